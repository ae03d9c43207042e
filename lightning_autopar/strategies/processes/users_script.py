"""Runs a user's script in this process as ``python script.py …`` or ``python -m module …`` would run it.

Standard library only: what a script sets before it imports torch must still count. Knows no Trainer and no strategy.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What to run.

    Args:
        target: the path of a Python file, or a module's name.
        is_module: whether ``target`` is a module's name, as after ``python -m``.

    Raises:
        ValueError: if there is no such file.
    """

    target: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).is_file():
            raise ValueError(f"there is no script {self.target!r}; give the path of the Python file that calls fit, or -m and a module")

    @property
    def name(self) -> str:
        """Its name in messages: ``"train.py"``."""
        return self.target if self.is_module else Path(self.target).name

    def run(self) -> None:
        """Run it; what it raises is raised here, also :class:`SystemExit`.

        Raises:
            ValueError: if there is no such module.
        """
        with self._as_main():
            if not self.is_module:
                runpy.run_path(self.target, run_name="__main__")
            else:
                _check_module(self.target)
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        """While open, ``sys.argv`` and ``sys.path`` are those of the script: its folder replaces this program's own."""
        before = sys.argv[:], sys.path[:]
        own = {"", os.getcwd(), str(Path(sys.argv[0]).resolve().parent)}
        folder = os.getcwd() if self.is_module else str(Path(self.target).resolve().parent)
        sys.argv = [self.target, *self.arguments]
        sys.path[: 1 if sys.path[:1] and sys.path[0] in own else 0] = [folder]
        try:
            yield
        finally:
            sys.argv, sys.path = before


def _check_module(name: str) -> None:
    """Raises: ValueError, if there is none of that name."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that its package imports
        found = None
    if found is None:
        raise ValueError(f"there is no module {name!r}; give its name as after python -m, in a folder from which it can be imported")


def own_traceback(error: BaseException) -> TracebackType | None:
    """The script's part of the traceback of an exception from :meth:`Script.run`."""
    around = {__file__, runpy.__file__, "<frozen runpy>"}
    found, inside = error.__traceback__, False
    while found is not None:
        is_around = found.tb_frame.f_code.co_filename in around
        if inside and not is_around:
            return found
        inside, found = inside or is_around, found.tb_next
    return None


def is_ours(error: BaseException | None) -> TypeGuard[ValueError]:
    """Whether it is a refusal of this package's, whose words say all, rather than an error of the script or of what it calls."""
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code.co_filename
    return Path(code).is_relative_to(_PACKAGE) and linecache.getline(code, line).lstrip().startswith("raise ")


# -- starting it again -----------------------------------------------------------------------------------------------------------------

#: Why a run can have no worker processes, in a notebook or an interactive session whose process can't be forked.
NO_WORKERS = (
    "this process has used a GPU (or run a backward pass) already, so that no workers can be forked from it, and it runs no script that "
    "could be started again for them; to use several devices, restart the kernel and call fit before anything else"
)
#: The words before the script's own arguments in the command that started it here; empty where Python runs the script directly.
_command: tuple[str, ...] = ()


@contextmanager
def started_by(command: Sequence[str]) -> Iterator[None]:
    """While open, :func:`rerun_command` starts the script by this command.

    Args:
        command: without the script's own arguments.
    """
    global _command
    before, _command = _command, tuple(command)
    try:
        yield
    finally:
        _command = before


def runs_script() -> bool:
    """Whether this process runs a script that can be started again, not a notebook, an interactive session or piped code."""
    return bool(_command) or (not hasattr(sys, "ps1") and getattr(sys.modules["__main__"], "__file__", "<stdin>") != "<stdin>")


def rerun_command() -> list[str]:
    """The command that starts this very script again, with the arguments that it has now.

    Raises:
        ValueError: if this process runs no script: a notebook or an interactive session.
    """
    if _command:
        return [*_command, *sys.argv[1:]]
    if not runs_script():
        raise ValueError(NO_WORKERS)
    from lightning_autopar._lightning_compat import script_command

    return list(script_command())
