// A dense layer in float32 with bias and activation, for many rows, on tensor cores: an operand is
// the sum of two halves, as in convolutions.cu.
//
// x:      float (n, I), 16-byte aligned
// weight: halves (U / 8 tiles, STEPS, 32 lanes, 2 planes, 4), as `pack` of dense_halves.py makes
//         them: their high halves, then their low ones; 0 for the inputs from I on
// bias:   float (U)
// scales: float2 (1 + U), powers of two: x of the first multiplies the inputs where they are split,
//         and x and y of the others the sums of a unit
// y:      float (n, U); the units from UNITS on become 0
//
// Macros: I, a multiple of 4; U, a multiple of 8; UNITS; ACTIVATION, PARAMETER; ROWS and COLUMNS,
// 64 or 128, of a block: a warp has 32 rows and half of the columns. A round of DEPTH inputs is
// copied to shared memory while the one before it is multiplied. A round is also a chain: its sums,
// which tensor cores cut off, are added to the others rounded to nearest.
//
// Grid: ceil(U / COLUMNS) by ceil(n / ROWS), 2 ROWS threads; shared memory: `shared_bytes` of
// dense_halves.py.

#include "activation.cuh"
#include "ptx.cuh"
#include "vector.cuh"

constexpr int DEPTH = 64, ROUND_STEPS = DEPTH / 16, ROUNDS = (I + DEPTH - 1) / DEPTH;
constexpr int TILES = U / 8, BLOCK_TILES = COLUMNS / 8, WARP_TILES = BLOCK_TILES / 2;
constexpr int THREADS = 2 * ROWS;
// Floats from one row to the next: lanes of four rows then read from all banks.
constexpr int PITCH = DEPTH + 8;

static_assert(I % 4 == 0 && U % 8 == 0 && UNITS <= U, "rows of vectors, whole tiles");
static_assert(WARP_TILES % 2 == 0, "tiles are multiplied in pairs");

// The sums of a warp, of 16 rows and 8 units each.
using Sums = float[2][WARP_TILES][4];

// A lane's words of eight units, high and low.
struct alignas(16) Fragment {
    unsigned words[2][2];
};

// What a block has in shared memory, twice.
struct Round {
    float x[ROWS][PITCH];
    Fragment weight[BLOCK_TILES][ROUND_STEPS][WARP];
};

__device__ inline void split(float2 values, float factor, unsigned& high, unsigned& low) {
    const float x = values.x * factor, y = values.y * factor;
    const __half2 upper = __floats2half2_rn(x, y);
    const __half2 lower =
        __floats2half2_rn(x - static_cast<float>(upper.x), y - static_cast<float>(upper.y));
    high = reinterpret_cast<const unsigned&>(upper), low = reinterpret_cast<const unsigned&>(lower);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dense_halves(const float* __restrict__ x, const uint4* __restrict__ weight,
                 const float* __restrict__ bias, const float2* __restrict__ scales,
                 float* __restrict__ y, int n) {
    extern __shared__ uint4 shared[];
    auto* const rounds = reinterpret_cast<Round*>(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int block_row = blockIdx.y * ROWS, block_tile = blockIdx.x * BLOCK_TILES;
    // Of this lane, in the block.
    const int own_row = warp / 2 * 32 + lane / 4, own_tile = warp % 2 * WARP_TILES;
    const float factor = scales[0].x;

    const auto copy = [&](int number) {
        Round& to = rounds[number % 2];
        for (int k = threadIdx.x; k < ROWS * DEPTH / 4; k += THREADS) {
            const int row = k / (DEPTH / 4), input = k % (DEPTH / 4) * 4;
            const size_t source = min(block_row + row, n - 1);  // rows from n on: not written
            // Inputs from I on meet weights of 0, and are finite if the last are.
            copy_async(&to.x[row][input], x + source * I + min(number * DEPTH + input, I - 4));
        }
        constexpr int VECTORS = ROUND_STEPS * WARP;  // of a tile
        for (int k = threadIdx.x; k < BLOCK_TILES * VECTORS; k += THREADS) {
            const int tile = k / VECTORS;
            if (block_tile + tile < TILES)
                copy_async(
                    &to.weight[tile][0][0] + k % VECTORS,
                    weight + ((block_tile + tile) * ROUNDS + number) * VECTORS + k % VECTORS);
        }
    };

    Sums sums = {};
    copy(0);
    for (int number = 0; number < ROUNDS; ++number) {
        wait_for_copies();
        __syncthreads();
        if (number + 1 < ROUNDS) copy(number + 1);
        const Round& round = rounds[number % 2];
        Sums chain = {};
#pragma unroll
        for (int step = 0; step < ROUND_STEPS; ++step) {
            unsigned a[2][2][4];  // high and low, of 16 rows each
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* const from =
                        &round
                             .x[own_row + 16 * m + k % 2 * 8][step * 16 + lane % 4 * 2 + k / 2 * 8];
                    split(*reinterpret_cast<const float2*>(from), factor, a[0][m][k], a[1][m][k]);
                }
#pragma unroll
            for (int tile = 0; tile < WARP_TILES; tile += 2) {
                const Fragment b[] = {round.weight[own_tile + tile][step][lane],
                                      round.weight[own_tile + tile + 1][step][lane]};
                // The small products first; four sums take turns, so that none waits for itself.
#pragma unroll
                for (int product = 0; product < 3; ++product)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        multiply(chain[k % 2][tile + k / 2], a[product == 0][k % 2],
                                 b[k / 2].words[product == 1]);
            }
        }
#pragma unroll
        for (int k = 0; k < 2 * WARP_TILES * 4; ++k)
            sums[k / (4 * WARP_TILES)][k / 4 % WARP_TILES][k % 4] +=
                chain[k / (4 * WARP_TILES)][k / 4 % WARP_TILES][k % 4];
    }
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile) {
        const int unit = (block_tile + own_tile + tile) * 8 + lane % 4 * 2;
        if (unit >= U) continue;
        const float2 factors[] = {scales[1 + unit], scales[2 + unit]};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int row = block_row + own_row + 8 * k;
            if (row >= n) continue;
            float values[2];
            for (int j = 0; j < 2; ++j) {
                const float sum = sums[k / 2][tile][k % 2 * 2 + j] * factors[j].x * factors[j].y;
                values[j] = unit + j < UNITS ? Activation::value(sum + bias[unit + j]) : 0;
            }
            *reinterpret_cast<float2*>(y + static_cast<size_t>(row) * U + unit) =
                make_float2(values[0], values[1]);
        }
    }
}
