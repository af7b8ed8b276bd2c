// The first two convolutions of a network with bias, activation and 2 x 2 pooling, in one pass over
// the images: of what they compute, only the second pooled image is written. The filters stay in
// the shared memory of a block, beside the images that it works on.
//
// images:  uint8 (n, H, W), 4-byte aligned
// weight1: halves (HALVES, conv1::STEPS, TILES1, 32 lanes, 8 bytes), for pixels divided by 256
// weight2: SCALAR (STEPS, TILES, 32 lanes, 8 bytes); both as `pack` of convolutions.py makes them
// bias1, bias2: float (C), (K)
// y:       SCALAR (n, QUADS_H, QUADS_W, K), 16-byte aligned; channels from CHANNELS on become 0
//
// Macros besides those of conv1.cuh: SCALAR; C, the first's channels, a multiple of 8, of which
// CHANNELS1 are real; R2, S2, PAD2_H, PAD2_W; POOL2: MAX or AVERAGE; K, a multiple of 16, of which
// CHANNELS are real; ACTIVATION_1, ACTIVATION_2, PARAMETER (of both); PRODUCTS: 0 for halves, for
// floats 1 (rounded to TF32) or 3 (the error of float32). TEAMS of TEAM warps, each with an image;
// in the second convolution a warp computes TASK_GROUPS times eight quads (2 x 2 neighbours) in one of
// PARTS parts of the channels.
//
// As a matrix product it has the pixels as rows (m), channels of taps as k, output channels as
// columns (n). 16 bytes of a pixel, LANES channels, are a chunk; a step of k has two chunks. The
// second convolution's input lies in shared memory with a border of zeros, first the even, then the
// odd columns of a row: eight quads beside each other are then eight neighbours, read without bank
// conflicts.
//
// Three products: a float is the sum of two TF32 numbers and a rest of 2^-22; the product of the
// two smaller parts, of the same size, is left out. The first convolution multiplies pixels, exact
// in half, by weights that are the sum of HALVES halves, see conv1.cu.
//
// Grid: any number of blocks, at most ceil(n / TEAMS); 32 TEAM TEAMS threads; shared memory:
// `shared_bytes` of convolutions.py.

#include "activation.cuh"
#include "conv1.cuh"
#include "ptx.cuh"
#include "vector.cuh"

constexpr int HALVES = sizeof(SCALAR) / 2, TILES1 = C / 8;

constexpr int IN_H = conv1::QUADS_H + 2 * PAD2_H, IN_W = conv1::QUADS_W + 2 * PAD2_W;
constexpr int QUADS_H = (IN_H - R2 + 1) / 2, QUADS_W = (IN_W - S2 + 1) / 2;
constexpr int QUADS = QUADS_H * QUADS_W;
constexpr int CHUNKS = (CHANNELS1 + LANES - 1) / LANES;  // of a pixel
constexpr int ALL_CHUNKS = R2 * S2 * CHUNKS, STEPS = (ALL_CHUNKS + 1) / 2;

// The columns of two tiles are ordered so that a lane's four are neighbours in the output. If at
// most two channels are left for the last two, they are in the first of them.
constexpr int REST = CHANNELS % 16;
constexpr int TILES = CHANNELS / 16 * 2 + (REST == 0 ? 0 : REST <= 2 ? 1 : 2);
constexpr int PART_TILES = ((TILES + 1) / 2 + PARTS - 1) / PARTS * 2 - (PARTS == 1 && TILES % 2);

// Bytes in shared memory. An odd number of chunks as the distance of pixels, and rows that continue
// it from one row of quads to the next, avoid bank conflicts.
constexpr int PIXEL = (CHUNKS | 1) * 16, HALF = (IN_W + 1) / 2;
constexpr int WANTED = QUADS_W * PIXEL / 2 / 16 * 16 % 64;
constexpr int PITCH = 2 * HALF * PIXEL + (WANTED - 2 * HALF * PIXEL % 64 + 64) % 64;
constexpr int IMAGE = IN_H * PITCH;

constexpr int TASK_QUADS = 8 * TASK_GROUPS;
constexpr int TASKS = (QUADS + TASK_QUADS - 1) / TASK_QUADS * PARTS;
constexpr int TEAM_THREADS = TEAM * WARP, THREADS = TEAMS * TEAM_THREADS;

static_assert(C % 8 == 0 && CHANNELS1 <= C, "channels are padded to a multiple of 8");
static_assert(K % 16 == 0 && CHANNELS <= K && K < CHANNELS + 16, "tiles come in pairs");
static_assert(conv1::POOLING != NONE && POOL2 != NONE, "each convolution is pooled");
static_assert(QUADS_H > 0 && QUADS_W > 0, "no quad fits");

__device__ inline int column(int j) { return (j / 2 + j % 2 * HALF) * PIXEL; }

__device__ inline void synchronize_team(int team) {
    if constexpr (TEAM == 1) {
        __syncwarp();
    } else {
        barrier(1 + team, TEAM_THREADS);
    }
}

