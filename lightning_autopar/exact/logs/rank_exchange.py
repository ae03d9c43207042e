"""Exchanges what the ranks logged: in one small collective once all ranks know what each logs, and in two, one of them on the host, with
GPUs.

Each rank sends a header (a hash of what it logged, and how much) with its numbers: samples, values, and metrics' states. When a combination
of hashes comes up for the first time, the ranks also send the names behind the hashes; from then on the numbers are enough. With GPUs,
values and states stay on the device, and only the header, which the host must read, goes by the host. Knows entries and a process group;
nothing of a trainer, of the step, or of what becomes of the values.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopar._lightning import rank_zero_warn
from lightning_autopar.exact.logs.combined_values import Combiner, Entry

#: How many numbers an exchange sends without first exchanging their count: this many, or up to the most if the last one needed more.
_NUMBERS, _MOST_NUMBERS = 192, 2**14
_HEADER = 4
#: How many combinations are cached; a step that always logs under new names makes as many.
_REMEMBERED = 1024
#: On a GPU, the values of so many exchanges are checked together, so that the host doesn't wait at each.
_UNCHECKED = 100
#: Relative difference up to which a hook's values on one replica's ranks count as equal.
_SAME = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Entries that the same ranks logged.

    Args:
        places: of each entry, in the order that all ranks have.
        ranks: who logged them; None for all, each in the order of ``entries``.
        columns: of each rank (row) and entry, which of the rank's it is.
        states: of each entry, with each rank that logged it, where among the rank's states its metric's begin; nothing where they don't go
            by the exchange.
    """

    entries: tuple[Entry, ...]
    places: tuple[int, ...]
    ranks: Tensor | None = None
    columns: Tensor | None = None
    states: tuple[tuple[tuple[int, int], ...], ...] = ()
    #: Both as they are on a device.
    _there: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, table: Tensor) -> Tensor:
        """This block's part of what all ranks sent, (ranks, entries)."""
        if self.ranks is None or self.columns is None:
            return table[:, : len(self.entries)]
        device = table.device
        if device not in self._there:
            self._there[device] = self.ranks.to(device, non_blocking=True), self.columns.to(device, non_blocking=True)
        return table[self._there[device]]


@dataclass(frozen=True, kw_only=True)
class _Agreement:
    """Who logs what.

    Args:
        same: whether all ranks log the same, in one order.
        twins: pairs of (rank, column) that must have one value: those of a replica's first rank and of another one's.
    """

    blocks: tuple[_Block, ...]
    same: bool
    twins: tuple[tuple[Entry, tuple[int, int], tuple[int, int]], ...] = ()

    @property
    def valued(self) -> bool:
        """Whether there are values besides metrics, which have their own."""
        return any(entry.valued or not entry.is_metric for block in self.blocks for entry in block.entries)


