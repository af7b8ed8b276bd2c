"""Images whose probabilities are known and differ from each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lenet.context import Target, open_backend
from lenet.weightfile import WeightFile

WEIGHTS = Path(__file__).parents[2] / "weights"
"""The committed ones; `lenet` has two versions."""


def weight_file(version=2):
    return WeightFile.read(WEIGHTS / "lenet" / f"{version}.safetensors")


class Digits:
    """`images`: uint8 (n, 28, 28), blends of two golden digits, so that no two answers are alike.

    `probabilities`: float32 (n, 10), each computed alone, without batches. Any two differ by more
    than 1e-4 somewhere, so that an answer that was mixed up is seen.
    """

    def __init__(self, count, seed=0):
        weights = weight_file()
        self.golden = weights.golden
        plan = open_backend(Target("cpu")).plan(weights, 1)
        generator = np.random.default_rng(seed)
        self.images = np.empty((count, 28, 28), np.uint8)
        self.probabilities = np.empty((count, 10), np.float32)
        made = 0
        while made < count:
            first, second = generator.choice(self.golden.images, 2)
            share = generator.uniform(0.35, 0.65)
            noise = generator.integers(-25, 26, first.shape)
            image = np.clip(share * first + (1 - share) * second + noise, 0, 255).astype(np.uint8)
            (answer,) = plan.run(image[np.newaxis]).probabilities
            nearest = np.abs(self.probabilities[:made] - answer).max(axis=1).min(initial=1.0)
            if answer.max() < 0.98 and nearest > 1e-4:
                self.images[made], self.probabilities[made] = image, answer
                made += 1

    def computed_by(self, weights):
        """Probabilities of `images`, each computed alone with `weights`; float32 (n, 10)."""
        plan = open_backend(Target("cpu")).plan(weights, 1)
        return np.concatenate([plan.run(image[np.newaxis]).probabilities for image in self.images])

    def rows(self, chosen):
        """The bytes of the chosen images, and their probabilities."""
        return self.images[chosen].tobytes(), self.probabilities[chosen]
