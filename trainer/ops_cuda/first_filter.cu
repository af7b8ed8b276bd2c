// The gradient of the first convolution's filter: for each of a channel's R x S taps, the sum over
// all images and output pixels of dy times the tap's input pixel.
//
//     dweight[c][r][s] = sum dy[n][i][j][c] x[n][i STRIDE_H + r DILATION_H - PAD_H][j ...]
//
// With one input channel the matrix product is too narrow, and cuDNN is slow at it. Here a lane is
// a channel and keeps all its taps in registers; a warp takes a row of the output, for which all
// lanes read the same input pixels from shared memory.
//
// x: SCALAR (rows, H, W); dy: SCALAR (rows, OH, OW, C); dweight: float (C, R, S).
// Grid: any number of blocks, best one for each 2 images up to about one a multiprocessor, by
// ceil(C / 32); 512 threads.
// partial: gridDim.x gridDim.y R S 32 floats;
// counters: (ceil(gridDim.x / 16) + 1) gridDim.y zeros, reset to 0.
// The sums have the same order whenever the grid is the same. (The 1 in the launch bounds: without
// it nvcc 13.0 uses only 64 registers and spills.)
// rows H W and rows OH OW < 2^31.
//
// Macros: SCALAR, R, S, C, H, W, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W.

#include "vector.cuh"
#include "reduce.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP;
constexpr int IMAGES = 2;   // that a block processes at a time: enough rows for its warps
constexpr int COLUMNS = 8;  // of the output that a warp processes at a time
constexpr int GROUP = 16;   // blocks whose sums are added first, in parallel with other groups
constexpr int VALUES = R * S * WARP;

__host__ __device__ constexpr int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The input pixels of COLUMNS outputs of a row, for a row of the filter, rounded up to float4.
constexpr int SPAN = round_up((COLUMNS - 1) * STRIDE_W + (S - 1) * DILATION_W + 1, 4);
// The padded image, as far as the filter reaches, with room for a whole SPAN at the right.
constexpr int REACH_H = (OH - 1) * STRIDE_H + (R - 1) * DILATION_H + 1;
constexpr int PITCH = (round_up(OW, COLUMNS) - COLUMNS) * STRIDE_W + SPAN;

static_assert(R * S <= 49, "each thread keeps the whole filter in registers");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    first_filter_gradient(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
                          float* partial, unsigned* counters, float* __restrict__ dweight,
                          int rows) {
    __shared__ alignas(16) float images[IMAGES][REACH_H][PITCH];
    __shared__ float by_warp[WARPS][S][WARP];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int channel = blockIdx.y * WARP + lane;
    float sums[R][S] = {};

    for (int first = blockIdx.x * IMAGES; first < rows; first += gridDim.x * IMAGES) {
        const int count = min(IMAGES, rows - first);
        __syncthreads();
        for (int at = thread; at < count * REACH_H * PITCH; at += THREADS) {
            const int image = at / (REACH_H * PITCH);
            const int i = at / PITCH % REACH_H - PAD_H, j = at % PITCH - PAD_W;
            const bool inside = i >= 0 && i < H && j >= 0 && j < W;
            images[0][0][at] =
                inside ? static_cast<float>(x[((first + image) * H + i) * W + j]) : 0;
        }
        __syncthreads();
        for (int task = warp; task < count * OH; task += WARPS) {
            const int image = task / OH, i = task % OH;
            const SCALAR* gradient =
                dy + static_cast<size_t>(((first + image) * OH + i) * OW) * C + channel;
            for (int left = 0; left < OW; left += COLUMNS) {
                float d[COLUMNS];
                for (int j = 0; j < COLUMNS; ++j)
                    d[j] = left + j < OW && channel < C
                               ? static_cast<float>(gradient[(left + j) * C])
                               : 0;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    float span[SPAN];
                    const float* from =
                        &images[image][i * STRIDE_H + r * DILATION_H][left * STRIDE_W];
#pragma unroll
                    for (int k = 0; k < SPAN; k += 4) {
                        const float4 four = *reinterpret_cast<const float4*>(from + k);
                        span[k] = four.x, span[k + 1] = four.y;
                        span[k + 2] = four.z, span[k + 3] = four.w;
                    }
#pragma unroll
                    for (int s = 0; s < S; ++s) {
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j)
                            sums[r][s] += d[j] * span[j * STRIDE_W + s * DILATION_W];
                    }
                }
            }
        }
    }

    // Sum over the warps of the block, a row of the filter at a time.
    float* const slots = partial + blockIdx.y * gridDim.x * VALUES;
    float* const mine = slots + blockIdx.x * VALUES;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        __syncthreads();
        for (int s = 0; s < S; ++s) by_warp[warp][s][lane] = sums[r][s];
        __syncthreads();
        for (int value = thread; value < S * WARP; value += THREADS) {
            float sum = 0;
            for (int other = 0; other < WARPS; ++other) sum += by_warp[other][0][value];
            mine[r * S * WARP + value] = sum;
        }
    }

    // Sum over the blocks: the last block of each group to finish writes the group's sum into the
    // slot of its first block; the last group to finish adds these.
    const int group = blockIdx.x / GROUP, groups = (gridDim.x + GROUP - 1) / GROUP;
    const int members = min(GROUP, gridDim.x - group * GROUP);
    unsigned* const counter = counters + blockIdx.y * (groups + 1);
    if (!last_block(counter + 1 + group, members)) return;
    float* const slot = slots + group * GROUP * VALUES;
    for (int value = thread; value < VALUES; value += THREADS)
        slot[value] = strided_sum(slot, value, members * VALUES, VALUES);
    if (!last_block(counter, groups)) return;
    for (int value = thread; value < VALUES; value += THREADS) {
        const int to = blockIdx.y * WARP + value % WARP;
        if (to < C)
            dweight[to * R * S + value / WARP] =
                strided_sum(slots, value, gridDim.x * VALUES, GROUP * VALUES);
    }
}
