"""A module with few of its repeated blocks, for a step that is too long to try whole. The others hand on what they are given.

Blocks of one sort have the same class and the same shapes of parameters. The first and the last of each sort stay. Meant for a forked
child, as the module is changed. Knows modules; nothing of batches or losses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: The most FLOPs of a forward to try, by threads: some seconds.
FLOPS_A_THREAD, _FEW_THREADS = 7.5e10, 4


class Extent(NamedTuple):
    """How much of a step is tried: so many samples, without these blocks (see :func:`spared`), and what is left of them in words."""

    samples: int
    without: list[list[str]]
    left: str


def extent(module: nn.Module, blocks: Mapping[str, int], flops: float, counts: Sequence[int], batch_size: int) -> Extent | None:
    """The largest part of a step that isn't too long to try; None where each is.

    Args:
        blocks: FLOPs of each repeated block's forward on the whole batch, by FQN.
        flops: of the forward of one sample.
        counts: numbers of samples that may be tried, the largest first.
        batch_size: samples of the whole batch.
    """
    most = FLOPS_A_THREAD * max(_FEW_THREADS, torch.get_num_threads())
    sorts = spared(module, blocks)
    for without in ([], sorts):
        saved = sum(blocks[name] for names in without for name in names[1:]) / batch_size
        if (count := next((count for count in counts if (flops - saved) * count <= most), None)) is not None:
            left = len(blocks) - sum(len(names) - 1 for names in without)
            return Extent(count, without, f"{left} of its {len(blocks)} blocks")
    return None


def spared(module: nn.Module, blocks: Collection[str]) -> list[list[str]]:
    """For each sort of block with more than two of them, the names: the one that stays and shows what a block returns, then those to do
    without. Blocks that aren't there, or lie in one another, are left out.

    Args:
        blocks: FQNs of repeated blocks, in the order in which they run.
    """
    there, sorts = dict(module.named_modules()), dict[tuple[Any, ...], list[str]]()
    for fqn in blocks:
        if fqn in there and not any(other.startswith(f"{fqn}.") for other in blocks):
            shapes = tuple((name, tensor.shape) for name, tensor in (*there[fqn].named_parameters(), *there[fqn].named_buffers()))
            sorts.setdefault((type(there[fqn]), shapes), []).append(fqn)
    return [names[:-1] for names in sorts.values() if len(names) > 2]


def do_without(module: nn.Module, spared: Iterable[list[str]]) -> None:
    """Replace blocks by copies without parameters and submodules, which return their first argument as a block of their sort returns it."""
    for first, *others in spared:
        shown = _Shown()
        module.get_submodule(first).register_forward_hook(shown.note)
        for fqn in others:
            block = copy(module.get_submodule(fqn))
            for name, value in vars(block).items():
                if isinstance(value, dict) and (name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks")):
                    vars(block)[name] = type(value)() if isinstance(value, OrderedDict) else {}
            vars(block)["forward"] = shown.handed_on
            parent, _, name = fqn.rpartition(".")
            setattr(module.get_submodule(parent), name, block)


class _Shown:
    """What a block of a sort has returned last."""

    def __init__(self) -> None:
        self.output: Any = None

    def note(self, block: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self.output = output

    def handed_on(self, *given: Any, **named: Any) -> Any:
        """What a block returns that changes nothing: its first argument in the place of what the noted one computed.

        Raises:
            TypeError: if blocks return something of another form than they are given.
        """
        first = next(iter((*given, *named.values())), None)
        rest: tuple[Any, ...] | None = self.output[1:] if type(self.output) is tuple else None
        computed = self.output if rest is None else self.output[0]
        if not isinstance(first, Tensor) or not isinstance(computed, Tensor) or first.shape != computed.shape:
            raise TypeError("a block returns something of another form than it is given")
        return first if rest is None else (first, *rest)
