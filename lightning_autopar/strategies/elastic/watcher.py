"""What a run's agent and the callbacks that watch it exchange: the run's state, and requests to move. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.preparation.decision import Decision


class RunView(Protocol):
    """A run as its agent sees it, at the moment of asking.

    Its figures are of now: each is read anew at every look.
    """

    @property
    def decision(self) -> Decision:
        """What runs now; of a parked run what ran last."""

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds a batch of late, of this generation; None before there is a figure."""

    @property
    def remaining_steps(self) -> float:
        """Batches to go; ``inf`` where nobody knows."""

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""

    @property
    def move_seconds(self) -> float:
        """Predicted price of a move: the pause, and what preparing it takes from the run."""

    @property
    def moved_at(self) -> float | None:
        """When the run last moved, was parked or resumed, as ``time.monotonic`` counts; None while it is where it began."""

    @property
    def parked(self) -> bool:
        """Whether it waits without a device."""

    @property
    def measured_bytes(self) -> Mapping[str, int]:
        """Bytes that each device of the plan was seen to hold at most, by its id; empty where nobody knows yet."""
        return {}

    def inventory(self) -> Inventory:
        """The devices that the run may use, as they are now; what it holds itself of devices and host counts as free."""

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
        decision: where to; None to park.
        reason: one sentence with the numbers.
        urgent: whether the run can't stay where it is, so that the next generation isn't worth preparing first.
    """

    action: Literal["move", "park"]
    decision: Decision | None
    reason: str
    urgent: bool = False

    def __post_init__(self) -> None:
        assert (self.action == "move") == (self.decision is not None), "a move goes somewhere, parking doesn't"


class Watcher(Protocol):
    """Who says where the run should be; called in the main process, every ``interval_seconds``."""

    interval_seconds: float

    def look(self, run: RunView) -> MoveRequest | None:
        """What to do now, if anything."""
