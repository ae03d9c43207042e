"""A rank of a pipeline plays its stages' parts of the tape, micro-batch by micro-batch, in the order of the schedule. Knows no planner.

As ``torch.distributed.pipelining`` runs them (torch 2.13, ``schedules.py``; ``strategies/pipeline/run/torch_schedules.py``): what a stage
receives is allocated when it is asked for; until its backward, a micro-batch keeps what it received, what forward saved and its output;
what was sent back stays until the schedule's end. Under 1F1B it stays until the next is sent, a received gradient until the next is asked
for, and of what was sent before the first backward the last but one until the last forward. No old gradients are there when the schedule
begins; where batches are accumulated, later ones add theirs as they make them. Replicas average their gradients when the last backward of
a stage is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeChange, TapePart, TapeParts
from lightning_autopar.memory.allocator.tape_player import Player
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.step_parts import Size, parts_of
from lightning_autopar.plans import INTERLEAVED, Schedule
from lightning_autopar.strategies.pipeline.memory import AVERAGED_ALONE_BYTES, AVERAGED_TOGETHER_BYTES, micro_batch_copy_bytes
from lightning_autopar.strategies.pipeline.schedules import Action

#: What an optimizer keeps of this size or less isn't of a parameter's shape, but a number (of steps).
_SCALAR_BYTES = 8


@dataclass(frozen=True)
class _Batch:
    """One batch of the tape, by stage.

    Attributes:
        parts: of forward (True) and of backward.
        summed: sizes of gradients of which the tape has a sum with a later stage's.
        made: what the stage makes, but for gradients.
        handed_on: gradients that wait on the tape for another part's.
        named: the ends of what the user's code holds longer than the stage's forward.
    """

    parts: dict[tuple[bool, int], list[TapePart]] = field(default_factory=dict)
    summed: dict[int, set[int]] = field(default_factory=dict)
    made: dict[int, set[int]] = field(default_factory=dict)
    handed_on: dict[int, set[int]] = field(default_factory=dict)
    named: dict[int, list[TapeChange]] = field(default_factory=dict)


class PipelinePlayer(Player):
    """A rank of a pipeline.

    Args:
        footprint: whose step it is, with its tape.
        rows: samples of each micro-batch that is played.
        borders: with which part of the tape each stage begins, and how many there are (outer part i is number 2i, block i is 2i + 1).
        actions: what the rank does in a step, in order.
        receives: for each of them, those whose inputs it begins to receive just before.
        samples: of the rank's part of the batch.
        replicas: how many ranks average the gradients of the same stages.
    """

    def __init__(
        self,
        machine: PlayedDevice,
        script: TapeParts,
        footprint: Footprint,
        rows: Sequence[int],
        recompute: frozenset[int],
        *,
        borders: Sequence[int],
        actions: Sequence[Action],
        receives: Sequence[Sequence[Action]],
        schedule: Schedule,
        samples: int,
        replicas: int,
    ) -> None:
        super().__init__(machine, script, footprint, rows, recompute)
        assert footprint.tape is not None, "there is a script of it"
        self.actions = actions
        self.receives = receives
        self.schedule = schedule
        self.samples = samples
        self._averages = replicas > 1
        #: How many micro-batches the rank's forward runs before its first backward.
        self._warm_up = next((place for place, action in enumerate(actions) if action.work == "backward"), 0)
        self.stages = sorted({action.stage for action in actions})
        begins = [place for place, part in enumerate(script.parts) if (part.mark, part.index) == ("leave", -1)] or [0]
        begins = begins if footprint.tape.batches > 1 else begins[-1:]
        self._batches = [self._in_stages(script.parts[first:end], borders) for first, end in zip(begins, [*begins[1:], None], strict=True)]
        self._batch = self._batches[0]
        sizes = parts_of(footprint.tape, len(footprint.blocks))
        crossing = [[one.size for one in sizes[border].crossing] if 0 < border < len(sizes) else [] for border in borders]
        self._received = {stage: crossing[stage] for stage in self.stages}
        self._sent = {stage: crossing[stage + 1] for stage in self.stages}
        #: Sizes of tensors that a stage receives, or makes before its last block, and passes on to the next one. The stage adds its own
        #: gradient to the next one's.
        self._through = {
            stage: [one.size for one in sizes[borders[stage + 1]].crossing if one.made < borders[stage + 1] - 2]
            for stage in self.stages
            if stage < len(borders) - 2
        }
        self._anew = {stage: sizes[borders[stage]].anew for stage in self.stages if stage}
        self._layers = {stage: _layers(footprint, borders[stage], borders[stage + 1]) for stage in self.stages}
        shared = {stage: footprint.shared_uses(borders[stage], borders[stage + 1]) for stage in self.stages}
        learning = {stage: [*_sizes(self._layers[stage], learning=True), *(use[3] for use in shared[stage])] for stage in self.stages}
        self._averaged = {stage: flat_sizes(learning[stage]) for stage in self.stages}
        #: Gradients that are complete in one part only on the tape, but in each stage here; and those that a stage's first part to use the
        #: parameter adds to those of its later ones, by the later one.
        self._shared = {stage: Counter[int]() for stage in self.stages}
        self._waiting = {stage: list[tuple[int, int]]() for stage in self.stages}
        for stage in self.stages:
            self._find_shared(stage, range(borders[stage], borders[stage + 1]), self._batches[-1].summed[stage])
        self._learning = {stage: Counter(learning[stage]) for stage in self.stages}
        self._completed: Counter[int] = Counter()
        everything = _sizes(_layers(footprint, 0, borders[-1]))
        self._own = {stage: [*_sizes(self._layers[stage]), *(use[2] for use in shared[stage])] for stage in self.stages}
        held, there = Counter(size for sizes_of in self._own.values() for size in sizes_of), Counter(everything)
        self._portion = {size: held[size] / count for size, count in there.items()}
        self._portion_of_all = sum(held.values()) / max(1, len(everything))
        self._share_of_all = sum(map(sum, self._own.values())) / max(1, sum(everything))
        self._met: Counter[int] = Counter()

    def _in_stages(self, parts: Sequence[TapePart], borders: Sequence[int]) -> _Batch:
        """A batch of the tape, by the stages that begin at these parts."""
        found = _Batch()
        for part in parts:
            number = 2 * part.index + 2 if part.mark == "leave" else 2 * part.index + (part.mark != "return")
            stage = next(stage for stage in range(len(borders) - 1) if borders[stage] <= number < borders[stage + 1])
            found.parts.setdefault((part.mark in ("forward", "leave"), stage), []).append(part)
        # What forward made isn't a gradient: under autocast it is a weight's copy, as large as its gradient.
        backward = [part for part in parts if part.mark in ("backward", "return")]
        made = {change.storage: change.size_bytes for part in backward for change in part.changes if _is_waiting(change)}
        for stage in self.stages:
            forward = found.parts.get((True, stage), [])
            backward, found.summed[stage] = _without_others(found.parts.get((False, stage), []), made)
            found.parts[False, stage] = backward
            changes = [change for part in [*forward, *backward] for change in part.changes]
            lives_on = {change.storage for change in changes if change.kind == "gradients"}
            found.made[stage] = {change.storage for change in changes if change.action == "allocate"} - lives_on
            found.handed_on[stage] = _to_be_added(backward)
            sent = {one for part in parts if part.mark == "forward" and 2 * part.index + 1 == borders[stage + 1] for one in part.inputs}
            # The ends of what a stage has made and the user's code holds until a later stage's part: this stage's forward ends before
            own = {change for part in forward for change in part.changes}
            frees = [change for part in parts if part.mark in ("forward", "leave") for change in part.changes if change.action == "free"]
            found.named[stage] = [change for change in frees if change.storage in (found.made[stage] - sent) and change not in own]
        return found

    def _find_shared(self, stage: int, own: range, summed: set[int]) -> None:
        """Look for parameters that parts of several stages use.

        Args:
            stage: which uses some.
            own: its parts.
            summed: sizes of those whose gradient waits on the stage's own part of the tape.
        """
        users: dict[str, tuple[set[int], int]] = {}
        for index, name, _, gradient_bytes, _ in self.footprint.also_uses:
            users.setdefault(name, ({self.footprint.holders.get(name, 0)}, gradient_bytes))[0].add(2 * index)
        for parts, size_bytes in users.values():
            within = parts.intersection(own)
            if within and len(within) < len(parts):
                self._shared[stage][size_bytes] += 1
            if len(within) > 1 and max(parts) not in within and size_bytes not in summed:
                self._waiting[stage].append((max(within), size_bytes))

    def start(self) -> None:
        """Parameters and buffers of its stages."""
        for stage in self.stages:
            for number, size_bytes in enumerate(self._own[stage]):
                self.machine.hold(("parameter", stage, number), size_bytes, "parameters")
            for number, layer in enumerate(self._layers[stage]):
                self.machine.hold(("buffers", stage, number), layer.buffer_bytes, "buffers")
        self.machine.hold("partless", self.footprint.partless_buffer_bytes, "buffers")

    def _share(self, rows: int) -> float:
        return rows / self.footprint.batch_size if self.footprint.batch_size else 1.0

    def keeps(self, change: TapeChange) -> bool:
        """The batch; what belongs to parameters is held by stage."""
        return change.kind == "input"

    def complete(self, key: Hashable, change: TapeChange) -> None:
        """See :class:`Player`; counts them."""
        self._completed[change.size_bytes] += 1
        super().complete(key, change)

    def size_of(self, change: TapeChange, *, updating: bool) -> int:
        """The batch lies whole on the device, also where some of its micro-batches aren't played."""
        if change.kind == "input" and change.grows:
            return self.share(change.size_bytes, self.samples)
        return super().size_of(change, updating=updating)

    def step(self) -> None:
        """Play the schedule once for each batch, then the optimizer."""
        if self.as_before():
            return
        machine = self.machine
        for change in self.script.before:
            if change.kind == "gradients":
                machine.drop(change.storage)
        for stage in self.stages:
            machine.drop_all(("shared gradients", stage, 0))
        self.arrive()
        for number, batch in enumerate(self._batches):
            self._run(number, batch)
        self.micro = 0
        self.update()
        self.depart()
        machine.settle()

    def _run(self, number: int, batch: _Batch) -> None:
        """Play the schedule of a batch; later ones' gradients are added to the first one's."""
        machine, self._batch = self.machine, batch
        averaged = {stage: micro for work, stage, micro in self.actions if work == "backward"}
        for (work, stage, micro), received in zip(self.actions, self.receives, strict=True):
            for each in received:
                self._receive(each)
            self.micro = micro
            share = self._share(self.rows[micro])
            forward = work == "forward"
            if not forward and self.schedule == "1f1b":
                self._let_go("gradients", stage, micro - 1, self._sent[stage])
            if self.steps == 0:  # the step's first product, which the tape has noted, may be another stage's
                self._multiply(int(not forward))
            copied = micro_batch_copy_bytes(self.footprint, self.rows[micro]) if len(self.rows) > 1 else 0
            if forward and copied:
                machine.hold(("rows", stage, micro), copied, "input")
            for part in batch.parts.get((forward, stage), ()):
                self.play(part)
                for storage in batch.handed_on[stage].intersection(change.storage for change in part.changes):
                    machine.drop(self.key(storage))
                if not forward:
                    self._sum(stage, 2 * part.index + (part.mark == "backward"), share)
            self._end_backward()
            if stage or not forward:
                machine.drop(("rows", stage, micro))
            if forward:
                self._apply(batch.named[stage], updating=False)
                for key in self._held_by_name:
                    machine.drop(key)
                self._held_by_name.clear()
                if stage:
                    machine.hold(("anew", stage, micro), self._anew[stage].at(share), "activations")
            else:
                self._after_backward(stage, number)
                if self._averages and averaged[stage] == micro:
                    machine.hold_all(("averaged", stage), self._averaged[stage], "communication")
        for stage in self.stages:
            for micro in range(len(self.rows)):
                machine.drop_all(("sent", stage, micro))
            self._let_go("gradients", stage, len(self.rows) - 1, self._sent[stage])
            machine.drop_all(("averaged", stage))
            if number:
                machine.drop_all(("shared gradients", stage, number))

    def _sum(self, stage: int, number: int, share: float) -> None:
        """After the backward of a part: what is summed until the stage's is over."""
        if number % 2 and ("through", stage, 0) not in self.machine:
            for place, size in enumerate(self._through.get(stage, ())):
                self.machine.hold(("through", stage, place), size.at(share), "temporary")
        for place, (last, size_bytes) in enumerate(self._waiting[stage]):
            if last == number:
                self.machine.hold(("waiting", stage, place), size_bytes, "gradients")

    def _receive(self, action: Action) -> None:
        """What a neighbour sends for an action."""
        forward = action.work == "forward"
        what, share = "activations" if forward else "gradients", self._share(self.rows[action.micro_batch])
        for number, size in enumerate((self._received if forward else self._sent)[action.stage]):
            self.machine.hold((what, action.stage, action.micro_batch, number), size.at(share), "communication")

    def _let_go(self, what: str, stage: int, micro: int, sizes: Sequence[Size]) -> None:
        """What a neighbour has sent of a micro-batch goes."""
        for number in range(len(sizes)):
            self.machine.drop((what, stage, micro, number))

    def _after_backward(self, stage: int, number: int) -> None:
        """What the micro-batch had goes; what is sent on stays for a while."""
        machine = self.machine
        for storage in self._batch.made[stage]:
            machine.drop(self.key(storage))
        machine.drop(("anew", stage, self.micro))
        for place in range(len(self._through.get(stage, ()))):
            machine.drop(("through", stage, place))
        for place in range(len(self._waiting[stage])):
            machine.drop(("waiting", stage, place))
        self._let_go("activations", stage, self.micro, self._received[stage])
        if self.schedule != "1f1b":
            self._let_go("gradients", stage, self.micro, self._sent[stage])
        if self.micro == 0:
            there = self._learning[stage] - self._completed
            machine.hold_all(("shared gradients", stage, number), list((self._shared[stage] & there).elements()), "gradients")
            self._completed.clear()
        share = self._share(self.rows[self.micro])
        if self.schedule == "1f1b":
            machine.drop_all(("sent", stage, self.micro - 1))
            if self.micro == self._warm_up - 2 < len(self.rows) - self._warm_up:
                machine.hold_all(("sent on", stage), [size.at(share) for size in self._sent[stage]], "communication")
            if self.micro == len(self.rows) - self._warm_up:
                machine.drop_all(("sent on", stage))
        lingering = [*self._received[stage], *(self._sent[stage] if self.schedule in INTERLEAVED else ())]
        machine.hold_all(("sent", stage, self.micro), [size.at(share) for size in lingering], "communication")

    def update(self) -> None:
        """The optimizer sees the parameters of its own stages."""
        self._met.clear()
        if self.steps == 0:
            for number, change in enumerate(self.script.before):
                if change.kind == "optimizer":
                    self.machine.hold(("state", number), self._part_of(change.size_bytes), "optimizer")
        self._met.clear()
        parts: dict[int, int] = {}
        for change in self.script.update.changes:
            if change.action == "allocate" and change.kind != "optimizer":
                parts[change.storage] = self._part_of(change.size_bytes)
        self._apply([_resized(change, parts) for change in self.script.update.changes if change.storage in parts], updating=True)

    def _part_of(self, size_bytes: int) -> int:
        """Of a tensor as large as some parameters: all of it, as often as those are this rank's; else its share."""
        if size_bytes in self._portion or size_bytes <= _SCALAR_BYTES:
            portion = self._portion.get(size_bytes, self._portion_of_all)
            self._met[size_bytes] += 1
            met = self._met[size_bytes]
            return size_bytes if int(met * portion + 1e-9) > int((met - 1) * portion + 1e-9) else 0
        return int(size_bytes * self._share_of_all)


