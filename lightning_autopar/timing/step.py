"""One step of replicas or shards: the ranks' own work by class of rank, and what they say to each other. It finds no plans.

What a prediction of time says: seconds by part; and as what a plan's bytes are sent. Data only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.timing import SHARDED_OPERATION, fsdp_calls, zero_calls
from lightning_autopar.strategies.zero.settings import ZeroSettings, settings_of
from lightning_autopar.strategies.zero.timing import modules_with_parameters, persistent_bytes, play_partitions, zero_units
from lightning_autopar.timing.collectives import topology
from lightning_autopar.timing.lanes import (
    Played,
    Wires,
    copy_seconds,
    fsdp_units,
    play_replicas,
    play_shards,
)
from lightning_autopar.timing.rank import Event, Run, batch_parts, run_of
from lightning_autopar.timing.rates import Collective, Rates
from lightning_autopar.timing.roofline import computing_dtype, layout_of, update_load


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of one training step on the slowest rank, by part; the parts add up to :attr:`step`.

    Args:
        compute: forward and backward.
        recompute: forwards that run a second time.
        optimizer: the update on the device, clipping included.
        communication: what communication adds, beyond what hides behind computing, copies in and out of its buffers included.
        bubble: what the ranks of a pipeline wait for each other.
        offload: copies to host memory and back that nothing hides, and the update there.
        input: copying the batch to the device, and what the loader needs beyond the step.
        overhead: launching, hooks, waiting for the host.
    """

    compute: float
    recompute: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    offload: float = 0.0
    input: float = 0.0
    overhead: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_dict(self) -> dict[str, float]:
        """The parts and ``step``, by name."""
        return {**self.parts(), "step": self.step}


@dataclass(frozen=True, kw_only=True)
class Wire:
    """As what parameters and gradients are sent, where an engine casts them first. None: as they are stored.

    Args:
        parameter_bytes: of an element of gathered parameters (``MixedPrecisionPolicy.param_dtype``).
        gradient_bytes: of an element of reduced gradients (``reduce_dtype``, or a hook that compresses).
    """

    parameter_bytes: int | None = None
    gradient_bytes: int | None = None


#: Torch's Adam as a loop of operations on the host's tensors beside one pass over them: 1.39 and 0.22 s for a billion parameters
#: ("ZeRO-Offload", https://arxiv.org/abs/2101.06840, table 4).
_PLAIN_ADAM = 1.39 / 0.22
#: Torch's optimizers whose update on the host is one pass; how often AdamW's goes over an element: parameter and two moments both ways, and
#: the gradient.
_ONE_PASS = ("Adagrad", "Adam", "AdamW", "SGD")
_ADAMS_PASSES = 7
#: Bytes a second of a disk that wasn't measured: a slow one, on which everybody else's files are, too.
_DISK_RATE = 1e9


