"""Calibration of this machine: which measurements are missing, and how each is made in a process of its own under a time limit.

The parent touches no GPU and runs no operation; what a measurement does to its process stays there. What fails is left to the data sheet.
Knows the inventory and the cache; nothing of modules and of plans' choice.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar.memory.cache_files import VARIABLE, cache_folder
from lightning_autopar.memory.inventory import Device, Inventory, Link
from lightning_autopar.planning.calibrate import HOST, MOST_RANKS, Calibrated, device_key, group_key
from lightning_autopar.planning.calibrate_cache import keep_calibration, load_calibration
from lightning_autopar.planning.calibrate_curves import Calibration, Curve
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.rates import Collective
from lightning_autopar.strategies.backward import backward_survives_fork

log = logging.getLogger(__name__)

#: What all operations of one device may take, and a limit for anything that hangs.
_CPU_SECONDS, _GPU_SECONDS = 2.2, 4.0
_LIMIT_SECONDS = 30.0
#: Micro-batches of a step whose stages do next to nothing else than handing them on.
_MANY = 8
#: Of everything: a machine so busy that this isn't enough is calibrated another time.
_MOST_SECONDS = {"cpu": 20.0, "cuda": 60.0}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing to measure.

    Args:
        title: for the progress bar.
        run: in a forked child; gets what is known by then.
    """

    title: str
    run: Callable[[Calibration], list[Curve]]


def calibrated(inventory: Inventory) -> Calibrated | None:
    """Rates as they are known of this machine; None where nothing was measured."""
    known = load_calibration(inventory)
    return Calibrated(known, DataSheet()) if known else None


def is_calibrated(inventory: Inventory) -> bool:
    """Whether there is nothing left to measure."""
    return not _measurements(inventory, load_calibration(inventory))


def calibrate(inventory: Inventory, *, again: bool = False, progress: bool = True) -> Calibrated:
    """Measure what isn't known yet of the devices of this host, keep it, and say so in one line.

    Args:
        inventory: whose devices; those that can only be planned for are left out.
        again: whether to measure what is known, too.
        progress: whether to show a bar while it runs.
    """
    known = load_calibration(inventory)
    wanted = _measurements(inventory, Calibration() if again else known)
    if not wanted:
        return Calibrated(known, DataSheet())
    begun = time.monotonic()
    if torch.cuda.is_initialized() or not backward_survives_fork():
        curves, failures = _in_another_process(inventory, again=again)
    else:
        curves, failures = _measure(wanted, known, _most_seconds(inventory), progress=progress)
    took = time.monotonic() - begun
    for failure in failures:
        rank_zero_warn(f"autopar: {failure}; the data sheet is taken for that")
    if not curves:
        return Calibrated(known, DataSheet())
    found = known.with_curves(curves, day=datetime.date.today().isoformat(), took_seconds=took)
    keep_calibration(inventory, found)
    where = "kept for later runs" if cache_folder("rates") is not None else f"not kept, as {VARIABLE} is off"
    rank_zero_info(f"autopar: measured how fast {_named(inventory)} in {took:.1f} s; {where}")
    return Calibrated(found, DataSheet())


def _named(inventory: Inventory) -> str:
    count = len([device for device in inventory.devices if device.kind != "catalogue"])
    return "this device is" if count == 1 else f"these {count} devices are, alone and together,"


def _most_seconds(inventory: Inventory) -> float:
    return max(_MOST_SECONDS["cuda" if device.kind == "cuda" else "cpu"] for device in inventory.devices)


# -- what there is to measure ----------------------------------------------------------------------------------------------------------


def _measurements(inventory: Inventory, known: Calibration) -> list[Measurement]:
    """What isn't known, the most important first."""
    devices = [device for device in inventory.devices if device.kind != "catalogue" and device.node == 0 and device.index is not None]
    found: list[Measurement] = []
    for key, device in {device_key(device): device for device in reversed(devices)}.items():
        if not known.ranks_of(key, "matmul/64") or (device.kind == "cpu" and not known.ranks_of(key, "adam")):
            found.append(Measurement(title=f"operations on {device.name}", run=partial(_device, device)))
    by_kind = {kind: [device for device in devices if device.kind == kind] for kind in ("cpu", "cuda")}
    for kind, group in by_kind.items():
        for ranks in rank_counts(len(group)):
            chosen = group[:ranks]
            subject, thing = (device_key(chosen[0]), "crowd/matmul") if kind == "cpu" else (group_key(chosen), "all_reduce")
            if ranks not in known.ranks_of(subject, thing) and (ranks > 1 or kind == "cpu"):
                share = _sharing(chosen, inventory) if kind == "cpu" else 1.0
                found.append(Measurement(title=f"{ranks} ranks at once", run=partial(_ranks, chosen, share)))
        if group and not known.ranks_of(device_key(group[0]), "call"):
            found.append(Measurement(title="the trainer's loop", run=partial(_engines, group, inventory)))
        if kind == "cpu" and len(group) > 1 and not known.ranks_of(device_key(group[0]), "action"):
            found.append(Measurement(title="a pipeline's stages", run=partial(_stages, group, inventory)))
    if devices and not known.ranks_of(HOST, "adam"):
        found.append(Measurement(title="the host", run=partial(_host, inventory)))
    return found


