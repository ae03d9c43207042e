"""The hooks in which the user's code logs, and after which something may read what was logged; and ``log`` itself.

Instance attributes of the module and the trainer shadow their methods; what each function returns undoes that. Knows Lightning's loops and
modules; nothing of ranks, or of what becomes of the values.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_autopar._lightning import Callback, LightningModule, Trainer
from lightning_autopar._lightning_compat import bare_optimizer, is_overridden
from lightning_autopar._root import PYTORCH, within

#: The hooks that Lightning calls between an automatic step's forward and its end.
_WITHIN_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)
#: Hooks that can log while a batch runs, but outside its step.
_BATCH_HOOKS = (
    *_WITHIN_STEP,
    "lr_scheduler_step",
    *(f"on_{stage}_batch_{point}" for stage in ("train", "validation", "test") for point in ("start", "end")),
)
#: Hooks that Lightning calls between the backward passes of two batches whose gradients add up; and names that aren't of gradients.
_BETWEEN_BACKWARDS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end", "training_step")
_NO_GRADIENTS = ("no_grad", "enable_grad", "set_grad_enabled", "requires_grad", "requires_grad_", "zero_grad", "accumulate_grad_batches")
#: Packages whose modules and callbacks log nothing in a step.
QUIET = ("torch.", "torchmetrics.", "transformers.", *PYTORCH, "lightning_autopar.callbacks.")
_NOT_THE_USERS = (*within("callbacks"), "lightning_autopar.callbacks.")


def may_stop(trainer: Trainer) -> bool:
    """Whether the user's code may end a fit by ``trainer.should_stop``, judged by its code. Lightning's own callbacks ask all ranks."""
    kinds = (LightningModule, Callback)
    names = {name for kind in kinds for name in dir(kind) if callable(getattr(kind, name))}  # `on_gpu` and `global_step` are no hooks
    hooks = {name for name in names if name.startswith("on_") or name.endswith("_step")}
    return mentions([getattr(each, hook) for each, hook in overridden(trainer, hooks)], trainer.lightning_module, "should_stop".__eq__)


def logs_between_steps(trainer: Trainer) -> bool:
    """Whether the user's code may log in a hook of a batch, judged by its code. Lightning's own callbacks don't."""
    module: Any = trainer.lightning_module
    return any(mentions([getattr(each, hook)], module, is_log) for each, hook in overridden(trainer, _BATCH_HOOKS))


