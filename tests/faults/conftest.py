"""Real service processes that are attacked; `start` is the fixture of tests/conftest.py."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.faults.checks import unharmed
from tests.faults.clients import WEIGHTS, Digits, Known
from tests.service_process import Service

SEEDS = int(os.environ.get("FAULT_SEEDS", "1"))
COMMITTED = ("--weights", str(WEIGHTS), "--models", "lenet")


def pytest_generate_tests(metafunc):
    """A test that takes `seed` runs once, or with FAULT_SEEDS (a number) different seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture(scope="session")
def digits():
    """300 images whose probabilities are known."""
    return Digits(300)


@pytest.fixture(scope="session")
def _shared(tmp_path_factory):
    """The service of `served`, started when it is first used and again when it has ended."""
    running = []

    def get():
        if not running or running[-1].process.poll() is not None:
            folder = tmp_path_factory.mktemp("served")
            running.append(Service(["--port", "0", "--grpc-port", "0", *COMMITTED], folder).ready())
            assert running[-1].get("/openapi.json")[0] == 200  # is made when it is first asked for
        return running[-1]

    yield get
    for service in running:
        service.end()


@pytest.fixture
def served(_shared):
    """A ready service with the committed `lenet`, for experiments that leave it as it was."""
    return _shared()


@pytest.fixture
def known(served, digits):
    return Known(served, digits)


@pytest.fixture
def start_committed(start):
    """`start` with the committed `lenet` and batches of the default size."""
    return partial(start, *COMMITTED, "--max-batch-rows", "64")


@pytest.fixture
def intact(served, digits):
    """`with intact(moved=...):` is `unharmed` for `served`."""
    return partial(unharmed, served, digits.golden)
