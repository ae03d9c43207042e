"""Lightning's own single-file checkpoint under any plan: rank 0 writes it whole, and each rank reads its own part.

The file is an ordinary ``.ckpt``, which plain Lightning reads without this package. The loaders' positions and random states, for a resume
in the middle of an epoch, lie under a key of their own that plain Lightning ignores. The mixin does what a Lightning strategy does about
files; its subclasses know what a rank's part is and how parts are joined. Knows tensors and files, no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only
from torchmetrics import Metric

from lightning_autopar._lightning import CheckpointIO, Strategy, TorchCheckpointIO
from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.loader import is_loader_state
from lightning_autopar.state import scratch_files as scratch

#: The checkpoint's key for values for which plain Lightning has no place.
KEY = "lightning_autopar"


def set_loader_states_aside(checkpoint: dict[str, Any]) -> None:
    """Move the exact loaders' states from Lightning's place for loader states (``_FitLoop.on_save_checkpoint``) to ours.

    Plain Lightning refuses a checkpoint that holds states for loaders which aren't stateful there (``CombinedLoader._load_state_dicts``).
    """
    loop = _fit_state(checkpoint)
    states = loop.get("combined_loader")
    if states and all(is_loader_state(state) for state in states):
        checkpoint[KEY] = {"loaders": loop.pop("combined_loader")}


def put_loader_states_back(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Put the exact loaders' states where Lightning looks for them; a checkpoint that has none stays as it is."""
    if states:
        _fit_state(checkpoint)["combined_loader"] = states


