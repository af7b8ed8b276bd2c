// The gradient of a block's epilogue, and the moments that batch norm needs in training. The
// forward pass is lenet/cuda/epilogue.cu, whose names are used here:
//
//     z = (x - mean) / sqrt(variance + EPSILON) * gamma + beta     NORM 1
//     z = x + beta                                                 NORM 0: beta is the bias
//     a = ACTIVATION(z),  y = POOL(a)
//
// x, dx:         SCALAR (rows, H, W, C), of a dense layer H = W = 1; 16-byte aligned
// dy, index:     (rows, OH, OW, C); index is the tap, row-major in the window, of the first maximum
// mean, variance, gamma, beta, running_mean, running_variance: float (C); the variance is biased,
//     a sum divided by the count, the running one unbiased
// sums:          float (2, C)
//
// Macros and launch geometry: epilogue.cuh, and RUNNING_SHARE, the weight of a batch in the running
// mean and variance. The kernels that sum take up to 512 threads; their sums have the same order
// whenever the grid is the same. Fastest on an H200 at the shapes of lenet (2026-11-20): 132 blocks
// in all for the sums, 528 for epilogue_backward, but 396 on halves. (The second number in the
// launch bounds, blocks that a multiprocessor must hold: without it nvcc 13.0 uses only 40
// registers and spills.)

#include "epilogue.cuh"
#include "reduce.cuh"

#ifndef RUNNING_SHARE
#define RUNNING_SHARE 0.1f
#endif

constexpr int MAX_SUM_THREADS = 512;

// How many windows can cover a pixel, along each axis: one, where they do not overlap.
constexpr int COVER_H = (WINDOW_H + STEP_H - 1) / STEP_H;
constexpr int COVER_W = (WINDOW_W + STEP_W - 1) / STEP_W;

// Sums `values` over the threads of all blocks of this tile, into sums (PLANES, C).
//
// Within a warp, over the warps, over the blocks: always in the same order for the same grid.
// Returns true in the threads of the block that finishes, which may then read its channels' sums.
// partial: gridDim.x gridDim.y PLANES TILE_CHANNELS floats; counters: gridDim.y zeros, reset to 0.
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
            for (int distance = WARP / 2; distance >= TILE; distance /= 2)
                value += __shfl_xor_sync(~0u, value, distance);
            if (lane < TILE)
                shared[thread / WARP][plane * TILE_CHANNELS + lane * LANES + k] = value;
        }
    }
    __syncthreads();
    float sum = 0;
    if (thread < VALUES)
        for (int warp = 0; warp < blockDim.x / WARP; ++warp) sum += shared[warp][thread];
    if (gridDim.x > 1) {
        float* mine = partial + blockIdx.y * gridDim.x * VALUES;
        if (thread < VALUES) mine[blockIdx.x * VALUES + thread] = sum;
        if (!last_block(counters + blockIdx.y, gridDim.x)) return false;

        const int groups = blockDim.x / VALUES, value = thread % VALUES;
        const int end = gridDim.x * VALUES;
        sum = strided_sum(mine, thread / VALUES * VALUES + value, end, groups * VALUES);
        grouped[thread] = sum;
        __syncthreads();
        if (thread < VALUES)
            for (int group = 1; group < groups; ++group) sum += grouped[group * VALUES + thread];
    }
    const int channel = blockIdx.y * TILE_CHANNELS + thread % TILE_CHANNELS;
    if (thread < VALUES && channel < C)
        sums[thread / TILE_CHANNELS * C + channel] = channel < CHANNELS ? sum : 0;
    __syncthreads();
    return true;
}

// Mean and variance of one channel from the sums of x - running_mean and of its square. Updates the
// running ones unless the new ones are not finite. They move in a step in which only a gradient
// overflows.
__device__ inline float2 moments(int channel, float sum, float squares, int count, float* mean,
                                 float* variance, float* running_mean, float* running_variance) {
    const float offset = sum / count, pivot = running_mean[channel];
    const float difference = squares / count - offset * offset;
    const float biased = difference < 0 ? 0 : difference;
    mean[channel] = pivot + offset;
    variance[channel] = biased;
    const float unbiased = biased * (static_cast<float>(count) / (count > 1 ? count - 1 : 1));
    const float old = running_variance[channel];
    if (channel < CHANNELS && isfinite(offset) && isfinite(unbiased)) {
        running_mean[channel] = pivot + RUNNING_SHARE * offset;
        running_variance[channel] = old + RUNNING_SHARE * (unbiased - old);
    }
    return make_float2(pivot + offset, biased);
}

