"""What an elastic run goes on with after a failure: the plan, and the memory promised for it.

Decides about one failure; how many there may be the agent knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from lightning_autopar.planning.changes import usable
from lightning_autopar.strategies.growth import after_shortage
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.memory.inventory import Inventory
    from lightning_autopar.strategies.decision import Decision
    from lightning_autopar.strategies.leasing import Promises


def with_more(decision: Decision, promises: Promises) -> Decision | None:
    """The same plan with more memory promised, where its devices have that: then it needn't make do with less.

    Args:
        decision: under which memory ran out.
        promises: of the run, of which nothing runs now.
    """
    assignment = decision.assignment
    wants = after_shortage(assignment)
    if not wants or not promises.held_bytes or promises.take(wants, None) is not None:
        return None
    most = max(wants, key=lambda device: wants[device])
    rank_zero_info(f"autopar: the plan is given more memory: {format_bytes(wants[most])} of {most}, as it ran out of what it had")
    return replace(decision, assignment=replace(assignment, at_least=wants))


def is_still_there(decision: Decision, inventory: Inventory) -> bool:
    """Whether a plan's devices are there with room for it."""
    there = {device.id: device.free_bytes for device in usable(inventory).devices}
    needed = decision.assignment.reserved_bytes
    return all(device in there and needed.get(device, 0) <= there[device] for device in decision.assignment.plan.devices)
