"""The head of a request through httptools' parser, and what `POST /predict` and `/explain` read."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import fields
from typing import Any, cast
from urllib.parse import unquote_plus

import httptools

from lenet.explanation import Change
from service.api.explain import explain_route, options
from service.api.paths import POLICY, image_routes
from service.api.routes import prefers, takes_gzip
from service.errors import InvalidInput, TooLarge, UnsupportedMediaType
from service.forms.body import ACCEPTED
from service.forms.compressed import CompressedForm
from service.forms.reader import Limits
from service.request import Requests, Wanted
from tests.fuzz.bodies import check_error
from tests.fuzz.target import Finding, MutateBytes, Target, mutate_list, pick
from wire.errors import ProtocolError
from wire.gate import Gate
from wire.head import FastRoutes, Head, Heads
from wire.http1 import Http1

MAX_BODY_BYTES = 10_000
TIMEOUT_S = 30.0


class _Reader:
    """Builds a `Head` at the end of the headers, as a connection does."""

    def __init__(self, routes: FastRoutes) -> None:
        self._routes = routes
        self._url = b""
        self.pairs: list[tuple[bytes, bytes]] = []
        self.head: Head | ProtocolError | None = None
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:
            self.pairs.append((name, value))

    def on_headers_complete(self) -> None:
        if self.head is not None:
            return
        parser = self.parser
        try:
            self.head = Head(
                parser.get_method(),
                self._url,
                parser.get_http_version(),
                self.pairs,
                parser.should_keep_alive(),
                self._routes,
                Gate(policy=POLICY),
            )
        except ProtocolError as exc:
            self.head = exc
        except httptools.HttpParserError:  # of the target: the connection answers 400
            self.head = ProtocolError(400, "target")


class HeadTarget(Target):
    """Request line, headers, query, content type, Accept and the timeout of a request."""

    max_bytes = 4096

    def __init__(self) -> None:
        super().__init__()
        # Reading needs no model, no queue and no budget.
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(Requests))
        parts |= {"limits": Limits(max_images=8), "max_body_bytes": MAX_BODY_BYTES}
        requests = Requests(**{**parts, "timeout_s": TIMEOUT_S})
        self._routes: FastRoutes = {
            (b"POST", b"/predict"): image_routes(requests)[b"POST", b"/predict"],
            (b"POST", b"/explain"): explain_route(requests),
        }

    def read(self, data: bytes) -> _Reader:
        """The head that `data` begins with, if it is complete."""
        reader = _Reader(self._routes)
        try:
            reader.parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            raise cast("BaseException", exc.__context__ or exc) from exc
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            pass
        return reader

    def run(self, data: bytes) -> None:
        reader = self.read(data)
        head = reader.head
        if isinstance(head, ProtocolError):
            if head.status not in (400, 417, 421, 501, 505) or len(head.message) > 1000:
                raise Finding(f"refused with {head.answer}")
        elif head is not None:
            self._check(head, reader.pairs)
            self._check_known(data)

    def _check_known(self, data: bytes) -> None:
        """A section like `data` but for some lines is read from what is known as by the parser."""
        heads, rng = self._heads(), random.Random(zlib.crc32(data))
        _read(heads, data)
        for _ in range(8):
            lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
            for _ in range(rng.randrange(1, 4)):
                lines.insert(rng.randrange(1, len(lines) + 1), pick(rng, _VARYING))
            section = b"\r\n".join(lines) + b"\r\n\r\n"
            if (known := heads.find(section)) is not None:
                expected = _read(self._heads(), section)
                if expected is None or _told(known) != _told(expected):
                    raise Finding(f"{section!r} is known, and {expected and _told(expected)}")

    def _heads(self) -> Heads:
        return Heads(self._routes, Gate(policy=POLICY), b"http")

    def _check(self, head: Head, pairs: list[tuple[bytes, bytes]]) -> None:
        named: dict[str, str] = {}
        for name, value in pairs:
            named.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t"))
        lengths = {int(value) for name, value in pairs if name.lower() == b"content-length"}
        if lengths and lengths != {head.length}:
            raise Finding(f"length {head.length} of {lengths}")
        if head.chunked and (lengths or named["transfer-encoding"].strip().lower() != "chunked"):
            raise Finding("another framing beside chunks")
        closing = re.search(r"(?:^|,)[ \t]*close[ \t]*(?:,|$)", named.get("connection", ""), re.I)
        if head.keep_alive and (closing or head.version not in ("1.0", "1.1")):
            raise Finding("kept a connection that has to close")
        if head.is_plain and (head.chunked or head.error or not head.keep_alive):
            raise Finding("may be taken for an equal header section, though it is not plain")
        if head.answer is not None:
            if head.query.count(b"&") < 100:
                raise Finding(f"answered with {head.answer}")
        elif head.route is None:
            if (head.method, head.path) in self._routes:
                raise Finding(f"POST {head.path!r} has no route")
        elif head.error is not None:
            if not isinstance(head.error, InvalidInput | TooLarge | UnsupportedMediaType):
                raise Finding(f"{head.error!r} is no error of a header")
            check_error(head.error)
            if head.wanted is None and _is_plain(named, head.query, head.length):
                raise Finding(f"refused a plain request: {head.error.message}")
        else:
            self._check_wanted(head.wanted, named, head)

    def _check_wanted(self, wanted: Wanted, named: dict[str, str], head: Head) -> None:
        kind = named.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (*ACCEPTED, "image/jpg"):
            raise Finding(f"accepted content type {kind!r}")
        form, coding = wanted.form, named.get("content-encoding", "identity").lower()
        if coding not in ("identity", "gzip", "deflate"):
            raise Finding(f"accepted a body of coding {coding!r}")
        packs = takes_gzip(named.get("accept-encoding", ""))
        if isinstance(form, CompressedForm) != (packs or coding != "identity"):
            raise Finding(f"{form} for coding {coding!r}")
        form = getattr(form, "form", form)
        if (wanted.length or 0) > MAX_BODY_BYTES:
            raise Finding(f"accepted a body of {wanted.length}")
        text = named.get("x-request-timeout-ms")
        expected_s = TIMEOUT_S
        if text is not None:
            if not re.fullmatch(r"0*[1-9][0-9]*", text, re.ASCII):
                raise Finding(f"accepted a timeout of {text!r}")
            expected_s = min(TIMEOUT_S, int(text) / 1e3)
        if wanted.timeout_s != expected_s:
            raise Finding(f"a timeout of {wanted.timeout_s} for {text!r}")
        plain = plain_preference(named.get("accept", ""))
        if plain is not None and form.binary != plain:
            raise Finding(f"binary is {form.binary} for Accept: {named['accept']!r}")
        query = dict(_plain_query(head.query))
        for name in ("model", "version"):
            if getattr(wanted, name) != query.get(name, ""):
                raise Finding(f"{name} is {getattr(wanted, name)!r} of {head.query!r}")
        if prefers("application/octet-stream", named.get("accept", "")) != form.binary:
            raise Finding("Accept is read in two ways")
        if head.path == b"/explain":
            try:
                self._check_options(*options(head.query), query)
            except InvalidInput as exc:
                check_error(exc)

    def _check_options(self, index: int, change: Change, query: dict[str, str]) -> None:
        noise = query.get("noise", "0")
        if index != int(query.get("index", "0")) or index < 0:
            raise Finding(f"index is {index} of {query}")
        if change.biases != {"on": True, "off": False}[query.get("biases", "on")]:
            raise Finding(f"biases is {change.biases} of {query}")
        if change.noisy != query.get("noisy", "") or change.noise != float(noise):
            raise Finding(f"{change} of {query}")
        if (
            not 0 <= change.noise <= 10
            or not noise.isascii()
            or (change.noise and not change.noisy)
        ):
            raise Finding(f"accepted {query}")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.1:
            return mutate(data)
        lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")

        def change(line: bytes) -> bytes:
            name, colon, value = line.partition(b": ")
            if colon and rng.random() < 0.6:
                words = re.split(rb"(?<=[,;=/ ])|(?=[,;=/ ])", value)
                words = mutate_list(words, rng, lambda _: pick(rng, _WORDS))
                return name + colon + b"".join(words)
            return mutate(line) if rng.random() < 0.3 else pick(rng, _LINES)

        if rng.random() < 0.3:
            words = re.split(rb"(?<=[?&=/ ])|(?=[?&=/ ])", lines[0])
            lines[0] = b"".join(mutate_list(words, rng, lambda _: pick(rng, _URL_WORDS)))
        else:
            lines = lines[:1] + mutate_list(lines[1:], rng, change)
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _read(heads: Heads, section: bytes) -> Head | None:
    """The head of a section, as a connection reads it; None if it is refused."""
    http1 = Http1(heads, 64 * 1024, "HTTP/1.1")
    http1.receive(section)
    try:
        return http1.next_head()
    except ProtocolError:
        return None


def _told(head: Head) -> object:
    """What the connection does by a head."""
    request = head.method, head.path, head.query, head.version, head.length, sorted(head.headers)
    return (
        *request,
        head.ids,
        head.keep_alive,
        head.known_length,
        head.extra,
        head.wanted,
        str(head.error),
    )


def _plain_query(query: bytes) -> list[tuple[str, str]]:
    pairs = (piece.partition("=") for piece in query.decode("latin-1").split("&") if piece)
    return [(unquote_plus(name), unquote_plus(value)) for name, _, value in pairs]


def _is_plain(named: dict[str, str], query: bytes, length: int | None) -> bool:
    """Whether there is nothing in a request to object to."""
    return (
        not query
        and named.get("content-type") in ACCEPTED
        and not named.keys() & {"content-encoding", "x-request-timeout-ms"}
        and (length or 0) <= MAX_BODY_BYTES
    )


def plain_preference(accept: str) -> bool | None:
    """Whether octets are preferred to JSON by RFC 9110, 12.4.2 and 12.5.1; None if not well-formed
    or too long.

    The most specific range counts, and of equal ones either may.
    """
    ranges: dict[str, float] = {}
    if accept.count(",") + accept.count(";") > 100:
        return None
    for item in accept.split(",") if accept.strip() else []:
        match = re.fullmatch(
            r"(\*/\*|[a-z]+/(?:\*|[a-z-]+))"
            r"(?:[ \t]*;[ \t]*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?))?",
            item.lower().strip(" \t"),
            re.ASCII,
        )
        if match is None or match[1] in ranges:
            return None
        ranges[match[1]] = float(match[2] or 1)

    def quality(kind: str) -> float:
        for matching in (kind, "application/*", "*/*"):
            if matching in ranges:
                return ranges[matching]
        return 0.0

    octets = quality("application/octet-stream")
    # A client that names only wildcards gets JSON, the first choice of the server.
    if "application/octet-stream" not in ranges:
        return False
    return octets > 0 and octets > quality("application/json")


_WORDS = (
    *b"application/json application/octet-stream */* application/* text/html image/png".split(),
    *b"image/jpg application/x-npy multipart/form-data boundary=x charset=utf-8 identity".split(),
    *b"gzip chunked close keep-alive 100-continue q q=0 q=0.5 q=1.000 q=1.001 q=.5 Q=0.2".split(),
    *b'q=2 q="1" q=0. , ; = 0 1 3600000 3600001 -1 +5 1e3 0005 99999999999999999999'.split(),
    *(b"00000000000000000001", b" ", b"\t", b"\xb2", b"A" * 300, b"\xff"),
)
_VARYING = (
    *(b"X-Request-Id: r1", b"x-request-id:r2", b"X-Request-Id: ", b"X-Request-Id: r 3", b" folded"),
    *(b"X-Request-Id: a\0b", b"X-Request-Id : a", b"\nX-Request-Id: a", b"X-Request-Id: a\rb"),
    *(b"X-Request-Id: " + b"r" * 1900, b"X: a\nX-Request-Id: b", b"X-Request-Id:\t\xff"),
    *(b"traceparent: 00-" + b"4b" * 16 + b"-" + b"0a" * 8 + b"-01", b"TRACEPARENT: 00-0-0-0"),
    *(b"X-Request-Timeout-Ms: 50", b"x-request-timeout-ms: 0", b"X-Request-Timeout-Ms: 5 5"),
)
_LINES = (
    *(b"Host: a", b"Host: b:1", b"Host: [::1]", b"Host: \xff", b"Content-Length: 784", b"X: 1"),
    *(b"Content-Length: 10001", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip"),
    *(b"Content-Type: application/octet-stream", b"Content-Type: application/json", b"Accept: */*"),
    *(b"Content-Type: IMAGE/PNG; a=b", b"Content-Encoding: gzip", b"Accept-Encoding: gzip;q=0.5"),
    *(b"Accept: application/octet-stream;q=0.9, application/json;q=0.1", b"Expect: 100-continue"),
    *(b"X-Request-Timeout-Ms: 50", b"x-request-timeout-ms: 0", b"Connection: close, x"),
    *(b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: x", b"Accept: "),
    b"Accept:\tapplication/*;q=0",
)
_URL_WORDS = (
    *b"POST GET / // ? & = ; # * % %2 %66 %00 %ff + [ predict explain model version invert".split(),
    *b"auto index biases noisy noise true False off conv1 10.5 1e-1 nan 1_0 http://a".split(),
    *b"https://a:99999/ HTTP/1.1 HTTP/1.0 HTTP/9.9".split(),
    *(b" ", b"\xff", b"a" * 500),
)
