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
from trainer.marks import CLASSES, MARK, NONE, alone, bar
from trainer.mnist import Digits, load
from trainer.scenes import Scene, drawn
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

_MOST_NONE = 32
"""Maximum candidates of a scene that are none: the first, which stand out."""

_TESTED = 5000
"""Images that are set aside for the test."""

_ALONE = 4
"""Marks drawn alone for each scene."""


def samples(digits: Digits, scenes: int, seed: int) -> tuple[Images, Labels]:
    """Images and classes of the candidates of scenes, of marks drawn alone, all digits, and bars.

    The work is divided over all cores.
    """
    done = _divided(_samples, digits, scenes, seed)
    bars = [
        _alone(bar(np.random.default_rng((seed, scenes, number)))) for number in range(scenes // 2)
    ]
    images = [
        np.stack([_alone(one / 255) for one in digits.images]),
        *(images for images, _ in done),
        np.array(bars, np.uint8),
    ]
    ones = np.ones(len(bars), np.int64)
    labels = [digits.labels.astype(np.int64), *(labels for _, labels in done), ones]
    return np.concatenate(images), np.concatenate(labels)


def _divided(work: Any, digits: Digits, scenes: int, seed: int) -> list[Any]:
    """The results of `work(digits, seed, numbers)` for parts of the scenes, on all cores."""
    workers = len(os.sched_getaffinity(0))
    parts = np.array_split(np.arange(scenes), 8 * workers)
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


def _alone(share: Floats) -> Images:
    from service.pictures.view import view_alone

    return view_alone(share) if (share > 0.5).any() else np.zeros((28, 28), np.uint8)


def _clean(share: Floats, label: int) -> tuple[Images, int]:
    return _alone(share), label


def _seen(scene: Scene) -> Iterator[tuple[Images, int]]:
    """The images of a scene's candidates, and of its marks alone, with their classes."""
    from service.pictures.normalise import normalised

    for share, label in scene.marks:
        yield _alone(share), label
    if len(scene.marks) > 1:
        yield _alone(np.sum([share for share, _ in scene.marks], 0).clip(0, 1)), NONE
    found = _found(scene)
    images = [normalised(one.ink) for one in found]
    left = _MOST_NONE
    for one, (closest, label) in zip(found, _classes(scene, found, images), strict=True):
        image = one.view
        if closest > _IS_NOT:
            left -= 1
            if left >= 0:
                yield image, NONE
        elif closest <= _IS:
            yield image, label


def _found(scene: Scene) -> list[Candidate]:
    """Every candidate of a scene."""
    from service.pictures.candidates import candidates, drawing

    grey = np.asarray(scene.picture.convert("L"))
    whole = drawing(grey, "auto")
    found = candidates(grey, "auto", "several" if len(scene.marks) > 1 else "one")
    return [*found, *([whole] if whole else [])]


def _classes(
    scene: Scene, found: Sequence[Candidate], images: Sequence[Images]
) -> Iterator[tuple[float, int]]:
    """For each candidate, how far it is from the closest mark, and the class of that mark.

    How far: the share of pixels of either that the other does not have, 0 to 1.
    """
    from service.pictures.normalise import normalised
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
    """The candidates of a scene, as the judge weighs them, and which are its only digit."""

    merits: Floats
    circumstances: Floats
    is_digit: NDArray[np.bool_]
    has_digit: bool


def weigh(seen: Sequence[Seen]) -> tuple[Floats, Floats]:
    """The weights of merits and of circumstances.

    Merits: the likelihood that a digit is chosen where there is one among the candidates.
    Circumstances: logistic regression of what is chosen, a digit or nothing that has one.
    """
    there = [one for one in seen if one.is_digit.any()]
    weights: Floats = np.full(there[0].merits.shape[1], 0.5)
    for _ in range(300):
        slope = np.zeros_like(weights)
        for one in there:
            chances = _softmax(one.merits @ weights)
            right = np.where(one.is_digit, chances, 0)
            slope += (right / right.sum() - chances) @ one.merits
        weights = weights + 0.3 * slope / len(there)
    about, is_digit = _chosen(seen, weights)
    return weights, _logistic(about, is_digit)


def rates(seen: Sequence[Seen], ranking: Floats, chance: Floats) -> tuple[float, float, float]:
    """How well weights do, as three shares.

    Of digits among the candidates what is chosen; of what is no digit and chosen what has a chance
    below that of one in a hundred digits; and that chance.
    """
    right = [one.is_digit[np.argmax(one.merits @ ranking)] for one in seen if one.is_digit.any()]
    about, is_digit = _chosen(seen, ranking)
    chances = 1 / (1 + np.exp(-about @ chance))
    least = float(np.quantile(chances[is_digit], 0.01))
    return float(np.mean(right)), float((chances[~is_digit] < least).mean()), least


def _chosen(seen: Sequence[Seen], ranking: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Circumstances of the best candidates, and whether they are a digit; no parts of digits."""
    best = [(one, int(np.argmax(one.merits @ ranking))) for one in seen]
    kept = [(one, at) for one, at in best if one.is_digit[at] or not one.has_digit]
    about = np.array([one.circumstances[at] for one, at in kept])
    return about, np.array([one.is_digit[at] for one, at in kept])


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max())
    chances: Floats = powers / powers.sum()
    return chances


def _logistic(features: Floats, is_one: NDArray[np.bool_]) -> Floats:
    """Weights of a logistic regression by Newton's method, both classes counting the same."""
    weights = np.zeros(features.shape[1])
    counts = np.where(is_one, 0.5 / is_one.mean(), 0.5 / (1 - is_one.mean()))
    for _ in range(50):
        chances = 1 / (1 + np.exp(-features @ weights))
        slope = features.T @ (counts * (chances - is_one))
        curve = (features.T * (counts * chances * (1 - chances))) @ features
        weights -= np.linalg.solve(curve + np.eye(len(weights)), slope + weights)
    return weights


def _weighed(digits: Digits, seed: int, numbers: NDArray[np.intp]) -> list[Seen]:
    """Scenes with one digit or none."""
    from service.pictures.judge import circumstances, merits, verdicts
    from service.pictures.normalise import normalised

    done = []
    for number in numbers:
        scene = drawn(digits, np.random.default_rng((seed, int(number))))
        labels = [label for _, label in scene.marks]
        found = _found(scene)
        if not found or (len(labels) > 1 and min(labels) < MARK):
            continue
        images = [normalised(one.ink) for one in found]
        is_digit = np.array(
            [beside <= _IS and label < MARK for beside, label in _classes(scene, found, images)]
        )
        judged = verdicts(np.stack([one.view for one in found]))
        done.append(
            Seen(
                merits(found, judged),
                circumstances(found, judged),
                is_digit,
                bool(labels and min(labels) < MARK),
            )
        )
    return done


def main() -> None:
    """Write the file that the judge is trained on, or print weights."""
    parser = argparse.ArgumentParser(prog="python -m trainer.judge")
    parser.add_argument("what", choices=("samples", "weigh"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, default=MNIST_FOLDER)
    parser.add_argument("--scenes", type=int, default=24000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    digits = load(arguments.data).train
    if arguments.what == "weigh":
        done: list[list[Seen]] = _divided(_weighed, digits, arguments.scenes, arguments.seed)
        seen = [one for some in done for one in some]
        ranking, chance = weigh(seen[::2])
        found, warned, least = rates(seen[1::2], ranking, chance)
        print(f"{len(seen)} scenes, the weights of half of them; of the other half:")
        print(f"of digits that are candidates {found:.2%} are chosen; of what is no digit")
        print(f"{warned:.2%} have a chance below {least:.3f}, which 1 % of digits have")
        print(f"RANKING = {tuple(np.round(ranking, 2).tolist())}")
        print(f"CHANCE = {tuple(np.round(chance, 2).tolist())}")
        return
    if arguments.file is None:
        parser.error("samples: expected a FILE.npz")
    images, labels = samples(digits, arguments.scenes, arguments.seed)
    order = np.random.default_rng(arguments.seed).permutation(len(images))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    images, labels = images[order], labels[order]
    aside, rest = slice(None, _TESTED), slice(_TESTED, None)
    np.savez(
        arguments.file,
        x_train=images[rest],
        y_train=labels[rest],
        x_test=images[aside],
        y_test=labels[aside],
    )
    arguments.file.with_suffix(".txt").write_text("\n".join(CLASSES) + "\n")
    print(f"{arguments.file}: {len(images)} images, of each class {np.bincount(labels).tolist()}")


if __name__ == "__main__":
    main()
