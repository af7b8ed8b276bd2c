"""A minimal uvicorn app: it reads the body and sends one fixed answer.

The difference to it is the cost of a service. uvicorn chooses the event loop and the parser: uvloop
and httptools where they are installed.
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
    """Answer every request with 200 and `ANSWER`."""
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
