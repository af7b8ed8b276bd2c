// What fused_network.cu is made of: how its work is split, and the two convolutions as far as a block goes
// without the others.

#pragma once
#include "activation.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "vector.cuh"

constexpr int CLUSTER = 8, THREADS = 512, WARPS = THREADS / WARP;

__host__ __device__ constexpr int divided_up(int value, int by) { return (value + by - 1) / by; }

// The image, four pixels at a time.
constexpr int WORDS = H * W / 4, WORDS_EACH = divided_up(WORDS, THREADS);

#if CONVOLUTIONS
#include "conv1.cuh"

constexpr int TILES = C / 8;
// The second convolution: its image with padding. The four halves more a pixel spread the loads
// of eight quads over all banks: 2 (C + 4) halves are an odd multiple of 4 words.
constexpr int IN_H = image::QUADS_H + 2 * PAD2_H, IN_W = image::QUADS_W + 2 * PAD2_W;
constexpr int PIXEL = C + 4;
constexpr int QUADS2_H = (IN_H - R2 + 1) / 2, QUADS2_W = (IN_W - S2 + 1) / 2;
constexpr int QUADS2 = QUADS2_H * QUADS2_W, GROUPS2 = divided_up(QUADS2, 8);
// Its k runs over the taps and, in each, over the channels: 16 a step, half a step never straddles
// two taps. A warp takes a group of quads and a split of the steps.
constexpr int STEPS2 = divided_up(R2 * S2 * C, 16);
constexpr int SPLITS2 = GROUPS2 < WARPS ? WARPS / GROUPS2 : 1, DEPTH2 = divided_up(STEPS2, SPLITS2);

static_assert(C % 8 == 0 && C2 % 8 == 0, "channels are padded to a multiple of 8");
static_assert(C <= THREADS, "a thread brings a bias");
static_assert(C2 <= 8 * CLUSTER, "a block has 8 channels of the second convolution");
static_assert(image::POOLING != NONE && POOL2 != NONE, "each convolution is pooled");
static_assert(QUADS2_H > 0 && QUADS2_W > 0, "no quad fits");

constexpr int FLAT = QUADS2 * C2;
#else
constexpr int FLAT = H * W;
#endif

// The hidden layer: a warp has 16 of the block's units and a split of the inputs, 16 a step.
constexpr int ROW_TILES = divided_up(UNITS, 16 * CLUSTER), SHARE = 16 * ROW_TILES;
constexpr int SPLITS = WARPS / ROW_TILES, DEPTH = divided_up(divided_up(FLAT, 16), SPLITS);
constexpr int INPUTS = 16 * DEPTH * SPLITS;  // from FLAT on, zeros
constexpr int SHARE_EACH = divided_up(SHARE, WARP);

static_assert(H * W % 4 == 0, "pixels are read four at a time");
static_assert(ROW_TILES <= WARPS, "a warp has 16 units");
static_assert(DEPTH <= 16, "the weights of the hidden layer wait in registers");
static_assert(CLASSES <= WARPS, "a warp has a class");

#if CONVOLUTIONS
// The two convolutions of one image, in shared memory: the first whole, the second for 8 channels.
struct Features {
    uint2 first[TILES][image::STEPS][WARP], second[STEPS2][WARP];
    union {
        image::Copies copies;                  // until the first convolution is done,
        float4 sums[SPLITS2][GROUPS2 * 8][8];  // from then on: of four pixels, by channel
    };
    __half middle[IN_H][IN_W][PIXEL];
    __half pooled[QUADS2][8];
    float first_bias[C];
    int taps[2 * STEPS2];  // of the second filter: where each half step lies, seen from a pixel

    static constexpr int FIRST = sizeof(first) / 16, SECOND = sizeof(second) / 16;
    static constexpr int FILTERS_EACH = divided_up(FIRST + SECOND, THREADS);

    // What needs no load. The padding of both convolutions is zeros; what is inside is overwritten.
    __device__ void prepare(int thread) {
        for (int half = thread; half < 2 * STEPS2; half += THREADS) {
            const int tap = 8 * half / C;
            // What is beyond the filter has weight 0, and meets a pixel that is there.
            taps[half] =
                tap < R2 * S2 ? (tap / S2 * IN_W + tap % S2) * PIXEL + 8 * half % C : 0;
        }
        for (int at = thread; at < static_cast<int>(sizeof(copies) / 4); at += THREADS)
            reinterpret_cast<unsigned*>(copies)[at] = 0;
        for (int at = thread; at < static_cast<int>(sizeof(middle) / 4); at += THREADS)
            reinterpret_cast<unsigned*>(middle)[at] = 0;
    }

