"""How the parts' logged values make the whole batch's: found out by comparing them, as ``reduce_fx`` only says how steps make an epoch's.

A mean loss logged with ``reduce_fx="max"`` is, over the parts of a batch, a mean; a count logged with the default is a sum. A mean over
unmasked tokens weighs parts by these. Knows numbers and ``LightningModule.log``; nothing of ranks or communication.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_autopar._lightning import LightningModule
from lightning_autopar.exact.data.counted_entries import Count, Rule

#: Other means: how values go into the sum, and how the result comes back. A root-mean-square error is the first, a perplexity the
#: second. Only logged values follow them: a loss that does has other gradients than the mean of its parts.
MEANS: dict[Any, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "root mean square": (torch.square, torch.sqrt),
    "geometric mean": (torch.log, torch.exp),
}
#: Hook and name of a logged value → ``"mean"`` (over samples), ``"sum"``, ``"max"``, ``"min"``, one of :data:`MEANS`, or what it is a mean
#: over. The loss of ``training_step`` has the name ``""``; without a rule it is a mean over samples.
LogRules = Mapping[tuple[str, str], Rule]

#: Relative difference up to which a rule explains a value: the effect of single precision's rounding with terms that cancel.
_EQUAL = 1e-5
#: The same in double precision: a rule that is further off is dropped if another isn't, as similar sums of parts may look alike.
_EXACT = 1e-10
#: The largest relative error of a value in single precision, if no terms cancel.
_ROUNDING = 1e-6
#: So much nearer than a mean over samples must a mean over something else come, which may be near by chance.
_TELLING = 1e-2
_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A value that a step logged."""

    value: float
    reduce_fx: str


@dataclass(frozen=True, kw_only=True)
class LogComparison:
    """The rules that explain each value, likelier ones first: none for a value that no rule fits.

    Args:
        matching: the rules, by hook and name.
        apart: by how much a value that no rule explains differs when split, relative to it.
        excluded: the counts over which a value is surely no mean, also in single precision: what explains it is far nearer.
    """

    matching: Mapping[tuple[str, str], tuple[Rule, ...]] = field(default_factory=dict)
    apart: Mapping[tuple[str, str], float] = field(default_factory=dict)
    excluded: Mapping[tuple[str, str], frozenset[Count]] = field(default_factory=dict)

    @property
    def rules(self) -> dict[tuple[str, str], Rule]:
        """The likeliest rule for each value; a count comes with those that couldn't be told from it."""
        return {key: _with_alike(rules) for key, rules in self.matching.items() if rules}

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each value of a step that no rule explains."""
        return self._notes(steps=True)

    @property
    def hook_notes(self) -> tuple[str, ...]:
        """The same for values that hooks log of a batch, of which only a rank's own can be a part."""
        return self._notes(steps=False)

    def _notes(self, *, steps: bool) -> tuple[str, ...]:
        return tuple(
            f"the value {name!r} logged in {hook} is no mean, root mean square, sum, maximum or minimum over the parts of "
            + (f"a batch: split, it differs by {self.apart[hook, name]:.2g} of it" if (hook, name) in self.apart else "every batch")
            for (hook, name), rules in self.matching.items()
            if not rules and hook.endswith("_step") == steps
        )

    @property
    def ambiguous(self) -> bool:
        """Whether other splits and batches may tell more: the sum and the maximum of a count and a zero are the same, say."""
        # Parts whose values are close to each other have nearly the same mean of any kind.
        open_to = ([rule for rule in rules if not _is_nearly_another(rule, rules)] for rules in self.matching.values())
        return any(len(rules) > 1 and sum(isinstance(rule, str) for rule in rules) != 1 for rules in open_to)

    def apart_as(self, losses: Sequence[Any], logged: Mapping[tuple[str, str], Logged]) -> float:
        """By how much what was logged differs when split, if it is exactly a step's only loss and no rule explains it; else 0."""
        loss = float(losses[0]) if len(losses) == 1 else math.nan
        same = (key for key, rules in self.matching.items() if not rules and key in logged and logged[key].value == loss)
        return max((self.apart.get(key, math.inf) for key in same), default=0.0)

    def narrowed(self, other: LogComparison) -> LogComparison:
        """This comparison without the rules that don't hold for another batch, or another split of it."""
        matching = {key: tuple(rule for rule in rules if rule in other.matching.get(key, rules)) for key, rules in self.matching.items()}
        apart = {key: max(by, other.apart.get(key, by)) for key, by in self.apart.items()}
        return LogComparison(matching={**other.matching, **matching}, apart={**other.apart, **apart})


