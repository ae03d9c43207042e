"""Whether a rank can run a training batch in parts, by how it was made: cut out of the collated batch, or collated anew of their samples.

Knows batches and loaders; whether parts of a batch give its loss is found out elsewhere (:mod:`lightning_autopar.strategies.parity`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_autopar._lightning import Callback, Trainer
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar._root import PYTORCH
from lightning_autopar.exact import random_state as rng
from lightning_autopar.exact.data.collate_trial import Loading
from lightning_autopar.exact.data.rank_share import KnownTensors
from lightning_autopar.exact.step.micro_batches import why_whole
from lightning_autopar.memory.trace.first_batch import FirstBatch, fresh

log = logging.getLogger(__name__)

#: Hooks that may change a batch before its step, besides ``on_train_batch_start``.
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def whole_of(batches: Iterable[FirstBatch], stage: str, *, collates: bool) -> str | None:
    """Why one of a training step's batches, the first such, can't run in parts; None where all can."""
    for batch in batches if stage == "fit" else ():
        samples = None if batch.samples is None else batch.batch_size
        if (words := why_whole(batch.batch, samples, several=batch.kind == "combined", collates=collates)) is not None:
            return words
        if (words := _counted_in(batch)) is not None:
            return f"parts are cut out of the collated batch, {words}"
    return None


def _counted_in(batch: FirstBatch) -> str | None:
    """Why a number in the batch keeps it whole: samples add up to it, such as their count, or nobody could try whether they do. A part that
    is cut out would have the whole batch's.
    """
    if not isinstance(batch.samples, list) or batch.collate is None or len(batch.samples) < 2:
        return None
    whole = {name: value for name, value in _numbers(batch.batch).items() if value}
    if not whole:
        return None
    state = rng.capture({}, cuda=False)
    try:
        parts = [_numbers(batch.collate(fresh(each))) for each in (batch.samples[::2], batch.samples[1::2])]
    except Exception as error:  # the user's collate function, on fewer samples than it is used to
        log.debug("the numbers of a batch's parts aren't known", exc_info=True)
        return f"and whether its number {next(iter(whole))} is a sum over samples couldn't be tried ({type(error).__name__}: {error})"
    finally:
        rng.restore(state, {})
    added = next((name for name, value in whole.items() if sum(part.get(name, 0.0) for part in parts) == value), None)
    return None if added is None else f"whose number {added} is that of all its samples"


def _numbers(batch: Any) -> dict[str, float]:
    """Python's numbers in a batch, by their places."""
    leaves, _ = tree_flatten_with_path(batch)
    return {keystr(path): leaf for path, leaf in leaves if type(leaf) in (int, float)}


def made_of_samples(trainer: Trainer, batch: FirstBatch, loading: Loading) -> bool:
    """Whether the loader can collate each part that the batch runs in of its own samples, and nobody could change the batch in between."""
    if batch.kind != "map" or batch.samples is None or loading.collation != "samples" or "collate" in {*batch.draws, *loading.draws}:
        return False
    if is_overridden("on_train_batch_start", trainer.lightning_module) or _transfers(trainer):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    foreign = (each for each in callbacks if not type(each).__module__.startswith((*PYTORCH, "lightning_autopar.")))
    return not any(is_overridden("on_train_batch_start", each) for each in foreign)


def known_tensors(trainer: Trainer, step: str, batches: Iterable[FirstBatch]) -> dict[str, KnownTensors]:
    """The tensors of a step's batches; nothing where several loaders or the user's hooks make what goes to the device."""
    tried = list(batches)
    if not tried or _transfers(trainer) or any(each.kind == "combined" for each in tried):
        return {}
    return {step: KnownTensors.of([(each.batch, each.batch_size) for each in tried])}


def _transfers(trainer: Trainer) -> bool:
    """Whether the user's hooks may change a batch on its way to the device."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return any(is_overridden(hook, owner) for owner in owners if owner is not None for hook in _TRANSFERS)
