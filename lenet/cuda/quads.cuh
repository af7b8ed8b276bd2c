// Pooling of 2 x 2 with stride 2 in the registers of a lane, for the convolutions on tensor cores.

#pragma once

enum Pooling { NONE, MAX, AVERAGE };

// The larger one; NaN if one of them is.
__device__ inline float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// The pooled activation of four pixels. Activations are monotonic: the largest sum gives the
// maximum.
template <typename Activate>
__device__ inline float pooled(Pooling pooling, float a, float b, float c, float d,
                               Activate activate) {
    if (pooling == MAX)
        return activate(larger_or_nan(larger_or_nan(a, b), larger_or_nan(c, d)));
    return (activate(a) + activate(b) + activate(c) + activate(d)) / 4;
}
