"""FSDP2's whole parameters: when there are any, and how their shards take over what is written to them. Knows modules; no plan, no trainer.

Parameters are whole in the user's steps and in calls from hooks. Everywhere else they are shards. FSDP2 gathers a unit's parameters for its
``forward`` and may leave them whole after it. After the optimizer has stepped on the shards, a parameter that was left whole is stale:
hence this rule.

FSDP2 gathers a parameter into a buffer of its own and frees it again: what a step has written there (an average of another network's
weights, weights of norm one) would be lost silently. Each rank holds the same whole parameter and has written the same, so that each takes
its own part of it without communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_autopar._temporary import patched
from lightning_autopar.exact.step.step_rollback import GRAD, own_gradient
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks
from lightning_autopar.strategies.fsdp import module_copies
from lightning_autopar.strategies.fsdp.module_copies import OwnHook
from lightning_autopar.strategies.fsdp.same_collectives import GatherOrder, agree_on_gradients, groups_of
from lightning_autopar.strategies.fsdp.whole_results import allow_mixed, forget_views, mixed_refused, part_of


class WholeParameters:
    """Gathers the root's own parameters for calls from outside of a step, and reshards all when none should be whole. A hook makes calls
    from outside: ``self(batch)`` or ``self.decoder(latent)`` in ``on_train_epoch_end``, say, or Hugging Face's ``generate``. Units gather
    their own parameters; the root's other parameters are gathered when any module outside of the units is called.

    Args:
        optimizers: those that will step on its parameters.
        uneven: FQNs of the modules within units that not every rank's samples call (routed experts).
    """

    def __init__(self, root: nn.Module, optimizers: Iterable[Optimizer] = (), uneven: Iterable[str] = ()) -> None:
        self._root = root
        units: dict[str, Any] = {name: module for name, module in root.named_modules() if isinstance(module, FSDPModule)}
        self._units = list(units.values())
        self._scalars = _Scalars(root)
        self._groups = [group for unit in self._units for group in groups_of(unit)]
        self._inside = False
        self._orders = defaultdict[str, GatherOrder](partial(GatherOrder, [name for name in units if name]))
        #: The order of the step that runs; None outside of a step's forward.
        self._order: GatherOrder | None = None
        self._visits = 0
        _keep_writes(self._units)
        self._on_gpus = [group for unit in self._units for group in groups_of(unit) if group.device.type == "cuda"]
        within = {id(child) for name, module in root.named_modules() if name in set(uneven) for child in module.modules()}
        agree_on_gradients([*self._groups, self._scalars], within)
        allow_mixed()
        self._update = ExitStack()
        self._handles: list[Any] = [
            handle
            for optimizer in optimizers
            for handle in (optimizer.register_step_pre_hook(self._begin_update), optimizer.register_step_post_hook(self._end_update))
        ]
        if isinstance(root, FSDPModule):
            # FSDP2 takes the module that runs first for the root, unless told before; and a hook may call a part of the root first.
            root._get_fsdp_state()._lazy_init()
            for unit in self._units if self._scalars.fsdp_params else ():
                state = unit._get_fsdp_state()
                state._root_post_backward_final_callback = partial(_after_backward, state, self._scalars)
            self._handles.append(root.register_state_dict_pre_hook(lambda *_: self._scalars.reshard()))  # type: ignore[no-untyped-call]
            self._handles += [
                unit.register_forward_pre_hook(partial(self._meet, name), prepend=True) for name, unit in units.items() if name
            ]
            for module in (root, *_outside_units(root)):
                self._handles += [
                    module.register_forward_pre_hook(OwnHook(module, self._enter, module_copies.enter), prepend=True),
                    module.register_forward_hook(OwnHook(module, self._leave, module_copies.leave), always_call=True),
                ]

    @contextmanager
    def inside(self, step: str | None) -> Iterator[None]:
        """The context of a step by its name, or of a backward pass, where FSDP2 itself knows when to gather."""
        order = None if step is None else self._orders[step]
        if order is not None:
            for group in self._on_gpus:
                # Gathers wait for earlier writes to shards by themselves.
                group._versions = [_version(parameter.sharded_param) for parameter in group.fsdp_params]
            order.begin()
        self._scalars.unshard()
        with (
            patched(self, "_inside", True),
            patched(self, "_order", order),
            patched(module_copies, "in_step", True),
            mixed_refused(),
        ):
            yield
        if order is not None:
            order.end()

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        """The optimizer's shards are its own, whoever calls it."""
        self._update.close()  # where the last one failed (memory ran out), it never came to its end
        self.reshard()
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                raise ValueError(
                    f"the optimizer {type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)} that isn't in the "
                    "module, so that FSDP2 takes no means of its gradients over the ranks. Put it there (in __init__ or "
                    "configure_model), or run with allow=['single']"
                )
        self._update.enter_context(mixed_refused())

    def _end_update(self, *_: Any) -> None:
        self._update.close()

    def _meet(self, name: str, unit: Any, args: Any) -> None:
        """Before a unit's forward: if it is to gather parameters in a step, all ranks must be about to."""
        if self._order is not None and any(group.is_sharded for group in groups_of(unit)):
            self._order.gathers(name)

    def knows(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter was there from the beginning; some are whole where others are shards."""
        return isinstance(parameter, (DTensor, _Gathered))

    def reshard(self) -> None:
        """Put all parameters back into shards; no communication."""
        forget_views()
        for unit in self._units:
            unit.reshard()
        self._scalars.reshard()

    def give_up(self) -> None:
        """Put all parameters back into shards wherever a step has failed, also within a gather; this process runs no step any more."""
        self._scalars.reshard()
        for unit in self._units:
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter.sharded_param)
                    parameter.sharded_state = type(parameter.sharded_state).SHARDED
                    parameter.free_unsharded_param()
                group._sharded_state = type(group._sharded_state).SHARDED

    def close(self) -> None:
        """Remove the hooks."""
        module_copies.become_plain()
        self._scalars.reshard()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        root: Any = self._root
        if self._inside:
            if module is not root and any(group.is_sharded for group in groups_of(root)):
                root.unshard()  # the step has called for a state dict, which has shards
                self._scalars.unshard()
            return
        self._visits += 1
        if self._visits == 1:
            wait_for_all_ranks(f"{type(module).__name__} was called outside of a step")
            root.unshard()
            self._scalars.unshard()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside or not self._visits:
            return
        self._visits -= 1
        differentiable = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if not self._visits and not differentiable:  # a backward pass may follow, and needs them
            self.reshard()


def _outside_units(root: nn.Module) -> Iterator[nn.Module]:
    """The modules under the root whose calls need the root's parameters: the outermost ones, and those that hold such parameters."""

    def walk(module: nn.Module, outermost: bool) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, FSDPModule) or next(child.parameters(), None) is None:
                continue
            container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if (outermost and not container) or next(child.parameters(recurse=False), None) is not None:
                yield child
            yield from walk(child, outermost and container)

    yield from dict.fromkeys(walk(root, True))


