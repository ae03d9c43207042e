"""A step of DDP's replicas: gradients are reduced by the bucket, behind backward."""

from __future__ import annotations

from lightning_autopar.timing.lanes import LaneSeconds, Links, play_replicas
from lightning_autopar.timing.rank import LaneSpan, RankWork
from lightning_autopar.timing.step import Step


class DDPStep(Step):
    """One step of a DDP plan.

    Attributes:
        gradient_scale: bytes of a gradient on the wire over those that it has at rest.
    """

    gradient_scale = 1.0

    def played(self, run: RankWork, events: list[LaneSpan] | None = None) -> LaneSeconds:
        """Play the step: each bucket is reduced when backward has filled it."""
        return play_replicas(self.layout, run, self.links(), self.gradient_scale, events)

    def links(self) -> Links:
        """Each rank has a whole copy."""
        return Links(self.devices[:1], self.devices, self.inventory, self.rates)