// Four pixels at a time of the image that a team computes next, in registers.
struct Pixels {
    static constexpr int WORDS = (conv1::WORDS + TEAM_THREADS - 1) / TEAM_THREADS;
    unsigned words[WORDS];

    __device__ void load(const uint8* image, int thread) {
        for (int k = 0; k < WORDS; ++k)
            if (k * TEAM_THREADS + thread < conv1::WORDS)
                words[k] = reinterpret_cast<const unsigned*>(image)[k * TEAM_THREADS + thread];
    }
    __device__ void store(conv1::Copies& copies, int thread) const {
        for (int k = 0; k < WORDS; ++k)
            if (k * TEAM_THREADS + thread < conv1::WORDS)
                conv1::store_pixels(copies, k * TEAM_THREADS + thread, words[k]);
    }
};

// The first convolution of one image, by the warps of a team: from its copies to `image`.
__device__ inline void convolve_first(const conv1::Copies& copies,
                                      const uint2 (&filters)[HALVES][conv1::STEPS][TILES1][WARP],
                                      const float* bias, char* image, int lane, int warp) {
    const conv1::TapOffsets taps(lane);
    for (int group = warp; group < conv1::GROUPS; group += TEAM) {
        const int quad = group * 8 + lane / 4;
        const bool inside = quad < conv1::QUADS;
        const __half* pixels = copies[0][0] + conv1::quad_offset(inside ? quad : 0);
        unsigned a[conv1::STEPS][2][4];
#pragma unroll
        for (int step = 0; step < conv1::STEPS; ++step)
            for (int lower = 0; lower < 2; ++lower) taps.load(pixels, step, lower, a[step][lower]);
        char* const to = image + (quad / conv1::QUADS_W + PAD2_H) * PITCH +
                         column(quad % conv1::QUADS_W + PAD2_W);
#pragma unroll
        for (int tile = 0; tile < TILES1; ++tile) {
            float sums[2][4] = {};
            __syncwarp();
#pragma unroll
            for (int k = 0; k < HALVES * conv1::STEPS; ++k) {
                const uint2 pair = filters[k / conv1::STEPS][k % conv1::STEPS][tile][lane];
                const unsigned b[2] = {pair.x, pair.y};
                for (int lower = 0; lower < 2; ++lower)
                    multiply(sums[lower], a[k % conv1::STEPS][lower], b);
            }
            const int channel = tile * 8 + lane % 4 * 2;
            if (!inside || channel >= CHUNKS * LANES) continue;
            float values[2];
            for (int k = 0; k < 2; ++k)
                values[k] =
                    conv1::pooled(conv1::POOLING, sums[0][k], sums[0][k + 2], sums[1][k],
                                  sums[1][k + 2], [&](float z) {
                                      return activation::ACTIVATION_1::value(z + bias[channel + k]);
                                  });
            store_two(reinterpret_cast<SCALAR*>(to) + channel, values);
        }
    }
}

// Both operands of a step, of a warp's quads and channels.
struct Operands {
    unsigned a[TASK_GROUPS][2][4];  // rows g and g + 8: the upper and lower pixel of quad g; left, right
    unsigned b[PART_TILES][2];
};

#if PRODUCTS == 0
__device__ inline void multiply_all(float (&sums)[TASK_GROUPS][2][PART_TILES][4], const Operands& of,
                                    int tiles) {
#pragma unroll
    for (int tile = 0; tile < PART_TILES; ++tile)
        if (tile < tiles)
#pragma unroll
            for (int m = 0; m < 2 * TASK_GROUPS; ++m)
                multiply(sums[m / 2][m % 2][tile], of.a[m / 2][m % 2], of.b[tile]);
}
#else
__device__ inline void multiply_all(float (&sums)[TASK_GROUPS][2][PART_TILES][4], const Operands& of,
                                    int tiles) {
    unsigned high[TASK_GROUPS][2][4], low[TASK_GROUPS][2][4];
#pragma unroll
    for (int m = 0; m < 2 * TASK_GROUPS; ++m)
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
            for (int m = 0; m < 2 * TASK_GROUPS; ++m)
                multiply_tf32(sums[m / 2][m % 2][tile], low[m / 2][m % 2], b_high);
#pragma unroll
            for (int m = 0; m < 2 * TASK_GROUPS; ++m)
                multiply_tf32(sums[m / 2][m % 2][tile], high[m / 2][m % 2], b_low);
        }
#pragma unroll
        for (int m = 0; m < 2 * TASK_GROUPS; ++m)
            multiply_tf32(sums[m / 2][m % 2][tile], high[m / 2][m % 2], b_high);
    }
}
#endif

// What a block has in shared memory, before the images of its teams.
struct Filters {
    uint2 second[STEPS][TILES][WARP];
    uint2 first[HALVES][conv1::STEPS][TILES1][WARP];
    // Of a chunk, from a quad's upper left pixel: for its left and its right pixels.
    int2 offsets[STEPS][2];
    float biases1[(C + 3) / 4 * 4];
};

