"""A worker under a Jupyter kernel: what it prints and shows, progress bars included, reaches the cell that runs.

It knows the kernel's messages, and neither trainers nor plans. Without a kernel it does nothing.

From a forked process ipykernel passes on the text streams, by a new ZMQ context for each write and in no certain order. It drops what the
process displays and every message of a widget ("attempted to send message from fork", jupyter_client/session.py: Session.send), and so
every progress bar. Here the session's check is turned off, as its documentation allows for code that takes care of forks, and one socket of
this process carries everything, in order. This can go when ipykernel does the same (ipykernel/iostream.py: IOPubThread._really_send).
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

_outlet: _Outlet | None = None


class _Outlet:
    """The socket by which this process's messages go to its parent's kernel.

    Args:
        thread: the kernel's IOPubThread, as the fork inherited it: without its thread.
    """

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._context, self._pipe = thread._setup_pipe_out()

    def send(self, message: list[bytes], *args: Any, **kwargs: Any) -> None:
        """Replaces the thread's send. A process that this one forked, such as a data loader's worker, still uses that."""
        if os.getpid() != self._pid:
            type(self._thread)._really_send(self._thread, message, *args, **kwargs)
            return
        with self._lock:
            self._pipe.send_multipart([self._thread._pipe_uuid, *message])

    def close(self) -> None:
        """Wait until all messages are sent, as long as ipykernel allows."""
        with self._lock:
            self._pipe.close()
            self._context.term()


def speak_through_kernel() -> None:
    """In a forked process, once: from here on, send its displays and widgets through the parent's kernel. Does nothing without a kernel."""
    global _outlet
    kernels = sys.modules.get("ipykernel.kernelbase")
    if kernels is None or not kernels.Kernel.initialized():
        return
    kernel = kernels.Kernel.instance()
    thread = getattr(kernel.iopub_socket, "io_thread", None)
    known = ("_setup_pipe_out", "_really_send", "_pipe_uuid", "_is_master_process")
    if thread is None or not all(hasattr(thread, name) for name in known) or thread._is_master_process():
        return  # an ipykernel that works differently: its streams stay as they are
    _outlet = _Outlet(thread)
    thread._really_send = _outlet.send
    kernel.session.check_pid = False


def fall_silent() -> None:
    """Before this process ends without Python's clean-up, let its messages arrive."""
    global _outlet
    if _outlet is not None and _outlet._pid == os.getpid():
        _outlet.close()
        _outlet = None
