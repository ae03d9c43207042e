"""A rank plays the tape of a step: its share of the batch, in micro-batches, recomputing blocks. Knows no allocator policy and no planner.

:class:`Player` holds a whole copy of the module, :class:`DDPPlayer` one under DDP. Other engines override what happens to parameters and
gradients (``start``, ``enter``, ``complete``, ``clear``) and how large the optimizer's tensors are (``size_of``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

from lightning_autopar.memory.allocator.caching_allocator import Category
from lightning_autopar.memory.allocator.options import MIB
from lightning_autopar.memory.allocator.played_device import SETUP, PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeChange, TapePart, TapeParts
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.fullest_moments import drawn_bytes
from lightning_autopar.memory.tape import Kind

CATEGORY: dict[Kind, Category] = {
    "parameters": "parameters",
    "buffers": "buffers",
    "input": "input",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "temporary": "temporary",
    "fixed": "temporary",
}
#: DDP's buckets: the first is filled to 1 MiB, the others to 25 (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``, DDP's
#: ``bucket_cap_mb``).
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
#: The most orders that wait for the allocator, besides those of one part: if there is no room, the rest needn't be computed.
_MOST_WAITING = 2000


class Player:
    """A rank that holds all parameters, gradients and optimizer state. From the second step on, what the device holds is all that a step
    may depend on (:meth:`as_before`).

    Args:
        rows: samples of each of its micro-batches; one number for a rank that takes its part of the batch at once.
        recompute: indices of the blocks that keep only what enters them.

    Attributes:
        workspaces: sizes of what libraries keep from the first product on, of the thread that runs forward, and of backward's.
    """

    def __init__(
        self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, rows: Sequence[int], recompute: frozenset[int]
    ) -> None:
        self.workspaces: Sequence[int] = ()
        self.machine = machine
        self.script = script
        self.footprint = footprint
        self.rows = rows
        self.recompute = recompute
        self.steps = 0
        self.micro = 0
        self._before = frozenset(change.storage for change in script.before)
        self._forwards: dict[int, TapePart] = {}
        self._in_backward: int | None = None
        self._pins: dict[Hashable, int] = {}
        self._unpinned_late: set[Hashable] = set()
        self._gone: set[Hashable] = set()
        #: Unused outputs of recomputed blocks that Python hasn't freed yet.
        self._held_by_name: set[Hashable] = set()
        #: Cached sizes: of storages that grow, by micro-batch, and of the optimizer's.
        self._shares: list[dict[int, int]] = [{} for _ in rows]
        self._updated: dict[int, int] = {}
        self._slopes = {} if footprint.tape is None else footprint.tape.slopes
        self._draws = {} if footprint.tape is None else footprint.tape.draws
        self._lasting: list[TapeChange] | None = None
        self._lives_on: frozenset[int] | None = None

    # -- what engines change ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Before the first step: the module moves to the device, one tensor after the other."""
        for change in self.script.before:
            if change.kind in ("parameters", "buffers"):
                self.machine.hold(change.storage, change.size_bytes, CATEGORY[change.kind])
        self.hold_copies(1.0)

    def hold_copies(self, share: float) -> None:
        """Callbacks make their copies of the module, which are on no tape; of the parameters, where they lie so, a share."""
        taped = sum(change.size_bytes for change in self.script.before if change.kind == "buffers")
        copies = self.footprint.buffer_bytes - taped + round(self.footprint.copied_bytes * share)
        if copies > 0:
            self.machine.hold("copies", copies, "buffers")

    def keeps(self, change: TapeChange) -> bool:
        """Whether the engine holds what is there before a step as on the tape; called for one change of each kind."""
        return True

    def enter(self, part: TapePart) -> None:
        """A part of the step begins."""

    def leave_backward(self, index: int) -> None:
        """The backward of a block is over."""

    def complete(self, key: Hashable, change: TapeChange) -> None:
        """A gradient is complete. That of a later micro-batch is added to the first one's."""
        if self.micro == 0:
            self.machine.become(key, "gradients")
        else:
            self.machine.drop(key)

    def clear(self, change: TapeChange) -> None:
        """The step frees a gradient, which is held under the first micro-batch's key."""
        self.machine.drop(change.storage)

    def size_of(self, change: TapeChange, *, updating: bool) -> int:
        """Bytes of a storage here; ``updating``: it belongs to the optimizer. If not, called only for what grows, once a size."""
        if not change.grows or not self.footprint.batch_size:
            return change.size_bytes
        rows = sum(self.rows) if change.kind == "input" else self.rows[self.micro]
        return self.share(change.size_bytes, rows)

    # -- a step ----------------------------------------------------------------------------------------------------------------------------

    def share(self, size_bytes: int, rows: int) -> int:
        """A size for so many samples, from the size at the whole batch."""
        return -(-size_bytes * rows // self.footprint.batch_size) if self.footprint.batch_size else size_bytes

    def key(self, storage: int) -> int:
        """The key for a storage of the tape: every micro-batch has its own key for what it makes anew."""
        return storage if self.micro == 0 or storage in self._before else storage + self.micro * self.script.storages

    def step(self) -> None:
        """Play it once. The first one finds no optimizer state and no gradients.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        if len(self.rows) == 1 and self.as_before():
            return
        self.arrive()
        before: object = None
        layout: object = None
        counted, released = self.machine.allocator.released, 0
        for number, rows in enumerate(self.rows):
            if number and self.micro == number - 1:
                before, layout = layout, self.layout_between()
                released, counted = self.machine.allocator.released - counted, self.machine.allocator.released
            # After a micro-batch that leaves the allocator as it found it, others as large do the same.
            if number and layout == before and rows == self.rows[self.micro]:
                self.machine.allocator.released += released
                counted += released
                continue
            self.micro = number
            for part in self.script.parts:
                self.play(part)
        self.update()
        self.depart()
        self.machine.settle()

    def as_before(self) -> bool:
        """Play a step whose orders don't depend on the allocator as the one before, if the same is held as when that began. Returns whether
        it was played.
        """
        if not self.steps or not self.machine.repeats():
            return False
        self.machine.settle()
        self.steps += 1
        return True

    def layout_between(self) -> object:
        """The allocator's layout between two micro-batches, once nothing is held of the one before but its gradients."""
        self._leave_micro_batch()
        self.machine.settle()
        self.machine.fork = None
        return self.machine.allocator.layout()

    def arrive(self) -> None:
        """Allocate what the step begins with: the batch, and what the step before didn't leave as on the tape."""
        self.micro = 0
        self._gone.clear()
        self._held_by_name.clear()
        self._pins.clear()
        self._unpinned_late.clear()
        if self._lasting is None:
            samples = {change.kind: change for change in self.script.before}
            kinds = {kind for kind, change in samples.items() if self.keeps(change)}
            self._lasting = [change for change in self.script.before if change.kind in kinds]
        held, first = self.machine.held, self.steps == 0
        for change in self._lasting:
            if change.storage in held:
                continue
            updating = change.kind == "optimizer"
            if not (first and (updating or change.storage in self.script.replaced)):
                self.machine.hold(change.storage, self.size_of(change, updating=updating), CATEGORY[change.kind])

    def update(self) -> None:
        """The optimizer's part; at first it makes its state."""
        self._end_backward()
        for thread in range(len(self.workspaces)):  # a stage may not have the step's first product
            self._multiply(thread)
        self.enter(self.script.update)
        if self.steps == 0:
            for change in self.script.before:
                if change.kind == "optimizer" and change.storage not in self.machine.held and change.storage not in self.script.replaced:
                    self.machine.hold(change.storage, self._updated_size(change), "optimizer")
        self._apply(self.script.update.changes, updating=True)

    def depart(self) -> None:
        """The end of the step: the batch is freed, what stays replaces its predecessor, and the rest is freed."""
        for change in self.script.before:
            if change.kind == "input":
                self.machine.drop(change.storage)
        for key in [key for key in self.machine.keys() if isinstance(key, int) and key not in self._before]:  # noqa: SIM118
            heir = self.script.heirs.get(key)
            if heir is not None and heir not in self.machine:
                self.machine.rename(key, heir)
            else:
                self.machine.drop(key)
        self.steps += 1

    def play(self, part: TapePart) -> None:
        """One part of forward or backward."""
        if len(self.machine.orders) > _MOST_WAITING:
            self.machine.settle()
        again = part.index in self.recompute and part.mark in ("forward", "leave", "backward")
        self._end_backward()
        if again and part.mark == "leave":
            self._forget(part.index)
        self.enter(part)
        if again and part.mark == "forward":
            self._forwards[part.index] = part
            self._pin(part)
        if part.mark == "backward":
            self._in_backward = part.index
            if again:
                self._run_again(part.index)
        self._apply(part.changes, updating=False, saves=not (again and part.mark != "leave"))
        for key in self._held_by_name.intersection(map(self.key, part.let_go)):
            self._held_by_name.discard(key)
            self.machine.drop(key)

    def _draw(self, sizes: Sequence[int]) -> None:
        """A random draw over the samples: it is made for other ranks' samples, too."""
        whole = sum(sizes)
        if taken := drawn_bytes([whole], self.rows[self.micro], self.footprint.batch_size):
            self.machine.hold_all("draw", [-(-size * taken // whole) for size in sizes], "temporary")
            self.machine.drop_all("draw")

    def _multiply(self, thread: int) -> None:
        """A thread's first product: libraries take their workspace, and keep it."""
        if thread < len(self.workspaces) and ("workspace", thread) not in self.machine:
            self.machine.hold(("workspace", thread), self.workspaces[thread], "workspace")

    def _end_backward(self) -> None:
        index, self._in_backward = self._in_backward, None
        if index is not None:
            self.leave_backward(index)
            if index in self.recompute:
                self._unpin(index)

    def _updated_size(self, change: TapeChange) -> int:
        """The size of the optimizer's part of a storage; called for many storages of few sizes."""
        if change.grows:
            return self.size_of(change, updating=True)
        size = self._updated.get(change.size_bytes)
        if size is None:
            size = self._updated[change.size_bytes] = self.size_of(change, updating=True)
        return size

    def _apply(self, changes: Sequence[TapeChange], *, updating: bool, saves: bool = True) -> None:
        """Play changes; ``saves``: whether backward keeps what forward no longer uses, and what it has read until its node ends."""
        machine, before, pins = self.machine, self._before, self._pins
        # PlayedDevice.hold and .drop, inlined: they run tens of thousands of times.
        held, order = machine.held, machine.orders.append
        numbers, label = machine.numbers, machine.labels.append
        shares, offset, slopes, draws = self._shares[self.micro], self.micro * self.script.storages, self._slopes, self._draws
        size: int | None
        for change in changes:
            action, storage, size_bytes, kind, grows = change
            key = storage if not offset or storage in before else storage + offset
            if action == "allocate":
                if updating:
                    size = self._updated_size(change)
                elif storage in slopes:
                    size = min(size_bytes, self.share(slopes[storage], self.rows[self.micro]))
                elif not grows:
                    size = size_bytes
                elif kind == "input":
                    size = self.size_of(change, updating=False)
                else:
                    size = shares.get(size_bytes)
                    if size is None:
                        size = shares[size_bytes] = self.size_of(change, updating=False)
                if size > 0:
                    held[key] = next(numbers)
                    order(size)
                    label(CATEGORY[kind])
                else:
                    held[key] = 0
                if kind == "gradients":
                    self.complete(key, change)
                elif storage in draws:
                    self._draw(draws[storage])
            elif action == "free":
                if kind == "gradients":
                    if not offset or updating:  # gradients stay between micro-batches
                        self.clear(change)
                elif key in pins:
                    self._unpinned_late.add(key)
                else:
                    number = held.pop(key, None)
                    if number:
                        order(-number)
                    elif number is None:
                        self._gone.add(key)
            elif action == "unsaved" or action == "read":
                if not saves and key not in pins:
                    machine.drop(key)
            elif action == "product":
                self._multiply(storage)
            elif key not in held:
                continue
            elif action == "become":
                if kind == "gradients":
                    self.complete(key, change)
                else:
                    machine.become(key, CATEGORY[kind])
            else:
                machine.hold((key, "resized"), self.size_of(change, updating=updating), CATEGORY[kind])
                machine.drop(key)
                machine.rename((key, "resized"), key)

    def _leave_micro_batch(self) -> None:
        """Before the next micro-batch, free what this one leaves, except gradients."""
        self._end_backward()
        if self._lives_on is None:
            changes = (change for part in self.script.parts for change in part.changes)
            self._lives_on = frozenset(change.storage for change in changes if change.kind == "gradients")
        for key in self.machine.keys():  # noqa: SIM118
            if isinstance(key, int) and key not in self._before and key % self.script.storages not in self._lives_on:
                self.machine.drop(key)

    # -- recomputation (exact/step/recompute.py: torch's non-reentrant checkpointing) ------------------------------------------------------

    def _made_in(self, index: int) -> list[TapeChange]:
        """What the block's last forward makes for itself: an output that is used is kept by the next block, and isn't computed again."""
        part = self._forwards[index]
        passed_on = {*part.outputs, *part.inputs}.difference(part.unused)
        made = {change.storage for change in part.changes if change.action == "allocate"} - passed_on
        return [change for change in part.changes if change.storage in made]

    def _pin(self, part: TapePart) -> None:
        """Keep what enters the block until its backward is over."""
        for storage in part.inputs:
            key = self.key(storage)
            self._pins[key] = self._pins.get(key, 0) + 1

    def _unpin(self, index: int) -> None:
        for storage in self._forwards[index].inputs:
            key = self.key(storage)
            if self._pins.get(key, 0) > 1:
                self._pins[key] -= 1
                continue
            self._pins.pop(key, None)
            if key in self._unpinned_late:
                self._unpinned_late.discard(key)
                self.machine.drop(key)

    def _forget(self, index: int) -> None:
        """Free what its forward would have saved, except unused outputs, which Python holds a while."""
        unused = {self.key(storage) for storage in self._forwards[index].unused}
        self._held_by_name.update(unused)
        for change in self._made_in(index):
            key = self.key(change.storage)
            if key not in self._pins and key not in unused:
                self.machine.drop(key)

    def _run_again(self, index: int) -> None:
        """Run its forward again before its backward; torch stops after the last tensor that backward needs (``early_stop``)."""
        part, changes = self._forwards[index], self._made_in(index)
        keys = {change.storage: self.key(change.storage) for change in changes}
        missing = {storage for storage, key in keys.items() if key not in self._gone and key not in self.machine}
        # An output that is used is made once more where its operation saves something after it, such as a norm its statistics.
        outputs = {*part.outputs}.difference(part.inputs, keys)
        changes = [one for one in part.changes if one.storage in missing or (one.storage in outputs and one.action == "allocate")]
        passing = {change.storage for change in changes if change.action == "free"} | outputs
        kept = (place for place, change in enumerate(changes) if change.action == "allocate" and change.storage not in passing)
        end = max(kept, default=-1) + 1
        made = {change.storage for change in changes[:end] if change.action == "allocate"}
        left = [change for change in changes[end:] if change.action == "free" and change.storage in made]
        again: list[Hashable] = [self.key(storage) for storage in outputs]
        used = {key: self.machine.held.pop(key) for key in again if key in self.machine}
        self._apply([*changes[:end], *left], updating=False)
        for key in again:
            self.machine.drop(key)
        self.machine.held.update(used)


class DDPPlayer(Player):
    """DDP with ``gradient_as_bucket_view``: gradients lie in flat buckets, which exist from the start, and are copied into them when
    complete. Lightning wraps the module on a stream of its own, so what a bucket's segment has left serves nobody else.

    With ``find_unused_parameters`` the buckets aren't built anew after the first step, so they are in the order of the parameters
    (``torch/nn/parallel/distributed.py``, ``torch/csrc/distributed/c10d/reducer.cpp``: ``compute_bucket_assignment_by_size``).
    """

    _batch = 0

    def start(self) -> None:
        """Parameters, then the buckets, the last ones first; and a number for each parameter, whether it was used."""
        super().start()
        self._waiting: list[Hashable] = []
        sizes = gradient_sizes(self.footprint, self.script)
        self.machine.hold("used", 4 * len(sizes), "gradients", SETUP)
        for number, size_bytes in enumerate(reversed(bucket_sizes(sizes))):
            self.machine.hold(("bucket", number), size_bytes, "gradients", SETUP)

    def keeps(self, change: TapeChange) -> bool:
        """Gradients lie in the buckets."""
        return change.kind != "gradients"

    def enter(self, part: TapePart) -> None:
        """Count the step's batches. When the optimizer comes, the last one's backward has moved all gradients into the buckets."""
        self._batch += part.mark == "leave" and part.index == -1
        if part.mark == "optimizer":
            self._batch = 0
            while self._waiting:
                self.machine.drop(self._waiting.pop())

    def complete(self, key: Hashable, change: TapeChange) -> None:
        """Copy the gradient into its bucket. Under ``no_sync``, in a batch that isn't the step's last one, it stays beside the buckets;
        gradients of a batch that runs in parts don't.
        """
        assert self.footprint.tape is not None, "it is played"
        if self._batch < self.footprint.tape.batches and len(self.rows) == 1:
            self.machine.become(key, "gradients")
            self._waiting.append(key)
        else:
            self.machine.drop(key)

    def clear(self, change: TapeChange) -> None:
        """The buckets stay."""


def gradient_sizes(footprint: Footprint, script: TapeParts) -> list[int]:
    """Bytes of each gradient, in the order of the parameters as far as it is known."""
    parts = [part for pair in zip(footprint.outer, (*footprint.blocks, None), strict=False) for part in pair if part is not None]
    sizes = [rows * row_bytes for part in parts for rows, row_bytes, learns in part.parameter_rows if learns]
    if sum(sizes) == footprint.gradient_bytes:
        return sizes
    return [change.size_bytes for change in script.before if change.kind == "gradients"]


def bucket_sizes(gradients: Sequence[int]) -> list[int]:
    """Bytes of DDP's buckets for gradients of these sizes, in order of the parameters: each is closed by the one that fills it."""
    found: list[int] = []
    filling = 0
    for size_bytes in gradients:
        filling += size_bytes
        if filling >= (BUCKET_BYTES if found else FIRST_BUCKET_BYTES):
            found.append(filling)
            filling = 0
    return [*found, filling] if filling else found


def parts_of(rows: int, micro_batches: int) -> list[int]:
    """Samples of each micro-batch of a batch, the larger ones first."""
    number = max(1, min(rows, micro_batches))
    return [int(Fraction(rows - first, number).__ceil__()) for first in range(number)] if rows else [0] * max(1, micro_batches)
