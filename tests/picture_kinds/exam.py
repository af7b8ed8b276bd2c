"""What the service makes of pictures: the one place that calls its preparation and the model."""

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.command import latest_weights
from lenet.reference import logits
from lenet.weightfile import WeightFile
from service.errors import InvalidInput, TooLarge
from service.forms.body import decode
from service.forms.reader import Limits
from tests.picture_kinds.others import NUMBERS

SURE = 0.95
CLEAN = tuple(NUMBERS[name] for name in ("plain", "light_on_dark", "two_rows"))


@cache
def _weights():
    return WeightFile.read(latest_weights(Path(__file__).parents[2] / "weights" / "lenet"))


def answer(body, content_type, digits="one"):
    """Labels, their probabilities, and warnings of one picture; raises where it is refused."""
    doubts = []
    images = decode(body, content_type, digits=digits, limits=Limits(max_images=64), doubts=doubts)
    scores = logits(_weights().model, _weights().tensors, images).astype(np.float64)
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return scores.argmax(1), odds.max(1) / odds.sum(1), {doubt for _, doubt in doubts}


@dataclass
class Outcome:
    """Answers to pictures of a kind."""

    right: int = 0
    sure_and_wrong: int = 0
    refused: int = 0
    warned: Counter = field(default_factory=Counter)
    took_ms: list = field(default_factory=list)


def outcome(pictures, digits="one"):
    """The outcome of pictures, each with the digits that it shows; none for what is no digit."""
    found = Outcome()
    for picture, expected in pictures:
        began_s = time.process_time()
        try:
            labels, sure, warned = answer(*picture, digits)
        except (InvalidInput, TooLarge):
            found.refused += 1
        else:
            right = labels.tolist() == expected
            found.right += right
            found.sure_and_wrong += not right and not warned and bool((sure > SURE).all())
            found.warned.update(warned)
        found.took_ms.append(1e3 * (time.process_time() - began_s))
    return found


def of_kind(kind, images, expected, count, seed):
    """`count` pictures, each with its digit: another draw for another seed."""
    for i in range(count):
        random = np.random.default_rng((seed, i))
        index = int(random.integers(len(images)))
        yield kind(images[index], random), [int(expected[index])]


def numbers(images, expected, count, seed, kinds=CLEAN):
    """Numbers of 2 to 10 digits, each of the next kind."""
    for i in range(count):
        random = np.random.default_rng((seed, i))
        chosen = random.integers(0, len(images), random.integers(2, 11))
        picture = kinds[i % len(kinds)](images[chosen], random)
        yield picture, expected[chosen].astype(int).tolist()
