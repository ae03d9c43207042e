"""Where the user's code logs: the hooks around steps after which something may read what was logged, and ``log`` itself.

Knows Lightning's loops and modules; nothing of ranks, or of what becomes of the values. The module and the trainer are shadowed by instance
attributes, which is undone by what each function returns.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule

from lightning_autopar._lightning_compat import is_overridden

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: What can be logged while a batch is worked on, but outside its step.
_BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


def logs_between_steps(trainer: Trainer) -> bool:
    """Whether the user's code may log in a hook of a batch. Lightning's own callbacks have the hooks, but don't log in them."""
    module: Any = trainer.lightning_module
    watched: list[Any] = [module]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    watched += [each for each in callbacks if not type(each).__module__.startswith("lightning.pytorch.")]
    parents = {id(each): Callback if isinstance(each, Callback) else LightningModule for each in watched}
    return any(hasattr(parents[id(each)], hook) and is_overridden(hook, each) for each in watched for hook in _BATCH_HOOKS)


def shadow_hooks(
    trainer: Trainer,
    before_batch_end: Callable[[], None],
    before_epoch_end: Callable[[], None],
    after_train_epoch_end: Callable[[], None],
    with_step: Callable[[Any], Any],
) -> Callable[[], None]:
    """Be called where Lightning or a monitoring callback is about to read what hooks logged; the returned function undoes it.

    Args:
        trainer: of the module.
        before_batch_end: before Lightning reads a batch's values.
        before_epoch_end: before it reads an epoch's.
        after_train_epoch_end: after the module's hook of this name, before the callbacks'.
        with_step: what the optimizer is given of an automatic step, from what Lightning would give it.
    """
    connector = trainer._logger_connector

    def on_batch_end() -> None:
        before_batch_end()
        type(connector).on_batch_end(connector)

    def on_epoch_end() -> None:
        before_epoch_end()
        type(connector).on_epoch_end(connector)

    connector.on_batch_end, connector.on_epoch_end = on_batch_end, on_epoch_end  # type: ignore[method-assign]
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def _make_step_fn(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        step = type(optimization)._make_step_fn(optimization, *args, **kwargs)
        return lambda: with_step(step())

    optimization.__dict__["_make_step_fn"] = _make_step_fn
    module: Any = trainer.lightning_module
    shadowed = module.__dict__.get("on_train_epoch_end")

    def on_train_epoch_end(self: LightningModule) -> None:
        if shadowed is None:
            type(self).on_train_epoch_end(self)
        else:
            shadowed()
        after_train_epoch_end()

    on_train_epoch_end.__wrapped__ = module.on_train_epoch_end  # type: ignore[attr-defined]  # is_overridden() looks behind it
    module.__dict__["on_train_epoch_end"] = types.MethodType(on_train_epoch_end, module)

    def undo() -> None:
        del connector.on_batch_end, connector.on_epoch_end, optimization.__dict__["_make_step_fn"]
        del module.__dict__["on_train_epoch_end"]
        if shadowed is not None:
            module.__dict__["on_train_epoch_end"] = shadowed

    return undo


def shadow_log(module: LightningModule, counts: Callable[[str, Any], bool]) -> Callable[[], None]:
    """Ask before each ``log`` of the module, with name and value, whether it counts; the returned function undoes it."""
    shadowed = module.__dict__.get("log")

    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not counts(name, value):
            return
        own = type(self).log.__get__(self) if shadowed is None else shadowed
        own(name, value, *args, **kwargs)

    module.__dict__["log"] = types.MethodType(log, module)

    def undo() -> None:
        del module.__dict__["log"]
        if shadowed is not None:
            module.__dict__["log"] = shadowed

    return undo
