from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.nvml_events import EventWatcher, with_errors
from tests.fakes import nvml as fake
from tests.fakes.nvml import FakeGpu, FakeInstance, FakeNvml

XID, ECC = FakeNvml.nvmlEventTypeXidCriticalError, FakeNvml.nvmlEventTypeDoubleBitEccError
GONE, ACTION = FakeNvml.nvmlEventTypeGpuUnavailableError, FakeNvml.nvmlEventTypeGpuRecoveryAction
#: Longer than anything here takes on a busy machine.
LONG = 30.0

Watch = Callable[..., EventWatcher]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """``watch(nvml, "GPU-a")`` listens; that nothing is left of it is checked at the end."""
    started: list[tuple[FakeNvml, EventWatcher]] = []

    def start(nvml: FakeNvml, *devices: str) -> EventWatcher:
        watcher = EventWatcher(devices, pynvml=nvml)
        started.append((nvml, watcher))
        assert watcher.start() == ()
        return watcher

    yield start
    for nvml, watcher in started:
        watcher.stop()
        assert (nvml.initialised, nvml.event_sets) == (0, [])
    assert not [thread for thread in threading.enumerate() if thread.name == "autopar-nvml-events"]


@pytest.mark.parametrize(
    ("kind", "data", "words"), [(XID, 79, "XID 79"), (XID, 48, "XID 48"), (ECC, 0, "double-bit ECC"), (GONE, 0, "unavailable")]
)
def test_errors_are_heard(watch: Watch, kind: int, data: int, words: str) -> None:
    a, b = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml = FakeNvml(a, b)
    watcher = watch(nvml, "GPU-a", "GPU-b")
    assert not watcher.heard.is_set()
    nvml.happen(b, kind, data)
    assert watcher.heard.wait(LONG)
    assert list(watcher.errors) == ["GPU-b"]
    assert words in watcher.errors["GPU-b"]


def test_the_first_error_is_kept(watch: Watch) -> None:
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)
    watcher = watch(nvml, "GPU-a")
    for xid in (94, 79):
        nvml.happen(gpu, XID, xid)
        assert watcher.heard.wait(LONG)
        watcher.heard.clear()
    assert watcher.errors == {"GPU-a": "XID 94"}


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_a_programs_own_errors_arent_the_devices(watch: Watch, xid: int) -> None:
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)
    watcher = watch(nvml, "GPU-a")
    nvml.happen(gpu, XID, xid)
    nvml.happen(gpu, ACTION)  # heard after it, and no error by itself
    assert watcher.heard.wait(LONG)
    assert watcher.errors == {}


def test_only_what_a_gpu_supports_is_asked_for(watch: Watch) -> None:
    gpu = FakeGpu("GPU-a", supported_events=XID | 1)
    nvml = FakeNvml(gpu)
    watch(nvml, "GPU-a")
    assert nvml.event_sets[0].registered == {"GPU-a": XID}


def test_an_old_module_doesnt_know_all_events(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlEventTypeGpuUnavailableError")
    monkeypatch.delattr(FakeNvml, "nvmlEventTypeGpuRecoveryAction")
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)
    watcher = watch(nvml, "GPU-a")
    assert nvml.event_sets[0].registered == {"GPU-a": XID | ECC}
    nvml.happen(gpu, XID, 79)
    assert watcher.heard.wait(LONG)
    assert watcher.errors == {"GPU-a": "XID 79"}


def test_instances_share_the_fate_of_their_gpu(watch: Watch) -> None:
    gpu = FakeGpu("GPU-a", mig=True, instances={0: FakeInstance("MIG-a0"), 1: FakeInstance("MIG-a1")})
    nvml = FakeNvml(gpu)
    watcher = watch(nvml, "MIG-a0", "MIG-a1")
    nvml.happen(gpu, XID, 79)
    assert watcher.heard.wait(LONG)
    assert watcher.errors == {"MIG-a0": "XID 79", "MIG-a1": "XID 79"}


def test_a_failing_wait_is_a_reason_to_look(watch: Watch) -> None:
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)
    watcher = watch(nvml, "GPU-a")
    nvml.event_sets[0].happened.put(fake.ERROR_GPU_IS_LOST)
    assert watcher.heard.wait(LONG)
    assert watcher.errors == {}
    watcher.heard.clear()
    nvml.happen(gpu, XID, 79)
    assert watcher.heard.wait(LONG), "it listens on"
    assert watcher.errors == {"GPU-a": "XID 79"}


def silent(nvml: Any, *devices: str) -> tuple[str, ...]:
    """The notes of a watcher that has nothing to listen to."""
    watcher = EventWatcher(devices, pynvml=nvml)
    notes = watcher.start()
    watcher.stop()
    assert (nvml.initialised, nvml.event_sets) == (0, [])
    return notes


def test_what_cant_be_listened_to_is_said() -> None:
    assert "Driver Not Loaded" in silent(FakeNvml(init_error=fake.ERROR_DRIVER_NOT_LOADED), "GPU-a")[0]
    assert "Not Found" in silent(FakeNvml(), "GPU-a")[0]
    assert "no errors of GPU-a" in silent(FakeNvml(FakeGpu("GPU-a", supported_events=1)), "GPU-a")[0]
    refused = FakeGpu("GPU-a", errors={"nvmlDeviceRegisterEvents": fake.ERROR_NO_PERMISSION})
    assert "Insufficient Permissions" in silent(FakeNvml(refused), "GPU-a")[0]


def test_one_device_that_cant_be_listened_to_doesnt_keep_the_others_from_it() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", supported_events=0), gpu := FakeGpu("GPU-b"))
    watcher = EventWatcher(["GPU-a", "GPU-b"], pynvml=nvml)
    (note,) = watcher.start()
    assert "GPU-a" in note
    nvml.happen(gpu, XID, 79)
    assert watcher.heard.wait(LONG)
    watcher.stop()
    assert watcher.errors == {"GPU-b": "XID 79"}
    assert nvml.initialised == 0


def test_without_the_module_there_are_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watcher = EventWatcher(["GPU-a"])
    assert "isn't installed" in watcher.start()[0]
    watcher.stop()


def test_the_library_isnt_in_use_while_the_process_forks(watch: Watch) -> None:
    """A child that is forked in the middle of a call would find the library's locks held."""

    class Locked(FakeNvml):
        def __init__(self, *gpus: FakeGpu) -> None:
            super().__init__(*gpus)
            self.lock = threading.Lock()

        def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
            with self.lock:
                return super().nvmlEventSetWait_v2(events, timeout_ms)

    gpu = FakeGpu("GPU-a")
    nvml = Locked(gpu)
    watcher = watch(nvml, "GPU-a")
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        child = context.Process(target=_exit_with, args=(nvml.lock,))
        child.start()
        child.join()
        assert child.exitcode == 0
    nvml.happen(gpu, XID, 79)
    assert watcher.heard.wait(LONG), "it listens on in the parent"


def _exit_with(lock: Any) -> None:
    os._exit(int(lock.locked()))


def test_errors_become_those_of_the_devices() -> None:
    devices = tuple(Device(id=f"GPU-{name}", kind="cuda", name="", total_bytes=1, free_bytes=1) for name in "abc")
    there = Inventory(devices=devices, host_total_bytes=1, host_free_bytes=1, source="nvml")
    assert with_errors(there, {}) is there
    assert [device.error for device in with_errors(there, {"GPU-b": "XID 79", "GPU-x": "XID 1"}).devices] == [None, "XID 79", None]
