"""Does the planner choose well? Every plan of every scenario is run on CPU devices, and the planner's choice held against the best of them.

A scenario is a model, a batch and devices with memory budgets. The planner is asked once; then its own candidates and every plan of
`decisions/scenarios.py` are run, pinned, also those that it says don't quite fit: what counts is what a run was measured to take. A plan
is recorded, but not run, where one that does the same with less work (without recomputation, say) was measured to have room, or where it is
predicted to need more than 1.1 times its budget. Of a scenario's pipelines the one that is predicted to be fastest is run in any case, and
those of even stages where devices are uneven, the others where they are predicted to take less than 1.3 times the best plan. The first
round runs every plan for a few steps; further ones, in turns, the fastest feasible ones, the planner's choice and what the fixed rules
take. A plan's time is the lower quartile of its steps. Feasible is what stays within what the planner may use, too: what a device has free,
less the margin of 5 %; over budget is what takes more than the device has.

A rank computes with the threads of its CPU device: four ranks on two cores are the contention that they are anywhere.

    python benchmarks/decisions.py                     # all, some fifteen minutes on two quiet cores; writes results/decisions.json
    python benchmarks/decisions.py --only "gpt 16"     # scenarios with that in their names
    python benchmarks/decisions.py --ask-again         # keep what was measured, ask the planner anew
    python benchmarks/decisions.py --resume            # only scenarios that the result file doesn't have yet
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["AUTOPAR_CACHE"] = "off"  # what one run took must not correct another's prediction; the planner alone gets measured rates

from decisions.runs import RunFailed, Took, ask_planner, run
from decisions.scenarios import SCENARIOS, Scenario, does_less, every_plan, is_even, key, lightest_first
from decisions.verdict import RULES, Measured, judge, summary, taken_by, within
from machine import machine

from lightning_autopar import Plan, Report
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.planning.refusals import cannot_run

RESULTS = Path(__file__).resolve().parent / "results" / "decisions.json"
#: Measured steps of the first round, and of each further one.
FIRST_STEPS, STEPS = 4, 10
#: Plans so much slower than the best needn't be measured more closely.
_CONTENDS = 1.25
#: What is predicted to need so many times its budget isn't run: memory is predicted far better than that (memory_cpu.py, memory_fsdp.py).
_FAR_BEYOND = 1.1
#: Of pipelines but the best one those are run that are predicted to take less than so many times the best plan.
_NEAR = 1.3
#: Of the printed table.
_LEAST_WIDTH = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where the goal isn't met or a scenario failed."""
    options = _parser().parse_args(arguments)
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    if not chosen:
        print(f"no scenario has {options.only!r} in its name; there are: {', '.join(one.name for one in SCENARIOS)}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"scenarios": {}, "failed": {}}
    if (options.resume or options.ask_again) and options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
        report["failed"] = {}
    report |= machine() | {"settings": {"rounds": options.rounds, "first_steps": FIRST_STEPS, "steps": STEPS}}
    with tempfile.TemporaryDirectory() as cache:
        if options.ask_again:
            for scenario in _progress([one for one in chosen if one.name in report["scenarios"]]):
                report["scenarios"][scenario.name] = ask_again(scenario, report["scenarios"][scenario.name], Path(cache))
                _write(options.json, report)
        for scenario in _progress([one for one in chosen if one.name not in report["scenarios"]]):
            try:
                report["scenarios"][scenario.name] = measure(scenario, options.rounds, Path(cache))
            except RunFailed as error:
                report["failed"][scenario.name] = str(error)
            report["summary"] = summary(report["scenarios"])
            _write(options.json, report)
    report["summary"] = summary(report["scenarios"])
    _write(options.json, report)
    _print(report)
    return 0 if report["summary"].get("within") and not report["failed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The planner's choices against every feasible plan, measured on CPU devices.")
    parser.add_argument("--only", default="", metavar="WORDS", help="only scenarios with these words in their names")
    parser.add_argument("--resume", action="store_true", help="keep the scenarios that the result file has")
    parser.add_argument("--ask-again", action="store_true", help="keep what was measured, but ask the planner anew")
    parser.add_argument("--rounds", type=int, default=2, help="the first of every plan, the others of the best ones; default: 2")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="the result file, written after each scenario")
    return parser


