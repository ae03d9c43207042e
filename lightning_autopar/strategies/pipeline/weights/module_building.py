"""Builds a module on one rank for all, and makes a module whole again on every rank. Knows ranks, absent tensors and tensors; no plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.step.initial_weights import random_states, set_random_states
from lightning_autopar.state.scratch_files import hand_back_pages
from lightning_autopar.strategies.pipeline.weights.tensor_transfers import Pipeline


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def spread(module: nn.Module, originals: Mapping[str, Tensor], everyone: Pipeline) -> None:
    """Give each rank its part of what only the first rank has built, one tensor at a time, and the random state after that.

    Args:
        module: with absent tensors. This rank's part is on the meta device; the first rank has it, in memory that will be freed.
        originals: all of the module's tensors by name, on the first rank; nothing elsewhere.
        everyone: the ranks of all pipelines.
    """
    first = everyone.place == 0
    fresh: dict[int, Any] = {}
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                if tensor is None or is_absent(tensor) or not (first or tensor.is_meta):
                    continue
                if id(tensor) not in fresh:
                    values = tensor.detach().clone() if first else torch.empty_like(tensor, device="cpu")
                    fresh[id(tensor)] = _in_place_of(tensor, values)
                slots[key] = fresh[id(tensor)]
    made = {id(tensor) for tensor in fresh.values()}
    here = {name: tensor for name, tensor in _firsts(module).items() if id(tensor) in made and not first}
    wanted = everyone.tell(set(here))
    for name, tensor in (originals if first else here).items():
        if not first:
            everyone.receive(tensor.detach(), 0)
            continue
        for rank, names in enumerate(wanted):
            if name in names:
                everyone.send(tensor, rank)
        hand_back_pages()
    for metric in (child for child in module.modules() if isinstance(child, Metric)):
        _spread_metric(metric, first)
    dist.broadcast_object_list(states := [random_states(everyone.device)], src=0)
    set_random_states(states[0], everyone.device)


def _spread_metric(metric: Metric, first: bool) -> None:
    """Spread a metric's states, which are no buffers, and the values to which they are reset."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    dist.broadcast_object_list(kept := [tree_map_only(Tensor, Tensor.cpu, (states, metric._defaults)) if first else None], src=0)
    if not first:
        assert kept[0] is not None
        metric._defaults = kept[0][1]
        for name, state in kept[0][0].items():
            setattr(metric, name, state)


def make_whole(module: nn.Module, pipeline: Pipeline) -> None:
    """Fill every rank's absent tensors permanently, and make all parameters plain ones on the CPU; every rank must call it.

    Args:
        module: with absent tensors; which names are tied is the same on every rank.
    """
    tensors = _firsts(module)
    holders = pipeline.tell({name for name, tensor in tensors.items() if not is_absent(tensor)})
    fresh: dict[int, Any] = {}
    for name, tensor in tensors.items():
        ranks = [rank for rank, names in enumerate(holders) if name in names]
        assert ranks, f"no stage has {name!r}"
        if is_absent(tensor):
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            fresh[id(tensor)] = _in_place_of(tensor, values)
        else:
            values = tensor.detach()
            if isinstance(values, DTensor):
                values = values.full_tensor()
                fresh[id(tensor)] = _in_place_of(tensor, values.cpu())
        if len(ranks) < len(holders):
            pipeline.broadcast(values.contiguous(), ranks[0])
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for key, slot in slots.items():
                if id(slot) in fresh:
                    slots[key] = fresh[id(slot)]
    module.cpu()


def _firsts(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, each under the first of its names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _in_place_of(tensor: Tensor, values: Tensor) -> Tensor:
    """The new tensor, as a parameter where the old one is a parameter."""
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
