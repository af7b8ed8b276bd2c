"""Several GPUs of one host: the network that one of them would have trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lenet.cuda.device import devices
from lenet.model import named

if devices() < 2:
    pytest.skip("needs two GPUs, found one", allow_module_level=True)

from trainer.augment import WarpLimits
from trainer.devices import on_devices
from trainer.errors import DeviceUnavailable
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors, take_step
from trainer.ops import Run
from trainer.optimizer import Sgd
from trainer.settings import Fit


def recorded(ops, batch, steps):
    """(network, state, the captured step)."""
    random = np.random.default_rng(4)
    images = random.integers(0, 256, (500, 28, 28), np.uint8)
    digits = Digits(images, random.integers(0, 10, 500).astype(np.uint8))
    run = Run(digits, batch, WarpLimits(10, 0.1, 5, 2, 1), 3, np.full(steps, 1e-3, np.float32))
    model = named("lenet")
    network = Network(model, initial_tensors(model, np.random.default_rng(1)), ops, 0.3)
    optimizer = Sgd(model, network.parameters, ops, 0.9, 5e-4, True)
    state = ops.start(run)
    repeat = ops.capture(lambda: take_step(network, optimizer, state))
    ops.barrier()  # a rank that is still recording takes memory, which waits for others' sums
    return network, state, repeat


def trained(gpus, precision="fp32", batch=64, steps=20):
    """(losses, tensors) of every rank."""
    outcomes = {}

    def work(ops, rank):
        network, state, repeat = recorded(ops, batch, steps)
        for _ in range(steps):
            repeat()
        outcomes[rank] = ops.losses(state, 0, steps)[0], network.tensors

    on_devices(Fit(precision=precision, batch=batch).resolved("cuda"), gpus, work)
    return [outcomes[rank] for rank in range(gpus)]


def test_two_gpus_train_what_one_would_batch_norm_and_dropout_included():
    ((alone, wanted),), (several, *_) = trained(1), trained(2)
    losses, tensors = several
    assert losses == pytest.approx(alone, rel=1e-5)
    before = initial_tensors(named("lenet"), np.random.default_rng(1))
    for name, want in wanted.items():
        # A maximum or a ReLU that rounding decides the other way moves single weights: NumPy in
        # float32 against float64 differs by up to 5e-3 here.
        moved = np.linalg.norm(want - before[name])
        assert np.linalg.norm(tensors[name] - want) <= 1e-2 * moved, name


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_every_rank_ends_with_the_same_bytes(precision):
    first, second = trained(2, precision)
    assert first[0].tobytes() == second[0].tobytes()
    assert all((first[1][name] == second[1][name]).all() for name in first[1])


def test_a_rank_that_fails_ends_the_others():
    def work(ops, rank):
        if rank == 1:
            raise ValueError("planted")
        network = Network(
            named("mlp"), initial_tensors(named("mlp"), np.random.default_rng(1)), ops
        )
        ops.all_reduce({"dense1.weight": network.arrays["dense1.weight"].master})
        return network.tensors

    with pytest.raises(ValueError, match="planted"):
        on_devices(Fit(precision="fp32", batch=64).resolved("cuda"), 2, work)


def test_a_rank_that_fails_ends_the_others_though_graphs_hold_their_sums():
    def work(ops, rank):
        _, state, repeat = recorded(ops, 64, 20)
        repeat()
        if rank == 1:
            raise ValueError("planted")
        repeat()  # waits for rank 1 until it is aborted
        return ops.losses(state, 0, 2)

    with pytest.raises(ValueError, match="planted"):
        on_devices(Fit(precision="fp32", batch=64).resolved("cuda"), 2, work)


def test_more_gpus_than_there_are_are_refused():
    with pytest.raises(DeviceUnavailable, match="--gpus is 60, expected at most"):
        on_devices(Fit(batch=60).resolved("cuda"), 60, lambda ops, rank: None)


def test_an_interrupted_fit_ends_within_five_seconds_while_engines_are_chosen(
    mnist_folder, tmp_path
):
    folders = ("--data", mnist_folder, "--out", tmp_path / "out", "--checkpoints", tmp_path / "c")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "fit", "--gpus", "2", *map(str, folders)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job inherits that SIGINT is ignored, and Python then leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        # Locked while the first engine is chosen; that takes longer than the interruption.
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("lenet-serve/engines/.lock")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        interrupted = time.monotonic()
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - interrupted < 5
        assert process.returncode == 130
        assert error.splitlines()[-1].startswith("interrupted before the first epoch")
    finally:
        process.kill()
