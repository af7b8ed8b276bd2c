"""The CUDA backend against float64 on NumPy: every architecture, precision and bucket.

By our kernels and by cuDNN and cuBLAS.
"""

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
from lenet.cuda import kernels, layers
from lenet.cuda.backend import CudaBackend
from lenet.cuda.cublas import CublasLt
from lenet.cuda.engine_cache import EngineCache
from lenet.cuda.kernels import Kernel
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
        "fused-by-cudnn",
        (
            ConvBlock(20, (3, 3), stride=(2, 2)),
            ConvBlock(50, (3, 3), padding=(1, 1)),
            DenseBlock(40, activation=Activation("tanh")),
            DenseBlock(10, activation=IDENTITY),
        ),
    ),
    Model(
        "fused-odd",
        (
            ConvBlock(9, (4, 3), padding=(1, 2), activation=Activation("tanh"), pool=AVERAGE_POOL),
            ConvBlock(33, (3, 4), padding=(2, 1), activation=Activation("elu"), pool=Pool("max")),
            DenseBlock(300, activation=Activation("sigmoid")),
            DenseBlock(7, activation=IDENTITY),
        ),
    ),
    *(
        Model(
            f"{classes}-classes",
            (
                ConvBlock(6, (5, 5), pool=Pool("max")),
                DenseBlock(120),
                DenseBlock(classes, activation=IDENTITY),
            ),
        )
        for classes in (33, 47, 64)
    ),
]


OURS = {
    *("convolutions", "first_convolution", "fused_network"),
    *("dense", "dense_halves", "dense_softmax"),
}
"""Our kernels that compute layers, by their names in CUDA."""


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Where the tuned backends keep their choices."""
    return EngineCache(tmp_path_factory.mktemp("engines"))


@pytest.fixture(params=["auto", "auto, tuned", "cudnn", "cudnn, tuned"])
def computed(request, engines):
    """Who computes, and whether engines are tuned: options of a backend."""
    by, _, tuned = request.param.partition(", ")
    return {"convolutions": by, "cache": engines if tuned else None}


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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", [*ARCHITECTURES, *OTHERS], ids=str)
def test_probabilities_agree_with_float64_in_every_bucket(
    model, precision, computed, random_weights
):
    """Every image of as many as the largest bucket has, in every bucket."""
    weights = random_weights(model)
    images, want = answers_of(weights, 1, LARGEST_BUCKET)
    with opened(precision, **computed) as backend:
        for bucket in buckets(LARGEST_BUCKET):
            plan = backend.plan(weights, bucket)
            if computed["convolutions"] == "cudnn":
                assert set(plan.layers.values()) <= {"cudnn", "cublas"}
            starts = range(0, LARGEST_BUCKET, bucket)
            got = np.concatenate([answer(plan, images[at : at + bucket]) for at in starts])
            difference = np.abs(got - want)
            assert difference.max() <= LARGEST[precision], (bucket, plan.strategy)
            assert difference.mean() <= AVERAGE, (bucket, plan.strategy)


@pytest.mark.parametrize("by", ["auto", "cudnn", "measured"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_committed_weights_compute_their_golden_logits(path, precision, by):
    target = Target("cuda", precision=precision, convolutions=by)
    with ExecutionContext(open_backend(target), WeightFile.read(path), 64) as context:
        context.warm_up()
        assert context.golden_error <= context.tolerance
        assert set(context.layers) == set(buckets(64))


@pytest.mark.parametrize("by", ["auto", "cudnn"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", [*ARCHITECTURES, OTHERS[0]], ids=str)
def test_the_named_kernels_are_those_that_a_profiler_sees(model, precision, by, random_weights):
    profiler = pytest.importorskip("torch").profiler
    weights = random_weights(model)
    images = np.zeros((512, 28, 28), np.uint8)
    with opened(precision, convolutions=by) as backend:
        for rows, plan in backend.plans(weights, (8, 64, 512)).items():
            activities = [profiler.ProfilerActivity.CUDA]
            with profiler.profile(activities=activities, acc_events=True) as profile:
                plan.run(images[:rows])
            seen = {
                event.name
                for event in profile.events()
                if event.device_type.name == "CUDA" and not event.name.startswith("Memcpy")
            }
            named = set(plan.layers.values())
            assert list(plan.layers) == [shape.name for shape in weights.model.shapes()]
            assert seen & OURS == named & OURS, (rows, seen, plan.layers)
            epilogues = {"unpack", "epilogue_forward", "bias_softmax"}
            assert bool(seen - OURS - epilogues) == bool(named & {"cudnn", "cublas"}), seen


def test_our_kernels_of_a_named_network_need_no_cudnn():
    """In a process of its own, into which no other test has loaded it."""
    script = """
