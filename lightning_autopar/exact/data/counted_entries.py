"""What a loss may be a mean over, other than samples: entries that a batch counts, such as unmasked tokens, nodes or weights.

Which count it is, planning finds out (:mod:`lightning_autopar.strategies.trials.part_weights`). Here the counts of a batch are taken on the
host, before the batch goes to the device, and the ranks tell each other theirs. Knows batches and shares; no module and no loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import islice, product
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from lightning_autopar.constraints import LOSS, overrule
from lightning_autopar.exact.data.batch_structure import is_collection, is_leaf, is_object, state_of
from lightning_autopar.exact.data.rank_share import BatchShare, Tally

Path = tuple[Any, ...]
#: Begins a collective, to which each rank gives its number for each count. It returns a function, which waits for the collective and
#: gives the numbers of all ranks, in the order of ranks.
Gather = Callable[[list[float]], Callable[[], Sequence[Sequence[float]]]]
#: How deep in a batch tensors are looked for.
_DEEP = 5
#: Those whose numbers torch can compare and add up on a CPU.
_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
#: Larger tensors are pictures, which nobody counts: looking at them would take longer than the step.
_MOST = 1 << 23
#: And nobody leaves out entries of larger samples.
_MOST_OF_SAMPLE = 1 << 16
#: So many numbers of a sample may say where something in it begins and ends.
_PLACES = 4
#: The comparisons with a value by which entries may count: each one's sign, its opposite and its function.
_SIGNS = {"differs": "!=", "equals": "==", "above": ">", "upto": "<=", "from": ">=", "below": "<"}
_OPPOSITE = {"differs": "equals", "equals": "differs", "above": "upto", "upto": "above", "from": "below", "below": "from"}
_OPERATORS = {"!=": operator.ne, "==": operator.eq, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "<": operator.lt}
_COMPARISONS = {kind: _OPERATORS[sign] for kind, sign in _SIGNS.items()}
#: A comparison that a step makes of entries: where they are, what kind of count it is or is the opposite of, and with which value.
Compared = tuple[Path, str, float]
#: As many of these are tried.
MOST_COMPARED = 16
#: And as many ways in which several of one tensor may hold together.
_MOST_TOGETHER = 8
#: Relative difference up to which two ways to count agree: rounding of a sum of weights.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many entries of a tensor in a batch count.

    Args:
        path: where in the batch the tensor is: keys, indices and names of attributes.
        kind: ``"differs"``: entries other than ``ignored``, or another one of ``_COMPARISONS`` with it; ``"sum"``: the sum of its entries;
            ``"finite"``: entries that are no NaN; ``"filled"``: rows of its last dimension that aren't all 0; ``"rows"``: its size in
            dimension 0; ``"alike"``: samples whose numbers are ``ignored`` and ``also``.
        ignored: the value of entries that don't count, or what entries are compared with; of a sum, what all entries were in batches that
            tell nothing.
        without: ``"first"`` or ``"last"``: entries of dimension 1 that are left out, as a causal model has no prediction for the first one.
        also: of ``"differs"``: further values of entries that don't count; of ``"alike"``: a sample's further numbers.
        within: further comparisons, each with its number, all of which hold for entries that count.
        alike: further counts that planning couldn't tell from this one. They must agree in every batch.
        mean: what kind of mean a logged value is over the entries: one of ``log_rules.MEANS``; empty for the usual one.
    """

    path: Path
    kind: str
    ignored: float = 0
    without: Literal["", "first", "last"] = ""
    also: tuple[float, ...] = ()
    within: tuple[tuple[str, float], ...] = ()
    alike: tuple[Count, ...] = ()
    mean: str = ""

    @property
    def _place(self) -> str:
        return "batch" + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in self.path if str(key)[:1] != "_")

    @property
    def _values(self) -> str:
        return " or ".join(map(str, (self.ignored, *self.also)))

    @property
    def left_out(self) -> str:
        """The entries that don't count, in words."""
        what = {
            "finite": "NaN",
            "sum": f"other numbers than {self.ignored:g}",
            "differs": f"entries of {self._values}",
            "filled": "rows of 0",
            "alike": f"other numbers than {' and '.join(f'{value:g}' for value in (self.ignored, *self.also))}",
        }
        more = "".join(f" or {_SIGNS[_OPPOSITE[kind]]} {value}" for kind, value in self.within)
        return f"{what.get(self.kind) or f'entries {_SIGNS[_OPPOSITE[self.kind]]} {self.ignored}'}{more} in {self._place}"

    def __str__(self) -> str:
        place = self._place
        place += {"": "", "first": "[:, 1:]", "last": "[:, :-1]"}[self.without]
        words = {"sum": f"the sum of {place}", "finite": f"{place} that aren't NaN", "rows": f"the rows of {place}"}
        words["filled"] = f"the rows of {place} that aren't all 0"
        more = "".join(f" and {_SIGNS[kind]} {value}" for kind, value in self.within)
        return words.get(self.kind) or f"{place} {_SIGNS[self.kind]} {self._values}{more}"

    def tensor(self, batch: Any) -> Tensor:
        """The tensor.

        Raises:
            LookupError: if the batch has no such tensor.
        """
        tensor = _tensor(value_at(batch, self.path))
        if tensor is None or tensor.ndim < (2 if self.without else 1):
            raise LookupError(self.path)
        return tensor

    def rows(self, batch: Any) -> Tensor:
        """The number for each row of the tensor.

        Raises:
            LookupError: as for :meth:`tensor`.
        """
        tensor = self.tensor(batch)
        if self.kind == "rows":
            return torch.ones(len(tensor), dtype=torch.float64)
        if self.without:
            tensor = tensor[:, 1:] if self.without == "first" else tensor[:, :-1]
        counted = tensor if self.kind == "sum" else self.counts(tensor)
        return (counted.flatten(1).sum(1, dtype=torch.float64) if counted.ndim > 1 else counted.double()).cpu()

    def counts(self, tensor: Tensor) -> Tensor:
        """Which entries count."""
        if self.kind in ("finite", "filled"):
            return tensor.isfinite() if self.kind == "finite" else (tensor != 0).any(-1)
        if self.kind == "alike":
            rows, usual = tensor.reshape(len(tensor), -1), tensor.new_tensor((self.ignored, *self.also))
            return (rows == usual).all(1) if rows.shape[1] == len(usual) else torch.zeros(len(rows), dtype=torch.bool)
        counted = _COMPARISONS[self.kind](tensor, self.ignored) if self.kind in _COMPARISONS else tensor != 0
        further = (*(("differs", value) for value in self.also), *self.within)
        return reduce(Tensor.logical_and, (_COMPARISONS[kind](tensor, value) for kind, value in further), counted)

    def uncounted(self, tensor: Tensor) -> Tensor | None:
        """A value for entries of this tensor that don't count; None where its type has none. Of samples that are alike, another one, whose
        numbers are one farther from zero, or nearer to each other.
        """
        if self.kind == "alike":
            row = tensor[0]
            return torch.where((row <= 0) | (row < row.double().mean()), row + 1, row - 1)
        if self.kind not in _COMPARISONS:
            return tensor.new_tensor(math.nan if self.kind == "finite" else 0)
        near = 1e-3 * max(1.0, abs(self.ignored)) if tensor.is_floating_point() else 1
        values = (self.ignored, *sorted((self.ignored - near, self.ignored + near), key=abs, reverse=not self.ignored))
        found = (torch.tensor(value, dtype=torch.float64).to(tensor.dtype) for value in values)
        return next((value for value in found if not self.counts(value)), None)

    def leaves_out(self, batch: Any) -> bool:
        """Whether the tensor has entries that don't count; False where the batch has no such tensor."""
        try:
            tensor = self.tensor(batch)
        except LookupError:
            return False
        if self.kind == "finite":
            return tensor.is_floating_point() and bool(tensor.isnan().any())
        return bool((tensor != self.ignored).any() if self.kind == "sum" else not self.counts(tensor).all())

    def total(self, batch: Any) -> float:
        """The number of the whole batch.

        Raises:
            LookupError: as for :meth:`rows`.
        """
        return float(self.rows(batch).sum())


