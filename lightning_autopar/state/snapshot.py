"""A snapshot: the training state at a step boundary, saved under one plan, loaded under any other.

It is a folder. torch.distributed.checkpoint writes weights and optimizer states, keyed by fully-qualified names, so that each rank writes
and reads its own part (its shards, its range of elements, or what its stages use); what several ranks have alike is written once. Beside
them lies Lightning's checkpoint dictionary without weights and optimizer states. Knows tensors, files and the trainer, no plan.

Tensors lie in files as in memory, so that a rank writes them directly and reads them in place: torch's own file format (``torch.save`` for
each tensor) costs one more copy when reading. Files of snapshots that nobody needs any more are written over, as the kernel would take
longer to find and clear new pages than the copy itself takes.
"""

from __future__ import annotations

import io
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.state import gpu_pickles
from lightning_autopar.state.checkpoint import without_shards
from lightning_autopar.state.flat_parts import FlatPart, Fragment
from lightning_autopar.state.objects.contents import raw_bytes
from lightning_autopar.state.snapshot_folder import REST, SPARE

_TENSORS = "tensors"
#: The key, in Lightning's dictionary, of the optimizers' values that aren't tensors.
_OPTIMIZERS = "lightning_autopar_optimizers"
#: The key of gradients by FQN, in the dictionary of :func:`load_snapshot`: the code that loads it sets them after Lightning has cleared all
#: gradients (``Trainer._run_stage``).
GRADIENTS = "lightning_autopar_gradients"
#: The prefix of the names of gradients, which manual optimization may keep from one batch to the next.
_GRADIENT = "gradient"
#: Separates the parts of a tensor's name; no FQN contains it.
_SEPARATOR = "|"


def save_snapshot(trainer: Trainer, path: str | Path) -> None:
    """Write the trainer's whole state; every rank must call it, between two steps.

    Args:
        path: a folder that doesn't exist yet, on a file system that all ranks share.
    """
    strategy: Any = trainer.strategy
    folder = Path(strategy.broadcast(str(path)))
    module, optimizers = strategy.lightning_module, [bare_optimizer(optimizer) for optimizer in strategy.optimizers]
    tensors = _weights(strategy)
    rest = _rest(trainer)
    rest[_OPTIMIZERS] = []
    parts = _optimizer_parts(strategy)
    if not module.automatic_optimization and not parts:
        tensors |= {f"{_GRADIENT}{_SEPARATOR}{name}": gradient for name, gradient in _gradients(module).items()}
    for index, optimizer in enumerate(optimizers):
        own, others = _optimizer_state(index, optimizer, _names(module, optimizer, parts), parts)
        tensors |= own
        rest[_OPTIMIZERS].append(others)
    if getattr(strategy, "holders", 1) > 1 or parts:
        _join_values(rest[_OPTIMIZERS])
    with _alone():
        dcp.save(tensors, storage_writer=PlainWriter(folder / _TENSORS, folder.parent / SPARE), no_dist=not dist.is_initialized())
    problem: Exception | None = None
    if strategy.is_global_zero:
        partial = folder / f"{REST}.part"
        try:
            partial.write_bytes(gpu_pickles.dumps(rest))
            partial.replace(folder / REST)  # the snapshot is complete once this file exists
        except Exception as error:  # a full disk, or a value that can't be pickled: the others mustn't wait for ever
            problem = error
    strategy.barrier("snapshot")
    if problem is not None:
        raise problem


