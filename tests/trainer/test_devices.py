import threading

import numpy as np
import pytest

from lenet.errors import DeviceError
from lenet.model import named
from tests.service_process import PATIENCE_S
from trainer import devices
from trainer.checkpoint import Checkpoint
from trainer.devices import check_classes, choose, on_devices, side_by_side
from trainer.errors import DeviceUnavailable
from trainer.loop import train
from trainer.network import Network, initial_tensors
from trainer.settings import Recipe


def recipe_on(device, precision="fp32", batch=12):
    return Recipe(precision=precision, batch=batch).resolved(device)


def test_auto_is_the_cpu_where_there_is_no_gpu_and_says_so_in_one_short_line(no_gpu):
    said = []
    assert choose("auto", said.append) == "cpu"
    assert said == ["training on the CPU: no usable GPU was found (--device cuda says why)"]
    with pytest.raises(DeviceUnavailable, match="--device is cuda:2: there is no NVIDIA GPU here"):
        choose("cuda:2", said.append)


@pytest.mark.parametrize(
    ("device", "classes", "expected"),
    [
        ("cuda", 64, []),
        ("cpu", 64, []),
        ("cpu", 65, ["65 classes: a GPU serves at most 64"]),
    ],
)
def test_classes_that_no_gpu_serves_are_reported_before_the_training(device, classes, expected):
    said = []
    check_classes(device, classes, said.append)
    assert [line.partition(",")[0] for line in said] == expected


def test_classes_that_no_gpu_trains_are_refused():
    with pytest.raises(DeviceUnavailable, match="has 65 classes, expected at most 64 on a GPU"):
        check_classes("cuda", 65, print)


def test_each_gpu_is_a_rank_with_a_thread_of_its_own_and_rank_0_has_the_result(fake_gpus):
    gpus, given = fake_gpus(4), {}
    all_at_once = threading.Barrier(3)

    def work(ops, rank):
        given[rank] = ops
        all_at_once.wait(PATIENCE_S)
        return f"of rank {rank}"

    assert on_devices(recipe_on("cuda", "mixed"), 3, work) == "of rank 0"
    assert sorted(given) == [0, 1, 2]
    for rank, ops in given.items():
        assert (ops.device, ops.joined.rank, ops.joined.size) == (rank, rank, 3)
        assert ops.precision == "mixed"
        assert not ops.joined.aborted.is_set()
        assert ops.joined.closed.is_set()
    assert len({ops.thread for ops in given.values()} | {threading.get_ident()}) == 4
    assert set(gpus.closed) == set(given.values())


class Together:
    """Work in which, once all ranks are at it, one fails and the others wait for it in vain."""

    def __init__(self, size, failing, error):
        self.all_at_once = threading.Barrier(size)
        self.failing, self.error = failing, error

    def __call__(self, ops, rank):
        self.all_at_once.wait(PATIENCE_S)
        if rank == self.failing:
            raise self.error
        assert ops.joined.aborted.wait(PATIENCE_S), "no rank was aborted"
        raise DeviceError(f"rank {rank} was aborted")


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_stops_the_others_and_its_error_is_raised(fake_gpus, failing):
    gpus = fake_gpus(3)
    with pytest.raises(ValueError, match="the first"):
        on_devices(recipe_on("cuda"), 3, Together(3, failing, ValueError("the first")))
    assert len(gpus.ranks) == 3
    assert all(ranks.aborted.is_set() for ranks in gpus.ranks)
    assert len(gpus.closed) == 3


class Interrupted:
    """`concurrent.futures.wait`, interrupted the first time, after `all_at_once`."""

    def __init__(self, all_at_once):
        self._all_at_once, self._wait, self._again = all_at_once, devices.wait, False

    def __call__(self, *arguments, **options):
        if self._again:
            return self._wait(*arguments, **options)
        self._again = True
        self._all_at_once.wait(PATIENCE_S)
        raise KeyboardInterrupt


