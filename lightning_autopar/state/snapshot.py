"""A snapshot: the training state at a step boundary, saved under one plan, loaded under any other.

A folder: weights and optimizer states by torch.distributed.checkpoint, keyed by fully-qualified names, so that each rank writes and reads its own
part; beside them Lightning's own checkpoint dictionary without them. Knows tensors, files and the trainer, no plan.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TENSORS, _REST = "tensors", "rest.pkl"


def is_snapshot(path: Any) -> bool:
    """Whether this path is a folder that :func:`save_snapshot` wrote."""
    return path is not None and Path(str(path)).joinpath(_REST).is_file()


def save_snapshot(trainer: Trainer, path: str | Path) -> None:
    """Write the trainer's whole state; every rank must call it, between two steps.

    Args:
        trainer: in a run.
        path: a folder that doesn't exist yet, on a file system that all ranks share.
    """
    strategy: Any = trainer.strategy
    folder = Path(strategy.broadcast(str(path)))
    tensors = _tensors(strategy.lightning_module, strategy.optimizers)
    dcp.save(tensors, checkpoint_id=str(folder / _TENSORS), no_dist=not dist.is_initialized())
    rest = _rest(trainer)
    if strategy.is_global_zero:
        partial = folder / f"{_REST}.part"
        partial.write_bytes(pickle.dumps(rest))
        partial.replace(folder / _REST)  # the snapshot is there once this file is
    strategy.barrier("snapshot")


def load_snapshot(strategy: Any, path: str | Path) -> dict[str, Any]:
    """Load weights and optimizer states into a strategy that is set up, whatever plan wrote them; return Lightning's dictionary.

    Args:
        strategy: with module and optimizers as they will be trained.
        path: a folder of :func:`save_snapshot`.
    """
    folder = Path(str(path))
    module, optimizers = strategy.lightning_module, [_bare(optimizer) for optimizer in strategy.optimizers]
    tensors = _tensors(module, optimizers)
    dcp.load(tensors, checkpoint_id=str(folder / _TENSORS), no_dist=not dist.is_initialized())
    if optimizers:
        set_state_dict(module, optimizers, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizers"])
    else:
        set_model_state_dict(module, tensors["model"])
    rest: dict[str, Any] = pickle.loads((folder / _REST).read_bytes())
    return rest


def _bare(optimizer: Any) -> Optimizer:
    bare: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return bare


def _tensors(module: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    """Weights and optimizer states by name; an optimizer without state yet gets its empty one."""
    if not optimizers:  # a run that evaluates
        return {"model": get_model_state_dict(module)}
    model, states = get_state_dict(module, [_bare(optimizer) for optimizer in optimizers])
    return {"model": model, "optimizers": states}


def _rest(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint dictionary without weights and optimizer states."""
    strategy: Any = trainer.strategy
    before = strategy.__dict__.get("lightning_module_state_dict"), strategy.__dict__.get("optimizer_state")
    strategy.__dict__.update(lightning_module_state_dict=dict, optimizer_state=lambda optimizer: {})
    try:
        rest = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        for name, value in zip(("lightning_module_state_dict", "optimizer_state"), before, strict=True):
            strategy.__dict__.pop(name) if value is None else strategy.__dict__.update({name: value})
    return {**rest, "rng": torch.get_rng_state()}
