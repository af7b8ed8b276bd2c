// The softmax over the lanes of a warp. Contains no kernel.

#pragma once
#include "vector.cuh"

// exp(logit) over its sum. A lane without a class has the logit -infinity and gets 0. A NaN in one
// lane makes all of them NaN: not by the maximum, which ignores it, but by the sum.
__device__ inline float softmax(float logit) {
    float largest = logit;
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const float power = expf(logit - largest);
    float total = power;
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        total += __shfl_xor_sync(~0u, total, distance);
    return power / total;
}