#: How the values of a batch's parts make the whole batch's.
Rule = str | Count


def candidates(batch: Any, samples: int, ignored: Collection[int], compared: Collection[Compared] = ()) -> Iterator[Count]:
    """What a loss on this batch may be a mean over, likelier counts first.

    Args:
        batch: on the host.
        ignored: values of entries that may not count.
        compared: what the step compares entries with.
    """
    for counts in _comparisons(batch, samples, compared):
        yield from counts
    found = {path: tensor for path, tensor in tensors_in(batch) if 0 < tensor.numel() <= _MOST and tensor.ndim}
    whole = {path: tensor for path, tensor in found.items() if not tensor.is_floating_point()}
    # Labels tell more than masks of inputs: entries may have no label although they are no padding.
    labels = sorted(whole.items(), key=lambda item: not any(word in str(item[0]).lower() for word in ("label", "target")))
    named = (-100, *ignored, 0)
    for value in dict.fromkeys((*named[:-1], *(value for tensor in whole.values() for value in _fillers(tensor)), 0)):
        for path, tensor in labels:
            # The numbers of nodes in edges are others in each part, so that any of them may seem to be a filler by chance.
            if len(tensor) == samples or (value in named and bool((tensor == value).any())):
                yield Count(path=path, kind="differs", ignored=value)
                if tensor.ndim > 1:
                    yield Count(path=path, kind="differs", ignored=value, without="first")
                    yield Count(path=path, kind="differs", ignored=value, without="last")
    for path, tensor in found.items():
        if tensor.is_floating_point() and (len(tensor) == samples or bool(tensor.isnan().any())):
            yield Count(path=path, kind="finite")
        if (tensor.is_floating_point() or tensor.numel() == len(tensor)) and tensor.dtype != torch.bool and bool((tensor >= 0).all()):
            yield Count(path=path, kind="sum")
            if tensor.ndim > 1:
                yield Count(path=path, kind="sum", without="first")
        if len(tensor) != samples:
            yield Count(path=path, kind="rows")


