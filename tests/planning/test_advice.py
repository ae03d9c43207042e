from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.planning.candidates import Constraints, SplitFinding
from lightning_autopar.planning.planner import make_report
from lightning_autopar.planning.report import NothingFits
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory


def advice(step: Any = None, here: Any = None, **constraints: Any) -> list[str]:
    constraints.setdefault("memory_margin", 0.0)
    with pytest.raises(NothingFits) as caught:
        make_report(step or footprint(), here or inventory(cpu(0, GIB // 2), cpu(1, GIB // 2)), Constraints(**constraints))
    return list(caught.value.report.advice)


def starting(found: list[str], words: str) -> list[str]:
    return [line for line in found if line.startswith(words)]


def test_another_engine_that_would_fit_is_named() -> None:
    found = advice(allow=("single",))
    assert len(starting(found, "allow=['single', 'ddp', 'fsdp']: fsdp ×2")) == 1
    assert not starting(advice(here=inventory(cpu(0, GIB // 8)), allow=("single",)), "allow=")


def test_the_largest_batch_that_fits_does_and_one_more_does_not() -> None:
    step = footprint(activation_bytes=GIB)
    step = replace(step, blocks=tuple(replace(block, recomputable=False) for block in step.blocks))
    here = inventory(cpu(0, 2 * GIB))
    line = next(line for line in advice(step, here) if line.startswith("a batch of"))
    assert line.startswith("a batch of 2 instead of 8 would fit")
    assert not starting(advice(step, inventory(cpu(0, GIB // 8))), "a batch of")


def test_the_missing_memory_would_do() -> None:
    step, here = footprint(), inventory(cpu(0, GIB // 2))
    with pytest.raises(NothingFits) as caught:
        make_report(step, here, Constraints(memory_margin=0.1))
    nearest = caught.value.report.candidates[0]
    missing = int((max(nearest.needs.values()) - int(GIB // 2 * 0.9)) / 0.9) + 1
    assert make_report(step, inventory(cpu(0, GIB // 2 + missing)), Constraints(memory_margin=0.1)).best
    assert starting(list(caught.value.report.advice), f"{missing / MIB:.3g} MiB more on cpu:0: {nearest.plan.title()} would fit")


def test_what_a_setting_costs_is_said() -> None:
    one = {"here": inventory(cpu(0, GIB), cpu(1, GIB)), "allow": ("single",)}
    assert starting(advice(memory_limit_bytes=GIB // 2, **one), "lift the memory limit: single")
    assert starting(advice(memory_margin=0.6, **one), "memory_margin=0.0: single")
    two = inventory(cpu(0, 450 * MIB), cpu(1, 450 * MIB))
    changed = SplitFinding(difference=0.1)
    assert starting(advice(here=two, exact=True, split=changed), "exact=False, which accepts the changed loss: fsdp ×2")
    assert starting(advice(here=two, max_devices=1), "let it use all 2 devices: fsdp ×2")
    pinned = Plan(engine="single", devices=("cpu:0",))
    assert starting(advice(here=two, pinned=pinned), "leave the plan unpinned: fsdp ×2")


def test_memory_that_others_hold_would_do() -> None:
    assert starting(advice(here=inventory(gpu(0, GIB // 4))), "free what others hold on cuda:0: single would fit")


def test_why_recomputation_does_not_help() -> None:
    step, here = footprint(), inventory(cpu(0, GIB // 8))
    fixed = replace(step, blocks=tuple(replace(block, recomputable=False) for block in step.blocks))
    assert starting(advice(fixed, here), "recomputation can't help, as running a block's forward twice would change the run (net.0")
    assert starting(advice(replace(step, blocks=()), here), "recomputation can't help, as the module has no repeated blocks")
    assert not starting(advice(step, here), "recomputation")
