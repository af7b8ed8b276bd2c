"""The services that tests start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.checks import until
from tests.service_process import ENDS_WITH_TESTS, PROJECT

pytestmark = pytest.mark.process  # starts a service

KILLED = """
import os, sys
from pathlib import Path
from tests.service_process import PROJECT, Service
line = ("--port", "0", "--grpc-port", "0", "--device", "cpu", "--weights", str(PROJECT / "weights"))
print(Service(line, Path(sys.argv[1])).process.pid, flush=True)
os._exit(1)
"""


@pytest.mark.skipif(not ENDS_WITH_TESTS, reason="setpriv is not installed")
def test_a_service_ends_with_tests_that_are_killed(tmp_path):
    line = [sys.executable, "-c", KILLED, tmp_path]
    done = subprocess.run(line, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=False)
    until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())
