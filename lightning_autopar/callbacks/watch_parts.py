"""Parts of a watch: the latest planning, what planning may take of a core, what steps usually take. Each knows nothing of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.planning.changes import changes
from lightning_autopar.planning.pace import raw_batch_seconds
from lightning_autopar.planning.report import Candidate
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.decision import Decision

#: So many plans may be made in a row beyond what the share of time allows, so that a quiet run answers a change at once.
_IN_A_ROW = 4
#: A plan's devices count as slowed from where a step takes so many times what it usually took there, until it takes less than that.
_SLOWED, _SLOW_NO_MORE = 1.5, 1.2
_SLOW_AFTER_SECONDS = 60.0
#: How much of a look's step counts in what is usual.
_USUAL_SHARE = 0.1
#: Of the host's memory: a change by more is a reason to plan again.
_NOTABLE_HOST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The latest planning.

    Args:
        decision: what came out; None where nothing fits.
        inventory: the devices that it was made for.
        known_seconds: raw seconds of a batch that were asked for, by plan.
    """

    decision: Decision | None
    inventory: Inventory
    known_seconds: dict[Plan, float] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The best plan; None where nothing fits."""
        return None if self.decision is None else self.decision.candidate

    @property
    def devices(self) -> set[str]:
        """Ids of the best plan's devices."""
        return set() if self.decision is None else set(self.decision.assignment.plan.devices)

    def stale(self, inventory: Inventory, devices: set[str] | None = None) -> bool:
        """Whether the devices have changed since, or the host's memory has by much; or those devices that are named."""
        events = changes(self.inventory, inventory)
        if devices is not None:
            return any(event.device in devices for event in events)
        change = abs(inventory.host_free_bytes - self.inventory.host_free_bytes)
        return bool(events) or change > _NOTABLE_HOST_SHARE * inventory.host_total_bytes

    def raw_seconds(self, plan: Plan, *, split_batch: bool) -> float:
        """Predicted seconds of a batch on those devices, asked once."""
        assert self.decision is not None, "only where something fits is anything compared"
        if plan not in self.known_seconds:
            self.known_seconds[plan] = raw_batch_seconds(plan, self.decision.report, split_batch=split_batch)
        return self.known_seconds[plan]


class Steps:
    """What steps usually take under one plan on devices that look as they do, and whether they take longer of late."""

    def __init__(self) -> None:
        self._of: object = None
        self._usual = 0.0
        self._looks = 0
        self._turns = 0
        self._turned_at = 0.0
        self._ratio = 1.0

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return self._looks > 0

    def slower(self, step_seconds: float | None, of: object, now: float, patience: int) -> float:
        """How many times longer than usual a step takes; 1 unless that has been so for long.

        Args:
            step_seconds: of late; None where nothing was measured.
            of: what they belong to: another one has a usual of its own.
            now: of the look.
            patience: so many looks in a row, over a minute, change the answer: a validation or a checkpoint makes some steps long, too.
        """
        if of != self._of:
            self._of, self._looks, self._turns, self._ratio = of, 0, 0, 1.0
        if step_seconds is None or step_seconds <= 0:
            return self._ratio
        if not self._looks:
            self._usual = step_seconds
        self._looks += 1
        ratio = step_seconds / self._usual
        slow = self._ratio > 1
        turned = ratio < _SLOW_NO_MORE if slow else ratio >= _SLOWED
        if not turned:
            self._turns = 0
        elif not self._turns:
            self._turned_at = now
        self._turns += turned
        if self._turns >= patience and now - self._turned_at >= _SLOW_AFTER_SECONDS:
            self._turns, self._ratio = 0, 1.0 if slow else ratio
        if not slow and not turned:
            self._usual += _USUAL_SHARE * (step_seconds - self._usual)
        return self._ratio


@dataclass(kw_only=True)
class Budget:
    """What planning takes of a core: a share of the time since the run began, and a few plans beyond it.

    Over a time T it takes at most ``share * T`` and four plans; those that can't wait aren't kept from it, but count.
    """

    began: float = 0.0
    taken_seconds: float = 0.0
    longest_seconds: float = 0.0

    def begin(self, now: float) -> None:
        """The time counts from here on."""
        self.began = now

    def allows(self, now: float, share: float) -> bool:
        """Whether there may be another one, that takes as long as the longest so far."""
        return self.taken_seconds + self.longest_seconds <= share * (now - self.began) + _IN_A_ROW * self.longest_seconds

    def spent(self, seconds: float) -> None:
        """Note what one has taken."""
        self.taken_seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
