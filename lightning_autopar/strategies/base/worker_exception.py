"""A worker's exception on its way to the parent, with its traceback; and the user's part of one. Knows frames, exceptions and their
pickles; no process and no run.
"""

from __future__ import annotations

import ast
import builtins
import io
import pickle
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from lightning_autopar._root import is_installed, is_users, package_of_frame

#: In the words of a rank that leaves a step as another one has run out of memory.
LEFT_BY_ALL = "so that all ranks leave this step"
#: Words of gloo, NCCL and torch's stores when their peer is gone: an exception with them follows from another worker's end.
_ECHOES = (
    *(LEFT_BY_ALL, "closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "process group", "tcpstore", "filestore"),
    "timed out waiting",
)

#: The attribute of an exception for a GPU's full memory: bytes by device id, more than which the run needs.
LACKED = "autopar_lacked_bytes"

#: The attribute of an exception for memory that ran out: whether that was in a step's forward or backward, which more micro-batches help.
IN_STEP = "autopar_in_step"
#: How many samples a batch of a validation or a test had at once, which ran out of memory.
EVALUATED = "autopar_evaluated"
#: And whether the process hadn't finished its first training batch; and where it was, in words.
AT_FIRST, WHERE = "autopar_at_first", "autopar_where"

#: What torch and CUDA's libraries say when memory runs out, where they raise no exception class of their own.
_SHORTAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad alloc", "bad_alloc", "cublas_status_alloc_failed")


class WorkerFailed(RuntimeError):
    """A worker ended without saying why: killed by a signal, or by ``os._exit``."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the host's, ran out."""
    words = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in words for word in _SHORTAGES)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One exception of one worker, as bytes and text.

    Args:
        pickled: the exception, or the nearest thing that can be pickled.
        text: its traceback as the worker would have printed it.
        echo: whether it reads like the consequence of another worker's end.
        at_seconds: when it was raised, by the host's monotonic clock.
        chained: its ``__cause__``, ``__context__`` and, of an exception group, ``exceptions``, where it has them.
        from_cause: its ``__suppress_context__``.
    """

    pickled: bytes
    frames: tuple[SentFrame, ...]
    text: str
    echo: bool
    at_seconds: float
    chained: Mapping[str, tuple[Failure, ...]]
    from_cause: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe ``error``, to be called in the process that raised it."""
        return cls._of(error, set())

    @classmethod
    def _of(cls, error: BaseException, known: set[int]) -> Failure:
        known.add(id(error))
        said = str(error).lower()
        others = {"__cause__": (error.__cause__,), "__context__": (error.__context__,), "exceptions": getattr(error, "exceptions", ())}
        chained = {
            name: tuple(cls._of(other, known) for other in found)
            for name, found in others.items()
            if isinstance(found, tuple) and found and all(isinstance(other, BaseException) and id(other) not in known for other in found)
        }
        return cls(
            pickled=_pickled(error),
            frames=sent(error.__traceback__),
            text="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            echo=isinstance(error, RuntimeError) and any(word in said for word in _ECHOES),
            at_seconds=time.monotonic(),
            chained=chained,
            from_cause=error.__suppress_context__,
        )

    def exception(self) -> BaseException:
        """The exception, with the worker's traceback and with the exceptions that led to it."""
        error: BaseException = pickle.loads(self.pickled)
        error.__traceback__ = received(self.frames)
        for name, found in self.chained.items():
            others = [other.exception() for other in found]
            if name != "exceptions":
                setattr(error, name, others[0])
                continue
            for part, other in zip(getattr(error, name, ()), others, strict=False):
                part.__traceback__ = other.__traceback__
        error.__suppress_context__ = self.from_cause
        return error


def _pickled(error: BaseException) -> bytes:
    """The exception as it is where it can be pickled; else its parts where they can; else its nearest base class with its words."""
    whole = _dumped(error)
    if whole is not None and _same(error, whole, words=True):
        return whole
    parts = _dumped(_Parts(error))
    if parts is not None and _same(error, parts, words=False):
        return parts
    for base in type(error).__mro__:
        stand_in = _dumped(_Parts(error, base=base, args=(f"{type(error).__name__}: {error}",)))
        if stand_in is not None and _loads(stand_in) is not None:
            return stand_in
    raise AssertionError("BaseException itself can be pickled")


def _loads(data: bytes) -> BaseException | None:
    """The exception; None where the user's class can't be rebuilt, whatever it raises."""
    try:
        error: BaseException = pickle.loads(data)
    except Exception:
        return None
    return error


def _same(error: BaseException, data: bytes, *, words: bool) -> bool:
    """Whether unpickling the bytes gives the exception back, with the same words."""
    again = _loads(data)
    if again is None or type(again) is not type(error) or len(again.args) != len(error.args):
        return False
    try:
        return not words or str(again) == str(error)
    except Exception:  # the __str__ of a user's class
        return False


