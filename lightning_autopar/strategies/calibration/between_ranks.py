"""Measures several ranks at once: how much they slow each other down, and their collectives; and the host that they share.

Each function runs in a forked child. Knows torch and ranks; nothing of engines and plans, nor of where measurements are kept.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar.devices.inventory import Device
from lightning_autopar.strategies.calibration.device_curves import Clock, cold_product
from lightning_autopar.strategies.calibration.idle_devices import TENSOR_BYTES
from lightning_autopar.timing.measured_curves import Curve
from lightning_autopar.timing.measured_rates import device_key
from lightning_autopar.timing.rates import Collective

_SLOT_SECONDS = 0.02
_CPU_SIZES = ((1 << 10, 12), (1 << 16, 8), (1 << 20, 5), (1 << 23, 3))
#: On a GPU, runs are repeated as often as fits into a slot, up to a size of which one takes longer than is worth waiting for.
_GPU_SIZES, _GPU_RUNS, _LONGEST_SECONDS = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27), (3, 50), 0.05
#: How long a partner may take to end.
_GOODBYE_SECONDS = 2.0
#: The collectives' names since torch 2.13, and before.
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Products between two collectives take some milliseconds; how often both run, and how often the products run alone.
_AMID_PRODUCTS, _LEAST_AMID_RUNS, _AMID_RUNS = 2, 5, 20


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What several ranks measure.

    Args:
        devices: one a rank; a single one gives the figures that several are compared with.
        groups: how many of the first ranks run collectives together, and the subject under which their curves are kept.
        share: how many threads have to share a core, 1 where each has its own.
        timeout_seconds: after which a hanging collective fails.
        collectives: which to measure.
    """

    devices: Sequence[Device]
    groups: Mapping[int, str]
    share: float
    timeout_seconds: float
    collectives: Collection[Collective]


def measure_ranks(asked: Asked) -> list[Curve]:
    """Measure curves of ranks that run at once; this process, a forked child, becomes rank 0 and forks the others."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/group"
        reader, writer = os.pipe()
        partners = []
        for rank in range(1, len(asked.devices)):
            partners.append(threading.Thread(target=_partner, args=(writer, rank, asked, rendezvous), daemon=True))
            partners[-1].start()
            os.read(reader, 1)  # all ranks are forked: from here on threads may be started
        curves = _rank(0, asked, rendezvous)
        for partner in partners:
            partner.join(_GOODBYE_SECONDS)  # so that nothing is left on a device
        return curves


def _partner(writer: int, rank: int, asked: Asked, rendezvous: str) -> None:
    def body() -> None:
        os.write(writer, b"1")
        _rank(rank, asked, rendezvous)

    with suppress(ChildFailed):  # rank 0 fails likewise, and reports it
        run_forked(body, timeout_seconds=asked.timeout_seconds, gpus=True)
    os.write(writer, b"1")


def _rank(rank: int, asked: Asked, rendezvous: str) -> list[Curve]:
    devices, device = asked.devices, torch_device(asked.devices[rank])
    if len(devices) > 1:
        backend = "gloo" if device.type == "cpu" else "nccl"
        limit = timedelta(seconds=asked.timeout_seconds)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=len(devices), timeout=limit)
    curves = _crowd(devices, device, asked.share) if device.type == "cpu" else []
    if len(devices) > 1:
        for ranks, subject in sorted(asked.groups.items()):
            group = dist.group.WORLD if ranks == len(devices) else dist.new_group(range(ranks))
            if rank < ranks:
                curves += _collectives(rank, ranks, subject, device, group, asked.collectives)
        dist.barrier()
    return curves


def torch_device(device: Device) -> torch.device:
    """The device as torch names it in this process, with its threads set."""
    if device.kind == "cpu":
        torch.set_num_threads(device.threads or 1)
        return torch.device("cpu")
    found = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(found)
    torch.cuda.set_per_process_memory_fraction(min(1.0, TENSOR_BYTES / torch.cuda.mem_get_info(found)[1]), found)
    return found


def _crowd(devices: Sequence[Device], device: torch.device, share: float) -> list[Curve]:
    """A product and additions while every rank does the same.

    Processor time is measured, so that others' work on the machine doesn't count; ranks that share a core take turns on it.
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


