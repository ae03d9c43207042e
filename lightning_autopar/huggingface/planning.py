"""Every plan that transformers' Trainer can run, with its prediction, as a report; the settings for the best; and what it can't run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_autopar import engines
from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import num_cuda_devices
from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory, usable
from lightning_autopar.engines import Question
from lightning_autopar.huggingface.relaunch import launched_by_others
from lightning_autopar.huggingface.settings import Batch, Settings, told_by
from lightning_autopar.huggingface.trainer_step import Look, checkpointing_field, has_own, look
from lightning_autopar.memory.allocator.options import options_from_environment
from lightning_autopar.memory.cuda_overhead import target_of
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import recomputable, with_recompute
from lightning_autopar.planning.device_sets import device_sets, single_sets
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.planning.plan_seconds import device_speeds
from lightning_autopar.planning.refusals import micro_batch_refusal, missing_packages, multi_refusal, own_refusal, split_notes
from lightning_autopar.plans import Plan, all_engines
from lightning_autopar.report.report import Candidate, NothingFits, Report
from lightning_autopar.sharing.take_leases import Leases
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.worker_exception import Failure
from lightning_autopar.strategies.calibration.calibration import calibrated

_TRACE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for.

    Args:
        devices: a spec; None for ``AUTOPAR_DEVICES``, or what is here.
        trainer_devices: of those, as Lightning's Trainer takes it; None for all.
        options: arguments of :class:`AutoParallelStrategy`.
    """

    devices: str | None = None
    trainer_devices: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plans for one call of ``train``.

    Args:
        settings: of the best one; None where nothing fits.
        steps: the optimizer's steps of the run; None where nobody knows.
        said: the values, in the script, of the arguments that plans change.
        differs: what the best plan takes otherwise than the script does, a sentence each.
    """

    report: Report
    settings: Settings | None
    steps: int | None
    said: Mapping[str, Any]
    differs: tuple[str, ...]


def plan_for(trainer: Any, asked: Asked) -> Planned:
    """Plan for what ``train`` would do; nothing is trained.

    Raises:
        ValueError: if the step can't be known, or the user asks for what this Trainer can't do.
    """
    if (variable := launched_by_others()) is not None:
        raise ValueError(
            f"a launcher has started this process ({variable} is set), but for transformers' Trainer lightning-autopar starts processes "
            "itself, as many as the plan needs; start it without the launcher"
        )
    refuse(trainer)
    settings = AutoParallelStrategy(**asked.options).settings
    if settings.batch != "global":
        raise ValueError(
            "--batch per_device doesn't work for transformers' Trainer, where a step's whole batch stays the same; multiply "
            "per_device_train_batch_size by the number of devices instead"
        )
    if "wait" in asked.options:
        raise ValueError("--wait and --priority don't work for transformers' Trainer, whose runs don't queue; leave them out")
    told = told_by(trainer.args)
    inventory, most = _devices(asked, on_cpu=told.use_cpu)
    on_cpu = all(device.kind == "cpu" for device in inventory.devices)
    batch = replace(told.batch, replicas=1 if told.use_cpu else max(1, num_cuda_devices()))
    mixed = getattr(trainer.args, "mixed_precision", "no")  # which accelerate's environment variable sets, too
    precision = "bf16-mixed" if trainer.args.bf16 or mixed == "bf16" else "16-mixed" if trainer.args.fp16 or mixed == "fp16" else "32-true"
    found = _looked_at(trainer, batch.size, precision, inventory)
    constraints = Constraints(
        allow=settings.allow,
        max_devices=most,
        memory_limit_bytes=settings.memory_limit_bytes,
        memory_margin=settings.memory_margin,
        objective="memory" if settings.objective == "memory" else "speed",
        exact=settings.exact,
        precision=precision,
        excluded={**missing_packages(inventory), **excluded(trainer, found, on_cpu=on_cpu)},
        notes=dict.fromkeys(all_engines(), notes(trainer)),
        split=_split(trainer, found, batch),
        allocator=options_from_environment(os.environ),
    )
    rates = None if any(device.kind == "catalogue" for device in inventory.devices) else calibrated(inventory)
    question = Question(footprint=found.footprint, inventory=inventory, constraints=constraints)
    space = _Space(trainer, question, found, batch)
    plans = list(space.plans(device_speeds(found.footprint, inventory, precision=precision, rates=rates)))
    if settings.plan is not None:
        plans = [space.pinned(settings.plan, plans)]
    try:
        report = make_report(found.footprint, inventory, constraints, predict=_evaluating_whole(precision), rates=rates, plans=plans)
    except NothingFits as error:
        report = error.report
    report = replace(report, candidates=tuple(map(space.with_notes, report.candidates)), adviser=None)
    best = report.best_candidate
    return Planned(
        report=report,
        settings=None if best is None else _settings(trainer, best, found, batch, on_cpu=on_cpu),
        steps=optimizer_steps(trainer, batch),
        said=said_of(trainer.args),
        differs=() if best is None else tuple(space.told(best.plan)),
    )


def _devices(asked: Asked, *, on_cpu: bool) -> tuple[Inventory, int | None]:
    """The devices to choose from, without what other runs were promised, and at most how many.

    Raises:
        ValueError: if they aren't there, or the script says that it keeps off GPUs and they are GPUs.
    """
    accelerator: Literal["cpu", "cuda"] = "cpu" if on_cpu or not num_cuda_devices() else "cuda"
    count = asked.trainer_devices
    wanted = int(count) if count is not None and count.isdigit() and accelerator == "cpu" else 1
    inventory = Leases().see(probe(asked.devices, accelerator=accelerator, cpu_devices=wanted))
    inventory = usable(inventory) if usable(inventory).devices else inventory
    if on_cpu and any(device.kind != "cpu" for device in inventory.devices):
        raise ValueError("the script sets use_cpu=True, but the devices to plan for are GPUs; leave use_cpu out, or plan for CPU devices")
    return inventory, None if count is None else inventory.restrict(count)[1]


def _looked_at(trainer: Any, rows: int, precision: str, inventory: Inventory) -> Look:
    """The step, traced in a forked child.

    Raises:
        RuntimeError: if the child ended.
        Exception: what the script's own code raises in it.
    """
    try:
        found = run_forked(look, trainer, rows, precision, target_of(inventory.devices), timeout_seconds=_TRACE_SECONDS)
    except ChildFailed as error:
        raise RuntimeError(f"the step of {type(trainer).__name__} can't be looked at: {error.reason}") from error
    if isinstance(found, Failure):
        raise found.exception()
    return found


def _split(trainer: Any, found: Look, batch: Batch) -> SplitFinding | None:
    """What a batch in parts changes, by transformers' own account."""
    reason = differences(trainer, found, batch)
    apart = tuple(sorted(name.removeprefix("aten.") for name in found.footprint.random_draws))
    if reason is None and not apart:
        return None
    return SplitFinding(probed=reason is None, reason=reason, drawn_apart=apart)


