"""Fixtures for every test: weight files, networks, real digits, an event loop on virtual time,
running services."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

# Before NumPy and ONNX Runtime are loaded. Two BLAS threads slow each other down when other
# programs want the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.errors import InvalidModel
from lenet.model import IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool, named
from lenet.weightfile import GOLDEN_IMAGES, Golden, Training, WeightFile
from tests.service_process import Service
from trainer.mnist import FILES, load
from website.build import build

# Every machine tries the same examples: they are derived from the name of the test.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # so is a busy machine
)
settings.load_profile("suite")

ROOT = Path(__file__).parents[1]

# Tests of these folders, and those that take these fixtures, start a service, a browser, a load or
# a program that takes seconds.
PROCESS_FOLDERS = {"benchmarks", "browser", "faults", "interop"}
PROCESS_FIXTURES = {"start", "serving", "site", "promtool"}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a process; elsewhere a module or a test bears the marker itself."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if item.path.parent.name in PROCESS_FOLDERS or PROCESS_FIXTURES & fixtures:
            item.add_marker("process")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped, a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", ())
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts run without coverage.

    Its tracer holds a lock while it meets a file for the first time. A signal handler that raises
    or sleeps there leaves the lock taken, and the process never ends. It also writes a file.
    """
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)


def draw_weights(model: Model | str, seed: int = 0) -> WeightFile:
    """A valid weight file: He-scaled random tensors, random images, float64 golden logits."""
    model = (named(model) if isinstance(model, str) else model).folded
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in model.parameters().items():
        spread = 0.1 if len(shape) == 1 else math.sqrt(2 / math.prod(shape[1:]))
        tensors[name] = (generator.standard_normal(shape) * spread).astype(np.float32)
    images = generator.integers(0, 256, (GOLDEN_IMAGES, 28, 28), np.uint8)
    exact = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    logits = reference.logits(model, exact, images)
    golden = Golden(images, logits.argmax(axis=1).astype(np.uint8), logits.astype(np.float32))
    training = Training(
        dataset_sha256="0" * 64,
        seed=seed,
        command="python -m trainer",
        epochs=1,
        accuracy=0.5,
        labels=tuple(str(label) for label in range(model.classes)),
    )
    return WeightFile(model, tensors, golden, training)


@pytest.fixture(scope="session")
def random_weights() -> Callable[..., WeightFile]:
    """`random_weights(model_or_name, seed=0)`: cached by its arguments."""
    return cache(draw_weights)


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The smallest network: one dense layer from 784 pixels to ten logits."""
    return Model("tiny", (DenseBlock(10, activation=IDENTITY),))


def _pair(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def _pools(draw: st.DrawFn) -> Pool:
    kind = draw(st.sampled_from(["max", "average", "global_average"]))
    size = draw(_pair(1, 3))
    padding = tuple(draw(st.integers(0, side // 2)) for side in size)
    return Pool(kind, size, draw(_pair(1, 3)), padding)


# Built once: Hypothesis validates a strategy before its first draw, longer than it then draws.
_ACTIVATIONS = st.builds(
    Activation,
    st.sampled_from(["identity", "relu", "clipped_relu", "elu", "sigmoid", "tanh"]),
    st.sampled_from([0.25, 1.0, 6.0]),
)
_CONVOLUTIONS = st.lists(
    st.builds(
        ConvBlock,
        channels=st.integers(1, 4),
        kernel=_pair(1, 4),
        stride=_pair(1, 2),
        padding=_pair(0, 2),
        dilation=_pair(1, 2),
        batch_norm=st.booleans(),
        activation=_ACTIVATIONS,
        pool=st.none() | _pools(),
    ),
    max_size=2,
)
_DENSE = st.lists(st.builds(DenseBlock, st.integers(1, 8), st.booleans(), _ACTIVATIONS), max_size=1)


@st.composite
def _networks(draw: st.DrawFn) -> Model:
    while True:
        blocks = [
            *draw(_CONVOLUTIONS),
            *draw(_DENSE),
            DenseBlock(draw(st.integers(2, 12)), activation=IDENTITY),
        ]
        try:
            return Model("drawn", tuple(blocks))
        except InvalidModel:
            continue


@pytest.fixture(scope="session")
def networks() -> st.SearchStrategy[Model]:
    """Random networks with every activation, pooling, stride, padding and dilation."""
    return _networks()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when nothing is ready, its time jumps to the next timer.

    `before_jump` is called before each jump, when nothing is left to do at the present time.

    Raises:
        RuntimeError: nothing is ready and no timer is set: a deadlock.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self.before_jump: Callable[[], None] = lambda: None
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass while nothing runs, as for a process that is stopped."""
        self._now_s += seconds

    def pending_timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]

    def _jump(self) -> None:
        self.before_jump()
        if not self._scheduled:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self._now_s = max(self._now_s, self._scheduled[0].when())


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # What was sent through a socket may be on its way. One socket is the loop's own.
        in_flight_s = 0.005 if timeout != 0 and len(self.get_map()) > 1 else 0
        events = super().select(in_flight_s)
        if not events and timeout != 0:
            self._jump()
        return events


