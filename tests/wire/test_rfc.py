"""A table of requests and their answers: RFC 9110 and 9112."""

from __future__ import annotations

import pytest

from tests.wire.doors import running
from wire.errors import InvalidInput
from wire.gate import Gate, Policy
from wire.head import Heads, Refused
from wire.http1 import Http1

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = (b"Transfer-Encoding: chunked",)


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
    "plain": (GET, "200 open"),
    "no host": (get(host=False), "400 closed"),
    "no host 1.0": (get(host=False, version=b"1.0"), "200 closed"),
    "two hosts": (get(b"Host: a"), "400 closed"),
    "two other hosts": (get(b"Host: b"), "400 closed"),
    "empty host": (get(b"Host:", host=False), "200 open"),
    "host slash": (get(b"Host: a/b", host=False), "400 closed"),
    "host space": (get(b"Host: a b", host=False), "400 closed"),
    "host at": (get(b"Host: u@a", host=False), "400 closed"),
    "host and white space": (get(b"Host: \t a\t ", host=False), "200 open"),
    "host port": (get(b"Host: a:80", host=False), "200 open"),
    "ipv6": (get(b"Host: [::1]:80", host=False), "200 open"),
    "1.0": (get(version=b"1.0"), "200 closed"),
    "1.0 ka": (get(b"Connection: keep-alive", version=b"1.0"), "200 open"),
    "close": (get(b"Connection: close"), "200 closed"),
    "Close": (get(b"connection: CLOSE"), "200 closed"),
    "2.0": (get(version=b"2.0"), "505 closed"),
    "1.2": (get(version=b"1.2"), "400 closed"),
    "0.9": (b"GET /\r\n\r\n", "505 closed"),
    "9.9": (get(version=b"9.9"), "400 closed"),
    "http lower": (b"GET / http/1.1\r\n\r\n", "400 closed"),
    "http2 preface in part": (b"PRI * HTTP/2.0\r\n\r\nGET / HTTP/1.1\r\n\r\n", "400 closed"),
    "http2 preface later": (get() + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "200 400 closed"),
    "unknown method": (get(method=b"FOO"), "400 closed"),
    "lower method": (get(method=b"get"), "400 closed"),
    "absolute": (get(path=b"http://a/"), "200 open"),
    "absolute path": (get(path=b"http://a/x?y"), "200 open"),
    "absolute none": (get(path=b"http://"), "400 closed"),
    "asterisk": (get(path=b"*", method=b"OPTIONS"), "200 open"),
    "asterisk get": (get(path=b"*"), "400 closed"),
    "asterisk and more": (get(path=b"*x"), "400 closed"),
    "no slash": (get(path=b"x"), "400 closed"),
    "connect": (get(path=b"a:80", method=b"CONNECT"), "501 closed"),
    "space target": (get(path=b"/a b"), "400 closed"),
    "fragment": (get(path=b"/a#b"), "200 open"),
    "percent": (get(path=b"/%41"), "200 open"),
    "nul": (get(path=b"/\x00"), "400 closed"),
    "high": (get(path=b"/\xff"), "400 closed"),
    "space colon": (get(b"X : a"), "400 closed"),
    "no colon": (get(b"X"), "400 closed"),
    "folded": (get(b"X: a", b" b"), "400 closed"),
    "empty name": (get(b": a"), "400 closed"),
    "nul value": (get(b"X: a\x00b"), "400 closed"),
    "cr value": (get(b"X: a\rb"), "400 closed"),
    "lf value": (get(b"X: a\nY: b"), "400 closed"),
    "tab value": (get(b"X: a\tb"), "200 open"),
    "obs text": (get(b"X: \xff"), "200 open"),
    "bad name": (get(b"X(: a"), "400 closed"),
    "empty value": (get(b"X:"), "200 open"),
    "ws value": (get(b"X:   a   "), "200 open"),
    "bare lf": (b"GET / HTTP/1.1\nHost: a\n\n", "400 closed"),
    "leading crlf": (b"\r\n\r\n" + GET, "200 open"),
    "leading space": (b" " + GET, "400 closed"),
    "cl": (post(b"abc"), "200 open"),
    "cl 0": (post(b""), "200 open"),
    "no cl": (get(method=b"POST", path=b"/fast"), "200 open"),
    "cl twice same": (post(b"abc", b"Content-Length: 3"), "400 closed"),
    "cl twice diff": (post(b"abc", b"Content-Length: 4"), "400 closed"),
    "cl list": (get(b"Content-Length: 3, 3", method=b"POST", path=b"/fast") + b"abc", "400 closed"),
    "cl neg": (get(b"Content-Length: -1", method=b"POST", path=b"/fast"), "400 closed"),
    "cl plus": (get(b"Content-Length: +3", method=b"POST", path=b"/fast") + b"abc", "400 closed"),
    "cl hex": (get(b"Content-Length: 0x3", method=b"POST", path=b"/fast") + b"abc", "400 closed"),
    "cl word": (get(b"Content-Length: abc", method=b"POST", path=b"/fast"), "400 closed"),
    "cl huge": (
        get(b"Content-Length: 99999999999999999999999", method=b"POST", path=b"/fast"),
        "400 closed",
    ),
    "cl empty": (get(b"Content-Length:", method=b"POST", path=b"/fast"), "400 closed"),
    "cl space": (get(b"Content-Length: 3 3", method=b"POST", path=b"/fast") + b"abc", "400 closed"),
    "get body": (get(b"Content-Length: 3") + b"abc", "200 open"),
    "chunked": (chunks(b"abc", b"de"), "200 open"),
    "Chunked": (chunks(b"abc", lines=(b"Transfer-Encoding: Chunked",)), "200 open"),
    "coding and length": (
        chunks(b"abc", lines=(b"Transfer-Encoding: chunked", b"Content-Length: 3")),
        "400 closed",
    ),
    "length and coding": (
        chunks(b"abc", lines=(b"Content-Length: 3", b"Transfer-Encoding: chunked")),
        "400 closed",
    ),
    "gzip chunked": (chunks(b"abc", lines=(b"Transfer-Encoding: gzip, chunked",)), "501 closed"),
    "chunked gzip": (chunks(b"abc", lines=(b"Transfer-Encoding: chunked, gzip",)), "400 closed"),
    "gzip": (chunks(lines=(b"Transfer-Encoding: gzip",)), "501 closed"),
    "identity": (chunks(lines=(b"Transfer-Encoding: identity",)), "501 closed"),
    "coding twice": (
        chunks(b"abc", lines=(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
        "400 closed",
    ),
    "coding empty": (chunks(lines=(b"Transfer-Encoding:",)), "400 closed"),
    "coding x": (chunks(lines=(b"Transfer-Encoding: xchunked",)), "501 closed"),
    "coding tab": (chunks(b"abc", lines=(b"Transfer-Encoding:\tchunked",)), "200 open"),
    "coding vt": (chunks(b"abc", lines=(b"Transfer-Encoding: \x0bchunked",)), "400 closed"),
    "coding 1.0": (
        b"POST /fast HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "400 closed",
    ),
    "coding name space": (chunks(b"abc", lines=(b"Transfer-Encoding : chunked",)), "400 closed"),
    "chunk ext": (chunks(end=b"3;a=b\r\nabc\r\n0\r\n\r\n"), "200 open"),
    "chunk ext quoted": (chunks(end=b'3;a="b c"\r\nabc\r\n0\r\n\r\n'), "200 open"),
    "chunk upper": (chunks(end=b"A\r\n0123456789\r\n0\r\n\r\n"), "200 open"),
    "chunk zeros": (chunks(end=b"0003\r\nabc\r\n000\r\n\r\n"), "200 open"),
    "chunk bad": (chunks(end=b"x\r\n"), "400 closed"),
    "chunk 0x": (chunks(end=b"0x3\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk neg": (chunks(end=b"-3\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk long": (chunks(end=b"ffffffffffffffffffff\r\n"), "400 closed"),
    "chunk no crlf": (chunks(end=b"3\r\nabcXX0\r\n\r\n"), "400 closed"),
    "chunk lf": (chunks(end=b"3\nabc\n0\n\n"), "400 closed"),
    "chunk space": (chunks(end=b"3 \r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk empty size": (chunks(end=b"\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "trailer": (chunks(b"abc", end=b"0\r\nX: 1\r\n\r\n"), "200 open"),
    "trailer bad": (chunks(b"abc", end=b"0\r\nX 1\r\n\r\n"), "400 closed"),
    "trailer flood": (chunks(b"abc", end=b"0\r\n" + b"X: 1\r\n" * 20000 + b"\r\n"), "400 closed"),
    "ext flood": (chunks(end=b"3;" + b"a" * 100000 + b"\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "expect other": (post(b"abc", b"Expect: x"), "417 closed"),
    "upgrade h2c": (
        post(
            b"abc",
            b"Connection: Upgrade, HTTP2-Settings",
            b"Upgrade: h2c",
            b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
        ),
        "200 open",
    ),
    "upgrade ws": (get(b"Connection: Upgrade", b"Upgrade: websocket"), "200 open"),
    "upgrade chunked": (
        chunks(
            b"abc", lines=(b"Connection: upgrade", b"Upgrade: x", b"Transfer-Encoding: chunked")
        ),
        "200 open",
    ),
    "upgrade no conn": (post(b"abc", b"Upgrade: h2c"), "200 open"),
    "upgrade pipelined": (
        post(b"abc", b"Connection: Upgrade", b"Upgrade: h2c") + GET,
        "200 200 open",
    ),
    "upgrade twice": (post(b"abc", b"Connection: Upgrade", b"Upgrade: h2c") * 2, "200 200 open"),
    "pipelined": (GET + GET, "200 200 open"),
    "pipelined mix": (post(b"a") + GET + post(b"b"), "200 200 200 open"),
    "garbage after": (GET + b"garbage\r\n\r\n", "200 400 closed"),
    "garbage after fast": (post(b"a") + b"garbage\r\n\r\n", "200 400 closed"),
    "pipelined close": (get(b"Connection: close") + GET, "200 closed"),
    "target 8192": (get(path=b"/" + b"a" * 8191), "200 open"),
    "target 8193": (get(path=b"/" + b"a" * 8192), "414 closed"),
    "long url": (get(path=b"/" + b"a" * 70000), "414 closed"),
    "100 headers": (get(*[b"X: 1"] * 99), "200 open"),
    "101 headers": (get(*[b"X: 1"] * 100), "431 closed"),
    "many headers": (get(*[b"X: 1"] * 8000), "431 closed"),
    "many lines": (post(b"\r\n" * 8000), "200 open"),
    "long header open": (b"GET / HTTP/1.1\r\nX: " + b"a" * 70000, "431 closed"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400 closed"),
    "text": (b"hello\r\n\r\n", "400 closed"),
    "h only": (b"GET / HTTP/1.1\r\n\r\n", "400 closed"),
    "headers 65536": (sized(65536), "200 open"),
    "headers 65537": (sized(65537), "431 closed"),
    "big body then half head": (post(bytes(78000)) + b"GET / HTTP/1.1\r\nHost: a\r\n", "200 open"),
    "cl zeros": (sent(b"Content-Length: 0003", body=b"abc"), "200 open"),
    "cl 20 digits": (sent(b"Content-Length: " + b"3".zfill(20), body=b"abc"), "200 open"),
    "cl 21 digits": (sent(b"Content-Length: " + b"3".zfill(21), body=b"abc"), "400 closed"),
    "cl 5000 digits": (sent(b"Content-Length: " + b"3".zfill(5000), body=b"abc"), "400 closed"),
    "cl tab": (sent(b"Content-Length:\t3 \t", body=b"abc"), "200 open"),
    "cl underscore": (sent(b"Content-Length: 1_0", body=b"0123456789"), "400 closed"),
    "cl suffix": (sent(b"Content-Length: 3abc", body=b"abc"), "400 closed"),
    "cl point": (sent(b"Content-Length: 3.0", body=b"abc"), "400 closed"),
    "cl empty first": (
        sent(b"Content-Length:", b"Content-Length: 3", body=b"abc"),
        "400 closed",
    ),
    "cl name nbsp": (sent(b"Content-Length\xa0: 3", body=b"abc"), "400 closed"),
    "cl cr": (sent(b"Content-Length: 3\r", body=b"abc"), "400 closed"),
    "coding comma": (chunks(b"abc", lines=(b"Transfer-Encoding: ,chunked",)), "501 closed"),
    "coding comma behind": (chunks(b"abc", lines=(b"Transfer-Encoding: chunked,",)), "400 closed"),
    "coding nbsp": (chunks(b"abc", lines=(b"Transfer-Encoding: \xa0chunked",)), "501 closed"),
    "coding nbsp behind": (
        chunks(b"abc", lines=(b"Transfer-Encoding: chunked\xa0",)),
        "501 closed",
    ),
    "coding quoted": (chunks(b"abc", lines=(b'Transfer-Encoding: "chunked"',)), "501 closed"),
    "coding parameter": (chunks(b"abc", lines=(b"Transfer-Encoding: chunked;a=b",)), "501 closed"),
    "coding list": (chunks(b"abc", lines=(b"Transfer-Encoding: chunked, chunked",)), "400 closed"),
    "coding identity first": (
        chunks(b"abc", lines=(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked")),
        "501 closed",
    ),
    "coding underscore": (
        sent(b"Transfer_Encoding: chunked", b"Content-Length: 3", body=b"abc"),
        "200 open",
    ),
    "coding name cut": (chunks(lines=(b"Transfer-", b"Encoding: chunked")), "400 closed"),
    "coding folded": (chunks(lines=(b"Transfer-Encoding:", b" chunked")), "400 closed"),
    "coding in a fold": (chunks(lines=(b"X: a", b" Transfer-Encoding: chunked")), "400 closed"),
    "coding get": (get(*CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n", "200 open"),
    "chunk underscore": (chunks(end=b"0_3\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk plus": (chunks(end=b"+3\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk lead space": (chunks(end=b" 3\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk tab": (chunks(end=b"3\t\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk suffix": (chunks(end=b"3xyz\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk cr": (chunks(end=b"3\rXabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk ext cr": (chunks(end=b"3;a=b\r\rX\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk ext lf": (chunks(end=b"3;a\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk ext empty": (chunks(end=b"3;\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk ext nul": (chunks(end=b"3;a\x00\r\nabc\r\n0\r\n\r\n"), "400 closed"),
    "chunk ext last": (chunks(b"abc", end=b"0;a=b\r\n\r\n"), "200 open"),
    "chunk data lf": (chunks(end=b"3\r\nabc\n0\r\n\r\n"), "400 closed"),
    "chunk data long": (chunks(end=b"3\r\nabcd\r\n0\r\n\r\n"), "400 closed"),
    "chunk crlf between": (chunks(b"abc", end=b"\r\n0\r\n\r\n"), "400 closed"),
    "chunk end lf": (chunks(b"abc", end=b"0\r\n\n"), "400 closed"),
    "trailer cr end": (chunks(b"abc", end=b"0\r\n\rX"), "400 closed"),
    "trailer length": (chunks(b"abc", end=b"0\r\nContent-Length: 5\r\n\r\n"), "400 closed"),
    "trailer coding": (
        chunks(b"abc", end=b"0\r\nTransfer-Encoding: chunked\r\n\r\n"),
        "400 closed",
    ),
    "trailer host": (chunks(b"abc", end=b"0\r\nHost: b\r\n\r\n"), "200 open"),
    "trailer nul": (chunks(b"abc", end=b"0\r\nX: \x00\r\n\r\n"), "400 closed"),
    "trailer request": (chunks(b"abc", end=b"0\r\nX:POST / HTTP/1.1\r\n\r\n"), "200 open"),
    "nul behind": (chunks(b"abc") + b"\x00", "200 400 closed"),
    "two spaces": (GET.replace(b"GET ", b"GET  "), "400 closed"),
    "two spaces behind the target": (GET.replace(b" HTTP", b"  HTTP"), "400 closed"),
    "keys, the same": (get(*[b"Authorization: Bearer a"] * 2), "400 closed"),
    "keys, others": (get(b"Authorization: Bearer a", b"Authorization: Bearer b"), "400 closed"),
    "types": (post(b"a", b"Content-Type: a/b", b"content-type: c/d"), "400 closed"),
    "cookies": (get(*[b"Cookie: a=b"] * 2), "200 open"),
    "tabs": (GET.replace(b"GET / ", b"GET\t/\t"), "400 closed"),
    "space behind version": (GET.replace(b"1.1\r", b"1.1 \r"), "400 closed"),
    "lf in the line": (GET.replace(b"/ H", b"/\nH"), "400 closed"),
    "cr ends the line": (GET.replace(b"1.1\r\n", b"1.1\r"), "400 closed"),
    "no target": (GET.replace(b"/ H", b"H"), "400 closed"),
    "method suffix": (get(method=b"GETX"), "400 closed"),
    "method quotes": (get(method=b'G="x"'), "400 closed"),
    "long method": (get(method=b"A" * 100000), "400 closed"),
    "1.32": (get(version=b"1.32"), "400 closed"),
    "01.1": (get(version=b"01.1"), "400 closed"),
    "version cr": (GET.replace(b"/1.1", b"/\r\r1.1"), "400 closed"),
    "version huge": (get(version=b"4294967295.255"), "400 closed"),
    "absolute other host": (get(path=b"http://b/"), "200 open"),
    "absolute query": (get(path=b"http://a?x=1"), "200 open"),
    "absolute upper": (get(path=b"HTTP://a/"), "200 open"),
    "absolute https": (get(path=b"https://a/"), "421 closed"),
    "absolute port": (get(path=b"http://a:99999/"), "400 closed"),
    "absolute ipv6 open": (get(path=b"http://[::1/"), "400 closed"),
    "target mark": (get(path=b"!"), "400 closed"),
    "percent crlf": (get(path=b"/%0d%0aX:%20y"), "200 open"),
    "percent nul": (get(path=b"/%00"), "200 open"),
    "percent bad": (get(path=b"/%zz"), "200 open"),
    "del": (get(path=b"/\x7f"), "400 closed"),
    "bell value": (get(b"X: \x07"), "400 closed"),
    "del value": (get(b"X: \x7f"), "400 closed"),
    "nul name": (get(b"X\x00Y: a"), "400 closed"),
    "high name": (get(b"\xefX: a"), "400 closed"),
    "long name": (get(b"A" * 100000 + b": a"), "431 closed"),
    "first folded": (GET.replace(b"Host", b" X: a\r\nHost"), "400 closed"),
    "cr ends headers": (GET[:-1] + b"X" + GET, "400 closed"),
    "colon line": (get(b":"), "400 closed"),
    "host query": (get(b"Host: a?x", host=False), "400 closed"),
    "host high": (get(b"Host: \xffa", host=False), "400 closed"),
    "two hosts 1.0": (get(b"Host: a", version=b"1.0"), "400 closed"),
    "garbage behind close": (get(b"Connection: close") + b"garbage\r\n\r\n", "200 closed"),
    "keep-alive, close": (get(b"Connection: keep-alive, close"), "200 closed"),
    "close, keep-alive": (get(b"Connection: close", b"Connection: keep-alive"), "200 closed"),
    "close, keep-alive 1.0": (get(b"Connection: close, keep-alive", version=b"1.0"), "200 closed"),
    "keep-alive, close 1.0": (
        get(b"Connection: keep-alive", b"Connection: x, Close", version=b"1.0"),
        "200 closed",
    ),
    "closed as a name": (get(b"Connection: closed"), "200 open"),
    "pipelined 1.0": (
        get(b"Connection: keep-alive", version=b"1.0") * 2 + get(version=b"1.0") + GET,
        "200 200 200 closed",
    ),
    "expect twice": (post(b"abc", b"Expect: 100-continue", b"Expect: 100-continue"), "417 closed"),
    "expect list": (post(b"abc", b"Expect: 100-continue, x"), "417 closed"),
    "upgrade 1.0": (
        get(b"Connection: Upgrade, keep-alive", b"Upgrade: h2c", version=b"1.0"),
        "200 open",
    ),
    "upgrade close": (post(b"abc", b"Connection: Upgrade, close", b"Upgrade: h2c"), "200 closed"),
    "request in a body": (post(GET) + GET, "200 200 open"),
    "many ranges": (get(b"Range: bytes=" + b"0-," * 1000), "200 open"),
}

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
        except Refused as exc:
            self.found.append(exc.answer.status)

    def end(self):
        head, self.head = self.head, None
        fields = head.wanted or head.headers or str(head.error)
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
        assert whole.feed(GET)[-1] == (b"GET /", ((b"host", b"a"),), b"")
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
    assert second == (b"GET /", ((b"host", b"a"),), b"")


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


@pytest.mark.parametrize("name", VARIED)
def test_a_section_that_differs_in_fields_that_vary_is_read_as_by_the_parser(name):
    lines, is_known = VARIED[name]
    heads, data = new_heads(), post(b"abc", *lines)
    Reader(heads).feed(post(b"abc", b"X-Timeout: 7", *(one for one in lines if one == b"A:")))
    assert (heads.find(data[:-3]) is not None) == is_known
    assert Reader(heads).feed(data) == Reader().feed(data)


NOT_KNOWN = {
    "that waits": post(b"abc", b"Expect: 100-continue"),
    "that closes": post(b"abc", b"Connection: close"),
    "that closes, of two options": post(b"abc", b"Connection: x, Close"),
    "of HTTP/1.0": post(b"abc").replace(b"1.1", b"1.0", 1),
    "without a body": post(b""),
    "chunked": chunks(b"abc"),
    "for the application": post(b"abc", path=b"/"),
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