def _evaluating_whole(precision: str) -> Any:
    """A prediction of bytes in which each device evaluates batches of its own, which plans don't split."""
    known: dict[int, Footprint] = {}

    def bytes_of(footprint: Footprint, plan: Plan, inventory: Inventory) -> dict[str, DeviceBytes]:
        ranks = plan.data_ranks
        if ranks not in known:
            whole = footprint.evaluation_bytes
            known[ranks] = footprint if whole is None else replace(footprint, evaluation_bytes=whole * ranks)
        return predict(known[ranks], plan, inventory, precision=precision)

    return bytes_of


class _Space:
    """The plans that a Trainer can run."""

    def __init__(self, trainer: Any, question: Question, found: Look, batch: Batch) -> None:
        self._trainer, self._question, self._found, self._batch = trainer, question, found, batch
        self._samples = samples_of(trainer)
        can = {block.fqn for block in recomputable(question.footprint)}
        self._layers = found.layers if found.layers and can.issuperset(found.layers) else ()

    def plans(self, speed: Mapping[str, float]) -> Iterator[Plan]:
        """Every plan: each device gets equally many samples, all at once or one part after the other, and recomputes all layers or none."""
        question, rows = self._question, self._batch.size
        footprint, inventory, constraints = question.footprint, question.inventory, question.constraints
        sets = [tuple(devices) for devices in single_sets(inventory, constraints, speed)]
        if multi_refusal(question) is None:
            sets += [each for each in device_sets(rows, inventory, constraints, speed) if rows % len(each) == 0]
        in_parts = micro_batch_refusal(footprint, constraints) is None
        for name in all_engines():
            engine = engines.named(name)
            if own_refusal(name, question) is not None:
                continue
            for devices in sets:
                if (len(devices) > 1) != engine.several:
                    continue
                share = rows // len(devices)
                counts = [count for count in range(1, share + 1) if share % count == 0]
                if len(devices) == 1 and not in_parts:
                    counts = [self._batch.accumulation] if share % self._batch.accumulation == 0 else []
                elif not in_parts:
                    counts = [1]
                for plan in engine.plans(question, devices):
                    for count in counts:
                        yield from self._recomputing(replace(plan, micro_batches=count))

    def _recomputing(self, plan: Plan) -> Iterator[Plan]:
        """The plan without and with recomputation, if its samples are the script's."""
        if last_batch(self._trainer, plan, self._batch, self._samples)[1]:
            return
        if self._question.constraints.exact and self.told(plan):
            return
        yield plan
        if self._layers and "recompute" not in self._question.constraints.excluded:
            yield with_recompute(plan, self._question.footprint, self._layers)

    def pinned(self, plan: Plan, plans: list[Plan]) -> Plan:
        """The plan that the user names.

        Raises:
            ValueError: if this Trainer can't run it.
        """
        kept = replace(plan, reasons=())
        if kept not in [replace(one, reasons=()) for one in plans]:
            raise ValueError(
                f"the plan {plan.title()!r} isn't one that transformers' Trainer can run here; lightning-autopar plan --json lists those"
            )
        return plan

    def with_notes(self, candidate: Candidate) -> Candidate:
        """The candidate, with what becomes of the epoch's end and of grouped samples under its plan."""
        plan, parts, as_script = candidate.plan, self._batch.accumulation, self._as_script(candidate.plan)
        if not candidate.bytes:  # an example of what is ruled out, which mustn't bear the name of the script's own plan
            return replace(candidate, plan=replace(plan, micro_batches=2 * parts)) if as_script and parts > 1 else candidate
        notes = candidate.notes
        if as_script:  # the script splits its batch by itself
            notes = tuple(words for words in notes if words not in split_notes(self._question.constraints))
            if parts > 1 and (words := undivided(self._trainer, self._found, "parts")) is not None:
                notes += (f"the script's own gradient_accumulation_steps={parts}: {words}",)
        return replace(candidate, notes=(*notes, *self.told(plan)))

    def told(self, plan: Plan) -> list[str]:
        """What the plan takes otherwise than the script does, a sentence each."""
        last = last_batch(self._trainer, plan, self._batch, self._samples)[0]
        if (
            not (self._found.divides or weighable(self._found, self._batch) or self._as_script(plan))
            and (self._samples or 0) % self._batch.size
        ):
            counted = "an epoch's last batch has parts with different numbers of samples, and transformers counts each part equally"
            last = f"{last}; {counted}" if last is not None else counted
        return [words for words in (last, grouped(self._trainer, plan), last_evaluated(self._trainer, plan)) if words is not None]

    def _as_script(self, plan: Plan) -> bool:
        """Whether the plan's parts are the script's own."""
        return self._batch.replicas == plan.world_size == 1 and plan.micro_batches == self._batch.accumulation


