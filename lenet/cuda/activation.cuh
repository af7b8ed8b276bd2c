// The elementwise functions of a block and their slopes, both of z. PARAMETER is the ceiling of
// clipped_relu and the alpha of elu; ACTIVATION names the function.
//
// A NaN passes through each function: z < 0 is false for it. At a kink the slope is zero for the
// two ReLUs and alpha for ELU. The slopes neither overflow nor cancel: y (1 - y) and 1 - y^2 would
// lose their last digits where a function saturates.

#pragma once

namespace activation {
struct identity {
    static __device__ float value(float z) { return z; }
    static __device__ float slope(float) { return 1; }
};
struct relu {
    static __device__ float value(float z) { return z < 0 ? 0 : z; }
    static __device__ float slope(float z) { return z > 0; }
};
struct clipped_relu {
    static __device__ float value(float z) { return z < 0 ? 0 : z > PARAMETER ? PARAMETER : z; }
    static __device__ float slope(float z) { return z > 0 && z < PARAMETER; }
};
struct elu {
    static __device__ float value(float z) { return z > 0 ? z : PARAMETER * expm1f(z); }
    static __device__ float slope(float z) { return z > 0 ? 1 : PARAMETER * expf(z); }
};
struct sigmoid {
    static __device__ float value(float z) {
        const float e = expf(-fabsf(z));
        return (z < 0 ? e : 1) / (1 + e);
    }
    static __device__ float slope(float z) {
        const float e = expf(-fabsf(z));
        return e / ((1 + e) * (1 + e));
    }
};
struct tanh {
    static __device__ float value(float z) { return tanhf(z); }
    static __device__ float slope(float z) {
        const float e = expf(-fabsf(z)), inverse_cosh = 2 * e / (1 + e * e);
        return inverse_cosh * inverse_cosh;
    }
};
}  // namespace activation
using Activation = activation::ACTIVATION;
