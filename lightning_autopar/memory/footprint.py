"""The footprint: what one step of a module needs, as data; and a cache of what was computed from a footprint, which a search asks for
hundreds of times.

It doesn't know how a footprint is traced or what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from lightning_autopar.memory.length_spread import Lengths
from lightning_autopar.memory.tape import Tape
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Plan

#: The argument of ``backward`` by which gradients get a graph of their own.
CREATE_GRAPH = "create_graph"


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """What a training step itself does with parameters, besides calling the modules that hold them; see :mod:`.trace.parameter_use`.

    Args:
        together: groups of blocks whose parameters the step uses together outside of a block's forward; and whether it uses them with other
            tensors, or for the loss. If so, the engine must have them whole for the whole step.
        mixed: a parameter that a hook, or a step of manual optimization, uses together with tensors that aren't parameters: its FQN, and
            the hook's name. None where there is none.
        written: parameters that the step or a hook writes to, without the optimizer's step: each one's FQN, and the hook's name.
        exchanged: FQNs of parameters that the step has replaced by others.
        shared: FQNs of parameters that the step has made share another parameter's values.
        looked: hooks that look at gradients, each with the FQN of a parameter whose gradient it reads; None in place of the FQN where a
            hook failed on the traced step, so that this isn't known.
    """

    together: tuple[tuple[tuple[str, ...], bool], ...] = ()
    mixed: tuple[str, str] | None = None
    written: tuple[tuple[str, str], ...] = ()
    exchanged: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    looked: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerFootprint:
    """One block of the module, at the traced batch. Every size in bytes, for the whole (unsplit) batch.

    Args:
        fqn: the block's fully-qualified name in the LightningModule.
        parameters: number of its parameter elements (tied ones counted once, where they come first).
        parameter_bytes: their bytes, as stored between steps.
        gradient_bytes: bytes of the gradients of those that require one.
        optimizer_bytes: bytes of the optimizers' state for them.
        activation_bytes: what its forward saves for backward, its input excepted.
        input_bytes: the activations that enter it: what recomputation keeps.
        flops: of its forward, counting a multiply-add as two.
        fixed_bytes: the part of ``activation_bytes`` that doesn't depend on the batch (autocast's casts of parameters).
        input_extra_bytes: the part of ``input_bytes`` that is freed before backward unless the block is recomputed.
        recomputable: whether running its forward twice leaves the run unchanged (no buffer moves, as in BatchNorm).
        output_bytes: the tensors made in its forward that leave it.
        parameter_rows: of each of its parameters the length of the first dimension, the bytes of one row of it, and whether it requires
            a gradient: what an engine that shards by rows needs for its padding.
        parameter_modules: of each of these parameters the number of the module that holds it directly, and whether that has others in it:
            what an engine that gathers parameters module by module needs. Empty where it isn't known.
        forward_peak_bytes: the most that tensors made in its forward take together while it runs, saved ones included.
        forward_unsaved_bytes: the same if nothing is saved for backward and each tensor is freed after its last use: while a recomputed
            block runs forward. Only for blocks.
        backward_peak_bytes: the most that tensors made in its backward take together while that runs, complete gradients excepted.
        backward_flops: of its backward.
        moved_bytes: inputs and outputs of every operation of its forward: what a roofline needs.
        backward_moved_bytes: the same of its backward.
        draw_bytes: the bytes of the random draws over the samples in its forward, for the whole batch, each size once: a rank with a part
            of the batch also makes the whole draw, and keeps its rows.
        work: the operations of its forward, by kind and size; empty where it wasn't traced. Their sums are ``flops`` and ``moved_bytes``.
        backward_work: of its backward, with forwards that the module itself recomputes there.
        repeated: whether it is one of several alike blocks, a unit of sharding and recomputation; else it is a layer of a module without
            such blocks, with which a pipeline's stage may begin.
    """

    fqn: str
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    flops: int = 0
    fixed_bytes: int = 0
    input_extra_bytes: int = 0
    recomputable: bool = True
    output_bytes: int = 0
    buffer_bytes: int = 0
    parameter_rows: tuple[tuple[int, int, bool], ...] = ()
    parameter_modules: tuple[tuple[int, bool], ...] = ()
    forward_peak_bytes: int = 0
    forward_unsaved_bytes: int = 0
    backward_peak_bytes: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    backward_moved_bytes: int = 0
    draw_bytes: tuple[int, ...] = ()
    work: tuple[Work, ...] = ()
    backward_work: tuple[Work, ...] = ()
    repeated: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For people and JSON."""
        return {
            "fqn": self.fqn,
            "parameters": self.parameters,
            "flops": self.flops + self.backward_flops,
            "moved_bytes": self.moved_bytes + self.backward_moved_bytes,
            "bytes": {
                "parameters": self.parameter_bytes,
                "gradients": self.gradient_bytes,
                "optimizer": self.optimizer_bytes,
                "activations": self.activation_bytes,
                "input": self.input_bytes,
                "output": self.output_bytes,
                "temporary": self.backward_peak_bytes,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a step holds at one of its fullest moments, beside parameters, optimizer state, buffers and input. Bytes at the whole batch.

    Which moment is the peak depends on the plan: replicas hold every gradient at any moment, recomputation empties the forward's end.

    Args:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        held: how many leading blocks hold all that they saved for backward, the one that is running excepted.
        running: whether the block of that index is in its forward or backward; else what runs is the part before it.
        boundary: whether this is what is there when that part begins, rather than one of its fullest moments.
        gradient_bytes: complete gradients.
        activation_bytes: tensors that forward made.
        temporary_bytes: tensors that backward made.
        fixed_bytes: tensors whose size doesn't depend on the batch: gradients in the making, casts of parameters, the optimizer's scratch.
        sloping_bytes: of those, what a kernel takes less of at a small share of the batch.
        slope_bytes: what the whole batch would take in proportion to that share.
        draw_bytes: of a random draw that is made then, for the whole batch, by a rank with a part of it.
    """

    phase: str
    held: int = 0
    running: bool = False
    boundary: bool = False
    gradient_bytes: int = 0
    activation_bytes: int = 0
    temporary_bytes: int = 0
    fixed_bytes: int = 0
    sloping_bytes: int = 0
    slope_bytes: int = 0
    draw_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.gradient_bytes + self.activation_bytes + self.temporary_bytes + self.fixed_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What it means for a step that ranks share a part of its network by rows, and each runs the rest on the whole batch.

    Args:
        modules: FQNs of the submodules that they share.
        work_share: the part of the forward's FLOPs that lies in these.
        gathered_bytes: of the tensors whose rows ranks gather in forward and backward, at the whole batch.
        gathers: how many such tensors there are.
    """

    modules: tuple[str, ...]
    work_share: float
    gathered_bytes: int
    gathers: int

    def share(self, ranks: int) -> float:
        """A rank's part of the step's work."""
        return 1 - self.work_share + self.work_share / ranks


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one step of a module needs on one device, at the traced batch.

    Sizes are bytes at the whole batch; ``flops`` is forward and backward of one batch. The per-block figures in
    ``blocks`` are part of the totals, not added to them.

    Args:
        parameters: number of parameter elements, tied ones once.
        trainable_parameters: those of them that require a gradient.
        batch_size: samples in the traced batch; 0 where it has no batch dimension.
        parameter_bytes: parameters as stored between steps.
        gradient_bytes: gradients of the trainable ones.
        optimizer_bytes: state of every optimizer.
        buffer_bytes: buffers, and what else is whole on every device.
        activation_bytes: saved for backward over the whole module at the peak, the batch itself excepted.
        temporary_bytes: what the step's peak holds beyond all that: scratch of the largest operations, the optimizer's
            temporaries.
        input_bytes: the batch on the device.
        largest_parameter_bytes: the largest single parameter.
        flops: forward and backward of one batch; a multiply-add counts two.
        moved_bytes: inputs and outputs of every operation of one batch, forward, backward and optimizer.
        blocks: the repeated blocks, in the order in which they run, units of sharding and recomputation; the layers of a module that has
            none, where its step was traced.
        outer: what runs outside of them, in ``len(blocks) + 1`` parts: before the first block, between two, after the last. A parameter
            belongs to the part or block that uses it first; one that the step doesn't use, to the first part.
        also_uses: for outer parts that use a parameter which another part or a block holds (tied embeddings): index among ``outer``, the
            parameter's FQN, and its bytes: of parameter, gradient, optimizer state.
        holders: the part, numbered as in :meth:`parts`, that holds each parameter of ``also_uses``, by FQN; the first unless it is there.
        again: layers that run again outside of blocks: their part and the outer part in which they do, numbered as in :meth:`parts`.
        repeats: by how much what a layer returns in all calls of a step is larger than in its first one, at most.
        evaluation_repeats: the same of a validation step.
        optimizer_work: the operations of the optimizers' steps and of clipping: of one update, also where gradients are accumulated.
        tape: every allocation of the step, in order; None where it wasn't traced.
        evaluation_bytes: the most that a validation step of the same run holds beside parameters, gradients, optimizer state and buffers;
            its batch included. None where there is none or it isn't known.
        copied_bytes: copies of the parameters that hooks make once these lie as the plan has them: shards where the parameters are.
        set_aside_bytes: more such copies, in a validation alone.
        evaluation_parts: the same while each part of the step runs, in the order of :meth:`parts`; empty where it isn't known.
        evaluation_failed: whether a validation step failed where training's was traced.
        streams: how many streams of its own the step multiplies on.
        conduct: what the step itself does with parameters; None where it wasn't traced.
        tied: groups of FQNs that share one parameter.
        training: False where the step is one of validation, test or prediction (no gradients, no optimizer).
        automatic_optimization: the module's own flag.
        optimizer_classes: their classes' names, where they are torch's own; empty where one isn't, or they aren't known.
        batch_norm: FQNs of the modules whose statistics span the batch.
        random_draws: names of the random operations that the step ran.
        unused_parameters: FQNs of trainable parameters that got no gradient in the traced steps.
        configures_model: whether the module overrides ``configure_model``.
        moments: the fullest moments of the step, in order; empty where it wasn't traced, and then the peak is the sum of all categories.
        asked: what the module asks its trainer for that differs between plans or ranks: ``"world_size"``, ``"is_global_zero"``, in
            a step ``"logger"``; and the paths of files that it writes.
        reentrant: the function whose backward runs another backward pass, from which parameters get gradients; or :data:`CREATE_GRAPH`
            where gradients have a graph of their own; empty where there is none.
        traced: False where the step could not be traced, and the activations are a guess with a wide margin.
        margin: by how much the prediction may be too low, as a share of it (0.1: up to ten per cent more).
        assumptions: what had to be guessed, a sentence each.
        lengths: how the sizes of batches vary, where other batches than the first were looked for; the bytes are then the longest one's,
            with what it may lack, and the work is the usual one's.
        longest_samples: samples in the longest batch, where they aren't ``batch_size``.
        sharing: how ranks share the step's network where splitting the batch would change its loss; None where they don't.
    """

    parameters: int
    trainable_parameters: int
    batch_size: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    temporary_bytes: int
    input_bytes: int
    largest_parameter_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    blocks: tuple[LayerFootprint, ...] = ()
    outer: tuple[LayerFootprint, ...] = ()
    also_uses: tuple[tuple[int, str, int, int, int], ...] = ()
    holders: Mapping[str, int] = field(default_factory=dict)
    again: tuple[tuple[int, int], ...] = ()
    repeats: float = 1.0
    evaluation_repeats: float = 1.0
    optimizer_work: tuple[Work, ...] = ()
    tape: Tape | None = None
    evaluation_bytes: int | None = None
    copied_bytes: int = 0
    set_aside_bytes: int = 0
    evaluation_parts: tuple[int, ...] = ()
    evaluation_failed: bool = False
    streams: int = 0
    conduct: Conduct | None = None
    tied: tuple[tuple[str, ...], ...] = ()
    training: bool = True
    automatic_optimization: bool = True
    optimizers: int = 1
    optimizer_classes: tuple[str, ...] = ()
    batch_norm: tuple[str, ...] = ()
    random_draws: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    configures_model: bool = False
    moments: tuple[Moment, ...] = ()
    asked: tuple[str, ...] = ()
    reentrant: str = ""
    traced: bool = True
    margin: float = 0.0
    assumptions: tuple[str, ...] = ()
    lengths: Lengths | None = None
    longest_samples: int = 0
    sharing: Sharing | None = None

    def shares_network(self, plan: Plan) -> bool:
        """Whether a plan's ranks share the step's network, each with the whole batch."""
        return self.sharing is not None and plan.may_share_network

    @cached_property
    def partless_buffer_bytes(self) -> int:
        """Bytes of the buffers that no part has: tensors in the module's attributes, and what callbacks hold of their own."""
        return max(0, self.buffer_bytes - sum(layer.buffer_bytes for layer in (*self.blocks, *self.outer)))

    def rows(self, plan: Plan) -> tuple[int, ...]:
        """How many samples of a batch each rank of a plan holds. Where ranks share the network, the whole batch: how much less lies in
        shared submodules isn't counted.
        """
        return (self.batch_size,) * plan.world_size if self.shares_network(plan) else plan.rows(self.batch_size)

    def shared_uses(self, begin: int, end: int) -> list[tuple[int, str, int, int, int]]:
        """Entries of ``also_uses`` from part ``begin`` to before part ``end`` whose parameter is held elsewhere; each parameter once."""
        found: dict[str, tuple[int, str, int, int, int]] = {}
        for use in self.also_uses:
            if begin <= 2 * use[0] < end and not begin <= self.holders.get(use[1], 0) < end:
                found.setdefault(use[1], use)
        return list(found.values())

    def parts(self) -> list[tuple[str, LayerFootprint]]:
        """Blocks by FQN and the parts around them, in the order in which they run; those are named by the block that comes next."""
        names = [block.fqn for block in self.blocks]
        found = list(zip(names, self.blocks, strict=True))
        for index, part in reversed(list(enumerate(self.outer))):
            around = f"(before {names[index]})" if index < len(names) else f"(after {names[-1]})" if names else "(everything)"
            found.insert(index, (around, part))
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report's ``footprint`` object; its ``blocks`` are the parts of :meth:`parts`."""
        return {
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "batch_size": self.batch_size,
            "bytes": {
                "parameters": self.parameter_bytes,
                "gradients": self.gradient_bytes,
                "optimizer": self.optimizer_bytes,
                "activations": self.activation_bytes,
                "temporary": self.temporary_bytes,
                "buffers": self.buffer_bytes + self.copied_bytes,
                "input": self.input_bytes,
            },
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "blocks": [part.to_dict() | {"fqn": name} for name, part in self.parts()],
            "margin": self.margin,
            "assumptions": list(self.assumptions),
            "lengths": None if self.lengths is None else self.lengths.to_dict(),
        }


T = TypeVar("T")


class FootprintCache(Generic[T]):
    """The last few results by footprint and key. A footprint is too large to be compared, so footprints are distinguished by identity.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._known: dict[tuple[int, Hashable], tuple[Footprint, T]] = {}

    def get(self, footprint: Footprint, key: Hashable, make: Callable[[], T]) -> T:
        """The cached result, or a new one."""
        known = self._known.get((id(footprint), key))
        if known is None or known[0] is not footprint:
            while len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            # The footprint is kept, too, so that no other one can get its identity.
            known = self._known[id(footprint), key] = footprint, make()
        return known[1]
