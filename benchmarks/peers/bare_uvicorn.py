"""The least that answers over HTTP with uvicorn: it reads the body and sends one fixed answer.

Beside it one sees what a service adds. The event loop and the parser are uvicorn's own choice:
uvloop and httptools where they are installed. It refuses to look at what it is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

ANSWER = (
    b'{"predictions":[{"label":0,"confidence":0.1,'
    b'"probabilities":[0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.1]}]}'
)


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """200 and `ANSWER`, whatever is asked."""
    while (await receive()).get("more_body", False):
        pass
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(ANSWER)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    uvicorn.run(
        app, port=arguments.port, lifespan="off", ws="none", access_log=False, log_level="warning"
    )


if __name__ == "__main__":
    main()
