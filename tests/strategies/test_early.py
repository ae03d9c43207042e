"""Memory that is taken before the first batch: how much, from when to when, and never to a run's harm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.report import Candidate
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.assignment import Assignment
from lightning_autopar.strategies.early import CudaReserve, Early, before_first_batch, take_early
from lightning_autopar.strategies.growth import Growth, Lease
from lightning_autopar.strategies.measure import Meter
from tests.strategies.modules import QUIET, Regression, loader

MIB, GIB = 1 << 20, 1 << 30
SINGLE = Plan(engine="single", devices=("cuda:0",))


class Fake:
    """A device's memory that only counts."""

    def __init__(self, free: int = 20 * GIB, peak: int = 0, held: int = 0, error: str | None = None) -> None:
        self.free, self.peak, self.held, self.error = free, peak, held, error
        self.taken: list[int] | None = None
        self.said: list[str] = []

    def peak_bytes(self) -> int:
        return self.peak

    def held_bytes(self) -> int:
        return self.held

    def free_bytes(self) -> int:
        return self.free

    def take(self, sizes: Sequence[int]) -> None:
        self.said.append("take")
        if self.error:
            raise RuntimeError(self.error)
        self.taken = list(sizes)

    def give_back(self) -> None:
        self.said.append("give back")
        self.taken, self.peak = None, 0


class Allocator:
    """One that has nothing yet."""

    def most_bytes(self) -> int:
        return 0

    def held_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 0

    def cap(self, limit_bytes: int | None) -> None:
        """Nothing is capped."""


def growth(base: int = 10 * GIB, *, leased: bool = True) -> Growth:
    lease = Lease(device="cuda:0", base_bytes=base, most_bytes=base, around_bytes=GIB)
    return Growth(lease, Allocator(), (lambda more: None) if leased else None)


