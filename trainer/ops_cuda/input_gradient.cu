// The gradient of a convolution's input, for few channels in halves:
//
//     dx[n][i][j][c] = sum dy[n][i + PAD_H - r][j + PAD_W - s][k] weight[k][r][s][c]
//
// As a matrix product it has the positions of dx as rows (m), output channels of taps as k, input
// channels as columns (n). An m-tile is 8 columns of two rows of dx. For a tap r it needs two rows
// of dy, and these serve other rows of dx for other taps: so a warp has 8 columns of all rows, and
// loads dy once for all r. Shared memory would otherwise be the bottleneck, because there are so
// few columns (n). Two images lie beside each other, so that fewer columns of the last tile are
// empty.
//
// With 12 columns there are only three such warps. So PARTS times as many divide the products, by s
// and by 16 output channels, and their sums are added at the end.
//
// dy:     halves (n, OH, OW, K)
// weight: halves (K, R, S, C)
// dx:     halves (n, H, W, C); channels from the last tile of 8 with real ones on become 0
//
// Macros: H, W, OH, OW, R, S, PAD_H, PAD_W; C and K, multiples of 8, of which INPUTS and OUTPUTS
// are real; PARTS. Stride and dilation are 1, PAD_H < R, PAD_W < S. Grid: any number of blocks, at
// most ceil(n / 2), best one a multiprocessor; 32 GROUPS PARTS threads; shared memory:
// `shared_bytes` of second_gradients.py.

#undef SCALAR
#define SCALAR __half
#include "ptx.cuh"
#include "vector.cuh"

constexpr int IMAGES = 2;  // beside each other
constexpr int COLUMNS = IMAGES * W, GROUPS = (COLUMNS + 7) / 8, PAIRS = (H + 1) / 2;
constexpr int TILES = (INPUTS + 7) / 8;     // of 8 input channels
constexpr int STEPS = (OUTPUTS + 15) / 16;  // of 16 output channels
constexpr int ITEMS = S * STEPS;
constexpr int CHUNKS = 2 * STEPS;  // 16 bytes of a pixel of dy, 8 channels
constexpr int THREADS = GROUPS * PARTS * WARP;

// dy in shared memory has a border of zeros: a row above and below, as the two rows of a tile may
// lie half outside, and all the columns that taps reach; images share the columns between them.
// Distances of pixels and of filters are odd numbers of chunks, against bank conflicts.
constexpr int BORDER = S - 1 - PAD_W, DISTANCE = OW + BORDER;
constexpr int PIXELS = BORDER + IMAGES * DISTANCE;  // of a row
constexpr int PIXEL = (CHUNKS | 1) * 16, ROW = PIXELS * PIXEL;
constexpr int FILTER_CHUNKS = R * S * TILES, FILTER = (FILTER_CHUNKS | 1) * 16;
constexpr int AT_ONCE = THREADS / FILTER_CHUNKS;  // filters that the block copies
constexpr int SUMS = (TILES | 1) * 8;             // floats of a position, likewise

static_assert(AT_ONCE > 0, "a filter has at most as many chunks as the block threads");

struct Shared {
    char filters[STEPS * 16][FILTER];
    char dy[OH + 2][ROW];
    alignas(16) float sums[PARTS][H * COLUMNS][SUMS];
};

