"""NVIDIA MPS for workers that share a GPU: finds its daemon, or starts and stops one.

Without MPS the workers' contexts take turns on the GPU. Each call of NVIDIA's control program ends
within a time limit, and a failure is one warning. Opens no CUDA context: the process that starts
the workers must not have one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
"""Environment variables: where CUDA in a worker finds the daemon, where the daemon writes."""

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.5

_PROGRAM = "nvidia-cuda-mps-control"
_DEFAULT_PIPE = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's choice
_DRIVER = Path("/dev/nvidiactl")
_POLL_S = 0.02
_COST = (
    "without MPS processes take turns on a GPU: four answered 0.75 times as many single images a "
    "second over HTTP as with MPS, eight 0.94 times (H200, 2026-11-20). Install "
    f"{_PROGRAM}, which comes with NVIDIA's driver, or serve with --workers 1 and more --contexts"
)


def wanted(device: str) -> bool:
    """Whether there is a GPU to share; `device` is auto, cpu or cuda."""
    # With auto: that the driver runs is all that can be known without a context.
    return device == "cuda" or (device == "auto" and _DRIVER.exists())


@contextlib.contextmanager
def shared_gpu() -> Iterator[bool]:
    """Inside, processes that are started share the GPU through MPS; yields whether they do.

    A daemon that answers at CUDA_MPS_PIPE_DIRECTORY, or in NVIDIA's default place, is used and left
    running. Otherwise one of our own runs as long as the block does, in a folder of its own, and
    this process's environment names it. Where neither works a warning says what that costs.
    """
    with contextlib.ExitStack() as stack:
        shared = True
        try:
            if _answers("get_server_list", os.environ, START_TIMEOUT_S):
                _log.info("MPS: found at %s", os.environ.get(PIPE, _DEFAULT_PIPE))
            else:
                stack.enter_context(_daemon())
                _log.info("MPS: started at %s", os.environ[PIPE])
        except (OSError, subprocess.SubprocessError) as exc:
            shared = False
            _log.warning("no MPS: %s; %s", exc, _COST)
        yield shared


@contextlib.contextmanager
def _daemon() -> Iterator[None]:
    """Our own daemon, named by the environment of this process, until the block is left.

    Raises:
        OSError, SubprocessError: it has no folder, ended at once or did not answer in time.
    """
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="lenet-serve-mps-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        ours = {PIPE: str(folder / "pipe"), LOG: str(folder / "log")}
        for path in ours.values():
            Path(path).mkdir()
        environment = {**os.environ, **ours}
        # The daemon would renumber the devices, and workers would read the inherited numbers so.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        with (folder / "output").open("wb") as output:
            # In the foreground it is a child that can be waited for; in a session of its own it
            # does not get the Ctrl-C on which workers finish their requests.
            daemon = subprocess.Popen(  # noqa: S603 - a fixed program, nothing of a user's
                [_PROGRAM, "-f"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It would inherit the signals that this process blocks, and not end on `kill`.
                preexec_fn=_unblock_signals,
            )
        stack.callback(_stop, daemon, environment)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers("get_server_list", environment, START_TIMEOUT_S):
            if daemon.poll() is not None:
                text = (folder / "output").read_text(errors="replace").strip()[-200:]
                raise OSError(f"{_PROGRAM} -f ended with {daemon.returncode}: {text}")
            if time.monotonic() > deadline_s:
                raise OSError(f"{_PROGRAM} -f was not ready within {START_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        os.environ.update(ours)
        yield


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stop(daemon: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """End the daemon and the servers that it started; their clients are gone."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _answers("quit", environment, STOP_TIMEOUT_S)
    try:
        daemon.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        _log.warning("MPS did not stop within %g s: killed", STOP_TIMEOUT_S)
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _answers(command: str, environment: Mapping[str, str], timeout_s: float) -> bool:
    """Whether a daemon took `command`.

    Raises:
        OSError, SubprocessError: the control program is missing, or hangs.
    """
    done = subprocess.run(  # noqa: S603 - a fixed program, nothing of a user's
        [_PROGRAM],
        input=f"{command}\n".encode(),
        env=environment,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode == 0
