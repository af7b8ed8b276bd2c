// The end of a row: its logits and their softmax. Contains no kernel.

#pragma once
#include <math_constants.h>
#include "vector.cuh"

// A warp has a row. Class k is value k / WARP of lane k % WARP; values without a class are
// -infinity.
constexpr int LANE_CLASSES = (CLASSES + WARP - 1) / WARP;

// Writes the row's logits, and exp(logit) over its sum. A NaN in one lane makes all probabilities
// NaN: not by the maximum, which ignores it, but by the sum.
__device__ inline void write_row(const float (&own)[LANE_CLASSES], int lane, float* logits,
                                 float* probabilities) {
    float largest = own[0];
#pragma unroll
    for (int k = 1; k < LANE_CLASSES; ++k) largest = fmaxf(largest, own[k]);
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    float powers[LANE_CLASSES], total = 0;
#pragma unroll
    for (int k = 0; k < LANE_CLASSES; ++k) total += powers[k] = expf(own[k] - largest);
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (int k = 0; k < LANE_CLASSES; ++k) {
        if (k * WARP + lane < CLASSES) {
            logits[k * WARP + lane] = own[k];
            probabilities[k * WARP + lane] = powers[k] / total;
        }
    }
}
