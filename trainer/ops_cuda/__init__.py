"""`TrainingOps` on cuDNN, cuBLAS and our own kernels.

Importing this package loads no GPU library; importing most of its modules does.
"""
