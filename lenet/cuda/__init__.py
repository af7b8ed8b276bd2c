"""The GPU backend. With `trainer.ops_cuda` the only folder that may name cupy or cudnn.

    device         a stream with its cuDNN and cuBLAS handles; errors translated
    cublas         matrix products with cuBLAS inside a capture
    memory         arena, workspace, page-locked staging
    capture        the capture of CUDA graphs; times by CUDA events
    kernels        compilation and launch of our own kernels
    graphs         cuDNN's operation graphs
    engines        the cuDNN engine of an operation, autotuned
    engine_cache   choices and serialized engines, kept on disk
    packing        canonical tensors to padded channels-last ones, and back
    weights        one network's weights on the device
    conv1          the first convolution; with conv1.cu
    convolutions   the first two, in one kernel; with convolutions.cu
    epilogue       bias, activation and pooling; with epilogue.cu
    layers         strategy one: layer by layer
    fused_network  strategy two: the whole network in one kernel; with fused_network.cu
    plan           a bucket: one graph launch from pixels to probabilities
    backend        `lenet.backend.Backend` on top of these

Importing `backend`, `plan`, `engines`, `weights` or `memory` needs CuPy; the others do not.
"""
