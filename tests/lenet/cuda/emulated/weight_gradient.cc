#include "ptx.cuh"
// The kernel, included after its stand-ins. The variable of reduce.cuh in shared memory is one for
// all threads.
#undef __shared__
#define __shared__ static
#include "reduce.cuh"
#undef __shared__
#define __shared__
#include "weight_gradient.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const __half* x, const __half* dy, float* partial, unsigned* counters,
                    float* dweight, int n, int blocks, int parts) {
    run_blocks({blocks, parts, 1}, THREADS, 0, 0,
               [=] { weight_gradient(x, dy, partial, counters, dweight, n); });
}

extern "C" int shared_bytes() { return sizeof(Shared); }
extern "C" int threads() { return THREADS; }
