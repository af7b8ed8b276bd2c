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

// The same with float operands, of which the instruction reads the TF32 part (10 bits behind the
// leading one): a is (16, 8), b (8, 8). A register holds one value:
//     a[0], a[1]:  rows g and g + 8, k = t;    a[2], a[3]:  the same rows, k = t + 4
//     b[0], b[1]:  column g, k = t and t + 4
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ inline void multiply_tf32(float (&accumulator)[4], const unsigned (&a)[4],
                                     const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The TF32 number nearest to a float, by its bits: half of the last bit that is kept is added.
__device__ inline unsigned rounded_to_tf32(unsigned value) {
    return (value + 0x1000u) & 0xffffe000u;
}

// Four matrices of 8 rows of 16 bytes from shared memory: lane l names row l % 8 of matrix l / 8,
// and gets bytes 4 t to 4 t + 3 of row g of each: the left operand of both products above, if the
// matrices are the upper and the lower eight rows, first for the smaller k.
__device__ inline void load_matrices(const char* row, unsigned (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// Copies 16 bytes to shared memory, not through registers; the thread goes on meanwhile.
__device__ inline void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}
// Waits for the copies of this thread; a barrier then shows them to others.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// The larger one, or NaN if one of them is.
__device__ inline float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
#else
    return a > b || isnan(a) ? a : b;
#endif
}

// A barrier of `threads` of the block, whole warps; 0 is that of __syncthreads.
__device__ inline void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
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