class Step:
    """One step of a plan: the ranks' own work by class of rank, and what they say to each other.

    Args:
        footprint: of the whole batch.
        plan: what to time.
        inventory: devices and links.
        precision: Lightning's name.
        rates: of single things.
        wire: as what parameters and gradients are sent.
        zero: DeepSpeed's settings, where somebody else has chosen them; None for our engine's.
    """

    def __init__(
        self,
        footprint: Footprint,
        plan: Plan,
        inventory: Inventory,
        precision: str,
        rates: Rates,
        wire: Wire,
        zero: ZeroSettings | None = None,
    ) -> None:
        self.footprint, self.plan, self.inventory = footprint, plan, inventory
        self.layout = layout_of(footprint, precision)
        self.half = computing_dtype(precision) in ("bf16", "fp16")
        self.devices, self.rates, self._sorts = topology(inventory).crew(plan.devices, rates, inventory)
        self.wire = wire
        self.on_cpu = self.devices[0].kind == "cpu"
        self.ours = zero is None
        self.zero = zero or (settings_of(footprint, plan, on_cpu=self.on_cpu) if plan.engine == "zero" else ZeroSettings())
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
        for rank, key in enumerate(zip(self._sorts, self.rows, strict=True)):
            found.setdefault(key, []).append(rank)
        return found

    def run(self, rank: int) -> Run:
        """What a rank does by itself."""
        plan = self.plan
        world = plan.world_size
        shards = plan.devices_per_replica if plan.engine == "fsdp" else world if plan.engine == "zero" else 1
        share = self.rows[rank] / self.batch if self.footprint.batch_size else 1 / world
        run = run_of(
            self.footprint,
            self.layout,
            plan,
            self.devices[rank],
            self.rates,
            share=share,
            parts=batch_parts(plan, self.rows) if self.footprint.batch_size else plan.micro_batches,
            held=1 / shards,
            updates="optimizer" not in plan.offload,
            units=len(plan.shard) + 1 if plan.engine == "fsdp" else 0,
        )
        calls = self.calls()
        return replace(run, beside=run.beside + calls * self.rates.call_seconds(run.device)) if calls else run

    def calls(self) -> int:
        """What the engine's Python does in a step besides its units' hooks; 0 of a plan with none."""
        plan, layers = self.plan, self.layout.layers
        parameters = sum(len(layer.gradients) for layer in layers)
        if plan.engine == "fsdp" and self.training and self.on_cpu:
            looped = 0 if self._one_pass() else sum(work.count for work in self.layout.optimizer)
            return fsdp_calls(parameters=parameters, units=len(plan.shard) + 1) + SHARDED_OPERATION * looped
        if plan.engine != "zero" or not self.ours:
            return 0
        elements = self.footprint.trainable_parameters
        buckets = elements // max(1, min(elements, self.zero.reduce_bucket_elements)) if elements else 0
        return zero_calls(plan, parameters=parameters, modules=len(layers) + modules_with_parameters(self.footprint), buckets=buckets)

    def _one_pass(self) -> bool:
        """Whether the update in host memory is torch's fused kernel: the user's own choice, or ours for a GPU's host."""
        if any(work.name.startswith("_fused_") for work in self.layout.optimizer):
            return True
        kinds = self.footprint.optimizer_classes
        wide = self.footprint.parameter_bytes >= 4 * self.footprint.parameters
        return not self.on_cpu and "optimizer" in self.plan.offload and bool(kinds) and all(kind in _ONE_PASS for kind in kinds) and wide

    def seconds(self) -> Seconds:
        """Single, DDP, FSDP and ZeRO."""
        runs = [self.run(ranks[0]) for ranks in self.classes().values()]
        slowest = max(runs, key=lambda run: run.alone)
        played, offload = self.played(slowest), self.offload(slowest)
        own = slowest.copied + slowest.compute + slowest.recompute
        # Of one device without offload the difference is nothing but rounding.
        exposed = max(0.0, played.end - own) if self.plan.world_size > 1 or self.plan.offload else 0.0
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
            units, root = zero_units(self.footprint, self.layout, plan, self.wires(), run.device, width=self.width, settings=self.zero)
            return play_shards(self.layout, run, units, root, again=True, training=self.training, events=events)
        if plan.engine == "zero":
            collective: Collective = "all_reduce" if self.ours else "reduce_scatter"
            bucket = self.zero.reduce_bucket_elements
            return play_partitions(self.layout, run, self.wires(), self.width, events, bucket=bucket, collective=collective)
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
        """Bytes on the wire under DeepSpeed, which may have converted the model to the precision's dtype, also of a mixed one."""
        if not self.zero.converts:
            return float(size_bytes)
        stored = self.footprint.parameter_bytes / max(1, self.footprint.parameters)
        return size_bytes * 2 / stored if self.half and stored > 2 else float(size_bytes)

    def waited(self) -> float:
        """Statistics of the whole batch: one exchange forward, one backward, at once waited for."""
        if not self.footprint.batch_norm or self.plan.world_size == 1:
            return 0.0
        times = len(self.footprint.batch_norm) * (2 if self.training else 1) * batch_parts(self.plan, self.rows)
        return times * self.rates.collective_seconds("all_reduce", 4096, self.devices, self.inventory)

    def after(self) -> float:
        """Under ZeRO, with nothing to hide behind: every rank's updated part of the parameters goes to all others, at stage 3 of those that
        stay gathered. Our engine asks all ranks which parameters had a gradient.
        """
        if self.plan.engine != "zero" or not self.training:
            return 0.0
        wires, width = self.wires(), self.width
        asked = wires.over_shards("all_reduce", sum(len(layer.gradients) for layer in self.layout.layers)) if self.ours else 0.0
        if self.plan.zero_stage == 3:
            staying = persistent_bytes(self.footprint, self.zero.persistence_elements)
            return asked + wires.over_shards("all_gather", width(staying))
        return asked + wires.over_shards("all_gather", width(self.footprint.parameter_bytes))

    def offload(self, run: Run) -> float:
        """The update in host memory: gradients down, unless they went as they came, all ranks of a node on its cores, parameters up.

        A CPU device's host is itself: its rank's threads update its own part.
        """
        plan, rates = self.plan, self.rates
        if "optimizer" not in plan.offload or not self.training:
            return 0.0
        nodes: dict[int, int] = {}
        for device in self.devices:
            nodes[device.node] = nodes.get(device.node, 0) + 1
        seconds = self._host_update(run.device, 1 if self.on_cpu else max(nodes.values()))
        if plan.engine == "zero":
            part = round(self.width(self.footprint.gradient_bytes) / plan.world_size)
            seconds += 2 * (copy_seconds(rates, run.device, 2 * part) if self.on_cpu else rates.host_copy_seconds(run.device, part))
        if plan.optimizer_on_disk:  # read and written, with nothing to hide behind
            share = round(self.footprint.optimizer_bytes / plan.world_size * max(nodes.values()))
            seconds += sum(rates.disk_seconds(share, write=write) or share / _DISK_RATE for write in (False, True))
        return seconds

    def _host_update(self, device: Device, ranks: int) -> float:
        """Of so many ranks' parts, on the cores that they share.

        One pass takes what it goes over; a loop of operations is as on a device, where that is a CPU, and as much slower than one pass as
        Adam's.
        """
        plan, footprint = self.plan, self.footprint
        elements = footprint.trainable_parameters / plan.devices_per_replica * ranks
        states = footprint.optimizer_bytes / footprint.gradient_bytes if footprint.gradient_bytes else 0
        one_pass = self._one_pass()
        if not one_pass and self.on_cpu and footprint.optimizer_classes:
            whole = update_load(self.layout, 1 / plan.devices_per_replica, device, self.rates)
            return whole.stream + whole.issue
        adam = self.rates.host_adam_seconds(round(elements), device)
        if one_pass and footprint.optimizer_classes:
            return adam * (3 + 2 * round(states)) / _ADAMS_PASSES
        return adam * (_PLAIN_ADAM if plan.engine == "fsdp" and not one_pass else 1.0)
