"""What a rank does by itself in one step: the seconds of its parts and of the update, and what the host adds. It knows no collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_autopar.devices.inventory import Device, idle_share
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Plan
from lightning_autopar.timing.rates import Phase, Rates
from lightning_autopar.timing.roofline import Layout, Load, part_load, update_load

#: How much longer a GPU's host is at a block's second forward than at its first: torch's hooks run for each tensor that is saved, in both
#: forwards and in backward. 3.1, 3.2, 2.6 and 2.7 for GPT-2, Llama, T5 and BERT of transformers, by processor time on stub GPUs.
RECOMPUTED = 2.9


class LaneSpan(NamedTuple):
    """Something that a rank does in a step, on one of its lanes."""

    lane: str
    start: float
    end: float
    kind: str
    label: str


@dataclass(frozen=True)
class RankWork:
    """One rank's own work in a step; a list has an entry for each layer of the layout.

    Args:
        parts: in how many parts its batch runs, one after the other.
        forward: seconds of a part's forwards on the device; ``backward`` and ``again`` (a second forward) likewise.
        copied: of the batch to the device.
        issued: what the host needs to issue forwards and backwards, while the device works; 0 for a CPU device, which does both.
        issued_update: the same of the update.
        host_seconds: of what the host does besides: the loop, hooks.
        synced: whether the host waits for the device in each step, as a gradient scaler does before the update.
    """

    device: Device
    parts: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    update: float
    copied: float
    issued: float
    issued_update: float
    host_seconds: float
    synced: bool

    @property
    def compute(self) -> float:
        """Seconds of the step's forwards and backwards."""
        return self.parts * (sum(self.forward) + sum(self.backward))

    @property
    def recompute(self) -> float:
        """Seconds of the step's second forwards."""
        return self.parts * sum(self.again)

    @property
    def busy(self) -> float:
        """Seconds of the whole step in which its device works."""
        return self.compute + self.recompute + self.update + self.copied

    @property
    def alone(self) -> float:
        """Seconds of the whole step without communication."""
        return self.busy + self.host_overhead(self.busy)

    def host_overhead(self, busy: float) -> float:
        """The seconds that the host adds to a device that is busy for so long in a step. A GPU's host runs ahead of it, from step to step:
        the longer of the two counts. If it waits for the device before the update, that holds separately for the time before and after. A
        CPU's host is the device.
        """
        if self.device.kind == "cpu":
            return self.host_seconds
        if not self.synced:
            return max(0.0, self.issued + self.issued_update + self.host_seconds - busy)
        return max(0.0, self.issued - (busy - self.update)) + max(0.0, self.issued_update + self.host_seconds - self.update)

    def backwards(self) -> tuple[float, ...]:
        """Seconds of each layer's backward, its second forward included."""
        return tuple(map(sum, zip(self.backward, self.again, strict=True)))


def batch_parts(plan: Plan, rows: tuple[int, ...]) -> int:
    """How many parts of its batch each rank runs: at most as many as the largest number of samples of a rank."""
    return max(1, min(plan.micro_batches, max(rows, default=1)))


def work_of(
    footprint: Footprint,
    layout: Layout,
    plan: Plan,
    device: Device,
    rates: Rates,
    *,
    share: float,
    parts: int,
    held: float = 1.0,
    updates: bool = True,
    units: int = 0,
    layers: range | None = None,
) -> RankWork:
    """What a rank does in a step.

    Args:
        share: of the batch that it gets, all its parts together.
        held: its part of the optimizer's work.
        updates: whether the device does the update.
        units: of FSDP, whose hooks take the host's time.
        layers: which layers are its own; all of them by default.
    """
    own = layers if layers is not None else range(len(layout.layers))
    again = frozenset(plan.recompute) if footprint.training else frozenset()
    # All wait for the slowest in every collective; the update is bound by memory, where devices don't differ.
    pace = rates.slowest_of(device, plan.world_size)
    idle = idle_share(device)
    on_cpu = device.kind == "cpu"
    each = share / parts
    own_layers = [layout.layers[number] for number in own]

    def loads(indices: list[int], phase: Phase) -> list[Load]:
        """The load of each layer. Blocks are mostly alike, so each kind is computed once."""
        found: dict[int, Load] = {}
        for index in set(indices):
            part = part_load(layout, index, each, device, rates, phase)
            stream = pace * part.stream / idle
            found[index] = Load(stream + part.issue, 0.0) if on_cpu else Load(stream, part.issue)
        return [found[index] for index in indices]

    forwards = loads([layer.forward for layer in own_layers], "forward")
    backwards = loads([layer.backward for layer in own_layers], "backward")
    repeated = [layer.fqn in again for layer in own_layers]
    second = [load if twice else Load(0.0, 0.0) for load, twice in zip(forwards, repeated, strict=True)]
    whole = update_load(layout, held, device, rates) if updates and layout.optimizer else Load(0.0, 0.0)
    update = whole.stream / idle + (whole.issue if on_cpu else 0.0)
    issued = parts * (sum(load.issue for load in (*forwards, *backwards)) + RECOMPUTED * sum(load.issue for load in second))
    added = _accumulation(layout, own, device, rates, parts) if parts > 1 and footprint.training else (0.0,) * len(forwards)
    return RankWork(
        device=device,
        parts=parts,
        forward=tuple(load.stream for load in forwards),
        backward=tuple(load.stream + adding / idle for load, adding in zip(backwards, added, strict=True)),
        again=tuple(load.stream for load in second),
        update=update,
        copied=rates.host_copy_seconds(device, round(footprint.input_bytes * share)),
        issued=0.0 if on_cpu else issued,
        issued_update=0.0 if on_cpu else whole.issue,
        host_seconds=rates.loop_seconds(device, plan.engine) + units * rates.python_seconds(device, "unit") * parts,
        synced=layout.synced,
    )


def _accumulation(layout: Layout, own: range, device: Device, rates: Rates, parts: int) -> tuple[float, ...]:
    """Seconds of adding a part's gradients to those of earlier parts, averaged over the parts."""
    known: dict[int, float] = {0: 0.0}
    sizes = [sum(layout.layers[number].gradients) for number in own]
    for size in set(sizes) - {0}:
        work = Work(kind="pointwise", name="add_", dtype="fp32", moved_bytes=3 * size, fixed_bytes=3 * size)
        known[size] = rates.work_seconds(device, work) * (parts - 1) / parts
    return tuple(known[size] for size in sizes)
