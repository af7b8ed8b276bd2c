"""Float32 from one and three products of halves, with sums truncated as on tensor cores."""

import numpy as np

random = np.random.default_rng(0)
x = random.random((2000, 608), np.float32)  # as behind ReLU: not negative
w = random.normal(0, 600**-0.5, (2000, 608)).astype(np.float32)
exact = (x.astype(float) * w).sum(1)


def truncated(x: np.ndarray) -> np.ndarray:
    """`x` cut to the 23 bits of a float, towards zero."""
    near = x.astype(np.float32)
    return np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near).astype(float)


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The nearest half of `x`, scaled to 2^15, the half nearest to the rest, and the factor."""
    factor = 2.0 ** (15 - np.frexp(abs(x).max())[1])
    high = (x * factor).astype(np.float16).astype(float)
    return high, (x * factor - high).astype(np.float16).astype(float), factor


def error(products: int, chain: int) -> float:
    """Relative error of sums of so many products a step, in chains of so many steps."""
    (xh, xl, x_factor), (wh, wl, w_factor) = halves(x), halves(w)
    pairs = ((xl, wh), (xh, wl), (xh, wh))[-products:]
    total = np.zeros(len(x), np.float32)
    for start in range(0, 38, chain):
        sums = np.zeros(len(x))
        for step in range(start, min(start + chain, 38)):
            k = slice(16 * step, 16 * step + 16)
            for a, b in pairs:
                sums = truncated(sums + (a[:, k] * b[:, k]).sum(1))
        total += sums.astype(np.float32)
    found = total / (x_factor * w_factor)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


one, three, chained = error(1, 38), error(3, 38), error(3, 4)
print(f"one product: {one:.1e}, three: {three:.1e}, in chains of four steps: {chained:.1e}")
assert one > 30 * three > 100 * chained
