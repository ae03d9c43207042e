"""The outcome of a check that a plan needs: it passed, it failed, or it couldn't be made. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of a check.

    Args:
        outcome: ``"not made"`` isn't ``"passed"``: then nothing is known about the plan.
        reason: why it failed or couldn't be made, in one sentence.
        notes: what a reader should know about a plan that passed, a sentence each.
    """

    outcome: Literal["passed", "failed", "not made"]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """Why plans that need the check are left out; None where they may be taken."""
        return None if self.outcome == "passed" else self.reason


PASSED = Check(outcome="passed")


def failed(reason: str) -> Check:
    """The check of a plan that computes something else than one device."""
    return Check(outcome="failed", reason=reason)


def not_made(reason: str) -> Check:
    """The check of a plan about which nothing is known.

    Args:
        reason: why, as the end of a sentence.
    """
    return Check(outcome="not made", reason=f"whether it runs the step right couldn't be checked, as {reason}")
