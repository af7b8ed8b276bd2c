"""`make env-example` writes .env.example: every variable of docker-compose.yml and its default."""

from __future__ import annotations

import textwrap
from pathlib import Path

from service.settings import Settings

FILE = Path(__file__).parents[1] / ".env.example"

FIXED = {"host"}
"""Settings that the container fixes."""

COMPOSE = {
    "COMPOSE_FILE": ("docker-compose.yml", "On a GPU docker-compose.yml:docker-compose.gpu.yml."),
    "COMPOSE_PROFILES": ("", "grafana starts Grafana, too."),
    "LENET_BIND": ("127.0.0.1", "Address on the host of the service and of Prometheus."),
    "LENET_PORT": ("8000", "HTTP port on the host; 8000 in the container."),
    "LENET_GRPC_PORT": ("8001", "gRPC port on the host; 8001 in the container."),
    "LENET_WEIGHTS": (
        "./weights",
        "Folder of weight files on the host, or weights, the volume that the trainer writes to.",
    ),
    "LENET_SECRETS": (
        "./deploy/secrets",
        "Folder on the host: its service is /srv/secrets in the service, its prometheus "
        "/etc/prometheus/secrets in Prometheus.",
    ),
    "LENET_GRACE_S": ("2", "At stop: how long to keep serving after /readyz says no."),
    "LENET_DEVICE": ("", "auto or cpu; with docker-compose.gpu.yml it is cuda by default."),
    "LENET_TLS_CERTIFICATE": ("", "/srv/secrets/server.pem: HTTPS, and gRPC over TLS."),
    "LENET_TLS_KEY": ("", "/srv/secrets/server.key, which user 65532 can read."),
    "LENET_TLS_CLIENT_CA": ("", "/srv/secrets/clients.pem: clients need certificates."),
    "OTEL_SERVICE_NAME": ("lenet-serve", "Name in traces."),
    "OTEL_RESOURCE_ATTRIBUTES": (
        "",
        "Further attributes of traces, as deployment.environment=a,b=c.",
    ),
    "OTEL_EXPORTER_OTLP_HEADERS": ("", "For the collector, as authorization=Bearer%20KEY."),
    "MEMORY_LIMIT": ("2g", "Memory of the service; 16g on a GPU."),
    "GPU_TARGET": ("service-cuda12", "service-cuda13 where nvidia-smi says CUDA 13."),
    "PROMETHEUS_PORT": ("9090", "Port on the host."),
    "PROMETHEUS_CONFIG": (
        "./deploy/prometheus/prometheus.yml",
        "With keys and TLS ./deploy/prometheus/prometheus-secured.yml.",
    ),
    "GRAFANA_PORT": ("3000", "Port on the host, at 127.0.0.1."),
    "PYTHON_IMAGE": ("python:3.11.14-slim-bookworm", "Base of the images that are built here."),
    "COMMIT": ("", "Commit that the images are built of; make sets it."),
    "PROMETHEUS_IMAGE": ("prom/prometheus:v3.5.0", "Image of Prometheus."),
    "GRAFANA_IMAGE": ("grafana/grafana:12.3.1", "Image of Grafana."),
}
"""Default and meaning of what Compose reads, and of settings that mean something else with it."""

HEAD = """\
Settings for Docker Compose: copy this file to .env, and remove the # of what you change. Made by
`make env-example` from service/settings.py and deploy/env_example.py.
"""


def example() -> str:
    """The text of .env.example."""
    variables = dict(COMPOSE)
    for name, field in Settings.model_fields.items():
        variable = f"LENET_{name.upper()}"
        if name not in FIXED and variable not in variables:
            variables[variable] = _text(field.default), field.description or ""
    parts = [_comment(HEAD)]
    parts += [f"{_comment(text)}#{name}={value}\n" for name, (value, text) in variables.items()]
    return "\n".join(parts)


def _text(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default is None else str(default).lower() if default is False else str(default)


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), 96, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(example())
