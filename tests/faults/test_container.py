"""The image, run with nothing that it could misuse. `make docker-image` builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest

from tests.faults.checks import NO_TRACE

IMAGE = os.environ.get("LENET_TEST_IMAGE", "lenet-serve:service")

INSIDE = """
import http.client, json, pathlib, socket
def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=10)
    connection.request(method, path, body, {"Content-Type": "application/octet-stream"})
    answer = connection.getresponse()
    return answer.status, answer.read()
assert ask("GET", "/readyz")[0] == 200
status, body = ask("POST", "/predict", bytes(784))
assert status == 200 and len(json.loads(body)["predictions"]) == 1, body
for place in ("/srv/a", "/opt/lenet-serve/a", "/home/lenet/a", "/a"):
    try:
        pathlib.Path(place).touch()
    except OSError:
        continue
    raise SystemExit(f"{place} can be written")
status = pathlib.Path("/proc/1/status").read_text()
assert "Uid:\\t65532\\t65532" in status, status
assert "CapEff:\\t0000000000000000" in status, status
assert "NoNewPrivs:\\t1" in status and "Seccomp:\\t2" in status, status
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError:
    print("all as it has to be")
"""


def docker(*arguments, check=True):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def container():
    """The service in a container that is hardened as in docker-compose.yml, and has no network."""
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not installed")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers: start one, or set DOCKER_HOST")
    if subprocess.run(
        ["docker", "image", "inspect", IMAGE], capture_output=True, check=False
    ).returncode:
        pytest.skip("the image is not built: make docker-image builds it")
    hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
    limits = ("--security-opt", "no-new-privileges:true", "--memory", "2g", "--pids-limit", "1024")
    name = docker("run", "--detach", *hardened, *limits, IMAGE, "--workers", "2").strip()
    yield name
    docker("rm", "--force", name)


@pytest.mark.long
def test_the_image_serves_with_nothing_it_could_misuse(container):
    end_s = time.monotonic() + 60
    while docker("logs", container).count("ready: HTTP") < 2:
        assert time.monotonic() < end_s, docker("logs", container)
        time.sleep(0.2)
    assert "all as it has to be" in docker("exec", container, "python", "-c", INSIDE)
    assert docker("diff", container).split() == [], "it wrote outside of /tmp"
    docker("stop", container)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "0"
    assert not NO_TRACE.search(docker("logs", container))
