// The first block of a network, from bytes: convolution of one input channel, bias, activation,
// pooling. One pass over the images, and nothing but the pooled values is written.
//
// images: uint8 (n, H, W), 4-byte aligned
// weight: halves as `packing.first_fragments` makes them, the 1/255 of a pixel folded in
// bias:   float (C), zeros from CHANNELS on
// y:      SCALAR (n, OH, OW, C), 16-byte aligned; the channels from CHANNELS on are written as 0
//
// Macros besides those of conv1.cuh: SCALAR, C, CHANNELS, OH, OW, ACTIVATION, PARAMETER. A float
// has 24 bits where a half has 11, and a pixel has 8: with SCALAR float a weight is the sum of two
// halves, and multiplying twice leaves an error of 2^-22 of the largest weights, far below TF32's.
//
// Grid: up to ceil(n / IMAGES) blocks, best no more than are resident at once, which then walk
// over the images; by C / CHUNK. 128 threads. n OH OW C may exceed 2^31: offsets are size_t.

#include "activation.cuh"
#include "conv1.cuh"

#ifndef IMAGES
#define IMAGES 2  // of a block at a time: at 24 x 24, 36 groups of quads for 4 warps
#endif

constexpr int THREADS = 128, WARPS = THREADS / WARP;
constexpr int PARTS = sizeof(SCALAR) / 2;  // halves that make up a weight
constexpr int TILES = C % 32 == 0 ? 4 : C % 16 == 0 ? 2 : 1;  // of 8 channels, of a warp
constexpr int CHUNK = 8 * TILES, OWN = 2 * TILES;              // channels of a warp, of a lane
constexpr int LOADS = (IMAGES * image::WORDS + THREADS - 1) / THREADS;

static_assert(C % 8 == 0 && CHANNELS <= C, "channels are padded to a multiple of 8");
static_assert(PARTS * image::STEPS <= 8, "the filter is kept in registers");
static_assert(image::POOLING == NONE ? OH == image::CONV_H && OW == image::CONV_W
                                     : OH == image::QUADS_H && OW == image::QUADS_W,
              "pooling is 2 x 2 with stride 2");

// Padding has weights and biases of zero, and of zero every activation but one makes zero.
template <typename Function>
constexpr bool KEEPS_ZERO = true;
template <>
constexpr bool KEEPS_ZERO<activation::sigmoid> = false;
constexpr bool PADDING_IS_ZERO = CHANNELS == C || KEEPS_ZERO<Activation>;

