// The last layer of a network: matrix product, bias, softmax.
//
// x:                      SCALAR (n, I), 16-byte aligned
// weight:                 SCALAR (at least CLASSES, I), 16-byte aligned; further rows are not read
// bias:                   float (CLASSES)
// logits, probabilities:  float (n, CLASSES); each row of probabilities sums to 1
//
// A warp computes ROWS rows at a time, so that each weight it loads is used for all of them. The
// result of a row does not depend on ROWS, on the grid or on other rows. A NaN makes its row NaN.
//
// Macros: SCALAR, I (a multiple of 8), CLASSES, ROWS (1 for small n, 2 for some thousands; a thread
// has ROWS CLASSES sums in registers).
// Threads: a multiple of 32, at most 128. Grid: any number of blocks, fastest with a warp for each
// ROWS rows.
// (The 3 in the launch bounds: without it nvcc 13.0 uses only 64 registers.)

#include "softmax.cuh"
#include "vector.cuh"

constexpr int VECTORS = I / LANES;

static_assert(I % 8 == 0, "inputs are padded to a multiple of 8");
static_assert(ROWS * CLASSES <= 64, "a thread has the sums of all classes");

extern "C" __global__ void __launch_bounds__(128, 3)
    dense_softmax(const SCALAR* __restrict__ x, const SCALAR* __restrict__ weight,
                  const float* __restrict__ bias, float* __restrict__ logits,
                  float* __restrict__ probabilities, int n) {
    const int lane = threadIdx.x % WARP;
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int warps = gridDim.x * blockDim.x / WARP;
    float biases[LANE_CLASSES];
#pragma unroll
    for (int k = 0; k < LANE_CLASSES; ++k)
        biases[k] = k * WARP + lane < CLASSES ? bias[k * WARP + lane] : 0;
    for (int first_row = warp * ROWS; first_row < n; first_row += warps * ROWS) {
        float sums[ROWS][CLASSES] = {};
#pragma unroll(CLASSES > WARP ? 1 : 2)
        for (int vector = lane; vector < VECTORS; vector += WARP) {
            float values[ROWS][LANES];
            for (int row = 0; row < ROWS; ++row) {
                const size_t source = min(first_row + row, n - 1);  // rows from n on: not written
                load(x + source * I + vector * LANES, values[row]);
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
            float own[LANE_CLASSES];
#pragma unroll
            for (int k = 0; k < LANE_CLASSES; ++k) own[k] = -CUDART_INF_F;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                float sum = sums[row][k];
                for (int distance = WARP / 2; distance > 0; distance /= 2)
                    sum += __shfl_xor_sync(~0u, sum, distance);
                if (lane == k % WARP) own[k / WARP] = sum + biases[k / WARP];
            }
            const size_t offset = static_cast<size_t>(first_row + row) * CLASSES;
            if (first_row + row < n) write_row(own, lane, logits + offset, probabilities + offset);
        }
    }
}