class Exchange:
    """Combines all ranks' entries into one list, the same on all of them.

    Where several ranks are one replica (a pipeline's stages), what a stage logged in a step counts for the whole replica, and what its
    ranks log alike outside of a step (in hooks) counts once.

    Args:
        combiner: combines the replicas' values into the whole batch's.
        device: where tensors must lie for the default process group's collectives.
        ranks_per_replica: how many ranks, one after the other, hold one replica.
    """

    def __init__(self, combiner: Combiner, *, device: torch.device, ranks_per_replica: int = 1) -> None:
        self._combiner = combiner
        self._device = device
        self._ranks_per_replica = ranks_per_replica
        self._agreements: dict[tuple[int, ...], _Agreement] = {}
        self._hashes: dict[tuple[Any, ...], int] = {}
        self._warned: set[str] = set()
        self._unchecked: list[tuple[_Agreement, Tensor]] = []
        self._open: list[dist.ProcessGroup] = []
        #: The room for numbers in the next exchange: the same on all ranks, from the last exchange.
        self._room = _NUMBERS
        #: The group for values on the host; None is the default group.
        self.host_group: dist.ProcessGroup | None = None
        #: The same, where the default group was asked for once; torch would look for it at each exchange.
        self._ranks: dist.ProcessGroup | None = None
        #: The group, on the host, of the ranks that run the same stage of other replicas; None if that is this rank alone, or all ranks.
        self.peers: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Make its process groups. Every rank calls this."""
        if self._device.type != "cpu":
            # Values on the host (names, batch sizes) are exchanged on the host: reading them from the device would wait for the step's
            # kernels.
            self.host_group = dist.new_group(backend="gloo")
            self._open.append(self.host_group)
        self._ranks = self.host_group or dist.group.WORLD
        world_size, stages = dist.get_world_size(), self._ranks_per_replica
        if 1 < stages < world_size:
            for first in range(stages):
                ranks = range(first, world_size, stages)
                group = dist.new_group(list(ranks), backend="gloo")
                if dist.get_rank() in ranks:
                    self.peers = group
                    self._open.append(group)

    def open_again(self) -> None:
        """The same after all groups were given up."""
        self._open.clear()
        self.host_group = self._ranks = self.peers = None
        if dist.get_world_size() > 1:
            self.open()

    def close(self) -> None:
        """Undo :meth:`open`."""
        while self._open:
            dist.destroy_process_group(self._open.pop())
        self.host_group = self._ranks = self.peers = None

    @property
    def staged(self) -> bool:
        """Whether several ranks are one replica."""
        return self._ranks_per_replica > 1

    def __call__(self, entries: list[Entry]) -> tuple[bool, list[tuple[Entry, Tensor | None, int]]]:
        """Whether all ranks logged the same values, and what all ranks together logged: entry, value, and its weight in an epoch's mean.

        Raises:
            RuntimeError: on every rank, if a hook logged a tensor that isn't the same on all ranks of a replica; on GPUs some batches
                later, or at the epoch's end.
        """
        on_host = self._device.type == "cpu"
        width = 3 if on_host else 2
        states = [entry.packed for entry in entries if entry.packed is not None]
        header = [self._hash(entries), len(entries), max((entry.of for entry in entries), default=0), sum(map(len, states))]
        numbers = [float(number) for entry in entries for number in (entry.rows, entry.batch_size, entry.number if on_host else 0)[:width]]
        mine = torch.tensor([*map(float, header), *numbers], dtype=torch.float64)
        if on_host:
            mine = torch.cat([mine, *states])
        room = self._room
        gathered = self._gather(mine, _HEADER + room)
        heads = [[int(number) for number in row] for row in gathered[:, :_HEADER].tolist()]
        agreement = self._agree(tuple(hashed for hashed, *_ in heads), entries)
        most, most_states = max(count for _, count, _, _ in heads), max(of_states for *_, of_states in heads)
        needed = max(width * count + (of_states if on_host else 0) for _, count, _, of_states in heads)
        self._room = needed if _NUMBERS < needed <= _MOST_NUMBERS else _NUMBERS
        if not most:
            return agreement.same, []
        if needed > room:
            gathered = self._gather(mine, _HEADER + needed)
        table = gathered[:, _HEADER : _HEADER + width * most].reshape(len(gathered), most, width)
        values = table[:, :, -1]
        begins = [_HEADER + width * count for _, count, _, _ in heads]  # each rank's states
        if not on_host and (agreement.valued or most_states):
            gathered = self._gather_values(entries, most, most_states)
            values, begins = gathered[:, :most], [most] * len(heads)
        self._check(agreement, values)
        samples = max(of for _, _, of, _ in heads)
        found: dict[int, tuple[Entry, Tensor | None, int]] = {}
        for block in agreement.blocks:
            rows = block.of(table[:, :, 0])
            # What is known of other ranks' entries holds for any batch, except for the batch's size.
            stated = [replace(entry, of=samples) if entry.of not in (0, samples) else entry for entry in block.entries]
            combined = self._combiner.combine(stated, block.of(values), rows, block.of(table[:, :, 1]).tolist())
            counts = rows.sum(0).tolist()
            for place, (entry, value, size), count, rank_states in zip(block.places, combined, counts, block.states, strict=True):
                if rank_states:
                    rows_of_states = [gathered[rank, begins[rank] + at :][: entry.packed_numbers] for rank, at in rank_states]
                    entry = replace(entry, packed=torch.stack(rows_of_states))
                if not self.staged:
                    self._combiner.tell_partly(entry, int(count), entry.of)
                if count or entry.is_metric or not entry.of:  # otherwise only a rank that was fed another rank's row saw it
                    found[place] = entry, value, size
        return agreement.same, [found[place] for place in sorted(found)]

    # -- who logs what ---------------------------------------------------------------------------------------------------------------------

    def _agree(self, hashes: tuple[int, ...], entries: list[Entry]) -> _Agreement:
        """Who logs what, by all ranks' hashes: the same on every rank, as all have received the same ones."""
        known = self._agreements.get(hashes)
        if known is not None:
            return known
        same = len(set(hashes)) == 1
        own = [replace(entry, value=None, states=None, packed=None) for entry in entries]
        lists = [own] * len(hashes)
        if not same:
            lists = [[] for _ in hashes]
            dist.all_gather_object(lists, own, group=self.host_group)
        if same and not self.staged:
            begins = _begins(own)
            states = tuple(
                tuple((rank, at) for rank in range(len(hashes))) if entry.packed_numbers else ()
                for entry, at in zip(own, begins, strict=True)
            )
            known = _Agreement(blocks=(_Block(entries=tuple(own), places=tuple(range(len(own))), states=states),), same=True)
        else:
            known = self._by_name(lists, same)
        if len(self._agreements) >= _REMEMBERED:
            self._agreements.clear()
        self._agreements[hashes] = known
        return known

    def _by_name(self, lists: Sequence[Sequence[Entry]], same: bool) -> _Agreement:
        """Group entries of one name, in the order of the stages and of the first rank that logged it, hooks' last."""
        by_key: dict[tuple[Any, ...], dict[int, tuple[int, Entry]]] = {}
        begins = [_begins(theirs) for theirs in lists]
        for rank, theirs in enumerate(lists):
            seen: defaultdict[tuple[Any, ...], int] = defaultdict(int)
            for column, entry in enumerate(theirs):
                key = (entry.stage, *entry.key)
                seen[key] += 1
                by_key.setdefault((*key, seen[key]), {})[rank] = (column, entry)
        ordered = sorted(by_key.values(), key=lambda ranks: _order(next(iter(ranks.values()))[1]))
        blocks: dict[tuple[int, ...], list[tuple[int, Entry, list[int]]]] = {}
        twins = []
        for place, ranks in enumerate(ordered):
            speakers = self._speakers(ranks)
            first = ranks[speakers[0]][1]
            blocks.setdefault(tuple(speakers), []).append((place, first, [ranks[rank][0] for rank in speakers]))
            if first.stage is None and not first.is_metric:
                speaker_of = {rank // self._ranks_per_replica: rank for rank in speakers}
                for rank in set(ranks) - set(speakers):
                    speaker = speaker_of[rank // self._ranks_per_replica]
                    twins.append((first, (speaker, ranks[speaker][0]), (rank, ranks[rank][0])))
        return _Agreement(
            blocks=tuple(
                _Block(
                    entries=tuple(entry for _, entry, _ in members),
                    places=tuple(place for place, _, _ in members),
                    ranks=torch.tensor(ranks).unsqueeze(1),
                    columns=torch.tensor([columns for _, _, columns in members]).t().contiguous(),
                    states=tuple(
                        tuple((rank, begins[rank][column]) for rank, column in zip(ranks, columns, strict=True))
                        if entry.packed_numbers
                        and all(
                            lists[rank][column].packed_numbers == entry.packed_numbers for rank, column in zip(ranks, columns, strict=True)
                        )
                        else ()
                        for _, entry, columns in members
                    ),
                )
                for ranks, members in blocks.items()
            ),
            same=same,
            twins=tuple(twins),
        )

    def _speakers(self, ranks: dict[int, tuple[int, Entry]]) -> list[int]:
        """The ranks, of those that logged something, whose values count."""
        first = next(iter(ranks.values()))[1]
        if first.stage is not None or not self.staged:
            return sorted(ranks)
        replicas: dict[int, int] = {}
        for rank in sorted(ranks):
            replicas.setdefault(rank // self._ranks_per_replica, rank)
        return list(replicas.values())

    def _check(self, agreement: _Agreement, values: Tensor) -> None:
        """Check that a hook logs the same value on all ranks of a replica; if not, no value would be right for all."""
        if not agreement.twins:
            return
        self._unchecked.append((agreement, values))
        if values.device.type == "cpu" or len(self._unchecked) >= _UNCHECKED:
            self.settle()

    def settle(self) -> None:
        """Check what hasn't been checked yet; on a GPU the host waits for it.

        Raises:
            RuntimeError: as calling it.
        """
        unchecked, self._unchecked = self._unchecked, []
        for agreement, values in unchecked:
            self._compare(agreement, values.tolist())

    def _compare(self, agreement: _Agreement, table: list[list[float]]) -> None:
        for entry, (speaker, column), (rank, other) in agreement.twins:
            ours, theirs = table[speaker][column], table[rank][other]
            if ours == theirs or math.isclose(ours, theirs, rel_tol=_SAME) or (math.isnan(ours) and math.isnan(theirs)):
                continue
            differs = (
                f"{entry.name!r}, logged in {entry.fx}, isn't the same on all ranks of a pipeline: "
                f"{ours:.7g} on rank {speaker}, {theirs:.7g} on rank {rank}"
            )
            if not entry.given_as_number:
                raise RuntimeError(
                    f"{differs}. Each holds its own stages' parameters and gradients only; log what all ranks know, or what a step "
                    "computes, or run without a pipeline (allow=['single', 'ddp', 'fsdp'])"
                )
            if entry.name not in self._warned:
                self._warned.add(entry.name)
                rank_zero_warn(f"{differs}; logged is that of each replica's first rank")

    def _hash(self, entries: list[Entry]) -> int:
        """48 bits of what was logged, the same in every process: a float64 holds them exactly."""
        keys = tuple(
            (entry.stage, entry.valued, entry.deferred, entry.packed_numbers, entry.given_as_number, entry.of > 0, *entry.key)
            for entry in entries
        )
        if keys not in self._hashes:
            if len(self._hashes) >= _REMEMBERED:
                self._hashes.clear()
            said = [(key, entry.result, str(entry.dtype)) for key, entry in zip(keys, entries, strict=True)]
            self._hashes[keys] = int.from_bytes(hashlib.blake2b(repr(said).encode(), digest_size=6).digest(), "big")
        return self._hashes[keys]

    # -- communication ---------------------------------------------------------------------------------------------------------------------

    def _gather(self, numbers: Tensor, size: int) -> Tensor:
        """Every rank's numbers, ``size`` of each."""
        mine = torch.zeros(size, dtype=torch.float64)
        mine[: len(numbers)] = numbers[:size]
        assert self._ranks is not None, "it is open"
        gathered = torch.empty(self._ranks.size(), size, dtype=torch.float64)
        dist.all_gather(list(gathered.unbind()), mine, group=self._ranks)
        return gathered

    def _gather_values(self, entries: list[Entry], most: int, most_states: int) -> Tensor:
        """Every rank's values and, after them, states on the device, (ranks, numbers), without waiting for it."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        own = [zero if entry.value is None else entry.value.to(self._device, torch.float64) for entry in entries]
        values = torch.stack([*own, *[zero] * (most - len(own))]).as_subclass(Tensor)  # users may log a subclass, with methods of its own
        states = [entry.packed.to(self._device) for entry in entries if entry.packed is not None]
        missing = most_states - sum(map(len, states))
        mine = torch.cat([values, *states, zero.expand(missing)]) if most_states else values
        gathered = mine.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather(list(gathered.unbind()), mine)
        return gathered


def _begins(entries: Sequence[Entry]) -> list[int]:
    """Where among a rank's states each entry's begin."""
    return list(accumulate((entry.packed_numbers for entry in entries[:-1]), initial=0)) if entries else []


def _order(entry: Entry) -> tuple[bool, int]:
    return entry.stage is None, entry.stage or 0