@contextmanager
def recorded_logs(module: LightningModule) -> Iterator[dict[str, Logged]]:
    """While open, what the module logs is recorded by name instead. torchmetrics objects, which synchronise by themselves, are left out."""
    logged: dict[str, Logged] = {}
    shadowed: dict[str, Any] = {name: module.__dict__[name] for name in ("log", "log_dict") if name in module.__dict__}

    def log(*args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(module, *args, **kwargs).arguments
        value, reduction = given["value"], given.get("reduce_fx", "mean")
        name = str(getattr(reduction, "__name__", reduction)).lower()
        if isinstance(value, Tensor):
            logged[given["name"]] = Logged(value=float(value.detach().double().mean()), reduce_fx=name)
        elif isinstance(value, (int, float)):
            logged[given["name"]] = Logged(value=float(value), reduce_fx=name)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    module.__dict__["log"], module.__dict__["log_dict"] = log, log_dict
    try:
        yield logged
    finally:
        for name in ("log", "log_dict"):
            del module.__dict__[name]
        module.__dict__.update(shadowed)


@contextmanager
def recorded_in(module: LightningModule, hook: str, logs: dict[tuple[str, str], Logged]) -> Iterator[None]:
    """While open, what the module logs is recorded as this hook's; in the end it is added to ``logs``."""
    with recorded_logs(module) as logged:
        yield
    logs.update({(hook, name): value for name, value in logged.items()})


def compare_logs(
    whole: Mapping[tuple[str, str], Logged],
    parts: Sequence[Mapping[tuple[str, str], Logged]],
    rows: Sequence[int],
    *,
    double: bool = False,
    weights: Mapping[Count, Sequence[float]] | None = None,
) -> LogComparison:
    """Which of mean, sum, maximum and minimum over the parts gives the whole batch's value, for each logged name.

    Args:
        whole: what was logged on the whole batch, by hook and name.
        parts: what was logged on each part.
        rows: the parts' samples.
        double: whether that was in double precision.
        weights: what the parts weigh, in all 1, in means over something other than samples.
    """
    matching: dict[tuple[str, str], tuple[Rule, ...]] = {}
    apart: dict[tuple[str, str], float] = {}
    excluded: dict[tuple[str, str], frozenset[Count]] = {}
    for key, logged in whole.items():
        values = [part[key].value if key in part else math.nan for part in parts]
        if not math.isfinite(logged.value):
            continue
        distance = _distances(logged.value, values, [count / sum(rows) for count in rows], weights or {})
        there = [part[key].value for part in parts if key in part]
        if logged.reduce_fx in ("sum", "max", "min") and 0 < len(there) < len(parts):  # of those that are logged
            distance[logged.reduce_fx] = _distances(logged.value, there, [1.0] * len(there), {})[logged.reduce_fx]
        if not all(math.isfinite(value) for value in values) and not any(by <= _EQUAL for by in distance.values()):
            if len(there) < len(parts):  # whether it is logged, each part decides
                matching[key] = ()
            continue
        preferred = logged.reduce_fx if logged.reduce_fx in ("mean", "sum", "max", "min") else "mean"
        equal = _EXACT if double and min(distance.values()) <= _EXACT else _EQUAL
        # Where the mean over samples fails, a count that is hardly nearer is near by chance. Where it holds, no other mean is told from it.
        near = {mean: equal if (by := distance[mean]) <= equal else min(equal, _TELLING * by) for mean in ("mean", *MEANS)}
        fit = (rule for rule in (preferred, *distance) if distance[rule] <= (equal if isinstance(rule, str) else near[rule.mean or "mean"]))
        matching[key] = tuple(sorted(dict.fromkeys(fit), key=partial(_is_farther, distance=distance)))
        first = next(iter(matching[key]), None)
        by = distance[first] if isinstance(first, str) else math.inf
        excluded[key] = frozenset(count for count in weights or () if distance[count] > max(_EQUAL, by / _TELLING))
        if math.isfinite(distance[preferred]):  # a rule that doesn't hold for other batches may have been the closest here
            apart[key] = max(distance[preferred], _EQUAL)
    return LogComparison(matching=matching, apart=apart, excluded=excluded)


def _distances(whole: float, values: Sequence[float], rows: Sequence[float], weights: Mapping[Count, Sequence[float]]) -> dict[Rule, float]:
    """By how much the whole batch's value differs from what each rule makes of the parts', relative to them; infinite where it makes none.
    The parts' samples are in all 1.
    """
    finite = [abs(value) for value in values if math.isfinite(value)]
    scale = max([abs(whole), *finite])
    simple: dict[Rule, float] = {"mean": weighted(values, rows), "sum": sum(values), "max": max(values), "min": min(values)}
    simple |= {name: _mean(name, values, rows) for name in MEANS}
    # One that isn't finite may come from a part that has nothing to count.
    found = {rule: _relative(value - whole, scale) if len(finite) == len(values) else math.inf for rule, value in simple.items()}
    for count, shares in weights.items():
        means: dict[Rule, float] = {count: weighted(values, shares)}
        means |= {replace(count, mean=name): _mean(name, values, shares) for name in MEANS}
        found |= {rule: _relative(value - whole, scale) for rule, value in means.items()}
    return found


def _is_farther(rule: Rule, distance: Mapping[Rule, float]) -> bool:
    """Whether the usual mean isn't the likeliest rule, as another mean of the same parts comes so much nearer that it is no rounding."""
    others: Collection[Rule] = MEANS if rule == "mean" else ()
    if isinstance(rule, Count):
        others = [replace(rule, mean=name) for name in MEANS]
    return distance[rule] > _ROUNDING and any(distance[other] < _TELLING * distance[rule] for other in others)


def _mean(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """One of the other means; NaN where a value that counts isn't positive."""
    if not all(value > 0 for value, weight in zip(values, weights, strict=True) if weight):
        return math.nan
    into, back = MEANS[name]
    summed = weighted(into(torch.tensor(values, dtype=torch.float64)).tolist(), weights)
    return float(back(torch.tensor(summed, dtype=torch.float64)))


def _is_nearly_another(rule: Rule, rules: Sequence[Rule]) -> bool:
    """Whether the usual mean, over the same, explains a value as another mean does."""
    return "mean" in rules if rule in MEANS else isinstance(rule, Count) and bool(rule.mean) and replace(rule, mean="") in rules


def weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """The sum of the values, each by its weight; one without weight may be anything, NaN included."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)


def shares_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether parts weigh the same in two ways."""
    return all(math.isclose(a, b, rel_tol=_EXACT) for a, b in zip(one, other, strict=True))


def _relative(difference: float, scale: float) -> float:
    return math.inf if not math.isfinite(difference) else abs(difference) / scale if scale else 0.0


def _with_alike(rules: Sequence[Rule]) -> Rule:
    first, *others = rules
    if isinstance(first, str):
        return first
    return replace(first, alike=tuple(each for each in others if isinstance(each, Count) and each.mean == first.mean))
