// The gradient of a convolution's filters, for few channels in halves:
//
//     dweight[k][r][s][c] = sum dy[n][i][j][k] x[n][i + r - PAD_H][j + s - PAD_W][c]
//
// As a matrix product it has output channels as rows (m), input channels of taps as columns (n) and
// the positions of all images as k. A block computes a part of the filters, those of a row r and 16
// M_TILES output channels, for a share of the images. A warp has all these output channels, a part
// of the columns, and every SETS-th step of 16 positions of an
// image. Its sums stay in registers; they are
// added over the warps of a block, then over the blocks of a part by the last one to finish.
//
// x:       halves (n, H, W, C)
// dy:      halves (n, OH, OW, K)
// partial: gridDim.x gridDim.y 16 M_TILES S INPUTS floats, INPUTS rounded up to 8; 16-byte aligned
// counters: gridDim.y zeros, reset to 0
// dweight: float (K, R, S, C); input channels from the last chunk of 8 with real ones on become 0
//
// Macros: H, W, OH, OW, R, S, PAD_H, PAD_W; C and K, multiples of 8, of which INPUTS of C are real;
// M_TILES; UNIT_PARTS, into which the columns are divided; SETS; IMAGES, loaded together. Stride
// and dilation are 1. Grid: any number of blocks by R ceil(K / 16 / M_TILES); 32 UNIT_PARTS SETS
// threads; shared memory: `shared_bytes` of second_gradients.py. The sums have the same order
// whenever the grid is the same.

#undef SCALAR
#define SCALAR __half
#include "ptx.cuh"
#include "vector.cuh"
#include "reduce.cuh"

constexpr int CHUNKS = (INPUTS + 7) / 8;  // of a pixel of x: 16 bytes, 8 channels
constexpr int UNITS = S * CHUNKS;         // tiles of 8 columns: a chunk at a tap s
constexpr int WARP_UNITS = ((UNITS + 1) / 2 + UNIT_PARTS - 1) / UNIT_PARTS * 2;
constexpr int PART_K = 16 * M_TILES, PARTS_K = (K + PART_K - 1) / PART_K;
constexpr int POSITIONS = OH * OW, STEPS = (POSITIONS + 15) / 16;
constexpr int THREADS = UNIT_PARTS * SETS * WARP;
constexpr int BATCH = 16;  // blocks whose sums are loaded together

// Distances of pixels are odd numbers of chunks, against bank conflicts.
constexpr int X_PIXEL = (CHUNKS | 1) * 16, X_COLUMNS = OW + S - 1, X_ROW = X_COLUMNS * X_PIXEL;
constexpr int DY_CHUNKS = 2 * M_TILES, DY_PIXEL = (DY_CHUNKS | 1) * 16;

struct Image {
    char x[OH][X_ROW];  // the rows that r reaches, with columns of zeros as padding
    char dy[STEPS * 16][DY_PIXEL];
};
union Shared {
    Image images[2][IMAGES];  // that warps work on, and that are loaded meanwhile
    float sums[SETS][PART_K][(UNITS | 1) * 8];
};

// Both operands of a step.
struct Operands {
    unsigned a[M_TILES][4];
    unsigned b[WARP_UNITS / 2][4];  // of two units each
};

