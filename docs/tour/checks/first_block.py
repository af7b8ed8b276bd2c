"""The gradients of a first block from its patches, beside those of one operation after another."""

import numpy as np

from lenet.model import RELU, ConvBlock, Pool
from trainer.ops import EPSILON, Epilogue, Norm
from trainer.ops_cpu import CpuOps

ops, random = CpuOps(np.float64), np.random.default_rng(0)
x = random.random((1, 12, 12, 8))  # c, h, w, n
w = random.standard_normal((3, 1, 5, 5))
gamma, beta = random.random((2, 3)) + 0.5
epilogue = Epilogue(Norm(gamma, beta, np.zeros(3), np.ones(3)), None, RELU, Pool("max"))
conv, saved = ops.convolution(x, w, ConvBlock(3, kernel=(5, 5)))
y, saved_epilogue = ops.epilogue(conv, epilogue, True)
dy = random.standard_normal(y.shape)
dconv, (dgamma, dbeta) = ops.epilogue_backward(dy, saved_epilogue)
dw = ops.convolution_weight_gradient(dconv, saved)

# dz: the gradient of the pooled output at the maximum of each window, where that is positive.
values = conv.reshape(3, -1)
xhat = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + EPSILON)
z = (gamma * xhat.T + beta).T.reshape(3, 4, 2, 4, 2, 8)
at_maximum = z == z.max(axis=(2, 4), keepdims=True)
dz = (at_maximum * np.where(y > 0, dy, 0)[:, :, None, :, None]).reshape(3, -1)

# From here on only w, dz and patches.
p = np.lib.stride_tricks.sliding_window_view(x[0], (5, 5), axis=(0, 1)).reshape(-1, 25)
w = w.reshape(3, 25)
m = p.mean(0)
G = p.T @ p / len(p) - np.outer(m, m)
mean, variance = w @ m, ((w @ G) * w).sum(1)
deviation = np.sqrt(variance + EPSILON)
D, dbeta_ours = dz @ p, dz.sum(1)
dgamma_ours = ((w * D).sum(1) - mean * dbeta_ours) / deviation
dw_ours = (gamma / deviation)[:, None] * (
    D - np.outer(dbeta_ours, m) - (dgamma_ours / deviation)[:, None] * (w @ G)
)

for name, one, other in (
    ("mean", mean, values.mean(1)),
    ("variance", variance, values.var(1)),
    ("dbeta", dbeta_ours, dbeta),
    ("dgamma", dgamma_ours, dgamma),
    ("dw", dw_ours, dw.reshape(3, 25)),
):
    print(f"{name}: {np.abs(one - other).max():.1e} of {np.abs(other).max():.1f}")
    assert np.allclose(one, other, rtol=1e-9, atol=1e-9)