def _fit_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def read_checkpoint(io: CheckpointIO, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint's dictionary; a local file is mapped rather than read, so that every rank can take its part without holding the whole.

    Args:
        io: the strategy's; anything but Lightning's own is asked to read the file itself.
        weights_only: as for ``Trainer.fit``.
    """
    if type(io) is not TorchCheckpointIO or not Path(str(path)).is_file():
        checkpoint: dict[str, Any] = (
            io.load_checkpoint(path, weights_only=weights_only) if weights_only is not None else io.load_checkpoint(path)
        )
        return checkpoint
    mapped: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return mapped


def whole_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The module's state dict with sharded tensors whole, on the CPU.

    A collective where tensors are sharded: every rank must call it. One tensor at a time is whole on each rank, besides what is kept.

    Args:
        keep: whether this rank wants the result; the others get an empty dict.
    """
    whole: dict[str, Any] = _whole(module.state_dict(), keep)
    return whole


def put_in_one_order(module: nn.Module, optimizers: Iterable[Any], *, ranks: int) -> None:
    """Give the optimizers' groups the same order of parameters on all ranks; a collective.

    Ranks exchange gradients and states in that order. A group that was made from a set goes by addresses, which differ between ranks: there
    each takes the module's order. An optimizer that was there before the run has its order from one process; under a pipeline, each rank's
    module lacks others of its parameters.
    """
    if ranks == 1:
        return
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    groups = [group["params"] for optimizer in optimizers for group in bare_optimizer(optimizer).param_groups]
    own = [[places.get(id(parameter), -1) for parameter in group] for group in groups]
    orders: list[Any] = [None] * ranks
    dist.all_gather_object(orders, own)
    for number, group in enumerate(groups):
        on_ranks = [order[number] for order in orders]
        if any(order != own[number] for order in on_ranks) and -1 not in set().union(*on_ranks):
            group.sort(key=lambda parameter: places[id(parameter)])


def whole_optimizer_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """The optimizer's own state dict (keyed by position in its groups) with sharded tensors whole, on the CPU; a collective as above."""
    whole: dict[str, Any] = _whole(optimizer.state_dict(), keep)
    return whole


def own_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """This rank's part of a module in stages, on the CPU, with sharded tensors whole; a collective of the ranks with the same part.

    Args:
        module: with absent tensors.
    """
    state = module.state_dict()
    elsewhere = {
        name.rpartition(".")[0] for name, value in state.items() if is_absent(value)
    }  # a module's own extra state is kept with its tensors
    own: dict[str, Any] = _whole({name: value for name, value in state.items() if not is_absent(value)}, keep)
    return {name: value for name, value in own.items() if isinstance(value, Tensor) or name.rpartition(".")[0] not in elsewhere}


def own_optimizer_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """The states of the parameters that this rank has, keyed by position among all, as above."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    if "state" not in state:
        return _whole(state, keep)  # type: ignore[no-any-return]
    own = {position: values for position, values in state["state"].items() if not is_absent(parameters[position])}
    whole: dict[str, Any] = _whole({**state, "state": own}, keep)
    return whole


def _whole(tree: Any, keep: bool) -> Any:
    """The tree with each DTensor gathered; a tensor that occurs twice (a tied weight) stays one."""
    seen: dict[tuple[Any, ...], Tensor | None] = {}

    def gather(tensor: Tensor) -> Tensor | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # By the storage itself: every empty shard has the address 0, and all ranks must gather equally often.
        key = (local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, tensor.stride())
        if key not in seen:
            whole = cast(Any, tensor.detach()).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            seen[key] = whole.cpu() if keep else None
        return seen[key]

    whole = tree_map_only(Tensor, gather, tree)
    return whole if keep else {}


def without_shards(checkpoint: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """A checkpoint with whole tensors in the place of the shards that callbacks and hooks have put into it; a collective.

    Raises:
        ValueError: if the ranks have put different shards into it, so that nobody knows which belong together.
    """
    found = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(checkpoint)[0] if isinstance(leaf, DTensor)]
    told = [(name, tuple(shard.shape), str(shard.placements)) for name, shard in found]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, told)
    if any(other != told for other in everyones):
        name = next(each[0] for other in everyones for each in other if not all(each in another for another in everyones))
        raise ValueError(
            f"checkpoint{name} is a shard of FSDP2's that not every rank has put there, and can't be made whole: let on_save_checkpoint "
            "and state_dict do the same on all ranks"
        )
    if not found:
        return checkpoint
    wholes: dict[int, Tensor] = {}
    for _, shard in found:
        if id(shard) not in wholes:
            with torch.no_grad():
                values = gathered(shard)
            wholes[id(shard)] = values.cpu() if keep else torch.empty(0)
    return cast(dict[str, Any], tree_map_only(DTensor, lambda shard: wholes[id(shard)], checkpoint))


def gathered(shard: Tensor, **options: Any) -> Tensor:
    """The whole tensor, where the shard is. One that was copied to the host is gathered on the mesh's devices all the same."""
    there: Any = shard
    mesh: Any = there.device_mesh
    if shard.device.type != mesh.device_type:
        local = there.to_local().to(mesh.device_type)
        there = DTensor.from_local(local, mesh, there.placements, run_check=False, shape=shard.shape, stride=shard.stride())
    whole: Tensor = there.full_tensor(**options)
    return whole.to(shard.device)


def spread_metrics(module: nn.Module, *, first: bool) -> None:
    """Give all ranks rank 0's states of the metrics, which are no buffers, and the values to which these are reset; a collective."""
    for metric in (child for child in module.modules() if isinstance(child, Metric)):
        states = {name: getattr(metric, name) for name in metric._defaults}
        kept: list[Any] = [tree_map_only(Tensor, Tensor.cpu, (states, metric._defaults)) if first else None]
        dist.broadcast_object_list(kept, src=0)
        if not first:
            metric._defaults = kept[0][1]
            for name, state in kept[0][0].items():
                setattr(metric, name, state)


def load_whole_state_dict(module: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a whole state dict into a module, sharded or in stages or neither; each rank takes its part, and reads no more of a mapped file.

    Raises:
        RuntimeError: as ``Module.load_state_dict`` does, on missing or unexpected keys or shapes that differ, where ``strict``.
    """
    current = module.state_dict()

    def part(name: str, value: Any) -> Any:
        there = current.get(name)
        if not isinstance(value, Tensor) or not isinstance(there, Tensor) or value.shape != there.shape:
            return value  # load_state_dict reports it
        return there if is_absent(there) else like(value, there)

    module.load_state_dict({name: part(name, value) for name, value in state_dict.items()}, strict=strict)


def load_whole_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, copies: bool = False) -> None:
    """Load an optimizer's plain state dict into one whose parameters may be sharded, or absent; one of another form, as it is.

    Args:
        copies: whether tensors that are taken as they are, are copied, so that the file needn't stay.
    """
    if not {"state", "param_groups"} <= set(state):  # Lightning's stand-in for none, or a user's own form
        optimizer.load_state_dict(dict(state))
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(parameter: Tensor, value: Tensor) -> Tensor:
        cut = like(value, parameter) if value.shape == parameter.shape else value
        return cut.clone() if copies and cut is value else cut

    parts = {
        position: tree_map_only(Tensor, partial(part, parameters[position]), values) if position in range(len(parameters)) else values
        for position, values in state["state"].items()
        if position not in range(len(parameters)) or not is_absent(parameters[position])
    }
    optimizer.load_state_dict({**state, "state": parts})


def like(whole: Tensor, target: Tensor) -> Tensor:
    """The whole tensor, sharded like ``target`` if that is sharded; without communication, since every rank holds (or maps) the whole."""
    if not isinstance(target, DTensor) or isinstance(whole, DTensor):
        return whole
    if whole.shape != target.shape:
        return whole  # load_state_dict reports it
    # Local parts are cut on the CPU first: the whole tensor never lies on the device. Cutting without a source rank doesn't communicate.
    local = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
    return DTensor.from_local(
        local.to(target.to_local().device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


class OneFile(Strategy):
    """Writes and reads one ordinary ``.ckpt``."""

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _scratch_folder(self) -> str:
        return str(self._module.trainer.default_root_dir)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: restore after each rank has its part of the module, so that none reads more than that."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimizers' plain states to :meth:`load_optimizer_state_dict`."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes one ordinary ``.ckpt``: without a copy of it in memory if Lightning's own plugin would write a local file."""
        if not self.is_global_zero:
            return
        if type(self.checkpoint_io) is TorchCheckpointIO and storage_options is None and "://" not in str(filepath):
            scratch.save_without_copies(checkpoint, Path(str(filepath)))
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Map the file, so that a rank reads only its part; a user's own CheckpointIO is used if there is one."""
        return read_checkpoint(self.checkpoint_io, self.broadcast(checkpoint_path), weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the checkpoint's weights."""
        load_whole_state_dict(self._module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the checkpoint's optimizer states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_whole_optimizer_state(optimizer, state, copies=True)
