"""What transformers' Trainer can and can't run of the plans, and what a reader should know. Reads the Trainer; plans and traces nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_autopar import engines
from lightning_autopar.huggingface.settings import Batch
from lightning_autopar.huggingface.trainer_step import Look, checkpointing_field, has_own
from lightning_autopar.huggingface.training_arguments import told_by
from lightning_autopar.plans import Plan, all_engines

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
    for key, of in (("multi", "devices"), ("micro_batches", "parts")):
        if (words := undivided(trainer, found_out, of)) is not None:
            found.setdefault(key, words)
    return found


def undivided(trainer: Any, found_out: Look, of: str) -> str | None:
    """Says that several ``"devices"`` or ``"parts"`` of a batch make gradients larger by their number; None where they don't."""
    if not found_out.counts or found_out.divides or (of == "parts" and getattr(trainer, "loss_is_scaled_for_ga", None) is False):
        return None
    named = type(trainer.model).__name__ if not has_own(trainer, "compute_loss") else f"{type(trainer).__name__}.compute_loss"
    taken = "is handed num_items_in_batch, but its loss doesn't depend on it"
    if found_out.divides is None:
        taken = "is handed num_items_in_batch, and whether its loss is divided by it isn't known"
    remedy = "accepts_loss_kwargs=False on the model" if of == "devices" else "loss_is_scaled_for_ga=False on the Trainer"
    return f"{named} {taken}: transformers would make the gradients larger by the number of {of}; {remedy} mends that"


def differences(trainer: Any, found_out: Look) -> str | None:
    """Why a batch in parts has another loss than the script's; None where it has the same."""
    if not found_out.divides:
        return (
            "the loss is a mean over each part of a batch, and transformers takes the mean over the parts: where parts have different "
            "numbers of samples or tokens, that isn't the mean over the batch"
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
        found.append(f"{own}: the prediction is of its compute_loss and a backward pass, and not of what else it does")
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
        unknown = "the dataset doesn't say its length, so that nobody knows whether an epoch's last batch is the script's"
        return (unknown, False) if plan.world_size > 1 or plan.micro_batches != batch.accumulation else (None, False)
    if trainer.args.dataloader_drop_last:
        before, now = (samples // size * size for size in (batch.per_device * batch.replicas, at_once))
        if before != now:
            return (
                f"dataloader_drop_last=True would drop {samples - now} samples of an epoch, and the script drops {samples - before}",
                True,
            )
        return None, False
    if plan.world_size > 1 and (missing := -samples % at_once):
        return (
            f"accelerate fills up an epoch's last batch with {missing} of its first samples, to share it among {plan.world_size} devices",
            False,
        )
    return None, False


def grouped(trainer: Any, plan: Plan) -> str | None:
    """What several processes change in a sampler that groups samples, as a sentence; None where nothing."""
    strategy = getattr(trainer.args, "train_sampling_strategy", None)
    if plan.world_size == 1 or (strategy != "group_by_length" and not getattr(trainer.args, "group_by_length", False)):
        return None
    return "samples are grouped by length over a process's batches, so that several devices take them in another order"


def said_of(args: Any) -> Mapping[str, Any]:
    """The values of the arguments that a plan may change, as the script has them."""
    batch = told_by(args).batch
    names = ("fsdp", "fsdp_config", "deepspeed", "activation_checkpointing", "gradient_checkpointing")
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {**found, "per_device_train_batch_size": batch.per_device, "gradient_accumulation_steps": batch.accumulation}
