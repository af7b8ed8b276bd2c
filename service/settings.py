"""The service's settings: one frozen object, read once from flags and `LENET_` variables.

A flag wins over a variable. Below `server` only small values are passed on, never this object.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, CliSuppress, NoDecode, SettingsConfigDict

from wire.budget import Budget
from wire.keys import MIN_CHARACTERS
from wire.tls import CertificateFiles

_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_VERSIONS = re.compile(r"latest(:[1-9][0-9]{0,3})?|all", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~:\[\]-]+")
_COLLECTOR = re.compile(r"https?://[^/?#\s]+/[^\s#]*")
_PRIVATE = frozenset("@?")
"""Begin what may be secret in a URL: a message that shows the URL would show it, too."""

_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")
_LAST_PORT = 65535
_ROUTE = re.compile(r"(/[A-Za-z0-9._~:@-]+)+", re.ASCII)
CLOUDS = {
    "AIP_HTTP_PORT": "port",
    "SAGEMAKER_BIND_TO_PORT": "port",
    "AIP_PREDICT_ROUTE": "predict_route",
    "AIP_HEALTH_ROUTE": "health_route",
}
"""Variables of Vertex AI and SageMaker, which are the defaults of settings."""

Port = Annotated[int, Field(ge=0, le=_LAST_PORT)]


def _default_weights() -> Path:
    """The folder `weights` where the service is started, else the one in this package."""
    here = Path("weights")
    return here if here.is_dir() else Path(__file__).parent / "weights"


class Settings(BaseSettings):
    """Recognise handwritten digits over HTTP and gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="LENET_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Addresses or host names to listen on, separated by commas; 0.0.0.0 for every IPv4 address of
    this machine, :: for every address, IPv6 and IPv4, localhost for 127.0.0.1 and ::1."""

    port: Port = 8000
    """HTTP port, /metrics included; 0 takes a free one. By default Vertex AI's AIP_HTTP_PORT or
    SageMaker's SAGEMAKER_BIND_TO_PORT, where one is set."""

    grpc_port: Port | Literal["off"] = 8001
    """gRPC port; 0 takes a free one, off serves no gRPC."""

    http_server: Literal["wire", "uvicorn"] = "wire"
    """Server of HTTP: wire is our own, uvicorn calls the same endpoints of FastAPI over HTTP/1.1
    alone. gRPC is on wire in both cases, on a port of its own with uvicorn."""

    workers: PositiveInt = 1
    """Processes, each with its own contexts, on the same ports."""

    mps: Literal["auto", "off"] = "auto"
    """NVIDIA MPS for several workers on a GPU: auto finds or starts it, off does not use it."""

    weights: Path = Field(default_factory=_default_weights)
    """Folder of weight files, MODEL/VERSION.safetensors. Without it ./weights, or, if there is no
    such folder, the one that is installed with the service."""

    models: Annotated[tuple[str, ...], NoDecode] = ()
    """Models to load, separated by commas: NAME, or NAME:VERSION for one version of it, also
    several times. All by default."""

    versions: str = "latest"
    """Versions to load of a model whose version --models does not name: the latest, which is the
    highest, the latest N as latest:N, or all."""

    default_model: str = ""
    """Model for requests that name none. By default lenet, or the only one loaded."""

    model_alias: str = ""
    """Second name of the default model, for clients that know the service by a name of its own, as
    KServe's do."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Backend: auto takes all GPUs that --devices names, or the CPU if there is none."""

    devices: Annotated[tuple[NonNegativeInt, ...], NoDecode] = (0,)
    """GPUs by number, separated by commas, divided over the workers; or all, for every worker."""

    precision: Literal["fp16", "tf32", "fp32"] = "fp16"
    """Precision on a GPU. The CPU always computes in float32."""

    convolutions: Literal["auto", "cudnn", "measured"] = "auto"
    """Who computes on a GPU: auto takes our own kernels where they support the network, cudnn takes
    cuDNN and cuBLAS for every layer, measured times both for each batch size at the first start and
    takes the faster."""

    contexts: NonNegativeInt = 0
    """Execution contexts of each model in each worker, on each GPU: concurrent batches. 0 is 2 on a
    GPU, 1 on the CPU."""

    cpu_threads: PositiveInt = 1
    """Threads that compute one batch on the CPU backend."""

    max_batch_rows: Annotated[int, Field(ge=0, le=65536)] = 0
    """Most images in one batch; a larger request is split. 0 is 1024 on a GPU, 64 on the CPU."""

    max_queue_rows: PositiveInt = 32768
    """Most images waiting for one model; further requests get 429."""

    max_wait_us: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How long a batch that is not full waits for more images."""

    busy_poll_us: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """How long a worker polls for the next request after an answer, instead of sleeping. By default
    200 on a GPU, 0 on the CPU, which needs its cores."""

    predict_route: str = ""
    """Another path of POST /invocations, or /predict to have that take such bodies, too. By default
    Vertex AI's AIP_PREDICT_ROUTE."""

    health_route: str = ""
    """Another path of GET /readyz; with API keys it needs one. By default Vertex AI's
    AIP_HEALTH_ROUTE."""

    max_images: PositiveInt = 16384
    """Most images in one request."""

    max_body_bytes: Annotated[int, Field(ge=784, le=2**31 - 1)] = 32 * 1024 * 1024
    """Largest request body."""

    max_in_flight_bytes: Annotated[int, Field(ge=784)] = 128 * 1024 * 1024
    """Most bytes of bodies being received or decoded and of answers waiting to be sent, over HTTP
    and gRPC together; beyond it requests get 429. A quarter is kept for bodies up to 256 KiB."""

    decoders: NonNegativeInt = 0
    """Processes in each worker that decode pictures and large bodies, at least 2, started when they
    are needed. 0 is one for each core of a worker, from 2 to 8."""

    request_timeout_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 30_000
    """Deadline of a request; a request may ask for less."""

    hang_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A batch that takes longer counts as hung: the process ends and its supervisor replaces it."""

    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """At stop, after the grace: how long accepted requests may take to finish."""

    grace_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """At stop: how long to keep serving after /readyz says no, for load balancers to notice."""

    max_connection_age_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Age, give or take a tenth, at which a connection ends after the requests that have begun, so
    that clients spread over instances that were added. 0 is no limit; uvicorn has none."""

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys, separated by commas, each of at least 16 characters. With any, every request but those
    for health needs `Authorization: Bearer KEY` or `X-API-Key: KEY`. Better as a variable than as
    a flag, which `ps` shows."""

    admin_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys, as --api-keys, with which models are listed, loaded and unloaded by requests. Without
    any, nobody may. Whatever needs an API key may be done with them, too."""

    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins, separated by commas, whose pages may read answers: https://example.org, or * for
    all."""

    explain: Literal["on", "off"] = "on"
    """Whether POST /explain answers with what each layer of a model computes of an image."""

    access_log: Literal["off", "text", "json"] = "off"
    """A line on standard output for each answer over HTTP and gRPC."""

    access_log_probes: Literal["on", "off"] = "on"
    """Whether health checks and scrapes of /metrics that succeed have lines in the access log."""

    tls_certificate: Path | None = None
    """PEM file of a certificate and its chain: HTTPS, and gRPC over TLS. SIGHUP reads it again."""

    tls_key: Path | None = None
    """PEM file of its key, without a password."""

    tls_client_ca: Path | None = None
    """PEM file of an authority: every client has to present a certificate of it (mutual TLS)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    log_format: Literal["text", "json"] = "text"
    """Form of the log lines on standard error; json is an object a line."""

    traces_endpoint: str = ""
    """URL of an OpenTelemetry collector that takes traces by OTLP over HTTP, as
    http://collector:4318/v1/traces. Without it there are none. Needs the extra otel."""

    traces_one_in: NonNegativeInt = 100
    """One request in this many is traced, of those whose caller has not decided; 0 traces none."""

    traces_slower_ms: NonNegativeInt = 0
    """A request that takes longer is traced in any case, as is one that fails by our own fault; 0
    is no such limit."""

    profile: bool = False
    """Use no captured graphs on a GPU, so that a profiler shows each layer by its name."""

    fault_injection: CliSuppress[bool] = False
    """Only for tests: SIGUSR2 to a worker breaks the device of its next batch, SIGUSR1 hangs it."""

    @property
    def unused_on_cpu(self) -> str:
        """The settings that differ from their defaults and have no effect on the CPU."""
        names = ("devices", "precision", "convolutions", "profile")
        defaults = type(self).model_fields
        changed = [name for name in names if getattr(self, name) != defaults[name].default]
        return ", ".join(f"--{name}" for name in changed)

    @property
    def latest_versions(self) -> int:
        """How many versions of a model are loaded, 0 for all."""
        return 0 if self.versions == "all" else int(self.versions.partition(":")[2] or 1)

    @property
    def one_port(self) -> bool:
        """Whether HTTP and gRPC have the same port."""
        return self.port == self.grpc_port != 0

    @property
    def certificate(self) -> CertificateFiles | None:
        """The files for TLS, None without it."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return CertificateFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        names = [name.strip() for name in host.split(",")]
        if any(not name or name.count(":") == 1 or set(name) & set("/[] ") for name in names):
            raise ValueError(
                "expected an address or a host name alone; the port is --port, and commas "
                "separate several"
            )
        return ",".join(names)

    @field_validator("port", "grpc_port", mode="before")
    @classmethod
    def _check_port(cls, port: object, info: ValidationInfo) -> object:
        if isinstance(port, str) and port.startswith("tcp://"):
            raise ValueError(
                "expected a port; Kubernetes sets this variable where a Service is called lenet or "
                "lenet-grpc: set enableServiceLinks: false in the pod, or rename the Service"
            )
        if info.field_name == "grpc_port" and port != "off":
            text = str(port)
            if not (text.isascii() and text.isdecimal() and int(text[:6]) <= _LAST_PORT):
                raise ValueError(f"expected a whole number >= 0 and <= {_LAST_PORT}, or off")
        return port

    @field_validator("predict_route", "health_route")
    @classmethod
    def _check_route(cls, route: str) -> str:
        if route and not _ROUTE.fullmatch(route):
            raise ValueError("expected a path of letters, digits and . _ ~ : @ -, as /v1/digits")
        return route

    @field_validator("traces_endpoint")
    @classmethod
    def _check_endpoint(cls, url: str) -> str:
        if url and not set(url) & _PRIVATE and not _COLLECTOR.fullmatch(url):
            raise ValueError("expected a URL with a path, as http://collector:4318/v1/traces")
        if url and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError(
                "it needs OpenTelemetry's SDK, which is not installed: "
                "python -m pip install opentelemetry-exporter-otlp-proto-http"
            )
        return url

    @field_validator("versions")
    @classmethod
    def _check_versions(cls, versions: str) -> str:
        if not _VERSIONS.fullmatch(versions):
            raise ValueError(
                "expected latest, latest:N or all; one version by its number is --models NAME:N"
            )
        return versions

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: dict[str, object]) -> dict[str, object]:
        for variable, name in CLOUDS.items():
            if name not in values and os.environ.get(variable):
                values = {**values, name: os.environ[variable]}
        devices = values.get("devices")
        for name in ("models", "api_keys", "admin_keys", "cors_origins"):
            if isinstance(text := values.get(name), str):
                found = tuple(filter(None, map(str.strip, text.split(","))))
                if name == "api_keys" and not found:
                    raise ValueError(
                        "--api-keys: got an empty list, which would leave the service open to all; "
                        "expected a key, or that neither it nor LENET_API_KEYS is there"
                    )
                values = {**values, name: found}
        if devices in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"--devices is {devices}, expected GPUs by number, or all; the backend is --device"
            )
        if isinstance(devices, str):
            numbers = () if devices == "all" else tuple(devices.split(","))
            values = {**values, "devices": numbers}
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for name, keys in (("api", self.api_keys), ("admin", self.admin_keys)):
            for number, key in enumerate(keys, 1):  # never shown
                text = key.get_secret_value()
                if set(text) & set("\t\r\n"):
                    raise ValueError(
                        f"--{name}-keys: key {number} of {len(keys)} has a tab or line break "
                        "within, which no client can send; expected a comma between two keys, and "
                        "a key on one line"
                    )
                if len(text) < MIN_CHARACTERS or not (text.isascii() and text.isprintable()):
                    raise ValueError(
                        f"--{name}-keys: key {number} of {len(keys)} has {len(text)} characters, "
                        f"expected at least {MIN_CHARACTERS}, ASCII alone"
                    )
        for origin in self.cors_origins:
            is_default = _DEFAULT_PORT.fullmatch(origin) is not None
            if origin != "*" and (is_default or not _ORIGIN.fullmatch(origin)):
                raise ValueError(
                    f"--cors-origins: got {origin!r}, expected * or an origin as browsers send it: "
                    "scheme and host in lower case, a port unless it is the scheme's, no path, as "
                    "https://example.org:8443"
                )
        files = {"--tls-certificate": self.tls_certificate, "--tls-key": self.tls_key}
        missing = [flag for flag, path in files.items() if path is None]
        if missing and (len(missing) == 1 or self.tls_client_ca is not None):
            given = (files.keys() - missing) or {"--tls-client-ca"}
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(
                f"{' and '.join(missing)} {verb} missing: {min(given)} alone makes no TLS"
            )
        if set(self.traces_endpoint) & _PRIVATE:
            raise ValueError(
                "--traces-endpoint: got a URL with a user or a query, expected none, as logs show "
                "it; a key belongs into OTEL_EXPORTER_OTLP_HEADERS"
            )
        if self.http_server == "uvicorn" and self.one_port:
            raise ValueError(
                f"--grpc-port is {self.grpc_port}, that of HTTP, where uvicorn speaks no gRPC: "
                "expected another, or off"
            )
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(
                f"--devices is {','.join(map(str, self.devices))}, expected each GPU once"
            )
        if self.device == "cpu" and self.unused_on_cpu:
            raise ValueError(
                f"--device is cpu, where {self.unused_on_cpu} would have no effect: remove "
                f"{self.unused_on_cpu}"
            )
        largest = Budget(self.max_in_flight_bytes).limit_bytes(self.max_body_bytes)
        if self.max_body_bytes > largest:
            raise ValueError(
                f"--max-body-bytes is {self.max_body_bytes}, expected at most {largest}, what "
                f"--max-in-flight-bytes {self.max_in_flight_bytes} leaves for large bodies: the "
                "largest could never be accepted"
            )
        if self.decoders == 1:
            raise ValueError(
                "--decoders is 1, expected 0 or at least 2: small pictures never wait for the one "
                "that large ones leave free"
            )
        if self.max_images > self.max_queue_rows:
            raise ValueError(
                f"--max-images is {self.max_images}, expected at most --max-queue-rows, "
                f"{self.max_queue_rows}: the largest request could never be accepted"
            )
        for model in self.models:
            name, colon, version = model.partition(":")
            wrong = not name or set(name) & set("/@ ")
            if wrong or (colon and not _VERSION.fullmatch(version)):
                raise ValueError(
                    f"--models: got {model!r}, expected NAME or NAME:VERSION, a positive integer; "
                    "commas separate several"
                )
        if set(self.model_alias) & set("/@: "):
            raise ValueError(
                f"--model-alias is {self.model_alias!r}, expected a name without /, @, : or space"
            )
        names = {model.partition(":")[0] for model in self.models}
        if names and self.default_model and self.default_model not in names:
            raise ValueError(
                f"--default-model is {self.default_model}, expected one of --models: "
                f"{', '.join(self.models)}"
            )
        return self


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False
