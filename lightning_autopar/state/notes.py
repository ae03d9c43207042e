"""Notes of a boundary between two batches, and the snapshot that a process can make of them later, with the tensors that it still has.

Notes are a snapshot without parameters and optimizer states: Lightning's own dictionary, the optimizers' options, and the buffers. They are
small, and are written at every boundary into memory that outlives their writer. Whether the tensors are still those of that boundary the
caller knows. Knows tensors, files and the trainer, no plan and no other process.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.state import snapshot
from lightning_autopar.state.snapshot_files import SPARE, PlainWriter

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NOTES = "notes.pkl"
#: Buffers up to this size are copied at each boundary; larger ones are watched as parameters are.
_SMALL_BYTES = 1024**2


def small_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that notes hold, by name."""
    return {name: each for name, each in module.named_buffers(remove_duplicate=False) if each.nbytes <= _SMALL_BYTES}


def large_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, and the buffers that notes don't hold."""
    return [*module.parameters(), *(each for each in module.buffers() if each.nbytes > _SMALL_BYTES)]


def write_notes(trainer: Trainer, folder: Path, complete: Callable[[dict[str, Any]], None], beside: Mapping[str, Any]) -> None:
    """Write what a snapshot holds besides parameters and optimizer states.

    Args:
        trainer: between two batches.
        folder: where to; it exists, and what lies there of earlier notes is written over.
        complete: adds to Lightning's dictionary what it takes to go on exactly, in this process alone.
        beside: given back by :func:`read_notes`.
    """
    strategy: Any = trainer.strategy
    module = strategy.lightning_module
    # Nobody's hook looks at the weights in here (``survivor``), and to collect them takes longer than all the rest.
    vars(strategy).update(lightning_module_state_dict=dict, optimizer_state=lambda optimizer: {})
    try:
        rest: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        for name in ("lightning_module_state_dict", "optimizer_state"):
            del vars(strategy)[name]
    complete(rest)
    names = [snapshot._names(module, optimizer, {}) for optimizer in map(bare_optimizer, strategy.optimizers)]
    rest[snapshot._OPTIMIZERS] = [
        _options(bare_optimizer(optimizer), its) for optimizer, its in zip(strategy.optimizers, names, strict=True)
    ]
    buffers = {name: buffer.detach().cpu() for name, buffer in small_buffers(module).items()}
    (folder / snapshot._REST).write_bytes(pickle.dumps(rest, pickle.HIGHEST_PROTOCOL))
    (folder / _NOTES).write_bytes(pickle.dumps({**beside, "buffers": buffers}, pickle.HIGHEST_PROTOCOL))


def _options(optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
    """What of an optimizer's state dict is no tensor, as a snapshot holds it."""
    state = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    for position, its in state["state"].items():
        if plain := {key: value for key, value in its.items() if not isinstance(value, Tensor)}:
            values[names[position]] = plain
    return {"param_groups": state["param_groups"], "names": names, "values": values}


def read_notes(folder: Path) -> dict[str, Any]:
    """What was given to :func:`write_notes` besides the trainer."""
    found: dict[str, Any] = pickle.loads((folder / _NOTES).read_bytes())
    return found


def make_snapshot(strategy: Any, notes: Path, target: Path) -> None:
    """Write the snapshot of the boundary of which the notes are; by one process, without a word to others.

    Args:
        strategy: whose parameters and optimizer states are those of that boundary.
        notes: their folder.
        target: a folder that exists and is empty.

    Raises:
        ValueError: if the module's state dict holds what is neither in the notes nor a tensor that :func:`large_tensors` names.
    """
    module = strategy.lightning_module
    buffers: dict[str, Tensor] = read_notes(notes)["buffers"]
    held = {each.untyped_storage()._cdata for each in large_tensors(module)}
    tensors: dict[str, Any] = {}
    for name, value in snapshot._weights(strategy).items():
        key = name.partition(snapshot._SEPARATOR)[2]
        if key in buffers:
            tensors[name] = buffers[key]
        elif isinstance(value, Tensor) and value.untyped_storage()._cdata in held:
            tensors[name] = value.detach().cpu()
        else:
            raise ValueError(f"nobody knows what {key} was at the boundary before")
    for index, optimizer in enumerate(map(bare_optimizer, strategy.optimizers)):
        own, _ = snapshot._optimizer_state(index, optimizer, snapshot._names(module, optimizer, {}), {})
        tensors |= {name: value.detach().cpu() for name, value in own.items()}
    with snapshot._alone():
        dcp.save(tensors, storage_writer=PlainWriter(target / snapshot._TENSORS, target.parent / SPARE), no_dist=True)
    for path in sorted(notes.iterdir(), key=lambda path: path.name == snapshot._REST):  # the snapshot is there once that one is
        shutil.copyfile(path, target / path.name)
