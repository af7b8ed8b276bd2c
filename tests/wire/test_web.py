"""gRPC-Web and Connect: what a page sends, and what it gets, by bytes."""

from __future__ import annotations

import json
import logging

import h2.config
import h2.connection
import h2.events
import pytest

from tests.fuzz.connection import Transport
from tests.fuzz.turns import Turns
from tests.wire.test_grpc import Calls, message
from wire.access_log import access_log
from wire.budget import Budget
from wire.door import HttpService
from wire.errors import Forbidden, InvalidInput
from wire.gate import Gate
from wire.grpc import Method, timeout_s_of
from wire.keys import Keys
from wire.unary import unary

WEB, CONNECT = "application/grpc-web+proto", "application/proto"
KINDS = [WEB, CONNECT]
KEY = "0123456789abcdef"


class Page(Transport):
    """A client over HTTP/1.1 that makes one call; `got` is its outcome, in words."""

    def __init__(self, method, kind, *headers, access=None, **gate):
        super().__init__()
        self.loop, self.kind = Turns(), kind
        gate.setdefault("origins", ["*"])
        self.door = HttpService(
            {}, Budget(1 << 30), methods={b"/a.B/C": method}, gate=Gate(**gate), access=access
        )
        self.connection = self.protocol = self.loop.call(self.door, self.loop)
        self.loop.call(self.connection.connection_made, self)
        self.headers = [f"content-type: {kind}", *headers]

    def send(self, data):
        """Bytes of the connection."""
        if not self.closed:
            self.loop.call(self.protocol.data_received, data)
        self.loop.settle()
        return self

    def post(self, body, step=1 << 20, length=None):
        """Send a request in pieces of `step` bytes."""
        size = len(body) if length is None else length
        lines = ["POST /a.B/C HTTP/1.1", "host: a", f"content-length: {size}", *self.headers]
        data = "\r\n".join([*lines, "\r\n"]).encode() + body
        for at in range(0, len(data), step):
            self.send(data[at : at + step])
        return self

    @property
    def answer(self):
        """Status, headers and body of the only answer."""
        head, _, body = bytes(self.written).partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(body) == int(headers["content-length"])
        return int(status.split()[1]), headers, body

    @property
    def got(self):
        status, headers, body = self.answer
        assert headers["access-control-allow-origin"] == "*"
        return outcome(self.kind, status, headers["content-type"], body)


def outcome(kind, status, content_type, body):
    """The messages of an answer, and its status of gRPC or Connect."""
    if kind == CONNECT:
        if status == 200:
            assert content_type == CONNECT
            return [body.decode(), "OK"]
        error = json.loads(body)
        return [f"{status} {error.pop('code')} {error.pop('message')}", *error]
    assert (status, content_type) == (200, kind)
    found = []
    while body:
        flag, size = body[0], int.from_bytes(body[1:5], "big")
        frame, body = body[5 : 5 + size].decode(), body[5 + size :]
        assert bool(body) == (flag == 0), "the trailers are the last frame"
        found.append(frame)
    fields = dict(line.split(": ", 1) for line in found.pop().splitlines())
    return [*found, "OK"] if fields == {"grpc-status": "0"} else [*found, fields]


def framed(kind, *messages):
    """The body of a request."""
    if kind == CONNECT:
        return b"".join(messages)
    return b"".join(map(message, messages))


def error(kind, code, words, text):
    """The outcome of a call that fails."""
    if kind == CONNECT:
        return [f"{words} {text}"]
    return [{"grpc-status": str(code), "grpc-message": text}]


def refused(_):
    raise Forbidden("not you")


