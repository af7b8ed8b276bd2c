"""Measures a weight file on labelled images, as it is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.context import Target, open_backend
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from trainer.datasets import load, read
from trainer.errors import InvalidDataset
from trainer.export import served_logits
from trainer.mnist import Digits, label_names
from trainer.runs import evaluate
from trainer.settings import Evaluate

_ROWS = 1000
"""Images that are computed at a time."""

_MATRIX_CLASSES = 16
_PAIRS, _MISTAKES = 20, 10
"""Lines of the most frequent and of the most confident mistakes."""

_Z = 1.959964
"""The normal distribution has 95 % between -z and z."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, of which `right` of `count` were seen.

    Source: E. B. Wilson 1927, "Probable inference, the law of succession, and statistical
    inference".
    """
    share, z2 = right / count, _Z**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def images_of(
    settings: Evaluate, weights: WeightFile, report: Callable[[str], None]
) -> tuple[Digits, str]:
    """The images to evaluate on, labelled by the classes of `weights`, and which ones they are.

    Raises:
        DatasetUnavailable: there is no dataset.
        InvalidDataset: it is broken, or has a class that `weights` lacks; the message names it.
    """
    names, path = weights.training.labels, settings.data
    given = names if settings.labels is None else label_names(settings.labels)
    if unknown := [name for name in given if name not in names]:
        raise InvalidDataset(
            f"{settings.labels}: names the class {unknown[0]}, which {settings.weights} lacks; "
            f"expected some of {', '.join(names)}"
        )
    found = read(path, given, transposed=settings.transposed, complete=False, report=report)
    part = settings.part
    if part == "auto":
        if "test" in found.parts:
            part = "test"
        elif found.sha256 == weights.training.dataset_sha256:
            kept = load(path, given, transposed=settings.transposed, report=report).test
            return kept, "images that fit set aside for testing"
        else:
            part = "all"
    if part == "all":
        digits, which = found.all(), "images"
    elif part in found.parts:
        digits, which = found.parts[part], f"{part} images"
    else:
        raise InvalidDataset(
            f"{path}: has no part {part}, expected one of {', '.join(found.parts)}, or all"
        )
    numbers = np.array([names.index(name) for name in given], np.uint8)
    return replace(digits, labels=numbers[digits.labels]), which


def logits_of(weights: WeightFile, images: Images, target: Target) -> NDArray[np.float32]:
    """The logits that the service computes on `target`.

    Raises:
        LeNetError: the device cannot be used, or cannot serve this network.
    """
    backend = open_backend(target)
    try:
        return served_logits(backend.plan(weights, min(_ROWS, len(images))), images)
    finally:
        backend.close()


def measured(
    settings: Evaluate, weights: WeightFile, digits: Digits, which: str, target: Target
) -> dict[str, Any]:
    """What `weights` make of `digits`: an `Evaluation` with what it belongs to, for JSON."""
    logits = logits_of(weights, digits.images, target)
    result = evaluate(logits, digits.labels, digits.files)
    count, right = len(digits), int(np.trace(result.confusion))
    return {
        "weights": str(settings.weights),
        "sha256": weights.digest(),
        "data": str(settings.data),
        "which": which,
        "device": target.device,
        "arithmetic": "fp32" if target.device == "cpu" else target.precision,
        "labels": weights.training.labels,
        "images": count,
        "wrong": count - right,
        "interval": wilson(right, count),
        **asdict(result),
    }


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of what `measured` returned."""
    names, confusion = found["labels"], np.array(found["confusion"])
    low, high = found["interval"]
    yield (
        f"{found['weights']} on {found['data']}: {found['images']} {found['which']}, by "
        f"{found['device']} in {found['arithmetic']}"
    )
    yield (
        f"accuracy {found['accuracy']:.2%} ({found['wrong']} of {found['images']} wrong), 95 % "
        f"interval {low:.2%} to {high:.2%}"
    )
    yield (
        f"loss {found['loss']:.4f} nats, expected calibration error "
        f"{found['calibration_error']:.4f}"
    )
    rows = [("class", "images", "precision", "recall")]
    for name, count, precision, recall in zip(
        names, confusion.sum(axis=1), found["precision"], found["recall"], strict=True
    ):
        rows.append((name, str(count), f"{precision:.2%}", f"{recall:.2%}" if count else "-"))
    yield from _aligned(rows)
    mistakes = np.where(np.eye(len(names), dtype=bool), 0, confusion)
    if len(names) <= _MATRIX_CLASSES:
        yield "images of a class (rows) that are taken for a class (columns):"
        of_class = zip(names, confusion.astype(str).tolist(), strict=True)
        yield from _aligned([("", *names), *((name, *row) for name, row in of_class)])
    elif mistakes.any():
        yield "most frequent mistakes:"
        order = np.argsort(-mistakes, axis=None, kind="stable")[:_PAIRS]
        for true, predicted in zip(*np.unravel_index(order, mistakes.shape), strict=True):
            if count := mistakes[true, predicted]:
                yield f"  {names[true]} is taken for {names[predicted]}: {count} times"
    if found["worst"]:
        yield "most confident mistakes:"
    for number, (image, true, predicted, confidence) in enumerate(found["worst"][:_MISTAKES]):
        of = found["worst_files"][number] if found["worst_files"] else f"image {image}"
        yield f"  {of}: {names[true]} is taken for {names[predicted]}, with {confidence:.1%}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns two blanks apart, all but the first right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells))
