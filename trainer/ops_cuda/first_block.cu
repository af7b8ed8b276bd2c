// The first block of a network in training, in mixed precision: convolution of one input channel,
// batch norm, ReLU, max pooling 2 x 2. What the convolution computes is never written: its moments
// and the gradients follow from the moments of the patches, which have one channel.
//
// With a patch p of R S pixels for each output pixel, N of them, the convolution is w p, and
//
//     m = sum p / N,  G = sum p p^T / N - m m^T                   the moments of the patches
//     mean = w m,  variance = w G w
//     xhat = (w p - mean) / deviation,  z = gamma xhat + beta,  y = max over 2 x 2 of max(z, 0)
//     dz = dy at the maximum, where y > 0;  D = sum dz p,  dbeta = sum dz
//     dgamma = sum dz xhat = (w D - mean dbeta) / deviation
//     dw = gamma / deviation (D - dbeta m - dgamma / deviation w G)
//
// (The last line is batch norm's gradient, multiplied by p and summed: sum xhat p = N w G /
// deviation.) Products of halves are exact in float, sums are float.
//
// x:             halves (rows, H, W), 8-byte aligned
// weight:        float (C, R, S), rounded to halves here
// gamma, beta, mean, variance, running_mean, running_variance, dgamma, dbeta: float (C)
// patches:       float (32, 32): sums of p p^T; row and column R S belong to the constant 1
// y, dy, index:  halves, halves, uint8 (rows, QUADS_H, QUADS_W, C); index is the tap, row-major in
//                the window, of the first maximum
// dweight:       float (C, R, S)
// partial:       gridDim.x (32, 32) floats, in first_block_backward gridDim.x 26 or R S + 1 rows of
//                32 of them; counters: ceil(gridDim.x / GROUP) + 1 zeros, reset to 0
//
// Macros besides those of conv1.cuh, with POOL MAX: C, a multiple of 8, at most 32, of which
// CHANNELS are real; EPSILON, RUNNING_SHARE. Grid: any number of blocks; 128 threads. The sums have
// the same order whenever the grid is the same.

#define SCALAR __half
#include "conv1.cuh"
#include "reduce.cuh"

#ifndef EPSILON
#define EPSILON 1e-5f
#define RUNNING_SHARE 0.1f
#endif

constexpr int THREADS = 128, WARPS = THREADS / WARP;
constexpr int GROUP = 12;  // blocks whose sums are added first, in parallel with other groups
constexpr int TAPS = R * S, SIDE = 32, MOMENTS = SIDE * SIDE;
constexpr int TILES = C / 8;
constexpr int HALVES = (conv1::CONV_W + 7) / 8;  // of a step of 16 positions, in a row
constexpr int ALL_HALVES = conv1::CONV_H * HALVES, MOMENT_STEPS = (ALL_HALVES + 1) / 2;

static_assert(TAPS < SIDE, "the constant needs a place");
static_assert(C % 8 == 0 && C <= WARP && CHANNELS <= C, "a lane has a channel");
static_assert(conv1::CONV_W % 2 == 0, "positions are read in pairs");
static_assert(conv1::POOLING == MAX && conv1::CONV_H % 2 == 0, "every pixel has its window");

struct alignas(8) Pack4 {
    __half values[4];
};

// Stores an image in both copies of conv1.cuh.
__device__ inline void store_image(conv1::Copies& copies, const __half* image) {
    for (int word = threadIdx.x; word < conv1::WORDS; word += THREADS) {
        const int i = word / (W / 4) + PAD_H, j = word % (W / 4) * 4 + PAD_W;
        const auto four = reinterpret_cast<const Pack4*>(image)[word];
        for (int k = 0; k < 4; ++k) {
            copies[0][i][j + k] = four.values[k];
            if (j + k > 0) copies[1][i][j + k - 1] = four.values[k];
        }
    }
}

__device__ inline void clear(conv1::Copies& copies) {
    for (int word = threadIdx.x; word < static_cast<int>(sizeof(copies) / 4); word += THREADS)
        reinterpret_cast<unsigned*>(copies)[word] = 0;
}

__device__ inline float rounded(float weight) { return static_cast<float>(__half(weight)); }

