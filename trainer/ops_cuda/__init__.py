"""`TrainingOps` on cuDNN, cuBLAS and our own kernels; beside `lenet.cuda` all that names cupy.

Importing this package loads no GPU library; importing a module of it does.
"""
