"""What we foresee for a row: bytes by category and seconds of its own plan on its own hardware. Knows a row's form; compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.predict import predict
from lightning_autopar.memory.replay import REPLAYED_ENGINES, replay
from lightning_autopar.memory.sharded import Widths
from lightning_autopar.memory.work import Work
from lightning_autopar.memory.zero_bytes import ZeroSettings
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.scaling import scaled
from lightning_autopar.planning.timing import Wire, predict_seconds
from lightning_autopar.plans import Plan
from rows.planned import Layout
from rows.question import Question
from rows.shape import Shape

#: A tape of more events isn't replayed: it would take a minute.
_MOST_EVENTS = 250_000


def whole_footprint(footprint: Footprint, asked: Question, laid: Layout) -> Footprint:
    """At the batch of one step over all ranks; with a step that is part of backward, no gradient waits for the end."""
    if asked.in_backward:
        footprint = _in_backward(footprint)
    if laid.keeps_gradients:
        kept = tuple(replace(one, gradient_bytes=footprint.gradient_bytes) for one in footprint.moments)
        footprint = replace(footprint, moments=kept)
    elif not laid.frees_late:
        freed = tuple(replace(one, gradient_bytes=0) if one.phase == "forward" else one for one in footprint.moments)
        footprint = replace(footprint, moments=freed)
    footprint = _drawing_by_part(footprint)
    wanted = asked.rows * laid.data * laid.accumulate
    return footprint if footprint.batch_size == wanted else scaled(footprint, wanted)


def _drawing_by_part(footprint: Footprint) -> Footprint:
    """Random draws are made for each micro-batch, where our own engine makes those of the whole batch and keeps rows of them."""

    def layers(found: tuple[LayerFootprint, ...]) -> tuple[LayerFootprint, ...]:
        return tuple(replace(one, draw_bytes=0) if one.draw_bytes else one for one in found)

    return replace(footprint, blocks=layers(footprint.blocks), outer=layers(footprint.outer))


def _in_backward(footprint: Footprint) -> Footprint:
    """Gradients are gone as soon as they are there: one at most is alive, and the update's scratch is that of one parameter."""
    largest = footprint.largest_parameter_bytes

    def moment(one: Moment) -> Moment:
        fixed = min(one.fixed_bytes, 3 * largest) if one.phase == "optimizer" else one.fixed_bytes
        return replace(one, gradient_bytes=min(one.gradient_bytes, largest), fixed_bytes=fixed)

    return replace(footprint, moments=tuple(moment(one) for one in footprint.moments), tape=None)


def foresee_bytes(footprint: Footprint, asked: Question, laid: Layout, inventory: Inventory) -> tuple[DeviceBytes, Plan]:
    """What the fullest device holds, and the plan.

    Args:
        footprint: of the whole step.
        asked: what was traced.
        laid: the row's layout.
        inventory: its hardware.
    """
    plan = laid.plan(footprint, inventory)
    fullest = _fullest(footprint, asked, laid, plan, inventory)
    if laid.whole_gradients:
        running = replace(footprint, moments=tuple(one for one in footprint.moments if one.phase != "optimizer"))
        held = _fullest(running, asked, laid, plan, inventory)
        # Of a unit that trains adapters alone FSDP1's flat gradient has room for the frozen parameters, too.
        whole = footprint.parameter_bytes if isinstance(asked.shape, Shape) and asked.shape.rank else footprint.gradient_bytes
        held = replace(held, gradients=whole * (2 if asked.wide_storage else 1))
        fullest = max(held, fullest, key=lambda one: one.allocated)
    if laid.inputs_on_host:
        fullest = replace(fullest, activations=max(0, fullest.activations - _inputs_kept(asked)))
    if laid.buckets:
        fullest = replace(fullest, communication=fullest.communication + footprint.gradient_bytes)
    kept = _held_by_graph(asked) if laid.holds_loss else 0
    if kept:
        fullest = replace(fullest, activations=fullest.activations + kept)
    return fullest, plan


