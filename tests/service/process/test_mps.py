from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from service.process import mps
from service.process.mps import LOG, PIPE, shared_gpu
from tests.service_process import PATIENCE_S

# Like NVIDIA's: a daemon in the foreground with -f, else one command from standard input.
CONTROL = """\
#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:-$DEFAULT_PIPE}
if [ "$1" = -f ]; then
  %(daemon)s
fi
read command
echo "$command at $pipe" >> %(asked)s
%(client)s
[ -p "$pipe/control" ] || { echo 'Cannot find MPS control daemon process' >&2; exit 1; }
[ "$command" = quit ] || exit 0
%(quit)s
"""

RUNS = """\
echo "$CUDA_VISIBLE_DEVICES;$CUDA_MPS_LOG_DIRECTORY;$$" > %(seen)s
  mkfifo "$pipe/control"
  read command < "$pipe/control"
  exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A stand-in for NVIDIA's control program alone on PATH, made by `control.install()`."""
    return Control(tmp_path, monkeypatch)


class Control:
    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.default_pipe = folder / "default"
        self.default_pipe.mkdir()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (folder / "bin").mkdir()
        monkeypatch.setattr(mps.tempfile, "tempdir", str(self.temporary))
        for name in (PIPE, LOG):  # set before they are deleted, so that they are put back
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        self._path = os.environ["PATH"]
        monkeypatch.setenv("PATH", str(folder / "bin"))
        monkeypatch.setenv("DEFAULT_PIPE", str(self.default_pipe))

    def install(self, daemon=RUNS, client="", quit_='echo quit > "$pipe/control"'):
        names = {name: self.folder / name for name in ("asked", "seen")}
        self.asked.touch()
        text = CONTROL % {"daemon": daemon % names, "client": client, "quit": quit_, **names}
        program = self.folder / "bin" / "nvidia-cuda-mps-control"
        program.write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\nPATH={self._path}\n"))
        program.chmod(0o755)
        return program

    @property
    def asked(self):
        return self.folder / "asked"

    def commands(self):
        return [line.split(" at ")[0] for line in self.asked.read_text().splitlines()]

    def daemon(self):
        """CUDA_VISIBLE_DEVICES, the log folder and the process id, as the daemon saw them."""
        return (self.folder / "seen").read_text().strip().split(";")


def lives(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_dead(pid):
    """Wait for the process, which need not be a child of this one; a zombie is dead."""
    state = Path(f"/proc/{int(pid)}/stat")
    deadline_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline_s, "it lives on"


@pytest.mark.parametrize("named", [True, False])
def test_a_daemon_that_runs_is_used_and_left_running(control, caplog, named, monkeypatch):
    program = control.install()
    caplog.set_level("INFO")
    if named:
        elsewhere = control.folder / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.setenv(PIPE, str(elsewhere))
    monkeypatch.setattr(mps, "_DEFAULT_PIPE", str(control.default_pipe))
    pipe = os.environ.get(PIPE, str(control.default_pipe))
    os.mkfifo(f"{pipe}/control")
    before = dict(os.environ)
    with shared_gpu():
        assert dict(os.environ) == before
    assert control.commands() == ["get_server_list"]
    assert caplog.messages == [f"MPS: found at {pipe}"]
    assert not (program.parent.parent / "seen").exists()


def test_workers_find_the_daemon_that_is_started_and_it_ends_with_them(
    control, caplog, monkeypatch
):
    control.install()
    caplog.set_level("INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with shared_gpu():
        (folder,) = control.temporary.iterdir()
        assert os.environ[PIPE] == str(folder / "pipe")
        assert os.environ[LOG] == str(folder / "log")
        assert folder.stat().st_mode & 0o077 == 0
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
        devices, log, pid = control.daemon()
        assert devices == ""
        assert log == os.environ[LOG]
        assert lives(pid)
        assert os.getpgid(int(pid)) != os.getpgrp()
    assert not lives(pid)
    assert control.commands()[-1] == "quit"
    assert list(control.temporary.iterdir()) == []
    assert caplog.messages == [f"MPS: started at {folder / 'pipe'}"]


def test_a_daemon_that_does_not_quit_is_killed_with_what_it_started(control, caplog, monkeypatch):
    server = RUNS.replace("mkfifo", 'sleep 1000 & echo $! > "$pipe/server"\n  mkfifo')
    control.install(server, quit_="exit 0")
    monkeypatch.setattr(mps, "STOP_TIMEOUT_S", 0.1)
    with shared_gpu():
        child = Path(os.environ[PIPE], "server").read_text()
    assert not lives(control.daemon()[2])
    wait_until_dead(child)
    assert "MPS did not stop within 0.1 s: killed" in caplog.messages
    assert list(control.temporary.iterdir()) == []


@pytest.fixture
def refused(control, caplog):
    """`refused()`: the one warning of a start without MPS, of which nothing is left."""

    def refused_():
        with shared_gpu():
            assert PIPE not in os.environ
            assert list(control.temporary.iterdir()) == []
        (warning,) = [message for message in caplog.messages if "no MPS" in message]
        assert "0.75 times as many single images a second" in warning
        assert "--workers 1 and more --contexts" in warning
        return warning

    return refused_


def test_a_daemon_that_refuses_is_quoted_and_leaves_no_process(control, refused):
    control.install('echo $$ > "%(seen)s"; echo no GPU here; exit 3')
    assert "no MPS: nvidia-cuda-mps-control -f ended with 3: no GPU here; " in refused()
    assert not lives((control.folder / "seen").read_text())


def test_a_missing_program_is_named_with_what_to_do(control, refused):
    warning = refused()
    assert "no MPS: [Errno 2] No such file or directory: 'nvidia-cuda-mps-control'; " in warning
    assert "Install nvidia-cuda-mps-control" in warning
