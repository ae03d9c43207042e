"""What ``fully_shard`` does to the user's module, and how it is undone: parameters become shards, in the module and in its optimizers.

Knows no trainer and no plan.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_autopar._temporary import patched
from lightning_autopar.memory.fakes.fake_copies import is_compiled
from lightning_autopar.strategies.fsdp.module_copies import STEPS, TRACES, let_copy
from lightning_autopar.strategies.fsdp.same_collectives import groups_of, without_views
from lightning_autopar.strategies.fsdp.whole_parameters import hand_on_attributes, replicate_scalars


def shard(
    module: Any, fqns: Sequence[str], mesh: Any, *, reshard_after_forward: bool, offload: OffloadPolicy | None = None
) -> dict[int, str]:
    """Call ``fully_shard`` on the units, then on the root.

    Args:
        module: a LightningModule.
        fqns: the units' names.
        mesh: a device mesh of the ranks that share the parameters; a further, first dimension is that of replicas (hybrid sharding).
        reshard_after_forward: whether a unit's parameters are freed between forward and backward.
        offload: where parameters, gradients and the optimizer's state lie between uses; None: on the device.

    Returns:
        Ids and names of the parameters before sharding, for :func:`onto_shards`.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    _let_go(module)
    attributes = {name: vars(parameter) for name, parameter in module.named_parameters()}
    shards = _shards(module)
    scalars = {parameter for parameter in module.parameters() if not parameter.ndim}
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload or OffloadPolicy(), "ignored_params": scalars | shards}
    units = [module.get_submodule(fqn) for fqn in fqns]
    # Of the views that a unit hands on as they came, which nobody can change in place: torch says so by an exception.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    with patched(_fsdp_param_group, "_named_parameters_with_duplicates", _with_duplicates):
        for unit in units:
            unit.register_forward_hook(without_views, with_kwargs=True)
            fully_shard(unit, **options, reshard_after_forward=reshard_after_forward)
        if not module.automatic_optimization or isinstance(module, FSDPModule):
            # Each backward of a manual step frees the root's parameters, so a module that a step calls more than once must be a unit. The
            # root takes those that share a parameter, which no two units can have.
            children = [child for child in _callable_children(module) if not shards.issuperset(child.parameters())]
            holders = Counter(parameter for child in children for parameter in child.parameters())
            for child in (each for each in children if all(holders[parameter] == 1 for parameter in each.parameters())):
                child.register_forward_hook(without_views, with_kwargs=True)
                fully_shard(child, **options, reshard_after_forward=reshard_after_forward)
        if not isinstance(module, FSDPModule):
            fully_shard(module, **options)
    replicate_scalars(module, mesh)
    for name, parameter in module.named_parameters():
        hand_on_attributes(attributes[name], parameter)
    let_copy(module)
    if not any(map(is_compiled, module.modules())):  # torch reads the mark where it compiles, and nowhere else
        for child in module.modules():
            # By this mark transformers (5.23, ``is_fsdp_managed_module``) runs a layer that layerdrop skips all the same, as ranks might
            # draw apart. Ours draw alike, and that layer would draw what one device doesn't.
            if type(child).__module__.startswith("transformers."):
                child._is_fsdp_managed_module = False
    for name in STEPS:
        signature = inspect.signature(getattr(module, name))
        register_fsdp_forward_method(module, name)
        # functools.wraps on a bound method makes inspect take the first argument for self (torch 2.13).
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        getattr(module, name).__func__.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return names


def shard_rest(module: Any, mesh: Any, *, reshard_after_forward: bool) -> dict[int, str]:
    """:func:`shard` what the user's ``configure_model`` has left whole, of a module of which it has sharded a part: nobody would take the
    means of its gradients over the ranks.

    Raises:
        ValueError: if a parameter can't be sharded any more.
    """

    def left() -> list[str]:
        return [name for name, each in module.named_parameters() if each.requires_grad and not isinstance(each, DTensor)]

    if not left():
        return {}
    # Optimizers update lists of shards, and all must be on one mesh.
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    mesh = next((each for each in meshes if each.size() == mesh.size()), mesh)
    names = shard(module, (), mesh, reshard_after_forward=reshard_after_forward)
    if whole_ones := left():
        raise ValueError(
            f"configure_model has sharded a module around {whole_ones[0]!r} without it, so that its gradients would differ from rank to "
            "rank; put it into the module before fully_shard, or leave the sharding to the strategy"
        )
    return names