def _comparisons(batch: Any, samples: int, compared: Collection[Compared]) -> Iterator[tuple[Count, ...]]:
    """By which entries may count that a step compares: those for which it holds, and those for which it doesn't."""
    found = {path: tensor for path, tensor in tensors_in(batch) if tensor.ndim and len(tensor) == samples and 0 < tensor.numel() <= _MOST}
    for path, kind, value in compared:
        if path in found and (kind != "filled" or found[path].ndim > 1):
            ways: tuple[Literal["", "first", "last"], ...] = ("", "first", "last") if found[path].ndim > 1 + (kind == "filled") else ("",)
            others = tuple(other for place, other_kind, other in compared if (place, other_kind) == (path, kind) == (path, "differs"))
            several = [Count(path=path, kind=kind, ignored=others[0], also=others[1:])] if len(others) > 1 else []
            together = _together(path, found[path], compared)
            for each in dict.fromkeys((kind, _OPPOSITE.get(kind, kind))):
                known = [Count(path=path, kind=each, ignored=value), *(several if each == "differs" else []), *together]
                yield tuple(replace(count, without=way) for count in known for way in ways)


def _together(path: Path, tensor: Tensor, compared: Collection[Compared]) -> list[Count]:
    """Counts of the entries for which several comparisons hold, of other kinds than ``differs`` alone: all as they hold for all entries, or
    either way.
    """
    ways: list[list[tuple[str, float]]] = []
    for kind, value in ((kind, value) for place, kind, value in compared if place == path and kind in _COMPARISONS):
        holding = [each for each in (kind, _OPPOSITE[kind]) if bool(_COMPARISONS[each](tensor, value).all())]
        ways.append([(each, value) for each in holding or (kind, _OPPOSITE[kind])])
    if len(ways) < 2 or {way[0][0] for way in ways} == {"differs"}:
        return []
    each_way = islice(product(*ways), _MOST_TOGETHER)
    return [Count(path=path, kind=first[0], ignored=first[1], within=tuple(rest)) for first, *rest in each_way]


