"""A training step in PyTorch, in the variants that its documentation recommends for speed.

One step is forward, cross entropy, backward and SGD (Nesterov momentum, weight decay), on one
batch that is already on the device as float32 (n, 1, 28, 28). Unlike ours, the step neither selects
nor augments images, and it decays all parameters in one group, which is one launch; ours decays
only the weights.

Each function imports torch, which this project does not depend on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lenet.model import Activation, ConvBlock, Model, Pool

Precision: TypeAlias = Literal["fp32", "tf32", "mixed"]
"""float32 without TF32, with it, or float16 autocast with a loss scale (TF32 for the rest)."""

Layout: TypeAlias = Literal["contiguous", "channels_last"]

Step: TypeAlias = Callable[[], Any]
"""One training step; returns the loss, a tensor of one value."""

MODES = ("eager", "graph", "compile")
"""Eager execution, the whole step as one CUDA graph, torch.compile."""

_WARM_UP_STEPS = 11  # PyTorch's documentation of CUDA graphs asks for these with autograd
_RATE, _MOMENTUM, _WEIGHT_DECAY = 0.01, 0.9, 5e-4


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of the step.

    `optimizer`: SGD's fused kernel, its kernels over lists of tensors, or the latter compiled.
    `compile_mode` is torch.compile's, "" without it. `captured`: one CUDA graph for all.
    """

    layout: Layout
    optimizer: Literal["fused", "foreach", "compiled"]
    compile_mode: str = ""
    captured: bool = False

    def __str__(self) -> str:
        parts = [self.compile_mode, "one CUDA graph" if self.captured else "", self.layout]
        return ", ".join(part for part in [*parts, f"{self.optimizer} SGD"] if part)


def variants(model: Model, precision: Precision) -> dict[str, list[Variant]]:
    """The variants to measure, by mode."""
    layouts: tuple[Layout, ...] = ("contiguous",)
    if any(isinstance(block, ConvBlock) for block in model.blocks):
        layouts += ("channels_last",)
    # "max-autotune" and "reduce-overhead" capture by themselves, but launch more than their graphs
    # and are slower (978 and 1,270 us, this one 389: lenet, batch 256, tf32, H200, 2026-11-20).
    compiled = [Variant("contiguous", "fused", "max-autotune-no-cudagraphs", captured=True)]
    # In a capture, a loss scale needs the fused kernel. With any other, the host reads from the
    # device whether to step.
    if precision != "mixed":
        compiled.append(replace(compiled[0], optimizer="compiled"))
    found = {
        "eager": [Variant("contiguous", "fused"), Variant("contiguous", "foreach")],
        "graph": [Variant("contiguous", "fused", captured=True)],
        "compile": compiled,
    }
    return {
        mode: [replace(variant, layout=layout) for variant in tried for layout in layouts]
        for mode, tried in found.items()
    }


def network(model: Model) -> Any:
    """`model` as a torch.nn.Sequential from float32 (n, c, h, w) to logits (n, classes)."""
    from torch import nn

    layers: list[Any] = []
    flat = False
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        bias = not block.batch_norm
        if isinstance(block, ConvBlock):
            geometry = block.kernel, block.stride, block.padding, block.dilation
            layers.append(nn.Conv2d(shape.input[0], block.channels, *geometry, bias=bias))
            norm = nn.BatchNorm2d
        else:
            if not flat:
                layers.append(nn.Flatten())
                flat = True
            layers.append(nn.Linear(math.prod(shape.input), block.units, bias=bias))
            norm = nn.BatchNorm1d
        if block.batch_norm:
            layers.append(norm(shape.linear[0]))
        layers += _activation(block.activation)
        if isinstance(block, ConvBlock) and block.pool is not None:
            layers.append(_pool(block.pool))
    return nn.Sequential(*layers)


def _activation(activation: Activation) -> list[Any]:
    from torch import nn

    parameter = activation.parameter
    made: dict[str, Callable[[], Any]] = {
        "relu": nn.ReLU,
        "clipped_relu": lambda: nn.Hardtanh(0, parameter),
        "elu": lambda: nn.ELU(parameter),
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
    }
    return [] if activation.kind == "identity" else [made[activation.kind]()]


def _pool(window: Pool) -> Any:
    from torch import nn

    if window.kind == "global_average":
        return nn.AdaptiveAvgPool2d(1)
    module = nn.MaxPool2d if window.kind == "max" else nn.AvgPool2d
    return module(window.size, window.stride, window.padding)


def training_step(
    model: Model, batch: int, precision: Precision, variant: Variant, device: str = "cuda"
) -> Step:
    """A step that trains a new network on one batch of random images.

    Call it inside `settings(precision)`. `variant.captured` needs a CUDA device.
    """
    import torch

    torch.manual_seed(1)
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    layout = layouts[variant.layout]
    net = network(model).to(device, memory_format=layout)
    images = torch.rand(batch, *model.input).to(device, memory_format=layout)
    labels = torch.randint(model.classes, (batch,)).to(device)
    mixed = precision == "mixed"
    kind = torch.device(device).type
    optimizer = torch.optim.SGD(
        net.parameters(),
        # A tensor can change without a new capture or compilation; foreach reads it back.
        lr=_RATE if variant.optimizer == "foreach" else torch.tensor(_RATE, device=device),
        momentum=_MOMENTUM,
        weight_decay=_WEIGHT_DECAY,
        nesterov=True,
        fused=variant.optimizer == "fused",
        foreach=variant.optimizer != "fused",
    )
    # Zeros give the same first step as no buffer, and make it like every other: nothing is compiled
    # twice, and the loss scale may skip it.
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(kind, enabled=mixed)

    def loss_of(images: Any, labels: Any) -> Any:
        with torch.autocast(kind, torch.float16, enabled=mixed):
            return torch.nn.functional.cross_entropy(net(images), labels)

    if variant.compile_mode:
        loss_of = torch.compile(loss_of, mode=variant.compile_mode, dynamic=False)
    if variant.optimizer == "compiled":
        optimizer.step = torch.compile(optimizer.step, mode=variant.compile_mode, dynamic=False)

    def step() -> Any:
        if variant.compile_mode and not variant.captured:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # The next backward then writes gradients, which is cheaper than adding to zeros, and in a
        # capture allocates them in the graph's own memory.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return captured(step) if variant.captured else step


def captured(step: Step) -> Step:
    """`step` as one CUDA graph, captured after a warm-up on a side stream."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Any:
        graph.replay()
        return loss

    return replay


@contextlib.contextmanager
def settings(precision: Precision) -> Iterator[None]:
    """Set PyTorch's process-wide switches for `precision`, and let cuDNN search its plans."""
    import torch

    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    cudnn.allow_tf32, cudnn.benchmark = precision != "fp32", True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]