def _settings(trainer: Any, best: Candidate, found: Look, batch: Batch, *, on_cpu: bool) -> Settings:
    plan = best.plan
    return Settings(
        plan=plan,
        number=told_by(trainer.args).number,
        batch=batch,
        checkpointing=bool(plan.recompute),
        checkpointed="activation_checkpointing" if hasattr(trainer.args, "activation_checkpointing") else "gradient_checkpointing",
        layers=tuple(dict.fromkeys(found.kinds[fqn] for fqn in plan.shard if fqn in found.kinds)),
        on_cpu=on_cpu,
        step_seconds=best.step_seconds,
        peak_bytes=max(best.needs.values()),
        weighed=weighable(found, batch),
    )


#: Methods that make up the loop or its batches: with others, nobody knows what a step is without running it.
_LOOP = ("_inner_training_loop", "_run_epoch", "_prepare_inputs", "get_batch_samples")
#: Features that no plan for this Trainer may have, each with the reason.
_NEVER = {
    "shares": "transformers' Trainer gives each device equally many samples",
    "replicas": "transformers' Trainer needs a parallelism_config for hybrid sharding, which autopar doesn't make",
}
#: Arguments that change a step in a way that isn't predicted.
_UNCOUNTED = {
    "torch_compile": "the prediction is of the step that isn't compiled",
    "use_liger_kernel": "the prediction is of the model's own kernels, which take more memory",
    "neftune_noise_alpha": "the noise isn't part of the prediction",
    "auto_find_batch_size": "where memory runs out, transformers takes fewer samples a step",
}


