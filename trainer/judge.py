"""What the judge of pictures learns: candidates of drawn scenes, each with its class.

    python -m trainer.judge samples FILE.npz [--data FOLDER] [--scenes N] [--seed N]
    python -m trainer.judge weigh [--data FOLDER] [--scenes N] [--seed N]

Every candidate that `service.pictures.candidates` finds in a scene of `trainer.scenes` gets a
class: a digit's where it is the digit and nothing else, `mark` where it is a letter or sign, `none`
for anything else. FILE.npz is for `python -m trainer fit`, with the names of the classes in
FILE.txt; `make judge` does both. `weigh` prints the weights of `service.pictures.judge` that suit
the judge there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lenet.pixels import Images
from trainer.mnist import Digits, load
from trainer.scenes import CLASSES, MARK, NONE, Scene, alone, bar, drawn
from trainer.settings import MNIST_FOLDER

if TYPE_CHECKING:
    from service.pictures.candidates import Candidate

Labels: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.floating[Any]]

_IS, _IS_NOT = 0.12, 0.25
"""A candidate is a mark where this share of its pixels, and of the mark's, is beside the other. It
is none from the second share on, and between the two it is left out."""

_SEEN = 80
"""Level, of 255, above which a pixel counts there."""

_ALONE = 4
"""Marks drawn alone for each scene."""

_EVEN = 0.75
"""Share of a picture's edge with one level, which is then the paper's."""

_FAINTEST = 24
"""Contrast of a drawing, of 255."""


def samples(digits: Digits, scenes: int, seed: int) -> tuple[Images, Labels]:
    """Images and classes of the candidates of scenes, of marks drawn alone, all digits, and bars.

    The work is divided over all cores.
    """
    from service.pictures.picture import normalised

    done = _divided(_samples, digits, scenes, seed)
    bars = [
        normalised(255 * bar(np.random.default_rng((seed, scenes, number))))
        for number in range(scenes // 2)
    ]
    images = [digits.images, *(images for images, _ in done), np.array(bars, np.uint8)]
    ones = np.ones(len(bars), np.int64)
    labels = [digits.labels.astype(np.int64), *(labels for _, labels in done), ones]
    return np.concatenate(images), np.concatenate(labels)


def _divided(work: Any, digits: Digits, scenes: int, seed: int) -> list[Any]:
    """The results of `work(digits, seed, numbers)` for parts of the scenes, on all cores."""
    workers = len(os.sched_getaffinity(0))
    parts = np.array_split(np.arange(scenes), workers)
    # Not by fork: the libraries' threads may hold a lock then.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(partial(work, digits, seed), parts))


def _samples(digits: Digits, seed: int, numbers: NDArray[np.intp]) -> tuple[Images, Labels]:
    images, labels = [np.zeros((0, 28, 28), np.uint8)], []
    for number in numbers:
        random = np.random.default_rng((seed, int(number)))
        clean = (_clean(*alone(digits, random)) for _ in range(_ALONE))
        for image, label in chain(clean, _seen(drawn(digits, random))):
            images.append(image[np.newaxis])
            labels.append(label)
    return np.concatenate(images), np.array(labels, np.int64)


def _clean(share: Floats, label: int) -> tuple[Images, int]:
    from service.pictures.picture import normalised

    is_there = (share > 0.5).any()
    return normalised(255 * share) if is_there else np.zeros((28, 28), np.uint8), label


def _seen(scene: Scene) -> Iterator[tuple[Images, int]]:
    """The images of a scene's candidates, and of its marks alone, with their classes."""
    from service.pictures.picture import normalised

    for share, label in scene.marks:
        yield normalised(255 * share), label
    if len(scene.marks) > 1:
        yield normalised(255 * np.sum([share for share, _ in scene.marks], 0)), NONE
    found = _found(scene)
    images = [normalised(one.ink) for one in found]
    for image, (closest, label) in zip(images, _classes(scene, found, images), strict=True):
        if closest > _IS_NOT:
            yield image, NONE
        elif closest <= _IS:
            yield image, label


def _found(scene: Scene) -> list[Candidate]:
    """Every candidate of a scene, and all ink of one on even paper."""
    from service.pictures.candidates import candidates

    grey = np.asarray(scene.picture.convert("L"))
    found, whole = candidates(grey, "auto"), _drawing(grey)
    return [*found, whole] if whole else found


