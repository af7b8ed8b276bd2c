"""tritonclient's four clients against the running service: HTTP and gRPC, plain and asyncio."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.service_process import committed

MISSING = not (importlib.util.find_spec("tritonclient") and importlib.util.find_spec("gevent"))
ADMIN = "a-key-of-an-administrator"
pytestmark = pytest.mark.skipif(MISSING, reason="tritonclient[grpc,http] is not installed")

# In a process of its own: tritonclient brings its own `inference.ModelInferRequest`, and protobuf
# allows one of each name in a process.
# Arguments: the HTTP port, the gRPC port, a file with images, uint8 (n, 28, 28), and a key.
PROGRAM = r"""
import asyncio, hashlib, json, sys
import numpy as np
import tritonclient.grpc as rpc, tritonclient.grpc.aio as rpc_aio
import tritonclient.http as http, tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

http_address, rpc_address = (f"127.0.0.1:{port}" for port in sys.argv[1:3])
images = np.load(sys.argv[3])
STEP = 1000

def request(kind, images, datatype="UINT8", binary=True, outputs=("probabilities", "label")):
    tensor = kind.InferInput("image", list(images.shape), datatype)
    if kind is http:
        tensor.set_data_from_numpy(images, binary_data=binary)
        wanted = [http.InferRequestedOutput(name, binary_data=binary) for name in outputs]
    else:
        tensor.set_data_from_numpy(images)
        wanted = [rpc.InferRequestedOutput(name) for name in outputs]
    return {"model_name": "lenet", "inputs": [tensor], "outputs": wanted}

def read(results):
    shares, labels = (np.concatenate([one.as_numpy(name) for one in results])
                      for name in ("probabilities", "label"))
    assert shares.dtype == np.float32 and labels.dtype == np.int64
    assert shares.shape == (len(images), 10) and labels.shape == (len(images),)
    return {"digest": hashlib.sha256(shares.tobytes()).hexdigest(), "labels": labels.tolist(),
            "first": shares[:2].astype(float).tolist()}

def parts():
    return [images[start : start + STEP] for start in range(0, len(images), STEP)]

def statistics(client, as_json):
    (found,) = client.get_inference_statistics("lenet", **as_json)["model_stats"]
    return [int(found["inference_count"]), int(found["inference_stats"]["success"]["count"]),
            sum(int(one["compute_infer"]["count"]) for one in found["batch_stats"])]

def failure(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]

seen = {"all": {}}
for name, kind, address in (("http", http, http_address), ("grpc", rpc, rpc_address)):
    with kind.InferenceServerClient(address) as client:
        as_json = {} if kind is http else {"as_json": True}
        one = seen[name] = {
            "ready": [client.is_server_live(), client.is_server_ready(),
                      client.is_model_ready("lenet"), client.is_model_ready("vgg")],
            "server": client.get_server_metadata(**as_json),
            "model": client.get_model_metadata("lenet", **as_json),
        }
        counts = [statistics(client, as_json)]
        seen["all"][name] = read([client.infer(**request(kind, part)) for part in parts()])
        one["statistics"] = [*counts, statistics(client, as_json)]
        one["config"] = client.get_model_config("lenet", **as_json)
        floats = images[:100].astype(np.float32)
        one["fp32"] = client.infer(**request(kind, floats, "FP32")).as_numpy("label").tolist()
        one["id"] = client.infer(**request(kind, images[:1]), request_id="7").get_response()
        one["id"] = one["id"]["id"] if kind is http else one["id"].id
        best = kind.InferRequestedOutput("probabilities", class_count=2)
        asked = {**request(kind, images[:1]), "outputs": [best]}
        one["best"] = [text.decode() if isinstance(text, bytes) else text
                       for text in client.infer(**asked).as_numpy("probabilities")[0]]
        admin = {"headers": {"authorization": "Bearer " + sys.argv[4]}}
        index = client.get_model_repository_index(**admin, **as_json)
        index = index if kind is http else index["models"]
        one["index"] = {row["name"]: [row["version"], row["state"]] for row in index}
        client.unload_model("mlp", **admin)
        one["loaded"] = [client.is_model_ready("mlp")]
        client.load_model("mlp", **admin)
        one["loaded"].append(client.is_model_ready("mlp"))
        one["forbidden"] = failure(lambda: client.unload_model("mlp"))
        one["no model"] = failure(lambda: client.load_model("vgg", **admin))
        only = client.infer(**request(kind, images[:1], outputs=("label",)))
        one["only"] = [only.as_numpy("label").tolist(), only.as_numpy("probabilities")]
        other = {**request(kind, images[:1]), "model_name": "vgg"}
        one["unknown"] = failure(lambda: client.infer(**other))
        one["wrong"] = failure(lambda: client.infer(**request(kind, images[:1, :27])))
        if kind is rpc:
            # The client has no method for typed contents; its message has the field.
            typed = rpc.InferInput("image", [2, 28, 28], "UINT8")
            typed._get_tensor().contents.uint_contents.extend(images[:2].ravel().tolist())
            share, label = (client.infer("lenet", [typed]).get_output(name).contents
                            for name in ("probabilities", "label"))
            came = []
            client.start_stream(lambda result, error: came.append(error or result))
            for part in parts():
                client.async_stream_infer(**request(kind, part))
            client.async_stream_infer(**request(kind, images[:1, :27]))
            client.async_stream_infer(**request(kind, images[:2]))
            client.stop_stream()
            seen["all"]["grpc stream"] = read(came[: len(parts())])
            one["stream"] = [came[-2].message(), came[-1].as_numpy("label").tolist()]
            one["typed"] = [np.reshape(share.fp32_contents, (2, 10)).tolist(),
                            list(label.int64_contents)]
        else:
            seen["all"]["http json"] = read(
                [client.infer(**request(kind, part, binary=False)) for part in parts()])
            for coding in ("gzip", "deflate"):
                coded = {f"{one}_compression_algorithm": coding for one in ("request", "response")}
                seen["all"]["http " + coding] = read(
                    [client.infer(**request(kind, part, binary=False), **coded)
                     for part in parts()])

