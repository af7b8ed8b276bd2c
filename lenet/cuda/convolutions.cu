// The first two convolutions of a network with bias, activation and 2 x 2 pooling, in one pass over
// the images: of what they compute, only the second pooled image is written. The filters stay in
// the shared memory of a block, beside the images that it works on.
//
// images:  uint8 (n, H, W), 4-byte aligned
// weight1: halves (HALVES, conv1::STEPS, TILES1, 32 lanes, 8 bytes), for pixels divided by 256
// weight2: (STEPS, TILES, 32 lanes, PLANES, 8 bytes); both as `pack` of convolutions.py makes them
// bias1, bias2: float (C), (K)
// scales:  float2 (1 + K), powers of two, for float32: the first convolution's sums are multiplied
// by
//          x of the first pair, and its output by y where it is stored; the others belong to the
//          output channels of the second, whose sums are multiplied by x and by y
// y:       SCALAR (n, QUADS_H, QUADS_W, K), 16-byte aligned; channels from CHANNELS on become 0
//
// Macros besides those of conv1.cuh: SCALAR; C, the first's channels, a multiple of 8, of which
// CHANNELS1 are real; R2, S2, PAD2_H, PAD2_W; POOL2: MAX or AVERAGE; K, a multiple of 16, of which
// CHANNELS are real; ACTIVATION_1, ACTIVATION_2, PARAMETER (of both); PRODUCTS: 0 for halves, for
// floats 1 (rounded to TF32) or 3 (float32, of halves). For few images, SLICES blocks compute
// each: all of them the first convolution, and a slice of the second's channels. A block has TEAMS
// of TEAM warps, each with an image; in the second convolution a warp computes eight quads (2 x 2
// neighbours), one of PARTS parts of the slice, and one of DEPTHS parts of the sum over k.
//
// As a matrix product it has the pixels as rows (m), channels of taps as k, output channels as
// columns (n). 16 bytes of a pixel, DEEP channels, are a chunk; a step of k has two chunks. The
// second convolution's input lies in shared memory with a border of zeros, first the even, then the
// odd columns of a row: eight quads beside each other are then eight neighbours, read without bank
// conflicts.
//
// Three products: an operand is the sum of two halves, high and low, and a rest of 2^-22; the
// product of the low halves, of the same size, is left out. Each half has a plane: the image of
// high halves, then the one of low ones. The scales move operands to the top of the range of
// halves, so that a low half is not subnormal; nothing exceeds 2^15. Tensor cores cut the last bits
// of a sum off, so sums of many products are too small: after CHAIN steps they are added to others,
// rounded to nearest. The first convolution multiplies pixels, exact in half, by weights that are
// the sum of HALVES halves, see conv1.cu.
//
// Source: Ootomo & Yokota 2022, arXiv 2203.03341; they scale each low half instead.
//
// Grid: at most ceil(n / TEAMS), by SLICES; 32 TEAM TEAMS threads; shared memory: `shared_bytes` of
// convolutions.py.

#include "activation.cuh"
#include "conv1.cuh"
#include "ptx.cuh"
#include "vector.cuh"

constexpr int HALVES = sizeof(SCALAR) / 2, TILES1 = C / 8;
constexpr int PLANES = PRODUCTS == 3 ? 2 : 1;
constexpr int DEEP = PRODUCTS == 1 ? 4 : 8;  // channels of a chunk

constexpr int IN_H = conv1::QUADS_H + 2 * PAD2_H, IN_W = conv1::QUADS_W + 2 * PAD2_W;
constexpr int QUADS_H = (IN_H - R2 + 1) / 2, QUADS_W = (IN_W - S2 + 1) / 2;
constexpr int QUADS = QUADS_H * QUADS_W;
constexpr int CHUNKS = (CHANNELS1 + DEEP - 1) / DEEP;  // of a pixel
constexpr int ALL_CHUNKS = R2 * S2 * CHUNKS, STEPS = (ALL_CHUNKS + 1) / 2;

