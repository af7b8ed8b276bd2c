#include "ptx.cuh"
// The kernel, included after its stand-ins.
#include "convolutions.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const uint8* images, const uint4* weight1, const uint4* weight2,
                    const float* bias1, const float* bias2, const float2* scales, SCALAR* y,
                    int n, int blocks, int slices) {
    run_blocks({blocks, slices, 1}, THREADS, TEAMS, TEAM_THREADS,
               [=] { convolutions(images, weight1, weight2, bias1, bias2, scales, y, n); });
}

extern "C" int shared_bytes() { 
    constexpr int PARTIAL = (DEPTHS - 1) * GROUPS * PARTS * SUMS * WARP * 4;
    return sizeof(Filters) + TEAMS * sizeof(Images) + PARTIAL;
}
