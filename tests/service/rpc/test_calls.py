from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from contextlib import asynccontextmanager

import grpc
import pytest

from service import errors
from service.budget import Budget
from service.rpc import calls
from service.rpc import open_inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), dict(error.trailing_metadata()), error.details()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what grpc's threads do has no event
            await asyncio.sleep(0.005)


def silent(stub):
    """A call whose message does not come."""
    return stub.channel.stream_unary(METHOD)()


async def test_a_new_call_takes_the_place_of_a_silent_one_when_all_are_open(
    house, raw_request, monkeypatch
):
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    admitted = []
    open_ = calls.Calls.open
    monkeypatch.setattr(
        calls.Calls,
        "open",
        lambda *args, **named: admitted.append(open_(*args, **named)) or admitted[-1],
    )
    async with house.connect() as stub:
        streams = [asyncio.ensure_future(failure(silent(stub))) for _ in range(2)]
        await until(lambda: len(admitted) == 2)
        answered = False
        async with asyncio.timeout(5):  # they end by themselves after 10 s
            while not any(stream.done() for stream in streams):
                code = await stub.ModelInfer(raw_request()).code()  # refused until they are slow
                assert code in {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
                answered |= code is grpc.StatusCode.OK
        assert answered
        ended, other = sorted(streams, key=lambda stream: not stream.done())
        code, metadata, details = ended.result()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metadata["grpc-retry-pushback-ms"] == "1000"
        assert details.startswith("message: it arrives slowly")
        other.cancel()


async def test_probes_are_answered_when_all_calls_are_open(house, raw_request, monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 1)
    house.models.gate.clear()
    async with house.connect() as stub:
        running = stub.ModelInfer(raw_request())
        await asyncio.wait_for(house.models.entered.wait(), 5)
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        house.models.gate.set()
        await running


async def test_a_silent_call_ends_in_time(house, monkeypatch):
    monkeypatch.setattr(calls, "MESSAGE_S", 0.1)
    async with house.connect() as stub:
        code, metadata, _ = await failure(silent(stub))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert metadata["lenet-error-code"] == "body_timeout"
        assert house.requests("body_timeout") == 1


async def test_few_messages_may_be_slow_when_the_process_has_grown(house, monkeypatch):
    resident_bytes = itertools.count(0, 1 << 30)
    monkeypatch.setattr(calls, "resident_bytes", lambda: next(resident_bytes))
    async with house.connect() as stub:  # the budget has room for three of the largest
        streams = [asyncio.ensure_future(silent(stub)) for _ in range(8)]
        await until(lambda: sum(stream.done() for stream in streams) >= 5)
        await asyncio.sleep(0.1)
        ended = [stream for stream in streams if stream.done()]
        assert len(ended) == 5
        for stream in ended:
            assert stream.exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
        assert house.requests("overloaded") == 5


class Resident:
    """The memory of a process, as the test says, and how often it was looked at."""

    def __init__(self, monkeypatch):
        self.size, self.looks = 1 << 30, 0
        monkeypatch.setattr(calls, "resident_bytes", self._look)

    def _look(self):
        self.looks += 1
        return self.size

    async def looked_at(self, times=10):
        looks = self.looks + times
        await until(lambda: self.looks >= looks)


async def test_bodies_over_http_end_no_slow_messages_while_the_budget_has_room(house, monkeypatch):
    resident = Resident(monkeypatch)
    async with house.connect() as stub:  # large messages may have 3 MiB of the budget
        streams = [asyncio.ensure_future(silent(stub)) for _ in range(5)]
        await resident.looked_at()
        house.budget.hold(1_800_000, 1_800_000)
        resident.size += 1_800_000
        await resident.looked_at()
        assert not any(stream.done() for stream in streams)
        resident.size += 1_800_000  # of messages
        await until(lambda: any(stream.done() for stream in streams))
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
async def test_others_are_answered_beside_silent_calls_when_the_process_has_grown(
    house, raw_request, monkeypatch, counted
):
    house.budget = Budget(1 << 26)
    resident = Resident(monkeypatch)
    async with house.connect() as stub:
        streams = [asyncio.ensure_future(silent(stub)) for _ in range(8)]
        await resident.looked_at()
        if counted:
            house.budget.hold(9 << 20, 9 << 20)
            monkeypatch.setattr(calls, "_HELD_UP_TICKS", 1 << 30)
        resident.size += 9 << 20
        await resident.looked_at()
        check = stub.channel.unary_unary("/grpc.health.v1.Health/Check")
        await check(b"", timeout=5)  # the silent calls last for 10 s
        await stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=5)
        await stub.ModelInfer(raw_request(), timeout=5)
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()


