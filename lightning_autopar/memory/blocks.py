"""The repeated blocks of a module: which they are, and what each of them takes in a step. Knows torch; no Lightning, no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar.memory.footprint import LayerFootprint
from lightning_autopar.memory.tracker import Cell, MemoryTracker

#: Blocks of one list and class that hold less than this share of the parameters and of the activations are no units of anything.
_SHARE = 0.01
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The candidates for blocks: members of lists and sequences of which at least two have one class and hold parameters.

    The outermost such list counts; a list of lists is looked into. Encoder and decoder are two lists, the stages of a ResNet four. Left out
    are blocks that share a parameter with anything outside of them, and normalisations and other layers that hold vectors only.

    Returns:
        The blocks by FQN, in the order of ``named_modules``.
    """
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    places = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))

    def shared(block: nn.Module) -> bool:
        own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        return any(owners[key] != count for key, count in own.items()) or any(places[id(child)] > 1 for child in block.modules())

    def eligible(block: nn.Module) -> bool:
        return any(parameter.dim() > 1 for parameter in block.parameters()) and not shared(block)

    return {name: block for name, block in _search("", module) if eligible(block)}


def _search(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists with repeated members, in order."""
    names = {name: f"{prefix}.{name}" if prefix else name for name in module._modules}
    children = {name: child for name, child in module._modules.items() if child is not None}
    blocks: set[str] = set()
    if isinstance(module, _CONTAINERS):
        holding = {name: child for name, child in children.items() if any(parameter.dim() > 1 for parameter in child.parameters())}
        classes = Counter(type(child) for child in holding.values() if type(child) not in _CONTAINERS)
        blocks = {name for name, child in holding.items() if classes[type(child)] > 1}
        sequences = [name for name, child in holding.items() if type(child) is nn.Sequential]
        if not blocks and len(sequences) > 1 and not any(found for name in sequences for found in _search(names[name], children[name])):
            blocks = set(sequences)
    for name, child in children.items():
        if name in blocks:
            yield names[name], child
        else:
            yield from _search(names[name], child)


@dataclass
class _Record:
    """What was seen of one block."""

    fqn: str
    module: nn.Module
    index: int | None = None
    calls: int = 0
    activation_bytes: int = 0
    fixed_bytes: int = 0
    input_bytes: int = 0
    input_extra_bytes: int = 0
    flops: int = 0
    recomputable: bool = True
    inputs: list[Cell] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)


class BlockWatcher:
    """Hooks on the blocks of the traced copy: tells the tracker which of them runs, and reads off what each leaves behind.

    Args:
        blocks: the candidates, modules of the traced copy.
        tracker: the ledger.
    """

    def __init__(self, blocks: dict[str, nn.Module], tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._records = [_Record(fqn, module) for fqn, module in blocks.items()]
        self._order: list[_Record] = []
        self._running: _Record | None = None
        self._seen_inputs: set[int] = set()
        for record in self._records:
            record.module.register_forward_pre_hook(self._before(record), with_kwargs=True, prepend=True)
            record.module.register_forward_hook(self._after(record), with_kwargs=True)

    def begin_step(self) -> None:
        """A step starts: count calls anew."""
        for record in self._records:
            record.calls = 0
            record.inputs = []
        self._running = None
        self._tracker.block = None
        self._seen_inputs.clear()

    def end_forward(self) -> None:
        """Backward starts: which inputs are still alive?"""
        for record in self._records:
            if record.inputs:
                record.input_extra_bytes = record.input_bytes - sum(cell.size_bytes for cell in record.inputs)
                record.inputs = []

    def _before(self, record: _Record) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tracker = self._tracker
            if tracker.phase != "forward":
                return  # the user's own recomputation
            record.calls += 1
            if record.calls > 1 or self._running is not None:
                return
            if record.index is None:
                record.index = len(self._order)
                self._order.append(record)
            self._running = record
            leaves = tree_leaves((args, kwargs))
            if not all(_plain(leaf) for leaf in leaves):
                record.recomputable = False
            record.inputs = []
            for leaf in leaves:
                for cell in tracker.cells(leaf) if isinstance(leaf, Tensor) else ():
                    if cell.kind == "activations" and id(cell) not in self._seen_inputs:
                        self._seen_inputs.add(id(cell))
                        record.inputs.append(cell)
            record.input_bytes = sum(cell.size_bytes for cell in record.inputs)
            record.versions = _versions(module)
            tracker.block_bytes[record.index] = tracker.block_fixed_bytes[record.index] = 0
            tracker.block = record.index
            tracker.enter("forward", record.index)

        return hook

    def _after(self, record: _Record) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tracker = self._tracker
            if self._running is not record or tracker.phase != "forward":
                return
            index = record.index
            assert index is not None
            self._running = None
            tracker.block = None
            leaves = tree_leaves(output)
            if not all(_plain(leaf) for leaf in leaves) or _versions(module) != record.versions:
                record.recomputable = False
            cells = {id(cell): cell for leaf in leaves if isinstance(leaf, Tensor) for cell in tracker.cells(leaf)}
            leaving = sum(cell.size_bytes for cell in cells.values() if cell.block == index)
            record.activation_bytes = tracker.block_bytes.get(index, 0) - leaving
            record.fixed_bytes = tracker.block_fixed_bytes.get(index, 0)
            record.flops = tracker.block_flops.get(index, 0)
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(lambda gradients: tracker.enter("backward", index))
                    break
            tracker.enter("forward", index + 1)

        return hook

    def blocks(
        self,
        bytes_of: Callable[[nn.Parameter], tuple[int, int, int]],
        *,
        parameters: int,
        activation_bytes: int,
    ) -> tuple[list[LayerFootprint], set[int]]:
        """What came of it.

        Args:
            bytes_of: (parameter, gradient, optimizer) bytes of a parameter of the traced copy.
            parameters: elements of the whole module.
            activation_bytes: of the whole module.

        Returns:
            The blocks in the order in which they ran, and their indices among all candidates in that order. Those that didn't run exactly
            once in a step are left out, and those that are too small.
        """
        groups: dict[tuple[str, type], list[_Record]] = {}
        for record in self._order:
            if record.calls == 1:
                groups.setdefault((record.fqn.rpartition(".")[0], type(record.module)), []).append(record)
        kept: set[int] = set()
        for group in groups.values():
            share = sum(p.numel() for record in group for p in record.module.parameters()) / max(1, parameters)
            activation_share = sum(record.activation_bytes for record in group) / max(1, activation_bytes)
            if max(share, activation_share) >= _SHARE:
                kept |= {record.index for record in group if record.index is not None}
        found = []
        for record in self._order:
            if record.index not in kept:
                continue
            own = list(record.module.parameters())
            sizes = [bytes_of(parameter) for parameter in own]
            found.append(
                LayerFootprint(
                    fqn=record.fqn,
                    parameters=sum(parameter.numel() for parameter in own),
                    parameter_bytes=sum(size[0] for size in sizes),
                    gradient_bytes=sum(size[1] for size in sizes),
                    optimizer_bytes=sum(size[2] for size in sizes),
                    activation_bytes=record.activation_bytes,
                    input_bytes=record.input_bytes,
                    input_extra_bytes=record.input_extra_bytes,
                    fixed_bytes=record.fixed_bytes,
                    flops=record.flops,
                    recomputable=record.recomputable and not _has_metric(record.module),
                )
            )
        return found, kept


def _plain(leaf: Any) -> bool:
    """Whether running a block twice with this value is harmless: no object that the block may change, such as a cache."""
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, slice))


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which tensor each buffer is, and how often it was written."""
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
