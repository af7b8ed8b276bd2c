// A whole network for one image, by a cluster of 8 blocks: where a batch is too small to fill a
// GPU, what counts is how often one thing waits for another.
//
//     CONVOLUTIONS 2:  convolution, activation, pooling; the same again; dense, activation; dense
//     CONVOLUTIONS 0:  dense, activation; dense
//
// images:                 uint8 (n, H, W), 4-byte aligned
// first, second, hidden, last: halves as `packing.whole_fragments` makes them; 16-byte aligned
// first_bias:             float (C)         second_bias: float (C2)
// hidden_bias:            float (CLUSTER SHARE), zeros beyond UNITS
// last_bias:              float (CLASSES)
// logits, probabilities:  float (n, CLASSES); each row of probabilities sums to 1
// Without convolutions the pointers named first and second are not read.
//
// Weights and what passes between layers are halves, sums are floats. The 1/255 of a pixel is in
// the first weights. An image has its own cluster: its answer does not depend on the batch.
//
// What a block does, and what it waits for:
// 1. All loads are issued: image, filters, and its share of the hidden layer's weights straight
//    into the registers they are multiplied from; they arrive while 2 and 3 run.
// 2. The first convolution, whole: cheaper than to wait for the others' parts of it.
// 3. The second for 8 channels, which it writes into the shared memory of all blocks.
// 4. Wait for the cluster. Its SHARE of the hidden units, of all inputs.
// 5. What these units add to each logit, written to block 0.
// 6. Wait for the cluster. Block 0 adds up, always in the same order, and takes the softmax.
//
// Macros: CONVOLUTIONS, H, W, UNITS, CLASSES, ACTIVATION (of the hidden layer), PARAMETER (of all
// activations that have one); and with convolutions R, S, PAD_H, PAD_W, POOL, C, ACTIVATION_1 for
// the first, R2, S2, PAD2_H, PAD2_W, POOL2, C2, ACTIVATION_2 for the second. Channels are padded
// to multiples of 8, C2 is at most 64; POOL is MAX or AVERAGE, 2 x 2 with stride 2; strides are 1.
//
// Grid: n CLUSTER blocks of THREADS threads. Hopper or newer: older GPUs have no clusters.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "fused_network.cu needs thread block clusters: compute capability 9.0"
#endif

