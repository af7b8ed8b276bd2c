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
// deviation.) Products of halves are exact in float, sums are float. In bright images G is a small
// difference of large sums: there a value near all pixels, the pivot, is subtracted from p first.
//
// x:             halves (rows, H, W), 8-byte aligned
// weight:        float (C, R, S), rounded to halves here
// gamma, beta, mean, variance, running_mean, running_variance, dgamma, dbeta: float (C)
// patches:       float (CHANNELS + 1, R S): w G, and m as the last row
// y, dy, index:  halves, halves, uint8 (rows, QUADS_H, QUADS_W, C), 16-byte aligned; index is the
//                tap, row-major in the window, of the first maximum
// dweight:       float (C, R, S)
// partial:       gridDim.x 1024 floats; counters: ceil(gridDim.x / GROUP) + 1 zeros, reset to 0
//
// Macros besides those of conv1.cuh, with POOL MAX: C, a multiple of 8, at most 32, of which
// CHANNELS are real; EPSILON, RUNNING_SHARE. Two images must fit in shared memory, twice each.
// Grid: up to GROUP GROUP blocks of 512 threads, best one for each 2 images up to one a
// multiprocessor. The sums have the same order whenever the grid is the same.

#define SCALAR __half
#include "conv1.cuh"
#include "reduce.cuh"

#ifndef EPSILON
#define EPSILON 1e-5f
#define RUNNING_SHARE 0.1f
#endif

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int IMAGES = 2;  // of a block at a time: enough positions for its warps
constexpr int GROUP = 12;  // blocks whose sums are added first, in parallel with other groups
constexpr int TAPS = R * S, WEIGHTS = CHANNELS * TAPS;
constexpr int TILES = C / 8;
// Of a warp, without a branch between them: all steps of two images with 24 x 24 positions.
constexpr int AHEAD = 5;
constexpr int PER_THREAD = (WEIGHTS + THREADS - 1) / THREADS;

static_assert(TAPS < 32, "the constant needs a place");
static_assert(C % 8 == 0 && C <= WARP && CHANNELS <= C, "the channels are at most four tiles");
static_assert(conv1::CONV_W % 2 == 0, "positions are read in pairs");
static_assert(conv1::POOLING == MAX && conv1::CONV_H % 2 == 0, "every pixel has its window");

// N neighbours, aligned so that they are as few accesses as possible.
template <typename T, int N>
struct alignas((N & -N) * sizeof(T)) Neighbours {
    T values[N];
};

// An image twice, the second one shifted left by one pixel, as in conv1.cuh. It begins 8 banks
// after the first: so lanes that read two neighbouring taps have no bank conflict.
constexpr int SECOND = conv1::ROWS * conv1::PITCH + 16;
using Copies = __half[SECOND + conv1::ROWS * conv1::PITCH];

// The pixels of two images on their way to shared memory.
struct Pixels {
    static constexpr int LOADS = (IMAGES * conv1::WORDS + THREADS - 1) / THREADS;
    Neighbours<__half, 4> words[LOADS];

    __device__ void load(const __half* x, int first_row, int count) {
        const auto from = reinterpret_cast<const Neighbours<__half, 4>*>(x) +
                          static_cast<size_t>(first_row) * conv1::WORDS;
        for (int k = 0; k < LOADS; ++k) {
            const int at = k * THREADS + threadIdx.x;
            if (at < count * conv1::WORDS) words[k] = from[at];
        }
    }
    // Less the pivot, if there is one.
    template <bool PIVOT = false>
    __device__ void store(Copies* copies, int count, __half pivot = 0) const {
        for (int k = 0; k < LOADS; ++k) {
            const int at = k * THREADS + threadIdx.x, word = at % conv1::WORDS;
            if (at >= count * conv1::WORDS) return;
            const int i = word / (W / 4) + PAD_H, j = word % (W / 4) * 4 + PAD_W;
            __half* const to = copies[at / conv1::WORDS] + i * conv1::PITCH + j;
            for (int n = 0; n < 4; ++n) {
                const __half value = PIVOT ? words[k].values[n] - pivot : words[k].values[n];
                to[n] = value;
                if (j + n > 0) to[SECOND + n - 1] = value;
            }
        }
    }
};

