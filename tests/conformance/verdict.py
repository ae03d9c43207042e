"""The verdict on a cell: parity with plain Lightning, refused before any process trained, or warned of. Anything else fails the cell."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.conformance.devices import CPUS, Devices
from tests.conformance.expected import ENGINES, KINDS, Cell, Outcome
from tests.conformance.features import PLAIN
from tests.conformance.harness import ROWS, TOLERANCES, Run, compare, plain, run
from tests.conformance.pinned import PINNED
from tests.conformance.zoo import ZOO

#: What the cells came to, for docs/features.md.
RESULTS = Path(__file__).parents[2] / "build" / "conformance.json"
#: The same on GPUs.
CUDA_RESULTS = RESULTS.with_name("conformance-cuda.json")
#: All of those that docs/features_cuda.md shows: a cell that is run anew takes its own place only.
CUDA_KEPT = Path(__file__).with_name("results_cuda.json")
#: The size of a difference, as a report's note gives it.
SIZE = re.compile(r"differs from the whole batch's by (\d\S*) of it")
#: The sentence within what is said of a pinned plan.
REFUSED_PIN = re.compile(r"can't be taken: (.*); unpin it")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a cell came to.

    Args:
        outcome: one of the three; for others' packages also a defect, or that stub GPUs can't run the module.
        difference: the largest difference from plain Lightning's run; None where nothing ran.
        where: what differs most.
        reason: the refusing or warning sentence; empty for parity.
    """

    outcome: Outcome | Literal["differs", "crashed", "not on the stub"]
    difference: float | None = None
    where: str = ""
    reason: str = ""


def autopar(engine: str, devices: Devices = CPUS, /, **options: Any) -> Callable[[], Any]:
    """Makes a strategy for a column: it may run that engine alone, or that plan, on two devices unless told otherwise."""

    def make() -> Any:
        from lightning_autopar.strategies.auto import AutoParallelStrategy

        only = {"plan": devices.place(KINDS[engine])} if engine in KINDS else {"allow": [engine]}
        return AutoParallelStrategy(**{**only, **devices.strategy(2), **options})

    return make


def reference(case: str, row: str, devices: Devices) -> Run:
    """Plain Lightning's run on one device of the kind."""
    return plain(case, row) if devices is CPUS else run(ZOO[case], ROWS[row], trainer={"accelerator": devices.accelerator})


def judge(cell: Cell, root: Path, devices: Devices = CPUS, reference: Callable[[str, str, Devices], Run] = reference) -> Verdict:
    """Run the cell, writing under ``root``, and hold it against plain Lightning's run.

    Args:
        cell: what is run.
        root: an empty folder.
        devices: what it runs on.
        reference: plain Lightning's run of a case and a feature.

    Raises:
        AssertionError: if the cell is silently wrong.
    """
    pinned = PINNED[cell.feature].plans[cell.engine] if cell.feature in PINNED else None
    row = cell.feature if pinned is None else PLAIN.name
    wanted = pinned or KINDS.get(cell.engine)
    wanted = None if wanted is None else devices.place(wanted)
    case, feature = ZOO[cell.case], ROWS[row]
    world_size = ENGINES[cell.engine] if pinned is None else pinned.world_size
    options = {} if pinned is None else {"plan": wanted, **devices.strategy(world_size)}
    trainer = {"accelerator": devices.accelerator, **devices.trainer(max(2, world_size))}
    try:
        other = run(case, feature, autopar(cell.engine, devices, **options), root=root, trainer=trainer)
    except ValueError as error:
        if started := list(root.glob("process-*")):
            raise AssertionError(f"{cell.id} was refused only after {len(started)} processes had begun to train") from error
        return Verdict(outcome="refused", reason=sentence(error, cell.engine))
    plan, report = other.strategy.plan, other.strategy.report
    assert wanted is None or replace(plan, reasons=()) == wanted, f"{cell.id} ran as {plan.title()}"
    engine = cell.engine if wanted is None else wanted.engine
    assert (plan.engine, plan.world_size) == (engine, world_size), f"{cell.id} ran as {plan.title()}"
    fits = 2 if feature.resume and world_size > 1 else 1
    assert other.processes == fits * world_size, f"{cell.id}: {other.processes} processes trained, not {fits * world_size}"
    difference = compare(reference(cell.case, row, devices), other, TOLERANCES[feature.numbers])
    notes = [note for note in report.best_candidate.notes if SIZE.search(note)]
    warned = [note for note in notes if any(note in warning for warning in other.warnings)]
    if not case.mean and plan.micro_batches > 1:
        assert warned, (
            f"{cell.id} differs by {difference.largest:.1e}, and no warning gives the size; its notes: {report.best_candidate.notes}"
        )
        return Verdict(outcome="warned", difference=difference.largest, where=difference.where, reason=warned[0])
    assert not difference.beyond, f"{cell.id} is not plain Lightning's run:\n  " + "\n  ".join(difference.beyond[:12])
    if feature.numbers != "fp32":
        in_fp32 = compare(reference(cell.case, PLAIN.name, devices), other, TOLERANCES["fp32"])
        assert in_fp32.beyond, f"{cell.id} is the run in fp32: the precision was ignored"
    assert not notes, f"{cell.id} has parity, but was warned of: {notes[0]}"
    return Verdict(outcome="parity", difference=difference.largest, where=difference.where)


def sentence(error: ValueError, engine: str) -> str:
    """Why the engine was refused: its candidate's reason where the error holds a report. What can't be cut stands there as one device's."""
    report = getattr(error, "report", None)
    refused = [candidate for candidate in report.candidates if "not in allow" not in (candidate.reason or "")] if report else []
    reasons = [candidate.reason for candidate in refused if candidate.plan.engine in (engine, "single")]
    text = str(reasons[0] if reasons else error)
    pinned = REFUSED_PIN.search(text)
    return pinned[1] if pinned else text


def keep(cell: str, verdict: Verdict, results: Path = RESULTS, about: Mapping[str, Any] | None = None) -> None:
    """Enter the verdict on the cell of that id into ``results``; several test processes may do so at once.

    Args:
        cell: its id.
        verdict: what it came to.
        results: a file of verdicts by the cells' ids.
        about: what the cell was run on and with, entered beside the verdict.
    """
    results.parent.mkdir(exist_ok=True)
    with results.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        kept = json.loads(text) if text else {}
        kept[cell] = asdict(verdict) | ({} if about is None else {"about": about})
        file.seek(0)
        file.truncate()
        json.dump(kept, file, indent=1, sort_keys=True)
