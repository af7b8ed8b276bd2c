"""A training step in PyTorch, in the variants that its documentation lets hope are fastest.

One step is forward, cross entropy, backward and SGD (Nesterov momentum, weight decay), on one
batch that already lies on the device as float32 (n, 1, 28, 28): PyTorch pays neither for choosing
images nor for augmenting them. All parameters decay, in one group, for that is one launch; ours
decays the weights alone. It refuses to time anything.

torch is no dependency of this project: each function imports it.
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

WAYS = ("eager", "graph", "compile")

_WARM_UP_STEPS = 11  # what PyTorch's documentation of CUDA graphs asks for with autograd
_RATE, _MOMENTUM, _WEIGHT_DECAY = 0.01, 0.9, 5e-4


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write the same step.

    `optimizer`: SGD's fused kernel, its kernels over lists of tensors, or those after
    torch.compile. `mode` is torch.compile's, "" without it. `captured`: all in one CUDA graph.
    """

    layout: Layout
    optimizer: Literal["fused", "foreach", "compiled"]
    mode: str = ""
    captured: bool = False

    def __str__(self) -> str:
        parts = [self.mode, "one CUDA graph" if self.captured else "", self.layout]
        return ", ".join(part for part in [*parts, f"{self.optimizer} SGD"] if part)


def variants(model: Model, precision: Precision) -> dict[str, list[Variant]]:
    """What is tried of each of `WAYS`."""
    layouts: tuple[Layout, ...] = ("contiguous",)
    if any(isinstance(block, ConvBlock) for block in model.blocks):
        layouts += ("channels_last",)
    # Not "max-autotune" or "reduce-overhead", which capture by themselves: what they launch beside
    # their graphs decides (978 and 1,270 us against 389: lenet, batch 256, tf32, H200, 2026-11-20).
    compiled = [Variant("contiguous", "fused", "max-autotune-no-cudagraphs", captured=True)]
    # In a capture a loss scale needs the fused kernel: for any other, the host asks the device
    # whether to step.
    if precision != "mixed":
        compiled.append(replace(compiled[0], optimizer="compiled"))
    tried = {
        "eager": [Variant("contiguous", "fused"), Variant("contiguous", "foreach")],
        "graph": [Variant("contiguous", "fused", captured=True)],
        "compile": compiled,
    }
    return {
        way: [replace(variant, layout=layout) for variant in found for layout in layouts]
        for way, found in tried.items()
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
    """A fresh network with a batch of random images, as the step that trains it on them.

    `variant.captured` needs a CUDA device. Call it inside `settings(precision)`.
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
        # As a tensor it can change without a new capture or compilation; foreach reads it back.
        lr=_RATE if variant.optimizer == "foreach" else torch.tensor(_RATE, device=device),
        momentum=_MOMENTUM,
        weight_decay=_WEIGHT_DECAY,
        nesterov=True,
        fused=variant.optimizer == "fused",
        foreach=variant.optimizer != "fused",
    )
    # From zeros the first step is what it would be from nothing, but no case of its own: nothing
    # to compile twice, and no harm when the loss scale skips it.
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(kind, enabled=mixed)

    def loss_of(images: Any, labels: Any) -> Any:
        with torch.autocast(kind, torch.float16, enabled=mixed):
            return torch.nn.functional.cross_entropy(net(images), labels)

    if variant.mode:
        loss_of = torch.compile(loss_of, mode=variant.mode, dynamic=False)
    if variant.optimizer == "compiled":
        optimizer.step = torch.compile(optimizer.step, mode=variant.mode, dynamic=False)

    def step() -> Any:
        if variant.mode and not variant.captured:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # Without gradients the next backward writes them, which is cheaper than adding to zeros;
        # and in a capture it allocates them in the graph's own memory.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return captured(step) if variant.captured else step


def captured(step: Step) -> Step:
    """What `step` queues as one CUDA graph, after a warm-up on a side stream."""
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
    """PyTorch's process-wide switches for `precision`, and cuDNN's search for its fastest plans."""
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
