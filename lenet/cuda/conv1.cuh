// The first convolution on tensor cores: one input channel, stride 1, for the kernels that follow
// it with pooling. Its matrix product has the pixels as rows, the taps of the filter as k, the
// channels as columns.
//
// Macros: H, W: the image; R, S, PAD_H, PAD_W: the filter; POOL: NONE, MAX or AVERAGE, of 2 x 2
// with stride 2. W must be a multiple of 4: pixels are read four at a time.
//
// A register of the instruction holds two taps, neighbours in a row of the filter (an odd row gets
// a tap of weight 0). They are one aligned load if their first pixel lies in an even column; so
// there is a second copy of the image, shifted left by one, for the others. A pixel is stored as
// its value / 256: exact in half, and the weights times 256 / 255 stay clear of the subnormals.
//
// The rows of two products are the pixels of eight quads, 2 x 2 neighbours: rows g and g + 8 of
// the first are the upper two of quad g, those of the second the lower two. So the four pixels of
// a pooling window end in one lane.

#pragma once
#include "ptx.cuh"
#include "vector.cuh"

enum Pooling { NONE, MAX, AVERAGE };

namespace image {
constexpr Pooling POOLING = POOL;
constexpr int CONV_H = H + 2 * PAD_H - R + 1, CONV_W = W + 2 * PAD_W - S + 1;
// A window that does not fit is not pooled; without pooling, what an odd size lacks is not stored.
constexpr int QUADS_H = (CONV_H + (POOLING == NONE)) / 2;
constexpr int QUADS_W = (CONV_W + (POOLING == NONE)) / 2;
constexpr int QUADS = QUADS_H * QUADS_W;
constexpr int GROUPS = (QUADS + 7) / 8;
constexpr int PAIRS = (S + 1) / 2;               // of taps, in a row of the filter
constexpr int STEPS = (R * PAIRS + 7) / 8;       // products along k, each of 8 pairs
constexpr int WORDS = H * W / 4;                 // of four pixels

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int ROWS = larger(H + PAD_H, 2 * QUADS_H + R - 1);
// A multiple of 16: at 28 x 28 the loads of eight quads of a row then meet no bank twice.
constexpr int PITCH = (larger(W + PAD_W, 2 * (QUADS_W + PAIRS - 1)) + 15) / 16 * 16;

static_assert(W % 4 == 0, "pixels are read four at a time");
static_assert(CONV_H >= 2 && CONV_W >= 2, "no quad fits");

// Both copies in shared memory, with the padding and what lies right of it, which must be 0.
using Copies = __half[2][ROWS][PITCH];

// Four pixels to their places in both copies.
__device__ inline void place(Copies& copies, int word, unsigned pixels) {
    const int i = word / (W / 4) + PAD_H, left = word % (W / 4) * 4 + PAD_W;
    for (int k = 0; k < 4; ++k) {
        const __half value = static_cast<float>(pixels >> 8 * k & 255) / 256;
        copies[0][i][left + k] = value;
        if (left + k > 0) copies[1][i][left + k - 1] = value;
    }
}

// Where the pairs of taps that a lane multiplies lie, seen from the first pixel of a quad.
struct Taps {
    int at[STEPS][2];

    __device__ explicit Taps(int lane) {
        for (int step = 0; step < STEPS; ++step) {
            for (int half = 0; half < 2; ++half) {
                const int pair = 8 * step + 4 * half + lane % 4;
                // What is beyond the filter has weight 0, and meets a pixel that is there.
                at[step][half] = pair < R * PAIRS ? pair / PAIRS * PITCH + pair % PAIRS * 2 : 0;
            }
        }
    }

    // The left side of a step: the `lower` or upper pixels of the quad at `first` in copies[0].
    __device__ void load(const __half* first, int step, int lower, unsigned (&a)[4]) const {
        for (int half = 0; half < 2; ++half) {
            const __half* pair = first + lower * PITCH + at[step][half];
            a[2 * half] = *reinterpret_cast<const unsigned*>(pair);
            a[2 * half + 1] = *reinterpret_cast<const unsigned*>(pair + ROWS * PITCH);
        }
    }
};

// The first pixel of a quad, in elements of copies[0].
__device__ inline int quad_at(int quad) {
    return quad / QUADS_W * 2 * PITCH + quad % QUADS_W * 2;
}

// The pooled value of a quad. No activation ever falls, so the largest sum has the largest value.
template <typename Activate>
__device__ inline float pooled(Pooling pooling, float a, float b, float c, float d,
                               Activate activate) {
    if (pooling == MAX) return activate(fmaxf(fmaxf(a, b), fmaxf(c, d)));
    return (activate(a) + activate(b) + activate(c) + activate(d)) / 4;
}
}  // namespace image
