// The epilogue of a block in one pass: batch norm or bias, activation, pooling. For serving and for
// the forward pass of training; trainer/ops_cuda/epilogue_backward.cu computes the gradient.
//
//     z = (x - mean) / sqrt(variance + EPSILON) * gamma + beta     NORM 1
//     z = x + beta                                                 NORM 0: beta is the bias
//     a = ACTIVATION(z),  y = POOL(a)
//
// x:         SCALAR (rows, H, W, C), of a dense layer H = W = 1; 16-byte aligned
// y, index:  (rows, OH, OW, C); index is the tap, row-major in the window, of the first maximum
// mean, variance, gamma, beta: float (C); the variance is biased, a sum divided by the count
//
// Macros and launch geometry: epilogue.cuh. Fastest on an H200 at the shapes of lenet (2026-11-20):
// 528 blocks in all. (The second number in the launch bounds, blocks that a multiprocessor must
// hold: without it nvcc 13.0 uses only 40 registers and spills.)

#include <math_constants.h>
#include "epilogue.cuh"

// y and, for a maximum, its tap, unless index is null.
extern "C" __global__ void __launch_bounds__(256, 2)
    epilogue_forward(const SCALAR* __restrict__ x, const float* __restrict__ mean,
                     const float* __restrict__ variance, const float* __restrict__ gamma,
                     const float* __restrict__ beta, SCALAR* __restrict__ y,
                     INDEX* __restrict__ index, int rows) {
    const Walk walk;
    if (walk.channel >= C) return;
    const Normalization norm(walk.channel, mean, variance, gamma, beta);
    for (int out = walk.pixel; out < rows * OH * OW; out += walk.step) {
        float pooled[LANES];
        Pack<INDEX> taps = {};
        for (int k = 0; k < LANES; ++k) pooled[k] = POOLING == MAX ? -CUDART_INF_F : 0;
        for_each_tap(out, [&](int tap, size_t offset) {
            float value[LANES];
            load(x + offset + walk.channel, value);
            for (int k = 0; k < LANES; ++k) {
                const float a = Activation::value(norm.z(k, norm.centred(k, value[k])));
                if (POOLING != MAX) {
                    pooled[k] += a;
                } else if (a > pooled[k] || isnan(a)) {  // keeps a NaN, as NumPy does
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
