"""Weights and optimizer states of a module whose parts lie on several ranks: gathered whole for a file, and loaded by each rank in part.

A rank holds what its stages use; the rest of its module is absent tensors. Each tensor's home is the first rank of the pipeline that holds
it. Knows ranks and tensors; no plan, no trainer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.state.scratch_files import ScratchFile, hand_back_pages
from lightning_autopar.strategies.pipeline.weights.tensor_transfers import Pipeline

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
