#include "ptx.cuh"
// The kernel, included after its stand-ins.
#include "dense_softmax.cu"

alignas(16) uint4 shared[SHARED_BYTES / 16];

extern "C" void run(const SCALAR* x, const SCALAR* weight, const float* bias, float* logits,
                    float* probabilities, int n) {
    run_blocks({2, 1, 1}, 64, 0, 0,
               [=] { dense_softmax(x, weight, bias, logits, probabilities, n); });
}