// The columns of two tiles are ordered so that a lane's four are neighbours in the output. If at
// most two channels are left for the last two, they are in the first of them.
constexpr int REST = CHANNELS % 16;
constexpr int TILES = CHANNELS / 16 * 2 + (REST == 0 ? 0 : REST <= 2 ? 1 : 2);
constexpr int PAIRS = (TILES + 1) / 2, SLICE_PAIRS = (PAIRS + SLICES - 1) / SLICES;
constexpr int SLICE_TILES = SLICE_PAIRS * 2 - (SLICES == 1 && TILES % 2);
constexpr int PART_TILES =
    (SLICE_PAIRS + PARTS - 1) / PARTS * 2 - (SLICES == 1 && PARTS == 1 && TILES % 2);

// Bytes in shared memory. An odd number of chunks as the distance of pixels, and rows that continue
// it from one row of quads to the next, avoid bank conflicts.
constexpr int PIXEL = (CHUNKS | 1) * 16, HALF = (IN_W + 1) / 2;
constexpr int WANTED = QUADS_W * PIXEL / 2 / 16 * 16 % 64;
constexpr int PITCH = 2 * HALF * PIXEL + (WANTED - 2 * HALF * PIXEL % 64 + 64) % 64;
constexpr int IMAGE = IN_H * PITCH;  // a plane

constexpr int GROUPS = (QUADS + 7) / 8, TASKS = GROUPS * PARTS * DEPTHS;
constexpr int DEPTH = (STEPS + DEPTHS - 1) / DEPTHS;  // steps of a part of the sum
constexpr int TEAM_THREADS = TEAM * WARP, THREADS = TEAMS * TEAM_THREADS;
// Steps. With four, blocks of more than 256 threads would not keep everything in registers.
constexpr int CHAIN = PRODUCTS != 3 ? STEPS : THREADS > 256 ? 3 : 4;

static_assert(C % 8 == 0 && CHANNELS1 <= C, "channels are padded to a multiple of 8");
static_assert(K % 16 == 0 && CHANNELS <= K && K < CHANNELS + 16, "tiles come in pairs");
static_assert(conv1::POOLING != NONE && POOL2 != NONE, "each convolution is pooled");
static_assert(QUADS_H > 0 && QUADS_W > 0, "no quad fits");
static_assert(DEPTHS == 1 || (TEAMS == 1 && TASKS == TEAM), "each warp has one part of a sum");

__device__ inline int column(int j) { return (j / 2 + j % 2 * HALF) * PIXEL; }

