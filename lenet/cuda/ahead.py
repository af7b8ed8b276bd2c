"""Compiles the kernels of networks ahead of time, on a machine without a GPU.

Which ones a network needs is not listed anywhere: it is built as on a GPU, over arrays in the
host's memory, and what it requests of `Kernels` is noted. Nothing is launched.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lenet.cuda import fused_network, layers
from lenet.cuda.device import Limits
from lenet.cuda.fused_network import FusedNetwork
from lenet.cuda.graphs import ConvolutionsBy, Precision
from lenet.cuda.layers import BuildContext, LayerByLayer
from lenet.cuda.nvrtc import nvrtc
from lenet.cuda.programs import Macros, Program
from lenet.errors import BackendUnavailable, DeviceError
from lenet.pixels import HEIGHT, WIDTH
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

SHARED_BYTES = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""The most shared memory of a block, by the compute capabilities that can be compiled for: Turing,
the oldest of CUDA 13; Ampere, twice; Ada; Hopper; Blackwell, twice. Source: CUDA programming guide,
technical specifications per compute capability."""

_MULTIPROCESSORS = (8, 16, 32, 64, 128)
"""How a kernel divides its work depends on a GPU's multiprocessors, whose number the capability
does not say. These give the divisions of the named networks for every number."""

_OWN: dict[ConvolutionsBy, tuple[bool, ...]] = {
    "auto": (True,),
    "cudnn": (False,),
    "measured": (True, False),
}
"""Whether our kernels compute, see `BuildContext.own`."""


@dataclass(frozen=True, slots=True)
class _Requested:
    """Notes what is requested of it in the place of `Kernels`."""

    programs: set[Program] = field(default_factory=set)

    def get(self, source: Path, _name: str, macros: Macros) -> Any:
        self.programs.add(Program.of(source, macros))
        return _nothing


def programs(
    file: WeightFile,
    precision: Precision,
    convolutions: ConvolutionsBy,
    buckets: Sequence[int],
    capability: int,
) -> set[Program]:
    """What the networks of `file` need on a GPU of this capability, one of `SHARED_BYTES`.

    Small buckets are built by both strategies: where the fused network does not run, they are
    computed layer by layer.

    Raises:
        BackendUnavailable: see `layers.check`.
    """
    model, requested = file.model, _Requested()
    kernels: Any = requested
    layers.check(model)
    for own in _OWN[convolutions]:
        for multiprocessors in _MULTIPROCESSORS:
            limits = Limits(capability, SHARED_BYTES[capability], multiprocessors)
            build = _build_context(file, precision, limits, own, kernels)
            for rows in buckets:
                LayerByLayer(model, _buffers(rows, model.classes), build)
    if True in _OWN[convolutions] and fused_network.is_supported(model, precision, capability):
        weights: Any = fused_network.pack(model, file.tensors)
        FusedNetwork(model, weights, kernels)
    return requested.programs


def _build_context(
    file: WeightFile, precision: Precision, limits: Limits, own: bool, kernels: Any
) -> BuildContext:
    """A context as on a GPU with these limits, in which libraries do nothing."""
    nothing: Any = SimpleNamespace(
        engine=lambda *_: SimpleNamespace(run=_nothing),
        product=lambda *_: SimpleNamespace(workspace_bytes=0),
        reserve=_nothing,
        take=np.empty,
    )
    handle: Any = SimpleNamespace(
        limits=limits, multiprocessors=limits.multiprocessors, cublas_lt=nothing
    )
    weights: Any = layers.pack(file, precision, limits, own)
    return BuildContext(handle, precision, weights, nothing, kernels, nothing, nothing, own)


def _buffers(rows: int, classes: int) -> Any:
    pixels = np.empty((rows, HEIGHT, WIDTH), np.uint8)
    answers = np.empty((rows, classes), np.float32)
    return SimpleNamespace(
        rows=rows,
        pixels=pixels,
        pixels_on_host=pixels,
        logits=answers,
        probabilities=answers,
        probabilities_on_host=answers,
    )


def _nothing(*_: object) -> None: ...


def compile_all(wanted: Iterable[tuple[int, Program]]) -> tuple[int, int]:
    """Compile each program for its capability and keep it, unless it is kept already.

    One that does not compile is reported: the service does without it.

    Returns:
        the number of programs that are there now, and of those that do not compile.

    Raises:
        BackendUnavailable: CUDA's compiler is not installed, or was killed.
        OSError: the folder cannot be written.
    """
    wanted = set(wanted)
    missing = [
        (capability, program) for capability, program in wanted if not program.find(capability)
    ]
    nvrtc()  # raises here what it would raise in every process
    failed = 0
    # Processes: NVRTC compiles for one thread at a time.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for (capability, program), found in zip(
                missing, pool.map(_compile, missing), strict=True
            ):
                if isinstance(found, str):
                    failed += 1
                    _log.warning("%s", found)
                else:
                    program.write(capability, found)
        except BrokenProcessPool as exc:
            raise BackendUnavailable(
                "a compiling process was killed", "there is one for each core, of 140 MB"
            ) from exc
    return len(wanted) - failed, failed


def _compile(wanted: tuple[int, Program]) -> bytes | str:
    """The machine code, or why there is none."""
    capability, program = wanted
    try:
        return nvrtc().compile(program.source, capability, program.options)[0]
    except DeviceError as exc:
        problem, *_ = str(exc).splitlines()
        return problem