def logs_in_training_step(trainer: Trainer) -> bool:
    """Whether ``training_step`` may log, judged by its code and by that of the modules that it may call."""
    module: Any = trainer.lightning_module
    others = {type(each) for each in module.modules() if each is not module and not f"{type(each).__module__}.".startswith(QUIET)}
    functions = [value for kind in others for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return mentions([module.training_step, module.forward, *functions], module, is_log)


def sees_loss(trainer: Trainer) -> bool:
    """Whether any code sees the loss of a step: an optimizer that may use it, or a hook that gets the step's output."""
    return _may_use_loss(trainer) or any(True for _ in overridden(trainer, ("on_train_batch_end", "optimizer_step")))


def looks_within_step(trainer: Trainer) -> bool:
    """Whether the user's code runs between the forward of an automatic step and its end, where it may read what was logged."""
    return _may_use_loss(trainer) or any(True for _ in overridden(trainer, _WITHIN_STEP))


def _may_use_loss(trainer: Trainer) -> bool:
    """Whether an optimizer isn't known to leave what its closure returns."""
    optimizers = [type(bare_optimizer(each)) for each in trainer.optimizers]
    return any(not each.__module__.startswith("torch.optim.") or each is torch.optim.LBFGS for each in optimizers)


def overridden(trainer: Trainer, hooks: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """The module and the callbacks, each with the hooks that are the user's: also one that Lightning's ``LambdaCallback`` was given."""
    module: Any = trainer.lightning_module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [(module, LightningModule), *((each, Callback) for each in callbacks)]
    names = tuple(hooks)
    return (
        (each, hook)
        for each, parent in owners
        for hook in names
        if hasattr(parent, hook) and is_overridden(hook, each, parent) and not _home(getattr(each, hook)).startswith(_NOT_THE_USERS)
    )


def is_of_batch(hook: str) -> bool:
    """Whether a hook belongs to a batch, of which each rank has its own samples."""
    return hook in _BATCH_HOOKS or "batch" in hook or hook.endswith("_step")


def reads_batch(owner: Any, hook: str) -> bool:
    """Whether the code of the user's hook at a batch's end uses the batch that it is given; True where its code can't be looked at."""
    found = getattr(owner, hook)
    code = getattr(inspect.unwrap(_bare(found)), "__code__", None)
    if code is None:
        return True
    # After the trainer, the module and the outputs, or the outputs alone; a method has itself before.
    place = (3 if isinstance(owner, Callback) else 1) + isinstance(found, types.MethodType)
    if place >= code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
        return False
    name = code.co_varnames[place if place < code.co_argcount else code.co_argcount + code.co_kwonlyargcount]
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any(name in each if isinstance(each, tuple) else name == each for each in loaded)


def _home(hook: Any) -> str:
    """The Python module of a hook's function."""
    return f"{getattr(inspect.unwrap(_bare(hook)), '__module__', '')}."


def is_log(name: str) -> bool:
    """Whether a method of this name logs."""
    return name in ("log", "log_dict") or name.startswith("log_")


def sees_gradients(trainer: Trainer) -> bool:
    """Whether the user's code may look at gradients between the backward passes of accumulated batches, judged by its code."""
    module: Any = trainer.lightning_module
    hooks = [getattr(each, hook) for each, hook in overridden(trainer, _BETWEEN_BACKWARDS)]
    return mentions(hooks, module, lambda name: "grad" in name and name not in _NO_GRADIENTS)


def mentions(functions: Iterable[Any], module: LightningModule, wanted: Callable[[str], bool]) -> bool:
    """Whether one of these functions has a wanted name in its code, or may call another one that has: of the module, of its file, or of
    what its code names. A function that can't be looked into counts as if it had.
    """
    pairs = [(function, getattr(function, "__self__", module)) for function in functions]
    return any(code is None or any(wanted(name) for name in names) for code, names, _ in reached(pairs, module, is_quiet))


def is_quiet(function: object) -> bool:
    """Whether a function is of a package whose code isn't looked into."""
    return f"{getattr(function, '__module__', '')}.".startswith(QUIET)


def reached(
    pairs: Iterable[tuple[Any, Any]], module: LightningModule, passes_over: Callable[[Any], bool], *, makes: bool = False
) -> Iterator[tuple[types.CodeType | None, set[str], Any]]:
    """The code of functions, and of those that their code may call: each with its names and the object whose attributes it sees.

    Args:
        pairs: the functions, each with that object.
        passes_over: whether a function isn't looked into.
        makes: whether the ``__init__`` of classes that the code names counts as well.

    Yields:
        None in place of the code where a function has none, as one that is written in C.
    """
    left, seen = list(pairs), set()
    while left:
        function, owner = left.pop()
        function = inspect.unwrap(_bare(function))
        code = getattr(function, "__code__", None)
        if code is None:
            yield None, set(), owner
        elif code not in seen and not passes_over(function):
            seen.add(code)
            names = set(_names(code))
            yield code, names, owner
            left += _mentioned(function, names, owner, module, makes=makes)


def _mentioned(
    function: types.FunctionType, names: set[str], owner: Any, module: LightningModule, *, makes: bool
) -> Iterator[tuple[Any, Any]]:
    """The functions that a function's code may call by these names, each with the object whose attributes it sees."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    spaces = [getattr(owner, "__dict__", {}), vars(module), function.__globals__, {name: _content(cell) for name, cell in cells}]
    kinds = dict.fromkeys((*type(owner).__mro__, *type(module).__mro__))  # also the overridden method, which super() calls
    held: list[Any] = []
    for name in {*names, *function.__code__.co_freevars}:
        for found in (*(vars(kind).get(name) for kind in kinds), *(space.get(name) for space in spaces)):
            found = _bare(found)
            if inspect.isfunction(found):
                yield found, owner
            elif found is not None and found is not owner and found is not module:
                held.append(found)
    for each in held:
        kind = each if isinstance(each, (types.ModuleType, type)) else type(each)
        home = kind.__name__ if isinstance(kind, types.ModuleType) else kind.__module__
        if home.partition(".")[0] in sys.stdlib_module_names or f"{home}.".startswith(QUIET):
            continue
        for name in (*names, "__call__", *(("__init__",) if makes and kind is each else ())):
            found = inspect.getattr_static(kind, name, None)
            found = _bare(found)
            if inspect.isfunction(found):
                yield found, each


def _bare(found: Any) -> Any:
    """The function of a method; anything else as it is. It isn't asked for an attribute, as its own ``__getattr__`` may raise any error."""
    return found.__func__ if isinstance(found, (types.MethodType, staticmethod, classmethod)) else found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in code, and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names(constant)


def shadow_hooks(
    trainer: Trainer,
    before_batch_end: Callable[[], object],
    before_epoch_end: Callable[[], None],
    after_train_epoch_end: Callable[[], object],
    with_step: Callable[[Any], Any],
    after_step: Callable[[Any], None],
) -> Callable[[], None]:
    """Call these functions where Lightning or a monitoring callback is about to read what hooks logged; returns what undoes it.

    Args:
        before_batch_end: before Lightning reads a batch's values.
        before_epoch_end: before it reads an epoch's.
        after_train_epoch_end: after the module's hook of this name, before the callbacks'.
        with_step: changes what Lightning would give the optimizer of an automatic step.
        after_step: when an automatic step is over; gets what hooks will get of it, as a dictionary.
    """
    connector = trainer._logger_connector

    def on_batch_end() -> None:
        before_batch_end()
        type(connector).on_batch_end(connector)

    def on_epoch_end() -> None:
        before_epoch_end()
        type(connector).on_epoch_end(connector)

    connector.on_batch_end, connector.on_epoch_end = on_batch_end, on_epoch_end  # type: ignore[method-assign]
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def _make_step_fn(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        step = type(optimization)._make_step_fn(optimization, *args, **kwargs)
        return lambda: with_step(step())

    def run(*args: Any, **kwargs: Any) -> Any:
        output = type(optimization).run(optimization, *args, **kwargs)
        after_step(output)
        return output

    optimization.__dict__.update(_make_step_fn=_make_step_fn, run=run)
    module: Any = trainer.lightning_module
    shadowed = module.__dict__.get("on_train_epoch_end")

    def on_train_epoch_end(self: LightningModule) -> None:
        if shadowed is None:
            type(self).on_train_epoch_end(self)
        else:
            shadowed()
        after_train_epoch_end()

    on_train_epoch_end.__wrapped__ = module.on_train_epoch_end  # type: ignore[attr-defined]  # is_overridden() looks behind it
    module.__dict__["on_train_epoch_end"] = types.MethodType(on_train_epoch_end, module)

    def undo() -> None:
        del connector.on_batch_end, connector.on_epoch_end, optimization.__dict__["_make_step_fn"], optimization.__dict__["run"]
        del module.__dict__["on_train_epoch_end"]
        if shadowed is not None:
            module.__dict__["on_train_epoch_end"] = shadowed

    return undo


def shadow_log(module: LightningModule, counted: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Before each ``log`` of the module, call a function that decides what is logged, None for nothing; returns what undoes it."""
    shadowed = module.__dict__.get("log")

    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        value = counted(name, value)
        if value is None:
            return
        own = type(self).log.__get__(self) if shadowed is None else shadowed
        own(name, value, *args, **kwargs)

    module.__dict__["log"] = types.MethodType(log, module)

    def undo() -> None:
        del module.__dict__["log"]
        if shadowed is not None:
            module.__dict__["log"] = shadowed

    return undo