def rank_counts(devices: int) -> tuple[int, ...]:
    """The numbers of ranks that are measured together: powers of two, and all."""
    most = min(devices, MOST_RANKS)
    return tuple(sorted({count for count in (1, 2, 4, most) if 1 <= count <= most}))


def _sharing(devices: Sequence[Device], inventory: Inventory) -> float:
    """How many threads of these devices' ranks share a core."""
    return max(1.0, sum(device.threads or 1 for device in devices) / inventory.host_threads) if inventory.host_threads else 1.0


# -- measuring, in forked children -----------------------------------------------------------------------------------------------------


def _measure(wanted: Sequence[Measurement], known: Calibration, most_seconds: float, *, progress: bool) -> tuple[list[Curve], list[str]]:
    """The curves, and a sentence for each measurement that failed."""
    until = time.monotonic() + most_seconds
    curves: list[Curve] = []
    failures: list[str] = []
    with _bar(len(wanted), progress) as step:
        for each in wanted:
            step(each.title)
            left = until - time.monotonic()
            if left <= 0:
                failures.append(f"{each.title} could not be measured within {most_seconds:g} s")
                continue
            try:
                so_far = known.with_curves(curves, day="", took_seconds=0.0)
                curves += run_forked(_quietly, each.run, so_far, timeout_seconds=min(left, _LIMIT_SECONDS))
            except ChildFailed as error:
                log.debug("%s can't be measured", each.title, exc_info=True)
                failures.append(f"{each.title} could not be measured ({error.reason})")
    return curves, failures


def _quietly(run: Callable[[Calibration], list[Curve]], known: Calibration) -> list[Curve]:
    """In the child: nothing that is said there is for the user, and nothing that was set there is meant for this."""
    be_silent()
    os.environ[VARIABLE] = "off"
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    return run(known)


def be_silent() -> None:
    """From now on nothing of this process, a child of ``run_forked``, which prints nothing anyway, reaches the user."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process lives
    os.dup2(nowhere.fileno(), 2)
    sys.stderr = nowhere


def _device(device: Device, known: Calibration) -> list[Curve]:
    from lightning_autopar.strategies.calibration_cases import measure_device
    from lightning_autopar.strategies.calibration_ranks import adam_curve, torch_device

    where, key = torch_device(device), device_key(device)
    curves = measure_device(where, key, seconds=_CPU_SECONDS if device.kind == "cpu" else _GPU_SECONDS)
    return [*curves, adam_curve(key)] if device.kind == "cpu" else curves


def _ranks(devices: Sequence[Device], share: float, known: Calibration) -> list[Curve]:
    from lightning_autopar.strategies.calibration_ranks import measure_ranks

    return measure_ranks(devices, share, _LIMIT_SECONDS)


def _host(inventory: Inventory, known: Calibration) -> list[Curve]:
    from lightning_autopar.strategies.calibration_ranks import measure_host

    return measure_host(HOST, inventory.host_threads, cache_folder("rates") or Path(tempfile.gettempdir()))


def _engines(devices: Sequence[Device], inventory: Inventory, known: Calibration) -> list[Curve]:
    """What the trainer's loop takes, and what two ranks of an engine add."""
    from lightning_autopar.strategies.calibration_steps import TINY_BYTES, TINY_UNITS, plain_step, step_taken, tiny_plan

    rates = Calibrated(known, DataSheet()).among(devices[:2], inventory)
    plain = run_forked(plain_step, devices[0], timeout_seconds=_LIMIT_SECONDS)

    def around(engine: str, ranks: int) -> tuple[float, int]:
        chosen = devices[:ranks]
        taken = step_taken(tiny_plan(engine, chosen), chosen)
        return max(taken.seconds - plain.seconds, plain.seconds / 10), taken.calls - plain.calls

    def collective(name: Collective) -> float:
        return rates.collective_seconds(name, TINY_BYTES, devices[:2], inventory)

    single, calls = around("single", 1)
    taken = {"loop/single": single, "call": single / calls}
    if len(devices) > 1:
        (replicas, _), (shards, _) = around("ddp", 2), around("fsdp", 2)
        # What is predicted apart is taken off: a bucket of gradients; of each unit two gathers and a scatter.
        taken["loop/ddp"] = taken["loop/fsdp"] = max(single, replicas - collective("all_reduce"))
        waiting = 2 * collective("all_gather") + collective("reduce_scatter")
        taken["unit"] = max(single / 10, (shards - taken["loop/fsdp"]) / TINY_UNITS - waiting)
    return _curves(devices[0], taken)


