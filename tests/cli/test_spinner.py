"""The spinner: on a terminal, before everybody else's words, and in nobody's way."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_autopar._fork import run_forked
from lightning_autopar.cli.spinner import progress


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Standard error is a terminal; gives what it has shown. (No fixture: pytest sets the stream anew when a test begins.)"""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)

        def read(*awaited: str) -> str:
            """Everything up to the last of these words, which come piece by piece."""
            shown = b""
            while any(shown.decode(errors="ignore").count(word) < awaited.count(word) for word in awaited):
                shown += os.read(master, 1 << 16)
            return shown.decode()

        yield read
    os.close(master)


def test_it_says_what_is_done_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        stream: Any = sys.stderr
        with progress() as show:
            show("thinking")
            show("planning")
            print("of the script", file=sys.stderr, flush=True)
        assert sys.stderr is stream
        shown = read("of the script\r\n")
    assert shown.index("thinking") < shown.index("planning") < shown.index("of the script")
    # the line is the spinner's no more when others write, and nothing follows them
    assert shown.split("of the script")[0].endswith("\x1b[2K")
    assert shown.split("of the script")[1] == "\r\n"


def test_a_forked_child_writes_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def child() -> int:
        print("of a child", file=sys.stderr, flush=True)
        return 7

    with terminal(monkeypatch) as read:
        with progress() as show:
            show("planning")
            assert [run_forked(child, timeout_seconds=30) for _ in range(20)] == [7] * 20
        assert read(*20 * ["of a child"]).count("of a child") == 20


@pytest.mark.parametrize(("lines", "shown"), [(False, ""), (True, "lightning-autopar: thinking\nlightning-autopar: planning\n")])
def test_without_a_terminal_there_is_none(monkeypatch: pytest.MonkeyPatch, lines: bool, shown: str) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(lines=lines) as show:
        show("thinking")
        show("planning")
        assert sys.stderr is stream
    assert stream.getvalue() == shown
