"""FSDPEngine: FSDP2 (``fully_shard``) under Lightning's ModelParallelStrategy, for a module that wasn't written for it.

It also lets torch's fused optimizers update shards: each rank's kernel runs on its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_autopar._lightning import ModelParallelStrategy, Trainer
from lightning_autopar._lightning_compat import (
    TrainerFn,
    bare_optimizer,
    is_overridden,
    materialize_module,
    optimizers_to_device,
    update_properties,
)
from lightning_autopar.exact.step.gradient_hooks import trained
from lightning_autopar.exact.step.initial_weights import drawn_on, random_states, set_random_states
from lightning_autopar.exact.step.micro_batches import overridden
from lightning_autopar.state import checkpoint as whole
from lightning_autopar.state.pretrained import check_values, shapes_only
from lightning_autopar.strategies.base.host_optimizers import on_host, why_not
from lightning_autopar.strategies.base.process_group import join_group, refuse_one_rank
from lightning_autopar.strategies.base.refused_parameters import refuse_new
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.split_mixin import SplitMixin
from lightning_autopar.strategies.fsdp.module_copies import plain_copies
from lightning_autopar.strategies.fsdp.shard import onto_shards, own_classes, shard, shard_rest, unshard
from lightning_autopar.strategies.fsdp.whole_parameters import WholeParameters
from lightning_autopar.strategies.fsdp.whole_results import give_whole_results, whole_for_loggers

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_OVERLOADS = ("default", "tensor_lr")


def fused_on_shards() -> None:
    """Make the fused updates work on the local parts of DTensors, in this process, permanently. They update each element by itself, and a
    parameter, its gradient and its states are sharded alike. ``DTensor`` has no rule for ``_fused_sgd_`` (torch 2.13,
    ``_ops/_pointwise_ops.py``), and for the others it goes through all tensors of the lists: some 50 µs a parameter.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # there is no public registry
    for name in _FUSED:
        packet = getattr(torch.ops.aten, name)
        for overload in set(_OVERLOADS) & set(packet.overloads()):
            handlers[getattr(packet, overload)] = _on_own_parts


def _on_own_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own_args, own_kwargs = tree_map_only(DTensor, lambda tensor: tensor.to_local(), (args, kwargs))
    return operation(*own_args, **own_kwargs)


#: Hooks that Lightning calls between a training step and its backward pass.
BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")

#: The dimensions of the mesh in ``self.device_mesh``, for a user's ``configure_model``; the second is Lightning's, and 1 here.
_DIMENSIONS = ("data_parallel", "tensor_parallel")


