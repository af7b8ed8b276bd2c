// Pixels to the first layer's input, for networks whose first block `conv1.cu` cannot compute.
//
// images: uint8 (rows, 28, 28), x: SCALAR likewise; both 16-byte aligned. A pixel is stored as its
// value times SCALE. Serving uses 1 / 256: exact in half, and the weights times 256 / 255 stay
// clear of the subnormals. Training uses 1 / 255.
//
// Macros: SCALAR, float or __half; SCALE. Grid: a thread takes 16 pixels.

#include "vector.cuh"

#ifndef SCALE
#define SCALE (1 / 256.0f)
#endif

constexpr int SIDE = 28, RUN = 16;

extern "C" __global__ void unpack(const uint8* __restrict__ images, SCALAR* __restrict__ x,
                                  int rows) {
    const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * RUN;
    if (first >= static_cast<size_t>(rows) * SIDE * SIDE) return;
    alignas(16) uint8 pixels[RUN];
    *reinterpret_cast<uint4*>(pixels) = *reinterpret_cast<const uint4*>(images + first);
#pragma unroll
    for (int part = 0; part < RUN; part += LANES) {
        float values[LANES];
        for (int k = 0; k < LANES; ++k) values[k] = pixels[part + k] * SCALE;
        store(x + first + part, values);
    }
}
