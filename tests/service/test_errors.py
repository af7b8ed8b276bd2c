from __future__ import annotations

import errno

import pytest

from lenet.errors import (
    BackendUnavailable,
    DeviceError,
    GoldenMismatch,
    InvalidModel,
    InvalidWeightFile,
    OutOfDeviceMemory,
)
from service import errors
from service.errors import STARTUP_ERRORS, CannotListen, ExitCode, ServiceError, exit_code


def every(kind=ServiceError):
    children = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return [kind, *(found for child in children for found in every(child))]


def test_the_tree_in_the_docstring_is_the_tree():
    for kind in (*every(), CannotListen):
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidWeightFile("x"), ExitCode.WEIGHTS),
        (InvalidModel("x"), ExitCode.WEIGHTS),
        (GoldenMismatch("x"), ExitCode.WEIGHTS),
        (BackendUnavailable("x"), ExitCode.BACKEND),
        (DeviceError("x"), ExitCode.BACKEND),
        (OutOfDeviceMemory("x"), ExitCode.BACKEND),
        (DeviceError("x", sticky=True), ExitCode.DEVICE),
        (CannotListen(errno.EADDRINUSE, "x"), ExitCode.ADDRESS),
    ],
)
def test_each_reason_not_to_start_has_its_exit_code(error, code):
    assert isinstance(error, STARTUP_ERRORS)
    assert exit_code(error) is code
