// Instructions without a name in CUDA C++, or with one that NVRTC knows only from headers that are
// not shipped with it (cooperative groups need CCCL). The only file with PTX; contains no kernel.

#pragma once

// accumulator += a b on the tensor cores, by a warp: a is (16, 16), b (16, 8), both halves; the
// accumulator is (16, 8), float. The warp must be converged (__syncwarp after a branch; volatile,
// so that nvcc does not move it into one). A register holds two halves with neighbouring k, the
// first in its lower part. With g = lane / 4 and t = lane % 4 a lane has
//     a[0], a[1]:  rows g and g + 8, k = 2 t and 2 t + 1;    a[2], a[3]:  the same rows, k + 8
//     b[0], b[1]:  column g, k = 2 t and 2 t + 1;            k + 8
//     accumulator[0], [1]:  row g, columns 2 t and 2 t + 1;  [2], [3]:  row g + 8
// The instruction of Turing has half the depth: two of them replace one.
__device__ inline void multiply(float (&accumulator)[4], const unsigned (&a)[4],
                                const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int half = 0; half < 2; ++half)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// Loads 16 bytes that no kernel writes, here and not where they are used: a volatile asm stays on
// its side of a barrier, and the load runs while other things compute.
__device__ inline uint4 load_early(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A thread block cluster: blocks that run at the same time and can access each other's shared
// memory.
namespace cluster {
__device__ inline unsigned rank() {
    unsigned value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}

// The barrier of the cluster: every thread of every block arrives, then waits until all have. After
// `arrive`, all blocks see what it wrote before; `start` only says that its block has started.
// Warps must be converged.
__device__ inline void start() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ inline void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of `local`, in shared memory, in the block with that rank. That block must have
// started, and must not end before the access.
template <typename T>
__device__ inline T* in_block(T* local, unsigned rank) {
    unsigned long long remote;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(remote)
        : "l"(reinterpret_cast<unsigned long long>(local)), "r"(rank));
    return reinterpret_cast<T*>(remote);
}
}  // namespace cluster

#endif
