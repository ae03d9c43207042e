"""A strategy of the process that a run is started from: it makes the engine that runs a plan, and by itself runs nothing."""

from __future__ import annotations

from typing import Any

import torch

from lightning_autopar import engines
from lightning_autopar._lightning import ParallelStrategy
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.processes.external_launcher import is_alone


class IdleStrategy(ParallelStrategy):
    """The strategy before and after a run: one process, nothing runs."""

    def make_engine(self, run_plan: RunPlan, *, forked: bool = True) -> EngineMixin:
        """The Lightning strategy that executes a plan, called in each process that trains; a subclass may override it.

        Args:
            forked: whether this process is a worker, forked for the plan; if not, a launcher or the user has started it.
        """
        engine: EngineMixin = engines.of(run_plan.plan).strategy(run_plan, forked=forked)
        return engine

    @property
    def root_device(self) -> torch.device:
        """The first of the Trainer's devices; the plan decides which are used."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return 0 if self.cluster_environment is None or is_alone(self.cluster_environment) else super().global_rank

    @property
    def is_distributed(self) -> bool:
        """Lightning's distributed sampler is never wanted: the loader splits the user's own order."""
        return False

    def setup_environment(self) -> None:
        """Nothing runs under this strategy itself."""
        raise AssertionError("the launcher installs an engine before anything runs")

    def model_to_device(self) -> None:
        """The module stays where the run left it."""

    def barrier(self, name: str | None = None) -> None:
        """One process waits for nobody."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One process has the object already."""
        return obj

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """One process has all values."""
        return tensor

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """One process's value is the result."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One process decides alone."""
        return decision

    def teardown(self) -> None:
        """Called after a failed run; the engine has cleaned up already."""
