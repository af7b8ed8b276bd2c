"""A network with random moments, with batch norm and folded."""

import numpy as np

from lenet import reference
from lenet.model import named
from trainer.export import fold
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps

model, random = named("lenet"), np.random.default_rng(0)
images = random.integers(0, 256, (8, 28, 28), np.uint8)
for dtype, most in ((np.float64, 1e-12), (np.float32, 1e-4)):
    tensors = initial_tensors(model, random, dtype)
    for name, tensor in tensors.items():
        if name.endswith((".gamma", ".variance")):
            tensor[:] = random.uniform(0.5, 2, tensor.shape)
        elif name.endswith((".beta", ".mean")):
            tensor[:] = random.normal(0, 0.5, tensor.shape)
    trained = Network(model, tensors, CpuOps(dtype)).logits(images)
    served = reference.logits(model.folded, fold(model, tensors), images)
    difference = np.abs(served - trained).max() / np.abs(trained).max()
    print(f"{np.dtype(dtype).name}: {difference:.1e} of the largest logit")
    assert difference < most
