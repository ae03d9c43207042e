"""What the parts of a batch weigh in its loss: found out by trying, where it isn't their samples.

A mean over unmasked tokens is the mean of the parts' means, weighed by the tokens that each part has. Which entries of the batch count, the
losses of several splits tell: one count must explain all of them, far better than the number of samples does. Knows a batch, its parts and
their losses; how a step is run it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_autopar._lightning_compat import before_transfer, is_overridden
from lightning_autopar.exact import random_state as rng
from lightning_autopar.exact.data.counting import Count, Rule, candidates
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, Tally, share_of
from lightning_autopar.exact.logs.log_rules import LogComparison, Logged, compare_logs, shares_alike
from lightning_autopar.strategies.parity.batch_parts import BatchParts
from lightning_autopar.strategies.parity.draw_probe import Observation, everything

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_LOG = logging.getLogger(__name__)
#: Relative difference up to which losses count as equal; see :mod:`.split_probe`.
_EQUAL = 1e-5
#: The splits that have to agree: two parts, three, and two of which one has twice the other's samples.
_SPLITS = (Dealing.even(2), Dealing.even(3), Dealing((0, 0, 1)))
#: Where an attribute's name says that its value stands for entries that don't count.
_NAMES = ("pad", "ignore")


class Weighing:
    """What a batch's parts weigh.

    Args:
        module: the user's.
        batches: the batch and its parts.
        known: counts that explain other batches.
    """

    def __init__(self, module: LightningModule, batches: BatchParts, known: Collection[Count] = ()) -> None:
        self._module = module
        self._batches = batches
        self._known = tuple(known)
        self._weights: dict[tuple[int, ...], dict[Count, list[float]]] = {}
        #: The rules that explain the loss; none as long as it is a mean over samples, as far as is known.
        self.rules: tuple[Rule, ...] = ()

    def shares(self, size: int | Dealing) -> list[BatchShare]:
        """The shares of ``size`` ranks, which weigh as the loss has them weigh."""
        dealing = Dealing.even(size) if isinstance(size, int) else size
        shares = [share_of(self._batches.count, rank, dealing) for rank in range(dealing.holders)]
        by = self.rules[0] if self.rules else "mean"
        if not isinstance(by, Count):
            return [replace(share, by=by) for share in shares]
        weights = self.weights(shares).get(by)
        if weights is None:
            raise ValueError(f"parts of the batch have no {by}")
        return [
            replace(share, by=by, tallies={by: Tally(own=weight, total=1.0, samples=lambda: ())})
            for share, weight in zip(shares, weights, strict=True)
        ]

    def weights(self, shares: Sequence[BatchShare]) -> dict[Count, list[float]]:
        """What the shares weigh by each count that they all have, in all 1."""
        key = shares[0].dealing.turns
        if key not in self._weights:
            state = rng.capture({})
            parts = [self._counted(share) for share in shares]
            rng.restore(state, {})
            found = {count: [_total(count, part) for part in parts] for count in self._candidates()}
            totals = {count: sum(numbers) for count, numbers in found.items()}
            # Without a total, or with a part that lacks the tensor (NaN), it is no count of this batch.
            self._weights[key] = {count: [each / totals[count] for each in found[count]] for count in found if totals[count] > 0}
        return self._weights[key]

    def _candidates(self) -> list[Count]:
        late = any(is_overridden(hook, self._module) for hook in ("transfer_batch_to_device", "on_after_batch_transfer"))
        if late and not self._batches.raw:  # the batch as it was before isn't known
            return []
        if not hasattr(self, "_found"):
            whole = self._counted(everything(self._batches.count))
            self._found = list(dict.fromkeys([*self._known, *candidates(whole, self._batches.count, _ignored_by(self._module))]))
        return self._found

    def _counted(self, share: BatchShare) -> Any:
        """A part as it is counted in a run: before it goes to the device."""
        batch = self._batches.part(share)
        return before_transfer(self._module, batch) if self._batches.raw else batch

    def explains(
        self,
        difference: float,
        observe: Callable[[Sequence[BatchShare]], Observation],
        in_double: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Whether it turns out now that the loss is no mean over samples, but goes by something that explains all splits.

        Args:
            difference: by how much the loss differs from the parts' mean, by what is known so far.
            observe: runs the step on the whole batch and on parts.
            in_double: makes a context in which the step runs in double precision.
        """
        if self.rules or (difference <= _EQUAL and not (difference and self._suspects())):
            return False
        try:
            with in_double():
                rules = self._explaining(observe, double=True)
        except Exception:  # the step insists on single precision
            _LOG.debug("what parts weigh can't be tried in double precision", exc_info=True)
            try:
                rules = self._explaining(observe, double=False)
            except Exception:  # a part of three is too small for the step
                _LOG.debug("what parts weigh can't be tried", exc_info=True)
                return False
        self.rules = () if "mean" in rules else rules
        return bool(self.rules)

    def _suspects(self) -> bool:
        """Whether some entries look as if they didn't count, and parts have unequally many of the others. Losses that hardly differ from
        each other, as those of a new model, look like a mean over samples then.
        """
        shares = self.shares(2)
        rows = [share.rows / share.of for share in shares]
        marked = {-100, *_ignored_by(self._module)}
        return any(count.ignored in marked and not shares_alike(by, rows) for count, by in self.weights(shares).items())

    def _explaining(self, observe: Callable[[Sequence[BatchShare]], Observation], *, double: bool) -> tuple[Rule, ...]:
        found: LogComparison | None = None
        for dealing in _SPLITS:
            if dealing.holders > self._batches.count:
                continue
            shares = self.shares(dealing)
            observed = observe(shares)
            if any(len(losses) != len(observed.whole) for losses in observed.parts):
                return ()
            whole, *parts = (
                {str(number): Logged(value=float(loss), reduce_fx="mean") for number, loss in enumerate(losses)}
                for losses in (observed.whole, *observed.parts)
            )
            rows = [share.rows for share in shares]
            here = compare_logs("training_step", whole, parts, rows, double=double, weights=self.weights(shares))
            if len(here.matching) < len(whole):
                return ()
            found = here if found is None else found.narrowed(here)
        first, *others = found.matching.values() if found is not None else [()]
        return tuple(rule for rule in first if rule not in ("max", "min") and all(rule in other for other in others))

    def loss_rules(self) -> tuple[Rule, ...]:
        """The rules that explain the loss; with the mean over samples, the counts of which the parts have as many as of samples."""
        if self.rules or self._batches.count < 2:
            return self.rules
        alike: list[Count] | None = None
        for dealing in _SPLITS[:: 1 if self._batches.count > 2 else 3]:
            shares = self.shares(dealing)
            rows = [share.rows / share.of for share in shares]
            here = [count for count, weights in self.weights(shares).items() if shares_alike(weights, rows)]
            alike = here if alike is None else [count for count in alike if count in here]
        return ("mean", *(alike or ()))


def _total(count: Count, part: Any) -> float:
    try:
        return count.total(part)
    except (LookupError, TypeError):
        return float("nan")


def _ignored_by(module: nn.Module) -> Collection[int]:
    """Whole numbers that the module or its parts have under the names of padding, or of what a loss ignores."""
    found: set[int] = set()
    for each in module.modules():
        for holder in (each, getattr(each, "hparams", None), getattr(each, "config", None)):
            found.update(value for name, value in _named(holder) if type(value) is int and any(word in name.lower() for word in _NAMES))
    return sorted(found)


def _named(holder: Any) -> Iterator[tuple[str, Any]]:
    fields = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    yield from ((name, value) for name, value in fields.items() if isinstance(name, str))