def absent(batch: Any, samples: int, ignored: Collection[int], compared: Collection[Compared] = ()) -> list[tuple[Count, ...]]:
    """What a loss may be a mean over once a batch has entries that don't count, as all of them count in this one: for each kind of entry
    the counts that leave it out; likelier kinds first.
    """
    all_count = (counts for counts in _comparisons(batch, samples, compared) if not counts[0].leaves_out(batch))
    found: list[tuple[int, tuple[Count, ...]]] = [(-1, counts) for counts in all_count]
    for path, tensor in tensors_in(batch):
        if not tensor.ndim or len(tensor) != samples or not 0 < tensor.numel() <= min(_MOST, samples * _MOST_OF_SAMPLE):
            continue
        ways: tuple[Literal["", "first", "last"], ...] = ("", "first", "last") if tensor.ndim > 1 else ("",)
        usual = tensor[0].flatten().tolist() if tensor.dtype != torch.bool and tensor.numel() <= samples * _PLACES else []
        tells = len({*usual}) > 1 or (usual and usual[0] <= (not tensor.is_floating_point()))
        if tells and bool((tensor == tensor[0]).all()):
            found.append((-1, (Count(path=path, kind="alike", ignored=usual[0], also=tuple(usual[1:])),)))  # where samples begin, say
        if tensor.is_floating_point():
            if not tensor.isnan().any():
                found.append((2, (Count(path=path, kind="finite"),)))
            if tensor.flatten()[0] > 0 and bool((tensor == tensor.flatten()[0]).all()):
                found.append((0, tuple(Count(path=path, kind="sum", without=way) for way in ways[:2])))
            continue
        if tensor.numel() == samples and tensor.flatten()[0] > 1 and bool((tensor == tensor[0]).all()):
            found.append((-1, (Count(path=path, kind="sum"),)))  # lengths, which are all the same here
        mask = bool(((tensor == 0) | (tensor == 1)).all())
        # A mask of several entries a sample has no others than these; one entry a sample is a class.
        values = (0, 1) if mask and (tensor.ndim > 1 or tensor.dtype == torch.bool) else (-100, *ignored, *(0, 1)[: 1 + mask], -1)
        least = 0 if tensor.dtype in (torch.bool, torch.uint8) else torch.iinfo(tensor.dtype).min
        for value in dict.fromkeys(value for value in values if value >= least):
            if not ((path, "differs", value) in compared or (tensor == value).any()):
                likely = 0 if mask and value >= 0 else 1 if value == -100 or value in ignored else 3
                found.append((likely, tuple(Count(path=path, kind="differs", ignored=value, without=way) for way in ways)))
    return [counts for _, counts in sorted(found, key=lambda each: each[0])]


