"""The one place that knows DeepSpeed's private names. Everything here is a doorway; it decides nothing. Tested with DeepSpeed 0.19.8."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_autopar.strategies.zero.gradient_reduction import Reduction

#: Modules that the package imports when a run begins.
_LATE = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
)


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed for this kind of device, which it keeps for the rest of the process; it takes seconds, once.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``. DeepSpeed itself would call CUDA to find out, which a process that will fork must not do.
    """
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what DeepSpeed uses of torch
            import deepspeed
            from deepspeed.accelerator import get_accelerator, real_accelerator
            from deepspeed.utils import logging as loggers

            for name in _LATE:
                import_module(name)
        if get_accelerator().device_name() != device_type:
            real_accelerator.ds_accelerator = None
            get_accelerator()
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before
    loggers.logger.setLevel(logging.ERROR)  # it logs every step of its start
    if device_type == "cpu":
        # Compiling its transport through shared memory would take more than a minute; gloo transfers the same tensors.
        # (``deepspeed.comm.torch`` as an attribute is torch itself.)
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    return deepspeed


def refuse_build(self: Any, verbose: bool = True) -> Any:
    """Refuse to compile: that takes minutes, and if a compiler was killed, the next one waits for its lock for ever."""
    raise RuntimeError(f"DeepSpeed wants to compile its {self.name}, which no plan needs")


def start(backend: str) -> None:
    """Let DeepSpeed use the existing process group."""
    from deepspeed.comm import comm
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder.jit_load = refuse_build
    # It calls collectives by names that torch 2.13 has replaced.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
    comm.cdb = None  # an earlier run's group is gone
    comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def initialize(module: nn.Module, optimizer: Optimizer | None, config: dict[str, Any], *, device_type: str, device_rank: int) -> Any:
    """DeepSpeed's engine around the module, whose weights are the same on all ranks; a collective.

    Args:
        optimizer: of its parameters; None for evaluation.
        config: see ``zero_config``.
        device_rank: this process' device's index.
    """
    import deepspeed
    from deepspeed.runtime import engine as runtime
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator, stage3, stage_1_and_2
    from deepspeed.runtime.zero import partition_parameters as partitioning

    # Sending weights to ranks that have them would copy every page that forked workers share; and it can't send tensors without dimensions.
    runtime.DeepSpeedEngine._broadcast_model = lambda self: None
    partitioning.Init._zero_init_param = _partition
    partitioning.zero3_linear_wrap = _linear()
    # It searches each module's output for parameters by ``vars``, which fails for numbers and objects with slots.
    parameter_offload.vars = _attributes
    partitioned_param_coordinator.get_all_parameters = _partitioned
    hook = _ORIGINALS.setdefault("apply_to_tensors_only", parameter_offload.apply_to_tensors_only)
    parameter_offload.apply_to_tensors_only = lambda function, *args, **kwargs: hook(partial(_as_plain, function), *args, **kwargs)
    copying = device_type == "cpu" and "offload_param" in config["zero_optimization"]
    for name in ("NoGatherHandle", "NoGatherCoalescedHandle"):
        original = _ORIGINALS.setdefault(name, getattr(partitioning, name))
        setattr(partitioning, name, _copying(original) if copying else original)
    configure = _ORIGINALS.setdefault("configure", runtime.DeepSpeedEngine._configure_distributed_model)

    def configured(engine: Any, model: nn.Module) -> None:
        if engine.zero_optimization_partition_weights():
            # It would move the whole module to the device, before it partitions it there, parameter by parameter.
            model._apply(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(engine.device))
            engine.dont_change_device = True
        configure(engine, model)

    runtime.DeepSpeedEngine._configure_distributed_model = configured
    # To find the end of a backward pass that it doesn't run itself, it counts the parameters that the pass will reach, by a view of each.
    for stages in (stage3, stage_1_and_2):
        stages.count_used_parameters_in_backward = lambda parameters: 0
    # It would switch Lightning's autocast off inside.
    runtime.autocast_if_enabled = lambda engine: nullcontext()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device_rank),
        config=config,
        model=module,
        model_parameters=trained if optimizer is not None else [],
        optimizer=optimizer,
        dist_init_required=False,
    )
    engine.register_forward_hook(_give_to_graph)
    return engine


