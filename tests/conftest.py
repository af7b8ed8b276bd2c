"""What every test may ask for: weights that prove themselves, real digits, time that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import selectors
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Both before NumPy and ONNX Runtime are loaded: two BLAS threads wait for each other when other
# programs want the cores, and tests need tell nobody of themselves.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from lenet import reference
from lenet.errors import InvalidModel
from lenet.model import IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool, named
from lenet.weightfile import GOLDEN_IMAGES, Golden, Training, WeightFile
from trainer.mnist import FILES, load

# One machine's luck must not be another's failure: examples come from the test's own name.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

ROOT = Path(__file__).parents[1]


def _draw_weights(model: Model | str, seed: int = 0) -> WeightFile:
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
    """`random_weights(model_or_name, seed=0)`; the same arguments give the same object."""
    return cache(_draw_weights)


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The smallest network that is one: 784 pixels, ten logits."""
    return Model("tiny", (DenseBlock(10, activation=IDENTITY),))


def _pair(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def _pools(draw: st.DrawFn) -> Pool:
    kind = draw(st.sampled_from(["max", "average", "global_average"]))
    size = draw(_pair(1, 3))
    padding = tuple(draw(st.integers(0, side // 2)) for side in size)
    return Pool(kind, size, draw(_pair(1, 3)), padding)


# Made once: Hypothesis looks at a strategy before it first draws from it, longer than it draws.
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
    """Described networks with every activation, pooling, stride, padding and dilation."""
    return _networks()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never waits: when nothing is ready, time jumps to the next timer.

    Where no timer is left either, everybody waits for ever, and it says so. `before_jump` is
    called when everything that could be done at one time has been done.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self.before_jump: Callable[[], None] = lambda: None
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now_s

    def pending_timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]

    def _jump(self) -> None:
        self.before_jump()
        if not self._scheduled:
            raise RuntimeError("nothing is ready and no timer is set: somebody waits for ever")
        self._now_s = max(self._now_s, self._scheduled[0].when())


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            self._jump()
        return events


def _run_virtually(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main(runner.get_loop()))


@pytest.fixture(scope="session")
def run_virtually() -> Callable[[Callable[[VirtualTimeLoop], Coroutine[Any, Any, Any]]], Any]:
    """`run_virtually(main)` runs `main(loop)` to its end on a loop whose time is virtual."""
    return _run_virtually


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """Where the four real MNIST files are, or a skip."""
    folder = Path(os.environ.get("LENET_TEST_MNIST", ROOT / "data" / "mnist"))
    if any(file.find(folder) is None for file in FILES):
        pytest.skip(f"MNIST is not in {folder}; set LENET_TEST_MNIST to its folder")
    return folder


@pytest.fixture(scope="session")
def mnist(mnist_folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The 10,000 real test images, uint8 (10000, 28, 28), and their labels, uint8 (10000,)."""
    test = load(mnist_folder).test
    return test.images, test.labels


class _Nvcc:
    """Compilations, one after another beside the tests, in one process of low priority.

    One process and no thread: a test that patches a clock or a module meets nobody.
    """

    def __init__(self, compilations: list[tuple[str, ...]], folder: Path) -> None:
        self._said = {key: folder / f"{number}.txt" for number, key in enumerate(compilations)}
        self._codes: list[int] = []
        lines = [
            f"nvcc {shlex.join(key)} -o /dev/null 2> {shlex.quote(str(said))}; echo $?\n"
            for key, said in self._said.items()
        ]
        (folder / "compile.sh").write_text("".join(lines))
        self._process = subprocess.Popen(
            ["nice", "sh", folder / "compile.sh"], stdout=subprocess.PIPE, start_new_session=True
        )

    def __call__(self, arguments: tuple[str, ...], refused: bool = False) -> str:
        """What nvcc and ptxas say of `arguments`, once they do; fails unless it compiles.

        With `refused` it fails if it compiles.
        """
        number = list(self._said).index(arguments)
        while len(self._codes) <= number:
            self._codes.append(int(self._process.stdout.readline()))
        said = self._said[arguments].read_text()
        assert (self._codes[number] != 0) == refused, said
        return said

    def close(self) -> None:
        with self._process:
            if self._process.poll() is None:  # the session ends before its last test
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def _nvcc(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Nvcc | None]:
    # From the first test on, since the second core has little else to do: 28
    # compilations take 22 s where tests wait for them (two cores of an EPYC, 2026-11-20).
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    wanted = [call.params["nvcc_arguments"] for call in calls if "nvcc_arguments" in call.params]
    if not wanted or shutil.which("nvcc") is None:
        yield None
        return
    with contextlib.closing(_Nvcc(wanted, tmp_path_factory.mktemp("nvcc"))) as nvcc:
        yield nvcc


@pytest.fixture
def nvcc_says(_nvcc: _Nvcc | None) -> _Nvcc:
    """`nvcc_says(nvcc_arguments)`: its standard error; the parameter of that name starts it."""
    if _nvcc is None:
        pytest.skip("nvcc is not on PATH")
    return _nvcc
