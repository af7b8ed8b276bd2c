"""The soak for a short time, and its arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.faults.soak import slope_and_margin
from tests.service_process import PROJECT


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", *arguments],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_nothing_is_wrong_in_a_short_soak(seed):
    assert "\n0 wrong" in run("--duration", "30s", "--seed", str(seed))


@pytest.mark.long
def test_nothing_is_wrong_when_workers_are_killed():
    table = run("--duration", "120s", "--workers", "2")
    assert "\n0 wrong" in table
    assert "2 kills" in table


def test_a_slope_is_found_within_its_margin_and_none_where_there_is_none():
    at = np.linspace(0, 2, 400)
    noise = np.random.default_rng(0).normal(0, 1, at.size)
    for slope in (3, 0):
        found, margin = slope_and_margin(at, 5 + slope * at + noise)
        assert abs(found - slope) < margin < 0.3
