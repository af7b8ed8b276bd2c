#include "ptx.cuh"
// The kernel, included after its stand-ins.
#include "dense_halves.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const float* x, const uint4* weight, const float* bias, const float2* scales,
                    float* y, int n) {
    run_blocks({(U + COLUMNS - 1) / COLUMNS, (n + ROWS - 1) / ROWS, 1}, THREADS, 0, 0,
               [=] { dense_halves(x, weight, bias, scales, y, n); });
}

extern "C" int shared_bytes() { return 2 * sizeof(Round); }
