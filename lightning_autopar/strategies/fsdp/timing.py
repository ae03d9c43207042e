"""Seconds of a step under FSDP2: its units, and how many calls its Python makes beside those of the trainer's loop.

Most counts of calls are by ``benchmarks/python_calls.py`` (``sys.setprofile`` in real steps of modules of several shapes, taken apart by
least squares) with torch 2.13 and DeepSpeed 0.19.8: the same on every machine; other versions make others, about as many. One comparison
alone gave ``SHARDED_OPERATION``.
"""

from __future__ import annotations

from lightning_autopar.devices.inventory import Device
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.memory import sharding_of
from lightning_autopar.timing.overlap import LaneSeconds, Links, UnitSeconds, copy_seconds, play_shards
from lightning_autopar.timing.rank_compute import LaneSpan, Layout, RankWork
from lightning_autopar.timing.step_seconds import PLAIN_ADAM, Step

#: Calls of FSDP2 for each parameter of a unit beyond the two that the measured unit has.
FSDP_PARAMETER = 197
FSDP_UNIT_PARAMETERS = 2
#: Calls of ``DTensor`` for one operation on shards, of which an optimizer without a kernel for lists runs a loop on a CPU.
SHARDED_OPERATION = 32
#: On a GPU with offload: what FSDP2 does for each parameter of a part of the batch (copies to the device and back, views, events), in
#: operations that the host issues. Fitted to GPT-2 and ViT of the GPU zoo on one H200 (``results/plans_gpu.json``).
OFFLOADED_PARAMETER = 11
#: Bytes a second at which a part's gradients come to the host to be added to those of earlier parts: FSDP2 waits for each copy, into
#: memory that isn't page-locked (torch 2.11, ``_fsdp_collectives.py``, ``foreach_reduce``). One measurement, of GPT-2 on an H200.
ACCUMULATED_BYTES_PER_SECOND = 4e9


class FSDPStep(Step):
    """One step of an FSDP plan.

    Attributes:
        parameter_scale: bytes of a parameter on the wire, beside those that it has at rest; ``gradient_scale`` of a gradient.
    """

    plain_update = PLAIN_ADAM
    parameter_scale, gradient_scale = 1.0, 1.0

    @property
    def shards(self) -> int:
        """Each rank updates its own."""
        return self.plan.devices_per_replica

    @property
    def units(self) -> int:
        """The blocks that are units of their own, and the root."""
        return len(self.plan.shard) + 1

    def calls(self) -> int:
        """Calls of FSDP2's Python in a step on CPU devices, besides its units' hooks."""
        if not (self.training and self.on_cpu):
            return 0
        looped = 0 if self.one_pass() else sum(work.count for work in self.layout.optimizer)
        return FSDP_PARAMETER * max(0, self._parameters - FSDP_UNIT_PARAMETERS * self.units) + SHARDED_OPERATION * looped

    def beside(self, run: RankWork) -> float:
        """Also what offloading a parameter from a GPU takes."""
        seconds = super().beside(run)
        if self.on_cpu or "parameters" not in self.plan.offload:
            return seconds
        return seconds + run.parts * self._parameters * OFFLOADED_PARAMETER * self.rates.issue_seconds(run.device)

    @property
    def _parameters(self) -> int:
        """How many learn."""
        return sum(len(layer.gradients) for layer in self.layout.layers)

    def offload(self, run: RankWork) -> float:
        """Also adding up the gradients of a batch's parts in a GPU's host memory."""
        seconds = super().offload(run)
        if self.on_cpu or not seconds:
            return seconds
        return seconds + (run.parts - 1) * self.footprint.gradient_bytes / self.shards / ACCUMULATED_BYTES_PER_SECOND

    def played(self, run: RankWork, events: list[LaneSpan] | None = None) -> LaneSeconds:
        """Play the step: each unit's parameters are gathered while the unit before computes, and its gradients are reduced afterwards."""
        units, root = fsdp_units(
            self.footprint,
            self.layout,
            self.plan,
            self.links(),
            run.device,
            parameter_scale=self.parameter_scale,
            gradient_scale=self.gradient_scale if self.training else 0.0,
        )
        again = bool(self.plan.reshard_after_forward)
        return play_shards(self.layout, run, units, root, again=again, training=self.training, events=events)


def fsdp_units(
    footprint: Footprint, layout: Layout, plan: Plan, links: Links, device: Device, *, parameter_scale: float, gradient_scale: float
) -> tuple[list[UnitSeconds | None], UnitSeconds]:
    """The units of a plan with their seconds: of each layer, and of the root.

    Args:
        device: on which buffers are copied.
        parameter_scale: bytes of a parameter on the wire, beside those that it has at rest; ``gradient_scale`` of a gradient.
    """
    sharding = sharding_of(footprint, plan)
    offloaded = "parameters" in plan.offload
    made: dict[tuple[int, int], UnitSeconds] = {}

    def unit(gathered: int, reduced: int) -> UnitSeconds:
        key = gathered, reduced
        if key not in made:
            wide, back = gathered * parameter_scale, reduced * gradient_scale
            shards = sharding.shards
            fetch = links.rates.host_copy_seconds(device, gathered // shards) if offloaded and gathered else 0.0
            # With one rank nothing is gathered: parameters come from the host when they are needed (torch 2.13, ``wait_for_unshard``), and
            # gradients are copied once more instead of being reduced.
            made[key] = UnitSeconds(
                gather=links.over_shards("all_gather", wide),
                unpack=copy_seconds(links.rates, device, 2 * wide) + (fetch if shards == 1 else 0.0),
                reduce=links.over_shards("reduce_scatter", back)
                + copy_seconds(links.rates, device, 2 * back * (2 if shards == 1 else 1))
                + links.over_copies(back / shards),
                fetch=fetch if shards > 1 else 0.0,
                store=links.rates.host_copy_seconds(device, reduced // shards) if offloaded and reduced else 0.0,
            )
        return made[key]

    pairs = zip(footprint.blocks, sharding.blocks, strict=True)
    own = {block.fqn: unit(one.gathered, one.reduced) for block, one in pairs if one.gathered}
    return [None if layer.fqn is None else own.get(layer.fqn) for layer in layout.layers], unit(
        sharding.root.gathered, sharding.root.reduced
    )
