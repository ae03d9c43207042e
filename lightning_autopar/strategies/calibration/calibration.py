"""Calibrates this machine: finds which measurements are missing, and makes each in a process of its own under a time limit.

The parent touches no GPU and runs no operation. A measurement that fails is replaced by the data sheet, and tried again after a week. Of
each model of GPU one is measured alone, and all idle ones together; the results count for every GPU of that model and every group that is
linked alike. Knows the inventory and the cache; nothing of modules, nor of how plans are chosen.
"""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lightning_autopar import engines
from lightning_autopar._fork import ChildFailed, run_forked, unforkable
from lightning_autopar._lightning import rank_zero_info, rank_zero_warn
from lightning_autopar._root import for_child
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.cache_files import VARIABLE, cache_folder
from lightning_autopar.planning.device_sets import one_of_each_gpu
from lightning_autopar.plans import Engine, all_engines
from lightning_autopar.strategies.calibration.idle_devices import came_meanwhile, leased, may_be_measured
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.measured_curves import Calibration, Curve, keep_calibration, load_calibration
from lightning_autopar.timing.measured_rates import HOST, RARE, MeasuredRates, device_key, group_key, is_of
from lightning_autopar.timing.rates import COLLECTIVES, Collective

log = logging.getLogger(__name__)

#: How long measuring all operations of one device may take, and a limit for anything that hangs. Several models of GPU divide the time.
_CPU_SECONDS, _GPU_SECONDS = 2.2, 1.5
_LIMIT_SECONDS = 30.0
#: How long starting a new Python may take besides, most of it to import torch.
_START_SECONDS = 30.0
#: Micro-batches of a step whose stages do hardly anything but pass them on.
_MANY = 8
#: How long everything together may take. Others may wait for the GPUs.
_MOST_SECONDS = {"cpu": 20.0, "cuda": 10.0}
#: The share of that time that one measurement may take, so that one that hangs leaves time for the others.
_MOST_SHARE = 0.6
#: The most ranks on the host's cores that are measured together.
_MOST_CPU_RANKS = 4
#: How long a failed measurement isn't tried again.
_FAILED_DAYS = 7


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing to measure.

    Args:
        title: for the progress bar.
        run: the function to call in a forked child; it gets the curves known so far.
        names: under which a failure is recorded.
    """

    title: str
    run: Callable[[Calibration], list[Curve]]
    names: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()


def calibrated(inventory: Inventory) -> MeasuredRates | None:
    """The measured rates of this machine; None where nothing was measured."""
    known = load_calibration(inventory)
    return MeasuredRates(known, DataSheet()) if known else None


def is_calibrated(inventory: Inventory, wanted: Collection[str] | None = None) -> bool:
    """Whether nothing that is wanted is left to measure, or may be measured now."""
    return not measurements(inventory, load_calibration(inventory), wanted)


def calibrate(inventory: Inventory, *, wanted: Collection[str] | None = None, again: bool = False, progress: bool = True) -> MeasuredRates:
    """Measure what isn't known yet about this host's devices, store it, and log one line about it.

    Args:
        inventory: the devices; those that can only be planned for are left out.
        again: whether to measure what is known, too.
    """
    known = load_calibration(inventory)
    before = Calibration() if again else known
    if not measurements(inventory, before, wanted):
        return MeasuredRates(known, DataSheet())
    begun = time.monotonic()
    tried = {name for each in measurements(inventory, before, wanted) for name in each.names}
    where = "is kept for later runs" if cache_folder("rates") is not None else f"isn't kept, as {VARIABLE} is off"
    rank_zero_info(f"autopar: measuring how fast {_named(inventory)}. This takes some seconds, and the result {where}")

    def measured(there: Inventory) -> list[Device]:
        return [device for each in measurements(there, before, wanted) for device in each.devices]

    with leased(inventory, measured) as there:
        if unforkable() is not None:
            curves, failures = _in_another_process(there, wanted, again=again)
        else:
            curves, failures = _measure(measurements(there, before, wanted), known, _most_seconds(there), progress=progress)
    took, today = time.monotonic() - begun, datetime.date.today().isoformat()
    for failure in failures:
        rank_zero_warn(f"autopar: {failure.words}; the data sheet is used instead")
    found = known.with_failures({name: today for failure in failures for name in failure.names})
    if curves:
        found = found.with_curves(curves, day=today, took_seconds=took)
    # What a measurement of CPUs didn't give, for want of time, isn't tried at every start.
    without = {name: today for each in measurements(inventory, found, wanted) if not each.devices for name in each.names if name in tried}
    found = found.with_failures(without)
    if curves or failures:
        keep_calibration(inventory, found)
    return MeasuredRates(found, DataSheet())


def _named(inventory: Inventory) -> str:
    count = len([device for device in inventory.devices if device.kind != "catalogue"])
    return "this device is" if count == 1 else f"these {count} devices are, alone and together"


def _most_seconds(inventory: Inventory) -> float:
    return min((_MOST_SECONDS["cuda" if device.kind == "cuda" else "cpu"] for device in inventory.devices), default=0.0)


# -- what there is to measure ----------------------------------------------------------------------------------------------------------


def things_of(names: Iterable[Engine], footprint: Footprint) -> frozenset[str]:
    """What predicting the step under these engines' plans needs, see :func:`measurements`.

    Args:
        footprint: of the step. Where its operations aren't known, all are needed.
    """
    layers = (*footprint.blocks, *footprint.outer)
    works = [work for layer in layers for work in (*layer.work, *layer.backward_work)]
    kinds = {kind for kind in RARE if not works or any(is_of(kind, work) for work in works)}
    return frozenset(kinds.union(*(engines.named(name).measured for name in names)))


def measurements(inventory: Inventory, known: Calibration, wanted: Collection[str] | None = None) -> list[Measurement]:
    """The measurements that are missing and may be made now, the most important first; without those that failed lately.

    Args:
        known: what needn't be measured.
        wanted: what is needed besides what every plan needs: kinds of operations (``device_curves.RARE``), and what engines name in
            ``Engine.measured``; by default everything. A GPU is measured whole: most of that time goes to starting CUDA.
    """
    if wanted is None:
        wanted = {*RARE, *(thing for name in all_engines() for thing in engines.named(name).measured)}
    devices = [device for device in inventory.devices if may_be_measured(device)]
    by_kind: dict[str, list[Device]] = {"cpu": [], "cuda": []}
    for device in devices:
        by_kind[device.kind].append(device)
    found = [*of_cpus(by_kind["cpu"], inventory, known, wanted), *_of_gpus(by_kind["cuda"], inventory, known)]
    if devices and not known.ranks_of(HOST, "adam"):
        found.append(Measurement(title="the host", names=("host",), run=partial(of_host, inventory)))
    return [each for each in found if not each.names or not all(_failed_lately(known.failures.get(name)) for name in each.names)]


def of_cpus(devices: Sequence[Device], inventory: Inventory, known: Calibration, wanted: Collection[str]) -> Iterator[Measurement]:
    """Measurements of CPU devices: the first of each kind alone, and some of them at once."""

    def missing(subject: str, things: Iterable[str], ranks: int | None = None) -> list[str]:
        found = {thing: known.ranks_of(subject, thing) for thing in things}
        return [thing for thing, counts in found.items() if not counts or (ranks is not None and ranks not in counts)]

    for key, device in {device_key(device): device for device in reversed(devices)}.items():
        common = bool(missing(key, ("matmul/64", "adam")))
        rare = [kind for kind, marks in RARE.items() if kind in wanted and missing(key, marks)]
        if common or rare:
            name = f"{key} operations" if common else f"{key} {', '.join(rare)}"
            title = f"{'operations' if common else ', '.join(rare)} on {device.name}"
            yield Measurement(title=title, names=(name,), run=partial(_device, device, _CPU_SECONDS, common, rare))
    if not devices:
        return
    key = device_key(devices[0])
    for ranks in rank_counts(min(len(devices), _MOST_CPU_RANKS)):
        chosen = devices[:ranks]
        group = group_key(chosen, inventory)
        collectives = [name for name in COLLECTIVES if name in wanted and (ranks == 2 or (ranks > 1 and name != "send"))]
        more = missing(group, collectives, ranks)
        if more or missing(key, ("crowd/matmul",), ranks):
            run = partial(_ranks, chosen, {ranks: group}, _sharing(chosen, inventory), collectives)
            yield Measurement(title=f"{ranks} ranks at once", names=(f"{key} of {ranks}: {', '.join(more)}",), run=run)
    loops = [thing for thing in ("loop/ddp", "loop/fsdp", "unit") if thing in wanted and len(devices) > 1]
    if more := missing(key, ("call", *loops)):
        names = (f"{key} loop: {', '.join(more)}",)
        yield Measurement(title="the trainer's loop", names=names, run=partial(_engines, devices, inventory, loops))
    if len(devices) > 1 and "action" in wanted and missing(key, ("action",)):
        yield Measurement(title="a pipeline's stages", names=(f"{key} stages",), run=partial(_stages, devices, inventory))


def _of_gpus(devices: Sequence[Device], inventory: Inventory, known: Calibration) -> Iterator[Measurement]:
    """Measurements of GPUs: one of each model alone, and all of that model together, in groups of every measured size."""
    models: dict[str, list[Device]] = {}
    for device in devices:
        models.setdefault(device_key(device), []).append(device)
    for key, (first, *_) in models.items():
        if not known.ranks_of(key, "matmul/64"):
            run = partial(_device, first, _GPU_SECONDS / len(models), True, tuple(RARE))
            yield Measurement(title=f"operations on {first.name}", names=(f"{key} operations",), run=run, devices=(first,))
    for alike in models.values():
        together = tuple(one_of_each_gpu(alike))
        groups = {ranks: group_key(together[:ranks], inventory) for ranks in rank_counts(len(together)) if ranks > 1}
        missing = {ranks: key for ranks, key in groups.items() if ranks not in known.ranks_of(key, "all_reduce")}
        if missing:
            names = tuple(f"{key} of {ranks}" for ranks, key in missing.items())
            ranks, run = max(missing), partial(_ranks, together[: max(missing)], missing, 1.0, COLLECTIVES)
            yield Measurement(title=f"{ranks} ranks at once", names=names, run=run, devices=together[:ranks])
    if models and not known.ranks_of(HOST, "call"):
        yield Measurement(title="the trainer's loop", names=("host loop",), run=_host_loop)


def _failed_lately(day: str | None) -> bool:
    return day is not None and datetime.date.today() - datetime.date.fromisoformat(day) < datetime.timedelta(days=_FAILED_DAYS)


def rank_counts(most: int) -> tuple[int, ...]:
    """The numbers of ranks that are measured together: powers of two, and all. Others are predicted by the nearest of these."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length())), most} - {0}))


