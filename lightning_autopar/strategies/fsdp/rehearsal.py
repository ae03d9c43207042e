"""Whether FSDP2 runs a module's step right: a rehearsal on two forked ranks.

FSDP2 refuses some modules, and with others it loses what the step writes to whole parameters. Knows Lightning modules; nothing of devices
or of how plans are chosen.
"""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar._root import LIGHTNING
from lightning_autopar.engines import Check, FirstStep, failed, not_made
from lightning_autopar.exact.data.loader_calls import called_by_loaders
from lightning_autopar.exact.step.shared_network import gradients_asked_for
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.state.checkpoint import whole_state_dict
from lightning_autopar.strategies.base.refused_parameters import sparse_gradients
from lightning_autopar.strategies.fsdp.shard import onto_shards, shard, shard_rest
from lightning_autopar.strategies.fsdp.strategy import BEFORE_BACKWARD
from lightning_autopar.strategies.fsdp.whole_parameters import WholeParameters
from lightning_autopar.strategies.fsdp.whole_results import give_whole_results
from lightning_autopar.strategies.trials.engine_rehearsal import STEPS, Batch, Engine, Run, copied, losses_of_backward, rehearse, rehearsed
from lightning_autopar.strategies.trials.optimizer_trial import optimizers_run

#: Whether a block's parameters are freed between forward and backward, for each step.
_RESHARD = (True, False, False)
assert len(_RESHARD) == STEPS
_IN_PLACE, _DIFFERENTIATES = "writes in place to what is given to ", "the step differentiates by itself (torch.autograd.grad)"
_OPTIMIZER, _MIXED = "the optimizer ", "mixed torch.Tensor and DTensor"
#: Attributes of modules whose parameters are handled elsewhere.
_NO_HOLDERS = frozenset((*vars(nn.Module()), "_trainer", "_fabric", "_hparams", "_hparams_initial"))
_DEEP = 4
_OWN_SHARDS = "the module's configure_model shards it already, so that offload and replicas can't be the plan's choice"


def rehearse_fsdp(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    shard_fqns: Sequence[str],
    *,
    flops: int = 0,
    conduct: Conduct | None = None,
    by_plan: bool = False,
) -> Check:
    """Whether FSDP2 runs the module's training step as one process does.

    Args:
        shard_fqns: the modules that are sharded as units of their own; see :attr:`lightning_autopar.plans.Plan.shard`.
        by_plan: whether the plan says how the module is sharded, and not its ``configure_model``.
    """
    refusal = unshardable(module)
    if refusal is not None:
        return failed(refusal)
    optimizers = cache(partial(optimizers_run, module, trainer, _OPTIMIZERS))
    engine = Engine(
        steps=partial(_steps, tuple(shard_fqns), by_plan),
        where="on sharded parameters",
        lost=_held(module) or _of_own_class(module) or "what the step does to whole parameters is lost on shards",
        sentence=partial(_sentence, module),
        traced=lambda conduct: _traced(module, conduct) or optimizers().refusal,
    )
    check = rehearse(module, trainer, first, engine, flops=flops, conduct=conduct)
    if check.outcome == "failed" and (by_optimizer := optimizers()).outcome == "failed":
        return by_optimizer  # the cause, and not what becomes of the step by it
    return check


def why_unsharded(first: FirstStep, rehearsed: Check | None) -> str | None:
    """Why FSDP2 doesn't run a step right; None where nothing is known against it.

    An evaluation loses nothing on shards.

    Args:
        first: the step; meant for a forked child.
        rehearsed: what a rehearsal of it found; None where there was none.
    """
    module, refusal = first.trainer.lightning_module, None if rehearsed is None else rehearsed.refusal
    if first.stage == "fit" and first.untried is not None:
        refusal = unshardable(module) or not_made(first.untried).refusal
    if (called := called_by_loaders((first.batch, first.validation()), module)) is not None:
        return f"the loader {called} to make a batch, and FSDP2 has whole parameters within steps only"
    if refusal is None and first.split is not None:
        refusal = _routed(module, first.split.uneven_calls)
    return refusal or unshardable(module)


def _routed(module: LightningModule, uneven_calls: Sequence[str]) -> str | None:
    """Why the module can't be sharded if the samples decide which of its parts are called: under manual optimization each is a unit of its
    own, which all ranks must gather together.
    """
    for name in () if module.automatic_optimization else uneven_calls:
        if name in dict(module.named_children()):
            return f"the samples decide whether {name!r} is called (as with routed experts), and FSDP2 needs every rank to call it"
    return None


