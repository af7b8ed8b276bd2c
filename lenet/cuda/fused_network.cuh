// The parts of fused_network.cu: how the work is divided, and the two convolutions, as far as a
// block computes them without the other blocks of its cluster.

#pragma once
#include "activation.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "vector.cuh"

constexpr int CLUSTER = 8, THREADS = 512, WARPS = THREADS / WARP;

__host__ __device__ constexpr int divided_up(int value, int by) { return (value + by - 1) / by; }

// The image, four pixels at a time.
constexpr int WORDS = H * W / 4, THREAD_WORDS = divided_up(WORDS, THREADS);

#if CONVOLUTIONS
#include "conv1.cuh"

constexpr int TILES = C / 8;
// The second convolution: its padded input. The four extra halves a pixel spread the loads of eight
// quads over all banks: 2 (C + 4) halves are an odd multiple of 4 words.
constexpr int IN_H = conv1::QUADS_H + 2 * PAD2_H, IN_W = conv1::QUADS_W + 2 * PAD2_W;
constexpr int PIXEL = C + 4;
constexpr int QUADS2_H = (IN_H - R2 + 1) / 2, QUADS2_W = (IN_W - S2 + 1) / 2;
constexpr int QUADS2 = QUADS2_H * QUADS2_W, GROUPS2 = divided_up(QUADS2, 8);
// Its k runs over the taps, and over the channels of each: 16 a step, where half a step never
// belongs to two taps. A warp computes a group of eight quads for a split of the steps.
constexpr int STEPS2 = divided_up(R2 * S2 * C, 16);
constexpr int SPLITS2 = GROUPS2 < WARPS ? WARPS / GROUPS2 : 1;
constexpr int WARP_STEPS2 = divided_up(STEPS2, SPLITS2);

static_assert(C % 8 == 0 && C2 % 8 == 0, "channels are padded to a multiple of 8");
static_assert(C <= THREADS, "a thread loads a bias");
static_assert(C2 <= 8 * CLUSTER, "a block has 8 channels of the second convolution");
static_assert(conv1::POOLING != NONE && POOL2 != NONE, "each convolution is pooled");
static_assert(QUADS2_H > 0 && QUADS2_W > 0, "no quad fits");

constexpr int FLAT = QUADS2 * C2;
#else
constexpr int FLAT = H * W;
#endif

// The hidden layer: a warp computes 16 of the block's units for a split of the inputs, 16 a step.
constexpr int UNIT_TILES = divided_up(UNITS, 16 * CLUSTER), BLOCK_UNITS = 16 * UNIT_TILES;
constexpr int SPLITS = WARPS / UNIT_TILES;
constexpr int WARP_STEPS = divided_up(divided_up(FLAT, 16), SPLITS);
constexpr int INPUTS = 16 * WARP_STEPS * SPLITS;  // from FLAT on, zeros
constexpr int LANE_UNITS = divided_up(BLOCK_UNITS, WARP);

static_assert(H * W % 4 == 0, "pixels are read four at a time");
static_assert(UNIT_TILES <= WARPS, "a warp has 16 units");
static_assert(WARP_STEPS <= 16, "the weights of the hidden layer wait in registers");
static_assert(CLASSES <= WARPS, "a warp has a class");

#if CONVOLUTIONS
// Both convolutions of one image, in shared memory: the first complete, the second for 8 channels.
struct Features {
    uint2 filters1[TILES][conv1::STEPS][WARP], filters2[STEPS2][WARP];
    union {
        conv1::Copies copies;                          // until the first convolution is finished,
        float4 partial_sums[SPLITS2][GROUPS2 * 8][8];  // after it: of four pixels, by channel
    };
    __half conv1_output[IN_H][IN_W][PIXEL];
    __half conv2_output[QUADS2][8];
    float biases1[C];
    int tap_offsets[2 * STEPS2];  // of the second filter: of each half step, from a pixel

    static constexpr int VECTORS1 = sizeof(filters1) / 16, VECTORS2 = sizeof(filters2) / 16;
    static constexpr int THREAD_VECTORS = divided_up(VECTORS1 + VECTORS2, THREADS);

    // Everything that needs no load. The padding of both convolutions stays zero.
    __device__ void initialize(int thread) {
        for (int half = thread; half < 2 * STEPS2; half += THREADS) {
            const int tap = 8 * half / C;
            // Taps beyond the filter have weight 0; they read any valid pixel.
            tap_offsets[half] =
                tap < R2 * S2 ? (tap / S2 * IN_W + tap % S2) * PIXEL + 8 * half % C : 0;
        }
        for (int word = thread; word < static_cast<int>(sizeof(copies) / 4); word += THREADS)
            reinterpret_cast<unsigned*>(copies)[word] = 0;
        for (int word = thread; word < static_cast<int>(sizeof(conv1_output) / 4); word += THREADS)
            reinterpret_cast<unsigned*>(conv1_output)[word] = 0;
    }