async def test_an_empty_stream_is_an_error(stub, house, caplog):
    empty = stub.channel.stream_unary(METHOD)
    code, _, details = await failure(empty(iter(())))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "message: got none, expected a request"
    assert house.requests("invalid_input") == 1


@pytest.mark.parametrize("message", [b"\xff\xff\xff", bytes(5000)])
@pytest.mark.parametrize(
    "method", ["inference.GRPCInferenceService/ModelReady", "grpc.health.v1.Health/Check"]
)
async def test_a_question_is_refused_when_it_is_not_one(stub, caplog, method, message):
    code, metadata, details = await failure(stub.channel.unary_unary(f"/{method}")(message))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["lenet-error-field"] == "message"
    assert details.startswith("message: ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_message_is_refused_when_the_budget_has_no_room(house, raw_request):
    house.budget.hold(house.budget.max_bytes - 4096, 0)
    async with house.connect() as stub:
        await stub.ModelInfer(raw_request(5))  # 3,920 bytes: not counted
        wrong = raw_request(raw_input_contents=[bytes(10_000)])
        code, metadata, _ = await failure(stub.ModelInfer(wrong))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metadata["lenet-error-code"] == "overloaded"
        assert house.requests("overloaded") == 1
    assert house.budget.held_bytes == house.budget.max_bytes - 4096


class RecordingBudget(Budget):
    """Notes what was held and added."""

    def __init__(self, max_bytes):
        super().__init__(max_bytes)
        self.held, self.added = [], []

    def hold(self, size, whole):
        super().hold(size, whole)
        self.held.append(size)

    def add(self, size):
        super().add(size)
        self.added.append(size)


async def test_a_large_message_and_its_answer_are_counted_until_both_are_gone(
    open_house, raw_request
):
    async with open_house(max_queue_rows=4096) as house:
        house.budget = RecordingBudget(1 << 23)
        async with house.connect(max_images=4096, max_body_bytes=1 << 22) as stub:
            tensor = pb.ModelInferRequest.InferInputTensor(
                name="image", datatype="UINT8", shape=(2000, 28, 28)
            )
            request = raw_request(inputs=[tensor], raw_input_contents=[bytes(2000 * 784)])
            response = await stub.ModelInfer(request)
            await until(lambda: house.budget.held_bytes == 0)
            assert house.budget.held == [request.ByteSize()]
            (added,) = house.budget.added
            assert added == pytest.approx(response.ByteSize(), abs=16)


@asynccontextmanager
async def collector_off():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_field_that_quotes_the_client_fits_the_trailer():
    status = calls.status_of(errors.InvalidInput("wrong", field="parameters.'file:\u00e9'"))
    assert dict(status.metadata)["lenet-error-field"] == r"parameters.'file:\xe9'"


REFUSALS = {
    "wrong": (None, "INVALID_ARGUMENT"),
    "overloaded": (errors.Overloaded("full"), "RESOURCE_EXHAUSTED"),
    "late": (errors.DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize(("error", "code"), REFUSALS.values(), ids=REFUSALS)
async def test_refused_messages_are_freed_when_the_collector_is_off(
    house, stub, raw_request, error, code
):
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="image", datatype="UINT8", shape=(64, 28, 28)
    )
    size = 64 * 784 if error else 900_000
    message = raw_request(inputs=[tensor], raw_input_contents=[bytes(size)]).SerializeToString()
    infer = stub.channel.unary_unary(METHOD)
    house.models.error = error

    async def refused():
        found, _, _ = await failure(infer(message))
        assert found.name == code

    await refused()
    async with collector_off():
        tracemalloc.start()
        for _ in range(20):
            await refused()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Each call leaves about 10 KB, mostly the client's, but no message.
    assert left < 20 * size / 2
