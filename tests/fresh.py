"""Call a function in a process of its own, forked off one that has never used CUDA nor run a backward: as a script is when it starts.

A process that has used CUDA can fork no workers, and the tests that share pytest's process use it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

T = TypeVar("T")


class FreshProcessFailed(RuntimeError):
    """The process ended without a result; its exit code and, where there is one, its traceback say why."""


def fresh(function: Callable[..., T], *args: Any, seconds: float = 100) -> T:
    """What ``function(*args)`` returns, or raises; both must have a pickle.

    Args:
        function: of a module that can be imported.
        args: its arguments.
        seconds: how long it may take; then the process is killed, and with it its workers.
    """
    context = _server()
    reader, writer = context.Pipe(duplex=False)
    # By value: multiprocessing itself would share tensors' memory.
    process = context.Process(target=_work, args=(writer, dict(os.environ), pickle.dumps((function, args))))
    process.start()
    writer.close()
    try:
        if not reader.poll(seconds):
            raise FreshProcessFailed(f"no result after {seconds:g} seconds")
        succeeded, value, trace = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        raise FreshProcessFailed(f"ended with exit code {process.exitcode} and no result") from None
    finally:
        if process.exitcode is None:
            process.join(5)
            process.kill()
        process.join()
        reader.close()
    if succeeded:
        result: T = value
        return result
    if isinstance(value, BaseException):
        raise value from FreshProcessFailed(trace)
    raise FreshProcessFailed(trace)


@cache
def _server() -> ForkServerContext:
    """What forks off the processes; it has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fresh_imports"])
    return context


def _work(writer: Any, environment: Mapping[str, str], work: bytes) -> None:
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # a script's: a forkserver's processes would start a DataLoader's workers as theirs
    try:
        function, args = pickle.loads(work)
        answer: tuple[bool, Any, str] = True, function(*args), ""
    except BaseException as error:
        answer = False, error, traceback.format_exc()
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except Exception:  # an exception that can't be built anew
        data = pickle.dumps((False, None, answer[2] or traceback.format_exc()))
    writer.send_bytes(data)
    writer.close()
