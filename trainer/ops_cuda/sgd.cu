// SGD over all parameters in one launch, and the loss scale that half needs.
//
// The rule is that of trainer/optimizer.py, Sgd: v <- momentum v + g, then w <- w - rate times
// (g + momentum v) with Nesterov or v without, where g is the gradient plus weight_decay w.
// Gradients are float or half, multiplied by scale[0], a power of two that is divided out here.
//
// scale: float (2): the scale, and the steps since it changed. It is halved when a gradient
// overflows and doubled after a number of steps without overflow. Source: Micikevicius et al. 2018,
// "Mixed precision training".
//
// Macro: CHUNK, the elements of a block.

#include "vector.cuh"

constexpr int RUN = 4;  // elements that a thread takes at once
static_assert(CHUNK % RUN == 0, "a chunk begins on a whole vector");

constexpr int WEIGHT_DECAY = 1, HALF_GRADIENT = 2;
constexpr float SMALLEST_SCALE = 1, LARGEST_SCALE = 1 << 24;

// One tensor, flat; all its arrays are 16-byte aligned and have `size` elements.
struct Update {
    float* weight;
    const void* gradient;
    float* velocity;
    __half* copy;  // null, or the half copy of the weight
    int size;
    int flags;
};

template <typename T>
struct alignas(sizeof(T) * RUN) Run {
    T values[RUN];
};

// Elements first to first + RUN of an array; those beyond its end read as 0 and are not written.
template <typename T>
__device__ inline void read(const T* from, int first, int size, float (&to)[RUN]) {
    if (first + RUN <= size) {
        const auto run = *reinterpret_cast<const Run<T>*>(from + first);
        for (int k = 0; k < RUN; ++k) to[k] = static_cast<float>(run.values[k]);
    } else {
        for (int k = 0; k < RUN; ++k)
            to[k] = first + k < size ? static_cast<float>(from[first + k]) : 0;
    }
}

template <typename T>
__device__ inline void write(T* to, int first, int size, const float (&from)[RUN]) {
    if (first + RUN <= size) {
        Run<T> run;
        for (int k = 0; k < RUN; ++k) run.values[k] = static_cast<T>(from[k]);
        *reinterpret_cast<Run<T>*>(to + first) = run;
    } else {
        for (int k = 0; k < RUN; ++k)
            if (first + k < size) to[first + k] = static_cast<T>(from[k]);
    }
}

__device__ inline void read_gradient(const Update& tensor, int first, float (&to)[RUN]) {
    if (tensor.flags & HALF_GRADIENT)
        read(static_cast<const __half*>(tensor.gradient), first, tensor.size, to);
    else
        read(static_cast<const float*>(tensor.gradient), first, tensor.size, to);
}

// chunks: (tensor, first element), one a block; CHUNK elements each, fewer at a tensor's end.
// Does nothing if *overflow. Threads: any, best CHUNK / 4.
extern "C" __global__ void sgd_step(const Update* __restrict__ table,
                                    const int2* __restrict__ chunks,
                                    const float* __restrict__ rates, const int* __restrict__ step,
                                    const float* __restrict__ scale,
                                    const int* __restrict__ overflow, float momentum,
                                    float weight_decay, int nesterov) {
    if (*overflow) return;
    const int2 chunk = chunks[blockIdx.x];
    const Update tensor = table[chunk.x];
    const float rate = rates[*step], unscale = 1 / scale[0];
    const float decay = tensor.flags & WEIGHT_DECAY ? weight_decay : 0;
    const int end = min(chunk.y + CHUNK, tensor.size);
    for (int first = chunk.y + threadIdx.x * RUN; first < end; first += blockDim.x * RUN) {
        float gradient[RUN], weight[RUN], velocity[RUN];
        read_gradient(tensor, first, gradient);
        read(tensor.weight, first, tensor.size, weight);
        read(tensor.velocity, first, tensor.size, velocity);
        for (int k = 0; k < RUN; ++k) {
            const float g = gradient[k] * unscale + decay * weight[k];
            velocity[k] = momentum * velocity[k] + g;
            weight[k] -= rate * (nesterov ? g + momentum * velocity[k] : velocity[k]);
        }
        write(tensor.weight, first, tensor.size, weight);
        write(tensor.velocity, first, tensor.size, velocity);
        if (tensor.copy) write(tensor.copy, first, tensor.size, weight);
    }
}

// Sets *overflow to 1 if any gradient is not finite. Grid as sgd_step.
extern "C" __global__ void find_overflow(const Update* __restrict__ table,
                                         const int2* __restrict__ chunks, int* overflow) {
    const int2 chunk = chunks[blockIdx.x];
    const Update tensor = table[chunk.x];
    const int end = min(chunk.y + CHUNK, tensor.size);
    bool finite = true;
    for (int first = chunk.y + threadIdx.x * RUN; first < end; first += blockDim.x * RUN) {
        float gradient[RUN];
        read_gradient(tensor, first, gradient);
        for (int k = 0; k < RUN; ++k) finite = finite && isfinite(gradient[k]);
    }
    if (!finite) *overflow = 1;  // all threads write the same value
}

// The end of a step, one thread: counts it, among those skipped if it overflowed, and sets the
// scale of the next. growth_interval: steps without overflow after which the scale is doubled, or 0
// for never.
extern "C" __global__ void end_step(int* step, float* scale, int* overflow, int* skipped,
                                    int growth_interval) {
    ++*step;
    ++scale[1];
    if (*overflow) {
        ++*skipped;
        scale[0] = fmaxf(scale[0] / 2, SMALLEST_SCALE);
        scale[1] = 0;
    } else if (growth_interval > 0 && scale[1] >= growth_interval) {
        scale[0] = fminf(scale[0] * 2, LARGEST_SCALE);
        scale[1] = 0;
    }
    *overflow = 0;
}