#include <math_constants.h>
#include "fused_network.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
whole_network(const uint8* __restrict__ images, const uint4* __restrict__ first,
              const float* __restrict__ first_bias, const uint4* __restrict__ second,
              const float* __restrict__ second_bias, const uint4* __restrict__ hidden,
              const float* __restrict__ hidden_bias, const __half* __restrict__ last,
              const float* __restrict__ last_bias, float* __restrict__ logits,
              float* __restrict__ probabilities) {
    __shared__ alignas(16) __half inputs[INPUTS];  // of the hidden layer
    __shared__ float by_split[SPLITS][SHARE];
    __shared__ float units[SHARE];
    __shared__ float by_block[CLUSTER][CLASSES];  // of the logits; read in block 0 alone
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const unsigned rank = cluster::rank();
    const size_t row = blockIdx.x / CLUSTER;
    cluster::start();  // once all blocks know this of each other, they may write

    unsigned pixels[WORDS_EACH];
    for (int k = 0; k < WORDS_EACH; ++k)
        if (k * THREADS + thread < WORDS)
            pixels[k] =
                reinterpret_cast<const unsigned*>(images)[row * WORDS + k * THREADS + thread];
#if CONVOLUTIONS
    __shared__ alignas(16) Features features;
    uint4 filters[Features::FILTERS_EACH];
    for (int k = 0; k < Features::FILTERS_EACH; ++k) {
        const int at = k * THREADS + thread;
        if (at < Features::FIRST)
            filters[k] = load_early(first + at);
        else if (at < Features::FIRST + Features::SECOND && 8 * rank < C2)
            filters[k] = load_early(second + rank * Features::SECOND + at - Features::FIRST);
        else
            filters[k] = {};
    }
    const float own_bias_1 = thread < C ? first_bias[thread] : 0;
    const float own_bias_2 = 8 * rank < C2 ? second_bias[8 * rank + thread % 8] : 0;
#endif
    const bool busy = warp < ROW_TILES * SPLITS;
    uint4 left[DEPTH] = {};
    const uint4* from = hidden + (rank * ROW_TILES * SPLITS + warp) * DEPTH * WARP + lane;
#pragma unroll
    for (int step = 0; step < DEPTH; ++step)
        if (busy) left[step] = load_early(from + step * WARP);
    const __half* const met = inputs + (busy ? warp / ROW_TILES * DEPTH * 16 : 0) + lane % 4 * 4;
    const float own_bias = thread < SHARE ? hidden_bias[rank * SHARE + thread] : 0;
    float outgoing[SHARE_EACH];  // the weights of unit lane, lane + 32, ... towards class `warp`
    for (int k = 0; k < SHARE_EACH; ++k)
        outgoing[k] = warp < CLASSES && k * WARP + lane < SHARE
                          ? last[(rank * CLASSES + warp) * SHARE + k * WARP + lane]
                          : __half(0.0f);
    const float last_own = lane < CLASSES ? last_bias[lane] : 0;

    for (int at = FLAT + thread; at < INPUTS; at += THREADS) inputs[at] = 0.0f;
#if CONVOLUTIONS
    features.prepare(thread);
    __syncthreads();
    features.fill(pixels, filters, own_bias_1, thread);
    __syncthreads();
    features.convolve_first(lane, warp);
    __syncthreads();
    features.convolve_second(lane, warp);
    __syncthreads();
    features.pool_second(own_bias_2, thread);
    __syncthreads();
    cluster::wait();
    if (8 * rank < C2) {
        for (int at = thread; at < QUADS2 * CLUSTER; at += THREADS) {
            const int quad = at / CLUSTER;
            __half* to = cluster::in_block(inputs, at % CLUSTER) + quad * C2 + 8 * rank;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(features.pooled[quad]);
        }
    }
    __syncwarp();
    cluster::arrive();
    cluster::wait();
#else
    for (int k = 0; k < WORDS_EACH; ++k)
        for (int byte = 0; byte < 4; ++byte)
            if (k * THREADS + thread < WORDS)
                inputs[4 * (k * THREADS + thread) + byte] =
                    static_cast<float>(pixels[k] >> 8 * byte & 255) / 256;
    __syncthreads();
    cluster::wait();
#endif

    // A vector is a matrix of one column; the instruction has eight, and gets it eight times.
    __syncwarp();
    float sums[2][4] = {};  // of the even and the odd steps: two chains wait less than one
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
        const unsigned a[4] = {left[step].x, left[step].y, left[step].z, left[step].w};
        const uint2 pair = *reinterpret_cast<const uint2*>(met + 16 * step);
        const unsigned b[2] = {pair.x, pair.y};
        multiply(sums[step % 2], a, b);
    }
    if (busy && lane % 4 == 0) {
        float* to = by_split[warp / ROW_TILES] + warp % ROW_TILES * 16 + lane / 4;
        to[0] = sums[0][0] + sums[1][0], to[8] = sums[0][2] + sums[1][2];
    }
    __syncthreads();
    if (thread < SHARE) {
        float z = own_bias;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) z += by_split[split][thread];
        units[thread] = Activation::value(z);
    }
    __syncthreads();

    if (warp < CLASSES) {
        float sum = 0;
        for (int k = 0; k < SHARE_EACH; ++k)
            if (k * WARP + lane < SHARE) sum += outgoing[k] * units[k * WARP + lane];
        for (int apart = WARP / 2; apart > 0; apart /= 2)
            sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == 0) *cluster::in_block(&by_block[rank][warp], 0) = sum;
    }
    __syncwarp();
    cluster::arrive();
    cluster::wait();
    if (rank > 0 || warp > 0) return;
    float logit = -CUDART_INF_F;
    if (lane < CLASSES) {
        logit = last_own;
        for (int block = 0; block < CLUSTER; ++block) logit += by_block[block][lane];
    }
    const float share = softmax(logit);
    if (lane < CLASSES) {
        logits[row * CLASSES + lane] = logit;
        probabilities[row * CLASSES + lane] = share;
    }
}
