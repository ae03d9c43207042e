"""Why an engine, a feature or a plan is left out, with a sentence for each. Knows what was found out about module, batch and run.

Must not know how to predict the bytes that a plan needs, nor how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

from lightning_autopar import engines
from lightning_autopar.constraints import LOSS, SPLIT_TOLERANCE, Constraints, SplitFinding, overrule, overruled
from lightning_autopar.devices.inventory import Device, Inventory, device_label
from lightning_autopar.engines import Question
from lightning_autopar.memory.footprint import Footprint, Sharing
from lightning_autopar.plans import Engine, Plan, all_engines, entry_of, offered_engines
from lightning_autopar.text import counted, format_bytes

Feature = Literal["micro_batches", "shares", "replicas", "offload"]


def engine_runs(engine: Engine, allow: Sequence[Engine]) -> bool:
    """Whether plans of an engine are taken when these engines are allowed."""
    return entry_of(engine).offered or engine in allow


def cannot_run(plan: Plan, *, allow: Sequence[Engine] = (), pinned: bool = False) -> str | None:
    """That nobody asked for the plan's engine, in a few words; None where the plan may be taken.

    Args:
        allow: the engines that the user names.
        pinned: whether the user asked for it.
    """
    return None if pinned or engine_runs(plan.engine, allow) else f"add {plan.engine!r} to allow= to use this"


def engine_refusal(engine: Engine, question: Question) -> str | None:
    """Why no plan of this engine is a candidate; None if some are. With offload, some engines also run on one device."""
    asked = engines.named(engine)
    if (refusal := own_refusal(engine, question)) is not None or not asked.several:
        return refusal
    return multi_refusal(question, asked) if asked.splits else devices_refusal(question.inventory, question.constraints)


def own_refusal(engine: Engine, question: Question) -> str | None:
    """The same but for what speaks against several devices."""
    constraints = question.constraints
    # Engines that aren't offered are shown to whoever leaves the choice open.
    if engine not in constraints.allow and (entry_of(engine).offered or not set(offered_engines()) <= set(constraints.allow)):
        return f"not in allow={list(constraints.allow)!r}"
    if engine in constraints.excluded:
        return constraints.excluded[engine]
    return engines.named(engine).refusal(question)


def missing_packages(inventory: Inventory) -> dict[str, str]:
    """Engines whose package is missing, with the sentence that says what to install; empty where nothing is to be run."""
    if all(device.kind == "catalogue" for device in inventory.devices):
        return {}
    return {
        engine: f"the package {entry.package[0]} is not installed; install lightning-autopar[{entry.package[1]}]"
        for engine, entry in all_engines().items()
        if entry.package is not None and find_spec(entry.package[0]) is None
    }


def multi_refusal(question: Question, engine: engines.Engine | None = None) -> str | None:
    """Why no plan of the engine, or of any other than those whose ranks can share a network, splits the batch over devices; None if some
    do.
    """
    footprint, constraints = question.footprint, question.constraints
    if (refusal := devices_refusal(question.inventory, constraints)) is not None or not constraints.split_batch:
        return refusal
    if footprint.batch_size == 0:
        return "the batch has no batch dimension, so it can't be split over ranks"
    if footprint.batch_size == 1:
        return (
            "a batch of 1 sample can't be split over ranks; what the dataset returns at once counts as 1 sample, so where that is a whole "
            "batch, use DataLoader(..., batch_size=None)"
        )
    if footprint.batch_size < (constraints.min_devices or 1):
        return f"a batch of {footprint.batch_size} samples can't be split over the {constraints.min_devices} processes that were started"
    return None if engine is not None and shares_network(engine, footprint) else split_refusal(constraints, ranks=True)


def shares_network(engine: engines.Engine, footprint: Footprint) -> bool:
    """Whether the ranks of an engine's plans share the network, so that the batch needn't be split."""
    return footprint.sharing is not None and engine.shares_network


def devices_refusal(inventory: Inventory, constraints: Constraints) -> str | None:
    """Why no plan with several devices is a candidate, whether it splits the batch or not; None if some are."""
    if "multi" in constraints.excluded:
        return constraints.excluded["multi"]
    kinds = [device.kind for device in inventory.devices]
    if max(kinds.count(kind) for kind in set(kinds)) < 2:
        one = inventory.devices[0].id if len(kinds) == 1 else "of each kind"
        return f"needs at least two devices of one kind, but there is one: {one}"
    gpus = len({device.part_of or device.id for device in inventory.devices})
    if gpus < max(2, constraints.min_devices or 2) <= len(inventory.devices):
        whose = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        return f"the {len(inventory.devices)} devices are MIG instances of {whose}, and NCCL takes one rank of each GPU"
    if constraints.max_devices == 1:
        return "needs at least two devices, but the run may use only one"
    return None


def memory_refusal(device: Device, need_bytes: int, budget_bytes: int, constraints: Constraints) -> str:
    """A plan needs more of a device's memory than the run may use: what is needed, what there is, and how that was computed."""
    limit = constraints.memory_limit_bytes
    limited = limit is not None and limit < device.free_bytes
    there = f"{format_bytes(limit)} by the memory limit" if limited and limit else f"{format_bytes(device.free_bytes)} free"
    if constraints.memory_margin:
        there += f" less the {constraints.memory_margin * 100:.3g} % margin"
    missing = f", {format_bytes(need_bytes - budget_bytes)} too little" if format_bytes(need_bytes) == format_bytes(budget_bytes) else ""
    return f"needs {format_bytes(need_bytes)} on {device_label(device)}, which has {format_bytes(budget_bytes)} ({there}){missing}"


