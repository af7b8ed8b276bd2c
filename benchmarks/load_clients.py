"""Connections of the load test: HTTP through httpx, gRPC through grpc.aio.

A connection prepares its messages once, exchanges one message at a time, and checks a reply after
its time was taken. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import grpc
import httptools
import httpx
import numpy as np

from benchmarks.digits import PreparedRequest, Verdict, error_kind, judge, judge_tensors
from benchmarks.grpc_stub import Stub
from service.forms import open_inference_pb2 as pb

TIMEOUT_S = 35.0
"""Timeout for a hung service; the service itself gives up after 30 s."""

ServerMs: TypeAlias = dict[str, float]
"""Milliseconds by stage of the service."""


class Connection(Protocol):
    """One connection of a protocol."""

    def prepare(self, request: PreparedRequest) -> Any:
        """The message for `request`; connections with the same target can share it."""

    async def exchange(self, message: Any) -> tuple[Any, float]:
        """The reply, or the kind of error as a str; and when it came, by `time.perf_counter`."""

    def examine(self, reply: Any, request: PreparedRequest) -> tuple[Verdict, ServerMs]:
        """Check a reply."""

    async def close(self) -> None:
        """Close the connection."""


class HttpConnection:
    """POST /predict of the service at `url`."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        timeout_ms: int | None,
        transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
    ) -> None:
        self._url, self._timeout_ms = f"{url}/predict", timeout_ms
        self._parameters = {"model": model} if model else None
        self._transport = transport() if transport else KeptConnection(url)

    def prepare(self, request: PreparedRequest) -> httpx.Request:
        """A request, which can be sent many times."""
        headers = {"Content-Type": request.content_type, "Accept": "application/json"}
        # The service reports its own timeouts.
        timeout_s = TIMEOUT_S
        if self._timeout_ms is not None:
            headers["X-Request-Timeout-Ms"] = str(self._timeout_ms)
            timeout_s = self._timeout_ms / 1e3 + 5
        return httpx.Request(
            "POST",
            self._url,
            params=self._parameters,
            headers=headers,
            content=request.body,
            extensions={"timeout": httpx.Timeout(timeout_s).as_dict()},
        )

    async def exchange(self, message: httpx.Request) -> tuple[httpx.Response | str, float]:
        """The response with its body, or the name of httpx's exception."""
        try:
            response = await self._transport.handle_async_request(message)
            await response.aread()
        except httpx.TransportError as exc:
            return type(exc).__name__, time.perf_counter()
        return response, response.extensions.get("received_s") or time.perf_counter()

    def examine(self, reply: httpx.Response, request: PreparedRequest) -> tuple[Verdict, ServerMs]:
        """Check status and predictions, and read the Server-Timing header."""
        if reply.status_code != 200:
            return Verdict(error_kind(reply.status_code, reply.content)), {}
        return judge(reply.content, request), server_timing(reply.headers.get("Server-Timing", ""))

    async def close(self) -> None:
        """Close the transport."""
        await self._transport.aclose()


