// The batch of a step: selects the images, augments each (rotation, scale, shear, shift, elastic)
// and divides by 255. The images, uint8, and the step number are read on the GPU.
//
// The augmentation is that of trainer/augment.py; with all limits 0 an image is unchanged. Source
// of the elastic displacement: a uniform cubic B-spline on a 7 x 7 grid (Lee, Wolberg & Shin 1997).
//
// Macro: SCALAR.

#include "random.cuh"

constexpr int SIDE = 28, PIXELS = SIDE * SIDE;
constexpr float SCALE = 1.0f / 255.0f;

// The image with a border of 0: one row above, two below, so that every clipped position has four
// neighbours.
constexpr int PADDED_SIDE = SIDE + 3;
constexpr float CENTRE = (SIDE - 1) / 2.0f;

constexpr int GRID = 7, INTERVAL = 7;  // control points along an axis, pixels between two of them
constexpr int AFFINE_DRAWS = 6, DRAWS = AFFINE_DRAWS + 2 * GRID * GRID;

// Limits of the random map; each image draws uniformly between minus and plus each limit.
// rotation and shear in radians, scale as a share, shift and elastic in pixels.
struct Limits {
    float rotation, scale, shear, shift, elastic;
};

// Maps a pixel of the result, relative to the centre, to its source position.
struct Affine {
    float yy, yx, xy, xx;  // of y, x on y, x
    float y, x;            // the shift
};

__device__ inline Affine affine(const float* draws, const Limits& limits) {
    // In half turns: sincosf and tanf need a stack frame, for angles of many turns.
    constexpr float HALF_TURNS = 0.31830988618f;
    float sin, cos, slant_sin, slant_cos;
    sincospif(limits.rotation * draws[0] * HALF_TURNS, &sin, &cos);
    sincospif(limits.shear * draws[1] * HALF_TURNS, &slant_sin, &slant_cos);
    const float shear = slant_sin / slant_cos;
    const float wide = 1 / (1 + limits.scale * draws[2]), high = 1 / (1 + limits.scale * draws[3]);
    Affine map = {cos * high, -sin * wide, sin * high, cos * wide};
    map.yy += shear * map.yx;
    map.xy += shear * map.xx;
    map.y = limits.shift * draws[4];
    map.x = limits.shift * draws[5];
    return map;
}

// The four cubic B-splines that are not zero at `pixel`; they sum to 1.
__device__ inline float4 basis(int pixel) {
    const float f = pixel % INTERVAL / static_cast<float>(INTERVAL), g = 1 - f;
    return make_float4(g * g * g / 6, (3 * f * f * f - 6 * f * f + 4) / 6,
                       (-3 * f * f * f + 3 * f * f + 3 * f + 1) / 6, f * f * f / 6);
}

// The displacement of pixel (i, j) along one axis, in units of the limit; control: GRID x GRID.
__device__ inline float displacement(const float* control, int i, int j) {
    const float4 down = basis(i), right = basis(j);
    const float* corner = control + i / INTERVAL * GRID + j / INTERVAL;
    const auto along = [&](const float* row) {
        return right.x * row[0] + right.y * row[1] + right.z * row[2] + right.w * row[3];
    };
    return down.x * along(corner) + down.y * along(corner + GRID) +
           down.z * along(corner + 2 * GRID) + down.w * along(corner + 3 * GRID);
}

__device__ inline float interpolate(float low, float high, float fraction) {
    return low + (high - low) * fraction;
}

// The rounded bilinear value at a position of the padded image, clipped to it; 0 to 255.
__device__ inline float sample(const uint8 (*image)[PADDED_SIDE], float y, float x) {
    y = fminf(fmaxf(y, 0), SIDE + 1);
    x = fminf(fmaxf(x, 0), SIDE + 1);
    const int top = y, left = x;
    const uint8 *above = image[top] + left, *below = image[top + 1] + left;
    const float fraction = x - left;
    const float value = interpolate(interpolate(above[0], above[1], fraction),
                                    interpolate(below[0], below[1], fraction), y - top);
    return floorf(value + 0.5f);
}

// images: (size, 28, 28); labels: (size). x: SCALAR (rows, 28, 28), out_labels: (rows).
// The batch is that of step *step + ahead. The global batch has `batch` rows, of which this GPU's
// begin at first_row; size >= batch; an incomplete last batch of an epoch is dropped.
// Grid: ceil(rows / ROWS) blocks of ROWS THREADS threads. ROWS rows a block, because it runs beside
// kernels that need whole multiprocessors: 256 rows leave half of them free.
constexpr int ROWS = 4, THREADS = 256;

extern "C" __global__ void __launch_bounds__(ROWS* THREADS)
    training_batch(const uint8* __restrict__ images, const uint8* __restrict__ labels,
                   const int* __restrict__ step, SCALAR* __restrict__ x,
                   uint8* __restrict__ out_labels, uint64 seed, int ahead, int size, int batch,
                   int first_row, int rows, float rotation, float scale, float shear, float shift,
                   float elastic) {
    constexpr int PADDED = PADDED_SIDE * PADDED_SIDE, DRAWN = (DRAWS + 3) / 4;
    __shared__ uint8 padded[ROWS][PADDED_SIDE][PADDED_SIDE];
    __shared__ float4 drawn[ROWS][DRAWN];
    __shared__ unsigned sources[ROWS];
    const Limits limits = {rotation, scale, shear, shift, elastic};
    const int place = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const int out = blockIdx.x * ROWS + place, row = first_row + out, number = *step + ahead;

    // Warps in parallel: the random draws, and the index of the image.
    if (thread < (elastic == 0 ? (AFFINE_DRAWS + 3) / 4 : DRAWN)) {
        const uint4 words = philox(seed, make_uint4(row, number, AUGMENTATION, thread));
        drawn[place][thread] = make_float4(uniform_signed(words.x), uniform_signed(words.y),
                                           uniform_signed(words.z), uniform_signed(words.w));
    } else if (thread == WARP && out < rows) {
        const int steps = size / batch;
        const unsigned source =
            permutation(seed, number / steps, size, number % steps * batch + row);
        sources[place] = source;
        out_labels[out] = labels[source];
    }
    uint8(*image)[PADDED_SIDE] = padded[place];
    for (int i = thread; i < PADDED; i += THREADS) image[0][i] = 0;
    __syncthreads();
    if (out < rows) {
        const uint8* from = images + static_cast<size_t>(sources[place]) * PIXELS;
        for (int i = thread; i < PIXELS; i += THREADS) image[i / SIDE + 1][i % SIDE + 1] = from[i];
    }
    __syncthreads();
    if (out >= rows) return;

    const float* draws = reinterpret_cast<const float*>(drawn[place]);
    const Affine map = affine(draws, limits);
    SCALAR* to = x + static_cast<size_t>(out) * PIXELS;
    for (int pixel = thread; pixel < PIXELS; pixel += THREADS) {
        const int i = pixel / SIDE, j = pixel % SIDE;
        const float down = i - CENTRE, right = j - CENTRE;
        float source_y = map.yy * down + map.yx * right + (CENTRE + 1 + map.y);
        float source_x = map.xy * down + map.xx * right + (CENTRE + 1 + map.x);
        if (elastic != 0) {
            const float* control = draws + AFFINE_DRAWS;
            source_y += elastic * displacement(control, i, j);
            source_x += elastic * displacement(control + GRID * GRID, i, j);
        }
        to[pixel] = static_cast<SCALAR>(sample(image, source_y, source_x) * SCALE);
    }
}
