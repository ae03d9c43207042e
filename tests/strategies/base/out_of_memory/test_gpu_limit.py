"""What a process may take of a GPU: its run's lease, a slack while that is there, more when it has asked, and never anything unasked."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autopar.devices.inventory import Device, DeviceProcess
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Ledger, Shortage
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import (
    CudaAllocator,
    GpuLimit,
    Lease,
    _Alone,
    gpu_limit_for,
    limit_after_out_of_memory,
    shortage_words,
    target_bytes,
)
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.elastic.generation_progress import own_bytes

MIB, GIB = 1 << 20, 1 << 30


class Allocator:
    """A GPU's, as far as growth looks at it."""

    def __init__(self, before_bytes: int = 0) -> None:
        self.most, self.held, self.caps = before_bytes, before_bytes, list[int | None]()
        self.free = 80 * GIB

    def most_bytes(self) -> int:
        return self.most

    def held_bytes(self) -> int:
        return self.held

    def free_bytes(self) -> int:
        return self.free

    def cap(self, limit_bytes: int | None) -> None:
        self.caps.append(limit_bytes)


class Book:
    """A ledger with so much room."""

    def __init__(self, room_bytes: int) -> None:
        self.room, self.asked, self.granted = room_bytes, list[int](), 0

    def __call__(self, more_bytes: int) -> LeaseFile | Shortage:
        self.asked.append(more_bytes)
        if more_bytes > self.room:
            return Shortage(device="GPU-0", wanted_bytes=more_bytes, room_bytes=self.room)
        self.room -= more_bytes
        self.granted += more_bytes
        return Piece(self, more_bytes)


class Piece(LeaseFile):
    """What it granted."""

    def __init__(self, book: Book, size: int) -> None:
        self.book, self.size = book, size

    def release(self) -> None:
        self.book.room += self.size
        self.book.granted -= self.size
        self.size = 0


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lease(base: int = 10 * GIB, most: int = 20 * GIB, around: int = GIB) -> Lease:
    return Lease(device="GPU-0", base_bytes=base, most_bytes=most, around_bytes=around)


def test_a_slack_is_asked_for_at_once_and_the_cap_is_what_was_promised_less_the_context() -> None:
    allocator, book = Allocator(), Book(5 * GIB)
    gpu_limit = GpuLimit(lease(), allocator, book, Clock())
    assert gpu_limit.promised_bytes == 11 * GIB
    assert allocator.caps == [9 * GIB, 10 * GIB]


