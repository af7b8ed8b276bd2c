"""An LSTM made of two matrix products per time step and layer, with a kernel of its own for gates.

What one writes without an RNN interface: each product waits for the one before it, reads all its
weights again, and at a batch of 32 uses a small part of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from benchmarks.recurrent.cudnn import Precision
from benchmarks.recurrent.reference import Layer
from lenet.cuda.device import Handle

_SOURCE = r"""
#include <cuda_fp16.h>
__device__ float logistic(float x) { return 1.f / (1.f + expf(-x)); }

// One thread a unit and row. `gates`: the sum of both products becomes i, f, g, o for `backward`.
extern "C" __global__ void step(const SCALAR* wx, const SCALAR* rh, const SCALAR* bias,
    const SCALAR* c_before, SCALAR* c, SCALAR* h, SCALAR* gates, int hidden, int size) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const int row = index / hidden, unit = index % hidden, start = row * 4 * hidden + unit;
  float sum[4];
  for (int gate = 0; gate < 4; ++gate) {
    const int at = start + gate * hidden;
    sum[gate] = float(wx[at]) + float(rh[at]) + float(bias[gate * hidden + unit]);
  }
  const float i = logistic(sum[0]), f = logistic(sum[1]), g = tanhf(sum[2]), o = logistic(sum[3]);
  const float cell = f * float(c_before[index]) + i * g;
  c[index] = cell;
  h[index] = o * tanhf(cell);
  if (gates) {
    gates[start] = i;
    gates[start + hidden] = f;
    gates[start + 2 * hidden] = g;
    gates[start + 3 * hidden] = o;
  }
}

