"""Moves weights a little from where they start, so that what is zero only at the start doesn't hide what a step computes.

A second network that starts as a copy of the first, a gate or an adapter that starts at zero: at the first weights their terms of a loss
are zero, and a sum of a sum and a mean looks like a sum alone. Knows a module's parameters; nothing of batches or steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: By how much a weight is moved at most, as a share of it, and a weight of zero. A term that is the square of what moves has to be seen
#: beside a loss of which 1e-5 count.
_SHARE, _AT_ZERO = 0.25, 0.1
#: How many elements of a parameter are moved, about: it takes few for two networks to differ.
_ELEMENTS = 1 << 15


@contextmanager
def nudged(module: nn.Module) -> Iterator[None]:
    """While open, some elements of every parameter are elsewhere, those without gradients as well; what takes no real numbers stays. None
    changes its sign, as a step may take its root.

    Args:
        module: has its weights back afterwards. The generators of random numbers aren't used.
    """
    generator = torch.Generator().manual_seed(0)
    moved: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        real = parameter.is_floating_point() and parameter.device.type == "cpu" and parameter.layout is torch.strided
        if nn.parameter.is_lazy(parameter) or not real or not parameter.numel():
            continue
        part = _part(parameter)
        moved.append((parameter, part.clone()))
        noise = (2 * torch.rand(part.shape, generator=generator) - 1).to(part.dtype)
        part.copy_(torch.where(part == 0, _AT_ZERO * noise.abs(), part * (1 + _SHARE * noise)))
    try:
        yield
    finally:
        for parameter, before in moved:
            _part(parameter).copy_(before)


def _part(parameter: nn.Parameter) -> Tensor:
    """The first rows, about so many elements."""
    whole = parameter.detach()
    return whole[: max(1, _ELEMENTS * whole.shape[0] // whole.numel())] if whole.ndim else whole