def test_what_others_have_is_no_slack_and_what_is_left_is() -> None:
    allocator, book = Allocator(), Book(GIB // 4)
    assert GpuLimit(lease(), allocator, book, Clock()).promised_bytes == 10 * GIB + GIB // 4
    assert GpuLimit(lease(), Allocator(), Book(0), Clock()).promised_bytes == 10 * GIB
    assert GpuLimit(lease(most=10 * GIB), Allocator(), Book(9 * GIB), Clock()).promised_bytes == 10 * GIB, "the user's limit"
    assert GpuLimit(lease(), Allocator(), None, Clock()).promised_bytes == 10 * GIB, "no leases"


def test_the_slack_is_given_back_once_usual_steps_are_known() -> None:
    clock, allocator, book = Clock(), Allocator(), Book(5 * GIB)
    gpu_limit = GpuLimit(lease(), allocator, book, clock)
    allocator.most = 8 * GIB  # and one around it: below what was predicted
    for _ in range(3):
        gpu_limit.step()
    assert gpu_limit.promised_bytes == 11 * GIB, "the optimizer's first steps say little"
    gpu_limit.step()
    assert (gpu_limit.promised_bytes, book.granted) == (10 * GIB, 0)
    assert allocator.caps[-1] == 9 * GIB


def test_a_run_that_needs_more_than_predicted_keeps_its_slack_and_asks_when_half_of_that_is_gone() -> None:
    clock, allocator, book = Clock(), Allocator(), Book(5 * GIB)
    gpu_limit = GpuLimit(lease(), allocator, book, clock)
    allocator.most = int(9.3 * GIB)
    for _ in range(5):
        gpu_limit.step()
    assert gpu_limit.promised_bytes == 11 * GIB
    allocator.most = int(9.6 * GIB)
    gpu_limit.step()
    assert gpu_limit.promised_bytes == 11 * GIB, "asked once a second"
    clock.now += 2
    gpu_limit.step()
    assert gpu_limit.promised_bytes == int(10.6 * GIB * 1.1)
    assert allocator.caps[-1] == gpu_limit.promised_bytes - GIB
    clock.now += 2
    gpu_limit.step()
    assert len(book.asked) == 2, "there is slack again"


def test_who_is_refused_stays_under_its_cap_and_asks_again_later() -> None:
    clock, allocator, book = Clock(), Allocator(), Book(GIB)
    gpu_limit = GpuLimit(lease(), allocator, book, clock)
    allocator.most = int(9.9 * GIB)
    for _ in range(30):
        clock.now += 1
        gpu_limit.step()
    assert gpu_limit.promised_bytes == 11 * GIB
    assert max(cap for cap in allocator.caps if cap is not None) == 10 * GIB
    assert len(book.asked) <= 5
    book.room = 9 * GIB
    clock.now += 11
    gpu_limit.step()
    assert gpu_limit.promised_bytes > 11 * GIB


def test_alone_on_a_device_it_may_have_all_of_its_budget_until_its_steps_are_known() -> None:
    clock, allocator, book = Clock(), Allocator(), Book(20 * GIB)
    gpu_limit = GpuLimit(replace(lease(), alone=True), allocator, book, clock)
    assert gpu_limit.promised_bytes == 20 * GIB
    allocator.most = 15 * GIB  # cuDNN tried its kernels out
    for _ in range(50):
        clock.now += 2
        gpu_limit.step()
        assert gpu_limit.promised_bytes == 20 * GIB
    clock.now += 2
    gpu_limit.step()
    assert gpu_limit.promised_bytes == pytest.approx(16 * GIB * 1.1, rel=0.2)
    assert allocator.most <= (allocator.caps[-1] or 0)


def test_who_comes_to_a_device_finds_what_the_run_on_it_doesnt_need() -> None:
    clock, allocator, book, crowd = Clock(), Allocator(), Book(20 * GIB), list[int]()
    gpu_limit = GpuLimit(replace(lease(), alone=True), allocator, book, clock, alone=lambda: not crowd)
    gpu_limit.step()
    crowd.append(1)
    clock.now += 2
    gpu_limit.step(steps=4)
    assert gpu_limit.promised_bytes == 10 * GIB
    assert book.granted == 0


def test_what_was_there_before_the_run_is_not_of_its_lease() -> None:
    allocator, book = Allocator(before_bytes=2 * GIB), Book(0)
    gpu_limit = GpuLimit(lease(), allocator, book, Clock())
    assert allocator.caps == [11 * GIB]
    allocator.most = 10 * GIB
    for _ in range(6):
        gpu_limit.step()
    assert gpu_limit.promised_bytes == 10 * GIB


def test_after_the_run_nothing_is_capped() -> None:
    allocator, book = Allocator(), Book(5 * GIB)
    gpu_limit = GpuLimit(lease(), allocator, book, Clock())
    gpu_limit.release()
    gpu_limit.release()
    assert allocator.caps[-1] is None
    assert book.granted == 0
    gpu_limit.step()
    assert book.granted == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_more_is_capped_than_promised_nor_less_than_the_plan_needs(seed: int) -> None:
    draw = random.Random(seed)
    clock, allocator, book = Clock(), Allocator(), Book(draw.randrange(4) * GIB)
    around = draw.randrange(2) * GIB
    gpu_limit = GpuLimit(lease(around=around, most=draw.randrange(10, 14) * GIB), allocator, book, clock)
    for _ in range(200):
        clock.now += draw.random() * 5
        book.room = max(0, book.room + draw.randrange(-GIB, GIB))
        assert allocator.caps[-1] is not None
        allocator.most = max(allocator.most, min(allocator.caps[-1], draw.randrange(14 * GIB)))
        gpu_limit.step(steps=draw.randrange(2))
        assert gpu_limit.promised_bytes == 10 * GIB + book.granted
        assert allocator.caps[-1] == gpu_limit.promised_bytes - around
        assert 10 * GIB <= gpu_limit.promised_bytes <= gpu_limit.lease.most_bytes
        assert allocator.most <= allocator.caps[-1], "nothing is taken away from what is in use"


def test_targets() -> None:
    assert target_bytes(lease(), 10 * GIB, 0, settled=False) == 11 * GIB
    assert target_bytes(lease(), 11 * GIB, 5 * GIB, settled=True) == 10 * GIB
    assert target_bytes(lease(), 11 * GIB, 19 * GIB, settled=True) == 20 * GIB


# -- whose lease it is ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home, prefix="autopar-growth-test-") as name:
        monkeypatch.setenv("AUTOPAR_LEDGER", name)
        monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:20GiB")
        yield Ledger(Path(name))


def assigned(kind: str = "cpu", free: int = 20 * GIB, total: int = 20 * GIB) -> RunPlan:
    device = Device(id=f"{kind}:0", kind=kind, name=kind, total_bytes=total, free_bytes=free, index=0)  # type: ignore[arg-type]
    plan = Plan(engine="single", devices=(device.id,))
    held = DeviceBytes(parameters=8 * GIB, context=GIB)
    candidate = Candidate(plan=plan, fits=True, bytes={device.id: held}, needs={device.id: 10 * GIB})
    return RunPlan(plan=plan, devices=(device,), candidate=candidate, budgets={device.id: int(free * 0.95)})


def claimed(ledger: Ledger, size: int, room: int = 20 * GIB) -> LeaseFile:
    found = ledger.claim({"cpu:0": size}, lambda: lambda leases: {"cpu:0": room}, run="test")
    assert isinstance(found, LeaseFile)
    return found


def test_a_workers_slack_stands_beside_its_runs_lease(ledger: Ledger) -> None:
    run = claimed(ledger, 10 * GIB)
    allocator = Allocator()
    told, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end[1])
        gpu_limit = gpu_limit_for(assigned(), 0, allocator=allocator)
        os.write(told[1], f"{gpu_limit and gpu_limit.promised_bytes} {allocator.caps[-1]}".encode())
        os.read(end[0], 1)
        os._exit(0)
    assert os.read(told[0], 100).decode().split() == [str(11 * GIB), str(10 * GIB)]
    found = {lease.pid: (lease.bytes["cpu:0"], lease.part_of) for lease in ledger.leases()}
    assert found == {os.getpid(): (10 * GIB, 0), pid: (GIB, os.getpid())}
    os.close(end[1])
    os.waitpid(pid, 0)
    assert [lease.pid for lease in ledger.leases()] == [os.getpid()]
    run.release()
    for each in (*told, end[0]):
        os.close(each)


