"""Our answers as other libraries read them: h11 strictly, httplint for what their headers mean."""

from __future__ import annotations

import asyncio
import http.client

import h11
import orjson
import pytest

from tests.service.http.doors import running
from tests.service.http.test_rfc import ROWS


async def read_with_h11(client, method, data):
    """(statuses, whether the connection ends, bytes behind) of the next answer; `data` came before.

    Raises:
        h11.RemoteProtocolError: the answer breaks a rule.
    """
    connection, statuses = h11.Connection(h11.CLIENT), []
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    if data:  # nothing means the end
        connection.receive_data(data)
    while type(event := connection.next_event()) is not h11.EndOfMessage:
        if event is h11.NEED_DATA:
            connection.receive_data(await client.reader.read(65536))
        elif isinstance(event, (h11.InformationalResponse, h11.Response)):
            statuses.append(event.status_code)
    return statuses, connection.their_state is h11.MUST_CLOSE, connection.trailing_data[0]


async def test_h11_reads_every_answer():
    async with running() as server, asyncio.timeout(60):
        for name, (request, expected) in ROWS.items():
            *statuses, after = expected.split()
            if statuses[-1] == "100":
                continue  # the body is still to come
            client, rest, found, ends = await server.open(), b"", [], False
            client.send(request)
            while len(found) < len(statuses):
                assert not ends, name
                method = "HEAD" if request.startswith(b"HEAD") else "GET"
                some, ends, rest = await read_with_h11(client, method, rest)
                found += some
            assert found == list(map(int, statuses)), name
            assert (ends, rest) == (after == "closed", b""), name


# What its warnings say is true of our answers, and wanted.
EXPECTED_WARNINGS = {
    "FRESHNESS_HEURISTIC",  # no answer has a Cache-Control
    "STATUS_BAD_REQUEST",
}


async def test_httplint_finds_nothing_wrong_with_our_headers(listen, images):
    httplint = pytest.importorskip("httplint", reason="needs httplint: pip install httplint")
    body = orjson.dumps({"images": images[0].tolist()})
    json = {"Content-Type": "application/json"}
    binary = json | {"Accept": "application/octet-stream"}
    requests = [
        *(("GET", path, b"", {}) for path in ("/healthz", "/readyz", "/info", "/metrics", "/no")),
        *((method, "/predict", b"", {}) for method in ("GET", "HEAD", "OPTIONS", "TRACE")),
        ("HEAD", "/healthz", b"", {}),
        ("OPTIONS", "*", b"", {}),
        ("GET", "/healthz", b"", {"Connection": "close"}),
        ("POST", "/predict", body, json),
        ("POST", "/predict", body, binary),
        ("POST", "/predict", b"{", json),
        ("POST", "/predict?model=other", body, json),
        ("POST", "/predict", body, {"Content-Type": "text/plain"}),
        ("POST", "/predict", b"", json | {"Content-Length": "999999999"}),
        ("POST", "/predict", body, json | {"Expect": "other"}),
    ]

    def notes(port, method, path, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        linter = httplint.HttpResponseLinter(no_content=method == "HEAD")
        linter.base_uri = f"http://127.0.0.1:{port}{path}"
        linter.process_response_topline(
            b"HTTP/1.1", str(answer.status).encode(), answer.reason.encode()
        )
        linter.process_headers([(n.encode(), v.encode()) for n, v in answer.getheaders()])
        linter.feed_content(content)
        linter.finish_content(True)
        return {type(note).__name__ for note in linter.notes if note.level.name in ("WARN", "BAD")}

    async with listen() as served:
        for request in requests:
            found = await asyncio.to_thread(notes, served.port, *request)
            assert found <= EXPECTED_WARNINGS, request
