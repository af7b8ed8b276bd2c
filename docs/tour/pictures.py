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

from lenet.cuda import fused_network
from lenet.cuda.packing import layout
from lenet.model import ConvBlock, DenseBlock, named

TOUR = Path(__file__).parent
DOCS = TOUR.parent
MODEL = named("lenet").folded

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
        kind = "cudnn" if shape.name in ("conv2", "dense1") else "ours"
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
        "Shapes are c x h x w. Layer by layer in fp16, cuDNN computes what is green (of conv2 only "
        "the convolution), our kernels the rest.",
    )
    return picture


def _axes(shape: Sequence[int]) -> tuple[str, str]:
    """Dimensions (n c h w) and strides of channels-last images, as `lenet.cuda.graphs` says."""
    h, w, c = shape
    return f"dim n, {c}, {h}, {w}", f"stride {h * w * c}, 1, {w * c}, {c}"


def operation_graph() -> Picture:
    """The graphs of conv2 and dense1."""
    picture = Picture(1040, 430, "The operation graphs of conv2 and of dense1.")
    packed = layout(MODEL)
    k, r, s, c = packed["conv2.weight"].shape
    _, shape, dense, _ = MODEL.shapes()
    source, result = (*shape.input[1:], c), (*shape.linear[1:], k)
    picture.text("head", 24, 34, "conv2: a graph of one operation, then a kernel of ours")
    picture.box("data", (24, 56, 196, 66), "INPUT, half", _axes(source))
    weights = f"dim {k}, {c}, {r}, {s}", f"stride {r * s * c}, 1, {s * c}, {c}"
    picture.box("data", (24, 136, 196, 66), "WEIGHT, half", weights)
    picture.box("cudnn", (272, 90, 156, 78), "conv_fprop", ["products of halves,", "sums float"])
    picture.line("arrow", (220, 89), (246, 89), (246, 116), (270, 116))
    picture.line("arrow", (220, 169), (246, 169), (246, 142), (270, 142))
    picture.box("data", (480, 96, 196, 66), "OUTPUT, half", _axes(result))
    picture.line("arrow", (428, 129), (478, 129))
    picture.box("ours", (716, 90, 160, 78), "epilogue_forward", ["float: + bias, relu,", "max 2x2"])
    picture.line("arrow", (676, 129), (714, 129))
    pooled = ", ".join(map(str, ("n", *shape.output[1:], k)))
    picture.box("data", (912, 98, 112, 62), "half", [pooled])
    picture.line("arrow", (876, 129), (910, 129))
    picture.rect("band", 14, 46, 672, 166)
    picture.text("note right", 684, 42, "what cuDNN gets")

    units, inputs = packed["dense1.weight"].shape
    assert inputs == math.prod((*dense.input[1:], k)), "dense1 reads conv2's padded output"
    picture.text("head", 24, 250, "dense1: a graph of three operations, fused by cuDNN")
    strides = f"stride n*{inputs}, {inputs}, 1", f"stride {units * inputs}, 1, {inputs}"
    picture.box("data", (24, 268, 170, 64), "INPUT, half", [f"dim 1, n, {inputs}", strides[0]])
    weights = [f"dim 1, {inputs}, {units}", strides[1]]
    picture.box("data", (24, 342, 170, 64), "WEIGHT, half", weights)
    picture.box("cudnn", (236, 306, 96, 60), "matmul")
    picture.line("arrow", (194, 300), (214, 300), (214, 326), (234, 326))
    picture.line("arrow", (194, 374), (214, 374), (214, 346), (234, 346))
    picture.box("cudnn", (426, 306, 110, 60), "bias")
    picture.line("arrow", (332, 336), (424, 336))
    picture.box("data", (426, 386, 110, 30), "BIAS, half")
    picture.line("arrow", (481, 386), (481, 368))
    picture.box("cudnn", (640, 306, 110, 60), "relu")
    picture.line("arrow", (536, 336), (638, 336))
    for x in (377, 587):
        picture.text("note centre", x, 328, "float, not")
        picture.text("note centre", x, 354, "in memory")
    picture.box("data", (806, 306, 150, 60), "OUTPUT, half", [f"dim 1, n, {units}"])
    picture.line("arrow", (750, 336), (804, 336))
    picture.rect("band", 14, 262, 952, 160)
    return picture


def _strategies_us() -> Mapping[int, tuple[float, float]]:
    """(fused, layer by layer) by rows, from decision 13."""
    text = (DOCS / "decisions" / "0013-two-strategies-for-a-bucket.md").read_text()
    found = re.findall(r"(\d+) rows (\d+\.\d)(?: us fused,| and) (\d+\.\d)", text)
    assert len(found) == 3, "decision 13 states three batch sizes"
    return {int(rows): (float(fused), float(layers)) for rows, fused, layers in found}


