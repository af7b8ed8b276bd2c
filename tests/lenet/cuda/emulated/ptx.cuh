// Stands in for lenet/cuda/ptx.cuh where there is no GPU: a thread of the host for each thread of a
// block, whose warps meet where the instructions of ptx.cuh need all lanes. The program ends where
// load_matrices or copy_async get an address that is not aligned, or not in the block's shared
// memory. Other accesses are not checked. Not for clusters.

#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct Dimensions {
    unsigned x, y, z;
};
inline thread_local Dimensions threadIdx, blockIdx;
inline Dimensions gridDim, blockDim;

struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline void __stcg(uint4* to, uint4 value) { *to = value; }
inline int min(int a, int b) { return a < b ? a : b; }

template <typename To, typename From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

constexpr size_t SHARED_BYTES = 232448;  // of a block, on Hopper
extern uint4 shared[];

// The meeting of a warp: its barrier, and what the lanes show each other.
struct Meeting {
    std::barrier<> barrier{32};
    unsigned words[32][4];
    unsigned others[32][2];
    const char* rows[32];
};
inline std::vector<std::unique_ptr<Meeting>> warps;
inline std::vector<std::unique_ptr<std::barrier<>>> barriers;

inline Meeting& meeting() { return *warps[threadIdx.x / 32]; }
inline int own_lane() { return threadIdx.x % 32; }
inline void __syncwarp() { meeting().barrier.arrive_and_wait(); }
inline void __syncthreads() { barriers[0]->arrive_and_wait(); }
inline void barrier(int number, int) { barriers[number]->arrive_and_wait(); }

inline void check(const void* address, size_t bytes, bool in_shared) {
    const auto* first = static_cast<const char*>(address);
    const auto* of_block = reinterpret_cast<const char*>(shared);
    const bool inside = first >= of_block && first + bytes <= of_block + SHARED_BYTES;
    if (reinterpret_cast<size_t>(address) % bytes || (in_shared && !inside)) abort();
}

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    Meeting& here = meeting();
    here.words[own_lane()][0] = bits<unsigned>(value);
    __syncwarp();
    const unsigned found = here.words[own_lane() ^ distance][0];
    __syncwarp();
    return bits<float>(found);
}

// The product of 16 rows and 8 columns, whose elements `pick_a` and `pick_b` find in the words of
// all lanes.
template <int DEPTH, typename PickA, typename PickB>
void multiply_by(float (&accumulator)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                 PickA pick_a, PickB pick_b) {
    Meeting& here = meeting();
    const int lane = own_lane(), g = lane / 4, t = lane % 4;
    memcpy(here.words[lane], a, sizeof a), memcpy(here.others[lane], b, sizeof b);
    __syncwarp();
    for (int v = 0; v < 4; ++v) {
        const int row = v / 2, column = 2 * t + v % 2;
        double sum = accumulator[v];
        for (int k = 0; k < DEPTH; ++k)
            sum +=
                static_cast<double>(pick_a(here.words, g, row, k)) * pick_b(here.others, column, k);
        accumulator[v] = sum;
    }
    __syncwarp();
}

inline float half_of(unsigned word, int k) {
    return bits<_Float16>(static_cast<unsigned short>(word >> 16 * (k % 2)));
}

inline void multiply(float (&accumulator)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_by<16>(
        accumulator, a, b,
        [](auto& words, int g, int row, int k) {
            return half_of(words[g * 4 + k % 8 / 2][row + 2 * (k / 8)], k);
        },
        [](auto& words, int column, int k) {
            return half_of(words[column * 4 + k % 8 / 2][k / 8], k);
        });
}

inline float tf32_of(unsigned word) { return bits<float>(word & 0xffffe000u); }

inline void multiply_tf32(float (&accumulator)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_by<8>(
        accumulator, a, b,
        [](auto& words, int g, int row, int k) {
            return tf32_of(words[g * 4 + k % 4][row + 2 * (k / 4)]);
        },
        [](auto& words, int column, int k) { return tf32_of(words[column * 4 + k % 4][k / 4]); });
}

inline void split(unsigned value, unsigned& high, unsigned& low) {
    high = (value + 0x1000u) & 0xffffe000u;
    low = bits<unsigned>(bits<float>(value) - bits<float>(high));
}

inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
    return std::atomic_ref<unsigned>(*at).fetch_add(value);
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::isfinite;
using std::isnan;

inline float max_or_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

inline void load_matrices(const char* row, unsigned (&words)[4]) {
    check(row, 16, true);
    Meeting& here = meeting();
    const int lane = own_lane();
    here.rows[lane] = row;
    __syncwarp();
    for (int k = 0; k < 4; ++k) memcpy(&words[k], here.rows[8 * k + lane / 4] + 4 * (lane % 4), 4);
    __syncwarp();
}

// Copies as late as they may be: when the thread waits for them.
inline thread_local std::vector<std::pair<void*, const void*>> copies_under_way;

inline void copy_async(void* to, const void* from) {
    check(to, 16, true), check(from, 16, false);
    copies_under_way.push_back({to, from});
}
inline void wait_for_copies() {
    for (const auto& [to, from] : copies_under_way) memcpy(to, from, 16);
    copies_under_way.clear();
}

// Runs the blocks one after another. Their shared memory begins as NaN, which nothing may use.
template <typename Kernel>
void run_blocks(Dimensions grid, int threads, int named_barriers, int team_threads, Kernel kernel) {
    gridDim = grid, blockDim = {threads, 1, 1};
    for (int y = 0; y < grid.y; ++y) {
        for (int x = 0; x < grid.x; ++x) {
            memset(shared, 0xff, SHARED_BYTES);
            warps.clear(), barriers.clear();
            for (int k = 0; k < threads / 32; ++k) warps.push_back(std::make_unique<Meeting>());
            barriers.push_back(std::make_unique<std::barrier<>>(threads));
            for (int k = 0; k < named_barriers; ++k)
                barriers.push_back(std::make_unique<std::barrier<>>(team_threads));
            std::vector<std::thread> running;
            for (int thread = 0; thread < threads; ++thread)
                running.emplace_back([=] {
                    threadIdx = {thread, 0, 0}, blockIdx = {x, y, 0};
                    kernel();
                });
            for (auto& one : running) one.join();
        }
    }
}
