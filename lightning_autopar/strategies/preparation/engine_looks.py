"""Engines look at the first step: one by one, and their long trials beside the probes of a split batch.

For the forked child that finds out about a step. It doesn't know what else is found out there, and which plans there are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lightning_autopar import engines
from lightning_autopar._fork import ChildFailed, forked
from lightning_autopar.engines import Finding, FirstStep
from lightning_autopar.strategies.parity.check_outcome import not_made

log = logging.getLogger(__name__)


def looks(names: Iterable[str], first: FirstStep, trials: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    """What each of these engines finds; one whose look fails is ruled out.

    Args:
        trials: what their trials found that have run already, by the engine's name.
    """
    found: dict[str, Finding] = {}
    for name in names:
        try:
            found[name] = engines.named(name).look(replace(first, trial=(trials or {}).get(name)))
        except Exception as error:  # the module may raise anything outside of a plain step
            log.debug("the engine %s can't look at the step", name, exc_info=True)
            words = not_made(f"looking at it failed ({type(error).__name__}: {error})").reason
            found[name] = Finding(refusals={name: words})
    return found


def begin_trials(children: ExitStack, names: Iterable[str], first: FirstStep, *, timeout_seconds: float) -> Callable[[], dict[str, Any]]:
    """Begin these engines' long trials in a child, where another core is there for it: gives what waits for what they find, by the
    engine's name. This process and the child share its threads from then on.

    Args:
        children: ends the child if nobody has waited for it.
        names: of engines that are surely to look.
        first: the step, small enough to run twice at a time, without what splitting its batch changes.
        timeout_seconds: ends the child after so long.
    """
    long = [name for name in names if engines.named(name).looks_long]
    if not long or (os.cpu_count() or 1) < 2:
        return dict
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    result = children.enter_context(forked(_try, long, first, timeout_seconds=timeout_seconds))

    def trials() -> dict[str, Any]:
        try:
            return result()
        except ChildFailed:  # the looks make them again, one by one, and say which fails
            log.debug("trials beside the probes of a split batch failed", exc_info=True)
            return {}

    return trials


def _try(names: Sequence[str], first: FirstStep) -> dict[str, Any]:
    return {name: engines.named(name).trial(first) for name in names}
