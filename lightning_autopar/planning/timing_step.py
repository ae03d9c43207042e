"""One step of replicas or shards: the ranks' own work by class of rank, and what they say to each other. It finds no plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.planning.collectives import topology
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.roofline import computing_dtype, layout_of
from lightning_autopar.planning.timing_ranks import Event, Run, batch_parts, run_of
from lightning_autopar.planning.timing_replicas import (
    Played,
    Wires,
    fsdp_units,
    play_partitions,
    play_replicas,
    play_shards,
    zero_units,
)
from lightning_autopar.planning.timing_seconds import Seconds, Wire
from lightning_autopar.plans import Plan

#: Torch's Adam on the host's tensors beside DeepSpeed's: 1.39 and 0.22 s for a billion parameters ("ZeRO-Offload",
#: https://arxiv.org/abs/2101.06840, table 4).
_PLAIN_ADAM = 1.39 / 0.22


class Step:
    """One step of a plan: the ranks' own work by class of rank, and what they say to each other.

    Args:
        footprint: of the whole batch.
        plan: what to time.
        inventory: devices and links.
        precision: Lightning's name.
        rates: of single things.
        wire: as what parameters and gradients are sent.
    """

    def __init__(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates, wire: Wire) -> None:
        self.footprint, self.plan, self.inventory = footprint, plan, inventory
        self.layout = layout_of(footprint, precision)
        self.half = computing_dtype(precision) in ("bf16", "fp16")
        there = topology(inventory).devices
        self.devices = [there[device] if device in there else inventory.device(device) for device in plan.devices]
        self.rates = rates.among(self.devices, inventory)
        self.wire = wire
        self.batch = max(1, footprint.batch_size)
        self.rows = plan.rows(footprint.batch_size) if footprint.batch_size else (1,) * plan.world_size
        self.training = footprint.training
        stored = footprint.parameter_bytes / max(1, footprint.parameters)
        self._parameter_scale = (wire.parameter_bytes or stored) / stored if stored else 1.0
        self._gradient_scale = (wire.gradient_bytes or stored) / stored if stored else 1.0

    # -- replicas and shards -----------------------------------------------------------------------------------------------------------

    def classes(self) -> dict[tuple[Hashable, ...], list[int]]:
        """Ranks that do the same work on devices that are alike."""
        found: dict[tuple[Hashable, ...], list[int]] = {}
        classify = self.rates.device_class
        for rank, device in enumerate(self.devices):
            found.setdefault((classify(device), device.utilization, self.rows[rank]), []).append(rank)
        return found

    def run(self, rank: int) -> Run:
        """What a rank does by itself."""
        plan = self.plan
        world = plan.world_size
        shards = plan.devices_per_replica if plan.engine == "fsdp" else world if plan.engine == "zero" else 1
        share = self.rows[rank] / self.batch if self.footprint.batch_size else 1 / world
        return run_of(
            self.footprint,
            self.layout,
            plan,
            self.devices[rank],
            self.rates,
            share=share,
            parts=batch_parts(plan, self.rows) if self.footprint.batch_size else plan.micro_batches,
            held=1 / shards,
            updates="optimizer" not in plan.offload,
            units=self.units(),
        )

    def units(self) -> int:
        """What has hooks of its own: FSDP's units, under ZeRO-3 each module with parameters, of which most have two."""
        if self.plan.engine == "fsdp":
            return len(self.plan.shard) + 1
        return 1 + sum(len(layer.gradients) for layer in self.layout.layers) // 2 if self.plan.zero_stage == 3 else 0

    def seconds(self) -> Seconds:
        """Single, DDP, FSDP and ZeRO."""
        runs = [self.run(ranks[0]) for ranks in self.classes().values()]
        slowest = max(runs, key=lambda run: run.alone)
        played, offload = self.played(slowest), self.offload(slowest)
        own = slowest.copied + slowest.compute + slowest.recompute
        # Of one device the difference is nothing but rounding.
        exposed = max(0.0, played.end - own) if self.plan.world_size > 1 else 0.0
        hidden = max(0.0, played.carried + played.copied - exposed)
        exposed += (1 - self.rates.overlap(slowest.device)) * hidden + self.waited() + self.after()
        return Seconds(
            compute=slowest.compute,
            recompute=slowest.recompute,
            optimizer=slowest.update,
            communication=exposed,
            offload=offload,
            input=slowest.copied,
            overhead=slowest.overhead(own + slowest.update + exposed + offload),
        )

    def played(self, run: Run, events: list[Event] | None = None) -> Played:
        """The lanes of a step up to its last backward and collective."""
        plan = self.plan
        if plan.world_size == 1 and plan.engine != "fsdp" and plan.zero_stage != 3:
            return play_replicas(self.layout, run, self.wires(), 0.0, events)
        if plan.engine == "fsdp":
            units, root = fsdp_units(
                self.footprint,
                self.layout,
                plan,
                self.wires(),
                run.device,
                parameter_scale=self._parameter_scale,
                gradient_scale=self._gradient_scale if self.training else 0.0,
            )
            again = bool(plan.reshard_after_forward)
            return play_shards(self.layout, run, units, root, again=again, training=self.training, events=events)
        if plan.zero_stage == 3:
            units, root = zero_units(self.layout, plan, self.wires(), run.device, width=self.width)
            return play_shards(self.layout, run, units, root, again=True, training=self.training, events=events)
        if plan.engine == "zero":
            return play_partitions(self.layout, run, self.wires(), self.width, events)
        return play_replicas(self.layout, run, self.wires(), self._gradient_scale, events)

    def wires(self) -> Wires:
        """Who talks to whom: of hybrid sharding the replica whose links are the slowest."""
        plan = self.plan
        if plan.engine == "ddp":
            return Wires(self.devices[:1], self.devices, self.inventory, self.rates)
        if plan.replicas == 1:
            return Wires(self.devices, self.devices[:1], self.inventory, self.rates)
        count = plan.devices_per_replica
        groups = [self.devices[first : first + count] for first in range(0, plan.world_size, count)]
        across = [self.devices[first::count] for first in range(count)]
        return Wires(self._slowest(groups), self._slowest(across), self.inventory, self.rates)

    def _slowest(self, groups: Sequence[Sequence[Device]]) -> Sequence[Device]:
        """The group that takes longest over 64 MiB."""
        return max(groups, key=lambda group: self.rates.collective_seconds("all_reduce", 2**26, group, self.inventory))

    def width(self, size_bytes: int) -> float:
        """Bytes on the wire under DeepSpeed, which converts the model to the precision's dtype, also of a mixed one."""
        stored = self.footprint.parameter_bytes / max(1, self.footprint.parameters)
        return size_bytes * 2 / stored if self.half and stored > 2 else float(size_bytes)

    def waited(self) -> float:
        """Statistics of the whole batch: one exchange forward, one backward, at once waited for."""
        if not self.footprint.batch_norm or self.plan.world_size == 1:
            return 0.0
        times = len(self.footprint.batch_norm) * (2 if self.training else 1) * batch_parts(self.plan, self.rows)
        return times * self.rates.collective_seconds("all_reduce", 4096, self.devices, self.inventory)

    def after(self) -> float:
        """ZeRO-1 and 2: every rank's updated part of the parameters goes to all others, with nothing to hide behind."""
        if self.plan.zero_stage not in (1, 2) or not self.training:
            return 0.0
        return self.wires().over_shards("all_gather", self.width(self.footprint.parameter_bytes))

    def offload(self, run: Run) -> float:
        """The update in host memory: gradients down, unless they went as they came, all ranks of a node on its cores, parameters up."""
        plan = self.plan
        if "optimizer" not in plan.offload or not self.training:
            return 0.0
        nodes: dict[int, int] = {}
        for device in self.devices:
            nodes[device.node] = nodes.get(device.node, 0) + 1
        elements = self.footprint.trainable_parameters / plan.devices_per_replica * max(nodes.values())
        fused = any(work.name.startswith("_fused_") for work in self.layout.optimizer)  # one vectorised pass, as DeepSpeed's
        seconds = self.rates.host_adam_seconds(round(elements)) * (_PLAIN_ADAM if plan.engine == "fsdp" and not fused else 1.0)
        if plan.engine == "zero":
            part = self.width(self.footprint.gradient_bytes) / plan.world_size
            seconds += 2 * self.rates.host_copy_seconds(run.device, round(part))
        return seconds
