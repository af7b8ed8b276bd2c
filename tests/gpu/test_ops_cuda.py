"""Every training operation on the GPU against float64 on NumPy, over random odd shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from threading import Event

import numpy as np
import pytest

from lenet.errors import DeviceError
from lenet.model import (
    IDENTITY,
    RELU,
    Activation,
    ConvBlock,
    DenseBlock,
    Model,
    Pool,
    named,
    window_count,
)
from tests.gpu.conftest import relative
from trainer.augment import WarpLimits
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors, take_step
from trainer.ops import Epilogue, Norm, Run
from trainer.optimizer import Sgd

SEEDS = range(8)
ACTIVATIONS = [
    IDENTITY,
    RELU,
    Activation("clipped_relu", 0.7),
    Activation("elu", 1.3),
    Activation("sigmoid"),
    Activation("tanh"),
]
POOLS = [
    None,
    Pool("max"),
    Pool("max", (3, 2), (1, 2), (1, 0)),
    Pool("max", (2, 2), (3, 3)),
    Pool("average", (3, 3), (2, 2), (1, 1)),
    Pool("global_average"),
]


def odd(random, low, high):
    return int(random.integers(low, high)) | 1


def upload_one(bench, kind, tensor):
    """One tensor as a parameter of both sides; `kind` tells its layout."""
    import cupy

    from lenet.cuda.packing import padded
    from trainer.ops_cuda.parameters import Parameter

    if kind == "vector":
        packed = np.pad(tensor, (0, padded(len(tensor)) - len(tensor)))
    else:
        k, c = tensor.shape[:2]
        wide = c if kind == "first" else padded(c)
        extra = [(0, padded(k) - k), (0, wide - c), *[(0, 0)] * (tensor.ndim - 2)]
        packed = np.moveaxis(np.pad(tensor, extra), 1, -1)
    master = cupy.asarray(np.ascontiguousarray(packed, np.float32))
    half = master.astype(cupy.float16) if bench.precision == "mixed" else None
    return Parameter(master, len(tensor), half)


def a_convolution(random, first):
    """(x, weight, block) that fit together, everything odd."""
    while True:
        n, c, k = odd(random, 1, 20), 1 if first else odd(random, 2, 40), odd(random, 1, 70)
        h, w = odd(random, 6, 25), int(random.integers(6, 26))
        pairs = [
            tuple(int(v) for v in random.integers(lo, hi, 2))
            for lo, hi in ((1, 6), (1, 4), (0, 4), (1, 4))
        ]
        block = ConvBlock(k, *pairs)
        sizes = [window_count(*axis) for axis in zip((h, w), *pairs, strict=True)]
        if min(sizes) >= 1:
            x = random.standard_normal((n, c, h, w))
            weight = random.standard_normal((k, c, *block.kernel)) / np.sqrt(c * 9)
            return x, weight, block


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_convolution_and_its_gradients_agree(bench, seed, first):
    random = np.random.default_rng([seed, first])
    x, weight, block = a_convolution(random, first)
    x, weight = bench.rounded(x), bench.rounded(weight)
    parameter = upload_one(bench, "first" if first else "filter", weight)
    y, saved = bench.gpu.convolution(bench.upload(x, image=first), parameter, block)
    expected, kept = bench.cpu.convolution(bench.batch_last(x), weight, block)
    bench.agrees(bench.download(y, len(weight)), bench.batch_first(expected))

    dy = bench.rounded(random.standard_normal(bench.batch_first(expected).shape))
    dw = bench.gpu.convolution_weight_gradient(bench.upload(dy), saved)
    assert bench.gpu.finite(dw)  # and waits for the second stream
    want_dw = bench.cpu.convolution_weight_gradient(bench.batch_last(dy), kept)
    got_dw = np.moveaxis(dw.get().astype(np.float64), -1, 1)[: len(weight), : weight.shape[1]]
    bench.agrees(got_dw, want_dw)
    if not first:
        dx = bench.gpu.convolution_input_gradient(bench.upload(dy), saved)
        want_dx = bench.cpu.convolution_input_gradient(bench.batch_last(dy), kept)
        bench.agrees(bench.download(dx, x.shape[1]), bench.batch_first(want_dx))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dense_product_and_its_gradients_agree(bench, seed):
    random = np.random.default_rng(seed)
    n, inputs, units = odd(random, 1, 300), odd(random, 3, 900), odd(random, 3, 600)
    x = bench.rounded(random.standard_normal((n, inputs)))
    weight = bench.rounded(random.standard_normal((units, inputs)) / np.sqrt(inputs))
    dy = bench.rounded(random.standard_normal((n, units)))
    y, saved = bench.gpu.dense(bench.upload(x), upload_one(bench, "dense", weight))
    dw = bench.gpu.dense_weight_gradient(bench.upload(dy), saved)
    dx = bench.gpu.dense_input_gradient(bench.upload(dy), saved)
    assert bench.gpu.finite(dw)  # and waits for the second stream
    bench.agrees(bench.download(y, units), x @ weight.T)
    bench.agrees(bench.download(dx, inputs), dy @ weight)
    bench.agrees(dw.get().astype(np.float64)[:units, :inputs], dy.T @ x)


def an_epilogue(bench, random, channels, norm, activation, pool):
    """An epilogue, for both sides."""

    def vector(values):
        return upload_one(bench, "vector", values), values.astype(np.float64)

    names = ("gamma", "beta", "mean", "variance") if norm else ("bias",)
    drawn = {name: random.standard_normal(channels).astype(np.float32) for name in names}
    if norm:
        drawn["variance"] = np.exp(drawn["variance"])
    both = {name: vector(values) for name, values in drawn.items()}
    return tuple(
        Epilogue(
            Norm(*(both[name][side] for name in names)) if norm else None,
            None if norm else both["bias"][side],
            activation,
            pool,
        )
        for side in (0, 1)
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_an_epilogue_and_its_gradients_agree(bench, activation, pool, norm):
    seed = [ACTIVATIONS.index(activation), POOLS.index(pool), norm]
    random = np.random.default_rng(seed)
    n, c = odd(random, 2, 40), odd(random, 1, 70)
    h, w = odd(random, 5, 13), int(random.integers(5, 13))
    # Far from zero: a sum of squares would lose its digits.
    x = bench.rounded(random.standard_normal((n, c, h, w)) * 2 + random.normal(0, 5, (c, 1, 1)))
    ours, theirs = an_epilogue(bench, random, c, norm, activation, pool)
    y, saved = bench.gpu.epilogue(bench.upload(x), ours, True)
    expected, kept = bench.cpu.epilogue(bench.batch_last(x), theirs, True)
    # Without batch norm nothing is recentred, and z may be large where a function saturates.
    bench.agrees(bench.download(y, c), bench.batch_first(expected))

    dy = bench.rounded(random.standard_normal(bench.batch_first(expected).shape))
    dx, gradients = bench.gpu.epilogue_backward(bench.upload(dy), saved)
    want_dx, wanted = bench.cpu.epilogue_backward(bench.batch_last(dy), kept)
    bench.agrees(bench.download(dx, c), bench.batch_first(want_dx))
    assert len(gradients) == len(wanted) == 1 + norm
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == np.float32
        # Sums of float32 values, whatever the storage.
        bench.agrees(bench.download(got[None], c)[0], want)
    if norm:
        for ours_now, theirs_now in zip(ours.norm[2:], theirs.norm[2:], strict=True):
            bench.agrees(ours_now.master.get().astype(np.float64)[:c], theirs_now, 1e-5)


# Not in TF32, where the largest of four values is often another one.
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("rows", [1, 5, 301])
def test_a_first_block_and_its_gradients_agree(make_bench, precision, rows):
    bench, random = make_bench(precision), np.random.default_rng(rows)
    block = ConvBlock(20, (5, 5), padding=(2, 0), batch_norm=True, pool=Pool("max"))
    x = bench.rounded(random.random((rows, 1, 28, 28)))
    weight = bench.rounded(random.standard_normal((20, 1, 5, 5)) / 5)
    ours, theirs = an_epilogue(bench, random, 20, True, RELU, block.pool)
    output, saved = bench.gpu.convolution(
        bench.upload(x, image=True), upload_one(bench, "first", weight), block
    )
    expected_output, kept = bench.cpu.convolution(bench.batch_last(x), weight, block)
    y, saved_epilogue = bench.gpu.epilogue(output, ours, True)
    expected, kept_epilogue = bench.cpu.epilogue(expected_output, theirs, True)
    bench.agrees(bench.download(y, 20), bench.batch_first(expected))
    for ours_now, theirs_now in zip(ours.norm[2:], theirs.norm[2:], strict=True):
        bench.agrees(ours_now.master.get().astype(np.float64)[:20], theirs_now)

    dy = bench.rounded(random.standard_normal(bench.batch_first(expected).shape))
    dx, gradients = bench.gpu.epilogue_backward(bench.upload(dy), saved_epilogue)
    dw = bench.gpu.convolution_weight_gradient(dx, saved)
    assert bench.gpu.finite(dw)  # and waits for the second stream
    want_dx, wanted = bench.cpu.epilogue_backward(bench.batch_last(dy), kept_epilogue)
    for got, want in zip(gradients, wanted, strict=True):
        bench.agrees(bench.download(got[None], 20)[0], want)
    want_dw = bench.cpu.convolution_weight_gradient(want_dx, kept)
    bench.agrees(np.moveaxis(dw.get().astype(np.float64), -1, 1)[:20], want_dw)


def test_bright_images_with_little_contrast_are_normalised_as_in_float64(make_bench):
    bench, random = make_bench("mixed"), np.random.default_rng(1)
    block = ConvBlock(20, (5, 5), batch_norm=True, pool=Pool("max"))
    x = bench.rounded(random.uniform(0.97, 0.99, (301, 1, 28, 28)))
    weight = bench.rounded(random.standard_normal((20, 1, 5, 5)) / 5)
    ours, theirs = an_epilogue(bench, random, 20, True, RELU, block.pool)
    output, _ = bench.gpu.convolution(
        bench.upload(x, image=True), upload_one(bench, "first", weight), block
    )
    y, _ = bench.gpu.epilogue(output, ours, True)
    expected, _ = bench.cpu.convolution(bench.batch_last(x), weight, block)
    expected, _ = bench.cpu.epilogue(expected, theirs, True)
    bench.agrees(bench.download(y, 20), bench.batch_first(expected))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_dense_epilogue_agrees_in_training_and_outside_it(bench, seed, norm):
    random = np.random.default_rng([seed, norm])
    n, units = odd(random, 2, 400), odd(random, 1, 600)
    x = bench.rounded(random.standard_normal((n, units)))
    dy = bench.rounded(random.standard_normal((n, units)))
    ours, theirs = an_epilogue(bench, random, units, norm, ACTIVATIONS[seed % 6], None)
    evaluated, _ = bench.gpu.epilogue(bench.upload(x), ours, False)
    bench.agrees(
        bench.download(evaluated, units),
        bench.batch_first(bench.cpu.epilogue(bench.batch_last(x), theirs, False)[0]),
    )
    y, saved = bench.gpu.epilogue(bench.upload(x), ours, True)
    expected, kept = bench.cpu.epilogue(bench.batch_last(x), theirs, True)
    dx, gradients = bench.gpu.epilogue_backward(bench.upload(dy), saved)
    want_dx, wanted = bench.cpu.epilogue_backward(bench.batch_last(dy), kept)
    bench.agrees(bench.download(y, units), bench.batch_first(expected))
    bench.agrees(bench.download(dx, units), bench.batch_first(want_dx))
    for got, want in zip(gradients, wanted, strict=True):
        bench.agrees(bench.download(got[None], units)[0], want)


def some_digits(random, size):
    images = random.integers(0, 256, (size, 28, 28), np.uint8)
    return Digits(images, random.integers(0, 10, size).astype(np.uint8))


def a_run(random, size=500, batch=101, steps=12, limits=None, seed=7):
    rates = np.linspace(0.05, 0.01, steps).astype(np.float32)
    return Run(some_digits(random, size), batch, limits or WarpLimits(), seed, rates)


@pytest.mark.parametrize("elastic", [0.0, 4.0])
def test_the_gpu_draws_and_warps_the_batches_of_numpy(bench, elastic):
    random = np.random.default_rng(3)
    limits = WarpLimits(rotation=12, scale=0.1, shear=8, shift=2, elastic=elastic)
    run = a_run(random, limits=limits)
    ours, theirs = bench.gpu.start(run), bench.cpu.start(run)
    for _ in range(7):  # past the end of the first epoch, of four steps
        x, labels = bench.gpu.batch(ours)
        want_x, want_labels = bench.cpu.batch(theirs)
        assert labels.get().tolist() == np.asarray(want_labels).tolist()
        difference = np.abs(bench.download(x, 1) - bench.batch_first(want_x)) * 255
        # Sines and fused multiply-adds round otherwise: a value may fall to the next of 256.
        assert difference.max() < 1.2
        assert (difference > 0.5).mean() < 0.01
        bench.gpu.end_step(ours)
        bench.cpu.end_step(theirs)


@pytest.mark.parametrize("rows", [1, 33, 256, 3000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, np.linspace(0.5, 2, 10, dtype=np.float32)])
def test_the_loss_its_gradient_and_the_hits_agree(bench, rows, smoothing, weights):
    random = np.random.default_rng(rows)
    bench.gpu.upload(named("mlp"), {})  # ten classes
    run = a_run(random, size=rows, batch=rows)
    run = replace(run, smoothing=smoothing, class_weights=weights)
    ours, theirs = bench.gpu.start(run), bench.cpu.start(run)
    logits = bench.rounded(random.standard_normal((rows, 10)) * 8)
    labels = run.digits.labels
    import cupy

    scale = float(ours.scale[0])
    saved = bench.gpu.softmax_cross_entropy(bench.upload(logits), cupy.asarray(labels), ours)
    kept = bench.cpu.softmax_cross_entropy(bench.batch_last(logits), labels, theirs)
    got = bench.download(bench.gpu.softmax_cross_entropy_backward(saved), 10) / scale
    bench.agrees(got, bench.batch_first(bench.cpu.softmax_cross_entropy_backward(kept)))
    losses, correct = bench.gpu.losses(ours, 0, 1)
    want_losses, want_correct = bench.cpu.losses(theirs, 0, 1)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert correct.tolist() == np.asarray(want_correct).tolist()


def test_dropout_zeroes_the_units_that_numpy_zeroes_forward_and_backward(bench):
    random = np.random.default_rng(5)
    run = a_run(random)
    ours, theirs = bench.gpu.start(run), bench.cpu.start(run)
    for units in (37, 500):
        x = bench.rounded(random.standard_normal((101, units)) + 3)
        y, saved = bench.gpu.dropout(bench.upload(x), units, 0.3, 2, ours)
        expected, kept = bench.cpu.dropout(bench.batch_last(x), units, 0.3, 2, theirs)
        bench.agrees(bench.download(y, units), bench.batch_first(expected))
        dx = bench.gpu.dropout_backward(bench.upload(x), saved)
        bench.agrees(
            bench.download(dx, units),
            bench.batch_first(bench.cpu.dropout_backward(bench.batch_last(x), kept)),
        )


SMALL = Model(
    "small",
    (
        ConvBlock(5, (3, 3), padding=(1, 1), batch_norm=True, pool=Pool("max")),
        ConvBlock(7, (3, 3), activation=Activation("tanh"), pool=Pool("average")),
        DenseBlock(33, batch_norm=True),
        DenseBlock(10, activation=IDENTITY),
    ),
)
NETWORKS = [*map(named, ("lenet", "lenet-classic", "lenet-6-16", "cnn-32-64", "mlp")), SMALL]


def trained(ops, model, run, steps, capture, dropout=0.0, frozen=0):
    """(the network, its canonical tensors, losses) after some steps."""
    tensors = initial_tensors(model, np.random.default_rng(1))
    network = Network(model, tensors, ops, dropout, frozen=frozen)
    optimizer = Sgd(model, network.parameters, ops, 0.9, 5e-4, True)
    state = ops.start(run)

    step = partial(take_step, network, optimizer, state)
    once = ops.capture(step) if capture else step
    for _ in range(steps):
        once()
    return network, network.tensors, ops.losses(state, 0, steps)[0]


def gently(model, seed=11):
    """A run whose steps are so small that rounding is not amplified from one to the next."""
    run = a_run(np.random.default_rng(seed), size=500, batch=64)
    return replace(run, rates=run.rates / 50)


NEAR = {"fp32": (1e-4, 1e-2), "tf32": (5e-3, 0.1), "mixed": (5e-3, 0.2)}
"""Largest relative differences of losses, and of what ten steps change in a tensor. A maximum or a
ReLU that rounding decides the other way moves single weights. The error of rounding to half alone,
by NumPy: at most 0.12, to the shift of conv1 in "small", most of whose gradient cancels out."""


@pytest.mark.parametrize(
    ("model", "frozen", "precision"),
    [
        *((model, 0, precision) for model in NETWORKS for precision in NEAR),
        *(
            (model, frozen, precision)
            for model in (named("lenet"), SMALL)
            for frozen in (1, 2, 3)
            for precision in ("fp32", "mixed")
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ten_steps_agree_with_float64_and_frozen_blocks_stay(make_bench, model, frozen, precision):
    bench, run = make_bench(precision), gently(model)
    _, ours, losses = trained(bench.gpu, model, run, 10, capture=True, frozen=frozen)
    _, theirs, wanted = trained(bench.cpu, model, run, 10, capture=False, frozen=frozen)
    before = initial_tensors(model, np.random.default_rng(1))
    names = [shape.name for shape in model.shapes()[:frozen]]
    of_losses, of_tensors = NEAR[precision]
    assert losses == pytest.approx(wanted, rel=of_losses)
    for name, want in theirs.items():
        if name.partition(".")[0] in names:
            assert ours[name].tobytes() == before[name].tobytes(), name
        else:
            assert relative(ours[name] - before[name], want - before[name]) <= of_tensors, name


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
def test_a_recorded_step_does_what_the_step_does_to_the_bit(make_bench, precision):
    run = a_run(np.random.default_rng(2), limits=WarpLimits(10, 0.1, 5, 1, 3), steps=9)
    results = [
        trained(make_bench(precision).gpu, named("lenet"), run, 9, capture, dropout=0.2)
        for capture in (False, True, True)
    ]
    for _, tensors, losses in results[1:]:
        assert losses.tobytes() == results[0][2].tobytes()
        assert all(tensors[name].tobytes() == results[0][1][name].tobytes() for name in tensors)


def test_a_loss_scale_that_overflows_drops_the_step_and_is_halved(make_bench):
    bench = make_bench("mixed")
    model = named("lenet")
    network = Network(model, initial_tensors(model, np.random.default_rng(1)), bench.gpu)
    optimizer = Sgd(model, network.parameters, bench.gpu, 0.9, 5e-4, True)
    state = bench.gpu.start(a_run(np.random.default_rng(2)))
    state.scale[0] = 2.0**24
    before = network.tensors
    x, labels = bench.gpu.batch(state)
    network.forward(x, labels, state)
    network.backward()
    optimizer.step(network.gradients, state)
    bench.gpu.end_step(state)
    after = network.tensors
    weights = [name for name in before if not name.endswith((".mean", ".variance"))]
    assert all((before[name] == after[name]).all() for name in weights)
    assert float(state.scale[0]) == 2.0**23
    assert bench.gpu.skipped(state) == 1
    assert int(state.step[0]) == 1


def test_logits_outside_training_agree_for_more_images_than_one_batch(bench):
    random = np.random.default_rng(9)
    model = named("lenet")
    network = Network(model, initial_tensors(model, random), bench.gpu)
    images = random.integers(0, 256, (1003, 28, 28), np.uint8)
    whole = network.logits(images)
    want = Network(model, network.tensors, bench.cpu).logits(images[:50])
    assert relative(whole[:50], want) <= 3 * bench.tolerance  # through eight operations


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
@pytest.mark.parametrize("model", NETWORKS, ids=lambda m: m.name)
def test_logits_follow_the_weights_though_they_were_asked_for_before_the_steps(
    make_bench, model, precision
):
    bench = make_bench(precision)
    network = Network(model, initial_tensors(model, np.random.default_rng(1)), bench.gpu)
    optimizer = Sgd(model, network.parameters, bench.gpu)
    run = a_run(np.random.default_rng(2), steps=9)
    if not any(block.batch_norm for block in model.blocks):  # it diverges at this rate
        run = replace(run, rates=run.rates / 10)
    state = bench.gpu.start(run)
    step = bench.gpu.capture(lambda: take_step(network, optimizer, state))
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (50, 28, 28), np.uint8)
    before = network.logits(images)
    for _ in range(9):
        step()
    after = network.logits(images)
    want = Network(model, network.tensors, bench.cpu).logits(images)
    assert relative(after, want) <= 5 * bench.tolerance  # through up to ten operations
    assert relative(before, want) > 10 * bench.tolerance


class TwoRanks:
    rank, size = 0, 2


@pytest.mark.parametrize("failing", [1, 2], ids=["its first run", "its capture"])
def test_a_step_that_fails_leaves_no_open_capture_and_keeps_its_ranks(make_bench, failing):
    ops, runs = make_bench("fp32").gpu, []
    state = ops.start(a_run(np.random.default_rng(2)))
    ops.join(TwoRanks())

    def step():
        runs.append(1)
        ops.end_step(state)
        if len(runs) == failing:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        ops.capture(step)
    assert len(runs) == failing
    assert not ops.handle.stream.is_capturing()
    assert ops.ranks == 2
    ops.close()  # which an open capture forbids


def test_the_choice_of_engines_stops_when_asked():
    from trainer.ops_cuda.ops import CudaOps

    stopping = Event()
    with CudaOps("tf32", stopping=stopping) as ops:
        network = Network(
            named("lenet"), initial_tensors(named("lenet"), np.random.default_rng(0)), ops
        )
        stopping.set()
        with pytest.raises(DeviceError, match="asked to stop"):
            network.logits(np.zeros((1, 28, 28), np.uint8))
