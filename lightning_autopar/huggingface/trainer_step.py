"""A training step of transformers' Trainer as a LightningModule's, so that it can be traced; and what the trace finds.

``look`` runs in a forked child: it changes the Trainer, and runs the script's loss and collator. Knows no plan.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_autopar._lightning import LightningModule
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import RAISED, FirstBatch, batch_size_of
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.strategies.base.worker_exception import Failure
from lightning_autopar.strategies.preparation.longest_footprint import at_lengths, seen_sizes

log = logging.getLogger(__name__)

#: The most samples that are collated for the trace; larger batches are scaled up from it.
_MOST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was found out about a step.

    Args:
        footprint: of the whole batch.
        counts: whether the Trainer counts the items of a step's whole batch, for the loss to be divided by.
        divides: whether the loss depends on that number; None where that isn't known.
        layers: FQNs of the layers that transformers' gradient checkpointing recomputes.
        kinds: the name of the class of each block.
    """

    footprint: Footprint
    counts: bool
    divides: bool | None
    layers: tuple[str, ...]
    kinds: Mapping[str, str]


class _Kept:
    """Holds an object that copies of the module share."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


class TrainerStep(LightningModule):
    """A step of transformers' Trainer: its own ``compute_loss``, and its own optimizer.

    Args:
        trainer: theirs. Its ``model`` becomes this module's, so that a copy of this module computes with the copy's parameters.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.model = trainer.model
        self.given = trainer.optimizer  # a copy of this module has a copy of it, over the copy's parameters
        self.kept = _Kept(trainer)

    def training_step(self, batch: Mapping[str, Any], batch_index: int) -> Any:
        """The loss of a batch, as the Trainer computes it."""
        return self.loss_of(batch, items_in(self.kept.value, batch))

    def validation_step(self, batch: Mapping[str, Any], batch_index: int) -> None:
        """The loss of a batch of an evaluation, beside the model's outputs."""
        self.loss_of(batch, items_in(self.kept.value, batch), return_outputs=True)

    def configure_optimizers(self) -> Any:
        """The script's optimizer, or the one that the Trainer makes by its arguments."""
        if self.given is not None:
            return self.given
        trainer = self.kept.value
        trainer.model, trainer.optimizer = self.model, None
        return trainer.create_optimizer()

    def loss_of(self, batch: Mapping[str, Any], items: Any, **options: Any) -> Any:
        """The loss of a batch of so many items, as the Trainer computes it."""
        trainer = self.kept.value
        trainer.model = self.model
        return trainer.compute_loss(self.model, dict(batch), num_items_in_batch=items, **options)


def items_in(trainer: Any, batch: Mapping[str, Any]) -> Any:
    """The number of items by which the Trainer divides the loss of a batch; None where it doesn't."""
    return trainer._get_num_items_in_batch([batch], trainer.args.device)


def look(trainer: Any, rows: int, precision: str, target: Target) -> Look | Failure:
    """Trace a step of the Trainer. Changes the Trainer: to be run in a forked child.

    Args:
        trainer: transformers', as ``train`` was called.
        rows: samples of one step.
    """
    try:
        return _look(trainer, rows, precision, target)
    except RAISED as error:  # the script's own code, which would raise in the run as well
        return Failure.of(error)


