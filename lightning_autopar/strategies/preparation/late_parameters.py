"""Which hook puts trained parameters into the module when the run has begun already, as callbacks do that train a probe beside it.

No engine of several processes would reduce their gradients. The run itself refuses them as well, but ends by it; a planner that knows of
them chooses one device. Knows hooks; no engine and no plan.
"""

from __future__ import annotations

import dis
import inspect
import logging
from functools import partial
from typing import Any

from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.logs.logging_hooks import overridden

_LOG = logging.getLogger(__name__)
#: Hooks that Lightning calls after the strategy has wrapped the module, before the first batch.
_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
#: Methods of a module, and of the containers in it, that put something there.
_METHODS = {"add_module", "register_module", "register_parameter", "append", "extend", "insert", "update"}
_SECONDS = 20.0


def late_parameters(trainer: Trainer) -> str | None:
    """A sentence on the first hook after which the module has another trained parameter; None where there is none.

    Only hooks whose code writes to the module are run, each once, in a child. Where one can't be run without the run itself, nothing is
    said: the run refuses such parameters when a gradient reaches them.

    Args:
        trainer: with its module and callbacks; it stays as it is.
    """
    writing = [(index, hook) for index, (each, hook) in enumerate(overridden(trainer, _HOOKS)) if _writes_to_module(each, hook, trainer)]
    if not writing:
        return None
    try:
        return run_clean(partial(_tried, indices=[index for index, _ in writing]), trainer, timeout_seconds=_SECONDS)
    except (CannotTravel, ChildFailed):
        _LOG.debug("nobody knows whether a hook puts parameters into the module", exc_info=True)
        return None


def _writes_to_module(owner: Any, hook: str, trainer: Trainer) -> bool:
    """Whether a hook's own code sets an attribute of the module, or puts something into it. Others aren't run: they may write files."""
    function = inspect.unwrap(getattr(getattr(owner, hook), "__func__", getattr(owner, hook)))
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    # The last argument is the module: a callback's hook gets the trainer and the module, a module's own hook itself.
    module = code.co_varnames[code.co_argcount - 1] if code.co_argcount else ""
    before: Any = None
    of_module = False  # whether what was loaded last is the module, or something in it
    for each in dis.get_instructions(code):
        loaded = None if before is None else before.argval[-1] if isinstance(before.argval, tuple) else before.argval
        if each.opname == "STORE_ATTR" and loaded == module:
            return True
        if of_module and each.opname in ("LOAD_METHOD", "LOAD_ATTR") and each.argval in _METHODS:
            return True
        of_module = each.argval == module if each.opname.startswith("LOAD_FAST") else of_module and each.opname == "LOAD_ATTR"
        before = each
    return False


def _tried(trainer: Trainer, indices: list[int]) -> str | None:
    """In a forked child: the sentence."""
    module: Any = trainer.lightning_module
    module.trainer = trainer
    for index, (owner, hook) in enumerate(overridden(trainer, _HOOKS)):
        if index not in indices:
            continue
        before = {id(parameter) for parameter in module.parameters()}
        arguments = () if owner is module else (trainer, module)
        try:
            getattr(owner, hook)(*arguments)
        except Exception:  # it needs what only the run has
            _LOG.debug("%s can't be run alone", hook, exc_info=True)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in before:
                whose = "the module" if owner is module else f"the callback {type(owner).__name__}"
                return f"{whose} puts the parameter {name!r} into the module in {hook}, and each process would train its own one"
    return None
