"""Fusion of a served convolution by cuDNN, and the choice of its engines, against float64."""

from __future__ import annotations

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
import pytest

from lenet.cuda import engines
from lenet.cuda.capture import captured
from lenet.cuda.device import Handle
from lenet.cuda.engine_cache import EngineCache
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.graphs import Convolution, Uid
from lenet.cuda.memory import Workspace
from lenet.model import ConvBlock
from trainer.ops_cpu import CpuOps

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 5e-3}
SMALL = Convolution("forward", "fp16", (4, 8, 8, 32), (64, 3, 3, 32), bias=True, relu=True)


@pytest.fixture
def handle():
    with Handle() as made:
        yield made


def relative(got, expected):
    return np.linalg.norm(got.get().astype(np.float64) - expected) / np.linalg.norm(expected)


def drawn(precision, *shapes):
    """Arrays on the GPU in the storage type of `precision`, and the same values in float64."""
    dtype = np.float16 if precision == "fp16" else np.float32
    random = np.random.default_rng(len(shapes[0]))
    host = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    return [cupy.asarray(array) for array in host], [array.astype(np.float64) for array in host]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_convolution_with_bias_and_relu_agrees(handle, precision, relu):
    image, filters = (7, 12, 11, 32), (64, 5, 3, 32)
    operation = Convolution("forward", precision, image, filters, bias=True, relu=relu)
    (x, weight, bias), (a, b, c) = drawn(precision, image, filters, (64,))
    y = cupy.full(operation.output, np.nan, x.dtype)
    engine = EngineCatalog(handle, Workspace(), None, autotune=False).engine(operation)
    engine.run({Uid.INPUT: x, Uid.WEIGHT: weight, Uid.BIAS: bias, Uid.OUTPUT: y})
    block = ConvBlock(64, (5, 3))
    linear, _ = CpuOps(np.float64).convolution(
        a.transpose(3, 1, 2, 0), b.transpose(0, 3, 1, 2), block
    )
    want = linear.transpose(3, 1, 2, 0) + c
    assert relative(y, np.maximum(want, 0) if relu else want) <= TOLERANCE[precision]


def test_a_cached_engine_is_not_built_again_and_gives_the_same_bits(handle, tmp_path, monkeypatch):
    (x, weight, bias), _ = drawn("fp16", SMALL.image, SMALL.filters, (64,))

    def answer():
        y = cupy.full(SMALL.output, np.nan, x.dtype)
        catalog = EngineCatalog(handle, Workspace(), EngineCache(tmp_path), autotune=True)
        engine = catalog.engine(SMALL)
        engine.run({Uid.INPUT: x, Uid.WEIGHT: weight, Uid.BIAS: bias, Uid.OUTPUT: y})
        return engine.name, y.get().tobytes()

    first = answer()
    built, building = [], EngineCatalog._build

    def watched(self, *arguments):
        built.append(arguments)
        return building(self, *arguments)

    monkeypatch.setattr(EngineCatalog, "_build", watched)
    assert answer() == first
    assert built == []
    (cached,) = tmp_path.glob("[!.]*")
    header, _ = cached.read_bytes().split(b"\n", 1)
    assert handle.name in json.loads(header)["key"]
    assert handle.cudnn_version in json.loads(header)["key"]
    assert json.loads(header)["name"] == first[0]
    cached.write_bytes(cached.read_bytes()[:-1])
    answer()
    assert len(built) == 1


def test_no_further_engine_is_tried_when_the_search_is_to_stop(handle):
    class Stopped(Exception):
        pass

    calls = []

    def check_stop():
        calls.append(None)
        if len(calls) == 2:
            raise Stopped

    catalog = EngineCatalog(handle, Workspace(), None, autotune=True, check_stop=check_stop)
    with pytest.raises(Stopped):
        catalog.engine(SMALL)
    assert len(calls) == 2


def test_an_engine_that_cannot_be_captured_keeps_no_callers_frame_alive(handle, monkeypatch):
    """A captured step in such a frame would keep NCCL from ever being left."""
    timed = engines._replayed_us

    def second_works(*arguments):
        monkeypatch.setattr(engines, "_replayed_us", timed)
        raise RuntimeError("planted")

    class Held:
        pass

    def caller():
        held = Held()
        EngineCatalog(handle, Workspace(), None, autotune=True).engine(SMALL)
        return weakref.ref(held)

    monkeypatch.setattr(engines, "_replayed_us", second_works)
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_engines_are_timed_while_another_thread_captures(handle):
    x = cupy.zeros(4, cupy.float32)
    cupy.add(x, 1, out=x)  # loads the kernel, which a capture must not
    handle.synchronize()
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(Handle).result()
        catalog = EngineCatalog(other, Workspace(), None, autotune=True)

        def queue():
            cupy.add(x, 1, out=x)
            assert executor.submit(catalog.engine, SMALL).result().name

        try:
            captured(queue, handle.stream)()
        finally:
            executor.submit(other.close).result()
    handle.synchronize()
    assert (x.get() == 2).all()
