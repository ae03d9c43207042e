"""What of a plan this version can't run yet, though it can predict it. Knows plans alone: nothing of their bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_autopar.plans import BUILT_ENGINES, Engine, Plan

Feature = Literal["micro_batches", "shares", "replicas", "offload", "disk"]
#: What single, ddp and fsdp plans may do besides what these engines always did. One that isn't here is predicted and shown, never chosen.
RUNS: frozenset[Feature] = frozenset({"micro_batches", "shares", "replicas", "offload"})
#: Engines that run where ``allow`` names them, or a plan of theirs is pinned; by default planning takes none of their plans.
ASKED_ENGINES: frozenset[Engine] = frozenset({"zero"})
#: Features that run where a plan with them is pinned, and that planning takes no plan with by itself.
PINNED: frozenset[Feature] = frozenset({"disk"})

_WORDS: dict[Feature, str] = {
    "micro_batches": "micro-batches inside a batch",
    "shares": "uneven shares of a batch",
    "replicas": "hybrid sharding",
    "offload": "offload to host memory",
    "disk": "the optimizer's state on disk",
}


def engine_runs(engine: Engine, allow: Sequence[Engine]) -> bool:
    """Whether this version runs plans of an engine for whoever allows these."""
    return engine in BUILT_ENGINES or (engine in ASKED_ENGINES and engine in allow)


def cannot_run(plan: Plan, *, allow: Sequence[Engine] = (), pinned: bool = False) -> str | None:
    """Why the plan isn't taken, in a few words; None where it may be: what it needs that this version can't run, or that nobody asked for.

    Args:
        plan: any.
        allow: the engines that the user names.
        pinned: whether the user asked for it.
    """
    if not engine_runs(plan.engine, allow) and not (pinned and plan.engine in ASKED_ENGINES):
        asked = plan.engine in ASKED_ENGINES
        return f"taken only where allow names {plan.engine!r}" if asked else f"can't be run by this version yet (engine {plan.engine!r})"
    if plan.engine == "pipeline":  # its replicas and micro-batches are its engine's own
        return None
    needed: dict[Feature, bool] = {
        "micro_batches": plan.micro_batches > 1,
        "shares": bool(plan.shares),
        "replicas": plan.replicas > 1,
        "offload": bool(plan.offload),
        "disk": plan.optimizer_on_disk,
    }
    able = RUNS | PINNED if pinned else RUNS
    missing = [_WORDS[feature] for feature, there in needed.items() if there and feature not in able]
    return f"can't be run by this version yet ({' and '.join(missing)})" if missing else None