from pathlib import Path
from lenet.cuda.backend import CudaBackend
from lenet.cuda.device import OLDEST_CAPABILITY
from lenet.weightfile import WeightFile
with CudaBackend() as backend:
    plans = backend.plans(WeightFile.read(Path("weights/lenet/2.safetensors")), (1, 64, 512))
    used = {who for plan in plans.values() for who in plan.layers.values()}
    print("cudnn" in used, "libcudnn" in Path("/proc/self/maps").read_text())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root
    )
    used, loaded = done.stdout.split()
    assert used == loaded


def test_contexts_of_a_model_compile_its_kernels_once(random_weights, monkeypatch):
    compiled = []
    load = kernels._load
    monkeypatch.setattr(
        kernels, "_load", lambda *arguments: (compiled.append(arguments[:2]), load(*arguments))
    )
    weights = random_weights("lenet-6-16")
    with opened("tf32") as first:
        first.plans(weights, (1, 512))
        once = len(compiled)
        assert once == len(set(compiled)) > 1
        with opened("tf32") as second:
            second.plans(weights, (1, 512))
        assert len(compiled) == once


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["lenet", "cnn-32-64"])
def test_a_measured_backend_takes_the_faster_for_each_bucket_and_remembers_it(
    name, precision, random_weights, tmp_path, monkeypatch
):
    weights, sizes = random_weights(name), (8, 64, 1024)
    with opened(precision, EngineCache(tmp_path), convolutions="measured") as backend:
        times = backend._times_us(weights, sizes)
        chosen = {rows: plan.layers for rows, plan in backend.plans(weights, sizes).items()}
    for rows, (own_us, library_us) in times.items():
        own = bool(set(chosen[rows].values()) & OURS)
        taken_us, other_us = (own_us, library_us) if own else (library_us, own_us)
        assert taken_us <= 1.03 * other_us, (rows, own_us, library_us)
    monkeypatch.setattr(
        CudaBackend, "_times_us", lambda _self, _weights, rows: pytest.fail("again") if rows else {}
    )
    with opened(precision, EngineCache(tmp_path), convolutions="measured") as backend:
        again = {rows: plan.layers for rows, plan in backend.plans(weights, sizes).items()}
    assert again == chosen


