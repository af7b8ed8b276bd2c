// Instructions that have no name in CUDA C++, or one that NVRTC only knows with headers from
// elsewhere (cooperative groups need CCCL). The only place with PTX; no kernel of its own.

#pragma once

// sums += a b on the tensor cores, for a warp: a is (16, 16), b (16, 8), both halves; sums (16, 8),
// float. The whole warp must come together (__syncwarp after a branch, and volatile so that nvcc
// does not move it into one). A register holds two halves, of neighbouring k, the
// first in its lower part. With g = lane / 4 and t = lane % 4 a lane has
//     a[0], a[1]:  rows g and g + 8, k = 2 t and 2 t + 1;    a[2], a[3]:  the same rows, k + 8
//     b[0], b[1]:  column g, k = 2 t and 2 t + 1;            k + 8
//     sums[0], sums[1]:  row g, columns 2 t and 2 t + 1;     sums[2], sums[3]:  row g + 8
// Turing's instruction has half the depth: two of them in place of one.
__device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4],
                                const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int half = 0; half < 2; ++half)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// 16 bytes that no kernel writes, read here and not where they are needed: a volatile asm stays on
// its side of a barrier, and the load is under way while other things happen.
__device__ inline uint4 load_early(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A thread block cluster: blocks that run at the same time and reach each other's shared memory.
namespace cluster {
__device__ inline unsigned rank() {
    unsigned value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}

// Every thread of every block arrives, then waits until all have: `start` says no more than that
// it is there; after `arrive`, all see what it wrote before. Warps come together.
__device__ inline void start() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}
__device__ inline void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What `mine`, in shared memory, is in the block of that rank. That block must have started, and
// must not end before the access.
template <typename T>
__device__ inline T* in_block(T* mine, unsigned rank) {
    unsigned long long theirs;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(theirs)
        : "l"(reinterpret_cast<unsigned long long>(mine)), "r"(rank));
    return reinterpret_cast<T*>(theirs);
}
}  // namespace cluster

#endif
