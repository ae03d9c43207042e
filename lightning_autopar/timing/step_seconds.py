"""One step of a plan: the ranks' own work by class of rank, and their communication. An engine's own step overrides what it does otherwise.
It finds no plans, and knows no engine.

What a prediction of time says: seconds by part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.timing.collectives import topology
from lightning_autopar.timing.overlap import LaneSeconds, Links, play_replicas
from lightning_autopar.timing.rank_compute import LaneSpan, RankWork, batch_parts, computing_dtype, layout_of, update_load, work_of
from lightning_autopar.timing.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of one training step on the slowest rank, by part; the parts add up to :attr:`step`.

    Args:
        compute: forward and backward.
        recompute: forwards that run a second time.
        optimizer: the update on the device, clipping included.
        communication: what communication adds, beyond what overlaps with computing, with copies in and out of its buffers.
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


#: How much slower torch's Adam is as a loop of operations on the host's tensors than as one pass over them: 1.39 and 0.22 s for a billion
#: parameters ("ZeRO-Offload", https://arxiv.org/abs/2101.06840, table 4).
PLAIN_ADAM = 1.39 / 0.22
#: Torch's optimizers whose update on the host is one pass; how often AdamW's goes over an element: parameter and two moments both ways, and
#: the gradient.
_ONE_PASS = ("Adagrad", "Adam", "AdamW", "SGD")
_ADAMS_PASSES = 7


class Step:
    """One step of a plan: the ranks' own work by class of rank, and their communication.

    Args:
        footprint: of the whole batch.

    Attributes:
        plain_update: by how much the optimizer's loop of operations in host memory is slower than one pass.
    """

    plain_update = 1.0

    def __init__(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> None:
        self.footprint, self.plan, self.inventory = footprint, plan, inventory
        self.layout = layout_of(footprint, precision)
        self.half = computing_dtype(precision) in ("bf16", "fp16")
        self.devices, self.rates, self._sorts = topology(inventory).crew(plan.devices, rates, inventory)
        self.on_cpu = self.devices[0].kind == "cpu"
        self.batch = max(1, footprint.batch_size)
        self.rows = footprint.rows(plan) if footprint.batch_size else (1,) * plan.world_size
        self.training = footprint.training
        self.sharing = footprint.sharing if footprint.shares_network(plan) else None

    # -- replicas and shards -----------------------------------------------------------------------------------------------------------

    def kinds(self) -> list[tuple[Hashable, ...]]:
        """A kind for each rank: those of one kind do the same work on equal devices."""
        return list(zip(self._sorts, self.rows, strict=True))

    def run(self, rank: int) -> RankWork:
        """A rank's own work."""
        plan = self.plan
        world = plan.world_size
        share = self.rows[rank] / self.batch if self.footprint.batch_size else 1 / world
        share *= 1.0 if self.sharing is None else self.sharing.share(world)
        run = work_of(
            self.footprint,
            self.layout,
            plan,
            self.devices[rank],
            self.rates,
            share=share,
            parts=batch_parts(plan, self.rows) if self.footprint.batch_size else plan.micro_batches,
            held=1 / self.shards,
            updates="optimizer" not in plan.offload,
            units=self.units,
        )
        beside = self.beside(run)
        return replace(run, host_seconds=run.host_seconds + beside) if beside else run

    def beside(self, run: RankWork) -> float:
        """Seconds of the host for the engine's Python in a step, besides its units' hooks."""
        return self.calls() * self.rates.python_seconds(run.device, "call")

    @property
    def shards(self) -> int:
        """Into how many parts the update is divided, one for each rank."""
        return 1

    @property
    def units(self) -> int:
        """How many parts of the module have hooks that gather and reduce."""
        return 0

    def calls(self) -> int:
        """Calls of the engine's Python in a step, besides its units' hooks."""
        return 0

    def one_pass(self) -> bool:
        """Whether the update in host memory is torch's fused kernel: the user's own choice, or ours for a GPU's host."""
        if any(work.name.startswith("_fused_") for work in self.layout.optimizer):
            return True
        kinds = self.footprint.optimizer_classes
        wide = self.footprint.parameter_bytes >= 4 * self.footprint.parameters
        return not self.on_cpu and "optimizer" in self.plan.offload and bool(kinds) and all(kind in _ONE_PASS for kind in kinds) and wide

    def seconds(self) -> Seconds:
        """The seconds of the slowest rank, by part. Where hosts are slower than the devices, ranks may take equally long alone, and with
        their communication it is the one whose device works longest that the others wait for.
        """
        first: dict[tuple[Hashable, ...], int] = {}
        for rank, kind in enumerate(self.kinds()):
            first.setdefault(kind, rank)
        runs = [self.run(rank) for rank in first.values()]
        slowest, busiest = (max(runs, key=key) for key in (lambda run: run.alone, lambda run: run.busy))
        found = self._seconds_with(slowest)
        return found if busiest is slowest else max(found, self._seconds_with(busiest), key=lambda seconds: seconds.step)

    def _seconds_with(self, slowest: RankWork) -> Seconds:
        """The seconds of a step in which all wait for this rank."""
        played, offload = self.played(slowest), self.offload(slowest)
        own = slowest.copied + slowest.compute + slowest.recompute
        # For one device without offload, the difference is only rounding.
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
            # While the host updates, it issues nothing: what it does besides isn't hidden by that.
            overhead=slowest.host_overhead(own + slowest.update + exposed),
        )

    def played(self, run: RankWork, events: list[LaneSpan] | None = None) -> LaneSeconds:
        """Play the lanes of a step up to its last backward and collective."""
        return play_replicas(self.layout, run, self.links(), 0.0, events)

    def links(self) -> Links:
        """The groups that communicate: with hybrid sharding, the replica whose links are the slowest."""
        plan = self.plan
        if plan.replicas == 1:
            return Links(self.devices, self.devices[:1], self.inventory, self.rates)
        count = plan.devices_per_replica
        groups = [self.devices[first : first + count] for first in range(0, plan.world_size, count)]
        across = [self.devices[first::count] for first in range(count)]
        return Links(self._slowest(groups), self._slowest(across), self.inventory, self.rates)

    def _slowest(self, groups: Sequence[Sequence[Device]]) -> Sequence[Device]:
        """The group that takes longest over 64 MiB."""
        return max(groups, key=lambda group: self.rates.collective_seconds("all_reduce", 2**26, group, self.inventory))

    def waited(self) -> float:
        """Seconds of exchanging the whole batch's statistics, in forward and in backward, and a shared network's rows, without overlap."""
        if self.plan.world_size == 1:
            return 0.0
        seconds = 0.0
        if self.footprint.batch_norm:
            times = len(self.footprint.batch_norm) * (2 if self.training else 1) * batch_parts(self.plan, self.rows)
            seconds += times * self.rates.collective_seconds("all_reduce", 4096, self.devices, self.inventory)
        if self.sharing is not None and self.sharing.gathers:
            each = self.sharing.gathered_bytes // self.sharing.gathers
            seconds += self.sharing.gathers * self.rates.collective_seconds("all_gather", each, self.devices, self.inventory)
        return seconds

    def after(self) -> float:
        """Seconds of communication after the update, without overlap."""
        return 0.0

    def offload(self, run: RankWork) -> float:
        """The update in host memory, all ranks of a node on its cores, where the plan offloads it.

        A CPU device is its own host: its rank's threads update its own part.
        """
        if "optimizer" not in self.plan.offload or not self.training:
            return 0.0
        return self._host_update(run.device, 1 if self.on_cpu else max(Counter(device.node for device in self.devices).values()))

    def _host_update(self, device: Device, ranks: int) -> float:
        """Seconds of so many ranks' parts, on the cores that they share. One pass is bound by its bytes; a loop of operations takes as long
        as on a CPU device, or is as much slower than one pass as Adam's: in 32 bits. In half of them it moves half as many bytes
        (``benchmarks/results/large_gpu.json``: 0.6 of the seconds in 32 bits on a GPU's host).
        """
        plan, footprint = self.plan, self.footprint
        elements = footprint.trainable_parameters / plan.devices_per_replica * ranks
        states = footprint.optimizer_bytes / footprint.gradient_bytes if footprint.gradient_bytes else 0
        one_pass = self.one_pass()
        if not one_pass and self.on_cpu and footprint.optimizer_classes:
            whole = update_load(self.layout, 1 / plan.devices_per_replica, device, self.rates)
            return whole.stream + whole.issue
        adam = self.rates.host_adam_seconds(round(elements), device)
        if one_pass and footprint.optimizer_classes:
            return adam * (3 + 2 * round(states)) / _ADAMS_PASSES
        width = footprint.parameter_bytes / (4 * max(1, footprint.parameters))
        return adam * (1.0 if one_pass else self.plain_update * min(1.0, width))

    def events(self, ranks: int) -> list[list[LaneSpan]]:
        """What each of the first ranks does, and when; equal ranks do the same."""
        made: dict[Hashable, list[LaneSpan]] = {}
        kinds = self.kinds()[:ranks]
        for rank, kind in enumerate(kinds):
            if kind not in made:
                made[kind] = self._of_rank(rank)
        return [made[kind] for kind in kinds]

    def _of_rank(self, rank: int) -> list[LaneSpan]:
        """What one rank does up to the end of its update."""
        run = self.run(rank)
        events: list[LaneSpan] = []
        played = self.played(run, events)
        on_cpu = run.device.kind == "cpu"
        if on_cpu:
            events = _on_one_lane(events)
        clock = max([played.end, *(event.end for event in events)])
        for seconds, kind, label in (
            (self.waited(), "communication", "batch norms"),
            (self.offload(run), "offload", "update on the host"),
            (run.update, "optimizer", "update"),
            (self.after(), "communication", "gather parameters"),
        ):
            if seconds > 0:
                lane = "compute" if on_cpu or kind != "communication" else "communication"
                events.append(LaneSpan(lane, clock, clock + seconds, kind, label))
                clock += seconds
        return events


def _on_one_lane(events: Iterable[LaneSpan]) -> list[LaneSpan]:
    """The spans of the same cores, one after the other: computing waits while they communicate."""
    out: list[LaneSpan] = []
    clock = 0.0
    for event in sorted(events, key=lambda event: (event.start, event.lane != "communication")):
        end = clock + event.end - event.start
        out.append(LaneSpan("compute", clock, end, event.kind, event.label))
        clock = end
    return out