// Fills the images with the padding, zeros less the pivot.
__device__ inline void clear(Copies* copies, float pivot = 0) {
    const __half2 twice = __floats2half2_rn(0 - pivot, 0 - pivot);
    const unsigned word = reinterpret_cast<const unsigned&>(twice);
    for (int k = threadIdx.x; k < static_cast<int>(IMAGES * sizeof(Copies) / 16); k += THREADS)
        reinterpret_cast<uint4*>(copies)[k] = make_uint4(word, word, word, word);
}

// About the mean of the first image's pixels; 0 if it is not bright. In sixteenths: then the
// difference from pixels above 0.5 is exact in halves. That from darker ones is rounded, by 1e-4 at
// most, and where there are many of those there is contrast.
__device__ inline float pivot_of(const __half* x) {
    float mean = static_cast<float>(x[threadIdx.x % WARP * (H * W / WARP)]) / WARP;
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        mean += __shfl_xor_sync(~0u, mean, distance);
    return mean < 0.625f ? 0 : static_cast<int>(mean * 16 + 0.5f) / 16.f;
}

__device__ inline float rounded(float weight) { return static_cast<float>(__half(weight)); }

// A lane's taps, one in each tile of 8: tap R S is the constant 1, those after it are 0.
struct LaneTaps {
    int offsets[4];
    unsigned kept[4], constants[4];

    __device__ explicit LaneTaps(int g) {
        for (int tile = 0; tile < 4; ++tile) {
            const int tap = tile * 8 + g, read = min(tap, TAPS - 1), r = read / S, s = read % S;
            offsets[tile] = s % 2 * SECOND + r * conv1::PITCH + s - s % 2;
            kept[tile] = tap < TAPS ? ~0u : 0;
            constants[tile] = tap == TAPS ? 0x3c003c00u : 0;  // 1 twice, in halves
        }
    }
    // The tap's pixels for two neighbouring positions, the first one in an even column.
    __device__ unsigned load(const __half* position, int tile) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(position + offsets[tile]);
        return 8 * tile + 8 <= TAPS ? word : (word & kept[tile]) | constants[tile];
    }
};

// Where an element of a tile of 16 x 8 is among the sums of a warp: sum v of lane l at 32 v + l.
__device__ inline int fragment(int tile, int row, int column) {
    return tile * 128 + (row / 8 * 2 + column % 2) * WARP + row % 8 * 4 + column / 2;
}

template <int SUM_TILES>
constexpr int SCRATCH =  // bytes: the images, and after them the sums of half of the warps
    conv1::larger(IMAGES * sizeof(Copies), WARPS / 2 * SUM_TILES * 128 * sizeof(float));

// The sum of from[0], from[STEP], ... in this order. All loads come before the first sum.
template <int STEP>
__device__ inline float2 sum_of(const float2* from, int count) {
    float2 loaded[GROUP], sum = {0, 0};
#pragma unroll
    for (int k = 0; k < GROUP; ++k) loaded[k] = k < count ? from[k * STEP] : make_float2(0, 0);
#pragma unroll
    for (int k = 0; k < GROUP; ++k) sum.x += loaded[k].x, sum.y += loaded[k].y;
    return sum;
}

