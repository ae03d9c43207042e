"""What each rank of a pipeline holds at the peak of a step. Arithmetic only: imports neither torch nor Lightning, and measures nothing.

As ``torch.distributed.pipelining`` runs stages that replay the user's own ``training_step`` (torch 2.13, ``stage.py``, ``schedules.py``):

- Stage ``s`` runs from its first block to just before the next stage's: what runs between two blocks belongs to the stage before the cut.
- A stage receives into buffers of its own for every micro-batch, activations and gradients alike. They are made once, and stay.
- Until its backward, a micro-batch holds what forward saved, and the stage's output. The last stage's output is the loss.
- What was sent stays until the schedule lets go of the operation: to the end of the step under GPipe and the schedules that ``torch`` runs
  action by action (interleaved, zero-bubble); under 1F1B the last gradient, and the last activation but one that was sent before the first
  backward. gloo's operations hold their tensor for as long as they exist; NCCL's let go of it at ``wait`` (``ProcessGroupNCCL.cpp``).
- Where backward is in two halves, the first frees nothing, and what it makes is counted as kept for the second. That is an estimate, of a
  few per cent: only gradients that reach a parameter's operation are kept (``_backward.py``, ``stage_backward_input``). The first stage
  does it all in the second half.
- No gradients of the step before are there when the schedule begins, as it runs its own backwards.
- Masks and the like, which are made before the first block, every stage makes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.parts import Part, parts_of
from lightning_autopar.memory.schedules import rank_actions
from lightning_autopar.plans import Plan

#: What ``torch.utils.checkpoint`` keeps of the CPU's random numbers for each block, in host memory (``torch.get_rng_state``).
_RNG_STATE_BYTES = 5056


def pipeline_bytes(footprint: Footprint, plan: Plan, rank: int, *, on_cpu: bool = False) -> DeviceBytes:
    """What a rank holds at its fullest moment, over all of its stages.

    Args:
        footprint: of the module, at the whole batch, with a tape.
        plan: a pipeline.
        rank: among all ranks of the plan.
        on_cpu: whether gloo sends, and the optimizer works parameter by parameter.

    Raises:
        ValueError: if the plan cuts at something that is none of the footprint's blocks, or not in their order, or there is no tape.
    """
    assert plan.schedule is not None
    if footprint.tape is None or not footprint.outer:
        raise ValueError("the stages of a pipeline can't be predicted, as the step wasn't traced; choose another engine")
    starts = _starts(footprint, plan)
    position, replica = rank % plan.devices_per_replica, rank // plan.devices_per_replica
    rows = max(1, -(-(footprint.batch_size - replica) // plan.replicas))
    whole = max(1, footprint.batch_size)
    share = -(-rows // plan.micro_batches) / whole
    parts = parts_of(footprint.tape, len(footprint.blocks))
    recomputed = frozenset(2 * index + 1 for index in _indices(footprint, plan.recompute))
    stages = {
        stage: _Stage.of(footprint, parts, starts, stage, share, recomputed, _RNG_STATE_BYTES if on_cpu else 0)
        for stage in range(position, plan.stages, plan.devices_per_replica)
    }
    held = _states(plan, stages)
    held["input"] = round(footprint.input_bytes * rows / whole)
    held["communication"] += plan.micro_batches * sum(stage.received + stage.sent for stage in stages.values())
    running = _run(plan, position, stages, on_cpu)
    stepping = _stepping(footprint, stages, on_cpu)
    if sum(stepping.values()) > sum(running.values()):
        running = stepping
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


def _indices(footprint: Footprint, fqns: tuple[str, ...]) -> list[int]:
    """Of blocks."""
    known = {block.fqn: index for index, block in enumerate(footprint.blocks)}
    for fqn in fqns:
        if fqn not in known:
            raise ValueError(
                f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
            )
    return [known[fqn] for fqn in fqns]


def _starts(footprint: Footprint, plan: Plan) -> list[int]:
    """With which part each stage begins, and the number of all parts."""
    cuts = _indices(footprint, plan.cuts)
    if cuts != sorted(cuts) or cuts[0] == 0:
        raise ValueError(f"the plan's cuts are {', '.join(plan.cuts)}; name blocks after the first one, in the order in which they run")
    return [0, *(2 * cut + 1 for cut in cuts), 2 * len(footprint.blocks) + 1]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What one stage takes, in bytes; of activations those of one micro-batch.

    Args:
        parameters: of its own, tied copies included; so are ``gradients`` and ``optimizer``.
        largest: its largest parameter.
        received: the activations that it gets; their gradients are as many.
        sent: the activations that it hands on.
        output: those of ``held`` that are its output.
        held: between a micro-batch's forward and its backward.
        forward: at the fullest moment of a forward.
        backward: at the fullest moment of a backward; complete gradients aren't counted.
        first: the same of a step's first backward, with the gradients that are complete by then.
        flow: all that a backward makes, gradients of parameters excepted.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    largest: int
    received: int
    sent: int
    output: int
    held: int
    forward: int
    backward: int
    first: int
    flow: int

    @classmethod
    def of(
        cls,
        footprint: Footprint,
        parts: list[Part],
        starts: list[int],
        stage: int,
        share: float,
        recomputed: frozenset[int],
        kept_random: int,
    ) -> _Stage:
        """A stage at a micro-batch's share of the batch."""
        begin, end = starts[stage], starts[stage + 1]
        layers = [_layer(footprint, number) for number in range(begin, end)]
        shared = [use for use in footprint.also_uses if begin <= 2 * use[0] < end]
        received = sum(one.size.at(share) for one in parts[begin].crossing) if begin else 0
        crossing = parts[end].crossing if end < len(parts) else []
        output = sum(one.size.at(share) for one in crossing if one.made >= begin)
        held = passing = parts[begin].anew.at(share) if begin else 0
        passing += sum(one.size.at(share) for one in crossing if one.made >= begin and not one.kept)
        forward = 0
        before: list[int] = []
        kept_until = dict.fromkeys(range(begin, len(parts)), 0)
        for number in range(begin, end):
            part = parts[number]
            forward = max(forward, held + (part.forward if number == begin else part.forward_given).at(share))
            lent = {until: size.at(share) for until, size in part.lent.items()}
            for until, size in lent.items():
                kept_until[max(until, begin)] += size
            inner = part.inner.at(share)
            if number in recomputed:
                inner = kept_random
                if number != begin:
                    inner += round(footprint.blocks[number // 2].input_extra_bytes * share)
            before.append(inner)
            held += inner + sum(lent.values())
        passing += sum(size for until, size in kept_until.items() if until >= end)
        gradients = sum(layer.gradient_bytes for layer in layers) + sum(use[3] for use in shared)
        last = max((number for number in range(begin, end) if parts[number].active), default=begin)
        backward = first = inside = 0
        complete = 0
        below = sum(before) + sum(size for until, size in kept_until.items() if until < end)
        for number in range(end - 1, begin - 1, -1):
            part = parts[number]
            below -= before[number - begin]
            below -= kept_until[number]
            given, lent_too = number != last, number != begin
            most = part.backward[given, lent_too].at(share)
            most_first = part.first[given, lent_too].at(share)
            if number in recomputed:
                kept = before[number - begin]
                again = kept + part.forward.at(share) + (inside if given else 0)
                most, most_first = max(most + kept, again), max(most_first + kept, again)
            backward = max(backward, passing + below + most)
            first = max(first, passing + below + most_first + complete)
            inside = part.returns.at(share)
            complete += _layer(footprint, number).gradient_bytes
        rows = [length * size_bytes for layer in layers for length, size_bytes, _ in layer.parameter_rows]
        return cls(
            parameters=sum(layer.parameter_bytes for layer in layers) + sum(use[2] for use in shared),
            gradients=gradients,
            optimizer=sum(layer.optimizer_bytes for layer in layers) + sum(use[4] for use in shared),
            buffers=sum(layer.buffer_bytes for layer in layers),
            largest=max([*rows, *(use[2] for use in shared)], default=0),
            received=received,
            sent=sum(one.size.at(share) for one in crossing),
            output=output,
            held=held + sum(one.size.at(share) for one in crossing if one.made >= begin and not one.kept),
            forward=forward,
            backward=backward,
            first=first,
            flow=sum(parts[number].flow.at(share) for number in range(begin, end)),
        )


def _layer(footprint: Footprint, number: int) -> LayerFootprint:
    """The part of that number."""
    return footprint.blocks[number // 2] if number % 2 else footprint.outer[number // 2]


def _states(plan: Plan, stages: dict[int, _Stage]) -> dict[str, int]:
    """What is there at any moment: parameters, optimizer state, buffers; sharded over the replicas where the plan says so.

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
    actions = rank_actions(plan.schedule, position, plan.devices_per_replica, plan.stages, plan.micro_batches)
    # DDP's buckets hold the gradients from the start, as gradient_as_bucket_view lets them.
    bucketed = plan.replicas > 1 and not plan.shard
    several = plan.schedule in ("interleaved_1f1b", "zero_bubble")
    gradients = sum(stage.gradients for stage in stages.values()) if bucketed else 0
    seen = set(stages) if bucketed else set()
    activations = communication = 0
    fullest: dict[str, int] = {}
    for work, number, micro_batch in actions:
        stage = stages[number]
        ends = work == "backward" or (work == "weight" and number == 0)
        own = 0 if work == "forward" else stage.held
        if work == "forward":
            moment = stage.forward
        elif ends:
            moment = stage.backward if number in seen else stage.first
        elif work == "input":
            moment = own + (stage.flow if number else 0)
        else:
            own += stage.flow
            moment = own + stage.largest
        found = {
            "activations": activations - own + min(moment, own),
            "temporary": max(0, moment - own),
            "gradients": gradients,
            "communication": communication,
        }
        if sum(found.values()) > sum(fullest.values()):
            fullest = found
        if work == "forward":
            activations += stage.held
        elif work == "input":
            activations += stage.flow if number else 0
        else:
            activations -= own
        if work != "forward":
            if not several and plan.schedule == "1f1b":
                ahead = plan.stages - number
                lingers = on_cpu and ahead > 1 and ahead - 2 <= micro_batch < plan.micro_batches - ahead
                communication = stage.received + (stage.output if lingers else 0)
            else:
                communication += stage.received if work != "weight" else 0
                communication += stage.output if work != "input" and (several or on_cpu) else 0
        if work not in ("forward", "input") and number not in seen:
            seen.add(number)
            gradients += stage.gradients
    return fullest


def _stepping(footprint: Footprint, stages: dict[int, _Stage], on_cpu: bool) -> dict[str, int]:
    """The optimizer's step: all gradients, and its scratch, which is of one parameter or of all of them, as it was traced."""
    fixed = max((moment.fixed_bytes for moment in footprint.moments if moment.phase == "optimizer"), default=0)
    gradients = sum(stage.gradients for stage in stages.values())
    if fixed <= 4 * footprint.largest_parameter_bytes and footprint.largest_parameter_bytes:
        scratch = fixed * max(stage.largest for stage in stages.values()) // footprint.largest_parameter_bytes
    else:
        scratch = fixed * gradients // max(1, footprint.gradient_bytes)
    return {"gradients": gradients, "temporary": scratch}
