// A convolution of several channels with bias, activation and 2 x 2 pooling in one pass: the sums
// are never written. All filters stay in the shared memory of a block, beside the images that it
// works on.
//
// x:      SCALAR (n, H, W, C), 16-byte aligned; the channels from CHANNELS_IN on are not read
// weight: SCALAR (STEPS, TILES, 32 lanes, 8 bytes), as `fragments` of convolution.py makes it
// bias:   float (K)
// y:      SCALAR (n, QUADS_H, QUADS_W, K), 16-byte aligned; channels from CHANNELS on become 0
//
// Macros: SCALAR; H, W, C, CHANNELS_IN of x; R, S, PAD_H, PAD_W; K, CHANNELS of y, K a multiple of
// 16; POOL: MAX or AVERAGE, 2 x 2 with stride 2; ACTIVATION, PARAMETER; PRODUCTS: 0 for halves, for
// floats 1 (rounded to TF32) or 3 (the error of float32). TEAMS of TEAM warps, each with an image;
// a warp computes GROUPS times eight quads (2 x 2 neighbours) in one of PARTS parts of the channels.
//
// As a matrix product it has the pixels as rows (m), channels of taps as k, output channels as
// columns (n). 16 bytes of a pixel, LANES channels, are a chunk; a step of k has two chunks. An
// image lies in shared memory with its border of zeros, first the even, then the odd columns of a
// row: eight quads beside each other are then eight neighbours, read without bank conflicts.
//
// Three products: a float is the sum of two TF32 numbers and a rest of 2^-22; the product of the
// two smaller parts, of the same size, is left out.
//
// Grid: any number of blocks, at most ceil(n / TEAMS); 32 TEAM TEAMS threads; shared memory:
// `shared_bytes` of convolution.py.

#include "activation.cuh"
#include "ptx.cuh"
#include "quads.cuh"
#include "vector.cuh"

constexpr int QUADS_H = (H + 2 * PAD_H - R + 1) / 2, QUADS_W = (W + 2 * PAD_W - S + 1) / 2;
constexpr int QUADS = QUADS_H * QUADS_W;
constexpr int CHUNKS = (CHANNELS_IN + LANES - 1) / LANES;  // of a pixel
constexpr int ALL_CHUNKS = R * S * CHUNKS, STEPS = (ALL_CHUNKS + 1) / 2;

// The columns of two tiles are ordered so that a lane's four are neighbours in the output. If at
// most two channels are left for the last two, they are in the first of them.
constexpr int REST = CHANNELS % 16;
constexpr int TILES = CHANNELS / 16 * 2 + (REST == 0 ? 0 : REST <= 2 ? 1 : 2);
constexpr int PART_TILES = ((TILES + 1) / 2 + PARTS - 1) / PARTS * 2 - (PARTS == 1 && TILES % 2);

// Bytes in shared memory. An odd number of chunks as the distance of pixels, and rows that continue
// it from one row of quads to the next, avoid bank conflicts.
constexpr int PIXEL = (CHUNKS | 1) * 16, HALF = (W + 2 * PAD_W + 1) / 2;
constexpr int WANTED = QUADS_W * PIXEL / 2 / 16 * 16 % 64;
constexpr int PITCH = 2 * HALF * PIXEL + (WANTED - 2 * HALF * PIXEL % 64 + 64) % 64;
constexpr int IMAGE = (H + 2 * PAD_H) * PITCH;

constexpr int TASK_QUADS = 8 * GROUPS;
constexpr int TASKS = (QUADS + TASK_QUADS - 1) / TASK_QUADS * PARTS;
constexpr int TEAM_THREADS = TEAM * WARP, THREADS = TEAMS * TEAM_THREADS;

static_assert(C % LANES == 0 && CHANNELS_IN <= C, "a chunk is 16 bytes of a pixel");
static_assert(K % 16 == 0 && CHANNELS <= K && K < CHANNELS + 16, "tiles come in pairs");
static_assert(POOL != NONE, "pooling is 2 x 2 with stride 2");

__device__ inline int column(int j) { return (j / 2 + j % 2 * HALF) * PIXEL; }

__device__ inline void synchronize_team(int team) {
    if constexpr (TEAM == 1) {
        __syncwarp();
    } else {
        barrier(1 + team, TEAM_THREADS);
    }
}

__device__ inline void load_image(char* image, const SCALAR* x, int thread) {
    for (int k = thread; k < H * W * CHUNKS; k += TEAM_THREADS) {
        const int pixel = k / CHUNKS, chunk = k % CHUNKS;
        char* const to = image + (pixel / W + PAD_H) * PITCH + column(pixel % W + PAD_W);
        copy_async(to + chunk * 16, x + pixel * C + chunk * LANES);
    }
}

// Both operands of a step, of a warp's quads and channels.
struct Operands {
    unsigned a[GROUPS][2][4];  // rows g and g + 8: the upper and lower pixel of quad g; left, right
    unsigned b[PART_TILES][2];
};

