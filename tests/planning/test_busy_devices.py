"""Devices on which others compute are chosen last, also where they have more memory and where nothing predicts that they are slower."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, busy_share
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_cost import WORTH_DISTURBING
from lightning_autopar.report.report import Report
from tests.fakes.values import GIB, MIB, footprint, gpu, inventory


def launched(operations: int = 200) -> Footprint:
    """A step of operations so small that issuing them is all that takes time: as long on a GPU that is busy as on an idle one."""
    work = {"parameter_bytes": MIB, "activation_bytes": MIB, "flops": 0}
    small = footprint(flops=operations, **{key: value for key, value in work.items() if key != "flops"})
    return replace(small, blocks=tuple(replace(block, flops=1) for block in small.blocks))


def report(here: Inventory, step: Footprint | None = None, **constraints: Any) -> Report:
    return make_report(step or launched(), here, Constraints(memory_margin=0.0, **constraints))


def devices(found: Report) -> tuple[str, ...]:
    assert found.best is not None
    return found.best.devices


def reasons(found: Report) -> str:
    assert found.best is not None
    return "; ".join(found.best.reasons)


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("allow", [("single",), ("single", "ddp", "fsdp", "pipeline")])
def test_a_small_run_does_not_land_on_a_busy_gpu(busy: float, allow: tuple[str, ...]) -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=busy), gpu(1, 20 * GIB, utilization=0.0))
    found = report(here, allow=allow)
    assert devices(found) == ("GPU-0001",)
    assert f"others compute on cuda:0 ({busy:.0%} busy), which the plan leaves to them" in reasons(found)
    assert devices(report(here, objective="memory", allow=allow)) == ("GPU-0001",)


def test_seconds_do_not_tell_them_apart() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.95), gpu(1, 20 * GIB, utilization=0.0))
    on_either = {one.plan.devices: one.step_seconds for one in report(here, allow=("single",)).candidates if one.fits}
    assert on_either["GPU-0000",] == pytest.approx(on_either["GPU-0001",], rel=0.01), "else the test above says nothing"


def test_of_several_the_idle_ones_are_taken_together() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.6), *(gpu(index, 20 * GIB) for index in (1, 2)), gpu(3, 70 * GIB, utilization=0.9))
    found = report(here, footprint(flops=10**14), allow=("ddp",), min_devices=2, max_devices=2)
    assert sorted(devices(found)) == ["GPU-0001", "GPU-0002"]
    assert "cuda:0 (60% busy), cuda:3 (90% busy), which the plan leaves to them" in reasons(found)


def test_where_nothing_else_has_the_memory_a_busy_gpu_is_taken_and_said_to_be_one() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.5), gpu(1, GIB // 64))
    found = report(here, footprint(parameter_bytes=GIB), allow=("single",))
    assert devices(found) == ("GPU-0000",)
    assert "others compute on cuda:0 (50% busy) as well" in reasons(found)


def test_where_all_are_busy_the_least_busy_one_is_taken() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.9), gpu(1, 20 * GIB, utilization=0.5), gpu(2, 60 * GIB, utilization=0.8))
    assert devices(report(here)) == ("GPU-0001",)


def test_what_a_screen_takes_counts_for_nothing() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.04), gpu(1, 20 * GIB, utilization=0.0))
    found = report(here)
    assert devices(found) == ("GPU-0000",), "the freest"
    assert "others compute" not in reasons(found)
    assert busy_share(gpu(0, utilization=None)) == 0.0


def test_a_busy_gpu_that_is_much_faster_all_the_same_is_taken() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.3), gpu(1, 14 * GIB, name="Tesla T4"))
    found = report(here, footprint(flops=10**14), allow=("single",))
    assert devices(found) == ("GPU-0000",)
    assert "others compute on cuda:0 (30% busy) as well" in reasons(found)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_chosen_nothing_idler_is_about_as_fast(seed: int) -> None:
    draw = random.Random(seed)
    many = draw.randrange(2, 5)
    here = inventory(
        *(gpu(index, draw.choice((8, 20, 40)) * GIB, utilization=draw.choice((None, 0.0, 0.3, 0.6, 1.0))) for index in range(many))
    )
    step = draw.choice((launched(), footprint(flops=10**12), footprint(flops=10**14)))
    found = report(here, step, allow=("single", "ddp"))
    best = found.best_candidate
    assert best is not None
    busy = {device.id: busy_share(device) for device in here.devices}

    def share(one: Any) -> float:
        return max(busy[device] for device in one.plan.devices)

    idler = [one for one in found.candidates if one.fits and share(one) < share(best)]
    assert all(one.step_seconds > best.step_seconds * (1 + WORTH_DISTURBING) * (1 - 1e-6) for one in idler)
