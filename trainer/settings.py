"""The settings of each command, read once from the command line and the environment.

`Recipe` holds what the result depends on: two runs of one recipe on one dataset give the same
weights, on a GPU as long as cuDNN's engines are the same. `Fit` adds files, folders and devices,
and its `command` goes into the weight file; `Search` adds what to vary; the rest are the other
commands. A variable LENET_TRAINER_EPOCHS does what --epochs does; the command line wins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lenet.cuda.graphs import ConvolutionsBy

Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Precision: TypeAlias = Literal["fp32", "tf32", "mixed"]
Schedule: TypeAlias = Literal["one-cycle", "step"]


def _is_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ValueError("expected auto, cpu, cuda, or cuda:N for GPU number N")
    return device


Device: TypeAlias = Annotated[str, AfterValidator(_is_device)]

MNIST_FOLDER = Path("data/mnist")
"""The default of --data, and the only folder that MNIST is downloaded to."""

_FULL_RATE_BATCH = 128
"""The smallest batch with the full default rate. With smaller ones for few images the rate falls
in proportion: lenet-6-16 on 100 images in batches of 8 ended at 10 % with 0.2, at 87 to 90 % with
0.0125 (CPU, 60 epochs, three seeds, 2026-11-27)."""

_RATE_FROM_A_FILE = 0.01
"""The default --rate of a run that starts from a file. With 0.2 the networks lenet-6-16, mlp and
lenet of 99.4, 98.7 and 99.6 % had 8.8, 45.9 and 76.6 % after three epochs on 240 digits, with 0.01
98.7, 97.7 and 99.5 % (2026-11-26)."""

_BY_DEVICE: dict[str, dict[str, object]] = {
    "epochs": {"cpu": 20, "cuda": 120},
    "batch": {"cpu": 128, "cuda": 256},
    "precision": {"cpu": "fp32", "cuda": "mixed"},
}


def _named(paths: Mapping[str, Path | None]) -> list[str]:
    """The flags that are set, each with the name of its file or folder."""
    return [
        word
        for flag, path in paths.items()
        if path is not None and path != MNIST_FOLDER
        for word in (flag, path.resolve().name)
    ]


class _Command(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        env_prefix="LENET_TRAINER_",
        extra="ignore",
    )


class Recipe(_Command):
    """How a network is trained. The defaults were chosen on the validation images."""

    model: str = "lenet"
    """The architecture: lenet, lenet-classic, lenet-6-16, cnn-32-64 or mlp, or FILE.json that
    describes another."""

    seed: int = Field(1, ge=0, lt=2**63)
    """The seed of initial weights, order of images, augmentation and dropout."""

    epochs: int = Field(0, ge=0, le=10_000)
    """Passes over the training images; 0 means 20 on the CPU, 120 on a GPU."""

    batch: int = Field(0, ge=0, le=60_000)
    """Images in one step, at least 2; 0 means 128 on the CPU, 256 on a GPU, or fewer: an eighth of
    the training images, but at least 8. An incomplete last batch of an epoch is dropped."""

    schedule: Schedule = "one-cycle"
    """The learning rate: up and down once, or divided by 10 at 50 % and at 75 % of the run."""

    rate: float = Field(0.2, gt=0, le=100)
    """The highest learning rate, also --lr. Unless it is set, it is 0.01 with --from, falls with
    the default batch below 128 images, and is halved, up to four times, where fit diverges."""

    momentum: Share = 0.9
    """The share of the last update that the next one keeps."""

    nesterov: bool = True
    """Use Nesterov's momentum."""

    weight_decay: Share = 2e-4
    """L2 regularization of the weights; not of biases and batch norm."""

    dropout: Share = 0.0
    """The share of units of each hidden dense layer that is zeroed in a step."""

    smoothing: Share = 0.1
    """Label smoothing: the share of each target that is spread over all classes. A network trained
    with it is calibrated on the validation images before it is written."""

    rotation: float = Field(12.0, ge=0, le=45)
    """Augmentation: at most so many degrees in either direction."""

    scale: float = Field(0.1, ge=0, le=0.5)
    """Augmentation: each axis is scaled by at most this share."""

    shear: float = Field(8.0, ge=0, le=45)
    """Augmentation: at most so many degrees in either direction."""

    shift: float = Field(2.0, ge=0, le=14)
    """Augmentation: at most so many pixels along each axis."""

    elastic: float = Field(1.0, ge=0, le=14)
    """Augmentation: each of 7 by 7 control points of a spline is displaced by at most so many
    pixels along each axis."""

    transposed: bool = False
    """The images are stored column by column, as EMNIST's."""

    class_weights: Literal["none", "balanced"] = "none"
    """The weight of an image in the loss: 1, or, balanced, in inverse proportion to the images of
    its class, with a mean of 1."""

    freeze: Annotated[tuple[str, ...], NoDecode] = ()
    """The first layers, separated by commas, as conv1,conv2: they are not trained."""

    validation_images: int = Field(0, ge=0)
    """How many of the training images are held out for validation: of MNIST the last ones, else the
    same share of each class; 0 means a tenth, at most 5000. Data with validation images of its own
    is not divided."""

    device: Device = "auto"
    """Device to train on: cpu, cuda, cuda:N for GPU number N, or auto, which takes a GPU if there
    is one. The last bits of the result depend on it."""

    precision: Literal["auto", "fp32", "tf32", "mixed"] = "auto"
    """Arithmetic of a GPU: float32, products rounded to TF32, or float16 values with float32
    weights; auto is mixed. The CPU supports only fp32."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _split(cls, names: object) -> object:
        return tuple(filter(None, names.split(","))) if isinstance(names, str) else names

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, batch: int) -> int:
        if batch == 1:
            raise ValueError("expected 0 or at least 2: batch norm needs a variance")
        return batch

    def resolved(self, device: str, images: int = 60_000) -> Self:
        """The recipe on `device`, with the defaults for so many images filled in."""
        values: dict[str, Any] = {"device": device}
        for field, by_device in _BY_DEVICE.items():
            if getattr(self, field) in (0, "auto"):
                values[field] = by_device[device.partition(":")[0]]
        while not self.batch and values["batch"] > max(8, images / 8):
            values["batch"] //= 2
        if not self.batch and "rate" not in self.model_fields_set:
            values["rate"] = self.rate * min(1.0, values["batch"] / _FULL_RATE_BATCH)
        return self.model_copy(update=values)

    def command(self) -> str:
        """The canonical command line: every field of the recipe in order, no paths.

        Left out are --transposed, --class-weights and --freeze where they are not set, and the
        number of a GPU.
        """
        words = ["python", "-m", "trainer", "fit"]
        for name in Recipe.model_fields:
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if name == "model":  # a file without its folder
                words += [flag, Path(value).name]
            elif name == "freeze":
                words += [flag, ",".join(value)] if value else []
            elif name == "transposed":
                words += [flag] if value else []
            elif name == "class_weights":
                words += [flag, value] if value != "none" else []
            elif name == "device":
                words += [flag, value.partition(":")[0]]
            else:
                words += [flag, str(value).lower()]
        return shlex.join(words)


class Fit(Recipe):
    """Train a network on MNIST, or on images of your own, and write its weight file."""

    data: Path = MNIST_FOLDER
    """A folder with a folder of pictures for each class, with such folders in train, validation and
    test, or with the four files of MNIST or of a dataset of that form; or FILE.npz (x_train,
    y_train, x_test, y_test; or images, labels) or FILE.csv (label, 784 pixels). MNIST is downloaded
    to the default folder where it is missing, and to no other."""

    labels: Path | None = None
    """A text file with the names of the classes, a line for each in their order; without it they
    are the names of the folders of pictures, else the digits 0 to 9."""

    from_: Path | None = None
    """A weight file to start from: of each layer that fits by name and shape the weights are
    taken."""

    out: Path = Path("weights")
    """The weight file is OUT/MODEL/VERSION.safetensors, with the next free version."""

    checkpoints: Path = Path("data/checkpoints")
    """The folder for interrupted runs; the same command resumes one."""

    runs: Path = Path("runs")
    """Results of a run are written to RUNS/TIME-MODEL: settings, metrics by epoch, report.html."""

    target: float | None = Field(None, gt=0, le=100)
    """Stop after the first epoch with this validation accuracy, in percent."""

    patience: int | None = Field(None, ge=1)
    """Stop after so many epochs without a better validation accuracy, and write the best epoch.
    Use --schedule step: one-cycle is best at its end."""

    gpus: int = Field(1, ge=1, le=64)
    """The number of GPUs, which share each batch."""

    profile: bool = False
    """Run every step without a CUDA graph, so that a profiler sees the layers' names."""

    @field_validator("gpus")
    @classmethod
    def _one_gpu_has_a_target(cls, gpus: int, others: ValidationInfo) -> int:
        # Ranks may evaluate differently; one that stops would keep the others waiting for ever.
        for name in ("target", "patience"):
            if gpus > 1 and others.data.get(name) is not None:
                raise ValueError(f"expected 1 with --{name} {others.data[name]}")
        if gpus > 1 and ":" in (device := others.data.get("device", "")):
            raise ValueError(f"expected 1 with --device {device}")
        return gpus

    @field_validator("profile")
    @classmethod
    def _one_gpu_is_profiled(cls, profile: bool, others: ValidationInfo) -> bool:
        # Outside a graph, a step may load kernels while another GPU waits for its all-reduce.
        if profile and others.data.get("gpus", 1) > 1:
            raise ValueError(
                f"expected false with --gpus {others.data['gpus']}: it supports one GPU"
            )
        return profile

    def resolved(self, device: str, images: int = 60_000) -> Self:
        """The run on `device`, with the defaults for so many images and --from filled in."""
        resolved = super().resolved(device, images)
        if self.from_ is None or "rate" in self.model_fields_set:
            return resolved
        return resolved.model_copy(update={"rate": _RATE_FROM_A_FILE})

    def command(self) -> str:
        """The recipe's, and --data, --labels, --from, --target, --patience and --gpus where set.

        Of files and folders it has the names alone.
        """
        words = _named({"--data": self.data, "--labels": self.labels, "--from": self.from_})
        if self.target is not None:
            words += ["--target", str(self.target)]
        if self.patience is not None:
            words += ["--patience", str(self.patience)]
        if self.gpus > 1:
            words += ["--gpus", str(self.gpus)]
        return shlex.join([*shlex.split(super().command()), *words])


