"""What steps keep (sums, counts, lists of outputs) held to what one device would keep, on every rank and after every part.

A step keeps it in attributes of its module, or in variables of the user's: globals, those of closures, attributes of classes. Before a
step those that are known to change are noted. When it is over, ranks and parts of a batch tell each other what they left,
and each puts the whole batch's in its place. Knows modules, shares of a batch and a process group; not which engine runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_autopar._lightning import LightningModule, Trainer, rank_zero_warn
from lightning_autopar._lightning_compat import step_name
from lightning_autopar._root import PYTORCH
from lightning_autopar.exact.data.fingerprint import bytes_of
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.reached_variables import Reached, is_followed, names_in
from lightning_autopar.exact.step.attribute_rules import (
    MISSING,
    ROW_RULES,
    Before,
    Evidence,
    KeptRules,
    Path,
    PathRules,
    Slot,
    combined,
    plain,
    restored,
    slots,
    taken,
)
from lightning_autopar.text import format_bytes

_LOG = logging.getLogger(__name__)

#: Rows larger than this that a step keeps of every batch, or of the last one, aren't sent between ranks.
_ROW_BYTES, _LAST_ROW_BYTES = 16 << 20, 1 << 20

#: Packages whose modules' attributes aren't looked at.
_OTHERS = ("torch.", "torchmetrics.", "transformers.", *PYTORCH)
_NOT_KEPT = frozenset((*vars(LightningModule()), "trainer", "log", "log_dict", "print", "all_gather", "manual_backward", "optimizers",
                       "lr_schedulers"))  # fmt: skip
#: Public attributes that torchmetrics' own ``Metric`` sets. They are no states.
_OF_METRICS = frozenset(("training", "update", "compute", "compute_on_cpu", "compute_with_cache", "dist_sync_fn", "dist_sync_on_step",
                         "distributed_available_fn", "process_group", "sync_on_compute"))  # fmt: skip
#: A namespace, of which ``get``, ``[]`` and ``pop`` count, and a name in it.
Place = tuple[dict[str, Any], str]


def variables(module: LightningModule) -> dict[str, Place]:
    """The user's variables that functions of the module reach, by their names in sentences, which no attribute has; and what they name of
    the DataModule's attributes.
    """
    found = Reached({type(each): each for each in module.modules()}.values()).places()
    named = {name for kind in type(module).__mro__ for each in vars(kind).values() if isfunction(each) for name in names_in(each.__code__)}
    try:
        source = getattr(module.trainer, "datamodule", None) if "datamodule" in named else None
    except RuntimeError:  # it has no trainer yet
        source = None
    held = {} if source is None else vars(source)
    return found | {f"attribute {type(source).__name__}.{name}": (held, name) for name in named & held.keys() if is_followed(held[name])}


def places_of(module: LightningModule, names: Iterable[str]) -> dict[str, Place]:
    """The places of names that are among :func:`attributes` or :func:`variables`."""
    found: dict[str, Place] = {}
    outside = variables(module) if any(map(is_variable, names)) else {}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if not is_variable(name):
            found[name] = vars(module.get_submodule(owner)), attribute
        elif name in outside:  # else the user's code has removed it
            found[name] = outside[name]
    return found


def is_variable(name: str) -> bool:
    """Whether it names one of :func:`variables` rather than an attribute."""
    return " " in name


def attributes(module: LightningModule, made: Iterable[str] = ()) -> dict[str, Place]:
    """The attributes in which a user's step may keep something, by dotted name: those of the user's modules; of metrics, what is no state.

    Args:
        made: further names, of attributes that a step makes; the class may have a default of them (``total = 0.0``).
    """
    more: dict[str, list[str]] = {}
    for owner, _, name in (each.rpartition(".") for each in made):
        more.setdefault(owner, []).append(name)
    return {
        f"{prefix}.{name}".lstrip("."): (vars(child), name)
        for prefix, child in module.named_modules()
        if child is module or not f"{type(child).__module__}.".startswith(_OTHERS)
        for name in (*vars(child), *more.get(prefix, ()))
        if name not in _NOT_KEPT and not (Metric in type(child).__mro__ and _is_exchanged(child, name))
    }


def _is_exchanged(metric: Any, name: str) -> bool:
    """Whether it is a metric's state or torchmetrics' own, rather than something that the user's class keeps beside."""
    return name.startswith("_") or name in metric._defaults or name in _OF_METRICS