def _to_be_added(backward: Sequence[TapePart]) -> set[int]:
    """Gradients that wait on the tape for another part's, as their parameter is shared: a stage adds them to its own at once."""
    changes = [change for part in backward for change in part.changes]
    made = {change.storage for change in changes if _is_waiting(change)}
    return made - {change.storage for change in changes if change.action != "allocate"}


def _is_waiting(change: TapeChange) -> bool:
    """Whether it makes a gradient that may wait for another part's, as their parameter is shared."""
    return change.action == "allocate" and change.kind == "fixed"


def _without_others(parts: list[TapePart], made: Mapping[int, int]) -> tuple[list[TapePart], set[int]]:
    """The backward of a stage without its sums of an own gradient and a later stage's, which isn't there: the own one waits as it is.

    Args:
        parts: of the stage, in order.
        made: bytes of each gradient that may wait, of all stages.

    Returns:
        The parts, and the sizes of those gradients.
    """
    own = {change.storage for part in parts for change in part.changes if _is_waiting(change)}
    same: dict[int, int] = {}  # a sum, and the gradient that takes its place
    found = []
    for part in parts:
        begun: dict[int, list[int]] = {}
        for change in part.changes:
            if _is_waiting(change):
                begun.setdefault(change.size_bytes, []).append(change.storage)
            elif change.action == "free" and change.storage not in own and len(alike := begun.get(made.get(change.storage, -1), [])) > 1:
                gradient, total = alike[-2:]
                same[total] = gradient
        kept = set(same.values())
        changes = [
            change._replace(storage=same.get(change.storage, change.storage))
            for change in part.changes
            if not (change.action == "allocate" and change.storage in same) and not (change.action == "free" and change.storage in kept)
        ]
        found.append(replace(part, changes=changes) if same else part)
    return found, {made[total] for total in same}


def _resized(change: TapeChange, sizes: Mapping[int, int]) -> TapeChange:
    return change._replace(size_bytes=sizes[change.storage], grows=False) if change.action == "allocate" else change


def _layers(footprint: Footprint, begin: int, end: int) -> list[LayerFootprint]:
    """The parts of those numbers."""
    return [footprint.blocks[number // 2] if number % 2 else footprint.outer[number // 2] for number in range(begin, end)]


def _sizes(layers: Sequence[LayerFootprint], *, learning: bool = False) -> list[int]:
    """Bytes of each of their parameters, or of those that learn."""
    return [rows * row_bytes for layer in layers for rows, row_bytes, learns in layer.parameter_rows if learns or not learning]


def flat_sizes(gradients: Sequence[int]) -> list[int]:
    """Bytes of the flat copies in which replicas average small gradients."""
    found: list[int] = []
    for size_bytes in gradients:
        if size_bytes >= AVERAGED_ALONE_BYTES:
            continue
        if found and found[-1] + size_bytes <= AVERAGED_TOGETHER_BYTES:
            found[-1] += size_bytes
        else:
            found.append(size_bytes)
    return found
