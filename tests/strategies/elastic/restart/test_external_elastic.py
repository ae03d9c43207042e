"""Runs of torchrun and SLURM that leave with a snapshot, or lose a process, go on at their next start, whatever its number of processes."""

from __future__ import annotations

import csv
import json
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lightning_autopar.strategies.elastic.restart.store_rendezvous import StoreRendezvous
from tests.processes import ForkedScript, ended

SCRIPT = """
import json, os, signal, sys, threading, warnings
from pathlib import Path
warnings.filterwarnings("ignore", module="(?!lightning_autopar)")
import lightning.pytorch as pl, torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from lightning_autopar import CheckpointMigrate, ElasticReplan
from lightning_autopar.strategies.auto import AutoParallelStrategy

torch.set_num_threads(1)
task, root = json.loads(sys.argv[1]), Path.cwd()
orders = json.loads(os.environ.get("ORDERS", "{}"))
came, home, kept = threading.Event(), os.getpid(), []  # the probe's steps are done in a child
sys.here = []  # no variable of the script's own, which would go on with the run from start to start

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1)) for _ in range(2)]
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), *blocks, torch.nn.Linear(16, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        sys.here.append(batch_idx)
        kept.append(batch_idx)
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if len(sys.here) == orders.get("at") and os.getpid() == home and not os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "1":
            self.obey()
        return loss

    def obey(self):
        if "kill" in orders:
            if self.global_rank == 1:
                latest = max(root.glob(".autopar/*/s*/manifest.json")).parent
                (latest / "rest.pkl").write_bytes(b"nonsense")
                os.kill(os.getpid(), signal.SIGKILL)
            return
        if self.global_rank == orders["by"]:
            os.kill(os.getppid() if orders["signal"] == "SIGTERM" else os.getpid(), getattr(signal, orders["signal"]))
        if orders["signal"] == "SIGTERM":
            assert came.wait(20), "the launcher has passed it on"

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

pl.seed_everything(1, verbose=False)
x = torch.randn(84, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
module = Module()
migrate = CheckpointMigrate(snapshot_seconds=task.get("every"))
plain = task.get("plain")
strategy = "auto" if plain else AutoParallelStrategy(allow=["single", "ddp"])
trainer = pl.Trainer(accelerator="cpu", devices=1 if plain else "auto", strategy=strategy, max_epochs=2, accumulate_grad_batches=2,
                     logger=CSVLogger(root, name="logs"), log_every_n_steps=1, callbacks=[] if plain else [migrate, ElasticReplan()],
                     enable_progress_bar=False, enable_model_summary=False)
if orders.get("signal") == "SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: came.set())
(root / f"pid{os.getpid()}").touch()
trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
if trainer.global_rank == 0:
    assert kept == module.seen
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    (root / "result.json").write_text(json.dumps([module.seen, sys.here, weights, trainer.global_step]))
print("FINISHED", flush=True)
"""

BATCHES = [*range(11)] * 2


