// Sums over a grid in a fixed order, so that the same grid gives the same bits. Contains no kernel.

#pragma once

// Returns true in the threads of the block that arrives last of `blocks`.
//
// It sees what all of them wrote before, through pointers without __restrict__. So it can add their
// partial sums in the order of the blocks and not of their arrival. `counter` is 0 before and
// after.
__device__ inline bool last_block(unsigned* counter, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    // The fences of one thread are enough: barriers order the others' accesses before and after.
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// The sum of from[first], from[first + step], ... below from[end], in this order.
//
// The loads of a batch are unconditional and come before the first sum: with a test between two
// loads, the loop would wait for the latency of each.
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