// sums: of x - running_mean and of its square, over rows H W. Subtracting running_mean, the pivot,
// keeps their difference from cancelling; the error of the variance is about
// 1e-7 (mean - pivot)^2. With `finish` also computes the moments; with several GPUs, sums are
// all-reduced first and epilogue_moments computes them.
extern "C" __global__ void __launch_bounds__(MAX_SUM_THREADS)
    epilogue_statistics(const SCALAR* __restrict__ x, float* partial, unsigned* counters,
                        float* sums, float* mean, float* variance, float* running_mean,
                        float* running_variance, int rows, int finish) {
    const Walk walk;
    float values[2][LANES] = {}, pivot[LANES];
    if (walk.channel < C) {
        load_floats(running_mean + walk.channel, pivot);
        // All loads of a batch come first, as in strided_sum; beyond the end they repeat the last
        // pixel, which is then ignored.
        constexpr int BATCH = 4;
        const int pixels = rows * H * W;
        for (int first = walk.pixel; first < pixels; first += BATCH * walk.step) {
            float value[BATCH][LANES];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int pixel = min(first + b * walk.step, pixels - 1);
                load(x + static_cast<size_t>(pixel) * C + walk.channel, value[b]);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                for (int k = 0; k < LANES; ++k) {
                    const float offset =
                        first + b * walk.step < pixels ? value[b][k] - pivot[k] : 0;
                    values[0][k] += offset;
                    values[1][k] += offset * offset;
                }
            }
        }
    }
    const bool last = sum_over_grid(values, partial, counters, sums);
    const int channel = blockIdx.y * TILE_CHANNELS + threadIdx.x;
    if (last && finish && threadIdx.x < TILE_CHANNELS && channel < C)
        moments(channel, sums[channel], sums[C + channel], rows * H * W, mean, variance,
                running_mean, running_variance);
}

// One thread a channel. count: elements of a channel over all GPUs.
extern "C" __global__ void epilogue_moments(const float* sums, int count, float* mean,
                                            float* variance, float* running_mean,
                                            float* running_variance) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel < C)
        moments(channel, sums[channel], sums[C + channel], count, mean, variance, running_mean,
                running_variance);
}

// da, the gradient of the activation at pixel (row, i, j), summed over the windows that cover it.
__device__ inline void activation_gradient(const SCALAR* __restrict__ dy,
                                           const INDEX* __restrict__ index, int row, int i, int j,
                                           int channel, float (&da)[LANES]) {
    for (int k = 0; k < LANES; ++k) da[k] = 0;
#pragma unroll
    for (int up = 0; up < COVER_H; ++up) {
#pragma unroll
        for (int back = 0; back < COVER_W; ++back) {
            const int out_i = (i + PAD_H) / STEP_H - up, out_j = (j + PAD_W) / STEP_W - back;
            const int r = i + PAD_H - out_i * STEP_H, s = j + PAD_W - out_j * STEP_W;
            if (out_i < 0 || out_i >= OH || r >= WINDOW_H) continue;
            if (out_j < 0 || out_j >= OW || s >= WINDOW_W) continue;
            const size_t at = static_cast<size_t>((row * OH + out_i) * OW + out_j) * C + channel;
            float gradient[LANES];
            load(dy + at, gradient);
            if (POOLING == MAX) {
                const auto taps = *reinterpret_cast<const Pack<INDEX>*>(index + at);
                for (int k = 0; k < LANES; ++k)
                    if (taps.values[k] == r * WINDOW_W + s) da[k] += gradient[k];
            } else {
                for (int k = 0; k < LANES; ++k) da[k] += gradient[k] * (1.0f / AREA);
            }
        }
    }
}

