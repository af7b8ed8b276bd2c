"""Each call of a real step is recorded with its shape and engine, and timed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lenet.cuda.engine_cache import default_cache
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, named
from trainer.commands import run
from trainer.inspect import measure, outline

WIDE = Model("wide", (ConvBlock(8, (8, 8)), DenseBlock(10, activation=IDENTITY)))
MEASURED = re.compile(r"(-|\d+) +(\d+\.\d+) +(\d+\.\d+) +(-|eng\S+|cuBLAS's own choice)$")
"""Workspace, time, share of the roofline, engine."""


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
@pytest.mark.parametrize("model", [named("lenet"), named("mlp"), WIDE], ids=lambda m: m.name)
def test_every_call_is_timed_and_has_the_engine_of_its_shape(
    model, precision, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, _, *rows, sums, _, rates = measure(model, 32, precision).splitlines()
    assert "cuDNN 9" in device
    cached = default_cache().glob("[!.]*")
    chosen = [json.loads(path.read_bytes().split(b"\n")[0])["name"] for path in cached]
    # A step on the CPU predicts the shapes, operations and bytes of the GPU's arrays.
    _, *predicted = outline(model, 32, precision).splitlines()
    times = []
    for row, line in zip(rows, predicted, strict=True):
        assert row.split()[: len(line.split())] == line.split()
        workspace, time_us, share, engine = MEASURED.search(row).groups()
        times.append(float(time_us))
        assert float(share) > 0 or float(time_us) > 1
        assert (workspace == "-") == (engine == "-") == ("our " in row)
        assert ("cuDNN" in row) == (engine in chosen)
    assert min(times) > 0
    # No step is faster than its slowest call.
    assert float(sums.split("the whole captured step ")[1].split()[0]) > 0.9 * max(times)
    assert "TFLOP/s" in rates


def test_a_weight_file_is_shown_with_who_computes_its_layers(capsys):
    path = Path(__file__).parents[2] / "weights" / "lenet" / "2.safetensors"
    for by, last in (("auto", "dense_softmax"), ("cudnn", "cublas")):
        assert run(["inspect", str(path), "--precision", "tf32", "--convolutions", by], {}) == 0
        heading, titles, first, *_, largest = capsys.readouterr().out.splitlines()[-13:]
        assert heading == f"served on GPU 0 in tf32, with --convolutions {by}, by:"
        assert titles.split() == ["images", "conv1", "conv2", "dense1", "dense2"]
        assert first.split()[0] == "1"
        assert (largest.split()[0], largest.split()[-1]) == ("1024", last)
