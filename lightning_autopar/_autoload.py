"""Makes ``Trainer(strategy="autopar")`` known without an import.

torch runs :func:`install` at the end of every ``import torch`` (entry point group ``torch.backends``), and importing this package
runs it as well. Lightning isn't there yet then, so a finder waits on ``sys.meta_path`` for Lightning's strategies module and
registers the name once that module was executed.

What this module must not do: import anything but the standard library, cost anybody time, or raise, since torch turns an error
here into a failure of every ``import torch``. ``LIGHTNING_AUTOPAR_AUTOLOAD=0`` turns it off.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time to import typing in every process that imports torch
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

NAME = "autopar"
OFF_SWITCH = "LIGHTNING_AUTOPAR_AUTOLOAD"
_DESCRIPTION = "plans by itself how the model runs on the devices that are free"


def _maker(root: str) -> Callable[..., Any]:
    def make_strategy(**options: Any) -> Any:
        """Makes the strategy when a Trainer of this root is given the name; only then is our code imported."""
        from lightning_autopar import _root

        _root.choose(root, "this Trainer")
        from lightning_autopar.strategies.auto import AutoParallelStrategy

        return AutoParallelStrategy(**options)

    return make_strategy


_FACTORIES = {f"{root}.strategies": _maker(root) for root in ("lightning.pytorch", "pytorch_lightning")}


def install() -> None:
    """Register ``"autopar"`` with Lightning, now or as soon as Lightning is imported. Calling it again changes nothing; it never raises."""
    try:
        if os.environ.get(OFF_SWITCH) == "0":
            return
        for name in _FACTORIES:
            if name in sys.modules:
                _register(sys.modules[name])
        if not any(getattr(finder, "_registers", None) == NAME for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception:
        _tell("can't be found by name; write strategy=lightning_autopar.AutoParallelStrategy() instead")


def when_executed(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``action`` with a module as soon as it has been executed, or now if it has been. If ``action`` raises, so does the import.

    Args:
        name: the module's; it isn't imported by this.
        action: called once at most.

    Returns:
        what stops waiting for the module.
    """
    finder = _Finder({name: action})

    def stop() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)
    return stop


def _register(module: ModuleType) -> None:
    """Never raises: it runs inside the import of Lightning, which must not fail because of us."""
    try:
        registry = getattr(module, "StrategyRegistry", None)  # None while the module is still being imported
        if registry is not None and NAME not in registry:
            registry.register(NAME, _FACTORIES[module.__name__], description=_DESCRIPTION)
        let_take = getattr(sys.modules.get("lightning_autopar.strategies.auto"), "let_trainers_take_it", None)  # None while it is imported
        if let_take is not None:
            let_take(module)
    except Exception:
        _tell(f"couldn't be registered with {module.__name__}")


def _tell(what: str) -> None:
    """Logs it: a warning would be an exception under ``python -W error``."""
    import logging

    logging.getLogger("lightning_autopar").warning("strategy=%r %s", NAME, what, exc_info=True)


class _Finder:
    """Finds some modules by the other finders, and runs an action after each was executed.

    Args:
        actions: what to do, by the module's name; by default to register with Lightning's strategies.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]] | None = None) -> None:
        self._actions = dict.fromkeys(_FACTORIES, _register) if actions is None else actions
        self._registers = NAME if actions is None else None
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Another package's finder may ask all finders in turn, as this one does: without the set the two would ask each other for ever.
        if name not in self._actions or name in self._searching:
            return None
        self._searching.add(name)
        try:
            for finder in sys.meta_path:
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        loader: Any = _Loader(spec.loader, self._actions[name])  # importlib calls only its two methods
                        spec.loader = loader
                    return spec
            return None
        finally:
            self._searching.discard(name)


class _Loader:
    """Executes a module by its own loader, then runs the action; the module keeps no trace of it."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create_module = getattr(self._loader, "create_module", None)
        return create_module(spec) if create_module is not None else None

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