__device__ inline void synchronize_team(int team) {
    __syncwarp();  // lanes come here from different branches, and the barrier is for whole warps
    if constexpr (TEAM > 1) barrier(1 + team, TEAM_THREADS);
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

// Stores two neighbouring channels of the second convolution's input.
__device__ inline void store_input(char* to, const float (&values)[2], float factor) {
    if constexpr (PLANES == 1) {
        store_two(reinterpret_cast<SCALAR*>(to), values);
    } else {
        const float scaled[2] = {values[0] * factor, values[1] * factor};
        const __half2 high = __floats2half2_rn(scaled[0], scaled[1]);
        *reinterpret_cast<__half2*>(to) = high;
        *reinterpret_cast<__half2*>(to + IMAGE) = __floats2half2_rn(
            scaled[0] - static_cast<float>(high.x), scaled[1] - static_cast<float>(high.y));
    }
}

// The first convolution of one image, by the warps of a team: from its copies to `image`.
__device__ inline void convolve_first(const conv1::Copies& copies,
                                      const uint2 (&filters)[HALVES][conv1::STEPS][TILES1][WARP],
                                      const float* bias, float2 scale, char* image, int lane,
                                      int warp) {
    const conv1::TapOffsets taps(lane);
    unsigned b[HALVES * conv1::STEPS][TILES1][2];
    float biases[TILES1][2];
#pragma unroll
    for (int tile = 0; tile < TILES1; ++tile) {
#pragma unroll
        for (int k = 0; k < HALVES * conv1::STEPS; ++k) {
            const uint2 pair = filters[k / conv1::STEPS][k % conv1::STEPS][tile][lane];
            b[k][tile][0] = pair.x, b[k][tile][1] = pair.y;
        }
        for (int k = 0; k < 2; ++k) biases[tile][k] = bias[tile * 8 + lane % 4 * 2 + k];
    }
    for (int group = warp; group < conv1::GROUPS; group += TEAM) {
        const int quad = group * 8 + lane / 4;
        const bool inside = conv1::QUADS % 8 == 0 || quad < conv1::QUADS;
        const __half* pixels = copies[0][0] + conv1::quad_offset(inside ? quad : 0);
        unsigned a[conv1::STEPS][2][4];
#pragma unroll
        for (int step = 0; step < conv1::STEPS; ++step)
            for (int lower = 0; lower < 2; ++lower) taps.load(pixels, step, lower, a[step][lower]);
        char* const to = image + (quad / conv1::QUADS_W + PAD2_H) * PITCH +
                         column(quad % conv1::QUADS_W + PAD2_W);
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < TILES1; ++tile) {
            if constexpr (conv1::QUADS % 8 != 0) __syncwarp();  // some lanes store nothing
            float sums[2][4];
            for (int k = 0; k < 8; ++k) sums[k / 4][k % 4] = PLANES == 2 ? 0 : biases[tile][k % 2];
#pragma unroll
            for (int k = 0; k < HALVES * conv1::STEPS; ++k)
                for (int lower = 0; lower < 2; ++lower)
                    multiply(sums[lower], a[k % conv1::STEPS][lower], b[k][tile]);
            const int channel = tile * 8 + lane % 4 * 2;
            if (!inside || channel >= CHUNKS * DEEP) continue;
            float values[2];
            for (int k = 0; k < 2; ++k) {
                const auto activated = [&](float sum) {
                    return activation::ACTIVATION_1::value(
                        PLANES == 2 ? sum * scale.x + biases[tile][k] : sum);
                };
                values[k] = conv1::pooled(conv1::POOLING, sums[0][k], sums[0][k + 2], sums[1][k],
                                          sums[1][k + 2], activated);
            }
            store_input(to + channel * 16 / DEEP, values, scale.y);
        }
    }
}

// The sums of a warp: of the left and of the right pixels of its quads.
using Sums = float[2][PART_TILES][4];
constexpr int SUMS = 2 * PART_TILES * 4;

// Both operands of a step, of a warp's quads and channels.
struct Operands {
    unsigned a[PLANES][2][4];  // left, right; rows g and g + 8: the upper and lower pixel of quad g
    unsigned b[PART_TILES][PLANES][2];
};

__device__ inline void multiply_all(Sums& sums, const Operands& of, int tiles) {
#if PRODUCTS == 1
    unsigned a[2][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) a[k / 4][k % 4] = rounded_to_tf32(of.a[0][k / 4][k % 4]);
#endif
#pragma unroll
    for (int tile = 0; tile < PART_TILES; ++tile) {
        if (tile >= tiles) continue;
#if PRODUCTS == 1
        unsigned b[2];
        for (int k = 0; k < 2; ++k) b[k] = rounded_to_tf32(of.b[tile][0][k]);
        for (int m = 0; m < 2; ++m) multiply_tf32(sums[m][tile], a[m], b);
#else
        // The small products first. Those of other pixels are between two sums of the same.
        if constexpr (PLANES == 2) {
            for (int m = 0; m < 2; ++m) multiply(sums[m][tile], of.a[PLANES - 1][m], of.b[tile][0]);
            for (int m = 0; m < 2; ++m) multiply(sums[m][tile], of.a[0][m], of.b[tile][PLANES - 1]);
        }
        for (int m = 0; m < 2; ++m) multiply(sums[m][tile], of.a[0][m], of.b[tile][0]);
#endif
    }
}

