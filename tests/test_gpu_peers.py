"""Processes on GPUs that weren't forked: a script's reruns, where CUDA is initialised, and torchrun's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nullgpu.control import on_stub

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

#: A line of JSON of each fit; "plain" is Lightning's own on one GPU.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.head(self.blocks(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

devices = tuple(device.id for device in probe(accelerator="cuda").devices)[:2]
fsdp = {"engine": "fsdp", "reshard_after_forward": True, "shard": ("blocks.0", "blocks.1")}
plans = {"ddp": {"engine": "ddp"}, "fsdp": fsdp, "fsdp offload": {**fsdp, "offload": ("optimizer", "parameters")}}
for name in sys.argv[1:]:  # "free": what takes least of each device
    pl.seed_everything(1, verbose=False)
    module, x = Module(), torch.randn(32, 16)
    strategy = "auto"
    if name != "plain":
        plan = Plan(devices=devices, **plans[name]) if name in plans else Plan(devices=devices[:1], engine="single")
        strategy = AutoParallelStrategy(plan=plan) if name != "free" else AutoParallelStrategy(objective="memory", calibrate="off")
    trainer = pl.Trainer(accelerator="gpu", devices=1 if name in ("plain", "single") else 2, strategy=strategy, max_steps=4,
                         gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
    weights = [value for parameter in module.parameters() for value in parameter.detach().cpu().flatten().tolist()]
    line = json.dumps([name, float(trainer.callback_metrics["loss"]), weights])
    sys.stdout.write(f"\\nRESULT {line}\\n")
    sys.stdout.flush()
"""


#: With it the GPU of rank 1 hangs from the second step on, and that is seen soon.
HANG = """
from lightning_autopar.strategies.processes import peer_watch
from lightning_autopar.strategies.processes import stalled_workers
from tests.nullgpu import control
stalled_workers.STOOD_SECONDS, stalled_workers.FIRST_SECONDS, stalled_workers.PATIENCE, peer_watch._QUEUE_SECONDS = 2.0, 2.0, 0, 0.5
def hang(module, batch, batch_idx):
    if module.global_rank == 1 and batch_idx == 1:
        control.fault("hang", rank=1)
pl.LightningModule.on_train_batch_start = hang
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(folder: Path, *names: str, launcher: tuple[str, ...] = (), typed: bool = False, before: str = "") -> Any:
    """The script with those fits, ended. What is typed is no script that could be run again.

    Args:
        folder: for the script.
        names: of the fits.
        launcher: arguments of Python's before the script's name.
        typed: whether it reads the script from its standard input.
        before: code of the script's before the fits.
    """
    path, script = folder / "train.py", SCRIPT.replace("devices = tuple", f"{before}\ndevices = tuple", 1)
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-" if typed else str(path), *names]
    return subprocess.run(
        command, env=environment, input=script if typed else None, capture_output=True, text=True, timeout=100, check=False
    )


def ran(folder: Path, *names: str, **options: Any) -> list[Any]:
    """What each process printed of each fit: its name, the loss and the weights."""
    done = run(folder, *names, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.JSONDecoder().raw_decode(part)[0] for part in done.stdout.split("RESULT ")[1:]]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if on_stub():
        monkeypatch.setenv("NULLGPU_DEVICES", "2")


def assert_equal(results: list[Any], names: list[str]) -> None:
    """Every process has had each fit, and each was plain Lightning's."""
    assert sorted(name for name, *_ in results) == sorted(names)
    _, loss, weights = next(result for result in results if result[0] == "plain")
    for name, its_loss, its_weights in results:
        assert its_loss == pytest.approx(loss, rel=1e-5), name
        assert its_weights == pytest.approx(weights, abs=1e-5), name


def test_runs_of_a_process_and_its_reruns_are_plain_lightnings(tmp_path: Path) -> None:
    """The last keeps its parameters in host memory, for which the process group before it had no backend."""
    names = ["plain", "single", "ddp", "fsdp offload"]
    assert_equal(ran(tmp_path, *names), names * 2)


def test_a_process_that_runs_no_script_and_has_used_a_gpu_runs_on_one(tmp_path: Path) -> None:
    assert_equal(ran(tmp_path, "plain", "free", typed=True), ["plain", "free"])


def test_runs_of_torchruns_processes_are_plain_lightnings(tmp_path: Path) -> None:
    names = ["ddp", "fsdp"]
    results = ran(tmp_path, *names, launcher=TORCHRUN)
    assert_equal(results + ran(tmp_path, "plain"), [*names * 2, "plain"])


@pytest.mark.stub
@pytest.mark.parametrize(("names", "launcher"), [(["ddp"], TORCHRUN), (["plain", "ddp"], ())], ids=["torchrun", "reruns"])
def test_processes_before_a_gpu_that_hangs_end_by_a_sentence(
    names: list[str], launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    done = run(tmp_path, *names, launcher=launcher, before=HANG)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "GPUs don't do what they were given" in line]
    assert len(said) == 2, done.stderr[-3000:]
    assert all("and this rank waited in " in line for line in said)