def _fullest(footprint: Footprint, asked: Question, laid: Layout, plan: Plan, inventory: Inventory) -> DeviceBytes:
    """Of the devices, that which holds most."""
    widths = _widths(asked, laid)
    buckets = laid.bucket_elements
    zero = None if buckets is None else ZeroSettings(reduce_bucket_elements=buckets, overlap_comm=False)
    shares = laid.optimizer_shards if laid.engine == "pipeline" else 1
    if shares > 1:
        # ZeRO-1 beside a pipeline: each replica updates its share, and the scratch is that share's.
        moments = (replace(one, fixed_bytes=one.fixed_bytes // shares) if one.phase == "optimizer" else one for one in footprint.moments)
        footprint = replace(footprint, moments=tuple(moments))
    held = predict(footprint, plan, inventory, precision=asked.precision, widths=widths, zero=zero)
    found = [_shared(one, asked, shares) for one in held.values()]
    fullest = max(found, key=lambda held: held.reserved)
    if _can_replay(footprint, laid, plan):
        played = replay(footprint, plan, found.index(fullest), workspace_bytes=fullest.workspace, widths=widths)
        fullest = replace(fullest, rounding=max(0, played.reserved_peak_bytes - played.allocated_peak_bytes))
    return fullest


def _widths(asked: Question, laid: Layout) -> Widths:
    """Of FSDP's mixed precision: shards in fp32, what is gathered and computed with in 16 bits."""
    return Widths(stored=2.0, reduced=laid.reduce_bytes / 2) if asked.wide_storage and laid.engine == "fsdp" else Widths()


def _inputs_kept(asked: Question) -> int:
    """The inputs of all recomputed blocks but the one that runs and the one that is on its way."""
    shape = asked.shape
    if not isinstance(shape, Shape):
        return 0
    element = 2 if "16" in asked.precision else 4
    return max(0, shape.layers - 2) * asked.rows * shape.length * shape.hidden * element


def _held_by_graph(asked: Question) -> int:
    """Inputs of quantised layers that the last step's graph still holds while the next one runs forward.

    bitsandbytes keeps them as attributes of the graph's nodes (``ctx.tensors``), not as saved tensors, which backward would have let go of;
    so they live as long as the graph does, which is as long as somebody has the loss.
    """
    shape = asked.shape
    if not isinstance(shape, Shape) or not shape.quantised or not shape.keeps_input or shape.recompute != "none":
        return 0
    element = 4 if asked.precision.startswith("32") else 2
    widths = 2 * shape.hidden + shape.heads * shape.head_dim + shape.ffn
    total = shape.layers * widths + (shape.hidden if shape.quantised_head else 0)
    return asked.rows * shape.length * total * element


def _can_replay(footprint: Footprint, laid: Layout, plan: Plan) -> bool:
    """Whether the tape tells the step as it was: whole, short enough, and with gradients that come and go."""
    if plan.engine not in REPLAYED_ENGINES or plan.replicas > 1 or plan.offload or laid.keeps_gradients:
        return False
    tape = footprint.tape
    return tape is not None and 2 * len(tape) * min(plan.micro_batches, 2) <= _MOST_EVENTS


def foresee_fit(footprint: Footprint, held: DeviceBytes, laid: Layout, plan: Plan, total_bytes: int) -> bool:
    """Whether it fits: the allocator gives its cache back before it gives up, but fragments remain.

    Where the step was taped, a replay under the limit decides between what is allocated and what would be reserved; else what is
    allocated does.

    Args:
        footprint: of the whole step.
        held: what the fullest device holds.
        laid: the row's layout.
        plan: the same as a plan.
        total_bytes: of a device.
    """
    if held.allocated + held.context > total_bytes:
        return False
    tape = footprint.tape
    if held.reserved <= total_bytes or tape is None or plan.engine != "single" or plan.micro_batches > 1 or len(tape) > _MOST_EVENTS // 2:
        return True
    # Gradients that stay are no part of the tape; they take room from the start.
    beside = footprint.gradient_bytes if laid.keeps_gradients else 0
    limit = total_bytes - held.context - beside
    return replay(footprint, plan, 0, limit_bytes=limit, workspace_bytes=held.workspace).fits


def _shared(held: DeviceBytes, asked: Question, shares: int) -> DeviceBytes:
    """With an optimizer's state that replicas of a pipeline share."""
    if shares <= 1:
        return held
    kept = 4 / 16 if asked.optimizer == "master gradients" else 0.0  # its buffer of gradients is whole on each rank
    return replace(held, optimizer=round(held.optimizer * (kept + (1 - kept) / shares)))


def of_kind(held: DeviceBytes, kind: str) -> int:
    """The figure that a row publishes, by what its ``memory_kind`` says.

    Allocated and active are what tensors take, and so is a peak that may be allocated or reserved. Reserved is what the allocator holds.
    nvidia-smi and the driver see all of it, with the context, unless the row says that this was subtracted; where the tool isn't stated,
    what the card has to have is meant.
    """
    said = kind.casefold()
    inside = held.reserved - held.context
    if said.startswith("reserved") or "(reserved" in said or "minus" in said:
        return inside
    if "allocated" in said or said.startswith(("active", "max_memory_alloc")):
        return held.allocated
    return held.reserved


def foresee_seconds(footprint: Footprint, asked: Question, laid: Layout, plan: Plan, inventory: Inventory) -> dict[str, Any]:
    """Seconds of one step by part."""
    if laid.tf32:
        footprint = _in_tf32(footprint)
    if laid.first_flash:
        footprint = _with_work(footprint, _first_flash)
    if laid.host_update:  # gradients down, CPU-Adam, parameters up: as ZeRO's offload on one rank
        plan = replace(plan, engine="zero", zero_stage=2, offload=("optimizer",))
    if laid.fused_update and plan.offload:
        footprint = replace(footprint, optimizer_work=(Work(kind="pointwise", name="_fused_adamw_", dtype="fp32"),))
    wire = Wire(parameter_bytes=2, gradient_bytes=laid.reduce_bytes) if asked.wide_storage and laid.engine == "fsdp" else None
    # Adam's pass is bound by memory: 28 bytes an element in fp32, half of that where parameters and states are of 16 bits.
    rates = HostRates(laid.slow_host * (0.5 if asked.optimizer == "cpu kernel same" else 1.0))
    seconds = predict_seconds(footprint, plan, inventory, precision=asked.precision, rates=rates, wire=wire)
    return {**seconds.to_dict(), "step": seconds.step}


class HostRates(DataSheet):
    """The data sheet's, with another host's memory.

    Args:
        slower: how many times.
    """

    def __init__(self, slower: float, crowded: float = 1.0) -> None:
        super().__init__(crowded)
        self._slower = slower

    @property
    def token(self) -> Hashable:
        """By what differs."""
        return super().token, self._slower

    def host_adam_seconds(self, elements: int) -> float:
        """AdamW's update of so many fp32 elements."""
        return super().host_adam_seconds(elements) * self._slower


def _in_tf32(footprint: Footprint) -> Footprint:
    """Products of fp32 matrices by the tensor cores' own type."""
    products = ("matmul", "convolution")
    return _with_work(footprint, lambda one: replace(one, dtype="tf32") if one.kind in products and one.dtype == "fp32" else one)


def _first_flash(one: Work) -> Work:
    """FlashAttention's first version takes about as long as the memory-efficient kernel (arXiv 2307.08691, figures 4 to 6)."""
    return replace(one, name=one.name.replace("flash", "efficient")) if one.kind == "attention" else one


def _with_work(footprint: Footprint, change: Callable[[Work], Work]) -> Footprint:
    """The same with other operations in forward and backward."""

    def layers(found: tuple[LayerFootprint, ...]) -> tuple[LayerFootprint, ...]:
        return tuple(replace(one, work=tuple(map(change, one.work)), backward_work=tuple(map(change, one.backward_work))) for one in found)

    return replace(footprint, blocks=layers(footprint.blocks), outer=layers(footprint.outer))
