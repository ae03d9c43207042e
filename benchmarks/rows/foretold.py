"""What we foresee for a row: bytes by category and seconds of its own plan on its own hardware. Knows a row's form; compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.batch_scaling import drawn_by_rank, scaled
from lightning_autopar.memory.cuda_overhead import context_bytes
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.work.work import Work
from lightning_autopar.planning.plan_bytes import predict, replay
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.engine import FSDP
from lightning_autopar.strategies.fsdp.memory import AS_TRACED, Widths
from lightning_autopar.strategies.fsdp.timing import FSDPStep
from lightning_autopar.strategies.zero.engine import Zero
from lightning_autopar.strategies.zero.settings import ZeroSettings
from lightning_autopar.timing.collectives import known_model
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.rank_compute import RankWork
from lightning_autopar.timing.rates import Phase, Rates
from lightning_autopar.timing.step_seconds import Seconds, Step
from rows.kept_gradients import played
from rows.planned import Layout
from rows.question import Question
from rows.shape import Shape
from rows.whole_stages import stage_activations

#: All of torch's kernels in the CUDA context, before the driver loaded them one by one: torch 1.3's first tensor on a Titan V took
#: 1,008 MiB of the device where PyCUDA's took 320 (pytorch/pytorch#28394); ">1000 MB" before CUDA 11.7, some 300 since
#: (pytorch/pytorch#107667).
_ALL_KERNELS_BYTES = (1008 - 320) << 20
#: The same built for CUDA 11, without which there is no Ampere: before its first tensor torch 1.7.1 took 1,486 MiB of an RTX 3090
#: (pytorch/pytorch#49877, 1,644 with a tensor of 158) and torch 1.8.2 1,685 (pytorch/pytorch#55277); the mean, beside the 397 MiB of a
#: context that loads kernels one by one, as the prediction has it for that card.
_AMPERE_KERNELS_BYTES = ((1486 + 1685) // 2 - 397) << 20
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
    if laid.caches_casts:
        casts = 2 * sum(rows * size // 4 for block in footprint.blocks for rows, size, learns in block.parameter_rows if learns)
        cached = tuple(replace(one, fixed_bytes=one.fixed_bytes + casts) if one.phase == "forward" else one for one in footprint.moments)
        footprint = replace(footprint, moments=cached)
    footprint = _drawing_by_part(footprint)
    wanted = asked.rows * laid.data * laid.accumulate
    return footprint if footprint.batch_size == wanted else scaled(footprint, wanted)


def _drawing_by_part(footprint: Footprint) -> Footprint:
    """Random draws are made for each micro-batch, where our own engine makes those of the whole batch and keeps rows of them."""

    def layers(found: tuple[LayerFootprint, ...]) -> tuple[LayerFootprint, ...]:
        return tuple(
            replace(one, draw_bytes=(), work=_by_part(one.work), backward_work=_by_part(one.backward_work)) if _draws(one) else one
            for one in found
        )

    return replace(drawn_by_rank(footprint), blocks=layers(footprint.blocks), outer=layers(footprint.outer))


def _draws(layer: LayerFootprint) -> bool:
    return bool(layer.draw_bytes) or any(work.drawn for work in (*layer.work, *layer.backward_work))


def _by_part(works: tuple[Work, ...]) -> tuple[Work, ...]:
    return tuple(replace(one, drawn=False) if one.drawn else one for one in works)


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
    if laid.masters and laid.accumulate > 1:  # the masters' gradients stay from the first micro-batch to the update
        fullest = replace(fullest, gradients=fullest.gradients + 2 * footprint.gradient_bytes)
    if laid.buckets:
        fullest = replace(fullest, communication=fullest.communication + footprint.gradient_bytes)
    kept = _held_by_graph(asked) if laid.holds_loss else 0
    if kept:
        fullest = replace(fullest, activations=fullest.activations + kept)
    if laid.whole_stages:  # GPipe's stages are one process's, which copies from device to device (torchgpipe's ``copy.py``): no NCCL
        fullest = replace(fullest, context=context_bytes(inventory.devices[0].name))
    if laid.all_kernels:
        model = known_model(inventory.devices[0])
        ampere = model is not None and model.generation == "ampere"
        fullest = replace(fullest, context=fullest.context + (_AMPERE_KERNELS_BYTES if ampere else _ALL_KERNELS_BYTES))
    return fullest, plan


@dataclass(frozen=True)
class _CastFSDP(FSDP):
    """FSDP with a ``MixedPrecisionPolicy``: parameters are gathered in 16 bits, gradients are reduced in ``reduce_bytes`` an element."""

    reduce_bytes: int | None = None

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        made = FSDPStep(footprint, plan, inventory, precision, rates)
        if self.reduce_bytes is not None:
            stored = footprint.parameter_bytes / footprint.parameters
            made.parameter_scale, made.gradient_scale = 2 / stored, self.reduce_bytes / stored
        return made


def _engine(plan: Plan, widths: Widths = AS_TRACED, reduce_bytes: int | None = None, zero: ZeroSettings | None = None) -> engines.Engine:
    """What runs a row's plan, with the settings that others have chosen."""
    if plan.engine == "fsdp":
        return _CastFSDP(widths, reduce_bytes)
    return Zero(zero or ZeroSettings()) if plan.engine == "zero" else engines.of(plan)


