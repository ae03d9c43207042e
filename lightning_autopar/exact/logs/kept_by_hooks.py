"""Hooks of the user's that may keep what they get of a batch, which on each of several ranks is that of the rank's own samples.

What steps keep on the module is found out by running them, and ranks exchange it. A callback's hook can't be tried, as it may write files:
its code is read. Knows hooks and code; nothing of ranks or plans.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torchmetrics import Metric, MetricCollection

from lightning_autopar._lightning import Callback, LightningModule, Trainer
from lightning_autopar._root import FRAMEWORK, package_of
from lightning_autopar.exact.logs.log_rules import recorded_logs
from lightning_autopar.exact.logs.logging_hooks import is_log, is_quiet, mentions, overridden, reached
from lightning_autopar.memory.trace.bare_step import TrainerView, loader_index
from lightning_autopar.memory.trace.first_batch import RAISED, copied
from lightning_autopar.memory.trace.no_writes import no_writes
from lightning_autopar.text import error_line

_HOOKS = tuple(f"on_{stage}_batch_{point}" for stage in ("train", "validation", "test") for point in ("start", "end"))
#: Of a prediction, which returns what it finds: nobody has tried what it keeps.
_PREDICTING = ("predict_step", "on_predict_batch_start", "on_predict_batch_end")
_STORES = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"))
_LOADS = frozenset(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "BINARY_SUBSCR"))
#: How the names of what draws begin; and ``dropout`` anywhere.
_RANDOM = ("rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")
_REGISTERS = frozenset(
    f"register_{kind}_hook" for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre", "module_forward")
)
_METHODS = frozenset(("add", "append", "appendleft", "extend", "insert", "setdefault", "update"))


def keeping_hooks(trainer: Trainer, *, predicting: bool = False) -> tuple[str, ...]:
    """A sentence on each hook of a batch whose code uses the batch or the step's outputs, and stores something or draws random numbers.

    Args:
        predicting: whether the hooks of a prediction count, rather than those of the other loops.
    """
    own = "on each rank is that of its own batches" if predicting else "on each rank is that of its own samples"
    found = list[str]()
    for each, hook in overridden(trainer, _PREDICTING if predicting else _HOOKS):
        if _keeps(each, hook, trainer.lightning_module):
            found.append(f"{_title(each)} may keep what {hook} gets of a batch, which {own}")
        if not predicting and _draws(each, hook, trainer.lightning_module):
            found.append(f"{_title(each)} may draw random numbers for what {hook} gets of a batch: each rank draws for its own samples")
    return tuple(found)


def tried_hooks(trainer: Trainer) -> dict[str, list[Any]]:
    """Whose hooks of a batch are to be tried on a split one, by the hook's name, in Lightning's order: those that may change the batch
    before its step, and those that log what they make of it; but for those of which a sentence tells (see :func:`keeping_hooks`).
    """
    module, found = trainer.lightning_module, dict[str, list[Any]]()
    for each, name in sorted(overridden(trainer, _HOOKS), key=lambda pair: pair[0] is module):
        logs = name.endswith("end") and mentions([getattr(each, name)], module, is_log) and not _keeps(each, name, module)
        if (logs or name.endswith("start")) and _uses_batch(each, name, module) is not False and not _draws(each, name, module):
            found.setdefault(name, []).append(each)
    return found


def as_callbacks_leave(batch: Any, trainer: Trainer, loop: str) -> tuple[Any, list[str]]:
    """A batch as callbacks leave it for the step, and a sentence for each that can't be asked. For a forked child: they are called."""
    module, name, unknown = trainer.lightning_module, f"on_{loop}_batch_start", list[str]()
    changing = [each for each, _ in overridden(trainer, (name,)) if each is not module and _uses_batch(each, name, module) is not False]
    batch = copied(batch) if changing else batch
    for each in changing:
        hook = getattr(each, name)
        try:
            with recorded_logs(module), no_writes({}):
                hook(TrainerView(trainer), module, batch, 0, *loader_index(hook))
        except RAISED as error:
            words = f"what {name} of the callback {type(each).__name__} makes of a batch isn't counted"
            unknown.append(f"{words}, as it can't run before the run ({error_line(error)})")
    return batch, unknown


