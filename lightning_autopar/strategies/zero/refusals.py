"""Why a Trainer's options, a module or its optimizer can't keep the promise under DeepSpeed, with a sentence for each.

Knows Lightning's options and torch's optimizers; nothing of memory or time. DeepSpeed isn't imported: planning asks before it is known
whether a ZeRO plan will be taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autopar._lightning import Callback, HalfPrecision, LightningModule, MixedPrecision, Precision, Trainer
from lightning_autopar._lightning_compat import graph_logger, is_overridden
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode, is_compiled
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.parameter_use import GRADIENT_HOOKS
from lightning_autopar.strategies.base.host_optimizers import ELEMENTWISE
from lightning_autopar.strategies.base.refused_parameters import sparse_gradients
from lightning_autopar.strategies.trials.engine_rehearsal import rehearsed

log = logging.getLogger(__name__)

#: Precisions with which DeepSpeed, as our engine runs it, computes the same as plain Lightning, to the last rounding.
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
#: Callbacks that copy, regroup or judge the module's own parameters and gradients.
_WHOLE_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning", "BaseFinetuning")
#: Hooks that clip gradients, or run backward and the optimizer's step, in another way. For hooks that may look at gradients see
#: :func:`unseen_gradients`.
_GRADIENT_HOOKS = ("configure_gradient_clipping", "backward")
_OPTIMIZER_HOOKS = ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_NONE = "under DeepSpeed parameters have no .grad to read"


def unpartitioned_run(trainer: Trainer, kinds: Mapping[str, str]) -> str | None:
    """Why this fit can't run under ZeRO, by the trainer's options and the module as it is; None where nothing is known against it."""
    module = trainer.lightning_module
    present: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if (reason := _precision(trainer)) is not None:
        return reason
    if logger := graph_logger(trainer):
        return f"{logger}(log_graph=True) traces the whole module on rank 0, and DeepSpeed partitions it; log_graph=False allows it"
    for name in _WHOLE_CALLBACKS:
        if name in kinds:
            return f"the callback {kinds[name]} works on whole parameters and on which of them are trained, and DeepSpeed partitions them"
    if "GradientAccumulationScheduler" in kinds:
        return f"Lightning's DeepSpeedStrategy refuses the callback {kinds['GradientAccumulationScheduler']}"
    for callback in present:
        for name in _CALLBACK_HOOKS:
            if is_overridden(name, callback, parent=Callback):
                return f"the callback {type(callback).__name__} has {name}, and {_NONE}"
    for name in (*_GRADIENT_HOOKS, *_OPTIMIZER_HOOKS):
        if is_overridden(name, module):
            return f"the module overrides {name}, and {_NONE if name in _GRADIENT_HOOKS else 'DeepSpeed runs the step by itself'}"
    return unpartitioned_module(module, str(trainer.precision))


def unpartitioned(module: LightningModule, trainer: Trainer) -> str | None:
    """What DeepSpeed can't partition of the module as it will be built, or of its optimizer; a fake copy is built to see it."""
    mode = fake_mode()
    try:
        with drawing_nothing(), as_if_real(None, "cpu"):
            copy = fake_copy(module, mode, None)
            with mode:
                rehearsal = rehearsed(copy, trainer)
                rehearsal.build()
                return unpartitioned_module(copy, str(trainer.precision)) or unpartitioned_optimizer(copy, rehearsal.optimizers)
    except Exception:  # tracing says why; a rehearsal finds out what a run does
        log.debug("the optimizer can't be looked at", exc_info=True)
        return None


def routed(module: LightningModule, uneven_calls: Sequence[str]) -> str | None:
    """Why stage 3, which gathers parameters in the order of a rank's calls, can't run a module whose samples decide what is called.

    Args:
        uneven_calls: FQNs of the submodules that a part of the batch calls more or less often than the whole.
    """
    for name in uneven_calls:
        if next(module.get_submodule(name).parameters(), None) is not None:
            return (
                f"the samples decide whether {name!r} is called (as with routed experts), and ZeRO-3 needs every rank to call the same "
                "modules"
            )
    return None


def unseen_gradients(module: LightningModule, conduct: Conduct | None) -> str | None:
    """Why the module's hooks can't be called while gradients are in parts; None where they look at no gradients. The precision plugin
    notices if they do so in a later step; see :func:`.strategy.refuse_looks`.

    Args:
        conduct: what the traced step does; None where it wasn't traced.
    """
    looked = {} if conduct is None else dict(conduct.looked)
    for name in GRADIENT_HOOKS:
        if not is_overridden(name, module) or (conduct is not None and name not in looked):
            continue
        if (parameter := looked.get(name)) is None:
            return f"the module overrides {name}, and whether it looks at gradients isn't known, as it wasn't traced to its end; {_NONE}"
        return f"the module's {name} looks at the gradient of {parameter!r}, and {_NONE}"
    return None


def _precision(trainer: Trainer) -> str | None:
    """Why ZeRO can't run with the Trainer's precision; None where it can."""
    if trainer.precision not in PRECISIONS:
        return f"precision {trainer.precision!r} isn't plain Lightning's under DeepSpeed; ZeRO takes {', '.join(PRECISIONS)}"
    plugin = trainer.precision_plugin
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        return f"the precision plugin {type(plugin).__name__} would be replaced by DeepSpeed's own precision"
    return None


def unpartitioned_module(module: nn.Module, precision: str) -> str | None:
    """What DeepSpeed can't partition in a module, or not without changing the run; None if there is nothing.

    Args:
        precision: Lightning's name of it. With true 16 bits all parameters have one dtype; otherwise they stay as they are.
    """
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if nn.parameter.is_lazy(parameter):
            return f"the parameter {name!r} gets its shape in the first step, and DeepSpeed partitions before"
        if isinstance(parameter, DTensor):
            return f"the parameter {name!r} is sharded already, and DeepSpeed has to partition it"
        if not parameter.is_floating_point():
            return f"the parameter {name!r} is {dtype}, which DeepSpeed doesn't take"
        if not precision.endswith("16-true") and parameter.dtype != torch.float32:
            return f"the parameter {name!r} is {dtype}, and at precision {precision!r} DeepSpeed keeps float32"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name!r} has a hook of its own, which would see a gradient before DeepSpeed has reduced it"
    if any(isinstance(child, torch._dynamo.OptimizedModule) or is_compiled(child) for child in module.modules()):
        return "a part of the module is compiled, and DeepSpeed hooks into the modules as they were written"
    return sparse_gradients(module, "which DeepSpeed can't partition")


def unpartitioned_optimizer(module: LightningModule, optimizers: Iterable[Optimizer]) -> str | None:
    """Why the optimizer's step can't be partitioned; None where a part of a parameter steps as the whole does. The number of optimizers
    isn't checked here.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            known = ", ".join(each.__name__ for each in ELEMENTWISE)
            return f"{kind.__module__}.{kind.__name__} isn't known to step each element by itself, as partitions need it; known are {known}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"the optimizer {kind.__name__} has hooks of its own around its step, which would see partitions"
        if optimizer.defaults.get("differentiable"):
            return f"the optimizer {kind.__name__} is differentiable, and DeepSpeed steps without a graph"
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            return f"the optimizer {kind.__name__} has parameters that aren't the module's, which DeepSpeed doesn't see"
    return None