# -- what is written to them -----------------------------------------------------------------------------------------------------------


def hand_on_attributes(theirs: Mapping[str, Any], parameter: Tensor) -> None:
    """Give a parameter the user's attributes (``parameter.no_decay = True``) of the one whose place it takes, and no others."""
    own = vars(parameter)
    if _NOT_THE_USERS.issuperset((*own, *theirs)):
        return
    for name in own.keys() - _NOT_THE_USERS - theirs.keys():
        del own[name]
    own.update((name, value) for name, value in theirs.items() if name not in _NOT_THE_USERS)


class _Gathered(nn.Parameter):
    """A gathered parameter that notices access to its ``data``: writes there don't change the version counter. Its gradient, outside of
    backward passes, is its shard's, in whole: ``zero_grad()`` in a step, or a hook that looks at gradients before the next backward pass.
    """

    @property
    def grad(self) -> Tensor | None:
        own = own_gradient(self)
        if own is not None or (shard := self._shard()) is None or shard.grad is None:
            return own
        self.take_over_gradient()
        whole: Tensor = shard.grad.full_tensor()  # type: ignore[attr-defined]  # a DTensor
        self.__dict__["_shown"] = whole, _version(whole)
        return whole

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (shard := self._shard()) is not None:
            if value is not None:
                raise RuntimeError(
                    "the step sets a parameter's gradient by itself (parameter.grad = ...), which FSDP2 holds in shards; let backward() "
                    "make it, or run with allow=['single']"
                )
            shard.grad = None
        GRAD.__set__(self, value)

    def take_over_gradient(self) -> None:
        """If the gradient was shown in whole and written to, copy the rank's part into the shard's."""
        whole, version = self.__dict__.pop("_shown", (None, 0))
        shard = self.__dict__["_of"].sharded_param
        if whole is not None and _version(whole) != version and shard.grad is not None:
            shard.grad._local_tensor.copy_(part_of(whole, shard))

    def _shard(self) -> Tensor | None:
        """None within a backward pass, where FSDP2 itself reads and sets gradients, and for a copy of a gathered parameter."""
        of = self.__dict__.get("_of")
        return None if of is None or torch._C._current_graph_task_id() != -1 else of.sharded_param

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_DATA.__get__(self), self.requires_grad).__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        self.__dict__["_taken"] = True
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["_taken"] = True
        _DATA.__set__(self, value)