def refuse(trainer: Any) -> None:
    """Refuse a Trainer whose step can't be known.

    Raises:
        ValueError: with the reason.
    """
    name = type(trainer).__name__
    for method in _LOOP:
        if has_own(trainer, method):
            raise ValueError(
                f"{name} has a {method} of its own, so that what a step does can't be told without running it; start the script without "
                "lightning-autopar"
            )
    if trainer.train_dataset is None:
        raise ValueError(f"{name} has no train_dataset, so that there is no step to plan for; give it one")
    spread = "the script spreads the model over several devices itself (device_map, or a DistributedConfig)"
    if getattr(trainer, "is_model_parallel", False) or getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(f"{spread}; load it without, or start the script without lightning-autopar")


def excluded(trainer: Any, found_out: Look, *, on_cpu: bool) -> dict[str, str]:
    """What no plan may be or have, with the sentence that says why, as ``Constraints.excluded``."""
    args, found = trainer.args, dict(_NEVER)
    own_optimizer = trainer.optimizer is not None or trainer.lr_scheduler is not None
    for name in all_engines():
        if (words := engines.named(name).not_by_transformers(on_cpu=on_cpu, own_optimizer=own_optimizer)) is not None:
            found[name] = words
    if getattr(args, "save_only_model", False) and getattr(args, "load_best_model_at_end", False):
        for name in (each for each in all_engines() if not engines.named(each).whole):
            found.setdefault(name, "transformers refuses it for save_only_model=True with load_best_model_at_end=True")
    if (field := checkpointing_field(args)) is not None:
        found["recompute"] = f"the script sets {field}=True, which counts already"
    if has_own(trainer, "get_train_dataloader"):
        words = "makes its loader in a get_train_dataloader of its own, whose batches TrainingArguments don't change"
        found["multi"] = found["micro_batches"] = f"{type(trainer).__name__} {words}"
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        found["multi"] = "train_sampling_strategy='batch_rebalance' makes other batches for several processes"
    if getattr(getattr(args, "accelerator_config", None), "split_batches", False):
        found["multi"] = "accelerator_config's split_batches=True makes per_device_train_batch_size the batch of all devices"
    for key, of in (("multi", "devices"), ("micro_batches", "parts")):
        if (words := undivided(trainer, found_out, of)) is not None:
            found.setdefault(key, words)
    return found


def undivided(trainer: Any, found_out: Look, of: str) -> str | None:
    """Says that several ``"devices"`` or ``"parts"`` of a batch make gradients larger by their number; None where they don't."""
    if found_out.divides or (of == "parts" and getattr(trainer, "loss_is_scaled_for_ga", None) is False):
        return None
    if not found_out.counts:
        if of == "devices" or getattr(trainer, "compute_loss_func", None) is None:
            return None
        return (
            "batches have no labels for transformers to count, and it doesn't divide what a compute_loss_func gives by the number of parts"
        )
    named = type(trainer.model).__name__ if not has_own(trainer, "compute_loss") else f"{type(trainer).__name__}.compute_loss"
    taken = "is handed num_items_in_batch, but its loss doesn't depend on it"
    if found_out.divides is None:
        taken = "is handed num_items_in_batch, and whether its loss is divided by it isn't known"
    remedy = "accepts_loss_kwargs=False on the model" if of == "devices" else "loss_is_scaled_for_ga=False on the Trainer"
    return f"{named} {taken}: transformers would make the gradients larger by the number of {of}; {remedy} mends that"


def weighable(found_out: Look, batch: Batch) -> bool:
    """Whether weights by samples make the loss the script's: it is a mean over each part of a batch, and the script has one part a step."""
    return found_out.divides is False and batch.replicas == batch.accumulation == 1


def differences(trainer: Any, found_out: Look, batch: Batch) -> str | None:
    """Why a batch in parts has another loss than the script's; None where it has the same."""
    if not found_out.divides:
        numbers = "numbers of tokens" if weighable(found_out, batch) else "numbers of samples or tokens"
        return (
            "the loss is a mean over each part of a batch, and transformers takes the mean over the parts: where parts have different "
            f"{numbers}, that isn't the mean over the batch"
        )
    if not getattr(trainer.args, "average_tokens_across_devices", True):
        return "average_tokens_across_devices=False: each device divides by the number of its own tokens"
    return None


