"""Real service processes that are attacked; `start` is the fixture of tests/conftest.py."""

from __future__ import annotations

import os


def pytest_generate_tests(metafunc):
    """A test that takes `seed` runs once, or with FAULT_SEEDS (a number) different seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(int(os.environ.get("FAULT_SEEDS", "1"))))
