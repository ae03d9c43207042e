"""Moves weights and counters from where they start, so that the first step doesn't hide what later ones compute.

A second network may start as a copy of the first, and a gate or an adapter at zero. At the first weights their terms of a loss are zero,
and a sum of a sum and a mean looks like a sum alone. A projection may be drawn anew after a thousand calls; no first step draws it.
Knows a module's parameters, buffers and attributes; nothing of batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_autopar.exact.step.kept_attributes import Place
from lightning_autopar.exact.step.random_draws import Draw, DrawPlan
from lightning_autopar.text import error_line

_LOG = logging.getLogger(__name__)
#: By how much a weight is moved at most, as a share of it, and a weight of zero. A term that is the square of what moves has to be seen
#: beside a loss of which 1e-5 count.
_SHARE, _AT_ZERO = 0.25, 0.1
#: How many elements of a parameter are moved, about: it takes few for two networks to differ.
_ELEMENTS = 1 << 15
#: Where counters are set, divisible by the numbers up to 16 and by a million, for what is done every so often; and one less, as some steps
#: count first.
_AHEAD = (720_720_000_000, 720_719_999_999)


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


@contextmanager
def counted_on(buffers: Mapping[str, Tensor], places: Mapping[str, Place], count: int) -> Iterator[bool]:
    """While open, the counters among these stand at ``count``; gives whether there are any.

    Args:
        buffers: some that a step changes, by name.
        places: where attributes are that it changes, by name.
    """
    tensors = [buffer for buffer in buffers.values() if buffer.numel() == 1 and buffer.dtype in (torch.int64, torch.float32, torch.float64)]
    before = [buffer.clone() for buffer in tensors]
    numbers = [(space, key, space[key]) for space, key in places.values() if type(space.get(key)) is int]
    for buffer in tensors:
        buffer.fill_(count)
    for space, key, _ in numbers:
        space[key] = count
    try:
        yield bool(tensors or numbers)
    finally:
        for buffer, value in zip(tensors, before, strict=True):
            buffer.copy_(value)
        for space, key, number in numbers:
            space[key] = number


def later_draws(
    plan: DrawPlan, buffers: Mapping[str, Tensor], places: Mapping[str, Place], draws: Callable[[], DrawPlan]
) -> tuple[DrawPlan, str]:
    """The plan, with the random draws that a step makes only once its counters have gone far; and what it raises at all of these.

    Args:
        buffers: as for :func:`counted_on`, as ``places``.
        draws: runs the step, as it was run for the plan.
    """
    if plan.draws is None:
        return plan, ""
    found = {(draw.op, draw.shape): draw for draw in plan.draws}
    later, failures = list[Draw](), list[str]()
    for count in _AHEAD:
        with counted_on(buffers, places, count) as any_counters:
            try:
                seen = draws().draws if any_counters else ()
            except Exception as error:  # it counts no farther than the items of a list, say
                _LOG.debug("the step can't be tried with counters that have gone far", exc_info=True)
                failures.append(error_line(error))
                continue
        later += [draw for draw in seen or () if (draw.op, draw.shape) not in found]
        found |= {(draw.op, draw.shape): draw for draw in later}
    return replace(plan, draws=(*plan.draws, *later)), failures[0] if len(failures) == len(_AHEAD) else ""


def _part(parameter: nn.Parameter) -> Tensor:
    """The first rows, about so many elements."""
    whole = parameter.detach()
    return whole[: max(1, _ELEMENTS * whole.shape[0] // whole.numel())] if whole.ndim else whole