def settled(evidence: Evidence) -> tuple[dict[Path, Any], dict[Path, str]]:
    """The rules for what a step keeps, and why other paths have none."""
    rules, unknown = evidence.settled()
    without = dict.fromkeys(unknown, "is no sum, mean, maximum, minimum or list over the parts of a batch")
    for path, size_bytes in evidence.row_bytes.items():
        # What a submodule keeps only of the last batch is for inspection.
        of_submodule = "." in path[0] and not is_variable(path[0])
        most_bytes = _ROW_BYTES if "+" in path else 0 if of_submodule else _LAST_ROW_BYTES
        if rules.get(path) in ROW_RULES and size_bytes > most_bytes:
            without[path] = f"has {format_bytes(size_bytes)} of a batch"
    return {path: rule for path, rule in rules.items() if path not in without}, without


def title(module: LightningModule, name: str) -> str:
    """An attribute, by the name of the module's class; or a variable."""
    return f"the {name}" if is_variable(name) else f"{type(module).__name__}.{name}"


@dataclass(kw_only=True)
class _Part:
    """What a part of a batch left at places with rules, in the same order for all parts."""

    share: BatchShare
    paths: tuple[Path, ...]
    values: list[Any]


class KeptSteps:
    """Gives what a step keeps the values of the whole batch.

    Args:
        rules: how the values that parts leave combine into the whole batch's.
        device: where the default process group's collectives want their tensors.
        group: of all ranks, for values on the host; None for the default group.
        parts: whether a step may run in parts, each of which finds what the step found.
    """

    def __init__(
        self, trainer: Trainer, rules: KeptRules, *, device: torch.device, group: Callable[[], dist.ProcessGroup | None], parts: bool
    ) -> None:
        self._trainer = trainer
        # Values that are the same on all ranks change only if parts would change them one after the other.
        self._rules = {hook: {path: rule for path, rule in by.items() if parts or rule != "same"} for hook, by in rules.items()}
        self._device = device
        self._group = group
        self._found: dict[str, dict[str, Place]] = {}
        self._before: dict[str, Any] = {}
        self._parts: list[_Part] = []
        self._slots: list[Slot] = []
        self._warned: set[str] = set()

    @property
    def _now(self) -> PathRules:
        """The rules for the step that runs."""
        return self._rules.get(step_name(self._trainer), {})

    @contextmanager
    def step(self, share: BatchShare | None) -> Iterator[None]:
        """The context of one of the user's steps on this rank's share; every rank runs equally many."""
        rules = self._now
        if not rules or share is None:
            yield
            return
        for name, (space, key) in self._places(rules).items():
            found = space.get(key, MISSING)
            self._before[name] = MISSING if found is MISSING else taken(found, (name,), rules)
        self._parts = []
        yield
        if not self._parts:
            self._note(share, rules)
        self._combine(rules)
        self._before, self._slots = {}, []

    @contextmanager
    def part(self, share: BatchShare) -> Iterator[None]:
        """The context of a part of a step, within :meth:`step`: each part finds what the step found."""
        rules = self._now
        if not rules or not self._before:
            yield
            return
        for name, (space, key) in self._places(rules).items() if self._parts else ():
            if self._before[name] is MISSING:
                space.pop(key, None)
            else:
                space[key] = restored(self._before[name])
        yield
        self._note(share, rules)

    def _places(self, rules: PathRules) -> dict[str, Place]:
        """The places of what the running step keeps; found once, as functions don't change within a run."""
        hook = step_name(self._trainer)
        if hook not in self._found:
            self._found[hook] = places_of(self._trainer.lightning_module, tuple(dict.fromkeys(path[0] for path in rules)))
        return self._found[hook]

    def _note(self, share: BatchShare, rules: PathRules) -> None:
        """Record what the step has left."""
        self._slots = []
        for name, (space, key) in self._places(rules).items():
            value = space.get(key, MISSING)
            if value is not MISSING:
                self._slots += slots((name,), self._before[name], value, rules, partial(space.__setitem__, key))
        self._slots = [slot for slot in self._slots if rules[slot.path] != "same"]
        values = [plain(taken(slot.value, slot.path)) for slot in self._slots]
        self._parts.append(_Part(share=share, paths=tuple(slot.path for slot in self._slots), values=values))

    def _combine(self, rules: PathRules) -> None:
        """Replace this rank's values by the whole batch's; a collective."""
        if all(rule == "same" for rule in rules.values()):
            return
        parts = [part for part in self._gathered() if part.share.rows]
        for name in self._before:
            own = [slot for slot in self._slots if slot.path[0] == name]
            left = [[(path, value) for path, value in zip(part.paths, part.values, strict=True) if path[0] == name] for part in parts]
            try:
                if any([path for path, _ in each] != [slot.path for slot in own] for each in left):
                    raise ValueError("the parts left values in different places")
                made = _made(own, rules, [[value for _, value in each] for each in left], [part.share for part in parts])
            except (TypeError, ValueError, RuntimeError):  # on all ranks alike
                _LOG.debug("what parts of a batch keep in %s can't be brought together", name, exc_info=True)
                if name not in self._warned:
                    self._warned.add(name)
                    rank_zero_warn(
                        f"autopar: in this batch what the step keeps in {title(self._trainer.lightning_module, name)} depends on the "
                        "samples in a way that planning didn't see. From now on each rank keeps what comes of its own samples, unlike "
                        "one device"
                    )
                continue
            for slot, whole in zip(own, made, strict=True):
                _put(slot, whole)

    # -- communication ---------------------------------------------------------------------------------------------------------------------

    def _gathered(self) -> list[_Part]:
        """What all ranks' parts left. Tensors on a GPU are sent from there, and the host doesn't wait for them."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._parts
        sent: list[Tensor] = []
        told = [(part.share, part.paths, [self._told(value, sent) for value in part.values]) for part in self._parts]
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, told, group=self._group())
        tensors = self._exchange(sent, [sum(_sizes(theirs)) for theirs in heard])
        return [
            _Part(share=share, paths=paths, values=[next(rank) if isinstance(value, _There) else value for value in values])
            for theirs, rank in zip(heard, (_cut(flat, theirs) for flat, theirs in zip(tensors, heard, strict=True)), strict=True)
            for share, paths, values in theirs
        ]

    def _told(self, value: Any, sent: list[Tensor]) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        sent.append(value)
        return _There(shape=tuple(value.shape), dtype=value.dtype)

    def _exchange(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Exchange each rank's tensors as bytes, one after the other."""
        if not any(sizes):
            return [torch.empty(0, dtype=torch.uint8)] * len(sizes)
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        if sent:
            flat = torch.cat([bytes_of(value.contiguous()) for value in sent])
            mine[: len(flat)] = flat
        gathered = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(gathered, mine)
        return gathered


