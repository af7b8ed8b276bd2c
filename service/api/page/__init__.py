"""The page of `GET /`, on which people draw digits, and the files that it loads.

The files are static and load nothing from another origin. They hold no data of the service, so
they need no key; what the page shows comes from `/predict`, `/explain`, `/info` and `/metrics`,
which do.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import Request, Response
from starlette.exceptions import HTTPException

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


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    packed: bytes
    media_type: str
    etag: str


class Page:
    """The files of the page, read once."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for entry in files(__name__).iterdir():
            media_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
            if media_type is not None:
                content = entry.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                packed = gzip.compress(content, mtime=0)
                self._files[entry.name] = _File(content, packed, media_type, etag)

    def answer(self, request: Request, name: str = _INDEX) -> Response:
        """The file `name`, or 304 where the client has it.

        Raises:
            HTTPException: 404, there is no such file.
        """
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": file.etag}
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(file.content, headers=headers, media_type=file.media_type)
        headers["Content-Encoding"] = "gzip"
        return Response(file.packed, headers=headers, media_type=file.media_type)
