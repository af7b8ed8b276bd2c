"""Draw the pictures of the tour: `python docs/tour/pictures.py [FOLDER]`, by default images/.

Shapes come from the code, times from the records of the repository. Colours follow the reader's
light or dark theme. `tests/test_tour.py` fails where a picture is not what this draws.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lenet.context import buckets
from lenet.cuda import fused_network
from lenet.cuda.convolutions import Convolutions, Split, tiles
from lenet.cuda.device import Limits
from lenet.cuda.graphs import Precision
from lenet.cuda.layers import is_small
from lenet.cuda.packing import layout
from lenet.model import ConvBlock, DenseBlock, named

TOUR = Path(__file__).parent
DOCS = TOUR.parent
MODEL = named("lenet").folded
HOPPER = Limits(capability=90, shared_bytes=227 << 10, multiprocessors=132)

_STYLE = """
  .page { fill: #f6f8fa; stroke: #d0d7de }
  .box, .cudnn, .cublas, .ours, .data { fill: #ffffff; stroke: #57606a; stroke-width: 1.2 }
  .cudnn { fill: #dafbe1 } .cublas { fill: #fff8c5 } .ours { fill: #ddf4ff }
  .band { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
  .title { font-weight: 600; font-size: 14px; fill: #1f2328; text-anchor: middle }
  .sub { font-size: 12.5px; fill: #424a53; text-anchor: middle }
  .note { font-size: 12.5px; fill: #57606a } .centre { text-anchor: middle } .right { text-anchor: end }
  .head { font-size: 14px; font-weight: 600; fill: #0550ae }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.6 }
  .tip { fill: #57606a }
  .cut { stroke: #57606a; stroke-width: 1; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d }
    .box, .data { fill: #161b22; stroke: #8b949e } .cudnn { fill: #12361f; stroke: #8b949e }
    .cublas { fill: #3a2f05; stroke: #8b949e } .ours { fill: #0c2d4d; stroke: #8b949e }
    .band { stroke: #6e7681 }
    .title { fill: #e6edf3 } .sub { fill: #c9d1d9 } .note { fill: #9ea7b1 } .head { fill: #79c0ff }
    .arrow, .cut { stroke: #9ea7b1 } .tip { fill: #9ea7b1 }
  }
"""  # noqa: E501 - one rule a line


class Picture:
    """An SVG of `width` x `height`, collected piece by piece."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{description}">',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
            "</defs>",
            f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>',
        ]

    def rect(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        """A rectangle of a class of the style sheet."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="5"/>'
        )

    def text(self, kind: str, x: float, y: float, text: str) -> None:
        """A line of text with its baseline at `y`."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escaped}</text>')

    def box(
        self,
        kind: str,
        place: tuple[float, float, float, float],
        title: str,
        lines: Sequence[str] = (),
    ) -> None:
        """A rectangle at (x, y, width, height) with a title and lines in its middle."""
        x, y, width, height = place
        self.rect(kind, *place)
        top = y + height / 2 - 8.5 * (len(lines) if title else len(lines) + 1) + 5
        if title:
            self.text("title", x + width / 2, top, title)
        for number, line in enumerate(lines, 1):
            self.text("sub", x + width / 2, top + 17 * number, line)

    def line(self, kind: str, *points: tuple[float, float]) -> None:
        """A line through `points`; an arrow ends in a tip."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if kind == "arrow" else ""
        self._parts.append(f'<path class="{kind}" d="M{path}"{tip}/>')

    def svg(self) -> str:
        """The whole document."""
        return "\n".join((*self._parts, "</svg>", ""))


def network() -> Picture:
    """The network with shapes and numbers of parameters."""
    picture = Picture(1040, 214, "The network lenet: shapes and parameters of each layer.")
    parameters = MODEL.parameters()
    total = sum(map(math.prod, parameters.values()))
    picture.text("head", 24, 34, f"lenet as it is served: {total:,} parameters")
    picture.box("data", (24, 62, 80, 104), "image", ["uint8", "28 x 28"])
    x = 104
    for block, shape in zip(MODEL.blocks, MODEL.shapes(), strict=True):
        count = sum(math.prod(parameters[f"{shape.name}.{part}"]) for part in ("weight", "bias"))
        if isinstance(block, ConvBlock):
            pool = block.pool
            assert pool is not None, "every convolution of lenet is pooled"
            r, s = block.kernel
            done = [f"{r} x {s}, {block.channels} channels", f"bias, {block.activation.kind}"]
            done.append(f"{pool.kind} {pool.size[0]} x {pool.size[1]}")
        else:
            done = [f"{block.units} units", "bias"]
            done[1] += "" if block.activation.kind == "identity" else ", relu"
        kind = "cublas" if shape.name == "dense1" else "ours"
        after = " x ".join(map(str, shape.output))
        before = " x ".join(map(str, shape.input))
        picture.line("arrow", (x, 114), (x + 58, 114))
        picture.text("note centre", x + 29, 106, before if len(shape.input) < 2 else "")
        if len(shape.input) > 1:
            picture.text("note centre", x + 29, 92, f"{shape.input[0]} x")
            picture.text("note centre", x + 29, 106, " x ".join(map(str, shape.input[1:])))
        picture.box(kind, (x + 60, 62, 138, 104), shape.name, [*done, f"{count:,} parameters"])
        x += 198
    picture.line("arrow", (x, 114), (x + 58, 114))
    picture.text("note centre", x + 27, 106, after)
    picture.text("note", x + 64, 118, "softmax")
    picture.text(
        "note",
        24,
        194,
        "Shapes are c x h x w. Layer by layer in fp16, both convolutions are one kernel of ours; "
        f"dense1 is cuBLAS's for more than {_dense_rows('fp16')} images.",
    )
    return picture


def _axes(shape: Sequence[int]) -> tuple[str, str]:
    """Dimensions (n c h w) and strides of channels-last images, as `lenet.cuda.graphs` says."""
    h, w, c = shape
    return f"dim n, {c}, {h}, {w}", f"stride {h * w * c}, 1, {w * c}, {c}"


def operation_graph() -> Picture:
    """The graphs of conv2 as it is, and as it would be without pooling."""
    picture = Picture(1040, 430, "The operation graphs of conv2 with and without pooling.")
    packed = layout(MODEL)
    k, r, s, c = packed["conv2.weight"].shape
    _, shape, *_ = MODEL.shapes()
    source, result = (*shape.input[1:], c), (*shape.linear[1:], k)
    picture.text("head", 24, 34, "conv2, where cuDNN computes it: a graph of one operation")
    picture.box("data", (24, 56, 196, 66), "INPUT, half", _axes(source))
    weights = f"dim {k}, {c}, {r}, {s}", f"stride {r * s * c}, 1, {s * c}, {c}"
    picture.box("data", (24, 136, 196, 66), "WEIGHT, half", weights)
    picture.box("cudnn", (272, 90, 156, 78), "conv_fprop", ["products of halves,", "sums float"])
    picture.line("arrow", (220, 89), (246, 89), (246, 116), (270, 116))
    picture.line("arrow", (220, 169), (246, 169), (246, 142), (270, 142))
    picture.box("data", (480, 96, 196, 66), "OUTPUT, half", _axes(result))
    picture.line("arrow", (428, 129), (478, 129))
    picture.box(
        "ours",
        (716, 90, 160, 78),
        "epilogue_forward",
        ["float: bias or batch", "norm, relu, max 2x2"],
    )
    picture.line("arrow", (676, 129), (714, 129))
    pooled = ", ".join(map(str, ("n", *shape.output[1:], k)))
    picture.box("data", (912, 98, 112, 62), "half", [pooled])
    picture.line("arrow", (876, 129), (910, 129))
    picture.rect("band", 14, 46, 672, 166)
    picture.text("note right", 684, 42, "what cuDNN gets")

    picture.text("head", 24, 250, "a convolution without pooling: three operations, fused by cuDNN")
    picture.box("data", (24, 268, 170, 64), "INPUT, half", _axes(source))
    picture.box("data", (24, 342, 170, 64), "WEIGHT, half", weights)
    picture.box("cudnn", (236, 306, 110, 60), "conv_fprop")
    picture.line("arrow", (194, 300), (214, 300), (214, 326), (234, 326))
    picture.line("arrow", (194, 374), (214, 374), (214, 346), (234, 346))
    picture.box("cudnn", (440, 306, 96, 60), "bias")
    picture.line("arrow", (346, 336), (438, 336))
    picture.box("data", (433, 386, 110, 30), "BIAS, half")
    picture.line("arrow", (488, 386), (488, 368))
    picture.box("cudnn", (640, 306, 96, 60), "relu")
    picture.line("arrow", (536, 336), (638, 336))
    for x in (391, 587):
        picture.text("note centre", x, 328, "float, not")
        picture.text("note centre", x, 354, "in memory")
    picture.box("data", (796, 304, 160, 66), "OUTPUT, half", _axes(result))
    picture.line("arrow", (736, 336), (794, 336))
    picture.rect("band", 14, 262, 952, 160)
    return picture


def _strategies_us() -> Mapping[int, tuple[float, float]]:
    """(fused, layer by layer) by rows, from decision 13."""
    text = (DOCS / "decisions" / "0013-two-strategies-for-a-bucket.md").read_text()
    found = re.findall(r"^\| (\d+) \| (\d+\.\d) \| (\d+\.\d) \|$", text, re.MULTILINE)
    assert len(found) == 5, "decision 13 states five batch sizes"
    return {int(rows): (float(fused), float(layers)) for rows, fused, layers in found}


def time_line() -> Picture:
    """Both strategies, host to host."""
    picture = Picture(1040, 514, "Times of the fused network and of layer by layer by batch size.")
    left, scale = 110, 16.0
    picture.text("head", 24, 32, "host to host, fp16, H100, microseconds")
    y = 52
    for rows, (fused_us, layers_us) in _strategies_us().items():
        picture.text("note", 24, y + 33, "1 image" if rows == 1 else f"{rows} images")
        picture.box("ours", (left, y, scale * fused_us, 26), "")
        picture.text("sub", left + scale * fused_us / 2, y + 18, "one kernel")
        picture.text("note", left + scale * fused_us + 8, y + 18, f"{fused_us} fused network")
        width = scale * layers_us / 3
        dense = "ours" if rows <= 32 else "cudnn"  # when decision 13 measured it
        steps = (("convs", "ours"), ("dense1", dense), ("dense2", "ours"))
        for number, (step, kind) in enumerate(steps):
            x = left + number * width
            picture.rect(kind, x, y + 30, width, 26)
            picture.text("sub", x + width / 2, y + 48, step)
        picture.text("note", left + scale * layers_us + 8, y + 48, f"{layers_us} layer by layer")
        y += 76
    picture.line("arrow", (left, y - 2), (left + scale * 54, y - 2))
    for tick in range(0, 51, 10):
        picture.line("cut", (left + scale * tick, y - 6), (left + scale * tick, y + 2))
        picture.text("note centre", left + scale * tick, y + 16, str(tick))
    picture.text(
        "note",
        24,
        y + 42,
        "The length of a bar was measured: by events, 20 launches in a row (decision 13). Its "
        "steps were not: they are drawn equally wide.",
    )
    picture.text(
        "note",
        24,
        y + 62,
        "Blue: kernels of ours. Green: cuDNN, then; now cuBLAS from 32 images on. Each bar is one "
        "graph launch, without copies.",
    )
    return picture


def _range(first: int, end: int, real: int) -> str:
    """Numbers from `first` to `end` - 1, as far as they are not padding."""
    return "none" if first >= real else f"{first} to {min(end, real) - 1}"


def _bytes(count: float) -> str:
    """A size as one reads it."""
    return f"{count:.0f} B" if count < 1024 else f"{count / 1024:.3g} KiB"


def cluster() -> Picture:
    """What each block of the cluster computes of one image, and the weights that it holds."""
    picture = Picture(1040, 516, "A cluster of eight blocks: what each holds of one image.")
    conv1, conv2, hidden, last = MODEL.blocks
    assert isinstance(conv1, ConvBlock), "lenet begins with a convolution"
    assert isinstance(conv2, ConvBlock), "lenet has two"
    assert isinstance(hidden, DenseBlock), "then a hidden layer"
    assert isinstance(last, DenseBlock), "then the logits"
    zeros = {name: np.zeros(shape, np.float32) for name, shape in MODEL.parameters().items()}
    packed = fused_network.pack(MODEL, zeros)
    blocks = fused_network.CLUSTER
    second = packed["second"].nbytes / len(packed["second"])
    own_units = packed["last"].shape[2]
    picture.text(
        "head", 24, 32, "one image, a cluster of eight blocks of 512 threads, time runs downwards"
    )
    width, left, gap = 108, 112, 6
    for y, name, place in (
        (66, "pixels", "shared mem."),
        (122, "conv1", "shared mem."),
        (202, "conv2", "shared mem."),
        (322, "hidden", "registers"),
        (402, "logits", "registers"),
    ):
        picture.text("note", 12, y + 18, name)
        picture.text("note", 12, y + 34, place)
    for block in range(blocks):
        x = left + block * (width + gap)
        middle = x + width / 2
        channels = _range(8 * block, 8 * block + 8, conv2.channels)
        units = _range(own_units * block, own_units * (block + 1), hidden.units)
        picture.text("sub", middle, 58, f"block {block}")
        picture.box("data", (x, 66, width, 40), "", ["the whole", "image, twice"])
        picture.line("arrow", (middle, 106), (middle, 120))
        first = _bytes(packed["first"].nbytes)
        picture.box("ours", (x, 122, width, 62), "", [f"all {conv1.channels}", "channels", first])
        picture.line("arrow", (middle, 184), (middle, 200))
        lines = ["channels", channels, _bytes(second)]
        if channels == "none":
            lines = ["no channel", "is left"]
        picture.box("ours", (x, 202, width, 62), "", lines)
        picture.line("arrow", (middle, 264), (middle, 276))
        picture.line("arrow", (middle, 304), (middle, 320))
        weights = _bytes(packed["hidden"].nbytes / blocks)
        picture.box("ours", (x, 322, width, 62), "", ["units", units, weights])
        picture.line("arrow", (middle, 384), (middle, 400))
        weights = _bytes(packed["last"].nbytes / blocks)
        part = ["its part of", f"{last.units} logits", weights]
        picture.box("ours", (x, 402, width, 62), "", part)
    right = left + blocks * (width + gap) - gap
    exchange = "barrier: all have started. Each writes its channels to all eight. Barrier: all of "
    picture.box("box", (left, 277, right - left, 27), "", [f"{exchange}conv2's output is there"])
    picture.line("cut", (left + width / 2, 472), (right - width / 2, 472))
    for block in range(blocks):
        middle = left + block * (width + gap) + width / 2
        picture.line("cut", (middle, 464), (middle, 472))
    picture.line("arrow", (left + width / 2, 472), (left + width / 2, 482))
    picture.box("ours", (left, 483, 2 * width + gap, 25), "", ["sum in a fixed order, softmax"])
    x = left + 2 * width + 20
    picture.text("note", x, 490, "Barrier: every part has arrived in the shared memory of block 0.")
    picture.text("note", x, 507, "The other blocks end. Sizes are those of a block's weights.")
    return picture


def _dense_rows(precision: Precision) -> int:
    """The largest bucket whose dense1 is `dense.cu`'s."""
    weights = math.prod(layout(MODEL)["dense1.weight"].shape)
    return max(rows for rows in buckets(1024) if is_small(rows, weights, precision))


def _step(picture: Picture, place: tuple[float, float, float, float], kind: str, text: str) -> None:
    """A kernel: its title, then the lines of `text` behind it."""
    title, *lines = text.splitlines()
    picture.box(kind, place, title, lines)


def _launches(picture: Picture) -> None:
    """The kernels of `lenet` with what is in memory between them."""
    *_, dense, last = MODEL.blocks
    assert isinstance(dense, DenseBlock), "a hidden layer"
    assert isinstance(last, DenseBlock), "the logits"
    packed = layout(MODEL)
    k, *_ = packed["conv2.weight"].shape
    units, _ = packed["dense1.weight"].shape
    _, h, w = MODEL.shapes()[1].output
    few, few_tf32, few_fp32 = _dense_rows("fp16"), _dense_rows("tf32"), _dense_rows("fp32")
    picture.box("data", (20, 104, 112, 76), "", ["pixels, uint8", "n x 28 x 28", "host or device"])
    picture.line("arrow", (132, 142), (150, 142))
    _step(
        picture,
        (152, 92, 150, 100),
        "ours",
        "convolutions\nconv1 and conv2\nwith bias, relu,\nmax 2x2",
    )
    picture.line("arrow", (302, 142), (320, 142))
    picture.box("data", (322, 114, 108, 56), "", ["half or float", f"n x {h} x {w} x {k}"])
    images = f"up to {few} images, in TF32 {few_tf32}, in fp32 {few_fp32}"
    for y, kind, text in (
        (76, "ours", f"dense: + bias, relu\n{images}"),
        (152, "cublas", "product, bias, relu\nmore images"),
    ):
        picture.line("arrow", (430, 142), (446, 142), (446, y + 28), (462, y + 28))
        _step(picture, (464, y, 262, 56), kind, text)
        picture.line("arrow", (726, y + 28), (742, y + 28), (742, 142), (758, 142))
    picture.box("data", (760, 114, 96, 56), "", ["half or float", f"n x {units}"])
    picture.line("arrow", (856, 142), (870, 142))
    _step(picture, (872, 104, 148, 76), "ours", "dense_softmax\ndense2, bias,\nsoftmax")
    picture.line("arrow", (946, 180), (946, 198))
    picture.box("data", (872, 200, 148, 56), "", [f"float, n x {last.units}", "host or device"])
    picture.text(
        "note",
        20,
        270,
        "Blue: ours. Yellow: cuBLAS. Host or device: up to 128 images the first "
        "kernel reads page-locked host memory, the last one writes there.",
    )


def _block_of_many(picture: Picture, top: float) -> None:
    """A block of threads that computes several images at a time."""
    both = Convolutions.of(MODEL, "fp16", HOPPER)
    assert both is not None, "lenet is supported"
    split = both.split(8192, HOPPER)
    weights = {name: np.zeros(shape) for name, shape in MODEL.parameters().items()}
    first = both.pack_first(weights["conv1.weight"]).nbytes
    second = both.pack_second(weights["conv2.weight"]).nbytes
    image = both.shared_bytes(Split(2, 1)) - both.shared_bytes(Split(1, 1))
    everything = both.shared_bytes(split)
    picture.text("head", 24, top + 22, "convolutions, many images: a block holds the filters once")
    picture.rect("band", 20, top + 34, 490, 202)
    filters = [f"filters of conv1, {_bytes(first)}, and conv2, {_bytes(second)}: for all images"]
    picture.box("data", (32, top + 46, 466, 34), "", filters)
    width, gap = 109, 10
    for team in range(split.teams):
        x = 32 + team % 4 * (width + gap)
        y = top + 88 + team // 4 * 62
        lines = [f"{split.team} warps", f"image, {_bytes(image)}"]
        picture.box("ours", (x, y, width, 56), f"team {team}", lines)
    picture.text(
        "note",
        32,
        top + 228,
        f"{32 * split.team * split.teams} threads, {_bytes(everything)} of shared memory. "
        "Then the next images.",
    )


def _blocks_of_few(picture: Picture, top: float) -> None:
    """The blocks of threads that compute one image together."""
    both = Convolutions.of(MODEL, "fp16", HOPPER)
    assert both is not None, "lenet is supported"
    split = both.split(1, HOPPER)
    channels = both.second.channels
    own = 16 * -(-(tiles(channels) + 1) // 2 // split.slices)
    _, h, w = MODEL.shapes()[1].output
    groups = h * w // 8
    assert split.team == groups * split.depths, "each warp has a group and a part"
    picture.text("head", 540, top + 22, "few images: an image has four blocks")
    width, gap = 113, 9
    for block in range(split.slices):
        x = 540 + block * (width + gap)
        picture.rect("band", x, top + 34, width, 202)
        picture.text("sub", x + width / 2, top + 52, f"block {block}")
        lines = ["conv1:", f"all {both.first.channels} channels"]
        picture.box("ours", (x + 6, top + 60, width - 12, 42), "", lines)
        picture.text("sub", x + width / 2, top + 120, "conv2: channels")
        found = _range(own * block, own * (block + 1), channels).replace("48 to 49", "48, 49")
        picture.text("sub", x + width / 2, top + 137, found)
        cell = (width - 12) / groups
        for part in range(split.depths):
            for group in range(groups):
                place = (x + 6 + group * cell, top + 146 + part * 17, cell - 2, 15)
                picture.rect("ours", *place)
        picture.text("note centre", x + width / 2, top + 229, f"{split.team} warps")
    assert split.depths == 4, "the note below says so"


def layers() -> Picture:
    """What layer by layer launches for lenet, and how the convolutions are divided."""
    picture = Picture(1040, 560, "What layer by layer launches, and how the convolutions divide.")
    picture.text("head", 24, 34, "layer by layer, lenet: one kernel after another, n images")
    _launches(picture)
    _block_of_many(picture, 282)
    _blocks_of_few(picture, 282)
    picture.text(
        "note",
        20,
        540,
        "fp16 on an H100. A small box is a warp in conv2: its column is for eight pooled pixels, "
        "its row for a quarter of each sum.",
    )
    return picture


def _calls() -> Mapping[tuple[str, str], tuple[float, str]]:
    """(us alone, who computes it) by layer and part, from inspect-mixed.txt."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for line in (DOCS / "benchmarks" / "inspect-mixed.txt").read_text().splitlines():
        cells = re.split(r"\s{2,}", line)
        if len(cells) == 10 and cells[0] != "layer":
            kind = next((one for one in ("cuDNN", "cuBLAS") if cells[3].startswith(one)), "ours")
            found[cells[0], cells[1]] = float(cells[7]), kind.lower()
    return found


def backward() -> Picture:
    """The backward pass on two streams."""
    picture = Picture(1040, 420, "The backward pass: gradients of weights on a second stream.")
    calls = _calls()
    left, scale = 118, 11
    main = [
        ("dense2", "epilogue backward", "bias of dense2"),
        ("dense2", "input gradient", "input of dense2"),
        ("dense1", "epilogue backward", "batch norm, relu of dense1"),
        ("dense1", "input gradient", "input of dense1"),
        ("conv2", "epilogue backward", "batch norm, relu, max of conv2"),
        ("conv2", "input gradient", "input of conv2"),
        ("conv1", "backward", "conv1 with batch norm, relu, max"),
    ]
    after = {"dense2": 1, "dense1": 3, "conv2": 4}  # what a weight's gradient waits for
    picture.text("head", 24, 32, "the backward pass of a step, 256 images, mixed precision")
    picture.text("note", 24, 80, "main stream")
    picture.text("note", 24, 142, "second stream")
    ends: list[float] = []
    time = 0.0
    for number, (layer, part, _) in enumerate(main, 1):
        took, kind = calls[layer, part]
        picture.rect(kind, left + scale * time, 56, scale * took, 40)
        picture.text("title", left + scale * (time + took / 2), 81, str(number))
        time += took
        ends.append(time)
    end, kind = calls["batch", "step"]
    picture.rect(kind, left, 118, scale * end, 40)
    picture.text("title", left + scale * end / 2, 143, "a")
    for letter, (layer, index) in zip("bcd", after.items(), strict=True):
        took, kind = calls[layer, "weight gradient"]
        start = max(ends[index], end)
        picture.rect(kind, left + scale * start, 118, scale * took, 40)
        picture.text("title", left + scale * (start + took / 2), 143, letter)
        picture.line("cut", (left + scale * ends[index], 96), (left + scale * ends[index], 118))
        end = start + took
    joined = max(ends[-1], end)
    took, kind = calls["update", "step"]
    picture.line("cut", (left + scale * joined, 50), (left + scale * joined, 164))
    picture.rect(kind, left + scale * joined, 56, scale * took, 40)
    picture.text("sub", left + scale * (joined + took / 2), 80, "update")
    for tick in range(0, 81, 20):
        picture.line("cut", (left + scale * tick, 168), (left + scale * tick, 176))
        picture.text("note centre", left + scale * tick, 192, f"{tick} us")
    for number, (layer, part, name) in enumerate(main):
        text = f"{number + 1}  {name}, {calls[layer, part][0]:.2f} us"
        picture.text("note", 24 + 330 * (number // 4), 228 + 20 * (number % 4), text)
    picture.text("note", 700, 228, f"a  the next batch, {calls['batch', 'step'][0]:.2f} us")
    for number, layer in enumerate(after, 1):
        text = f"{'abcd'[number]}  weight of {layer}, {calls[layer, 'weight gradient'][0]:.2f} us"
        picture.text("note", 700, 228 + 20 * number, text)
    picture.text(
        "note",
        24,
        330,
        "Green: cuDNN. Yellow: cuBLAS. Blue: kernels of ours, two in 5 (sums, then the gradient) "
        "and several in the update.",
    )
    picture.text("note", 24, 352, "A dashed line is an event that the other stream waits for.")
    picture.text(
        "note",
        24,
        374,
        "The times are those of each call alone (inspect-mixed.txt, H200, cuDNN 9.19), put one "
        "after another: the picture is no trace.",
    )
    picture.text(
        "note",
        24,
        396,
        "In the step they take longer: alone, a call finds its data in the L2 cache.",
    )
    return picture


def folding() -> Picture:
    """A block before and after folding."""
    picture = Picture(1040, 330, "A block as trained, and the same block with batch norm folded.")
    picture.text("head", 24, 34, "the trained network, outside training")
    picture.box("box", (70, 56, 170, 80), "linear", ["x' = w x", "no bias"])
    picture.box(
        "ours",
        (318, 56, 300, 80),
        "batch norm",
        ["y = gamma (x' - m) / √(v + eps) + beta", "m, v: the running mean and variance"],
    )
    picture.box("box", (696, 56, 170, 80), "", ["activation,", "pooling"])
    for start, end, name in ((24, 68, "x"), (240, 316, "x'"), (618, 694, "y"), (866, 930, "")):
        picture.line("arrow", (start, 96), (end, 96))
        picture.text("note centre", (start + end) / 2 - 2, 88, name)
    picture.text("head", 24, 190, "in the weight file, and wherever it is served")
    picture.box(
        "ours",
        (70, 212, 548, 80),
        "linear",
        ["y = (s w) x + (beta - s m)", "s = gamma / √(v + eps), a number for each channel"],
    )
    picture.box("box", (696, 212, 170, 80), "", ["activation,", "pooling"])
    for start, end, name in ((24, 68, "x"), (618, 694, "y"), (866, 930, "")):
        picture.line("arrow", (start, 252), (end, 252))
        picture.text("note centre", (start + end) / 2 - 2, 244, name)
    return picture


PICTURES = {
    "network": network,
    "operation-graph": operation_graph,
    "time-line": time_line,
    "cluster": cluster,
    "layers": layers,
    "backward": backward,
    "folding": folding,
}


def main() -> None:
    """Write every picture."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TOUR / "images"
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
