"""What is measured of several ranks at once: how much they slow each other down, collectives, and what an engine adds to a step.

Each function runs in a forked child. Knows torch, ranks and engines; nothing of plans' choice, nor of where measurements are kept.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning_compat import attach_data, run_arguments
from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.calibrate import device_key, group_key
from lightning_autopar.planning.calibrate_curves import Curve
from lightning_autopar.planning.rates import Collective
from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.calibration_cases import cold_product
from lightning_autopar.strategies.calibration_clock import Clock
from lightning_autopar.strategies.engine import Assignment
from lightning_autopar.strategies.generation import run_folder, run_generation
from lightning_autopar.strategies.launcher import AutoLauncher, make_job
from lightning_autopar.strategies.staged.record import record
from lightning_autopar.strategies.staged.recording import Staging

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_SLOT_SECONDS = 0.02
_CPU_SIZES = ((1 << 10, 12), (1 << 16, 8), (1 << 20, 5), (1 << 23, 3))
_GPU_SIZES = ((1 << 10, 50), (1 << 16, 50), (1 << 20, 30), (1 << 24, 10), (1 << 28, 4))
#: Their names since torch 2.13, and before.
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Products between two collectives, some milliseconds; how often, and how often they run alone.
_AMID_PRODUCTS, _LEAST_AMID_RUNS, _AMID_RUNS = 2, 5, 20
_WIDTH, _LAYERS, _STEPS = 8, 4, 18
#: The first steps say nothing: no optimizer state, memory recorded.
_WARM_UP = 5
#: What a step takes beyond this multiple of its processor time is others' work on the machine: so small a step hardly waits.
_MOST_WAITING = 1.5


def measure_ranks(devices: Sequence[Device], share: float, timeout_seconds: float) -> list[Curve]:
    """Curves of ranks on these devices at once; this process, a forked child, becomes rank 0 and forks the others.

    Args:
        devices: one a rank; a single one measures what the others are compared with.
        share: how many threads have to share a core, 1 where each has its own.
        timeout_seconds: after which a collective that hangs fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/group"
        reader, writer = os.pipe()
        for rank in range(1, len(devices)):
            arguments = (writer, rank, devices, rendezvous, share, timeout_seconds)
            threading.Thread(target=_partner, args=arguments, daemon=True).start()
            os.read(reader, 1)  # it is forked: from here on threads may be started
        return _rank(0, devices, rendezvous, share, timeout_seconds)


def _partner(writer: int, rank: int, devices: Sequence[Device], rendezvous: str, share: float, timeout_seconds: float) -> None:
    def body() -> None:
        os.write(writer, b"1")
        _rank(rank, devices, rendezvous, share, timeout_seconds)

    with suppress(ChildFailed):  # rank 0 fails likewise, and tells of it
        run_forked(body, timeout_seconds=timeout_seconds)
    os.write(writer, b"1")


def _rank(rank: int, devices: Sequence[Device], rendezvous: str, share: float, timeout_seconds: float) -> list[Curve]:
    device = torch_device(devices[rank])
    if len(devices) > 1:
        backend = "gloo" if device.type == "cpu" else "nccl"
        limit = timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=len(devices), timeout=limit)
    curves = _crowd(devices, device, share) if device.type == "cpu" else []
    if len(devices) > 1:
        curves += _collectives(rank, devices, device)
        dist.barrier()
    return curves


def torch_device(device: Device) -> torch.device:
    """The device as torch names it in this process, with its threads set."""
    if device.kind == "cpu":
        torch.set_num_threads(device.threads or 1)
        return torch.device("cpu")
    found = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(found)
    return found


def _crowd(devices: Sequence[Device], device: torch.device, share: float) -> list[Curve]:
    """A product and additions while every rank does the same.

    Processor time is what is measured, so that others' work on the machine doesn't count; a core that ranks share takes turns.
    """
    clock, ranks, subject = Clock(device), len(devices), device_key(devices[0])

    def taken(run: Callable[[], Any]) -> float:
        run()
        if ranks > 1:
            dist.barrier()
        seconds = clock.busy(run, _SLOT_SECONDS * share) / (devices[0].threads or 1) * share
        if ranks > 1:
            mean = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(mean)
            seconds = float(mean) / ranks
        return seconds

    product = taken(cold_product(device, torch.float32, 256, 256, 256))
    curves = [Curve(subject=subject, thing="crowd/matmul", dtype="fp32", ranks=ranks, sizes=(1,), seconds=(product,))]
    points = {}
    for count in (1 << 14, 1 << 18, 1 << 21, 1 << 23):
        a, b, kept = torch.full((count,), 0.5), torch.full((count,), 0.5), torch.empty(count)
        points[12.0 * count] = taken(lambda a=a, b=b, kept=kept: torch.add(a, b, out=kept))  # type: ignore[misc]
    curves.append(Curve(subject=subject, thing="crowd/add", dtype="fp32", ranks=ranks, sizes=tuple(points), seconds=tuple(points.values())))
    return curves


