"""A forward pass in JAX: one function compiled by XLA, with JAX's own cuDNN and cuBLAS.

The work is that of `benchmarks.baselines.torch_serving`: uint8 (n, 28, 28) on the device to float32
probabilities there, 1/255 folded into the first layer, and only a pass whose probabilities agree
with the reference is timed. This project does not depend on JAX.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.torch_serving import Precision, check
from benchmarks.baselines.torch_training import BaselineUnavailable
from benchmarks.command import missing_library
from benchmarks.timing import Call, rounds_us, summary
from lenet.model import Activation, ConvBlock, Pool
from lenet.pixels import SCALE, Images
from lenet.weightfile import WeightFile

_PRODUCTS: dict[Precision, str] = {"fp16": "default", "tf32": "tensorfloat32", "fp32": "float32"}
"""JAX's names of how it multiplies."""


def measure(
    weights: WeightFile,
    images: Images,
    expected: NDArray[np.float64],
    precision: Precision,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time a pass over `images`, uint8 (n, 28, 28), whose probabilities are `expected`.

    Calls are queued one behind the other; where queuing takes longer than computing, that is the
    time.

    Returns: `jit_us`, the median of the rounds, and `jit_spread_us`, their [minimum, maximum].

    Raises:
        BaselineUnavailable: no JAX or no GPU.
        WrongAnswer: it computes other probabilities.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others are on the GPU, too
    try:
        jax = importlib.import_module("jax")
        device = jax.devices("gpu")[0]
    except ImportError as exc:
        raise BaselineUnavailable(missing_library(exc)) from exc
    except RuntimeError as exc:
        raise BaselineUnavailable(f"JAX has no GPU: {exc}") from exc
    start_s = time.monotonic()
    with jax.default_device(device), jax.default_matmul_precision(_PRODUCTS[precision]):
        forward = forward_pass(jax, weights, images, precision)
        check(lambda: np.asarray(forward()), expected, precision)
        times_us = rounds_us(forward, _timer)
    took_s = time.monotonic() - start_s
    report(f"JAX, {precision}, {len(images)} rows: {min(times_us):.1f} us at best, {took_s:.0f} s")
    return summary("jit", times_us)


def forward_pass(
    jax: Any, weights: WeightFile, images: Images, precision: Precision
) -> Callable[[], Any]:
    """A compiled pass of the network over `images`; returns the probabilities on the device."""
    jnp, model = jax.numpy, weights.model
    dtype = jnp.float16 if precision == "fp16" else jnp.float32
    first = next(iter(weights.tensors))
    tensors = {
        name: jnp.asarray(tensor * np.float32(SCALE if name == first else 1), dtype)
        for name, tensor in weights.tensors.items()
    }
    pixels = jnp.asarray(images)

    def probabilities(tensors: Any, pixels: Any) -> Any:
        x = pixels.astype(dtype).reshape(-1, *model.input)
        for block, shape in zip(model.blocks, model.shapes(), strict=True):
            weight, bias = (tensors[f"{shape.name}.{kind}"] for kind in ("weight", "bias"))
            if isinstance(block, ConvBlock):
                padding = [(side, side) for side in block.padding]
                x = jax.lax.conv_general_dilated(
                    x, weight, block.stride, padding, rhs_dilation=block.dilation
                )
                x = _activated(jax, x + bias[:, None, None], block.activation)
                x = x if block.pool is None else _pooled(jax, x, block.pool)
            else:
                x = _activated(jax, x.reshape(len(x), -1) @ weight.T + bias, block.activation)
        return jax.nn.softmax(x.astype(jnp.float32))

    compiled = jax.jit(probabilities)
    return lambda: compiled(tensors, pixels)


def _activated(jax: Any, x: Any, activation: Activation) -> Any:
    parameter = activation.parameter
    functions: dict[str, Callable[[], Any]] = {
        "identity": lambda: x,
        "relu": lambda: jax.nn.relu(x),
        "clipped_relu": lambda: jax.numpy.clip(x, 0, parameter),
        "elu": lambda: jax.nn.elu(x, parameter),
        "sigmoid": lambda: jax.nn.sigmoid(x),
        "tanh": lambda: jax.numpy.tanh(x),
    }
    return functions[activation.kind]()


def _pooled(jax: Any, x: Any, pool: Pool) -> Any:
    if pool.kind == "global_average":
        return x.mean((2, 3), keepdims=True)
    window, stride = (1, 1, *pool.size), (1, 1, *pool.stride)
    padding = [(0, 0), (0, 0), *((side, side) for side in pool.padding)]
    if pool.kind == "max":
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, stride, padding)
    sums = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, stride, padding)
    return sums / (pool.size[0] * pool.size[1])


def _timer(call: Call, count: int) -> float:
    start_s = time.perf_counter()
    last: Any = None
    for _ in range(count):
        last = call()
    last.block_until_ready()
    return 1e6 * (time.perf_counter() - start_s)