// Adds the sums of a block's warps, then those of the blocks of each group. Value k < SIZE, an even
// number, is place(k) among the sums of a warp. Returns true in the threads of the block that
// finishes last, where sum_of_groups then gives the sums of the grid.
template <int SIZE, int SUM_TILES, typename Place>
__device__ inline bool sum_in_groups(const float (&sums)[SUM_TILES][4], unsigned char* scratch,
                                     float* partial, unsigned* counters, Place place) {
    constexpr int ALL = SUM_TILES * 128, HALF = WARPS / 2;
    static_assert(SIZE <= 2 * THREADS && SIZE % 2 == 0, "a thread adds two values");
    const int thread = threadIdx.x, warp = thread / WARP;
    float* const by_warp = reinterpret_cast<float*>(scratch);
    float* const own = by_warp + warp % HALF * ALL + thread % WARP;
    __syncthreads();
    if (warp >= HALF)
        for (int k = 0; k < 4 * SUM_TILES; ++k) own[k * WARP] = sums[k / 4][k % 4];
    __syncthreads();
    if (warp < HALF)
        for (int k = 0; k < 4 * SUM_TILES; ++k) own[k * WARP] += sums[k / 4][k % 4];
    __syncthreads();
#pragma unroll
    for (int first = 0; first < ALL; first += THREADS) {
        const int k = first + thread;
        if (k >= ALL) break;
        float sum = 0;
#pragma unroll
        for (int other = 0; other < HALF; ++other) sum += by_warp[other * ALL + k];
        by_warp[k] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int first = 0; first < SIZE; first += THREADS) {
        const int k = first + thread;
        if (k < SIZE) partial[blockIdx.x * SIZE + k] = by_warp[place(k)];
    }

    const int blocks = gridDim.x, group = blockIdx.x / GROUP;
    const int members = min(GROUP, blocks - group * GROUP);
    if (!last_block(counters + 1 + group, members)) return false;
    const auto slot = reinterpret_cast<float2*>(partial + group * GROUP * SIZE) + thread;
    if (thread < SIZE / 2) *slot = sum_of<SIZE / 2>(slot, members);
    return last_block(counters, (blocks + GROUP - 1) / GROUP);
}

template <int SIZE>
__device__ inline void sum_of_groups(const float* partial, float* totals) {
    const int thread = threadIdx.x, groups = (static_cast<int>(gridDim.x) + GROUP - 1) / GROUP;
    if (thread < SIZE / 2)
        reinterpret_cast<float2*>(totals)[thread] =
            sum_of<GROUP * SIZE / 2>(reinterpret_cast<const float2*>(partial) + thread, groups);
}

// The sum of a channel's R S values in shared memory. R S is often odd: then no bank conflicts.
__device__ inline float sum_of_taps(const float* values, int channel) {
    float sum = 0;
#pragma unroll
    for (int a = 0; a < TAPS; ++a) sum += values[channel * TAPS + a];
    return sum;
}

// The matrix of the patches is symmetric, EDGE x EDGE with an even EDGE. Of its upper triangle,
// rows p and EDGE - 1 - p have EDGE + 1 values together: they are row p of what is summed.
constexpr int EDGE = (TAPS + 2) / 2 * 2;
constexpr int MOMENTS = (EDGE / 2 * (EDGE + 1) + 1) / 2 * 2;

__device__ inline int moment_place(int k) {
    const int p = k / (EDGE + 1), q = k % (EDGE + 1);
    const bool upper = q < EDGE - p;
    const int a = upper ? p : EDGE - 1 - p, b = upper ? p + q : q - 1;
    return fragment(a / 16 * 2 + b / 8, a % 16, b % 8);
}
__device__ inline float moment(const float* totals, int a, int b) {
    const int row = min(a, b), column = a + b - row;
    return totals[row < EDGE / 2 ? row * EDGE + column
                                 : (EDGE - 1 - row) * (EDGE + 1) + column + 1];
}