def test_a_process_that_leads_its_run_itself_has_both(ledger: Ledger) -> None:
    with claimed(ledger, 10 * GIB):
        gpu_limit = gpu_limit_for(assigned(), 0, allocator=Allocator())
        assert gpu_limit is not None
        assert sorted((lease.pid, lease.part_of) for lease in ledger.leases()) == [(os.getpid(), 0), (os.getpid(), os.getpid())]
        gpu_limit.release()
    assert ledger.leases() == []


def test_beside_others_there_is_no_slack(ledger: Ledger) -> None:
    with claimed(ledger, 10 * GIB), claimed(ledger, 10 * GIB):
        gpu_limit = gpu_limit_for(assigned(), 0, allocator=Allocator())
        assert gpu_limit is not None
        assert gpu_limit.promised_bytes == 10 * GIB
        gpu_limit.release()


def test_who_is_alone_on_a_device(ledger: Ledger) -> None:
    (device,) = assigned("cuda").devices
    watch = _Alone(ledger, device.id, os.getpid())
    assert watch.was(device)
    assert watch.was(replace(device, processes=(DeviceProcess(pid=os.getpid(), used_bytes=GIB, own=True),)))
    assert not watch.was(replace(device, processes=(DeviceProcess(pid=1, used_bytes=None),)))
    assert not watch.was(replace(device, free_bytes=device.free_bytes - 2 * GIB)), "somebody whom the driver doesn't show"
    assert watch()
    with claimed(ledger, GIB):
        assert watch(), "its own lease is another device's"
        theirs = _Alone(ledger, "cpu:0", 1)
        assert not theirs()


