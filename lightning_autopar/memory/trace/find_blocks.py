"""The repeated blocks of a module, or its layers where it has none: which they are, and when each of them runs in a step. Knows torch; no
Lightning, no plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar.memory.storages import tensor_bytes
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker

#: The most layers in place of blocks: every one is a cut that is tried.
_MOST_LAYERS = 8
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The candidates for blocks: members of lists and sequences, at least two of which have the same class and hold parameters. The
    outermost such list counts. Lists in a list are searched; lists without repeated members are taken together: one list a layer with its
    norm, attention and residual, say. Encoder and decoder are two lists, the stages of a ResNet four. Blocks that share a parameter with
    anything outside of them are left out, as are normalisations and other layers with only vectors.

    Returns:
        The blocks by FQN, in the order of ``named_modules``.
    """
    eligible = _eligible(module)
    return {name: block for name, block in _search("", module) if eligible(block)}


def _eligible(module: nn.Module) -> Callable[[nn.Module], bool]:
    """A function that tells whether a part of the module holds a matrix, and no parameter that something outside of it has as well."""
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))

    def shared(block: nn.Module) -> bool:
        # A class may have a `named_parameters` of its own, of other names and arguments.
        own = Counter(id(parameter) for _, parameter in nn.Module.named_parameters(block, remove_duplicate=False))
        return any(owners[key] != count for key, count in own.items())

    return lambda block: any(parameter.dim() > 1 for parameter in block.parameters()) and not shared(block)


def find_layers(module: nn.Module, calls: Mapping[str, ModuleCalls], blocks: Collection[str] = ()) -> dict[str, nn.Module]:
    """The layers before which a step may be cut, besides its repeated blocks: the outermost modules without such blocks that ran, with a
    matrix each, and no parameter that something outside has. The largest of them is replaced by its own such layers until there are as many
    as a plan may need.

    Args:
        calls: of one step, by FQN; see :class:`CallCounter`.
        blocks: FQNs of the repeated blocks that ran, which are looked for elsewhere.

    Returns:
        The layers by FQN, in the order in which they ran first.
    """
    eligible, named = _eligible(module), dict(module.named_modules())

    def outermost(prefix: str) -> list[str]:
        found: list[str] = []
        for name, child in named[prefix]._modules.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if child is None or fqn not in named or fqn in blocks:  # the second name of a module isn't there
                continue
            whole = fqn in calls and calls[fqn].plain and eligible(child) and not any(block.startswith(f"{fqn}.") for block in blocks)
            found += [fqn] if whole else outermost(fqn)
        return found

    def inner(fqn: str) -> list[str]:
        """Its own layers, at least two."""
        found = outermost(fqn)
        return inner(found[0]) if len(found) == 1 else found

    def elements(fqn: str) -> int:
        return sum(parameter.numel() for parameter in named[fqn].parameters())

    found = outermost("")
    while len(found) < _MOST_LAYERS:
        for fqn in sorted(found, key=elements, reverse=True):
            if (within := inner(fqn)) and len(found) + len(within) - 1 <= _MOST_LAYERS:
                found = [*(other for other in found if other != fqn), *within]
                break
        else:
            break
    largest = sorted(found, key=elements, reverse=True)[:_MOST_LAYERS]
    return {fqn: named[fqn] for fqn in sorted(largest, key=lambda fqn: calls[fqn].first)}


@dataclass
class ModuleCalls:
    """What was seen of a module in one step.

    Args:
        first: its place among all calls.
        plain: whether it was given and returned nothing but tensors, numbers and the like.
    """

    first: int
    times: int = 0
    plain: bool = True


