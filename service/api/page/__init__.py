"""The page of `GET /`, on which people draw digits, and the files that it loads.

The files are static and load nothing from another origin. They hold no data of the service, so
they need no key; what the page shows comes from `/predict`, `/explain`, `/info` and `/metrics`,
which do.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from service.api.routes import takes_gzip

HTML = "text/html"

_INDEX = "index.html"

_TYPES = {
    ".html": HTML + "; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # asks with the ETag each time: a new service has a new page
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept, Accept-Encoding",  # `GET /` answers with JSON, too
    "X-Content-Type-Options": "nosniff",
}


class StaticFile:
    """A file that is read or made once, and its answers; `headers` are those of all of them."""

    def __init__(
        self, content: bytes, media_type: str, headers: Mapping[str, str] = _HEADERS
    ) -> None:
        digest, packed = hashlib.sha256(content).hexdigest()[:16], gzip.compress(content, mtime=0)
        self._headers = {**headers, "ETag": f'"{digest}"'}
        self._packed_headers = {**headers, "ETag": f'"{digest}-gzip"'}
        coded = {**self._packed_headers, "Content-Encoding": "gzip"}
        self._plain = Response(content, headers=self._headers, media_type=media_type)
        self._packed = Response(packed, headers=coded, media_type=media_type)

    def answer(self, request: Request) -> Response:
        """The file, or 304 where the client has it."""
        response, headers = self._plain, self._headers
        if takes_gzip(request.headers.get("accept-encoding", "")):
            response, headers = self._packed, self._packed_headers
        known = request.headers.get("if-none-match", "")
        tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
        if headers["ETag"] in tags or tags == ["*"]:
            return Response(status_code=304, headers=headers)
        return response


class Page:
    """The files of the page, read once."""

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}
        for entry in files(__name__).iterdir():
            media_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
            if media_type is not None:
                self._files[entry.name] = StaticFile(entry.read_bytes(), media_type)

    def answer(self, request: Request, name: str = _INDEX) -> Response:
        """The file `name`, or 304 where the client has it.

        Raises:
            HTTPException: 404, there is no such file.
        """
        if (file := self._files.get(name)) is None:
            raise HTTPException(404)
        return file.answer(request)
