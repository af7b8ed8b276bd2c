"""FastAPI's endpoints for the routes that take images, on any ASGI server.

Our own server answers these routes on the connection instead, by the same `ImageRoute`; see
`wire.head`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from service.api.routes import ImageRequest, ImageRoute, Reply
from service.errors import Cancelled, stopped
from service.request import Wanted
from wire.answer import Answer
from wire.errors import Refusal

DRAINED = "Task cancelled, timeout graceful shutdown exceeded"
"""With this message uvicorn cancels the requests that are left at the end of its drain."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def image_endpoint(route: ImageRoute) -> Endpoint:
    """The endpoint of `route`."""

    async def answer(request: Request) -> Response:
        return await answered(request, route, route.open)

    return answer


async def answered(
    request: Request, route: ImageRoute, begin: Callable[[Wanted, Reply], ImageRequest]
) -> Response:
    """The answer to the request of `route` that `begin`, which may raise a Refusal, opens."""
    if path_of(request.scope).endswith("\n"):  # Starlette takes it for the path before it
        raise HTTPException(404)
    replied: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    try:
        wanted = route.read(request.scope["query_string"], request.headers, request.path_params)
        call = begin(wanted, replied.set_result)
    except Refusal as exc:
        return response(route.refuse(exc))
    receiving = asyncio.create_task(_receive(request, call, wanted.length))
    try:
        await asyncio.wait((replied, receiving), return_when=asyncio.FIRST_COMPLETED)
        if not replied.done() and receiving.result():
            return Response(status_code=Cancelled.status)  # which nobody reads
        await asyncio.wait((replied,))
        return response(replied.result())
    except asyncio.CancelledError as exc:
        if exc.args == (DRAINED,):  # `Middleware` answers
            call.fail(stopped())
        raise
    finally:
        receiving.add_done_callback(_read_exception)
        receiving.cancel()
        call.cancel()  # if it is not answered


def _read_exception(task: asyncio.Task[bool]) -> None:
    """Read the exception of a task whose result nobody needs, or asyncio logs it."""
    if not task.cancelled():
        task.exception()


async def _receive(request: Request, call: ImageRequest, length: int | None) -> bool:
    """Give the body to `call`; return whether the client is gone before the answer."""
    try:
        more = True
        while more and not call.done:
            call.wait_for_body()
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return True
            body, more = message.get("body", b""), message.get("more_body", False)
            if not more and len(body) == length:
                call.complete(body)  # all of it in one message
                break
            if body:
                call.data(body)
            if not more:
                call.complete()
    except Refusal as exc:
        call.fail(exc)
    if call.done:
        return False
    await request.receive()  # nothing but a disconnect follows the body, see `Middleware`
    return True


def response(answer: Answer) -> Response:
    """`answer` as a response; a large one is sent in pieces."""
    found: Response
    if answer.rest:
        size = len(answer.body) + sum(map(len, answer.rest))
        found = StreamingResponse(_pieces(answer), answer.status, {"content-length": str(size)})
    else:
        found = Response(answer.body, answer.status)
    # Not by `headers`, which holds one line of a name; `media_type` would get a charset.
    found.raw_headers += [*fields(answer.headers), (b"content-type", answer.media_type)]
    return found


def fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Header lines, each with its line end, as names in lower case and values."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name.lower(), value) for name, _, value in pairs]


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    for piece in (answer.body, *answer.rest):
        yield piece
        await asyncio.sleep(0)  # others come in between


def path_of(scope: Mapping[str, Any]) -> str:
    """The path of a request below the place where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    below = path.removeprefix(root)
    return below if below.startswith("/") else path