def host_refusal(need_bytes: int, budget_bytes: int) -> str:
    """The ranks on CPU devices need more together than their host has."""
    return f"needs {format_bytes(need_bytes)} of the host's memory over all its ranks, which has {format_bytes(budget_bytes)}"


def feature_refusal(feature: Feature, footprint: Footprint, constraints: Constraints) -> str | None:
    """Why no plan has this feature; None where plans may have it."""
    if feature == "micro_batches":
        return micro_batch_refusal(footprint, constraints)
    if feature in constraints.excluded:
        return constraints.excluded[feature]
    if feature == "shares" and not constraints.split_batch:
        return "each rank takes a whole batch of its own, so there is no batch to divide"
    if feature == "offload" and not footprint.training:
        return "a step without gradients has no optimizer's state to offload"
    return None


def recompute_refusal(constraints: Constraints) -> str | None:
    """Why no block may be recomputed; None where blocks that can run twice may be."""
    return constraints.excluded.get("recompute")


def micro_batch_refusal(footprint: Footprint, constraints: Constraints, *, staged: bool = False) -> str | None:
    """Why a rank, or the ranks of a pipeline (``staged``), must not run their samples in parts; None where they may."""
    for name in ("micro_batches", *(("pipeline_parts",) if staged else ())):
        if name in constraints.excluded:
            return constraints.excluded[name]
    if not footprint.training:
        return "a step without gradients keeps nothing for backward, so micro-batches would save little"
    if not constraints.split_batch:
        return "each rank takes a whole batch of its own, and runs it in one piece"
    if footprint.batch_size < 2:
        return "the batch has fewer than two samples"
    if not footprint.automatic_optimization:
        return "the module calls backward by itself, so parts of a batch can't share one optimizer step"
    if footprint.batch_norm and "batch_norm" not in constraints.despite:
        words = f"the statistics of {counted(len(footprint.batch_norm), 'batch norm')} would be a micro-batch's, not the whole batch's"
        return words + overrule("batch_norm")
    return split_refusal(constraints)


def undivided(footprint: Footprint, constraints: Constraints) -> str | None:
    """Why a batch can't be run again in more parts where memory runs out; None where it can, as far as is known."""
    split = constraints.split
    refusal = constraints.excluded.get("rerun", micro_batch_refusal(footprint, constraints)) if footprint.training else None
    if refusal is not None:
        return refusal
    if split is None:
        return "planning didn't try whether parts give the whole batch's loss, as the step takes less than half of the memory"
    unknown, pinned = unknown_split(constraints), constraints.pinned
    if unknown and (pinned is None or pinned.micro_batches == 1):  # who pins a plan in parts has decided it
        return unknown
    differs = split.probed and not split.difference <= SPLIT_TOLERANCE
    return f"its parts don't give the whole batch's loss ({split.reason})" if differs else None


def unknown_split(constraints: Constraints) -> str:
    """What isn't known of running a batch in parts."""
    split = constraints.split
    if split is None or split.probed or not split.reason:
        return ""
    return f"whether parts of a batch give its loss is not known ({split.reason})"


def split_refusal(constraints: Constraints, *, ranks: bool = False) -> str | None:
    """Why the batch must not be split, over ``ranks`` or into parts of one; None if it may."""
    split = constraints.split
    if split is None:
        return None
    if not split.splittable:
        return split.reason or "the batch can't be taken apart into samples"
    if not constraints.exact:
        return None
    if not split.probed and split.reason:
        return f"exact=True, and whether splitting the batch changes its loss is not known ({split.reason})"
    if split.probed and not split.difference <= SPLIT_TOLERANCE:  # NaN is a difference too
        return f"exact=True, and {_difference_words(split)}"
    if split.drawn_apart:
        return f"exact=True, and {_apart_words(split)}"
    notes = (*split.notes, *(split.rank_notes if ranks else ()))
    return f"exact=True, and {notes[0]}" if notes else None