class Search(Recipe):
    """Vary a recipe, and compare by the mistakes on the images held out for validation."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_SEARCH_")

    data: Path = MNIST_FOLDER
    """The dataset, as of fit."""

    labels: Path | None = None
    """A text file with the names of the classes, as of fit."""

    over: Annotated[tuple[str, ...], NoDecode] = (
        "rate",
        "weight_decay",
        "dropout",
        "smoothing",
        "rotation",
        "scale",
        "shear",
        "shift",
        "elastic",
    )
    """The settings to vary, separated by commas; also momentum, schedule and batch."""

    trials: int = Field(50, ge=1, le=10_000)
    """How many recipes to try, those of earlier calls of the same search included."""

    seeds: int = Field(3, ge=1, le=100)
    """How many times a recipe is trained, with --seed and the numbers after it."""

    journal: Path = Path("runs/search.log")
    """The file that keeps the trials; the same command goes on, and several share it."""

    @field_validator("over", mode="before")
    @classmethod
    def _split_over(cls, names: object) -> object:
        if isinstance(names, str):
            return tuple(name.replace("-", "_") for name in names.split(",") if name)
        return names

    def command(self) -> str:
        """The recipe's, with --over and --seeds."""
        command = super().command().replace("fit", "search", 1)
        return f"{command} --over {','.join(self.over)} --seeds {self.seeds}"


