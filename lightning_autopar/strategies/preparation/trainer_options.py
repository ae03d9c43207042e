"""Which engines the Trainer's options rule out, with a sentence for each. Knows Lightning's options; nothing of memory or time.

Among them a hook that puts trained parameters into the module when the run has begun already, as callbacks do that train a probe beside
it. No engine of several processes would reduce their gradients. The run itself refuses them as well, but ends by it; a planner that knows
of them chooses one device.
"""

from __future__ import annotations

import dis
import inspect
import logging
import re
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lightning_autopar import engines
from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import Trainer, callbacks, is_param_in_hook_signature, lightning_hasattr
from lightning_autopar._lightning_compat import TrainerFn, has_own_loaders
from lightning_autopar._root import FRAMEWORK
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.plans import all_engines

#: The name of one of several GPUs.
_NUMBERED = re.compile(r"cuda:\d+")


def finder_of(trainer: Trainer) -> Any:
    """The ``BatchSizeFinder`` whose search can be answered for several devices (``batch_size``); None where there is none, or where it is
    left to Lightning: a class of the user's own, another stage than fit, or loaders whose batch size the module doesn't set.
    """
    present: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # as below
    found = [each for each in present if type(each) is callbacks.BatchSizeFinder]
    if len(found) != 1 or trainer.state.fn != TrainerFn.FITTING or getattr(trainer, "fast_dev_run", False):
        return None
    own = has_own_loaders(trainer) and lightning_hasattr(trainer.lightning_module, found[0]._batch_arg_name)
    return found[0] if own else None


def exclusions(trainer: Trainer, *, finds: bool = False, on_gpus: bool = False) -> dict[str, str]:
    """The engines that this trainer can't use, with the reason.

    Args:
        trainer: its callbacks, precision and module are read.
        finds: whether the search of a ``BatchSizeFinder`` can be answered, see :func:`finder_of`.
        on_gpus: whether it would run on GPUs: code that names one falls back to the CPU where there is none.

    Returns:
        Engine name → sentence; the name ``"multi"`` stands for every plan of more than one device, ``"micro_batches"`` for every plan that
            runs a batch in parts.
    """
    excluded: dict[str, str] = {}
    module = trainer.lightning_module
    present: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    kinds = {base.__name__: type(callback).__name__ for callback in present for base in type(callback).__mro__}
    if "BatchSizeFinder" in kinds:
        excluded["micro_batches"] = "the callback BatchSizeFinder looks for the batch that fits in one piece"
        if not finds or finder_of(trainer) is None:
            excluded["multi"] = f"the search of the callback {kinds['BatchSizeFinder']} runs on one device, as in Lightning itself"
    if "LearningRateFinder" in kinds and trainer.state.fn == TrainerFn.FITTING:
        excluded["multi"] = (
            "the callback LearningRateFinder judges by the loss on its own device, which would be that of a part of the batch"
        )
    for name, submodule in module.named_modules():
        rescales = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.max_norm is not None
        if rescales and trainer.state.fn == TrainerFn.FITTING:
            excluded["multi"] = f"{name!r} has max_norm, which rescales the rows of a batch in place: each device would do so to other rows"
    if on_gpus and (named := _numbered_gpu(module)) is not None:
        excluded["multi"] = f"{named}, which is one GPU for all ranks; let it use self.device, or 'cuda', which is a rank's own"
    stage = trainer.state.fn
    if stage == TrainerFn.FITTING and (late := late_parameters(trainer)) is not None:
        excluded["multi"] = late
    if stage == TrainerFn.FITTING and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        excluded["multi"] = "training_step takes dataloader_iter and draws batches by itself, so that they can't be split"
        excluded["micro_batches"] = "training_step takes dataloader_iter and draws batches by itself, so that they can't run in parts"
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters()):
        excluded["micro_batches"] = "a parameter has a hook for when its gradient is complete, which a part of a batch would call as well"
    if stage == TrainerFn.PREDICTING and any(isinstance(callback, callbacks.BasePredictionWriter) for callback in present):
        excluded["multi"] = "a BasePredictionWriter writes batches by their index in this process, which several devices don't share"
    for name in all_engines():
        if (reason := engines.named(name).unfit(trainer, kinds)) is not None:
            excluded[name] = reason
    return excluded


def _numbered_gpu(module: nn.Module) -> str | None:
    """Which method names a GPU by its number, in words."""
    kinds = dict.fromkeys(
        kind for each in module.modules() for kind in type(each).__mro__ if kind.__module__.split(".")[0] not in FRAMEWORK
    )
    for kind in kinds:
        for name, method in vars(kind).items():
            if isinstance(method, FunctionType):
                for value in _constants((method.__defaults__, method.__code__)):
                    if isinstance(value, str) and _NUMBERED.fullmatch(value):
                        return f"{kind.__name__}.{name} names {value!r}"
    return None


def _constants(value: Any) -> Iterator[Any]:
    """Of code, and of what is inside of it."""
    if isinstance(value, (tuple, CodeType)):
        for each in value if isinstance(value, tuple) else value.co_consts:
            yield from _constants(each)
    else:
        yield value


_LOG = logging.getLogger(__name__)
#: Hooks that Lightning calls after the strategy has wrapped the module, before the first batch.
_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
#: Methods of a module, and of the containers in it, that put something there.
_METHODS = {"add_module", "register_module", "register_parameter", "set_submodule", "append", "extend", "insert", "update"}
#: How many instructions a key may take in ``module.part[key] = value``.
_KEY_INSTRUCTIONS = 4
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
    """Whether a hook's own code sets an attribute or an item of the module or of a part of it, or puts something into it. Others aren't
    run: they may write files.
    """
    function = inspect.unwrap(getattr(getattr(owner, hook), "__func__", getattr(owner, hook)))
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    # The last argument is the module: a callback's hook gets the trainer and the module, a module's own hook itself.
    module = code.co_varnames[code.co_argcount - 1] if code.co_argcount else ""
    of_module, latest = False, -_KEY_INSTRUCTIONS - 1  # whether what was loaded last is the module, or something in it; and where last
    for place, each in enumerate(dis.get_instructions(code)):
        stores = (each.opname == "STORE_ATTR" and of_module) or (each.opname == "STORE_SUBSCR" and place - latest <= _KEY_INSTRUCTIONS)
        if stores or (of_module and each.opname in ("LOAD_METHOD", "LOAD_ATTR") and each.argval in _METHODS):
            return True
        if each.opname == "LOAD_GLOBAL" and each.argval == "setattr":
            return True
        loaded = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
        of_module = loaded == module if each.opname.startswith("LOAD_FAST") else of_module and each.opname == "LOAD_ATTR"
        latest = place if of_module else latest
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
