"""Numbers that documents repeat are those of docs/benchmarks, rounded, wherever they stand."""

from __future__ import annotations

import json
import math
import re
import statistics
import zlib
from pathlib import Path

import pytest

from service.process import descriptors
from service.process.shared_folder import FILE_BYTES
from service.settings import Settings
from tests.documented import documented
from trainer.settings import Recipe

ROOT = Path(__file__).parents[1]
PAGES = {
    path: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "reference" not in path.parts
}


def read(name):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())


ENGINE, TRAINING, HTTP = read("engine"), read("training"), read("http")["cases"]
BESIDE_JAX = {(one["rows"], one["precision"]): one for one in read("jax-h200")["buckets"]}
CHANGE = (ROOT / "docs/benchmarks/before-after-h100.txt").read_text()
SURE = 1 - 0.9 * Recipe.model_fields["smoothing"].default
"""The target of the right one of ten classes."""
KIB = 1024
FIELDS = documented("header fields of a request; bytes of its target")
CREDIT = documented("frames that bring no request further")
FILES = sorted((ROOT / "weights").glob("*/*.safetensors"))
DEFLATED_BYTES = sum(len(zlib.compress(path.read_bytes())) for path in FILES)
"""What the committed weight files take in a wheel."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)


def default(name):
    """The default of a setting of the service."""
    return Settings.model_fields[name].default


def bucket(rows, precision="fp16"):
    """A bucket of `lenet`."""
    (found,) = [
        one for one in ENGINE["buckets"] if (one["rows"], one["precision"]) == (rows, precision)
    ]
    return found


def torch(rows, precision="fp16"):
    """The fastest of PyTorch's times."""
    times = bucket(rows, precision)["torch"]
    return min(filter(None, (times[f"{way}_us"] for way in ("eager", "graph", "compile"))))


def ours_and_others(rows, precision):
    """Times of `lenet` on an H200 in us: ours, by JAX, and by PyTorch with a CUDA graph."""
    found = BESIDE_JAX[rows, precision]
    return [found["device_us"], found["jax"]["jit_us"], found["torch"]["graph_us"]]


def changed(precision, rows):
    """(before, after) of `lenet` on the device."""
    (part,) = re.findall(rf"^lenet {precision}\n((?: .*\n)+)", CHANGE, re.MULTILINE)
    (found,) = re.findall(rf"^ +{rows} \w+ +([\d.]+) -> \w+ +([\d.]+) ", part, re.MULTILINE)
    return tuple(map(float, found))


def step_us(label):
    """The median of the rounds of a training step."""
    (rounds,) = re.findall(rf"^{label}  (.*)$", CHANGE, re.MULTILINE)
    return statistics.median(map(float, rounds.split(", ")))


def contexts_per_s(contexts):
    """Images a second from host to host, in the largest batches."""
    (found,) = [
        one["images_per_s"]
        for one in ENGINE["pool_all"]
        if (one["contexts"], one["rows"]) == (contexts, 8192)
    ]
    return found


def cells(label, values):
    """A row of a table, a claim for each of its columns."""
    row = rf"\| {label} \|" + "".join(r" ([\d,.]+) \|" for _ in values)
    return [(row, values)]