// The moments of the patches, and with them those of the convolution. As a matrix product, patches
// have taps as rows and as columns, and positions as k: a step has twice 8 positions of a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    first_block_moments(const __half* __restrict__ x, const float* __restrict__ weight,
                        float* partial, unsigned* counters, float* patches, float* mean,
                        float* variance, float* running_mean, float* running_variance, int rows) {
    constexpr int IN_ROW = (conv1::CONV_W + 7) / 8, EIGHTS = conv1::CONV_H * IN_ROW;
    constexpr int STEPS = (EIGHTS + 1) / 2, SUM_TILES = 6;  // the upper triangle of 2 x 4
    alignas(16) __shared__ unsigned char scratch[SCRATCH<SUM_TILES>];
    const auto copies = reinterpret_cast<Copies*>(scratch);
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int g = lane / 4, t = lane % 4, first_row = blockIdx.x * IMAGES;
    const LaneTaps taps(g);
    float sums[SUM_TILES][4] = {};
    Pixels pixels;
    pixels.load(x, first_row, min(IMAGES, rows - first_row));
    const float pivot = pivot_of(x);
    clear(copies, pivot);
    for (int row = first_row; row < rows; row += gridDim.x * IMAGES) {
        const int count = min(IMAGES, rows - row), next = row + gridDim.x * IMAGES;
        __syncthreads();
        pixels.store<true>(copies, count, pivot);
        __syncthreads();
        pixels.load(x, next, min(IMAGES, rows - next));
        for (int first = warp; first < count * STEPS; first += AHEAD * WARPS) {
            __syncwarp();
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const int task = min(first + k * WARPS, count * STEPS - 1);
                unsigned words[4][2];
                for (int half = 0; half < 2; ++half) {
                    const int at = task % STEPS * 2 + half, j = at % IN_ROW * 8 + 2 * t;
                    const bool inside = task == first + k * WARPS &&
                                        (EIGHTS % 2 == 0 || at < EIGHTS) &&
                                        (conv1::CONV_W % 8 == 0 || j < conv1::CONV_W);
                    const __half* from =
                        copies[task / STEPS] + (inside ? at / IN_ROW * conv1::PITCH + j : 0);
                    for (int tile = 0; tile < 4; ++tile)
                        words[tile][half] = taps.load(from, tile) & (inside ? ~0u : 0);
                }
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const unsigned a[4] = {words[2 * m][0], words[2 * m + 1][0], words[2 * m][1],
                                           words[2 * m + 1][1]};
#pragma unroll
                    for (int n = 2 * m; n < 4; ++n) multiply(sums[2 * m + n], a, words[n]);
                }
            }
        }
    }
    if (!sum_in_groups<MOMENTS>(sums, scratch, partial, counters, moment_place)) return;

    alignas(16) __shared__ float totals[MOMENTS];
    __shared__ float weights[WEIGHTS], products[WEIGHTS], covariance[TAPS * TAPS];
    float own[PER_THREAD], moved[2] = {};  // loaded together with the sums
    for (int k = 0; k < PER_THREAD; ++k)
        own[k] = k * THREADS + thread < WEIGHTS ? weight[k * THREADS + thread] : 0;
    if (thread < CHANNELS) moved[0] = running_mean[thread], moved[1] = running_variance[thread];
    sum_of_groups<MOMENTS>(partial, totals);
    for (int k = 0; k < PER_THREAD; ++k)
        if (k * THREADS + thread < WEIGHTS) weights[k * THREADS + thread] = rounded(own[k]);
    __syncthreads();
    const float positions = moment(totals, TAPS, TAPS), inverse = 1 / positions;
    for (int k = thread; k < TAPS * TAPS; k += THREADS) {
        const int a = k / TAPS, b = k % TAPS;
        const float mean_b = moment(totals, b, TAPS) * inverse;
        covariance[k] = (moment(totals, a, b) - moment(totals, a, TAPS) * mean_b) * inverse;
    }
    if (thread < TAPS) patches[WEIGHTS + thread] = moment(totals, thread, TAPS) * inverse + pivot;
    __syncthreads();
    for (int k = thread; k < WEIGHTS; k += THREADS) {
        const int channel = k / TAPS, a = k % TAPS;
        float product = 0;
#pragma unroll
        for (int b = 0; b < TAPS; ++b)  // symmetric: so read, lanes have no bank conflicts
            product += weights[channel * TAPS + b] * covariance[b * TAPS + a];
        patches[k] = product, products[k] = weights[k] * product;
    }
    __syncthreads();
    if (thread >= C) return;
    float expected = 0, biased = 0;
    if (thread < CHANNELS) {
        for (int a = 0; a < TAPS; ++a)
            expected += weights[thread * TAPS + a] * (moment(totals, a, TAPS) * inverse + pivot);
        biased = sum_of_taps(products, thread);
    }
    if (biased < 0) biased = 0;  // keeps a NaN
    const float unbiased = biased * (positions / (positions > 1 ? positions - 1 : 1));
    mean[thread] = expected, variance[thread] = biased;
    if (thread >= CHANNELS || !isfinite(expected) || !isfinite(unbiased)) return;
    running_mean[thread] = moved[0] + RUNNING_SHARE * (expected - moved[0]);
    running_variance[thread] = moved[1] + RUNNING_SHARE * (unbiased - moved[1]);
}

