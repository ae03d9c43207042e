"""A generation at work as its agent sees it: how fast it runs, whether it hangs, and what it holds. It asks the generation for nothing."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.devices.inventory import Device
from lightning_autopar.sharing.process_ids import is_drivers
from lightning_autopar.strategies.processes.agent_protocol import GenerationFiles
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_supervisor import LOOK_SECONDS, Generation

if TYPE_CHECKING:
    from lightning_autopar.strategies.preparation.decision import Decision


@dataclass(kw_only=True)
class RunningGeneration:
    """A running generation, as the agent sees it."""

    generation: Generation
    elastic: GenerationFiles
    job: WorkerJob
    decision: Decision
    step_seconds: float | None = None
    _boundaries: int = 0
    _moved_at: float = 0.0
    _progress: int = -1

    def round(self, noted: list[type[BaseException]], *, timeout_seconds: float = LOOK_SECONDS) -> None:
        """Listen once, as :meth:`Generation.round`; SIGTERM doesn't end the generation here, as it must be saved first."""
        # A list of its own: a signal that comes meanwhile is for the next round.
        ends = [kind for kind in noted if kind is not SIGTERMException]
        self.generation.round(ends, timeout_seconds=timeout_seconds)

    def note(self) -> None:
        """Update the generation's speed: a running mean of the seconds of batches, without the first ones."""
        pace = self.elastic.rendezvous.progress()
        if pace.boundaries != self._boundaries and pace.batch_seconds is not None and pace.boundaries > 2:
            known = self.step_seconds
            self.step_seconds = pace.batch_seconds if known is None else 0.9 * known + 0.1 * pace.batch_seconds
        self._boundaries = pace.boundaries
        progress = self.generation.progress
        if progress != self._progress:
            self._progress, self._moved_at = progress, time.monotonic()

    def hangs(self, seconds: float) -> bool:
        """Whether no batch of any loop has begun for so long, after the first one began."""
        return self._boundaries > 0 and not self.generation.gone and time.monotonic() - self._moved_at > seconds

    def finished(self, noted: list[type[BaseException]]) -> bool:
        """Whether the run is over, by its end or by the user's interruption."""
        return bool(noted) or not (self.generation.failed or self.generation.paused or self.generation.ended_by_us)

    def bury(self) -> None:
        """End what still runs, and remove the files between its workers and the agent: a run may have hundreds of generations."""
        self.generation.end()
        shutil.rmtree(self.job.folder, ignore_errors=True)

    def why(self) -> str:
        """The generation's failure, in words."""
        while not self.generation.gone:
            self.generation.round([])
        return str(self.generation.outcome([]).error)


def own_bytes(running: RunningGeneration | None, device: Device) -> int:
    """The bytes of a GPU that a run itself holds: what its allocator reserved, and the context. A worker reports the first at its
    boundaries. Before its first boundary, or if the driver shows more for its process, the driver's figure counts. The context is as it was
    predicted, so that it may be less: no more is the run's than is in use.
    """
    if running is None or device.id not in running.decision.run_plan.plan.devices or device.kind != "cuda":
        return 0
    pids = set(running.generation.pids())
    seen = sum(process.used_bytes or 0 for process in device.processes if process.pid in pids and is_drivers(process.pid))
    used = running.elastic.rendezvous.used_bytes()[running.decision.run_plan.plan.devices.index(device.id)]
    candidate = running.decision.run_plan.candidate
    held: Any = None if candidate is None else candidate.bytes.get(device.id)
    own = max(seen, used + (held.context if held is not None and used else 0))
    return min(own, device.total_bytes - device.free_bytes)