def _collectives(rank: int, devices: Sequence[Device], device: torch.device) -> list[Curve]:
    """Every collective at several sizes; all ranks run as many."""
    ranks, subject = len(devices), group_key(devices)
    clock = _wait(device)
    amid = _Amid(device) if device.type == "cpu" else None
    points: dict[Collective, dict[float, float]] = {}
    for size, times in _CPU_SIZES if device.type == "cpu" else _GPU_SIZES:
        count = size // 4 // ranks * ranks
        whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
        runs: dict[Collective, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),  # type: ignore[misc]
            "all_gather": lambda whole=whole, part=part: _GATHER(whole, part),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: _SCATTER(part, whole),  # type: ignore[misc]
            "broadcast": lambda whole=whole: dist.broadcast(whole, 0),  # type: ignore[misc]
            "send": lambda whole=whole: _there_and_back(rank, whole),  # type: ignore[misc]
        }
        for collective, run in runs.items():
            run()
            taken = []
            for _ in range(times):
                clock()
                dist.barrier()
                begun = time.perf_counter()
                run()
                clock()
                taken.append(time.perf_counter() - begun)
            seconds = _usual(taken)
            if amid is not None:
                seconds = max(seconds, amid.seconds(run, times))
            points.setdefault(collective, {})[4.0 * count] = seconds / (2 if collective == "send" else 1)
    return [
        Curve(subject=subject, thing=collective, ranks=2 if collective == "send" else ranks, sizes=tuple(by), seconds=tuple(by.values()))
        for collective, by in points.items()
        if collective != "send" or ranks == 2 or device.type != "cpu"
    ]


class _Amid:
    """What a collective of CPU ranks takes amid computing: longer than on idle cores, as ranks aren't at the same place at the same time,
    and its threads need the cores that compute. Two ranks on two cores were seen to take 1 to 3 ms longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = cold_product(device, torch.float32, 384, 384, 384)
        self._alone = self._pace(lambda: None, _AMID_RUNS)

    def seconds(self, run: Callable[[], Any], times: int) -> float:
        """Of one run; all ranks ask alike."""
        return self._pace(run, max(times, _LEAST_AMID_RUNS)) - self._alone

    def _pace(self, run: Callable[[], Any], times: int) -> float:
        self._compute()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(times):
            for _ in range(_AMID_PRODUCTS):
                self._compute()
            run()
        dist.barrier()
        return (time.perf_counter() - begun) / times


def _there_and_back(rank: int, tensor: Tensor) -> None:
    """Between the first two ranks."""
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _wait(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


# -- engines ---------------------------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What a step took.

    Args:
        seconds: of the wall clock.
        calls: of functions and of builtins, all that Python makes.
    """

    seconds: float
    calls: int


class _Tiny(L.LightningModule):
    """So small that a step is nothing but what surrounds it. Rank 0 writes down how long one took, and how many calls the last one made.

    Args:
        out: the file for that.
    """

    def __init__(self, out: Path | None = None) -> None:
        super().__init__()
        self.out = out
        self.begun: list[tuple[float, float]] = []
        self.calls: Counter[str] = Counter()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.mean(self.layers(batch[0]).square())
        self.log("loss", loss)  # as nearly everybody's step does; of several ranks it takes them an exchange
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == _STEPS - 1:
            sys.setprofile(None)
        self.begun.append((time.perf_counter(), time.process_time()))
        if batch_idx == _STEPS - 2:
            calls = self.calls
            sys.setprofile(lambda frame, event, argument: calls.update((event,)))

    def on_train_end(self) -> None:
        if self.out is not None and self.global_rank == 0:
            steps = list(itertools.pairwise(self.begun))[_WARM_UP:-1]
            taken, busy = (_usual([after[clock] - before[clock] for before, after in steps]) for clock in (0, 1))
            self.out.write_text(json.dumps([min(taken, _MOST_WAITING * busy), _calls(self.calls)]), encoding="utf-8")


class _Launcher(AutoLauncher):
    """Runs a given plan in forked workers without planning, and forgets what they leave."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function``."""
        assert trainer is not None
        attach_data(trainer, run_arguments(function, args, kwargs))
        with run_folder(1 << 20) as folder:
            outcome = run_generation(make_job(self.assignment, trainer, function, args, kwargs, folder))
        if outcome.error is not None:
            raise outcome.error