def _give_to_graph(engine: Any, args: Any, output: Any) -> None:
    """DeepSpeed (0.19) keeps what it does in backward alive in an attribute of the loss. A tensor class of the user's copies its attributes
    (MONAI's ``clone``), and can't copy this one; the loss's node in the graph keeps it alive as long.
    """
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and (managers := vars(tensor).pop("_backward_hook_managers", None)) is not None:
            node: Any = tensor.grad_fn  # it has hooks
            node.metadata["_backward_hook_managers"] = managers


#: DeepSpeed's own classes and functions that we replace.
_ORIGINALS: dict[str, Any] = {}


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes by ``vars`` and slots; empty for an object with neither."""
    slots = (name for kind in type(value).__mro__ for name in vars(kind) if isinstance(vars(kind)[name], MemberDescriptorType))
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _as_plain(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What DeepSpeed's function gives for what a module takes or returns, as a tensor of the user's own class with the same attributes. Its
    functions detach a tensor; of such a class that makes a view, and torch refuses operations in place on a view that a function has made.
    """
    kind: Any = type(tensor)
    if kind in (Tensor, nn.Parameter) or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return function(tensor)
    result: Tensor = function(tensor.as_subclass(Tensor)).as_subclass(kind)
    vars(result).update(vars(tensor))
    return result


