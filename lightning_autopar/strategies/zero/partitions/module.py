"""What DeepSpeed makes of a module (partitioned parameters, hooks, attributes), how to make it plain again, and what a rank holds between
steps.

It reads what DeepSpeed 0.19.8 writes on parameters and modules (``runtime/zero/partition_parameters.py``, ``parameter_offload.py``). On a
CPU device the host's memory and the device's lie in one allocator, and only DeepSpeed's attributes tell them apart. Knows modules and
parts; no plan, no trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopar.state.flat_parts import FlatPart

#: The prefix, and the names, of attributes that DeepSpeed gives modules while they run.
_PREFIX = "ds_"
_OTHERS = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")


def is_partitioned(parameter: Any) -> bool:
    """Whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_tensor")


def is_whole(parameter: Any) -> bool:
    """Whether a parameter is gathered at the moment."""
    return not is_partitioned(parameter) or parameter.ds_status.name == "AVAILABLE"


def part_of(parameter: Any) -> FlatPart:
    """This rank's part of a partitioned parameter, without the padding of the last ranks' parts."""
    size = int(parameter.ds_tensor.ds_numel)
    start = min(size * dist.get_rank(parameter.ds_process_group), int(parameter.ds_numel))
    count = min(size, int(parameter.ds_numel) - start)
    return FlatPart(parameter=parameter, shape=tuple(parameter.ds_shape), flat=parameter.ds_tensor.data.narrow(0, 0, count), start=start)


def parts(module: nn.Module) -> Iterator[FlatPart]:
    """This rank's parts of those parameters that are partitioned."""
    return (part_of(parameter) for parameter in module.parameters() if is_partitioned(parameter))


def make_whole(module: nn.Module) -> None:
    """Give each parameter all of its elements, in memory of its own on the CPU; a collective at stage 3."""
    for parameter in module.parameters():
        its: Any = parameter
        if not is_whole(its):
            its.all_gather()
        # At stages 1 and 2 it is a part of a flat buffer.
        parameter.data = parameter.data.cpu().clone()


def gather_again(module: nn.Module) -> None:
    """The parts have changed: gather again those parameters that are whole at the moment; a collective at stage 3."""
    whole: list[Any] = [parameter for parameter in module.parameters() if is_partitioned(parameter) and is_whole(parameter)]
    if whole:
        whole[0].partition(whole)
        whole[0].all_gather(whole)


def running_modules() -> list[nn.Module]:
    """The modules whose forward is running under DeepSpeed, the innermost last; before them the roots of this process, permanently."""
    from deepspeed.runtime.zero import parameter_offload

    stack: list[nn.Module] = parameter_offload.FWD_MODULE_STACK
    return stack


def register_external(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Make DeepSpeed gather a parameter for a module that doesn't hold it, in forward and backward; returns whether that is new."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    known = id(parameter) in getattr(module, "_external_params", {})
    register_external_parameter(module, parameter)
    return not known


class Traces:
    """Records a module before DeepSpeed changes it, so that DeepSpeed's hooks and attributes can be removed, and the user's stay.

    Args:
        module: the root, before DeepSpeed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._kinds = {path: type(child._parameters) for path, child in module.named_modules()}
        self._known = {path: (set(vars(child)), _hooks(child)) for path, child in module.named_modules()}
        self._attributes = {id(parameter): set(vars(parameter)) for parameter in module.parameters()}
        self._theirs: dict[str, tuple[set[str], set[tuple[str, int]]]] = {}

    def noted(self) -> None:
        """To be called when DeepSpeed has just initialised the module."""
        for path, child in self._root.named_modules():
            names, hooks = self._known[path]
            self._theirs[path] = set(vars(child)) - names, _hooks(child) - hooks
        paths = {id(child): path for path, child in self._root.named_modules()}
        # By it copies and pickles are made, whoever makes them; until :meth:`undo`.
        nn.Module.__getstate__ = lambda child: self._state(paths.get(id(child)), child)  # type: ignore[method-assign]

    def _state(self, path: str | None, child: nn.Module) -> Any:
        """What a copy and a pickle of a module take: what the user's has."""
        state: Any = object.__getstate__(child)
        if path is None or not isinstance(state, dict):
            return state
        theirs = self._names(path, child)
        state = {name: value for name, value in state.items() if name not in theirs}
        state["_parameters"] = self._kinds.get(path, dict)(child._parameters)
        for name, hooks in state.items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _own(hook))
        return state

    def attributes(self) -> dict[int, set[str]]:
        """DeepSpeed's attributes of each module, by its id."""
        return {id(child): self._names(path, child) for path, child in self._root.named_modules()}

    def _names(self, path: str, child: nn.Module) -> set[str]:
        names, _ = self._theirs.get(path, (set(), set()))
        return {name for name in vars(child) if name in names or name.startswith(_PREFIX) or name in _OTHERS}

    def undo(self) -> None:
        """Remove DeepSpeed's hooks and attributes; parameters keep their values."""
        if "__getstate__" in vars(nn.Module):
            del nn.Module.__getstate__
        for path, child in self._root.named_modules():
            _, hooks = self._theirs.get(path, (set(), set()))
            for place, key in hooks:
                getattr(child, place).pop(key, None)
            for name in self._names(path, child):
                del child.__dict__[name]
            child.__dict__["_parameters"] = self._kinds.get(path, dict)(child._parameters)
        for parameter in self._root.parameters():
            known = self._attributes.get(id(parameter))
            for name in list(vars(parameter)):
                if known is not None and name not in known:
                    delattr(parameter, name)


