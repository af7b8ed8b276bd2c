"""Numbers that documents repeat are those of docs/benchmarks, rounded, wherever they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    path: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "reference" not in path.parts
}


def read(name):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())


ENGINE, TRAINING, HTTP = read("engine"), read("training"), read("http")["cases"]
ROWS = (1, 8, 64, 256, 1024, 8192)


def bucket(rows, precision="fp16"):
    (found,) = [
        one for one in ENGINE["buckets"] if (one["rows"], one["precision"]) == (rows, precision)
    ]
    return found


def torch(rows, precision="fp16"):
    """The fastest of PyTorch's times."""
    times = bucket(rows, precision)["torch"]
    return min(filter(None, (times[f"{way}_us"] for way in ("eager", "graph", "compile"))))


def cells(label, values):
    """A row of a table, a claim for each of its columns."""
    row = rf"\| {label} \|" + "".join(r" ([\d,.]+) \|" for _ in values)
    return [(row, values)]


CLAIMS = [
    *cells("the network on the device, us", [bucket(rows)["device_us"] for rows in ROWS]),
    *cells(
        r"PyTorch's fastest of eager, CUDA graph and `torch\.compile`, us",
        [torch(rows) for rows in ROWS],
    ),
    *cells("host to host, us", [bucket(rows)["host_us"] for rows in ROWS]),
    *cells(
        r"a step, us \([^)]*\)", [TRAINING["step_us"][name] for name in ("fp32", "tf32", "mixed")]
    ),
    (
        r"It takes ([\d.]+), ([\d.]+) and ([\d.]+) us on the device for 8, 16 and 32 images",
        [bucket(rows)["device_us"] for rows in (8, 16, 32)],
    ),
    (
        r"one image on the (?:device|H200), fp16 \| ([\d,.]+) us",
        [bucket(1)["device_us"]],
    ),
    (r"one image on the H200, fp16 \| [\d.]+ us \| ([\d,.]+) us", [torch(1)]),
    (
        r"batch of 8,192 images on the device, fp16 \| ([\d,.]+) us, ([\d,.]+) million",
        [bucket(8192)["device_us"], 8192 / bucket(8192)["device_us"]],
    ),
    (
        r"8,192 images on the H200, fp16 \| ([\d,.]+) us \| ([\d,.]+) us",
        [bucket(8192)["device_us"], torch(8192)],
    ),
    (
        r"8,192 images on the H200, \*\*fp32\*\* \| ([\d,.]+) us \| \*\*([\d,.]+) us",
        [bucket(8192, "fp32")["device_us"], torch(8192, "fp32")],
    ),
    (
        r"training step of 256 images[^|]*\| ([\d,.]+) us(?! \(mixed\) \|)",
        [TRAINING["step_us"]["mixed"]],
    ),
    (
        r"([\d,.]+) us \(mixed\) \| ([\d,.]+) us: PyTorch's CUDA graph",
        [TRAINING["step_us"]["mixed"], TRAINING["torch_beside_step"]["graph_us"]],
    ),
    (
        r": ([\d,.]+) us eager, ([\d,.]+) us as a CUDA graph, ([\d,.]+) us with `torch\.compile`",
        [TRAINING["torch"][f"{way}_us"] for way in ("eager", "graph", "compile")],
    ),
    (r"Two contexts together take ([\d,.]+) million", [ENGINE["pool"]["images_per_s"] / 1e6]),
    (
        r"is ready ([\d,.]+) s after the command, and ([\d,.]+) s after it",
        [ENGINE["cold_start_s"]["warm_cache"], ENGINE["cold_start_s"]["no_cache"]],
    ),
    (
        r"took ([\d,.]+) s \(sd ([\d,.]+), 30 seeds\) and reached ([\d,.]+) %",
        [TRAINING["time_to_99"][name] for name in ("mean_s", "sd_s", "mean_accuracy")],
    ),
    (
        r"([\d.]+) %(?:\*\* \(sd [\d.]+\) in at most [\d.]+ s)? in mixed precision",
        [TRAINING["accuracy_mixed"]["mean"]],
    ),
    (
        r"HTTP, JSON, 32 connections, two cores, two workers \| ([\d,.]+) a second "
        r"\| ([\d,.]+): mosec; ([\d,.]+): FastAPI with ONNX Runtime; ([\d,.]+): an ASGI",
        [HTTP["json_32"][name]["rps"] for name in ("ours_2", "mosec", "fastapi_2", "floor")],
    ),
    (
        r"HTTP, raw, 64 images a request, two cores, two workers \| ([\d,.]+) a second "
        r"\| ([\d,.]+): mosec; ([\d,.]+): FastAPI with ONNX Runtime",
        [HTTP["raw_64x4"][name]["rps"] for name in ("ours_2", "mosec", "fastapi_2")],
    ),
]


@pytest.mark.parametrize(("pattern", "values"), CLAIMS, ids=[pattern for pattern, _ in CLAIMS])
def test_a_number_is_the_measured_one_wherever_it_stands(pattern, values):
    found = [
        (path.name, match.groups())
        for path, text in PAGES.items()
        for match in re.finditer(pattern, text)
    ]
    assert found, "it stands nowhere"
    for name, groups in found:
        for text, value in zip(groups, values, strict=True):
            decimals = len(text.partition(".")[2])
            assert float(text.replace(",", "")) == round(value, decimals), name
