"""Processes that torchrun or SLURM started, and reruns of a script: rank 0 plans, all follow, and each has what plain Lightning has."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_autopar._lightning_compat import find_free_network_port
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.processes import external_launcher
from lightning_autopar.strategies.processes.external_launcher import Peers
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.processes import ForkedScript, ended, lean_path

SCRIPT = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from lightning_autopar.strategies.processes import stalled_workers
from lightning_autopar.strategies.auto import AutoParallelStrategy

stalled_workers.STOPPED_SECONDS = 2.0
torch.set_num_threads(1)
task = json.loads(sys.argv[1])
if task.get("cuda"):
    torch.cuda.is_initialized = lambda: sys._getframe(2).f_globals["__name__"] == "lightning_autopar.strategies.launcher"  # of unforkable

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1)) for _ in range(2)]
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), *blocks, torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if task.get("stop") == self.global_rank and batch_idx == 1 and torch.distributed.group.WORLD is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        if task.get("fail") == self.global_rank and batch_idx == 1:
            raise ValueError(f"rank {self.global_rank} is unwell")
        if task.get("lacks") == self.global_rank and batch_idx == 1:
            raise torch.OutOfMemoryError("a fake")
        return mse_loss(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

pl.seed_everything(1, verbose=False)
x = torch.randn(42, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
module, values, plans = Module(), [], []
for asked in task.get("strategies", [task.get("strategy")] * task.get("fits", 1)):
    strategy = AutoParallelStrategy(**asked) if asked is not None else "auto"
    trainer = pl.Trainer(accelerator="cpu", devices=task.get("devices", 1), strategy=strategy, max_epochs=1, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
    predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=8)))
    values += [len(predicted), float(predicted.sum()), sum(float(p.abs().sum()) for p in module.parameters())]
    plans.append([strategy.plan.engine, strategy.plan.world_size] if asked is not None else None)
print("RESULT " + json.dumps([values, plans[-1], plans]), flush=True)
"""


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": lean_path(), "OMP_NUM_THREADS": "1", **more}


def _start(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=_environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _fork(script: Path, task: dict[str, Any], torchrun: tuple[str, ...] | None = None, **more: str) -> ForkedScript:
    return ForkedScript(script, json.dumps(task), environment=_environment(**more), folder=script.parent, torchrun=torchrun)


def _task(script: Path, task: dict[str, Any]) -> list[str]:
    return [str(script), json.dumps(task)]


def _torchrun(script: Path, ranks: int, task: dict[str, Any], **more: str) -> tuple[int, str]:
    return ended(_fork(script, task, ("--standalone", "--nproc-per-node", str(ranks)), **more))


def _results(output: str) -> list[Any]:
    return [json.JSONDecoder().raw_decode(part)[0] for part in output.split("RESULT ")[1:]]


@pytest.fixture(scope="session")
def plain(script: Path) -> list[float]:
    """What three fits of plain Lightning come to, three figures each."""
    code, output = ended(_fork(script, {"fits": 3}))
    assert code == 0, output
    values: list[float] = _results(output)[0][0]
    return values


@pytest.mark.parametrize("forked", [True, False])
def test_torchrun_several_fits(forked: bool, script: Path, plain: list[float]) -> None:
    """One after the other in the same processes, which torchrun starts as it does, or forks as in the tests after this one."""
    engines = ["ddp", "pipeline", "fsdp"]
    task = {"strategies": [{"allow": [engine]} for engine in engines]}
    if forked:
        code, output = _torchrun(script, 2, task)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        code, output = ended(_start([*command, *_task(script, task)]), 220)
    assert code == 0, output
    results = _results(output)
    assert [plans for _, _, plans in results] == [[[engine, 2] for engine in engines]] * 2
    for values, *_ in results:
        assert values == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_torchrun_zero(script: Path, plain: list[float]) -> None:
    pytest.importorskip("deepspeed")
    path = script.with_name("plan.json")
    path.write_text(Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=3).to_json())
    code, output = _torchrun(script, 2, {"strategy": {"plan": str(path), "devices": "2xcpu:1GiB"}})
    assert code == 0, output
    for values, ran, _ in _results(output):
        assert ran == ["zero", 2]
        assert values == pytest.approx(plain[:3], rel=1e-4, abs=1e-5)