def assigned(**options: Any) -> Assignment:
    device = Device(id="cuda:0", kind="cuda", name="GPU", total_bytes=20 * GIB, free_bytes=20 * GIB, index=0)
    held = DeviceBytes(parameters=GIB, gradients=GIB, optimizer=2 * GIB, activations=3 * GIB, context=GIB, rounding=GIB // 2)
    candidate = Candidate(plan=SINGLE, fits=True, bytes={"cuda:0": held}, needs={"cuda:0": 10 * GIB})
    return Assignment(plan=SINGLE, devices=(device,), candidate=candidate, **options)


def test_all_is_taken_but_what_is_there_before_the_first_batch() -> None:
    fake = Fake(held=GIB // 2)
    early = take_early(assigned(), 0, growth(), reserve=fake)
    assert early is not None
    assert early.holds
    assert fake.taken is not None
    assert 7 * GIB - 64 * 2 * MIB < sum(fake.taken) <= 7 * GIB, "ten, less one around, half a one held, and one and a half to come"
    fake.peak = 3 * GIB
    assert early.release() == 3 * GIB
    assert early.release() == 0
    assert (early.holds, fake.said) == (False, ["take", "give back"])


@pytest.mark.parametrize(
    ("engine", "resumes", "least"),
    [("single", False, 2.5), ("single", True, 4.5), ("ddp", False, 3.5), ("fsdp", False, 2.5), ("zero", False, 5.5)],
)
def test_what_is_there_before_depends_on_the_engine_and_on_a_snapshot(engine: Any, resumes: bool, least: float) -> None:
    held = DeviceBytes(parameters=GIB, buffers=GIB, gradients=GIB, optimizer=2 * GIB, activations=9 * GIB, rounding=GIB // 2)
    devices = ("cuda:0",) if engine == "single" else ("cuda:0", "cuda:1")
    known: dict[str, dict[str, Any]] = {"fsdp": {"reshard_after_forward": True}, "zero": {"zero_stage": 2}}
    options = known.get(engine, {})
    plan = Plan(engine=engine, devices=devices, **options)
    assert before_first_batch(held, plan, resumes=resumes) == int(least * GIB)


def test_no_more_is_taken_than_is_free_and_little_is_not_worth_it() -> None:
    fake = Fake(free=2 * GIB)
    assert take_early(assigned(), 0, growth(), reserve=fake) is not None
    assert fake.taken is not None
    assert sum(fake.taken) <= 2 * GIB
    assert len(fake.taken) <= 64
    small = Fake(free=100 * MIB)
    assert not Early(small, GIB).holds
    assert not Early(Fake(), -GIB).holds
    assert small.said == []


def test_the_users_counters_are_not_set_back() -> None:
    used = Fake(peak=GIB)
    assert not Early(used, 4 * GIB).holds
    assert used.said == []


def test_who_cannot_take_it_goes_without(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(error="CUDA out of memory")
    with caplog.at_level("INFO"):
        early = Early(fake, 4 * GIB)
    assert not early.holds
    assert fake.said == ["take", "give back"]
    assert "isn't taken before its first batch: CUDA out of memory" in caplog.text


def test_without_a_lease_nothing_is_taken() -> None:
    fake = Fake()
    assert take_early(assigned(), 0, None, reserve=fake) is None
    assert take_early(assigned(), 0, growth(leased=False), reserve=fake) is None
    assert take_early(replace(assigned(), candidate=None), 0, growth(), reserve=fake) is None
    assert take_early(assigned(), 0, growth(), environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) is None
    assert fake.said == []


def test_torchs_pool_is_asked_as_its_sources_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Pool:
        def __init__(self, *, use_on_oom: bool) -> None:
            said.append(("pool", use_on_oom))

        def __del__(self) -> None:
            said.append("pool gone")

    @contextmanager
    def use(pool: Pool, device: torch.device) -> Any:
        said.append("in")
        yield
        said.append("out")

    @contextmanager
    def on(device: torch.device) -> Any:
        yield

    real = torch.empty

    def empty(size: int, **_: Any) -> torch.Tensor:
        said.append(size)
        return real(1)

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: said.append("reset"))
    monkeypatch.setattr(torch, "empty", empty)
    reserve = CudaReserve(torch.device("cuda", 0))
    reserve.take([5, 6])
    assert said == [("pool", True), "in", 5, 6, "out", "reset"]
    reserve.give_back()
    assert said[6:] == ["pool gone", "reset"], "the memory is back before the counters begin anew"

    def old(**_: Any) -> Any:
        raise TypeError("unexpected keyword argument 'use_on_oom'")

    monkeypatch.setattr(torch.cuda, "MemPool", old)
    with pytest.raises(RuntimeError, match="use_on_oom"):
        reserve.take([5])


def test_the_meter_keeps_the_peak_from_before_the_counters_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter("cuda:0")
    meter.count_from(3 * GIB)
    meter.count_from(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("lightning_autopar.strategies.measure._process_bytes", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * GIB)
    for peak, told in ((2 * GIB, 3 * GIB), (5 * GIB, 5 * GIB)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peak=peak: peak)
        meter._ask(torch.device("cuda", 0))
        assert meter.measured.peak_bytes == told


@pytest.mark.parametrize("sanity", [0, 1])
def test_it_is_given_back_before_the_first_batch_of_any_loop(sanity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, seen = Fake(), list[str]()

    def early(assignment: Assignment, rank: int, growth: Any) -> Early:
        return Early(fake, 4 * GIB)

    class Look(pl.Callback):
        def on_fit_start(self, *_: Any) -> None:
            seen.append(f"fit {fake.taken is not None}")

        def on_validation_batch_start(self, *_: Any) -> None:
            seen.append(f"validation {fake.taken is not None}")

        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(f"train {fake.taken is not None}")

    monkeypatch.setattr("lightning_autopar.strategies.launcher.take_early", early)
    strategy = AutoParallelStrategy(devices="1xcpu:1GiB", calibrate="off")
    options: dict[str, Any] = {**QUIET, "num_sanity_val_steps": sanity, "max_steps": 1, "callbacks": [Look()]}
    pl.Trainer(strategy=strategy, accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **options).fit(
        Regression(), loader(), loader()
    )
    assert seen[:2] == ["fit True", "validation False" if sanity else "train False"]
    assert fake.said == ["take", "give back"]
