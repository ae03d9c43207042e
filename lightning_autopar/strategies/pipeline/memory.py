"""What each rank of a pipeline holds at the peak of a step. Arithmetic only: imports neither torch nor Lightning, and measures nothing.

As ``torch.distributed.pipelining`` runs stages that replay the user's own ``training_step`` (torch 2.13, ``schedules.py``;
``strategies/pipeline/run/torch_schedules.py``):

- Stage ``s`` runs from its first block to just before the next stage's: what runs between two blocks belongs to the stage before the cut.
- What a stage receives is allocated when it is asked for: activations stay until the micro-batch's backward is over, gradients during it
  (under 1F1B until the next are asked for). The interleaved schedule, which ``torch`` runs action by action, asks several actions ahead;
  here one is counted, in a replay all are (``schedules.receives``).
- Until its backward, a micro-batch holds what forward saved, and the stage's output. The last stage's output is the loss.
- What was sent stays until the schedule lets go of the operation: to the end of the step under interleaved 1F1B; under 1F1B the last
  gradient, and until the last forward the last activation but one that was sent before the first backward. Under GPipe gloo's
  operations hold their tensors to the end of the step, NCCL's let go of them at ``wait`` (``ProcessGroupNCCL.cpp``).
- No gradients of the step before are there when the schedule begins, as it runs its own backwards; of batches before it that are
  accumulated they lie aside.
- Replicas average a stage's gradients after its last backward, small ones in flat copies (``strategies/pipeline/run/replicas.py``).
- Masks and the like, which are made before the first block, every stage makes for itself.
- Tensors in the module's attributes and a callback's own networks lie whole on every rank.
- Layers that run again, as for a second view of the batch, do so within an outer part. Each stage that has one of them is taken to run all
  of that part, and what crosses a cut is as much more as the layers return in all of their calls.
- A step without gradients takes the replica's whole part of the batch through the stages at once, and keeps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_autopar.engines import Rank
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, FootprintCache, LayerFootprint
from lightning_autopar.memory.fullest_moments import RNG_STATE_BYTES, drawn_bytes
from lightning_autopar.memory.step_parts import StepPart, parts_of
from lightning_autopar.plans import INTERLEAVED, Plan
from lightning_autopar.strategies.pipeline.schedules import played_micro_batches, rank_actions

#: From this size on, replicas average a gradient alone, without a copy (``strategies/pipeline/run/replicas.py``).
AVERAGED_ALONE_BYTES = 1024**2
#: And so many bytes of smaller ones together.
AVERAGED_TOGETHER_BYTES = 25 * 1024**2


def pipeline_bytes(footprint: Footprint, plan: Plan, rank: int, *, on_cpu: bool = False) -> DeviceBytes:
    """What a rank holds at its fullest moment, over all of its stages.

    Args:
        footprint: of the module, at the whole batch, with a tape.
        rank: among all ranks of the plan.
        on_cpu: whether gloo sends, and the optimizer works parameter by parameter.

    Raises:
        ValueError: if the plan cuts at something that is none of the footprint's blocks, or not in their order, or there is no tape.
    """
    if footprint.tape is None or not footprint.outer:
        raise ValueError("the stages of a pipeline can't be predicted, as the step wasn't traced; choose another engine")
    starts = starts_of(footprint, plan)
    position, replica = rank % plan.devices_per_replica, rank // plan.devices_per_replica
    rows = max(1, -(-(footprint.batch_size - replica) // plan.replicas))
    own = {stage: (starts[stage], starts[stage + 1]) for stage in range(position, plan.stages, plan.devices_per_replica)}
    again = frozenset(2 * index + 1 for index in _indices(footprint, plan.recompute))
    again = again.intersection(itertools.chain.from_iterable(itertools.starmap(range, own.values())))
    how = plan.schedule, plan.stages, plan.devices_per_replica, plan.micro_batches, plan.replicas, plan.shard
    random_bytes = RNG_STATE_BYTES if on_cpu else 0
    key = how, position, rows, tuple(own.values()), again, random_bytes
    return _RANKS.get(footprint, key, lambda: _rank_bytes(footprint, plan, position, rows, own, again, random_bytes))


def _rank_bytes(
    footprint: Footprint,
    plan: Plan,
    position: int,
    rows: int,
    own: dict[int, tuple[int, int]],
    recomputed: frozenset[int],
    random_bytes: int,
) -> DeviceBytes:
    """The same for so many of the batch's samples, by the rank's own stages: where each begins and ends; which of their parts are
    recomputed; and the bytes of a random state that each of these keeps on a CPU device, 0 on a GPU.
    """
    assert footprint.tape is not None, "asked before"
    whole = max(1, footprint.batch_size)
    samples = -(-rows // (plan.micro_batches if footprint.training else 1))
    share = samples / whole
    copied = micro_batch_copy_bytes(footprint, samples) if footprint.training and plan.micro_batches > 1 else 0
    parts, on_cpu = parts_of(footprint.tape, len(footprint.blocks)), random_bytes > 0

    def stage_of(begin: int, end: int) -> _Stage:
        again = recomputed.intersection(range(begin, end))
        key = begin, end, share, again, random_bytes, copied
        return _STAGES.get(footprint, key, lambda: _Stage.of(footprint, parts, begin, end, share, again, random_bytes, copied))

    stages = {stage: stage_of(*ends) for stage, ends in own.items()}
    held = _states(plan, stages)
    held["buffers"] += footprint.partless_buffer_bytes
    held["input"] = round(footprint.input_bytes * rows / whole)
    if footprint.training:
        aside = sum(stage.gradients for stage in stages.values()) if footprint.tape.batches > 1 else 0
        running = _run(plan, position, stages, on_cpu)
        running["gradients"] += aside
        averaging = _averaging(plan, stages)
        averaging["gradients"] += aside
        running = max(running, averaging, _stepping(footprint, stages, on_cpu), key=lambda moment: sum(moment.values()))
    else:
        # Outputs of earlier calls wait for those of later ones.
        waits = max(stage.sent for stage in stages.values()) if footprint.again else 0
        running = {"gradients": 0, "temporary": max(stage.forward for stage in stages.values()) + waits}
    return DeviceBytes(
        parameters=held["parameters"],
        gradients=running["gradients"],
        optimizer=held["optimizer"],
        activations=running.get("activations", 0),
        temporary=running["temporary"],
        buffers=held["buffers"],
        input=held["input"],
        communication=held["communication"] + running.get("communication", 0),
    )


def micro_batch_copy_bytes(footprint: Footprint, samples: int) -> int:
    """The bytes of a micro-batch's rows. They are every n-th sample of the batch, copied (``exact/data/rank_share.py``); one sample is a
    view. The first stage keeps the copy until backward. Other stages free it with their forward.
    """
    return round(footprint.input_bytes * samples / footprint.batch_size) if samples > 1 and footprint.batch_size else 0


def rank_bytes(rank: Rank) -> Iterator[DeviceBytes]:
    """A rank's fullest moments: of a step, and of a validation between two, which runs its part of the batch whole."""
    step = pipeline_bytes(rank.footprint, rank.plan, rank.number, on_cpu=rank.on_cpu)
    yield step
    if rank.evaluation_bytes is not None:
        runs, received = pipeline_evaluation(rank.footprint, rank.plan, rank.number, rank.share)
        yield replace(step, gradients=0, activations=0, temporary=runs, input=0, communication=received, occasion="validation")


