"""Our answers as h2 reads them. `doors.Client` reads those over HTTP/1.1 with h11."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from tests.wire.test_http2 import HEADERS, Client, frames

TABLE_SIZE = h2.settings.SettingCodes.HEADER_TABLE_SIZE


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