// Sums `size` values of each block over the grid, into values[0] to values[size - 1] of `partial`.
// Returns true in the threads of the block that has finished it.
__device__ inline bool sum_over_blocks(float* partial, unsigned* counters, int size) {
    const int group = blockIdx.x / GROUP, groups = (gridDim.x + GROUP - 1) / GROUP;
    const int members = min(GROUP, static_cast<int>(gridDim.x) - group * GROUP);
    if (!last_block(counters + 1 + group, members)) return false;
    float* const slot = partial + group * GROUP * size;
    for (int k = threadIdx.x; k < size; k += THREADS)
        slot[k] = strided_sum(slot, k, members * size, size);
    if (!last_block(counters, groups)) return false;
    for (int k = threadIdx.x; k < size; k += THREADS)
        partial[k] = strided_sum(partial, k, gridDim.x * size, GROUP * size);
    __syncthreads();
    return true;
}

// m and G of the patches, from their sums.
__device__ inline float patch_mean(const float* patches, int tap) {
    return patches[TAPS * SIDE + tap] / patches[TAPS * SIDE + TAPS];
}
__device__ inline float patch_covariance(const float* patches, int a, int b) {
    return patches[a * SIDE + b] / patches[TAPS * SIDE + TAPS] -
           patch_mean(patches, a) * patch_mean(patches, b);
}

// The sums of the patches, and the moments of the convolution. As a matrix product, patches have
// taps as rows and as columns, and positions as k.
extern "C" __global__ void __launch_bounds__(THREADS)
    first_block_moments(const __half* __restrict__ x, const float* __restrict__ weight,
                        float* partial, unsigned* counters, float* patches, float* mean,
                        float* variance, float* running_mean, float* running_variance, int rows) {
    alignas(16) __shared__ conv1::Copies copies;
    __shared__ float by_warp[WARPS][MOMENTS];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int g = lane / 4, t = lane % 4;
    // Of a lane's taps, one a tile of 8: from a position to its pixels, in the copy where a pair
    // is aligned.
    int offsets[4];
    for (int tile = 0; tile < 4; ++tile) {
        const int tap = tile * 8 + g, r = tap / S, s = tap % S;
        offsets[tile] =
            tap < TAPS ? (s % 2 * conv1::ROWS + r) * conv1::PITCH + s - s % 2 + 2 * t : -1;
    }
    const unsigned one = 0x3c003c00u;  // twice, in halves
    float sums[2][4][4] = {};
    clear(copies);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();
        store_image(copies, x + static_cast<size_t>(row) * H * W);
        __syncthreads();
        for (int step = warp; step < MOMENT_STEPS; step += WARPS) {
            unsigned words[4][2];
            for (int half = 0; half < 2; ++half) {
                const int at = 2 * step + half, i = at / HALVES, j = at % HALVES * 8;
                const bool inside = at < ALL_HALVES && j + 2 * t < conv1::CONV_W;
                const __half* from = copies[0][0] + (inside ? i * conv1::PITCH + j : 0);
                for (int tile = 0; tile < 4; ++tile) {
                    const bool is_tap = offsets[tile] >= 0, is_one = tile * 8 + g == TAPS;
                    const unsigned word = *reinterpret_cast<const unsigned*>(
                        from + (is_tap && inside ? offsets[tile] : 0));
                    words[tile][half] = !inside ? 0 : is_tap ? word : is_one ? one : 0;
                }
            }
            __syncwarp();
            for (int m = 0; m < 2; ++m) {
                const unsigned a[4] = {words[2 * m][0], words[2 * m + 1][0], words[2 * m][1],
                                       words[2 * m + 1][1]};
                for (int n = 0; n < 4; ++n) multiply(sums[m][n], a, words[n]);
            }
        }
    }
    for (int m = 0; m < 2; ++m)
        for (int n = 0; n < 4; ++n)
            for (int v = 0; v < 4; ++v)
                by_warp[warp][(16 * m + v / 2 * 8 + g) * SIDE + 8 * n + 2 * t + v % 2] =
                    sums[m][n][v];
    __syncthreads();
    for (int k = thread; k < MOMENTS; k += THREADS) {
        float sum = 0;
        for (int other = 0; other < WARPS; ++other) sum += by_warp[other][k];
        partial[blockIdx.x * MOMENTS + k] = sum;
    }
    if (!sum_over_blocks(partial, counters, MOMENTS)) return;
    for (int k = thread; k < MOMENTS; k += THREADS) patches[k] = partial[k];
    __syncthreads();
    // A thread has a channel and a quarter of the taps a.
    const int channel = thread % WARP, quarter = thread / WARP;
    float expected = 0, spread = 0;
    if (channel < CHANNELS) {
        for (int a = quarter; a < TAPS; a += WARPS) {
            const float weight_a = rounded(weight[channel * TAPS + a]);
            expected += weight_a * patch_mean(patches, a);
            float product = 0;
            for (int b = 0; b < TAPS; ++b)
                product += rounded(weight[channel * TAPS + b]) * patch_covariance(patches, a, b);
            spread += weight_a * product;
        }
    }
    by_warp[quarter][channel] = expected, by_warp[quarter][WARP + channel] = spread;
    __syncthreads();
    if (quarter > 0 || channel >= C) return;
    for (int other = 1; other < WARPS; ++other)
        expected += by_warp[other][channel], spread += by_warp[other][WARP + channel];
    const float biased = spread < 0 ? 0 : spread, count = patches[TAPS * SIDE + TAPS];
    const float unbiased = biased * (count / (count > 1 ? count - 1 : 1));
    mean[channel] = expected, variance[channel] = biased;
    if (channel >= CHANNELS || !isfinite(expected) || !isfinite(unbiased)) return;
    running_mean[channel] += RUNNING_SHARE * (expected - running_mean[channel]);
    running_variance[channel] += RUNNING_SHARE * (unbiased - running_variance[channel]);
}

