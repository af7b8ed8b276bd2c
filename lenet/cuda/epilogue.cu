// What follows a block's convolution or matrix product, as one pass: batch norm or bias,
// activation, pooling; forward, then backward. Outside training tail_forward is all there is.
//
//     z = (x - mean) / sqrt(variance + EPSILON) * gamma + beta     NORM 1
//     z = x + beta                                                 NORM 0: beta is the bias
//     a = ACTIVATION(z),  y = POOL(a)
//
// x, dx:         SCALAR (rows, H, W, C), of a dense layer H = W = 1; 16-byte aligned
// y, dy, index:  (rows, OH, OW, C); index is the tap, row-major in the window, of the first maximum
// mean, variance, gamma, beta, running_mean, running_variance: float (C); the variance is biased,
//     a sum divided by the count, the running one unbiased
// sums:          float (2, C)
//
// Only CHANNELS of the C channels are true; the others are written as 0 and never matter.
// POOL is NONE (window 1, stride 1), MAX (padding is never the largest) or AVERAGE (padding counts
// as zeros; a global average is the window H, W). PARAMETER is the activation's. INDEX is uint8,
// or uint16 for windows of more than 256 taps. It refuses to choose a grid:
//
// A block covers a tile of up to four 16-byte vectors of channels (blockIdx.y: ceil(C / LANES / 4)
// tiles) and walks over pixels in steps of the grid (blockIdx.x: any number). Threads: a multiple
// of 32, at most 256, or 512 for the two kernels that sum. `rows` H W < 2^30; offsets are size_t.
// Fastest on an H200 at the shapes of lenet (2026-11-20): 132 blocks in all for the sums, 528 for
// the others, but 396 for tail_backward on halves. (The second number in the launch bounds, blocks
// that a multiprocessor must hold: left alone, nvcc 13.0 squeezes a kernel into 40 registers and
// spills.)

#include <math_constants.h>
#include "epilogue.cuh"

// y and, of a maximum, the tap it came from, unless index is null.
extern "C" __global__ void __launch_bounds__(256, 2)
tail_forward(const SCALAR* __restrict__ x, const float* __restrict__ mean,
             const float* __restrict__ variance, const float* __restrict__ gamma,
             const float* __restrict__ beta, SCALAR* __restrict__ y, INDEX* __restrict__ index,
             int rows) {
    const Walk walk;
    if (walk.channel >= C) return;
    const Normalization norm(walk.channel, mean, variance, gamma, beta);
    for (int out = walk.pixel; out < rows * OH * OW; out += walk.step) {
        float pooled[LANES];
        Pack<INDEX> taps = {};
        for (int k = 0; k < LANES; ++k) pooled[k] = POOLING == MAX ? -CUDART_INF_F : 0;
        for_each_tap(out, [&](int tap, size_t at) {
            float value[LANES];
            load(x + at + walk.channel, value);
            for (int k = 0; k < LANES; ++k) {
                const float a = Activation::value(norm.z(k, norm.centred(k, value[k])));
                if (POOLING != MAX) {
                    pooled[k] += a;
                } else if (a > pooled[k] || isnan(a)) {  // a NaN is kept, as NumPy keeps it
                    pooled[k] = a;
                    taps.values[k] = tap;
                }
            }
        });
        for (int k = 0; k < LANES; ++k) {
            if (POOLING == AVERAGE) pooled[k] /= AREA;
            if (walk.channel + k >= CHANNELS) pooled[k] = 0;
        }
        const size_t to = static_cast<size_t>(out) * C + walk.channel;
        store(y + to, pooled);
        if (POOLING == MAX && index) *reinterpret_cast<Pack<INDEX>*>(index + to) = taps;
    }
}

// Mean and variance of one channel from its sums about the running mean, which they then move;
// unless they are not finite: a step that overflows is dropped, and must leave nothing behind.
__device__ inline void moments(int channel, const float* sums, int count, float* mean,
                               float* variance, float* running_mean, float* running_variance) {
    const float away = sums[channel] / count, pivot = running_mean[channel];
    const float spread = sums[C + channel] / count - away * away;
    const float biased = spread < 0 ? 0 : spread;
    mean[channel] = pivot + away;
    variance[channel] = biased;
    const float unbiased = biased * (static_cast<float>(count) / (count > 1 ? count - 1 : 1));
    const float old = running_variance[channel];
    if (channel >= CHANNELS || !isfinite(away) || !isfinite(unbiased)) return;
    running_mean[channel] = pivot + RUNNING_SHARE * away;
    running_variance[channel] = old + RUNNING_SHARE * (unbiased - old);
}