class _Parts:
    """Pickles as a call of :func:`_rebuilt`, past the class's own constructor, which may want other arguments than ``args`` holds."""

    def __init__(self, error: BaseException, base: type | None = None, args: tuple[Any, ...] | None = None) -> None:
        self._kind = base or type(error)
        self._args = args if args is not None else tuple(arg if _dumped(arg) is not None else repr(arg) for arg in error.args)
        self._state = {} if base else {name: value for name, value in vars(error).items() if _dumped(value) is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._kind, self._args, self._state)


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    builtin = next(base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base)
    builtin.__init__(error, *args)
    error.__dict__.update(state)
    return error


class _Pickler(pickle.Pickler):
    """Writes tensors as CPU tensors: the parent must not touch a GPU to read an exception."""

    def reducer_override(self, target: Any) -> Any:
        if isinstance(target, torch.Tensor) and target.device.type != "cpu":
            return target.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumped(value: Any) -> bytes | None:
    """The pickle; None where pickling fails: a user's ``__reduce__`` may raise any exception."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return None
    return buffer.getvalue()


#: Frames of every call of a module, which say nothing.
_CALLS = ("_wrapped_call_impl", "_call_impl")
#: How many of the first and of the last frames are always shown.
_ENDS = 4


def users_part(found: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on; None where no frame is the user's.

    Between the user's frames those of Lightning, torch and this package are left out; behind the last one up to four stay, as they say what
    was called. Of many frames of other installed packages the first four and the last four stay.
    """
    every = list(_links(found))
    theirs = [index for index, link in enumerate(every) if is_users(link.tb_frame)]
    if not theirs:
        # A data loader's worker: torch raises its exception again, and the words hold the user's own frames.
        again = bool(every) and every[-1].tb_frame.f_code.co_name == "reraise" and package_of_frame(every[-1].tb_frame) == "torch"
        return _joined(every[-1:]) if again else None
    inside = [link for link in every[theirs[-1] + 1 :] if link.tb_frame.f_code.co_name not in _CALLS]
    shown = [*(every[index] for index in theirs), *inside[-_ENDS:]]
    if len(shown) > 2 * _ENDS:
        middle = [link for link in shown[_ENDS:-_ENDS] if not is_installed(link.tb_frame.f_code.co_filename)]
        shown = [*shown[:_ENDS], *middle, *shown[-_ENDS:]]
    return _joined(shown)


def _links(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next


def _joined(links: list[TracebackType]) -> TracebackType | None:
    """A traceback of these links of another one, which stays as it is."""
    joined: TracebackType | None = None
    for link in reversed(links):
        joined = TracebackType(joined, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return joined


# -- from process to process -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SentFrame:
    """Where one frame of a traceback was; ``span`` is its expression's lines and columns, where Python knows them (3.11 and later)."""

    file: str
    function: str
    module: str
    line: int
    span: tuple[int, int, int, int] | None = None


def sent(found: TracebackType | None) -> tuple[SentFrame, ...]:
    """The frames of a traceback, to be sent to another process."""
    return tuple(
        SentFrame(
            file=link.tb_frame.f_code.co_filename,
            function=link.tb_frame.f_code.co_name,
            module=str(link.tb_frame.f_globals.get("__name__", "")),
            line=link.tb_lineno,
            span=_span(link),
        )
        for link in _links(found)
    )


def received(frames: tuple[SentFrame, ...]) -> TracebackType | None:
    """A traceback that reads like the one that was sent. Its frames have no variables."""
    return _joined([_like(frame) for frame in frames])


def _span(link: TracebackType) -> tuple[int, int, int, int] | None:
    code = link.tb_frame.f_code
    if not hasattr(code, "co_positions"):
        return None
    line, end_line, column, end_column = list(code.co_positions())[link.tb_lasti // 2]
    return None if None in (line, end_line, column, end_column) else (line, end_line, column, end_column)  # type: ignore[return-value]


class _Here(Exception):
    """Raised where another process's frame was."""


def _like(frame: SentFrame) -> TracebackType:
    """A link of a traceback that names the frame's place: a statement that raises is compiled as if it stood there."""
    tree = ast.parse("raise _Here")
    line, end_line, column, end_column = frame.span or (frame.line, frame.line, 0, 0)
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno, node.end_lineno, node.col_offset, node.end_col_offset = line, end_line, column, end_column
    names = {"co_name": frame.function, **({"co_qualname": frame.function} if frame.span is not None else {})}
    code = compile(tree, frame.file, "exec").replace(**names)  # type: ignore[arg-type]
    found: TracebackType | None = None
    try:
        exec(code, {"__name__": frame.module, "_Here": _Here})
    except _Here as here:
        found = here.__traceback__
    assert found is not None
    assert found.tb_next is not None, "the frame that was compiled"
    return found.tb_next