// y and index, from the moments.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    first_block_forward(const __half* __restrict__ x, const float* __restrict__ weight,
                        const float* __restrict__ mean, const float* __restrict__ variance,
                        const float* __restrict__ gamma, const float* __restrict__ beta,
                        __half* __restrict__ y, uint8* __restrict__ index, int rows) {
    alignas(16) __shared__ conv1::Copies copies;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int g = lane / 4, t = lane % 4;
    const conv1::TapOffsets taps(lane);
    unsigned b[conv1::STEPS][TILES][2];
    for (int step = 0; step < conv1::STEPS; ++step) {
        for (int half = 0; half < 2; ++half) {
            const int pair = 8 * step + 4 * half + t;
            const int r = pair / conv1::PAIRS, s = pair % conv1::PAIRS * 2;
            for (int tile = 0; tile < TILES; ++tile) {
                const float* filter = weight + (tile * 8 + g) * TAPS + r * S + s;
                const __half2 two =
                    __floats2half2_rn(r < R ? filter[0] : 0, r < R && s + 1 < S ? filter[1] : 0);
                b[step][tile][half] = reinterpret_cast<const unsigned&>(two);
            }
        }
    }
    float scale[TILES][2], shift[TILES][2];
    for (int tile = 0; tile < TILES; ++tile) {
        for (int k = 0; k < 2; ++k) {
            const int channel = tile * 8 + 2 * t + k;
            const float factor = gamma[channel] * rsqrtf(variance[channel] + EPSILON);
            scale[tile][k] = channel < CHANNELS ? factor : 0;
            shift[tile][k] = channel < CHANNELS ? beta[channel] - mean[channel] * factor : 0;
        }
    }
    clear(copies);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();
        store_image(copies, x + static_cast<size_t>(row) * H * W);
        __syncthreads();
        for (int group = warp; group < conv1::GROUPS; group += WARPS) {
            const int quad = group * 8 + g;
            const bool inside = quad < conv1::QUADS;
            const __half* pixels = copies[0][0] + conv1::quad_offset(inside ? quad : 0);
            float sums[2][TILES][4] = {};
            __syncwarp();
#pragma unroll
            for (int step = 0; step < conv1::STEPS; ++step) {
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    unsigned a[4];
                    taps.load(pixels, step, lower, a);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        multiply(sums[lower][tile], a, b[step][tile]);
                }
            }
            if (!inside) continue;
            const size_t to = (static_cast<size_t>(row) * conv1::QUADS + quad) * C + 2 * t;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float largest[2];
                unsigned char at[2];
                for (int k = 0; k < 2; ++k) {
                    largest[k] = sums[0][tile][k] * scale[tile][k] + shift[tile][k], at[k] = 0;
                    for (int tap = 1; tap < 4; ++tap) {
                        const float z =
                            sums[tap / 2][tile][k + tap % 2 * 2] * scale[tile][k] + shift[tile][k];
                        if (z > largest[k] || isnan(z)) largest[k] = z, at[k] = tap;
                    }
                    if (largest[k] < 0) largest[k] = 0;  // keeps a NaN
                }
                *reinterpret_cast<__half2*>(y + to + tile * 8) =
                    __floats2half2_rn(largest[0], largest[1]);
                index[to + tile * 8] = at[0], index[to + tile * 8 + 1] = at[1];
            }
        }
    }
}

