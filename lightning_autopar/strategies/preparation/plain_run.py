"""Runs the trainer's function up to its first batch as plain Lightning would, on one CPU, and says how the user's own step fails there.

Meant for a step that could be neither traced nor run bare: either planning is too simple for it, or it has a bug, which the run would meet
as well. Only Lightning's own loop can tell. Meant for a forked child. Knows Lightning's trainer; nothing of devices or plans.
"""

from __future__ import annotations

import dis
import logging
import os
import sys
import traceback
from functools import partial
from typing import Any

import torch

from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import Callback, DummyLogger, SingleDeviceStrategy, Trainer
from lightning_autopar._lightning_compat import TrainerFn, installed, is_overridden, run_attached
from lightning_autopar._root import FRAMEWORK, is_users, package_of_frame
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.trace.first_batch import RAISED
from lightning_autopar.memory.trace.trace import module_bytes
from lightning_autopar.strategies.base.worker_exception import Failure, out_of_memory
from lightning_autopar.strategies.calibration.calibration import be_silent

log = logging.getLogger(__name__)

#: A larger module isn't run, nor for longer: a bug shows itself early.
_MOST_BYTES, _SECONDS = 2 << 30, 20.0
#: A frame of one of these names is in the traceback of what the user's step raises, or Lightning's call of it.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "backward", "configure_optimizers")
#: Hooks of a callback that run before the first batch has ended, so that the step may need what they did.
_EARLY = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step"),
)
#: The same in the other loops.
_EARLY_ELSEWHERE = ("setup", "on_{0}_start", "on_{0}_epoch_start", "on_{0}_batch_start")
_LOOPS: dict[TrainerFn | None, str] = {TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
#: Exceptions that a bug in Python raises on every device. Others may come from an operator of torch that fails on the CPU alone.
_ANYWHERE = (AttributeError, IndexError, KeyError, NameError, TypeError)
#: Where the run is on CPUs, these are the user's bug, too. An OSError (a file, a lock, a port) may be of this process alone.
_ON_CPUS = (*_ANYWHERE, ArithmeticError, RuntimeError, ValueError)
#: Attributes of the trainer that differ between this trial and the run: the number of processes, which one this is, what planning adds.
_SURROUNDINGS = (
    *("accelerator", "callbacks", "device_ids", "global_rank", "is_global_zero", "local_rank", "model", "node_rank", "num_devices"),
    *("num_nodes", "strategy", "world_size"),
)
#: Modules whose functions tell of other processes and of GPUs; what reads a variable of the environment; words in the names of those that
#: tell of the same.
_TELLING, _VARIABLE = ("torch.distributed", "torch.cuda", "multiprocessing"), type(os.environ).__getitem__.__code__
_WORDS = ("RANK", "WORLD", "MASTER", "NODE", "SLURM", "CUDA")
#: Properties and methods of a LightningModule that read these for the code that calls them.
_READERS = ("all_gather", "global_rank", "local_rank")


def failure_of_step(trainer: Trainer, target: Target, *, batches: int = 1, last_resort: bool = False) -> Failure | None:
    """What the user's own step raises in its first batches; None where it doesn't, or where that can't be told without the run itself.

    Args:
        trainer: in a function, with module and data attached; it stays as it is.
        target: the kind of device that will run it.
        batches: how many of training; of another loop, one.
        last_resort: whether there will be no run that would show it: then a file that is missing counts, too.
    """
    module = trainer.lightning_module
    loop = _LOOPS.get(trainer.state.fn)
    early = _EARLY if loop is None else tuple(hook.format(loop) for hook in _EARLY_ELSEWHERE)
    if any(each is not module for each, _ in overridden(trainer, early)):
        return None  # it may write files or talk to a server, and the step may need it
    if is_overridden("on_load_checkpoint", module) or module_bytes(module) > _MOST_BYTES:
        return None
    try:
        return run_clean(partial(_run, batches=batches, last_resort=last_resort), trainer, target, timeout_seconds=_SECONDS)
    except (CannotTravel, ChildFailed):
        log.debug("nobody knows whether the step fails by itself", exc_info=True)
        return None


class _Enough(Exception):
    """The first batches have ended well."""


class _Stop(Callback):
    """Ends the run after its first batches."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._left -= 1
        if not self._left:
            raise _Enough

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise _Enough

    on_predict_batch_end = on_test_batch_end

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            raise _Enough


class _Asked:
    """Whether the user's code has asked for something that isn't as in the run."""

    yes = False

    @classmethod
    def note(cls, frame: Any) -> None:
        """Note it if the code of this frame is the user's, or a reader of a LightningModule that the user's code calls."""
        if package_of_frame(frame) in FRAMEWORK and frame.f_code.co_name in _READERS:
            frame = frame.f_back
        cls.yes |= is_users(frame)


class _Listener(DummyLogger):
    """Logs nothing, and notes whether the user's code has asked it for something, which it doesn't have."""

    def __getattribute__(self, name: str) -> Any:
        _Asked.note(sys._getframe(1))
        return super().__getattribute__(name)


def _run(trainer: Trainer, target: Target, *, batches: int, last_resort: bool) -> Failure | None:
    """In a forked child."""
    be_silent()
    module: Any = trainer.lightning_module
    module.trainer = trainer  # as in first_batch
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [
        _Stop(batches),
        *(callback for callback in callbacks if type(callback).__module__.partition(".")[0] != "lightning_autopar"),
    ]
    trainer.loggers = [_Listener() for _ in trainer.loggers]
    cpu = torch.device("cpu")
    try:
        with installed(trainer, SingleDeviceStrategy(cpu), module, [cpu], keep_sampler=True):
            _listen_to(trainer)
            sys.setprofile(_note_call)
            run_attached(trainer)
    except _Enough:
        return None
    except RAISED as error:
        sys.setprofile(None)
        return Failure.of(error) if not _Asked.yes and _is_the_users(error, target, last_resort=last_resort) else None
    return None


def _note_call(frame: Any, event: str, _: Any) -> None:
    """Note whether the user's code asks, by a call, for other processes, GPUs or the environment."""
    if event != "call":
        return
    variable = str(frame.f_locals.get("key")) if frame.f_code is _VARIABLE else ""
    if any(word in variable for word in _WORDS) or str(frame.f_globals.get("__name__")).startswith(_TELLING):
        caller = frame.f_back
        while caller is not None and package_of_frame(caller) in sys.stdlib_module_names:
            caller = caller.f_back
        if caller is not None:
            _Asked.note(caller)


def _listen_to(trainer: Trainer) -> None:
    """Note from now on whether the user's code asks the trainer for its surroundings."""
    own: Any = type(trainer)

    def read(self: Any, name: str) -> Any:
        if name in _SURROUNDINGS:
            _Asked.note(sys._getframe(1))
        return own.__getattribute__(self, name)

    trainer.__class__ = type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})


