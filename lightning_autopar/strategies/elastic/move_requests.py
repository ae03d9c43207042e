"""What callbacks and others ask of a run's agent. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lightning_autopar.strategies.preparation.decision import Decision


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """What the agent is asked to do.

    Args:
        action: ``"move"`` to the decision's plan (a parked run resumes under it), or ``"park"``: give the devices back and wait.
        decision: what to run then; None to park.
        reason: one sentence with the numbers.
        urgent: whether the run can't stay where it is.
    """

    action: Literal["move", "park"]
    decision: Decision | None
    reason: str
    urgent: bool = False

    def __post_init__(self) -> None:
        assert (self.action == "move") == (self.decision is not None), "a move has a decision, parking has none"
