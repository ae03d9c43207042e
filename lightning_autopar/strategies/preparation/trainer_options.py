"""Which engines the Trainer's options rule out, with a sentence for each. Knows Lightning's options; nothing of memory or time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lightning_autopar import engines
from lightning_autopar._lightning import Trainer, callbacks, is_param_in_hook_signature, lightning_hasattr
from lightning_autopar._lightning_compat import TrainerFn, has_own_loaders
from lightning_autopar._root import FRAMEWORK
from lightning_autopar.plans import all_engines
from lightning_autopar.strategies.preparation.late_parameters import late_parameters

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