def _sharing(devices: Sequence[Device], inventory: Inventory) -> float:
    """How many threads of these devices' ranks share a core."""
    return max(1.0, sum(device.threads or 1 for device in devices) / inventory.host_threads) if inventory.host_threads else 1.0


# -- measuring, in forked children -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A measurement that couldn't be made.

    Args:
        words: a sentence, without its full stop.
    """

    words: str
    names: tuple[str, ...] = ()


def _measure(
    wanted: Sequence[Measurement], known: Calibration, most_seconds: float, *, progress: bool
) -> tuple[list[Curve], list[Failure]]:
    """The curves, and the measurements that failed."""
    until = time.monotonic() + most_seconds
    curves: list[Curve] = []
    failures: list[Failure] = []
    before = {device.id: device for each in wanted for device in each.devices}
    with _bar(len(wanted), progress) as step:
        for each in wanted:
            step(each.title)
            left = until - time.monotonic()
            if left <= 0:
                failures.append(Failure(words=f"{each.title} could not be measured within {most_seconds:g} s", names=each.names))
                continue
            try:
                so_far = known.with_curves(curves, day="", took_seconds=0.0)
                limit_seconds = min(left, _LIMIT_SECONDS, _MOST_SHARE * most_seconds)
                found = run_forked(_quietly, each.run, so_far, timeout_seconds=limit_seconds, gpus=True)
            except ChildFailed as error:
                log.debug("%s can't be measured", each.title, exc_info=True)
                failures.append(Failure(words=f"{each.title} could not be measured ({error.reason})", names=each.names))
                continue
            if came_meanwhile(each.devices, before):
                rank_zero_info(f"autopar: {each.title} will be measured later, as another process began to use the GPU")
            else:
                curves += found
    return curves, failures


def _quietly(run: Callable[[Calibration], list[Curve]], known: Calibration) -> list[Curve]:
    """In the child: suppress messages to the user, and ignore settings that were made for a run."""
    be_silent()
    os.environ[VARIABLE] = "off"
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    return run(known)


def be_silent() -> None:
    """From now on no logs or warnings of this process, a child of ``run_forked``, reach the user; its output is discarded already."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process lives
    os.dup2(nowhere.fileno(), 2)
    sys.stderr = nowhere