def pipeline_evaluation(footprint: Footprint, plan: Plan, rank: int, share: float) -> tuple[int, int]:
    """The bytes of a validation step between two training steps on a rank, with the batch and the buffers for receiving. Tensors that cross
    a cut count as in training, once for each call of the blocks. Where these run several times, a stage may run what all stages do.

    Args:
        footprint: of a training step, with what is known of the validation's.
        share: its replica's part of the batch.
    """
    assert footprint.tape is not None, "asked before"
    starts = starts_of(footprint, plan)
    parts = parts_of(footprint.tape, len(footprint.blocks))
    own = range(rank % plan.devices_per_replica, plan.stages, plan.devices_per_replica)
    received = sum(one.size.at(share) for stage in own if stage for one in parts[starts[stage]].crossing)
    runs = footprint.evaluation_bytes or 0
    if footprint.evaluation_repeats > footprint.repeats or runs_again(footprint, plan):
        # Outputs of earlier calls wait for those of later ones, before they are sent together.
        ends = [starts[stage + 1] for stage in own if stage < plan.stages - 1]
        sent = sum(one.size.at(share) for end in ends for one in parts[end].crossing)
        received = round((received + sent) * footprint.evaluation_repeats)
    elif footprint.evaluation_parts:
        runs = max(footprint.evaluation_parts[number] for stage in own for number in range(starts[stage], starts[stage + 1]))
    return round(runs * share), received


