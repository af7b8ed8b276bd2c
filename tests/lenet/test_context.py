from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lenet.context import ExecutionContext, Target, buckets, choose, estimate_bytes
from lenet.cpu import CpuBackend, CpuPlan
from lenet.errors import (
    BackendUnavailable,
    DeviceError,
    GoldenMismatch,
    InvalidModel,
    LeNetError,
    WrongThread,
)
from lenet.model import ARCHITECTURES, Model
from lenet.reference import logits as reference_logits
from lenet.reference import softmax


def on_another_thread(function, *arguments):
    """The error that `function` raises on a thread of its own."""
    errors = []

    def work():
        try:
            function(*arguments)
        except LeNetError as exc:
            errors.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (error,) = errors
    return error


def answer(context, images):
    return context.run(images).probabilities


def changed(change):
    """Stands in for `CpuPlan.answers`: those of the plan after `change(probabilities, images)`."""
    return lambda plan, images: [change(plan.run(images).probabilities, images)]


def softmax_of(weights, images):
    return softmax(reference_logits(weights.model, weights.tensors, images))


def edited(weights, *, logits=None, scale=1.0):
    """`weights` whose golden logits are others."""
    golden = weights.golden
    logits = golden.logits * np.float32(scale) if logits is None else logits
    return dataclasses.replace(weights, golden=dataclasses.replace(golden, logits=logits))


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_buckets_are_powers_of_two_and_the_largest(largest, expected):
    assert buckets(largest) == expected


@pytest.fixture
def no_gpu(monkeypatch):
    def devices():
        raise BackendUnavailable("there is no NVIDIA GPU", "use the cpu device")

    monkeypatch.setattr("lenet.cuda.device.devices", devices)


def test_auto_is_the_cpu_elsewhere_and_says_why(no_gpu):
    why = "there is no NVIDIA GPU (docs/operations.md says how to serve on a GPU)"
    assert choose("auto") == ("cpu", why)
    assert choose("cpu") == ("cpu", None)


def test_a_gpu_that_is_asked_for_and_is_not_there_is_rejected(no_gpu):
    with pytest.raises(BackendUnavailable, match="there is no NVIDIA GPU; use the cpu device"):
        choose("cuda")


def test_a_row_of_lenet_in_fp16_is_estimated_by_the_outputs_of_its_layers():
    # 784 pixels and 2 x 10 answers in float32; 12x12x32 after the first convolution, 8x8x64 and
    # 4x4x64 for the second, 500 and 10 units before and after their activation, in halves.
    expected = 784 + 80 + 2 * (12 * 12 * 32 + 8 * 8 * 64 + 4 * 4 * 64 + 2 * 500 + 2 * 10)
    lenet = ARCHITECTURES["lenet"]
    few, many = (estimate_bytes(Target("cuda"), lenet, rows) for rows in (1 << 18, 1 << 19))
    assert (many - few) / (1 << 18) == expected
    assert estimate_bytes(Target("cpu"), lenet, 1 << 18) == 0


def test_a_context_answers_any_number_of_rows_in_the_smallest_bucket_that_holds_them(
    backend, random_weights, tiny, monkeypatch
):
    weights, used, run = random_weights(tiny), [], CpuPlan.run
    images = np.random.default_rng(3).integers(0, 256, (6, 28, 28), np.uint8)
    with ExecutionContext(backend, weights, 6) as context:
        context.warm_up()
        expected = backend.plan(weights, 6).run(images).probabilities

        def spy(plan, images):
            used.append(plan.rows)
            return run(plan, images)

        monkeypatch.setattr(CpuPlan, "run", spy)
        for rows in range(1, 7):
            found = answer(context, images[:rows])
            np.testing.assert_allclose(found, expected[:rows], rtol=1e-5)
        assert used == [1, 2, 4, 4, 6, 6]
        for rows in (0, 7):
            with pytest.raises(AssertionError, match=f"bug: a batch of {rows} rows"):
                context.run(np.zeros((rows, 28, 28), np.uint8))


@pytest.mark.parametrize("quick", [True, False])
def test_the_cpu_launches_quick_batches_only_from_any_thread(
    random_weights, tiny, monkeypatch, quick
):
    monkeypatch.setattr("lenet.cpu._QUICK_S", 60.0 if quick else 0.0)
    images = random_weights(tiny).golden.images[:2]
    with ExecutionContext(CpuBackend(), random_weights(tiny), 2) as context:
        context.warm_up()
        ran = context.run(images)
        with ThreadPoolExecutor(1) as other:
            pending = other.submit(context.launch, [images[:1], images[1:]]).result()
        assert not ran.captured
        if quick:
            np.testing.assert_array_equal(pending.probabilities, ran.probabilities)
        else:
            assert pending is None


@pytest.mark.parametrize("row", [0, 9])
def test_weights_are_rejected_when_a_single_golden_logit_differs(
    backend, random_weights, tiny, row
):
    weights = random_weights(tiny)
    logits = weights.golden.logits.copy()
    logits[row, 3] += 3 * backend.tolerance * np.abs(logits).max()
    with (
        ExecutionContext(backend, edited(weights, logits=logits), 3) as context,
        pytest.raises(GoldenMismatch),
    ):
        context.warm_up()


def test_weights_are_rejected_when_the_device_answers_nan(backend, random_weights, tiny):
    weights = random_weights(tiny)
    tensors = {name: np.full_like(tensor, np.nan) for name, tensor in weights.tensors.items()}
    bad = dataclasses.replace(weights, tensors=tensors)
    with (
        ExecutionContext(backend, bad, 1) as context,
        pytest.raises(GoldenMismatch, match="NaN"),
    ):
        context.warm_up()


