"""Whether a forked child of this process can run a backward pass. Knows torch's autograd engine; nothing of plans or trainers."""

from __future__ import annotations

import torch

from lightning_autopar._fork import ChildFailed, run_forked

_TIMEOUT_SECONDS = 60.0


def backward_survives_fork() -> bool:
    """False once this process has run a backward pass on a machine with GPUs, be it on the CPU.

    The first backward starts a thread for each GPU, which a fork doesn't copy, and torch refuses every backward in a child from then on
    (``torch/csrc/autograd/engine.cpp``, ``track_bad_autograd_forks``; https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork). No
    function of torch tells, so a child tries. Without a build for GPUs there are no such threads.
    """
    if not torch.backends.cuda.is_built():
        return True
    try:
        return run_forked(_try, timeout_seconds=_TIMEOUT_SECONDS)
    except ChildFailed:
        return False


def _try() -> bool:
    torch.ones(1, requires_grad=True).sum().backward()
    return True
