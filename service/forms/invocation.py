"""The form of `POST /invocations`, which SageMaker, MLflow and Vertex AI send.

The body is one of `POST /predict`, or JSON of TensorFlow Serving's API, answered as that is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from service.forms.form import Answered, Asked, Body, Content, Decoded
from service.forms.prediction import ImageForm
from service.forms.tensorflow import TensorflowForm
from service.pictures.headers import Between

_NOW_BYTES = 192 * 1024
"""Larger JSON is not even searched on the event loop."""

_INSTANCES = re.compile(rb'"(?:instances|inputs)"\s*:')


@dataclass(frozen=True, slots=True)
class InvocationForm:
    """The form of `POST /invocations`: that of `images`, or of `instances`, as the body says.

    `inputs` are answered by row, too, as MLflow does.
    """

    images: ImageForm
    instances: TensorflowForm

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False

    @property
    def in_place(self) -> bool:
        """True of raw pixels."""
        return self.images.in_place

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.images.max_images

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode what the form that the body has decodes at once."""
        if self._is_json and len(body) > _NOW_BYTES:
            return None
        if not self._has_instances(body):
            return self.images.decode_now(body)
        decoded = self.instances.decode_now(body)
        return None if decoded is None else _by_row(decoded)

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body."""
        if self._has_instances(body):
            return _by_row(self.instances.decode(body, between))
        return self.images.decode(body, between)

    def write(self, asked: Asked, answered: Answered) -> Content:
        """The answer in the form of the body."""
        return (self.instances if asked.by_instance else self.images).write(asked, answered)

    @property
    def _is_json(self) -> bool:
        return self.images.kind == "application/json"

    def _has_instances(self, body: Body) -> bool:
        return self._is_json and _INSTANCES.search(body) is not None


def _by_row(decoded: Decoded) -> Decoded:
    asked = replace(decoded.asked, by_instance=True, by_column=False)
    return Decoded(decoded.images, asked)
