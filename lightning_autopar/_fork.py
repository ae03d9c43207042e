"""Run one function in a forked child and bring its result back; and what a forked child can do after what its parent has done.

Whatever the function does to its process (random draws, changed objects, a crash) stays in the child; what it tells others is held back
(files that are open for writing, and trackers by :mod:`lightning_autopar._trackers`). Knows what a fork does to torch and to the user's
pools, and nothing of what is run.

A fork copies one thread and none of the others. Of torch's threads that matters to four kinds:

- Autograd's. The first backward pass of a process, on whatever device, starts a thread for each GPU that it sees. In a child that is forked
  afterwards torch refuses every backward pass (``torch/csrc/autograd/engine.cpp``, ``track_bad_autograd_forks``;
  https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork). A process that sees no GPU starts none.
- CUDA's own. Once the driver was asked for anything, also for the number of GPUs without NVML, no child can use it
  (``torch.cuda._is_in_bad_fork``). ``torch.cuda.is_available()`` asks it so. Where it has none, no child needs it.
- OpenMP's, which belong to the thread that used them: a child's main thread would wait for workers that are gone
  (https://github.com/pytorch/pytorch/issues/17199). So a child works in a fresh thread.
- Those of torch's second pool, which ``torch.set_num_threads`` makes. Where a child's first two threads ask for it at the same time, one of
  them finds it exchanged halfway, and the process aborts: "Invalid thread pool!" (https://github.com/pytorch/pytorch/issues/75147). So a
  child asks for it once before it has a second thread.

The user's pools of threads and of processes begin anew in a child, and so does multiprocessing's server of forks.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import pickle
import random
import select
import signal
import stat
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.pool import Pool, ThreadPool
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch

from lightning_autopar._gpus_as_cpu import gpus_as_cpu
from lightning_autopar._trackers import track
from lightning_autopar.text import error_line

T = TypeVar("T")

_HEADER = struct.Struct("!?Q")
_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 1 << 20
#: A child that still lives so long after its answer is killed.
_GOODBYE_SECONDS = 5.0
_TRY_SECONDS = 60.0
#: A child that sees no GPU never leaves the contexts in here.
_LASTING = ExitStack()
_MAKE_TENSOR: Any = torch.Tensor.__new__


class ChildFailed(RuntimeError):
    """The forked child gave no result.

    Args:
        reason: one sentence: the exception's last line, the signal that ended it, or the time it took.
        child_traceback: the traceback as the child printed it; empty if it left none.
        crashed: whether the child ended before its answer, by a signal or by an exit.
        timed_out: whether it was killed because it took too long.
    """

    def __init__(self, reason: str, child_traceback: str = "", *, crashed: bool = False, timed_out: bool = False) -> None:
        super().__init__(f"{reason}\n\n{child_traceback}" if child_traceback else reason)
        self.reason = reason
        self.child_traceback = child_traceback
        self.crashed = crashed
        self.timed_out = timed_out


def unforkable() -> str | None:
    """Why no forked child of this process can use a GPU or run a backward pass, as the end of a sentence; None where it can.

    torch has no function that tells, so a child tries.
    """
    if torch.cuda.is_initialized():
        return "this process has used a GPU already"
    if not torch.backends.cuda.is_built():
        return None
    try:
        reason = run_forked(_try, timeout_seconds=_TRY_SECONDS)
        if reason is not None and not torch.cuda.device_count():  # asked already; where there are no GPUs, no child is to use one
            run_forked(_go_backward, timeout_seconds=_TRY_SECONDS)
            return None
        return reason
    except ChildFailed as error:
        if "autograd's threading" in error.reason:
            return "this process has run a backward pass already, which started autograd's threads for the GPUs"
        return f"a forked child of this process can't run a backward pass ({error.reason})"


def _try() -> str | None:
    if torch.cuda._is_in_bad_fork():
        return "this process has asked CUDA's driver for its GPUs already"
    _go_backward()
    return None


def _go_backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def begin_child(*, gpus: bool) -> None:
    """To be called first in each process that this package forks, while it has a single thread.

    Args:
        gpus: whether the child may use GPUs. If not, it sees none, so that a backward pass on the CPU makes no context on each of them, and
            what the user's code calls a GPU is the CPU.
    """
    gc.freeze()  # a full collection would visit all that the parent has imported, and copy those pages into this process
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if torch.backends.cuda.is_built():
            _LASTING.enter_context(gpus_as_cpu())
    torch.set_num_threads(torch.get_num_threads())
    # For good, as the user's code may make such a tensor whenever it runs: torch's own fails while a mode is open.
    torch.Tensor.__new__ = staticmethod(_new_tensor)  # type: ignore[method-assign,assignment]
    _renew_pools()
    _renew_server()


def _new_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.Tensor.__new__``, by which a user's subclass makes one of itself out of a tensor (``super().__new__(cls, x)``): while a
    ``TorchDispatchMode`` is open, torch's own can't (torch 2.13: "the raw Tensor object is already associated to a python object").
    Dynamo takes this signature alone for that of torch's own.
    """
    if len(args) == 2 and not kwargs and args[0] is not torch.Tensor and isinstance(args[1], torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            of_kind: torch.Tensor = args[1].as_subclass(args[0])
            return of_kind
    made: torch.Tensor = _MAKE_TENSOR(*args, **kwargs)
    return made


def run_forked(
    function: Callable[..., T],
    *args: Any,
    timeout_seconds: float | None = None,
    gpus: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> T:
    """Call ``function(*args)`` in a forked child and return its result.

    The function runs in a fresh thread of the child. The child leaves by ``os._exit``, hence nothing that the parent registered with
    ``atexit`` runs in it. It dies with the parent, and by Ctrl-C. Its standard output is discarded, and so is
    what it adds to files that this process writes.

    Args:
        function: what to run; needn't be picklable, as the child has the parent's memory.
        timeout_seconds: kill the child after so long; None waits for ever.
        gpus: whether the function may use GPUs; if not, it sees none.
        meanwhile: what this process does before it waits for the child.

    Returns:
        The function's result, a pickled copy.

    Raises:
        ChildFailed: if the function raises, its result can't be pickled, or the child crashes or takes too long.
        ValueError: if the time-out isn't positive.
    """
    with forked(function, *args, timeout_seconds=timeout_seconds, gpus=gpus) as result:
        if meanwhile is not None:
            meanwhile()
        return result()


@contextmanager
def forked(function: Callable[..., T], *args: Any, timeout_seconds: float | None = None, gpus: bool = False) -> Iterator[Callable[[], T]]:
    """The same while this process goes on: gives what waits for the child's result, once. A child that nobody waited for is ended."""
    if timeout_seconds is not None and timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds must be positive, but is {timeout_seconds!r}; leave it out to wait for ever")
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    parent, python_draws = os.getpid(), random.getstate()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at every fork; that is why the function runs in a fresh thread of the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        random.setstate(python_draws)  # Python seeds its generator anew in each child, while torch's and NumPy's go on
        _be_child(parent, writer, gpus, function, args)
    os.close(writer)
    ended = False

    def result() -> T:
        nonlocal ended
        answer = read_message(reader, deadline)
        status = _wait(pid, _GOODBYE_SECONDS) if answer is not None else _wait(pid, 0.0 if _passed(deadline) else _GOODBYE_SECONDS)
        ended = status is not None
        if answer is not None:
            succeeded, payload = answer
            found = pickle.loads(payload)
            if succeeded:
                return found  # type: ignore[no-any-return]
            raise ChildFailed(*found)
        if status is None and _passed(deadline):
            raise ChildFailed(f"the child process was stopped after {timeout_seconds:.3g} seconds without a result", timed_out=True)
        raise ChildFailed(f"the child process ended without a result: {_describe(status)}", crashed=True)

    try:
        yield result
    finally:
        os.close(reader)
        if not ended:
            _kill(pid)


def _be_child(parent: int, writer: int, gpus: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """The child's whole life; never returns into the parent's stack."""
    code = 1
    try:
        die_with(parent)
        _forget_handlers()
        _print_nothing()
        _write_nothing()
        begin_child(gpus=gpus)
        track(here=False)
        torch.autograd.set_detect_anomaly(False)  # values that planning makes up may be NaN; the run finds the user's
        thread = threading.Thread(target=_answer, args=(writer, function, args), name="forked", daemon=True)
        thread.start()
        thread.join()
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(code)


def _print_nothing() -> None:
    """Discard what the user's code prints while it is examined: the run prints it again. Warnings are still shown."""
    nowhere = _LASTING.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # to the end
    os.dup2(nowhere.fileno(), 1)
    sys.stdout = nowhere


def _write_nothing() -> None:
    """Discard what the user's code adds to files that the parent has open for writing alone, such as a log. Standard error isn't one."""
    nowhere, errors = os.open(os.devnull, os.O_WRONLY), os.fstat(2)
    for name in os.listdir("/proc/self/fd"):
        try:
            found, flags = os.fstat(int(name)), fcntl.fcntl(int(name), fcntl.F_GETFL)
        except OSError:  # the list's own
            continue
        if stat.S_ISREG(found.st_mode) and flags & os.O_ACCMODE == os.O_WRONLY and not os.path.samestat(found, errors):
            os.dup2(nowhere, int(name))


#: The user's pools of threads and of processes, and what showed that there are some.
_POOLS: WeakSet[Any] = WeakSet()
_SHOWN: set[int] = set()


def _find_pools() -> None:
    """Before a fork: which pools there are. The collector knows them, and is asked only where there are new threads of theirs."""
    theirs = ("_handle_workers", "ExecutorManagerThread")  # in the names that threads have of their functions and classes
    threads = [each for each in threading.enumerate() if any(name in f"{each.name} {type(each).__name__}" for name in theirs)]
    shown = {*map(id, threads), *map(id, pools._threads_queues.values())}
    if not shown <= _SHOWN:
        _SHOWN.update(shown)
        _POOLS.update(each for each in gc.get_objects() if issubclass(type(each), (ThreadPoolExecutor, ProcessPoolExecutor, Pool)))


os.register_at_fork(before=_find_pools)


def _renew_pools() -> None:
    """In a child: a pool would leave its work to threads and processes that aren't there, and wait for ever."""
    for pool in _POOLS:
        kind = type(pool)
        if any(getattr(pool, name, False) for name in ("_shutdown", "_shutdown_thread")) or getattr(pool, "_state", "RUN") != "RUN":
            continue
        if issubclass(kind, ThreadPoolExecutor):
            pool._threads.clear()
            pool._work_queue, pool._idle_semaphore, pool._shutdown_lock = SimpleQueue(), threading.Semaphore(0), threading.Lock()
        elif issubclass(kind, ThreadPool):
            ThreadPool.__init__(pool, pool._processes, pool._initializer, pool._initargs)
        elif issubclass(kind, ProcessPoolExecutor):
            context, most = pool._mp_context, pool._max_tasks_per_child
            ProcessPoolExecutor.__init__(pool, pool._max_workers, context, *_dying(pool, context), max_tasks_per_child=most)
        else:
            pool._check_running = partial(_begin_processes, pool)  # at its first use: every child has the pool, and few use it


def _renew_server() -> None:
    """In a child: multiprocessing would look after its server of forks, which is the parent's child ("No child processes")."""
    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _begin_processes(pool: Any) -> None:
    del pool._check_running
    Pool.__init__(pool, pool._processes, *_dying(pool, pool._ctx), pool._maxtasksperchild, pool._ctx)


def _dying(pool: Any, context: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A pool's initializer and its arguments, for processes that end with this one, as a child leaves without ending its pools."""
    given = pool._initargs[1:] if pool._initializer is _begin_process else (pool._initializer, pool._initargs)
    return _begin_process, (None if context.get_start_method() == "forkserver" else os.getpid(), *given)


def _begin_process(parent: int | None, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]) -> None:
    if parent is not None:  # else it is the server's child
        die_with(parent)
    if initializer is not None:
        initializer(*initargs)


def of_this_process() -> list[Any]:
    """What a forked process lacks, or has made anew: threads, the queues that they serve, and pools of threads."""
    threads = threading.enumerate()
    _find_pools()
    return [*threads, *(queue for each in threads if (queue := vars(each).get("_queue")) is not None), *_POOLS]


def _answer(writer: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function and write its result or its failure."""
    try:
        payload = pickle.dumps(function(*args), protocol=pickle.HIGHEST_PROTOCOL)
        succeeded = True
    except BaseException as error:  # a SystemExit in the user's code is a failure here, too
        # The failure of the child's own child has its reason already.
        reason = error.reason if isinstance(error, ChildFailed) else error_line(error)
        payload = pickle.dumps((reason, traceback.format_exc()))
        succeeded = False
    try:
        write_message(writer, succeeded, payload)
    except BrokenPipeError:
        return  # the parent has stopped waiting


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; leave at once if the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _forget_handlers() -> None:
    """Reset every signal that the parent's Python code handles, so that Ctrl-C and SIGTERM end the child."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def write_message(writer: int, succeeded: bool, payload: bytes) -> None:
    """Write what :func:`read_message` reads."""
    view = memoryview(_HEADER.pack(succeeded, len(payload)) + payload)
    while view:
        view = view[os.write(writer, view[:_CHUNK_BYTES]) :]


def read_message(reader: int, deadline: float | None) -> tuple[bool, bytes] | None:
    """The message that another process wrote; None if it ended, or the time passed, before the last byte.

    The length comes first: a process that the child started may keep the pipe open long after the child.
    """
    header = _read(reader, _HEADER.size, deadline)
    if header is None:
        return None
    succeeded, size = _HEADER.unpack(header)
    payload = _read(reader, size, deadline)
    return None if payload is None else (succeeded, payload)


def _read(reader: int, size: int, deadline: float | None) -> bytes | None:
    """Exactly ``size`` bytes, or None at the end of the file or at the deadline."""
    data = bytearray()
    while len(data) < size:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], wait)[0]:
            return None
        piece = os.read(reader, min(_CHUNK_BYTES, size - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _wait(pid: int, seconds: float) -> int | None:
    """The child's wait status, or None if it still runs after so long."""
    until = time.monotonic() + seconds
    pause = 0.0005
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0  # somebody ignores SIGCHLD, and the kernel has reaped it
        if ended:
            return status
        if time.monotonic() >= until:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _kill(pid: int) -> None:
    """End a child that may have ended by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _describe(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "it closed its pipe and hung"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        cause = "; the kernel does that when the host's memory is short" if number == signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(number).name}{cause}"
    return f"it left with exit status {os.waitstatus_to_exitcode(status)}"


def _flush(stream: Any) -> None:
    """Flush a standard stream that may be missing or closed."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return
