// The first block of a network in one pass over the images: convolution of one input channel, bias,
// activation, pooling. Only the pooled values are written.
//
// images: uint8 (n, H, W), 4-byte aligned
// weight: halves as `fragments` of conv1.py makes them, for pixels divided by 256
// bias:   float (C), zeros from CHANNELS on
// y:      SCALAR (n, OH, OW, C), 16-byte aligned; the channels from CHANNELS on are written as 0
//
// Macros besides those of conv1.cuh: SCALAR, C, CHANNELS, OH, OW, ACTIVATION, PARAMETER. A float
// has 24 bits, a half 11, a pixel 8: with SCALAR float a weight is the sum of two halves, and the
// two products leave an error of 2^-22 of the largest weights, far below TF32's.
//
// Grid: up to ceil(n / IMAGES) blocks, fastest with no more than are resident at once, which loop
// over the images; by C / CHUNK. 128 threads. n OH OW C may exceed 2^31: offsets are size_t.

#include "activation.cuh"
#include "conv1.cuh"

#ifndef IMAGES
#define IMAGES 2  // of a block at a time: at 24 x 24, 36 groups of quads for 4 warps
#endif

constexpr int THREADS = 128, WARPS = THREADS / WARP;
constexpr int PARTS = sizeof(SCALAR) / 2;                     // halves whose sum is a weight
constexpr int TILES = C % 32 == 0 ? 4 : C % 16 == 0 ? 2 : 1;  // of 8 channels, of a warp
constexpr int CHUNK = 8 * TILES, LANE_CHANNELS = 2 * TILES;   // channels of a warp, of a lane
constexpr int LOADS = (IMAGES * conv1::WORDS + THREADS - 1) / THREADS;

static_assert(C % 8 == 0 && CHANNELS <= C, "channels are padded to a multiple of 8");
static_assert(PARTS * conv1::STEPS <= 8, "the filter is kept in registers");
static_assert(conv1::POOLING == NONE ? OH == conv1::CONV_H && OW == conv1::CONV_W
                                     : OH == conv1::QUADS_H && OW == conv1::QUADS_W,
              "pooling is 2 x 2 with stride 2");

// Padding has weights and biases of zero, and every activation but one maps zero to zero.
template <typename Function>
constexpr bool KEEPS_ZERO = true;
template <>
constexpr bool KEEPS_ZERO<activation::sigmoid> = false;
constexpr bool PADDING_IS_ZERO = CHANNELS == C || KEEPS_ZERO<Activation>;

