"""Bodies that are valid, which a schema cannot say of anything binary; see `make schemathesis`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.file_samples import FILE_SAMPLES, MEDIA_TYPE_FILE_SAMPLES

_CORPUS = Path(__file__).parents[1] / "corpus"


def _files(*names: str) -> st.SearchStrategy[bytes]:
    return st.sampled_from([(_CORPUS / name).read_bytes() for name in names])


_PIXELS = _files("octets/one-image", "octets/two-images")

schemathesis.openapi.media_type("application/octet-stream", _PIXELS)
schemathesis.openapi.media_type("application/x-npy", _files("npy/28x28", "npy/2x28x28"))
schemathesis.openapi.media_type("text/csv", _files("csv/kaggle-train", "csv/two-lines"))
schemathesis.openapi.media_type("image/png", _files("png/dark-and-light"))
for _kind in ("jpeg", "webp", "gif", "bmp", "avif", "tiff"):
    schemathesis.openapi.media_type(f"image/{_kind}", _files(f"{_kind}/dark-and-light"))
schemathesis.openapi.format("binary", _PIXELS)

# Schemathesis' own samples are blank, and the service finds no digit in them.
_SAMPLES = {"png": "png/dark-and-light", "jpg": "jpeg/dark-and-light"}
FILE_SAMPLES.update({kind: (_CORPUS / name).read_bytes() for kind, name in _SAMPLES.items()})
MEDIA_TYPE_FILE_SAMPLES.update(
    {"image/png": FILE_SAMPLES["png"], "image/jpeg": FILE_SAMPLES["jpg"]}
)


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_body(_context: object, body: Any) -> Any:
    """1.0 as 1: it is an integer to JSON Schema, which has no other name for one."""
    if isinstance(body, dict):
        return {name: map_body(_context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [map_body(_context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body