def _indices(footprint: Footprint, fqns: tuple[str, ...]) -> list[int]:
    known = _PLACES.get(footprint, None, lambda: {block.fqn: index for index, block in enumerate(footprint.blocks)})
    for fqn in fqns:
        if fqn not in known:
            raise ValueError(
                f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
            )
    return [known[fqn] for fqn in fqns]


#: The number of each block, by its FQN.
_PLACES: FootprintCache[dict[str, int]] = FootprintCache(4)


def starts_of(footprint: Footprint, plan: Plan) -> list[int]:
    """The part with which each stage begins, and the number of all parts."""
    cuts = _indices(footprint, plan.cuts)
    if cuts != sorted(cuts) or cuts[0] == 0:
        raise ValueError(f"the plan's cuts are {', '.join(plan.cuts)}; name blocks after the first one, in the order in which they run")
    return [0, *(2 * cut + 1 for cut in cuts), 2 * len(footprint.blocks) + 1]


def again_in(footprint: Footprint, begin: int, end: int) -> list[int]:
    """Outer parts from part ``end`` on in which layers from part ``begin`` to before it run again."""
    return sorted({outer for layer, outer in footprint.again if begin <= layer < end <= outer})


def runs_again(footprint: Footprint, plan: Plan) -> bool:
    """Whether a stage's layers run again after the stage's end."""
    starts = starts_of(footprint, plan) if footprint.again else []
    return any(again_in(footprint, begin, end) for begin, end in itertools.pairwise(starts))