def _is_the_users(error: BaseException, target: Target, *, last_resort: bool = False) -> bool:
    """Whether the run itself would meet this error as well.

    Args:
        error: what a step raised on one CPU.
        last_resort: whether one of a file counts.
    """
    links = list(traceback.walk_tb(error.__traceback__))
    last, modules = links[-1][0], [frame.f_globals.get("__name__", "") for frame, _ in links]
    if not any(frame.f_code.co_name in _STEPS for frame, _ in links) or out_of_memory(error):
        return False
    if modules[-1] == "os" or any(name.startswith(("torch.distributed", "torch.cuda")) for name in modules):
        return False  # a variable of the environment, other processes or a GPU may be what it lacks
    if is_users(last) and target == "cpu" and isinstance(error, Exception):
        return last_resort or not isinstance(error, OSError)
    return isinstance(error, _ON_CPUS if target == "cpu" else _ANYWHERE) and not _by_statement(error, only_torchs=target == "cpu")


def _by_statement(error: BaseException, *, only_torchs: bool) -> bool:
    """Whether code raised it by ``raise`` or ``assert``, as what it found was not to its liking; with ``only_torchs`` torch may have."""
    link: Any = error.__traceback__
    while link.tb_next is not None:
        link = link.tb_next
    if only_torchs and package_of_frame(link.tb_frame) == "torch":
        return False
    return dis.opname[link.tb_frame.f_code.co_code[link.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