// sums: of x - running_mean and of its square, over rows H W; the pivot keeps their difference
// from cancelling. What is left is an error of the variance of about 1e-7 (mean - pivot)^2.
// With `finish` also the moments; without, the sums of several GPUs are added first, and
// tail_moments does that.
extern "C" __global__ void __launch_bounds__(MAX_SUM_THREADS)
tail_statistics(const SCALAR* __restrict__ x, float* partial, unsigned* counters, float* sums,
                float* mean, float* variance, float* running_mean, float* running_variance,
                int rows, int finish) {
    const Walk walk;
    float values[2][LANES] = {}, pivot[LANES];
    if (walk.channel < C) {
        load_floats(running_mean + walk.channel, pivot);
        // Loads first, as in strided_sum; beyond the end it is the last pixel, and does not count.
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
                    const float away =
                        first + b * walk.step < pixels ? value[b][k] - pivot[k] : 0;
                    values[0][k] += away;
                    values[1][k] += away * away;
                }
            }
        }
    }
    const bool last = sum_over_grid(values, partial, counters, sums);
    const int channel = blockIdx.y * TILE_CHANNELS + threadIdx.x;
    if (last && finish && threadIdx.x < TILE_CHANNELS && channel < C)
        moments(channel, sums, rows * H * W, mean, variance, running_mean, running_variance);
}

// One thread a channel. count: elements of a channel over all GPUs.
extern "C" __global__ void tail_moments(const float* sums, int count, float* mean, float* variance,
                                        float* running_mean, float* running_variance) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel < C)
        moments(channel, sums, count, mean, variance, running_mean, running_variance);
}

// The gradient at the activation of pixel (row, i, j): of every window that covers it, its share.
__device__ inline void incoming(const SCALAR* __restrict__ dy, const INDEX* __restrict__ index,
                                int row, int i, int j, int channel, float (&da)[LANES]) {
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

// sums[0] = sum of dz, the gradient of beta or the bias; sums[1], with NORM only, of dz normal:
// that of gamma. Over the windows of a maximum, which has one dz each, else over the pixels.
extern "C" __global__ void __launch_bounds__(MAX_SUM_THREADS)
tail_backward_sums(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
                   const INDEX* __restrict__ index, const float* __restrict__ mean,
                   const float* __restrict__ variance, const float* __restrict__ gamma,
                   const float* __restrict__ beta, float* partial, unsigned* counters, float* sums,
                   int rows) {
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
                incoming(dy, index, pixel / (H * W), pixel / W % H, pixel % W, walk.channel, da);
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

// dx = dz or, with NORM, gamma / deviation (dz - sums[0] / count - normal sums[1] / count), where
// the sums and the count, elements of a channel, are those of all GPUs.
extern "C" __global__ void __launch_bounds__(256, 3)
tail_backward(const SCALAR* __restrict__ x, const SCALAR* __restrict__ dy,
              const INDEX* __restrict__ index, const float* __restrict__ mean,
              const float* __restrict__ variance, const float* __restrict__ gamma,
              const float* __restrict__ beta, const float* __restrict__ sums,
              SCALAR* __restrict__ dx, int rows, int count) {
    const Walk walk;
    if (walk.channel >= C) return;
    const Normalization norm(walk.channel, mean, variance, gamma, beta);
    float along_one[LANES], along_centred[LANES];
    if (NORM) {
        load_floats(sums + walk.channel, along_one);
        load_floats(sums + C + walk.channel, along_centred);
        for (int k = 0; k < LANES; ++k) {
            along_one[k] *= norm.scale[k] / count;
            along_centred[k] *= norm.scale[k] * norm.inverse[k] / count;
        }
    }
    for (int pixel = walk.pixel; pixel < rows * H * W; pixel += walk.step) {
        const size_t at = static_cast<size_t>(pixel) * C + walk.channel;
        float value[LANES], gradient[LANES];
        load(x + at, value);
        incoming(dy, index, pixel / (H * W), pixel / W % H, pixel % W, walk.channel, gradient);
        for (int k = 0; k < LANES; ++k) {
            const float centred = norm.centred(k, value[k]);
            float d = gradient[k] * Activation::slope(norm.z(k, centred));
            if (NORM) d = norm.scale[k] * d - along_one[k] - centred * along_centred[k];
            gradient[k] = walk.channel + k < CHANNELS ? d : 0;
        }
        store(dx + at, gradient);
    }
}