def time_line() -> Picture:
    """Both strategies, host to host."""
    picture = Picture(1040, 386, "Times of the fused network and of layer by layer by batch size.")
    left, scale = 110, 15.0
    steps = ("copy in", "conv1", "conv2", "epilogue", "dense1", "dense2", "copy out")
    kinds = ("box", "ours", "cudnn", "ours", "cudnn", "ours", "box")
    picture.text("head", 24, 32, "host to host, fp16, H200, microseconds")
    y = 52
    for rows, (fused_us, layers_us) in _strategies_us().items():
        picture.text("note", 24, y + 39, f"{rows} images")
        picture.box("ours", (left, y, scale * fused_us, 28), "")
        picture.text("sub", left + scale * fused_us / 2, y + 18, "one kernel, no copies")
        picture.text("note", left + scale * fused_us + 8, y + 18, f"{fused_us} fused network")
        width = scale * layers_us / len(steps)
        picture.rect("box", left, y + 34, scale * layers_us, 28)
        for number, (step, kind) in enumerate(zip(steps, kinds, strict=True)):
            x = left + number * width
            picture.rect(kind, x, y + 34, width, 28)
            picture.text("sub", x + width / 2, y + 52, step)
        picture.text("note", left + scale * layers_us + 8, y + 52, f"{layers_us} layer by layer")
        y += 86
    picture.line("arrow", (left, y - 6), (left + scale * 55, y - 6))
    for tick in range(0, 51, 10):
        picture.line("cut", (left + scale * tick, y - 10), (left + scale * tick, y - 2))
        picture.text("note centre", left + scale * tick, y + 12, str(tick))
    picture.text(
        "note",
        24,
        y + 36,
        "The length of a bar was measured: one launch and the wait for it, by the host's clock "
        "(decision 13). Its steps were not: they are drawn equally wide.",
    )
    picture.text(
        "note", 24, y + 56, "Green: cuDNN. Blue: kernels of ours. Each bar is one graph launch."
    )
    return picture


def _range(first: int, end: int, real: int) -> str:
    """Numbers from `first` to `end` - 1, as far as they are not padding."""
    return "none" if first >= real else f"{first} to {min(end, real) - 1}"


def cluster() -> Picture:
    """What each block of the cluster computes of one image."""
    picture = Picture(1040, 432, "A cluster of eight blocks: what each holds of one image.")
    conv1, conv2, hidden, last = MODEL.blocks
    assert isinstance(conv1, ConvBlock), "lenet begins with a convolution"
    assert isinstance(conv2, ConvBlock), "lenet has two"
    assert isinstance(hidden, DenseBlock), "then a hidden layer"
    assert isinstance(last, DenseBlock), "then the logits"
    own_units = -(-hidden.units // (16 * fused_network.CLUSTER)) * 16
    picture.text("head", 24, 32, "one image, a cluster of eight blocks, time runs downwards")
    width, left, gap = 108, 112, 6
    for y, name in ((66, "conv1"), (128, "conv2"), (238, "hidden"), (300, "logits")):
        picture.text("note", 24, y + 26, name)
    for block in range(fused_network.CLUSTER):
        x = left + block * (width + gap)
        middle = x + width / 2
        channels = _range(8 * block, 8 * block + 8, conv2.channels)
        units = _range(own_units * block, own_units * (block + 1), hidden.units)
        picture.text("sub", middle, 58, f"block {block}")
        picture.box("ours", (x, 66, width, 44), "", [f"all {conv1.channels}", "channels"])
        picture.line("arrow", (middle, 110), (middle, 126))
        lines = ["channels", channels] if channels != "none" else ["no channel", "is left"]
        picture.box("ours", (x, 128, width, 44), "", lines)
        picture.line("arrow", (middle, 172), (middle, 190))
        picture.line("arrow", (middle, 220), (middle, 236))
        picture.box("ours", (x, 238, width, 44), "", ["units", units])
        picture.line("arrow", (middle, 282), (middle, 298))
        picture.box("ours", (x, 300, width, 44), "", ["its part of", f"{last.units} logits"])
        picture.line("cut", (middle, 344), (middle, 360))
    right = left + fused_network.CLUSTER * (width + gap) - gap
    exchange = "barrier: all have started. Each writes its channels to all eight. Barrier: all of "
    picture.box("box", (left, 192, right - left, 28), "", [f"{exchange}conv2's output is there"])
    picture.line("cut", (left + width / 2, 360), (right - width / 2, 360))
    picture.line("arrow", (left + width / 2, 360), (left + width / 2, 374))
    picture.box("ours", (left, 376, 2 * width + gap, 44), "", ["sum in a fixed order,", "softmax"])
    x = left + 2 * width + 20
    picture.text("note", x, 394, "Barrier: every part has arrived in the shared memory of block 0.")
    picture.text("note", x, 412, "The other blocks end.")
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
    left, scale = 118, 8.7
    main = [
        ("dense2", "epilogue backward", "bias of dense2"),
        ("dense2", "input gradient", "input of dense2"),
        ("dense1", "epilogue backward", "batch norm, relu of dense1"),
        ("dense1", "input gradient", "input of dense1"),
        ("conv2", "epilogue backward", "batch norm, relu, max of conv2"),
        ("conv2", "input gradient", "input of conv2"),
        ("conv1", "epilogue backward", "batch norm, relu, max of conv1"),
    ]
    after = {"dense2": 0, "dense1": 2, "conv2": 4, "conv1": 6}  # what a weight's gradient waits for
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
    end = 0.0
    for letter, (layer, index) in zip("abcd", after.items(), strict=True):
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
    for tick in range(0, 101, 20):
        picture.line("cut", (left + scale * tick, 168), (left + scale * tick, 176))
        picture.text("note centre", left + scale * tick, 192, f"{tick} us")
    for number, (layer, part, name) in enumerate(main):
        text = f"{number + 1}  {name}, {calls[layer, part][0]:.2f} us"
        picture.text("note", 24 + 330 * (number // 4), 228 + 20 * (number % 4), text)
    for number, layer in enumerate(after):
        text = f"{'abcd'[number]}  weight of {layer}, {calls[layer, 'weight gradient'][0]:.2f} us"
        picture.text("note", 700, 228 + 20 * number, text)
    picture.text(
        "note",
        24,
        330,
        "Green: cuDNN. Yellow: cuBLAS. Blue: kernels of ours, two each in 3, 5 and 7 (sums, then "
        "the gradient) and several in the update.",
    )
    picture.text("note", 24, 352, "A dashed line is an event that the other stream waits for.")
    picture.text(
        "note",
        24,
        374,
        "The times are those of each call alone (inspect-mixed.txt, H200, cuDNN 9.14), put one "
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
