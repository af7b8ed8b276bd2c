import asyncio
import time

import pytest
from service.rpc.gathering import Gathering

from service.rpc import gathering


class Call:
    """What a call's task does for `Gathering`."""

    def add_done_callback(self, callback):
        self.end = lambda: callback(self)


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


def join(calls, count=1):
    return [asyncio.create_task(calls.join(Call())) for _ in range(count)]


async def test_a_lone_call_does_not_wait():
    calls = Gathering()
    for _ in range(3):
        call = Call()
        with pytest.raises(StopIteration):
            calls.join(call).send(None)
        call.end()


async def test_calls_go_on_together_when_another_is_open(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST_S", 60.0)  # however busy the machine is
    calls = Gathering()
    await calls.join(Call())
    early = join(calls, 2)
    await turns(gathering.TURNS // 2)
    late = join(calls)
    await turns(gathering.TURNS // 4)
    assert not any(task.done() for task in early + late)
    await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
    await turns(2)
    assert all(task.done() for task in early + late)


async def test_calls_do_not_wait_for_slow_turns():
    calls = Gathering()
    await calls.join(Call())
    (waiting,) = join(calls)
    count = 0
    while not waiting.done():
        time.sleep(0.001)  # noqa: ASYNC251 - other work on the loop
        await asyncio.sleep(0)
        count += 1
    assert count < gathering.TURNS / 4


async def test_the_others_go_on_when_one_is_cancelled():
    calls = Gathering()
    await calls.join(Call())
    gone, *others = join(calls, 3)
    await turns(2)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.wait_for(asyncio.gather(*others), 5)


async def test_concurrent_calls_share_batches(house, stub, raw_request):
    await asyncio.gather(*(stub.ModelInfer(raw_request(1)) for _ in range(16)))
    assert house.value("lenet_batch_rows_sum") == 16
    assert house.value("lenet_batch_rows_count") < 16
