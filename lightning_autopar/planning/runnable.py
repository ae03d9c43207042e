"""What of a plan this version can't run yet, though it can predict it. Knows plans alone: nothing of their bytes and seconds."""

from __future__ import annotations

from typing import Literal

from lightning_autopar.plans import BUILT_ENGINES, Plan

Feature = Literal["micro_batches", "shares", "replicas", "offload"]
#: What single, ddp and fsdp plans may do besides what these engines always did. One that isn't here is predicted and shown, never chosen.
RUNS: frozenset[Feature] = frozenset({"micro_batches", "shares", "replicas"})

_WORDS: dict[Feature, str] = {
    "micro_batches": "micro-batches inside a batch",
    "shares": "uneven shares of a batch",
    "replicas": "hybrid sharding",
    "offload": "offload to host memory",
}


def cannot_run(plan: Plan) -> str | None:
    """What the plan would need that this version can't run yet, in a few words; None where it can be run."""
    if plan.engine not in BUILT_ENGINES:
        return f"engine {plan.engine!r}"
    if plan.engine == "pipeline":  # its replicas and micro-batches are its engine's own
        return None
    asked: dict[Feature, bool] = {
        "micro_batches": plan.micro_batches > 1,
        "shares": bool(plan.shares),
        "replicas": plan.replicas > 1,
        "offload": bool(plan.offload),
    }
    missing = [_WORDS[feature] for feature, there in asked.items() if there and feature not in RUNS]
    return " and ".join(missing) or None
