// What the kernels of epilogue.cu share: the constants that follow from its macros, how a thread walks
// over channels and pixels, the normalisation, the taps of a window, the sum over a grid.

#pragma once
#include "activation.cuh"
#include "vector.cuh"

#ifndef EPSILON
#define EPSILON 1e-5f
#endif
#ifndef RUNNING_SHARE
#define RUNNING_SHARE 0.1f
#endif
#ifndef INDEX
#define INDEX uint8
#endif

enum Pooling { NONE, MAX, AVERAGE };
constexpr Pooling POOLING = POOL;

static_assert(C % 8 == 0 && CHANNELS <= C, "channels are padded to a multiple of 8");
static_assert(POOLING != NONE || (OH == H && OW == W && WINDOW_H * WINDOW_W == 1), "no pooling");
static_assert(WINDOW_H * WINDOW_W <= 1 << 8 * sizeof(INDEX), "a tap must fit into INDEX");

constexpr int VECTORS = C / LANES;
constexpr int TILE = VECTORS < 3 ? VECTORS : 4;  // 1, 2 or 4, so that a warp splits evenly
constexpr int TILE_CHANNELS = TILE * LANES;
constexpr int MAX_SUM_THREADS = 512;

constexpr int AREA = WINDOW_H * WINDOW_W;
// Of a single window the stride has no meaning; this one says that no two windows overlap.
constexpr int STEP_H = OH == 1 ? WINDOW_H : STRIDE_H, STEP_W = OW == 1 ? WINDOW_W : STRIDE_W;
// How many windows can cover a pixel, along each axis: one, where they do not overlap.
constexpr int COVER_H = (WINDOW_H + STEP_H - 1) / STEP_H;
constexpr int COVER_W = (WINDOW_W + STEP_W - 1) / STEP_W;
constexpr bool ALL_INSIDE = PAD_H == 0 && PAD_W == 0 && (OH - 1) * STEP_H + WINDOW_H <= H &&
                            (OW - 1) * STEP_W + WINDOW_W <= W;
constexpr int UNROLL_H = WINDOW_H <= 4 ? WINDOW_H : 1, UNROLL_W = WINDOW_W <= 4 ? WINDOW_W : 4;

// Which LANES channels a thread has, where it starts among the pixels, and how far it steps.
struct Walk {
    int channel = (blockIdx.y * TILE + threadIdx.x % TILE) * LANES;
    int pixel = (blockIdx.x * blockDim.x + threadIdx.x) / TILE;
    int step = gridDim.x * blockDim.x / TILE;
    __device__ Walk() {}
};

// The normalisation of a thread's channels, in registers: z = centred scale + beta, and the normal
// value is centred inverse. The mean is taken off first: where it is far larger than the deviation,
// x scale + shift would cancel. Without NORM a value is its own centred one.
struct Normalization {
    float mean[LANES], inverse[LANES], scale[LANES], beta[LANES];

    __device__ Normalization(int channel, const float* means, const float* variances,
                             const float* gammas, const float* betas) {
        load_floats(betas + channel, beta);
        if (!NORM) return;
        load_floats(means + channel, mean);
        load_floats(variances + channel, inverse);
        load_floats(gammas + channel, scale);
        for (int k = 0; k < LANES; ++k) {
            inverse[k] = rsqrtf(inverse[k] + EPSILON);
            scale[k] *= inverse[k];
        }
    }
    __device__ float centred(int k, float x) const { return NORM ? x - mean[k] : x; }
    __device__ float z(int k, float centred) const {
        return NORM ? centred * scale[k] + beta[k] : centred + beta[k];
    }
};

// Where pixel (i, j) of image `row` begins, in elements.
__device__ inline size_t input_at(int row, int i, int j) {
    return static_cast<size_t>((row * H + i) * W + j) * C;
}

// Calls visit(tap, offset of the pixel in x) for each tap inside the image of output pixel `out`.
template <typename Visit>
__device__ inline void for_each_tap(int out, Visit visit) {
    const int row = out / (OH * OW), top = out / OW % OH * STEP_H - PAD_H;
    const int left = out % OW * STEP_W - PAD_W;
#pragma unroll UNROLL_H
    for (int r = 0; r < WINDOW_H; ++r) {
#pragma unroll UNROLL_W
        for (int s = 0; s < WINDOW_W; ++s) {
            const int i = top + r, j = left + s;
            if (ALL_INSIDE || (i >= 0 && i < H && j >= 0 && j < W))
                visit(r * WINDOW_W + s, input_at(row, i, j));
        }
    }
}

// Adds `values` over the threads of all blocks of this tile, into sums (PLANES, C).
//
// Within a warp, over the warps, over the blocks: always in the same order for the same grid. True
// in the threads of the block that finished, where the sums of its channels can then be read.
// partial: gridDim.x gridDim.y PLANES TILE_CHANNELS floats; counters: gridDim.y zeros, left so.
template <int PLANES>
__device__ bool sum_over_grid(float (&values)[PLANES][LANES], float* partial, unsigned* counters,
                              float* sums) {
    constexpr int VALUES = PLANES * TILE_CHANNELS;
    __shared__ float shared[MAX_SUM_THREADS / WARP][VALUES];
    __shared__ float grouped[MAX_SUM_THREADS];
    const int thread = threadIdx.x, lane = thread % WARP;
    for (int plane = 0; plane < PLANES; ++plane) {
        for (int k = 0; k < LANES; ++k) {
            float& value = values[plane][k];
#pragma unroll
            for (int apart = WARP / 2; apart >= TILE; apart /= 2)
                value += __shfl_xor_sync(~0u, value, apart);
            if (lane < TILE)
                shared[thread / WARP][plane * TILE_CHANNELS + lane * LANES + k] = value;
        }
    }
    __syncthreads();
    float* mine = partial + blockIdx.y * gridDim.x * VALUES;
    if (thread < VALUES) {
        float sum = 0;
        for (int warp = 0; warp < blockDim.x / WARP; ++warp) sum += shared[warp][thread];
        mine[blockIdx.x * VALUES + thread] = sum;
    }
    if (!last_block(counters + blockIdx.y, gridDim.x)) return false;

    const int groups = blockDim.x / VALUES, value = thread % VALUES;
    const int end = gridDim.x * VALUES;
    float sum = strided_sum(mine, thread / VALUES * VALUES + value, end, groups * VALUES);
    grouped[thread] = sum;
    __syncthreads();
    const int channel = blockIdx.y * TILE_CHANNELS + thread % TILE_CHANNELS;
    if (thread < VALUES && channel < C) {
        for (int group = 1; group < groups; ++group) sum += grouped[group * VALUES + thread];
        sums[thread / TILE_CHANNELS * C + channel] = channel < CHANNELS ? sum : 0;
    }
    __syncthreads();
    return true;
}
