"""One device: Lightning's own single-device strategy, with the exact loader and the measurement."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_autopar.strategies.assignment import Assignment
from lightning_autopar.strategies.engine import EngineMixin


class SingleEngine(EngineMixin, SingleDeviceStrategy):
    """Executes a plan of one device."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(device=assignment.torch_devices[0])
        self.attach(assignment)
