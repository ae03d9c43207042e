"""NVML's events: what the driver says of GPUs between two looks at them. Knows the ``pynvml`` module and threads; nothing of plans."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.nvml import as_text

#: What is listened for, where the module and the GPU know it.
_EVENTS = (
    "nvmlEventTypeXidCriticalError",
    "nvmlEventTypeDoubleBitEccError",
    "nvmlEventTypeGpuUnavailableError",
    "nvmlEventTypeGpuRecoveryAction",
)
#: XIDs that a program brings about by itself, on a GPU that is well (github.com/NVIDIA/k8s-device-plugin, ``internal/rm/health.go``, which
#: counts the others as the GPU's): graphics exception, memory page fault, stopped processing, cleanup after such, video, context switch.
_XIDS_OF_PROGRAMS = frozenset((13, 31, 43, 45, 68, 109))
#: How long the library is waited for at a time: so long a fork may have to wait.
_WAIT_MS = 50


class EventWatcher:
    """Listens for what the driver says of GPUs between two looks at them: errors of the device, not of a program on it.

    A thread waits for them. What it heard stays in :attr:`errors` until it is stopped: the driver doesn't say when an error is over, which
    takes a reset. The library isn't asked for anything while this process forks: a child that is forked in the middle of a call would find
    the library's locks held for good.

    Args:
        devices: ids of GPUs, or of their MIG instances, to which what happens to their GPU happens.
        pynvml: the module to ask; by default the one that is installed.
    """

    def __init__(self, devices: Iterable[str], *, pynvml: Any = None) -> None:
        self.errors: dict[str, str] = {}
        #: Set whenever something was heard; whoever looks at it clears it.
        self.heard = threading.Event()
        self._devices = tuple(devices)
        self._pynvml = pynvml
        self._ids: dict[str, list[str]] = {}
        self._stop = threading.Event()
        self._calling, self._may_call = threading.Lock(), threading.Event()
        self._may_call.set()
        self._thread: threading.Thread | None = None

    def start(self) -> tuple[str, ...]:
        """Begin to listen; notes on what can't be listened to, a sentence each. Where that is everything nothing is started."""
        try:
            pynvml = self._pynvml or importlib.import_module("pynvml")
        except ImportError:
            return ("the driver's events can't be listened to: the package nvidia-ml-py isn't installed",)
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return (f"the driver's events can't be listened to ({error})",)
        notes, events = [], None
        try:
            events = pynvml.nvmlEventSetCreate()
            notes = [note for device in self._devices if (note := self._register(device, events)) is not None]
        except pynvml.NVMLError as error:
            notes = [f"the driver's events can't be listened to ({error})"]
        if not self._ids:
            self._end(events)
            return tuple(notes)
        self._thread = threading.Thread(target=self._listen, args=(events,), name="autopar-nvml-events", daemon=True)
        _WATCHERS.add(self)
        self._thread.start()
        return tuple(notes)

    def stop(self, *, wait: bool = True) -> None:
        """Listen no more; the thread frees what it took. Unless told to wait for that, it is done within moments."""
        self._stop.set()
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def _register(self, device: str, events: Any) -> str | None:
        """Listen to a device; the reason where that can't be."""
        pynvml = self._pynvml
        wanted = 0
        for name in _EVENTS:
            wanted |= getattr(pynvml, name, 0)
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device)
            if device.startswith("MIG-"):
                handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            uuid = as_text(pynvml.nvmlDeviceGetUUID(handle))
            if uuid not in self._ids:
                mask = wanted & int(pynvml.nvmlDeviceGetSupportedEventTypes(handle))
                if not mask:
                    return f"the driver tells of no errors of {device}"
                pynvml.nvmlDeviceRegisterEvents(handle, mask, events)
            self._ids.setdefault(uuid, []).append(device)
        except pynvml.NVMLError as error:
            return f"the driver's events of {device} can't be listened to ({error})"
        return None

    def _listen(self, events: Any) -> None:
        """The thread."""
        pynvml = self._pynvml
        while not self._stop.is_set():
            self._may_call.wait()
            with self._calling:
                try:
                    happened = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                    uuid = as_text(pynvml.nvmlDeviceGetUUID(happened.device))
                except pynvml.NVMLError as error:
                    if error.value != pynvml.NVML_ERROR_TIMEOUT:
                        # A GPU fell off the bus, say: which one, the next look at the devices shows.
                        self.heard.set()
                        self._stop.wait(_WAIT_MS / 1000)
                    continue
                self._take_in(uuid, int(happened.eventType), int(happened.eventData))
        with self._calling:
            self._end(events)

    def _take_in(self, uuid: str, kind: int, data: int) -> None:
        """What an event means for the devices."""
        pynvml = self._pynvml
        if kind == getattr(pynvml, "nvmlEventTypeXidCriticalError", None):
            if data in _XIDS_OF_PROGRAMS:
                return
            words = f"XID {data}"
        elif kind == getattr(pynvml, "nvmlEventTypeDoubleBitEccError", None):
            words = "a double-bit ECC error"
        elif kind == getattr(pynvml, "nvmlEventTypeGpuUnavailableError", None):
            words = "the driver says that it is unavailable"
        else:
            # What is to be done with the GPU the next look at the devices shows.
            self.heard.set()
            return
        for device in self._ids.get(uuid, ()):
            self.errors.setdefault(device, words)
        self.heard.set()

    def _end(self, events: Any) -> None:
        """Give back what was taken of the library. Nobody's result depends on how it ends."""
        with contextlib.suppress(self._pynvml.NVMLError):
            if events is not None:
                self._pynvml.nvmlEventSetFree(events)
        with contextlib.suppress(self._pynvml.NVMLError):
            self._pynvml.nvmlShutdown()
        _WATCHERS.discard(self)

    # -- forks -------------------------------------------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        self._may_call.clear()
        self._calling.acquire()

    def _after_fork(self) -> None:
        self._calling.release()
        self._may_call.set()


def with_errors(inventory: Inventory, errors: Mapping[str, str]) -> Inventory:
    """The inventory with what was heard of its devices, where they have no error of their own."""
    if not errors:
        return inventory
    return replace(inventory, devices=tuple(replace(device, error=device.error or errors.get(device.id)) for device in inventory.devices))


#: Who listens in this process.
_WATCHERS: weakref.WeakSet[EventWatcher] = weakref.WeakSet()
_HELD: list[EventWatcher] = []


def _hold() -> None:
    _HELD[:] = list(_WATCHERS)
    for watcher in _HELD:
        watcher._before_fork()


def _let_go() -> None:
    for watcher in _HELD:
        watcher._after_fork()
    _HELD.clear()


def _forget() -> None:
    """In the child nobody listens: threads don't survive a fork."""
    _HELD.clear()
    _WATCHERS.clear()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)
