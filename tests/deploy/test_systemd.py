"""The unit file of systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from service.errors import ExitCode
from service.process.mps import STOP_TIMEOUT_S
from service.settings import Settings
from service.supervisor import STOP_LIMIT_S
from tests.service_process import PROJECT

UNIT = (PROJECT / "deploy/systemd/lenet-serve@.service").read_text()
MOST_EXPOSED = 20  # tenths; what is left: the Internet, the host's folders, @resources for nice


def value(name):
    return re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[1]


def test_systemd_waits_longer_than_a_stop_takes():
    drain_s = Settings.model_fields["drain_timeout_s"].default
    assert drain_s + STOP_LIMIT_S + STOP_TIMEOUT_S < float(value("TimeoutStopSec"))


def test_systemd_does_not_repeat_a_start_that_a_restart_cannot_mend():
    codes = {ExitCode(int(code)) for code in value("RestartPreventExitStatus").split()}
    assert codes == set(ExitCode) - {ExitCode.STOPPED, ExitCode.WORKERS, ExitCode.DEVICE}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit_without_a_complaint_and_finds_it_hardened(tmp_path):
    unit = tmp_path / "lenet-serve@8000.service"
    unit.write_text(re.sub(r"/opt/lenet-serve/bin/[\w-]+", sys.executable, UNIT))
    options = {"capture_output": True, "text": True, "check": False}
    read = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], **options)
    assert (read.returncode, read.stdout + read.stderr) == (0, "")
    rate = ["systemd-analyze", "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", unit]
    rated = subprocess.run(rate, **options)
    assert rated.returncode == 0, rated.stdout