def notes(trainer: Any) -> tuple[str, ...]:
    """What a reader should know of any plan, a sentence each."""
    args, found = trainer.args, []
    evaluates = getattr(args, "eval_strategy", "no") != "no"
    if has_own(trainer, "training_step"):
        own = f"{type(trainer).__name__} has a training_step of its own"
        found.append(f"{own}: the prediction is of its compute_loss and a backward pass alone, without what else it does")
    if trainer.compute_metrics is not None and evaluates:
        found.append("compute_metrics: an evaluation keeps the model's outputs for all samples; the predicted memory leaves them out")
    return (*found, *(f"{name}={getattr(args, name)}: {words}" for name, words in _UNCOUNTED.items() if getattr(args, name, None)))


def samples_of(trainer: Any) -> int | None:
    """The samples of an epoch; None where the dataset doesn't say."""
    try:
        return len(trainer.train_dataset)
    except TypeError:
        return None


def optimizer_steps(trainer: Any, batch: Batch) -> int | None:
    """The optimizer's steps of the whole run; None where nobody knows."""
    args, samples = trainer.args, samples_of(trainer)
    if args.max_steps > 0:
        return int(args.max_steps)
    if samples is None:
        return None
    each = batch.per_device * batch.replicas
    batches = samples // each if args.dataloader_drop_last else -(-samples // each)
    an_epoch = max(1, -(-batches // batch.accumulation))
    return -(-int(args.num_train_epochs * an_epoch * 1000) // 1000)


def last_batch(trainer: Any, plan: Plan, batch: Batch, samples: int | None) -> tuple[str | None, bool]:
    """What becomes of an epoch's last batch under a plan, as a sentence, None where it is the script's; and whether the run then has other
    steps than the script's, rather than other samples in one step.
    """
    at_once, steps = batch.size // plan.micro_batches, optimizer_steps(trainer, batch)  # by all devices
    if samples is not None and steps is not None and steps * batch.size <= samples:
        return None, False  # the run ends before
    if samples is None:
        unknown = "the dataset doesn't say its length, so it isn't known whether an epoch's last batch has the script's samples"
        return (unknown, False) if plan.world_size > 1 or plan.micro_batches != batch.accumulation else (None, False)
    if trainer.args.dataloader_drop_last:
        before, now = (samples // size * size for size in (batch.per_device * batch.replicas, at_once))
        if before != now:
            return (
                f"dataloader_drop_last=True would drop {samples - now} samples of an epoch, and the script drops {samples - before}",
                True,
            )
        return None, False
    left, devices, loaders = samples % batch.size, plan.world_size, getattr(trainer.args, "accelerator_config", None)
    parts, added = -(-left // at_once) * devices, -samples % at_once
    if devices > 1 and added and (left < parts or getattr(loaders, "dispatch_batches", None)):
        words = f"accelerate fills up an epoch's last batch with {added} of its first samples, to share it among {devices} devices"
        return words, not getattr(loaders, "even_batches", True)  # not filled up, some devices would have no batch
    return None, False


def last_evaluated(trainer: Any, plan: Plan) -> str | None:
    """What several processes change in an evaluation's last batch, as a sentence; None where nothing."""
    data, at_once = trainer.eval_dataset, trainer.args.per_device_eval_batch_size * plan.world_size
    every = data.values() if isinstance(data, dict) else () if data is None else (data,)
    if plan.world_size == 1 or all(hasattr(each, "__len__") and len(each) % at_once == 0 for each in every):
        return None
    return (
        f"where {plan.world_size} devices can't share an evaluation's last batch evenly, accelerate fills it up with the first samples, so "
        "that they count again in eval_loss"
    )


def grouped(trainer: Any, plan: Plan) -> str | None:
    """What several processes change in a sampler that groups samples, as a sentence; None where nothing."""
    strategy = getattr(trainer.args, "train_sampling_strategy", None)
    if plan.world_size == 1 or (strategy != "group_by_length" and not getattr(trainer.args, "group_by_length", False)):
        return None
    return "transformers groups samples by length within each process's batches, so that several devices take them in another order"


def said_of(args: Any) -> Mapping[str, Any]:
    """The values of the arguments that a plan may change, as the script has them."""
    batch = told_by(args).batch
    names = ("fsdp", "fsdp_config", "deepspeed", "activation_checkpointing", "gradient_checkpointing")
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {**found, "per_device_train_batch_size": batch.per_device, "gradient_accumulation_steps": batch.accumulation}