def _device(device: Device, seconds: float, common: bool, rare: Collection[str], known: Calibration) -> list[Curve]:
    from lightning_autopar.strategies.calibration.between_ranks import adam_curve, torch_device
    from lightning_autopar.strategies.calibration.device_curves import measure_device

    where, key = torch_device(device), device_key(device)
    curves = measure_device(where, key, seconds=seconds, common=common, rare=rare)
    return [*curves, adam_curve(key)] if common and device.kind == "cpu" else curves


def _ranks(
    devices: Sequence[Device], groups: Mapping[int, str], share: float, collectives: Collection[Collective], known: Calibration
) -> list[Curve]:
    from lightning_autopar.strategies.calibration.between_ranks import Asked, measure_ranks

    return measure_ranks(Asked(devices=devices, groups=groups, share=share, timeout_seconds=_LIMIT_SECONDS, collectives=collectives))


def of_host(inventory: Inventory, known: Calibration) -> list[Curve]:
    """The speeds of copies between devices and the host, and of updates there."""
    from lightning_autopar.strategies.calibration.between_ranks import measure_host

    return measure_host(HOST, inventory.host_threads)


def _host_loop(known: Calibration) -> list[Curve]:
    """The trainer's loop's seconds on the host where GPUs compute: measured on the CPU, as the loop doesn't wait for GPUs."""
    host = Device(id="cpu:0", kind="cpu", name="CPU", total_bytes=0, free_bytes=0, index=0, threads=1)
    found = _engines([host], Inventory(devices=(host,), host_total_bytes=0, host_free_bytes=0, source="spec"), (), known)
    return [replace(curve, subject=HOST) for curve in found]


