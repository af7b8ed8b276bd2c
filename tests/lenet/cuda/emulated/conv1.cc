#include "ptx.cuh"
#undef __shared__
#define __shared__ static
#define alignas(bytes) __attribute__((aligned(bytes)))  // GCC takes this form behind `static`
// The kernel, included after its stand-ins.
#include "conv1.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const uint8* images, const uint2* weight, const float* bias, SCALAR* y, int n,
                    int blocks) {
    run_blocks({blocks, C / CHUNK, 1}, THREADS, 0, 0,
               [=] { first_convolution(images, weight, bias, y, n); });
}
