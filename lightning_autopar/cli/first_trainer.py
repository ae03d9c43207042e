"""Waits for a script to build its first Trainer, of whichever Lightning: until then nobody knows which one it uses.

Imports neither; the functions here act on modules that the script has imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_autopar._autoload import when_executed
from lightning_autopar._root import ROOTS, choose

_ARGUMENTS = "_autopar_arguments"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options for our strategy, in addition to what the script says.

    Args:
        devices: a spec, in place of the Trainer's devices; None for those.
        trainer_devices: in place of the Trainer's devices, as the Trainer takes it; None for what the script says.
        options: arguments of :class:`AutoParallelStrategy`.
    """

    devices: str | None = None
    trainer_devices: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def at_first_trainer(begin: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While open, a context is entered when the script is about to build a Trainer for the first time; it is left at the end.

    Strategies that the script makes keep their constructor's arguments from now on, as they may be made before the Trainer.

    Args:
        begin: makes the context manager. It may import Lightning, which is the Trainer's.
    """
    with ExitStack() as until_the_end:
        has_begun = False

        def wait(root: str, module: Any) -> None:
            own = module._AcceleratorConnector  # what a Trainer makes first

            def connector(**arguments: Any) -> Any:
                nonlocal has_begun
                choose(root, "this Trainer")
                restore()
                if not has_begun:
                    has_begun = True
                    until_the_end.enter_context(begin())
                return module._AcceleratorConnector(**arguments)

            def restore() -> None:
                if module._AcceleratorConnector is connector:
                    module._AcceleratorConnector = own

            module._AcceleratorConnector = connector
            until_the_end.callback(restore)

        for root in ROOTS:
            until_the_end.callback(when_executed(f"{root}.strategies.strategy", remember_arguments))
            until_the_end.callback(when_executed(f"{root}.trainer.trainer", partial(wait, root)))
        yield


def remember_arguments(module: Any) -> None:
    """From now on, each strategy keeps its constructor's arguments; most of Lightning's keep only derived values.

    Args:
        module: where Lightning's ``Strategy`` is defined.
    """
    if module.Strategy.__new__ is not object.__new__:
        return

    def make(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        if not cls.__module__.startswith(f"{__package__.partition('.')[0]}."):
            vars(made)[_ARGUMENTS] = args, kwargs
        return made

    module.Strategy.__new__ = make


def remembered_arguments(strategy: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a strategy's constructor, by position and by name; empty if it was made before they were kept."""
    return vars(strategy).get(_ARGUMENTS, ((), {}))  # type: ignore[no-any-return]
