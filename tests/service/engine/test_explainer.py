from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lenet import explanation
from lenet.explanation import Change
from lenet.model import DenseBlock, Model
from service.engine import explainer as module
from service.engine.deadlines import Deadlines
from service.engine.explainer import Explained, Explainer
from service.engine.versions import ModelVersion
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    Unavailable,
)
from tests.conftest import draw_weights
from tests.documented import documented
from tests.service_process import PATIENCE_S
from tests.wire.doors import until


class Held:
    """Explanations begin, and compute each layer when `release` is called."""

    def __init__(self, monkeypatch):
        self._released, self.begun, self.layers = threading.Semaphore(0), 0, 0

        def explain(*arguments):
            self.begun += 1
            for layer in explanation.explain(*arguments):
                assert self._released.acquire(timeout=PATIENCE_S), "nobody released a layer"
                self.layers += 1
                yield layer

        monkeypatch.setattr(module, "explain", explain)

    def release(self, layers=1000):
        self._released.release(layers)


@pytest.fixture
def held(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.release()


@pytest.fixture
async def explainer():
    deadlines = Deadlines()
    with Explainer(deadlines) as explainer:
        yield explainer
    assert not deadlines._waiting
    deadlines.close()


class Asked(Explained):
    """What a request for an explanation has."""


class Asking:
    """Asks for explanations; `answers` are what came of them, by name."""

    def __init__(self, explainer, model):
        weights = draw_weights(model)
        self._version = ModelVersion("m", "1", Path("m/1"), weights, "")
        self._explainer, self.answers, self.requests = explainer, {}, {}

    def ask(self, name, change=Change(), timeout_s=20.0):  # noqa: B008 - frozen
        def answered(error):
            assert name not in self.answers
            self.answers[name] = error or [layer.kind for layer in self.requests[name].layers]

        request = Asked()
        request.deadline_s, request.answered = time.monotonic() + timeout_s, answered
        request.index, request.change, request.layers = 0, change, []
        self._explainer.enqueue(request, np.zeros((1, 28, 28), np.uint8), self._version)
        self.requests[name] = request

    async def answered(self, *names):
        await until(lambda: self.answers.keys() >= set(names))


@pytest.fixture
def asking(explainer, tiny):
    return Asking(explainer, Model("m", (DenseBlock(3), *tiny.blocks)))


@pytest.mark.states(
    "limits",
    "explanations that wait in a worker",
    found="explanations behind one that is held, until one is refused",
)
async def test_no_more_wait_than_the_limit_and_one_that_leaves_makes_room(asking, held, explainer):
    (most,) = map(int, documented("explanations that wait in a worker"))
    for number in range(1 + most):
        asking.ask(number)
    with pytest.raises(Overloaded, match=f"{most} explanations wait") as caught:
        asking.ask("refused")
    assert caught.value.retry_after_s == 1
    explainer.cancel(asking.requests[7])
    asking.ask("admitted")
    held.release()
    await asking.answered("admitted")
    assert list(asking.answers) == [*range(7), *range(8, 1 + most), "admitted"]


@pytest.mark.states(
    "limits",
    "images in a request for an explanation; operations of a network",
    found="networks of a hidden unit more and less: 784 + 10 multiplications each",
)
async def test_a_network_of_too_many_operations_is_refused(explainer, held, tiny):
    most = int(documented("images in a request for an explanation")[1])
    units = most // 794
    for count, kind in ((units, list), (units + 1, InvalidInput)):
        asking = Asking(explainer, Model("m", (DenseBlock(count), *tiny.blocks)))
        asking.ask("one")
        held.release()
        await asking.answered("one")
        assert type(asking.answers["one"]) is kind


async def test_one_that_is_cancelled_while_it_is_computed_ends_after_its_layer(
    asking, held, explainer
):
    asking.ask("left")
    await until(lambda: held.begun == 1)
    explainer.cancel(asking.requests["left"])
    asking.ask("next")
    held.release()
    await asking.answered("next")
    assert set(asking.answers) == {"next"}
    assert held.layers == 1 + 2


async def test_a_deadline_ends_one_that_waits_and_one_that_is_computed(asking, held):
    asking.ask("computed", timeout_s=0.001)
    asking.ask("waits", timeout_s=0.001)
    await asking.answered("computed", "waits")
    assert {type(error) for error in asking.answers.values()} == {DeadlineExceeded}
    asking.ask("next")
    held.release()
    await asking.answered("next")
    assert held.begun == 2  # the one that waited never began


async def test_whoever_waits_is_answered_when_it_is_closed(asking, held, explainer):
    asking.ask("computed")
    asking.ask("waits")
    await until(lambda: held.begun == 1)
    held.release()
    explainer.__exit__()
    assert {type(error) for error in asking.answers.values()} == {Unavailable}
    with pytest.raises(Unavailable):
        asking.ask("late")


async def test_an_unknown_block_is_refused_and_the_known_ones_are_named(asking):
    asking.ask("it", Change(noisy="conv1", noise=1.0))
    await asking.answered("it")
    error = asking.answers["it"]
    assert isinstance(error, InvalidInput)
    assert error.message == "noisy: got 'conv1', expected one of dense1, dense2"


async def test_values_that_are_not_finite_fail_and_the_next_is_computed(asking):
    weights = asking._version.weights
    weights.tensors["dense1.bias"] = np.full(3, 3e38, np.float32)
    weights.tensors["dense2.weight"] = np.full((10, 3), 3e38, np.float32)
    asking.ask("overflows")
    await asking.answered("overflows")
    assert isinstance(asking.answers["overflows"], InferenceFailed)
    assert "dense2" in asking.answers["overflows"].message
