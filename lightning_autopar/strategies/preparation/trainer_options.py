"""Which engines a trainer's own options rule out, each by a sentence. Knows Lightning's options; knows nothing of memory or time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import BitsandbytesPrecision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.exact.random_state import find_generators
from lightning_autopar.memory.fakes.fakes import is_compiled
from lightning_autopar.strategies.zero.refusals import unpartitioned_run

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Precisions with which FSDP2 runs a plain run's arithmetic: not 16-mixed, whose gradient scaler doesn't know shards.
_FSDP_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
#: Precisions whose layers or weights are replaced by another library's, which can't be left out of a stage.
_UNSTAGED_PRECISIONS = ("transformer-engine", "transformer-engine-float16")
#: Callbacks that copy or regroup the module's own parameters, which shards don't survive.
_UNSHARDED_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")


def exclusions(trainer: Trainer) -> dict[str, str]:
    """The engines that this trainer can't use, with the reason.

    Args:
        trainer: its callbacks, precision and module are read.

    Returns:
        Engine name → sentence; the name ``"multi"`` stands for every plan of more than one device, ``"micro_batches"`` for every one
        that works a batch off in parts.
    """
    excluded: dict[str, str] = {}
    module = trainer.lightning_module
    present: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    kinds = {base.__name__: type(callback).__name__ for callback in present for base in type(callback).__mro__}
    if trainer.precision not in _FSDP_PRECISIONS:
        excluded["fsdp"] = f"precision {trainer.precision!r} doesn't work on sharded parameters; FSDP2 takes {', '.join(_FSDP_PRECISIONS)}"
    if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
        excluded["fsdp"] = "quantised bitsandbytes layers can't be sharded by FSDP2"
    for name in _UNSHARDED_CALLBACKS:
        if name in kinds and trainer.state.fn == TrainerFn.FITTING:
            excluded["fsdp"] = f"the callback {kinds[name]} works on whole parameters, and FSDP2 shards them"
    if any(isinstance(submodule, torch._dynamo.OptimizedModule) for submodule in module.modules()):
        excluded["fsdp"] = "a part of the module was compiled before sharding, and FSDP2 has to shard first"
    if "BaseFinetuning" in kinds and trainer.state.fn == TrainerFn.FITTING:
        excluded["multi"] = (
            f"the callback {kinds['BaseFinetuning']} unfreezes parameters during the run, and neither DDP nor FSDP2 communicates the "
            "gradients of those that were frozen when it began"
        )
        excluded.setdefault(
            "fsdp", f"the callback {kinds['BaseFinetuning']} unfreezes parameters during the run, which FSDP2 doesn't notice"
        )
    if "BatchSizeFinder" in kinds:
        excluded["multi"] = "the callback BatchSizeFinder runs on one device only, as in Lightning itself"
    if "LearningRateFinder" in kinds and trainer.state.fn == TrainerFn.FITTING:
        excluded["multi"] = (
            "the callback LearningRateFinder judges by the loss that it sees on one device, which would be that of a part of the batch"
        )
    for name, submodule in module.named_modules():
        rescales = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.max_norm is not None
        if rescales and trainer.state.fn == TrainerFn.FITTING:
            excluded["multi"] = f"{name!r} has max_norm, which rescales the rows of a batch in place: on each device others"
    stage = trainer.state.fn
    if stage == TrainerFn.FITTING and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        excluded["multi"] = "training_step takes dataloader_iter and draws batches by itself, so that they can't be split"
        excluded["micro_batches"] = "training_step takes dataloader_iter and draws batches by itself, so that they can't be taken apart"
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters()):
        excluded["micro_batches"] = "a parameter has a hook for when its gradient is complete, which a part of a batch would call as well"
    if stage == TrainerFn.PREDICTING and any(isinstance(callback, callbacks.BasePredictionWriter) for callback in present):
        excluded["multi"] = "a BasePredictionWriter writes batches by their index in this process, which several devices don't share"
    if (reason := _unstaged(trainer, kinds)) is not None:
        excluded["pipeline"] = reason
    if stage == TrainerFn.FITTING and (reason := unpartitioned_run(trainer, kinds)) is not None:
        excluded["zero"] = reason
    return excluded


def _unstaged(trainer: Trainer, kinds: Mapping[str, str]) -> str | None:
    """Why this run can't be one in stages; what the step itself has against it is the parity probe's to find out.

    Args:
        trainer: its options are read.
        kinds: of the callbacks: the name of each class that one is of, and the callback's own.
    """
    module, fitting = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
    if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
        return "quantised bitsandbytes layers can't be left out of a stage"
    if trainer.precision in _UNSTAGED_PRECISIONS:
        return f"precision {trainer.precision!r} replaces layers by another library's, which can't be left out of a stage"
    for name in (*_UNSHARDED_CALLBACKS, "ModelPruning"):
        if name in kinds and fitting:
            return f"the callback {kinds[name]} works on the whole module's weights, and a pipeline's stages each hold a part of them"
    if any(isinstance(submodule, torch._dynamo.OptimizedModule) or is_compiled(submodule) for submodule in module.modules()):
        return "a part of the module is compiled, and a pipeline cuts the code as it was written"
    if own := sorted(find_generators(module.named_modules())):
        name = own[0].removeprefix("own:").lstrip(".")
        return f"it draws from {name!r}, a generator of its own, which the stages can't keep in step"
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return f"the parameter {name!r} gets its shape in the first step, and a pipeline is cut before"
        if fitting and getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name!r} has a hook for when its gradient is complete, which a part of a batch would call as well"
    return None
