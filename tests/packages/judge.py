"""What a run of somebody else's model came to, held against plain Lightning's by the conformance suite's own comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from tests.conformance.harness import TOLERANCES, Run, compare
from tests.conformance.verdict import SIZE, Verdict
from tests.packages.plans import PLANS, engine

#: An engine rounds otherwise at every operation; plain Lightning's run was moved by one rounding of each initial weight and gradient.
_SWINGS = 4.0
#: The stub's own errors: it lacks cuDNN's recurrent layers, and operators that torch doesn't have for CPUs.
_MISSING = re.compile(r"CUDNN_STATUS_NOT_SUPPORTED|not on the stub GPU")


@dataclass(kw_only=True)
class Ended:
    """How a run ended: with results, refused by a sentence before any process trained, or by an error.

    Args:
        run: what it left behind.
        refused: the sentence.
        error: a traceback.
        engine: of the plan that ran.
        title: the plan in words.
        world_size: how many processes the plan has.
        notes: what the report says of the plan.
        seconds: from its start to its end.
    """

    run: Run | None = None
    refused: str = ""
    error: str = ""
    engine: str = ""
    title: str = ""
    world_size: int = 1
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """A verdict with what a page of others' packages needs beside.

    Args:
        double: whether ``difference`` is that of runs in float64, as single precision's noise is larger than the bound.
        single: the difference in float32 then.
        like: the plan whose run in float32 it is within the bound, where its engine doesn't run float64 and that plan's does.
        swing: how far plain Lightning's run is from itself at the value that differs most, with each initial weight and each gradient off
            by one rounding, where nothing differs by more than ``_SWINGS`` times its own swing; None where that isn't so, or wasn't asked.
        beyond: the first values that differ by more than the bound.
        notes: what the report says of the plan.
        day: when it was run.
        gpus: which GPUs it ran on; empty for CPU devices.
    """

    double: bool = False
    single: float | None = None
    like: str = ""
    swing: float | None = None
    beyond: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    day: str = field(default_factory=lambda: date.today().isoformat())
    gpus: str = ""

    def in_double(self, other: Finding) -> Finding:
        """The finding of the same in float64, where that is parity: what differed was noise."""
        if other.outcome == "parity":
            return replace(other, double=True, single=self.difference)
        size = "" if other.difference is None else f" by {other.difference:.0e}"
        first = other.reason or (other.beyond or (other.where,))[0]
        return self if self.reason else replace(self, reason=f"in float64 {other.outcome}{size}: {first}")

    def like_another(self, ended: Ended, noisy: Mapping[str, Run]) -> Finding:
        """The finding where the run in float32 is that of another plan, which in float64 was parity."""
        if self.outcome != "differs" or ended.run is None:
            return self
        for plan, run in noisy.items():
            difference = compare(run, ended.run, TOLERANCES["fp32"])
            if not difference.beyond:
                return replace(self, outcome="parity", difference=difference.largest, single=self.difference, like=plan, reason="")
        return self

    def as_rounded(self, plain: Run, ended: Ended, rounded: Sequence[Run]) -> Finding:
        """The finding where nothing differs by more than rounding alone moves it.

        Each value, weight and state of an optimizer is held against its own swing: what swings elsewhere excuses nothing.

        Args:
            plain: plain Lightning's run.
            ended: the run.
            rounded: plain Lightning's, each initial weight and each gradient of which was off by one rounding.
        """
        if self.outcome != "differs" or ended.run is None:
            return self
        found = compare(plain, ended.run, TOLERANCES["fp32"])
        swings: dict[str, float] = {}
        for run in rounded:
            for name, size in compare(plain, run, TOLERANCES["fp32"]).apart.items():
                swings[name] = max(size, swings.get(name, 0.0))
        bound = TOLERANCES["fp32"].values
        apart = {name: size for name, size in found.apart.items() if not size <= bound}
        # What is missing, or of another kind, has no size.
        if len(apart) < len(found.beyond) or not all(size <= _SWINGS * swings.get(name, 0.0) for name, size in apart.items()):
            return self
        return replace(self, outcome="parity", swing=swings[found.where], reason="")


def missing_on_the_stub(error: str) -> str:
    """The line of an error in which the stub GPUs report that they lack something; empty where no line does."""
    return next((line for line in error.splitlines() if _MISSING.search(line)), "")


def judge(plain: Run, ended: Ended, plan: str) -> Finding:
    """The same within the bound, refused or warned of by a sentence; anything else is a defect."""
    if ended.refused:
        return Finding(outcome="refused", reason=ended.refused)
    if ended.run is None:
        return Finding(outcome="crashed", reason=_last_line(ended.error))
    wanted = (engine(plan), PLANS[plan], PLANS[plan])
    if (ended.engine, ended.world_size, ended.run.processes) != wanted:
        return Finding(outcome="crashed", reason=f"ran as {ended.title} in {ended.run.processes} processes")
    difference = compare(plain, ended.run, TOLERANCES["fp32"])
    told = [note for note in ended.notes if SIZE.search(note) and any(note in warning for warning in ended.run.warnings)]
    outcome = "parity" if not difference.beyond else "warned" if told else "differs"
    return Finding(
        outcome=outcome,
        difference=difference.largest,
        where=difference.where,
        reason=told[0] if outcome == "warned" else "",
        beyond=tuple(difference.beyond[:6]),
        notes=ended.notes,
    )


def _last_line(error: str) -> str:
    return next(
        (line for line in reversed(error.strip().splitlines()) if line.strip() and not line.startswith(" ")), "an error without words"
    )