def names_in_callbacks(trainer: Trainer) -> Iterator[tuple[Callback, set[str]]]:
    """The callbacks with the names in their hooks' code, and in what of the user's that calls."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        hooks = [getattr(callback, name) for name in dir(Callback) if name.startswith("on_") or name == "setup"]
        own = [(hook, callback) for hook in hooks if not is_quiet(hook)]
        yield callback, {word for _, words, _ in reached(own, trainer.lightning_module, is_quiet, makes=True) for word in words}


def _title(owner: Any) -> str:
    return "the module" if isinstance(owner, LightningModule) else f"the callback {type(owner).__name__}"


def _keeps(owner: Any, hook: str, module: LightningModule) -> bool:
    """Whether a hook uses its batch or outputs, and it or a function of the same package that it names stores something."""
    if not (uses := _uses_batch(owner, hook, module)):
        return uses is None
    function = _function(owner, hook)
    home, given = package_of(function), _given(owner, hook, module)
    found = list(reached([(function, owner)], module, lambda each: package_of(each) != home))
    words = {name for _, names, _ in found for name in names}
    methods = [(inspect.getattr_static(kind, name, None), kind) for kind in _held_kinds(owner, module, words) for name in words]
    found += reached([each for each in methods if inspect.isfunction(each[0])], module, lambda each: package_of(each) != home)
    for code, names, holder in found:
        # A metric's states are the whole batch's wherever they are: ranks exchange them.
        held = {**getattr(holder, "__dict__", {}), **getattr(holder, "_modules", {})}  # no property of the user's is called
        metrics = {name for name, value in held.items() if isinstance(value, (Metric, MetricCollection))}
        own = given if code is function.__code__ else ()
        if code is not None and _stores(code, _METHODS - {"update"} if metrics & names else _METHODS, own):
            return True
    return False


def _held_kinds(owner: Any, module: LightningModule, words: Set[str]) -> set[type]:
    """The user's classes of what code with these names may have in hand: of the module's parts that it names, and of what a callback makes
    in its other hooks and may have put there.
    """
    kinds = {type(child) for path, child in module.named_modules() if not words.isdisjoint(path.split("."))}
    for function in [] if owner is module else _methods(owner):
        kinds.update(each for name in function.__code__.co_names if isinstance(each := function.__globals__.get(name), type))
    return {kind for kind in kinds if package_of(kind) not in FRAMEWORK and not issubclass(kind, (Metric, LightningModule))}


def _methods(owner: Any) -> list[types.FunctionType]:
    kinds = [kind for kind in type(owner).__mro__ if package_of(kind) not in FRAMEWORK]
    return [method for kind in kinds for method in vars(kind).values() if isinstance(method, types.FunctionType)]


def late_hooks(trainer: Trainer) -> tuple[str, ...]:
    """A sentence on each callback that puts hooks on modules when the run begins: they aren't there when planning tries the step."""
    return tuple(f"{words} after planning has tried the step: what they keep of parts may differ" for words in hooking_callbacks(trainer))


def hooking_callbacks(trainer: Trainer) -> list[str]:
    """Callbacks that put hooks on modules: the beginning of a sentence on each."""
    named = ((each, sorted(words & _REGISTERS)) for each, words in names_in_callbacks(trainer))
    return [f"{_title(each)} puts hooks on modules ({by[0]})" for each, by in named if by]


def _draws(owner: Any, hook: str, module: LightningModule) -> bool:
    """Whether a hook uses its batch or outputs, and may draw random numbers, by the names in its code and in what that calls.

    A callback may train a network of its own, of which its other methods tell.
    """
    if not _uses_batch(owner, hook, module):
        return False
    found = reached([(_function(owner, hook), owner)], module, lambda each: package_of(each) in FRAMEWORK)
    names = {name for _, names, _ in found for name in names}
    methods = [] if owner is module else _methods(owner)
    names |= {name for method in methods for name in method.__code__.co_names if "dropout" in name.lower()}
    held = [child for each in vars(owner).values() if owner is not module and isinstance(each, nn.Module) for child in each.modules()]
    return any(name.lower().startswith(_RANDOM) or "dropout" in name.lower() for name in names) or any(
        isinstance(child, _DropoutNd) for child in held
    )


def _stores(code: types.CodeType, methods: Set[str], given: Sequence[str] = ()) -> bool:
    """Whether code assigns to something else than its own variables and the items of what is ``given``, or calls one of these methods of
    something else.
    """
    outside = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])  # variables that may hold what others have
    before: Any = None
    stored = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("STORE_FAST")]
    given = [name for name in given if not any(name == each or name in each for each in stored)]  # others' names by then
    holder = ""  # of an item, which is loaded before its key
    for each in dis.get_instructions(code):
        if each.opname in _STORES and not (each.opname == "STORE_SUBSCR" and holder in given):
            return True
        holder = (before.argval[-1] if isinstance(before.argval, tuple) else before.argval) if before and "FAST" in before.opname else ""
        if each.opname == "STORE_FAST" and before is not None and before.opname in _LOADS:
            outside.add(each.argval)
        if each.argval in methods and each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            if not before.opname.startswith("LOAD_FAST") or loaded in outside:
                return True
        before = each
    return any(_stores(inner, methods) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _function(owner: Any, hook: str) -> Any:
    found = getattr(owner, hook)
    return inspect.unwrap(getattr(found, "__func__", found))


def _given(owner: Any, hook: str, module: LightningModule) -> tuple[str, ...]:
    """The names of a hook's arguments that are the batch, or the step's outputs."""
    code: types.CodeType = _function(owner, hook).__code__
    after = hasattr(getattr(owner, hook), "__func__") + (0 if owner is module else 2)  # without self where it is no method
    variadic = bool(code.co_flags & inspect.CO_VARARGS)
    wanted = code.co_varnames[: code.co_argcount + variadic][after : after + (2 if hook.endswith("end") else 1)]
    if variadic and code.co_argcount <= after:
        wanted = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][:1]
    return wanted


def _uses_batch(owner: Any, hook: str, module: LightningModule) -> bool | None:
    """Whether a hook loads the batch or the step's outputs; None where its code can't be looked into.

    ``outputs["loss"]`` of a training step doesn't count: it is the whole batch's.
    """
    code = getattr(_function(owner, hook), "__code__", None)
    if code is None:
        return None
    wanted = _given(owner, hook, module)
    loaded = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_")]
    for each, following in zip(loaded, [*loaded[1:], None], strict=True):
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        whole = hook == "on_train_batch_end" and names == wanted[:1] and following is not None and following.argval == "loss"
        if "FAST" in each.opname and set(wanted) & set(names) and not whole:
            return True
    return False
