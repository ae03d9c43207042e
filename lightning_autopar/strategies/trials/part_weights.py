"""What the parts of a batch weigh in its loss: found out by trying, where it isn't their samples.

A mean over unmasked tokens is the mean of the parts' means, weighed by the tokens that each part has. Which entries of the batch count, the
losses of several splits tell: one count must explain all of them, far better than the number of samples does. Knows a batch, its parts and
their losses; how a step is run it is told.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_autopar._lightning import LightningModule
from lightning_autopar._lightning_compat import before_transfer, is_overridden, transfer_batch
from lightning_autopar._temporary import patched
from lightning_autopar.constraints import LOSS
from lightning_autopar.exact.data.batch_structure import take_rows
from lightning_autopar.exact.data.counted_entries import (
    MOST_COMPARED,
    Compared,
    Count,
    Path,
    Rule,
    absent,
    candidates,
    tensors_in,
    value_at,
)
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, Tally, share_of
from lightning_autopar.exact.logs.log_rules import MEANS, LogComparison, Logged, compare_logs, shares_alike
from lightning_autopar.exact.logs.logging_hooks import mentions
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.trace.first_batch import copied
from lightning_autopar.strategies.trials.draw_probe import Observation, everything
from lightning_autopar.strategies.trials.first_batch_parts import BatchParts
from lightning_autopar.strategies.trials.recorded_backward import EQUAL, difference_of
from lightning_autopar.text import error_line

_LOG = logging.getLogger(__name__)
#: The splits that are looked at: two parts, three, and two of which one has twice as many samples.
_SPLITS = (Dealing.even(2), Dealing.even(3), Dealing((0, 0, 1)))
#: Finds out for a split what explains each value.
Compare = Callable[[Dealing], LogComparison]
#: Hooks that may change a batch after it is counted.
_LATE = ("transfer_batch_to_device", "on_after_batch_transfer")
_FEW = 4  # samples with which a changed batch is tried
_PICKS = ("argsort", "kthvalue", "median", "nanmedian", "quantile", "sort", "topk")  # samples by their values
_CROSS_ENTROPIES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_ATEN = torch.ops.aten
#: Comparisons with a value, each as one of the ways to count or as its opposite.
_COMPARISONS = {_ATEN.ne: "differs", _ATEN.eq: "differs", _ATEN.gt: "above", _ATEN.le: "above", _ATEN.ge: "from", _ATEN.lt: "from"}
#: Operators whose result has entries of their input.
_KEEPS = {_ATEN._to_copy, _ATEN.clone, _ATEN.index, _ATEN.index_select, _ATEN.masked_select, _ATEN.gather}
#: Operators whose result still tells where their input is zero; and those whose result tells which rows of it are zero.
_ZEROS = {_ATEN.abs, _ATEN.pow, _ATEN.ne, _ATEN.eq}
_ROWS = {_ATEN.sum, _ATEN.amax, _ATEN.linalg_vector_norm, _ATEN.any, _ATEN.all}
#: Operators that ask which entries are zero.
_TRUTHS = {_ATEN.logical_not, _ATEN.nonzero, _ATEN.any, _ATEN.all}
_NEAR_ZERO = 1e-3
#: Where an attribute's name says that its value stands for entries that don't count.
_NAMES = ("pad", "ignore")


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """A tensor that holds entries of a batch.

    Args:
        tensor: the tensor.
        paths: where in the batch these are.
        times: by what each is multiplied.
        plus: what is added to that.
        zeros: which count it tells of where of the values only zeros are left.
    """

    tensor: Tensor
    paths: list[Path] = field(default_factory=list)
    times: float = 1
    plus: float = 0
    zeros: str = ""


#: By operator, with a number as its other operand: the factor and the summand of its result, from those of its input.
_LINEAR: dict[Any, Callable[[float, float, float], tuple[float, float]]] = {
    _ATEN.add: lambda times, plus, value: (times, plus + value),
    _ATEN.sub: lambda times, plus, value: (times, plus - value),
    _ATEN.rsub: lambda times, plus, value: (-times, value - plus),
    _ATEN.neg: lambda times, plus, _: (-times, -plus),
    _ATEN.mul: lambda times, plus, value: (times * value, plus * value),
    _ATEN.div: lambda times, plus, value: (times / value, plus / value) if value else (0, 0),
}


class LossArguments(TorchDispatchMode):
    """While open, what cross-entropies are told: the value of entries that don't count, and what classes weigh. And what a step compares
    entries of its batch with by itself.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: set[int] = set()
        #: The class that weighs most and the one that weighs least, where a loss weighs them.
        self.weighed: set[int] = set()
        self.compared: dict[Compared, None] = {}
        #: By their memory: tensors that hold entries of the batch.
        self._from: dict[int, _Entries] = {}
        for path, tensor in tensors_in(batch):
            if memory := _memory(tensor):
                self._from.setdefault(memory, _Entries(tensor=tensor)).paths.append(path)

    def __exit__(self, *raised: Any) -> None:
        self._from.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's has no annotations

    def __torch_dispatch__(self, operation: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if operation in _CROSS_ENTROPIES:
            _, target, weight, _, ignored = args
            self.ignored.add(ignored)
            self._note(self._from.get(_memory(target)), "differs", ignored)
            if weight is not None and bool((weight != weight[0]).any()):
                self.weighed.update((int(weight.argmax()), int(weight.argmin())))
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket
        known = self._from.get(_memory(args[0])) if args and isinstance(args[0], Tensor) else None
        if known is not None:
            value = args[1].item() if len(args) > 1 and isinstance(args[1], Tensor) and args[1].numel() == 1 else [*args, None][1]
            number = isinstance(value, (int, float))
            kept = "filled" if name in _ROWS else known.zeros or "differs" * (name in _ZEROS)
            if name in _COMPARISONS and number:
                self._note(known, _COMPARISONS[name], value)
            elif name in _TRUTHS or (name in _KEEPS and result.dtype == torch.bool):
                self._note(replace(known, zeros=kept), "differs", 0)
            if name in _LINEAR and (number or name is _ATEN.neg) and not known.zeros and not kwargs and len(args) < 3:
                times, plus = _LINEAR[name](known.times, known.plus, value)
                self._from[_memory(result)] = replace(known, tensor=result, times=times, plus=plus)
            elif name in _KEEPS or (kept and name in _ROWS | _ZEROS and (name not in _COMPARISONS or (number and value == 0))):
                self._from[_memory(result)] = replace(known, tensor=result, zeros=kept)
        return result

    def _note(self, known: _Entries | None, kind: str, value: float) -> None:
        boolean = known is not None and known.tensor.dtype == torch.bool and not known.zeros
        if known is None or boolean or not math.isfinite(value) or (known.zeros and abs(value) > _NEAR_ZERO):
            return
        if known.zeros:
            kind, value = known.zeros, 0
        if not known.times or (kind == "filled" and known.plus):
            return
        if known.times < 0:
            kind = {"above": "from", "from": "above"}.get(kind, kind)
        value = float(f"{(value - known.plus) / known.times:.12g}") if (known.times, known.plus) != (1, 0) else value
        value = int(value) if value == int(value) else value
        self.compared.update({(path, kind, value): None for path in known.paths})


def _memory(tensor: Tensor) -> int:
    """A number that views of one tensor share; 0 where there is none."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if dense else 0


def _sums(rule: Rule, count: Count) -> bool:
    """Whether a rule adds up the tensor in which the count leaves entries out."""
    return isinstance(rule, Count) and rule.kind == "sum" and count.kind != "sum" and rule.path == count.path


class Weighing:
    """What a batch's parts weigh.

    Args:
        batches: the batch and its parts.
        known: counts that explain other batches.
    """

    def __init__(self, module: LightningModule, batches: BatchParts, known: Collection[Count] = ()) -> None:
        self._module = module
        self._batches = batches
        self._known = tuple(known)
        self._weights: dict[tuple[int, ...], dict[Count, list[float]]] = {}
        #: The numbers that the step compares entries of the batch with, and the arguments of its cross-entropies. Empty until it has run.
        self.told = LossArguments(None)
        #: The rules that explain the loss; none as long as it is a mean over samples, as far as is known.
        self.rules: tuple[Rule, ...] = ()
        #: The mean over samples and what explains the loss as well, where that was tried.
        self._equal: tuple[Rule, ...] = ()

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
            replace(share, by=by, tallies={by: Tally(own=weight, of_all=lambda: 1.0, samples=lambda: ())})
            for share, weight in zip(shares, weights, strict=True)
        ]

    def weights(self, shares: Sequence[BatchShare]) -> dict[Count, list[float]]:
        """What the shares weigh by each count that they all have, in all 1."""
        key = shares[0].dealing.turns
        if key not in self._weights:
            state, found = rng.capture({}), dict[Count, list[float]]()
            try:
                parts = [self._counted(share) for share in shares]
                found = {count: [_total(count, part) for part in parts] for count in self._candidates}
            except Exception:  # the user's collate function, on few samples; a tensor of a kind that can't be compared
                _LOG.debug("what parts of the batch hold can't be counted", exc_info=True)
            finally:
                rng.restore(state, {})
            totals = {count: sum(numbers) for count, numbers in found.items()}
            # Without a total, or with a part that lacks the tensor (NaN), it is no count of this batch.
            self._weights[key] = {count: [each / totals[count] for each in found[count]] for count in found if 0 < totals[count] < math.inf}
        return self._weights[key]

    @property
    def compared(self) -> list[Compared]:
        """What the step compares entries of the batch with, as far as that can be tried."""
        return list(self.told.compared)[:MOST_COMPARED]

    @cached_property
    def _candidates(self) -> list[Count]:
        owners = (self._module, getattr(getattr(self._module, "_trainer", None), "datamodule", None))
        late = any(is_overridden(hook, each) for hook in _LATE for each in owners if each is not None)
        if late and not self._batches.raw:  # the batch as it was before isn't known
            return []
        whole = self._counted(everything(self._batches.count))
        return list(dict.fromkeys([*self._known, *candidates(whole, self._batches.count, _ignored_by(self._module), self.compared)]))

    def _counted(self, share: BatchShare) -> Any:
        """A part as it is counted in a run: before it goes to the device."""
        batch = self._batches.part(share)
        return before_transfer(self._module, batch) if self._batches.raw else batch

    def among_few(
        self, size: int, observe: Callable[[Sequence[BatchShare]], Observation], in_double: Callable[[], AbstractContextManager[None]]
    ) -> tuple[float, str]:
        """By how much the loss differs in parts of two samples, where the step picks samples by their values (the hardest half of a batch):
        ``size`` parts may pick the same ones by chance. 0 where it picks none. And how it fails on such parts, if it does.
        """
        step, pairs = self._module.training_step, self._batches.count // 2
        if pairs <= size or not mentions([step, self._module.forward], self._module, lambda name: name in _PICKS):
            return 0.0, ""
        shares = self.shares(pairs)
        try:
            difference = difference_of(observe(shares), shares)
            if difference > EQUAL:
                with in_double():
                    difference = difference_of(observe(shares), shares)
        except Exception as error:  # more are picked than there are
            _LOG.debug("the step can't be run on two samples", exc_info=True)
            return 0.0, error_line(error)
        return difference, ""

    def explains(
        self,
        difference: float,
        observed: Observation,
        shares: Sequence[BatchShare],
        observe: Callable[[Sequence[BatchShare]], Observation],
        in_double: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Whether it turns out now that the loss is no mean over samples, but goes by something that explains all splits.

        Args:
            difference: by how much the loss differs from the parts' mean, by what is known so far.
            observed: what shows that, of these ``shares``.
            observe: runs the step on the whole batch and on parts.
            in_double: makes a context in which the step runs in double precision.
        """
        if self.rules or (difference <= EQUAL and not (self.telling and self.undecided(self._of_losses(observed, shares), every=False))):
            return False
        try:
            with in_double():
                compare = partial(self._losses_compared, observe, double=True)
                found = self.told_apart(self._over_splits(compare), compare)
        except Exception:  # the step insists on single precision
            _LOG.debug("what parts weigh can't be tried in double precision", exc_info=True)
            try:
                found = self._over_splits(partial(self._losses_compared, observe, double=False))
            except Exception:  # a part is too small for the step
                _LOG.debug("what parts weigh can't be tried", exc_info=True)
                return False
        rules = found.matching[LOSS]
        self.rules, self._equal = ((), rules) if "mean" in rules else (rules, ())
        return bool(self.rules)

    @cached_property
    def telling(self) -> list[Dealing]:
        """The splits whose parts don't have as many entries that look as if they alone counted as they have samples. Losses that hardly
        differ from each other, as those of a new model, look like a mean over samples, whatever they are; and so do those of two parts
        that happen to have as many of what counts.
        """
        unlike = {shares[0].dealing: self._unlike(shares) for shares in self._splits()}
        if not any(unlike.values()):
            return []
        whole, marked = self._counted(everything(self._batches.count)), {-100, *_ignored_by(self._module)}
        compared = {(path, value) for path, _, value in self.compared}

        def marks(count: Count) -> bool:
            tensor = count.tensor(whole)
            mask = tensor.ndim > 1 and bool(((tensor == 0) | (tensor == 1)).all())
            known = mask or count in self._known or count.kind not in ("differs", "sum")
            # Of samples' classes, what two halves have alike isn't told by their losses.
            alike = tensor.ndim == 1 and count not in unlike[_SPLITS[0]]
            named = count.ignored in marked or (count.path, count.ignored) in compared
            return known or alike or (count.kind == "differs" and named)

        return [dealing for dealing, counts in unlike.items() if any(marks(count) for count in counts)]

    def _splits(self) -> list[list[BatchShare]]:
        return [self.shares(dealing) for dealing in _SPLITS if dealing.holders <= self._batches.count]

    def _unlike(self, shares: Sequence[BatchShare]) -> list[Count]:
        """The counts of which parts don't have as many as of samples."""
        rows = [share.rows / share.of for share in shares]
        return [count for count, weights in self.weights(shares).items() if not shares_alike(weights, rows)]

    def told_apart(self, found: LogComparison, compare: Compare) -> LogComparison:
        """Of several counts that explain a value alike, those that still do once entries of one of them no longer count.

        Args:
            found: what explains each value.
            compare: finds that out anew for a split.
        """
        counts: list[Count] = []
        for key, rules in found.matching.items():
            of_loss = tuple(rule for rule in rules if (replace(rule, mean="") if isinstance(rule, Count) else rule) in self.rules)
            if len(rules) > 1 and self.rules and len(of_loss) >= len(self.rules):  # it is the loss, most likely, or its exponential
                found = found.narrowed(LogComparison(matching={key: of_loss}))
            elif len(rules) > 1 and all(isinstance(rule, Count) for rule in rules):
                counts += [rule for rule in rules if isinstance(rule, Count) and rule not in counts]
        kept = found
        for count in {count.path: count for count in reversed(counts) if count.kind != "rows"}.values():
            try:
                with self.changed(count, counts):
                    kept = kept.narrowed(compare(_SPLITS[0]))
            except Exception:  # the step, or a batch without rows
                _LOG.debug("a batch of which other entries count can't be tried", exc_info=True)
        # Where none holds, several have to agree for an entry to count.
        return replace(found, matching={key: kept.matching[key] or rules for key, rules in found.matching.items()})

    @contextmanager
    def changed(self, count: Count, counts: list[Count], given: Any = None) -> Iterator[None]:
        """While open, fewer entries of the first sample count, and only these counts are candidates.

        Args:
            given: the batch of :meth:`arrived`, of which a few samples are taken; by default the whole batch is made anew.
        """
        batches, first, samples = self._batches, self._batches.first, self._batches.count
        batch = copied(self.arrived() if given is None else given)
        if given is not None and samples >= 2 * _FEW:
            with suppress(ValueError):  # its rows aren't samples
                fewer = Dealing.even(samples // _FEW)
                batch, samples = take_rows(batch, 0, fewer, samples=samples)[1], fewer.rows(samples, 0)
        batch = tree_map_only(Tensor, Tensor.clone, batch)  # one tensor may have two names: a language model's inputs and its labels
        tensor = count.tensor(batch)
        if (ignored := count.uncounted(tensor)) is None:
            raise ValueError(f"no entry of {count} is left out")
        counted = tensor[count.counts(tensor)].flatten()[0].clone()
        single = tensor.numel() == len(tensor)
        weighs = count.kind == "sum" and (tensor.is_floating_point() or (single and bool(counted > 1)))
        if weighs:  # an entry that isn't left out may weigh less
            counted = counted / 2 if tensor.is_floating_point() else counted // 2
        if single or count.kind == "alike" or (tensor.ndim == 2 and count.kind == "filled"):
            tensor[0] = counted if weighs else ignored
        else:  # its first entry counts and its last one doesn't, as some counts leave out either
            tensor[0, 1::2] = tensor[0, -1] = ignored
            tensor[0, 0] = counted
        if isinstance(numbers := value_at(batch, count.path), list):
            numbers[:] = tensor.tolist()
        changed = replace(first, batch=batch, samples=None, collate=None)
        with (
            patched(batches, "first", changed),
            patched(batches, "count", samples),
            patched(batches, "raw", False),
            patched(self, "_weights", {}),
            patched(self, "_candidates", counts),
        ):
            yield

    def arrived(self) -> Any:
        """The whole batch as the step gets it."""
        whole = self._batches.part(everything(self._batches.count))
        return transfer_batch(self._module, whole) if self._batches.raw else whole

    def holding(
        self, rules: LogComparison, compare: Callable[[Sequence[BatchShare]], LogComparison], values: Collection[int]
    ) -> tuple[LogComparison, dict[tuple[str, str], list[Count]]]:
        """The rules that hold as well where a batch has entries that don't count, of which this one has none: a mask's zeros, NaN, labels
        of -100. It is changed to have some, a kind at a time. And for each value the kinds with which no rule holds.

        Args:
            rules: those that hold for this batch.
            compare: finds them out anew for a split.
            values: further numbers that may not count, or weigh otherwise.
        """
        lost: dict[tuple[str, str], list[Count]] = {}
        given: Any = None
        whole = self._counted(everything(self._batches.count))
        tried = absent(whole, self._batches.count, [*values, *_ignored_by(self._module)], self.compared)
        for counts in tried:
            alike = counts[0].kind == "alike"  # this tells only whether anything else would be counted
            if any(each.kind == "alike" and each.path == counts[0].path for each in lost.get(LOSS, ())):
                continue
            # What weighs by a tensor's sum (lengths) says what its entries are: none is a filler.
            open_to = {
                key: found for key, found in rules.matching.items() if not found or any(not _sums(rule, counts[0]) for rule in found)
            }
            # None of these can be told from the mean over samples here.
            more = [count for each in tried if each[0].path == counts[0].path for count in each] if alike else counts
            likely = {key: tuple(dict.fromkeys((*found, *more))) if "mean" in found else found for key, found in open_to.items()}
            try:
                given = self.arrived() if given is None else given  # before the module is in double precision, which a hook may not take
                with self.changed(counts[0], list(dict.fromkeys([*more, *self._candidates])), given):
                    narrowed = LogComparison(matching=likely).narrowed(compare(self.shares(_SPLITS[0]))).matching
            except Exception:  # such an entry is no input of this step's: it would raise the same in a run
                _LOG.debug("the step fails where not all of the batch counts", exc_info=True)
                continue
            for key in (key for key, known in likely.items() if known and not narrowed[key]):
                usual = float(counts[0].tensor(whole).flatten()[0]) if counts[0].kind == "sum" else counts[0].ignored
                lost.setdefault(key, []).append(replace(counts[0], ignored=usual))
            if not alike:
                rules = replace(rules, matching={**rules.matching, **{key: narrowed[key] or rules.matching[key] for key in likely}})
        return rules, lost

    def _over_splits(self, compare: Compare) -> LogComparison:
        found = compare(_SPLITS[0])
        others = [dealing for dealing in self.telling if dealing != _SPLITS[0]] or [_SPLITS[2]]
        return found if self._batches.count == 2 else found.narrowed(compare(others[-1]))

    def _losses_compared(self, observe: Callable[[Sequence[BatchShare]], Observation], dealing: Dealing, *, double: bool) -> LogComparison:
        """What explains all of a step's losses in one split."""
        shares = self.shares(dealing)
        return self.of_losses(observe(shares), shares, double=double)

    def of_losses(self, observed: Observation, shares: Sequence[BatchShare], *, double: bool) -> LogComparison:
        """What explains all of a step's losses in this split."""
        found = self._of_losses(observed, shares, double=double).matching
        rules = list(found.values()) or [()]
        shared = (rule for rule in rules[0] if all(rule in each for each in rules) and rule not in ("max", "min", *MEANS))
        return LogComparison(matching={LOSS: tuple(rule for rule in shared if isinstance(rule, str) or not rule.mean)})

    def _of_losses(self, observed: Observation, shares: Sequence[BatchShare], *, double: bool = False) -> LogComparison:
        """What explains each of a step's losses, by its number."""
        if any(len(losses) != len(observed.whole) for losses in observed.parts):
            return LogComparison()
        whole, *parts = (
            {("", str(number)): Logged(value=float(loss), reduce_fx="mean") for number, loss in enumerate(losses)}
            for losses in (observed.whole, *observed.parts)
        )
        found = compare_logs(whole, parts, [share.rows for share in shares], double=double, weights=self.weights(shares))
        return replace(found, matching={number: found.matching.get(number, ()) for number in whole})

    def undecided(self, found: LogComparison, *, every: bool) -> bool:
        """Whether there are splits that are :attr:`telling`, and values may still be means over a count that isn't even in all splits.

        Args:
            found: what explains the values of a split.
            every: whether each value has to exclude a count, as those that a step logs; else one of them does, as of its losses.
        """
        excluded = [found.excluded.get(key, frozenset()) for key in found.matching]
        counts = {count for shares in self._splits() for count in self._unlike(shares)} if self.telling else set()
        return not all((all if every else any)(count in each for each in excluded) for count in counts)

    def loss_rules(self) -> tuple[Rule, ...]:
        """The rules that explain the loss; with the mean over samples, the counts of which the parts have as many as of samples."""
        if self.rules or self._equal:
            return self.rules or self._equal
        return ("mean", *self.even())

    def even(self) -> tuple[Count, ...]:
        """The counts of which the parts have as many as of samples, in all splits."""
        splits = [(self.weights(shares), self._unlike(shares)) for shares in self._splits()]
        return tuple(count for count in splits[0][0] if all(count in weights and count not in unlike for weights, unlike in splits))


def _total(count: Count, part: Any) -> float:
    try:
        return count.total(part)
    except (LookupError, TypeError):
        return float("nan")


def _ignored_by(module: nn.Module) -> Collection[int]:
    """Whole numbers that the module or its parts have under the names of padding, or of what a loss ignores."""
    found: set[int] = set()
    for each in module.modules():
        for holder in (each, vars(each).get("_hparams"), vars(each).get("config")):
            found.update(value for name, value in _named(holder) if type(value) is int and any(word in name.lower() for word in _NAMES))
    return sorted(found)


def _named(holder: Any) -> Iterator[tuple[str, Any]]:
    fields = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    yield from ((name, value) for name, value in fields.items() if isinstance(name, str))
