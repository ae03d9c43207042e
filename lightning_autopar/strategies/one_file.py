"""Checkpoints of a module whose ranks each have a part: one ordinary file, written by rank 0 and read by each rank no more than it needs.

A mixin for what a Lightning strategy does about files; what a rank's part is, and how parts come together, is its subclasses' matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_autopar.state import scratch
from lightning_autopar.state.checkpoint import read_checkpoint


class OneFile(Strategy):
    """Writes and reads one ordinary ``.ckpt``."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Once each rank has its part of the module, so that none reads more than that."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimizers' plain states to :meth:`load_optimizer_state_dict`."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes one ordinary ``.ckpt``: without a copy of it in memory, where Lightning's own plugin would write a local file."""
        if not self.is_global_zero:
            return
        if type(self.checkpoint_io) is TorchCheckpointIO and storage_options is None and "://" not in str(filepath):
            scratch.save_lean(checkpoint, Path(str(filepath)))
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Map the file, so that a rank reads no more of it than its part; by the user's own CheckpointIO, if there is one."""
        return read_checkpoint(self.checkpoint_io, self.broadcast(checkpoint_path), weights_only)