// sums[0] = sum of dz, the gradient of beta or the bias; sums[1], with NORM only, = sum of dz times
// the normalized value, the gradient of gamma. For a maximum over the windows, which have one dz
// each, else over the pixels.
extern "C" __global__ void __launch_bounds__(MAX_SUM_THREADS)
    epilogue_backward_sums(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
                           const INDEX* __restrict__ index, const float* __restrict__ mean,
                           const float* __restrict__ variance, const float* __restrict__ gamma,
                           const float* __restrict__ beta, float* partial, unsigned* counters,
                           float* sums, int rows) {
    const Walk walk;
    float values[NORM ? 2 : 1][LANES] = {};
    if (walk.channel < C) {
        const Normalization norm(walk.channel, mean, variance, gamma, beta);
        const int pixels = rows * (POOLING == MAX ? OH * OW : H * W);
        for (int pixel = walk.pixel; pixel < pixels; pixel += walk.step) {
            const size_t at = static_cast<size_t>(pixel) * C + walk.channel;
            float value[LANES] = {}, da[LANES];
            if (POOLING == MAX) {
                const auto taps = *reinterpret_cast<const Pack<INDEX>*>(index + at);
                load(dy + at, da);
                for_each_tap(pixel, [&](int tap, size_t from) {
                    float candidate[LANES];
                    load(x + from + walk.channel, candidate);
                    for (int k = 0; k < LANES; ++k)
                        if (taps.values[k] == tap) value[k] = candidate[k];
                });
            } else {
                load(x + at, value);
                activation_gradient(dy, index, pixel / (H * W), pixel / W % H, pixel % W,
                                    walk.channel, da);
            }
            for (int k = 0; k < LANES; ++k) {
                const float centred = norm.centred(k, value[k]);
                const float dz = da[k] * Activation::slope(norm.z(k, centred));
                values[0][k] += dz;
                if (NORM) values[NORM][k] += dz * centred;
            }
        }
        for (int k = 0; NORM && k < LANES; ++k) values[NORM][k] *= norm.inverse[k];
    }
    sum_over_grid(values, partial, counters, sums);
}

// dx = dz or, with NORM, gamma / deviation (dz - sums[0] / count - normalized sums[1] / count);
// sums and count, the elements of a channel, are those of all GPUs.
extern "C" __global__ void __launch_bounds__(256, 3)
    epilogue_backward(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
                      const INDEX* __restrict__ index, const float* __restrict__ mean,
                      const float* __restrict__ variance, const float* __restrict__ gamma,
                      const float* __restrict__ beta, const float* __restrict__ sums,
                      SCALAR* __restrict__ dx, int rows, int count) {
    const Walk walk;
    if (walk.channel >= C) return;
    const Normalization norm(walk.channel, mean, variance, gamma, beta);
    float dbeta[LANES], dgamma[LANES];  // scaled
    if (NORM) {
        load_floats(sums + walk.channel, dbeta);
        load_floats(sums + C + walk.channel, dgamma);
        for (int k = 0; k < LANES; ++k) {
            dbeta[k] *= norm.scale[k] / count;
            dgamma[k] *= norm.scale[k] * norm.inverse[k] / count;
        }
    }
    for (int pixel = walk.pixel; pixel < rows * H * W; pixel += walk.step) {
        const size_t at = static_cast<size_t>(pixel) * C + walk.channel;
        float value[LANES], gradient[LANES];
        load(x + at, value);
        activation_gradient(dy, index, pixel / (H * W), pixel / W % H, pixel % W, walk.channel,
                            gradient);
        for (int k = 0; k < LANES; ++k) {
            const float centred = norm.centred(k, value[k]);
            float d = gradient[k] * Activation::slope(norm.z(k, centred));
            if (NORM) d = norm.scale[k] * d - dbeta[k] - centred * dgamma[k];
            gradient[k] = walk.channel + k < CHANNELS ? d : 0;
        }
        store(dx + at, gradient);
    }
}

// The two kernels below compute one epilogue without pooling of few pixels, as a dense layer's, in
// one launch: a block has a vector of channels, and a thread a pixel, which it reads once.
// Grid: C / LANES blocks; threads: rows H W, rounded up to whole warps, at most MAX_PIXELS.
constexpr int MAX_PIXELS = 512;