// `dh` is the gradient by the step after, `dy` that of the output; `dc` changes in place.
extern "C" __global__ void step_backward(const SCALAR* gates, const SCALAR* c_before,
    const SCALAR* c, const SCALAR* dy, const SCALAR* dh, float* dc, SCALAR* dgates, int hidden,
    int size) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const int row = index / hidden, unit = index % hidden, start = row * 4 * hidden + unit;
  const float i = gates[start], f = gates[start + hidden], g = gates[start + 2 * hidden],
              o = gates[start + 3 * hidden];
  const float given = float(dy[index]) + float(dh[index]), squashed = tanhf(float(c[index]));
  const float cell = dc[index] + given * o * (1 - squashed * squashed);
  dgates[start] = cell * g * i * (1 - i);
  dgates[start + hidden] = cell * float(c_before[index]) * f * (1 - f);
  dgates[start + 2 * hidden] = cell * i * (1 - g * g);
  dgates[start + 3 * hidden] = given * squashed * o * (1 - o);
  dc[index] = cell * f;
}
"""
_THREADS = 256


class EmulatedLstm:
    """`layers` on the GPU, for `steps` of `batch` rows; arrays are float32, or float16 in fp16."""

    def __init__(
        self,
        handle: Handle,
        layers: Sequence[Layer],
        steps: int,
        batch: int,
        precision: Precision,
        *,
        training: bool = False,
    ) -> None:
        self._product, self._precision = handle.cublas.product, precision
        self.dtype = dtype = np.dtype(np.float16 if precision == "fp16" else np.float32)
        scalar = "__half" if precision == "fp16" else "float"
        module = cupy.RawModule(code=_SOURCE, options=(f"-DSCALAR={scalar}",))
        self._step, self._step_backward = map(module.get_function, ("step", "step_backward"))
        self._layers = [
            Layer(
                *(cupy.asarray(np.ascontiguousarray(part, dtype)) for part in (one.w, one.r, one.b))
            )
            for one in layers
        ]
        self._steps, self._batch, self._hidden = steps, batch, layers[0].r.shape[1]
        gate_shape, state_shape = (batch, 4 * self._hidden), (batch, self._hidden)
        self._wx, self._rh = (cupy.empty(gate_shape, dtype) for _ in range(2))
        count = len(layers)
        self._outputs = cupy.empty((count, steps + 1, *state_shape), dtype)
        """For each layer, the state before the first step, then its outputs."""
        self._cells = cupy.empty((count, steps + 1, *state_shape), dtype)
        self._training = training
        if training:
            self._gates = cupy.empty((count, steps, *gate_shape), dtype)
            self._dgates = cupy.empty((steps, *gate_shape), dtype)
            self._dx = [cupy.empty((steps, batch, one.w.shape[1]), dtype) for one in layers]
            self._ones = cupy.ones((1, steps * batch), dtype)
            self._dh, self._dc = cupy.empty(state_shape, dtype), cupy.empty(state_shape, np.float32)
            self._given = [
                Layer(*(cupy.empty_like(part) for part in (one.w, one.r, one.b)))
                for one in self._layers
            ]

    @property
    def y(self) -> Any:
        """Outputs of the last layer (t, n, h)."""
        return self._outputs[-1, 1:]

    @property
    def h(self) -> Any:
        """Final outputs of each layer (l, n, h)."""
        return self._outputs[:, -1]

    @property
    def c(self) -> Any:
        """Final cells of each layer (l, n, h)."""
        return self._cells[:, -1]

    @property
    def dx(self) -> Any:
        """The gradient of the input after `backward`."""
        return self._dx[0]

    def forward(self, x: Any, h: Any, c: Any) -> None:
        """Queue the pass of x (t, n, inputs) from the states (l, n, h)."""
        self._outputs[:, 0], self._cells[:, 0] = h, c
        for number, layer in enumerate(self._layers):
            outputs, cells = self._outputs[number], self._cells[number]
            for step in range(self._steps):
                self._product(x[step], layer.w, self._wx, self._precision, transpose_b=True)
                self._product(outputs[step], layer.r, self._rh, self._precision, transpose_b=True)
                gates = self._gates[number, step] if self._training else np.uintp(0)
                self._launch(
                    self._step,
                    self._wx,
                    self._rh,
                    layer.b,
                    cells[step],
                    cells[step + 1],
                    outputs[step + 1],
                    gates,
                )
            x = outputs[1:]

    def backward(self, x: Any, dy: Any) -> None:
        """Queue the gradients of x and of the weights, for `dy` (t, n, h)."""
        for number in reversed(range(len(self._layers))):
            layer, given = self._layers[number], self._given[number]
            outputs, cells = self._outputs[number], self._cells[number]
            dx = self._dx[number]
            self._dh.fill(0)
            self._dc.fill(0)
            for step in reversed(range(self._steps)):
                dgates = self._dgates[step]
                self._launch(
                    self._step_backward,
                    self._gates[number, step],
                    cells[step],
                    cells[step + 1],
                    dy[step],
                    self._dh,
                    self._dc,
                    dgates,
                )
                self._product(dgates, layer.r, self._dh, self._precision)
                self._product(dgates, layer.w, dx[step], self._precision)
            # The weights' gradients of all steps are one product each.
            rows = self._dgates.reshape(-1, 4 * self._hidden)
            source = x if number == 0 else self._outputs[number - 1, 1:]
            self._product(
                rows, source.reshape(len(rows), -1), given.w, self._precision, transpose_a=True
            )
            self._product(
                rows,
                outputs[:-1].reshape(len(rows), -1),
                given.r,
                self._precision,
                transpose_a=True,
            )
            self._product(self._ones, rows, given.b.reshape(1, -1), self._precision)
            dy = dx

    def gradients(self) -> list[Layer]:
        """Host copies of the weights' gradients after `backward`."""
        return [Layer(*(part.get() for part in (one.w, one.r, one.b))) for one in self._given]

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        size = self._batch * self._hidden
        blocks = -(-size // _THREADS)
        kernel((blocks,), (_THREADS,), (*arguments, np.int32(self._hidden), np.int32(size)))