# -- scalars ---------------------------------------------------------------------------------------------------------------------------


def replicate_scalars(module: nn.Module, mesh: Any) -> None:
    """Put the module's scalars, which have no dimension along which FSDP2 could cut them, onto the mesh: each rank has them whole.

    Args:
        mesh: where its other parameters are sharded.
    """
    replicated: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and not parameter.ndim:
                if id(parameter) not in replicated:
                    values = _on(mesh, parameter.detach())
                    replicated[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    hand_on_attributes(vars(parameter), replicated[id(parameter)])
                child._parameters[name] = replicated[id(parameter)]


def _on(mesh: Any, whole: Tensor) -> DTensor:
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Scalar:
    """A scalar that each rank has, by the names of FSDP2's own class for shards."""

    unsharded_accumulated_grad = None

    def __init__(self, sharded: Any, module: nn.Module) -> None:
        self.sharded_param = sharded
        self.holders: list[tuple[nn.Module, str]] = []
        self._module_info = SimpleNamespace(module=module)
        self.unsharded_param = self._unsharded_param = nn.Parameter(sharded.to_local().detach(), requires_grad=sharded.requires_grad)
        self.unsharded_param.__class__ = _Gathered
        self.unsharded_param.__dict__.update(_of=self)

    def is_whole(self) -> bool:
        """Whether the module has it whole now."""
        return any(module._parameters[name] is not self.sharded_param for module, name in self.holders)

    def reshard(self) -> None:
        """Put it back onto the mesh, with the step's writes to it."""
        whole, local = self.unsharded_param, self.sharded_param.to_local()
        whole.take_over_gradient()  # type: ignore[attr-defined]  # a _Gathered
        hand_on_attributes(vars(whole), self.sharded_param)
        if whole.data_ptr() != local.data_ptr():
            local.detach().copy_(whole.detach())
            _DATA.__set__(whole, local.detach())


class _Scalars:
    """A module's scalars, by the names of FSDP2's own class for groups of parameters. They are whole where others are, and share their
    memory with what they are otherwise.
    """

    reduce_grads = True

    def __init__(self, root: nn.Module) -> None:
        found: dict[int, _Scalar] = {}
        for child in root.modules():
            for name, parameter in child._parameters.items():
                if isinstance(parameter, DTensor) and not parameter.ndim:
                    scalar = found.setdefault(id(parameter), _Scalar(parameter, child))
                    scalar.holders.append((child, name))
        self.fsdp_params = list(found.values())
        if self.fsdp_params:
            self._mesh: Any = self.fsdp_params[0].sharded_param.device_mesh
            self.device = self.fsdp_params[0].unsharded_param.device
            self._is_hsdp = self._mesh.ndim > 1
            self._all_reduce_process_group, self._reduce_scatter_process_group = self._mesh.get_group(0), self._mesh.get_group(-1)

    def unshard(self) -> None:
        """Let the module have whole scalars."""
        for scalar in self.fsdp_params:
            if not scalar.is_whole():
                _DATA.__set__(scalar.unsharded_param, scalar.sharded_param.to_local().detach())  # a hook may have exchanged its data
            scalar.unsharded_param.requires_grad_(scalar.sharded_param.requires_grad)
            hand_on_attributes(vars(scalar.sharded_param), scalar.unsharded_param)
            for module, name in scalar.holders:
                module._parameters[name] = scalar.unsharded_param

    def reshard(self) -> None:
        """Let it have them on the mesh, as the optimizer has."""
        for scalar in filter(_Scalar.is_whole, self.fsdp_params):
            for module, name in scalar.holders:
                _refuse_other(module, name, scalar.unsharded_param)
                module._parameters[name] = scalar.sharded_param
            scalar.reshard()

    def post_backward(self) -> None:
        """Give them the means of all ranks' gradients."""
        if not (trained := [scalar for scalar in self.fsdp_params if own_gradient(scalar.unsharded_param) is not None]):
            return
        means = torch.stack([own_gradient(scalar.unsharded_param).double() for scalar in trained])  # type: ignore[union-attr]
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(means, group=self._mesh.get_group(dimension))
        for scalar, mean in zip(trained, means / self._mesh.size(), strict=True):
            shard, whole = scalar.sharded_param, scalar.unsharded_param
            gradient = _on(self._mesh, mean.to(whole.dtype))
            shard.grad = gradient if shard.grad is None else shard.grad + gradient
            GRAD.__set__(whole, None)


def _after_backward(state: Any, scalars: _Scalars) -> None:
    """What FSDP2 does after the backward pass, and then the same for scalars."""
    type(state)._root_post_backward_final_callback(state)
    scalars.post_backward()


def _refuse_other(module: nn.Module, name: str, whole: nn.Parameter) -> None:
    """Raise where the step has put another parameter in the place of a whole one."""
    if module._parameters.get(name) is not whole and not isinstance(module._parameters.get(name), DTensor):
        raise RuntimeError(
            f"the step has replaced the parameter {name!r} of {type(module).__name__}, which FSDP2 holds in shards, by another one; "
            "write to the parameter instead (with torch.no_grad(): parameter.copy_(...)), or run with allow=['single', 'ddp']"
        )


# -- what is written to them -----------------------------------------------------------------------------------------------------------


_DATA: Any = torch._C.TensorBase.__dict__["data"]
#: Attributes that are no user's: those of a gathered parameter, what makes a DTensor a parameter, and FSDP2's number of one (torch 2.13).
_NOT_THE_USERS = frozenset(("_of", "_taken", "_shown", "_is_param", "_fsdp_orig_uid"))
#: What FSDP2 knows of each shard that is a parameter of its.
_OWNERS: Any = WeakIdKeyDictionary()


def _keep_writes(units: Iterable[FSDPModule]) -> None:
    """From now on, the units' shards take over what is written to their gathered parameters.

    Args:
        units: sharded modules, the root among them.
    """
    DTensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]
    groups = [group for unit in units for group in groups_of(unit)]
    for group in groups:
        if "unshard" in vars(group):
            continue
        group.unshard = partial(_unshard, group, group.unshard) if group.device.type == "cuda" else group.unshard
        for parameter in group.fsdp_params:
            _OWNERS[parameter.sharded_param] = parameter
            parameter.to_unsharded = partial(_to_unsharded, parameter, parameter.to_unsharded)
            for name in ("to_sharded", "to_sharded_post_forward"):
                setattr(parameter, name, partial(_to_sharded, groups, group, parameter, getattr(parameter, name)))


