"""A rank of FSDP2 plays the tape of a step: shards between steps, whole parameters where they are used. Knows no planner.

As ``fully_shard`` does it (torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` and ``_fsdp_collectives.py``): a gather
goes through one flat buffer of the unit on a stream of its own, from which each parameter is copied out into a buffer of the compute
stream. Forward keeps the flat buffer until the next unit's is copied out; backward frees it at once, and allocates that of the unit before.
When a unit's backward is over its whole parameters are freed, its gradients are copied into a flat buffer, which is kept until the next
unit's, and reduced into a shard on a third stream. A rank alone copies its shards into the whole parameters, one after the other. With
offload shards come from the host for that, and a reduced shard goes there at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning_autopar.memory.allocator.played_device import GATHER, REDUCE, PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeChange, TapePart, TapeParts
from lightning_autopar.memory.allocator.tape_player import CATEGORY, Player
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.strategies.fsdp.memory import AS_TRACED, Widths

#: The unit of all parameters that lie in no other.
ROOT = -1
#: Optimizer state of this size or less isn't of a parameter's shape, but a number (of steps), and isn't split.
_SCALAR_BYTES = 8


@dataclass(frozen=True)
class _Parameter:
    """One parameter on one rank of a group."""

    whole_bytes: int
    padded_bytes: int
    shard_bytes: int
    padded_shard_bytes: int
    learns: bool


def split_parameter(rows: int, row_bytes: int, learns: bool, rank: int, world_size: int) -> _Parameter:
    """A rank's part of a parameter: rows in chunks of equal length, the last ones shorter or empty, and padded where they are stored."""
    chunk = -(-rows // world_size)
    own = min(max(0, rows - rank * chunk), chunk)
    return _Parameter(
        whole_bytes=rows * row_bytes,
        padded_bytes=chunk * world_size * row_bytes,
        shard_bytes=own * row_bytes,
        padded_shard_bytes=chunk * row_bytes,
        learns=learns,
    )


class _Sizes:
    """A unit's sizes: of its gathered parameters and their buffer, of the buffer that reduces gradients, their shard, and each gradient."""

    def __init__(self, parameters: Sequence[_Parameter], widths: Widths) -> None:
        learning = [parameter for parameter in parameters if parameter.learns]
        self.whole_bytes = [parameter.padded_bytes for parameter in parameters]
        self.flat_bytes = sum(self.whole_bytes)
        self.reduced_bytes = round(widths.reduced * sum(parameter.padded_bytes for parameter in learning))
        self.shard_bytes = round(widths.stored * sum(parameter.padded_shard_bytes for parameter in learning))
        self.gradients = frozenset(parameter.whole_bytes for parameter in learning)


class FSDPPlayer(Player):
    """A rank of FSDP2.

    Args:
        units: indices of the blocks that are units of their own; the root has the rest.
        rank: in the group over which parameters are split.
        world_size: of that group.
        reshard: whether a unit's parameters are freed between forward and backward.
        offloads: whether shards, gradients and the optimizer lie in host memory.
    """

    def __init__(
        self,
        machine: PlayedDevice,
        script: TapeParts,
        footprint: Footprint,
        rows: Sequence[int],
        recompute: frozenset[int],
        *,
        units: Sequence[int],
        rank: int,
        world_size: int,
        reshard: bool,
        widths: Widths = AS_TRACED,
        offloads: bool = False,
    ) -> None:
        super().__init__(machine, script, footprint, rows, recompute)
        self.offloads = offloads
        self._one_by_one = offloads and world_size == 1
        self.world_size = world_size
        self.reshard = reshard
        self.widths = widths
        self.parameters: dict[int, list[_Parameter]] = {unit: [] for unit in (*units, ROOT)}
        known: dict[tuple[int, int, bool], _Parameter] = {}  # most blocks have equal parameters
        for index, part in _in_order(footprint):
            unit = index if index in self.parameters else ROOT
            for row in _rows(part):
                if row not in known:
                    known[row] = split_parameter(*row, rank, world_size)
                self.parameters[unit].append(known[row])
        everything = [parameter for unit in self.parameters.values() for parameter in unit]
        self._shard_bytes = {parameter.whole_bytes: parameter.shard_bytes for parameter in everything if parameter.whole_bytes}
        self._sizes = {unit: _Sizes(parameters, widths) for unit, parameters in self.parameters.items()}
        #: The unit that ran before each block, and before what follows the last.
        self._previous = {
            after: max((unit for unit in self.parameters if unit != ROOT and unit < after), default=ROOT)
            for after in (*self.parameters, len(footprint.blocks))
        }
        self._gathered: set[int] = set()
        self._whole_gradients: dict[int, list[Hashable]] = {unit: [] for unit in self.parameters}
        self._running = ROOT
        self._kept: Hashable = None
        self._ahead: dict[int, Hashable] = {}
        self._gathers = 0
        self._reduced: set[int] = set()
        self._reducing: Hashable = None

    def start(self) -> None:
        """Each unit's parameters move to the device whole, and are split there (``fully_shard``), the root's last; then buffers move. What
        is offloaded stays where it is.
        """
        machine = self.machine
        for unit, parameters in () if self.offloads else self.parameters.items():
            machine.hold_all("moving", [parameter.whole_bytes for parameter in parameters], "communication")
            shards = [round(parameter.padded_shard_bytes * self.widths.stored) for parameter in parameters]
            machine.hold_all(("shards", unit), shards, "parameters")
            machine.drop_all("moving")
        for change in self.script.before:
            if change.kind == "buffers":
                machine.hold(change.storage, change.size_bytes, CATEGORY[change.kind])
        own = [(parameter.shard_bytes, parameter.whole_bytes) for unit in self.parameters.values() for parameter in unit]
        self.hold_copies(sum(shard for shard, _ in own) / max(1, sum(whole for _, whole in own)))

    def keeps(self, change: TapeChange) -> bool:
        """Parameters and gradients are held by unit."""
        return change.kind not in ("parameters", "gradients")

    def size_of(self, change: TapeChange, *, updating: bool) -> int:
        """The optimizer sees shards only, on the host those that lie there."""
        if updating and self.offloads:
            return 0
        if not updating or change.size_bytes <= _SCALAR_BYTES:
            return super().size_of(change, updating=updating)
        for factor in (1, 2, 4):  # state in the parameters' precision, or in a lower or higher one
            for whole_bytes, times, by in ((change.size_bytes * factor, 1, factor), (change.size_bytes // factor, factor, 1)):
                if whole_bytes in self._shard_bytes:
                    return self._shard_bytes[whole_bytes] * times // by
        return -(-change.size_bytes // self.world_size)

    def enter(self, part: TapePart) -> None:
        """Gather, reshard and reduce where FSDP2's hooks do."""
        index = part.index
        if part.mark == "leave":
            if index == -1:
                self._gather_forward(ROOT)
            elif index in self._gathered and self.reshard:
                self._release(index)
        elif part.mark == "forward" and index in self.parameters:
            self._gather_forward(index)
        elif part.mark == "return":
            self._end_of_forward()
        elif part.mark == "backward" and index in self.parameters:
            self._end_of_forward()
            self._running = index
            if index not in self._gathered and self.parameters[index]:
                flat = self._fill(index)
                self._copy_out(index)
                self.machine.drop(flat)
            self._prefetch(index)
        elif part.mark == "optimizer":
            self._end_of_backward()

    def leave_backward(self, index: int) -> None:
        """The unit's parameters are freed and its gradients reduced, before the unit before it is gathered."""
        if index in self.parameters:
            self._reduce(index)
            self._running = ROOT

    def complete(self, key: Hashable, change: TapeChange) -> None:
        """Whole gradients wait for the end of their unit's backward."""
        self.machine.become(key, "communication")
        self._whole_gradients[self._running if change.size_bytes in self._sizes[self._running].gradients else ROOT].append(key)

    def clear(self, change: TapeChange) -> None:
        """All shards of gradients are freed at once: they are views of the reduced buffers."""
        if not self._reduced:  # this is called for each of them
            return
        for unit in self.parameters:
            if unit in self._reduced:
                self.machine.drop(("gradient", unit))
        self._reduced.clear()

    # -- gathering -------------------------------------------------------------------------------------------------------------------------

    def _fill(self, unit: int) -> Hashable:
        """A flat buffer of the unit, on the stream for gathers; the prefetched one, if there is one. A rank alone needs none."""
        if unit in self._ahead:
            return self._ahead.pop(unit)
        self._gathers += 1
        flat = ("flat", self._gathers)
        if self.world_size == 1:
            self.machine.hold(flat, 0, "communication")
            return flat
        fetched = [parameter.padded_shard_bytes for parameter in self.parameters[unit]] if self.offloads else []
        for number, size in enumerate(fetched):
            self.machine.hold(("fetched", unit, number), size, "communication", GATHER)
        self.machine.hold(flat, self._sizes[unit].flat_bytes, "communication", GATHER)
        for number in range(len(fetched)):
            self.machine.drop(("fetched", unit, number))
        return flat

    def _copy_out(self, unit: int) -> None:
        sizes = self._sizes[unit].whole_bytes
        if self._one_by_one:
            # Each parameter comes from the host by itself, and is let go when the next one has come (``wait_for_unshard``).
            for number, size in enumerate(sizes):
                self.machine.hold(("fetched", number), size, "communication")
                self.machine.drop(("fetched", number - 1))
                self.machine.hold(("whole", unit, number), size, "communication")
            self.machine.drop(("fetched", len(sizes) - 1))
        else:
            self.machine.hold_all(("whole", unit), sizes, "communication")
        self._gathered.add(unit)

    def _release(self, unit: int) -> None:
        self.machine.drop_all(("whole", unit))
        for number in range(len(self.parameters[unit]) if self._one_by_one else 0):
            self.machine.drop(("whole", unit, number))
        self._gathered.discard(unit)

    def _gather_forward(self, unit: int) -> None:
        """The flat buffer is kept until the next unit's is copied out: ``wait_for_unshard`` holds it in a local variable until then."""
        if unit in self._gathered or not self.parameters[unit]:
            return
        flat = self._fill(unit)
        self._copy_out(unit)
        self.machine.drop(self._kept)
        self._kept = flat

    def _end_of_forward(self) -> None:
        """The last flat buffer is freed; the root's backward begins, and prefetches the unit that ran last."""
        if self._kept is not None:
            self.machine.drop(self._kept)
            self._kept = None
            self._prefetch(len(self.footprint.blocks))

    def _prefetch(self, after: int) -> None:
        """Begin to gather the unit that ran before this one."""
        before = self._previous[after]
        if before != ROOT and before not in self._gathered and before not in self._ahead and self.parameters[before]:
            self._ahead[before] = self._fill(before)

    # -- reducing --------------------------------------------------------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        """The unit's backward is over (``post_backward``)."""
        machine = self.machine
        self._release(unit)
        machine.drop(self._reducing)
        self._reducing = None
        gradients, self._whole_gradients[unit] = self._whole_gradients[unit], []
        if not gradients:
            return
        self._reducing = ("reducing", unit)
        machine.hold(self._reducing, self._sizes[unit].reduced_bytes, "communication")
        for key in gradients:
            machine.drop(key)
        shard = ("gradient", unit)
        added = shard in machine  # to an earlier micro-batch's gradients
        key = (shard, "added") if added else shard
        machine.hold(key, self._sizes[unit].shard_bytes, "gradients", REDUCE)
        if added or self.offloads:  # the copy to the host is on the same stream
            machine.drop(key)
        if not self.offloads:
            self._reduced.add(unit)

    def _end_of_backward(self) -> None:
        """Reduce what no unit's own backward has reduced: the root's gradients, and units without a backward. Useless gathers are freed."""
        for flat in (self._kept, *self._ahead.values()):
            self.machine.drop(flat)
        self._kept = None
        self._ahead.clear()
        for unit in [unit for unit in self.parameters if unit in self._gathered or self._whole_gradients[unit]]:
            self._reduce(unit)
        self.machine.drop(self._reducing)
        self._reducing = None
        self._running = ROOT

    def _leave_micro_batch(self) -> None:
        self._end_of_backward()
        super()._leave_micro_batch()


def _in_order(footprint: Footprint) -> list[tuple[int, LayerFootprint]]:
    """Outer parts and blocks as they run; ``ROOT`` stands for the index of an outer part."""
    found: list[tuple[int, LayerFootprint]] = []
    for index, block in enumerate((*footprint.blocks, None)):
        if index < len(footprint.outer):
            found.append((ROOT, footprint.outer[index]))
        if block is not None:
            found.append((index, block))
    return found


def _rows(part: LayerFootprint) -> Sequence[tuple[int, int, bool]]:
    """For each parameter, its rows, their bytes, and whether it learns; all as one where that isn't known."""
    if part.parameter_rows or not part.parameter_bytes:
        return part.parameter_rows
    return ((part.parameters, part.parameter_bytes // max(1, part.parameters), part.gradient_bytes > 0),)