def test_an_interruption_lets_every_rank_stop_by_itself_also_while_it_chooses_engines(
    fake_gpus, monkeypatch
):
    gpus, all_at_once, aborted_meanwhile = fake_gpus(2), threading.Barrier(3), []

    def work(ops, rank):
        all_at_once.wait(PATIENCE_S)
        # Checked between two candidates when an engine is chosen.
        assert ops.stopping.wait(PATIENCE_S), "no rank was asked to stop"
        aborted_meanwhile.append(ops.joined.marked.is_set())
        raise DeviceError("training was asked to stop")

    monkeypatch.setattr(devices, "wait", Interrupted(all_at_once))
    with pytest.raises(KeyboardInterrupt):
        on_devices(recipe_on("cuda"), 2, work)
    assert aborted_meanwhile == [False, False]
    assert len(gpus.closed) == 2


def test_a_rank_that_does_not_stop_is_aborted(fake_gpus, monkeypatch):
    monkeypatch.setattr(devices, "_STOP_TIMEOUT_S", 0.1)
    gpus = fake_gpus(2)
    work = Together(3, None, None)
    monkeypatch.setattr(devices, "wait", Interrupted(work.all_at_once))
    with pytest.raises(KeyboardInterrupt):
        on_devices(recipe_on("cuda"), 2, work)
    assert [ranks.aborted.is_set() for ranks in gpus.ranks] == [True, True]
    assert len(gpus.closed) == 2


class Training:
    """Trains mlp with the seed `number`; `before_step` is called with it before each step."""

    def __init__(self, digits, folder, epochs, before_step=lambda _number: None):
        self._digits, self._folder, self._epochs = digits, folder, epochs
        self._before_step = before_step

    def __call__(self, ops, number):
        model, digits = named("mlp"), self._digits
        recipe = Recipe(model="mlp", epochs=self._epochs, batch=50, rate=0.05, seed=number)
        network = Network(model, initial_tensors(model, np.random.default_rng(number)), ops, 0.2)
        checkpoint = Checkpoint(self._folder / str(number), recipe, "", digits)
        batch = ops.batch

        def observed(state):
            self._before_step(number)
            return batch(state)

        ops.batch = observed
        train(network, recipe, digits, digits, checkpoint, leader=False)
        return {name: tensor.tobytes() for name, tensor in network.tensors.items()}


def test_seeds_side_by_side_train_the_same_bytes_as_one_after_another(digits, tmp_path):
    # Three steps at a time: each seed waits for the two others before every step.
    meeting = threading.Barrier(3)
    together = Training(digits(200, 0), tmp_path, 3, lambda _: meeting.wait(PATIENCE_S))
    alone = Training(digits(200, 0), tmp_path, 3)
    recipe = recipe_on("cpu", batch=50)
    expected = [
        on_devices(recipe, 1, lambda ops, _, seed=seed: alone(ops, seed)) for seed in range(3)
    ]
    assert side_by_side(recipe, 3, together) == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("error", [ValueError("of seed 1"), KeyboardInterrupt()])
def test_a_failure_or_an_interruption_of_one_seed_stops_the_others(
    device, error, fake_gpus, digits, tmp_path, monkeypatch
):
    gpus = fake_gpus(1)
    interrupted = isinstance(error, KeyboardInterrupt)
    started, stopped, all_at_once = set(), set(), threading.Barrier(3 + interrupted)

    def before_step(number):
        if number not in started:
            started.add(number)
            all_at_once.wait(PATIENCE_S)
            if number == 1 and not interrupted:
                raise error

    if interrupted:
        monkeypatch.setattr(devices, "wait", Interrupted(all_at_once))
    endless = Training(digits(200, 0), tmp_path, 200, before_step)

    def work(ops, number):
        try:
            endless(ops, number)
        except DeviceError:
            stopped.add(number)
            raise

    with pytest.raises(type(error)):
        side_by_side(recipe_on(device, batch=50), 3, work)
    assert stopped == ({0, 1, 2} if interrupted else {0, 2})
    assert len(gpus.opened) == len(gpus.closed) == (3 if device == "cuda" else 0)
