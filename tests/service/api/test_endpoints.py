"""What clients of other servers send first, by every door it can come by: a seven is a seven."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from service.api.schemas import example_seven
from service.forms import open_inference_pb2 as pb
from tests.pictures import FORM, encoded, form

PREDICT, INFER, INSTANCES = "/predict", "/v2/models/lenet/infer", "/v1/models/lenet:predict"
LENGTH = "Inference-Header-Content-Length"
JSON, NPY = {"Content-Type": "application/json"}, "application/x-npy"
WEIGHTS = Path(__file__).parents[3] / "weights"

SEVEN = np.array(example_seven(), np.uint8)
UNIT = SEVEN.astype(np.float32) / 255
RAW, PNG, JPEG = (
    SEVEN.tobytes(),
    encoded(SEVEN),
    encoded(np.kron(255 - SEVEN, np.ones((5, 5))).astype(np.uint8), "JPEG"),
)
FILES = [PNG, JPEG, RAW, encoded(SEVEN, "WEBP", lossless=True)]
LIKE_TIFF = PNG.ljust(int.from_bytes(b"II*\0", "little"), b"\0")
LARGE_AVIF = encoded(np.kron(SEVEN, np.ones((5, 5), np.uint8)), "AVIF")


@pytest.fixture
async def served(open_app):
    changes = {"weights": WEIGHTS, "default_model": "lenet", "max_images": 64}
    async with open_app(**changes, max_batch_rows=64) as served:
        yield served


def b64(content):
    return base64.b64encode(content).decode()


def tensor(datatype, shape, data=None, **more):
    one = {"name": "image", "datatype": datatype, "shape": shape, **more}
    return one if data is None else {**one, "data": data}


def infer(datatype, shape, data, **parameters):
    return INFER, json.dumps({"inputs": [tensor(datatype, shape, data)], "parameters": parameters})


def binary(datatype, shape, content, **parameters):
    sized = {"binary_data_size": len(content)}
    inputs = [tensor(datatype, shape, parameters=sized)]
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    return INFER, head + content, {LENGTH: str(len(head))}


def unsized(*document_and_content):
    """A binary request without `binary_data_size`, as OpenVINO's clients send one tensor."""
    path, body, headers = binary(*document_and_content)
    size = int(headers[LENGTH])
    document = json.loads(body[:size])
    del document["inputs"][0]["parameters"]
    head = json.dumps(document).encode()
    return path, head + body[size:], {LENGTH: str(len(head))}


def elements(*files):
    return b"".join(len(one).to_bytes(4, "little") + one for one in files)


def npy(array, query=""):
    file = io.BytesIO()
    np.save(file, array)
    return PREDICT + query, file.getvalue(), {"Content-Type": NPY}


def images(value, query=""):
    return PREDICT + query, json.dumps({"images": value}), JSON


def instances(value, query="", **more):
    return INSTANCES + query, json.dumps({"instances": value, **more})


def columns(value, query="", **more):
    return INSTANCES + query, json.dumps({"inputs": value, **more})


def invocation(query="", **document):
    return f"/invocations{query}", json.dumps(document), JSON


def sent_as(kind, content, path=PREDICT):
    return path, content, {"Content-Type": kind}


def marked(path, body, *headers):
    """A request whose body begins with a byte order mark."""
    if headers and LENGTH in headers[0]:
        headers = ({LENGTH: str(3 + int(headers[0][LENGTH]))},)
    return path, b"\xef\xbb\xbf" + (body if isinstance(body, bytes) else body.encode()), *headers