def unshardable(module: nn.Module) -> str | None:
    """What FSDP2 refuses in a module whatever the step does; None if there is nothing."""
    places: dict[tuple[int, Any], str] = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            return f"the parameter {name!r} gets its shape in the first step, and FSDP2 shards it before"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name!r} has a hook of its own (register_hook), which is lost when FSDP2 replaces it by a shard"
        if parameter.numel() and not parameter.is_meta:
            other = places.setdefault((parameter.data_ptr(), parameter.shape), name)
            if other != name:
                return f"the parameters {other!r} and {name!r} share their memory, and FSDP2 shards each by itself; make them one parameter"
    return sparse_gradients(module, "which FSDP2 can't reduce")


def _traced(module: nn.Module, conduct: Conduct) -> str | None:
    """What the traced step does that fails on shards, or would go wrong unnoticed."""
    if conduct.exchanged:
        return (
            f"the step replaces the parameter {conduct.exchanged[0]!r}, which FSDP2 holds in shards, by another one; write to the "
            "parameter instead (with torch.no_grad(): parameter.copy_(...))"
        )
    if conduct.shared:
        return (
            f"the step makes the parameter {conduct.shared[0]!r} share another one's memory (by its .data), but FSDP2 shards each by "
            "itself; copy the values instead (with torch.no_grad(): parameter.copy_(other))"
        )
    if conduct.mixed is not None:
        name, where = conduct.mixed
        return f"{where} uses the parameter {name!r} together with tensors that aren't parameters, and FSDP2 has only shards of it there"
    return _held(module) or _of_own_class(module)


def _held(module: nn.Module) -> str | None:
    """That an attribute holds a parameter as well; None where none does."""
    if (found := held(module)) is None:
        return None
    name, attribute = found
    return f"{attribute!r} holds the parameter {name!r} itself, in the place of which FSDP2 puts shards that {attribute!r} doesn't know"


def _of_own_class(module: nn.Module) -> str | None:
    """That a parameter is of a class of its own, which an optimizer may ask for; None where none is."""
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter and issubclass(type(parameter), nn.Parameter):
            return f"the parameter {name!r} is a {type(parameter).__name__}, and the shards that FSDP2 puts in its place aren't"
    return None


def held(module: nn.Module) -> tuple[str, str] | None:
    """A parameter that an attribute of a module holds as well, in a list, say: its FQN and the attribute's name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for path, child in module.named_modules():
        if type(child).__module__.startswith("torch."):  # which update theirs, as recurrent layers do
            continue
        for name, value in vars(child).items():
            if name not in _NO_HOLDERS and (found := next(_parameters_in(value, names, 0), None)) is not None:
                return names[found], f"{path}.{name}" if path else name
    return None


def _parameters_in(value: Any, names: Mapping[int, str], depth: int) -> Iterator[int]:
    """The ids of the module's parameters within a value."""
    if isinstance(value, weakref.ref):
        value = value()
    if id(value) in names:
        yield id(value)
    elif depth < _DEEP and not isinstance(value, (Tensor, nn.Module, str, bytes, type, ModuleType, FunctionType)):
        inside: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = value
        elif not type(value).__module__.startswith(("torch.", *LIGHTNING, "builtins", "numpy")):
            inside = vars(value).values() if hasattr(value, "__dict__") else ()
        for each in inside:
            yield from _parameters_in(each, names, depth + 1)


def _steps(fqns: tuple[str, ...], by_plan: bool, module: LightningModule, trainer: Trainer | None, batch: Batch, keep: bool) -> Run:
    """Runs a few training steps on shards."""
    rehearsal = rehearsed(module, trainer)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    module._device_mesh = mesh
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if is_overridden("configure_model", module):
        module.configure_model()
        module.__dict__["configure_model"] = lambda: None
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        give_whole_results()
        names = shard(module, fqns, mesh["data_parallel"], reshard_after_forward=True)
    elif by_plan:
        raise ValueError(_OWN_SHARDS)
    else:
        names |= shard_rest(module, mesh["data_parallel"], reshard_after_forward=True)
    rehearsal.build()
    onto_shards(rehearsal.optimizers, module, names)
    gathered = WholeParameters(module, rehearsal.optimizers)
    with losses_of_backward() as losses, _told(module):
        for index, reshard in enumerate(_RESHARD):
            for name, unit in module.named_modules():
                if isinstance(unit, FSDPModule) and name and fqns:
                    unit.set_reshard_after_forward(reshard, recurse=False)
            _step(rehearsal, gathered, batch(), index)
    return Run(losses=tuple(losses), weights=copied(whole_state_dict(module, keep=keep)), notes=tuple(rehearsal.notes))


