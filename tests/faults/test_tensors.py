"""Shapes and sizes that lie, over gRPC and in npy files, at a running service."""

from __future__ import annotations

import io
import json

import grpc
import numpy as np
import pytest

from tests.faults.clients import ask, grpc_status, infer_request, request

ONE = np.zeros((1, 28, 28), np.uint8)
MOST = 2**63 - 1

SHAPES = {
    "a negative dimension": (-1, 28, 28),
    "the least number": (-(2**63), 28, 28),
    "no images": (0, 28, 28),
    "a dimension of 0": (1, 0, 28),
    "the greatest number": (MOST, 28, 28),
    "a product that is 0 modulo 2**64": (2**32, 2**32, 1),
    "a product that is 784 modulo 2**64": (2**62 + 1, 28, 28),
    "all the greatest": (MOST, MOST, MOST),
    "rank 0": (),
    "rank 1": (28,),
    "rank 5": (1, 1, 1, 28, 28),
    "rank 10,000": (1,) * 10_000,
    "two images in the bytes of one": (2, 28, 28),
    "other sides": (1, 14, 56),
}
TOO_MANY = ("the greatest number", "a product that is 784 modulo 2**64")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_lies_is_invalid_and_named(stub, intact, name):
    outcome = "too_large" if name in TOO_MANY else "invalid_input"
    with intact(moved={f"grpc {outcome}": 1}):
        message = infer_request(ONE, shape=SHAPES[name])
        status, details = grpc_status(stub.ModelInfer, message)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs[0]" in details or "raw_input_contents[0]" in details
    assert len(details) < 400


CONTENTS = {
    "a byte too many": {"raw": [ONE.tobytes() + b"0"]},
    "a byte too few": {"raw": [ONE.tobytes()[:-1]]},
    "no bytes": {"raw": [b""]},
    "no contents at all": {"raw": []},
    "contents of two inputs": {"raw": [ONE.tobytes(), ONE.tobytes()]},
    "raw and typed contents": {"contents": [0] * 784},
    "typed contents, one too few": {"raw": [], "contents": [0] * 783},
    "typed contents over 255": {"raw": [], "contents": [256] * 784},
    "floats in bytes of 1": {"datatype": "FP32"},
    "booleans": {"datatype": "BOOL"},
    "an unknown type": {"datatype": "UINT8; DROP"},
    "no type": {"datatype": ""},
    "an unknown name": {"name": "image\x00"},
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_do_not_fit_are_invalid_and_named(stub, intact, name):
    with intact(moved={"grpc invalid_input": 1}):
        status, details = grpc_status(stub.ModelInfer, infer_request(ONE, **CONTENTS[name]))
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs" in details or "raw_input_contents" in details
    assert len(details) < 400


def _npy(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _lying(shape):
    plain = _npy(ONE)
    text = b"(1, 28, 28)"
    assert text in plain
    lie = repr(shape).encode()
    # The header keeps its length: spaces at its end make room.
    header = plain[:128].replace(text, lie).rstrip(b" \n")
    return header + b" " * (127 - len(header)) + b"\n" + plain[128:]


NPY = {
    "negative": _lying((-1, 28, 28)),
    "2**62 images": _lying((2**62, 28, 28)),
    "two images in the bytes of one": _lying((2, 28, 28)),
    "no images": _npy(ONE[:0]),
    "rank 5": _npy(ONE[np.newaxis, np.newaxis]),
    "floats": _npy(ONE.astype(np.float64)),
    "booleans": _npy(ONE.astype(bool)),
    "objects": _npy(np.array([None])),
    "trailing bytes": _npy(ONE) + b"0",
    "a header of 60 KB": b"\x93NUMPY\x01\x00\x60\xea" + b" " * 60_000,
    "only the magic": b"\x93NUMPY",
}


@pytest.mark.parametrize("name", NPY)
def test_an_npy_file_that_lies_is_refused_by_its_header(served, intact, name):
    status, outcome = (413, "too_large") if name == "2**62 images" else (400, "invalid_input")
    with intact(moved={f"http {outcome}": 1}):
        answer = ask(served.port, request(NPY[name], kind=b"application/x-npy"))
    assert answer.status == status
    assert json.loads(answer.body)["error"]["field"]
