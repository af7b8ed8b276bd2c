// Dropout: zeroes a share `rate` of the units of each row and divides the rest by 1 - rate. The
// mask depends only on (seed, step, row of the whole batch, unit, layer), so the backward is the
// same kernel on dy. Source: Srivastava et al. 2014.
//
// Macros: SCALAR; C units in memory, UNITS of them real.

#include "random.cuh"

// x, y: SCALAR (rows, C), those beyond UNITS written as 0; may be the same array.
// first_row: where this GPU's rows begin in the whole batch, whose rows times UNITS are < 2^32;
// rows C < 2^31. One thread 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
    dropout(const SCALAR* x, SCALAR* y, const int* __restrict__ step, uint64 seed, int first_row,
            int rows, int layer, float rate) {
    constexpr int VECTORS = C / LANES;
    constexpr bool ALIGNED = UNITS % 4 == 0;  // then a row begins with a fresh draw
    const int vector = blockIdx.x * blockDim.x + threadIdx.x;
    if (vector >= rows * VECTORS) return;
    const int row = vector / VECTORS, first_unit = vector % VECTORS * LANES;
    float values[LANES];
    load(x + vector * LANES, values);
    uint4 draw;
#pragma unroll
    for (int k = 0; k < LANES; ++k) {
        const unsigned element = (first_row + row) * static_cast<unsigned>(UNITS) + first_unit + k;
        const unsigned word = (ALIGNED ? k : element) % 4;
        if (k == 0 || word == 0)
            draw = philox(seed, make_uint4(element / 4, *step, DROPOUT, layer));
        const unsigned bits = word == 0 ? draw.x : word == 1 ? draw.y : word == 2 ? draw.z : draw.w;
        const bool kept = first_unit + k < UNITS && uniform(bits) >= rate;
        values[k] = kept ? values[k] / (1 - rate) : 0;
    }
    store(y + vector * LANES, values);
}
