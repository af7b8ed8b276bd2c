"""A network as Keras computes it, in NumPy, and the same network after the import."""

import numpy as np

from lenet import reference
from lenet.model import named
from trainer.importing import converted, matched, read_source

random = np.random.default_rng(0)
shapes = {
    "conv2d": (5, 5, 1, 6),
    "conv2d_1": (5, 5, 6, 16),
    "dense": (256, 120),
    "dense_1": (120, 10),
}
arrays = {}
for name, shape in shapes.items():
    arrays[f"{name}/kernel"] = random.normal(0, np.prod(shape[:-1]) ** -0.5, shape)
    arrays[f"{name}/bias"] = random.normal(0, 0.1, shape[-1])
kernels, biases = list(arrays.values())[::2], list(arrays.values())[1::2]
images = random.integers(0, 256, (4, 28, 28), np.uint8)

x = images[..., np.newaxis] / 255.0  # n, h, w, c
for kernel, bias in zip(kernels[:2], biases[:2], strict=True):
    view = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))
    x = np.maximum(np.einsum("nijcrs,rsck->nijk", view, kernel) + bias, 0)
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
x = np.maximum(x.reshape(4, -1) @ kernels[2] + biases[2], 0)  # flattened h, w, c
by_keras = x @ kernels[3] + biases[3]

source = read_source(named("lenet-6-16").to_json())
found = matched(arrays, source, "keras")
tensors = converted(arrays, found, source, "keras", epsilon=1e-3)
ours = reference.logits(source.model, tensors, images)
print(f"imported: {np.abs(ours - by_keras).max():.1e}")
assert np.abs(ours - by_keras).max() < 1e-5

# Without the order of the flattened image:
tensors["dense1.weight"] = kernels[2].T.astype(np.float32)
wrong = reference.logits(source.model, tensors, images)
print(f"only transposed: {np.abs(wrong - by_keras).max():.1e}")
assert np.abs(wrong - by_keras).max() > 0.01
