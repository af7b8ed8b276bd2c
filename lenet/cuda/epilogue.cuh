// What the kernels of epilogue.cu and of training's epilogue_backward.cu share: constants, how a
// thread walks over channels and pixels, the normalization, the taps of a window.
//
// Macros: SCALAR, float or __half; C channels in memory, CHANNELS of them real, the others are
// written as 0; H, W, OH, OW; WINDOW_H, WINDOW_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W; POOL: NONE
// (window 1, stride 1), MAX (padding is never the maximum) or AVERAGE (padding counts as zeros; a
// global average has the window H, W); NORM: 0 or 1; ACTIVATION and its PARAMETER; EPSILON; INDEX:
// uint8, or uint16 for windows of more than 256 taps.
//
// A block computes a tile of up to four 16-byte vectors of channels (blockIdx.y:
// ceil(C / LANES / 4) tiles) and walks over the pixels in steps of the grid (blockIdx.x: any
// number). Threads: a multiple of 32, at most 256. rows H W < 2^30; offsets are size_t.

#pragma once
#include "activation.cuh"
#include "vector.cuh"

#ifndef EPSILON
#define EPSILON 1e-5f
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

constexpr int AREA = WINDOW_H * WINDOW_W;
// A single window has no stride; this value means that no two windows overlap.
constexpr int STEP_H = OH == 1 ? WINDOW_H : STRIDE_H, STEP_W = OW == 1 ? WINDOW_W : STRIDE_W;
constexpr bool ALL_INSIDE = PAD_H == 0 && PAD_W == 0 && (OH - 1) * STEP_H + WINDOW_H <= H &&
                            (OW - 1) * STEP_W + WINDOW_W <= W;
constexpr int UNROLL_H = WINDOW_H <= 4 ? WINDOW_H : 1, UNROLL_W = WINDOW_W <= 4 ? WINDOW_W : 4;

// The first of a thread's LANES channels, its first pixel, and its step.
struct Walk {
    int channel = (blockIdx.y * TILE + threadIdx.x % TILE) * LANES;
    int pixel = (blockIdx.x * blockDim.x + threadIdx.x) / TILE;
    int step = gridDim.x * blockDim.x / TILE;
    __device__ Walk() {}
};

// The normalization of a thread's channels, in registers: z = centred scale + beta; the normalized
// value is centred inverse. The mean is subtracted first: where it is much larger than the
// deviation, x scale + shift would cancel. Without NORM, centred is x.
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

// The offset of pixel (i, j) of image `row`, in elements.
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
