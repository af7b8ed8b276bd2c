"""cuDNN and cuBLAS: with `trainer.ops_cuda` the only place that may name cupy or cudnn.

From the bottom: `cublas` and `memory`, then `handle`, then `graphs`, `kernels` and `plan_cache`,
then `packing` and `plans`. `graphs`, `handle`, `packing` and `plan_cache` need no GPU library.
Importing this package loads no GPU library; importing a module of it may.
"""