class Export(_Command):
    """Write a weight file as an ONNX model."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_EXPORT_")

    weights: Path
    """The weight file to read."""

    out: Path = Path("model.onnx")
    """The ONNX file to write."""


class Compare(_Command):
    """Lay two runs side by side: settings that differ, results, times."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_COMPARE_")

    run: Path
    """The folder of a run."""

    other: Path
    """The folder of another."""

    out: Path | None = None
    """A page to write, with the table and the curves of both."""


class Import(_Command):
    """Make a weight file of weights from elsewhere: a state dict, or Keras' arrays."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_IMPORT_")

    file: Path
    """The file to read: safetensors, or npz without pickled objects."""

    model: str = "lenet"
    """The network that it holds: lenet, lenet-classic, lenet-6-16, cnn-32-64 or mlp, or FILE.json
    that describes another, where padding may also be same or valid."""

    mapping: Path | None = None
    """A JSON file with an object of names, as {"conv1.weight": "features.0.weight"}; without it
    layers are found by their shapes and order."""

    layout: Literal["auto", "torch", "keras"] = "auto"
    """How arrays are stored: channels first as in PyTorch, or last as in Keras; auto takes Keras
    where an array is called kernel."""

    epsilon: float = Field(0.0, ge=0, le=1)
    """Epsilon of the maker's batch norm; 0 means 1e-5 for torch, 1e-3 for keras."""

    input_mean: float = Field(0.0, ge=0, le=1)
    """The mean that the maker subtracted from pixels between 0 and 1."""

    input_deviation: float = Field(1.0, gt=0, le=1)
    """The deviation by which it divided them; 0.00392157 if its pixels are 0 to 255."""

    data: Path | None = None
    """A dataset, as of fit, whose test images give the accuracy."""

    labels: Path | None = None
    """A text file with the names of the classes, a line for each; without it the digits 0 to 9."""

    transposed: bool = False
    """The images of the dataset are stored column by column, as EMNIST's."""

    out: Path = Path("weights")
    """The weight file is OUT/MODEL/VERSION.safetensors, with the next free version."""

    def command(self, layout: str) -> str:
        """The command line that gave the weights, with the names of files alone."""
        words = ["python", "-m", "trainer", "import", "--file", self.file.name]
        words += ["--model", Path(self.model).name, "--layout", layout]
        words += _named({"--mapping": self.mapping, "--data": self.data, "--labels": self.labels})
        for name in ("epsilon", "input_mean", "input_deviation"):
            if getattr(self, name) != Import.model_fields[name].default:
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return shlex.join(words)


