"""Processes that tests start, and what they are given, so that each doesn't spend its first seconds on imports that nobody uses."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import psutil

_HERE = Path(__file__).resolve().parent
#: What a forked script finds imported.
_PRELOADED = ("lightning.pytorch", "lightning_autopar.strategies.auto", "torch.distributed.run")


def lean_path(*more: Path) -> str:
    """``PYTHONPATH`` for a process that trains but needs no Hugging Face and no pictures: these folders, then the project's."""
    return os.pathsep.join(map(str, (_HERE / "lean", *more, _HERE.parent)))


def descendants() -> set[psutil.Process]:
    """This process's; another test's server of fresh processes (:mod:`tests.fresh`) may be among them."""
    return set(psutil.Process().children(recursive=True))


def left_since(before: Set[psutil.Process], seconds: float = 30) -> list[psutil.Process]:
    """The descendants that weren't there ``before`` and don't end: a busy machine takes a while to end what was killed."""
    _, left = psutil.wait_procs(descendants() - before, timeout=seconds)
    return list(left)


def processor_seconds() -> float:
    """What this process and those that it has waited for have computed, which a busy machine doesn't change."""
    return sum(os.times()[:4])


def wait_for_signal() -> None:
    """Returns, or raises what a handler raises, once a signal has been handled.

    A read or :func:`signal.pause` would sleep through one that comes just before it, as where a process is stopped there: Python runs
    handlers between its own instructions. The pipe keeps that it came.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.read(read, 1)


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this, once it has said a line; killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def ledger_folder() -> Iterator[Path]:
    """A place for leases that a test's runs share, in memory where there is some."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home, prefix="autopar-leases-test-") as name:
        yield Path(name)


class ForkedScript:
    """A script as a fork of this process, which has imported what it needs: to start Python anew takes four seconds of a core.

    It has an environment, a folder and a session of its own, its signals and warnings are as Python has them at its start, and for the rest
    it looks like a :class:`subprocess.Popen`. What a start itself does isn't tested so.

    Args:
        script: the file to run as ``__main__``.
        arguments: what it finds in ``sys.argv``.
        environment: all of its variables.
        folder: where it runs.
        torchrun: torchrun's options, if its agent is to start the script, as forks of itself.
    """

    def __init__(
        self, script: Path, *arguments: str, environment: Mapping[str, str], folder: Path, torchrun: tuple[str, ...] | None = None
    ) -> None:
        for name in _PRELOADED:
            import_module(name)
        run = partial(_run_script, str(script), *arguments)
        if torchrun is not None:
            run = partial(_be_torchrun, *torchrun, str(script), *arguments)
        with tempfile.NamedTemporaryFile(prefix="said-", delete=False) as said:
            self._said = Path(said.name)
        self._process = get_context("fork").Process(target=_be_script, args=(run, dict(environment), folder, self._said))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: forks of a process that has threads
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has said until its end.

        Raises:
            subprocess.TimeoutExpired: if it hasn't ended after so many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        said = self._said.read_text(encoding="utf-8")
        self._said.unlink()
        return said, None


def _be_script(run: Callable[[], None], environment: dict[str, str], folder: Path, said: Path) -> None:
    """In the fork: nothing of this process that a new one wouldn't have."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    out = said.open("a", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(out.fileno(), descriptor)
    sys.stdout = sys.stderr = out
    root = logging.getLogger()
    root.handlers[:] = []  # pytest's; without any, Python prints warnings
    root.setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [logging.StreamHandler(out)]
        logger.setLevel(logging.INFO)
    warnings.resetwarnings()
    warnings.showwarning = lambda message, *_, **__: print(message, file=out)
    _default_signals()
    run()


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_script(script: str, *arguments: str) -> None:
    """Run it as ``python script``; as under Python, an exception's traceback is printed and the exit code is 1."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    _default_signals()  # a rank's: torchrun's own are those of its agent
    rank_zero_only.rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))  # what Lightning asks at its import
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _be_torchrun(*arguments: str) -> None:
    """torchrun's own program, whose agent forks its ranks from itself."""
    from torch.distributed import run
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def launch(config: LaunchConfig, entrypoint: object) -> Callable[..., object]:
        config.start_method = "fork"
        return lambda unbuffered, *words: elastic_launch(config, _run_script)(*words)

    run.elastic_launch = launch
    run.main(list(arguments))


def ended(process: subprocess.Popen[str] | ForkedScript, seconds: float = 200) -> tuple[int, str]:
    """Wait for it; one that hangs is ended, with all that it started."""
    process_itself = psutil.Process(process.pid)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for member in [*process_itself.children(recursive=True), process_itself]:
            member.kill()
        output, _ = process.communicate()
        raise AssertionError(f"no end after {seconds:g} s\n{output}") from None
    assert process.returncode is not None
    return process.returncode, output