// Each step's filters are a group of copies. A thread copies the same chunk of every AT_ONCE-th
// filter: no division for each.
__device__ inline void load_filters(Shared& block, const __half* weight) {
    const int chunk = threadIdx.x % FILTER_CHUNKS, tap = chunk / TILES, tile = chunk % TILES;
    const int first = threadIdx.x / FILTER_CHUNKS;
    for (int step = 0; step < STEPS; ++step) {
        for (int row = first; first < AT_ONCE && row < 16; row += AT_ONCE) {
            const int k = step * 16 + row;
            char* const to = block.filters[k] + chunk * 16;
            if (k < K) {
                copy_async(to, weight + (k * R * S + tap) * C + tile * 8);
            } else {
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
        }
        end_group();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    input_gradient(const __half* __restrict__ dy, const __half* __restrict__ weight,
                   __half* __restrict__ dx, int n) {
    extern __shared__ uint4 shared[];
    Shared& block = *reinterpret_cast<Shared*>(shared);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = warp % GROUPS, part = warp / GROUPS;

    // The rows that a lane names: of dy, a position and a chunk; of the filters, an output channel
    // and a tile, transposed, because the product adds over output channels.
    const int named = min(group * 8 + lane % 8, COLUMNS - 1);
    const char* const pixel = block.dy[lane / 8 % 2] +
                              (named / W * DISTANCE + named % W + S - 1) * PIXEL + lane / 16 * 16;
    const char* const filter = block.filters[lane % 16] + lane / 16 * 16;

    for (int first = blockIdx.x * IMAGES; first < n; first += gridDim.x * IMAGES) {
        for (int at = threadIdx.x; at < PIXELS * CHUNKS; at += THREADS) {
            const int column = at / CHUNKS, k = at % CHUNKS * 8;
            const int image = first + (column - BORDER) / DISTANCE;
            const int j = (column - BORDER) % DISTANCE;
            const bool inside = column >= BORDER && j < OW && image < n && k < K;
            const __half* const from = dy + (static_cast<size_t>(image) * OH * OW + j) * K + k;
            for (int i = -1; i <= OH; ++i) {
                char* const to = block.dy[i + 1] + column * PIXEL + k * 2;
                if (inside && i >= 0 && i < OH) {
                    copy_async(to, from + i * OW * K);
                } else {
                    *reinterpret_cast<uint4*>(to) = zero;
                }
            }
        }
        const bool starts = first == blockIdx.x * IMAGES;
        if (starts) {
            load_filters(block, weight);
        } else {
            end_group();
        }

        // At the start, the filters of later steps are loaded meanwhile.
        int steps_ready = 0;
        float sums[PAIRS][TILES][4] = {};
        for (int items = 0; items < ITEMS; items += PARTS) {
            const int needed = min(items + PARTS - 1, ITEMS - 1) / S + 1;
            if (needed > steps_ready) {
                steps_ready = starts ? needed : STEPS;
                wait_for_groups_but(STEPS - steps_ready);
                __syncthreads();
            }
            const int item = items + part, s = item % S, step = item / S;
            if (item >= ITEMS) break;
            const char* const taps = filter + step * 16 * FILTER + s * TILES * 16;
            const char* const pixels = pixel + step * 32 - s * PIXEL;
            unsigned a[2][4], b[R][TILES][2];
            load_matrices(pixels, a[0]);
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile += 2) {
                    const char* const from = taps + (r * S * TILES + tile) * 16;
                    if (tile + 1 < TILES) {
                        unsigned words[4];
                        load_transposed(from, words);
                        b[r][tile][0] = words[0], b[r][tile][1] = words[1];
                        b[r][tile + 1][0] = words[2], b[r][tile + 1][1] = words[3];
                    } else {
                        load_transposed(from, b[r][tile]);
                    }
                }
            }
            // Rows y and y + 1 of dy; the next ones are loaded before these are used.
#pragma unroll
            for (int y = -1; y < OH; ++y) {
                if (y + 1 < OH) load_matrices(pixels + (y + 2) * ROW, a[y % 2 != 0]);
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const int i = y - PAD_H + r;
                    if (i < 0 || i >= H || i % 2 != 0) continue;
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        multiply(sums[i / 2][tile], a[y % 2 == 0], b[r][tile]);
                }
            }
        }

        const int column = group * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < H; ++i) {
            if (column >= COLUMNS) continue;
            float* const to = block.sums[part][i * COLUMNS + column] + lane % 4 * 2;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const float* const two = sums[i / 2][tile] + i % 2 * 2;
                *reinterpret_cast<float2*>(to + tile * 8) = make_float2(two[0], two[1]);
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < H * COLUMNS * (C / 4); at += THREADS) {
            const int position = at / (C / 4), channel = at % (C / 4) * 4;
            const int i = position / COLUMNS, image = first + position % COLUMNS / W;
            if (image >= n) continue;
            float values[4] = {};
            if (channel < TILES * 8) {
#pragma unroll
                for (int other = 0; other < PARTS; ++other) {
                    const float4 four =
                        *reinterpret_cast<const float4*>(block.sums[other][position] + channel);
                    values[0] += four.x, values[1] += four.y;
                    values[2] += four.z, values[3] += four.w;
                }
            }
            store_four(dx + (static_cast<size_t>(image * H + i) * W + position % W) * C + channel,
                       values);
        }
    }
}