class _ShardingStrategy(whole.OneFile, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy without its demand that the user shards the module, and with plain checkpoints."""

    run_plan: RunPlan
    _exit: ExitStack
    _gathered: Any = None
    #: Ids and names of the parameters that became shards: an optimizer that was made earlier still has them.
    _names: Mapping[int, str] = {}  # replaced, never modified
    #: Whether parameters, gradients and the optimizer's state lie in host memory between uses.
    _offloads = False

    def setup_environment(self) -> None:
        """Join the group and build the mesh, without re-seeding: every rank goes on from the parent's RNG state."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        if self.run_plan.plan.offload and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # for norms and checkpoints of tensors in host memory
        join_group(self, self._process_group_backend)
        # One dimension uses the group of all ranks, without a communicator of its own; a user's configure_model may read the second.
        dimensions = len(_DIMENSIONS) if is_overridden("configure_model", self._module) else 1
        shape = (self.world_size, 1)[:dimensions]
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=_DIMENSIONS[:dimensions])
        self._module._device_mesh = self._device_mesh
        self._names = {id(parameter): name for name, parameter in self._module.named_parameters()}  # configure_model may shard it itself

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where ``configure_model`` builds the module: in host memory, with the device's draws. Only rank 0 gives a large one values."""
        where = shapes_only() if (self.run_plan.large and self.global_rank != 0) else torch.device("cpu")
        with where, drawn_on(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then build the user's optimizers on the shards; the order is Lightning's."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        give_whole_results()
        whole_for_loggers(trainer.loggers)
        plan, reshard = self.run_plan.plan, bool(self.run_plan.plan.reshard_after_forward)
        if not any(isinstance(module, FSDPModule) for module in self._module.modules()):
            originals = dict(self._module.state_dict()) if self.global_rank == 0 and self.run_plan.large else {}
            self._offloads = bool(plan.offload)
            # A GPU copies from pinned memory.
            offload = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda") if self._offloads else None
            self._names = shard(self._module, plan.shard, self._sharding_mesh(), reshard_after_forward=reshard, offload=offload)
            if self.run_plan.large and self._any_rank_has_shapes_only():
                self._spread(originals)
        elif plan.replicas > 1 or plan.offload:
            raise ValueError(
                f"the plan {plan.title()!r} says how the module is sharded, but its configure_model has sharded it already; "
                "leave the sharding to the strategy, or choose a plan without replicas and offload"
            )
        else:
            self._names = {**self._names, **shard_rest(self._module, self._sharding_mesh(), reshard_after_forward=reshard)}
        check_values(self._module)
        materialize_module(self._module, self._home)
        self.model = self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self._home)
            if self._offloads and self.root_device.type != "cpu":  # a CPU device is its own host: no reason for another update there
                self._speed_up()
        self._gathered = WholeParameters(self._module, self.optimizers, self.run_plan.finding or ())
        self._hooks_before_backward = overridden(trainer, *BEFORE_BACKWARD)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse trained parameters that a hook has put into the module."""
        if not all(self._gathered.knows("", parameter) for parameter in trained(self._module)):
            refuse_new(self._module, self._gathered.knows, "FSDP2", watch=self._exit)
        super().on_train_batch_start(batch, batch_idx)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the user's optimizers on the shards; those that were made before sharding get the shards."""
        super().setup_optimizers(trainer)
        onto_shards(map(bare_optimizer, self.optimizers), self._module, self._names)

    @property
    def _home(self) -> torch.device:
        """Where parameters and the optimizer's state lie between uses."""
        return torch.device("cpu") if self._offloads else self.root_device

    def _speed_up(self) -> None:
        """Make the optimizers use torch's fused kernels, one call for all parameters. Their default on the host is a loop of some ten
        operations on each shard, each of which goes through DTensor's dispatch.
        """
        fused_on_shards()
        for optimizer in map(bare_optimizer, self.optimizers):
            if why_not(type(optimizer)) is None:
                on_host(optimizer)

    def model_to_device(self) -> None:
        """Offloaded parameters stay where they are; buffers and metrics move to the device, which the module's ``device`` names."""
        if not self._offloads:
            super().model_to_device()
            return
        self._move_others(self.root_device)
        update_properties(self._module, device=self.root_device)

    def _move_others(self, device: torch.device) -> None:
        """Move the tensors that aren't sharded."""
        self._module._apply(lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device))

    def _sharding_mesh(self) -> Any:
        """The mesh over which the module is sharded: all ranks, or replicas (first dimension) by the ranks of a replica."""
        plan = self.run_plan.plan
        if plan.replicas == 1:
            return self.device_mesh["data_parallel"]
        return init_device_mesh(
            self.root_device.type, (plan.replicas, plan.devices_per_replica), mesh_dim_names=("replicas", "data_parallel")
        )

    def _any_rank_has_shapes_only(self) -> bool:
        here = any(tensor.is_meta for tensor in (*self._module.parameters(), *self._module.buffers()))
        flags: list[bool] = [False] * self.world_size
        dist.all_gather_object(flags, here)
        return any(flags)

    def _spread(self, originals: dict[str, Any]) -> None:
        """Give every rank its part of rank 0's weights, tensor by tensor, and rank 0's RNG state, which building the module advanced."""
        if self.global_rank != 0:
            self._module.to_empty(device=self._home)
        elif self._offloads:
            self._move_others(self._home)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self._module, originals, options=options)
        persistent = set(self._module.state_dict())
        for name, buffer in self._module.named_buffers():
            if name not in persistent:
                buffer.copy_(self.broadcast(buffer.cpu() if self.global_rank == 0 else None))
        whole.spread_metrics(self._module, first=self.global_rank == 0)
        set_random_states(self.broadcast(random_states(self.root_device)), self.root_device)

    # -- steps: the only time when parameters are whole --------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step; under automatic optimization its backward pass puts the parameters back into shards. A hook that is called
        before it finds shards only: an average of another network's weights can't be taken of shards and whole parameters.
        """
        with self._gathered.inside("training_step"):
            output = super().training_step(*args, **kwargs)
        if not self._module.automatic_optimization or self._hooks_before_backward:
            self._gathered.reshard()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Recomputation in backward calls modules, which must not count as calls by a hook."""
        with self._gathered.inside(None):
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._module.automatic_optimization:
            self._gathered.reshard()  # FSDP2 has done so; scalars are left
        return loss

    def give_up_gathered(self) -> None:
        """Put the parameters back into shards after a failed step; what it wrote to whole ones is lost."""
        self._gathered.give_up()

    def teardown(self) -> None:
        """Leave the module without our hooks."""
        if self._gathered is not None:
            self._gathered.close()
        super().teardown()

    def release(self) -> None:
        """Make the module whole and plain again, for code after the run in this process; a collective."""
        self._gathered.close()
        unshard(self._module)
        self._module._device_mesh = None  # it can't be pickled, and the next run's checks may have to pickle the module

    # -- checkpoints: whole, plain, one file -------------------------------------------------------------------------------------------

    plain_copies = staticmethod(plain_copies)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict on rank 0, nothing elsewhere; a collective."""
        refuse_one_rank("the state dict was asked for")
        return whole.whole_state_dict(self._module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state on rank 0, nothing elsewhere; a collective."""
        return whole.whole_optimizer_state(bare_optimizer(optimizer), keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes one ordinary ``.ckpt``, in which nothing is a shard: callbacks may have put their own into it."""
        checkpoint = whole.without_shards(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


class FSDPEngine(SplitMixin, _ShardingStrategy):
    """Executes an FSDP plan: each rank has a shard of parameters, gradients and optimizer state. The plan's blocks are units of their own;
    the root takes the rest, also of a module of which the user's ``configure_model`` has sharded a part.
    """

    completes_gradients = True

    def hand_over(self, module: Any, *args: Any, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Afterwards modules that the run has made can be pickled."""
        states = super().hand_over(module, *args, **options)
        own_classes(module)
        return states

    def evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Reshard after the step: no backward pass follows that would."""

        @wraps(step)
        def resharded(*args: Any, **kwargs: Any) -> Any:
            with self._gathered.inside(step.__name__):
                output = step(*args, **kwargs)
            self._gathered.reshard()
            return output

        return resharded

    def new_gradients_on_host(self) -> Iterator[Tensor]:
        """The gradients, which FSDP2 puts into host memory when they are reduced."""
        if self.run_plan.plan.offload:
            for group in chain.from_iterable(bare_optimizer(optimizer).param_groups for optimizer in self.optimizers):
                yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)

    def __init__(self, run_plan: RunPlan) -> None:
        super().__init__(data_parallel_size=run_plan.plan.world_size, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.parallel_devices = run_plan.torch_devices
        self.attach(run_plan)