def _shards(module: nn.Module) -> set[Any]:
    """The parameters that are FSDP2's already."""
    groups = chain.from_iterable(groups_of(unit) for unit in module.modules() if isinstance(unit, FSDPModule))
    return {parameter.sharded_param for group in groups for parameter in group.fsdp_params}


def onto_shards(optimizers: Iterable[Optimizer], module: nn.Module, names: Mapping[int, str]) -> None:
    """In optimizers that were made before sharding, replace the module's parameters by its shards.

    Args:
        optimizers: of the module; those that have shards already stay as they are.
        names: what :func:`shard` returned.
    """
    shards = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, before in enumerate(group["params"]):
                now: Any = shards.get(names.get(id(before), ""))
                if isinstance(before, DTensor) or now is None:
                    continue
                group["params"][index] = now
                for name, value in (state := optimizer.state.pop(before, {})).items():
                    if isinstance(value, Tensor) and value.shape == before.shape:
                        state[name] = distribute_tensor(value, now.device_mesh, now.placements)
                if state:
                    optimizer.state[now] = state


def _with_duplicates(module: nn.Module, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters, also where its own ``named_parameters`` doesn't take ``remove_duplicate``: torch 2.13 expects another
    exception there.
    """
    return nn.Module.named_parameters(module, remove_duplicate=False, **options)


def _let_go(module: nn.Module) -> None:
    """Put other parameter objects over the same storages into the module.

    ``fully_shard`` moves the objects that it finds to the mesh's device and frees them by dropping its references (torch 2.13,
    ``_fsdp_init.py``, ``_move_states_to_device``). Any other reference to one of them would keep the whole parameter on the device, and the
    survey of the module before the run has one.
    """
    fresh: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if type(parameter) is not nn.Parameter:
                continue
            if id(parameter) not in fresh:
                fresh[id(parameter)] = nn.Parameter(parameter.data.contiguous(), requires_grad=parameter.requires_grad)
                fresh[id(parameter)].__dict__.update(parameter.__dict__)
            child._parameters[name] = fresh[id(parameter)]


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that hold parameters and aren't sharded yet."""
    for child in module.children():
        if isinstance(child, FSDPModule) or next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        else:
            yield child


def unshard(module: nn.Module) -> None:
    """Undo :func:`shard`, or the user's ``fully_shard``: plain parameters on the CPU in a module of its own class; a collective.

    PyTorch has no such function (2.13): the class, the hooks and the registered state are what ``fully_shard`` adds.
    """
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        return
    whole: dict[int, nn.Parameter] = {}
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    whole[id(parameter)] = nn.Parameter(parameter.detach().full_tensor().cpu(), requires_grad=parameter.requires_grad)
                    hand_on_attributes(vars(parameter), whole[id(parameter)])
                setattr(child, name, whole[id(parameter)])
    own_classes(module)


def own_classes(module: nn.Module) -> None:
    """Make units plain modules again, which have shards still: of classes that can be pickled, without FSDP2's hooks."""
    for child in list(module.modules()):
        if isinstance(child, FSDPModule):
            for key in [key for key, hook in child._forward_hooks.items() if hook is without_views]:
                del child._forward_hooks[key]
            state: Any = child._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            for group in groups_of(child):
                for handles in (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle):
                    for handle in handles.values():
                        handle.remove()
                    handles.clear()
                for parameter in group.fsdp_params:
                    parameter._post_load_hook_handle.remove()
            _module_state_mapping.pop(child, None)
            child.__class__ = type(child).__bases__[1]
        for name in [name for name in vars(child) if name.startswith(TRACES)]:
            del child.__dict__[name]
    for name in STEPS:
        module.__dict__.pop(name, None)
