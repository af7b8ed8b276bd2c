"""A collector of OpenTelemetry in the process of a test: it keeps the spans that come.

As a program it counts them, while tracing is measured: `python -m tests.collector 4318`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.service_process import PATIENCE_S

ENDLESS_BYTES = 64 << 20


def attributes(owner):
    """Those of a span or a resource, by name."""
    values = {one.key: one.value for one in owner.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


class Collector:
    """`resources`, `spans` and the `headers` of what came.

    `taken_bytes`: how much of an answer without end the service took.
    """

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.resources, self.spans, self.headers = [], [], []
        self.taken_bytes = 0

    def take(self, path, headers, body):
        assert path == "/v1/traces"
        message = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for resource in message.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse().SerializeToString()

    def wait_for(self, count, name):
        """The spans called `name`, when there are so many. More must not come within a second."""
        until_s = time.monotonic() + PATIENCE_S
        while len(found := self.called(name)) < count:
            assert time.monotonic() < until_s, f"{len(found)} spans {name}, expected {count}"
            time.sleep(0.05)
        return found

    def called(self, name):
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def collector(port=0, moved_to=None, endless=False, status=200):
    """`moved_to`: every request is redirected there. `endless`: no answer ends below 64 MiB.

    `status`: of every answer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if moved_to is not None:
                self.send_response(302)
                self.send_header("Location", moved_to)
                self.end_headers()
                return
            answer = found.take(self.path, dict(self.headers), body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)
            while endless and found.taken_bytes < ENDLESS_BYTES:
                try:
                    found.taken_bytes += self.wfile.write(bytes(1 << 20))
                except OSError:  # the service closed the connection
                    break

        def do_GET(self):
            found.headers.append(dict(self.headers))
            self.send_error(405)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        found = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with collector(int(sys.argv[1])) as found, contextlib.suppress(KeyboardInterrupt):
        came = 0
        while True:
            time.sleep(10)
            came, found.spans = came + len(found.spans), []
            print(f"spans: {came}", flush=True)
