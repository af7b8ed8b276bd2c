"""Our answers as other libraries read them: h11, h2."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import h2.settings
import h11
import pytest

from tests.service_process import PATIENCE_S
from tests.wire.doors import running
from tests.wire.test_http1 import ROWS
from tests.wire.test_http2 import HEADERS, Client, frames

TABLE_SIZE = h2.settings.SettingCodes.HEADER_TABLE_SIZE


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
    async with running() as server, asyncio.timeout(PATIENCE_S):
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


@pytest.mark.parametrize("path", ["/answer", "/trailers", "/echo", "/empty", "/large"])
@pytest.mark.parametrize(
    ("sizes", "updates"),
    [
        *(((size,), [True, False]) for size in (0, 64, 4095)),
        *(((size,), [False, False]) for size in (4096, 8192)),
        ((0, 4096), [True, False]),
        ((4096, 64), [True, False]),
    ],
)
def test_h2_reads_answers_after_it_has_changed_the_limit_of_its_table(sizes, updates, path):
    server, found = Client(), []
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    for size in sizes:
        client.update_settings({TABLE_SIZE: size})
    for stream in (1, 3):
        pseudo = {":method": "GET", ":scheme": "http", ":authority": "a", ":path": path}
        client.send_headers(stream, list(pseudo.items()), end_stream=True)
        server.feed(client.data_to_send(), 1 << 20)
        written, server.http2.out[:] = b"".join(server.http2.out), []
        blocks = [payload for kind, _, _, payload in frames(written) if kind == HEADERS]
        found.append(blocks[0].startswith(b"\x20"))
        assert not any(block.startswith(b"\x20") for block in blocks[1:])
        events = client.receive_data(written)
        answers = [one for one in events if isinstance(one, h2.events.ResponseReceived)]
        assert [(one.stream_id, one.headers[0]) for one in answers] == [
            (stream, (b":status", b"200"))
        ]
    assert found == updates
