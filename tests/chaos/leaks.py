"""Moves one run many times over, and counts what is left of it: a script, as a run begins in a process that has used no GPU.

    python tests/chaos/leaks.py MOVES cpu|gpu [SECONDS]

Prints one line of JSON: what there was before the first move, after some, at the last one, and after the run.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.callbacks.checkpoint_migrate import CheckpointMigrate
from lightning_autopar.devices.discover import probe
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.preparation.decision import MoveRequest
from lightning_autopar.strategies.preparation.planning_inputs import decide_again

#: Moves that say nothing yet: the first ones import and open what all others use.
_WARM_UP = 6


class Small(pl.LightningModule):
    """As little as can be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Agent:
    """What the moves' callback knows in the main process: attributes of its own would be carried from a worker."""

    def __init__(self) -> None:
        self.done, self.counts = 0, list[dict[str, int]]()
        self.decisions: dict[Plan, Any] = {}
        self.trainer: Any = None
        self.seen: Any = None
        self.until = float("inf")


_agent = Agent()


class Moves(pl.Callback):
    """Moves the run as soon as it has come to a batch, from plan to plan, and counts now and then.

    Args:
        moves: how many; the run ends after them.
        plans: in turn.
    """

    interval_seconds = 0.01

    def __init__(self, moves: int, plans: list[Plan]) -> None:
        self.moves, self.plans = moves, plans

    def look(self, run: Any) -> MoveRequest | None:
        """Called by the agent."""
        generations = len(run.recorder.spans)
        if not run.step or run.step < 1 or generations == _agent.seen:
            return None
        _agent.done = generations - 1
        ends = _agent.done >= self.moves or time.monotonic() > _agent.until
        if _agent.done == _WARM_UP or ends:
            _agent.counts.append(count())
        if ends:
            _agent.seen = generations
            Path(os.environ["LEAKS_END"]).touch()
            return None
        _agent.seen = generations
        plan = self.plans[generations % len(self.plans)]
        if plan not in _agent.decisions:
            _agent.decisions[plan] = decide_again(_agent.trainer, run.decision, run.inventory(), plan=plan)
        return MoveRequest(action="move", decision=_agent.decisions[plan], reason=f"move {generations}")


class Ends(pl.Callback):
    """In the workers: ends the run when all moves are done."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # Ranks that looked by themselves could see the file before and after the same batch, and stop at different ones.
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(os.path.exists(os.environ["LEAKS_END"]), all=False)


def count() -> dict[str, int]:
    """What this process and its children hold of the host, and of its GPUs what anybody holds."""
    gc.collect()
    own = psutil.Process()
    found = {
        "descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "processes": len(own.children(recursive=True)),
        "mappings": len(own.memory_maps(grouped=False)),
        "resident_mib": own.memory_info().rss >> 20,
        "shared_files": sum(len(files) for _, _, files in os.walk("/dev/shm")) if os.environ.get("LEAKS_ALONE") else _own_files(),
    }
    if torch.version.cuda is not None:
        found["device_mib"] = sum(device.total_bytes - device.free_bytes for device in probe(accelerator="cuda").devices) >> 20
    return found


def _own_files() -> int:
    """In shared memory, of folders that this process has open."""
    locks = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()}
    folders = [path for path in Path("/dev/shm").glob("*autopar-*") if str(path / "in-use") in locks]
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))


def main(moves: int, kind: str, seconds: float = float("inf")) -> dict[str, Any]:
    """Fit, and count."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if kind == "cpu":
        os.environ["AUTOPAR_DEVICES"] = "2xcpu:1GiB"
        ids = ["cpu:0", "cpu:1"]
    else:
        ids = [device.id for device in probe(accelerator="cuda").devices[:2]]
    both = tuple(ids)
    plans = [
        Plan(engine="single", devices=(ids[0],)),
        Plan(engine="ddp", devices=both),
        Plan(engine="single", devices=(ids[1],)),
        Plan(engine="fsdp", devices=both, shard=("net.0", "net.2"), reshard_after_forward=True),
        Plan(engine="pipeline", devices=both, cuts=("net.2",), schedule="1f1b", micro_batches=2),
    ]
    before = count()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEAKS_END"] = f"{folder}/end"
        watcher = Moves(moves, plans)
        strategy = AutoParallelStrategy(allow=["single", "ddp", "fsdp", "pipeline"], calibrate="off")
        trainer = _agent.trainer = pl.Trainer(
            accelerator=kind, devices="auto", strategy=strategy, max_epochs=-1, default_root_dir=folder,
            callbacks=[CheckpointMigrate(), watcher, Ends()],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        x = torch.randn(64, 8)
        began = time.monotonic()
        _agent.until = began + seconds
        trainer.fit(Small(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
        took = time.monotonic() - began
        left = sorted(path.name for path in Path(folder).rglob("*"))
    return {
        "moves": _agent.done, "seconds": round(took, 1), "step": trainer.global_step, "before": before, "warm": _agent.counts[0],
        "last": _agent.counts[-1], "after": count(), "left": left,
    }  # fmt: skip


if __name__ == "__main__":
    print("LEAKS " + json.dumps(main(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))))