def load_snapshot(strategy: Any, path: str | Path) -> dict[str, Any]:
    """Load weights and optimizer states into a strategy that is set up, written under any plan; return Lightning's dictionary.

    Args:
        strategy: with module and optimizers as they will be trained.
        path: a folder of :func:`save_snapshot`.

    Raises:
        ValueError: if the snapshot has another number of optimizers than the run.
    """
    folder = Path(str(path))
    module, optimizers = strategy.lightning_module, [bare_optimizer(optimizer) for optimizer in strategy.optimizers]
    rest: dict[str, Any] = gpu_pickles.loads((folder / REST).read_bytes(), strategy.root_device)
    saved = rest.pop(_OPTIMIZERS)
    if optimizers and len(saved) != len(optimizers):
        raise ValueError(
            f"the snapshot {folder} holds the states of {len(saved)} optimizers, but the module now configures {len(optimizers)}"
        )
    weights, parts = _weights(strategy), _optimizer_parts(strategy)
    reader = PlainReader(str(folder / _TENSORS))
    kinds = reader.read_metadata().state_dict_metadata
    names = [_names(module, optimizer, parts) for optimizer in optimizers]
    states = [_empty_state(index, optimizer, names[index], kinds, parts) for index, optimizer in enumerate(optimizers)]
    tensors = dict(weights)
    for state in states:
        tensors |= state
    gradients = _empty_gradients(module, kinds) if not parts else {}
    tensors |= gradients
    with _alone():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    loaded = {name.partition(_SEPARATOR)[2]: tensors[name] for name in weights if not isinstance(tensors[name], Fragment)}
    with strategy.handling_parts() if hasattr(strategy, "handling_parts") else nullcontext():
        module.load_state_dict({**module.state_dict(), **loaded})
    if hasattr(strategy, "parts_loaded"):
        strategy.parts_loaded()
    rest["state_dict"] = _state_dict(strategy)
    rest[GRADIENTS] = {name.partition(_SEPARATOR)[2]: tensors[name] for name in gradients}
    for index, optimizer in enumerate(optimizers):  # none in a run that evaluates
        _load_optimizer(optimizer, names[index], {name: tensors[name] for name in states[index]}, saved[index], parts)
    return rest


@contextmanager
def _alone() -> Iterator[None]:
    """While open, torch doesn't warn of a single process, of ranks that have different names, and of read-only files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected mismatched keys")
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


def _state_dict(strategy: Any) -> dict[str, Any]:
    """This rank's part of the module's state dict: all of it, except that it has only a part of a partitioned parameter."""
    module, parts = strategy.lightning_module, _weight_parts(strategy)
    if not parts:
        return dict(module.state_dict())
    with strategy.handling_parts():
        state = module.state_dict(keep_vars=True)
    return {
        name: part.of(part.flat) if (part := parts.get(id(value))) is not None else (value.detach() if isinstance(value, Tensor) else value)
        for name, value in state.items()
    }


def _weights(strategy: Any) -> dict[str, Any]:
    """This rank's part of the state dict; a module's own extra state only where its tensors are here."""
    state = _state_dict(strategy)
    elsewhere = {name.rpartition(".")[0] for name, value in state.items() if is_absent(value)}
    return {
        f"model{_SEPARATOR}{name}": value
        for name, value in state.items()
        if (not is_absent(value) if isinstance(value, Tensor) else name.rpartition(".")[0] not in elsewhere)
    }


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """The existing gradients, by the FQN of their parameter."""
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None and not is_absent(each)}


def _empty_gradients(module: nn.Module, kinds: dict[str, Any]) -> dict[str, Any]:
    """Room for the gradients that were saved, of the parameters that are here."""
    here = {f"{_GRADIENT}{_SEPARATOR}{name}": each for name, each in module.named_parameters() if not is_absent(each)}
    return {name: torch.zeros_like(here[name], requires_grad=False) for name in kinds if name in here}


def _weight_parts(strategy: Any) -> dict[int, FlatPart]:
    """This rank's part of each parameter that is partitioned by elements, by id."""
    parts: dict[int, FlatPart] = strategy.weight_parts() if hasattr(strategy, "weight_parts") else {}
    return parts


def _optimizer_parts(strategy: Any) -> dict[int, FlatPart]:
    """The same for the parameters that the optimizers have."""
    parts: dict[int, FlatPart] = strategy.optimizer_parts() if hasattr(strategy, "optimizer_parts") else {}
    return parts