def _set_data(shard: DTensor, value: Tensor) -> None:
    """``shard.data = value``: torch 2.13 silently leaves the local tensor, with all the values, as it was.

    The shard gets other memory, as a whole tensor would: who has taken its ``data`` before (``backup = p.data; p.data = average``) keeps
    the earlier values.
    """
    if (shard.shape, shard.dtype, shard.device) != (value.shape, value.dtype, value.device):
        _DATA.__set__(shard, value)
        return
    if isinstance(value, DTensor):
        part = value.redistribute(shard.device_mesh, shard.placements)._local_tensor.detach()
    else:  # whole, and the same on each rank
        part = part_of(value.detach(), shard).clone()
    owner = _OWNERS.get(shard)
    if owner is not None and getattr(owner._module_info.module, owner._module_info.param_name) is not shard:
        with torch.no_grad():
            shard._local_tensor.copy_(part)  # gathered: FSDP2 takes other memory of what the module has, and of nothing else
        return
    shard._local_tensor = part.contiguous()
    if owner is not None:
        owner.reset_sharded_param()


def _unshard(group: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    """Gather, after this step's writes to the shards: on a GPU gathers run on another stream."""
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    frozen = not any(shard.requires_grad for shard in shards)
    versions = [_version(shard) for shard in shards]
    if frozen or versions != vars(group).get("_versions", versions):
        _order(group)
    original(*args, **kwargs)


def _to_unsharded(parameter: Any, original: Any) -> None:
    original()
    whole = parameter._unsharded_param
    if type(whole) is nn.Parameter:
        whole.__class__ = _Gathered
        whole.__dict__["_of"] = parameter
    hand_on_attributes(vars(parameter.sharded_param), whole)
    whole.__dict__["_taken"] = False
    parameter._gathered_version = _version(whole)


def _to_sharded(groups: list[Any], group: Any, parameter: Any, original: Any) -> None:
    """If the whole parameter may have been written to, copy the rank's part into the shard; then free the whole one."""
    whole = parameter._unsharded_param
    if isinstance(whole, _Gathered):
        whole.take_over_gradient()
    info = parameter._module_info
    for module, name in ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)):
        _refuse_other(module, name, whole)
    if whole.__dict__.get("_taken", False) or _version(whole) != parameter._gathered_version:
        _take_part(groups, parameter, whole)
        _order(group)
    hand_on_attributes(vars(whole), parameter.sharded_param)
    original()


