"""The service's settings: one frozen object, read once, from flags and `LENET_` variables.

A flag wins over a variable. Below `app` only small values travel, never this object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, NoDecode, SettingsConfigDict

Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """lenet-serve: recognise handwritten digits over HTTP and gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="LENET_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_prog_name="python -m service",
        nested_model_default_partial_update=False,
    )

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""

    port: Port = 8000
    """HTTP port, /metrics included; 0 takes a free one."""

    grpc_port: Port = 8001
    """gRPC port; 0 takes a free one."""

    workers: PositiveInt = 1
    """Processes, each with its own contexts, on the same ports."""

    mps: Literal["auto", "off"] = "auto"
    """NVIDIA MPS for several workers on a GPU: auto finds or starts it, off leaves it alone."""

    weights: Path = Path("weights")
    """Folder of weight files, MODEL/VERSION.safetensors."""

    models: Annotated[tuple[str, ...], NoDecode] = ()
    """Models to load, separated by commas, the highest version of each; none given: all."""

    default_model: str = ""
    """Model that answers requests which name none; none given: lenet, or the only one loaded."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Backend: auto takes GPUs where there are any, else the CPU, and says why in the log."""

    devices: Annotated[tuple[NonNegativeInt, ...], NoDecode] = (0,)
    """GPUs by number, separated by commas, or all: each worker serves every model on each."""

    precision: Literal["fp16", "tf32", "fp32"] = "fp16"
    """How a GPU multiplies; the CPU computes in float32 and takes no other value than this one."""

    contexts: NonNegativeInt = 0
    """Execution contexts for each model in each worker, on each GPU: batches in flight at a time;
    0 is 2 on a GPU, 1 on the CPU."""

    cpu_threads: PositiveInt = 1
    """Threads that compute one batch on the CPU backend."""

    max_batch_rows: Annotated[int, Field(ge=0, le=65536)] = 0
    """Most images in one batch; a larger request is split. 0 is 1024 on a GPU, 64 on the CPU."""

    max_queue_rows: PositiveInt = 32768
    """Most images waiting for one model; beyond, requests are refused with 429."""

    max_wait_us: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Microseconds a batch that is not full waits for more images."""

    busy_poll_us: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Microseconds that a worker stays awake after an answer, in case a request follows; none
    given: 200 on a GPU, 0 on the CPU, which has better use for its cores."""

    max_images: PositiveInt = 16384
    """Most images in one request."""

    max_body_bytes: Annotated[int, Field(ge=784, le=2**31 - 1)] = 32 * 1024 * 1024
    """Largest request body."""

    max_bodies_bytes: Annotated[int, Field(ge=784)] = 128 * 1024 * 1024
    """Most bytes of all HTTP bodies being read or decoded at a time; beyond, 429."""

    request_timeout_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 30_000
    """Time to answer a request that states none, or more."""

    hang_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A batch that takes longer has hung: the process ends, for its supervisor to replace it."""

    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """At stop, after the grace: how long accepted requests may take to finish."""

    grace_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """At stop: how long to serve on after /readyz says no, for load balancers to notice."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    profile: CliImplicitFlag[bool] = False
    """No captured graphs on a GPU, so that a profiler sees each layer by its name."""

    fault_injection: CliImplicitFlag[bool] = False
    """Only for tests of what happens on faults: SIGUSR2 to a worker breaks the device of its next
    batch, SIGUSR1 lets it hang for ever."""

    @property
    def unused_on_cpu(self) -> str:
        """What is set and means nothing without a GPU, "" if nothing is."""
        names = ("devices", "precision", "profile")
        defaults = type(self).model_fields
        changed = [name for name in names if getattr(self, name) != defaults[name].default]
        return ", ".join(changed)

    @model_validator(mode="before")
    @classmethod
    def _split_devices(cls, values: dict[str, object]) -> dict[str, object]:
        devices = values.get("devices")
        if isinstance(devices, str):
            numbers = () if devices == "all" else tuple(devices.split(","))
            values = {**values, "devices": numbers}
        return values

    @model_validator(mode="before")
    @classmethod
    def _split_models(cls, values: dict[str, object]) -> dict[str, object]:
        models = values.get("models")
        if isinstance(models, str):
            models = tuple(name.strip() for name in models.split(",") if name.strip())
            values = {**values, "models": models}
        return values

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.port == self.grpc_port != 0:
            raise ValueError(
                f"grpc_port is {self.grpc_port}, expected another than port, {self.port}: "
                "HTTP and gRPC cannot share one"
            )
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(
                f"devices is {','.join(map(str, self.devices))}, expected each GPU once"
            )
        if self.device == "cpu" and self.unused_on_cpu:
            raise ValueError(
                f"device is 'cpu', which has no use for {self.unused_on_cpu}: leave that out"
            )
        if self.max_body_bytes > self.max_bodies_bytes:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, expected at most max_bodies_bytes, "
                f"{self.max_bodies_bytes}: the largest body could never be accepted"
            )
        if self.max_images > self.max_queue_rows:
            raise ValueError(
                f"max_images is {self.max_images}, expected at most max_queue_rows, "
                f"{self.max_queue_rows}: a larger request could never be accepted"
            )
        if self.models and self.default_model and self.default_model not in self.models:
            raise ValueError(
                f"default_model is {self.default_model!r}, expected one of models, "
                f"{', '.join(self.models)}"
            )
        return self
