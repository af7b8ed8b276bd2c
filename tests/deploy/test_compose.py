"""docker-compose.yml, .env.example, and what they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import trustme

from deploy.env_example import COMPOSE, FILE, example
from service.process.mps import STOP_TIMEOUT_S
from service.settings import Settings
from service.supervisor import STOP_LIMIT_S
from tests.deploy.proxies import free_ports
from tests.faults.checks import NO_TRACE

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"]
KEY = "the-key-of-a-test-0123"
SEVEN = ROOT / "docs/images/seven.png"
PATIENCE_S = 60
LINE = re.compile(r"^#(\w+)=(.*)$", re.MULTILINE)


def test_env_example_is_what_make_env_example_writes():
    assert FILE.read_text() == example(), "run make env-example"


def test_env_example_shows_the_defaults_of_the_service():
    lines = dict(LINE.findall(FILE.read_text()))
    own = {name: value for name, value in lines.items() if name not in COMPOSE and value}
    given = {name.removeprefix("LENET_").lower(): value for name, value in own.items()}
    assert len(given) > 20
    assert Settings(weights=Path("a"), **given) == Settings(weights=Path("a"))


def test_env_example_lists_what_compose_reads_with_its_defaults():
    text = "\n".join(file.read_text() for file in FILES)
    read = re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", text)
    of_compose = {"COMPOSE_FILE", "COMPOSE_PROFILES"}  # Compose itself reads them
    passed = set(re.findall(r"- ((?:LENET|OTEL)_\w+)\b(?!=)", text))
    lines = dict(LINE.findall(FILE.read_text()))
    assert {name for name, _ in read} | passed | of_compose == lines.keys()
    on_a_gpu = {("LENET_DEVICE", "cuda"), ("MEMORY_LIMIT", "16g")}
    for name, default in set(read) - on_a_gpu:
        assert float_or_text(lines[name]) == float_or_text(default), name


def float_or_text(value):
    return float(value) if re.fullmatch(r"[\d.]+", value) and value.count(".") < 2 else value


def test_compose_waits_longer_than_a_stop_takes():
    compose = (ROOT / "docker-compose.yml").read_text()

    def seconds(pattern):
        return float(re.search(pattern, compose)[1])

    grace_s = seconds(r"LENET_GRACE_S:-(\d+)")
    drain_s = seconds(r"LENET_DRAIN_TIMEOUT_S:-(\d+)")
    limit_s = seconds(r"stop_grace_period: (\d+)s")
    assert grace_s + drain_s + STOP_LIMIT_S + STOP_TIMEOUT_S < limit_s


def test_every_image_is_pinned_to_a_version():
    text = "\n".join(file.read_text() for file in [*FILES, ROOT / "Dockerfile"])
    images = re.findall(r"_IMAGE(?::-|=)([\w./]+:[\w.-]+)", text)
    assert {image.partition(":")[0] for image in images} == {
        "grafana/grafana",
        "prom/prometheus",
        "python",
    }
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def run(*command, check=True, **variables):
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compose_command():
    """`docker compose`, or docker-compose; skips where nothing can be started."""
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not installed")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers: start one, or set DOCKER_HOST")
    prometheus = os.environ.get("PROMETHEUS_IMAGE", COMPOSE["PROMETHEUS_IMAGE"][0])
    for image, cure in (
        ("lenet-serve:service", "make docker-image builds it"),
        (prometheus, "pull it, or name another in PROMETHEUS_IMAGE"),
    ):
        known = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, check=False
        )
        if known.returncode:
            pytest.skip(f"the image {image} is not there: {cure}")
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose") is None:
        pytest.skip("Docker has no Compose")
    return ("docker-compose",)


def secured(folder):
    """Keys and TLS as docs/operations.md describes them; the settings, and the authority."""
    service, prometheus = folder / "service", folder / "prometheus"
    service.mkdir()
    prometheus.mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "service")
    certificate.private_key_pem.write_to_path(service / "server.key")
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(service / "server.pem", append=number > 0)
    (service / "server.key").chmod(0o644)  # the container's user is another
    authority.cert_pem.write_to_path(prometheus / "ca.pem")
    (prometheus / "key").write_text(KEY)
    for path in (folder, *folder.parents):
        if path.owner() == folder.owner() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    variables = {
        "LENET_SECRETS": str(folder),
        "LENET_API_KEYS": KEY,
        "LENET_TLS_CERTIFICATE": "/srv/secrets/server.pem",
        "LENET_TLS_KEY": "/srv/secrets/server.key",
        "PROMETHEUS_CONFIG": str(ROOT / "deploy/prometheus/prometheus-secured.yml"),
    }
    return variables, prometheus / "ca.pem"


def eventually(check):
    """What `check` returns once it is true."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.5)
    return found


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("with_keys_and_tls", [False, True], ids=["open", "keys and TLS"])
def test_compose_serves_a_digit_and_prometheus_scrapes_it(tmp_path, with_keys_and_tls, workers):
    compose = (*compose_command(), "--project-name", f"lenet-test-{os.getpid()}")
    port, grpc_port, prometheus_port = free_ports(3)
    variables = {
        "LENET_PORT": str(port),
        "LENET_GRPC_PORT": str(grpc_port),
        "PROMETHEUS_PORT": str(prometheus_port),
        "LENET_WORKERS": workers,
    }
    address, context, headers = f"http://localhost:{port}", None, {"Content-Type": "image/png"}
    if with_keys_and_tls:
        settings, authority = secured(tmp_path)
        variables |= settings
        address, context = f"https://localhost:{port}", ssl.create_default_context(cafile=authority)
        headers["Authorization"] = f"Bearer {KEY}"
    try:
        # Prometheus is started when the health check says that the service is ready.
        run(*compose, "up", "--no-build", "--detach", **variables)
        request = urllib.request.Request(f"{address}/predict", SEVEN.read_bytes(), headers)
        with urllib.request.urlopen(request, context=context) as answer:
            assert json.load(answer)["predictions"][0]["label"] == 7

        def scraped():
            query = f"http://localhost:{prometheus_port}/api/v1/query?query=up"
            with urllib.request.urlopen(query) as answer:
                return [sample["value"][1] for sample in json.load(answer)["data"]["result"]]

        eventually(lambda: scraped() == ["1"])
        container = run(*compose, "ps", "-q", "service", **variables).strip()
        (state,) = json.loads(run("docker", "inspect", container))
        assert state["State"]["Health"]["Status"] == "healthy"
        assert state["Config"]["User"] == "65532:65532"
        host = state["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["Memory"] > 0
        assert host["PidsLimit"] > 0
        run(*compose, "stop", "service", **variables)
        assert json.loads(run("docker", "inspect", container))[0]["State"]["ExitCode"] == 0
        logs = run(*compose, "logs", "service", **variables)
        assert logs.count("ready: HTTP") == int(workers)
        assert not NO_TRACE.search(logs)
    finally:
        run(*compose, "down", "--volumes", check=False, **variables)
