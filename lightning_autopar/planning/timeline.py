"""What each rank does in one step, as spans of time: what a picture of a plan draws. It predicts by the same step as the seconds do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.timing import step_of
from lightning_autopar.planning.timing_pipeline import play
from lightning_autopar.planning.timing_ranks import Event
from lightning_autopar.planning.timing_seconds import Wire
from lightning_autopar.planning.timing_stages import PipelineStep
from lightning_autopar.planning.timing_step import Step
from lightning_autopar.plans import Plan

Lane = Literal["compute", "communication"]
SpanKind = Literal["forward", "backward", "recompute", "communication", "optimizer", "offload", "input", "idle"]
#: What is shorter than this share of the step is rounding, not waiting.
_NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank does, from when to when.

    Args:
        rank: of the plan's.
        start_seconds: since the step began.
        end_seconds: likewise.
        kind: what it is.
        label: of which block or stage.
        lane: a GPU computes and communicates at once; what a rank's cores do themselves is all on the first.
    """

    rank: int
    start_seconds: float
    end_seconds: float
    kind: str
    label: str
    lane: Lane = "compute"


def timeline(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    rates: Rates | None = None,
    ranks: int | None = None,
    wire: Wire | None = None,
) -> tuple[Span, ...]:
    """The spans of one step by rank, in the order of their beginning on each lane.

    Args:
        footprint: as for :func:`lightning_autopar.planning.timing.predict_seconds`; so are ``plan``, ``inventory``, ``precision``,
            ``rates`` and ``wire``.
        ranks: the first so many ranks only; all of them by default.

    Raises:
        ValueError: if a device of the plan isn't in the inventory, or the plan names blocks that the footprint hasn't.
    """
    step = step_of(footprint, plan, inventory, precision=precision, rates=rates, wire=wire)
    most = min(plan.world_size, ranks or plan.world_size)
    events = _of_stages(step, most) if isinstance(step, PipelineStep) else _of_ranks(step, most)
    seconds = step.seconds().step
    return tuple(span for rank, found in enumerate(events) for span in _spans(rank, found, seconds))


def _of_ranks(step: Step, most: int) -> list[list[Event]]:
    """Each rank's own work and its collectives; ranks that are alike do alike."""
    made: dict[Hashable, list[Event]] = {}
    by_rank: dict[int, Hashable] = {rank: key for key, members in step.classes().items() for rank in members}
    for rank in range(most):
        key = by_rank[rank]
        if key not in made:
            made[key] = _of_rank(step, rank)
    return [made[by_rank[rank]] for rank in range(most)]


def _of_rank(step: Step, rank: int) -> list[Event]:
    """What one rank does up to the end of its update."""
    run = step.run(rank)
    events: list[Event] = []
    played = step.played(run, events)
    on_cpu = run.device.kind == "cpu"
    if on_cpu:
        events = _on_one_lane(events)
    clock = max([played.end, *(event.end for event in events)])
    for seconds, kind, label in (
        (step.waited(), "communication", "batch norms"),
        (step.offload(run), "offload", "update on the host"),
        (run.update, "optimizer", "update"),
        (step.after(), "communication", "gather parameters"),
    ):
        if seconds > 0:
            events.append(Event("compute" if on_cpu or kind != "communication" else "communication", clock, clock + seconds, kind, label))
            clock += seconds
    return events


def _on_one_lane(events: Iterable[Event]) -> list[Event]:
    """What the same cores do, one after the other: computing waits while they communicate."""
    out: list[Event] = []
    clock = 0.0
    for event in sorted(events, key=lambda event: (event.start, event.lane != "communication")):
        end = clock + event.end - event.start
        out.append(Event("compute", clock, end, event.kind, event.label))
        clock = end
    return out


def _of_stages(step: PipelineStep, most: int) -> list[list[Event]]:
    """Each rank's actions; those of the replicas are alike."""
    plan = step.plan
    count = plan.devices_per_replica
    runs = step.stage_runs()
    stages = step.stages(runs)
    events: list[list[Event]] = [[] for _ in range(count)]
    for rank, action, start, end in play(stages):
        label = f"stage {action.stage}, micro-batch {action.micro_batch}"
        again = runs[action.stage].again
        if action.work == "forward":
            events[rank].append(Event("compute", start, end, "forward", label))
            if action.stage + 1 < plan.stages and (sent := stages.sends[action.stage]):
                events[rank].append(Event("communication", end, end + sent, "communication", f"send {label}"))
            continue
        second = min(sum(again), end - start)
        if second:
            events[rank].append(Event("compute", start, start + second, "recompute", label))
        events[rank].append(Event("compute", start + second, end, "backward", label))
        if action.stage and (sent := stages.sends[action.stage - 1]):
            events[rank].append(Event("communication", end, end + sent, "communication", f"send gradients of {label}"))
    for position, found in enumerate(events):
        clock = max(event.end for event in found if event.lane == "compute")
        if (talk := step.synced(position, runs)) > 0:
            found.append(Event("communication", clock, clock + talk, "communication", "gradients"))
            clock += talk
        if (update := sum(run.update for run in runs[position::count])) > 0:
            found.append(Event("compute", clock, clock + update, "optimizer", "update"))
    return [events[rank % count] for rank in range(most)]


def _spans(rank: int, events: Iterable[Event], step_seconds: float) -> list[Span]:
    """In order, with what the compute lane waits in between."""
    spans: list[Span] = []
    lanes: tuple[Lane, Lane] = ("compute", "communication")
    ordered = sorted(events, key=lambda event: event.start)
    for lane in lanes:
        clock = 0.0
        for event in ordered:
            if event.lane != lane:
                continue
            if lane == "compute" and event.start - clock > _NOTHING * step_seconds:
                spans.append(Span(rank=rank, start_seconds=clock, end_seconds=event.start, kind="idle", label=""))
            spans.append(Span(rank=rank, start_seconds=event.start, end_seconds=event.end, kind=event.kind, label=event.label, lane=lane))
            clock = event.end
        if lane == "compute" and step_seconds - clock > _NOTHING * step_seconds:
            spans.append(Span(rank=rank, start_seconds=clock, end_seconds=step_seconds, kind="idle", label=""))
    return spans
