"""The repeated blocks of a module: which they are, and when each of them runs in a step. Knows torch; no Lightning, no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar.memory.trace.tracker import MemoryTracker

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The candidates for blocks: members of lists and sequences, at least two of which have the same class and hold parameters. The
    outermost such list counts. Lists in a list are searched; lists without repeated members are taken together: one list a layer with its
    norm, attention and residual, say. Encoder and decoder are two lists, the stages of a ResNet four. Blocks that share a parameter with
    anything outside of them are left out, as are normalisations and other layers with only vectors.

    Returns:
        The blocks by FQN, in the order of ``named_modules``.
    """
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))

    def shared(block: nn.Module) -> bool:
        own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        return any(owners[key] != count for key, count in own.items())

    def eligible(block: nn.Module) -> bool:
        return any(parameter.dim() > 1 for parameter in block.parameters()) and not shared(block)

    return {name: block for name, block in _search("", module) if eligible(block)}


def _search(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists with repeated members, in order."""
    children = {name: child for name, child in module._modules.items() if child is not None}  # the only way to see a scripted module's
    names = {name: f"{prefix}.{name}" if prefix else name for name in children}
    blocks: set[str] = set()
    if isinstance(module, _CONTAINERS):
        holding = {name: child for name, child in children.items() if any(parameter.dim() > 1 for parameter in child.parameters())}
        classes = Counter(type(child) for child in holding.values() if type(child) not in _CONTAINERS)
        blocks = {name for name, child in holding.items() if classes[type(child)] > 1}
        sequences = [name for name, child in holding.items() if type(child) is nn.Sequential]
        if len(sequences) > 1 and not any(found for name in sequences for found in _search(names[name], children[name])):
            # A stem and a head of one class next to them, such as two linear layers, are no blocks.
            blocks = max(blocks, set(sequences), key=lambda chosen: sum(p.numel() for name in chosen for p in children[name].parameters()))
    together = set() if blocks else _repeated_together(children) if isinstance(module, _CONTAINERS) else set()
    for name, child in children.items():
        if name in blocks:
            yield names[name], child
        elif together and type(child) is nn.ModuleList:
            for key, member in child.named_children():
                fqn = f"{names[name]}.{key}"
                yield from [(fqn, member)] if type(member) in together else _search(fqn, member)
        else:
            yield from _search(names[name], child)


def _repeated_together(children: dict[str, nn.Module]) -> set[type[nn.Module]]:
    """Classes of which several lists have a member each, where none of these lists has repeated members itself."""
    lists = [child for child in children.values() if type(child) is nn.ModuleList]
    if len(lists) < 2 or any(found for child in lists for found in _search("", child)):
        return set()
    members = Counter(type(member) for child in lists for member in child if type(member) not in _CONTAINERS)
    holding = {type(member) for child in lists for member in child if any(parameter.dim() > 1 for parameter in member.parameters())}
    return {kind for kind, count in members.items() if count > 1 and kind in holding}


@dataclass
class BlockCalls:
    """What was seen of one candidate.

    Args:
        fqn: its name.
        module: of the traced copy.
        index: its place in the order in which the candidates ran first; None if it never did, or within another one.
        calls: how often it ran in the last batch.
        recomputable: whether running its forward twice leaves the run unchanged, as far as its arguments and buffers tell.
    """

    fqn: str
    module: nn.Module
    index: int | None = None
    calls: int = 0
    recomputable: bool = True
    versions: list[tuple[int, int]] = field(default_factory=list)


class BlockWatcher:
    """Hooks on the candidates for blocks of the traced copy, which tell the tracker which candidate runs.

    Args:
        blocks: the candidates, modules of the traced copy.
        tracker: the ledger.
    """

    def __init__(self, blocks: dict[str, nn.Module], tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._records = [BlockCalls(fqn, module) for fqn, module in blocks.items()]
        self._running: BlockCalls | None = None
        #: The candidates that have run, in the order in which they did so first.
        self.order: list[BlockCalls] = []
        for record in self._records:
            record.module.register_forward_pre_hook(self._before(record), with_kwargs=True, prepend=True)
            record.module.register_forward_hook(self._after(record), with_kwargs=True)

    def follow(self, tracker: MemoryTracker) -> None:
        """From now on, tell another tracker."""
        self._tracker = tracker

    def begin_step(self) -> None:
        """A batch starts: count calls anew."""
        for record in self._records:
            record.calls = 0
        self._running = None
        self._tracker.begin_step()

    def _before(self, record: BlockCalls) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._tracker.phase != "forward":
                if self._tracker.phase == "backward" and record.index is not None:
                    self._tracker.repeat_block(record.index)  # the user's own recomputation
                return
            record.calls += 1
            if record.calls > 1 or self._running is not None:
                return
            if record.index is None:
                record.index = len(self.order)
                self.order.append(record)
            self._running = record
            leaves = tree_leaves((args, kwargs))
            record.recomputable &= all(_plain(leaf) for leaf in leaves) and not _has_metric(module)
            record.versions = _versions(module)
            self._tracker.begin_block(record.index, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

        return hook

    def _after(self, record: BlockCalls) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._running is not record or self._tracker.phase != "forward":
                return
            assert record.index is not None
            self._running = None
            leaves = tree_leaves(output)
            record.recomputable &= all(_plain(leaf) for leaf in leaves) and _versions(module) == record.versions
            self._tracker.end_block(record.index, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

        return hook


def _plain(leaf: Any) -> bool:
    """Whether running a block twice with this value is harmless: no object that the block may change, such as a cache."""
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, slice))


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Each buffer's tensor, and how often it was written to."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _has_metric(module: nn.Module) -> bool:
    """Whether a torchmetrics metric, which counts what it sees, is inside; told by its class, as torchmetrics may be missing."""
    return any(
        base.__name__ == "Metric" and base.__module__.startswith("torchmetrics")
        for child in module.modules()
        for base in type(child).__mro__
    )


def batch_norms(module: nn.Module) -> Iterable[str]:
    """FQNs of the modules whose statistics span the batch: BatchNorm in training mode, subclasses included."""
    return (name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training)


def tied_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that stand for one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