def _collectives(
    rank: int, ranks: int, subject: str, device: torch.device, group: dist.ProcessGroup | None, wanted: Collection[Collective]
) -> list[Curve]:
    """Each of these collectives at several sizes; all ranks run as many."""
    clock = waiter(device)
    amid = _Amid(device) if device.type == "cpu" else None
    points: dict[Collective, dict[float, float]] = {}
    cut: set[Collective] = set()
    for size, most_times in _CPU_SIZES if device.type == "cpu" else [(size, _GPU_RUNS[1]) for size in _GPU_SIZES]:
        count = size // 4 // ranks * ranks
        whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
        runs: dict[Collective, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole, group=group),  # type: ignore[misc]
            "all_gather": lambda whole=whole, part=part: _GATHER(whole, part, group=group),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: _SCATTER(part, whole, group=group),  # type: ignore[misc]
        }
        if ranks == 2:
            runs["send"] = lambda whole=whole: _there_and_back(rank, whole, group)  # type: ignore[misc]
        for collective, run in runs.items():
            if collective in cut or collective not in wanted:
                continue
            run()
            times = most_times
            if device.type == "cuda":
                once = _slowest(run, device, group)
                times = min(most_times, max(_GPU_RUNS[0], int(_SLOT_SECONDS / once)))
                if once > _LONGEST_SECONDS:
                    cut.add(collective)
            taken = []
            for _ in range(times):
                clock()
                dist.barrier(group=group)
                begun = time.perf_counter()
                run()
                clock()
                taken.append(time.perf_counter() - begun)
            seconds = usual(taken)
            if amid is not None:
                seconds = max(seconds, amid.seconds(run, times))
            points.setdefault(collective, {})[4.0 * count] = seconds / (2 if collective == "send" else 1)
    return [
        Curve(subject=subject, thing=collective, ranks=ranks, sizes=tuple(by), seconds=tuple(by.values()))
        for collective, by in points.items()
    ]


def _slowest(run: Callable[[], Any], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Seconds of one run on the slowest rank; a collective that returns them on each rank."""
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    taken = torch.tensor([time.perf_counter() - begun], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return float(taken)


class _Amid:
    """Times a collective of CPU ranks between computations: it takes longer than on idle cores, as ranks arrive at different times, and its
    threads need the cores that compute. Two ranks on two cores were seen to take 1 to 3 ms longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = cold_product(device, torch.float32, 384, 384, 384)
        self._alone = self._pace(lambda: None, _AMID_RUNS)

    def seconds(self, run: Callable[[], Any], times: int) -> float:
        """Seconds of one run; all ranks call it alike."""
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


def _there_and_back(rank: int, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if rank == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def waiter(device: torch.device) -> Callable[[], None]:
    """A function that waits until a device has done all its queued work."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def usual(taken: Sequence[float]) -> float:
    """The lower quartile of times: others' work on the machine makes some longer, none shorter."""
    return sorted(taken)[len(taken) // 4]


def adam_curve(subject: str) -> Curve:
    """The curve of AdamW with torch's fused kernel, on the threads of this process."""
    clock, points = Clock(torch.device("cpu")), {}
    for count in (1 << 14, 1 << 21):
        parameter = torch.full((count,), 0.5, requires_grad=True)
        parameter.grad = torch.full((count,), 0.5)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        points[float(count)] = clock.seconds(optimizer.step, 5e-3)
    return Curve(subject=subject, thing="adam", sizes=tuple(points), seconds=tuple(points.values()))


# -- the host --------------------------------------------------------------------------------------------------------------------------


def measure_host(subject: str, threads: int) -> list[Curve]:
    """Measure AdamW on all cores."""
    torch.set_num_threads(max(1, threads))
    return [adam_curve(subject)]
