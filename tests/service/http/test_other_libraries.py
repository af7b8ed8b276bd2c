"""Our answers as other libraries read them: h11 strictly, httplint for what their headers mean."""

from __future__ import annotations

import asyncio

import h11

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
