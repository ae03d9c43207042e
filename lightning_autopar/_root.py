"""Which of the two Lightnings this process uses, ``lightning.pytorch`` or ``pytorch_lightning``: one source under two names, whose classes
aren't each other's.

It is settled once, by the code that knows which package the Trainer is from. Code that needs a class of Lightning's earlier gets a guess.
Standard library only: it imports neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isfunction
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

ROOTS = ("lightning.pytorch", "pytorch_lightning")
#: How the names of all modules of either begin.
LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
#: The packages between the user's code and the devices.
FRAMEWORK = frozenset({"torch", "torchmetrics", "lightning_autopar", *(name.removesuffix(".") for name in LIGHTNING)})
#: With packages whose objects hold values, and no code of the user's.
NOT_THE_USERS = FRAMEWORK | {"builtins", "functools", "types", "numpy"}
#: How the names of modules of ``lightning.pytorch`` begin, under either name.
PYTORCH = tuple(f"{root}." for root in ROOTS)
VARIABLE = "AUTOPAR_LIGHTNING"
_OLDEST = (2, 5, 3)
_COMPROMISED = ("2.6.2", "2.6.3")  # on the package index (Lightning-AI/pytorch-lightning#21691)


class Choice(NamedTuple):
    """A root; and why, where that is a guess."""

    root: str
    guess: str | None = None


choice: Choice | None = None


def within(*packages: str) -> tuple[str, ...]:
    """How the names of modules in these packages of either root begin: ``lightning.pytorch.callbacks.`` and its like."""
    return tuple(f"{root}{package}." for root in PYTORCH for package in packages)


def package_of(kind: object) -> str:
    """The top-level package of a class's or a function's module."""
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def package_of_frame(frame: Any) -> str:
    """The top-level package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_users(frame: Any) -> bool:
    """Whether a frame is the user's, or that of a library that is neither a framework nor Python's own."""
    package = package_of_frame(frame)
    return package not in FRAMEWORK and package not in sys.stdlib_module_names


def names_all_gather(module: Any) -> bool:
    """Whether the code of the module's class, or of a base of it that is the user's, calls ``all_gather``."""
    functions = (each for kind in type(module).__mro__ if package_of(kind) not in NOT_THE_USERS for each in vars(kind).values())
    return any("all_gather" in each.__code__.co_names for each in functions if isfunction(each))


def is_installed(file: str) -> bool:
    """Whether a source file belongs to an installed package, also to one of ``pip install --target``, whose folder may have any name."""
    if any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages")):
        return True
    folders = (entry.rstrip(os.sep) + os.sep for entry in sys.path if entry)
    return any(file.startswith(folder) and file[len(folder) :].partition(os.sep)[0] in _recorded(folder) for folder in folders)