// y and index, from the moments. Rows, columns and k of the matrix product are those of conv1.cuh,
// but column c of tile n is channel c / 2 2 TILES + 2 n + c % 2: so those of a lane are neighbours.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    first_block_forward(const __half* __restrict__ x, const float* __restrict__ weight,
                        const float* __restrict__ mean, const float* __restrict__ variance,
                        const float* __restrict__ gamma, const float* __restrict__ beta,
                        __half* __restrict__ y, uint8* __restrict__ index, int rows) {
    constexpr int LANE_CHANNELS = 2 * TILES, TAP_PAIRS = 8 * conv1::STEPS;
    alignas(16) __shared__ Copies copies[IMAGES];
    __shared__ unsigned filter[C][TAP_PAIRS + 1];  // halves; one more: fewer bank conflicts
    __shared__ float scales[C], shifts[C];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int g = lane / 4, t = lane % 4, first_row = blockIdx.x * IMAGES;
    Pixels pixels;
    pixels.load(x, first_row, min(IMAGES, rows - first_row));
    // Loaded here, used after the loop: one latency instead of two.
    const int own = min(thread, CHANNELS - 1);
    const float expected = mean[own], spread = variance[own], slope = gamma[own], start = beta[own];
    for (int k = thread; k < C * TAP_PAIRS; k += THREADS) {
        const int channel = k / TAP_PAIRS, pair = k % TAP_PAIRS;
        const int r = pair / conv1::PAIRS, s = pair % conv1::PAIRS * 2;
        const float* from = weight + channel * TAPS + r * S + s;
        const __half2 two =
            __floats2half2_rn(r < R ? from[0] : 0, r < R && s + 1 < S ? from[1] : 0);
        filter[channel][pair] = reinterpret_cast<const unsigned&>(two);
    }
    if (thread < C) {
        const float factor = slope * rsqrtf(spread + EPSILON);
        scales[thread] = thread < CHANNELS ? factor : 0;
        shifts[thread] = thread < CHANNELS ? start - expected * factor : 0;
    }
    clear(copies);
    __syncthreads();
    const conv1::TapOffsets taps(lane);
    unsigned b[conv1::STEPS][TILES][2];
    for (int step = 0; step < conv1::STEPS; ++step)
        for (int tile = 0; tile < TILES; ++tile)
            for (int half = 0; half < 2; ++half)
                b[step][tile][half] =
                    filter[g / 2 * LANE_CHANNELS + 2 * tile + g % 2][8 * step + 4 * half + t];
    float scale[LANE_CHANNELS], shift[LANE_CHANNELS];
    for (int k = 0; k < LANE_CHANNELS; ++k)
        scale[k] = scales[t * LANE_CHANNELS + k], shift[k] = shifts[t * LANE_CHANNELS + k];

    for (int row = first_row; row < rows; row += gridDim.x * IMAGES) {
        const int count = min(IMAGES, rows - row), next = row + gridDim.x * IMAGES;
        __syncthreads();
        pixels.store(copies, count);
        __syncthreads();
        pixels.load(x, next, min(IMAGES, rows - next));
        for (int task = warp; task < count * conv1::GROUPS; task += WARPS) {
            const int image = task / conv1::GROUPS, quad = task % conv1::GROUPS * 8 + g;
            const bool inside = quad < conv1::QUADS;
            const __half* pixel = copies[image] + conv1::quad_offset(inside ? quad : 0);
            float sums[2][TILES][4] = {};
            __syncwarp();
#pragma unroll
            for (int step = 0; step < conv1::STEPS; ++step) {
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    unsigned a[4];
                    for (int k = 0; k < 4; ++k)
                        a[k] = *reinterpret_cast<const unsigned*>(pixel + lower * conv1::PITCH +
                                                                  taps.offsets[step][k / 2] +
                                                                  k % 2 * SECOND);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        multiply(sums[lower][tile], a, b[step][tile]);
                }
            }
            if (!inside) continue;
            // A NaN of one pixel comes from a weight, and makes the channel's shift NaN too: so it
            // is enough if the first z stays.
            Neighbours<unsigned, TILES> largest;  // halves in twos
            Neighbours<uint8, LANE_CHANNELS> taps_of_largest;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float values[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int channel = 2 * tile + k;
                    float& value = values[k];
                    unsigned char at = 0;
                    value = sums[0][tile][k] * scale[channel] + shift[channel];
#pragma unroll
                    for (int tap = 1; tap < 4; ++tap) {
                        const float z =
                            sums[tap / 2][tile][k + tap % 2 * 2] * scale[channel] + shift[channel];
                        if (z > value) value = z, at = tap;
                    }
                    if (value < 0) value = 0;  // keeps a NaN
                    taps_of_largest.values[channel] = at;
                }
                const __half2 two = __floats2half2_rn(values[0], values[1]);
                largest.values[tile] = reinterpret_cast<const unsigned&>(two);
            }
            const size_t to =
                (static_cast<size_t>(row + image) * conv1::QUADS + quad) * C + t * LANE_CHANNELS;
            const unsigned (&words)[TILES] = largest.values;
            if constexpr (TILES == 4)  // nvcc 13 does not merge these stores itself
                __stcg(reinterpret_cast<uint4*>(y + to),
                       make_uint4(words[0], words[1], words[2], words[3]));
            else
                *reinterpret_cast<Neighbours<unsigned, TILES>*>(y + to) = largest;
            *reinterpret_cast<Neighbours<uint8, LANE_CHANNELS>*>(index + to) = taps_of_largest;
        }
    }
}