def step_taken(plan: Plan, devices: Sequence[Device]) -> Taken:
    """What a step takes of a tiny module under a plan, in real workers; in a forked child, which keeps the trainer's traces to itself."""
    from lightning_autopar.strategies.auto import AutoParallelStrategy

    strategy = AutoParallelStrategy(allow=[plan.engine], calibrate="off")
    size = max(2 * len(devices), 2 * plan.micro_batches)
    staging = None
    if plan.engine == "pipeline":
        batch, blocks = [torch.zeros(2, _WIDTH)], [f"layers.{index}" for index in range(_LAYERS)]
        staging = Staging(hooks={"training_step": record(_Tiny(), None, "training_step", batch, blocks, rows=2)})
    launcher = _Launcher(Assignment(plan=plan, devices=tuple(devices), staging=staging))
    strategy._configure_launcher = lambda: setattr(strategy, "_launcher", launcher)  # type: ignore[method-assign]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu" if devices[0].kind == "cpu" else "cuda",
        devices=1,
        strategy=strategy,
        max_steps=_STEPS,
        limit_val_batches=0,
        **quiet,  # type: ignore[arg-type]
    )
    samples = TensorDataset(torch.zeros(_STEPS * size, _WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds"
        trainer.fit(_Tiny(out), DataLoader(samples, batch_size=size))
        return Taken(*json.loads(out.read_text(encoding="utf-8")))


def tiny_plan(engine: str, devices: Sequence[Device], micro_batches: int = 1) -> Plan:
    """A plan for the tiny module; under FSDP each of its layers is a unit, a pipeline has two stages."""
    ids = tuple(device.id for device in devices)
    if engine == "pipeline":
        schedule: Schedule = "gpipe" if micro_batches == 1 else "1f1b"
        return Plan(engine="pipeline", devices=ids, cuts=(f"layers.{_LAYERS // 2}",), schedule=schedule, micro_batches=micro_batches)
    if engine != "fsdp":
        return Plan(engine=engine, devices=ids)  # type: ignore[arg-type]
    return Plan(engine="fsdp", devices=ids, reshard_after_forward=True, shard=tuple(f"layers.{index}" for index in range(_LAYERS)))


#: Units of FSDP that the tiny module is made of, its root included.
TINY_UNITS = _LAYERS + 1
#: Of the parameters of one of them.
TINY_BYTES = 4 * (_WIDTH + 1) * _WIDTH


def plain_step(device: Device) -> Taken:
    """The tiny module's own operations in a step, in a bare loop."""
    where = torch_device(device)
    module, wait = _Tiny().to(where), _wait(where)
    optimizer = module.configure_optimizers()
    batch = (torch.zeros(2, _WIDTH, device=where),)
    calls: Counter[str] = Counter()

    def step() -> None:
        torch.mean(module.layers(batch[0]).square()).backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - begun)
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        step()
    finally:
        sys.setprofile(None)
    return Taken(_usual(taken), _calls(calls))


def _calls(events: Counter[str]) -> int:
    """How many of a profiler's events are calls."""
    return events["call"] + events["c_call"]


def _usual(taken: Sequence[float]) -> float:
    """Their lower quartile: others' work on the machine makes some longer, none shorter."""
    return sorted(taken)[len(taken) // 4]


def adam_curve(subject: str) -> Curve:
    """AdamW by torch's fused kernel on the threads that this process has."""
    clock, points = Clock(torch.device("cpu")), {}
    for count in (1 << 14, 1 << 21):
        parameter = torch.full((count,), 0.5, requires_grad=True)
        parameter.grad = torch.full((count,), 0.5)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        points[float(count)] = clock.seconds(optimizer.step, 5e-3)
    return Curve(subject=subject, thing="adam", sizes=tuple(points), seconds=tuple(points.values()))


# -- the host --------------------------------------------------------------------------------------------------------------------------


def measure_host(subject: str, threads: int, folder: Path) -> list[Curve]:
    """AdamW on all cores, and the disk that a folder is on."""
    torch.set_num_threads(max(1, threads))
    curves = [adam_curve(subject)]
    size = 8 << 20
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        data = bytes(size)
        begun = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begun
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        file.read()
        read = time.perf_counter() - begun
    for thing, seconds in (("disk_write", written), ("disk_read", read)):
        curves.append(Curve(subject=subject, thing=thing, sizes=(size,), seconds=(seconds,)))
    return curves