def _step(rehearsal: BareStep, gathered: WholeParameters, batch: Any, index: int) -> None:
    """Runs one training step; everything between forward and backward counts as inside of it."""
    step: Any = rehearsal._call
    backward = rehearsal.module.backward

    begun = 0  # training steps and backward passes that haven't ended; an error leaves its own

    def call(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        with gathered.inside("training_step"):
            output = step(*args)
        begun -= 1
        if any(is_overridden(hook, rehearsal.module) for hook in BEFORE_BACKWARD):
            gathered.reshard()  # as the strategy does
        return output

    def inside(*args: Any, **kwargs: Any) -> None:
        nonlocal begun
        begun += 1
        with gathered.inside(None):
            backward(*args, **kwargs)
        begun -= 1

    rehearsal.__dict__["_call"] = call
    rehearsal.module.__dict__["backward"] = inside
    try:
        rehearsal.training_step(batch, index)
    except RuntimeError as error:
        if _MIXED in str(error) and not begun and (optimizer := _optimizer_in(error)) is not None:
            raise RuntimeError(
                f"{_OPTIMIZER}{type(optimizer).__name__} computes with tensors of its own together with parameters or gradients, and FSDP2 "
                "has only shards of them there"
            ) from error
        raise
    finally:
        rehearsal.__dict__.pop("_call")
        rehearsal.module.__dict__.pop("backward")


def _optimizer_in(error: BaseException) -> Optimizer | None:
    """The optimizer in whose method an error came up."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((owner for owner in reversed(frames) if isinstance(owner, Optimizer)), None)


@contextmanager
def _told(module: nn.Module) -> Iterator[None]:
    """While open, errors name what the user's step does that FSDP2 doesn't support."""
    entered: list[str] = []
    asked = list[Any]()

    def note(gradient: Tensor, of: Any) -> Tensor:
        asked.append(of)
        return gradient

    units: list[tuple[str, Any]] = [(name, unit) for name, unit in module.named_modules() if isinstance(unit, FSDPModule)]
    hooks = [unit.register_forward_pre_hook(lambda *_, name=name: entered.append(name)) for name, unit in units]
    try:
        with gradients_asked_for(note):
            yield
    except RuntimeError as error:
        if "is a view and is being modified inplace" in str(error) and entered:
            raise RuntimeError(f"{_IN_PLACE}{entered[-1]!r}") from error
        if asked:
            raise RuntimeError(_DIFFERENTIATES) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


#: The rehearsal of an optimizer on small parameters.
_OPTIMIZERS = Engine(
    steps=partial(_steps, (), False),
    where="steps a shard otherwise",
    lost="than it steps this part of a whole parameter",
    sentence=lambda reason: f"can't step shards of parameters ({reason.splitlines()[0]})",
    traced=lambda conduct: None,
)


def _sentence(module: nn.Module, reason: str) -> str:
    """The cause, in words for a user."""
    if _IN_PLACE in reason:
        block, at, line = reason.partition(_IN_PLACE)[2].partition(", at ")
        anew = "make a new tensor there (x = x + 1, or inplace=False of a layer)"
        return f"{block} writes in place to the tensor that it is given{at}{line}, which FSDP2 doesn't allow; {anew}"
    if _DIFFERENTIATES in reason:
        return f"{_DIFFERENTIATES}, through parameters that FSDP2 frees after each use"
    if "_chunk_cat expects non-empty tensor" in reason:
        empty = next((name for name, parameter in module.named_parameters() if not parameter.numel() and parameter.requires_grad), "")
        return f"the parameter {empty!r} has no elements and gets a gradient, which FSDP2 can't reduce; freeze it"
    if _OWN_SHARDS in reason:
        return _OWN_SHARDS
    if _OPTIMIZER in reason:
        return _OPTIMIZER + reason.partition(_OPTIMIZER)[2].partition(", or run with allow")[0]
    if _MIXED in reason:
        return (
            "the step uses a block's parameters outside of the block's forward (a weight in the loss, or a method other than forward), and "
            "FSDP2 gathers them in forward only"
        )
    if told := re.search(r"RuntimeError: (the step has .*)", reason):
        return told[1].partition(", or run with allow")[0]
    if "FSDP does not support deepcopy" in reason:
        return (
            f"the step copies a module (copy.deepcopy{reason[reason.rfind(', at ') :]}), and FSDP2 can't copy one with sharded parameters"
        )
    if "uniform original parameter dtype" in reason:
        return "the parameters of a block have several dtypes, and FSDP2 needs one"
    return f"the step fails on sharded parameters ({reason})"
