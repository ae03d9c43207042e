"""What of a Trainer's options, of its callbacks and of a module can't be run in stages, by a sentence. Knows Lightning's options alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_autopar._lightning import BitsandbytesPrecision, LightningModule, Trainer
from lightning_autopar._lightning_compat import TrainerFn, graph_logger
from lightning_autopar.exact.logs.kept_by_hooks import hooking_callbacks, names_in_callbacks
from lightning_autopar.exact.logs.logging_hooks import is_quiet, overridden, reached
from lightning_autopar.exact.random.generator_states import find_generators
from lightning_autopar.memory.fakes.fake_copies import is_compiled

#: Precisions that replace layers or weights by another library's, which can't be left out of a stage.
_UNSTAGED_PRECISIONS = ("transformer-engine", "transformer-engine-float16")
#: Callbacks that copy, regroup or judge the module's own parameters.
_WHOLE_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning", "BaseFinetuning")
#: Names in a callback's code by which it gets at weights, and by which it copies, changes or reads them.
_WEIGHTS = ("parameters", "named_parameters", "state_dict", "AveragedModel")
_COPIES = ("clone", "deepcopy", "AveragedModel", "copy_", "add_", "mul_", "lerp_", "_foreach_lerp_", "load_state_dict")
_READS = ("norm", "vector_norm", "item", "numpy", "tolist", "std", "add_histogram", "add_graph")
#: Names that stand together in code which records the module's.
_TRACERS = ({"jit", "trace"}, {"jit", "trace_module"}, {"jit", "script"}, {"torch", "export"}, {"to_torchscript"}, {"to_onnx"})
_HOOKS = tuple(name for name in dir(LightningModule) if name.startswith("on_"))


def unstaged_run(trainer: Trainer, kinds: Mapping[str, str]) -> str | None:
    """Why this run can't run in stages; whether the step itself can, the trial of stages finds out."""
    module, fitting = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
    if logger := graph_logger(trainer):
        return (
            f"{logger}(log_graph=True) traces the whole module, and a pipeline's stages each hold a part of it; log_graph=False allows it"
        )
    if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
        return "quantised bitsandbytes layers can't be left out of a stage"
    if trainer.precision in _UNSTAGED_PRECISIONS:
        return f"precision {trainer.precision!r} replaces layers by another library's, which can't be left out of a stage"
    for name in _WHOLE_CALLBACKS:
        if name in kinds and fitting:
            return f"the callback {kinds[name]} works on the whole module's weights, and a pipeline's stages each hold a part of them"
    for owner, hook in overridden(trainer, _HOOKS) if fitting else ():
        for _, mentioned, _ in reached([(getattr(owner, hook), owner)], module, is_quiet):
            if any(together <= mentioned for together in _TRACERS):
                return f"{type(owner).__name__}.{hook} records the module's code (by torch.jit or an export), and a stage has a part of it"
    for callback, names in names_in_callbacks(trainer) if fitting else ():
        if "grad" in names:  # it copies, changes or reads gradients
            continue
        for does, words in (("copies or changes", _COPIES), ("reads", _READS)):
            got, used = (next((word for word in those if word in names), None) for those in (_WEIGHTS, words))
            if got is not None and used is not None:
                by = " and ".join(map(repr, dict.fromkeys((got, used))))
                return (
                    f"the callback {type(callback).__name__} {does} weights (its code names {by}), and a pipeline's stages hold "
                    "a part of them each"
                )
    for hooking in hooking_callbacks(trainer) if fitting else ():
        return f"{hooking}, which run only in the stage that has the module"
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
