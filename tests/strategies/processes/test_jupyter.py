"""What a worker does where there is no kernel, or one that it doesn't know. The real one is in tests/test_notebook.py."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autopar.strategies.processes import jupyter


class Pipe:
    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.closed = False

    def send_multipart(self, message: list[bytes]) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class Thread:
    """A kernel's IOPubThread, as far as it is used."""

    _pipe_uuid = b"uuid"

    def __init__(self, *, master: bool) -> None:
        self.master = master
        self.pipe = Pipe()
        self.own: list[Any] = []

    def _setup_pipe_out(self) -> tuple[Any, Pipe]:
        return SimpleNamespace(term=lambda: None), self.pipe

    def _is_master_process(self) -> bool:
        return self.master

    def _really_send(self, message: list[bytes]) -> None:
        self.own.append(message)


def kernel(monkeypatch: pytest.MonkeyPatch, thread: Any, *, initialized: bool = True) -> Any:
    one = SimpleNamespace(iopub_socket=SimpleNamespace(io_thread=thread), session=SimpleNamespace(check_pid=True))
    known = SimpleNamespace(Kernel=SimpleNamespace(initialized=lambda: initialized, instance=lambda: one))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelbase", known)  # type: ignore[arg-type]
    return one


def test_a_worker_sends_by_one_socket_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Thread(master=False)
    found = kernel(monkeypatch, thread)
    jupyter.speak_through_kernel()
    assert found.session.check_pid is False
    thread._really_send([b"one"])
    thread._really_send([b"two"])
    assert thread.pipe.sent == [[b"uuid", b"one"], [b"uuid", b"two"]]
    # A process that it forks has a way of its own, as it shares the socket with nobody.
    monkeypatch.setattr(os, "getpid", lambda: -1)
    thread._really_send([b"three"])
    assert thread.own == [[b"three"]]
    jupyter.fall_silent()
    assert not thread.pipe.closed
    monkeypatch.undo()
    jupyter.fall_silent()
    assert thread.pipe.closed
    jupyter.fall_silent()  # once is enough


@pytest.mark.parametrize("thread", [None, SimpleNamespace(_setup_pipe_out=None), Thread(master=True)])
def test_a_kernel_that_it_does_not_know_and_the_kernel_itself_are_left_alone(monkeypatch: pytest.MonkeyPatch, thread: Any) -> None:
    found = kernel(monkeypatch, thread)
    jupyter.speak_through_kernel()
    assert found.session.check_pid is True
    assert "_really_send" not in vars(thread or SimpleNamespace())


def test_without_a_kernel_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel(monkeypatch, Thread(master=False), initialized=False)
    jupyter.speak_through_kernel()
    assert found.session.check_pid is True
    monkeypatch.delitem(sys.modules, "ipykernel.kernelbase")
    jupyter.speak_through_kernel()
    jupyter.fall_silent()
