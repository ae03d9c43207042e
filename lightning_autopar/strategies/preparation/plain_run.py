"""Runs the trainer's function up to its first batch as plain Lightning would, on one CPU, and says how the user's own step fails there.

Meant for a step that could be neither traced nor run bare: either planning is too simple for it, or it has a bug, which the run would meet
as well. Only Lightning's own loop can tell. Meant for a forked child. Knows Lightning's trainer; nothing of devices or plans.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

import torch

from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import Callback, DummyLogger, SingleDeviceStrategy
from lightning_autopar._lightning_compat import installed, is_overridden, run_attached
from lightning_autopar.memory.trace.first_batch import RAISED
from lightning_autopar.memory.trace.trace import module_bytes
from lightning_autopar.memory.workspace import Target
from lightning_autopar.strategies.base.worker_exception import Failure
from lightning_autopar.strategies.calibration.calibration import be_silent

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

#: A larger module isn't run, nor for longer: a bug shows itself early.
_MOST_BYTES, _SECONDS = 2 << 30, 20.0
#: Packages whose frames a user doesn't look for, and whose callbacks leave the module alone.
_NOT_THE_USERS = ("lightning", "lightning_autopar", "lightning_fabric", "pytorch_lightning", "torch")
#: A frame of one of these names is in the traceback of what the user's step raises, or Lightning's call of it.
_STEPS = ("training_step", "validation_step", "backward", "configure_optimizers")
#: Frames of every call of a module, which say nothing.
_CALLS = ("_wrapped_call_impl", "_call_impl")
#: Hooks of a callback that run before the first batch has ended, so that the step may need what they did.
_EARLY = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step"),
)
#: Exceptions that a bug in Python raises on every device. Others may come from an operator of torch that fails on the CPU alone.
_ANYWHERE = (AttributeError, IndexError, KeyError, NameError, TypeError)


def failure_of_step(trainer: Trainer, target: Target) -> Failure | None:
    """What the user's own step raises in its first batch; None where it doesn't, or where that can't be told without the run itself.

    Args:
        trainer: in a function, with module and data attached; it stays as it is.
        target: the kind of device that will run it.
    """
    module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not _is_known(callback)]
    if any(is_overridden(hook, callback, Callback) for callback in others for hook in _EARLY):
        return None  # it may write files or talk to a server, and the step may need it
    if is_overridden("on_load_checkpoint", module) or module_bytes(module) > _MOST_BYTES:
        return None
    try:
        return run_clean(_run, trainer, target, timeout_seconds=_SECONDS)
    except (CannotTravel, ChildFailed):
        log.debug("nobody knows whether the step fails by itself", exc_info=True)
        return None


class _Enough(Exception):
    """The first batch has ended well."""


class _Stop(Callback):
    """Ends the run after its first batch."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise _Enough


class _Listener(DummyLogger):
    """Logs nothing, and notes whether the user's code has asked it for something, which it doesn't have."""

    asked = False

    def __getattribute__(self, name: str) -> Any:
        if _package(sys._getframe(1).f_globals.get("__name__", "")) not in _NOT_THE_USERS:
            type(self).asked = True
        return super().__getattribute__(name)


def _run(trainer: Trainer, target: Target) -> Failure | None:
    """In a forked child."""
    be_silent()
    module: Any = trainer.lightning_module
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [_Stop(), *(callback for callback in callbacks if _package(type(callback).__module__) != "lightning_autopar")]
    trainer.loggers = [_Listener() for _ in trainer.loggers]
    cpu = torch.device("cpu")
    try:
        with installed(trainer, SingleDeviceStrategy(cpu), module, [cpu], keep_sampler=True):
            run_attached(trainer)
    except _Enough:
        return None
    except RAISED as error:
        return None if _Listener.asked or not _is_the_users(error, target) else Failure.of(error, shown=_shown(error))
    return None


def _is_the_users(error: BaseException, target: Target) -> bool:
    """Whether the run itself would meet this error as well."""
    frames = traceback.extract_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, MemoryError) or not any(frame.name in _STEPS for frame in frames):
        return False
    if any(name.startswith("torch.distributed") for name in modules):
        return False  # several processes may be what it lacks
    installed_at = sysconfig.get_path("purelib")
    return target == "cpu" or (isinstance(error, _ANYWHERE) and not frames[-1].filename.startswith(installed_at))


def _shown(error: BaseException) -> str:
    """Its traceback from the user's first line on: at most four frames of his and the last four."""
    frames = traceback.extract_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    first = next((index for index, name in enumerate(modules) if _package(name) not in _NOT_THE_USERS), 0)
    theirs = [frame for frame in frames[first:] if frame.name not in _CALLS]
    kept = traceback.format_list(theirs if len(theirs) <= 8 else theirs[:4])
    if len(theirs) > 8:
        kept += [f"  ... {len(theirs) - 8} more\n", *traceback.format_list(theirs[-4:])]
    return "".join(["Traceback (most recent call last):\n", *kept, *traceback.format_exception_only(type(error), error)])


def _package(name: str) -> str:
    return name.partition(".")[0]


def _is_known(callback: Callback) -> bool:
    return _package(type(callback).__module__) in _NOT_THE_USERS
