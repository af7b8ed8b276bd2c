// The last layer of a network: matrix product, bias, softmax.
//
// x:                      SCALAR (n, I), 16-byte aligned
// weight:                 SCALAR (at least CLASSES, I), 16-byte aligned; further rows are not read
// bias:                   float (CLASSES)
// logits, probabilities:  float (n, CLASSES); each row of probabilities sums to 1
//
// A warp takes ROWS rows at a time, so that each weight it loads serves all of them. A row's
// numbers do not depend on ROWS, on the grid or on its neighbours. A NaN makes its row NaN.
//
// Macros: SCALAR, I (a multiple of 8), CLASSES, ROWS (1 for small n, 2 from some thousands on).
// Threads: a multiple of 32, at most 128. Grid: any number of blocks, best a warp for each ROWS
// rows.
// (The 3 in the launch bounds: left alone, nvcc 13.0 squeezes the kernel into 64 registers.)

#include <math_constants.h>
#include "softmax.cuh"
#include "vector.cuh"

constexpr int VECTORS = I / LANES;

static_assert(I % 8 == 0, "inputs are padded to a multiple of 8");
static_assert(CLASSES <= WARP, "a lane writes a class");

extern "C" __global__ void __launch_bounds__(128, 3)
last_dense_softmax(const SCALAR* __restrict__ x, const SCALAR* __restrict__ weight,
                   const float* __restrict__ bias, float* __restrict__ logits,
                   float* __restrict__ probabilities, int n) {
    const int lane = threadIdx.x % WARP;
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int warps = gridDim.x * blockDim.x / WARP;
    const float own_bias = lane < CLASSES ? bias[lane] : 0;
    for (int first = warp * ROWS; first < n; first += warps * ROWS) {
        float sums[ROWS][CLASSES] = {};
#pragma unroll 2
        for (int vector = lane; vector < VECTORS; vector += WARP) {
            float values[ROWS][LANES];
            for (int row = 0; row < ROWS; ++row) {
                const size_t from = min(first + row, n - 1);  // beyond the end: not written
                load(x + from * I + vector * LANES, values[row]);
            }
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                float weights[LANES];
                load(weight + k * I + vector * LANES, weights);
#pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    for (int v = 0; v < LANES; ++v) sums[row][k] += values[row][v] * weights[v];
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float logit = -CUDART_INF_F;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                float sum = sums[row][k];
                for (int apart = WARP / 2; apart > 0; apart /= 2)
                    sum += __shfl_xor_sync(~0u, sum, apart);
                if (lane == k) logit = sum + own_bias;
            }
            const float share = softmax(logit);
            if (lane < CLASSES && first + row < n) {
                const size_t to = static_cast<size_t>(first + row) * CLASSES + lane;
                logits[to] = logit;
                probabilities[to] = share;
            }
        }
    }
}
