"""Whether planning says what it said before: whole reports, and single predictions of every engine, compared byte for byte.

    python tools/same_report.py write build/reports.json       # before a change
    python tools/same_report.py compare build/reports.json     # after it: names the first differences, and fails
    python tools/same_report.py compare build/reports.json gpt # those alone whose name has that in it

The modules are those of ``benchmarks/decisions``, traced for CPU devices and for GPUs; rates are the data sheets', so that nothing is
measured. Traced steps are kept beside the file.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
os.environ.update({"OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "off", "AUTOPAR_LEDGER": "off"})

import torch  # noqa: E402
from decisions.models import MODELS  # noqa: E402
from decisions.scenarios import SCENARIOS  # noqa: E402

from lightning_autopar import engines  # noqa: E402
from lightning_autopar.constraints import Constraints, SplitFinding  # noqa: E402
from lightning_autopar.devices.inventory import Inventory  # noqa: E402
from lightning_autopar.devices.spec import parse_spec  # noqa: E402
from lightning_autopar.memory.batch_scaling import scaled  # noqa: E402
from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402
from lightning_autopar.planning import advice  # noqa: E402
from lightning_autopar.planning import plan_bytes as planning_memory  # noqa: E402
from lightning_autopar.planning.block_units import cuttable, recomputable, shardable  # noqa: E402
from lightning_autopar.planning.make_report import make_report  # noqa: E402
from lightning_autopar.planning.plan_cost import host_need  # noqa: E402
from lightning_autopar.planning.plan_seconds import predict_seconds  # noqa: E402
from lightning_autopar.plans import OFFLOADS, SCHEDULES, Plan  # noqa: E402
from lightning_autopar.report.page.step import timeline  # noqa: E402
from lightning_autopar.report.report import NothingFits  # noqa: E402

# Advice is found in four or ten seconds at most, of which a busy machine has fewer.
advice._MOST_SECONDS = advice._MOST_SECONDS_UNFIT = float("inf")

# Until engines were asked by one contract, notes were a pipeline's alone.
NOTED: Any = {"notes": {"pipeline": ("noted",)}} if hasattr(engines, "Finding") else {"pipeline_notes": ("noted",)}

Case = tuple[str, Footprint, Inventory, Constraints]


def steps(folder: Path) -> dict[str, Footprint]:
    """The traced steps, by name."""
    kept = folder / "steps.pickle"
    if kept.exists():
        found: dict[str, Footprint] = pickle.loads(kept.read_bytes())
        return found
    found = {}
    for (name, rows), target in itertools.product(
        (("gpt", 16), ("wide", 64), ("resnet-bn", 16), ("lstm", 32), ("bert", 16)), ("cpu", "cuda")
    ):
        torch.manual_seed(1)
        found[f"{name} {target}"] = trace(MODELS[name].build(), None, MODELS[name].data(rows), target=target)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(found))
    return found


def cases(found: dict[str, Footprint]) -> Iterator[Case]:
    """Questions to the planner: footprint, devices, constraints."""
    for scenario in SCENARIOS:
        if (footprint := found.get(f"{scenario.model} cpu")) is not None:
            yield scenario.name, scaled(footprint, scenario.batch), _with_free(scenario.inventory, 1), Constraints()
    everything = ("single", "ddp", "fsdp", "pipeline", "zero")
    gpt, bert, wide = found["gpt cuda"], found["bert cuda"], found["wide cuda"]
    for devices, gib in (("1xRTX4090", 0.6), ("2xRTX4090", 0.55), ("4xL4,4xA10G", 0.56), ("2x8xA100-40GB", 24)):
        inventory = _with_free(parse_spec(devices), gib)
        for name, footprint in (("gpt", scaled(gpt, 64)), ("bert", bert), ("wide", scaled(wide, 4096))):
            yield f"{name} on {devices}", footprint, inventory, Constraints(precision="bf16-mixed")
            yield f"{name} on {devices} with zero", footprint, inventory, Constraints(allow=everything, exact=True)
            yield f"{name} on {devices}, memory", footprint, inventory, Constraints(objective="memory", allow=everything)
    two = _with_free(parse_spec("2xRTX4090"), 4)
    for name, constraints in {
        "zero alone": Constraints(allow=("zero",)),
        "pipeline alone": Constraints(allow=("pipeline",)),
        "excluded": Constraints(allow=everything, excluded={"zero_3": "no", "fsdp": "never", "micro_batches": "none"}),
        "several": Constraints(excluded={"multi": "alone"}, allow=everything),
        "per device": Constraints(split_batch=False, allow=everything),
        "one": Constraints(max_devices=1, allow=everything),
        "two processes": Constraints(min_devices=2, max_devices=2),
        "split": Constraints(split=SplitFinding(difference=0.1, reason="it is no mean"), **NOTED),
        "unsplittable": Constraints(split=SplitFinding(splittable=False)),
        "pinned": Constraints(pinned=Plan(engine="zero", devices=("gpu:0", "gpu:1"), zero_stage=3)),
    }.items():
        yield name, bert, two, constraints
    yield "evaluation", replace(bert, training=False, gradient_bytes=0, optimizer_bytes=0), two, Constraints(allow=everything)
    yield "untraced", replace(bert, tape=None, outer=(), traced=False), two, Constraints(allow=everything)


def _with_free(inventory: Inventory, gib: float) -> Inventory:
    devices = tuple(replace(one, free_bytes=min(one.free_bytes, int(gib * 2**30))) for one in inventory.devices)
    return replace(inventory, devices=devices, host_total_bytes=64 << 30, host_free_bytes=48 << 30)


def plans(footprint: Footprint, ids: tuple[str, ...]) -> Iterator[Plan]:
    """Plans of every engine on one to all of these devices."""
    units, again = shardable(footprint)[0], tuple(block.fqn for block in recomputable(footprint))
    recomputations = ((), again[: len(again) // 2], again)
    names, allowed = [block.fqn for block in footprint.blocks], cuttable(footprint)
    for count, recompute, parts in itertools.product(range(1, len(ids) + 1), dict.fromkeys(recomputations), (1, 3)):
        common: dict[str, Any] = {"devices": ids[:count], "recompute": recompute, "micro_batches": parts}
        yield Plan(engine="single" if count == 1 else "ddp", **common)
        if count > 1:
            yield Plan(engine="ddp", shares=tuple(range(1, count + 1)), **common)
        for reshard, offload, replicas in itertools.product((True, False), ((), OFFLOADS), range(1, max(2, count))):
            if count % replicas == 0:
                sharded: dict[str, Any] = {"reshard_after_forward": reshard, "offload": offload, "replicas": replicas, "shard": units}
                yield Plan(engine="fsdp", **common, **sharded)
        for stage, kinds in ((1, ()), (2, ()), (3, ()), (2, ("optimizer",)), (3, ("optimizer",)), (3, OFFLOADS)):
            yield Plan(engine="zero", zero_stage=stage, offload=kinds, **common)
        for schedule, replicas, shard in itertools.product(SCHEDULES, range(1, max(2, count)), ((), units)):
            ranks = count // replicas
            stages = 2 * ranks if schedule == "interleaved_1f1b" else ranks
            starts = [round(stage * len(names) / stages) for stage in range(1, stages)]
            if (
                count % replicas
                or ranks < 2
                or stages > len(names)
                or not all(allowed[start] for start in starts)
                or (shard and replicas < 2)
            ):
                continue
            cuts = tuple(names[start] for start in starts)
            pipeline = {"schedule": schedule, "replicas": replicas, "cuts": cuts, "shard": shard, "micro_batches": 4 * parts}
            yield Plan(engine="pipeline", **{**common, **pipeline})


def predictions(footprint: Footprint, inventory: Inventory, precision: str) -> dict[str, Any]:
    """All that is predicted of single plans."""
    found: dict[str, Any] = {}
    for plan in plans(footprint, tuple(device.id for device in inventory.devices)):
        kind = inventory.device(plan.devices[0]).kind
        sizes = planning_memory.predict(footprint, plan, inventory, precision=precision)
        needs = {device: size.reserved for device, size in sizes.items()}
        host = host_need(footprint, plan, inventory, needs, precision=precision, margin=0.05)
        on_host = planning_memory.host_bytes(footprint, plan, precision=precision, on_cpu=kind == "cpu", workers=2, resumes=True)
        spans = timeline(footprint, plan, inventory, precision=precision, ranks=4)
        told: dict[str, Any] = {
            "bytes": {device: {**size.to_dict(), "occasion": size.occasion, "updates": size.updates} for device, size in sizes.items()},
            "host": None if host is None else host.to_dict(),
            "on_host": repr(on_host),
            "seconds": predict_seconds(footprint, plan, inventory, precision=precision).to_dict(),
            "spans": [repr(span) for span in spans[:: max(1, len(spans) // 12)]],
        }
        plain = engines.of(plan).replays and plan.micro_batches <= 4 and not (plan.recompute or plan.offload)
        if plain and kind != "cpu":
            told["replayed"] = repr(planning_memory.replay(footprint, plan, plan.world_size - 1))
        found[f"{plan.title()} {plan.devices} {plan.shard != ()}"] = told
    return found


def everything(folder: Path, part: str) -> dict[str, Any]:
    """All that is compared and has this part in its name."""
    traced = steps(folder)
    told: dict[str, Any] = {}
    for name, footprint, inventory, constraints in cases(traced):
        if part not in name:
            continue
        try:
            report: Any = make_report(footprint, inventory, constraints)
        except NothingFits as nothing:
            report = nothing.report
        except ValueError as error:
            told[name] = str(error)
            continue
        told[name] = report.to_dict()
    for name, footprint in traced.items():
        devices = "3xcpu:4GiB" if name.endswith("cpu") else "2xA100-40GB,1xL4"
        inventory = _with_free(parse_spec(devices), 64)
        for precision, training in (("32-true", True), ("bf16-mixed", False)):
            if part not in f"{name} {precision}":
                continue
            asked = footprint if training else replace(footprint, evaluation_bytes=footprint.activation_bytes // 2)
            told[f"{name} {precision}"] = predictions(asked, inventory, precision)
    return told


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where two values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, "(nothing)"), after.get(key, "(nothing)"), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}/{number}")
    elif before != after:
        yield f"{path}: {before!r:.300} is now {after!r:.300}"


def main() -> int:
    """Writes, or compares; 1 where something differs."""
    what, file, part = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    text = json.dumps(everything(file.parent / "same_report", part), indent=1)
    if what == "write":
        file.write_text(text)
        print(f"{len(text):,} characters in {file}")
        return 0
    before = {name: told for name, told in json.loads(file.read_text()).items() if part in name}
    if text == json.dumps(before, indent=1):
        print(f"the same, {len(text):,} characters")
        return 0
    for line in itertools.islice(differences(before, json.loads(text)), 20):
        print(line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
