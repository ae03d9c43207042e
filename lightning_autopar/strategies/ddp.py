"""Replicas: Lightning's DDP strategy on split batches."""

from __future__ import annotations

from inspect import signature

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_autopar.state.checkpoint import PlainCheckpoint
from lightning_autopar.strategies.engine import Assignment, EngineMixin
from lightning_autopar.strategies.group import join_group

#: Buffers that depend on the batch (BatchNorm's) are synchronised where they are computed; copying rank 0's at each step would only cost time.
#: torch 2.13 renamed the argument.
_NO_BUFFER_BROADCAST = (
    {"forward_sync_buffers": False} if "forward_sync_buffers" in signature(DistributedDataParallel).parameters else {"broadcast_buffers": False}
)


class DDPEngine(EngineMixin, PlainCheckpoint, DDPStrategy):
    """Executes a DDP plan: each rank a whole copy of the module."""

    def __init__(self, assignment: Assignment, *, forked: bool) -> None:
        super().__init__(
            parallel_devices=assignment.torch_devices,
            find_unused_parameters=assignment.find_unused_parameters,
            gradient_as_bucket_view=True,
            # Forked workers hold the very pages of the parent's module: equal already, and a broadcast would copy every page of them.
            init_sync=not forked,
            **_NO_BUFFER_BROADCAST,
        )
        self.attach(assignment)

    def _configure_launcher(self) -> None:
        """The processes are there already."""

    def setup_distributed(self) -> None:
        """As Lightning's, without re-seeding: every rank goes on from the parent's RNG state, as one device would."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        join_group(self, self._process_group_backend)
