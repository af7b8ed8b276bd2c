"""What can be set, once, on the command line or in the environment.

`Recipe` is what the result depends on: two runs of one recipe on one dataset give the same bytes,
on a GPU as long as cuDNN's plans are the same, and its `command` goes into the weight file. `Fit`
adds where things lie, `Export` and `Inspect` are the other commands. A variable
LENET_TRAINER_EPOCHS does what --epochs does; the command line wins.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, SettingsConfigDict

Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Precision: TypeAlias = Literal["fp32", "tf32", "mixed"]
Schedule: TypeAlias = Literal["one-cycle", "step"]


_BY_DEVICE: dict[str, dict[str, object]] = {
    "epochs": {"cpu": 20, "cuda": 120},
    "batch": {"cpu": 128, "cuda": 256},
    "precision": {"cpu": "fp32", "cuda": "mixed"},
}


class _Command(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        env_prefix="LENET_TRAINER_",
        extra="ignore",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )


class Recipe(_Command):
    """How a network is trained. The defaults were chosen on the validation images alone."""

    model: str = "lenet"
    """The architecture, one of those that lenet.model names."""

    seed: int = Field(1, ge=0, lt=2**63)
    """Where the initial weights, the order of images, augmentation and dropout come from."""

    epochs: int = Field(0, ge=0, le=10_000)
    """How often every training image is met; 0 is 20 times on the CPU, 120 on a GPU."""

    batch: int = Field(0, ge=0, le=60_000)
    """Images in one step, at least 2; what is left over at the end of an epoch waits for the next.
    0 is 128 on the CPU, 256 on a GPU."""

    schedule: Schedule = "one-cycle"
    """How the learning rate runs: up and down once, or down tenfold at 50 % and at 75 %."""

    rate: float = Field(0.2, gt=0, le=100)
    """The highest learning rate."""

    momentum: Share = 0.9
    """How much of the last update the next one keeps."""

    nesterov: bool = True
    """Look ahead along the momentum."""

    weight_decay: Share = 2e-4
    """The pull of weights towards zero; biases and batch norm are left alone."""

    dropout: Share = 0.0
    """The share of each hidden dense layer's units that is zeroed in a step."""

    rotation: float = Field(12.0, ge=0, le=45)
    """Augmentation: degrees, to either side."""

    scale: float = Field(0.1, ge=0, le=0.5)
    """Augmentation: each axis stretched or shrunk by up to this share."""

    shear: float = Field(8.0, ge=0, le=45)
    """Augmentation: degrees, to either side."""

    shift: float = Field(2.0, ge=0, le=14)
    """Augmentation: pixels, in any direction."""

    elastic: float = Field(0.0, ge=0, le=14)
    """Augmentation: pixels that each of 7 by 7 control points is displaced by, along either axis;
    splines bend what lies between them."""

    validation_images: int = Field(5_000, ge=1)
    """The last so many of the training images are held out for validation."""

    device: Device = "auto"
    """Where it runs: auto is the GPU where there is one. The last bits of the result depend on
    it."""

    precision: Precision | Literal["auto"] = "auto"
    """How a GPU computes: in float32, with products rounded to TF32, or with float16 values and
    float32 weights; auto is mixed. The CPU has fp32 alone."""

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, batch: int) -> int:
        if batch == 1:
            raise ValueError("the variance that batch norm takes needs at least 2 images")
        return batch

    def resolved(self, device: Device) -> Self:
        """The recipe on `device`, with what depends on it written out."""
        meant: dict[str, object] = {"device": device}
        for field, by_device in _BY_DEVICE.items():
            if getattr(self, field) in (0, "auto"):
                meant[field] = by_device[device]
        return self.model_copy(update=meant)

    def command(self) -> str:
        """The canonical command line: every field of the recipe in order, no path."""
        words = ["python", "-m", "trainer", "fit"]
        for name in Recipe.model_fields:
            words += [f"--{name.replace('_', '-')}", str(getattr(self, name)).lower()]
        return shlex.join(words)


class Fit(Recipe):
    """Train a network on MNIST and write its weight file."""

    data: Path = Path("data/mnist")
    """The folder of the four MNIST files; what is missing there is downloaded."""

    out: Path = Path("weights")
    """The weight file becomes OUT/MODEL/VERSION.safetensors, with the next free version."""

    checkpoints: Path = Path("data/checkpoints")
    """Where an interrupted run is kept; the same command resumes it."""

    target: float | None = Field(None, gt=0, le=100)
    """Stop after the first epoch whose validation accuracy, in percent, reaches this."""

    gpus: int = Field(1, ge=1, le=64)
    """How many GPUs share each batch."""

    profile: CliImplicitFlag[bool] = False
    """Take every step anew instead of recording one, so that a profiler sees the layers' names."""

    @field_validator("gpus")
    @classmethod
    def _one_gpu_has_a_target(cls, gpus: int, others: ValidationInfo) -> int:
        # Each rank would look at its own evaluation, and wait for ever for one that has stopped.
        if gpus > 1 and others.data.get("target") is not None:
            raise ValueError(f"--target is {others.data['target']}, and one GPU alone can have one")
        return gpus

    @field_validator("profile")
    @classmethod
    def _one_gpu_is_profiled(cls, profile: bool, others: ValidationInfo) -> bool:
        # Not captured, a step loads kernels while another GPU waits for its sum.
        if profile and others.data.get("gpus", 1) > 1:
            raise ValueError(f"it looks at one GPU, and --gpus is {others.data['gpus']}")
        return profile

    def command(self) -> str:
        """The recipe's, and what else the result depends on where it is set."""
        command = super().command()
        if self.target is not None:
            command += f" --target {self.target}"
        if self.gpus > 1:
            command += f" --gpus {self.gpus}"
        return command


class Export(_Command):
    """Write a weight file as an ONNX model."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_EXPORT_")

    weights: Path
    """The weight file to read."""

    out: Path = Path("model.onnx")
    """The ONNX file to write."""


class Inspect(_Command):
    """Print a table of one training step: what each call computes, moves and takes."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_INSPECT_")

    model: str = "lenet"
    """The architecture, one of those that lenet.model names."""

    precision: Precision = "mixed"
    """How the GPU computes: in float32, with products rounded to TF32, or with float16 values."""

    batch: int = Field(256, ge=2, le=60_000)
    """Images in the step."""

    device: Device = "auto"
    """Where it is timed: without a GPU, or with cpu, the table has no plans and no times."""