@pytest.mark.parametrize("step", [1 << 20, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_ends_as_its_function_does(kind, step):
    method = unary(bytes.upper, max_bytes=4)
    page = Page(method, kind).post(framed(kind, b"abcd"), step)
    assert page.got == ["ABCD", "OK"]
    assert page.door.budget.held_bytes == 0
    assert Page(method, kind).post(framed(kind, b""), step).got == ["", "OK"]
    invalid, text = (3, "400 invalid_argument"), "message: got 5 bytes, expected at most 4"
    page = Page(method, kind).post(framed(kind, b"abcde"), step)
    assert page.got == error(kind, *invalid, text)
    assert page.door.budget.held_bytes == 0
    denied = Page(unary(refused), kind).post(framed(kind, b"a"), step)
    assert denied.got == error(kind, 7, "403 permission_denied", "not you")
    fault = Page(unary(lambda _: 1 / 0), kind).post(framed(kind, b"a"), step)
    assert fault.got == error(kind, 13, "500 internal", "internal error; see the server log")


@pytest.mark.parametrize("step", [1 << 20, 5])
@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"", 3, "message: got none, expected a request"),
        (message(b"abcd")[:4], 3, "message: the request ended 1 bytes before its message"),
        (message(b"abcd")[:-1], 3, "message: the request ended 1 bytes before its message"),
        (b"\1" + message(b"abcd")[1:], 12, "message: got 1 as its first byte, expected 0"),
    ],
    ids=["nothing", "cut in a prefix", "cut", "compressed"],
)
def test_frames_that_are_no_message_are_refused(body, code, text, step):
    page = Page(unary(bytes.upper), WEB).post(body, step)
    assert page.got == [{"grpc-status": str(code), "grpc-message": text}]


def test_a_call_has_one_message():
    heard = Calls(many=True)
    method = Method(timeout_s_of, heard.open)
    assert Page(method, WEB).post(framed(WEB, b"abc")).got[-1] == "OK"
    (*_, fields) = Page(method, WEB).post(framed(WEB, b"abc", b"d")).got
    assert fields["grpc-message"] == "message: got a second, expected one request"


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_needs_a_key_unless_its_method_is_open(kind):
    keys = Keys([KEY])
    body = framed(kind, b"a")
    without = Page(unary(bytes.upper), kind, keys=keys).post(body).got
    text = "authorization: got none, expected 'Authorization: Bearer KEY' or 'X-API-Key: KEY' "
    text += "with one of the service's keys"
    assert without == error(kind, 16, "401 unauthenticated", text)
    with_key = Page(unary(bytes.upper), kind, f"authorization: Bearer {KEY}", keys=keys)
    assert with_key.post(body).got == ["A", "OK"]
    is_open = Method(lambda _: None, unary(bytes.upper).open, is_open=True)
    assert Page(is_open, kind, keys=keys).post(body).got == ["A", "OK"]


def test_a_page_of_another_origin_may_ask():
    page = Page(unary(bytes.upper), WEB, keys=Keys([KEY]))
    lines = ["OPTIONS /a.B/C HTTP/1.1", "host: a", "access-control-request-method: POST", "\r\n"]
    status, headers, _ = page.send("\r\n".join(lines).encode()).answer
    sent = {"connect-protocol-version", "connect-timeout-ms", "content-type", "grpc-timeout"}
    sent |= {"authorization", "x-api-key", "x-grpc-web", "x-user-agent"}
    assert status == 200
    assert sent <= set(headers["access-control-allow-headers"].split(", "))


@pytest.mark.parametrize(
    ("kind", "header", "seconds"),
    [
        (WEB, "grpc-timeout: 70m", 0.07),
        (CONNECT, "connect-timeout-ms: 70", 0.07),
        (CONNECT, "connect-timeout-ms: 9999999999", 9_999_999),
        (WEB, "connect-timeout-ms: 70", None),
        (CONNECT, "x: y", None),
    ],
)
def test_a_call_may_have_a_deadline(kind, header, seconds):
    read = []

    def open_call(timeout_s, caller):
        read.append(timeout_s)
        return unary(bytes.upper).open(None, caller)

    assert Page(Method(timeout_s_of, open_call), kind, header).post(framed(kind, b"a")).got[-1]
    assert read == [seconds]


