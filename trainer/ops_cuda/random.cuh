// Random numbers as pure functions of (seed, step or epoch, row, purpose), without state: the same
// numbers on every GPU and in trainer/random.py, which has the same functions.
//
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10);
// Black & Rogaway 2002, "Ciphers with arbitrary finite domains" (the order of the images).

#pragma once
#include "vector.cuh"

// The purpose of a number, the third word of the counter.
constexpr unsigned ORDER = 0, AUGMENTATION = 1, DROPOUT = 2;

// Four random words of a counter of four.
__device__ inline uint4 philox(uint64 seed, uint4 counter) {
    unsigned key0 = seed, key1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const unsigned high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Exact floats: [-1, 1) and [0, 1), in steps of 2^-23 and 2^-24.
__device__ inline float uniform_signed(unsigned word) { return (word >> 8) * 0x1p-23f - 1; }
__device__ inline float uniform(unsigned word) { return (word >> 8) * 0x1p-24f; }

// The finaliser of MurmurHash3, keyed.
__device__ inline unsigned mix(unsigned x, unsigned key) {
    x += key;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

// Which of `size` images comes at `position` in `epoch`: a bijection of 0 <= position < size.
//
// A Feistel network of six rounds permutes the smallest 4^b >= size indices; an index outside the
// range is permuted again until it is inside, on average less than four times in all.
__device__ inline unsigned permutation(uint64 seed, unsigned epoch, unsigned size,
                                       unsigned position) {
    const uint4 first = philox(seed, make_uint4(epoch, 0, ORDER, 0));
    const uint4 second = philox(seed, make_uint4(epoch, 1, ORDER, 0));
    const unsigned keys[6] = {first.x, first.y, first.z, first.w, second.x, second.y};
    // Half of the bits of size - 1, rounded up.
    const int bits = max(1, (33 - __clz(size - 1)) / 2);
    const unsigned mask = (1u << bits) - 1;
    unsigned index = position;
    do {
        unsigned left = index >> bits, right = index & mask;
#pragma unroll
        for (int round = 0; round < 6; ++round) {
            const unsigned mixed = left ^ (mix(right, keys[round]) & mask);
            left = right;
            right = mixed;
        }
        index = left << bits | right;
    } while (index >= size);
    return index;
}