def _fullest(footprint: Footprint, asked: Question, laid: Layout, plan: Plan, inventory: Inventory) -> DeviceBytes:
    """Of the devices, that which holds most."""
    widths = _widths(asked, laid)
    buckets = laid.bucket_elements
    zero = ZeroSettings() if buckets is None else ZeroSettings(reduce_bucket_elements=buckets, overlap_comm=False)
    shares = laid.optimizer_shards if laid.engine == "pipeline" else 1
    if shares > 1:
        # ZeRO-1 beside a pipeline: each replica updates its share, and the scratch is that share's.
        moments = (replace(one, fixed_bytes=one.fixed_bytes // shares) if one.phase == "optimizer" else one for one in footprint.moments)
        footprint = replace(footprint, moments=tuple(moments))
    held = predict(footprint, plan, inventory, precision=asked.precision, engine=_engine(plan, widths, zero=zero))
    found = [_shared(one, asked, shares) for one in held.values()]
    if laid.whole_stages and plan.recompute:
        kept_by_stage = stage_activations(footprint, plan)
        found = [replace(one, activations=kept_by_stage[rank % len(kept_by_stage)]) for rank, one in enumerate(found)]
    fullest = max(found, key=lambda held: held.reserved)
    if _can_replay(footprint, plan) and laid.keeps_gradients:
        # DDP's buckets come on top; they are as large as the gradients, and stay as they do.
        kept = played(footprint, plan, workspace_bytes=fullest.workspace)
        assert kept is not None, "without a limit there is room"
        fullest = replace(fullest, rounding=max(0, kept.peak_reserved_bytes - kept.peak_allocated_bytes))
    elif _can_replay(footprint, plan):
        found_peak = replay(footprint, plan, found.index(fullest), workspaces=_workspaces(fullest), engine=_engine(plan, widths))
        fullest = replace(fullest, rounding=max(0, found_peak.reserved_peak_bytes - found_peak.allocated_peak_bytes))
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


def _can_replay(footprint: Footprint, plan: Plan) -> bool:
    """Whether the tape tells the step as it was: whole and short enough."""
    if plan.engine == "zero" or plan.replicas > 1 or plan.offload:
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
    limit = total_bytes - held.context
    if laid.keeps_gradients:
        return played(footprint, plan, workspace_bytes=held.workspace, limit_bytes=limit) is not None
    return replay(footprint, plan, 0, limit_bytes=limit, workspaces=_workspaces(held)).fits


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
    if isinstance(asked.shape, Shape) and asked.shape.fused:
        footprint = _with_work(footprint, _compiled_cast)
    if laid.host_update:  # gradients down, CPU-Adam, parameters up: as ZeRO's offload on one rank
        plan = replace(plan, engine="zero", zero_stage=2, offload=("optimizer",))
    if laid.clips and not plan.offload:
        footprint = replace(footprint, optimizer_work=(*footprint.optimizer_work, *_clipping(footprint, laid)))
    if laid.masters:
        footprint = replace(footprint, optimizer_work=(*footprint.optimizer_work, *_unscaling(footprint, laid)))
    if laid.fused_update and plan.offload:
        footprint = replace(footprint, optimizer_work=(Work(kind="pointwise", name="_fused_adamw_", dtype="fp32"),))
    if laid.narrow:
        footprint = _narrow(footprint, laid.narrow)
    reduced = laid.reduce_bytes if asked.wide_storage and laid.engine == "fsdp" else None
    # Adam's pass is bound by memory: 28 bytes an element in fp32, half of that where parameters and states are of 16 bits.
    rates = HostRates(laid.slow_host * (0.5 if asked.optimizer == "cpu kernel same" else 1.0), laid.slow_python)
    step = _engine(plan, reduce_bytes=reduced).step(footprint, plan, inventory, asked.precision, rates)
    seconds = step.seconds()
    if laid.waits and plan.engine != "pipeline":
        seconds = replace(seconds, overhead=max(seconds.overhead, _waiting(step.run(0), footprint, laid, plan, rates, seconds)))
    if laid.inputs_on_host and not laid.copies_aside:
        # ``save_on_cpu`` copies each input down and up again in the stream that computes (torch/autograd/graph.py).
        # Around the whole model (``offload_wrapper(model)``) that goes for what is saved outside of the blocks as well.
        outside = sum(part.activation_bytes for part in footprint.outer) * asked.rows // max(1, footprint.batch_size)
        copied = 2 * laid.accumulate * rates.host_copy_seconds(inventory.devices[0], _inputs_kept(asked) + outside)
        seconds = replace(seconds, offload=seconds.offload + copied)
    return {**seconds.to_dict(), "step": seconds.step}


class HostRates(DataSheet):
    """The data sheet's, with another host.

    Args:
        slower: how many times its memory is.
        slow_python: how many times its interpreter is.
    """

    def __init__(self, slower: float, slow_python: float) -> None:
        super().__init__()
        self._slower, self._slow_python = slower, slow_python

    @property
    def token(self) -> Hashable:
        """By what differs."""
        return super().token, self._slower, self._slow_python

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """Of one operation; in backward there is no Python."""
        return super().issue_seconds(device, phase) * (1.0 if phase == "backward" else self._slow_python)

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """AdamW's update of so many fp32 elements."""
        return super().host_adam_seconds(elements, device) * self._slower


def _waiting(run: RankWork, footprint: Footprint, laid: Layout, plan: Plan, rates: HostRates, seconds: Seconds) -> float:
    """What the host adds where it waits for the device in each micro-batch: it can't run ahead from one to the next, nor to the update."""
    parts = (*footprint.blocks, *footprint.outer)
    forward = rates.issue_seconds(run.device, "forward") * sum(work.count for part in parts for work in part.work)
    backward = rates.issue_seconds(run.device, "backward") * sum(work.count for part in parts for work in part.backward_work)
    if plan.recompute:
        backward += forward
    there, back = sum(run.forward), sum(run.backwards())
    if laid.waits == "both":
        late = max(0.0, forward - there) + max(0.0, backward - back)
    else:
        late = max(0.0, forward + backward - there - back - seconds.communication / run.parts)
    return run.parts * late + max(0.0, run.issued_update + run.host_seconds - run.update)


def _unscaling(footprint: Footprint, laid: Layout) -> tuple[Work, ...]:
    """After each backward apex's amp reads gradients of 16 bits and writes them as the masters', in fp32, to which it adds those of the
    micro-batches after the first (``amp/_process_optimizer.py``, ``post_backward_with_master_weights``): 6 and 10 bytes an element. A
    clipper reads them for their norm, then reads and writes them.
    """
    tensors = sum(learns for part in (*footprint.blocks, *footprint.outer) for *_, learns in part.parameter_rows)
    count, elements = max(1, tensors // 100), footprint.gradient_bytes // 2
    each = elements // count
    passes = [(6, 1), (10, laid.accumulate - 1)]
    if laid.clips_each:
        passes += [(4, laid.accumulate), (8, laid.accumulate)]
    return tuple(
        Work(kind="pointwise", name="unscale", dtype="fp32", count=count * times, moved_bytes=width * each, fixed_bytes=width * each)
        for width, times in passes
        if times
    )


def _clipping(footprint: Footprint, laid: Layout) -> tuple[Work, ...]:
    """Gradients read for their norm, then read and written (``torch.nn.utils.clip_grad_norm_``): two kernels a parameter, or a list."""
    tensors = sum(learns for part in (*footprint.blocks, *footprint.outer) for *_, learns in part.parameter_rows)
    count = max(1, tensors if laid.tensor_by_tensor else tensors // 100)  # a kernel takes some hundred tensors at once
    each = footprint.gradient_bytes // count
    return tuple(
        Work(kind="pointwise", name="clip", dtype="fp32", count=count, moved_bytes=passes * each, fixed_bytes=passes * each)
        for passes in (1, 2)
    )


def _in_tf32(footprint: Footprint) -> Footprint:
    """Products of fp32 matrices by the tensor cores' own type."""
    products = ("matmul", "convolution")
    return _with_work(footprint, lambda one: replace(one, dtype="tf32") if one.kind in products and one.dtype == "fp32" else one)


def _narrow(footprint: Footprint, name: str) -> Footprint:
    """The blocks' products of weights in eight or four bits, with the casts that these take; the rest, head included, as it was.

    Both factors are read for their largest values, read again and written in fewer bits ("dynamic scaling", torchao/float8/README.md):
    five bytes an element where they had two. Tensor cores do twice as many operations of eight bits as of sixteen, Blackwell's four times
    as many of four bits, which count as two products of eight here (data sheets of H100, B200).
    """

    def works(found: tuple[Work, ...]) -> tuple[Work, ...]:
        made: list[Work] = []
        for one in found:
            if one.kind != "matmul" or one.name not in ("mm", "addmm") or one.dtype not in ("bf16", "fp16") or len(one.shape) != 4:
                made.append(one)
                continue
            _, m, n, k = one.shape
            if name == "fp4":
                made.append(replace(one, dtype="fp8", shape=(1, m, n, max(1, k // 2))))
            else:
                made.append(replace(one, dtype="fp8"))
            fixed = 5 * ((0 if one.growing in (1, 3) else m * k) + (0 if one.growing in (2, 3) else n * k))
            moved = 5 * (m * k + n * k)
            casts = Work(
                kind="pointwise", name="cast", dtype=one.dtype, count=2 * one.count, moved_bytes=moved // 2, fixed_bytes=fixed // 2
            )
            made.append(casts)
        return tuple(made)

    blocks = tuple(replace(one, work=works(one.work), backward_work=works(one.backward_work)) for one in footprint.blocks)
    return replace(footprint, blocks=blocks)


def _first_flash(one: Work) -> Work:
    """FlashAttention's first version takes about as long as the memory-efficient kernel (arXiv 2307.08691, figures 4 to 6)."""
    return replace(one, name=one.name.replace("flash", "efficient")) if one.kind == "attention" else one


def _compiled_cast(one: Work) -> Work:
    """A compiler's casts are part of kernels that load in vectors (torch's inductor), not torch's own that don't."""
    return replace(one, name="compiled cast") if one.name == "_to_copy" else one


def _with_work(footprint: Footprint, change: Callable[[Work], Work]) -> Footprint:
    """The same with other operations in forward and backward."""

    def layers(found: tuple[LayerFootprint, ...]) -> tuple[LayerFootprint, ...]:
        return tuple(replace(one, work=tuple(map(change, one.work)), backward_work=tuple(map(change, one.backward_work))) for one in found)

    return replace(footprint, blocks=layers(footprint.blocks), outer=layers(footprint.outer))


def _workspaces(held: DeviceBytes) -> tuple[int, int]:
    """Forward's and backward's, which are as large."""
    return held.workspace - held.workspace // 2, held.workspace // 2
