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
from service.errors import (
    GRPC_STATUS,
    STARTUP_ERRORS,
    STATUS,
    CannotListen,
    ExitCode,
    ServiceError,
    exit_code,
)
from service.observe.traces import FAULTS
from wire.errors import InvalidCertificate, Refusal


def every(kind=ServiceError):
    children = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return [kind, *(found for child in children for found in every(child))]


def test_the_tree_in_the_docstring_is_the_tree():
    for kind in (*every(), CannotListen):
        assert kind.__name__ in errors.__doc__


def test_every_error_has_a_status_over_http_and_grpc_and_traces_know_whose_fault_it_is():
    def codes(kind):
        return {kind.code}.union(*map(codes, kind.__subclasses__()))

    assert codes(Refusal) == set(STATUS) == set(GRPC_STATUS)
    assert 422 not in STATUS.values()
    assert {code for code, status in STATUS.items() if status >= 500} == FAULTS
    assert GRPC_STATUS["invalid_input"] == "INVALID_ARGUMENT"


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
        (InvalidCertificate("x"), ExitCode.SETTINGS),
    ],
)
def test_each_reason_not_to_start_has_its_exit_code_and_a_bug_has_none(error, code):
    assert isinstance(error, STARTUP_ERRORS)
    assert exit_code(error) is code
    assert not isinstance(OSError(errno.ENOSPC, "x"), STARTUP_ERRORS)