// Of a team: the pixels and the second convolution's input.
struct Images {
    conv1::Copies copies;
    char image[IMAGE];
};

static_assert(sizeof(Filters) % 16 == 0 && sizeof(conv1::Copies) % 16 == 0, "vectors");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convolutions(const uint8* __restrict__ images, const uint4* __restrict__ weight1,
                 const uint4* __restrict__ weight2, const float* __restrict__ bias1,
                 const float* __restrict__ bias2, SCALAR* __restrict__ y, int n) {
    extern __shared__ uint4 shared[];
    Filters& filters = *reinterpret_cast<Filters*>(shared);
    auto* const of_teams = reinterpret_cast<Images*>(&filters + 1);
    const int thread = threadIdx.x % TEAM_THREADS, team = threadIdx.x / TEAM_THREADS;
    const int lane = thread % WARP, warp = thread / WARP;
    conv1::Copies& copies = of_teams[team].copies;
    char* const image = of_teams[team].image;

    for (int k = threadIdx.x; k < static_cast<int>(sizeof(filters.second) / 16); k += THREADS)
        copy_async(reinterpret_cast<uint4*>(filters.second) + k, weight2 + k);
    for (int k = threadIdx.x; k < static_cast<int>(sizeof(filters.first) / 16); k += THREADS)
        copy_async(reinterpret_cast<uint4*>(filters.first) + k, weight1 + k);
    int row = blockIdx.x * TEAMS + team;
    Pixels next;
    if (row < n) next.load(images + static_cast<size_t>(row) * H * W, thread);
    // The chunk behind the last has weights of 0; what it reads must be finite if the last is.
    for (int k = threadIdx.x; k < 2 * STEPS; k += THREADS) {
        const int chunk = k < ALL_CHUNKS ? k : ALL_CHUNKS - 1;
        const int r = chunk / (S2 * CHUNKS), s = chunk / CHUNKS % S2;
        const int first = r * PITCH + chunk % CHUNKS * 16;
        filters.offsets[k / 2][k % 2] = make_int2(first + column(s), first + column(s + 1));
    }
    if (threadIdx.x < C) filters.biases1[threadIdx.x] = bias1[threadIdx.x];
    // The borders of zeros.
    for (int k = threadIdx.x; k < static_cast<int>(TEAMS * sizeof(Images) / 16); k += THREADS)
        reinterpret_cast<uint4*>(of_teams)[k] = make_uint4(0, 0, 0, 0);
    wait_for_copies();
    __syncthreads();

    for (; row < n; row += gridDim.x * TEAMS) {
        next.store(copies, thread);
        synchronize_team(team);
        convolve_first(copies, filters.first, filters.biases1, image, lane, warp);
        synchronize_team(team);
        const int next_row = row + gridDim.x * TEAMS;
        if (next_row < n) next.load(images + static_cast<size_t>(next_row) * H * W, thread);
        for (int task = warp; task < TASKS; task += TEAM) {
            const int first_quad = task / PARTS * TASK_QUADS;
            const int first_tile = task % PARTS * PART_TILES;
            const int tiles = min(PART_TILES, TILES - first_tile);
            // The rows that a lane names: of the upper or lower pixels of eight quads.
            const char* pixels[TASK_GROUPS];
            for (int k = 0; k < TASK_GROUPS; ++k) {
                const int quad = min(first_quad + 8 * k + lane % 8, QUADS - 1);
                pixels[k] =
                    image + (quad / QUADS_W * 2 + lane / 8 % 2) * PITCH + quad % QUADS_W * PIXEL;
            }
            const auto load_step = [&](int step, Operands& to) {
                const int2 offset = filters.offsets[step][lane / 16];
#pragma unroll
                for (int k = 0; k < TASK_GROUPS; ++k) {
                    load_matrices(pixels[k] + offset.x, to.a[k][0]);
                    load_matrices(pixels[k] + offset.y, to.a[k][1]);
                }
#pragma unroll
                for (int tile = 0; tile < PART_TILES; ++tile) {
                    if (tile >= tiles) continue;
                    const uint2 pair = filters.second[step][first_tile + tile][lane];
                    to.b[tile][0] = pair.x, to.b[tile][1] = pair.y;
                }
            };
            float sums[TASK_GROUPS][2][PART_TILES][4] = {};
            Operands current, ahead;
            load_step(0, ahead);
#pragma unroll 2
            for (int step = 0; step < STEPS; ++step) {
                current = ahead;
                if (step + 1 < STEPS) load_step(step + 1, ahead);
                multiply_all(sums, current, tiles);
            }
#pragma unroll
            for (int group = 0; group < TASK_GROUPS; ++group) {
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
                            return activation::ACTIVATION_2::value(z + bias2[channel + k]);
                        };
                        values[k] = conv1::pooled(POOL2, left[k % 2], right[k % 2], left[k % 2 + 2],
                                                  right[k % 2 + 2], activated);
                    }
                    store_four(to + channel, values);
                }
            }
        }
    }
}