@pytest.mark.parametrize("own_us", [1.0, 3.0])
def test_a_measured_bucket_is_computed_by_who_took_less_time(random_weights, monkeypatch, own_us):
    times = {8: (own_us, 2.0), 64: (4 - own_us, 2.0)}
    monkeypatch.setattr(CudaBackend, "_times_us", lambda *_: times)
    weights = random_weights("lenet")
    images, want = answers_of(weights, 3, 64)
    with opened("fp16", convolutions="measured") as backend:
        plans = backend.plans(weights, (8, 64))
        own = {rows: bool(set(plan.layers.values()) & OURS) for rows, plan in plans.items()}
        assert own == {8: own_us < 2, 64: own_us > 2}
        for rows, plan in plans.items():
            assert np.abs(answer(plan, images[:rows]) - want[:rows]).max() <= LARGEST["fp16"]
        other = random_weights("lenet", 5)  # both ways get new weights
        backend.load(other)
        images, want = answers_of(other, 3, 64)
        for rows, plan in plans.items():
            assert np.abs(answer(plan, images[:rows]) - want[:rows]).max() <= LARGEST["fp16"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_logits_have_a_relative_error_below_one_millionth(name, random_weights):
    weights, random = random_weights(name), np.random.default_rng()
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    with opened("fp32") as backend:
        for bucket in (1, 32, 64, 128, 256, 1024, 4096):
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
    want = reference.softmax(
        np.concatenate(
            [
                reference.logits(weights.model, weights.tensors, part)
                for part in np.split(images, 10)
            ]
        )
    )
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
        assert plan.launch([images[:2], images[2:]]) is None
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


def plant_a_compile_error(monkeypatch):
    """`convolutions.cu` and `dense_softmax.cu` do not compile."""
    get = kernels.Kernels.get

    def broken(self, source, name, macros):
        planted = {"WARP": "1+"} if name in ("convolutions", "dense_softmax") else {}
        return get(self, source, name, {**macros, **planted})

    monkeypatch.setattr(kernels.Kernels, "get", broken)


def plant_a_launch_error(monkeypatch):
    """Both are launched with more threads than a block can have."""
    call = Kernel.__call__

    def broken(self, grid, block, *arguments):
        planted = self._name in ("convolutions", "dense_softmax")
        call(self, grid, (2048,) if planted else block, *arguments)

    monkeypatch.setattr(Kernel, "__call__", broken)


@pytest.mark.parametrize("plant", [plant_a_compile_error, plant_a_launch_error])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_cudnn_and_cublas_compute_where_our_kernels_fail(
    random_weights, monkeypatch, caplog, name, precision, plant
):
    plant(monkeypatch)
    layers.report_once.cache_clear()
    weights = random_weights(name)
    images, want = answers_of(weights, 3, 64)
    with opened(precision) as backend:
        plans = backend.plans(weights, (8, 16, 64))
        assert all(set(plan.layers.values()) <= {"cudnn", "cublas"} for plan in plans.values())
        assert np.abs(answer(plans[64], images) - want).max() <= LARGEST[precision]
        other = random_weights(name, 5)  # a reload packs its weights for cuDNN, too
        backend.load(other)
        images, want = answers_of(other, 3, 16)
        assert np.abs(answer(plans[16], images) - want).max() <= LARGEST[precision]
    with opened(precision) as second:
        second.plans(weights, (8, 16, 64))  # logs nothing more
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert record.message.startswith(
        f"model {name}: cuDNN and cuBLAS compute it instead of our kernels, which fail in "
        f"{precision} on this {gpu}: "
    )


@pytest.mark.parametrize("by", ["auto", "cudnn"])
def test_a_dense_layer_for_which_cublas_has_no_algorithm_is_computed_by_our_kernel(
    random_weights, monkeypatch, caplog, by
):
    monkeypatch.setattr(CublasLt, "product", lambda *_: None)
    layers.report_once.cache_clear()
    weights = random_weights("mlp")
    images, want = answers_of(weights, 3, 1024)
    with opened("fp16", convolutions=by) as backend:
        plans = backend.plans(weights, (512, 1024))
        assert np.abs(answer(plans[1024], images) - want).max() <= LARGEST["fp16"]
        assert plans[1024].layers == {"dense1": "dense", "dense2": "dense_softmax"}
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    messages = [record.message for record in caplog.records]
    assert messages == [
        f"model mlp: our kernel computes {name}, as cuBLAS has no algorithm for it in fp16 on this "
        f"{gpu}"
        for name in (("dense1",) if by == "auto" else ("dense1", "dense2"))
    ]


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
    found="what cuBLAS says that its algorithm needs",
)
def test_a_workspace_is_as_large_as_the_algorithms_say(random_weights, monkeypatch):
    needed = []
    product = CublasLt.product

    def noted(*arguments):
        made = product(*arguments)
        needed.append(made.workspace_bytes)
        return made

    monkeypatch.setattr(CublasLt, "product", noted)
    with opened("fp32") as backend:
        backend.plan(random_weights("mlp"), 16)
        assert (backend.workspace_bytes, needed) == (0, [])
        backend.plan(random_weights("mlp"), 512)
        assert needed
        assert backend.workspace_bytes == max(needed) < backend.device_bytes