// A number of steps that the compiler knows.
template <int N>
struct Steps {
    static constexpr int COUNT = N;
};

__device__ inline void add(Sums& sums, const Sums& others) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int tile = 0; tile < PART_TILES; ++tile)
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[m][tile][k] += others[m][tile][k];
}

// A lane's words of a tile's filters.
struct alignas(8 * PLANES) Fragment {
    unsigned words[PLANES][2];
};

// What a block has in shared memory, before the images of its teams.
struct Filters {
    Fragment second[STEPS][SLICE_TILES][WARP];
    uint2 first[HALVES][conv1::STEPS][TILES1][WARP];
    // Of a chunk, from a quad's upper left pixel: for its left and its right pixels.
    int2 offsets[STEPS][2];
    float biases1[(C + 3) / 4 * 4];
};

// Of a team: the pixels and the second convolution's input.
struct Images {
    conv1::Copies copies;
    char image[PLANES * IMAGE];
};

static_assert(sizeof(Filters) % 16 == 0 && sizeof(conv1::Copies) % 16 == 0, "vectors");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convolutions(const uint8* __restrict__ images, const uint4* __restrict__ weight1,
                 const uint4* __restrict__ weight2, const float* __restrict__ bias1,
                 const float* __restrict__ bias2, const float2* __restrict__ scales,
                 SCALAR* __restrict__ y, int n) {
    extern __shared__ uint4 shared[];
    Filters& filters = *reinterpret_cast<Filters*>(shared);
    auto* const of_teams = reinterpret_cast<Images*>(&filters + 1);
    // All parts of a sum but the first.
    auto* const others = reinterpret_cast<float (*)[SUMS][WARP]>(of_teams + TEAMS);
    const int thread = threadIdx.x % TEAM_THREADS, team = threadIdx.x / TEAM_THREADS;
    const int lane = thread % WARP, warp = thread / WARP;
    conv1::Copies& copies = of_teams[team].copies;
    char* const image = of_teams[team].image;

    const float2 scale = PLANES == 2 ? scales[0] : float2{1, 1};

    // TILE_VECTORS of a step have a tile's lanes; the last slice may have fewer tiles.
    constexpr int TILE_VECTORS = WARP * PLANES / 2, VECTORS = SLICE_TILES * TILE_VECTORS;
    const int slice_tile = blockIdx.y * SLICE_TILES;
    const int slice_tiles = min(SLICE_TILES, TILES - slice_tile);
    for (int k = threadIdx.x; k < STEPS * VECTORS; k += THREADS)
        if (k % VECTORS < slice_tiles * TILE_VECTORS)
            copy_async(reinterpret_cast<uint4*>(filters.second) + k,
                       weight2 + (k / VECTORS * TILES + slice_tile) * TILE_VECTORS + k % VECTORS);
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
    for (int first = 0; first < C; first += THREADS)
        if (const int k = first + threadIdx.x; k < C) filters.biases1[k] = bias1[k];
    // The borders of zeros.
    for (int k = threadIdx.x; k < static_cast<int>(TEAMS * sizeof(Images) / 16); k += THREADS)
        reinterpret_cast<uint4*>(of_teams)[k] = make_uint4(0, 0, 0, 0);
    wait_for_copies();
    __syncthreads();

    for (; row < n; row += gridDim.x * TEAMS) {
        next.store(copies, thread);
        synchronize_team(team);
        convolve_first(copies, filters.first, filters.biases1, scale, image, lane, warp);
        synchronize_team(team);
        const int next_row = row + gridDim.x * TEAMS;
        if (next_row < n) next.load(images + static_cast<size_t>(next_row) * H * W, thread);
        for (int task = warp; task < TASKS; task += TEAM) {
            if constexpr (QUADS % 8 != 0) __syncwarp();  // some lanes store nothing
            const int depth = task % DEPTHS, part = task / DEPTHS % PARTS;
            const int first_quad = task / DEPTHS / PARTS * 8, first_tile = part * PART_TILES;
            const int tiles = min(PART_TILES, slice_tiles - first_tile);
            // The row that a lane names: of the upper or lower pixels of eight quads.
            const int named = min(first_quad + lane % 8, QUADS - 1);
            const char* const pixels =
                image + (named / QUADS_W * 2 + lane / 8 % 2) * PITCH + named % QUADS_W * PIXEL;
            const auto load_step = [&](int step, Operands& to) {
                const int2 offset = filters.offsets[step][lane / 16];
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) {
                    load_matrices(pixels + plane * IMAGE + offset.x, to.a[plane][0]);
                    load_matrices(pixels + plane * IMAGE + offset.y, to.a[plane][1]);
                }
#pragma unroll
                for (int tile = 0; tile < PART_TILES; ++tile) {
                    if (tile >= tiles) continue;
                    const Fragment fragment = filters.second[step][first_tile + tile][lane];
#pragma unroll
                    for (int k = 0; k < 2 * PLANES; ++k)
                        to.b[tile][k / 2][k % 2] = fragment.words[k / 2][k % 2];
                }
            };
            Sums sums = {};
            const int begin = depth * DEPTH, end = min(begin + DEPTH, STEPS);
            const auto add_step = [&](int step, Sums& to) {
                Operands operands;
                load_step(step, operands);
                multiply_all(to, operands, tiles);
            };
            const auto add_chain = [&](int first, auto steps) {
                Sums chain = {};
#pragma unroll
                for (int k = 0; k < decltype(steps)::COUNT; ++k) add_step(first + k, chain);
                add(sums, chain);
            };
            int step = begin;
            if constexpr (CHAIN == STEPS) {
#pragma unroll 8
                for (; step < end; ++step) add_step(step, sums);
            } else {
#pragma unroll 1
                for (; step + CHAIN <= end; step += CHAIN) add_chain(step, Steps<CHAIN>());
                if constexpr (DEPTHS > 1) {
                    for (; step < end; ++step) add_chain(step, Steps<1>());
                } else if constexpr (STEPS % CHAIN != 0) {
                    add_chain(step, Steps<STEPS % CHAIN>());
                }
            }
            if constexpr (DEPTHS > 1) {
                auto& values = reinterpret_cast<float (&)[SUMS]>(sums);
                float (*const own)[SUMS][WARP] = others + task / DEPTHS * (DEPTHS - 1);
                if (depth > 0)
#pragma unroll
                    for (int k = 0; k < SUMS; ++k) own[depth - 1][k][lane] = values[k];
                synchronize_team(team);
                if (depth > 0) continue;
                for (int other = 0; other < DEPTHS - 1; ++other)
#pragma unroll
                    for (int k = 0; k < SUMS; ++k) values[k] += own[other][k][lane];
            }
            const int quad = first_quad + lane / 4;
            if (quad >= QUADS) continue;
            SCALAR* const to = y + (static_cast<size_t>(row) * QUADS + quad) * K;
#pragma unroll
            for (int tile = 0; tile < PART_TILES; tile += 2) {
                if (tile >= tiles) continue;
                const int channel = (slice_tile + first_tile + tile) * 8 + lane % 4 * 4;
                float values[4] = {};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (tile + k / 2 >= PART_TILES || channel + k >= CHANNELS) continue;
                    const auto& left = sums[0][tile + k / 2];
                    const auto& right = sums[1][tile + k / 2];
                    const float2 factors = PLANES == 2 ? scales[1 + channel + k] : float2{1, 1};
                    const auto activated = [&](float sum) {
                        return activation::ACTIVATION_2::value(sum * factors.x * factors.y +
                                                               bias2[channel + k]);
                    };
                    values[k] = conv1::pooled(POOL2, left[k % 2], right[k % 2], left[k % 2 + 2],
                                              right[k % 2 + 2], activated);
                }
                store_four(to + channel, values);
            }
        }
    }
}
