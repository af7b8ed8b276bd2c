// The first convolution on tensor cores: one input channel, stride 1, followed by pooling. As a
// matrix product it has the pixels as rows (m), the taps of the filter as k, the channels as
// columns (n).
//
// Macros: H, W: the image; R, S, PAD_H, PAD_W: the filter; POOL: NONE, MAX or AVERAGE, 2 x 2 with
// stride 2. W must be a multiple of 4: pixels are read four at a time.
//
// A register of the instruction holds two taps that are neighbours in a row of the filter (an odd
// row gets a tap of weight 0). They are one aligned load if the first one's pixel is in an even
// column. For odd columns there is a second copy of the image, shifted left by one. A pixel is
// stored as its value / 256, which is exact in half; the weights times 256 / 255 stay clear of the
// subnormals.
//
// The rows of two products are the pixels of eight quads (2 x 2 neighbours): rows g and g + 8 of
// the first product are the upper two of quad g, those of the second the lower two. So one lane
// gets the four pixels of a pooling window.

#pragma once
#include "ptx.cuh"
#include "vector.cuh"

enum Pooling { NONE, MAX, AVERAGE };

namespace conv1 {
constexpr Pooling POOLING = POOL;
constexpr int CONV_H = H + 2 * PAD_H - R + 1, CONV_W = W + 2 * PAD_W - S + 1;
// With pooling, an odd last row or column is dropped; without, its quads are partly stored.
constexpr int QUADS_H = (CONV_H + (POOLING == NONE)) / 2;
constexpr int QUADS_W = (CONV_W + (POOLING == NONE)) / 2;
constexpr int QUADS = QUADS_H * QUADS_W;
constexpr int GROUPS = (QUADS + 7) / 8;     // of eight quads, for one warp
constexpr int PAIRS = (S + 1) / 2;          // of taps, in a row of the filter
constexpr int STEPS = (R * PAIRS + 7) / 8;  // of 16 taps, along k
constexpr int WORDS = H * W / 4;            // of four pixels

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int ROWS = larger(H + PAD_H, 2 * QUADS_H + R - 1);
// A multiple of 16: at 28 x 28 the loads of eight quads of a row have no bank conflicts.
constexpr int PITCH = (larger(W + PAD_W, 2 * (QUADS_W + PAIRS - 1)) + 15) / 16 * 16;

static_assert(W % 4 == 0, "pixels are read four at a time");
static_assert(CONV_H >= 2 && CONV_W >= 2, "no quad fits");

// Both copies of the image in shared memory. The padding, and what is right of it, must be 0.
using Copies = __half[2][ROWS][PITCH];

// Stores four pixels in both copies.
__device__ inline void store_pixels(Copies& copies, int word, unsigned pixels) {
    const int i = word / (W / 4) + PAD_H, j = word % (W / 4) * 4 + PAD_W;
    for (int k = 0; k < 4; ++k) {
        const __half value = static_cast<float>(pixels >> 8 * k & 255) / 256;
        copies[0][i][j + k] = value;
        if (j + k > 0) copies[1][i][j + k - 1] = value;
    }
}

// The offsets of a lane's pairs of taps from the first pixel of a quad, for each step.
struct TapOffsets {
    int offsets[STEPS][2];

    __device__ explicit TapOffsets(int lane) {
        for (int step = 0; step < STEPS; ++step) {
            for (int half = 0; half < 2; ++half) {
                const int pair = 8 * step + 4 * half + lane % 4;
                // Taps beyond the filter have weight 0; they read any valid pixel.
                offsets[step][half] =
                    pair < R * PAIRS ? pair / PAIRS * PITCH + pair % PAIRS * 2 : 0;
            }
        }
    }

    // The left operand of a step: the `lower` or upper pixels of the quad at `pixels` in copies[0].
    __device__ void load(const __half* pixels, int step, int lower, unsigned (&a)[4]) const {
        for (int half = 0; half < 2; ++half) {
            const __half* pair = pixels + lower * PITCH + offsets[step][half];
            a[2 * half] = *reinterpret_cast<const unsigned*>(pair);
            a[2 * half + 1] = *reinterpret_cast<const unsigned*>(pair + ROWS * PITCH);
        }
    }
};

// The offset of the first pixel of a quad in copies[0].
__device__ inline int quad_offset(int quad) {
    return quad / QUADS_W * 2 * PITCH + quad % QUADS_W * 2;
}

// The pooled activation of a quad. Activations are monotonic: the largest sum gives the maximum.
template <typename Activate>
__device__ inline float pooled(Pooling pooling, float a, float b, float c, float d,
                               Activate activate) {
    if (pooling == MAX) return activate(max_or_nan(max_or_nan(a, b), max_or_nan(c, d)));
    return (activate(a) + activate(b) + activate(c) + activate(d)) / 4;
}
}  // namespace conv1
