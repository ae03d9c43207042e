"""The module's repeated blocks as units: which can be sharded, which recomputed, and in what order. Knows no device and no plan's bytes."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import replace

from lightning_autopar.constraints import SplitFinding
from lightning_autopar.memory.footprint import Footprint, FootprintCache, LayerFootprint
from lightning_autopar.plans import Plan


def shardable(footprint: Footprint, split: SplitFinding | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Blocks that can be units of FSDP, and those that can't: something outside has or uses one of their parameters, or samples decide
    whether they are called, and all ranks must gather a unit together.
    """
    units, left_out = _SHARDABLE.get(footprint, None, lambda: _shardable(footprint))
    routed = () if split is None else tuple(fqn for fqn in units if fqn in split.uneven_calls)
    return tuple(fqn for fqn in units if fqn not in routed), (*left_out, *routed)


#: Every plan of a search needs them.
_SHARDABLE: FootprintCache[tuple[tuple[str, ...], tuple[str, ...]]] = FootprintCache()


def _shardable(footprint: Footprint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    units: list[str] = []
    groups = [group for group in footprint.tied if len(group) > 1]
    blocks = [block for block in footprint.blocks if block.repeated]
    for block in blocks:
        inside = f"{block.fqn}."
        crosses = any(0 < sum(f"{fqn}.".startswith(inside) for fqn in group) < len(group) for group in groups)
        if not crosses:
            units.append(block.fqn)
    together = () if footprint.conduct is None else footprint.conduct.together
    while apart := [fqn for names, others in together if others or not {*names} <= {*units} for fqn in names if fqn in units]:
        units = [fqn for fqn in units if fqn not in apart]
    return tuple(units), tuple(block.fqn for block in blocks if block.fqn not in units)


def recomputable(footprint: Footprint) -> tuple[LayerFootprint, ...]:
    """The blocks that may be recomputed and save memory by it, in running order."""
    return _RECOMPUTABLE.get(footprint, None, lambda: tuple(filter(_may_be_recomputed, footprint.blocks)) if footprint.training else ())


#: Every plan that recomputes asks for them.
_RECOMPUTABLE: FootprintCache[tuple[LayerFootprint, ...]] = FootprintCache()


def _may_be_recomputed(block: LayerFootprint) -> bool:
    return block.recomputable and saved_bytes(block) > 0


def saved_bytes(block: LayerFootprint) -> int:
    """The bytes that recomputing the block saves between its forward and its backward, at the whole batch."""
    return block.activation_bytes - block.input_bytes


def recomputable_order(footprint: Footprint, seconds: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """FQNs of the blocks that may be recomputed, those first that save most bytes for their time. Among equal blocks the earlier comes
    first: its activations are kept longest. At the peak, when forward ends, all count the same, but what a later block recomputes would
    come on top of what earlier ones still hold.

    Args:
        seconds: of each block's forward; unless given, its FLOPs stand for them.
    """

    def cost(block: LayerFootprint) -> float:
        return max(1, block.flops) if seconds is None else max(1e-12, seconds[block.fqn])

    # Sums of seconds differ in their last digits: equal to nine digits counts as equal.
    ordered = sorted(recomputable(footprint), key=lambda block: -float(f"{saved_bytes(block) / cost(block):.9g}"))
    return tuple(block.fqn for block in ordered)


def with_recompute(plan: Plan, footprint: Footprint, blocks: Collection[str]) -> Plan:
    """The plan with these blocks recomputed, in the order in which they run."""
    if not blocks:
        return plan
    chosen = frozenset(blocks)
    whole = "all that can be" if len(chosen) == len(recomputable(footprint)) else "as few as fit"
    repeated = sum(block.repeated for block in footprint.blocks)
    reason = f"activations of {len(chosen)} of {repeated} blocks are recomputed in backward ({whole}), for memory"
    recompute = tuple([block.fqn for block in footprint.blocks if block.fqn in chosen])
    return replace(plan, recompute=recompute, reasons=(*plan.reasons, reason))


def cuttable(footprint: Footprint, refused: Container[str] = ()) -> list[bool]:
    """For each block, whether a pipeline's stage may begin with it: not if blocks before and after share a parameter.

    Args:
        footprint: with the blocks; the first of them begins the first stage in any case.
        refused: FQNs of blocks that are known not to begin a stage.
    """
    allowed = [block.fqn not in refused for block in footprint.blocks]
    for group in footprint.tied:
        used = [index for index, block in enumerate(footprint.blocks) if any(f"{fqn}.".startswith(f"{block.fqn}.") for fqn in group)]
        for index in range(used[0] + 1, used[-1] + 1) if used else ():
            allowed[index] = False
    return allowed
