"""The user's part of a traceback, and tracebacks on their way from process to process. Knows frames; no run and no process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from lightning_autopar._root import is_installed, is_users, package_of_frame

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