class Result(NamedTuple):
    """What a finished run left: the batches that it saw, those of its last start, weights, steps, and the rows of the log."""

    seen: list[int]
    here: list[int]
    weights: dict[str, Any]
    steps: int
    rows: list[dict[str, str]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def _start(
    script: Path,
    folder: Path,
    task: dict[str, Any],
    orders: dict[str, Any] | None = None,
    torchrun: tuple[str, ...] | None = None,
    **more: str,
) -> ForkedScript:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOPAR_RUNS": str(folder), **more, "ORDERS": json.dumps(orders or {})}
    return ForkedScript(script, json.dumps(task), environment=environment, folder=folder, torchrun=torchrun)


def _torchrun(script: Path, folder: Path, ranks: int, orders: dict[str, Any] | None = None, *options: str, **task: Any) -> tuple[int, str]:
    return ended(_start(script, folder, task, orders, ("--standalone", "--nproc-per-node", str(ranks), *options)))


def _result(folder: Path) -> Result:
    """What a finished run left."""
    seen, here, weights, steps = json.loads((folder / "result.json").read_text())
    rows = [row for path in sorted(folder.glob("logs/*/metrics.csv")) for row in csv.DictReader(path.read_text().splitlines())]
    return Result(seen, here, weights, steps, rows)


@pytest.fixture(scope="module")
def plain(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("plain")
    code, output = ended(_start(script, folder, {"plain": True}))
    assert code == 0, output
    return _result(folder)


def _assert_like(folder: Path, plain: Result) -> int:
    """The run is as the undisturbed one; returns how many batches its last start did."""
    run = _result(folder)
    assert run.steps == plain.steps
    for name, value in plain.weights.items():
        for row, own in zip(value, run.weights[name], strict=True):
            assert own == pytest.approx(row, rel=1e-4, abs=1e-5), name
    assert [row["step"] for row in run.rows] == [row["step"] for row in plain.rows]
    assert [float(row["loss"]) for row in run.rows] == pytest.approx([float(row["loss"]) for row in plain.rows], rel=1e-4, abs=1e-5)
    assert run.seen == BATCHES == plain.seen, "none left out, and none twice"
    assert run.here == BATCHES[len(BATCHES) - len(run.here) :]
    assert not list(folder.glob(".autopar/*/s*")), "a run that is over needs no snapshots"
    return len(run.here)


@pytest.mark.timeout(300)
def test_terminated_by_the_launcher_and_started_again(script: Path, plain: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output = _torchrun(script, folder, 2, {"at": 6, "signal": "SIGTERM", "by": 1})
    assert code != 0, output
    assert "FINISHED" not in output
    assert output.count("ElasticReplan can't move this run") == 1
    assert "the run leaves at step" in output, output
    code, output = _torchrun(script, folder, 2, {"at": 2, "signal": "SIGUSR1", "by": 1})
    assert code == 0, output
    assert "asked by a signal, the run wrote a snapshot" in output
    assert len(BATCHES) - 6 - 3 * 2 <= _assert_like(folder, plain) <= len(BATCHES) - 6, "it stops within three windows"


def test_a_killed_rank_and_a_damaged_snapshot(script: Path, plain: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output = _torchrun(script, folder, 2, {"at": 17, "kill": True}, "--max-restarts", "1", every=1e-3)
    assert code == 0, output
    assert "a snapshot can't be used, so the one before it is" in output
    assert "the run goes on from the snapshot of step" in output
    assert len(BATCHES) - 17 < _assert_like(folder, plain) < len(BATCHES)


def test_slurm_requeues_after_our_snapshot_and_one_process_goes_on(script: Path, plain: Result, tmp_path: Path) -> None:
    folder, tools = tmp_path / "run", tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/sh\necho "$@" >> requeued\nfor file in pid*; do kill -TERM "${file#pid}"; done\n'  # Slurm ends the job's steps
    )
    (tools / "scontrol").chmod(0o755)
    names = ("NTASKS", "NTASKS_PER_NODE", "NNODES", "JOB_ID", "JOB_NAME", "NODEID", "NODELIST")
    slurm = {f"SLURM_{name}": value for name, value in zip(names, ("2", "2", "1", "4711", "train", "0", "127.0.0.1"), strict=True)}
    slurm["PATH"] = f"{tools}:{os.environ['PATH']}"

    orders = {"at": 6, "signal": "SIGUSR1", "by": 1}
    ranks = [_start(script, folder, {}, orders, **slurm, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]
    for code, output in [ended(process) for process in ranks]:
        assert code == -15, output
    assert (folder / "requeued").read_text() == "requeue 4711\n"
    assert not list(folder.rglob("hpc_ckpt*"))
    code, output = ended(_start(script, folder, {}))
    assert code == 0, output
    assert _assert_like(folder, plain) == 0, "it goes on in a forked worker; had it begun anew, the log would have more rows"


def test_ranks_stop_at_one_boundary_and_never_within_a_window() -> None:
    """Threads for ranks: a barrier at the end of each window stands for its all-reduce."""
    store, windows, accumulation, ranks = dist.HashStore(), 60, 3, 3
    gates = [StoreRendezvous(store, rank, ranks, "1") for rank in range(ranks)]
    step = threading.Barrier(ranks)
    stopped: list[list[int]] = [[] for _ in range(ranks)]

    def train(rank: int) -> None:
        rendezvous = gates[rank]
        for batch in range(windows * accumulation):
            stop = rendezvous.arrived(in_window=batch % accumulation > 0)
            if rank == 0 and stop is None and not rendezvous.waits and batch % 7 == 0:
                rendezvous.call(accumulation=accumulation, leave=False, target="")
            if stop is not None:
                assert rendezvous.gather(stop, 10)
                stopped[rank].append(batch)
            if batch % accumulation == accumulation - 1:
                step.wait(10)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(stopped[0]) > 5
    assert stopped[1] == stopped[0]
    assert stopped[2] == stopped[0]
    assert all(batch % accumulation == 0 for batch in stopped[0])


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    rendezvous = StoreRendezvous(dist.HashStore(), 0, 2, "1")
    rendezvous.arrived(in_window=False)
    rendezvous.call(accumulation=1, leave=True, target="")
    rendezvous.arrived(in_window=False)
    stop = rendezvous.arrived(in_window=False)
    assert stop is not None
    assert not rendezvous.gather(stop, 0.01)
    assert not rendezvous.waits