#if PRODUCTS == 0
__device__ inline void multiply_all(float (&sums)[GROUPS][2][PART_TILES][4], const Operands& of,
                                    int tiles) {
#pragma unroll
    for (int tile = 0; tile < PART_TILES; ++tile)
        if (tile < tiles)
#pragma unroll
            for (int m = 0; m < 2 * GROUPS; ++m)
                multiply(sums[m / 2][m % 2][tile], of.a[m / 2][m % 2], of.b[tile]);
}
#else
__device__ inline void multiply_all(float (&sums)[GROUPS][2][PART_TILES][4], const Operands& of,
                                    int tiles) {
    unsigned high[GROUPS][2][4], low[GROUPS][2][4];
#pragma unroll
    for (int m = 0; m < 2 * GROUPS; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            split(of.a[m / 2][m % 2][k], high[m / 2][m % 2][k], low[m / 2][m % 2][k]);
#pragma unroll
    for (int tile = 0; tile < PART_TILES; ++tile) {
        if (tile >= tiles) continue;
        unsigned b_high[2], b_low[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) split(of.b[tile][k], b_high[k], b_low[k]);
        // The small products first. Those of other pixels are between two sums of the same.
        if constexpr (PRODUCTS == 3) {
#pragma unroll
            for (int m = 0; m < 2 * GROUPS; ++m)
                multiply_tf32(sums[m / 2][m % 2][tile], low[m / 2][m % 2], b_high);
#pragma unroll
            for (int m = 0; m < 2 * GROUPS; ++m)
                multiply_tf32(sums[m / 2][m % 2][tile], high[m / 2][m % 2], b_low);
        }
#pragma unroll
        for (int m = 0; m < 2 * GROUPS; ++m)
            multiply_tf32(sums[m / 2][m % 2][tile], high[m / 2][m % 2], b_high);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convolution(const SCALAR* __restrict__ x, const uint2* __restrict__ weight,
                const float* __restrict__ bias, SCALAR* __restrict__ y, int n) {
    extern __shared__ uint4 shared[];
    auto* const filters = reinterpret_cast<uint2*>(shared);
    auto* const offsets = reinterpret_cast<int2*>(filters + STEPS * TILES * WARP);
    const int thread = threadIdx.x % TEAM_THREADS, team = threadIdx.x / TEAM_THREADS;
    const int lane = thread % WARP, warp = thread / WARP;
    char* const images = reinterpret_cast<char*>(offsets + 2 * STEPS);
    char* const image = images + team * IMAGE;
    const size_t image_values = static_cast<size_t>(H) * W * C;

    for (int k = threadIdx.x; k < STEPS * TILES * WARP / 2; k += THREADS)
        copy_async(shared + k, reinterpret_cast<const uint4*>(weight) + k);
    // From a quad's upper left pixel to the chunk, for its left and its right pixels. The chunk
    // behind the last has weights of 0; what it reads must be finite if the last is.
    for (int k = threadIdx.x; k < 2 * STEPS; k += THREADS) {
        const int chunk = k < ALL_CHUNKS ? k : ALL_CHUNKS - 1;
        const int r = chunk / (S * CHUNKS), s = chunk / CHUNKS % S;
        const int first = r * PITCH + chunk % CHUNKS * 16;
        offsets[k] = make_int2(first + column(s), first + column(s + 1));
    }
    if constexpr (PAD_H + PAD_W > 0) {
        for (int k = threadIdx.x; k < TEAMS * IMAGE / 16; k += THREADS)
            reinterpret_cast<uint4*>(images)[k] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    int row = blockIdx.x * TEAMS + team;
    if (row < n) load_image(image, x + row * image_values, thread);
    wait_for_copies();
    __syncthreads();

    while (row < n) {
        for (int task = warp; task < TASKS; task += TEAM) {
            const int first_quad = task / PARTS * TASK_QUADS;
            const int first_tile = task % PARTS * PART_TILES;
            const int tiles = min(PART_TILES, TILES - first_tile);
            // The rows that a lane names: of the upper or lower pixels of eight quads.
            const char* pixels[GROUPS];
            for (int k = 0; k < GROUPS; ++k) {
                const int quad = min(first_quad + 8 * k + lane % 8, QUADS - 1);
                pixels[k] = image + (quad / QUADS_W * 2 + lane / 8 % 2) * PITCH +
                            quad % QUADS_W * PIXEL;
            }
            const auto load_step = [&](int step, Operands& to) {
                const int2 offset = offsets[2 * step + lane / 16];
#pragma unroll
                for (int k = 0; k < GROUPS; ++k) {
                    load_matrices(pixels[k] + offset.x, to.a[k][0]);
                    load_matrices(pixels[k] + offset.y, to.a[k][1]);
                }
#pragma unroll
                for (int tile = 0; tile < PART_TILES; ++tile) {
                    if (tile >= tiles) continue;
                    const uint2 pair = filters[(step * TILES + first_tile + tile) * WARP + lane];
                    to.b[tile][0] = pair.x, to.b[tile][1] = pair.y;
                }
            };
            float sums[GROUPS][2][PART_TILES][4] = {};
            Operands current, next;
            load_step(0, next);
#pragma unroll 2
            for (int step = 0; step < STEPS; ++step) {
                current = next;
                if (step + 1 < STEPS) load_step(step + 1, next);
                multiply_all(sums, current, tiles);
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const int quad = first_quad + 8 * group + lane / 4;
                if (quad >= QUADS) continue;
                SCALAR* const to = y + (static_cast<size_t>(row) * QUADS + quad) * K;
#pragma unroll
                for (int tile = 0; tile < PART_TILES; tile += 2) {
                    if (tile >= tiles) continue;
                    const int channel = (first_tile + tile) * 8 + lane % 4 * 4;
                    float values[4] = {};
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if (tile + k / 2 >= PART_TILES || channel + k >= CHANNELS) continue;
                        const auto& left = sums[group][0][tile + k / 2];
                        const auto& right = sums[group][1][tile + k / 2];
                        const auto activated = [&](float z) {
                            return Activation::value(z + bias[channel + k]);
                        };
                        values[k] = pooled(POOL, left[k % 2], right[k % 2], left[k % 2 + 2],
                                           right[k % 2 + 2], activated);
                    }
                    store_four(to + channel, values);
                }
            }
        }
        row += gridDim.x * TEAMS;
        synchronize_team(team);
        if (row < n) load_image(image, x + row * image_values, thread);
        wait_for_copies();
        synchronize_team(team);
    }
}