def _engines(devices: Sequence[Device], inventory: Inventory, loops: Collection[str], known: Calibration) -> list[Curve]:
    """The seconds of the trainer's loop, and what two ranks of an engine add to these loops."""
    from lightning_autopar.strategies.calibration.engine_overhead import TINY_BLOCKS, TINY_BYTES, TINY_UNITS, plain_step, step_taken

    rates = MeasuredRates(known, DataSheet()).among(devices[:2], inventory)
    plain = run_forked(plain_step, devices[0], timeout_seconds=_LIMIT_SECONDS, gpus=True)

    def around(engine: str, ranks: int) -> tuple[float, int]:
        chosen = devices[:ranks]
        taken = step_taken(engines.named(engine).sample(chosen, TINY_BLOCKS, 1), chosen)
        return max(taken.seconds - plain.seconds, plain.seconds / 10), taken.calls - plain.calls

    def collective(name: Collective) -> float:
        return rates.collective_seconds(name, TINY_BYTES, devices[:2], inventory)

    single, calls = around("single", 1)
    taken = {"loop/single": single, "call": single / calls}
    if loops:  # subtract what is predicted separately: a bucket of gradients; for each unit two gathers and a scatter
        replicas, _ = around("ddp", 2)
        taken["loop/ddp"] = taken["loop/fsdp"] = max(single, replicas - collective("all_reduce"))
    if "unit" in loops:
        shards, _ = around("fsdp", 2)
        waiting = 2 * collective("all_gather") + collective("reduce_scatter")
        taken["unit"] = max(single / 10, (shards - taken["loop/fsdp"]) / TINY_UNITS - waiting)
    return _curves(devices[0], taken)