def test_a_full_disk_under_the_ledger_leaves_the_cap_where_it_is(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(ledger, 10 * GIB):

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lightning_autopar.sharing.ledger.LeaseFile", full)
        gpu_limit = gpu_limit_for(assigned(), 0, allocator=(allocator := Allocator()))
        assert gpu_limit is not None
        assert allocator.caps == [9 * GIB]


def test_without_a_lease_the_cap_is_what_was_free(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_limit = gpu_limit_for(assigned(free=12 * GIB), 0, allocator=(allocator := Allocator()))
    assert gpu_limit is not None, "nobody has promised anything"
    assert allocator.caps == [12 * GIB]
    assert gpu_limit_for(assigned(), 0, allocator=Allocator()) is None, "all of it is free"
    assert gpu_limit_for(assigned(), 0) is None, "a CPU device has no allocator to cap"
    monkeypatch.setenv("AUTOPAR_LEDGER", str(ledger.folder / "missing"))
    gpu_limit_for(assigned(free=12 * GIB), 0, allocator=(again := Allocator()))
    assert again.caps == [12 * GIB]


# -- when it wasn't enough ------------------------------------------------------------------------------------------------------------


def test_a_gpu_with_room_is_asked_for_more_after_a_shortage() -> None:
    assert limit_after_out_of_memory(assigned("cuda")) == {"cuda:0": int(12.5 * GIB)}
    assert limit_after_out_of_memory(assigned("cuda", free=12 * GIB)) == {"cuda:0": int(12 * GIB * 0.95)}
    assert limit_after_out_of_memory(assigned("cuda", free=11 * GIB)) == {}, "it had all that there is"
    assert limit_after_out_of_memory(assigned("cpu")) == {}
    more = replace(assigned("cuda"), at_least={"cuda:0": 12 * GIB})
    assert more.needed_bytes == {"cuda:0": 12 * GIB}
    assert limit_after_out_of_memory(more) == {"cuda:0": 15 * GIB}


def test_who_runs_out_of_memory_reads_what_was_promised() -> None:
    words = shortage_words(assigned("cuda"), 0, GpuLimit(lease(), Allocator(), Book(GIB), Clock()))
    assert "20 GiB were free on cuda:0" in words
    assert "9 GiB were predicted (10 GiB with the margin)" in words
    assert "11 GiB were promised to it" in words
    assert "CheckpointMigrate" not in words, "that is for who knows whether the run is a fit"


def test_what_was_lacked_is_the_lease_where_that_was_in_the_way_and_else_what_there_was() -> None:
    allocator = Allocator(before_bytes=GIB)
    gpu_limit = GpuLimit(lease(), allocator, Book(GIB), Clock())
    allocator.most, allocator.free = 10 * GIB, 2 * GIB
    assert gpu_limit.lacked_bytes() == gpu_limit.promised_bytes == 11 * GIB
    allocator.most, allocator.free = 6 * GIB, 2 * GIB
    assert gpu_limit.lacked_bytes() == 6 * GIB, "five of the run's own, and one around them: somebody has the rest"


def test_torchs_cap_is_a_share_of_what_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[float, torch.device]] = []

    class Properties:
        total_memory = 40 * GIB

    set_by_user = [1.0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: set_by_user[0])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: said.append((share, device)))
    device = torch.device("cuda", 1)
    for limit in (10 * GIB, 80 * GIB, -1, None):
        CudaAllocator(device).cap(limit)
    assert said == [(0.25, device), (1.0, device), (0.0, device), (1.0, device)]
    set_by_user[0] = 0.5
    allocator = CudaAllocator(device)
    allocator.cap(30 * GIB)
    set_by_user[0] = 0.1  # what torch says now is what was just set
    allocator.cap(None)
    assert said[4:] == [(0.5, device), (0.5, device)]


def test_what_a_run_holds_itself_is_what_the_driver_shows_before_its_workers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.strategies.elastic.generation_progress.is_drivers", lambda pid: True)
    said = [0]
    gate, generation = SimpleNamespace(used_bytes=lambda: said), SimpleNamespace(pids=lambda: [7])
    running: Any = SimpleNamespace(
        decision=SimpleNamespace(run_plan=assigned("cuda")), elastic=SimpleNamespace(rendezvous=gate), generation=generation
    )
    processes = (DeviceProcess(pid=7, used_bytes=9 * GIB), DeviceProcess(pid=8, used_bytes=GIB))
    seen = replace(assigned("cuda").devices[0], total_bytes=40 * GIB, free_bytes=28 * GIB, processes=processes)
    assert own_bytes(running, seen) == 9 * GIB
    said[0] = 10 * GIB
    assert own_bytes(running, seen) == 11 * GIB, "with the context around it"
    less = replace(seen, free_bytes=30 * GIB, processes=processes[:1])
    assert own_bytes(running, less) == 10 * GIB, "a context that takes less than was predicted"
    assert own_bytes(running, replace(seen, id="cuda:1")) == 0
    assert own_bytes(None, seen) == 0