__device__ inline void add(float4& sum, const float4& other) {
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// A thread copies the same chunks of every image, so that it finds their places only once.
__device__ inline void load_images(Image* to, const __half* x, const __half* dy, int first,
                                   int count, int r, int part) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int at = threadIdx.x; at < OH * X_COLUMNS * CHUNKS; at += THREADS) {
        const int chunk = at % CHUNKS, column = at / CHUNKS % X_COLUMNS;
        const int row = at / (CHUNKS * X_COLUMNS), i = row + r - PAD_H, j = column - PAD_W;
        const bool inside = i >= 0 && i < H && j >= 0 && j < W;
        const __half* const from =
            x + ((static_cast<size_t>(first) * H + i) * W + j) * C + chunk * 8;
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) {
            char* const pixel = to[image].x[row] + column * X_PIXEL + chunk * 16;
            if (inside && image < count) {
                copy_async(pixel, from + image * H * W * C);
            } else {
                *reinterpret_cast<uint4*>(pixel) = zero;
            }
        }
    }
    for (int at = threadIdx.x; at < STEPS * 16 * DY_CHUNKS; at += THREADS) {
        const int chunk = at % DY_CHUNKS, position = at / DY_CHUNKS;
        const int k = part * PART_K + chunk * 8;
        const bool inside = position < POSITIONS && k < K;
        const __half* const from = dy + (static_cast<size_t>(first) * POSITIONS + position) * K + k;
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) {
            char* const pixel = to[image].dy[position] + chunk * 16;
            if (inside && image < count) {
                copy_async(pixel, from + image * POSITIONS * K);
            } else {
                *reinterpret_cast<uint4*>(pixel) = zero;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    weight_gradient(const __half* __restrict__ x, const __half* __restrict__ dy, float* partial,
                    unsigned* counters, float* __restrict__ dweight, int n) {
    extern __shared__ uint4 shared[];
    Shared& block = *reinterpret_cast<Shared*>(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int set = warp % SETS, first_unit = warp / SETS * WARP_UNITS;
    const int r = blockIdx.y / PARTS_K, part = blockIdx.y % PARTS_K;
    const int first = static_cast<long long>(n) * blockIdx.x / gridDim.x;
    const int end = static_cast<long long>(n) * (blockIdx.x + 1) / gridDim.x;

    // The rows that a lane names are positions, transposed, because the product adds over them. Of
    // dy, the matrices are two chunks of 8 positions, then those of the next 8; of x, a unit's 8
    // positions, its next 8, then those of the next unit.
    const int of_dy = (lane % 8 + lane / 16 * 8) * DY_PIXEL + lane / 8 % 2 * 16;
    int units[WARP_UNITS / 2];
    for (int k = 0; k < WARP_UNITS / 2; ++k) {
        const int unit = min(first_unit + 2 * k + lane / 16, UNITS - 1);
        units[k] = unit / CHUNKS * X_PIXEL + unit % CHUNKS * 16;
    }
    float sums[M_TILES][WARP_UNITS][4] = {};
    load_images(block.images[0], x, dy, first, end - first, r, part);
    for (int batch = first, stage = 0; batch < end; batch += IMAGES, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        const int next = batch + IMAGES;
        if (next < end) load_images(block.images[stage ^ 1], x, dy, next, end - next, r, part);
        const Image& image = block.images[stage][0];
        for (int step = set; step < STEPS; step += SETS) {
            const int position = min(step * 16 + lane % 16, POSITIONS - 1);
            const char* const a = image.dy[step * 16] + of_dy;
            const char* const b = image.x[position / OW] + position % OW * X_PIXEL;
            const auto load = [&](int image, Operands& to) {
#pragma unroll
                for (int tile = 0; tile < M_TILES; ++tile)
                    load_transposed(a + image * sizeof(Image) + tile * 32, to.a[tile]);
#pragma unroll
                for (int k = 0; k < WARP_UNITS / 2; ++k)
                    load_transposed(b + image * sizeof(Image) + units[k], to.b[k]);
            };
            // The next image's operands are loaded before this one's are used.
            Operands operands[2];
            load(0, operands[0]);
#pragma unroll
            for (int image = 0; image < IMAGES; ++image) {
                if (image + 1 < IMAGES) load(image + 1, operands[(image + 1) % 2]);
                const Operands& of = operands[image % 2];
#pragma unroll
                for (int unit = 0; unit < WARP_UNITS; ++unit) {
                    const unsigned* const words = of.b[unit / 2] + unit % 2 * 2;
                    const unsigned pair[2] = {words[0], words[1]};
#pragma unroll
                    for (int tile = 0; tile < M_TILES; ++tile)
                        multiply(sums[tile][unit], of.a[tile], pair);
                }
            }
        }
    }

    // Sum over the warps of the block.
    __syncthreads();
#pragma unroll
    for (int unit = 0; unit < WARP_UNITS; ++unit) {
        if (first_unit + unit >= UNITS) continue;
        const int column = (first_unit + unit) * 8 + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 2 * M_TILES; ++k) {
            const float* const two = sums[k / 2][unit] + k % 2 * 2;
            *reinterpret_cast<float2*>(&block.sums[set][k * 8 + lane / 4][column]) =
                make_float2(two[0], two[1]);
        }
    }
    __syncthreads();
    constexpr int FOURS = UNITS * 2, SIZE = PART_K * FOURS;
    float4* const slots = reinterpret_cast<float4*>(partial) + blockIdx.y * gridDim.x * SIZE;
    for (int at = threadIdx.x; at < SIZE; at += THREADS) {
        float4 sum = {};
#pragma unroll
        for (int other = 0; other < SETS; ++other)
            add(sum,
                *reinterpret_cast<const float4*>(&block.sums[other][at / FOURS][at % FOURS * 4]));
        slots[blockIdx.x * SIZE + at] = sum;
    }

    // Sum over the blocks.
    if (!last_block(counters + blockIdx.y, gridDim.x)) return;
    const int blocks = gridDim.x;
    for (int at = threadIdx.x; at < PART_K * S * (C / 4); at += THREADS) {
        const int row = at / (S * (C / 4)), s = at / (C / 4) % S, four = at % (C / 4);
        const int k = part * PART_K + row;
        if (k >= K) continue;
        float4 sum = {};
        if (four < CHUNKS * 2) {
            const float4* const from = slots + row * FOURS + s * CHUNKS * 2 + four;
            for (int other = 0; other < blocks; other += BATCH) {
                float4 values[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) values[b] = from[min(other + b, blocks - 1) * SIZE];
#pragma unroll
                for (int b = 0; b < BATCH; ++b)
                    if (other + b < blocks) add(sum, values[b]);
            }
        }
        reinterpret_cast<float4*>(dweight)[((k * R + r) * S + s) * (C / 4) + four] = sum;
    }
}
