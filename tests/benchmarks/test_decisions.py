"""The harness of the decision benchmark: which plans it runs, and how it judges. What the figures are is the benchmark's own business."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_autopar.planning.refusals import cannot_run
from lightning_autopar.plans import Plan
from tests.fakes.values import MIB, footprint

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from decisions import runs, scenarios, verdict  # noqa: E402

MEASURED = verdict.Measured
BUDGETS = {"cpu:0": 50 * MIB, "cpu:1": 50 * MIB}
#: What the devices have: the budgets are less by a margin.
MEMORY = {"cpu:0": 50 * MIB + MIB // 2, "cpu:1": 50 * MIB + MIB // 2}
TWO = ("cpu:0", "cpu:1")
SINGLE = Plan(engine="single", devices=("cpu:0",))
DDP = Plan(engine="ddp", devices=TWO)
SHARDED = Plan(engine="fsdp", devices=TWO, reshard_after_forward=True)


def command() -> ModuleType:
    """benchmarks/decisions.py, whose name the package has, too."""
    spec = importlib.util.spec_from_file_location("decisions_command", FOLDER / "decisions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(plan: Plan, milliseconds: float, mebibytes: int, **values: Any) -> Any:
    steps = tuple(milliseconds / 1e3 for _ in range(5))
    peaks = dict.fromkeys(plan.devices, mebibytes * MIB)
    return MEASURED(**{"plan": plan, "steps": steps, "peak_bytes": peaks, "predicted_bytes": {}, **values})


def judged(plans: list[Any], chosen: Plan | None, memory: dict[str, int] = MEMORY) -> dict[str, Any]:
    scenario = scenarios.Scenario(model="gpt", batch=16, devices="2xcpu:50MiB")
    found: dict[str, Any] = verdict.judge(scenario, plans, chosen, BUDGETS, memory)
    return found


def test_the_choice_is_held_against_the_best_that_fits() -> None:
    plans = [measured(SINGLE, 100, 60), measured(DDP, 40, 60), measured(SHARDED, 60, 30), measured(gathered(), 50, 45)]
    found = judged(plans, SHARDED)
    assert found["best"] == gathered().title()
    assert found["share"] == pytest.approx(50 / 60)
    assert found["feasible"] == 2
    assert not found["over_budget"]
    assert judged(plans, gathered())["share"] == 1.0


def gathered() -> Plan:
    return Plan(engine="fsdp", devices=TWO, reshard_after_forward=False)


def test_a_choice_may_take_of_the_margin_and_it_is_said() -> None:
    plans = [measured(SINGLE, 100, 30), measured(DDP, 40, 51), measured(SHARDED, 60, 30)]
    found = judged(plans, DDP, {"cpu:0": 52 * MIB, "cpu:1": 52 * MIB})
    assert (found["over_budget"], found["uses_margin"], found["best"]) == (False, True, SHARDED.title())
    assert found["share"] == pytest.approx(60 / 40)
    assert judged(plans, SHARDED, {"cpu:0": 52 * MIB, "cpu:1": 52 * MIB})["share_of_all"] == pytest.approx(40 / 60)
    assert not judged(plans, SHARDED)["uses_margin"]


def test_a_choice_beyond_its_budget_or_of_nothing_is_worth_nothing() -> None:
    plans = [measured(SINGLE, 100, 30), measured(DDP, 40, 51), measured(SHARDED, 60, 30)]
    over = judged(plans, DDP)
    assert over["share"] == 0.0
    assert over["over_budget"]
    nothing = judged(plans, None)
    assert nothing["share"] == 0.0
    assert not nothing["over_budget"]
    full = [measured(SINGLE, 100, 60), measured(DDP, 40, 60), measured(SHARDED, 60, 60)]
    assert judged(full, None)["share"] is None  # rightly nothing
    failed = [measured(SINGLE, 100, 30), measured(DDP, 40, 30, steps=(), error="it broke"), measured(SHARDED, 60, 30)]
    assert judged(failed, DDP)["share"] == 0.0
    assert judged(failed, DDP)["failed"] == "it broke"


def test_rules_take_the_first_that_fits_and_the_last_in_any_case() -> None:
    def rules(*sizes: int) -> dict[str, Any]:
        plans = [measured(plan, time, size) for plan, time, size in zip((SINGLE, DDP, SHARDED), (100, 50, 80), sizes, strict=True)]
        rules: dict[str, Any] = judged(plans, SHARDED)["rules"]
        return {rule: (taken["plan"].split(",")[0], taken["share"]) for rule, taken in rules.items()}

    assert rules(30, 30, 30) == {
        "single, else FSDP": ("single", 0.5),
        "single, else DDP, else FSDP": ("single", 0.5),
        "always DDP": ("ddp ×2", 1.0),
        "always FSDP": ("fsdp ×2", 0.625),
    }
    assert rules(60, 30, 30)["single, else FSDP"] == ("fsdp ×2", 0.625)
    assert rules(60, 30, 30)["single, else DDP, else FSDP"] == ("ddp ×2", 1.0)
    assert rules(60, 60, 30)["always DDP"] == ("ddp ×2", 0.0)


def test_uneven_shares_stand_beside_the_best_even_plan() -> None:
    shared = Plan(engine="ddp", devices=TWO, shares=(1, 2))
    plans = [measured(SINGLE, 100, 60), measured(DDP, 40, 60), measured(SHARDED, 80, 30), measured(shared, 50, 45)]
    found = judged(plans, shared)
    assert found["best_even"] == SHARDED.title()
    assert found["chosen_over_best_even"] == pytest.approx(80 / 50)
    alone = judged([measured(SINGLE, 100, 60), measured(DDP, 40, 60), measured(SHARDED, 80, 60), measured(shared, 50, 45)], shared)
    assert alone["best_even"] is None
    assert alone["chosen_over_best_even"] is None
    assert alone["share"] == 1.0


def test_a_pipeline_of_as_many_blocks_in_each_stage_is_an_even_plan() -> None:
    step, blocks = footprint(blocks=5), [f"net.{index}" for index in range(5)]
    assert scenarios.even_cuts(step, 2) == ("net.2",)
    assert scenarios.even_cuts(step, 3) == ("net.2", "net.3")
    assert scenarios.even_cuts(step, 6) == ()
    assert scenarios.even_cuts(footprint(blocks=4, tied=(("net.1.weight", "net.3.weight"),)), 2) == ()

    def staged(*cuts: str) -> Plan:
        return Plan(engine="pipeline", devices=TWO, cuts=cuts, schedule="1f1b", micro_batches=4)

    even, uneven = staged("net.2"), staged("net.1")
    assert scenarios.is_even(even, blocks)
    assert not scenarios.is_even(uneven, blocks)
    plans = [measured(even, 60, 30), measured(uneven, 40, 30), *(measured(plan, 10, 60) for plan in (SINGLE, DDP, SHARDED))]
    scenario = scenarios.Scenario(model="wide", batch=64, devices="cpu:10MiB,cpu:30MiB")
    assert verdict.judge(scenario, plans, uneven, BUDGETS, MEMORY, blocks)["chosen_over_best_even"] == pytest.approx(1.5)


def test_the_summary_is_over_scenarios_in_which_something_fits() -> None:
    plans = [measured(SINGLE, 100, 30), measured(DDP, 50, 30), measured(SHARDED, 80, 30)]
    results = {
        "a": {"uneven": False, "verdict": judged(plans, DDP)},
        "b": {"uneven": True, "verdict": judged(plans, SHARDED)},
        "c": {"uneven": False, "verdict": judged([measured(plan, 1, 60) for plan in (SINGLE, DDP, SHARDED)], None)},
    }
    found = verdict.summary(results)
    assert found["scenarios"] == 2
    assert found["planner"] == {"median": pytest.approx((1 + 0.625) / 2), "worst": 0.625, "out_of_memory": 0}
    assert found["uneven"]["scenarios"] == 1
    assert found["within"] is False
    assert verdict.summary({"a": results["a"]})["within"] is True
    assert verdict.summary({}) == {"scenarios": 0}


def test_a_plan_is_the_same_after_the_result_file() -> None:
    one = measured(SHARDED, 60, 30, predicted_seconds=0.05, fits=True)
    assert MEASURED.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_every_plan_that_can_be_run_is_there_once() -> None:
    here = scenarios.Scenario(model="gpt", batch=8, devices="1xcpu:1GiB,1xcpu:3GiB").inventory
    plans = scenarios.every_plan(footprint(), here)
    assert len(plans) == len(set(plans))
    assert all(cannot_run(plan) is None for plan in plans)
    kinds = {(plan.engine, plan.world_size, plan.reshard_after_forward, bool(plan.recompute)) for plan in plans}
    assert kinds >= {
        ("single", 1, None, False),
        ("single", 1, None, True),
        ("ddp", 2, None, False),
        ("ddp", 2, None, True),
        ("fsdp", 2, True, False),
        ("fsdp", 2, False, True),
    }
    assert {plan.devices for plan in plans if plan.engine == "single"} == {("cpu:1",)}  # the freest


def test_a_plan_that_does_less_comes_first() -> None:
    more = Plan(engine="ddp", devices=TWO, recompute=("a", "b"), micro_batches=2)
    some = Plan(engine="ddp", devices=TWO, recompute=("a",), micro_batches=2)
    assert scenarios.does_less(some, more)
    assert scenarios.does_less(DDP, more)
    assert not scenarios.does_less(more, some)
    assert not scenarios.does_less(more, more)
    assert not scenarios.does_less(SHARDED, more)
    assert scenarios.does_less(DDP, Plan(engine="ddp", devices=TWO, shares=(1, 2)))
    assert not scenarios.does_less(Plan(engine="ddp", devices=TWO, shares=(1, 2)), DDP)
    assert scenarios.lightest_first([more, some, DDP, SINGLE]) == [SINGLE, DDP, some, more]


def test_the_scenarios_are_as_many_and_as_mixed_as_asked_for() -> None:
    found = scenarios.SCENARIOS
    assert len({scenario.name for scenario in found}) == len(found) >= 24
    counts = {len(scenario.inventory.devices) for scenario in found}
    assert counts == {1, 2, 3, 4}
    ratios = {
        round(max(sizes) / min(sizes))
        for scenario in found
        if (sizes := [device.free_bytes for device in scenario.inventory.devices]) and scenario.uneven
    }
    assert {2, 3} <= ratios


def test_a_scenario_is_measured_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = command()
    tiny = scenarios.Scenario(model="wide", batch=4, devices="1xcpu:256MiB")
    monkeypatch.setattr(tool, "SCENARIOS", (tiny,))
    monkeypatch.setattr(tool, "STEPS", 2)
    monkeypatch.setattr(tool, "FIRST_STEPS", 2)
    monkeypatch.setattr(runs, "calibrate", lambda inventory, progress: None)  # some seconds, and not what is tested

    def timed(scenario: Any, plan: Plan, steps: int) -> Any:
        # A busy machine doesn't decide which plan was the fastest.
        took = runs.run(scenario, plan, steps)
        return replace(took, steps=tuple(0.001 if plan.engine == "single" else 0.002 for _ in took.steps))

    monkeypatch.setattr(tool, "run", timed)
    out = tmp_path / "decisions.json"
    assert tool.main(["--json", str(out), "--rounds", "2"]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert {"date", "machine", "versions", "settings", "summary"} <= set(report)
    assert report["failed"] == {}
    (result,) = report["scenarios"].values()
    assert result["verdict"]["share"] == 1.0
    (single,) = [plan for plan in result["plans"] if plan["plan"]["engine"] == "single" and not plan["skipped"]]
    assert len(single["steps"]) == 4
    assert single["peak_bytes"]["cpu:0"] == pytest.approx(single["predicted_bytes"]["cpu:0"], rel=0.01)
    assert "wide 4 on" in capsys.readouterr().out
    monkeypatch.setattr(tool, "measure", None)  # nothing is left to be measured
    assert tool.main(["--json", str(out), "--resume"]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["scenarios"] == report["scenarios"]
    assert tool.main(["--only", "no such scenario"]) == 2


def test_a_run_that_fails_is_recorded_as_such() -> None:
    tiny = scenarios.Scenario(model="wide", batch=4, devices="1xcpu:256MiB")
    took = runs.run(tiny, Plan(engine="single", devices=("cpu:7",)), 1)
    assert took.steps == ()
    assert took.error is not None
    assert "cpu:7" in took.error
