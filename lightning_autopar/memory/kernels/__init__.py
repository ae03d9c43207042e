"""What an operation takes inside.

Modules, in reading order:

    cpu             what CPU kernels allocate inside one operation
    cuda            what CUDA kernels allocate inside one operation
    measured        convolutions, half-precision products and LSTMs: the kernel is run once and measured
"""