def _take_part(groups: list[Any], parameter: Any, whole: Tensor) -> None:
    """Copy this rank's part; if the parameter's ``data`` was exchanged, put it back to where it was gathered."""
    local = whole._local_tensor if isinstance(whole, DTensor) else whole.detach()
    gathered = parameter.all_gather_outputs[0] if len(parameter.all_gather_outputs) == 1 else None
    elsewhere = gathered is not None and local.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr()
    if elsewhere and (not local.untyped_storage().size() or local.untyped_storage().data_ptr() in _storages(groups)):
        raise RuntimeError(
            f"the step has made the parameter {parameter._module_info.param_name!r} share another one's memory (by its .data), "
            "but FSDP2 shards each by itself; copy the values instead (with torch.no_grad(): parameter.copy_(other)), or run with "
            "allow=['single', 'ddp']"
        )
    with torch.no_grad():
        parameter.sharded_param._local_tensor.copy_(part_of(local, parameter.sharded_param))
    if elsewhere:
        assert gathered is not None
        _DATA.__set__(whole, gathered.as_strided(parameter._orig_size, parameter._contiguous_orig_stride, 0))


def _storages(groups: Iterable[Any]) -> Iterator[int]:
    """The storages into which parameters are gathered."""
    for group in groups:
        for parameter in group.fsdp_params:
            yield from (output.untyped_storage().data_ptr() for output in parameter.all_gather_outputs if output.untyped_storage().size())


def _order(group: Any) -> None:
    """Let the next gather wait for the current stream, as FSDP2 does after a reshard whose memory the gather reads."""
    event = group.device_handle.Event()
    event.record()
    group._reshard_after_forward_event = event


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
