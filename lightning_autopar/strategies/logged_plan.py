"""What loggers get of a plan: hyperparameters, always, and numbers for whoever asks for them. It calls no logger.

Hyperparameters name the plan that a run begins with, once; a run that moves tells of that by numbers (``callbacks/monitor.py``), since
some loggers refuse a hyperparameter that changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_autopar.planning.labels import devices_label

if TYPE_CHECKING:
    from lightning_autopar.planning.report import Candidate
    from lightning_autopar.strategies.assignment import Assignment


def hyperparameters(assignment: Assignment) -> dict[str, Any]:
    """The plan and its prediction, by names that a user's own hyperparameters won't have."""
    plan = assignment.plan
    found: dict[str, Any] = {
        "autopar/plan": plan.title(),
        "autopar/engine": plan.engine,
        "autopar/devices": devices_label(assignment.devices),
        "autopar/world_size": plan.world_size,
    }
    predicted = predictions(assignment.candidate)
    return found | {name: int(value) if name.endswith("_bytes") else value for name, value in predicted.items()}


def predictions(candidate: Candidate | None) -> dict[str, float]:
    """Seconds of a step, and bytes on the fullest device; what isn't predicted isn't there."""
    found: dict[str, float] = {}
    if candidate is not None and candidate.seconds is not None:
        found["autopar/predicted_step_seconds"] = candidate.seconds.step
    if candidate is not None and candidate.bytes:
        found["autopar/predicted_peak_bytes"] = float(max(held.allocated for held in candidate.bytes.values()))
    return found
