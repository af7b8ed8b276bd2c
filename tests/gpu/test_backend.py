"""The CUDA backend against float64 on NumPy: every architecture, precision and bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import cupy
import numpy as np
import pytest

from lenet import reference
from lenet.context import ExecutionContext, Target, buckets, open_backend
from lenet.cuda import layers
from lenet.cuda.backend import CudaBackend
from lenet.cuda.convolutions import Convolutions
from lenet.cuda.cublas import Cublas
from lenet.cuda.engine_cache import EngineCache
from lenet.cuda.memory import page_locked
from lenet.cuda.plan import STAGED_ROWS, CudaPlan
from lenet.errors import GoldenMismatch, OutOfDeviceMemory
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool
from lenet.pixels import PIXELS
from lenet.staging import Staging
from lenet.weightfile import WeightFile

PRECISIONS = ("fp32", "tf32", "fp16")
LARGEST, AVERAGE = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3}, 1e-4
LARGEST_BUCKET = 1024
WEIGHTS = Path(__file__).parents[2] / "weights"
FILES = sorted(WEIGHTS.glob("*/*.safetensors"))
DEFAULT = max((WEIGHTS / "lenet").glob("*.safetensors"), key=lambda path: int(path.stem))

AVERAGE_POOL = Pool("average")
OTHERS = [
    Model(
        "unpooled",
        (
            ConvBlock(9, (3, 5), padding=(1, 0), activation=Activation("tanh")),
            ConvBlock(33, (3, 3), stride=(2, 1), padding=(1, 1), activation=Activation("elu", 0.5)),
            ConvBlock(20, (3, 3), dilation=(2, 2), pool=Pool("global_average")),
            DenseBlock(10, activation=IDENTITY),
        ),
    ),
    Model(
        "strided",
        (
            ConvBlock(6, (5, 5), stride=(2, 2), pool=Pool("average", (3, 3), (2, 2), (1, 1))),
            DenseBlock(70, activation=Activation("sigmoid")),
            DenseBlock(40, activation=Activation("clipped_relu", 2.0)),
            DenseBlock(7, activation=IDENTITY),
        ),
    ),
    Model(
        "fused-odd",
        (
            ConvBlock(
                9, (4, 3), padding=(1, 2), activation=Activation("tanh"), pool=Pool("average")
            ),
            ConvBlock(33, (3, 4), padding=(2, 1), activation=Activation("elu"), pool=Pool("max")),
            DenseBlock(300, activation=Activation("sigmoid")),
            DenseBlock(7, activation=IDENTITY),
        ),
    ),
]


@cache
def answers_of(weights, seed, rows):
    """(images, their probabilities in float64)."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), np.uint8)
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    return images, reference.softmax(reference.logits(weights.model, tensors, images))


def opened(precision, cache=None, **options):
    return CudaBackend(precision=precision, cache=cache, **options)


def answer(plan, images):
    return plan.run(images).probabilities


def check_every_bucket(weights, precision):
    """Every image of as many as the largest bucket has, in every bucket."""
    images, want = answers_of(weights, 1, LARGEST_BUCKET)
    with opened(precision) as backend:
        for bucket in buckets(LARGEST_BUCKET):
            plan = backend.plan(weights, bucket)
            starts = range(0, LARGEST_BUCKET, bucket)
            got = np.concatenate([answer(plan, images[at : at + bucket]) for at in starts])
            difference = np.abs(got - want)
            assert difference.max() <= LARGEST[precision], (bucket, plan.strategy)
            assert difference.mean() <= AVERAGE, (bucket, plan.strategy)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probabilities_agree_with_float64_in_every_bucket(name, precision, random_weights):
    check_every_bucket(random_weights(name), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.name)
