"""Methods made of a function: what a client gets, and what their calls hold in memory."""

from __future__ import annotations

import pytest

from tests.wire.test_grpc import Client, gzipped, message
from wire.errors import Forbidden
from wire.unary import unary

MIB = 1 << 20
TOO_LONG = "only INVALID_ARGUMENT message: got 5 bytes, expected at most 4"


def refused(message):
    raise Forbidden("not you")


@pytest.mark.parametrize("step", [1000, 3])
@pytest.mark.parametrize(
    ("answer", "sent", "got"),
    [
        (bytes.upper, message(b"abcd"), ["headers", "'ABCD'", "OK"]),
        (bytes.upper, message(b"abcde"), [TOO_LONG]),
        (bytes.upper, gzipped(b"abcde"), [TOO_LONG]),
        (bytes.upper, b"", ["only INVALID_ARGUMENT message: got none, expected a request"]),
        (refused, message(b"a"), ["only PERMISSION_DENIED not you"]),
        (lambda _: 1 / 0, message(b"a"), ["only INTERNAL internal error; see the server log"]),
    ],
    ids=["answer", "too long", "too long, compressed", "nothing", "refusal", "bug"],
)
def test_a_call_ends_as_its_function_does(answer, sent, got, step):
    client = Client(unary(answer, max_bytes=4), "gzip")
    for at in range(0, max(1, len(sent)), step):
        client.send(sent[at : at + step], end=at + step >= len(sent)).turn()
    assert client.got == got
    assert client.door.budget.held_bytes == 0


def test_the_bytes_of_a_message_are_held_until_its_client_leaves():
    client = Client(unary(bytes.upper)).send(message(b"abcd")[:8]).turn()
    assert client.door.budget.held_bytes == 3
    client.h2.reset_stream(1)
    client.turn()
    assert client.door.budget.held_bytes == 0


def test_a_message_for_which_there_is_no_memory_is_refused():
    client = Client(unary(bytes.upper))
    budget = client.door.budget
    budget.add(budget.max_bytes - 3)
    (got,) = client.send(message(b"abcd")[:8]).turn().send(b"d").turn().got
    assert got.startswith("only RESOURCE_EXHAUSTED body: ")
    assert budget.held_bytes == budget.max_bytes - 3


@pytest.mark.parametrize("by", ["another", "itself"])
def test_a_large_slow_message_gives_way_when_memory_is_needed(by):
    client = Client(unary(len)).send(message(bytes(2 * MIB), size=4 * MIB)).turn()
    budget, loop = client.door.budget, client.loop
    assert budget.held_bytes == 2 * MIB
    rest = budget.limit_bytes(4 * MIB) - 2 * MIB
    if by == "itself":
        budget.add(rest)
    loop.wait(loop.time() + 2.5)
    if by == "itself":
        client.send(bytes(MIB))
    else:
        loop.call(budget.hold, rest + MIB, rest)
    (got,) = client.turn().got
    assert got.startswith("only DEADLINE_EXCEEDED message: upload too slow")
    assert budget.held_bytes == rest + MIB * (by == "another")
