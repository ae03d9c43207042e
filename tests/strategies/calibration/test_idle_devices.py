"""Measuring is a good neighbour: which GPUs are measured, that others see it, and what of it is kept."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.sharing.ledger import open_ledger
from lightning_autopar.strategies.calibration import calibration
from lightning_autopar.strategies.calibration import idle_devices as calibration_devices
from lightning_autopar.strategies.calibration.calibration import Measurement
from lightning_autopar.strategies.calibration.idle_devices import ROOM_BYTES
from lightning_autopar.timing.measured_curves import Calibration, Curve, load_calibration
from lightning_autopar.timing.measured_rates import device_key, group_key
from tests.fakes.nvml import GIB, FakeGpu, FakeInstance, FakeNvml

H100 = "cuda/NVIDIA H100 80GB HBM3"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeNvml]:
    """``host(FakeGpu("GPU-a"), …)`` makes these the machine's, linked by NVLink, with a ledger and a cache of its own."""
    for name in ("AUTOPAR_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "AUTOPAR_NEIGHBOURS", "AUTOPAR_DEVICES_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "ledger").mkdir()
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setattr(calibration, "unforkable", lambda: None)
    monkeypatch.setattr(calibration_devices, "_GONE_SECONDS", 0.0)

    def install(*gpus: FakeGpu) -> FakeNvml:
        nvml = FakeNvml(*gpus)
        for number, gpu in enumerate(gpus):
            gpu.bus_id, gpu.nvlinks = f"00000000:{number + 1:02X}:00.0", ["00000000:FF:00.0"] * 18
        for a, b in itertools.combinations(gpus, 2):
            nvml.connect(a, b, 0, 1, 2)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


def gpus(count: int, **figures: Any) -> list[FakeGpu]:
    return [FakeGpu(f"GPU-{number}", **figures) for number in range(count)]


def measured_on(known: Calibration = Calibration()) -> list[tuple[str, list[str]]]:  # noqa: B008
    """Title and GPUs of what would be measured now."""
    return [(each.title, [device.id for device in each.devices]) for each in calibration.measurements(probe(), known)]


def of(subject: str, thing: str, ranks: int = 1) -> Curve:
    return Curve(subject=subject, thing=thing, ranks=ranks, sizes=(1.0,), seconds=(1.0,))


def stand_in(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None] = lambda: None) -> list[list[str]]:
    """Nothing is really measured: ``run`` is called in this process instead. Returns on which GPUs it was each time."""
    seen: list[list[str]] = []
    real = calibration._of_gpus

    def of_gpus(devices: Sequence[Any], inventory: Inventory, known: Calibration) -> Any:
        for each in real(devices, inventory, known):
            if each.devices:
                yield Measurement(title=each.title, names=each.names, devices=each.devices, run=lambda _, its=each: [*made(its)])

    def made(each: Measurement) -> list[Curve]:
        seen.append([device.id for device in each.devices])
        run()
        key, inventory = device_key(each.devices[0]), probe()
        if len(each.devices) == 1:
            return [of(key, "matmul/64")]
        ranks = [count for count in calibration.rank_counts(len(each.devices)) if count > 1]
        return [of(group_key(each.devices[:count], inventory), "all_reduce", count) for count in ranks]

    monkeypatch.setattr(calibration, "_of_gpus", of_gpus)
    monkeypatch.setattr(calibration, "of_host", lambda inventory, known: [of("host", "adam")])
    monkeypatch.setattr(calibration, "run_forked", lambda function, run, known, **_: run(known))
    return seen


def test_one_gpu_of_a_model_and_all_of_it_together(host: Callable[..., FakeNvml]) -> None:
    host(*gpus(8), FakeGpu("GPU-t", "Tesla T4"))
    everything = [f"GPU-{number}" for number in range(8)]
    assert measured_on() == [
        ("operations on NVIDIA H100 80GB HBM3", ["GPU-0"]),
        ("operations on Tesla T4", ["GPU-t"]),
        ("8 ranks at once", everything),
        ("the trainer's loop", []),
        ("the host", []),
    ]
    inventory = probe()
    groups = {count: group_key(inventory.devices[:count], inventory) for count in (2, 4, 8)}
    assert groups == dict.fromkeys((2, 4, 8), f"{H100} by nvlink")
    known = Calibration().with_curves([of(key, "all_reduce", count) for count, key in groups.items()], day="d", took_seconds=1)
    assert "8 ranks at once" not in dict(measured_on(known))


