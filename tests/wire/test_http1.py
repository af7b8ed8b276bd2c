"""Requests and their answers after RFC 9110 and 9112, by the reader and over a socket."""

from __future__ import annotations

import pytest

from tests.wire.doors import running
from wire.errors import InvalidInput, ProtocolError
from wire.gate import Gate, Policy
from wire.head import Heads
from wire.http1 import Http1

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = (b"Transfer-Encoding: chunked",)
UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQA")


def get(*lines, path=b"/", method=b"GET", version=b"1.1", host=True):
    head = method + b" " + path + b" HTTP/" + version + b"\r\n" + (HOST if host else b"")
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def post(body, *lines, path=b"/fast"):
    return get(*lines, b"Content-Length: %d" % len(body), path=path, method=b"POST") + body


def sent(*lines, body=b"", path=b"/fast"):
    """A POST whose framing is `lines`."""
    return get(*lines, path=path, method=b"POST") + body


def chunks(*parts, end=b"0\r\n\r\n", lines=CHUNKED, path=b"/fast"):
    return sent(*lines, path=path) + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + end


def sized(count):
    """A request whose headers, with all line ends, are `count` bytes."""
    return get(b"X: " + b"a" * (count - len(get(b"X: "))))


# "200 open": answered, and the connection takes another request; "400 closed": answered with
# Connection: close, and ended by the server.
ROWS = {
    "http2 preface in part": (b"PRI * HTTP/2.0\r\n\r\nGET / HTTP/1.1\r\n\r\n", "400 closed"),
    "http2 preface later": (GET + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "200 400 closed"),
    "no host": (get(host=False), "400 closed"),
    "no host 1.0": (get(host=False, version=b"1.0"), "200 closed"),
    "two hosts 1.0": (get(b"Host: a", version=b"1.0"), "400 closed"),
    "1.0 ka": (get(b"Connection: keep-alive", version=b"1.0"), "200 open"),
    "close, keep-alive 1.0": (get(b"Connection: close, keep-alive", version=b"1.0"), "200 closed"),
    "asterisk": (get(path=b"*", method=b"OPTIONS"), "200 open"),
    "connect": (get(path=b"a:80", method=b"CONNECT"), "501 closed"),
    "no cl": (sent(), "200 open"),
    "get body": (get(b"Content-Length: 3") + b"abc", "200 open"),
    "coding get": (get(*CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n", "200 open"),
    "coding 1.0": (
        b"POST /fast HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "400 closed",
    ),
    "upgrade pipelined": (post(b"abc", *UPGRADE) + GET, "200 200 open"),
    "upgrade 1.0": (
        get(b"Connection: Upgrade, keep-alive", b"Upgrade: h2c", version=b"1.0"),
        "200 open",
    ),
    "pipelined": (post(b"a") + GET + post(b"b"), "200 200 200 open"),
    "pipelined 1.0": (
        get(b"Connection: keep-alive", version=b"1.0") * 2 + get(version=b"1.0") + GET,
        "200 200 200 closed",
    ),
    "request in a body": (post(GET) + GET, "200 200 open"),
    "many lines in a body": (post(b"\r\n" * 8000), "200 open"),
    "big body then half head": (post(bytes(78000)) + b"GET / HTTP/1.1\r\nHost: a\r\n", "200 open"),
    "garbage after": (GET + b"garbage\r\n\r\n", "200 400 closed"),
    "garbage after fast": (post(b"a") + b"garbage\r\n\r\n", "200 400 closed"),
    "garbage behind close": (get(b"Connection: close") + b"garbage\r\n\r\n", "200 closed"),
    "nul behind": (chunks(b"abc") + b"\x00", "200 400 closed"),
    "100 headers": (get(*[b"X: 1"] * 99), "200 open"),
    "101 headers": (get(*[b"X: 1"] * 100), "431 closed"),
    "headers 65536": (sized(65536), "200 open"),
    "headers 65537": (sized(65537), "431 closed"),
    "long header open": (b"GET / HTTP/1.1\r\nX: " + b"a" * 70000, "431 closed"),
}


def more(outcome, make, *values):
    """Add rows that `make` makes of values."""
    for value in values:
        ROWS[f"{make.__name__} {len(ROWS)}: {value!r:.40}"] = make(value), outcome


def line(value):
    return get(value)


def host(value):
    return get(b"Host:" + value, host=False)


def version(value):
    return get(version=value)


def path(value):
    return get(path=value)


def method(value):
    return get(method=value)


def start(value):
    return value + GET


def target(value):
    return value + GET[5:]


def version_end(value):
    return value + GET[14:]


def first_line(value):
    return value + GET[16:]


def end(value):
    return GET[:-4] + value


def alone(value):
    return value


def length(value):
    return sent(b"Content-Length:" + value, body=b"abc")


def coding(value):
    return framing(b"Transfer-Encoding:" + value)


def framing(value):
    return chunks(b"abc", lines=(value,))


def body(value):
    return sent(value, body=b"abc")


def chunk(value):
    return chunks(end=value + b"\r\n0\r\n\r\n")


def last(value):
    return chunks(b"abc", end=value)


def expect(value):
    return post(b"abc", b"Expect: " + value)


def posted(value):
    return post(b"abc", value)


more("200 open", line, b"X: a\tb", b"X: \xff", b"X:", b"X:   a   ", b"Connection: closed")
more("200 open", line, b"\r\n".join(UPGRADE), b"Range: bytes=" + b"0-," * 1000)
more("200 open", line, b"Cookie: a=b\r\nCookie: a=b")
more("200 closed", line, b"connection: CLOSE", b"Connection: keep-alive, close")
more("200 closed", line, b"Connection: close\r\nConnection: keep-alive")
more("400 closed", line, b"X : a", b"X", b"X: a\r\n b", b": a", b":", b"X: a\0b", b"X: a\rb")
more("400 closed", line, b"X: a\nY: b", b"X(: a", b"X: \x07", b"X: \x7f", b"X\0Y: a", b"\xefX: a")
more("400 closed", line, b"Host: a", b"Host: b")
more("400 closed", line, b"Authorization: Bearer a\r\nAuthorization: Bearer a")
more("400 closed", line, b"Content-Type: a/b\r\ncontent-type: c/d")
more("431 closed", line, b"A" * 100000 + b": a")
more("200 open", host, b"", b" \t a\t ", b" a:80", b" [::1]:80")
more("400 closed", host, b" a/b", b" a b", b" u@a", b" a?x", b" \xffa")
more("400 closed", version, b"1.2", b"9.9", b"1.32", b"01.1", b"9999999.1")
more("505 closed", version, b"2.0")
more("200 open", path, b"http://a/x?y", b"http://b/", b"http://a?x=1", b"HTTP://a/", b"/a#b")
more("200 open", path, b"/%41", b"/%0d%0aX:%20y", b"/%00", b"/%zz", b"/" + b"a" * 8191)
more("400 closed", path, b"http://", b"*", b"*x", b"x", b"/a b", b"/\0", b"!", b"/\xff", b"/\x7f")
more("400 closed", path, b"http://a:99999/", b"http://[::1/")
more("414 closed", path, b"/" + b"a" * 8192, b"/" + b"a" * 70000)
more("421 closed", path, b"https://a/")
more("400 closed", method, b"FOO", b"get", b"GETX", b'G="x"', b"A" * 99999)
more("200 open", start, b"\r\n\r\n")
more("400 closed", start, b" ", b"hello\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc")
more("400 closed", target, b"GET  /", b"GET\t/", b"GET /\n", b"GET ", b"GET / ")
more("400 closed", version_end, b"GET / http/1.1", b"GET / HTTP/1.1 ", b"GET / HTTP/\r1.1")
more("400 closed", first_line, b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r")
more("400 closed", first_line, b"GET / HTTP/1.1\r\n X: a\r\n")
more("400 closed", end, b"\n\n", b"\r\n\rX" + GET)
more("505 closed", alone, b"GET /\r\n\r\n")
more("200 open", length, b"3", b" 0003", b" " + b"3".zfill(20), b"\t3 \t")
more("400 closed", length, b"", b" -1", b" +3", b" 0x3", b" abc", b" 3abc", b" 3.0", b" 1_0")
more("400 closed", length, b" 3 3", b" 3, 3", b" 3\r", b" " + b"3".zfill(21), b"3".zfill(5000))
more("400 closed", length, b" 3\r\nContent-Length: 3", b" 3\r\nContent-Length: 4")
more("400 closed", length, b"\r\nContent-Length: 3", b" 3\r\nTransfer-Encoding: chunked")
more("200 open", coding, b" chunked", b" Chunked", b"\tchunked")
more("200 open", coding, b"chunked\r\nConnection: upgrade\r\nUpgrade: x")
more("400 closed", coding, b"", b" chunked, gzip", b" chunked,", b" chunked, chunked")
more("400 closed", coding, b"\x0bchunked", b" chunked\r\nContent-Length: 3", b"\r\n chunked")
more("400 closed", coding, b" chunked\r\nTransfer-Encoding: chunked")
more("501 closed", coding, b" gzip, chunked", b" gzip", b" identity", b" xchunked", b" ,chunked")
more("501 closed", coding, b" \xa0chunked", b" chunked\xa0", b' "chunked"', b" chunked;a=b")
more("501 closed", coding, b" identity\r\nTransfer-Encoding: chunked")
more("400 closed", framing, b"Transfer-Encoding : chunked", b"Transfer-\r\nEncoding: chunked")
more("400 closed", framing, b"X: a\r\n Transfer-Encoding: chunked", b"Content-Length\xa0: 3")
more("200 open", body, b"Transfer_Encoding: x\r\nContent-Length: 3")
more("200 open", chunk, b"3;a=b\r\nabc", b'3;a="b c"\r\nabc', b"A\r\n0123456789", b"0003\r\nabc")
more("400 closed", chunk, b"x", b"0x3\r\nabc", b"-3\r\nabc", b"f" * 20, b"3\r\nabcXX", b"3\nabc")
more("400 closed", chunk, b"3 \r\nabc", b"\r\nabc", b"0_3\r\nabc", b"+3\r\nabc", b" 3\r\nabc")
more("400 closed", chunk, b"3\t\r\nabc", b"3xyz\r\nabc", b"3\rXabc", b"3;a=b\r\rX\r\nabc")
more("400 closed", chunk, b"3;a\nabc", b"3;\r\nabc", b"3;a\0\r\nabc", b"3\r\nabc\n", b"3\r\nabcd")
more("400 closed", chunk, b"3;" + b"a" * 100000 + b"\r\nabc")
more("200 open", last, b"000\r\n\r\n", b"0;a=b\r\n\r\n", b"0\r\nX: 1\r\n\r\n")
more("200 open", last, b"0\r\nHost: b\r\n\r\n", b"0\r\nX:POST / HTTP/1.1\r\n\r\n")
more("400 closed", last, b"0\r\nX 1\r\n\r\n", b"0\r\n" + b"X: 1\r\n" * 20000 + b"\r\n")
more("400 closed", last, b"\r\n0\r\n\r\n", b"0\r\n\n", b"0\r\n\rX", b"0\r\nX: \0\r\n\r\n")
more("400 closed", last, b"0\r\nContent-Length: 5\r\n\r\n")
more("400 closed", last, b"0\r\nTransfer-Encoding: chunked\r\n\r\n")
more("417 closed", expect, b"x", b"100-continue, x", b"100-continue\r\nExpect: 100-continue")
more("200 closed", posted, b"Connection: Upgrade, close\r\nUpgrade: h2c")

ANSWERS = {
    "cl over": (get(b"Content-Length: 200001", method=b"POST", path=b"/fast"), "413 closed"),
    "chunk over": (chunks(bytes(100000), bytes(100001)), "413 open"),
    "expect": (post(b"abc", b"Expect: 100-continue"), "100 200 open"),
    "expect no body yet": (
        get(b"Expect: 100-continue", b"Content-Length: 3", method=b"POST", path=b"/fast"),
        "100 open",
    ),
    "expect over": (
        get(b"Expect: 100-continue", b"Content-Length: 200001", method=b"POST", path=b"/fast"),
        "413 closed",
    ),
    "expect and white space": (post(b"abc", b"Expect: 100-continue \t"), "100 200 open"),
    "expect asgi": (get(b"Expect: 100-continue", b"Content-Length: 3", method=b"POST"), "100 open"),
    "expect early": (
        get(b"Expect: 100-continue", b"Content-Length: 3", method=b"POST", path=b"/early"),
        "200 closed",
    ),
    "expect 1.0": (
        b"POST /fast HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
        "200 closed",
    ),
    "head": (get(method=b"HEAD"), "200 open"),
    "head fast path": (get(method=b"HEAD", path=b"/fast"), "200 open"),
    "options": (get(method=b"OPTIONS"), "200 open"),
    "204": (get(path=b"/none"), "204 open"),
    "pieces": (get(path=b"/pieces"), "200 open"),
    "pieces 1.0": (get(path=b"/pieces", version=b"1.0"), "200 closed"),
    "fails": (get(path=b"/fails"), "500 open"),
    "cancels itself": (get(path=b"/cancels"), "500 open"),
    "early": (post(b"abc", path=b"/early"), "200 open"),
    "early more": (get(b"Content-Length: 100000", method=b"POST", path=b"/early"), "200 closed"),
    "refused query": (post(b"abc", path=b"/fast?x=1"), "400 open"),
    "refused big": (
        get(b"Content-Length: 100000", method=b"POST", path=b"/fast?x=1"),
        "400 closed",
    ),
    "head body": (get(b"Content-Length: 3", method=b"HEAD") + b"abc", "200 open"),
    "options body": (get(b"Content-Length: 3", method=b"OPTIONS") + b"abc", "200 open"),
    "Expect": (post(b"abc", b"Expect: 100-Continue"), "100 200 open"),
    "expect pipelined": (post(b"abc", b"Expect: 100-continue") + GET, "100 200 200 open"),
    "expect upgrade": (
        post(b"abc", b"Expect: 100-continue", b"Connection: Upgrade", b"Upgrade: h2c"),
        "100 200 open",
    ),
}
"""Rows that depend on the route, too; tested over a socket."""


class Route:
    """The fast route, as far as the reader sees it. It wants its headers."""

    def read(self, query, headers, path=None):
        if headers.get("x-timeout") == "0":
            raise InvalidInput("x-timeout: got 0")
        return sorted((name.encode(), text.encode("latin-1")) for name, text in headers.items())


def new_heads():
    policy = Policy(headers=["x-timeout"], varying=["x-timeout"])
    return Heads({(b"POST", b"/fast"): Route()}, Gate(policy=policy), b"http")


class Reader:
    """Feeds a reader, and notes what it says: a request with its body, or a refusal's status."""

    def __init__(self, heads=None, max_header_bytes=64 * 1024):
        self.heads, self.found, self.head = heads or new_heads(), [], None
        self.http1 = Http1(self.heads, max_header_bytes, "HTTP/1.1")

    def feed(self, *pieces):
        for piece in pieces:
            whole = None if self.head else self.http1.whole(piece)
            if whole is not None:
                self.head, self.body = whole[0], bytes(whole[1])
                self.end()
            else:
                self.http1.receive(piece)
                self.read()
        return self.found

    def read(self):
        """Read what there is, each request as soon as the one before is complete."""
        try:
            while self.http1.has_more or self.http1.receiving:
                if self.head is None:
                    self.head, self.body = self.http1.next_head(), b""
                if (piece := self.http1.next_piece()) is not None:
                    self.body += piece[0]
                    if piece[1]:
                        self.end()
                elif not self.http1.has_more:
                    return
        except ProtocolError as exc:
            self.found.append(exc.status)

    def end(self):
        head, self.head = self.head, None
        fields = head.wanted or sorted(head.headers) or str(head.error)
        self.found.append((b"%s %s" % (head.method, head.path), fields, self.body))
        if not head.keep_alive:
            self.http1.close()

    def outcome(self):
        """The outcome in the form of `ROWS`."""
        statuses = [str(one) if isinstance(one, int) else "200" for one in self.found]
        return " ".join([*statuses, "closed" if self.http1.closed else "open"])


@pytest.mark.parametrize("name", ROWS)
def test_a_request_is_read_as_its_row_says_in_one_piece_and_byte_by_byte(name):
    data, expected = ROWS[name]
    whole, bytewise, again = Reader(), Reader(), Reader()
    whole.feed(data)
    assert whole.outcome() == expected
    bytewise.feed(*(data[at : at + 1] for at in range(len(data))))
    if "431" not in expected:
        assert bytewise.found == whole.found
    assert bytewise.outcome() == expected
    again = Reader(whole.heads)
    assert again.feed(data) == whole.found, "its header section is known"
    if expected.endswith("open") and not whole.http1.in_headers:
        assert whole.feed(GET)[-1] == (b"GET /", [(b"host", b"a")], b"")
        assert again.outcome() == expected


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_answer_and_what_becomes_of_the_connection(name):
    data, expected = ANSWERS[name]
    *statuses, after = expected.split()
    async with running() as server:
        client = await server.open()
        client.send(data)
        for status in statuses:
            found, headers, _ = await client.answer("HEAD" if data[:4] == b"HEAD" else "GET")
            assert found == int(status)
        if after == "closed":
            assert headers["connection"] == "close"
            assert await client.rest() == b""
        elif statuses != ["100"]:
            client.send(GET)
            assert (await client.answer())[0] == 200


def test_a_trailer_is_never_read_as_a_header():
    reader = Reader()
    reader.feed(chunks(b"abc", end=b"0\r\nX-Late: 1\r\nConnection: close\r\n\r\n"), GET)
    first, second = reader.found
    assert first == (b"POST /fast", [(b"host", b"a"), (b"transfer-encoding", b"chunked")], b"abc")
    assert second == (b"GET /", [(b"host", b"a")], b"")


def test_white_space_around_a_value_is_not_part_of_it():
    reader = Reader()
    lines = (b"A:\t x \t y\t ", b"B: \xa0z\xa0", b"C: \t ", b"Content-Encoding:identity ")
    for _ in range(2):
        reader.feed(post(b"1", *lines).replace(b"Content-Length: 1", b"Content-Length:\t1\t"))
    values = dict(reader.found[0][1])
    assert (values[b"a"], values[b"b"], values[b"c"]) == (b"x \t y", b"\xa0z\xa0", b"")
    assert (values[b"content-encoding"], values[b"content-length"]) == (b"identity", b"1")
    assert reader.found[0] == reader.found[1], "its header section is known"


# Known header sections: the parser does not see them again

KNOWN = post(b"0123456789")
SECTION = KNOWN[:-10]


def test_equal_headers_are_read_once_and_others_are_not_mixed_up():
    reader = Reader()
    for n in range(5):
        reader.feed(post(b"%d" % n))
    assert [body for _, _, body in reader.found] == [b"%d" % n for n in range(5)]
    assert len(reader.heads.known) == 1
    reader.feed(post(b"5", b"X: 1"), post(b"6", b"X: 2"))
    assert len(reader.heads.known) == 3
    assert [dict(headers)[b"x"] for _, headers, _ in reader.found[-2:]] == [b"1", b"2"]


def test_few_header_sections_are_kept_and_none_that_is_large():
    reader = Reader()
    for n in range(1500):
        reader.feed(post(b"a", b"X: %d" % n, b"X-Timeout: 1"))
        assert 0 < len(reader.heads.known) <= 512
    for n, is_known in ((1499, True), (988, True), (987, False)):
        assert (reader.heads.find(post(b"a", b"X: %d" % n)[:-1]) is not None) == is_known
    reader.feed(post(b"a", b"X: " + b"a" * 5000))
    assert max(map(len, reader.heads.known)) < 5000


@pytest.mark.parametrize("behind", [b"", KNOWN, GET + KNOWN, post(b"new", b"X: 2") + KNOWN])
def test_a_known_request_is_read_alike_wherever_it_is_cut(behind):
    data = KNOWN + behind
    expected = Reader().feed(data)
    known = Reader()
    known.feed(KNOWN)
    for cut in range(1, len(data)):
        assert Reader(known.heads).feed(data[:cut], data[cut:]) == expected, cut


KNOWN_IN = {
    "a body": [post(KNOWN)[: -len(KNOWN)], KNOWN],
    "a chunk": [sent(*CHUNKED), b"%x\r\n" % len(KNOWN), KNOWN, b"\r\n0\r\n\r\n"],
    "a header": [b"POST / HTTP/1.1\r\nHost: a\r\nX: ", KNOWN],
    "a request line": [b"POST /a?", b"b HTTP/1.1\r\nHost: b\r\nX: ", KNOWN],
}


@pytest.mark.parametrize("name", KNOWN_IN)
def test_a_known_request_within_another_is_not_one(name):
    pieces = KNOWN_IN[name]
    expected = Reader().feed(b"".join(pieces))
    known = Reader()
    known.feed(KNOWN)
    assert Reader(known.heads).feed(*pieces) == expected


VARIED = {
    "an id": ([b"X-Request-Id: r1"], True),
    "no space": ([b"x-request-id:r1"], True),
    "no value": ([b"X-Request-Id:"], True),
    "another id": ([b"X-Request-Id: " + b"r" * 200], True),
    "a trace": ([b"traceparent: 00-%s-%s-01" % (b"4b" * 16, b"0a" * 8)], True),
    "all": ([b"X-Timeout: 5", b"TRACEPARENT: x", b"X-REQUEST-ID: r1"], True),
    "a refused value": ([b"X-Timeout: 0"], True),
    "two spaces": ([b"X-Request-Id:  r1"], False),
    "two words": ([b"X-Request-Id: r 1"], False),
    "two ids": ([b"X-Request-Id: r1", b"X-Request-Id: r2"], False),
    "an odd id and another": ([b"X-Request-Id: r 1", b"x-request-id: r2"], False),
    "two timeouts": ([b"X-Timeout: 1", b"x-timeout: 2"], False),
    "a fold": ([b"X-Request-Id: r1", b" r2"], False),
    "a fold before": ([b" r2", b"X-Request-Id: r1"], False),
    "NUL": ([b"X-Request-Id: a\0b"], False),
    "CR": ([b"X-Request-Id: a\rb"], False),
    "LF": ([b"X-Request-Id: a\nb"], False),
    "LF before": ([b"X: a\nX-Request-Id: b"], False),
    "latin-1": ([b"X-Request-Id: \xff"], False),
    "a space before the colon": ([b"X-Request-Id : a"], False),
    "much": ([b"X-Request-Id: " + b"r" * 2000], False),
    "another field": ([b"XX-Request-Id: r1"], False),
    "101 fields": ([b"X-Request-Id: r1", *[b"A:"] * 98], False),
}
"""Lines that are inserted, and whether the parser is left out."""


@pytest.mark.parametrize("path", [b"/fast", b"/"], ids=["fast", "application"])
@pytest.mark.parametrize("name", VARIED)
def test_a_section_that_differs_in_fields_that_vary_is_read_as_by_the_parser(name, path):
    lines, is_known = VARIED[name]
    heads, data = new_heads(), post(b"abc", *lines, path=path)
    others = [one for one in lines if one == b"A:"]
    Reader(heads).feed(post(b"abc", b"X-Timeout: 7", *others, path=path))
    assert (heads.find(data[:-3]) is not None) == is_known
    assert Reader(heads).feed(data) == Reader().feed(data)


NOT_KNOWN = {
    "that waits": post(b"abc", b"Expect: 100-continue"),
    "that closes": post(b"abc", b"Connection: close"),
    "that closes, of two options": post(b"abc", b"Connection: x, Close"),
    "of HTTP/1.0": post(b"abc").replace(b"1.1", b"1.0", 1),
    "chunked": chunks(b"abc"),
    "malformed": KNOWN.replace(b"Host", b"Ho st"),
    "with LF alone": KNOWN.replace(b"a\r\n", b"a\n", 1),
    "with two ids": post(b"abc", b"X-Request-Id: 1", b"X-Request-Id: 2"),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_header_sections_of_such_requests_are_not_kept(name):
    reader = Reader()
    reader.feed(NOT_KNOWN[name])
    assert not reader.heads.known


# Unparsed input, and limits


def test_empty_lines_before_a_request_are_bounded():
    reader = Reader(max_header_bytes=1000)
    assert reader.feed(*[b"\r\n"] * 500) == []
    assert reader.feed(b"\r\n") == [431]


@pytest.mark.parametrize("request_", [KNOWN, GET], ids=["whole", "a head"])
def test_empty_lines_behind_requests_do_not_add_up(request_):
    reader = Reader(max_header_bytes=100)
    for _ in range(200):
        reader.feed(request_, b"\r\n")
    assert 431 not in reader.found


def test_a_body_in_small_chunks_is_decoded_a_part_at_a_time():
    http1 = Reader().http1
    http1.receive(chunks(*[b"x"] * 40_000))
    http1.next_head()
    pieces = []
    while http1.receiving:
        assert http1.has_more
        pieces.append(http1.next_piece()[0])
    assert b"".join(pieces) == b"x" * 40_000
    assert max(map(len, pieces)) < 5000


@pytest.mark.parametrize("flood", [b"0\r\n" + b"X: 1\r\n" * 20_000, b"3;" + b"a" * 100_000])
def test_trailers_and_chunk_extensions_are_bounded_however_they_are_cut(flood):
    reader = Reader()
    reader.feed(sent(*CHUNKED), *(flood[at : at + 999] for at in range(0, len(flood), 999)))
    assert reader.found == [400]
