"""Run a step of a module and undo what it did to the module: parameters that it wrote to, attributes that it set; and tell what that was.

Knows modules, and nothing of batches, trainers or engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: Relative difference up to which written values count as equal: rounding of float32 sums taken in another order, and some cancellation.
_EQUAL = 1e-4
#: Parameters are copied to see whether a step writes to them, but not more bytes of them than this.
_PARAMETER_BYTES = 256 << 20


@dataclass(kw_only=True)
class Deeds:
    """What a step did.

    Args:
        written: name → new value of each parameter that the step wrote to.
        calls: how often each submodule was called, by name.
    """

    written: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)


@contextmanager
def undone(module: nn.Module) -> Iterator[Deeds]:
    """Around a step: afterwards the module's parameters and the attributes of its submodules are as before.

    What a step changes inside of an object that an attribute holds (a list that it appends to) stays changed. Buffers keep what was
    written to them, but are the same tensors as before.

    Args:
        module: the root.
    """
    deeds = Deeds()
    parameters = dict(module.named_parameters())
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()} if size_bytes <= _PARAMETER_BYTES else {}
    attributes = [(child, dict(child.__dict__), dict(child._buffers)) for child in module.modules()]

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            deeds.calls[name] += 1

        return hook

    with ExitStack() as hooks:
        for name, child in module.named_modules():
            if name:
                hooks.callback(child.register_forward_pre_hook(count(name)).remove)
        try:
            yield deeds
        finally:
            for child, values, buffers in attributes:
                child.__dict__.clear()
                child.__dict__.update(values)
                child._buffers.clear()
                child._buffers.update(buffers)
            for name, copy in copies.items():
                parameter = parameters[name]
                if parameter.shape == copy.shape and not torch.equal(parameter.detach(), copy):
                    deeds.written[name] = parameter.detach().clone()
                    parameter.data.copy_(copy)


def drifting(written: Sequence[Mapping[str, Tensor]]) -> tuple[float, str] | None:
    """By how much something that a step writes (a codebook's averages, say) comes out otherwise on a part of the batch, and the sentence.

    Args:
        written: of the step on the whole batch, then on each part of it.
    """
    names = sorted({name for values in written for name in values})
    for name in names:
        sentence = f"{name!r} depends on the batch, and each rank would keep one of its own"
        values = [each[name].double() if name in each else None for each in written]
        whole = values[0]
        for part in values[1:]:
            if whole is None or part is None or part.shape != whole.shape:
                return 1.0, sentence
            scale = float(whole.abs().max()) if whole.numel() else 0.0
            distance = float((part - whole).abs().max()) / scale if scale else float((part - whole).abs().sum() > 0)
            if not distance <= _EQUAL:
                return distance, sentence
    return None


def uneven(calls: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """The submodules that a step calls more or less often on a part of the batch than on the whole.

    Args:
        calls: of the step on the whole batch, then on each part of it.
    """
    names = {name for counts in calls for name in counts}
    return tuple(sorted(name for name in names if len({counts.get(name, 0) for counts in calls}) > 1))
