import numpy as np
import pytest

from lenet.model import named
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd
from trainer.step import find_fault, take_step


class Faulty(CpuOps):
    """One operation gives a NaN in one step; which is what `fault` says: (method, step)."""

    def __init__(self, fault=None, skips=False):
        super().__init__()
        self.fault, self.skips = fault, skips

    def start(self, run, step=0):
        self.progress = super().start(run, step)
        return self.progress

    def spoil(self, method, x):
        if (method, self.progress.step) == self.fault:
            x.flat[-1] = np.nan

    def dense(self, x, weight):
        y, saved = super().dense(x, weight)
        self.spoil("dense", y)
        return y, saved

    def dense_backward(self, dy, saved, input_gradient):
        dx, dweight = super().dense_backward(dy, saved, input_gradient)
        self.spoil("dense_backward", dweight)
        return dx, dweight

    def tail_backward(self, dy, saved):
        dx, gradients = super().tail_backward(dy, saved)
        self.spoil("tail_backward", dx)
        return dx, gradients

    def descend(self, updates, progress, *settings):
        if self.skips and not all(np.isfinite(update.gradient).all() for update in updates):
            return
        super().descend(updates, progress, *settings)
        self.spoil("descend", updates[0].parameter)

    def softmax_cross_entropy(self, logits, labels, progress):
        saved = super().softmax_cross_entropy(logits, labels, progress)
        if ("softmax", progress.step) == self.fault:
            progress.losses[progress.step] = np.inf
        return saved


def fault_of(ops, digits, run_of, start=0, stop=5):
    model = named("mlp")
    network = Network(model, initial_tensors(model, np.random.default_rng(0)), ops)
    optimizer = Sgd(model, network.parameters, ops)
    return find_fault(network, optimizer, run_of(digits(40, 0), 20, [0.01] * 9), start, stop)


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("dense", "dense1's output"),
        ("dense_backward", "dense2's gradient"),
        ("tail_backward", "dense2.bias's gradient"),
        ("descend", "dense1.weight"),
        ("softmax", "the loss itself"),
    ],
)
def test_the_first_array_that_is_not_finite_is_found_with_its_step(digits, run_of, method, found):
    assert fault_of(Faulty((method, 3)), digits, run_of) == f"{found} at step 4"


def test_nothing_is_found_in_steps_that_are_not_taken(digits, run_of):
    assert fault_of(Faulty(("dense", 5)), digits, run_of) is None
    assert fault_of(Faulty(("dense", 5)), digits, run_of, 4, 6) == "dense1's output at step 6"


def test_a_gradient_that_is_met_by_taking_no_step_is_no_fault(digits, run_of):
    assert fault_of(Faulty(("dense_backward", 3), skips=True), digits, run_of) is None


def test_a_step_is_a_batch_forward_backward_an_update_and_a_tick(digits, run_of):
    model, ops = named("mlp"), CpuOps()
    tensors = initial_tensors(model, np.random.default_rng(0))
    run, networks = run_of(digits(40, 0), 20, [0.1, 0.2, 0.3]), []
    for _ in range(2):
        network = Network(model, tensors, ops, 0.5)
        networks.append((network, Sgd(model, network.parameters, ops), ops.start(run, 1)))
    (one, sgd, progress), (other, other_sgd, other_progress) = networks
    for _ in range(2):
        take_step(one, sgd, progress)
    for step in (1, 2):
        assert other_progress.step == step
        x, labels = ops.batch(other_progress)
        other.forward(x, labels, other_progress)
        other.backward()
        other_sgd.step(other.gradients, other_progress)
        ops.tick(other_progress)
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(value, other.tensors[name])
    np.testing.assert_array_equal(
        ops.losses(progress, 0, 3)[0], ops.losses(other_progress, 0, 3)[0]
    )
