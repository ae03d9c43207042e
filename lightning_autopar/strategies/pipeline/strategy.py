"""PipelineEngine: the module in stages, each on a device of its own, under a schedule of ``torch.distributed.pipelining``.

It is a Lightning strategy for a module that wasn't written for pipelines. A rank holds its stages' parameters and no others. Every rank of
a pipeline gets the same batch, runs the user's own steps on it for its stages (:mod:`.run.staged_step`), and sees what the last stage's
step returned. Forward and backward of all micro-batches run in the place of Lightning's ``training_step``; its ``backward`` makes their
gradients visible. Knows Lightning's order of a run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_autopar._lightning import ParallelStrategy, Trainer, rank_zero_only
from lightning_autopar._lightning_compat import NoLoss, bare_optimizer, default_backend, let_steps_be_skipped, reduce_over_ranks
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.counted_entries import BatchCounts
from lightning_autopar.exact.data.fingerprint import fingerprint
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.initial_weights import drawn_on
from lightning_autopar.exact.step.micro_batches import PartGradients, several_loaders, uncut, whole_share
from lightning_autopar.state.checkpoint import own_optimizer_state, own_state_dict
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.out_of_memory.running_step import BOTH
from lightning_autopar.strategies.base.process_group import join_group
from lightning_autopar.strategies.base.refused_parameters import refuse_new
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.pipeline.run.replicas import Replicas
from lightning_autopar.strategies.pipeline.run.stage_draws import StageDraws
from lightning_autopar.strategies.pipeline.run.stage_shapes import agree_on_overflow
from lightning_autopar.strategies.pipeline.run.staged_step import StagedStep
from lightning_autopar.strategies.pipeline.run.torch_schedules import Stage
from lightning_autopar.strategies.pipeline.stages.module_state import StageParameters, assign, take_stages
from lightning_autopar.strategies.pipeline.stages.stage_module import StageModule
from lightning_autopar.strategies.pipeline.weights.checkpoint_files import StagedState

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

T = TypeVar("T")


class _StagedStrategy(StagedState, ParallelStrategy):
    """The methods that Lightning calls: processes, groups, and steps through the stages."""

    run_plan: RunPlan
    _staged: StagedStep
    _share: BatchShare | None
    _counts: BatchCounts
    _samples: int | None

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(parallel_devices=devices)
        self.num_nodes = 1
        self._timeout = default_pg_timeout
        self._process_group_backend: str | None = None

    # -- processes ---------------------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """This rank's."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many processes are on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of a pipeline all have the same samples."""
        plan = self.run_plan.plan
        return {"num_replicas": plan.data_ranks, "rank": plan.data_rank(self.global_rank)}

    def set_world_ranks(self) -> None:
        """Like Lightning's other strategies with several processes."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # Lightning hangs it on the function

    def setup_environment(self) -> None:
        """Join the group, without re-seeding: every rank goes on from the parent's RNG state, as one device would."""
        super().setup_environment()
        self.set_world_ranks()
        self._process_group_backend = default_backend(self.root_device)
        join_group(self, self._process_group_backend)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where ``configure_model`` builds the module: in host memory, with the device's draws, as stages are taken before it moves."""
        with torch.device("cpu"), self.build_context(), drawn_on(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Move what is here to the device; absent tensors already report that device."""
        self._module.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            on_gpu = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """One rank's object on all of them."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks."""
        return reduce_over_ranks(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As on one device: all ranks have the batch, and a function of a step may run on one of them alone."""
        return tensor

    def teardown(self) -> None:
        """Leave module and optimizers where they are. Lightning would move them to the CPU, where NCCL can't gather what is sharded."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps -------------------------------------------------------------------------------------------------------------------------

    def whole_or_share(self, batch: Any) -> BatchShare:
        """The replica's share of the current batch; for a batch without countable samples, a share of one."""
        if self._share is not None:
            return self._share
        trainer = self._module.trainer
        several = trainer.training and several_loaders(trainer)
        try:
            share = whole_share(batch, self._samples, several=several)
        except ValueError as error:
            if trainer.training and self.run_plan.plan.micro_batches > 1:
                raise uncut(self.run_plan.plan, error) from error
            share = BatchShare(rows=1, of=1, rank=0, world_size=1)
        return self._counts.on(share)


class PipelineEngine(EngineMixin, _StagedStrategy):
    """Executes a pipeline plan."""

    def __init__(self, run_plan: RunPlan) -> None:
        super().__init__(run_plan.torch_devices)
        self.attach(run_plan)

    @property
    def holders(self) -> int:
        """The ranks of the first pipeline."""
        return self.run_plan.plan.devices_per_replica

    def hand_over(
        self, module: Any, optimizers: list[Any], *, keep: bool, affordable: Callable[[int], bool]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Each rank's part, which its stages have."""
        state = own_state_dict(module, keep=keep)
        return state, [own_optimizer_state(each, keep=keep) for each in optimizers] if affordable(self.holders) else []

    def attach(self, run_plan: RunPlan) -> None:
        """See :class:`.engine.EngineMixin`."""
        super().attach(run_plan)
        self.in_parts = True  # with any number of ranks: a step's logs are combined from its stages
        self._owned: StageParameters | None = None
        #: The parameters of other stages, by id, each with what stands in its place; until the optimizers are there.
        self._dropped: dict[int, tuple[Any, Tensor]] = {}
        #: Whether a step's gradients wait for Lightning's backward.
        self._laid_aside = False
        self._users: dict[str, tuple[int, ...]] = {}
        self._part_gradients: PartGradients | None = None

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same stages."""
        return self._replicas.data

    # -- setup -------------------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Drop what other stages have, then let Lightning set up the rest.

        Raises:
            ValueError: if the module's step can't be run in these stages.
        """
        plan, staging, module = self.run_plan.plan, self.run_plan.finding, self._module
        if staging is None or staging.refusal is not None:
            reason = "nothing is known of how its step can be cut" if staging is None else staging.refusal
            raise ValueError(
                f"{plan.title()!r} can't run {type(module).__name__}: {reason}; choose another engine, as allow=['single', 'ddp']"
            )
        if not module.automatic_optimization:
            raise ValueError(f"{plan.title()!r} runs forward and backward by itself; use automatic optimization, or another engine")
        self._replicas = Replicas(plan, self.root_device)
        originals = self.originals()
        self._users = assign(module, staging, plan.cuts)
        whole = {name: (id(parameter), weakref.ref(parameter)) for name, parameter in module.named_parameters()}
        self._owned = take_stages(module, staging, plan.cuts, self.stages_here, self.root_device)
        self._dropped = {whole[name][0]: (whole[name][1], hole) for name, hole in module.named_parameters() if is_absent(hole)}
        self.spread(originals)
        super().setup(trainer)
        self.join_stages(self._replicas.pipeline, self._pipelines)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self._exit.callback(agree_on_overflow(scaler, self.root_device, hidden=self.gradients_hidden))

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the user's optimizers. One that was there before the run has all parameters: it forgets those of other stages."""
        super().setup_optimizers(trainer)
        for optimizer in map(bare_optimizer, self.optimizers):
            for group in optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    before, hole = self._dropped.get(id(parameter), (None, None))
                    if before is not None and before() is parameter:
                        group["params"][place] = hole
                        optimizer.state.pop(parameter, None)
        self._dropped.clear()

    def prepare_steps(self, trainer: Trainer) -> None:
        """Like every engine's, for stages."""
        plan, run_plan = self.run_plan.plan, self.run_plan
        assert run_plan.finding is not None
        self._logging = GlobalLogging(
            trainer,
            self.share,
            device=self.root_device,
            rules=run_plan.log_rules,
            metrics=run_plan.metric_rules,
            parts=True,
            ranks_per_replica=plan.devices_per_replica,
        )
        self._logging.install()
        self._exit.callback(self._logging.uninstall)
        draws = None
        if run_plan.draws is not None:
            draws = self._exit.enter_context(GlobalDraws(lambda: self._stage_draws.share, run_plan.draws))
        mine = self._pipelines[plan.data_rank(self.global_rank)]
        self._stage_draws = StageDraws(
            draws,
            ranks=[mine[stage % len(mine)] for stage in range(plan.stages)],
            device=self.root_device,
            group=None if self.root_device.type == "cpu" else self._logging.host_group,
        )
        self._staged = StagedStep(
            trainer,
            plan,
            self._logging,
            self._stage_draws,
            changing=[hook for hook, recording in run_plan.finding.hooks.items() if recording.changes_batch],
            appended=run_plan.finding.appended,
            contexts=self._precision_context,
            around=self._replicas.step,
            scale=self._scaled,
            note=partial(self.meter.note, self),
        )
        self._part_gradients = PartGradients(trainer)
        self._exit.callback(let_steps_be_skipped(trainer))

    def _setup_model(self, model: Module) -> Module:
        """Make the stages, as soon as the rank's part is on the device."""
        plan, staging = self.run_plan.plan, self.run_plan.finding
        assert staging is not None
        modules = {index: StageModule(model, staging, plan.cuts, index, partial(self._staged.call, index)) for index in self.stages_here}
        for index, module in modules.items():
            self._stage_draws.adopt(module, index)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = [{name for name in parameters if index in self._users[name]} for index in modules]
        parts = self._replicas.prepare(list(modules.values()), model, names)
        self._parameters = {name: id(parameter) for name, parameter in parameters.items()}
        host_groups = [dist.new_group(ranks, backend="gloo") for ranks in self._pipelines]
        host_group = host_groups[plan.data_rank(self.global_rank)]
        stages = [
            Stage(
                part,
                index,
                plan.stages,
                self.root_device,
                group=self._replicas.pipeline,
                host_group=host_group,
                around=self._staged.around,
                reduce=partial(self._replicas.reduce, part),
            )
            for part, index in zip(parts, modules, strict=True)
        ]
        self._staged.install(modules, stages, host_group)
        return model

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse parameters that the hooks of an epoch's beginning have put into the module."""
        if batch_idx == 0:
            ids = frozenset(self._parameters.values())
            by_name = self._replicas.shards  # shards and whole parameters take turns

            def known(name: str, parameter: Tensor) -> bool:
                return name in self._parameters if by_name else id(parameter) in ids

            refuse_new(self._module, known, "A pipeline")
        super().on_train_batch_start(batch, batch_idx)

    @property
    def stages_here(self) -> list[int]:
        """This rank's stages."""
        plan = self.run_plan.plan
        return list(range(self.global_rank % plan.devices_per_replica, plan.stages, plan.devices_per_replica))

    @property
    def _pipelines(self) -> list[list[int]]:
        """The ranks of every replica, in the order of its pipeline."""
        plan = self.run_plan.plan
        each = plan.devices_per_replica
        return [list(range(replica * each, (replica + 1) * each)) for replica in range(plan.replicas)]

    def _precision_context(self, hook: str) -> AbstractContextManager[Any]:
        names = {"training_step": "train_step_context", "validation_step": "val_step_context"}
        make: Callable[[], AbstractContextManager[Any]] = getattr(self.precision_plugin, names.get(hook, f"{hook}_context"))
        return make()

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss, scaled as Lightning's precision plugin does before backward (``MixedPrecision.pre_backward``)."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        scaled: Tensor = loss if scaler is None else scaler.scale(loss)
        return scaled

    # -- steps -------------------------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Every rank of a pipeline should have the same batch, which is checked."""
        self._staged.fingerprint = fingerprint(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def batch_arrives(self) -> None:
        """The draws of the transfer's hooks are for the replica's part of the batch."""
        self._stage_draws.arrive(self._share)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on all micro-batches, with their backward passes; the loss is the whole batch's."""
        gradients = self._part_gradients
        assert gradients is not None
        self.step_begins(BOTH)
        self._share = self.whole_or_share(args[0])
        goes_back = not self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        if goes_back:
            gradients.begin(apart=self._shared_parameters())
        output = self._staged.train(args, kwargs, self._share, goes_back=goes_back)
        loss = output.get("loss") if isinstance(output, dict) else output
        if loss is None and goes_back:
            self.sum_shared({})
            gradients.forget()
        if loss is None or not goes_back:
            return NoLoss() if output is None else output
        gradients.lay_aside(self.sum_shared)
        self._laid_aside = True
        self.meter.note(self, "forward")
        whole = _Ready.apply(torch.zeros((), device=loss.device, requires_grad=True), loss, self._take_up)  # type: ignore[no-untyped-call]
        return {**output, "loss": whole} if isinstance(output, dict) else whole

    def evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, through the stages."""
        hook = step.__name__

        @wraps(step)
        def staged(*args: Any, **kwargs: Any) -> Any:
            parts = 1 if hook == "predict_step" else self._evaluations.parts  # which takes a batch's parts one by one
            return self._staged.evaluate(hook, args, kwargs, self.whole_or_share(args[0]), parts, self._evaluations.put_together)

        return staged

    def _evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._share = self.whole_or_share(args[0])
        return super()._evaluate(step, args, kwargs)

    def _shared_parameters(self) -> list[Parameter]:
        """This rank's parameters that another rank's stages use, too."""
        module, owned = self._module, self._owned
        assert owned is not None
        if not owned.shared:
            return []
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return [parameters[name] for name in owned.shared if name in owned.names and name in parameters]

    def _take_up(self) -> None:
        if self._laid_aside:
            self._laid_aside = False
            assert self._part_gradients is not None
            self._part_gradients.take_up()
            self.gradients_there()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """The backward passes are over: put their gradients where hooks look for them."""
        assert self._part_gradients is not None
        if not self._part_gradients.watched:
            self._take_up()
        super().pre_backward(closure_loss)


class _Ready(torch.autograd.Function):
    """A loss whose backward has run already; its backward only says so."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, begin: Callable[[], None]) -> Tensor:
        ctx.begin = begin
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.begin()
        return None, None, None
