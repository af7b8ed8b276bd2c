"""docker-compose.yml, .env.example, and what they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from deploy.env_example import COMPOSE, FILE, example
from service.process.mps import STOP_TIMEOUT_S
from service.settings import Settings
from service.supervisor import STOP_LIMIT_S
from tests.deploy.proxies import free_ports, issue
from tests.faults.checks import NO_TRACE
from tests.service_process import PATIENCE_S, PROJECT

FILES = [PROJECT / "docker-compose.yml", PROJECT / "docker-compose.gpu.yml"]
TEXT = "\n".join(file.read_text() for file in FILES)
KEY = "the-key-of-a-test-0123"
SEVEN = PROJECT / "docs/images/seven.png"
LINES = dict(re.findall(r"^#(\w+)=(.*)$", FILE.read_text(), re.MULTILINE))


def test_env_example_is_what_make_env_example_writes():
    assert FILE.read_text() == example(), "run make env-example"


def test_env_example_shows_the_defaults_of_the_service():
    own = {name: value for name, value in LINES.items() if name not in COMPOSE and value}
    given = {name.removeprefix("LENET_").lower(): value for name, value in own.items()}
    assert len(given) > 20
    assert Settings(weights=Path("a"), **given) == Settings(weights=Path("a"))


def test_env_example_lists_what_compose_reads_with_its_defaults():
    read = re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", TEXT)
    of_compose = {"COMPOSE_FILE", "COMPOSE_PROFILES"}  # Compose itself reads them
    passed = set(re.findall(r"- ((?:LENET|OTEL)_\w+)\b(?!=)", TEXT))
    assert {name for name, _ in read} | passed | of_compose == LINES.keys()
    on_a_gpu = {("LENET_DEVICE", "cuda"), ("MEMORY_LIMIT", "16g")}
    for name, default in set(read) - on_a_gpu:
        assert re.sub(r"\.0$", "", LINES[name]) == re.sub(r"\.0$", "", default), name


def test_compose_waits_longer_than_a_stop_takes():
    parts = (r"LENET_GRACE_S:-(\d+)", r"LENET_DRAIN_TIMEOUT_S:-(\d+)", r"grace_period: (\d+)s")
    grace_s, drain_s, limit_s = (float(re.search(part, TEXT)[1]) for part in parts)
    assert grace_s + drain_s + STOP_LIMIT_S + STOP_TIMEOUT_S < limit_s


def test_every_image_is_pinned_to_a_version():
    text = TEXT + (PROJECT / "Dockerfile").read_text()
    images = re.findall(r"_IMAGE(?::-|=)([\w./]+:[\w.-]+)", text)
    names = {image.partition(":")[0] for image in images}
    assert names == {"grafana/grafana", "prom/prometheus", "python"}
    assert [image for image in images if not re.search(r":v?\d+\.\d+\.\d+", image)] == []


def run(*command, check=True, **variables):
    environment = {**os.environ, **variables}
    options = {"cwd": PROJECT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def works(*command):
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compose_command():
    """`docker compose`, or docker-compose; skips where nothing can be started."""
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not installed")
    if not works("docker", "info"):
        pytest.skip("no Docker engine answers: start one, or set DOCKER_HOST")
    prometheus = os.environ.get("PROMETHEUS_IMAGE", COMPOSE["PROMETHEUS_IMAGE"][0])
    for image, cure in (
        ("lenet-serve:service", "make docker-image builds it"),
        (prometheus, "pull it, or name another in PROMETHEUS_IMAGE"),
    ):
        if not works("docker", "image", "inspect", image):
            pytest.skip(f"the image {image} is not there: {cure}")
    if works("docker", "compose", "version"):
        return ("docker", "compose")
    if shutil.which("docker-compose") is None:
        pytest.skip("Docker has no Compose")
    return ("docker-compose",)


def secured(folder):
    """Settings of keys and TLS as docs/operations.md describes them."""
    service, prometheus = folder / "service", folder / "prometheus"
    service.mkdir()
    prometheus.mkdir()
    issue(service, "localhost", "service")
    (service / "ca.pem").rename(prometheus / "ca.pem")
    (service / "server.key").chmod(0o644)  # the container's user is another
    (prometheus / "key").write_text(KEY)
    for path in (folder, *folder.parents):
        if path.owner() == folder.owner() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    return {
        "LENET_SECRETS": str(folder),
        "LENET_API_KEYS": KEY,
        "LENET_TLS_CERTIFICATE": "/srv/secrets/server.pem",
        "LENET_TLS_KEY": "/srv/secrets/server.key",
        "PROMETHEUS_CONFIG": str(PROJECT / "deploy/prometheus/prometheus-secured.yml"),
    }


@pytest.mark.long
def test_compose_serves_a_digit_and_prometheus_scrapes_it(tmp_path):
    compose = (*compose_command(), "--project-name", f"lenet-test-{os.getpid()}")
    names = ("LENET_PORT", "LENET_GRPC_PORT", "PROMETHEUS_PORT")
    ports = dict(zip(names, free_ports(3), strict=True))
    variables = {name: str(port) for name, port in ports.items()} | {"LENET_WORKERS": "2"}
    variables |= secured(tmp_path)
    url = f"https://localhost:{ports['LENET_PORT']}/predict"
    trusted = ssl.create_default_context(cafile=tmp_path / "prometheus" / "ca.pem")
    headers = {"Content-Type": "image/png", "Authorization": f"Bearer {KEY}"}
    try:
        # Prometheus is started when the health check says that the service is ready.
        run(*compose, "up", "--no-build", "--detach", **variables)
        answer = httpx.post(url, content=SEVEN.read_bytes(), headers=headers, verify=trusted)
        assert answer.json()["predictions"][0]["label"] == 7
        query = f"http://localhost:{ports['PROMETHEUS_PORT']}/api/v1/query?query=up"
        end_s = time.monotonic() + PATIENCE_S
        while [one["value"][1] for one in httpx.get(query).json()["data"]["result"]] != ["1"]:
            assert time.monotonic() < end_s, "Prometheus does not scrape the service"
            time.sleep(0.5)
        container = run(*compose, "ps", "-q", "service", **variables).strip()
        (state,) = json.loads(run("docker", "inspect", container))
        assert state["State"]["Health"]["Status"] == "healthy"
        assert state["Config"]["User"] == "65532:65532"
        host = state["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["Memory"] > 0 < host["PidsLimit"]
        run(*compose, "stop", "service", **variables)
        assert json.loads(run("docker", "inspect", container))[0]["State"]["ExitCode"] == 0
        logs = run(*compose, "logs", "service", **variables)
        assert logs.count("ready: HTTP") == 2
        assert not NO_TRACE.search(logs)
    finally:
        run(*compose, "down", "--volumes", check=False, **variables)