def split_notes(constraints: Constraints, *, ranks: bool = True) -> tuple[str, ...]:
    """What a reader should know about a plan that splits the batch, over ``ranks`` or into parts of one."""
    split = constraints.split
    if split is None or not constraints.split_batch:
        return ()
    notes = (*apart_notes(split), *split.notes, *(split.rank_notes if ranks else ()))
    if split.unweighed and "later_entries" in constraints.despite:
        entries = " or ".join(count.left_out for count in split.unweighed)
        notes = (*notes, overruled("later_entries", f"parts of a batch that has {entries} weigh as those of one without"))
    if not split.probed:
        unknown = (f"whether splitting the batch changes its loss is not known ({split.reason})",) if split.reason else ()
        return (*unknown, *notes)
    if not split.difference <= SPLIT_TOLERANCE:
        return (f"{_difference_words(split)}; exact=True rules such plans out", *notes)
    return (*weighing_notes(split), *notes)


def weighing_notes(split: SplitFinding | None) -> tuple[str, ...]:
    """What parts of a batch weigh, where it isn't their samples: nothing to warn of."""
    rules = () if split is None else split.log_rules.get(LOSS, ())
    if not rules or rules[0] == "mean":
        return ()
    if rules[0] == "sum":
        return ("the loss is a sum over samples: the losses of a batch's parts are added, not averaged",)
    return (f"the loss is a mean over {rules[0]}: each part of a batch is weighted by how many it has",)


def apart_notes(split: SplitFinding | None) -> tuple[str, ...]:
    """What a reader should know about draws that aren't those of one device."""
    return () if split is None or not split.drawn_apart else (f"{_apart_words(split)}; exact=True rules such plans out",)


def sharing_words(sharing: Sharing) -> str:
    """Says how a plan's ranks share the network."""
    first, *others = sharing.modules
    more = f" and {len(others)} other submodules" if others else ""
    return f"each rank runs {first!r}{more} on its own rows, gathers all ranks' outputs, and runs the rest of the step on the whole batch"


def norm_notes(footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know about a plan that runs a rank's samples in parts in spite of batch norms."""
    if not footprint.batch_norm or not footprint.training or not constraints.split_batch:
        return ()
    return (overruled("batch_norm", f"the statistics of {counted(len(footprint.batch_norm), 'batch norm')} are a micro-batch's"),)


def half_notes(footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know about a plan that splits the batch, where one device leaves out steps whose gradients overflow. A sample's
    gradients are one device's in such a plan, too (``exact/step/gradient_scaler.py``), but a sum is of fewer samples.
    """
    if not footprint.training or not constraints.split_batch or constraints.precision != "16-mixed":
        return ()
    return (
        "at precision 16-mixed one device skips a step if a gradient of the whole batch overflows; here the gradients of the batch's parts "
        "may not overflow, and the step is made; bf16-mixed skips no steps",
    )


def world_notes(footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know if the module asks for the number of devices, or for its rank."""
    if not constraints.split_batch:
        return ()
    sizes = [name for name in footprint.asked if name in ("world_size", "num_devices")]
    files = [name for name in footprint.asked if "/" in name]
    ranks = [name for name in footprint.asked if name not in (*sizes, *files, "logger")]
    found = [
        f"the module asks its trainer for {' and '.join(sizes)}, which is 1 on one device, and more where ranks gather their parts of the "
        "batch by self.all_gather; the global batch stays the same, so the learning rate needs no scaling by it"
    ] * bool(sizes)
    found += [
        f"the module asks its trainer for {' and '.join(ranks)}; one device computes the whole batch, and here each rank a part of it: "
        "what only one rank stores or logs, and random numbers that depend on the rank, differ from one device's"
    ] * bool(ranks)
    found += [
        "the step calls its logger or another tracker directly, which only rank 0 does, with what it computed of its part of the batch; "
        "self.log writes what one device would"
    ] * ("logger" in footprint.asked)
    found += [
        f"the module writes {path!r}: each rank writes it, for its own part of the batch, unless the code checks the rank "
        "(self.trainer.is_global_zero, rank_zero_only)"
        for path in files[:1]
    ]
    return tuple(found)


def _apart_words(split: SplitFinding) -> str:
    """Says which draws aren't those of one device."""
    return f"each rank and each part of a batch draws its own random numbers for {', '.join(split.drawn_apart)}; one device draws others"


def _difference_words(split: SplitFinding) -> str:
    """Says by how much the loss changes, and why if that is known."""
    what = "gradient" if (split.reason or "").startswith("its gradient") else "loss"
    size = f"the split batch's {what} differs from the whole batch's by {split.difference:.2g} of it"
    if split.difference == float("inf"):
        size = f"the split batch's {what} differs from the whole batch's in some batches"
    if split.difference != split.difference:
        size = "the split batch's loss and the whole batch's can't be compared, as one isn't finite"
    return f"{size} ({split.reason})" if split.reason else size
