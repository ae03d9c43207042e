"""One step of a LightningModule, called as Lightning's loops would call it, without the loops. Knows Lightning; nothing of fakes or memory.

The module may be a fake copy: nothing here reads a tensor's value. The module sees a view of its trainer: reads pass through, and nothing
is written, logged or communicated, nor do the module's own writes reach a file.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar._lightning import LightningModule, LightningOptimizer, Precision, Trainer
from lightning_autopar._lightning_compat import TrainerFn, is_overridden, parse_optimizers
from lightning_autopar._root import LIGHTNING, names_all_gather
from lightning_autopar._temporary import patched
from lightning_autopar._trackers import untold
from lightning_autopar.memory.footprint import CREATE_GRAPH
from lightning_autopar.memory.trace.first_batch import RAISED
from lightning_autopar.memory.trace.no_writes import Written, no_writes
from lightning_autopar.text import error_line

#: The value of ``trainer.num_training_batches`` where nobody knows it, and of ``trainer.estimated_stepping_batches`` without an end.
_SOME_STEPS = 10_000


class Silent:
    """Stands for a logger: every attribute and call returns itself, and nothing happens."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does nothing, and returns itself."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


class TrainerView:
    """The trainer, read-only: reads pass through, writes vanish, nothing is logged or saved.

    Args:
        trainer: the trainer; None where there is none yet.
    """

    barebones = True
    progress_bar_callback = None

    def __init__(self, trainer: Trainer | None) -> None:
        object.__setattr__(self, "_real", trainer)
        object.__setattr__(self, "_own", {"optimizers": [], "lr_scheduler_configs": [], "precision_plugin": Precision()})
        object.__setattr__(self, "asked", {})
        #: Whether one of the user's steps has asked for its number, or its epoch's.
        object.__setattr__(self, "numbered", False)
        #: Whether one of the user's steps runs.
        object.__setattr__(self, "stepping", False)

    @property
    def num_training_batches(self) -> int | float:
        """The true number if it is known, else some number: of a stream, and where there are no loaders."""
        known = getattr(self._real, "num_training_batches", 0)
        return known if 0 < known < float("inf") else _SOME_STEPS

    @property
    def strategy(self) -> Any:
        """The trainer's strategy without its communication, which isn't set up."""
        return StrategyView(getattr(self._real, "strategy", None))

    def give(self, **values: Any) -> None:
        """Use these values instead of the trainer's."""
        self._own.update(values)

    @property
    def logger(self) -> Any:
        """The first of :attr:`loggers`."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """A silent one for each that the trainer has; of its class to ``isinstance``, by which steps look for theirs."""
        if self._real is None or not self._real.loggers:
            return []
        if self.stepping:
            self.asked["logger"] = None
        return [type("Silent", (Silent,), {"__class__": type(logger)})() for logger in self._real.loggers]

    @property
    def estimated_stepping_batches(self) -> int:
        """As Lightning's, of :attr:`num_training_batches`."""
        steps, epochs = getattr(self._real, "max_steps", -1), getattr(self._real, "max_epochs", None) or -1
        together = getattr(self._real, "accumulate_grad_batches", 1)
        total = math.ceil(self.num_training_batches / together) * epochs if epochs > 0 else _SOME_STEPS
        return min(steps, total) if steps > 0 else total

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in DIFFERS and _asked_by_users(sys._getframe(1)):
            self.asked[name] = None
        if name in _NUMBERS and self.stepping and _asked_by_users(sys._getframe(1)):
            object.__setattr__(self, "numbered", True)
        own = object.__getattribute__(self, "_own")
        if name in own:
            return own[name]
        real = object.__getattribute__(self, "_real")
        if real is None:
            if name in _WITHOUT_TRAINER:
                return _WITHOUT_TRAINER[name]
            raise AttributeError(f"there is no trainer to ask for {name!r}")
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        return None


#: Attributes of a trainer whose values differ between plans, or between ranks.
DIFFERS = ("world_size", "num_devices", "is_global_zero", "global_rank", "local_rank", "node_rank")
_NUMBERS = ("global_step", "current_epoch")