def _run_virtually(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main(runner.get_loop()))


@pytest.fixture(scope="session")
def run_virtually() -> Callable[[Callable[[VirtualTimeLoop], Coroutine[Any, Any, Any]]], Any]:
    """`run_virtually(main)` runs `main(loop)` to its end on a `VirtualTimeLoop`."""
    return _run_virtually


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The folder with the four real MNIST files; skips the test if there is none."""
    folder = Path(os.environ.get("LENET_TEST_MNIST", ROOT / "data" / "mnist"))
    if any(file.find(folder) is None for file in FILES):
        pytest.skip(f"MNIST is not in {folder}; set LENET_TEST_MNIST to its folder")
    return folder


@pytest.fixture(scope="session")
def mnist(mnist_folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The 10,000 real test images, uint8 (10000, 28, 28), and their labels, uint8 (10000,)."""
    test = load(mnist_folder).test
    return test.images, test.labels


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder with the site of the documentation, built from this checkout."""
    pytest.importorskip("zensical", reason="zensical, which builds the site, is not installed")
    return build(ROOT, tmp_path_factory.mktemp("site"))


@pytest.fixture
def folder(tmp_path):
    """An empty weights folder."""
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def write(folder, random_weights, tiny):
    """`write("a/1")` puts a valid file of model `a`, the smallest there is, into `folder`."""

    def write(place, *, seed=0, name=None):
        path = folder / f"{place}.safetensors"
        model = Model(name or path.parent.name, tiny.blocks)
        random_weights(model, seed).write(path)
        return path

    return write


@pytest.fixture
def tiny_weights(folder, write):
    """A folder with the one model `lenet`."""
    write("lenet/1")
    return folder


@pytest.fixture
def second_version(tiny_weights, write):
    """`second_version()` puts version 2 of `lenet` beside the first."""
    return lambda: write("lenet/2", seed=1)


@pytest.fixture
def start(tmp_path, tiny_weights):
    """`start("--workers", "2")` runs the service on free ports; killed when the test ends."""
    services = []

    def start_(*arguments, port=0, grpc_port=0, **options):
        ports = ("--port", str(port), "--grpc-port", str(grpc_port))
        service = Service([*ports, "--max-batch-rows", "4", *arguments], tmp_path, **options)
        services.append(service)
        return service

    yield start_
    for service in services:
        service.end()


@pytest.fixture
def ranges(monkeypatch):
    """The ranges that a profiler sees: what began, and the places in it of what ended."""
    began, ended, numbers = [], [], itertools.count(1)

    def begin(name):  # contexts have threads of their own
        began.append(name)
        return next(numbers)

    monkeypatch.setattr("lenet.nvtx.active", True)
    monkeypatch.setattr("lenet.nvtx.begin", begin)
    monkeypatch.setattr("lenet.nvtx.end", lambda place: place and ended.append(place))
    return began, ended
