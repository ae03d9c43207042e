"""A spinner on a terminal's standard error, for work that takes over a second. Elsewhere it prints lines if asked to, or nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """While open, shows the text that is passed to the yielded function. Other output to the standard streams comes first: it takes the
    line, and the spinner returns with the next text.

    Args:
        lines: whether each text is a line where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        stream = sys.stderr
        yield lambda words: print(f"lightning-autopar: {words}", file=stream, flush=True) if lines else None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # A separate stream: children are forked while the spinner's thread runs, and must not inherit a lock that it holds.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as own:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        console = Console(file=own)
        shown: list[Progress] = []

        def hush() -> None:
            if shown:
                shown.pop().stop()

        def show(words: str) -> None:
            hush()
            spinner = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            spinner.add_task(words, total=None)
            spinner.start()
            shown.append(spinner)

        before, process = (sys.stdout, sys.stderr), os.getpid()

        def others() -> None:
            if os.getpid() == process:  # in a forked child there is no spinner
                hush()

        sys.stdout, sys.stderr = (_Before(stream, others) for stream in before)
        try:
            yield show
        finally:
            hush()
            sys.stdout, sys.stderr = before


class _Before:
    """A stream that calls a function before each write."""

    def __init__(self, stream: Any, first: Callable[[], None]) -> None:
        self._stream, self._first = stream, first

    def write(self, words: str) -> int:
        self._first()
        return int(self._stream.write(words))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
