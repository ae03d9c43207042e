"""Which class executes the plans of which engine. Knows the classes and the plan's engine, nothing else of a plan."""

from __future__ import annotations

from lightning_autopar.strategies.base.assignment import Assignment
from lightning_autopar.strategies.base.mixin import EngineMixin
from lightning_autopar.strategies.ddp.strategy import DDPEngine, SingleEngine
from lightning_autopar.strategies.fsdp.strategy import FSDPEngine
from lightning_autopar.strategies.pipeline.strategy import PipelineEngine
from lightning_autopar.strategies.zero.strategy import ZeroEngine


def build_engine(assignment: Assignment, *, forked: bool = True) -> EngineMixin:
    """The Lightning strategy that executes a plan, in this process.

    Args:
        assignment: the plan and the devices.
        forked: whether this process is a worker, forked for the plan; a launcher has started it otherwise.
    """
    engine = assignment.plan.engine
    if engine == "single":
        return SingleEngine(assignment)
    if engine == "ddp":
        return DDPEngine(assignment, forked=forked)
    if engine == "pipeline":
        return PipelineEngine(assignment)
    if engine == "zero":
        return ZeroEngine(assignment, forked=forked)
    assert engine == "fsdp", engine
    return FSDPEngine(assignment)