// The gradients. As a matrix product, D has taps as rows, channels as columns, and positions as k.
// A step has 4 windows: k = 2 t and 2 t + 1 are the upper pixels of window t, 8 more the lower
// ones. So one lane makes the four values of dz of a window and channel. Column c of tile n is
// channel TILES c + n: so those of a lane are neighbours.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    first_block_backward(const __half* __restrict__ x, const __half* __restrict__ y,
                         const __half* __restrict__ dy, const uint8* __restrict__ index,
                         const float* __restrict__ weight, const float* __restrict__ mean,
                         const float* __restrict__ variance, const float* __restrict__ gamma,
                         const float* __restrict__ patches, float* partial, unsigned* counters,
                         float* dweight, float* dgamma, float* dbeta, int rows) {
    constexpr int STEPS = (conv1::QUADS + 3) / 4, SUM_TILES = 2 * TILES;
    constexpr int SIZE = (WEIGHTS + CHANNELS + 1) / 2 * 2;  // D as weights are, and dbeta
    alignas(16) __shared__ unsigned char scratch[SCRATCH<SUM_TILES>];
    const auto copies = reinterpret_cast<Copies*>(scratch);
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int g = lane / 4, t = lane % 4, first_row = blockIdx.x * IMAGES;
    const LaneTaps taps(g);
    float sums[SUM_TILES][4] = {};
    clear(copies);
    for (int row = first_row; row < rows; row += gridDim.x * IMAGES) {
        const int count = min(IMAGES, rows - row), tasks = count * STEPS;
        Pixels pixels;
        pixels.load(x, row, count);
        for (int first = 0; first < tasks; first += AHEAD * WARPS) {
            // Loaded without a branch, so that no load waits for another; padding has y = 0.
            Neighbours<__half, TILES> outputs[AHEAD], gradients[AHEAD];
            Neighbours<uint8, TILES> maxima[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const int task = min(first + k * WARPS + warp, tasks - 1);
                const int quad = min(task % STEPS * 4 + t, conv1::QUADS - 1);
                const size_t from =
                    (static_cast<size_t>(row + task / STEPS) * conv1::QUADS + quad) * C + g * TILES;
                outputs[k] = *reinterpret_cast<const Neighbours<__half, TILES>*>(y + from);
                gradients[k] = *reinterpret_cast<const Neighbours<__half, TILES>*>(dy + from);
                maxima[k] = *reinterpret_cast<const Neighbours<uint8, TILES>*>(index + from);
            }
            if (first == 0) {  // while these are loaded
                __syncthreads();
                pixels.store(copies, count);
                __syncthreads();
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const int task = min(first + k * WARPS + warp, tasks - 1);
                const int quad = min(task % STEPS * 4 + t, conv1::QUADS - 1);
                const bool inside = task == first + k * WARPS + warp &&
                                    (conv1::QUADS % 4 == 0 || task % STEPS * 4 + t == quad);
                const __half* pixel = copies[task / STEPS] + conv1::quad_offset(quad);
                unsigned a[2][4];
                for (int m = 0; m < 2; ++m)
                    for (int v = 0; v < 4; ++v)
                        a[m][v] = taps.load(pixel + v / 2 * conv1::PITCH, 2 * m + v % 2);
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const bool passes = inside & (static_cast<float>(outputs[k].values[n]) > 0);
                    const unsigned d = reinterpret_cast<const uint16&>(gradients[k].values[n]) &
                                       (passes ? ~0u : 0);
                    const uint64 window = static_cast<uint64>(d) << 16 * maxima[k].values[n];
                    const unsigned b[2] = {static_cast<unsigned>(window),
                                           static_cast<unsigned>(window >> 32)};
                    for (int m = 0; m < 2; ++m) multiply(sums[m * TILES + n], a[m], b);
                }
            }
        }
    }
    const auto place = [](int k) {
        const int tap = k < WEIGHTS ? k % TAPS : TAPS;
        const int channel = k < WEIGHTS ? k / TAPS : k - WEIGHTS;
        return fragment(tap / 16 * TILES + channel % TILES, tap % 16, channel / TILES);
    };
    if (!sum_in_groups<SIZE>(sums, scratch, partial, counters, place)) return;

    alignas(16) __shared__ float totals[SIZE];
    __shared__ float products[WEIGHTS], scales[CHANNELS], slopes[CHANNELS];
    float own[PER_THREAD], spread[PER_THREAD], means[PER_THREAD];  // loaded together with the sums
    for (int k = 0; k < PER_THREAD; ++k) {
        const int at = min(k * THREADS + thread, WEIGHTS - 1);
        own[k] = rounded(weight[at]), spread[k] = patches[at];
        means[k] = patches[WEIGHTS + at % TAPS];
    }
    const int channel = min(thread, CHANNELS - 1);
    const float expected = mean[channel], factor = gamma[channel];
    const float inverse = rsqrtf(variance[channel] + EPSILON);
    sum_of_groups<SIZE>(partial, totals);
    __syncthreads();
    for (int k = 0; k < PER_THREAD; ++k) {
        const int at = k * THREADS + thread;
        if (at < WEIGHTS) products[at] = own[k] * totals[at];
    }
    __syncthreads();
    if (thread < CHANNELS) {
        const float sum = totals[WEIGHTS + thread];
        const float slope = (sum_of_taps(products, thread) - expected * sum) * inverse;
        dgamma[thread] = slope, dbeta[thread] = sum;
        scales[thread] = factor * inverse, slopes[thread] = slope * inverse;
    } else if (thread < C) {
        dgamma[thread] = dbeta[thread] = 0;
    }
    __syncthreads();
    for (int k = 0; k < PER_THREAD; ++k) {
        const int at = k * THREADS + thread, of = at / TAPS;
        if (at < WEIGHTS)
            dweight[at] = scales[of] *
                          (totals[at] - totals[WEIGHTS + of] * means[k] - slopes[of] * spread[k]);
    }
    for (int k = WEIGHTS + thread; k < C * TAPS; k += THREADS) dweight[k] = 0;
}
