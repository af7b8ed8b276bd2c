"""Heads of requests over HTTP/2: their limits, and which of them are read once."""

from __future__ import annotations

import pytest
from hpack import Encoder
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire.test_http2 import ACKED, NO_TABLE, START, Client, block, get, headers
from wire.gate import Gate
from wire.grpc import Method, timeout_s_of
from wire.http2 import Http2
from wire.http2_fields import VARYING
from wire.http2_head import Http2Head
from wire.ids import Ids
from wire.keys import Keys


def test_few_heads_are_remembered_and_none_with_ids_of_its_own():
    client = Client()
    client.feed(START + ACKED + headers(NO_TABLE + block(path=b"/answer")), 1 << 20)
    known = client.http2.blocks.known
    for stream in range(3, 4003, 2):
        client.feed(get(stream, (b"a", b"%d" % stream), path=b"/answer"), 1 << 20)
        assert known
        assert sum(map(len, known)) < 2**20
    before = len(known)
    client.feed(get(5001, (b"x-request-id", b"1"), path=b"/answer"), 1 << 20)
    client.feed(get(5003, (b"a", b"b" * 4000), path=b"/answer"), 1 << 20)
    assert len(known) == before
    assert client.heard[-2:] == ["5003 GET /answer", "5003 end"]


POST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a"))
CALL = ((b"content-type", b"application/grpc"),)


def test_a_block_that_sets_the_size_of_the_table_again_is_not_remembered():
    client = Client()
    client.feed(START + headers(NO_TABLE + block(path=b"/answer")), 1 << 20)
    before = set(client.http2.blocks.known)
    client.feed(headers(b"\x3f\xe1\x1f" + block(path=b"/answer"), stream=3), 1 << 20)
    assert client.heard[-1] == "3 end"
    assert set(client.http2.blocks.known) == before


class Caller(Client):
    """Notes what the heads of its calls say; `known` are the heads that connections share."""

    def __init__(self, known=None):
        super().__init__()
        self.http2 = Http2(self, {} if known is None else known)
        self.reads, self.found = 0, []
        self.feed(START + ACKED, 1 << 20)

    def call(self, *fields, coded=False):
        """What the head of a call with `fields` says; in Huffman's code where `coded`."""
        stream, encoder = self.http2._last + 2 | 1, Encoder()
        encoder.header_table_size = 0
        sent = NO_TABLE + block(*CALL, *fields, path=b"/a.B/C", method=b"POST")
        if coded:
            sent = encoder.encode((*POST[:2], (b":path", b"/a.B/C"), POST[3], *CALL, *fields))
        self.found = []
        self.feed(headers(sent, stream=stream), 1 << 20)
        return self.found

    def read(self, fields):
        self.reads += 1
        method = Method(lambda named: (named.get("x"), timeout_s_of(named)), None)
        return Http2Head(fields, {}, {b"/a.B/C": method}, Gate())

    def opened(self, stream, head, end):
        self.found = [(head.wanted if head.error is None else head.error.message, head.ids)]
        self.http2.answer(stream, b"\x88", b"", None)


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACES = [TRACE, TRACE, TRACE[:-1] + b"0"]
TIMEOUTS = [b"1S", b"999999u", b"1S", b"1S", b"20m", b"99999999n"]
TIMEOUTS += [b"%dm" % (1000 + number // 2) for number in range(40)]


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "Huffman"])
def test_heads_that_differ_in_fields_that_vary_are_read_once(coded):
    client = Caller()
    varied = [
        *([(b"grpc-timeout", one)] for one in TIMEOUTS),
        *([(b"traceparent", one), (b"x-request-id", one[-9:])] for one in TRACES),
        *([(b"x-request-id", one), (b"grpc-timeout", one)] for one in TIMEOUTS),
    ]
    for x in (b"a", b"b"):
        for fields in varied:
            named = {name.decode(): value.decode() for name, value in fields}
            found = client.call((b"x", x), *fields, coded=coded)
            assert found == [((x.decode(), timeout_s_of(named)), Ids.read(named))]
    assert client.reads <= 2 * 3 + 1  # the first block announces the empty table
    for value, expected in ((b"1", "grpc-timeout: got '1', expected"), (b" 1S", None)):
        found = client.call((b"x", b"b"), (b"grpc-timeout", value), coded=coded)
        assert [one[:31] for one, _ in found] == ([expected] if expected else [])
    known = client.http2.blocks.known
    assert client.call((b"x", b"b"), (b"grpc-timeout", b"2S"), coded=coded)[0][0] == ("b", 2)
    assert len(known) <= 7


TIMEOUT = b"\x0cgrpc-timeout"
LIKE = [b"@" + TIMEOUT + b"\x021S", b"@" + TIMEOUT + b"\x022S", b"a", b"@", TIMEOUT + b"\x023S"]


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([b"x", *VARYING]),
                st.one_of(
                    st.sampled_from([b"1S", b"2S", b"a" * 200]),
                    st.lists(st.sampled_from(LIKE), min_size=1, max_size=3).map(b"".join),
                ),
            ),
            max_size=3,
        ),
        min_size=2,
        max_size=6,
    )
)
@example([[(b"x", like), (b"grpc-timeout", b"1S")] for like in LIKE[:2]])
def test_a_known_head_is_that_of_its_fields_whatever_looks_as_if_it_varied(calls):
    client = Caller()
    for fields in calls:
        assert client.call(*fields) == Caller({}).call(*fields)


def test_the_head_that_is_known_longest_gives_way_to_a_new_one():
    client = Caller()
    for number in range(512):
        client.call((b"x", b"%d" % number))
    reads = client.reads
    client.call((b"x", b"511"))
    client.call((b"x", b"0"))
    assert client.reads == reads
    client.call((b"x", b"new"))
    client.call((b"x", b"511"))
    assert client.reads == reads + 1
    client.call((b"x", b"0"))
    assert client.reads == reads + 2


def test_each_request_without_its_key_is_counted_though_its_headers_are_known():
    refused = []

    class Guarded(Client):
        def read(self, fields):
            return Http2Head(fields, {}, {}, Gate(Keys(["a-key"]), refused=refused.append))

    client = Guarded()
    client.feed(START + ACKED + headers(NO_TABLE + block(path=b"/x")), 1 << 20)
    client.feed(get(3, path=b"/x") + get(5, path=b"/x"), 1 << 20)
    assert len(refused) == 3