// Stores a lane's channels of a pixel, which are neighbours, in as few accesses as possible.
// nvcc 13.0 does not merge them itself: four times as many stores wait for each other.
__device__ inline void store_channels(SCALAR* y, const float (&values)[LANE_CHANNELS]) {
    unsigned words[LANE_CHANNELS * sizeof(SCALAR) / 4];
    for (int k = 0; k < LANE_CHANNELS; k += PARTS == 1 ? 2 : 1) {
        if (PARTS == 1) {
            const __half2 two = __floats2half2_rn(values[k], values[k + 1]);
            words[k / 2] = reinterpret_cast<const unsigned&>(two);
        } else {
            words[k] = reinterpret_cast<const unsigned&>(values[k]);
        }
    }
    if constexpr (sizeof(words) == 4) {
        __stcg(reinterpret_cast<unsigned*>(y), words[0]);
    } else if constexpr (sizeof(words) == 8) {
        __stcg(reinterpret_cast<uint2*>(y), make_uint2(words[0], words[1]));
    } else {
        for (int k = 0; k < sizeof(words) / 4; k += 4)
            __stcg(reinterpret_cast<uint4*>(y) + k / 4,
                   make_uint4(words[k], words[k + 1], words[k + 2], words[k + 3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    first_convolution(const uint8* __restrict__ images, const uint2* __restrict__ weight,
                      const float* __restrict__ bias, SCALAR* __restrict__ y, int n) {
    __shared__ alignas(16) conv1::Copies copies[IMAGES];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int channel = blockIdx.y * CHUNK + lane % 4 * LANE_CHANNELS;
    const conv1::TapOffsets taps(lane);

    unsigned b[PARTS * conv1::STEPS][TILES][2];
    for (int k = 0; k < PARTS * conv1::STEPS; ++k) {
        for (int tile = 0; tile < TILES; ++tile) {
            const uint2 pair =
                weight[((blockIdx.y * PARTS * conv1::STEPS + k) * WARP + lane) * TILES + tile];
            b[k][tile][0] = pair.x, b[k][tile][1] = pair.y;
        }
    }
    float lane_bias[LANE_CHANNELS];
    for (int k = 0; k < LANE_CHANNELS; ++k) lane_bias[k] = bias[channel + k];

    // Prefetch: the pixels of the next images are loaded while these are computed.
    unsigned pixels[LOADS];
    const auto prefetch = [&](int first_row) {
        const int words = min(IMAGES, n - first_row) * conv1::WORDS;
        const auto source = reinterpret_cast<const unsigned*>(images) +
                            static_cast<size_t>(first_row) * conv1::WORDS;
        for (int k = 0; k < LOADS; ++k)
            if (k * THREADS + thread < words) pixels[k] = source[k * THREADS + thread];
    };
    prefetch(blockIdx.x * IMAGES);
    for (int word = thread; word < static_cast<int>(sizeof(copies) / 4); word += THREADS)
        reinterpret_cast<unsigned*>(copies)[word] = 0;

    for (int first_row = blockIdx.x * IMAGES; first_row < n; first_row += gridDim.x * IMAGES) {
        const int count = min(IMAGES, n - first_row);
        __syncthreads();
        for (int k = 0; k < LOADS; ++k) {
            const int word = k * THREADS + thread;
            if (word < count * conv1::WORDS)
                conv1::store_pixels(copies[word / conv1::WORDS], word % conv1::WORDS, pixels[k]);
        }
        __syncthreads();
        prefetch(first_row + gridDim.x * IMAGES);
        for (int task = warp; task < count * conv1::GROUPS; task += WARPS) {
            const int image = task / conv1::GROUPS;
            const int quad = task % conv1::GROUPS * 8 + lane / 4;
            const bool inside = quad < conv1::QUADS;
            const __half* quad_pixels = copies[image][0][0] + conv1::quad_offset(inside ? quad : 0);
            float accumulators[2][TILES][4] = {};
            __syncwarp();
#pragma unroll
            for (int step = 0; step < conv1::STEPS; ++step) {
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    unsigned a[4];
                    taps.load(quad_pixels, step, lower, a);
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                        for (int tile = 0; tile < TILES; ++tile)
                            multiply(accumulators[lower][tile], a,
                                     b[part * conv1::STEPS + step][tile]);
                    }
                }
            }
            if (!inside) continue;
            const auto activated = [&](int k, float z) {
                const float value = Activation::value(z + lane_bias[k]);
                return PADDING_IS_ZERO || channel + k < CHANNELS ? value : 0;
            };
            // The sum of pixel `pixel` of the quad in the lane's channel k. The packing makes these
            // channels neighbours in memory, though the instruction gives a lane two columns a
            // tile.
            const auto sum = [&](int pixel, int k) {
                return accumulators[pixel / 2][k / 2][pixel % 2 * 2 + k % 2];
            };
            const size_t row = first_row + image;
            float values[LANE_CHANNELS];
            if constexpr (conv1::POOLING == NONE) {
                const int top = quad / conv1::QUADS_W * 2, left = quad % conv1::QUADS_W * 2;
#pragma unroll
                for (int pixel = 0; pixel < 4; ++pixel) {
                    const int i = top + pixel / 2, j = left + pixel % 2;
                    for (int k = 0; k < LANE_CHANNELS; ++k) values[k] = activated(k, sum(pixel, k));
                    if (i < OH && j < OW)
                        store_channels(y + ((row * OH + i) * OW + j) * C + channel, values);
                }
            } else {
#pragma unroll
                for (int k = 0; k < LANE_CHANNELS; ++k)
                    values[k] = conv1::pooled(conv1::POOLING, sum(0, k), sum(1, k), sum(2, k),
                                              sum(3, k), [&](float z) { return activated(k, z); });
                store_channels(y + (row * conv1::QUADS + quad) * C + channel, values);
            }
        }
    }
}
