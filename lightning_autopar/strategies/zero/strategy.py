"""ZeroEngine: DeepSpeed's stages under Lightning's DeepSpeedStrategy, such that the run computes what plain Lightning computes on one
device.

Lightning's ``DeepSpeedPrecision`` converts the module and each batch to 16 bits under mixed precision, and changes the order of hooks. The
precision plugins here do neither: they are Lightning's own for a plain run, with backward and the optimizer's step run by DeepSpeed's
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_autopar._lightning import (
    DeepSpeedStrategy,
    GradClipAlgorithmType,
    HalfPrecision,
    MixedPrecision,
    Precision,
    Strategy,
    Trainer,
    pl,
)
from lightning_autopar._lightning_compat import TrainerFn, bare_optimizer, update_properties
from lightning_autopar._root import package_of
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.initial_weights import drawn_on
from lightning_autopar.memory.trace.parameter_use import GradientLooks
from lightning_autopar.state.scratch_files import hand_back_freed
from lightning_autopar.strategies.base.host_optimizers import on_host
from lightning_autopar.strategies.base.process_group import join_group
from lightning_autopar.strategies.base.rank_measurement import optimizer_states
from lightning_autopar.strategies.base.refused_parameters import refuse_new
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.split_mixin import SplitMixin
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
from lightning_autopar.strategies.zero.gradient_reduction import Clipping, Reduction
from lightning_autopar.strategies.zero.partitions.checkpoint_files import ZeroFiles
from lightning_autopar.strategies.zero.partitions.module import held_by_zero, host_held_by_zero
from lightning_autopar.strategies.zero.partitions.optimizer_pieces import Edits, OptimizerBridge, ParameterPart
from lightning_autopar.strategies.zero.settings import deepspeed_config, zero_settings


class _ByDeepSpeed(Precision):
    """A precision plugin for DeepSpeed, whose engine runs backward and step itself."""

    clipping: Clipping

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Any:  # type: ignore[override]  # as Lightning's own
        """``on_after_backward``."""
        with refuse_looks(module, "on_after_backward"):
            return super().post_backward(tensor, module)

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """``on_before_optimizer_step`` and clipping."""
        with refuse_looks(model, "on_before_optimizer_step"):
            super()._after_closure(model, optimizer)

    def backward(  # type: ignore[override]  # as Lightning's own
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward, with the gradients reduced to their ranks' parts."""
        strategy: Any = model.trainer.strategy
        strategy.backward_parts(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The closure with the hooks that come after it, then the step."""
        result = self._wrap_closure(model, optimizer, closure)
        strategy: Any = model.trainer.strategy
        strategy.step_parts()
        return result

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Clip in the step, which is about to begin: gradients are in parts until then."""
        if clip_val > 0:
            self.clipping.ask(float(clip_val), by_value=gradient_clip_algorithm == GradClipAlgorithmType.VALUE)


@contextmanager
def refuse_looks(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """The context of a hook that looked at no gradients in the traced step, but may do so now.

    Raises:
        ValueError: if it does, as there are none in the parameters.
    """

    def refuse(parameter: Parameter) -> None:
        name = next((name for name, each in module.named_parameters() if each is parameter), "a parameter")
        raise ValueError(
            f"{hook} looks at the gradient of {name!r} in step {module.global_step}, though it looked at none in the step that was tried "
            "before the run; under DeepSpeed parameters have no .grad to read. Run with allow=['single', 'ddp', 'fsdp']"
        )

    with GradientLooks(refuse):
        yield


class _Full(_ByDeepSpeed):
    pass


class _Mixed(_ByDeepSpeed, MixedPrecision):
    pass


class _Half(_ByDeepSpeed, HalfPrecision):
    pass


def plugin(precision: str, device_type: str) -> Precision:
    """The plugin for the Trainer's precision.

    Raises:
        ValueError: if DeepSpeed can't compute what a plain run at this precision does.
    """
    if precision == "32-true":
        return _Full()
    if precision == "bf16-mixed":
        return _Mixed("bf16-mixed", device_type)
    if precision == "bf16-true":
        return _Half("bf16-true")
    raise ValueError(f"a ZeRO plan runs at precision 32-true, bf16-mixed or bf16-true, but the Trainer's is {precision!r}; choose one")


class _StepCall:
    """Calls a step through DeepSpeed's forward, in place of Lightning's ``_ForwardRedirection``: without the user's hooks on the module's
    own forward, which a step doesn't call on one device either.
    """

    def __call__(self, engine: Any, module: Any, name: str, *args: Any, **options: Any) -> Any:
        """What the step returns."""
        forward, calls = module.forward, (module._forward_pre_hooks, module._forward_hooks)
        every = [list(hooks.items()) for hooks in calls]

        def set_hooks(kept: Callable[[Any], bool]) -> None:
            for hooks, items in zip(calls, every, strict=True):
                hooks.clear()
                hooks.update((number, hook) for number, hook in items if kept(hook))

        def step(*args: Any, **options: Any) -> Any:
            module.forward = forward
            set_hooks(lambda hook: True)
            try:
                return getattr(module, name)(*args, **options)
            finally:
                every[:] = [list(hooks.items()) for hooks in calls]
                set_hooks(_is_engines)

        module.forward = step
        set_hooks(_is_engines)
        try:
            return engine(*args, **options)
        finally:
            set_hooks(lambda hook: True)


def _is_engines(hook: Any) -> bool:
    """Whether a hook on a module is DeepSpeed's or this package's."""
    return package_of(hook) in ("deepspeed", "lightning_autopar")


class _ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, changed to do all that a plain run does, also on CPU devices, and with plain checkpoints."""

    run_plan: RunPlan
    _relay: OptimizerBridge | None = None
    _reduction: Reduction
    _clipping: Clipping
    _forked: bool
    _edits: Edits
    _exit: ExitStack
    _frozen: frozenset[int] = frozenset()
    _backward_ran = False

    def setup_environment(self) -> None:
        """Join the group, without re-seeding: every rank goes on from the parent's RNG state."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.precision_plugin = plugin(str(self.precision_plugin.precision), self.root_device.type)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Like Lightning's, without new seeds, and without its demand that devices have indices, which CPUs haven't."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        doorway.import_deepspeed(self.root_device.type)
        join_group(self, self._process_group_backend)
        doorway.start(self._process_group_backend)

    def setup(self, trainer: Trainer) -> None:
        """Build the user's optimizer on the module's parameters, then hand both to DeepSpeed."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        self.model = self.precision_plugin.convert_module(module)
        if not self._forked:
            self._take_weights_of_rank_0()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting or self.zero_stage_3:
            before = rng.capture({})
            self.init_deepspeed()
            rng.restore(before, {})  # some modules make DeepSpeed draw, and the run would see other numbers than one device's
        else:  # without an optimizer there is nothing to partition
            self.model_to_device()
        hand_back_freed()
        self.barrier()

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are partitioned."""
        return self.run_plan.plan.zero_stage == 3

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where ``configure_model`` builds the module: in host memory if it will be partitioned, with the device's draws. Lightning leaves
        that to ``zero.Init``, which isn't used here (``model_sharded_context``).
        """
        if not self.zero_stage_3:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("cpu"), drawn_on(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Like plain Lightning: optimizer and schedulers are, and stay, the user's own objects."""
        Strategy.setup_optimizers(self, trainer)

    def _take_weights_of_rank_0(self) -> None:
        """Give all ranks rank 0's weights: processes that were started one by one may have built different modules."""
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            moved = tensor.data.to(self.root_device)
            dist.broadcast(moved, src=0)
            if moved is not tensor.data:
                tensor.data.copy_(moved)

    def init_deepspeed(self) -> None:
        """Partition the module and its optimizer; a collective."""
        module, plan = self._module, self.run_plan.plan
        trainer = module.trainer
        parameters = list(module.parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ValueError(
                "configure_model has sharded the module, which DeepSpeed would do; leave that to the strategy, or run with allow=['fsdp']"
            )
        settings = zero_settings(
            plan,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            on_cpu=self.root_device.type == "cpu",
        )
        self._known = frozenset(map(id, parameters))
        self._frozen = frozenset(id(parameter) for parameter in parameters if not parameter.requires_grad)
        self.config = deepspeed_config(plan, settings, element="bf16" if str(trainer.precision) == "bf16-true" else "fp32")
        self._config_initialized = True
        users = bare_optimizer(self.optimizers[0]) if self.optimizers else None
        if users is not None and "optimizer" in plan.offload and self.root_device.type != "cpu":
            on_host(users)  # a CPU device is its own host: there the update stays that of the plan without offload
        relay = self._relay = None if users is None else OptimizerBridge(users)
        device = self.root_device
        self.model = doorway.initialize(module, relay, self.config, device_type=device.type, device_rank=device.index or 0)
        update_properties(module, device=device)
        if users is None or relay is None:
            return
        optimizer = self.model.optimizer
        doorway.share_partitions(optimizer)
        relay.attach(doorway.partitions(optimizer))
        self._reduction = Reduction([parameter for group in relay.trained for parameter in group])
        doorway.reduce_by(optimizer, self._reduction)
        self._clipping = Clipping(lambda: doorway.gradient_parts(optimizer))
        self.precision_plugin.clipping = self._clipping  # type: ignore[attr-defined]
        relay.clip = self._clipping.apply
        self._edits = Edits(list(doorway.copied_partitions(optimizer)), list(doorway.places(optimizer)))

    # -- steps -------------------------------------------------------------------------------------------------------------------------

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning's own loop accumulates, also in a shorter last window."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The context of a backward pass without a following step: gradients are kept, and at stage 1 not yet reduced."""
        engine = self.deepspeed_engine
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def backward_parts(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass; gradients are reduced to this rank's parts."""
        self._backward_ran = True
        self.deepspeed_engine.backward(loss, *args, scale_wrt_gas=False, **kwargs)

    def step_parts(self) -> None:
        """Step this rank's parts, and gather the parameters, unless they stay in parts."""
        if not self._backward_ran:  # no batch of the window had a loss
            return
        self._backward_ran = False
        assert self._relay is not None
        self._relay.used = self._reduction.settle(self.root_device)
        self._clipping.measure(self.root_device)
        self._edits.take_over()
        self.deepspeed_engine.step()
        self._edits.remember()
        self._clipping.done()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse newly trained parameters: DeepSpeed partitioned only gradients of parameters that were trained when it was set up."""
        refuse_new(self._module, lambda _, parameter: id(parameter) in self._known, "DeepSpeed", self._frozen, watch=self._exit)
        super().on_train_batch_start(batch, batch_idx)

    # -- pieces ------------------------------------------------------------------------------------------------------------------------

    @property
    def pieces(self) -> list[list[ParameterPart]]:
        """This rank's parts of the trained parameters, by group of the user's optimizer."""
        return [] if self._relay is None else self._relay.pieces

    def weights_changed(self) -> None:
        """To be called after writes to the module's parameters (at stage 3, their parts): updates the optimizer's copies."""
        self.deepspeed_engine.optimizer.refresh_fp32_params()

    def teardown(self) -> None:
        """Leave module and optimizer as they are, for the code that collects them; Lightning would move them, or what is left of them."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ZeroEngine(SplitMixin, ZeroFiles, _ZeroStrategy):
    """Executes a ZeRO plan: each rank has a part of the optimizer's state, from stage 2 on of the gradients, at stage 3 of the parameters.

    Args:
        run_plan: with a plan of engine ``"zero"``.
        forked: whether the ranks were forked from one process, so that they have the same weights.
    """

    def __init__(self, run_plan: RunPlan, *, forked: bool = True) -> None:
        doorway.import_deepspeed(run_plan.devices[0].kind)  # before Lightning does, which makes it look for devices
        super().__init__(config={}, parallel_devices=run_plan.torch_devices, logging_level=logging.ERROR)
        self._forked = forked
        self._forward_redirection = _StepCall()  # type: ignore[assignment]  # called alike
        self.attach(run_plan)

    def evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step sees parameters that DeepSpeed gathers."""

        @wraps(step)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            with self.inside(step=True):
                return step(*args, **kwargs)

        return gathered

    @property
    def _partitioned(self) -> bool:
        """Whether DeepSpeed's engine exists, which holds what is trained."""
        return bool(self.optimizers)

    def held_tensors(self) -> dict[str, Iterable[Tensor]]:
        """The tensors that DeepSpeed holds, by kind."""
        found = super().held_tensors()
        if self._partitioned:
            for kind, theirs in held_by_zero(self.model, self._module).items():
                if kind != "gradients":
                    found[kind] = chain(theirs, () if kind == "parameters" else found.get(kind, ()))
        return found

    def held_gradients(self) -> Iterator[Tensor]:
        """The gradients, which DeepSpeed holds."""
        if self._partitioned:
            yield from held_by_zero(self.model, self._module)["gradients"]
        yield from super().held_gradients()

    def held_on_host(self) -> Iterator[Tensor]:
        """DeepSpeed's copies and buffers in host memory, which it always has."""
        if not self._partitioned:
            yield from super().held_on_host()
            return
        yield from host_held_by_zero(self.model, self._module)
        if "optimizer" in self.run_plan.plan.offload:
            yield from optimizer_states(self)

    def hand_over(
        self, module: Any, optimizers: list[Any], *, keep: bool, affordable: Callable[[int], bool]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The states, made whole on rank 0; DeepSpeed is removed from the module."""
        state = self.lightning_module_state_dict()
        wanted = affordable(self.run_plan.plan.world_size)
        states = [self.optimizer_state(optimizer) for optimizer in optimizers] if wanted else []
        self.let_go()
        return state, states
