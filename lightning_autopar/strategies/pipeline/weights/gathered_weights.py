"""Weights and optimizer states of a module whose parts lie on several ranks: gathered whole for a file, and loaded by each rank in part.

A rank holds what its stages use; the rest of its module is absent tensors. Each tensor's home is the first rank of the pipeline that holds
it. :class:`Pipeline` sends tensors from rank to rank. Knows ranks and tensors; no plan, no trainer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.fingerprint import bytes_of
from lightning_autopar.state.scratch_files import ScratchFile, hand_back_pages

#: The bytes of a piece: tensors are sent in pieces, as a full device has no room for a whole copy.
_PIECE_BYTES = 32 * 1024**2

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The ranks among which one copy of the module is spread, as seen by one of them.

    Args:
        ranks: their global ranks, in the order of their first stages.
        group: their process group; None stands for all ranks.
        device: where tensors must lie to be sent: the CPU under gloo.
    """

    ranks: tuple[int, ...]
    group: Group
    device: torch.device

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Pipeline:
        """The pipeline of a process group."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return cls(ranks=tuple(ranks), group=group, device=device)

    def tell(self, value: Any) -> list[Any]:
        """All ranks' values, in order; a collective."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor's bytes to the ``rank``-th rank of the pipeline."""
        for piece in _pieces(tensor.detach().contiguous()):
            dist.send(piece.to(self.device), self.ranks[rank], group=self.group)

    def receive(self, into: Tensor, rank: int) -> None:
        """Receive what the ``rank``-th rank sends, into a contiguous tensor."""
        for piece in _pieces(into):
            here = piece if piece.device == self.device else torch.empty_like(piece, device=self.device)
            dist.recv(here, self.ranks[rank], group=self.group)
            if here is not piece:
                piece.copy_(here)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Broadcast the ``rank``-th rank's contiguous tensor into every rank's."""
        for piece in _pieces(tensor):
            here = piece.to(self.device)
            dist.broadcast(here, self.ranks[rank], group=self.group)
            if here is not piece:
                piece.copy_(here)

    @property
    def place(self) -> int:
        """This rank's."""
        return self.ranks.index(dist.get_rank())


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor, in pieces: so every type can be sent, even if the backend doesn't support it."""
    if tensor.numel():
        yield from bytes_of(tensor).split(_PIECE_BYTES)


#: Smaller tensors (an optimizer's step counters) are sent together with the descriptions of the others.
_TINY_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class _Described:
    """A tensor that a rank has.

    Args:
        shape: whole.
        alias: the name of an earlier one in the same memory.
        value: itself, where it is tiny.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    alias: str | None = None
    value: Tensor | None = None


# -- gathered --------------------------------------------------------------------------------------------------------------------------


def whole_state_dict(module: nn.Module, pipeline: Pipeline, *, keep: bool, scratch: ScratchFile) -> dict[str, Any]:
    """The module's state dict, on the pipeline's first rank whole and on the CPU; every rank must call it.

    It sends one tensor at a time. On other ranks it returns the rank's own part, with absent tensors.

    Args:
        keep: whether the first rank wants it; the other replicas of a sharded pipeline take part and get nothing.
        scratch: where tensors from other ranks are put.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if isinstance(value, Tensor) and not is_absent(value)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    found, homes = _gather(own, pipeline, keep=keep, scratch=scratch)
    everyones = pipeline.tell(others)
    if not keep or pipeline.place != 0:
        return state
    whole: OrderedDict[str, Any] = OrderedDict()
    for name in state:
        if name in found:
            whole[name] = found[name]
            continue
        assert name in others, f"no stage has {name!r}"
        prefix = name.rpartition(".")[0]
        home = next((homes[each] for each in homes if each.rpartition(".")[0] == prefix), 0)
        whole[name] = everyones[home][name]
    if hasattr(state, "_metadata"):
        whole._metadata = state._metadata  # type: ignore[attr-defined]  # the versions of the modules' formats, as torch keeps them
    return whole


def whole_optimizer_state(optimizer: Optimizer, pipeline: Pipeline, *, keep: bool, scratch: ScratchFile) -> dict[str, Any]:
    """The optimizer's state dict, keyed by the positions of the whole module's parameters; like :func:`whole_state_dict`."""
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own: dict[str, Tensor] = {}
    plain: dict[int, Any] = {}
    for position, values in state["state"].items():
        if isinstance(position, int) and is_absent(parameters[position]):
            continue  # some optimizers make a state for each parameter at once

        def name(tensor: Tensor, position: int = position) -> Any:
            key = f"{position}|{sum(1 for each in own if each.startswith(f'{position}|'))}"
            own[key] = tensor
            return _Slot(key)

        plain[position] = tree_map_only(Tensor, name, values)
    found, _ = _gather(own, pipeline, keep=keep, scratch=scratch)
    everyones = pipeline.tell(plain)
    if not keep or pipeline.place != 0:
        return {**state, "state": {position: state["state"][position] for position in plain}}
    whole: dict[int, Any] = {}
    for rank in reversed(range(len(everyones))):  # the first rank's value counts
        whole.update(everyones[rank])
    filled = {position: tree_map(lambda leaf: found[leaf.key] if isinstance(leaf, _Slot) else leaf, whole[position]) for position in whole}
    return {**state, "state": dict(sorted(filled.items()))}


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that is sent separately."""

    key: str


def _gather(own: Mapping[str, Tensor], pipeline: Pipeline, *, keep: bool, scratch: ScratchFile) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Every name's tensor, on the first rank, from the rank that has it; and those ranks, as places in the pipeline."""
    described = _describe(own)
    everyones: list[dict[str, _Described]] = pipeline.tell(described)
    homes: dict[str, int] = {}
    for rank, names in enumerate(everyones):
        for name in names:
            homes.setdefault(name, rank)
    place = pipeline.place
    whole: dict[str, Tensor] = {}
    for name, home in homes.items():
        each = everyones[home][name]
        if each.alias is not None and homes[each.alias] == home:
            if each.alias in whole:
                whole[name] = whole[each.alias]
            continue
        if each.value is not None:
            whole[name] = each.value
            continue
        tensor = own[name].detach() if place == home else None
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # together with the same stage of the other replicas, which call this as well
        if not keep:
            continue
        if place == home == 0:
            assert tensor is not None
            whole[name] = tensor if tensor.device.type == "cpu" else scratch.tensor(tensor.shape, tensor.dtype).copy_(tensor)
        elif place == home:
            assert tensor is not None
            pipeline.send(tensor, 0)
        elif place == 0:
            whole[name] = scratch.tensor(each.shape, each.dtype)
            pipeline.receive(whole[name], home)
            hand_back_pages()
    return whole, homes


def _describe(own: Mapping[str, Tensor]) -> dict[str, _Described]:
    described: dict[str, _Described] = {}
    seen: dict[Any, str] = {}
    for name, tensor in own.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        alias = seen.setdefault(key, name) if local.numel() else name
        tiny = not isinstance(tensor, DTensor) and tensor.nbytes <= _TINY_BYTES
        described[name] = _Described(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            alias=alias if alias != name else None,
            value=tensor.detach().cpu().clone() if tiny else None,
        )
    return described
