// Stands in for lenet/cuda/ptx.cuh where there is no GPU: a coroutine for each thread of a block,
// which runs until it waits for others: at a barrier, and where the instructions of ptx.cuh need
// all lanes of a warp. So a value that is read before the barrier behind its store is not there
// yet. The program ends where all threads wait, and where load_matrices or copy_async get an
// address that is not aligned, or not in the block's shared memory. Other accesses are not checked.
// Not for clusters.

#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct Dimensions {
    unsigned x, y, z;
};
inline Dimensions threadIdx, blockIdx, gridDim, blockDim;

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
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename Vector>
void __stcg(Vector* to, Vector value) {
    *to = value;
}
inline int min(int a, int b) { return a < b ? a : b; }

template <typename To, typename From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

constexpr size_t SHARED_BYTES = 232448;  // of a block, on Hopper
constexpr size_t STACK_BYTES = 1 << 17;
extern uint4 shared[];

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    std::vector<std::pair<void*, const void*>> copies_under_way;
    bool is_done = false;
};
inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline std::function<void()> kernel_of_thread;
inline bool has_moved;  // since the scheduler began its round

inline void run_thread() {
    kernel_of_thread();
    threads[threadIdx.x].is_done = has_moved = true;
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}

struct Barrier {
    int expected, arrived = 0;
    unsigned phase = 0;

    void arrive_and_wait() {
        const unsigned own = phase;
        has_moved = true;
        if (++arrived == expected) arrived = 0, ++phase;
        while (phase == own) swapcontext(&threads[threadIdx.x].context, &scheduler);
    }
};

// The meeting of a warp: its barrier, and what the lanes show each other.
struct Meeting {
    Barrier barrier{32};
    unsigned words[32][4];
    unsigned others[32][2];
    const char* rows[32];
};
inline std::vector<Meeting> warps;
inline std::vector<Barrier> barriers;

inline Meeting& meeting() { return warps[threadIdx.x / 32]; }
inline int own_lane() { return threadIdx.x % 32; }
inline void __syncwarp() { meeting().barrier.arrive_and_wait(); }
inline void __syncthreads() { barriers[0].arrive_and_wait(); }
inline void barrier(int number, int) { barriers[number].arrive_and_wait(); }

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

inline unsigned rounded_to_tf32(unsigned value) { return (value + 0x1000u) & 0xffffe000u; }

inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
    *at += value;
    return *at - value;
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
inline void copy_async(void* to, const void* from) {
    check(to, 16, true), check(from, 16, false);
    threads[threadIdx.x].copies_under_way.push_back({to, from});
}
inline void wait_for_copies() {
    auto& copies = threads[threadIdx.x].copies_under_way;
    for (const auto& [to, from] : copies) memcpy(to, from, 16);
    copies.clear();
}

// Runs the blocks one after another. Their shared memory begins as NaN, which nothing may use.
inline void run_blocks(Dimensions grid, int count, int named_barriers, int team_threads,
                       std::function<void()> kernel) {
    gridDim = grid, blockDim = {static_cast<unsigned>(count), 1, 1};
    kernel_of_thread = std::move(kernel);
    for (unsigned block = 0; block < grid.x * grid.y; ++block) {
        blockIdx = {block % grid.x, block / grid.x, 0};
        memset(shared, 0xff, SHARED_BYTES);
        warps.assign(count / 32, {}), barriers.assign(1, {count});
        barriers.resize(1 + named_barriers, {team_threads});
        threads = std::vector<Thread>(count);
        for (Thread& thread : threads) {
            getcontext(&thread.context);
            thread.context.uc_stack = {thread.stack.get(), 0, STACK_BYTES};
            makecontext(&thread.context, run_thread, 0);
        }
        do {
            has_moved = false;
            for (threadIdx = {0, 0, 0}; threadIdx.x < count; ++threadIdx.x)
                if (!threads[threadIdx.x].is_done)
                    swapcontext(&scheduler, &threads[threadIdx.x].context);
        } while (has_moved);
        for (const Thread& thread : threads)
            if (!thread.is_done) abort();  // all wait for each other
    }
    threads.clear();
}
