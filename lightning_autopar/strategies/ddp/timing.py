"""A step of DDP's replicas: gradients are reduced by the bucket, behind backward."""

from __future__ import annotations

from lightning_autopar.timing.lanes import Played, Wires, play_replicas
from lightning_autopar.timing.rank import Event, Run
from lightning_autopar.timing.step import Step


class DDPStep(Step):
    """One step of replicas."""

    def played(self, run: Run, events: list[Event] | None = None) -> Played:
        """Each bucket is reduced when backward has filled it."""
        return play_replicas(self.layout, run, self.wires(), self.gradient_scale, events)

    def wires(self) -> Wires:
        """Each rank has a whole copy."""
        return Wires(self.devices[:1], self.devices, self.inventory, self.rates)