@pytest.mark.parametrize(
    "taken",
    [
        {"utilization_percent": 60, "compute": [(1, GIB)], "free_bytes": 60 * GIB},
        {"free_bytes": GIB},
        {"remapping_failed": True},
    ],
    ids=["busy", "full", "in error"],
)
def test_a_gpu_that_others_use_is_left_alone(taken: dict[str, Any], host: Callable[..., FakeNvml]) -> None:
    first, *others = gpus(3)
    for name, value in taken.items():
        setattr(first, name, value)
    host(first, *others)
    assert measured_on()[:2] == [("operations on NVIDIA H100 80GB HBM3", ["GPU-1"]), ("2 ranks at once", ["GPU-1", "GPU-2"])]
    for each in others:
        for name, value in taken.items():
            setattr(each, name, value)
    assert measured_on() == []
    assert calibration.is_calibrated(probe()), "there is nothing that may be measured now"


def test_of_a_gpu_in_instances_one_is_measured(host: Callable[..., FakeNvml]) -> None:
    gpu = FakeGpu("GPU-m", mig=True, instances={number: FakeInstance(f"MIG-{number}") for number in (0, 1)}, utilization_percent=0)
    host(gpu)
    assert measured_on()[0] == ("operations on NVIDIA A100-SXM4-40GB MIG 3g.20gb", ["MIG-0"])
    assert not any("at once" in title for title, _ in measured_on())


def test_others_see_what_is_measured_as_leased(host: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    host(*gpus(3))
    leases: list[dict[str, int]] = []

    def look() -> None:
        ledger = open_ledger()
        assert ledger is not None
        leases.append({device: size for lease in ledger.leases() for device, size in lease.bytes.items()})

    seen = stand_in(monkeypatch, look)
    calibration.calibrate(probe())
    assert seen == [["GPU-0"], ["GPU-0", "GPU-1", "GPU-2"]]
    assert leases == [dict.fromkeys(("GPU-0", "GPU-1", "GPU-2"), ROOM_BYTES)] * 2
    look()
    assert leases[-1] == {}, "nothing is left behind"
    assert calibration.is_calibrated(probe())


def test_what_others_were_promised_is_not_taken(host: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    host(*gpus(3))
    ledger, inventory = open_ledger(), probe()
    assert ledger is not None
    held = ledger.claim({"GPU-1": 78 * GIB}, lambda: lambda leases: {device.id: device.free_bytes for device in inventory.devices}, run="b")
    monkeypatch.setattr("lightning_autopar.sharing.take_leases._is_own", lambda lease: False)  # it is another process's
    seen = stand_in(monkeypatch)
    calibration.calibrate(inventory)
    assert seen == [["GPU-0"], ["GPU-0", "GPU-2"]]
    held.release()  # type: ignore[union-attr]  # there was room


def test_rates_of_a_gpu_to_which_somebody_came_are_not_kept(host: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second) = gpus(2)
    host(first, second)

    def come() -> None:
        first.compute = [(1, 30 * GIB)]

    stand_in(monkeypatch, come)
    calibration.calibrate(probe())
    known = load_calibration(probe())
    assert not known.measured(H100)
    assert not known.measured(f"{H100} by nvlink"), "nor those of a group that it is in"
    assert not known.failures, "they will be measured another time"
    first.compute = []
    assert not calibration.is_calibrated(probe())


def test_who_was_there_before_hasnt_come_meanwhile(host: Callable[..., FakeNvml]) -> None:
    """The process of a notebook that has used a GPU has a new Python measure, to which it is a stranger."""
    (gpu,) = gpus(1)
    gpu.compute = [(1, GIB)]
    host(gpu)
    (device,) = probe().devices
    seen = replace(device, processes=tuple(replace(process, own=True) for process in device.processes))
    assert not calibration_devices.came_meanwhile([device], {device.id: seen})
    gpu.compute.append((2, GIB))
    assert calibration_devices.came_meanwhile([device], {device.id: seen})


def test_however_many_gpus_there_are_it_takes_ten_seconds_at_most(host: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    host(*gpus(8), FakeGpu("GPU-t", "Tesla T4"))
    passed, limits = [0.0], list[float]()

    def forked(function: Any, run: Any, known: Calibration, timeout_seconds: float, gpus: bool) -> list[Curve]:
        limits.append(timeout_seconds)
        passed[0] += timeout_seconds - 0.01 if len(limits) > 2 else 3.0
        return run(known)  # type: ignore[no-any-return]  # a measurement's

    stand_in(monkeypatch)
    monkeypatch.setattr(calibration, "run_forked", forked)
    monkeypatch.setattr(calibration.time, "monotonic", lambda: passed[0])
    calibration.calibrate(probe())
    assert limits[0] == 6.0
    assert passed[0] <= 10.0