def _look(trainer: Any, rows: int, precision: str, target: Target) -> Look:
    args, model = trainer.args, trainer.model
    if recomputes := checkpointing_field(args):
        _recompute(trainer, recomputes)
    if precision.endswith("-mixed"):
        _return_floats(model)
    # Batches are made here, in this process.
    args.dataloader_num_workers, args.dataloader_prefetch_factor, args.dataloader_persistent_workers = 0, None, False
    args.per_device_train_batch_size = trainer._train_batch_size = min(rows, _MOST_ROWS)
    batch = _first(trainer.get_train_dataloader(), "train_dataset")
    if not has_own(trainer, "get_train_dataloader") and hasattr(trainer.train_dataset, "__len__"):
        # Collators that pad nothing lay all samples in one row.
        batch = replace(batch, batch_size=min(args.per_device_train_batch_size, len(trainer.train_dataset)))
    validation = None
    if getattr(args, "eval_strategy", "no") != "no" and trainer.eval_dataset is not None:
        dataset = trainer.eval_dataset
        one = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        validation = _first(trainer.get_eval_dataloader(one), "eval_dataset")
    counts = items_in(trainer, batch.batch) is not None
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule without a step, and such
        seen = seen_sizes(None, batch, validation)
        traced = partial(trace, TrainerStep(trainer), None, stage="fit", precision=precision, target=target)
        footprint = at_lengths(traced, batch, traced(batch, validation=seen.validation), seen)
    named = {f"model.{name}": module for name, module in model.named_modules() if name}
    layers = tuple(name for name, module in named.items() if hasattr(module, "gradient_checkpointing") and _is_layer(module))
    return Look(
        footprint=scaled(footprint, rows) if footprint.batch_size != rows else footprint,
        counts=counts,
        divides=_divides(trainer, batch.batch) if counts else False,
        layers=layers if getattr(model, "supports_gradient_checkpointing", False) else (),
        kinds={block.fqn: type(named[block.fqn]).__name__ for block in footprint.blocks if block.fqn in named},
    )


def _divides(trainer: Any, batch: Mapping[str, Any]) -> bool | None:
    """Whether the loss of a batch depends on the number of items that the Trainer hands over, computed with fake tensors; None where that
    can't be told. Models that take the number and ignore it get a gradient that is too large by the number of parts
    (``Trainer.training_step`` takes such a loss for one that has been divided).
    """
    mode, shadow = fake_mode(), ShadowValues()
    try:
        with drawing_nothing():
            step, inputs = fake_copy(TrainerStep(trainer), mode, shadow), fake_copy(dict(batch), mode, shadow)
            with as_if_real(shadow, "cpu"), mode, shadow:
                items = torch.ones((), requires_grad=True)
                loss = step.loss_of(inputs, items)
                return loss.requires_grad and torch.autograd.grad(loss, items, allow_unused=True)[0] is not None
    except RAISED:
        log.debug("what divides the loss can't be told", exc_info=True)
        return None


def has_own(trainer: Any, name: str) -> bool:
    """Whether the Trainer's class has a method of its own in place of transformers'."""
    own = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    return own is not None and not own.__module__.startswith("transformers.")


def checkpointing_field(args: Any) -> str | None:
    """The field that switches gradient checkpointing, if the script has switched it on; transformers has renamed it."""
    return next((name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)), None)


def _recompute(trainer: Any, field: str) -> None:
    """Switch the model's gradient checkpointing on, as ``train`` would."""
    options = dict(getattr(trainer.args, f"{field}_kwargs", None) or {})
    if field == "activation_checkpointing":
        ours = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
        trainer.model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **ours)
    else:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def _return_floats(model: Any) -> None:
    """Under mixed precision accelerate makes what the model returns float32 (``Accelerator.prepare_model``)."""
    from accelerate.utils import convert_to_fp32

    model.register_forward_hook(lambda module, args, output: convert_to_fp32(output))


def _is_layer(module: Any) -> bool:
    """Whether it is recomputed as one, rather than having layers that are."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _first(loader: Any, name: str) -> FirstBatch:
    batches = list(itertools.islice(loader, 1))
    if not batches:
        raise ValueError(f"{name} gives no batch; give the Trainer a dataset with at least one batch of samples")
    batch = dict(batches[0]) if isinstance(batches[0], Mapping) or hasattr(batches[0], "keys") else batches[0]
    if not isinstance(batch, dict):
        raise ValueError(f"a batch of {name} is a {type(batch).__name__}, but transformers' Trainer takes mappings; see its data_collator")
    # accelerate's loader moves batches to the device; the same dataset, sampler and collator make them here.
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    plain = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn) if indexed else loader
    return FirstBatch(batch=batch, batch_size=batch_size_of(batch), loaders=(plain,))
