#include "ptx.cuh"
// The kernel, included after its stand-ins.
#include "input_gradient.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const __half* dy, const __half* weight, __half* dx, int n, int blocks) {
    run_blocks({blocks, 1, 1}, THREADS, 0, 0, [=] { input_gradient(dy, weight, dx, n); });
}

extern "C" int shared_bytes() { return sizeof(Shared); }
extern "C" int threads() { return THREADS; }