class GrpcConnection:
    """ModelInfer of the service at `target`, HOST:PORT, with raw tensors."""

    def __init__(self, target: str, *, model: str, timeout_ms: int | None) -> None:
        # Without this, channels to one target share a connection.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._infer = Stub(self._channel).ModelInfer
        self._model = model
        self._timeout_s = TIMEOUT_S if timeout_ms is None else timeout_ms / 1e3

    def prepare(self, request: PreparedRequest) -> pb.ModelInferRequest:
        """A message with the pixels as raw contents."""
        shape = (len(request.true_labels), 28, 28)
        image = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=shape)
        return pb.ModelInferRequest(
            model_name=self._model, inputs=[image], raw_input_contents=[request.body]
        )

    async def exchange(
        self, message: pb.ModelInferRequest
    ) -> tuple[pb.ModelInferResponse | str, float]:
        """The response, or the status with the service's error code."""
        try:
            response: pb.ModelInferResponse = await self._infer(message, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            code = dict(exc.trailing_metadata() or ()).get("lenet-error-code", "")
            return f"{exc.code().name} {code}".strip(), time.perf_counter()
        return response, time.perf_counter()

    def examine(
        self, reply: pb.ModelInferResponse, request: PreparedRequest
    ) -> tuple[Verdict, ServerMs]:
        """Check both tensors, and read the times among the parameters."""
        server_ms = {
            name.removesuffix("_us"): value.int64_param / 1e3
            for name, value in reply.parameters.items()
            if name.endswith("_us")
        }
        raw = dict(
            zip((output.name for output in reply.outputs), reply.raw_output_contents, strict=False)
        )
        try:
            labels = np.frombuffer(raw["label"], "<i8")
            probabilities = np.frombuffer(raw["probabilities"], "<f4").reshape(-1, 10)
        except (KeyError, ValueError):
            return Verdict("bad answer: not the documented tensors"), server_ms
        return judge_tensors(labels, probabilities, request), server_ms

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class KeptConnection(httpx.AsyncBaseTransport):
    """httpx's transport over one HTTP/1.1 connection, for one request at a time.

    httpx's own, with its pool, anyio and h11, takes 630 us of CPU time a request where this one
    takes 180 (one connection; two Xeon cores, 2026-11-22). With it, the client was the limit, and
    most of the latency of a small request. The connection is opened by the first request, and again
    after the service closed it.
    """

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)
        self._ssl = ssl.create_default_context() if self._url.scheme == "https" else None
        self._protocol: _Http11 | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request whose body is in memory; the response's body is, too.

        Raises:
            httpx.TransportError: the service cannot be reached, hangs, or does not speak HTTP/1.1.
        """
        timeout_s = request.extensions["timeout"]["read"]
        wire = request.extensions.get("wire")
        if wire is None:
            # Kept for the next time that this request is sent.
            wire = request.extensions["wire"] = _wire(request)
        if self._protocol is None or self._protocol.closed:
            self._protocol = await self._connect(timeout_s)
        status, headers, body, at_s = await self._protocol.exchange(wire, timeout_s)
        return httpx.Response(
            status,
            headers=headers,
            stream=httpx.ByteStream(body),
            extensions={"received_s": at_s},
        )

    async def _connect(self, timeout_s: float) -> _Http11:
        port = self._url.port or (443 if self._ssl else 80)
        connecting = asyncio.get_running_loop().create_connection(
            _Http11, self._url.host, port, ssl=self._ssl
        )
        try:
            _, protocol = await asyncio.wait_for(connecting, timeout_s)
        except TimeoutError as exc:
            raise httpx.ConnectTimeout(f"no connection within {timeout_s:g} s") from exc
        except OSError as exc:
            raise httpx.ConnectError(str(exc)) from exc
        return protocol

    async def aclose(self) -> None:
        """Close the connection."""
        if self._protocol is not None:
            self._protocol.close()


_Reply: TypeAlias = tuple[int, list[tuple[bytes, bytes]], bytes, float]
"""Status, headers, body, and when the last byte came."""


class _Http11(asyncio.Protocol):
    """Sends prepared requests and parses the replies with httptools, as uvicorn does."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: asyncio.Future[_Reply] | None = None

    async def exchange(self, wire: bytes, timeout_s: float) -> _Reply:
        loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._waiting = loop.create_future()
        timer = loop.call_later(timeout_s, self._fail, httpx.ReadTimeout("no reply"))
        try:
            self._transport.write(wire)
            return await self._waiting
        finally:
            timer.cancel()
            if self._waiting.cancelled():
                self.close()
            self._waiting = None

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def _fail(self, error: httpx.TransportError) -> None:
        self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    # Called by asyncio.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(httpx.RemoteProtocolError(str(exc)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(httpx.ReadError(str(exc or "the service closed the connection")))

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._waiting is None or self._waiting.done():
            return
        status, body = self._parser.get_status_code(), b"".join(self._body)
        self._waiting.set_result((status, self._headers, body, time.perf_counter()))
        if not self._parser.should_keep_alive():
            self.close()


def _wire(request: httpx.Request) -> bytes:
    head = b"".join(b"%s: %s\r\n" % header for header in request.headers.raw)
    method, path = request.method.encode(), request.url.raw_path
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, path, head, request.content)


def server_timing(header: str) -> ServerMs:
    """The durations of a Server-Timing header; entries without a duration are skipped."""
    stages = {}
    for entry in header.split(","):
        name, *parameters = entry.split(";")
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    stages[name.strip()] = float(value)
                except ValueError:
                    continue
    return stages
