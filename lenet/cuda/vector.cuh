// Shared by the kernels of serving and of training: memory accesses of 16 bytes, and sums over a
// grid in a fixed order. Contains no kernel.
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

__device__ inline void load_floats(const float* from, float (&to)[LANES]) {
    for (int k = 0; k < LANES; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + k);
        to[k] = four.x, to[k + 1] = four.y, to[k + 2] = four.z, to[k + 3] = four.w;
    }
}

#endif

// True in every thread of the block that is the last of `blocks` to arrive, and in no other.
//
// What all of them wrote before is then visible to it, through pointers without __restrict__. So
// the last block can add up what the others left, in the order of the blocks and not of their
// arrival. `counter` is 0 before and after.
__device__ inline bool last_block(unsigned* counter, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The sum of from[first], from[first + step], ... below from[end], in this order.
//
// The loads of a batch are unconditional and come before the first sum: a loop that tests for its
// end between two loads waits out the latency of each.
__device__ inline float strided_sum(const float* from, int first, int end, int step) {
    constexpr int BATCH = 16;
    float sum = 0;
    for (; first < end; first += BATCH * step) {
        float batch[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) batch[k] = from[min(first + k * step, end - 1)];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) sum += first + k * step < end ? batch[k] : 0;
    }
    return sum;
}
