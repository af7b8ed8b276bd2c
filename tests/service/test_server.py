from __future__ import annotations

import dataclasses
import socket
import threading
from contextlib import asynccontextmanager

import pytest

import service
from lenet import context
from lenet.errors import GoldenMismatch, InvalidWeightFile
from service import server as module
from service.engine.batcher import Batcher
from service.server import create_app
from service.settings import Settings


@pytest.fixture
def weights(tmp_path, tiny, random_weights):
    for model in (tiny, "mlp"):
        file = random_weights(model)
        file.write(tmp_path / "weights" / file.model.name / "1.safetensors")
    return tmp_path / "weights"


@pytest.fixture
def settings(weights):
    return Settings(port=0, grpc_port=0, weights=weights, default_model="tiny", max_batch_rows=2)


@pytest.fixture
def lifespan(settings):
    """`lifespan(**changes)`: the started application."""

    @asynccontextmanager
    async def lifespan(**changes):
        app = create_app(settings.model_copy(update=changes))
        async with app.router.lifespan_context(app):
            yield app

    return lifespan


@pytest.fixture
def contexts(monkeypatch):
    """Every context that is made; all are closed when the test ends."""
    made = []

    class Watched(context.ExecutionContext):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("service.engine.models.ExecutionContext", Watched)
    yield made
    assert not [context for context in made if context._open]
    assert not [t for t in threading.enumerate() if t.name.startswith("context-")]


async def test_it_starts_in_one_order_and_stops_in_the_reverse(lifespan, monkeypatch, contexts):
    events = []
    read, serve, drain = module.read_models, module.rpc.serve, Batcher.drain

    def watched_read(*arguments):
        events.append("weights")
        return read(*arguments)

    class WatchedRepository(module.Repository):
        async def __aenter__(self):
            entered = await super().__aenter__()
            events.append("contexts")
            return entered

        async def __aexit__(self, *error):
            await super().__aexit__(*error)
            events.append("contexts closed")

    @asynccontextmanager
    async def watched_serve(predictor, *arguments, **options):
        async with serve(predictor, *arguments, **options) as port:
            events.append(f"gRPC, ready: {predictor.ready}")
            yield port
            events.append(f"gRPC closed, ready: {predictor.ready}")

    async def watched_drain(batcher, timeout_s):
        await drain(batcher, timeout_s)
        events.append("drained")

    monkeypatch.setattr(module, "read_models", watched_read)
    monkeypatch.setattr(module, "Repository", WatchedRepository)
    monkeypatch.setattr(module.rpc, "serve", watched_serve)
    monkeypatch.setattr(Batcher, "drain", watched_drain)
    async with lifespan() as app:
        assert events == ["weights", "contexts", "gRPC, ready: False"]
        assert app.state.predictor.ready
        assert app.state.grpc_port > 0
        assert len(contexts) == 2
        events.clear()
    assert events == ["gRPC closed, ready: False", "drained", "drained", "contexts closed"]
    assert not app.state.predictor.ready


async def test_nothing_is_made_before_it_starts(settings, monkeypatch):
    monkeypatch.setattr(module, "read_models", lambda *_: pytest.fail("weights were read"))
    create_app(settings)


async def test_a_broken_weight_file_is_refused_before_any_context_is_made(
    lifespan, weights, contexts
):
    path = weights / "mlp" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidWeightFile, match=r"mlp/1.safetensors: "):
        async with lifespan():
            pytest.fail("it started")
    assert not contexts


async def test_contexts_are_closed_when_another_fails_its_proof(
    lifespan, weights, random_weights, contexts
):
    good = random_weights("mlp")
    golden = dataclasses.replace(good.golden, logits=good.golden.logits + 1)
    dataclasses.replace(good, golden=golden).write(weights / "mlp" / "2.safetensors")
    with pytest.raises(GoldenMismatch, match="'mlp'"):
        async with lifespan():
            pytest.fail("it started")
    assert len(contexts) == 2


async def test_contexts_are_closed_when_the_grpc_port_is_taken(lifespan, contexts):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            async with lifespan(grpc_port=port):
                pytest.fail("it started")
    assert len(contexts) == 2


async def test_everything_is_closed_when_what_runs_inside_fails(lifespan, contexts):
    with pytest.raises(RuntimeError, match="inside"):
        async with lifespan() as app:
            raise RuntimeError("inside")
    assert not app.state.predictor.ready
    assert len(contexts) == 2


async def test_only_the_asked_for_models_are_loaded_when_some_are_named(lifespan, contexts):
    async with lifespan(models=("tiny",)):
        assert len(contexts) == 1


def test_the_version_is_0_when_the_distribution_is_not_installed(settings, monkeypatch):
    def missing(name):
        raise service.PackageNotFoundError(name)

    monkeypatch.setattr(service, "version", missing)
    assert create_app(settings).version == "0"