def _stages(devices: Sequence[Device], inventory: Inventory, known: Calibration) -> list[Curve]:
    """The seconds that two ranks of a pipeline add, to a step and to each micro-batch's forward and backward."""
    from lightning_autopar.strategies.calibration.engine_overhead import TINY_BLOCKS, TINY_BYTES, plain_step, step_taken

    chosen = devices[:2]
    rates = MeasuredRates(known, DataSheet()).among(chosen, inventory)
    plain = run_forked(plain_step, devices[0], timeout_seconds=_LIMIT_SECONDS, gpus=True).seconds
    sending = rates.collective_seconds("send", TINY_BYTES, chosen, inventory)

    def besides(micro_batches: int) -> float:
        """The seconds without the module's own operations: each rank has half of them, and the longest path has one micro-batch more."""
        taken = step_taken(engines.named("pipeline").sample(chosen, TINY_BLOCKS, micro_batches), chosen)
        return taken.seconds - (micro_batches + 1) / 2 * plain

    few, many = besides(1), besides(_MANY)
    action = max(plain / 10, (many - few) / (2 * (_MANY - 1)) - sending / 2)
    taken = {"action": action, "loop/pipeline": max(plain / 10, few - 4 * action - 2 * sending)}
    return _curves(devices[0], taken)


def _curves(device: Device, taken: Mapping[str, float]) -> list[Curve]:
    """The curve of a value that doesn't depend on a size."""
    return [Curve(subject=device_key(device), thing=thing, sizes=(1,), seconds=(seconds,)) for thing, seconds in taken.items()]


@contextmanager
def _bar(steps: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; elsewhere nothing."""
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


def _in_another_process(inventory: Inventory, wanted: Collection[str] | None, *, again: bool) -> tuple[list[Curve], list[Failure]]:
    most_seconds = _most_seconds(inventory)
    asked = pickle.dumps((inventory, None if wanted is None else set(wanted), again, most_seconds))
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "calibration.pkl"
        command = [sys.executable, "-c", f"from {__name__} import answer; answer()", str(found)]
        limit, env = most_seconds + _START_SECONDS, for_child(os.environ)
        try:
            subprocess.run(command, input=asked, env=env, timeout=limit, check=True, stdout=subprocess.DEVNULL)
            curves, failures = pickle.loads(found.read_bytes())
        except (subprocess.SubprocessError, OSError) as error:
            names = tuple(name for each in measurements(inventory, Calibration(), wanted) for name in each.names)
            return [], [Failure(words=f"this machine could not be measured ({error})", names=names)]
    return curves, failures


def answer() -> None:
    """The new Python's main function: reads what to measure from its input, and writes what it found to the file in its first argument."""
    inventory, wanted, again, most_seconds = pickle.load(sys.stdin.buffer)
    known = load_calibration(inventory)
    found = _measure(measurements(inventory, Calibration() if again else known, wanted), known, most_seconds, progress=True)
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