def test_weights_whose_probabilities_are_not_those_of_their_logits_are_rejected(
    backend, random_weights, tiny, monkeypatch
):
    # As of a copy that comes too late.
    late = changed(lambda probabilities, _: np.roll(probabilities, 1, axis=1))
    monkeypatch.setattr(CpuPlan, "answers", late)
    with (
        ExecutionContext(backend, random_weights(tiny), 3) as context,
        pytest.raises(GoldenMismatch, match=r"probabilities differ by .* in bucket [123];"),
    ):
        context.warm_up()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_weights_that_overflow_on_white_are_rejected_with_the_precision_that_helps(
    backend, random_weights, tiny, monkeypatch, precision
):
    def overflow(probabilities, images):
        probabilities[images.min(axis=(1, 2)) == 255] = np.nan
        return probabilities

    monkeypatch.setattr(CpuPlan, "answers", changed(overflow))
    backend.precision = precision
    with (
        ExecutionContext(backend, random_weights(tiny), 3) as context,
        pytest.raises(GoldenMismatch, match="black, white or noise are NaN") as caught,
    ):
        context.warm_up()
    assert ("serve it with --precision tf32" in str(caught.value)) == (precision == "fp16")


def test_the_old_weights_stay_when_the_new_ones_are_of_another_network(
    backend, random_weights, tiny
):
    old = random_weights(tiny)
    other = random_weights("mlp")
    with ExecutionContext(backend, old, 1) as context:
        context.warm_up()
        with pytest.raises(InvalidModel, match=r"'mlp' has another architecture .* 'tiny'"):
            context.replace_weights(other)
        assert context.weights is old
        context.replace_weights(random_weights(Model("renamed", tiny.blocks)))


@pytest.mark.parametrize("wrong", ["logits", "architecture"])
def test_the_served_weights_answer_on_when_staged_ones_are_rejected(
    backend, random_weights, tiny, wrong
):
    old, staged = random_weights(tiny, 1), random_weights(tiny, 2)
    images = old.golden.images[:4]
    rejected = random_weights("mlp") if wrong == "architecture" else edited(staged, scale=2.0)
    with ExecutionContext(backend, old, 4) as context:
        context.warm_up()
        before = answer(context, images)
        with pytest.raises((GoldenMismatch, InvalidModel)):
            context.stage(rejected)
        np.testing.assert_array_equal(answer(context, images), before)
        context.stage(staged)
        context.replace_weights(staged)
        np.testing.assert_allclose(answer(context, images), softmax_of(staged, images), rtol=1e-4)


def test_nothing_is_validated_again_when_staged_and_served_weights_take_turns(
    backend, random_weights, tiny, monkeypatch
):
    old, new = random_weights(tiny, 1), random_weights(tiny, 2)
    images = old.golden.images[:3]
    with ExecutionContext(backend, old, 4) as context:
        context.warm_up()
        context.stage(new)
        monkeypatch.delattr(CpuPlan, "logits")
        errors = []
        for weights in (new, old, new, new, old):
            context.replace_weights(weights)
            assert context.weights is weights
            errors.append(context.golden_error)
            found = answer(context, images)
            np.testing.assert_allclose(found, softmax_of(weights, images), rtol=1e-4)
        assert errors[0] == errors[2] == errors[3] != errors[1] == errors[4]


def test_the_old_weights_stay_when_the_device_fails_at_a_replacement(
    backend, random_weights, tiny, monkeypatch
):
    old, new = random_weights(tiny, 1), random_weights(tiny, 2)
    images = old.golden.images[:4]
    with ExecutionContext(backend, old, 4) as context:
        context.warm_up()
        before = answer(context, images)
        context.stage(new)
        load = backend.load

        def fails_half_way(weights):
            load(weights)
            if weights is new:
                raise DeviceError("the copy failed")

        monkeypatch.setattr(backend, "load", fails_half_way)
        for method in (context.replace_weights, context.stage):
            with pytest.raises(DeviceError):
                method(new)
            assert context.weights is old
            for rows in (1, 2, 4):
                found = answer(context, images[:rows])
                np.testing.assert_allclose(found, before[:rows], rtol=1e-5)


def test_another_thread_cannot_use_a_context(backend, random_weights, tiny):
    weights = random_weights(tiny)
    with ExecutionContext(backend, weights, 2) as context:
        context.warm_up()
        images = weights.golden.images[:1]
        for method, arguments in (
            (context.run, (images,)),
            (context.warm_up, ()),
            (context.stage, (weights,)),
            (context.replace_weights, (weights,)),
            (context.close, ()),
        ):
            assert isinstance(on_another_thread(method, *arguments), WrongThread)
        context.run(images)


def test_a_closed_context_is_a_bug_when_used_and_closes_again(backend, random_weights, tiny):
    context = ExecutionContext(backend, random_weights(tiny), 1)
    context.warm_up()
    context.close()
    context.close()
    with pytest.raises(RuntimeError, match="bug: the execution context is closed"):
        context.run(np.zeros((1, 28, 28), np.uint8))
    with pytest.raises(RuntimeError, match="bug"):
        context.warm_up()


def test_a_context_warns_when_it_is_dropped_open(backend, random_weights, tiny):
    context = ExecutionContext(backend, random_weights(tiny), 1)
    with pytest.warns(ResourceWarning, match=r"ExecutionContext object at .* was not closed"):
        del context
