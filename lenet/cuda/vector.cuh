// Shared by the kernels of serving and of training: memory accesses of 16 bytes. Contains no
// kernel.
//
// SCALAR, float or __half, is the storage type of activations; all arithmetic is float.

#pragma once
#include <cuda_fp16.h>

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint64 = unsigned long long;

constexpr int WARP = 32;

#ifdef SCALAR

// Values in 16 bytes: 4 floats or 8 halves. C, the padded channels, is always a multiple of it.
constexpr int LANES = 16 / sizeof(SCALAR);

// LANES values of any type as one access; memory must be aligned to its size.
template <typename T>
struct alignas(sizeof(T) * LANES) Pack {
    T values[LANES];
};

__device__ inline void load(const SCALAR* from, float (&to)[LANES]) {
    const auto pack = *reinterpret_cast<const Pack<SCALAR>*>(from);
    for (int k = 0; k < LANES; ++k) to[k] = static_cast<float>(pack.values[k]);
}

// Rounds to nearest; a half beyond 65504 becomes infinite, which is how an overflow is found.
__device__ inline void store(SCALAR* to, const float (&from)[LANES]) {
    Pack<SCALAR> pack;
    for (int k = 0; k < LANES; ++k) pack.values[k] = static_cast<SCALAR>(from[k]);
    *reinterpret_cast<Pack<SCALAR>*>(to) = pack;
}

// Two and four neighbours, aligned to their size.
__device__ inline void store_two(SCALAR* to, const float (&from)[2]) {
    if constexpr (sizeof(SCALAR) == 4) {
        *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
    } else {
        *reinterpret_cast<__half2*>(to) = __floats2half2_rn(from[0], from[1]);
    }
}
__device__ inline void store_four(SCALAR* to, const float (&from)[4]) {
    if constexpr (sizeof(SCALAR) == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    } else {
        __half2 halves[] = {__floats2half2_rn(from[0], from[1]),
                            __floats2half2_rn(from[2], from[3])};
        *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(halves);
    }
}

__device__ inline void load_floats(const float* from, float (&to)[LANES]) {
    for (int k = 0; k < LANES; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + k);
        to[k] = four.x, to[k + 1] = four.y, to[k + 2] = four.z, to[k + 3] = four.w;
    }
}

#endif
