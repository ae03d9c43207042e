"""torchmetrics that a step updates with a value of its whole batch: ``self.train_loss(loss)`` of a ``MeanMetric``.

Most metrics add up samples, so that what ranks and parts add makes the whole batch's. These count batches: on one device each batch is
one update, of the batch's mean. A part of a batch therefore adds what its samples are of the whole. Which states of which metrics do so is
found out before the run. Where hooks of all ranks give a metric the same value, it counts once. Knows metrics and shares; nothing of ranks,
nor of logging.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_autopar.exact.data.rank_share import BatchShare

#: By step, then by the metric's and the state's names: by what a part adds to the state, see :func:`rules_of`.
MetricRules = Mapping[str, Mapping[tuple[str, str], str]]
#: Among a step's rules: it keeps what ranks don't put together, so that a later hook may give a metric this rank's own part of it.
APART = ("", "")
#: ``own``: as its reduction says, which needs nothing; ``mean``: by its samples; ``weighed``: by what the loss goes by.
_RULES = ("own", "mean", "weighed")
#: Relative difference up to which a rule explains a state, in single precision.
_EQUAL = 1e-5


def keeping_apart(rules: MetricRules, step: str) -> dict[str, Mapping[tuple[str, str], str]]:
    """The rules, where a step keeps what ranks don't put together, or where nobody could find out."""
    return {**rules, step: {**rules.get(step, {}), APART: "own"}}


def rules_of(reduction: Any, before: Any, whole: Any, parts: Sequence[Any], shares: Sequence[BatchShare]) -> tuple[str, ...]:
    """By what a batch's parts make what the whole batch adds to a metric's state, likelier rules first; none where nothing explains it.

    Args:
        reduction: torchmetrics' own, of the state.
        before: the state that each run found.
        whole: what the whole batch left; ``parts``: what each part left, and ``shares`` are those parts.
    """
    if isinstance(whole, list):
        grown = [_entries(each) - _entries(before) for each in (whole, *parts)]
        return ("own",) if grown[0] == sum(grown[1:]) else ()
    if not isinstance(whole, Tensor) or reduction not in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min):
        return ("own",)  # of such a reduction nothing is known
    if any(part.shape != whole.shape for part in parts):
        return ()
    left, found = torch.stack([part.double() for part in parts]), before.double()
    if reduction is dim_zero_sum:
        made = {rule: (_weights(rule, shares, left) * (left - found)).sum(0) + found for rule in _RULES}
    else:
        made = {"own": left.mean(0) if reduction is dim_zero_mean else left.amax(0) if reduction is dim_zero_max else left.amin(0)}
    if not whole.is_floating_point():
        made = {"own": made["own"]}
    largest = torch.cat([left, whole[None].double()]).nan_to_num(posinf=0, neginf=0).abs().max()
    within = _EQUAL * max(1e-30, float(largest))
    return tuple(rule for rule, each in made.items() if torch.allclose(each, whole.double(), rtol=0, atol=within, equal_nan=True))


def settled(found: Mapping[str, tuple[str, ...]]) -> dict[str, str | None]:
    """The rule for each of a metric's states, None where there is none. States that share a rule get the same: a sum and its weights."""
    left = [rules for rules in found.values() if "own" not in rules]
    common = [rule for rule in _RULES if all(rule in rules for rules in left)]
    return {state: "own" if "own" in rules else next(iter([*common, *rules]), None) for state, rules in found.items()}


def _weights(rule: str, shares: Sequence[BatchShare], like: Tensor) -> Tensor:
    """The factor of what each part adds."""
    factors = [1.0 if rule == "own" else fraction(rule, share) for share in shares]
    return torch.tensor(factors, dtype=torch.float64).reshape(-1, *[1] * (like.dim() - 1))


def _entries(states: Any) -> int:
    return sum(each.numel() if isinstance(each, Tensor) else 1 for each in states)


def fraction(rule: str, share: BatchShare) -> float:
    """How much of what a part adds counts."""
    return share.rows / share.of if rule == "mean" else share.fraction()


def adopt_values(metric: Metric, factors: Callable[[Metric, tuple[Any, ...]], Mapping[str, float]]) -> Callable[[], None]:
    """Make what an update adds to some of a metric's states count by a factor; returns what undoes it.

    Args:
        factors: gives those of the states for an update with these arguments, now.
    """
    shadowed = metric.__dict__["update"]

    def update(this: Any, *args: Any, **kwargs: Any) -> None:
        counts = factors(this, (args, kwargs))
        before = {name: _copied(getattr(this, name)) for name in counts}
        shadowed(*args, **kwargs)
        with torch.set_grad_enabled(this._enable_grad):
            for name, by in counts.items():
                setattr(this, name, before[name] + (getattr(this, name) - before[name]) * by if by else before[name])

    # A bound method of the method's own name: a copy of the metric gets the class's.
    metric.__dict__["update"] = types.MethodType(update, metric)

    def undo() -> None:
        metric.__dict__["update"] = shadowed

    return undo


def adding(metric: Metric) -> list[str]:
    """The states to which an update adds, so that equal updates on all ranks count as many times."""
    reductions = metric._reductions.items()
    return [name for name, reduction in reductions if reduction is dim_zero_sum or isinstance(getattr(metric, name), list)]


def averaging(metric: Metric) -> list[str]:
    """Those of them to which parts of an update can be added."""
    return [name for name in adding(metric) if isinstance(state := getattr(metric, name), Tensor) and state.is_floating_point()]


def of_samples(given: Any) -> bool:
    """Whether an update's arguments may have a row a sample, rather than being numbers."""
    return any(not isinstance(leaf, (Tensor, numpy.generic, int, float)) or numpy.ndim(leaf) for leaf in tree_leaves(given))


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()