// Sums `values` over the threads of a block, into totals: always in the same order, and 0 for
// padded channels.
template <int PLANES>
__device__ inline void sum_over_block(const float (&values)[PLANES][LANES], int channel,
                                      float (&totals)[PLANES][LANES]) {
    __shared__ float shared[PLANES * LANES][MAX_PIXELS];
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < PLANES * LANES; ++k) shared[k][threadIdx.x] = values[k / LANES][k % LANES];
    __syncthreads();
#pragma unroll 1
    for (int k = threadIdx.x / WARP; k < PLANES * LANES; k += blockDim.x / WARP) {
        float sum = 0;
#pragma unroll 4
        for (int from = lane; from < blockDim.x; from += WARP) sum += shared[k][from];
        for (int distance = WARP / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) totals[k / LANES][k % LANES] = channel + k % LANES < CHANNELS ? sum : 0;
    }
    __syncthreads();
}

// The moments, and y. NORM is 1.
extern "C" __global__ void __launch_bounds__(MAX_PIXELS, 1)
    epilogue_normalize(const SCALAR* __restrict__ x, const float* __restrict__ gamma,
                       const float* __restrict__ beta, SCALAR* __restrict__ y,
                       float* __restrict__ mean, float* __restrict__ variance, float* running_mean,
                       float* running_variance, int rows) {
    __shared__ float totals[2][LANES], means[LANES], scales[LANES], shifts[LANES];
    const int channel = blockIdx.x * LANES, count = rows * H * W, own = threadIdx.x;
    const bool inside = threadIdx.x < count;
    const size_t at = static_cast<size_t>(threadIdx.x) * C + channel;
    float value[LANES] = {}, pivot[LANES], sums[2][LANES], slope = 0;
    load_floats(running_mean + channel, pivot);
    if (inside) load(x + at, value);
    if (own < LANES) slope = gamma[channel + own], shifts[own] = beta[channel + own];
    for (int k = 0; k < LANES; ++k) {
        const float offset = inside ? value[k] - pivot[k] : 0;
        sums[0][k] = offset, sums[1][k] = offset * offset;
    }
    sum_over_block(sums, channel, totals);
    if (own < LANES) {
        const float2 found = moments(channel + own, totals[0][own], totals[1][own], count, mean,
                                     variance, running_mean, running_variance);
        means[own] = found.x, scales[own] = slope * rsqrtf(found.y + EPSILON);
    }
    __syncthreads();
    for (int k = 0; k < LANES; ++k) {
        const float a = Activation::value((value[k] - means[k]) * scales[k] + shifts[k]);
        value[k] = channel + k < CHANNELS ? a : 0;
    }
    if (inside) store(y + at, value);
}

// The sums and dx.
extern "C" __global__ void __launch_bounds__(MAX_PIXELS, 1)
    epilogue_gradients(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
                       const float* __restrict__ mean, const float* __restrict__ variance,
                       const float* __restrict__ gamma, const float* __restrict__ beta,
                       float* __restrict__ sums, SCALAR* __restrict__ dx, int rows) {
    __shared__ float totals[NORM + 1][LANES];
    const int channel = blockIdx.x * LANES, count = rows * H * W;
    const bool inside = threadIdx.x < count;
    const size_t at = static_cast<size_t>(threadIdx.x) * C + channel;
    float value[LANES] = {}, gradient[LANES] = {}, values[NORM + 1][LANES];
    if (inside) load(x + at, value), load(dy + at, gradient);
    const Normalization norm(channel, mean, variance, gamma, beta);
    for (int k = 0; k < LANES; ++k) {
        value[k] = norm.centred(k, value[k]);
        values[0][k] = gradient[k] *= Activation::slope(norm.z(k, value[k]));
        if (NORM) values[NORM][k] = gradient[k] * value[k] * norm.inverse[k];
    }
    sum_over_block(values, channel, totals);
    const float share = 1.0f / count;
    for (int k = 0; k < LANES; ++k) {
        if (NORM)
            gradient[k] = norm.scale[k] * (gradient[k] - share * totals[0][k] -
                                           value[k] * norm.inverse[k] * share * totals[NORM][k]);
        if (channel + k >= CHANNELS) gradient[k] = 0;
    }
    if (inside) store(dx + at, gradient);
    const int k = threadIdx.x % LANES, plane = threadIdx.x / LANES;
    if (plane <= NORM) sums[plane * C + channel + k] = totals[plane][k];
}