def _drawing(grey: Images) -> Candidate | None:
    """All ink of a picture as one candidate; None if its paper has more than one level."""
    from service.pictures.candidates import Candidate

    edge = np.sort(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    level = int(edge[edge.size // 2])
    ink = grey.astype(np.float32) - level
    if (ink**3).sum() < 0:
        ink = -ink
    ink = ink.clip(0)
    if np.count_nonzero(edge == level) < _EVEN * edge.size or ink.max() < _FAINTEST:
        return None
    drawn = ink > ink.max() * 0.1
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    box = np.array([rows[0], rows[-1] + 1, columns[0], columns[-1] + 1]) / max(grey.shape)
    return Candidate(ink, tuple(box.tolist()), 1)


def _classes(
    scene: Scene, found: Sequence[Candidate], images: Sequence[Images]
) -> Iterator[tuple[float, int]]:
    """Of each candidate the share of pixels beside the closest mark, and that mark's class."""
    from service.pictures.picture import normalised
    from service.pictures.shapes import common_areas

    marks: list[tuple[Floats, int, Images]] = []
    for share, label in scene.marks:
        rows, columns = np.nonzero(share > 0.5)
        box = np.array([rows.min(), rows.max() + 1, columns.min(), columns.max() + 1])
        marks.append((box / max(scene.picture.size), label, normalised(255 * share)))
    for one, image in zip(found, images, strict=True):
        closest, label = 1.0, NONE
        for box, of_mark, clean in marks:
            areas = common_areas(np.array([one.box, box]))
            if 3 * areas[0, 1] > np.trace(areas):  # half of what both cover
                beside = _beside(image > _SEEN, clean > _SEEN)
                closest, label = min((closest, label), (beside, of_mark))
        yield closest, label


def _beside(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """The greater of the shares of each mask's pixels that are not in or next to the other."""
    shares = [
        int((mask & ~_grown(near)).sum()) / max(1, int(mask.sum()))
        for mask, near in ((one, other), (other, one))
    ]
    return max(shares)


def _grown(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(Image.fromarray(mask.astype(np.uint8)).filter(ImageFilter.MaxFilter(3))) > 0


# Weights


@dataclass(frozen=True, slots=True)
class Seen:
    """The candidates of a scene with one digit, as the judge weighs them, and which are it."""

    merits: Floats
    is_digit: NDArray[np.bool_]


def weigh(seen: Sequence[Seen]) -> Floats:
    """The weights with which it is likeliest that a digit is chosen: multinomial logit."""
    weights: Floats = np.full(seen[0].merits.shape[1], 0.5)
    for _ in range(300):
        slope = np.zeros_like(weights)
        for one in seen:
            powers = np.exp((scores := one.merits @ weights) - scores.max())
            chances = powers / powers.sum()
            right = np.where(one.is_digit, chances, 0)
            slope += (right / right.sum() - chances) @ one.merits
        weights = weights + 0.3 * slope / len(seen)
    return weights


def _weighed(digits: Digits, seed: int, numbers: NDArray[np.intp]) -> list[Seen]:
    """Scenes whose one digit is among the candidates."""
    from service.pictures.judge import merits, verdicts
    from service.pictures.picture import normalised

    done = []
    for number in numbers:
        scene = drawn(digits, np.random.default_rng((seed, int(number))))
        found = _found(scene) if len(scene.marks) == 1 else []
        images = [normalised(one.ink) for one in found]
        is_digit = np.array(
            [beside < _IS_NOT and label < MARK for beside, label in _classes(scene, found, images)]
        )
        if is_digit.any():
            done.append(Seen(merits(found, verdicts(np.stack(images))), is_digit))
    return done


def main() -> None:
    """Write the file that the judge is trained on, or print weights."""
    parser = argparse.ArgumentParser(prog="python -m trainer.judge")
    parser.add_argument("what", choices=("samples", "weigh"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, default=MNIST_FOLDER)
    parser.add_argument("--scenes", type=int, default=7400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    digits = load(arguments.data).train
    if arguments.what == "weigh":
        done: list[list[Seen]] = _divided(_weighed, digits, arguments.scenes, arguments.seed)
        seen = [one for some in done for one in some]
        weights = weigh(seen[::2])
        found = [one.is_digit[np.argmax(one.merits @ weights)] for one in seen[1::2]]
        print(f"{len(seen)} scenes, the weights of half of them; in the other half")
        print(f"{np.mean(found):.2%} of digits are chosen")
        print(f"RANKING = {tuple(np.round(weights, 2).tolist())}")
        return
    if arguments.file is None:
        parser.error("samples: expected a FILE.npz")
    images, labels = samples(digits, arguments.scenes, arguments.seed)
    order = np.random.default_rng(arguments.seed).permutation(len(images))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.file, images=images[order], labels=labels[order])
    arguments.file.with_suffix(".txt").write_text("\n".join(CLASSES) + "\n")
    print(f"{arguments.file}: {len(images)} images, of each class {np.bincount(labels).tolist()}")


if __name__ == "__main__":
    main()