def _names(module: nn.Module, optimizer: Optimizer, parts: Mapping[int, FlatPart]) -> list[str]:
    """The FQN of each of an optimizer's parameters, in its order; for one that isn't the module's, its position."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    its = [parts[id(each)].parameter if id(each) in parts else each for each in _parameters(optimizer)]
    return [known.get(id(parameter), f"#{position}") for position, parameter in enumerate(its)]


def _is_here(parameter: Tensor, parts: Mapping[int, FlatPart]) -> bool:
    """Whether this rank has anything of a parameter."""
    part = parts.get(id(parameter))
    return not is_absent(parameter) if part is None else part.flat.numel() > 0


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters, by position."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _join_values(optimizers: list[dict[str, Any]]) -> None:
    """Give each rank the other values of all ranks, where the first rank's value counts; a collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    # On the CPU: torch would unpickle a tensor on the GPU of the rank that sent it. Whoever loads it moves it to its parameter's device.
    own = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), [others["values"] for others in optimizers])
    dist.all_gather_object(everyones, own)
    for values in everyones:
        for others, its in zip(optimizers, values, strict=True):
            for name, each in its.items():
                others["values"].setdefault(name, each)


def _optimizer_state(
    index: int, optimizer: Optimizer, names: list[str], parts: Mapping[int, FlatPart]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of an optimizer's state by name, and its other values; of the parameters that are here."""
    state = optimizer.state_dict()
    parameters = _parameters(optimizer)
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {"param_groups": state["param_groups"], "names": names, "values": {}}
    for position, values in state["state"].items():
        if not _is_here(parameters[position], parts):
            continue  # some optimizers make a state for each parameter at once
        part = parts.get(id(parameters[position]))
        for key, value in values.items():
            if isinstance(value, Tensor):
                whole = part.of(value) if part is not None and part.is_like(value) else value
                tensors[_SEPARATOR.join(("optimizer", str(index), names[position], key))] = whole
            else:
                others["values"].setdefault(names[position], {})[key] = value
    return tensors, others


def _empty_state(
    index: int, optimizer: Optimizer, names: list[str], kinds: dict[str, Any], parts: Mapping[int, FlatPart]
) -> dict[str, Any]:
    """Room for the tensors of an optimizer's saved state, sharded like its parameters; of those that are here."""
    parameters = {name: each for name, each in zip(names, _parameters(optimizer), strict=True) if _is_here(each, parts)}
    room: dict[str, Any] = {}
    for name, kind in kinds.items():
        kept, number, parameter, key = (*name.split(_SEPARATOR), "", "", "")[:4]
        if kept != "optimizer" or number != str(index) or parameter not in parameters or not isinstance(kind, TensorStorageMetadata):
            continue
        like, dtype = parameters[parameter], kind.properties.dtype
        part = parts.get(id(like))
        if part is not None and part.has_all_of(key, kind.size):
            room[name] = part.of(torch.zeros_like(part.flat, dtype=dtype))
        else:
            whole = part is None and like.shape == kind.size
            room[name] = torch.empty_like(like, dtype=dtype) if whole else torch.empty(kind.size, dtype=dtype)
    return room


def _load_optimizer(
    optimizer: Optimizer, names: list[str], tensors: dict[str, Any], others: dict[str, Any], parts: Mapping[int, FlatPart]
) -> None:
    """Load the saved state, by the parameters' present positions; a group's options belong to its place among the groups."""
    state: dict[int, dict[str, Any]] = {}
    parameters = _parameters(optimizer)
    positions = {name: position for position, name in enumerate(names) if _is_here(parameters[position], parts)}
    for name, value in tensors.items():
        _, _, parameter, key = name.split(_SEPARATOR)
        state.setdefault(positions[parameter], {})[key] = value.flat if isinstance(value, Fragment) else value
    for parameter, values in others["values"].items():
        if parameter in positions:
            state.setdefault(positions[parameter], {}).update(values)
    optimizer.load_state_dict({"state": state, "param_groups": others["param_groups"]})


def _rest(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint dictionary without weights and optimizer states."""
    strategy: Any = trainer.strategy
    before = strategy.__dict__.get("lightning_module_state_dict"), strategy.__dict__.get("optimizer_state")
    # The user's hooks may look at the weights: each rank's own part of them.
    strategy.__dict__.update(lightning_module_state_dict=lambda: _state_dict(strategy), optimizer_state=lambda optimizer: {})
    try:
        rest: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        for name, value in zip(("lightning_module_state_dict", "optimizer_state"), before, strict=True):
            strategy.__dict__.pop(name) if value is None else strategy.__dict__.update({name: value})
    rest["state_dict"] = {}
    if dist.is_initialized():  # a shard in a callback's or a hook's entry would be rank 0's on every rank that reads it
        rest = without_shards(rest, keep=strategy.is_global_zero)
    strategy.complete_checkpoint(rest)
    return rest


#: A tensor begins at a multiple of this: of every dtype's size, and of a cache line.
_ALIGNED_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Where something lies.

    Args:
        file: its name, in the snapshot's folder.
        dtype: of a tensor that lies there as in memory; None for what ``torch.save`` wrote, or for bytes.
        shape: of such a tensor.
    """

    file: str
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


class PlainWriter(FileSystemWriter):
    """Writes one file a rank.

    Args:
        path: the folder, which needn't exist yet.
        spare: a folder of files to write over; it needn't exist.
    """

    def __init__(self, path: Path, spare: Path) -> None:
        super().__init__(path)
        self._spare = spare

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; when this returns, the file is on the disk, if it isn't in memory."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        size_bytes = sum(_tensor_bytes(item) for item in plan.items)
        with _open(Path(self.path) / name, self._spare, size_bytes) as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor) == (item.type != WriteItemType.BYTE_IO), "a tensor is no bytes"
                place = _write(file, name, data)
                results.append(WriteResult(index=item.index, size_in_bytes=place.size_bytes, storage_data=place))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class PlainReader(FileSystemReader):
    """Reads what :class:`PlainWriter` wrote, each tensor from the file's own pages to its place."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part."""
        mapped: dict[str, mmap.mmap] = {}
        for item in plan.items:
            place: FileRange = self.storage_data[item.storage_index]
            if place.file not in mapped and place.size_bytes:
                mapped[place.file] = _map(Path(self.path) / place.file)
            data = mapped[place.file] if place.size_bytes else b""
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_bytes(data, place)))
                continue
            tensor = _tensor(data, place)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == tensor.shape, f"{item.dest_index} has the shape {tuple(target.shape)}, not {tuple(tensor.shape)}"
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def _open(path: Path, spare: Path, size_bytes: int) -> Iterator[BinaryIO]:
    """Open a file for writing, by this name: the spare one whose size is nearest, or a new one."""

    def distance(file: Path) -> int:
        with suppress(FileNotFoundError):
            return abs(file.stat().st_size - size_bytes)
        return size_bytes

    mode = "wb"
    for file in sorted(spare.iterdir(), key=distance) if spare.is_dir() else []:
        with suppress(FileNotFoundError):  # another rank took it
            file.replace(path)
            mode = "r+b"
            break
    with path.open(mode) as stream:
        yield stream  # type: ignore[misc]  # either mode gives a writer of bytes


