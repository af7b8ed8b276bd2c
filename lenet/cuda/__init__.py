"""cuDNN and cuBLAS: with `trainer.ops_cuda` the only place that may name cupy or cudnn.

From the bottom: `handle` and `memory`, then `graphs` and `kernels`, then `packing` and `plans`.
Importing this package loads no GPU library; importing a module of it may.
"""