// The gradients. A lane is a channel and keeps its row of D in registers.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    first_block_backward(const __half* __restrict__ x, const __half* __restrict__ y,
                         const __half* __restrict__ dy, const uint8* __restrict__ index,
                         const float* __restrict__ weight, const float* __restrict__ mean,
                         const float* __restrict__ variance, const float* __restrict__ gamma,
                         const float* __restrict__ patches, float* partial, unsigned* counters,
                         float* dweight, float* dgamma, float* dbeta, int rows) {
    constexpr int VALUES = TAPS + 1, SIZE = VALUES * WARP;  // D, and the sum of dz
    constexpr int SPAN = conv1::PITCH;
    __shared__ float image[conv1::ROWS * SPAN];
    __shared__ float by_warp[WARPS][SIZE];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    float sums[R][S] = {}, total = 0;
    for (int k = thread; k < conv1::ROWS * SPAN; k += THREADS) image[k] = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();
        for (int k = thread; k < H * W; k += THREADS)
            image[(k / W + PAD_H) * SPAN + k % W + PAD_W] =
                static_cast<float>(x[static_cast<size_t>(row) * H * W + k]);
        __syncthreads();
        for (int quad = warp; quad < conv1::QUADS; quad += WARPS) {
            const size_t from = (static_cast<size_t>(row) * conv1::QUADS + quad) * C + lane;
            const bool is_channel = lane < CHANNELS;
            const float d =
                is_channel && static_cast<float>(y[from]) > 0 ? static_cast<float>(dy[from]) : 0;
            const int tap = is_channel ? index[from] : 0;
            const float* patch = image + conv1::quad_offset(quad) + tap / 2 * SPAN + tap % 2;
            total += d;
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int s = 0; s < S; ++s) sums[r][s] += d * patch[r * SPAN + s];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) by_warp[warp][(r * S + s) * WARP + lane] = sums[r][s];
    by_warp[warp][TAPS * WARP + lane] = total;
    __syncthreads();
    for (int k = thread; k < SIZE; k += THREADS) {
        float sum = 0;
        for (int other = 0; other < WARPS; ++other) sum += by_warp[other][k];
        partial[blockIdx.x * SIZE + k] = sum;
    }
    if (!sum_over_blocks(partial, counters, SIZE)) return;
    // A thread has a channel and a quarter of the taps.
    const int channel = lane;
    if (channel >= C) return;
    const bool is_channel = channel < CHANNELS;
    const float inverse = rsqrtf(variance[channel] + EPSILON);
    const float sum = partial[TAPS * WARP + channel];
    float product = 0;
    for (int a = 0; a < TAPS; ++a)
        product += rounded(weight[channel * TAPS + a]) * partial[a * WARP + channel];
    const float dscale = (product - mean[channel] * sum) * inverse;
    if (warp == 0) dgamma[channel] = is_channel ? dscale : 0, dbeta[channel] = sum;
    for (int a = warp; a < TAPS; a += WARPS) {
        float spread = 0;
        for (int b = 0; b < TAPS; ++b)
            spread += rounded(weight[channel * TAPS + b]) * patch_covariance(patches, a, b);
        const float gradient =
            partial[a * WARP + channel] - sum * patch_mean(patches, a) - dscale * inverse * spread;
        dweight[channel * TAPS + a] = is_channel ? gamma[channel] * inverse * gradient : 0;
    }
}
