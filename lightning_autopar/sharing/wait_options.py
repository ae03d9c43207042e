"""``Turn``: how long a user lets a run wait, and how important the run is. It knows no queue.

No ``from __future__ import annotations`` here: jsonargparse reads the annotations as objects.
"""

import math
import os
from dataclasses import dataclass

from lightning_autopar.sharing.queue import LEAST_PRIORITY, MOST_PRIORITY
from lightning_autopar.text import parse_seconds

#: The variables for how long runs wait, and how important they are, if the script doesn't say.
WAIT_VARIABLE, PRIORITY_VARIABLE = "AUTOPAR_WAIT", "AUTOPAR_PRIORITY"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How long a run waits for its turn where nothing fits now, and how important it is.

    Args:
        wait: "forever" (or True), "never" (or False), or how long: seconds, or "90s", "30min", "2h". By default what the variable
            AUTOPAR_WAIT says, or else forever.
        priority: from -100 to 100: of waiting runs, the larger goes first, then the one that asked first; elastic runs with a smaller one
            may be asked to make room. By default what the variable AUTOPAR_PRIORITY says, or else 0.

    Raises:
        ValueError: if a value isn't allowed, with the value, the bound and the remedy.
    """

    wait: bool | int | float | str | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        if self.wait is not None:
            _seconds(self.wait, "wait=")
        if self.priority is not None:
            _priority(self.priority, "priority=")

    @classmethod
    def of(cls, wait: "bool | int | float | str | Turn | None") -> "Turn":
        """The strategy's argument as a turn.

        Raises:
            ValueError: if it, or a variable, isn't allowed.
        """
        turn = wait if isinstance(wait, Turn) else cls(wait=wait)
        turn.wait_seconds, turn.rank  # noqa: B018  # the variables are wrong now rather than after planning
        return turn

    def over(self, other: "Turn") -> "Turn":
        """This turn, with the other's values where it has none."""
        return Turn(
            wait=other.wait if self.wait is None else self.wait,
            priority=other.priority if self.priority is None else self.priority,
        )

    @property
    def wait_seconds(self) -> float:
        """How long the run waits at most, 0 for never.

        Raises:
            ValueError: if the variable's value isn't allowed.
        """
        if self.wait is not None:
            return _seconds(self.wait, "wait=")
        words = os.environ.get(WAIT_VARIABLE, "").strip()
        return _seconds(words, f"the environment variable {WAIT_VARIABLE}=") if words else math.inf

    @property
    def rank(self) -> int:
        """The run's priority.

        Raises:
            ValueError: if the variable's value isn't allowed.
        """
        if self.priority is not None:
            return self.priority
        words = os.environ.get(PRIORITY_VARIABLE, "").strip()
        return _priority(words, f"the environment variable {PRIORITY_VARIABLE}=") if words else 0


def _seconds(wait: bool | int | float | str, what: str) -> float:
    """The seconds of a value.

    Raises:
        ValueError: if the value isn't allowed.
    """
    words = str(wait).strip().lower()
    if words in ("forever", "true"):
        return math.inf
    if words in ("never", "false"):
        return 0.0
    try:
        return parse_seconds(words)
    except ValueError as error:
        raise ValueError(
            f"{what}{wait!r} must be 'forever', 'never' or how long to wait, at least 0 seconds: a number, or such as '30min' or '2h'"
        ) from error


def _priority(value: object, what: str) -> int:
    """That priority.

    Raises:
        ValueError: if it is none.
    """
    try:
        found = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    except ValueError:
        found = None
    if found is None or not LEAST_PRIORITY <= found <= MOST_PRIORITY:
        raise ValueError(
            f"{what}{value!r} must be a whole number from {LEAST_PRIORITY} to {MOST_PRIORITY}; the larger goes first, and 0 is the default"
        )
    return found