@dataclass(frozen=True, kw_only=True)
class _There:
    """Stands for a tensor on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _sizes(told: Any) -> list[int]:
    return [value.size_bytes for _, _, values in told for value in values if isinstance(value, _There)]


def _cut(flat: Tensor, told: Any) -> Iterator[Tensor]:
    begin = 0
    for _, _, values in told:
        for value in values:
            if isinstance(value, _There):
                yield flat[begin : begin + value.size_bytes].clone().view(value.dtype).view(value.shape)
                begin += value.size_bytes


def _made(own: Sequence[Slot], rules: PathRules, values: Sequence[Sequence[Any]], shares: Sequence[BatchShare]) -> list[Any]:
    """The whole batch's values for the places of an attribute; averages after the values that they are computed from."""
    made: list[Any] = [None] * len(own)
    by_path: dict[Path, Any] = {}
    for ratios in (False, True):
        for index, slot in enumerate(own):
            rule = rules[slot.path]
            if isinstance(rule, str) == ratios:
                continue
            if ratios:
                above, below = (by_path[(*slot.path[:-1], name)] for name in rule[1:])
                made[index] = type(slot.value)(above / below) if isinstance(slot.value, (int, float)) else above / below
            else:
                made[index] = combined(rule, plain(slot.before), [each[index] for each in values], shares)
            by_path[slot.path] = made[index]
    return made


def _put(slot: Slot, whole: Any) -> None:
    """Put a value in its place: into the object that was there before, if the step has written to that."""
    value = slot.value
    written = isinstance(slot.before, Before) and slot.before.container is value
    if isinstance(value, Tensor):
        whole = whole.to(value.device)
        if written and value.shape == whole.shape:
            value.data.copy_(whole)
            return
        if value.requires_grad and value.shape == whole.shape:
            whole = value + (whole - value).detach()
    elif written and not isinstance(value, (list, dict, set)) and hasattr(value, "shape"):
        value[...] = whole
        return
    slot.put(whole)
