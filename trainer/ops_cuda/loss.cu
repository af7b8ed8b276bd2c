// The softmax cross-entropy of a batch and its gradient in one kernel: together the gradient is
// softmax - target, and neither can overflow. The target is 1 - smoothing for the label, and
// smoothing / CLASSES more for every class.
//
// logits, dlogits: SCALAR (rows, PADDED), CLASSES of them real, the rest of dlogits written as 0.
// weights (float, 256): the weight of a row by its label, in loss and gradient; 1 changes no bit.
// losses (float), correct (int): one entry a step, for this GPU's rows: the sum of -log p[label]
// divided by `total_rows`, the rows of all GPUs; and the number of rows whose first maximum is the
// label. A logit that is NaN or +inf makes the loss NaN; -inf is the probability 0. dlogits is
// multiplied by scale[0], which keeps small gradients above half's smallest number.
//
// Macros: SCALAR, CLASSES, PADDED.

#include "vector.cuh"

static_assert(CLASSES <= PADDED && PADDED % 8 == 0 && PADDED <= 64, "a thread holds a whole row");

// One block, a multiple of 32 threads up to 1024, one row each at a time: fast enough for a batch,
// and the sums always have the same order. rows PADDED < 2^31.
extern "C" __global__ void __launch_bounds__(1024)
    softmax_cross_entropy(const SCALAR* __restrict__ logits, const uint8* __restrict__ labels,
                          const float* __restrict__ weights, SCALAR* __restrict__ dlogits,
                          float* losses, int* correct, const int* __restrict__ step,
                          const float* __restrict__ scale, int rows, int total_rows,
                          float smoothing) {
    __shared__ float warp_loss[WARP];
    __shared__ int warp_correct[WARP];
    float loss = 0;
    int right = 0;
    const float factor = scale[0] / total_rows;
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        float p[PADDED];
#pragma unroll
        for (int k = 0; k < PADDED; k += LANES)
            load(logits + row * PADDED + k, *reinterpret_cast<float (*)[LANES]>(p + k));
        const int label = labels[row];
        const float weight = weights[label];
        int first = 0;
        float largest = p[0], of_label = 0;
#pragma unroll
        for (int k = 0; k < CLASSES; ++k) {
            if (p[k] > largest) largest = p[k], first = k;
            if (k == label) of_label = p[k];
        }
        float total = 0, sum = 0;
#pragma unroll
        for (int k = 0; k < CLASSES; ++k) {
            sum += p[k] - largest;
            total += p[k] = expf(p[k] - largest);
        }
        // Not where nothing is smoothed: a logit of -inf is the probability 0.
        const float spread = smoothing > 0 ? smoothing / CLASSES * sum : 0;
        loss += weight * (logf(total) - (1 - smoothing) * (of_label - largest) - spread);
        right += first == label;
#pragma unroll
        for (int k = 0; k < PADDED; ++k)
            p[k] = k < CLASSES
                       ? (p[k] / total - (1 - smoothing) * (k == label) - smoothing / CLASSES) *
                             (factor * weight)
                       : 0;
#pragma unroll
        for (int k = 0; k < PADDED; k += LANES)
            store(dlogits + row * PADDED + k, *reinterpret_cast<float (*)[LANES]>(p + k));
    }

    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        loss += __shfl_xor_sync(~0u, loss, distance);
        right += __shfl_xor_sync(~0u, right, distance);
    }
    if (threadIdx.x % WARP == 0) {
        warp_loss[threadIdx.x / WARP] = loss;
        warp_correct[threadIdx.x / WARP] = right;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < blockDim.x / WARP; ++warp) {
        loss += warp_loss[warp];
        right += warp_correct[warp];
    }
    losses[*step] = loss / total_rows;
    correct[*step] = right;
}
