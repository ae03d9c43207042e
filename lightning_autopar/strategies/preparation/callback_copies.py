"""Copies of the network that a user's callbacks make (averages, teachers, weights set aside for a validation), found out by running their
hooks on fakes. Knows the hooks' order; nothing of engines.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from lightning_autopar._lightning import Callback, Trainer, callbacks
from lightning_autopar._root import FRAMEWORK, package_of
from lightning_autopar.exact.logs.kept_by_hooks import names_in_callbacks
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.storages import storages
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.extra_tensors import in_callbacks
from lightning_autopar.memory.trace.first_batch import RAISED, FirstBatch
from lightning_autopar.memory.trace.no_writes import no_writes
from lightning_autopar.memory.trace.trace import precision_of
from lightning_autopar.text import error_line

#: The hooks around a training step in Lightning's order, once parameters lie as the plan has them; and before a validation.
_TRAINING = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end")
_VALIDATING = ("on_validation_start", "on_validation_epoch_start")
#: Names in a callback's code that may have to do with copies of the module.
_COPYING = re.compile(r"copy|clone|averag|shadow|teacher|(^|_)(ema|swa)(_|$)|EMA|Ema[A-Z]|SWA", re.ASCII)


def with_copies(footprint: Footprint, trainer: Trainer, first: FirstBatch) -> Footprint:
    """The footprint, with the copies of the module that the user's callbacks keep, and the networks of their own.

    Only hooks whose code has a name that speaks of copies are run: others may do anything, and nobody has asked them to.
    """
    if not footprint.training:
        return footprint
    named = (each for each, names in names_in_callbacks(trainer) if any(map(_COPYING.search, names)))
    copying = {type(each) for each in named if not isinstance(each, callbacks.ProgressBar)}  # whose libraries copy lines, not weights
    held = [each for each in trainer.callbacks if package_of(type(each)) not in FRAMEWORK]  # type: ignore[attr-defined]  # set by a connector
    if not copying and not any(True for _ in in_callbacks(held, trainer.lightning_module)):
        return footprint
    failed = dict[str, str]()
    try:
        (before, copied, aside), keeping = _bytes(trainer, held, copying, first.batch, failed)
    except RAISED as error:
        (before, copied, aside), keeping = (0, 0, 0), set()
        failed |= dict.fromkeys((kind.__name__ for kind in copying), error_line(error))
    uncounted = sorted(failed.keys() - keeping)
    notes = [f"{name} keeps copies of weights, or a network of its own, which are counted with the buffers" for name in sorted(keeping)]
    notes += [f"one copy of the module is counted for {name}, as its hooks can't be tried ({failed[name]})" for name in uncounted]
    return replace(
        footprint,
        buffer_bytes=footprint.buffer_bytes + before,
        copied_bytes=copied + len(uncounted) * footprint.parameter_bytes,
        set_aside_bytes=aside,
        assumptions=(*footprint.assumptions, *notes),
    )


def handed_over(footprint: Footprint) -> Footprint:
    """The footprint of a run that other processes go on with: to each of them, copies come whole."""
    if not footprint.copied_bytes:
        return footprint
    return replace(footprint, buffer_bytes=footprint.buffer_bytes + footprint.copied_bytes, copied_bytes=0)


def _bytes(
    trainer: Trainer, held: Sequence[Callback], copying: Collection[type], batch: Any, failed: dict[str, str]
) -> tuple[list[int], set[str]]:
    """Bytes of copies that are made while parameters are whole, where they lie as the plan has them, and for a validation alone; and who
    keeps any from step to step.

    Args:
        copying: classes of those whose hooks are run.
        failed: gets what hooks raise, by the class's name.
    """
    module, dtype = trainer.lightning_module, precision_of(str(trainer.precision)).true
    mode, shadow = fake_mode(), ShadowValues()
    network, batch = (fake_copy(each, mode, shadow, dtype=dtype) for each in (module, batch))
    rehearsal = BareStep(network, trainer, "fit", autocast_dtype=None, default_dtype=dtype, enter=lambda phase: None)
    known = {id(trainer): network.trainer} | {id(real): fake for real, fake in zip(module.modules(), network.modules(), strict=True)}
    there, sizes = dict[int, torch.UntypedStorage](), list[int]()
    with warnings.catch_warnings(), drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow, no_writes({}):
        warnings.simplefilter("ignore")
        given: dict[str, tuple[Any, ...]] = {"setup": ("fit",), "on_train_batch_start": (batch, 0)}
        given["on_train_batch_end"] = {"loss": torch.zeros(())}, batch, 0
        copies = [fake_copy(each, mode, shadow, known=known) for each in held]
        for hooks in (("setup",), _TRAINING, _VALIDATING):
            for each, hook in product((each for each in copies if type(each) in copying), hooks):
                try:
                    getattr(each, hook)(network.trainer, network, *given.get(hook, ()))
                except RAISED as error:
                    failed.setdefault(type(each).__name__, error_line(error))
            now = {storage._cdata: storage for tensor in in_callbacks(copies, network) for storage in storages(tensor)}
            sizes.append(sum(storage.nbytes() for key, storage in now.items() if key not in there))
            there.update(now)
            if hooks == ("setup",):
                rehearsal.build()
            elif hooks == _TRAINING:
                keeping = {type(each).__name__ for each in copies if any(True for _ in in_callbacks([each], network))}
    return sizes, keeping
