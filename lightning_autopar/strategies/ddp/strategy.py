"""DDPEngine and SingleEngine: Lightning's DDP strategy on split batches, and Lightning's single-device strategy with the exact loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_autopar._lightning import DDPStrategy, SingleDeviceStrategy
from lightning_autopar._temporary import Exits, without_noise
from lightning_autopar.exact.logs.logging_hooks import sees_gradients
from lightning_autopar.exact.step.gradient_hooks import OurHook, trained
from lightning_autopar.exact.step.users_backward import average
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.out_of_memory.optimizer_step import FirstStep, is_guarded
from lightning_autopar.strategies.base.process_group import join_group
from lightning_autopar.strategies.base.refused_parameters import refuse_new
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.split_mixin import SplitMixin

#: Buffers that depend on the batch (BatchNorm's) are synchronised when they are computed; copying rank 0's at each step would only cost
#: time. torch 2.13 renamed the argument.
_NO_BUFFER_BROADCAST: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)
#: torch advises against ``find_unused_parameters``, once and on stderr, past Python's warnings. An unmodified module may leave parameters
#: out in some steps only (LayerDrop, a GAN's turns), which a trace of a few steps can't rule out. Without the search, such a step uses
#: gradients that the ranks haven't reduced: torch reports it only in the next forward, after the last step never, and if ranks leave out
#: different parameters, a collective pairs with another. A check before each optimizer's step would end runs that are correct today. The
#: search runs on the host alone: 0.1 ms for a GPT of 12 blocks (144 parameters), 0.5 ms for 48. It waits for the GPU only in a step in
#: which the rank has left a parameter out, to see whether the other ranks have, too (`tests/test_gpu_syncs.py` counts no other wait).
_ADVICE = (b"find_unused_parameters=True was specified in DDP constructor",)


class DDPEngine(SplitMixin, DDPStrategy):
    """Executes a DDP plan: each rank has a whole copy of the module."""

    reruns_batches = True
    completes_gradients = True
    _advised = False
    _trained: frozenset[int] = frozenset()
    _known: frozenset[int] = frozenset()
    #: Parameters that the optimizers step and the module doesn't hold: DDP doesn't average their gradients.
    _outside: tuple[Parameter, ...] = ()
    _reduced = False

    def __init__(self, run_plan: RunPlan, *, forked: bool) -> None:
        super().__init__(
            parallel_devices=run_plan.torch_devices,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            # Forked workers share the pages of the parent's module: they are equal already, and a broadcast would copy every page.
            init_sync=not forked,
            **_NO_BUFFER_BROADCAST,
        )
        self.attach(run_plan)
        self._views = self._exit.enter_context(Exits())

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        self._in_order = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._trained = frozenset(map(id, self._in_order))
        self._known = frozenset(map(id, model.parameters()))
        self._reduced = False
        if not self._trained:  # DDP refuses a module that has no gradients to reduce
            return model  # type: ignore[return-value]  # Lightning runs it as it is
        wrapped = super()._setup_model(model)
        after_forward: Any = wrapped._post_forward

        def once(output: Any) -> Any:
            if not (torch.is_grad_enabled() and wrapped.require_backward_grad_sync):
                return after_forward(output)
            wrapped.__dict__["_post_forward"] = after_forward
            with without_noise(_ADVICE):
                return after_forward(output)

        def without_hooks(*args: Any, **options: Any) -> Any:
            with wrapped._inside_ddp_forward():
                return wrapped.module.forward(*args, **options)

        wrapped.__dict__["_post_forward"] = once
        # This call runs training_step. Hooks on the module's forward aren't called by that, as on one device, and would get its arguments.
        wrapped.__dict__["_run_ddp_forward"] = without_hooks
        return wrapped

    @contextmanager
    def before_last_part(self) -> Iterator[None]:
        """A batch's parts add up their gradients in DDP's buckets, which the last part's backward reduces.

        Under ``no_sync`` DDP leaves gradients outside of its buckets, unless they are views of them already. The first backward pass that
        communicates makes them views; hence all parts of the first batch communicate. A gradient that is reduced twice is the mean of the
        ranks' equal means.
        """
        wrapped: Any = self.model
        if self._reduced or self._alone:
            with wrapped.no_sync():
                yield
            return
        before, wrapped.require_backward_grad_sync = wrapped.require_backward_grad_sync, True
        try:
            yield
        finally:
            wrapped.require_backward_grad_sync = before
        self._keep_views()

    def _keep_views(self) -> None:
        """Gradients are views of buckets now: from now on, let autograd add up parts' gradients there."""
        self._reduced = True
        for parameter in self.model.parameters():  # type: ignore[union-attr]  # it is set up
            if parameter.grad is not None:
                hook = OurHook(self._into_bucket, parameter, parameter.grad)
                self._views.callback(parameter.register_hook(hook).remove)

    def post_backward(self, closure_loss: Tensor) -> None:
        """See :class:`.EngineMixin`. A rank that runs its batches in more parts than planned learns of the buckets here."""
        if not self._stepping and getattr(self.model, "require_backward_grad_sync", True):
            if self._alone and not self._reduced:
                self._keep_views()
            self._average_outside()
        super().post_backward(closure_loss)

    def gradient_marks(self) -> list[int] | None:
        """The time at which DDP got each gradient."""
        wrapped: Any = self.model
        if not isinstance(wrapped, DistributedDataParallel) or not wrapped.require_backward_grad_sync:
            return None
        marks: list[int] = wrapped.reducer.get_backward_stats()
        return marks

    def send_gradients(self, parameters: list[Parameter]) -> None:
        """DDP takes a gradient when autograd has added to it. Here autograd adds nothing, and hooks on the parameters, which have seen the
        gradients, aren't called again.
        """
        hooks = [(each._backward_hooks, dict(each._backward_hooks)) for each in parameters if each._backward_hooks]
        for held, _ in hooks:
            held.clear()
        try:
            _Nothing.apply(*parameters).backward()  # type: ignore[no-untyped-call]
        finally:
            for held, theirs in hooks:
                held.update(theirs)

    def _into_bucket(self, parameter: Tensor, view: Tensor, gradient: Tensor) -> None:
        """A gradient is about to be added to the parameter's, which lies in the bucket unless an earlier batch's waits there."""
        assert self._micro is not None
        if parameter.grad is None and not self._micro.gradients.beside:
            with torch.no_grad():
                parameter.grad = view.zero_()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """DDP reduces only gradients of parameters that were trained when it was set up. Where a hook has unfrozen others, on every rank
        alike, another one is set up in its place.
        """
        module = self._module
        more = [id(each) for each in trained(module) if id(each) not in self._trained]
        if more:
            refuse_new(module, lambda _, parameter: id(parameter) in self._known, "DDP", watch=self._exit)
        if not self._known.isdisjoint(more):
            self._views.close()
            if isinstance(self.model, DistributedDataParallel):
                self.model._remove_autograd_hooks()
            self.model = self._setup_model(module)
            self._register_ddp_hooks()
        self._find_outside()
        super().on_train_batch_start(batch, batch_idx)

    def _find_outside(self) -> None:
        stepped = {id(each): each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]}
        before, self._outside = self._outside, tuple(each for key, each in stepped.items() if key not in self._known)
        if self._ddp_kwargs.get("init_sync", True):  # as DDP does with the module's
            known = set(map(id, before))
            for parameter in self._outside:  # in the optimizers' order, which is the same on all ranks
                if id(parameter) not in known:
                    dist.broadcast(parameter.detach(), 0)

    def _average_outside(self, reached: Iterable[Parameter] = (), parameters: Iterable[Parameter] = ()) -> None:
        reached = dict.fromkeys((*reached, *(each for each in self._outside if each.grad is not None)))
        if self._outside or reached:
            average(reached, [*parameters, *self._outside])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Not where the user's code sees gradients before the last one of accumulated batches: then each batch's are the whole batch's."""
        with nullcontext() if self._hooks or self._gradients_seen else super().block_backward_sync():
            yield

    @cached_property
    def _gradients_seen(self) -> bool:
        return sees_gradients(self._trainer)

    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            super()._register_ddp_hooks()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Under manual optimization DDP prepares for each backward here."""
        if self._advised or self._module.automatic_optimization:
            super().pre_backward(closure_loss)
            return
        self._advised = True
        with without_noise(_ADVICE):
            super().pre_backward(closure_loss)

    def exchange_gradients(self, reached: list[Parameter]) -> None:
        """DDP reduces gradients only in backward passes that it was prepared for."""
        self._average_outside(reached, [parameter for parameter in self._module.parameters() if parameter.requires_grad])

    def setup_distributed(self) -> None:
        """Like Lightning's, without re-seeding: every rank goes on from the parent's RNG state, as one device would."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        join_group(self, self._process_group_backend)


class _Nothing(torch.autograd.Function):
    """Leads backward to parameters, with nothing to add to their gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.number = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * ctx.number


class SingleEngine(EngineMixin, SingleDeviceStrategy):
    """Executes a plan of one device."""

    reruns_batches = True
    completes_gradients = True

    def __init__(self, run_plan: RunPlan) -> None:
        super().__init__(device=run_plan.torch_devices[0])
        self.attach(run_plan)
        #: The optimizers that have made a step.
        self._stepped: set[int] = set()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The optimizer's step; its first one may be done again."""
        if id(optimizer) not in self._stepped and not is_guarded(self.run_plan, optimizer):
            self._stepped.add(id(optimizer))
        if id(optimizer) in self._stepped:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        first = FirstStep(optimizer, self.run_plan.plan.devices[0])
        with first.guarded():
            found = super().optimizer_step(optimizer, closure, model, **kwargs)
        if first.done:
            self._stepped.add(id(optimizer))
        return found