def _tensor_bytes(item: Any) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize)


def _write(file: BinaryIO, name: str, data: Tensor | io.BytesIO) -> FileRange:
    """Write the next value; returns its place."""
    offset_bytes = -(-file.tell() // _ALIGNED_BYTES) * _ALIGNED_BYTES
    file.seek(offset_bytes)
    if isinstance(data, io.BytesIO):
        return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=file.write(data.getbuffer()))
    tensor = data.detach()
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        torch.save(tensor.cpu(), file)
        return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=file.tell() - offset_bytes)
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    size_bytes = file.write(raw_bytes(plain))
    return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=size_bytes, dtype=tensor.dtype, shape=tuple(tensor.shape))


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bytes(data: Any, place: FileRange) -> bytes:
    return bytes(data[place.offset_bytes : place.offset_bytes + place.size_bytes])


def _tensor(data: Any, place: FileRange) -> Tensor:
    """The tensor in the file's own pages, which must not be written to."""
    if place.dtype is None:
        loaded: Tensor = torch.load(io.BytesIO(_bytes(data, place)), map_location="cpu", weights_only=True)
        return loaded
    if not place.size_bytes:
        return torch.empty(place.shape, dtype=place.dtype)
    count = place.size_bytes // place.dtype.itemsize
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.offset_bytes).view(place.shape)
