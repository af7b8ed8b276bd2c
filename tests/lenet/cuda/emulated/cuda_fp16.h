// Stands in for CUDA's header.

#pragma once

using __half = _Float16;
struct alignas(4) __half2 {
    __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) {
    return {static_cast<__half>(x), static_cast<__half>(y)};
}