def own_blocks(footprint: Footprint, plan: Plan, rank: int) -> list[str]:
    """FQNs of the blocks of a rank's stages, in the order in which they run."""
    begins = [0, *_indices(footprint, plan.cuts), len(footprint.blocks)]
    own = range(rank % plan.devices_per_replica, plan.stages, plan.devices_per_replica)
    return [block.fqn for stage in own for block in footprint.blocks[begins[stage] : begins[stage + 1]]]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The bytes of one stage; its activations are those of one micro-batch.

    Args:
        parameters: of its own, tied copies included; so are ``gradients`` and ``optimizer``.
        largest: its largest parameter.
        flat: those of its gradients that replicas average in flat copies.
        received: the activations that it gets; their gradients are as many.
        sent: the activations that it hands on; the gradients that it gets are as many.
        output: those of ``held`` that are its output.
        held: between a micro-batch's forward and its backward, what it received included.
        forward: at the fullest moment of a forward.
        backward: at the fullest moment of a backward, the gradients that it got included; complete gradients aren't counted.
        first: the same for a step's first backward, with the gradients that are complete by then.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    largest: int
    flat: int
    received: int
    sent: int
    output: int
    held: int
    forward: int
    backward: int
    first: int

    @classmethod
    def of(
        cls,
        footprint: Footprint,
        parts: list[StepPart],
        begin: int,
        end: int,
        share: float,
        recomputed: frozenset[int],
        kept_random: int,
        copied: int = 0,
    ) -> _Stage:
        """The bytes of these parts, at a micro-batch's share of the batch, with the copy of its rows."""
        layers = [_layer(footprint, number) for number in range(begin, end)]
        shared = footprint.shared_uses(begin, end)
        twice = _twice(footprint, begin, end)
        more = again_in(footprint, begin, end)
        numbers = [*range(begin, end), *more]
        repeats = footprint.repeats if footprint.again else 1.0
        received = round(repeats * sum(one.size.at(share) for one in parts[begin].crossing)) if begin else 0
        crossing = parts[end].crossing if end < len(parts) else []
        output = round(repeats * sum(one.size.at(share) for one in crossing if one.made >= begin))
        held = passing = parts[begin].anew.at(share) if begin else 0
        waits = round(repeats * sum(one.size.at(share) for one in crossing if one.made >= begin and not one.kept))
        passing += waits
        forward = 0
        samples = round(share * footprint.batch_size)

        def drawn(whole: int) -> int:
            return drawn_bytes([whole], samples, footprint.batch_size, on_cpu=kept_random > 0)

        before: dict[int, int] = {}
        kept_until = dict.fromkeys(range(begin, len(parts)), 0)
        for number in numbers:
            part = parts[number]
            runs = (part.forward if number == begin else part.forward_given).at(share)
            runs += copied if begin or number == begin else 0
            forward = max(forward, held + max(runs, part.drawing(share, drawn, given=number != begin)))
            lent = {until: size.at(share) for until, size in part.lent.items()}
            for until, size in lent.items():
                kept_until[max(until, begin)] += size
            inner = part.inner.at(share) + (copied if not number else 0)
            if number in recomputed:
                inner = kept_random
                if number != begin:
                    inner += round(footprint.blocks[number // 2].input_extra_bytes * share)
            before[number] = inner
            held += inner + sum(lent.values())
        passing += sum(size for until, size in kept_until.items() if until >= end)
        gradients = sum(layer.gradient_bytes for layer in layers) + sum(use[3] for use in shared)
        last = max((number for number in numbers if parts[number].active), default=begin)
        backward = first = inside = 0
        complete = 0
        below = sum(before.values()) + sum(size for until, size in kept_until.items() if until < end)
        for number in reversed(numbers):
            part = parts[number]
            below -= before[number]
            below -= kept_until[number] if number < end else 0
            given, lent_too = number != last, number != begin
            again = number in recomputed
            most = (part.backward_again if again else part.backward)[given, lent_too].at(share)
            most_first = (part.first_again if again else part.first)[given, lent_too].at(share)
            if again:
                kept = before[number]
                runs = max(part.again.at(share), part.drawing(share, drawn, given=False))
                running = kept + kept_random + runs + (inside if given else 0)
                most, most_first = max(most + kept, running), max(most_first + kept, running)
            waiting = passing + below + sum([size_bytes for low, high, size_bytes in twice if low <= number < high])
            backward = max(backward, waiting + most)
            first = max(first, waiting + most_first + complete)
            inside = part.returns.at(share)
            complete += _layer(footprint, number).gradient_bytes if number < end else 0
        rows = [length * size_bytes for layer in layers for length, size_bytes, _ in layer.parameter_rows]
        learning = [length * size_bytes for layer in layers for length, size_bytes, learns in layer.parameter_rows if learns]
        learning += [use[3] for use in shared]
        sent = round(repeats * sum(one.size.at(share) for one in crossing))
        return cls(
            parameters=sum(layer.parameter_bytes for layer in layers) + sum(use[2] for use in shared),
            gradients=gradients,
            optimizer=sum(layer.optimizer_bytes for layer in layers) + sum(use[4] for use in shared),
            buffers=sum(layer.buffer_bytes for layer in layers),
            largest=max([*rows, *(use[2] for use in shared)], default=0),
            flat=sum(size for size in learning if size < AVERAGED_ALONE_BYTES),
            received=received,
            sent=sent,
            output=output,
            held=received + held + waits,
            forward=received + forward,
            backward=received + sent + backward,
            first=received + sent + first,
        )


#: Plans of one search have most of their stages in common, and plans whose cuts are moved most of their ranks.
_STAGES: FootprintCache[_Stage] = FootprintCache(2048)
_RANKS: FootprintCache[DeviceBytes] = FootprintCache(2048)


def _twice(footprint: Footprint, begin: int, end: int) -> list[tuple[int, int, int]]:
    """For each parameter that several parts of a stage use: the first and the last part, and the bytes of its gradient. The gradient from
    the later part's backward is held until the earlier part's is added.
    """
    users: dict[str | int, list[int]] = {}
    size_bytes: dict[str | int, int] = {}
    for layer, outer in footprint.again:
        users.setdefault(layer, [layer]).append(outer)
        size_bytes[layer] = footprint.blocks[layer // 2].gradient_bytes
    for index, name, _, gradient_bytes, _ in footprint.also_uses:
        users.setdefault(name, [footprint.holders.get(name, 0)]).append(2 * index)
        size_bytes[name] = gradient_bytes
    more = again_in(footprint, begin, end)
    within = {name: [part for part in parts if begin <= part < end or part in more] for name, parts in users.items()}
    return [(min(parts), max(parts), size_bytes[name]) for name, parts in within.items() if len(set(parts)) > 1]


def _layer(footprint: Footprint, number: int) -> LayerFootprint:
    return footprint.blocks[number // 2] if number % 2 else footprint.outer[number // 2]


def _states(plan: Plan, stages: dict[int, _Stage]) -> dict[str, int]:
    """The bytes at every moment: parameters, optimizer state, buffers; sharded over the replicas where the plan says so.

    ``fully_shard`` keeps the gathered parameters through the schedule (at most three stages' at once, ``_add_unshard_reshard``), and whole
    gradients up to its end.
    """
    parts = plan.replicas if plan.shard else 1
    whole = sorted((stage.parameters for stage in stages.values()), reverse=True)
    return {
        "parameters": sum(-(-size_bytes // parts) for size_bytes in whole),
        "optimizer": sum(-(-stage.optimizer // parts) for stage in stages.values()),
        "buffers": sum(stage.buffers for stage in stages.values()),
        "communication": sum(whole[:3]) if plan.shard else 0,
    }


def _run(plan: Plan, position: int, stages: dict[int, _Stage], on_cpu: bool) -> dict[str, int]:
    """The fullest moment of the schedule, by category."""
    assert plan.schedule is not None
    parts = played_micro_batches(plan.schedule, plan.stages, plan.micro_batches)
    actions = rank_actions(plan.schedule, position, plan.devices_per_replica, plan.stages, parts)
    several = plan.schedule in INTERLEAVED
    most = gradients = activations = communication = lingering = 0
    seen: set[int] = set()
    fullest: dict[str, int] = {"gradients": 0, "temporary": 0}
    for (work, number, micro_batch), following in zip(actions, [*actions[1:], None], strict=True):
        stage = stages[number]
        own = 0 if work == "forward" else stage.held
        moment = stage.forward if work == "forward" else stage.backward if number in seen else stage.first
        passing = communication + (lingering if work == "forward" else 0)
        if several and following is not None:
            passing += stages[following.stage].received if following.work == "forward" else stages[following.stage].sent
        if (total := activations - own + moment + gradients + passing) > most:
            most, kept = total, activations - own + min(moment, own)
            fullest = {"activations": kept, "temporary": max(0, moment - own), "gradients": gradients, "communication": passing}
        if work == "forward":
            activations += stage.held
        else:
            activations -= own
            if not several and plan.schedule == "1f1b":
                ahead = plan.stages - number
                lingers = ahead > 1 and ahead - 2 <= micro_batch < parts - ahead
                communication, lingering = stage.received + (stage.output if lingers else 0), stage.sent
            else:
                communication += stage.received + (stage.output if several or on_cpu else 0)
            if number not in seen:
                seen.add(number)
                gradients += stage.gradients
    return fullest


def _averaging(plan: Plan, stages: dict[int, _Stage]) -> dict[str, int]:
    """After the last backward: replicas average their gradients; gradients of shards are scattered without a copy."""
    copies = plan.replicas > 1 and not plan.shard
    return {
        "gradients": sum(stage.gradients for stage in stages.values()),
        "temporary": 0,
        "communication": sum(stage.flat for stage in stages.values()) if copies else 0,
    }


#: Bytes of the optimizer's temporaries.
_FIXED: FootprintCache[int] = FootprintCache(4)


def _stepping(footprint: Footprint, stages: dict[int, _Stage], on_cpu: bool) -> dict[str, int]:
    """The optimizer's step: all gradients, and its temporaries, of one parameter or of all of them, as traced."""
    fixed = _FIXED.get(footprint, None, lambda: max((one.fixed_bytes for one in footprint.moments if one.phase == "optimizer"), default=0))
    gradients = sum(stage.gradients for stage in stages.values())
    if fixed <= 4 * footprint.largest_parameter_bytes and footprint.largest_parameter_bytes:
        scratch = fixed * max(stage.largest for stage in stages.values()) // footprint.largest_parameter_bytes
    else:
        scratch = fixed * gradients // max(1, footprint.gradient_bytes)
    return {"gradients": gradients, "temporary": scratch}