def _own(hook: Any) -> bool:
    """Whether it is DeepSpeed's hook, or one of this package's."""
    return f"{getattr(hook, '__module__', '')}.".startswith(("deepspeed.", "lightning_autopar."))


def _hooks(module: nn.Module) -> set[tuple[str, int]]:
    return {(place, key) for place, hooks in vars(module).items() if place.endswith("_hooks") and hooks for key in hooks}


def held_by_zero(engine: Any, module: nn.Module) -> dict[str, list[Tensor]]:
    """The device's tensors by kind: ``"parameters"``, ``"gradients"``, ``"rest"``. The tensors that the optimizer updates lie within the
    parameters' bytes, or on the host.
    """
    zero, offloads = engine.optimizer, _offloads(engine)
    if not _is_stage_3(zero):
        passed = getattr(zero, "temp_grad_buffer_for_gpu_offload", None)
        rest = [buffer for bucket in zero.ipg_buckets.values() for buffer in bucket.buffer]
        waiting = [*getattr(zero, "all_grad_tensors", {}).values(), *getattr(zero, "averaged_gradients", {}).values()]
        return {
            "parameters": list(module.parameters()),
            # Gradients of earlier batches, where they accumulate.
            "gradients": [gradient for group in waiting if group is not None for gradient in group],
            "rest": [*rest, *_there([passed])],
        }
    return {
        "parameters": [] if "parameters" in offloads else _parts(module),
        "gradients": [] if "optimizer" in offloads else [zero.grad_partitions_flat_buffer],
        # Parameters that stay gathered.
        "rest": [*(bucket.buffer for bucket in zero.ipg_buckets.values()), *module.parameters()],
    }


def host_held_by_zero(engine: Any, module: nn.Module) -> list[Tensor]:
    """The tensors in the host's memory, without the optimizer's state."""
    zero, offloads = engine.optimizer, _offloads(engine)
    found: list[Tensor] = []
    if "optimizer" in offloads:
        masters = _masters(zero)
        found += [*masters, *_there(master.grad for master in masters)]
        found += getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])
        found += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        found += _there([getattr(zero, "temp_grad_buffer_for_cpu_offload", None), getattr(zero, "grad_partitions_flat_buffer", None)])
    if "parameters" in offloads:
        found += [*_parts(module), *zero.param_groups_fp16_flat_cpu_memory]
    return found


def _offloads(engine: Any) -> tuple[str, ...]:
    zero = engine.optimizer
    if _is_stage_3(zero):
        return tuple(name for name, on in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param)) if on)
    return ("optimizer",) if zero.cpu_offload else ()


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _masters(zero: Any) -> list[Tensor]:
    """The tensors that the optimizer steps: a copy of this rank's part of the parameters, in 32 bits."""
    found: list[Tensor] = zero.fp32_partitioned_groups_flat if _is_stage_3(zero) else zero.single_partition_of_fp32_groups
    return found


def _parts(module: nn.Module) -> list[Tensor]:
    return [*_there(getattr(parameter, "ds_tensor", None) for parameter in module.parameters())]


def _there(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor is not None)