def _asked_by_users(caller: FrameType) -> bool:
    """Whether a user's code asks, also through the module's own ``global_rank``; and not a method of Lightning's, such as ``print``."""
    return not caller.f_globals.get("__name__", "").startswith(LIGHTNING) or caller.f_code.co_name in (*DIFFERS, *_NUMBERS)


class StrategyView:
    """A strategy of one process, which waits for nobody and exchanges nothing; reads pass through.

    Args:
        strategy: the trainer's own; None where there is none.
    """

    def __init__(self, strategy: Any) -> None:
        self._real = strategy
        self.root_device = torch.device("cpu")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for nobody."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the only process has."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Of one process."""
        return tensor

    all_gather = reduce_boolean_decision = reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_WITHOUT_TRAINER: dict[str, Any] = {
    "accumulate_grad_batches": 1,
    "callbacks": [],
    "current_epoch": 0,
    "datamodule": None,
    "global_rank": 0,
    "global_step": 0,
    "gradient_clip_algorithm": None,
    "gradient_clip_val": None,
    "is_global_zero": True,
    "local_rank": 0,
    "max_epochs": 1,
    "max_steps": -1,
    "num_devices": 1,
    "num_nodes": 1,
    "is_last_batch": False,
    "world_size": 1,
}


log = logging.getLogger(__name__)

#: Notes of steps without a backward.
NO_LOSS = "training_step returned no loss"
NO_GRADIENT = "training_step returned a loss that has no gradient"
STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class BareStep:
    """Calls a module's hooks for a step in the loops' order.

    Args:
        module: the copy of the user's module; it is changed.
        trainer: the trainer that the user passed it to, if there is one.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        autocast_dtype: of mixed precision; None for none.
        default_dtype: the default floating-point type within the step, as the true-precision plugins set it.
        enter: called with the name of each phase as it starts: ``"forward"``, ``"backward"``, ``"optimizer"``.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer | None,
        stage: str,
        *,
        autocast_dtype: torch.dtype | None,
        default_dtype: torch.dtype | None,
        enter: Callable[[str], None],
    ) -> None:
        self.module = module
        self.stage = stage
        self.optimizers: list[Optimizer] = []
        self.notes: dict[str, None] = {}
        #: Whose hooks :meth:`batch_hooks` calls, by the hook's name; and the loop that runs.
        self.hooks: Mapping[str, Sequence[Any]] = {}
        self.loop = "train"
        #: The number of the evaluation's loader.
        self.loader = 0
        #: Whether the last step of automatic optimization had a backward.
        self.went_back = False
        self._trainer = TrainerView(trainer)
        #: Whether a fit validates: the module has its optimizers and schedulers then.
        self._in_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self._wrapped: list[Any] = []
        self._schedulers: list[Any] = []
        self._autocast_dtype = autocast_dtype
        self._default_dtype = default_dtype
        self._enter = enter
        self._kept: Any = None
        self._written: dict[str, Written] = {}
        self._attach()

    @property
    def asked(self) -> tuple[str, ...]:
        """What the module has asked its trainer for, of ``DIFFERS``, and the paths of the files that it has written."""
        told = () if names_all_gather(self.module) else ("world_size", "num_devices")  # 1 in each run, as here
        return (*(name for name in self._trainer.asked if name not in told), *self._written)

    @property
    def numbered(self) -> bool:
        """Whether a step has asked its trainer for its number."""
        return bool(self._trainer.numbered)

    @property
    def number(self) -> int:
        """The number of the trainer's next step."""
        return int(self._trainer.global_step)

    def give_number(self, number: int) -> None:
        """Let the next steps be those of this number."""
        self._trainer.give(**dict.fromkeys(_NUMBERS, number))

    @property
    def accumulate(self) -> int:
        """Batches to an optimizer step."""
        return int(self._trainer.accumulate_grad_batches) if self.module.automatic_optimization else 1

    def _attach(self) -> None:
        """Give the module its trainer, and stubs where Lightning would use the strategy."""
        module = self.module
        for child in module.modules():
            if isinstance(child, LightningModule):
                child.__dict__["_trainer"] = self._trainer
                child.__dict__.update(
                    log=_nothing,
                    log_dict=_nothing,
                    print=_nothing,
                    all_gather=lambda data, *args, **kwargs: data,
                    manual_backward=self._backward,
                )
            if hasattr(child, "_device"):
                child.__dict__["_device"] = torch.device("cpu")
        module.__dict__["optimizers"] = self._optimizers
        module.__dict__["lr_schedulers"] = self._lr_schedulers
        stages = {"fit": "training", "validate": "validating", "test": "testing", "predict": "predicting"}
        self._trainer.give(lightning_module=module, model=module, sanity_checking=False, evaluating=self.stage in ("validate", "test"))
        self._trainer.give(**{name: stage == self.stage for stage, name in stages.items()})

    def configure(self) -> None:
        """``configure_model`` ahead of :meth:`build`, which doesn't call it again: not every user's may be called twice."""
        if is_overridden("configure_model", self.module):
            with self._defaults(), no_writes(self._written):
                self.module.configure_model()
            self.module.__dict__["configure_model"] = _nothing

    def build(self) -> None:
        """``configure_model``, the mode of the stage, and the optimizers."""
        with self._defaults(), no_writes(self._written):
            if is_overridden("configure_model", self.module):
                self.module.configure_model()
        if self.stage != "fit":
            self.module.eval()
            if not self._in_fit:
                return
        conf: Any = None
        if is_overridden("configure_optimizers", self.module):
            with no_writes(self._written):
                conf = self.module.configure_optimizers()
        optimizers, schedulers = ([], []) if conf is None else _parse(conf)
        self.optimizers = optimizers if self.stage == "fit" else []
        self._schedulers = schedulers
        strategy = SimpleNamespace(lightning_module=self.module, optimizer_step=self._step_optimizer)
        self._wrapped = []
        for optimizer in optimizers:
            wrapped = LightningOptimizer(optimizer)
            wrapped._strategy = strategy  # type: ignore[assignment]
            self._wrapped.append(wrapped)
        configs = [SimpleNamespace(scheduler=s, interval="epoch", frequency=1, monitor=None, name=None) for s in schedulers]
        self._trainer.give(optimizers=optimizers, lr_scheduler_configs=configs)
        if self.stage != "fit":
            return
        for name in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
            self._hook(name)

    def training_step(self, batch: Any, batch_idx: int, *, first: bool = True, last: bool = True) -> None:
        """One step of training: forward, backward, and the optimizer if it is the last one of an accumulation.

        Args:
            first: the first of an accumulation: gradients are reset, after forward, as in Lightning's closure.
            last: the last one: the optimizer steps.
        """
        self._kept = None
        self.went_back = False
        if self._hook("on_train_batch_start", batch, batch_idx) == -1:
            self.notes["on_train_batch_start returned -1; the footprint is that of a batch that isn't skipped"] = None
        if not self.module.automatic_optimization:
            self._enter("forward")
            with self._precision():
                output = self._call("training_step", batch, batch_idx)
            self._kept = {"loss": output} if isinstance(output, Tensor) else output or {}
            return
        # To the hooks, a LightningOptimizer looks like an Optimizer, as in Lightning's own loop.
        optimizer = cast(Any, self._wrapped[0]) if self._wrapped else None

        @torch.enable_grad()  # as Lightning's: an optimizer's step may be under no_grad
        def closure() -> Tensor | None:
            self._enter("forward")
            with self._precision():
                output = self._call("training_step", batch, batch_idx)
            loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
            # As in Lightning's ClosureResult, drop the step's output, whose storage may be large (``Loss.cpp``).
            kept = None if loss is None else loss.detach().clone()
            self._kept = {} if kept is None else {**output, "loss": kept} if isinstance(output, Mapping) else {"loss": kept}
            del output
            loss = loss if loss is None else loss / self.accumulate
            if loss is None:
                self.notes[NO_LOSS] = None
                return None
            if first and optimizer is not None:
                self._hook("on_before_zero_grad", optimizer)
                self.module.optimizer_zero_grad(0, batch_idx, optimizer)
            if not loss.requires_grad:
                self.notes[NO_GRADIENT] = None
            else:
                self._hook("on_before_backward", loss)
                self.module.backward(loss)
                self.went_back = True
                self._hook("on_after_backward")
            self._enter("optimizer")
            if last and optimizer is not None:
                self._unscale(optimizer)
                self._hook("on_before_optimizer_step", optimizer)
                self.module.configure_gradient_clipping(
                    optimizer,
                    gradient_clip_val=self._trainer.gradient_clip_val,
                    gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
                )
            return loss

        if last and optimizer is not None:
            self.module.optimizer_step(0, batch_idx, optimizer, closure)
        else:
            closure()
        self._hook("on_train_batch_end", self._kept, batch, batch_idx)

    def evaluation_step(self, batch: Any, stage: str | None = None) -> None:
        """One step of validation, test or prediction, without gradients; by default of this object's own stage."""
        self._kept = None
        self._enter("forward")
        with torch.no_grad(), self._precision():
            self._kept = self._call(STEPS[stage or self.stage], batch, 0)

    def begin_evaluation(self, stage: str = "validation") -> None:
        """After steps of training: what Lightning calls before the first batch of a validation loop within ``fit``, or of a test."""
        self._kept, self.loop = None, stage
        self._trainer.give(training=False, validating=stage == "validation", testing=stage == "test")
        self.module.eval()
        for name in (f"on_{stage}_start", f"on_{stage}_epoch_start"):
            self._hook(name)

    def _call(self, name: str, batch: Any, batch_idx: int) -> Any:
        """Call a step with as many arguments as it takes."""
        step = getattr(self.module, name)
        accepted = inspect.signature(step).parameters
        if "dataloader_iter" in accepted:
            raise TypeError(f"{name} takes a dataloader_iter, and draws its batches by itself")
        kwargs: dict[str, Any] = {}
        if "batch_idx" in accepted or len(accepted) > 1:
            kwargs["batch_idx"] = batch_idx
        if index := loader_index(step, self.loader):
            kwargs["dataloader_idx"] = index[0]
        object.__setattr__(self._trainer, "stepping", True)
        before = untold()
        try:
            with no_writes(self._written):
                return step(batch, *kwargs.values())
        finally:
            object.__setattr__(self._trainer, "stepping", False)
            if untold() > before:
                self._trainer.asked["logger"] = None

    def _hook(self, name: str, *args: Any) -> Any:
        """Call a hook that the module overrides; if it fails, note that and go on, as hooks rarely matter to memory."""
        return self._called(name, getattr(self.module, name), *args) if is_overridden(name, self.module) else None

    def batch_hooks(self, point: str, *given: Any) -> None:
        """Call the hooks at a batch's ``"start"``, which may change it, or at its ``"end"``, as Lightning does around a step."""
        name = f"on_{self.loop}_batch_{point}"
        owners = self.hooks.get(name, ())
        for owner in owners:
            hook = getattr(owner, name)
            self._called(
                name, hook, *(() if owner is self.module else (self._trainer, self.module)), *given, *loader_index(hook, self.loader)
            )
        if name == "on_train_batch_start" and self.module not in owners:
            self._hook(name, *given)

    def _called(self, name: str, hook: Callable[..., Any], *args: Any) -> Any:
        try:
            with no_writes(self._written):
                return hook(*args)
        except RAISED as error:
            log.debug("%s failed while tracing", name, exc_info=True)
            self.notes[f"{name} was left out, as it failed while tracing ({error_line(error)})"] = None
            return None

    # -- what Lightning's strategy would do ------------------------------------------------------------------------------------------------

    def _unscale(self, optimizer: Optimizer) -> None:
        """Under float16: ``GradScaler.unscale_``, one pass over all gradients of a type, unless the optimizer does so itself."""
        if self._autocast_dtype is not torch.float16 or getattr(optimizer, "_step_supports_amp_scaling", False):
            return
        found = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in found:
            if gradient is not None and gradient.layout is torch.strided:
                by_type.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.ones(1))

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.module.backward(loss, *args, **kwargs)

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found: list[Any] = list(self._wrapped if use_pl_optimizer else self.optimizers)
        return found[0] if len(found) == 1 else found

    def _lr_schedulers(self) -> Any:
        return None if not self._schedulers else self._schedulers[0] if len(self._schedulers) == 1 else self._schedulers

    def _step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        return optimizer.step(closure=closure, **kwargs)

    def _precision(self) -> AbstractContextManager[Any]:
        """The context that the precision plugin's ``forward_context`` would give."""
        if self._autocast_dtype is not None:
            return torch.autocast("cpu", dtype=self._autocast_dtype, cache_enabled=False)
        return self._defaults()

    def _defaults(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._default_dtype is None else default_dtype(self._default_dtype)


def loader_index(hook: Callable[..., Any], loader: int = 0) -> tuple[int, ...]:
    """What a step, or a hook at a batch's start or end, gets behind all else: its loader's number, where it isn't 0 or is insisted on."""
    wanted = inspect.signature(hook).parameters.get("dataloader_idx")
    return (loader,) if wanted is not None and (loader or wanted.default is inspect.Parameter.empty) else ()


@contextmanager
def announced(
    optimizers: Iterable[Optimizer], *, automatic: bool, enter: Callable[[str], None], nested: Callable[[str], None]
) -> Iterator[None]:
    """While open, ``enter`` is called for each backward pass and each optimizer's step, also those that the user starts.

    Args:
        automatic: whether the optimizer follows backward; if not, the user's step decides what follows.
        nested: gets the name of a function whose backward runs another backward pass, from which parameters get gradients; and
            :data:`CREATE_GRAPH` for a backward pass with that argument.
    """
    original = torch.autograd.backward
    inside = False

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # a backward pass within a node of another: reentrant checkpointing
            if _reaches_parameters([tensors] if isinstance(tensors, Tensor) else tensors):
                function = getattr(type(torch._C._current_autograd_node()), "_forward_cls", None)
                nested("a hook" if function is None else f"{function.__module__}.{function.__qualname__}")
            return original(tensors, *args, **kwargs)
        if kwargs.get(CREATE_GRAPH, args[2:3] == (True,)) and _reaches_parameters([tensors] if isinstance(tensors, Tensor) else tensors):
            nested(CREATE_GRAPH)
        inside = True
        enter("backward")
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            inside = False
        enter("optimizer" if automatic else "forward")
        return result

    with ExitStack() as stack:
        stack.enter_context(patched(torch.autograd, "backward", backward))
        for optimizer in optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: enter("optimizer"))
            after = optimizer.register_step_post_hook(lambda *_: enter("forward"))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _reaches_parameters(tensors: Iterable[Tensor]) -> bool:
    """Whether parameters get gradients from a backward pass that begins at these."""
    left: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(getattr(node, "variable", None), nn.Parameter):
                return True
            left += [inner for inner, _ in node.next_functions]
    return False


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While open, new floating-point tensors have that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parse(conf: Any) -> tuple[list[Optimizer], list[Any]]:
    """The optimizers and schedulers in what ``configure_optimizers`` returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizers, schedulers = parse_optimizers(conf)
    plain = [optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer for optimizer in optimizers]
    take_hooks(plain)
    return plain, [scheduler["scheduler"] if isinstance(scheduler, Mapping) else scheduler for scheduler in schedulers]


def take_hooks(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers be hooked around their steps whose classes don't call torch's ``__init__``, as many don't that wrap another one."""
    for optimizer in optimizers:
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if type(hooks := vars(optimizer).get(name, {})) is dict:  # from which torch can't take a hook back
                vars(optimizer)[name] = OrderedDict(hooks)
                Optimizer._patch_step_function(optimizer)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
