"""Fake tensors, as CUDA would treat them.

Modules, in reading order:

    fake_copies     fake copies of modules and batches
    fake_mode       torch's fake mode, without what costs time
    shadow_values   real values behind fake tensors, where they are known
    dynamic_shapes  operations whose shape depends on values
    as_cuda         CPU tensors treated as CUDA would; its attention kernel, its recurrent layers
    cuda_autocast   CUDA's autocast lists on CPU tensors
    composites      composite operations that treat fakes as they treat real tensors
"""