class CallCounter:
    """Hooks on all modules, which count the calls of one step's forward.

    Args:
        module: the traced copy.
        counts: whether a call counts now: not in backward, where a user's own recomputation runs a module again.
    """

    def __init__(self, module: nn.Module, counts: Callable[[], bool]) -> None:
        #: By FQN, of the modules that ran.
        self.calls: dict[str, ModuleCalls] = {}
        self._counts = counts
        self._handles: list[Any] = []
        for name, child in module.named_modules():
            self._handles.append(child.register_forward_pre_hook(self._before(name)))
            self._handles.append(child.register_forward_hook(self._after(name), with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._counts():
                self.calls.setdefault(name, ModuleCalls(len(self.calls))).times += 1

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in self.calls:
                self.calls[name].plain &= all(map(_plain, tree_leaves((args, kwargs, output))))

        return hook


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
        module: of the traced copy.
        index: its place in the order in which the candidates ran first; None if it never did, or within another one.
        calls: how often it ran in the last batch.
        recomputable: whether running its forward twice leaves the run unchanged, as far as its arguments and buffers tell.
        repeated: whether it is one of several alike blocks; else it is a layer, with which no more than a stage may begin.
        again: the tracker's parts in which it ran again, in the last batch.
        output_bytes: of what each of its calls returned, in the last batch.
    """

    fqn: str
    module: nn.Module
    index: int | None = None
    calls: int = 0
    recomputable: bool = True
    repeated: bool = True
    versions: list[tuple[int, int]] = field(default_factory=list)
    again: dict[int, None] = field(default_factory=dict)
    output_bytes: list[int] = field(default_factory=list)


class BlockWatcher:
    """Hooks on the candidates for blocks of the traced copy, which tell the tracker which candidate runs.

    Args:
        blocks: the candidates, modules of the traced copy.
    """

    def __init__(self, blocks: dict[str, nn.Module], tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._records: list[BlockCalls] = []
        self._running: BlockCalls | None = None
        #: The candidates that have run, in the order in which they did so first.
        self.order: list[BlockCalls] = []
        self._handles: list[Any] = []
        self._watch([BlockCalls(fqn, module) for fqn, module in blocks.items()])

    def _watch(self, records: list[BlockCalls]) -> None:
        self._records = records
        for record in records:
            self._handles.append(record.module.register_forward_pre_hook(self._before(record), with_kwargs=True, prepend=True))
            self._handles.append(record.module.register_forward_hook(self._after(record), with_kwargs=True))

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The candidates that the last step ran once."""
        return {record.fqn: record.module for record in self._records if record.calls == 1}

    @property
    def blocks_again(self) -> dict[str, nn.Module]:
        """The candidates that the last step ran several times: no blocks, but layers."""
        return {record.fqn: record.module for record in self._records if record.calls > 1 and record.index is not None}

    def watch_layers(self, layers: Mapping[str, nn.Module]) -> None:
        """From now on, watch these layers beside the blocks that ran. To be called between two steps that aren't recorded."""
        for handle in self._handles:
            handle.remove()
        blocks = [BlockCalls(fqn, module) for fqn, module in self.blocks.items()]
        self.order, self._handles = [], []
        self._watch([*blocks, *(BlockCalls(fqn, module, repeated=False) for fqn, module in layers.items())])

    @property
    def candidates(self) -> list[BlockCalls]:
        """What may be a block: it ran once; a layer may have run again later, where it is left to who cuts to look for that."""
        return [record for record in self.order if record.calls == 1 or not record.repeated]

    @property
    def repeats(self) -> float:
        """By how much what a candidate returned in all of its calls is larger than what it returned in its first one, at most."""
        return max((sum(each) / each[0] for each in (record.output_bytes for record in self.order) if each and each[0]), default=1.0)

    def follow(self, tracker: MemoryTracker) -> None:
        """From now on, tell another tracker."""
        self._tracker = tracker

    def begin_step(self) -> None:
        """A batch starts: count calls anew."""
        for record in self._records:
            record.calls = 0
            record.again.clear()
            record.output_bytes.clear()
        self._running = None
        self._tracker.begin_step()

    def _before(self, record: BlockCalls) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._tracker.phase != "forward":
                if self._tracker.phase == "backward" and record.index is not None:
                    self._tracker.repeat_block(record.index)  # the user's own recomputation
                return
            record.calls += 1
            if self._running is not None:
                return
            if record.calls > 1:
                if record.index is not None:
                    record.again[self._tracker.run_again(record.index)] = None
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
            if self._tracker.phase != "forward" or self._running not in (None, record) or record.index is None:
                return
            leaves = tree_leaves(output)
            record.output_bytes.append(sum(tensor_bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
            if self._running is None:
                self._tracker.run_again(None)
                return
            self._running = None
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
