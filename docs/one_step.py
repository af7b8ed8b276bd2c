"""Twenty steps of training, and one more between the start and the stop of a profiler."""

import cupy
import numpy as np

from lenet.cuda.engine_cache import EngineCache, default_cache
from lenet.model import named
from trainer.loop import run_of
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors, take_step
from trainer.ops_cuda.ops import CudaOps
from trainer.optimizer import Sgd
from trainer.settings import Recipe

random = np.random.default_rng(0)
images = random.integers(0, 256, (60_000, 28, 28), np.uint8)
digits = Digits(images, random.integers(0, 10, 60_000).astype(np.uint8))
recipe = Recipe(precision="mixed").resolved("cuda")
model = named("lenet")
with CudaOps("mixed", cache=EngineCache(default_cache())) as ops:
    network = Network(model, initial_tensors(model, random), ops)
    optimizer = Sgd(model, network.parameters, ops, recipe.momentum, recipe.weight_decay)
    state = ops.start(run_of(recipe, digits))
    for _ in range(20):  # the first of them makes engines, kernels and buffers
        take_step(network, optimizer, state)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.profilerStart()
    take_step(network, optimizer, state)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.profilerStop()
