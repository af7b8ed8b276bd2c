// A dense layer with bias and activation for few rows: a warp computes one unit, and reads its
// weights once for up to ROWS rows.
//
// x:      SCALAR (n, I), 16-byte aligned
// weight: SCALAR (U, I), likewise
// bias:   BIAS (U), float or __half
// y:      SCALAR (n, U); the units from UNITS on become 0
//
// Macros: SCALAR, BIAS; I, a multiple of LANES; U, a multiple of 4; UNITS; ROWS; ACTIVATION,
// PARAMETER. Grid: U / 4 by ceil(n / ROWS). 128 threads.

#include "activation.cuh"
#include "vector.cuh"

static_assert(I % LANES == 0 && U % 4 == 0 && UNITS <= U, "rows of whole vectors, four warps");
static_assert(ROWS <= WARP, "a lane writes one row");

extern "C" __global__ void __launch_bounds__(128, 4)
    dense(const SCALAR* __restrict__ x, const SCALAR* __restrict__ weight,
          const BIAS* __restrict__ bias, SCALAR* __restrict__ y, int n) {
    const int lane = threadIdx.x % WARP, unit = blockIdx.x * 4 + threadIdx.x / WARP;
    const int first = blockIdx.y * ROWS;
    float sums[ROWS] = {};
#pragma unroll 2
    for (int k = lane * LANES; k < I; k += WARP * LANES) {
        float weights[LANES], values[ROWS][LANES];
        load(weight + static_cast<size_t>(unit) * I + k, weights);
        for (int row = 0; row < ROWS; ++row) {
            const size_t source = min(first + row, n - 1);  // rows from n on: not written
            load(x + source * I + k, values[row]);
        }
        for (int row = 0; row < ROWS; ++row)
            for (int j = 0; j < LANES; ++j) sums[row] += values[row][j] * weights[j];
    }
    float own = 0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        for (int distance = WARP / 2; distance > 0; distance /= 2)
            sums[row] += __shfl_xor_sync(~0u, sums[row], distance);
        if (lane == row) own = sums[row];
    }
    if (lane < ROWS && first + lane < n)
        y[static_cast<size_t>(first + lane) * U + unit] =
            unit < UNITS ? Activation::value(own + static_cast<float>(bias[unit])) : 0;
}
