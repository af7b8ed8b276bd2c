// A whole network for one image, by a cluster of 8 blocks. For batches that are too small to fill a
// GPU, where the time is the number of steps that wait for each other.
//
//     CONVOLUTIONS 2:  convolution, activation, pooling; the same again; dense, activation; dense
//     CONVOLUTIONS 0:  dense, activation; dense
//
// images:                 uint8 (n, H, W), 4-byte aligned
// first, second, hidden, last: halves as `pack` of fused_network.py makes them; 16-byte aligned
// first_bias:             float (C)         second_bias: float (C2)
// hidden_bias:            float (CLUSTER BLOCK_UNITS), zeros from UNITS on
// last_bias:              float (CLASSES)
// logits, probabilities:  float (n, CLASSES); each row of probabilities sums to 1
// Without convolutions the pointers named first and second are not read.
//
// Weights and the outputs of layers are halves, sums are floats. The first weights are for pixels
// divided by 256. An image has its own cluster: its result does not depend on the batch.
//
// All loads are issued at the start, into registers, so that they run while other things compute:
//
//     prefetch   image, filters        hidden weights           last weights and biases
//                    |                      |                          |
//     compute   zero shared memory          |                          |
//                    v                      |                          |
//               store to shared memory      |                          |
//               conv1, all channels         |                          |
//               conv2, 8 channels a block   |                          |
//               == cluster barrier: all blocks have started ==         |
//               conv2's output to the shared memory of all blocks      |
//               == cluster barrier: it has arrived ==                  |
//                                           v                          |
//               hidden layer, BLOCK_UNITS units a block                |
//                                                                      v
//               each block's part of every logit, to block 0
//               == cluster barrier: it has arrived ==
//               block 0: sum in a fixed order, softmax
//
// Every block computes the whole first convolution: that is faster than waiting for the others.
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

