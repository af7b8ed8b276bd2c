from __future__ import annotations

import pytest

from lenet.context import Target, open_backend


@pytest.fixture
def backend():
    """The backend of a machine without a GPU; `tests/gpu` has the others."""
    return open_backend(Target("cpu"))
