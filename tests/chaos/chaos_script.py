"""A script that trains a variant under autopar, to be killed and started again: ``chaos_script.py FOLDER``."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.chaos.chaos_modules import Variant
from tests.chaos.chaos_runs import fit_with
from tests.chaos.chaos_schedules import ddp
from tests.chaos.chaos_stage import Action

VARIANT = Variant(seed=8)
PACE_SECONDS = 0.03


class Slow(pl.Callback):
    """Gives whoever kills the script its time, and says how far it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            partial = self.folder / "step.part"
            partial.write_text(str(trainer.global_step), encoding="utf-8")
            partial.replace(self.folder / "step")
        time.sleep(PACE_SECONDS)


def main(folder: Path) -> None:
    """Train, from the beginning or from where an earlier start was."""
    actions = [] if (folder / "step").exists() else [Action(at=4, what="move", plan=ddp(0, 1))]
    run = fit_with(
        VARIANT,
        folder,
        actions,
        allow=["single", "ddp"],
        watchers=[Slow(folder)],
        migrate={"snapshot_seconds": 0.15},
        devices="2xcpu:2GiB",
        loud=True,
    )
    (folder / "run.pkl").write_bytes(pickle.dumps((run.module.state_dict(), run.trainer.global_step)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