NUMBERS = {
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
HALF = np.minimum(SEVEN, 127)  # of int8
FLAT = SEVEN.ravel().tolist()
BF16, WHOLE_BF16 = (
    (one.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes() for one in (UNIT, SEVEN)
)

HTTP = {
    # Pictures
    "json, png": images(b64(PNG)),
    "json, data URL": images([f"data:image/png;base64,{b64(PNG)}"]),
    "json, mixed": images([*map(b64, FILES), SEVEN.tolist()]),
    "infer, json": infer("BYTES", [len(FILES)], list(map(b64, FILES))),
    "infer, json of a column": infer(
        "BYTES", [2, 1], [[b64(PNG)], [base64.encodebytes(JPEG).decode()]]
    ),
    "infer, binary": binary("BYTES", [len(FILES), 1], elements(*FILES)),
    "infer, binary, no size": unsized("BYTES", [len(FILES)], elements(*FILES)),
    "infer, binary, no size, one": unsized("BYTES", [1], elements(PNG)),
    "infer, binary, no size, a file": unsized("BYTES", [1, 1], PNG),
    **{
        f"infer, binary, no size, {len(files)} of a length like a TIFF's first bytes": unsized(
            "BYTES", [len(files)], elements(*files)
        )
        for files in ((LIKE_TIFF,), (LIKE_TIFF, PNG))
    },
    "infer, binary, no size, FP32": unsized("FP32", [1, 784], SEVEN.astype("<f4").tobytes()),
    "infer, raw": (INFER, JPEG + b"\0" * (len(JPEG) % 784 == 0), {LENGTH: "0"}),
    "instances": instances([{"b64": b64(one)} for one in FILES]),
    "instances, named": instances([{"image": {"b64": b64(one)}} for one in FILES]),
    "columns": columns([{"b64": b64(one)} for one in FILES]),
    "columns, named": columns({"image": [{"b64": b64(one)} for one in FILES]}),
    "invocation, instances": invocation(instances=[{"b64": b64(one)} for one in FILES]),
    "invocation, images": invocation(images=list(map(b64, FILES))),
    "form, AVIF and TIFF": sent_as(FORM, form(LARGE_AVIF, encoded(SEVEN, "TIFF"))),
    "form, a preamble": sent_as(FORM, b"Nobody reads\r\n--this.\r\n" + form(PNG)),
    **{
        f"{kind} as {name}": sent_as(name, content)
        for kind, content, name in (
            ("AVIF", LARGE_AVIF, "image/avif"),
            ("TIFF", encoded(SEVEN, "TIFF"), "image/tiff"),
            ("PNG", PNG, "image/apng"),
            ("PNG", PNG, "image/x-png"),
            ("JPEG", JPEG, "image/pjpeg"),
        )
    },
    "PNG of a fiftieth of 16 bits": sent_as("image/png", encoded(SEVEN * np.uint16(5) + 5000)),
    "form, x-png": sent_as(FORM, form(("image/x-png", PNG))),
    # Text
    "json, base64 in lines": images(base64.encodebytes(PNG).decode()),
    "instances, base64 in lines": instances([{"b64": base64.encodebytes(PNG).decode()}]),
    "instances, base64 of URLs": instances(
        [{"b64": base64.urlsafe_b64encode(RAW).decode().rstrip("=")}]
    ),
    "instances, data URL": instances([{"b64": f"data:image/png;base64,{b64(PNG)}"}]),
    "infer, data URL": infer("BYTES", [1], [f"data:image/png;base64,{b64(PNG)}"]),
    "json, marked": marked(*images(FLAT)),
    "infer, marked": marked(*infer("UINT8", [1, 784], FLAT)),
    "infer, binary, marked": marked(*binary("UINT8", [1, 784], RAW)),
    "instances, marked": marked(*instances([FLAT])),
    "invocation, marked": marked(*invocation(instances=[FLAT])),
    **{f"json, invert={no}": images(FLAT, f"?invert={no}") for no in ("False", "0")},
    **{
        f"json, invert={yes}": images((255 - SEVEN).tolist(), f"?invert={yes}")
        for yes in ("True", "1")
    },
    # Fractions, declared
    "json, unit": images(UNIT.tolist(), "?scale=unit"),
    "json, unit, ToTensor": images(UNIT[None, None].tolist(), "?scale=unit"),
    "json, unit, Keras": images(UNIT[None, ..., None].tolist(), "?scale=unit"),
    "json, unit, all 0 and 1": images((SEVEN > 127).astype(float).tolist(), "?scale=unit"),
    "json, unit, integers": images((SEVEN > 127).astype(int).ravel().tolist(), "?scale=unit"),
    "npy, unit": npy(UNIT.astype(np.float64), "?scale=unit"),
    "npy, unit, half": npy(UNIT.astype(np.float16)[None, None], "?scale=unit"),
    "npy, bool": npy(SEVEN > 127),
    "form, npy, unit": ("/predict?scale=unit", *sent_as(FORM, form((NPY, npy(UNIT)[1])))[1:]),
    "invocation, unit": invocation("?scale=unit", instances=[UNIT.tolist()]),
    "invocation, unit, parameters": invocation(
        instances=UNIT[None, ..., None].tolist(), parameters={"scale": "unit"}
    ),
    "invocation, MLflow's inputs, unit": invocation("?scale=unit", inputs=UNIT[None].tolist()),
    "invocation, npy, unit": ("/invocations?scale=unit", *npy(UNIT[None, ..., None])[1:]),
    "columns, unit": columns(UNIT[None].tolist(), "?scale=unit"),
    "invocation, unit, params": invocation(inputs=UNIT[None].tolist(), params={"scale": "unit"}),
    "invocation, id": invocation(instances=SEVEN[None].tolist(), id="7"),
    "columns, unit, parameters": columns({"image": [UNIT.tolist()]}, parameters={"scale": "unit"}),
    "infer, unit": infer("FP32", [1, 784], UNIT.ravel().tolist(), scale="unit"),
    "infer, unit in the URL": (INFER + "?scale=unit", *infer("FP64", [28, 28], UNIT.tolist())[1:]),
    "infer, binary, unit": binary("FP32", [1, 28, 28, 1], UNIT.tobytes(), scale="unit"),
    "infer, binary, unit, FP16": binary("FP16", [784], UNIT.astype("<f2").tobytes(), scale="unit"),
    "infer, binary, unit, BF16": binary("BF16", [1, 784], BF16, scale="unit"),
    "infer, BOOL": infer("BOOL", [1, 28, 28], (SEVEN[None] > 127).tolist()),
    "infer, binary, BOOL": binary("BOOL", [28, 28], (SEVEN > 127).tobytes()),
    "instances, unit": instances([UNIT.tolist()], "?scale=unit"),
    "instances, unit, parameters": instances(
        UNIT[None, ..., None].tolist(), parameters={"scale": "unit"}
    ),
    # Whole numbers of other types
    **{f"npy, {code}": npy(SEVEN.astype(code)) for code in (*NUMBERS.values(), ">i4", ">f8")},
    **{
        f"infer, {kind}": infer(kind, [1, 28, 28], SEVEN[None].astype(code).tolist())
        for kind, code in NUMBERS.items()
    },
    **{
        f"infer, binary, {kind}": binary(kind, [28, 28], SEVEN.astype(code).tobytes())
        for kind, code in NUMBERS.items()
    },
    "infer, binary, INT8": binary("INT8", [1, 784], HALF.tobytes()),
    "infer, INT8": infer("INT8", [1, 784], HALF.ravel().tolist()),
    "npy, |i1": npy(HALF.astype(np.int8)),
    "infer, BF16": infer("BF16", [1, 784], FLAT),
    "infer, binary, BF16": binary("BF16", [1, 784], WHOLE_BF16),
    "instances, floats": instances([SEVEN.astype(float).tolist()]),
    "invocation, floats": invocation(instances=[SEVEN.astype(float).tolist()]),
    # One channel
    "json, 28 x 28 x 1": images(SEVEN[..., None].tolist()),
    "json, n x 28 x 28 x 1": images(np.stack([SEVEN] * 3)[..., None].tolist()),
    "json, 1 x 28 x 28": images(SEVEN[None].tolist()),
    "json, n x 1 x 28 x 28": images(np.stack([SEVEN] * 3)[:, None].tolist()),
    "npy, 28 x 28 x 1": npy(SEVEN[..., None]),
    "npy, n x 28 x 28 x 1": npy(np.stack([SEVEN] * 2)[..., None]),
    "npy, n x 1 x 28 x 28": npy(np.stack([SEVEN] * 2)[:, None]),
    "infer, 28 x 28 x 1": infer("UINT8", [28, 28, 1], SEVEN.ravel().tolist()),
    "instances, n x 28 x 28 x 1": instances(SEVEN[None, ..., None].tolist()),
    "instances, n x 1 x 28 x 28": instances(SEVEN[None, None].tolist()),
    "infer, binary, 28 x 28 x 1": binary("UINT8", [28, 28, 1], RAW),
    # Paths
    "instances, version 0": (INSTANCES.replace(":", "/versions/0:"), instances([FLAT])[1]),
    "infer, a slash": (f"{INFER}/", infer("UINT8", [1, 784], FLAT)[1]),
    "instances, a slash": (f"{INSTANCES}/", instances([FLAT])[1]),
    "infer, n x 28 x 28 x 1": infer("UINT8", [1, 28, 28, 1], SEVEN[None, ..., None].tolist()),
}


def labels_of(document):
    if "outputs" in document and "label" in document["outputs"]:  # by column
        return document["outputs"]["label"]
    if "outputs" in document:
        return next(one["data"] for one in document["outputs"] if one["name"] == "label")
    return [one["label"] for one in document["predictions"]]


async def test_every_first_try_over_http_is_a_seven(served):
    seen = {}
    for name, (path, body, *headers) in HTTP.items():
        answer = await served.client.post(path, content=body, headers=headers[0] if headers else {})
        if answer.headers["content-type"] == "application/octet-stream":  # of a raw request
            size = int(answer.headers[LENGTH])
            seen[name] = [int.from_bytes(answer.content[size:][-8:], "little")]
        else:
            seen[name] = labels_of(answer.json()) if answer.status_code == 200 else answer.text
    assert {name: found for name, found in seen.items() if set(found) != {7}} == {}
    assert len(seen["json, mixed"]) == 5
    assert len(seen["infer, binary"]) == len(seen["instances"]) == len(FILES)


def message(datatype, shape, *, raw=None, unit=False, **contents):
    one = pb.ModelInferRequest.InferInputTensor(name="image", datatype=datatype, shape=shape)
    request = pb.ModelInferRequest(model_name="lenet", inputs=[one])
    if raw is None:
        request.inputs[0].contents.CopyFrom(pb.InferTensorContents(**contents))
    else:
        request.raw_input_contents.append(raw)
    if unit == 7:
        request.parameters["scale"].int64_param = 7
    elif unit:
        request.parameters["scale"].string_param = "unit"
    return request


GRPC = {
    "bytes_contents": message("BYTES", [len(FILES)], bytes_contents=FILES),
    "raw BYTES": message("BYTES", [len(FILES), 1], raw=elements(*FILES)),
    "unit": message("FP32", [1, 1, 28, 28], fp32_contents=UNIT.ravel(), unit=True),
    "raw, unit": message("FP32", [1, 28, 28, 1], raw=UNIT.tobytes(), unit=True),
    "28 x 28 x 1": message("UINT8", [28, 28, 1], uint_contents=FLAT),
    "raw, 28 x 28 x 1": message("UINT8", [28, 28, 1], raw=RAW),
    "raw BF16": message("BF16", [1, 784], raw=WHOLE_BF16),
    "raw, unit, BF16": message("BF16", [1, 784], raw=BF16, unit=True),
    "BOOL": message("BOOL", [1, 784], bool_contents=(SEVEN > 127).ravel().tolist()),
    "INT8": message("INT8", [1, 784], int_contents=HALF.ravel().tolist()),
    "INT32": message("INT32", [1, 784], int_contents=FLAT),
    "INT64": message("INT64", [1, 784], int64_contents=FLAT),
    "UINT16": message("UINT16", [1, 784], uint_contents=FLAT),
    "UINT64": message("UINT64", [1, 784], uint64_contents=FLAT),
    "FP64": message("FP64", [1, 784], fp64_contents=FLAT),
    "raw BOOL": message("BOOL", [1, 784], raw=(SEVEN > 127).tobytes()),
    "raw, unit, UINT8": message("UINT8", [1, 784], raw=(SEVEN > 127).tobytes(), unit=True),
    "raw INT8": message("INT8", [1, 784], raw=HALF.tobytes()),
    **{
        f"raw {kind}": message(kind, [1, 784], raw=SEVEN.astype(code).tobytes())
        for kind, code in NUMBERS.items()
    },
}


async def by_call(served, stub, request):
    return await stub.ModelInfer(request)


async def by_stream(served, stub, request):
    (answer,) = [one async for one in stub.ModelStreamInfer(iter([request]))]
    assert not answer.error_message, answer.error_message
    return answer.infer_response


async def by_connect(served, stub, request):
    path = "/inference.GRPCInferenceService/ModelInfer"
    headers = {"Content-Type": "application/proto"}
    content = request.SerializeToString()
    answer = await served.client.post(path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return pb.ModelInferResponse.FromString(answer.content)


@pytest.mark.parametrize("door", [by_call, by_stream, by_connect])
async def test_every_first_try_over_grpc_is_a_seven(served, door):
    seen = {}
    async with served.connect() as stub:
        for name, request in GRPC.items():
            try:
                answer = await door(served, stub, request)
            except (grpc.aio.AioRpcError, AssertionError) as error:
                seen[name] = str(error)
                continue
            if answer.raw_output_contents:
                seen[name] = np.frombuffer(answer.raw_output_contents[1], "<i8").tolist()
            else:
                seen[name] = list(answer.outputs[1].contents.int64_contents)
    assert {name: found for name, found in seen.items() if set(found) != {7}} == {}
    assert len(seen["raw BYTES"]) == len(seen["bytes_contents"]) == len(FILES)


async def test_metadata_is_the_scale_of_messages_that_state_none(served):
    metadata, stated = (("x-scale", "unit"),), message("UINT8", [1, 784], raw=RAW)
    stated.parameters["scale"].string_param = "byte"
    fractions = message("FP32", [1, 784], raw=UNIT.tobytes())
    one = message("UINT8", [1, 784], raw=(SEVEN > 127).tobytes())
    async with served.connect() as stub:
        for request in (fractions, one, stated):
            answer = await stub.ModelInfer(request, metadata=metadata)
            (streamed,) = [
                one async for one in stub.ModelStreamInfer(iter([request]), metadata=metadata)
            ]
            for found in (answer, streamed.infer_response):
                assert list(np.frombuffer(found.raw_output_contents[1], "<i8")) == [7]
        with pytest.raises(grpc.aio.AioRpcError, match="x-scale: got 'x', expected one of byte, u"):
            await stub.ModelInfer(fractions, metadata=(("x-scale", "x"),))


WRONG_MESSAGES = {
    "inputs[0].contents[0]: got 10000 x 10000": lambda: message(
        "BYTES", [1], bytes_contents=[HUGE]
    ),
    "raw_input_contents[0][0]: got 10000 x 10000": lambda: message(
        "BYTES", [1], raw=elements(HUGE)
    ),
    "raw_input_contents[0]: got element 0 of": lambda: message("BYTES", [1], raw=LYING),
    "expected raw_input_contents": lambda: message("FP16", [1, 784], fp32_contents=FLAT),
    "got -2 at index": lambda: message("INT8", [1, 784], raw=RAW),
    "got 254 at index": lambda: message("UINT8", [1, 784], raw=RAW, unit=True),
    "need the parameter scale=unit": lambda: message("FP32", [1, 784], raw=UNIT.tobytes()),
    "parameters.scale: got '', expected one of byte, unit": lambda: message(
        "FP32", [1, 784], raw=UNIT.tobytes(), unit=7
    ),
}


async def test_what_lies_or_is_too_large_is_refused_over_grpc_too(served):
    async with served.connect() as stub:
        for words, make in WRONG_MESSAGES.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(make())
            assert words in caught.value.details()


async def test_pictures_and_pixels_of_one_request_are_one_batch(served):
    for name in ("json, mixed", "infer, binary", "instances"):
        path, body, *headers = HTTP[name]
        answer = await served.client.post(path, content=body, headers=headers[0] if headers else {})
        count = len(labels_of(answer.json()))
        assert f'batch;desc="{count}"' in answer.headers["server-timing"], name


def huge():
    """A PNG of 100 megapixels, in 12 kB."""
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


HUGE = huge()
LYING = elements(PNG)[:-1]
LONG = (2**32 - 1).to_bytes(4, "little") + PNG
WRONG = [
    (images([b64(HUGE)]), 413, "images[0]: got 10000 x 10000 pixels, expected at most"),
    (infer("BYTES", [1], [b64(HUGE)]), 413, "inputs[0].data[0]: got 10000 x 10000 pixels"),
    (
        binary("BYTES", [1], elements(HUGE)),
        413,
        "inputs[0]'s binary data[0]: got 10000 x 10000 pixels",
    ),
    (instances([{"b64": b64(HUGE)}]), 413, "instances[0].b64: got 10000 x 10000 pixels"),
    (
        binary("BYTES", [1], LYING),
        400,
        f"element 0 of {len(PNG)} bytes, of which {len(PNG) - 1} are",
    ),
    (binary("BYTES", [1], LONG), 400, "element 0 of 4294967295 bytes, of which"),
    (binary("BYTES", [1], elements(PNG, PNG)), 400, "bytes more, expected 1 elements"),
    (binary("BYTES", [2], elements(PNG)), 400, "got 1 elements, expected 2 for shape [2] of BYTES"),
    (binary("BYTES", [1], elements(PNG) + b"\0\0"), 400, "bytes more, expected 1 elements"),
    (binary("BYTES", [2], elements(PNG) + b"\0\0"), 400, "got 2 bytes at the end"),
    (unsized("BYTES", [1], LYING), 400, "inputs[0]'s binary data: got element 0 of"),
    (unsized("UINT8", [1, 784], RAW[1:]), 400, "inputs[0]'s binary data: got 783 bytes, expected"),
    (infer("BYTES", [1], ["?"]), 400, "inputs[0].data[0]: got '?', expected a picture in base64"),
    (infer("BYTES", [1, 28], [b64(PNG)]), 400, "inputs[0].shape: got [1, 28], expected [n] or"),
    (infer("BYTES", [65], [b64(PNG)]), 413, "inputs[0].shape: got 65 images, expected at most 64"),
    (
        infer("BYTES", [1], [b64(b"GIF")]),
        400,
        "got 3 bytes, the text 'GIF', expected the file",
    ),
    (instances([{"b64": b64(PNG[:60])}]), 400, "instances[0].b64: not a readable image/png"),
    (images(UNIT.tolist()), 400, "fractions 0 to 1 need the parameter scale=unit"),
    (npy(UNIT), 400, "fractions 0 to 1 need the parameter scale=unit"),
    (infer("FP32", [1, 784], UNIT.ravel().tolist()), 400, "need the parameter scale=unit"),
    (
        binary("FP32", [1, 784], (UNIT > 0.5).astype("<f4").tobytes()),
        400,
        "the parameter scale=unit",
    ),
    (instances([UNIT.tolist()]), 400, "need the parameter scale=unit"),
    (images([[2.0] * 784], "?scale=unit"), 400, "images[0][0]: got 2.0, expected a number 0 to 1"),
    (
        images([[-0.1] * 784], "?scale=unit"),
        400,
        "images[0][0]: got -0.1, expected a number 0 to 1",
    ),
    (npy(UNIT * 2, "?scale=unit"), 400, "expected numbers 0 to 1, as scale=unit says"),
    (npy(UNIT * np.float32("nan"), "?scale=unit"), 400, "body: got nan at index 0"),
    (infer("FP32", [1, 784], [1.5] * 784, scale="unit"), 400, "inputs[0].data: got 1.5 at index 0"),
    (infer("UINT8", [1, 784], [9] * 784, scale="unit"), 400, "inputs[0].data: got 9 at index 0"),
    (instances([[255] * 784], "?scale=unit"), 400, "instances: got 255 at index 0"),
    (
        (PREDICT + "?scale=unit", RAW, {"Content-Type": "application/octet-stream"}),
        400,
        "body: got 254",
    ),
    (images(FLAT, "?scale=tiny"), 400, "scale is 'tiny', expected one of byte, unit"),
    (infer("UINT8", [1, 784], FLAT, scale=1), 400, "parameters.scale: got 1, expected one of byte"),
    (instances([FLAT], "?scale=1"), 400, "scale: got '1', expected one of byte, unit"),
]


@pytest.mark.parametrize(("request_", "status", "words"), WRONG, ids=[words for *_, words in WRONG])
async def test_what_lies_or_is_too_large_is_refused_by_its_field(served, request_, status, words):
    path, body, *headers = request_
    answer = await served.client.post(path, content=body, headers=headers[0] if headers else {})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
