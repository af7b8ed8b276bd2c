import httpx
import orjson
import pytest

from benchmarks.baselines import torch_serving, torch_step, torch_training
from benchmarks.baselines.bare_uvicorn import app
from benchmarks.baselines.model import WEIGHTS_VARIABLE, Model, images_of_json
from benchmarks.baselines.plain_fastapi import create_app
from benchmarks.baselines.torch_step import MODES
from benchmarks.digits import judge, prepare_requests
from lenet.model import named


@pytest.mark.parametrize("path", ["/predict", "/readyz"])
async def test_bare_uvicorn_sends_a_well_formed_answer(path, requests):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bare") as client:
        response = await client.post(path, content=bytes(784))
    assert response.status_code == 200
    assert judge(response.content, requests[0]).error == ""


@pytest.mark.parametrize(("form", "path"), [("json", "/predict"), ("raw", "/predict/raw")])
async def test_plain_fastapi_predicts_the_models_labels(form, path, digits, weights):
    (request,) = prepare_requests(digits, weights, form, 12)
    transport = httpx.ASGITransport(create_app(Model(weights)))
    headers = {"Content-Type": request.content_type}
    async with httpx.AsyncClient(transport=transport, base_url="http://plain") as client:
        response = await client.post(path, content=request.body, headers=headers)
        assert (await client.get("/readyz")).status_code == 200
    verdict = judge(response.content, request)
    assert (verdict.error, verdict.wrong_labels) == ("", 0)


@pytest.mark.parametrize(("form", "worker"), [("json", "JsonWorker"), ("raw", "RawWorker")])
def test_mosec_answers_each_request_of_a_batch(
    form, worker, digits, weights, tmp_path, monkeypatch
):
    plain_mosec = pytest.importorskip("benchmarks.baselines.plain_mosec", exc_type=ImportError)
    weights.write(tmp_path / "1.safetensors")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "1.safetensors"))
    batch = prepare_requests(digits, weights, form, 5)
    one = getattr(plain_mosec, worker)()
    answers = one.forward([one.deserialize(request.body) for request in batch])
    for request, predictions in zip(batch, answers, strict=True):
        verdict = judge(one.serialize(predictions), request)
        assert (verdict.error, verdict.wrong_labels) == ("", 0)
    with pytest.raises(plain_mosec.ValidationError):
        one.deserialize(b"1")


def test_json_images_are_784_integers_or_28_rows(digits):
    image = digits.images[0]
    both = orjson.dumps({"images": [image.ravel().tolist(), image.tolist()]})
    assert (images_of_json(both) == image).all()


@pytest.mark.parametrize(
    "image", [[0] * 783, [0] * 1568, [256] * 784, [-1] * 784, [[0] * 28] * 27, [[0] * 784] * 28]
)
def test_an_image_of_another_shape_or_range_is_rejected(image):
    with pytest.raises(ValueError, match=r"reshape|range"):
        images_of_json(orjson.dumps({"images": [image]}))


@pytest.mark.parametrize(
    "variants",
    [
        torch_serving.VARIANTS,
        *(torch_step.variants(named("lenet"), one) for one in ("fp32", "tf32", "mixed")),
    ],
)
def test_the_variants_of_a_mode_have_different_names(variants):
    assert tuple(variants) == MODES
    for tried in variants.values():
        assert len({str(variant) for variant in tried}) == len(tried) > 1


def test_the_variant_with_the_smallest_median_counts():
    found = torch_training.summarise(
        {
            "eager": {"contiguous": [900.0, 700.0, 800.0]},
            "graph": {"contiguous": [300.0, 310.0, 320.0], "channels_last": [100.0, 400.0, 250.0]},
            "compile": {},
        }
    )
    assert found["eager_us"] == 800
    assert (found["graph_us"], found["graph_variant"]) == (250, "channels_last")
    assert found["graph_spread_us"] == [100, 400]
    assert found["medians_us"]["graph"] == {"contiguous": 310, "channels_last": 250}
    assert found["compile_us"] is found["compile_spread_us"] is found["compile_variant"] is None
    about = {"model": "lenet", "batch": 256, "precision": "tf32", "device": "a GPU", "torch": "2"}
    text = torch_training.table({**about, **found, "failed": {"compile: x": "no compiler"}})
    assert "(100.0..400.0)" in text
    assert "no compiler" in text