def _fillers(tensor: Tensor) -> list[int]:
    """Values with which a tensor of whole numbers may be filled up: what stands at most rows' ends, and the least and the largest one."""
    if tensor.dtype == torch.bool:
        return []
    ends = [int(tensor[:, place].flatten().mode().values) for place in (-1, 0)] if tensor.ndim > 1 and tensor.shape[1] else []
    return [*ends, *(int(value) for value in (tensor.min(), tensor.max()) if tensor.ndim > 1 or value < 0)]


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors and arrays of a batch whose entries can be counted, each with where it is."""
    if (tensor := _tensor(value)) is not None:
        yield path, tensor
    elif len(path) < _DEEP and not is_leaf(value):
        for key, item in _items(value):
            yield from tensors_in(item, (*path, key))


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        value = torch.as_tensor(value)
    if isinstance(value, list) and value and all(type(each) in (int, float) for each in value):  # lengths, say
        value = torch.tensor(value)
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested and value.dtype in _DTYPES
    return value.detach() if is_dense else None


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(state_of(value).items()) if is_object(value) else []


def _item(value: Any, key: Any) -> Any:
    return value[key] if isinstance(value, (Mapping, list, tuple)) else state_of(value)[key]


def value_at(batch: Any, path: Path) -> Any:
    """What the batch has there.

    Raises:
        LookupError: if it has nothing there.
    """
    value = batch
    for key in path:
        if is_leaf(value) or isinstance(value, Tensor):
            raise LookupError(path)
        value = _item(value, key)
    return value


class BatchCounts:
    """Counts each batch of a run, where a loss or a logged value is a mean over something that batches count.

    Args:
        rules: how the ranks' values combine, by hook and name; the loss has the name ``""``.
        gather: a collective that gives every rank the numbers of all; None where batches aren't split over ranks. Then they are counted
            only where they run in parts.
        replicated: how many ranks have the same part of a batch.
        unweighed: entries that no training batch may have: what its parts would weigh isn't known.
    """

    def __init__(
        self,
        rules: Mapping[tuple[str, str], Rule],
        gather: Gather | None,
        replicated: int = 1,
        unweighed: Sequence[Count] = (),
    ) -> None:
        self._by: Rule = rules.get(LOSS, "mean")
        self._counts: dict[str, list[Count]] = {}
        for (hook, _), rule in rules.items():
            stage = hook.removeprefix("on_").partition("_")[0]  # of a hook at a batch's start or end
            step = hook if hook.endswith("_step") else "training_step" if stage == "train" else f"{stage}_step"
            if isinstance(rule, Count) and rule not in self._counts.setdefault(step, []):
                self._counts[step].append(rule)
        #: Whether something is counted, or the loss is a sum; else nobody has to call this.
        self.needed = bool(self._counts) or self._by != "mean" or bool(unweighed)
        self._unweighed = unweighed
        self._gather, self._replicated = gather, 1 if gather is None else replicated
        self._tallies: dict[Count, Tally] = {}
        self._now: Rule = "mean"
        self._waiting: Callable[[], None] = _nothing

    def arrives(self, hook: str, batch: Any, shares: Sequence[BatchShare], *, in_parts: bool) -> None:
        """A batch arrives for this hook. Where something in it is counted, a collective begins, which ends when the first share that
        :meth:`on` gives is asked for its weight: the step's forward pass has run then.

        Args:
            hook: the name of the step that gets it.
            batch: this rank's part of it, on the host.
            shares: this rank's of it, one of each loader; empty where that isn't known yet, as this rank has all of it.
            in_parts: whether this rank runs it in parts.

        Raises:
            ValueError: on one rank, if the batch has entries of which it isn't known what they change, or lacks what is counted. The weight
                raises it on every rank, if one of them lacks that, or counts differ that couldn't be told apart.
        """
        for count in self._unweighed if hook == "training_step" and (in_parts or self._gather is not None) else ():
            if count.leaves_out(batch):
                raise ValueError(_unweighed_words(count))
        self._tallies, self._now, self._waiting = {}, self._by if hook == "training_step" else "mean", _nothing
        if counts := self._counts.get(hook, []):
            self._waiting = partial(self._count, hook, counts, batch, shares, in_parts=in_parts or self._gather is None)
        if self._gather is not None:
            self._take()

    def _take(self) -> None:
        waiting, self._waiting = self._waiting, _nothing
        waiting()

    def _count(self, hook: str, counts: Sequence[Count], batch: Any, shares: Sequence[BatchShare], *, in_parts: bool) -> None:
        empty, alone = bool(shares) and not shares[0].rows, shares[0] if len(shares) == 1 else None
        ways = [(count, way) for count in counts for way in (count, *count.alike)]
        own = [None if empty else _counted(way, batch, alone) for _, way in ways]
        first = {count: place for place, (count, way) in enumerate(ways) if way == count}
        known = [
            each is not None and (not in_parts or _proportional(each, own[first[count]]))
            for each, (count, _) in zip(own, ways, strict=True)
        ]
        found = [0.0 if empty else each.total if each and fits else math.nan for each, fits in zip(own, known, strict=True)]
        gathered = partial(list, [found]) if self._gather is None else self._gather(found)

        @cache
        def totals() -> list[float]:
            return self._totals(hook, ways, first, torch.tensor(gathered(), dtype=torch.float64))

        if self._gather is None or any(map(math.isnan, found)):  # then the step may fail by what is missing
            totals()
        for count, place in first.items():
            each = own[place] or _Counted(total=0.0, of_samples=lambda: [0.0])
            total = partial(lambda place: totals()[place], place)
            self._tallies[count] = Tally(own=each.total, of_all=total, samples=each.of_samples)

    def _totals(self, hook: str, ways: Sequence[tuple[Count, Count]], first: Mapping[Count, int], everyones: Tensor) -> list[float]:
        """The whole batch's counts, in the order of ``ways``."""
        totals = everyones.sum(0) / self._replicated
        for place, (count, way) in enumerate(ways):
            ours, theirs = everyones[:, place], everyones[:, first[count]]
            agree = torch.allclose(ours * totals[first[count]], theirs * totals[place], rtol=_SAME, atol=0.0)  # never NaN with NaN
            if not agree or bool(totals[place]) != bool(totals[first[count]]):
                raise ValueError(_words(hook, count, way))
        return [float(total) for total in totals]

    def on(self, share: BatchShare) -> BatchShare:
        """This rank's share of the batch, with what it counts.

        Raises:
            ValueError: as for :meth:`arrives`.
        """
        self._take()
        return replace(share, by=self._now, tallies=self._tallies) if self._tallies or self._now != "mean" else share


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What a rank has of a batch, in all and by sample."""

    total: float
    of_samples: Callable[[], Sequence[float]]


def _counted(count: Count, batch: Any, share: BatchShare | None) -> _Counted | None:
    """None where the batch has no such tensor."""
    try:
        rows: list[float] = count.rows(batch).tolist()
    except (LookupError, TypeError):
        return None

    def of_samples() -> Sequence[float]:
        if share is not None and share.parts:  # samples are dealt out to parts in turns, so that a part's first sample can stand for it
            return [*(count.total(part) for part in share.parts), *[0.0] * (share.fed - len(share.parts))]
        value = batch
        for place, key in enumerate(count.path):
            if is_collection(value):
                return [replace(count, path=count.path[place:]).total(sample) for sample in value.to_data_list()]
            value = _item(value, key)
        return rows

    return _Counted(total=sum(rows), of_samples=of_samples)


def _proportional(one: _Counted | None, other: _Counted | None) -> bool:
    if one is None or other is None or one is other:
        return one is not None and one is other
    a, b = (torch.tensor(each.of_samples(), dtype=torch.float64) for each in (one, other))
    return a.shape == b.shape and torch.allclose(a * b.sum(), b * a.sum(), rtol=_SAME, atol=0.0)


def _nothing() -> None:
    """There is nothing to count."""


def _unweighed_words(count: Count) -> str:
    return (
        f"this batch has {count.left_out}, and planning found no weights of a batch's parts with which their losses give that of the whole "
        "batch wherever it has some and wherever it has none, so this batch can't be split. Run the model on one device in one piece "
        "(plan=Plan(engine='single', devices=[...])), or let the first batch have some, so that planning takes them into account"
        + overrule("later_entries")
    )


def _words(hook: str, count: Count, other: Count) -> str:
    if other == count:
        return (
            f"planning found that what {hook} computes is a mean over {count}, but this batch, or a rank's part of it, has no such tensor; "
            "give all batches the same tensors, or run on one device (allow=['single'])"
        )
    return (
        f"what {hook} computes is a mean over {count} or over {other}. They had equal counts in all batches that planning looked at, but "
        "not in this one, so the weight of its parts isn't known; run on one device (allow=['single']), or shuffle the data, so that "
        "planning sees such a batch"
    )
