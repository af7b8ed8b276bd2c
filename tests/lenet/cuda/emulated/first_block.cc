#include "ptx.cuh"
// The kernels, included after their stand-ins. A variable in shared memory is one for all threads.
#undef __shared__
#define __shared__ static
#include "first_block.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void moments(const __half* x, const float* weight, float* partial, unsigned* counters,
                        float* patches, float* mean, float* variance, float* running_mean,
                        float* running_variance, int rows, int blocks) {
    run_blocks({blocks, 1, 1}, THREADS, 0, 0, [=] {
        first_block_moments(x, weight, partial, counters, patches, mean, variance, running_mean,
                            running_variance, rows);
    });
}

extern "C" void forward(const __half* x, const float* weight, const float* mean,
                        const float* variance, const float* gamma, const float* beta, __half* y,
                        uint8* index, int rows, int blocks) {
    run_blocks({blocks, 1, 1}, THREADS, 0, 0, [=] {
        first_block_forward(x, weight, mean, variance, gamma, beta, y, index, rows);
    });
}

extern "C" void backward(const __half* x, const __half* y, const __half* dy, const uint8* index,
                         const float* weight, const float* mean, const float* variance,
                         const float* gamma, const float* patches, float* partial,
                         unsigned* counters, float* dweight, float* dgamma, float* dbeta, int rows,
                         int blocks) {
    run_blocks({blocks, 1, 1}, THREADS, 0, 0, [=] {
        first_block_backward(x, y, dy, index, weight, mean, variance, gamma, patches, partial,
                             counters, dweight, dgamma, dbeta, rows);
    });
}