def is_of_a_package(kind: type[Any]) -> bool:
    """Whether a class is an installed package's, neither the user's nor a framework's. A package may derive its callback from the other
    Lightning than the script's, as MLflow's autolog does; the script can't change it, and Lightning calls its hooks all the same.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return package_of(kind) not in FRAMEWORK and file is not None and is_installed(file)


@cache
def _recorded(folder: str) -> frozenset[str]:
    """What pip has put into a folder, by its records; a project's own ``.egg-info`` has none."""
    from importlib.metadata import distributions

    lines = (line for each in distributions(path=[folder]) for line in (each.read_text("RECORD") or "").splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


def choose(root: str, what: str) -> None:
    """Settle it by somebody who knows.

    Args:
        root: one of :data:`ROOTS`.
        what: what is that root's, in words: "this Trainer".

    Raises:
        ValueError: if the process has settled on the other one, or if the root's version can't be used.
    """
    global choice
    if choice is None:
        _check_version(root)
    elif choice.root != root and choice.guess is not None:
        raise ValueError(
            f"{what} is {root}'s, but lightning_autopar was imported for {choice.root}, since {choice.guess}; set {VARIABLE}={root}, "
            "or write strategy='autopar' and import nothing else of lightning_autopar before the Trainer is built"
        )
    elif choice.root != root:
        raise ValueError(
            f"{what} is {root}'s, but autopar serves {choice.root} in this process already; import all Trainers, modules, callbacks and "
            f"loggers of a process from one package: change {root} to {choice.root} or the reverse"
        )
    choice = Choice(root)


def chosen() -> str:
    """The root; where nobody has settled it yet, it is guessed now.

    Raises:
        ValueError: if the variable names neither, or if the root's version can't be used.
    """
    global choice
    if choice is None:
        guess = _guess()
        _check_version(guess.root)
        choice = guess
    return choice.root


def check(thing: object, what: str) -> None:
    """Settle it by an object's class, unless that has nothing of Lightning's.

    Raises:
        ValueError: as :func:`choose`.
    """
    if (root := next(_roots_of(type(thing)), None)) is not None:
        choose(root, what)


def version() -> str:
    """The version of the root that this process uses; "unknown" where it isn't installed as a package."""
    return _version(chosen()) or "unknown"


def for_child(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs our code alone, with the root of this one."""
    return {**environment, VARIABLE: choice.root} if choice is not None else dict(environment)


def _check_version(root: str) -> None:
    import re

    found = _version(root)
    if found is None:
        return
    if found in _COMPROMISED or tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < _OLDEST:
        why = "was compromised on the package index" if found in _COMPROMISED else "is older than 2.5.3, which autopar needs"
        raise ValueError(f"{_distribution(root)} {found} {why}; install another version: pip install --upgrade {_distribution(root)}")


def _distribution(root: str) -> str:
    return "lightning" if root == "lightning.pytorch" else "pytorch-lightning"


def _version(root: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_distribution(root))
    except PackageNotFoundError:  # a source tree
        return None


# -- the guess -------------------------------------------------------------------------------------------------------------------------


def _guess() -> Choice:
    if said := os.environ.get(VARIABLE):
        if said not in ROOTS:
            raise ValueError(f"{VARIABLE}={said!r} must be {' or '.join(ROOTS)}")
        return Choice(said, f"{VARIABLE} says so")
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # from the inside out: the code that imports us imports its Trainer, before or after
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("lightning_autopar", "importlib") and not frame.f_code.co_filename.startswith("<frozen"):
            named = _named(name, frame)
            if len(named) == 1:
                return Choice(named.pop(), f"{name} uses that")
        frame = frame.f_back
    loaded = [root for root in ROOTS if sys.modules.get(root) is not None]
    if len(loaded) == 1:
        return Choice(loaded[0], "it was imported")
    return Choice(ROOTS[0] if _has_lightning() else ROOTS[1], "it is installed")


def _named(module: str, frame: FrameType) -> set[str]:
    """The roots that a frame's code points to: it is of one, has imported of one, or will."""
    if root := _root_of(module):
        return {root}
    held: set[str] = set()
    for value in list(frame.f_globals.values()):
        if isinstance(value, type):
            held.update(_roots_of(value))
        elif isinstance(value, ModuleType) and (root := _root_of(value.__name__)):
            held.add(root)
    return held if len(held) == 1 else held | _imported(frame.f_code)


def _imported(code: CodeType) -> set[str]:
    """The roots in import statements, in those still to come and in functions too."""
    found: set[str] = set()
    if any(map(_root_of, code.co_names)):  # attributes are among them; taking code apart is slow
        import dis

        names = (str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
        found.update(root for name in names if (root := _root_of(name)))
    return found.union(*(_imported(each) for each in code.co_consts if isinstance(each, CodeType)))


def _roots_of(kind: type[Any]) -> Iterator[str]:
    return (root for base in kind.__mro__ if (root := _root_of(str(base.__module__))))


def _root_of(module: str) -> str | None:
    """The root that a module's name belongs to; Fabric, which either root's scripts may use, points to none."""
    first, _, rest = module.partition(".")
    if first == "lightning":
        return None if rest.partition(".")[0] == "fabric" else ROOTS[0]
    return ROOTS[1] if first == ROOTS[1] else None


def _has_lightning() -> bool:
    """Whether ``lightning.pytorch`` can be imported, without importing its parent; a folder ``lightning`` of the user's is none."""
    from importlib.util import find_spec

    spec = find_spec("lightning")
    return spec is not None and any(os.path.isdir(os.path.join(each, "pytorch")) for each in spec.submodule_search_locations or ())
