"""Inputs of both the golden script and the test, so that no weights need to be stored.

`RandomState` because its stream is frozen for good; `default_rng` makes no such promise.
"""

import math

import numpy as np

from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool

SEED = 20
BATCH = 8
RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4

VALUES = 512
"""How many elements of a larger tensor are stored."""

SUMS = 4
"""How many sums over all its elements, with random signs, are stored beside them."""

MODELS = {
    **ARCHITECTURES,
    # Layers that no named architecture uses: every other activation and pooling, odd geometry.
    "every-other-layer": Model(
        "every-other-layer",
        (
            ConvBlock(
                5,
                (3, 4),
                stride=(1, 2),
                padding=(2, 1),
                dilation=(2, 1),
                batch_norm=True,
                activation=Activation("elu", 0.7),
                pool=Pool("average", (3, 2), (2, 1), (1, 1)),
            ),
            ConvBlock(
                7,
                (2, 3),
                activation=Activation("sigmoid"),
                pool=Pool("max", (2, 3), padding=(0, 1)),
            ),
            ConvBlock(9, (3, 2), activation=Activation("tanh"), pool=Pool("global_average")),
            DenseBlock(11, activation=Activation("clipped_relu", 0.3)),
            DenseBlock(10, activation=IDENTITY),
        ),
    ),
}


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


def digest(value):
    """A digest of an array: some of its elements, and (SUMS,) numbers that need them all.

    A sum with random signs changes when any element does, by as much as that element; divided by
    the root of the sum of squares of the golden elements it is of the order of one.
    """
    flat = np.asarray(value, np.float64).ravel()
    random = np.random.RandomState(SEED + 2)
    places = np.arange(flat.size) if flat.size <= VALUES else random.randint(0, flat.size, VALUES)
    signs = random.randint(0, 2, (SUMS, flat.size)) * 2 - 1
    return flat[places], signs @ flat
