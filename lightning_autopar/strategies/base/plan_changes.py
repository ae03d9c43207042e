"""How a run came from plan to plan, for its loggers.

The agent says from which plan to which and why. At which step a change was over only the new workers know;
rank 0 writes it in the run's folder, which outlives them. Calls no logger.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A change from one plan to another, or back to the same plan after a failure.

    Args:
        from_plan: its title; ``to_plan`` likewise.
        from_devices: its devices in short; ``to_devices`` likewise.
        reason: why, in words.
        left_at: when the last batch under the old plan began, by the host's monotonic clock; None where the old plan began no batch.
    """

    from_plan: str
    from_devices: str
    to_plan: str
    to_devices: str
    reason: str
    left_at: float | None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The first batch after a change.

    Args:
        number: of the change, from 1.
        step: the trainer's global step at the first batch under the new plan.
        pause_seconds: from the last batch under the old plan to this one; None where the old plan began no batch.
    """

    number: int
    step: int
    pause_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class PlanChanges:
    """All changes of a run up to a generation of workers.

    Args:
        changes: in order; the last one led here.
    """

    changes: tuple[PlanChange, ...] = ()
    folder: Path = field(default_factory=Path)

    @property
    def _path(self) -> Path:
        return self.folder / "arrivals.jsonl"

    def arrivals(self) -> dict[int, Arrival]:
        """The recorded arrivals, by number; a change whose workers ended before their first batch has none."""
        if not self._path.is_file():
            return {}
        found = (Arrival(**json.loads(line)) for line in self._path.read_text(encoding="utf-8").splitlines())
        return {arrival.number: arrival for arrival in found}

    def arrive(self, step: int) -> Arrival:
        """Called by rank 0 at its first batch: the latest change is over."""
        assert self.changes, "there was a change"
        left_at = self.changes[-1].left_at
        pause = None if left_at is None else max(0.0, time.monotonic() - left_at)
        arrival = Arrival(number=len(self.changes), step=step, pause_seconds=pause)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(arrival)) + "\n")
        return arrival

    def words(self, arrival: Arrival) -> str:
        """One change in a sentence."""
        change = self.changes[arrival.number - 1]
        pause = "" if arrival.pause_seconds is None else f" after {arrival.pause_seconds:.3g} s"
        return (
            f"step {arrival.step}: from {change.from_plan} on {change.from_devices} to {change.to_plan} on {change.to_devices}{pause}: "
            f"{change.reason}"
        )
