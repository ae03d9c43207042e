"""What an operation takes inside.

Modules, in reading order:

    cpu_workspace       what CPU kernels allocate inside one operation
    cuda_workspace      what CUDA kernels allocate inside one operation
    measured_workspace  convolutions, half-precision products and LSTMs: the kernel is run once and measured
"""