#include "fused_network.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    fused_network(const uint8* __restrict__ images, const uint4* __restrict__ first,
                  const float* __restrict__ first_bias, const uint4* __restrict__ second,
                  const float* __restrict__ second_bias, const uint4* __restrict__ hidden,
                  const float* __restrict__ hidden_bias, const __half* __restrict__ last,
                  const float* __restrict__ last_bias, float* __restrict__ logits,
                  float* __restrict__ probabilities) {
    __shared__ alignas(16) __half inputs[INPUTS];  // of the hidden layer
    __shared__ float split_sums[SPLITS][BLOCK_UNITS];
    __shared__ float units[BLOCK_UNITS];
    __shared__ float block_logits[CLUSTER][CLASSES];  // read in block 0 only
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const unsigned rank = cluster::rank();
    const size_t row = blockIdx.x / CLUSTER;
    cluster::start();  // the others may write here once they know that this block has started

    // Prefetch.
    unsigned pixels[THREAD_WORDS];
    for (int k = 0; k < THREAD_WORDS; ++k)
        if (k * THREADS + thread < WORDS)
            pixels[k] =
                reinterpret_cast<const unsigned*>(images)[row * WORDS + k * THREADS + thread];
#if CONVOLUTIONS
    __shared__ alignas(16) Features features;
    uint4 filters[Features::THREAD_VECTORS];
    for (int k = 0; k < Features::THREAD_VECTORS; ++k) {
        const int vector = k * THREADS + thread;
        if (vector < Features::VECTORS1)
            filters[k] = load_early(first + vector);
        else if (vector < Features::VECTORS1 + Features::VECTORS2 && 8 * rank < C2)
            filters[k] =
                load_early(second + rank * Features::VECTORS2 + vector - Features::VECTORS1);
        else
            filters[k] = {};
    }
    const float bias1 = thread < C ? first_bias[thread] : 0;
    const float bias2 = 8 * rank < C2 ? second_bias[8 * rank + thread % 8] : 0;
#endif
    const bool has_units = warp < UNIT_TILES * SPLITS;
    uint4 hidden_weights[WARP_STEPS] = {};
    const uint4* source = hidden + (rank * UNIT_TILES * SPLITS + warp) * WARP_STEPS * WARP + lane;
#pragma unroll
    for (int step = 0; step < WARP_STEPS; ++step)
        if (has_units) hidden_weights[step] = load_early(source + step * WARP);
    const __half* const lane_inputs =
        inputs + (has_units ? warp / UNIT_TILES * WARP_STEPS * 16 : 0) + lane % 4 * 4;
    const float unit_bias = thread < BLOCK_UNITS ? hidden_bias[rank * BLOCK_UNITS + thread] : 0;
    float class_weights[LANE_UNITS];  // of units lane, lane + 32, ... for class `warp`
    for (int k = 0; k < LANE_UNITS; ++k)
        class_weights[k] = warp < CLASSES && k * WARP + lane < BLOCK_UNITS
                               ? last[(rank * CLASSES + warp) * BLOCK_UNITS + k * WARP + lane]
                               : __half(0.0f);
    const float class_bias = lane < CLASSES ? last_bias[lane] : 0;

    // The inputs of the hidden layer, in every block.
    for (int k = FLAT + thread; k < INPUTS; k += THREADS) inputs[k] = 0.0f;
#if CONVOLUTIONS
    features.initialize(thread);
    __syncthreads();
    features.store(pixels, filters, bias1, thread);
    __syncthreads();
    features.convolve_first(lane, warp);
    __syncthreads();
    features.convolve_second(lane, warp);
    __syncthreads();
    features.pool_second(bias2, thread);
    __syncthreads();
    cluster::wait();
    if (8 * rank < C2) {
        for (int task = thread; task < QUADS2 * CLUSTER; task += THREADS) {
            const int quad = task / CLUSTER;
            __half* target = cluster::in_block(inputs, task % CLUSTER) + quad * C2 + 8 * rank;
            *reinterpret_cast<uint4*>(target) =
                *reinterpret_cast<const uint4*>(features.conv2_output[quad]);
        }
    }
    __syncwarp();
    cluster::arrive();
    cluster::wait();
#else
    for (int k = 0; k < THREAD_WORDS; ++k)
        for (int byte = 0; byte < 4; ++byte)
            if (k * THREADS + thread < WORDS)
                inputs[4 * (k * THREADS + thread) + byte] =
                    static_cast<float>(pixels[k] >> 8 * byte & 255) / 256;
    __syncthreads();
    cluster::wait();
#endif

    // The hidden layer. The right operand is one column; all eight of the instruction hold it.
    __syncwarp();
    float accumulators[2][4] = {};  // of even and odd steps: two chains of products overlap
#pragma unroll
    for (int step = 0; step < WARP_STEPS; ++step) {
        const unsigned a[4] = {hidden_weights[step].x, hidden_weights[step].y,
                               hidden_weights[step].z, hidden_weights[step].w};
        const uint2 pair = *reinterpret_cast<const uint2*>(lane_inputs + 16 * step);
        const unsigned b[2] = {pair.x, pair.y};
        multiply(accumulators[step % 2], a, b);
    }
    if (has_units && lane % 4 == 0) {
        float* sums = split_sums[warp / UNIT_TILES] + warp % UNIT_TILES * 16 + lane / 4;
        sums[0] = accumulators[0][0] + accumulators[1][0];
        sums[8] = accumulators[0][2] + accumulators[1][2];
    }
    __syncthreads();
    if (thread < BLOCK_UNITS) {
        float z = unit_bias;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) z += split_sums[split][thread];
        units[thread] = Activation::value(z);
    }
    __syncthreads();

    // The last layer.
    if (warp < CLASSES) {
        float sum = 0;
        for (int k = 0; k < LANE_UNITS; ++k)
            if (k * WARP + lane < BLOCK_UNITS) sum += class_weights[k] * units[k * WARP + lane];
        for (int distance = WARP / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) *cluster::in_block(&block_logits[rank][warp], 0) = sum;
    }
    __syncwarp();
    cluster::arrive();
    cluster::wait();
    if (rank > 0 || warp > 0) return;
    float logit[] = {-CUDART_INF_F};
    if (lane < CLASSES) {
        logit[0] = class_bias;
        for (int block = 0; block < CLUSTER; ++block) logit[0] += block_logits[block][lane];
    }
    write_row(logit, lane, logits + row * CLASSES, probabilities + row * CLASSES);
}