def test_torchrun_one_process_plans_for_the_devices_given(script: Path, plain: list[float]) -> None:
    code, output = _torchrun(script, 1, {"strategy": {"allow": ["ddp"]}}, AUTOPAR_DEVICES="2xcpu:1GiB")
    assert code == 0, output
    assert _results(output)[0][1] == ["ddp", 2]
    assert _results(output)[0][0] == pytest.approx(plain[:3], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param("1xcpu:1GiB", "2 processes were started, but the devices given are 1", marks=pytest.mark.slow),
        ("2xcpu:1MiB", None),
    ],
)
def test_what_rank_0_cannot_plan_ends_all(script: Path, devices: str, message: str | None) -> None:
    task: dict[str, Any] = {"strategy": {} if message else {"allow": ["single"]}}
    code, output = _torchrun(script, 2, task, AUTOPAR_DEVICES=devices)
    assert code != 0
    assert (message or "NothingFits") in output


def test_who_runs_out_of_memory_in_a_launchers_process_reads_how_to_go_on(script: Path) -> None:
    code, output = _torchrun(script, 2, {"strategy": {"allow": ["fsdp"]}, "lacks": 1})
    assert code != 0
    assert "only its launcher can start processes for a smaller plan" in output


def test_slurm(script: Path, plain: list[float]) -> None:
    slurm = {
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "NNODES": "1",
        "JOB_ID": "4711",
        "JOB_NAME": "train",
        "NODEID": "0",
        "NODELIST": "127.0.0.1",
    }
    task = {"devices": 2, "strategy": {"allow": ["ddp"]}}
    common = {f"SLURM_{name}": value for name, value in slurm.items()}
    processes = [_fork(script, task, **common, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]
    for code, output in [ended(process) for process in processes]:
        assert code == 0, output
        assert _results(output)[0][1] == ["ddp", 2]
        assert _results(output)[0][0] == pytest.approx(plain[:3], rel=1e-4, abs=1e-5)


def test_a_rerun_has_had_the_earlier_runs_when_it_joins(script: Path, plain: list[float]) -> None:
    """Those that its starter ran alone; it took its first one for the run that it was started for."""
    task = {"cuda": True, "strategies": [{"allow": [engine], "devices": "2xcpu:1GiB"} for engine in ("single", "ddp")]}
    code, output = ended(_start([sys.executable, *_task(script, task)]))
    assert code == 0, output
    results = _results(output)
    assert [plans for _, _, plans in results] == [[["single", 1], ["ddp", 2]]] * 2
    for values, *_ in results:
        assert values == pytest.approx(plain[:6], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("allow", "alone"), [(("single",), True), (("single", "ddp"), False)])
def test_what_may_use_one_device_only_runs_without_the_reruns(allow: Any, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fit on two devices, by a script and its rerun: "2 processes were started", said the next one that may use one device only."""
    monkeypatch.setenv(external_launcher.PARENT, "1")
    peers = Peers(store=dist.HashStore(), rank=0, world_size=2, node=0, environment=LightningEnvironment())
    monkeypatch.setattr(external_launcher, "_peers", peers)
    strategy: Any = SimpleNamespace(settings=SimpleNamespace(plan=None, allow=allow), inventory=lambda: (probe("2xcpu:1GiB"), None))
    assert external_launcher.under_external_launcher(strategy) is (None if alone else peers)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rerun_that_fails_ends_everything(script: Path, rank: int) -> None:
    task = {"cuda": True, "fail": rank, "strategy": {"allow": ["ddp"], "devices": "2xcpu:1GiB"}}
    process = _start([sys.executable, *_task(script, task)])
    children: set[psutil.Process] = set()
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        children.update(psutil.Process(process.pid).children(recursive=True) if process.poll() is None else [])
    assert process.wait() != 0
    assert f"rank {rank} is unwell" in output
    process.stdout.close()
    _, alive = psutil.wait_procs(list(children), timeout=30)
    assert not alive


@pytest.mark.slow
def test_a_rerun_that_is_stopped_ends_everything(script: Path) -> None:
    task = {"cuda": True, "stop": 1, "strategy": {"allow": ["ddp"], "devices": "2xcpu:1GiB"}}
    process = _start([sys.executable, *_task(script, task)])
    code, output = ended(process)
    assert code == 1, output
    assert re.search(
        r"rank 1 on cpu:1, process \d+, has been stopped by a signal \(SIGSTOP\) for 2 s, and this rank waited for it in", output
    )
    stopped = int(output.split("process ")[-1].split(",")[0])
    until = time.monotonic() + 30
    while psutil.pid_exists(stopped) and psutil.Process(stopped).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_process_of_slurms_that_is_stopped_ends_the_others(script: Path) -> None:
    """Slurm itself doesn't look."""
    names = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "JOB_ID": "4713", "JOB_NAME": "train", "NODEID": "0"}
    common = {f"SLURM_{name}": value for name, value in {**names, "NODELIST": "127.0.0.1"}.items()}
    task = {"devices": 2, "stop": 1, "strategy": {"allow": ["ddp"]}}
    first, second = (_fork(script, task, **common, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1"))
    try:
        code, output = ended(first)
    finally:
        os.kill(second.pid, signal.SIGKILL)
        second.communicate(10)
    assert code == 1, output
    assert f"rank 1 on cpu:1, process {second.pid}, has been stopped by a signal (SIGSTOP) for 2 s, and this rank waited" in output


@pytest.mark.parametrize("alone", [False, True], ids=["torchrun", "Slurm shows each process its own GPU"])
def test_the_links_of_this_node_count(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them eight GPUs behind an NVSwitch counted as ones that meet in the host's memory."""
    ranks = 8
    gpus = [FakeGpu(f"GPU-{rank}", bus_id=f"00000000:{rank:02X}:00.0", nvlinks=["00000000:FF:00.0"] * 18) for rank in range(ranks)]
    nvml = FakeNvml(*gpus)
    for a, b in itertools.combinations(gpus, 2):
        nvml.connect(a, b, 0, 1, 2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("AUTOPAR_DEVICES", raising=False)
    strategy: Any = SimpleNamespace(inventory=lambda: (probe(), None))
    store, found = dist.HashStore(), list[Inventory]()
    for rank in reversed(range(ranks)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank) if alone else ",".join(map(str, range(ranks))))
        environment: Any = SimpleNamespace(local_rank=lambda rank=rank: rank)
        peers = Peers(store=store, rank=rank, world_size=ranks, node=0, environment=environment)
        peers.introduce(strategy)
        if rank == 0:
            found.append(peers.inventory(strategy)[0])
    assert [device.id for device in found[0].devices] == [gpu.uuid for gpu in gpus]
    assert {link.kind for link in found[0].links} == {"nvlink"}
    assert len(found[0].links) == ranks * (ranks - 1) // 2


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
@pytest.mark.parametrize("count", [1, 2])
def test_processes_of_a_launcher_that_lightning_does_not_know_are_told(
    names: tuple[str, str], count: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """As under mpirun without mpi4py, or in a Kubeflow job: each process trained the whole run by itself, and nobody said so."""
    for name, value in zip(names, ("0", str(count)), strict=True):
        monkeypatch.setenv(name, value)
    strategy: Any = SimpleNamespace(cluster_environment=LightningEnvironment())
    assert external_launcher._find_peers(strategy) is None
    told = [str(each.message) for each in recwarn if "each process trains the whole run by itself" in str(each.message)]
    assert len(told) == count - 1
    assert all(f"{names[0]}=0 and {names[1]}=2" in each and "torchrun" in each for each in told)


@pytest.fixture
def slurms_first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A strategy in the first of two processes that Slurm's variables promise."""
    slurm = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "4712", "NODELIST": "localhost"}
    own = {f"SLURM_{name}": value for name, value in slurm.items()}
    for name, value in {**own, "MASTER_ADDR": "localhost", "MASTER_PORT": str(find_free_network_port())}.items():
        monkeypatch.setenv(name, value)
    return SimpleNamespace(cluster_environment=SLURMEnvironment())


def test_who_waits_for_processes_that_nobody_started_says_so(
    slurms_first: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a batch job whose script was started without srun: rank 0 waited half an hour in silence."""
    monkeypatch.setattr(external_launcher, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(external_launcher, "_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(dist.DistError):
        external_launcher._find_peers(slurms_first)
    assert "this is process 0 of 2" in caplog.text
    assert "start the script by srun" in caplog.text


def test_a_port_that_another_program_uses_is_named(slurms_first: Any) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])  # slurms_first puts it back
        with pytest.raises(ValueError, match=r"port \d+, which another program uses; set MASTER_PORT to a free one"):
            external_launcher._find_peers(slurms_first)
