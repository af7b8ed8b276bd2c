"""What the judge of pictures learns: candidates of drawn scenes, each with its class.

    python -m trainer.judge FILE.npz [--data FOLDER] [--scenes N] [--seed N]

Every candidate that `service.pictures.candidates` finds in a scene of `trainer.scenes` gets a
class: a digit's where it is the digit and nothing else, `mark` where it is a letter or sign, `none`
for anything else. FILE.npz is for `python -m trainer fit`, with the names of the classes in
FILE.txt; `make judge` does both.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lenet.pixels import Images
from trainer.mnist import Digits, load
from trainer.scenes import CLASSES, NONE, Field, Scene, alone, bar, drawn
from trainer.settings import MNIST_FOLDER

Labels: TypeAlias = NDArray[np.int64]

_IS, _IS_NOT = 0.12, 0.25
"""A candidate is a mark where this share of its pixels, and of the mark's, is beside the other. It
is none from the second share on, and between the two it is left out."""

_SEEN = 80
"""Level, of 255, above which a pixel counts there."""

_NONE_KEPT = 0.2
"""Share of the candidates that are none which are kept; most are."""

_ALONE = 4
"""Marks drawn alone for each scene."""


def samples(digits: Digits, scenes: int, seed: int) -> tuple[Images, Labels]:
    """Images and classes of the candidates of scenes, of marks drawn alone, all digits, and bars.

    The work is divided over all cores.
    """
    from service.pictures.picture import normalised

    workers = len(os.sched_getaffinity(0))
    parts = np.array_split(np.arange(scenes), workers)
    # Not by fork: the libraries' threads may hold a lock then.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = list(pool.map(partial(_samples, digits, seed), parts))
    bars = [
        normalised(255 * bar(np.random.default_rng((seed, scenes, number))))
        for number in range(scenes // 2)
    ]
    images = [digits.images, *(images for images, _ in done), np.array(bars, np.uint8)]
    ones = np.ones(len(bars), np.int64)
    labels = [digits.labels.astype(np.int64), *(labels for _, labels in done), ones]
    return np.concatenate(images), np.concatenate(labels)


def _samples(digits: Digits, seed: int, numbers: NDArray[np.intp]) -> tuple[Images, Labels]:
    images, labels = [np.zeros((0, 28, 28), np.uint8)], []
    for number in numbers:
        random = np.random.default_rng((seed, int(number)))
        clean = (_clean(*alone(digits, random)) for _ in range(_ALONE))
        for image, label in chain(clean, _seen(drawn(digits, random))):
            if label != NONE or random.random() < _NONE_KEPT:
                images.append(image[np.newaxis])
                labels.append(label)
    return np.concatenate(images), np.array(labels, np.int64)


def _clean(share: Field, label: int) -> tuple[Images, int]:
    from service.pictures.picture import normalised

    is_there = (share > 0.5).any()
    return normalised(255 * share) if is_there else np.zeros((28, 28), np.uint8), label


def _seen(scene: Scene) -> Iterator[tuple[Images, int]]:
    """The images of a scene's candidates, and of its marks alone, with their classes."""
    from service.pictures.candidates import candidates
    from service.pictures.picture import normalised
    from service.pictures.shapes import common_areas

    marks: list[tuple[NDArray[np.float64], int, Images]] = []
    side = max(scene.picture.size)
    for share, label in scene.marks:
        clean = normalised(255 * share)
        yield clean, label
        rows, columns = np.nonzero(share > 0.5)
        box = np.array([rows.min(), rows.max() + 1, columns.min(), columns.max() + 1])
        marks.append((box / side, label, clean))
    if len(marks) > 1:
        yield normalised(255 * np.sum([share for share, _ in scene.marks], 0)), NONE
    for one in candidates(np.asarray(scene.picture.convert("L")), "auto"):
        image = normalised(one.ink)
        closest, label = 1.0, NONE
        for box, of_mark, clean in marks:
            areas = common_areas(np.array([one.box, box]))
            if 3 * areas[0, 1] > np.trace(areas):  # half of what both cover
                beside = _beside(image > _SEEN, clean > _SEEN)
                closest, label = min((closest, label), (beside, of_mark))
        if closest > _IS_NOT:
            label = NONE
        elif closest > _IS:
            continue
        yield image, label


def _beside(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """The greater of the shares of each mask's pixels that are not in or next to the other."""
    shares = [
        int((mask & ~_grown(near)).sum()) / max(1, int(mask.sum()))
        for mask, near in ((one, other), (other, one))
    ]
    return max(shares)


def _grown(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(Image.fromarray(mask.astype(np.uint8)).filter(ImageFilter.MaxFilter(3))) > 0


def main() -> None:
    """Write the file that the judge is trained on."""
    parser = argparse.ArgumentParser(prog="python -m trainer.judge")
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, default=MNIST_FOLDER)
    parser.add_argument("--scenes", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    images, labels = samples(load(arguments.data).train, arguments.scenes, arguments.seed)
    order = np.random.default_rng(arguments.seed).permutation(len(images))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.file, images=images[order], labels=labels[order])
    arguments.file.with_suffix(".txt").write_text("\n".join(CLASSES) + "\n")
    print(f"{arguments.file}: {len(images)} images, of each class {np.bincount(labels).tolist()}")


if __name__ == "__main__":
    main()
