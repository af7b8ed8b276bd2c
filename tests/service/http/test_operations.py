from __future__ import annotations

import random

from prometheus_client.parser import text_string_to_metric_families

from lenet.weightfile import WeightFile
from service.http.openapi import Health, InfoResponse


async def test_the_probes_say_yes_when_the_service_is_ready(served):
    for path in ("/healthz", "/readyz"):
        response = await served.client.get(path)
        assert response.status_code == 200
        assert Health.model_validate_json(response.content) == Health(live=True, ready=True)


async def test_only_readiness_says_no_when_the_stop_begins(served, one):
    served.models.ready = False
    live, ready = [await served.client.get(path) for path in ("/healthz", "/readyz")]
    assert (live.status_code, ready.status_code) == (200, 503)
    assert live.json() == ready.json() == {"live": True, "ready": False}
    # Requests under way to an instance that is told to go are answered.
    assert (await served.post(one)).status_code == 200


async def test_info_tells_what_is_loaded_and_within_which_limits(served, weights, tiny):
    response = await served.client.get("/info")
    info = InfoResponse.model_validate_json(response.content, strict=True)
    file = WeightFile.read(weights / "tiny" / "3.safetensors")
    (model,) = info.models
    assert (model.name, model.version, model.sha256) == ("tiny", "3", file.digest())
    assert model.parameters == 7850
    assert model.labels == list("0123456789")
    assert model.accuracy == 0.5
    assert info.default_model == "tiny"
    assert info.limits.pop("max_picture_pixels") == 16_777_216
    assert info.limits == {
        name: getattr(served.settings, name)
        for name in (
            *("max_batch_rows", "max_queue_rows", "max_images"),
            *("max_body_bytes", "request_timeout_ms"),
        )
    }


async def test_info_and_answers_tell_of_the_new_version_when_it_was_reloaded(
    served, weights, tiny, random_weights, images
):
    new = random_weights(tiny, 5)
    new.write(weights / "tiny" / "4.safetensors")
    await served.models.reload()
    info = InfoResponse.model_validate_json((await served.client.get("/info")).content)
    (model,) = info.models
    assert (model.name, model.version, model.sha256) == ("tiny", "4", new.digest())
    assert model.seed == 5
    response = await served.post(images.tobytes())
    assert response.json()["version"] == response.headers["x-model-version"] == "4"
    told = {"model": "tiny", "version": "4", "sha256": new.digest()}
    assert await served.value("lenet_model_info", **told) == 1
    assert (await served.post(images.tobytes(), query="?version=4")).status_code == 200
    assert (await served.post(images.tobytes(), query="?version=3")).status_code == 404


async def test_metrics_are_prometheus_text_when_scraped(served, images, one):
    await served.post(images.tobytes())
    await served.post(one)
    await served.post(b"")
    accept = {"Accept": "application/openmetrics-text;version=1.0.0," * 500}
    response = await served.client.get("/metrics", headers=accept)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    latency = families["lenet_request_duration_seconds"]
    assert latency.type == "histogram"
    labels = {"protocol": "http", "le": "+Inf"}
    assert await served.value(f"{latency.name}_bucket", **labels) == 2
    assert await served.value(f"{latency.name}_count", protocol="http") == 2
    assert await served.requests("ok") == 2
    assert await served.requests("invalid_input") == 1
    assert await served.value("lenet_images_total", model="tiny") == 6
    assert await served.value("lenet_queue_rows", model="tiny") == 0
    assert not [name for name in families if name.endswith("_created")]


async def test_strange_requests_make_no_series(served, one):
    async def count():
        return sum(len(family.samples) for family in (await served.families()).values())

    async def strange():
        draw = random.Random(0)
        for _ in range(60):
            word = "".join(draw.choices("abc/%$.\u00e9", k=12))
            await served.client.request(
                draw.choice(["GET", "POST", "DELETE", "BREW"]),
                f"/x{word}",
                headers={"Accept": word.encode(), "X-Request-Timeout-Ms": word.encode()},
            )
            await served.post(one, query=f"?model={word}")
            await served.post(one, query=f"?{word}=1")
            await served.post(one, content_type=f"image/x{draw.random()}")
        await served.post(one)

    await strange()
    before = await count()
    await strange()
    assert await count() == before < 600


async def test_no_route_answers_a_method_it_does_not_know(served, refusal):
    for method, path in (
        *(("GET", "/predict"), ("PUT", "/predict"), ("POST", "/healthz"), ("DELETE", "/info")),
        *(("POST", "/metrics"), ("BREW", "/readyz")),
    ):
        response = await served.client.request(method, path)
        error = refusal(response, 405, "method_not_allowed")
        assert method in error.message
        assert response.headers["allow"] == ("POST" if path == "/predict" else "GET")


async def test_an_unknown_path_is_a_404_in_the_same_shape(served, refusal):
    for path in ("/", "/predict/", "/nope", "/predict/..%2f..%2fetc", "/%00", "/v2"):
        assert "/docs" in refusal(await served.client.get(path), 404, "not_found").message


async def test_the_page_of_the_api_is_there(served):
    response = await served.client.get("/docs")
    assert response.status_code == 200
    assert "/openapi.json" in response.text
