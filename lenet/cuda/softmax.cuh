// The softmax over the lanes of a warp. No kernel of its own.

#pragma once
#include "vector.cuh"

// exp(logit) over its sum; a lane without a class has the logit -infinity and gets 0. A NaN in
// one lane makes all of them NaN: not by the maximum, which skips it, but by the sum.
__device__ inline float softmax(float logit) {
    float largest = logit;
    for (int apart = WARP / 2; apart > 0; apart /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    const float power = expf(logit - largest);
    float total = power;
    for (int apart = WARP / 2; apart > 0; apart /= 2)
        total += __shfl_xor_sync(~0u, total, apart);
    return power / total;
}