def _stages(devices: Sequence[Device], inventory: Inventory, known: Calibration) -> list[Curve]:
    """What two ranks of a pipeline add, to a step and to each micro-batch's forward and backward."""
    from lightning_autopar.strategies.calibration_steps import TINY_BYTES, plain_step, step_taken, tiny_plan

    chosen = devices[:2]
    rates = Calibrated(known, DataSheet()).among(chosen, inventory)
    plain = run_forked(plain_step, devices[0], timeout_seconds=_LIMIT_SECONDS).seconds
    sending = rates.collective_seconds("send", TINY_BYTES, chosen, inventory)

    def besides(micro_batches: int) -> float:
        """Without the module's own operations: each rank has half of them, and the longest path is a micro-batch longer than there are."""
        return step_taken(tiny_plan("pipeline", chosen, micro_batches), chosen).seconds - (micro_batches + 1) / 2 * plain

    few, many = besides(1), besides(_MANY)
    action = max(plain / 10, (many - few) / (2 * (_MANY - 1)) - sending / 2)
    taken = {"action": action, "loop/pipeline": max(plain / 10, few - 4 * action - 2 * sending)}
    return _curves(devices[0], taken)


def _curves(device: Device, taken: Mapping[str, float]) -> list[Curve]:
    """What doesn't depend on a size."""
    return [Curve(subject=device_key(device), thing=thing, sizes=(1,), seconds=(seconds,)) for thing, seconds in taken.items()]


@contextmanager
def _bar(steps: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Progress on a terminal; nowhere else."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("autopar measures", total=steps)

        def step(title: str) -> None:
            progress.update(task, description=f"autopar measures {title}", completed=progress.tasks[0].completed + 1)

        yield step


# -- where this process has used a GPU: a fresh one ------------------------------------------------------------------------------------


def _in_another_process(inventory: Inventory, *, again: bool) -> tuple[list[Curve], list[str]]:
    """The same in a new Python, which may fork as it likes."""
    most_seconds = _most_seconds(inventory) + _LIMIT_SECONDS
    words = json.dumps({"inventory": _as_words(inventory), "again": again})
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "calibration.json"
        command = [sys.executable, "-c", f"from {__name__} import answer; answer()", str(answer)]
        try:
            subprocess.run(command, input=words, text=True, timeout=most_seconds, check=True, stdout=subprocess.DEVNULL)
            data = json.loads(answer.read_text(encoding="utf-8"))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            return [], [f"this machine could not be measured ({error})"]
    return list(Calibration.from_dict(data["calibration"]).all()), data["failures"]


def answer() -> None:
    """What the new Python runs: an inventory from standard input, the measurements into the file named by the first argument."""
    asked = json.loads(sys.stdin.read())
    inventory = _from_words(asked["inventory"])
    known = load_calibration(inventory)
    wanted = _measurements(inventory, Calibration() if asked["again"] else known)
    curves, failures = _measure(wanted, known, _most_seconds(inventory), progress=True)
    found = Calibration().with_curves(curves, day="", took_seconds=0.0)
    Path(sys.argv[1]).write_text(json.dumps({"calibration": found.to_dict(), "failures": failures}), encoding="utf-8")


def _as_words(inventory: Inventory) -> dict[str, Any]:
    return inventory.to_dict()


def _from_words(words: dict[str, Any]) -> Inventory:
    """The inventory without what is no matter here: who is on its devices."""
    return Inventory(
        devices=tuple(replace(Device(**{**device, "processes": ()})) for device in words["devices"]),
        links=tuple(Link(**link) for link in words["links"]),
        host_total_bytes=words["host"]["total_bytes"],
        host_free_bytes=words["host"]["free_bytes"],
        source=words["source"],
        host_threads=words["host"]["threads"],
    )