async def aio():
    async with http_aio.InferenceServerClient(http_address) as client:
        results = [await client.infer(**request(http, part)) for part in parts()]
        seen["all"]["http aio"] = read(results)
        results = [await client.infer(**request(http, part, binary=False)) for part in parts()]
        seen["all"]["http aio json"] = read(results)
    async with rpc_aio.InferenceServerClient(rpc_address) as client:
        results = [await client.infer(**request(rpc, part)) for part in parts()]
        seen["all"]["grpc aio"] = read(results)

        async def requests():
            for part in parts():
                yield request(rpc, part)

        came = [result async for result, error in client.stream_infer(requests())]
        seen["all"]["grpc aio stream"] = read(came)

asyncio.run(aio())
json.dump(seen, sys.stdout)
"""


def talk(images, folder):
    """What `PROGRAM` prints of a service that is started for it."""
    path = folder / "images.npy"
    np.save(path, images)
    with committed(folder, "--admin-keys", ADMIN) as service:
        arguments = str(service.port), str(service.grpc_port), str(path), ADMIN
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WAYS = {"http", "http json", "http aio", "http aio json", "http gzip", "http deflate"}
WAYS |= {"grpc", "grpc aio", "grpc stream", "grpc aio stream"}


def test_each_client_reads_what_the_service_says(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (1200, 28, 28), np.uint8)
    seen = talk(images, tmp_path)
    for kind in ("http", "grpc"):
        one = seen[kind]
        assert one["ready"] == [True, True, True, False]
        assert one["server"]["name"] == "lenet-serve"
        assert "classification" in one["server"]["extensions"]
        assert [tensor["name"] for tensor in one["model"]["outputs"]] == ["probabilities", "label"]
        # perf_analyzer reads them before and after, and takes the difference.
        before, after = one["statistics"]
        assert np.subtract(after, before).tolist() == [1200, 2, 20]
        labels = seen["all"][kind]["labels"]
        assert one["fp32"] == labels[:100]
        assert one["id"] == "7"
        assert one["best"][0].split(":")[1:] == [str(labels[0])] * 2
        assert len(one["best"]) == 2
        assert one["only"] == [labels[:1], None]
        assert one["index"]["mlp"] == ["1", "READY"]
        assert one["loaded"] == [False, True]
        status, message = one["forbidden"]
        assert status == ("401" if kind == "http" else "StatusCode.UNAUTHENTICATED")
        status, message = one["no model"]
        assert "no model 'vgg' in the weights folder" in message
        status, message = one["unknown"]
        assert "model 'vgg' is not loaded" in message
        assert status == ("404" if kind == "http" else "StatusCode.NOT_FOUND")
        status, message = one["wrong"]
        assert "inputs[0].shape: got [1, 27, 28], expected [n, 28, 28]" in message
        assert status == ("400" if kind == "http" else "StatusCode.INVALID_ARGUMENT")
    error, labels = seen["grpc"]["stream"]
    assert "inputs[0].shape: got [1, 27, 28]" in error
    assert labels == seen["all"]["grpc"]["labels"][:2]
    first, labels = seen["grpc"]["typed"]
    # In a batch of two instead of 64 numbers are summed in another order.
    np.testing.assert_allclose(first, seen["all"]["grpc"]["first"], atol=1e-5)
    assert labels == seen["all"]["grpc"]["labels"][:2]
    assert seen["http"]["config"] == _plain(seen["grpc"]["config"]["config"])
    assert seen["http"]["config"]["max_batch_size"] == 16384
    check_alike(seen["all"])


def _plain(config):
    """A message as JSON: integers of 64 bits are texts there, and what is empty is left out."""
    tensors = {
        kind: [{**one, "dims": [int(size) for size in one["dims"]]} for one in config[kind]]
        for kind in ("input", "output")
    }
    tensors["output"][1]["reshape"] = {"shape": []}
    return {**config, "backend": "", **tensors}


def check_alike(results):
    """Requests of equal size are cut into equal batches, which give equal bits."""
    assert set(results) == WAYS
    first = results["grpc"]
    for way, found in results.items():
        assert found["labels"] == first["labels"], way
        assert found["digest"] == first["digest"], way
