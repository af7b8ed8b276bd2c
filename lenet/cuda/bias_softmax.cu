// The end of the last layer, behind a product of cuBLAS: bias, softmax.
//
// x:                      float (n, PITCH), of which CLASSES columns are read
// bias:                   float (CLASSES)
// logits, probabilities:  float (n, CLASSES); each row of probabilities sums to 1
//
// A warp computes a row. A NaN makes its row NaN. Macros: PITCH, CLASSES. Threads: 128. Grid: any
// number of blocks, fastest with a warp for each row.

#include "softmax.cuh"

static_assert(CLASSES <= PITCH, "each class has a column");

extern "C" __global__ void __launch_bounds__(128)
    bias_softmax(const float* __restrict__ x, const float* __restrict__ bias,
                 float* __restrict__ logits, float* __restrict__ probabilities, int n) {
    const int lane = threadIdx.x % WARP;
    float biases[LANE_CLASSES];
    for (int k = 0; k < LANE_CLASSES; ++k)
        biases[k] = k * WARP + lane < CLASSES ? bias[k * WARP + lane] : 0;
    const int warps = gridDim.x * blockDim.x / WARP;
    for (int row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; row < n; row += warps) {
        float own[LANE_CLASSES];
        for (int k = 0; k < LANE_CLASSES; ++k)
            own[k] = k * WARP + lane < CLASSES
                         ? x[static_cast<size_t>(row) * PITCH + k * WARP + lane] + biases[k]
                         : -CUDART_INF_F;
        const size_t offset = static_cast<size_t>(row) * CLASSES;
        write_row(own, lane, logits + offset, probabilities + offset);
    }
}