    // bias: of the first convolution's channel `thread`.
    __device__ void fill(const unsigned (&pixels)[WORDS_EACH], const uint4 (&filters)[FILTERS_EACH],
                         float bias, int thread) {
        if (thread < C) first_bias[thread] = bias;
        for (int k = 0; k < WORDS_EACH; ++k)
            if (k * THREADS + thread < WORDS) image::place(copies, k * THREADS + thread, pixels[k]);
        for (int k = 0; k < FILTERS_EACH; ++k)
            if (k * THREADS + thread < FIRST + SECOND)
                reinterpret_cast<uint4*>(first)[k * THREADS + thread] = filters[k];
    }

    __device__ void convolve_first(int lane, int warp) {
        const image::Taps pairs(lane);
        for (int group = warp; group < image::GROUPS; group += WARPS) {
            const int quad = group * 8 + lane / 4;
            const bool inside = quad < image::QUADS;
            const __half* from = copies[0][0] + image::quad_at(inside ? quad : 0);
            unsigned left[image::STEPS][2][4];
#pragma unroll
            for (int step = 0; step < image::STEPS; ++step)
                for (int lower = 0; lower < 2; ++lower)
                    pairs.load(from, step, lower, left[step][lower]);
            __half* to = &middle[quad / image::QUADS_W + PAD2_H][quad % image::QUADS_W + PAD2_W][0];
            for (int tile = 0; tile < TILES; ++tile) {
                float sums[2][4] = {};
                __syncwarp();
#pragma unroll
                for (int step = 0; step < image::STEPS; ++step) {
                    const uint2 pair = first[tile][step][lane];
                    const unsigned right[2] = {pair.x, pair.y};
                    for (int lower = 0; lower < 2; ++lower)
                        multiply(sums[lower], left[step][lower], right);
                }
                if (!inside) continue;
                for (int k = 0; k < 2; ++k) {
                    const int channel = tile * 8 + lane % 4 * 2 + k;
                    const float own = first_bias[channel];
                    to[channel] = image::pooled(
                        image::POOLING, sums[0][k], sums[0][k + 2], sums[1][k], sums[1][k + 2],
                        [&](float z) { return activation::ACTIVATION_1::value(z + own); });
                }
            }
        }
    }

    __device__ void convolve_second(int lane, int warp) {
        for (int task = warp; task < GROUPS2 * SPLITS2; task += WARPS) {
            const int split = task / GROUPS2, quad = task % GROUPS2 * 8 + lane / 4;
            const int place = quad < QUADS2 ? quad : 0;
            const __half* from =
                &middle[place / QUADS2_W * 2][place % QUADS2_W * 2][lane % 4 * 2];
            float own[2][4] = {};
            __syncwarp();
#pragma unroll
            for (int k = 0; k < DEPTH2; ++k) {
                const int step = split * DEPTH2 + k;
                if (step >= STEPS2) break;
                const uint2 pair = second[step][lane];
                const unsigned right[2] = {pair.x, pair.y};
                unsigned left[2][4];
                for (int half = 0; half < 2; ++half) {
                    const __half* tap = from + taps[2 * step + half];
                    for (int pixel = 0; pixel < 4; ++pixel)
                        left[pixel / 2][2 * half + pixel % 2] = *reinterpret_cast<const unsigned*>(
                            tap + (pixel / 2 * IN_W + pixel % 2) * PIXEL);
                }
                for (int lower = 0; lower < 2; ++lower)
                    multiply(own[lower], left[lower], right);
            }
            for (int k = 0; k < 2; ++k)
                sums[split][quad][lane % 4 * 2 + k] = {own[0][k], own[0][k + 2], own[1][k],
                                                       own[1][k + 2]};
        }
    }

    // bias: of the channel thread % 8.
    __device__ void pool_second(float bias, int thread) {
        for (int at = thread; at < QUADS2 * 8; at += THREADS) {
            float4 sum = {};
#pragma unroll
            for (int split = 0; split < SPLITS2; ++split) {
                const float4 more = sums[split][at / 8][at % 8];
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            pooled[at / 8][at % 8] = image::pooled(
                POOL2, sum.x, sum.y, sum.z, sum.w,
                [&](float z) { return activation::ACTIVATION_2::value(z + bias); });
        }
    }
};
#endif