// A lane's channels of a pixel to where they are neighbours, in as few accesses as there can be:
// nvcc 13.0 does not see it by itself, and four times as many stores wait for each other.
__device__ inline void write(SCALAR* to, const float (&values)[OWN]) {
    unsigned words[OWN * sizeof(SCALAR) / 4];
    for (int k = 0; k < OWN; k += PARTS == 1 ? 2 : 1) {
        if (PARTS == 1) {
            const __half2 two = __floats2half2_rn(values[k], values[k + 1]);
            words[k / 2] = reinterpret_cast<const unsigned&>(two);
        } else {
            words[k] = reinterpret_cast<const unsigned&>(values[k]);
        }
    }
    if constexpr (sizeof(words) == 4) {
        __stcg(reinterpret_cast<unsigned*>(to), words[0]);
    } else if constexpr (sizeof(words) == 8) {
        __stcg(reinterpret_cast<uint2*>(to), make_uint2(words[0], words[1]));
    } else {
        for (int k = 0; k < sizeof(words) / 4; k += 4)
            __stcg(reinterpret_cast<uint4*>(to) + k / 4,
                   make_uint4(words[k], words[k + 1], words[k + 2], words[k + 3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
first_convolution(const uint8* __restrict__ images, const uint2* __restrict__ weight,
                  const float* __restrict__ bias, SCALAR* __restrict__ y, int n) {
    __shared__ alignas(16) image::Copies copies[IMAGES];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int channel = blockIdx.y * CHUNK + lane % 4 * OWN;
    const image::Taps taps(lane);

    unsigned right[PARTS * image::STEPS][TILES][2];
    for (int k = 0; k < PARTS * image::STEPS; ++k) {
        for (int tile = 0; tile < TILES; ++tile) {
            const uint2 pair =
                weight[((blockIdx.y * PARTS * image::STEPS + k) * WARP + lane) * TILES + tile];
            right[k][tile][0] = pair.x, right[k][tile][1] = pair.y;
        }
    }
    float biases[OWN];
    for (int k = 0; k < OWN; ++k) biases[k] = bias[channel + k];

    // The pixels of the next images are on their way while these are worked on.
    unsigned pixels[LOADS];
    const auto fetch = [&](int first) {
        const int words = min(IMAGES, n - first) * image::WORDS;
        const auto from = reinterpret_cast<const unsigned*>(images) +
                          static_cast<size_t>(first) * image::WORDS;
        for (int k = 0; k < LOADS; ++k)
            if (k * THREADS + thread < words) pixels[k] = from[k * THREADS + thread];
    };
    fetch(blockIdx.x * IMAGES);
    for (int at = thread; at < static_cast<int>(sizeof(copies) / 4); at += THREADS)
        reinterpret_cast<unsigned*>(copies)[at] = 0;

    for (int first = blockIdx.x * IMAGES; first < n; first += gridDim.x * IMAGES) {
        const int count = min(IMAGES, n - first);
        __syncthreads();
        for (int k = 0; k < LOADS; ++k) {
            const int at = k * THREADS + thread;
            if (at < count * image::WORDS)
                image::place(copies[at / image::WORDS], at % image::WORDS, pixels[k]);
        }
        __syncthreads();
        fetch(first + gridDim.x * IMAGES);
        for (int task = warp; task < count * image::GROUPS; task += WARPS) {
            const int index = task / image::GROUPS;
            const int quad = task % image::GROUPS * 8 + lane / 4;
            const bool inside = quad < image::QUADS;
            const __half* from = copies[index][0][0] + image::quad_at(inside ? quad : 0);
            float sums[2][TILES][4] = {};
            __syncwarp();
#pragma unroll
            for (int step = 0; step < image::STEPS; ++step) {
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    unsigned left[4];
                    taps.load(from, step, lower, left);
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                        for (int tile = 0; tile < TILES; ++tile)
                            multiply(sums[lower][tile], left,
                                     right[part * image::STEPS + step][tile]);
                    }
                }
            }
            if (!inside) continue;
            const auto activated = [&](int k, float z) {
                const float a = Activation::value(z + biases[k]);
                return PADDING_IS_ZERO || channel + k < CHANNELS ? a : 0;
            };
            // Pixel `tap` of the quad, of the lane's channel k; the packed order makes these
            // neighbours in memory, though the instruction deals columns out in pairs.
            const auto sum = [&](int tap, int k) {
                return sums[tap / 2][k / 2][tap % 2 * 2 + k % 2];
            };
            const size_t row = first + index;
            float values[OWN];
            if constexpr (image::POOLING == NONE) {
                const int top = quad / image::QUADS_W * 2, left = quad % image::QUADS_W * 2;
#pragma unroll
                for (int tap = 0; tap < 4; ++tap) {
                    const int i = top + tap / 2, j = left + tap % 2;
                    for (int k = 0; k < OWN; ++k) values[k] = activated(k, sum(tap, k));
                    if (i < OH && j < OW)
                        write(y + ((row * OH + i) * OW + j) * C + channel, values);
                }
            } else {
#pragma unroll
                for (int k = 0; k < OWN; ++k)
                    values[k] =
                        image::pooled(image::POOLING, sum(0, k), sum(1, k), sum(2, k), sum(3, k),
                                      [&](float z) { return activated(k, z); });
                write(y + (row * image::QUADS + quad) * C + channel, values);
            }
        }
    }
}