def measure(scenario: Scenario, rounds: int, cache: Path) -> dict[str, Any]:
    """Ask the planner, run the plans, judge. The cache is that of the machine's measured rates.

    Raises:
        RunFailed: if the planner failed.
    """
    report = ask_planner(scenario, cache)
    budgets = dict(report.budgets)
    plans = [_expected(report, plan) for plan in lightest_first(_plans(scenario, report))]
    taken = None if report.best is None else key(report.best)
    done: list[Measured] = []
    pipelines = {one.plan: one for one in plans if one.plan.engine == "pipeline"}
    best_pipeline = min((one for one in pipelines.values() if one.fits), key=lambda one: one.predicted_seconds or 0.0, default=None)
    wanted = {taken, best_pipeline.plan if best_pipeline else None}
    blocks = [block.fqn for block in report.footprint.blocks]
    wanted |= {plan for plan in pipelines if scenario.uneven and is_even(plan, blocks)}
    near = _NEAR * min((one.predicted_seconds for one in plans if one.fits and one.predicted_seconds), default=0.0)
    for one in plans:
        lighter = next((other for other in done if within(other, budgets) and does_less(other.plan, one.plan)), None)
        beyond = max(size / budgets[device] for device, size in one.predicted_bytes.items())
        if lighter is not None and one.plan != taken:
            done.append(replace(one, skipped=f"does more than {lighter.plan.title()}, which has room"))
        elif one.plan.engine == "pipeline" and one.plan not in wanted and not (one.predicted_seconds or 0.0) <= near:
            done.append(replace(one, skipped="another pipeline is predicted to be faster, and other plans far faster"))
        elif beyond > _FAR_BEYOND and one.plan != taken:
            done.append(replace(one, skipped=f"needs {beyond:.2f} times the budget by its prediction"))
        else:
            done.append(_add(one, run(scenario, one.plan, FIRST_STEPS)))
    for _ in range(rounds - 1):
        closer = _worth_a_closer_look(scenario, done, taken, budgets)
        done = [_add(one, run(scenario, one.plan, STEPS)) if one.plan in closer else one for one in done]
    return _result(scenario, report, done)


def ask_again(scenario: Scenario, result: dict[str, Any], cache: Path) -> dict[str, Any]:
    """The planner's new word, against what was measured; a plan that wasn't is run."""
    report = ask_planner(scenario, cache)
    taken = None if report.best is None else key(report.best)
    done = []
    for one in map(Measured.from_dict, result["plans"]):
        expected = _expected(report, one.plan)
        done.append(
            replace(one, fits=expected.fits, predicted_seconds=expected.predicted_seconds, predicted_bytes=expected.predicted_bytes)
        )
    known = {(replace(one.plan, shares=()), one.plan.rows(scenario.batch)): number for number, one in enumerate(done)}
    if taken is not None:
        number = known.get((replace(taken, shares=()), taken.rows(scenario.batch)))
        one = _expected(report, taken) if number is None else replace(done[number], plan=taken)
        if not one.steps:
            one = _add(_add(replace(one, skipped=None), run(scenario, taken, FIRST_STEPS)), run(scenario, taken, STEPS))
        done = [*done, one] if number is None else [*done[:number], one, *done[number + 1 :]]
    return _result(scenario, report, done)


def _result(scenario: Scenario, report: Report, done: Sequence[Measured]) -> dict[str, Any]:
    """What the result file says of a scenario."""
    budgets = dict(report.budgets)
    memory = {device.id: device.free_bytes for device in scenario.inventory.devices}
    taken = None if report.best is None else key(report.best)
    return {
        "model": scenario.model,
        "batch": scenario.batch,
        "devices": scenario.devices,
        "uneven": scenario.uneven,
        "budgets": budgets,
        "rates": getattr(report.rates, "name", "data sheets"),
        "advice": list(map(str, report.advice)),
        "verdict": judge(scenario, done, taken, budgets, memory, [block.fqn for block in report.footprint.blocks]),
        "plans": [one.to_dict() for one in done],
    }