class Evaluate(_Command):
    """Measure a weight file on labelled images: accuracy, confusion, calibration, mistakes."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_EVALUATE_")

    weights: Path
    """The weight file to measure."""

    data: Path
    """The images, as of fit; classes are those of the weight file with the same names, and some of
    them may be missing."""

    labels: Path | None = None
    """A text file with the names of the classes, as of fit; without it, and where no folders name
    them, they are those of the weight file in their order."""

    transposed: bool = False
    """The images are stored column by column, as EMNIST's."""

    part: Literal["auto", "train", "validation", "test", "all"] = "auto"
    """The part of the data. auto: its test images; without any those that fit set aside, if the
    file was trained on this data, else all."""

    device: Device = "auto"
    """Device to compute on: cpu, cuda, cuda:N for GPU number N, or auto, which takes a GPU if there
    is one."""

    precision: Precision = "mixed"
    """Arithmetic of the GPU: float32, products rounded to TF32, or float16 values."""

    json_: Path | None = None
    """A JSON file to write, with all numbers."""

    out: Path | None = None
    """A page to write, with pictures of the mistakes."""


class Inspect(_Command):
    """Print what is in a weight file and who computes it, or the calls of a training step."""

    model_config = SettingsConfigDict(env_prefix="LENET_TRAINER_INSPECT_")

    weights: Path | None = None
    """The weight file to print."""

    model: str = "lenet"
    """The architecture: lenet, lenet-classic, lenet-6-16, cnn-32-64 or mlp, or FILE.json that
    describes another."""

    precision: Precision = "mixed"
    """Arithmetic of the GPU: float32, products rounded to TF32, or float16 values."""

    convolutions: ConvolutionsBy = "auto"
    """Who computes a weight file's layers, as the service's setting of that name."""

    batch: int = Field(256, ge=2, le=60_000)
    """Images in the step."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on: without a GPU, or with cpu, the table has no engines and no times."""
