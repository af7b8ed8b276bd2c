"""The pool over the CPU backend: what is added up, and what happens when a context fails."""

import threading
from contextlib import contextmanager

import pytest

from benchmarks import engine_pool
from benchmarks.engine_pool import (
    Context,
    ContextFailed,
    best,
    contexts,
    measure_gpus,
    measure_pool,
    together_per_s,
)
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable

SHORT_S = 1e-6  # one batch


class InPlace:
    """The CPU backend's plan, with a place where images can lie as they do for the engine's."""

    def __init__(self, plan, told=lambda rows: None):
        self._plan, self._told, self._images = plan, told, None

    def run(self, images):
        self._images = images
        return self._plan.run(images)

    def run_in_place(self, rows):
        self._told(rows)
        return self._plan.run(self._images[:rows])


class Cpu(CpuBackend):
    def plan(self, weights, batch):
        return InPlace(super().plan(weights, batch))


@contextmanager
def open_cpu(device):
    yield Cpu()


@contextmanager
def open_nothing(device):
    raise BackendUnavailable("there is no such device")
    yield


class Watched:
    """Opens CPU backends and notes on which thread each is opened, used and closed."""

    def __init__(self):
        self.opened, self.used, self.closed = [], set(), []

    @contextmanager
    def __call__(self, device):
        self.opened.append((device, threading.get_ident()))
        yield self
        self.closed.append((device, threading.get_ident()))

    def plan(self, weights, batch):
        return InPlace(
            CpuBackend().plan(weights, batch),
            lambda rows: self.used.add((threading.get_ident(), rows)),
        )


@pytest.fixture
def weights(random_weights, tiny):
    return random_weights(tiny)


def test_each_context_lives_on_one_thread_of_its_own(weights):
    watched = Watched()
    with contexts(watched, [0, 1], weights, [1, 3]) as members:
        assert together_per_s(members, 3, SHORT_S) > 0
        assert watched.closed == []
    assert [device for device, _ in watched.opened] == [0, 1]
    assert sorted(watched.closed) == sorted(watched.opened)
    threads = {thread for _, thread in watched.opened}
    assert len(threads) == 2
    assert watched.used == {(thread, 3) for thread in threads}


def test_a_pool_is_measured_for_every_number_of_contexts_and_batch_size(weights):
    found = measure_pool(open_cpu, weights, rows=(1, 4), counts=(1, 2), duration_s=SHORT_S)
    assert [(one["contexts"], one["rows"]) for one in found] == [(1, 1), (2, 1), (1, 4), (2, 4)]
    assert all(one["images_per_s"] > 0 for one in found)


def test_the_best_is_that_of_a_number_of_contexts():
    rates = [(1, 256, 9.0), (2, 256, 5.0), (2, 512, 7.0), (4, 512, 8.0)]
    found = [dict(zip(("contexts", "rows", "images_per_s"), one, strict=True)) for one in rates]
    assert best(found, 2)["rows"] == 512


def test_a_context_that_cannot_be_opened_says_so_and_leaves_no_thread(weights):
    before = threading.active_count()
    with pytest.raises(BackendUnavailable, match="no such device"):
        Context(open_nothing, 0, weights, [1])
    assert threading.active_count() == before


def test_several_devices_are_compared_with_one_in_threads_and_in_processes(weights, tmp_path):
    path = tmp_path / "1.safetensors"
    weights.write(path)
    found = measure_gpus(open_cpu, path, gpus=2, count=1, rows=2, duration_s=SHORT_S)
    assert (found["n"], found["contexts"], found["rows"]) == (2, 1, 2)
    for kind in ("threads", "processes"):
        rates = found[kind]
        assert rates["ratio"] == rates["images_per_s"] / rates["one_gpu_images_per_s"] > 0


def test_a_process_that_fails_says_why(weights, tmp_path):
    path = tmp_path / "1.safetensors"
    weights.write(path)
    workers = engine_pool._workers(open_nothing, path, 1, 1, 2, SHORT_S)
    with pytest.raises(ContextFailed, match="no such device"), workers:
        pass