def _plans(scenario: Scenario, report: Report) -> list[Plan]:
    """The planner's own candidates that can be run, and every other plan, each once."""
    own = [key(candidate.plan) for candidate in report.candidates if candidate.bytes and cannot_run(candidate.plan) is None]
    found: dict[object, Plan] = {}
    for plan in (*own, *every_plan(report.footprint, scenario.inventory)):
        # Shares that come to the same samples are the same plan here.
        found.setdefault((replace(plan, shares=()), plan.rows(scenario.batch)), plan)
    return list(found.values())


def _expected(report: Report, plan: Plan) -> Measured:
    """The plan with what the planner predicts for it; whether it fits, where it looked at it."""
    looked = next((candidate for candidate in report.candidates if key(candidate.plan) == plan), None)
    sizes = predict(report.footprint, plan, report.inventory, precision=report.precision)
    seconds = predict_seconds(report.footprint, plan, report.inventory, precision=report.precision, rates=report.rates)
    return Measured(
        plan=plan,
        fits=None if looked is None else looked.fits,
        predicted_seconds=seconds.step,
        predicted_bytes={device: size.allocated for device, size in sizes.items()},
        peak_bytes={},
    )


def _add(one: Measured, took: Took) -> Measured:
    """The plan with one more run's steps; where a run failed, that is what counts."""
    if took.error is not None:
        return replace(one, error=took.error, steps=())
    peaks = {device: max(size, one.peak_bytes.get(device, 0)) for device, size in took.peak_bytes.items() if size is not None}
    return replace(one, steps=(*one.steps, *took.steps), peak_bytes=peaks)


def _worth_a_closer_look(scenario: Scenario, done: Sequence[Measured], taken: Plan | None, budgets: dict[str, int]) -> set[Plan]:
    """The fastest feasible ones, the planner's choice, and what the rules take."""
    feasible = [one for one in done if within(one, budgets)]
    best = min((one.seconds for one in feasible if one.seconds), default=0.0)
    found = {one.plan for one in feasible if one.seconds and one.seconds <= _CONTENDS * best}
    devices = len(scenario.inventory.devices)
    ruled = (taken_by(rule, done, devices, budgets) for rule in RULES)
    found |= {one.plan for one in ruled if within(one, budgets)}
    found |= {one.plan for one in done if one.plan == taken and one.seconds}
    return found


def _progress(scenarios: Sequence[Scenario]) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(scenarios, description="scenarios", console=Console(stderr=True))


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("scenario", "chosen", "best measured", "chosen/best", *_rules(report)):
        left = title in ("scenario", "chosen", "best measured")
        table.add_column(title, justify="left" if left else "right", no_wrap=title == "scenario")
    for name, result in report["scenarios"].items():
        verdict = result["verdict"]
        rules = (_share(rule["share"], rule["fits"]) for rule in verdict["rules"].values())
        share = _share(verdict["share"], not verdict["over_budget"])
        table.add_row(name, verdict["chosen"] or "nothing fits", verdict["best"] or "nothing fits", share, *rules)
    figures = report["summary"]
    if figures["scenarios"]:
        for which in ("median", "worst"):
            rules = (f"{rule[which]:.1%}" for rule in figures["rules"].values())
            table.add_row(which, "", "", f"{figures['planner'][which]:.1%}", *rules, style="bold")
    console = Console()
    console = Console(width=max(console.width, _LEAST_WIDTH))
    console.print(table)
    for name, why in report["failed"].items():
        console.print(f"{name} failed: {why}", markup=False)
    if figures["scenarios"]:
        uneven = figures["uneven"]
        console.print(
            f"{figures['scenarios']} scenarios; over budget: {figures['over_budget']}, within the margin: {figures['use_margin']}; of all "
            f"plans with room, margin or not: {figures['planner_of_all']}; uneven devices: {uneven['scenarios']}, in "
            f"{uneven['no_even_plan_fits']} of them no even plan fits; against the best that does: "
            f"{uneven['against_best_even']}"
        )


def _rules(report: dict[str, Any]) -> list[str]:
    return list(report["summary"].get("rules", ()))


def _share(share: float | None, fits: bool) -> str:
    """``"97.3%"``; in words where there is none."""
    if share is None:
        return "–"
    return f"{share:.1%}" if share else "nothing" if fits else "out of memory"


if __name__ == "__main__":
    sys.exit(main())
