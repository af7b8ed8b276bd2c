"""What both the golden script and the test start from, so that no weights need to be stored.

`RandomState` because its stream is frozen for good; `default_rng` makes no such promise.
"""

import math

import numpy as np

SEED = 20
BATCH = 8
RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4


def initial(model):
    """Weights as He would have them; everything else away from its neutral value."""
    random = np.random.RandomState(SEED)
    tensors = {}
    for name, shape in model.parameters().items():
        values = random.standard_normal(shape)
        if name.endswith(".weight"):
            values *= math.sqrt(2 / math.prod(shape[1:]))
        elif name.endswith((".gamma", ".variance")):
            values = 1 + 0.2 * np.abs(values)
        else:
            values *= 0.1
        tensors[name] = values.astype(np.float32)
    return tensors


def batch():
    """uint8 (8, 28, 28) with a digit's share of ink, and labels uint8 (8,)."""
    random = np.random.RandomState(SEED + 1)
    images = random.randint(0, 256, (BATCH, 28, 28)) * (random.rand(BATCH, 28, 28) < 0.2)
    return images.astype(np.uint8), random.randint(0, 10, BATCH).astype(np.uint8)