CLAIMS = [
    *(
        claim
        for precision, name in (("fp32", "fp32"), ("tf32", "TF32"), ("fp16", "fp16"))
        for label, values in (
            (f"{name} on the device, us", [bucket(rows, precision)["device_us"] for rows in ROWS]),
            (f"PyTorch's fastest in {name}, us", [torch(rows, precision) for rows in ROWS]),
            (
                f"{name} from host to host, us",
                [bucket(rows, precision)["host_us"] for rows in ROWS],
            ),
        )
        for claim in cells(label, values)
    ),
    *cells("a step, us", [TRAINING["step_us"][name] for name in ("fp32", "tf32", "mixed")]),
    (
        r"It took ([\d.]+), ([\d.]+) and ([\d.]+) us on the device for 8, 16 and 32 images",
        [changed("fp16", rows)[0] for rows in (8, 16, 32)],
    ),
    (
        r"one image on (?:the device|an H100), fp16 \| ([\d,.]+) us",
        [bucket(1)["device_us"]],
    ),
    (r"one image on an H100, fp16 \| [\d.]+ us \| ([\d,.]+) us", [torch(1)]),
    (r"one image on the device, fp32 \| ([\d,.]+) us", [bucket(1, "fp32")["device_us"]]),
    (
        r"batch of 8,192 images on the device, fp32 \| ([\d,.]+) us, ([\d,.]+) million",
        [ours_and_others(8192, "fp32")[0], 8192 / ours_and_others(8192, "fp32")[0]],
    ),
    (
        r"\| 32 images on an H100, fp32 \| ([\d,.]+) us \| ([\d,.]+) us",
        [bucket(32, "fp32")["device_us"], torch(32, "fp32")],
    ),
    *(
        (
            rf"\| 8,192 images on an H200, {precision} \| ([\d,.]+) us \| ([\d,.]+) us: JAX; "
            r"([\d,.]+): PyTorch's CUDA graph",
            ours_and_others(8192, precision),
        )
        for precision in ("fp16", "fp32")
    ),
    *(
        claim
        for precision, name in (("fp16", "fp16"), ("tf32", "TF32"), ("fp32", "fp32"))
        for column, who in enumerate(("ours", "JAX", "PyTorch's CUDA graph"))
        for claim in cells(
            f"{name}, {who}",
            [ours_and_others(rows, precision)[column] for rows in (1, 32, 1024, 8192)],
        )
    ),
    *(
        claim
        for precision, name in (("fp32", "fp32"), ("tf32", "TF32"), ("fp16", "fp16"))
        for side, when in enumerate(("before", "after"))
        for claim in cells(
            f"{name}, {when}",
            [changed(precision, rows)[side] for rows in (1, 32, 128, 1024, 4096)],
        )
    ),
    (
        r"batch of 8,192 images on the device, fp16 \| ([\d,.]+) us, ([\d,.]+) million",
        [bucket(8192)["device_us"], 8192 / bucket(8192)["device_us"]],
    ),
    (
        r"8,192 images on an H100, fp16 \| ([\d,.]+) us \| ([\d,.]+) us",
        [bucket(8192)["device_us"], torch(8192)],
    ),
    (r"training step of 256 images[^|]*\| ([\d,.]+) us", [TRAINING["step_us"]["mixed"]]),
    (
        r"\| ([\d,.]+) us: PyTorch's CUDA graph in TF32",
        [TRAINING["torch_beside_step"]["graph_us"]],
    ),
    (
        r"PyTorch took ([\d.]+) of its graph's time with `torch\.compile`",
        [TRAINING["torch"]["compile_us"] / TRAINING["torch"]["graph_us"]],
    ),
    (
        r"of-its-patches\.md\) ([\d,.]+) and ([\d,.]+) us on an H100",
        [step_us(r"before \(\w+\)"), step_us("for none: both are cuDNN's")],
    ),
    (
        r": ([\d,.]+) us eager, ([\d,.]+) us as a CUDA graph, ([\d,.]+) us with `torch\.compile`",
        [TRAINING["torch"][f"{way}_us"] for way in ("eager", "graph", "compile")],
    ),
    (
        r"Two contexts together take ([\d,.]+) million images a second from page-locked memory and "
        r"back there, in batches of 8,192; one takes ([\d,.]+) million, and four take "
        r"([\d,.]+) million, ([\d.]+) of",
        [
            *(contexts_per_s(contexts) / 1e6 for contexts in (2, 1, 4)),
            contexts_per_s(4) / ENGINE["limits"]["copy_images_per_s"],
        ],
    ),
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
        r"about ([\d.]+) sure at most, and the loss that a run prints does not go below ([\d.]*\d)",
        [SURE, -SURE * math.log(SURE) - (1 - SURE) * math.log((1 - SURE) / 9)],
    ),
    # security.md repeats limits of operations.md, which have tests of their own.
    (
        r"by headers \| ([\d,]+) fields, a target of ([\d,]+) KiB and ([\d,]+) parameters",
        [FIELDS[0], FIELDS[1] / KIB, FIELDS[2]],
    ),
    (
        r"a connection \| (\d+) s for headers, (\d+) s between requests, (\d+) s without reading",
        [documented("bytes of a request's headers")[1], *documented("time without a request")],
    ),
    (
        r"over HTTP/2 \| (\d+) open requests of (\d+) KiB of headers; (\d+) MiB that is received "
        r"and not used; (\d+) s for a header block[^:|]*: ([\d,]+), and (\d+) a second",
        [
            *documented("open requests of a connection over HTTP/2"),
            documented("header fields of a request over HTTP/2")[0] / KIB,
            documented("bytes of a request over HTTP/2")[2] / KIB**2,
            *documented("time in which a header block"),
            CREDIT[0],
            1 / CREDIT[1],
        ],
    ),
    (
        r"of a network of at most ([\d,]+) operations[^|]*; (\d+) wait",
        [
            documented("images in a request for an explanation")[1],
            *documented("explanations that wait"),
        ],
    ),
    (
        r"from 4 KiB on over HTTP/2: (\d+) MiB in a worker",
        [documented("bytes that are received and not used, of all")[0] / KIB**2],
    ),
    (
        r"`--max-in-flight-bytes` \((\d+) MiB\)[^|]*`--max-queue-rows` x 784 bytes \((\d+) MiB\)",
        [default("max_in_flight_bytes") / KIB**2, default("max_queue_rows") * 784 / KIB**2],
    ),
    (r"(\d+) KiB a worker there", [FILE_BYTES / KIB]),
    (r"8\.5 MB, of which ([\d.]+) are the six weight files", [DEFLATED_BYTES / 1e6]),
    (
        r"fewer than (\d+), or, with a supervisor \([^)]*\), than \d+ and (\d+) for each worker",
        [descriptors.LEAST, descriptors.LEAST_PER_WORKER],
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


@pytest.mark.states(
    "documents",
    "limits that security.md repeats; sizes of weights and of metrics' files; descriptors",
    found="the tested limits of operations.md, defaults of settings, files, deflated as in a wheel",
)
@pytest.mark.states(
    "documents",
    "measured numbers in README and docs: times, rates, accuracies",
    found="the JSON and text that the benchmarks wrote, in docs/benchmarks, rounded alike",
)
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


def test_what_uvicorn_costs_is_what_was_measured():
    found = read("http-uvicorn")
    page = PAGES[ROOT / "docs/benchmarks.md"]
    for case, servers in found["cases"].items():
        ours, other = (servers[name]["cpu_us"] for name in ("ours", "against"))
        median, low, high = (1 / ratio for ratio in found["ratios"][case]["cpu_us"])
        times = f"{median:.1f} ({high:.1f} to {low:.1f})"
        assert f"| `{case}` | {ours:,.0f} | {other:,.0f} | {times} |" in page
