import gzip
import struct
import sys
import threading
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest

from lenet.errors import BackendUnavailable, OutOfDeviceMemory
from tests.service_process import PATIENCE_S
from trainer.augment import WarpLimits
from trainer.mnist import FILES, Dataset, Digits
from trainer.network import take_step
from trainer.ops import Run
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd

# The error of a central difference in float64 is about h^2 + 1e-16 / h, so 1e-9 at this h.
H = 1e-5
TOLERANCE = 1e-6


def _numeric(function, x):
    """The gradient of a scalar function at x by central differences."""
    gradient = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + H
        above = function()
        x[place] = kept - H
        below = function()
        x[place] = kept
        gradient[place] = (above - below) / (2 * H)
    return gradient


@pytest.fixture(scope="session")
def assert_slope():
    """`assert_slope(computed, function, x)`: a gradient against differences in float64."""
    return _assert_slope


def _assert_slope(computed, function, x):
    expected = _numeric(function, x)
    scale = np.abs(expected).max()
    assert np.abs(computed - expected).max() <= TOLERANCE * max(scale, 1e-3)


def idx_bytes(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def synthetic_digits(count, seed):
    """Each class a bright bar at its own height, with noise: learnt in one epoch."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    random.shuffle(labels)
    images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[3 + 2 * label : 5 + 2 * label, 6:22] = 230
    return Digits(images, labels)


@pytest.fixture
def digits():
    return synthetic_digits


@pytest.fixture
def tiny():
    """400 training and 60 test images."""
    return Dataset(synthetic_digits(400, 0), synthetic_digits(60, 1), "0" * 64)


def plain_run(digits, batch, rates, seed=0):
    """A run that changes no image; the rates in whatever precision they have."""
    return Run(digits, batch, WarpLimits(), seed, np.asarray(rates))


@pytest.fixture(scope="session")
def run_of():
    """`run_of(digits, batch, rates, seed=0)`: a run without augmentation."""
    return plain_run


@pytest.fixture(scope="session")
def practise():
    """Take some steps at one rate; returns their losses."""

    def practise(network, digits, batch, steps, rate):
        state = network.ops.start(plain_run(digits, batch, np.full(steps, rate)))
        sgd = Sgd(network.model, network.parameters, network.ops)
        for _ in range(steps):
            take_step(network, sgd, state)
        return network.ops.losses(state, 0, steps)[0]

    return practise


@pytest.fixture
def write_idx(tmp_path):
    """Write a dataset's four files, gzip or not, into a folder of tmp_path, and return it."""

    def write(dataset, packed=False):
        folder = tmp_path / "digits"
        folder.mkdir(exist_ok=True)
        parts = (dataset.train.images, dataset.train.labels, dataset.test.images)
        for file, array in zip(FILES, (*parts, dataset.test.labels), strict=True):
            content = idx_bytes(array)
            if packed:
                (folder / f"{file.name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / file.name).write_bytes(content)
        return folder

    return write


class FakeGpus:
    """Stands in for `trainer.ops_cuda`: each GPU is the CPU.

    As with NCCL, a rank is constructed only when all of them are, and one can be left or aborted
    only when its GPU is closed, and with it the graphs that hold its all-reduces.
    """

    def __init__(self):
        self.opened, self.closed, self.ranks = [], [], []
        gpus = self

        class CudaOps(CpuOps):
            name = "cuda"
            memory_bytes = 12_000_000

            def __init__(self, precision, device=0, cache=None, stopping=None):
                super().__init__(stopping=stopping)
                self.precision, self.device, self.stopping = precision, device, stopping
                self.thread, self.joined = threading.get_ident(), None
                self.left = threading.Event()
                gpus.opened.append(self)

            def join(self, ranks):
                self.joined = ranks

            def __enter__(self):
                return self

            def __exit__(self, *_):
                gpus.closed.append(self)
                self.left.set()

        class Ranks:
            def __init__(self, identity, rank, size, barrier, stopping):
                self.rank, self.size = rank, size
                self.barrier = barrier.wait
                self.marked = threading.Event()
                self.aborted, self.closed = threading.Event(), threading.Event()
                with gpus._lock:
                    gpus.ranks.append(self)
                    all_made = gpus._meetings.setdefault(identity, threading.Barrier(size))
                all_made.wait(PATIENCE_S)

            def mark_aborted(self):
                self.marked.set()

            def abort(self):
                assert all(ranks.marked.is_set() for ranks in gpus.ranks), "a rank may go on"
                self.aborted.set()
                assert self._ops().left.wait(PATIENCE_S), "aborting waits for ever"

            def close(self):
                assert self._ops().left.is_set(), "leaving waits for ever"
                self.closed.set()

            def _ops(self):
                return [ops for ops in gpus.opened if ops.device == self.rank][-1]

        self._lock, self._meetings = threading.Lock(), {}
        self.CudaOps, self.Ranks = CudaOps, Ranks

    def new_identity(self):
        return object()


@pytest.fixture
def no_gpu(monkeypatch):
    """The reason that is given for there being none."""
    reason = "there is no NVIDIA GPU here"

    def check_gpu(_device):
        raise BackendUnavailable(reason)

    monkeypatch.setattr("trainer.devices.check_gpu", check_gpu)
    return reason


@contextmanager
def translated(what):
    """Replaces `lenet.cuda.device.translated`, which needs CuPy's errors."""
    try:
        yield
    except MemoryError as exc:  # of which CuPy's is one
        raise OutOfDeviceMemory(f"{what}: {exc}") from exc


@pytest.fixture
def fake_gpus(monkeypatch, tmp_path):
    """`fake_gpus(count)`: from now on there are so many, and they are `FakeGpus`."""

    def install(count):
        gpus = FakeGpus()
        for module, names in {"ops": ("CudaOps",), "ranks": ("Ranks", "new_identity")}.items():
            fake = ModuleType(f"trainer.ops_cuda.{module}")
            for name in names:
                setattr(fake, name, getattr(gpus, name))
            monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.setattr("trainer.devices.check_gpu", lambda _device: None)
        monkeypatch.setattr("trainer.devices.devices", lambda: count)
        monkeypatch.setattr("trainer.devices.translated", translated)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return gpus

    return install


@pytest.fixture(scope="session")
def rings_and_bars():
    """Twenty rings and bars instead of digits, so that no files are needed."""
    y, x = np.indices((28, 28)) - 13.5
    ring = (np.abs(np.hypot(x, y * 0.8) - 7) < 1.6) * 255
    bar = ((np.abs(x) < 1.6) & (np.abs(y) < 10)) * 255
    return Digits(np.array([ring, bar] * 10, np.uint8), np.array([0, 1] * 10, np.uint8))
