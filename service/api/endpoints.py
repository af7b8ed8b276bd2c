"""FastAPI's endpoints for the routes that take images, on any ASGI server.

Our own server answers these routes on the connection instead, by the same `ImageRoute`; see
`transport.head`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from service.api.routes import ImageRequest, ImageRoute
from service.errors import ServiceError
from service.transport.answer import STATUS, Answer

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def image_endpoint(route: ImageRoute) -> Endpoint:
    """The endpoint of `route`."""

    async def answer(request: Request) -> Response:
        if path_of(request.scope).endswith("\n"):  # Starlette takes it for the path before it
            raise HTTPException(404)
        query = request.scope["query_string"]
        try:
            wanted = route.read(query, request.headers, request.path_params)
        except ServiceError as exc:
            return response(route.refuse(exc))
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        call = route.open(wanted, answered.set_result)
        receiving = asyncio.create_task(_receive(request, call, wanted.length))
        try:
            await asyncio.wait((answered, receiving), return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return response(answered.result())
            receiving.result()
            return Response(status_code=STATUS["cancelled"])  # which nobody reads
        finally:
            receiving.cancel()
            call.cancel()  # if it is not answered

    return answer


async def _receive(request: Request, call: ImageRequest, length: int | None) -> None:
    """Give the body to `call`; return when it is refused, or the client is gone."""
    try:
        more = True
        while more and not call.done:
            call.wait_for_body()
            message = await request.receive()
            if message["type"] == "http.disconnect":
                call.cancel()
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            if not more and len(body) == length:
                call.complete(body)  # all of it in one message
                break
            if body:
                call.data(body)
            if not more:
                call.complete()
    except ServiceError as exc:
        call.fail(exc)
    if not call.done:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        call.cancel()


def response(answer: Answer) -> Response:
    """`answer` as a response; a large one is sent in pieces."""
    headers = dict(line.split(": ", 1) for line in answer.headers.decode("latin-1").splitlines())
    headers["content-type"] = answer.media_type.decode()  # as it is: Response adds a charset
    if not answer.rest:
        return Response(answer.body, answer.status, headers)
    headers["content-length"] = str(len(answer.body) + sum(map(len, answer.rest)))
    return StreamingResponse(_pieces(answer), answer.status, headers)


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