    // Stores what the thread has prefetched. bias1: of the first convolution's channel `thread`.
    __device__ void store(const unsigned (&pixels)[THREAD_WORDS],
                          const uint4 (&filters)[THREAD_VECTORS], float bias1, int thread) {
        if (thread < C) biases1[thread] = bias1;
        for (int k = 0; k < THREAD_WORDS; ++k)
            if (k * THREADS + thread < WORDS)
                conv1::store_pixels(copies, k * THREADS + thread, pixels[k]);
        for (int k = 0; k < THREAD_VECTORS; ++k)
            if (k * THREADS + thread < VECTORS1 + VECTORS2)
                reinterpret_cast<uint4*>(filters1)[k * THREADS + thread] = filters[k];
    }

    __device__ void convolve_first(int lane, int warp) {
        const conv1::TapOffsets taps(lane);
        for (int group = warp; group < conv1::GROUPS; group += WARPS) {
            const int quad = group * 8 + lane / 4;
            const bool inside = quad < conv1::QUADS;
            const __half* quad_pixels = copies[0][0] + conv1::quad_offset(inside ? quad : 0);
            unsigned a[conv1::STEPS][2][4];
#pragma unroll
            for (int step = 0; step < conv1::STEPS; ++step)
                for (int lower = 0; lower < 2; ++lower)
                    taps.load(quad_pixels, step, lower, a[step][lower]);
            __half* output =
                &conv1_output[quad / conv1::QUADS_W + PAD2_H][quad % conv1::QUADS_W + PAD2_W][0];
            for (int tile = 0; tile < TILES; ++tile) {
                float accumulators[2][4] = {};
                __syncwarp();
#pragma unroll
                for (int step = 0; step < conv1::STEPS; ++step) {
                    const uint2 pair = filters1[tile][step][lane];
                    const unsigned b[2] = {pair.x, pair.y};
                    for (int lower = 0; lower < 2; ++lower)
                        multiply(accumulators[lower], a[step][lower], b);
                }
                if (!inside) continue;
                for (int k = 0; k < 2; ++k) {
                    const int channel = tile * 8 + lane % 4 * 2 + k;
                    const float bias = biases1[channel];
                    output[channel] = conv1::pooled(
                        conv1::POOLING, accumulators[0][k], accumulators[0][k + 2],
                        accumulators[1][k], accumulators[1][k + 2],
                        [&](float z) { return activation::ACTIVATION_1::value(z + bias); });
                }
            }
        }
    }

    __device__ void convolve_second(int lane, int warp) {
        for (int task = warp; task < GROUPS2 * SPLITS2; task += WARPS) {
            const int split = task / GROUPS2, quad = task % GROUPS2 * 8 + lane / 4;
            const int valid_quad = quad < QUADS2 ? quad : 0;
            const __half* quad_pixels =
                &conv1_output[valid_quad / QUADS2_W * 2][valid_quad % QUADS2_W * 2][lane % 4 * 2];
            float accumulators[2][4] = {};
            __syncwarp();
#pragma unroll
            for (int k = 0; k < WARP_STEPS2; ++k) {
                const int step = split * WARP_STEPS2 + k;
                if (step >= STEPS2) break;
                const uint2 pair = filters2[step][lane];
                const unsigned b[2] = {pair.x, pair.y};
                unsigned a[2][4];
                for (int half = 0; half < 2; ++half) {
                    const __half* tap = quad_pixels + tap_offsets[2 * step + half];
                    for (int pixel = 0; pixel < 4; ++pixel)
                        a[pixel / 2][2 * half + pixel % 2] = *reinterpret_cast<const unsigned*>(
                            tap + (pixel / 2 * IN_W + pixel % 2) * PIXEL);
                }
                for (int lower = 0; lower < 2; ++lower) multiply(accumulators[lower], a[lower], b);
            }
            for (int k = 0; k < 2; ++k)
                partial_sums[split][quad][lane % 4 * 2 + k] = {
                    accumulators[0][k], accumulators[0][k + 2], accumulators[1][k],
                    accumulators[1][k + 2]};
        }
    }

    // bias2: of the channel thread % 8.
    __device__ void pool_second(float bias2, int thread) {
        for (int index = thread; index < QUADS2 * 8; index += THREADS) {
            float4 sum = {};
#pragma unroll
            for (int split = 0; split < SPLITS2; ++split) {
                const float4 part = partial_sums[split][index / 8][index % 8];
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            conv2_output[index / 8][index % 8] =
                conv1::pooled(POOL2, sum.x, sum.y, sum.z, sum.w,
                              [&](float z) { return activation::ACTIVATION_2::value(z + bias2); });
        }
    }
};
#endif