def _partitioned(module: Any, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module and its guests, without those that a hook has put there since they were partitioned."""
    every = chain(module.named_parameters(recurse=recurse), module.ds_external_parameters())
    return ((name, each) for name, each in every if hasattr(each, "ds_tensor") or not isinstance(each, nn.Parameter))


def _partition(self: Any, parameter: nn.Parameter) -> None:
    """``Init._zero_init_param`` without its broadcast."""
    self._convert_to_deepspeed_param(parameter)
    parameter.partition()  # type: ignore[attr-defined]


def _linear() -> Callable[..., Tensor]:
    """A replacement for DeepSpeed's version of ``torch.nn.functional.linear`` at stage 3, which saves what torch's saves. DeepSpeed's saves
    the parameter, which may be freed until backward, rather than a view that keeps it. But it also saves the input of a frozen weight,
    which no gradient needs, and under autocast the input itself rather than its cast (0.19.8, ``runtime/zero/linear.py``).
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as Theirs

    class Linear(Theirs):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            Theirs.setup_context(ctx, inputs, output)
            x, weight, *bias = inputs
            ctx.save_for_backward(x if weight.requires_grad else None, weight, *(bias or [None]))

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # the argument names are torch's
        kind = weight.device.type
        if torch.is_autocast_enabled(kind) and input.is_floating_point() and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        output: Tensor = Linear.apply(input, weight, bias)
        return output

    return linear


def _copying(handle: Any) -> Any:
    """Fetches offloaded parameters by a copy where one rank has all of them: on a CPU device DeepSpeed would use them where they lie. Host
    memory is the device's there, too; the copy separates the device's memory from what is offloaded.
    """

    class Copying(handle):  # type: ignore[misc]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
                parameter.data = parameter.data.clone()

    return Copying


def share_partitions(optimizer: Any) -> None:
    """Make the optimizer step the parts of the module's own parameters, or copies of the same type if the parts lie elsewhere. DeepSpeed
    0.19.8 always makes copies in 32 bits. With them, writes to the parameters between two steps are lost, a module of 16 bits is trained in
    32, and they take memory.
    """
    apart = _is_apart(optimizer)
    for stepped, own in _pairs(optimizer):
        gradient, stepped.grad = stepped.grad, None
        stepped.data = stepped.data.to(own.dtype) if apart else own.data
        if gradient is not None:
            stepped.grad = gradient.to(own.dtype)
    # At stages 1 and 2 each parameter has a view of what is stepped; of DeepSpeed's copies, those views would keep the memory.
    optimizer._link_all_hp_params()


def copied_partitions(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that the optimizer steps, each with the module's part of which it is a copy; none if it steps the parts."""
    if _is_apart(optimizer):
        yield from _pairs(optimizer)


def forget_order(engine: Any) -> None:
    """Make stage 3, which gathers ahead in the order of an earlier step, learn the order anew, as this step needs other parameters."""
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if coordinator is not None and coordinator.is_complete_trace():
        coordinator._invalidate_trace()


def places(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters that stages 1 and 2 have put into flat buffers, each with its view of the buffer."""
    for flat, group in zip(getattr(optimizer, "bit16_groups_flat", ()), getattr(optimizer, "round_robin_bit16_groups", ()), strict=False):
        yield from zip(group, optimizer.unflatten(flat, group), strict=True)


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
        return
    rank = dist.get_rank()
    own = (parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups)
    yield from zip(optimizer.single_partition_of_fp32_groups, own, strict=True)


def _is_apart(optimizer: Any) -> bool:
    """Whether the optimizer steps in host memory, and the parameters lie elsewhere."""
    return _offloads(optimizer) and not getattr(optimizer, "offload_param", False)


def _offloads(optimizer: Any) -> bool:
    """Whether the optimizer's state lies in host memory."""
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def reduce_by(optimizer: Any, reduction: Reduction) -> None:
    """Make DeepSpeed reduce gradients in one order on all ranks, without taking their norm and without scaling them."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        reduce, epilogue = optimizer.reduce_ready_partitions_and_remove_grads, optimizer.independent_gradient_partition_epilogue

        def finish() -> None:
            reduction.finish(reduce, lambda parameter: ())
            epilogue()

        optimizer.reduce_ready_partitions_and_remove_grads = lambda parameter: reduction.arrive(reduce, parameter)
        optimizer.independent_gradient_partition_epilogue = finish
        gathering, gather = optimizer.parameter_offload, optimizer.parameter_offload.pre_sub_module_forward_function

        def gather_and_note(module: Any) -> None:
            reduction.ran(module.ds_id)
            gather(module)

        gathering.pre_sub_module_forward_function = gather_and_note
        # It takes the norm of an offloaded gradient by a copy in 64 bits, twice the gradient's size.
        optimizer._constant_buffered_norm2 = lambda gradient: torch.zeros(())
        optimizer._get_norm_groups = lambda: [torch.zeros(())]
        optimizer.unscale_and_clip_grads = lambda *_: None
        return
    group_of = {id(parameter): number for number, group in enumerate(optimizer.bit16_groups) for parameter in group}
    process = optimizer.process_gradients
    last = "independent_gradient_partition_epilogue" if optimizer.partition_gradients else "reduce_gradients"
    then = getattr(optimizer, last)

    def arrive(parameter: nn.Parameter, group: int) -> None:
        if optimizer.partition_gradients or optimizer.is_gradient_accumulation_boundary():
            reduction.arrive(process, parameter, group)
        else:
            reduction.note(parameter)
            process(parameter, group)

    def finish_then(**options: Any) -> None:
        reduction.finish(process, lambda parameter: (group_of[id(parameter)],))
        then(**options)

    optimizer.process_gradients = arrive
    setattr(optimizer, last, finish_then)
    optimizer.set_norm_for_param_grad_in_gpu = lambda parameter: None  # as at stage 3
    optimizer.scaled_global_norm = lambda norm_type=2: torch.zeros(())
    optimizer.unscale_and_clip_grads = lambda *_: None


def gradient_parts(optimizer: Any) -> Iterator[Tensor]:
    """This rank's parts of the reduced gradients, when a step is about to begin."""
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    for number, flat in enumerate(flats):
        if _offloads(optimizer):
            yield flat.grad
        else:
            found = optimizer.averaged_gradients[number]
            yield from [found] if isinstance(found, Tensor) else found


def partitions(optimizer: Any) -> Iterator[tuple[int, Any, list[tuple[nn.Parameter, int, int, int]]]]:
    """This rank's flat partitions, as the ZeRO optimizer steps them.

    Args:
        optimizer: DeepSpeed's, of any stage.

    Yields:
        The group's index, the flat tensor, and what is in it: parameters, each with where its part begins and ends in the flat tensor and
        where that part begins in the parameter.
    """
    rank = dist.get_rank()
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            found, start = [], 0
            for parameter in optimizer.fp16_groups[number]:
                part = parameter.partition_numel()
                begin = min(rank * part, parameter.ds_numel)
                length = max(0, min(part, parameter.ds_numel - begin))
                found.append((parameter, start, start + length, begin))
                start += part
            yield optimizer.sub_group_to_group_id[number], flat, found
        return
    for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        found = []
        first = rank * optimizer.partition_size[number]
        for parameter, offset in zip(optimizer.round_robin_bit16_groups[number], optimizer.round_robin_bit16_offsets[number], strict=True):
            begin = min(max(first - offset, 0), parameter.numel())
            end = min(max(first + flat.numel() - offset, 0), parameter.numel())
            start = max(offset - first, 0) if end > begin else 0
            found.append((parameter, start, start + end - begin, begin))
        yield number, flat, found