def test_other_networks_agree_with_float64_in_every_bucket(model, precision, random_weights):
    check_every_bucket(random_weights(model), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_committed_weights_agree_with_float64_in_every_bucket(path, precision):
    check_every_bucket(WeightFile.read(path), precision)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_logits_have_a_relative_error_below_one_millionth(name, random_weights):
    weights, random = random_weights(name), np.random.default_rng()
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    with opened("fp32") as backend:
        for bucket in (1, 32, 64, 128, 256, 1024):
            images = random.integers(0, 256, (bucket, 28, 28), np.uint8)
            exact = reference.logits(weights.model, tensors, images)
            error = backend.plan(weights, bucket).logits(images) - exact
            assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(exact), bucket


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bucket", [1, 8, 64, 1024])
def test_an_image_gets_the_same_bits_whatever_else_is_in_its_bucket(
    precision, bucket, random_weights
):
    weights, random = random_weights("lenet"), np.random.default_rng(2)
    with opened(precision) as backend:
        plan = backend.plan(weights, bucket)
        images = random.integers(0, 256, (bucket, 28, 28), np.uint8)
        whole = answer(plan, images)
        for rows in {1, bucket // 2 + 1, bucket}:
            assert answer(plan, images[:rows]).tobytes() == whole[:rows].tobytes()
        other = random.permutation(bucket)
        assert answer(plan, images[other]).tobytes() == whole[other].tobytes()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_real_digits_are_recognised_as_in_float32(precision, mnist, capsys):
    """Equal digits unless two are about as likely; the accuracy within 0.02 points."""
    images, labels = mnist
    weights = WeightFile.read(DEFAULT)
    starts = range(0, len(images), 1000)
    want = np.concatenate([in_float32(weights, images[at : at + 1000]) for at in starts])
    with opened(precision) as backend:
        for bucket in (8, 1000):
            plan = backend.plan(weights, bucket)
            parts = [answer(plan, images[at : at + bucket]) for at in range(0, len(images), bucket)]
            got = np.concatenate(parts).argmax(axis=1)
            differ = np.flatnonzero(got != want.argmax(axis=1))
            with capsys.disabled():
                sys.stdout.write(
                    f"{precision}, {plan.strategy}: {len(differ)} of 10,000 answered otherwise, "
                    f"{np.count_nonzero(got == labels)} right\n"
                )
            least, best = np.sort(want[differ], axis=1)[:, -2:].T
            assert (best - least < 1e-2).all()
            right = [np.count_nonzero(digits == labels) for digits in (got, want.argmax(axis=1))]
            assert abs(right[0] - right[1]) <= 2


def in_float32(weights, images):
    return reference.softmax(reference.logits(weights.model, weights.tensors, images))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_replaced_weights_answer_as_if_they_had_been_there_first(
    precision, random_weights, tmp_path
):
    # With one cache all backends agree on engines, whose last bits differ.
    cache = EngineCache(tmp_path)
    files = [random_weights("lenet", seed) for seed in (0, 1, 2)]
    images = np.random.default_rng(3).integers(0, 256, (64, 28, 28), np.uint8)
    want = {}
    for file in files:
        with opened(precision, cache) as backend:
            want[file] = {
                n: answer(backend.plan(file, n), images[:n]).tobytes() for n in (1, 16, 64)
            }
    with opened(precision, cache) as backend:
        plans = {n: backend.plan(files[0], n) for n in (1, 16, 64)}
        for file in (files[1], files[0], files[2], files[1]):
            backend.load(file)
            for n, plan in plans.items():
                assert answer(plan, images[:n]).tobytes() == want[file][n]


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="free memory is the whole GPU's: other tests must not run beside this one",
)
def test_after_warm_up_no_batch_takes_device_memory(random_weights):
    taken = []

    class Hook(cupy.cuda.MemoryHook):
        name = "taken"

        def malloc_preprocess(self, **arguments):
            taken.append(arguments)

    target = Target("cuda")
    with ExecutionContext(open_backend(target), random_weights("lenet"), 256) as context:
        context.warm_up()
        images = np.random.default_rng(4).integers(0, 256, (256, 28, 28), np.uint8)
        free, _ = cupy.cuda.runtime.memGetInfo()
        with Hook():
            for count in range(100_000):
                assert context.run(images[: 1 + count % 256]).captured
        assert taken == []
        assert cupy.cuda.runtime.memGetInfo()[0] == free


def test_contexts_answer_side_by_side_as_each_alone(random_weights, tmp_path):
    weights = random_weights("lenet")
    images = np.random.default_rng(5).integers(0, 256, (32, 28, 28), np.uint8)
    # With one cache all backends agree on engines.
    with opened("fp16", EngineCache(tmp_path)) as backend:
        want = {n: answer(backend.plan(weights, n), images[:n]).tobytes() for n in (1, 8, 32)}
    wrong = []

    def work():
        with opened("fp16", EngineCache(tmp_path)) as backend:
            plans = {n: backend.plan(weights, n) for n in want}
            for _ in range(3000):
                for n, plan in plans.items():
                    if answer(plan, images[:n]).tobytes() != want[n]:
                        wrong.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_profiled_backend_runs_without_graphs_and_answers_the_same(precision, random_weights):
    weights = random_weights("lenet")
    images, want = answers_of(weights, 6, 4)
    with opened(precision, profile=True) as backend:
        plan = backend.plan(weights, 4)
        assert not plan.captured
        assert np.abs(answer(plan, images) - want).max() <= LARGEST[precision]


def test_a_context_validates_other_weights_and_switches_between_both(random_weights):
    files = [random_weights("lenet", seed) for seed in (0, 1)]
    images = np.random.default_rng(7).integers(0, 256, (40, 28, 28), np.uint8)
    with ExecutionContext(open_backend(Target("cuda")), files[0], 64) as context:
        context.warm_up()
        before = answer(context, images).tobytes()
        context.stage(files[1])
        assert answer(context, images).tobytes() == before
        context.replace_weights(files[1])
        after = answer(context, images)
        exact = reference.softmax(reference.logits(files[1].model, files[1].tensors, images))
        assert np.abs(after - exact).max() <= LARGEST["fp16"]
        context.replace_weights(files[0])
        assert answer(context, images).tobytes() == before


@pytest.mark.states(
    "metrics",
    "on a GPU: `lenet_graph_replays_total`: hit; `lenet_padding_rows_total`",
    found="batches that were launched: each replayed a graph, and had at least its images",
)
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_a_batch_launched_by_another_thread_answers_as_one_that_is_waited_for(random_weights, rows):
    images = np.random.default_rng(8).integers(0, 256, (rows, 28, 28), np.uint8)
    parts = np.split(images, sorted({rows // 3, rows // 2} - {0}))
    got = []
    with ExecutionContext(open_backend(Target("cuda")), random_weights("lenet"), 128) as context:
        context.warm_up()
        want = answer(context, images).tobytes()

        def work():
            for _ in range(40):  # of which the device times some
                pending = context.launch(parts)
                while not pending.done():
                    pass
                got.append(pending.result())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {result.probabilities.tobytes() for result in got} == {want}
    assert all(result.captured and result.computed_rows >= rows for result in got)
    assert {result.device_s is None for result in got} == {True, False}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, STAGED_ROWS, 1000, LARGEST_BUCKET])
def test_a_batch_in_page_locked_memory_answers_as_one_that_is_copied(
    random_weights, rows, precision
):
    staging = Staging(page_locked(0, 2, LARGEST_BUCKET * PIXELS + 300))
    weights = random_weights("lenet")
    target = Target("cuda", precision=precision)
    with ExecutionContext(open_backend(target, staging), weights, LARGEST_BUCKET) as context:
        context.warm_up()
        for seed in range(20):
            images, want = answers_of(weights, seed, rows)
            room = staging.take(images.nbytes + 300)
            room[300:] = images.tobytes()  # behind the head of a request
            staged = np.frombuffer(room[300:], np.uint8).reshape(images.shape)
            del room
            assert staging.holds(staged)
            assert not staging.holds(images)
            pending = context.launch([staged])
            del staged
            while not pending.done():
                pass
            got = pending.result().probabilities
            assert got.tobytes() == answer(context, images).tobytes()
            assert np.abs(got - want).max() <= LARGEST[precision]


def test_a_second_graph_that_writes_nothing_is_found_when_the_context_warms_up(
    random_weights, monkeypatch
):
    monkeypatch.setattr(CudaPlan, "_captured_without_copy", lambda _plan: lambda: None)
    staging = Staging(page_locked(0, 2, STAGED_ROWS * PIXELS))
    backend = open_backend(Target("cuda"), staging)
    with (
        ExecutionContext(backend, random_weights("lenet"), STAGED_ROWS) as context,
        pytest.raises(GoldenMismatch, match=f"in bucket {STAGED_ROWS};"),
    ):
        context.warm_up()


def test_a_network_that_overflows_in_halves_is_refused_with_the_precision_that_helps(
    random_weights,
):
    weights = random_weights("mlp")
    tensors = {name: np.float32(1e5) * tensor for name, tensor in weights.tensors.items()}
    logits = reference.logits(weights.model, tensors, weights.golden.images).astype(np.float32)
    golden = replace(weights.golden, logits=logits)
    large = replace(weights, tensors=tensors, golden=golden)
    with (
        ExecutionContext(open_backend(Target("cuda")), large, 256) as context,
        pytest.raises(GoldenMismatch, match="overflow in fp16; serve it with --precision tf32"),
    ):
        context.warm_up()
    with ExecutionContext(open_backend(Target("cuda", precision="tf32")), large, 256) as context:
        context.warm_up()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["lenet", "cnn-32-64"])
def test_cudnn_computes_the_convolutions_where_our_kernels_do_not_compile(
    random_weights, monkeypatch, caplog, name, precision
):
    macros = Convolutions.macros
    broken = {"TEAMS": "planted"}
    monkeypatch.setattr(Convolutions, "macros", lambda self, split: macros(self, split) | broken)
    weights = random_weights(name)
    images, want = answers_of(weights, 3, 64)
    with opened(precision) as backend:
        plans = backend.plans(weights, (16, 64))
        assert np.abs(answer(plans[64], images) - want).max() <= LARGEST[precision]
        other = random_weights(name, 5)  # a reload packs its weights for cuDNN, too
        backend.load(other)
        images, want = answers_of(other, 3, 16)
        assert np.abs(answer(plans[16], images) - want).max() <= LARGEST[precision]
    (record,) = caplog.records
    assert "cuDNN computes its convolutions instead of our kernels, after: " in record.message


def test_a_dense_layer_for_which_cublas_has_no_algorithm_is_computed_by_our_kernel(
    random_weights, monkeypatch, caplog
):
    monkeypatch.setattr(Cublas, "has_dense", lambda *_: False)
    layers._report.cache_clear()
    weights = random_weights("mlp")
    images, want = answers_of(weights, 3, 1024)
    with opened("fp16") as backend:
        plans = backend.plans(weights, (512, 1024))
        assert np.abs(answer(plans[1024], images) - want).max() <= LARGEST["fp16"]
    (record,) = caplog.records
    assert record.message == "dense.cu computes dense1: cuBLAS has no product with its epilogue"


def test_a_profiled_backend_launches_nothing_by_itself(random_weights):
    with opened("fp16", profile=True) as backend:
        plan = backend.plan(random_weights("lenet"), 2)
        assert plan.launch([np.zeros((1, 28, 28), np.uint8)] * 2) is None


@pytest.mark.states(
    "metrics",
    "on a GPU: `lenet_device_duration_seconds`: one batch in sixteen",
    found="times that are there, of 48 batches",
)
def test_one_batch_in_sixteen_is_timed_by_the_device(random_weights):
    with opened("fp16") as backend:
        plan = backend.plan(random_weights("lenet"), 4)
        times = [plan.run(np.zeros((4, 28, 28), np.uint8)).device_s for _ in range(48)]
        measured = [time for time in times if time is not None]
        assert len(measured) == 3
        assert all(1e-6 < time < 1e-2 for time in measured)


def test_a_poisoned_device_fails_for_good():
    """Runs in a process of its own, which is lost with the device."""
    script = """
import numpy as np
from lenet.context import Target, open_backend
from lenet.errors import DeviceError
backend = open_backend(Target("cuda"))
for attempt in range(2):
    try:
        backend.poison()
    except DeviceError as exc:
        assert exc.sticky, exc
        print("sticky", flush=True)
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "sticky\n" * 2, done.stderr


def test_a_network_too_large_for_the_device_does_not_fit_into_its_memory(random_weights):
    wide = Model("wide", (ConvBlock(64, (3, 3)), DenseBlock(10, activation=IDENTITY)))
    with (
        opened("fp32") as backend,
        pytest.raises(OutOfDeviceMemory, match="preparing 1048576 rows"),
    ):
        backend.plan(random_weights(wide), 1 << 20)  # 181 GB behind the convolution


@pytest.mark.states(
    "metrics",
    "on a GPU: `lenet_workspace_bytes`, a part of `lenet_device_bytes`",
    found="the 32 MiB that cuBLAS is given",
)
def test_cublas_takes_its_workspace_when_a_hidden_layer_has_many_rows(random_weights):
    with opened("fp16") as backend:
        backend.plan(random_weights("mlp"), 16)
        assert backend.workspace_bytes == 0
        backend.plan(random_weights("mlp"), 256)
        assert backend.workspace_bytes == 32 << 20 < backend.device_bytes
