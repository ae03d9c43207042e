"""A pipeline whose stages are checkpointed whole, as GPipe's: what a stage keeps. Knows footprints and plans; no row."""

from __future__ import annotations

from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.plans import Plan


def stage_activations(footprint: Footprint, plan: Plan) -> tuple[int, ...]:
    """Bytes of activations that each stage holds at most.

    GPipe runs all forwards first (https://arxiv.org/abs/1811.06965, section 2.3), and each stage keeps what entered it of every
    micro-batch. In backward it makes one micro-batch's activations again, all of the stage's, where recomputation block by block would
    make one block's; the last micro-batch's are kept from the start (torchgpipe's ``checkpoint="except_last"``). What skips stages on its
    way to another isn't counted.

    Args:
        footprint: of the whole step.
        plan: its cuts and micro-batches.
    """
    parts = plan.micro_batches * plan.replicas
    names = [block.fqn for block in footprint.blocks]
    starts = [0, *(names.index(cut) for cut in plan.cuts)]
    found = []
    for start, end in zip(starts, [*starts[1:], len(names)], strict=True):
        inside: list[LayerFootprint] = list(footprint.blocks[start:end])
        saved = sum(block.activation_bytes + block.input_bytes for block in inside[1:]) + inside[0].activation_bytes
        # What lies between two blocks runs with the one before it, what comes before the first with that one.
        saved += sum(part.activation_bytes for index, part in enumerate(footprint.outer) if start <= max(0, index - 1) < end)
        entered = inside[0].input_bytes if start else 0  # the first stage's is the batch, which is there anyway
        found.append(saved // parts + plan.micro_batches * (entered // parts))
    return tuple(found)
