"""Float32 from one and three products of TF32, with sums that are truncated as on tensor cores."""

import numpy as np

random = np.random.default_rng(0)
x = random.random((2000, 504), np.float32)  # as behind ReLU: not negative
w = random.normal(0, 500**-0.5, (2000, 504)).astype(np.float32)
exact = (x.astype(float) * w).sum(1)


def tf32(x: np.ndarray, rounded: bool) -> np.ndarray:
    """`x` cut or rounded to 10 bits of fraction."""
    bits = x.view(np.uint32) + np.uint32(0x1000 * rounded)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def truncated(x: np.ndarray) -> np.ndarray:
    """`x` cut to the 23 bits of a float, towards zero."""
    near = x.astype(np.float32)
    return np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near).astype(float)


def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest number of TF32, and the rest."""
    high = tf32(x, rounded=True)
    return high.astype(float), tf32(x - high, rounded=False).astype(float)


def error(products: int, chain: int) -> float:
    """Relative error of sums of so many products a step, in chains of so many steps."""
    (xh, xl), (wh, wl) = parts(x), parts(w)
    pairs = ((xl, wh), (xh, wl), (xh, wh))[-products:]
    total = np.zeros(len(x), np.float32)
    for start in range(0, 63, chain):
        sums = np.zeros(len(x))
        for step in range(start, min(start + chain, 63)):
            k = slice(8 * step, 8 * step + 8)
            for a, b in pairs:
                sums = truncated(sums + (a[:, k] * b[:, k]).sum(1))
        total += sums.astype(np.float32)
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


one, three, chained = error(1, 63), error(3, 63), error(3, 8)
print(f"one product: {one:.1e}, three: {three:.1e}, in chains of eight steps: {chained:.1e}")
assert one > 30 * three > 100 * chained
