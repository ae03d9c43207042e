"""What a run's agent and the callbacks that watch it exchange: the run's state, and requests to move. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.preparation.decision import Decision


class RunView(Protocol):
    """A run as its agent sees it now. Its figures are current: each is read anew at every look."""

    @property
    def decision(self) -> Decision:
        """The decision that runs now; for a parked run, the one that ran last."""

    @property
    def step_seconds(self) -> float | None:
        """Recently measured seconds a batch, of this generation; None before there is a figure."""

    @property
    def remaining_steps(self) -> float:
        """Batches to go; ``inf`` where nobody knows."""

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""

    @property
    def move_seconds(self) -> float:
        """Predicted seconds that a move costs the run: its pause, and the slowdown while it is prepared."""

    @property
    def moved_at(self) -> float | None:
        """When the run last moved, was parked or resumed, as ``time.monotonic`` counts; None before its first move."""

    @property
    def parked(self) -> bool:
        """Whether the run waits without a device."""

    @property
    def measured_bytes(self) -> Mapping[str, int]:
        """The most bytes that each device of the plan was seen to hold, by its id; empty before they are known."""
        return {}

    def inventory(self) -> Inventory:
        """The devices that the run may use, as they are now; what the run itself holds of devices and host counts as free."""

    def replan(self, inventory: Inventory) -> Decision:
        """The best plan for these devices, found in 0.1 to 1 s.

        Raises:
            NothingFits: if no plan fits.
        """


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


class Watcher(Protocol):
    """Decides where the run should be; called in the main process, every ``interval_seconds``."""

    interval_seconds: float

    def look(self, run: RunView) -> MoveRequest | None:
        """What to do now, if anything."""