@pytest.mark.parametrize(
    ("kind", "header", "got"),
    [
        (
            *(CONNECT, "connect-timeout-ms: 1s"),
            "400 invalid_argument connect-timeout-ms: got '1s', expected up to 10 digits",
        ),
        (
            *(CONNECT, "connect-timeout-ms: 12345678901"),
            "400 invalid_argument connect-timeout-ms: got '12345678901', expected up to 10 digits",
        ),
        (
            *(CONNECT, "content-encoding: gzip"),
            "501 unimplemented content-encoding: got 'gzip', expected identity",
        ),
        (WEB, "grpc-timeout: 5", {"grpc-status": "3"}),
        (WEB, "grpc-encoding: gzip", {"grpc-status": "12"}),
    ],
)
def test_a_call_that_its_head_refuses_is_counted(kind, header, got):
    counted = []
    method = Method(timeout_s_of, unary(bytes.upper).open, counted.append)
    (found,) = Page(method, kind, header).post(framed(kind, b"a")).got
    assert found == got if kind == CONNECT else found.items() >= got.items()
    (error,) = counted
    assert type(error) is InvalidInput


def test_other_content_types_and_endless_streams_are_refused():
    for kind in ("application/json", "application/grpc-web-text"):
        status, _, body = Page(unary(bytes.upper), kind).post(b"{}").answer
        assert status == 415
        assert b"got '%b', expected application/grpc-web, " % kind.encode() in body
    endless = Method(lambda _: None, unary(bytes.upper).open, is_endless=True)
    (fields,) = Page(endless, WEB).post(framed(WEB, b"a")).got
    assert fields["grpc-status"] == "12"


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_does_not_come_is_given_up(kind):
    page = Page(unary(bytes.upper), kind).post(framed(kind, b"abcdefg")[:6], length=30)
    assert not page.written
    page.loop.wait(page.loop.time() + 12)
    (found,) = page.got
    assert "504 deadline_exceeded" in found if kind == CONNECT else found["grpc-status"] == "4"
    assert page.door.budget.held_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_may_be_refused_while_it_arrives(kind):
    class Full(Calls):
        def wait_for_body(self):
            raise InvalidInput("full")

    page = Page(Method(timeout_s_of, Full().open), kind)
    page.post(framed(kind, b"abcdefg")[:6], length=30)
    assert page.got == error(kind, 3, "400 invalid_argument", "full")


def test_the_memory_of_a_client_that_leaves_is_given_back():
    page = Page(unary(bytes.upper), WEB).post(message(b"abcdefg")[:9], length=30)
    assert page.door.budget.held_bytes == 4
    page.loop.call(page.protocol.connection_lost, None)
    page.loop.settle()
    assert page.door.budget.held_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_access_log_names_the_status_of_a_call(kind, capfd):
    with access_log("text") as access:
        Page(unary(bytes.upper), kind, access=access).post(framed(kind, b"a"))
        Page(unary(refused), kind, access=access).post(framed(kind, b"a"))
    first, second = (line.split() for line in capfd.readouterr().out.splitlines())
    assert "OK" in first
    assert "PERMISSION_DENIED" in second


def test_a_fault_is_logged_with_the_ids_of_its_request(caplog):
    with caplog.at_level(logging.ERROR):
        Page(unary(lambda _: 1 / 0), WEB, "x-request-id: mine").post(framed(WEB, b"a"))
    assert any("INTERNAL" in text and "mine" in text for text in caplog.messages)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_over_http_2_is_answered_likewise(kind):
    page = Page(unary(bytes.upper), kind)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    pseudo = ((":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "a"))
    client.send_headers(1, [*pseudo, ("content-type", kind)])
    body = framed(kind, b"abc")
    client.send_data(1, body[:3])
    client.send_data(1, body[3:], end_stream=True)
    page.send(client.data_to_send())
    events = client.receive_data(bytes(page.written))
    (response,) = (one for one in events if isinstance(one, h2.events.ResponseReceived))
    content = b"".join(one.data for one in events if isinstance(one, h2.events.DataReceived))
    headers = dict(response.headers)
    found = outcome(kind, int(headers[":status"]), headers["content-type"], content)
    assert found == ["ABC", "OK"]
