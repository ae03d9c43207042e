"""The contract of an engine: one way to run plans, in one folder, which nothing outside of the folder knows by name.

Planning asks an engine by these methods; the table ``plans.ENGINES`` says where each one is. A module that implements the contract imports
neither torch nor Lightning at its top: :meth:`Engine.strategy`, :meth:`Engine.look`, :meth:`Engine.rehearse`,
:meth:`Engine.unfit` and :meth:`Engine.before_fork` import within what they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeParts
from lightning_autopar.memory.allocator.tape_player import Player
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.fullest_moments import Moments
from lightning_autopar.plans import Plan, loaded
from lightning_autopar.timing.rates import COLLECTIVES, Rates
from lightning_autopar.timing.step_seconds import Step


@dataclass(frozen=True, kw_only=True)
class Question:
    """What planning asks an engine about.

    Args:
        footprint: what a step needs, at the whole batch.
    """

    footprint: Footprint
    inventory: Inventory
    constraints: Constraints


@dataclass(frozen=True, kw_only=True)
class Searching:
    """What a search lends to an engine whose plans depend on bytes and seconds.

    Args:
        appraiser: predicts plans (``planning/plan_cost``).
        speed: each device's, by its id, in steps a second.
        rates: of single operations; data sheets' where there are none.
        limit: gives the seconds a batch that a plan must stay below to be of interest; they fall while the search goes on.
    """

    appraiser: Any
    speed: Mapping[str, float]
    rates: Rates | None
    limit: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a plan, whose bytes are asked for.

    Args:
        footprint: of the module, at the whole batch.
        number: the rank's, from 0.
        rows: samples of the batch that it takes.
        moments: gives the moments of the step on the rank's share of the batch, with the plan's blocks recomputed. It computes them once,
            when it is first called, for all engines.
    """

    footprint: Footprint
    plan: Plan
    number: int
    rows: int
    device: Device
    precision: str
    moments: Callable[[], Moments]

    @property
    def on_cpu(self) -> bool:
        """Whether its device is a CPU."""
        return self.device.kind == "cpu"

    @property
    def share(self) -> float:
        """The rank's part of the batch."""
        return self.rows / self.footprint.batch_size if self.footprint.batch_size else 1.0

    @property
    def evaluation_bytes(self) -> int | None:
        """What a validation step between two training steps takes on its share; None where nothing is known of a validation."""
        whole = self.footprint.evaluation_bytes
        return None if whole is None or not self.footprint.training else round(whole * self.share)


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A step of the run that planning is for, as an engine looks at it.

    Args:
        trainer: with the module attached; it is only read.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        batch: the step's first batch, a ``FirstBatch``.
        validation: gives the first batch of the validation within a fit; None where there is none.
        footprint: of the step.
        split: what splitting the batch changes; None where nobody has tried.
        several: whether there may be several devices.
        excluded: what is ruled out already, as ``Constraints.excluded``.
        untried: why nothing may be run, as the end of a sentence; None in a forked child, which may fork others that run the step.
        fakes: whether a fake copy of the module may be made: not where tracing one has ended a process.
        trial: what :meth:`Engine.trial` found, where it ran beside other checks; None where it hasn't run.
    """

    trainer: Any
    stage: str
    batch: Any
    validation: Callable[[], Any]
    footprint: Footprint
    split: SplitFinding | None = None
    several: bool = True
    excluded: Mapping[str, str] = field(default_factory=dict)
    untried: str | None = None
    fakes: bool = True
    trial: Any = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an engine has found out about a step; the forked child that has looked sends it.

    Args:
        refusals: what is ruled out, by names of ``constraints.excludable``, with the sentence that says why; None where it isn't.
        notes: what a reader should know about any plan of the engine, a sentence each.
        uncuttable: FQNs of the blocks with which no stage may begin, with the sentence that says why.
        counted: FQNs of the buffers that a training step changes, and would change once for each part of a batch.
        untried: why a part of each plan's checks is left to :meth:`Engine.rehearse`; None where nothing is.
        value: what the strategy of a plan of the engine gets as ``RunPlan.finding``; opaque to all but the engine.
    """

    refusals: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    uncuttable: Mapping[str, str] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    untried: str | None = None
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of a check.

    Args:
        outcome: ``"not made"`` isn't ``"passed"``: then nothing is known about the plan.
        reason: why it failed or couldn't be made, in one sentence.
        notes: what a reader should know about a plan that passed, a sentence each.
    """

    outcome: Literal["passed", "failed", "not made"]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """Why plans that need the check are left out; None where they may be taken."""
        return None if self.outcome == "passed" else self.reason


PASSED = Check(outcome="passed")


def failed(reason: str) -> Check:
    """The check of a plan that computes something else than one device."""
    return Check(outcome="failed", reason=reason)


def not_made(reason: str) -> Check:
    """The check of a plan about which nothing is known.

    Args:
        reason: why, as the end of a sentence.
    """
    return Check(outcome="not made", reason=f"whether it runs the step right couldn't be checked, as {reason}")


class Engine(ABC):
    """One way to run plans. An engine defines :meth:`plans`, :meth:`bytes`, :meth:`step` and :meth:`strategy`. The other methods answer
    here for an engine each of whose ranks has the whole module.

    Attributes:
        name: its name in the table and in ``Plan.engine``.
        several: whether its plans run on several devices.
        splits: whether the ranks of a plan share the samples of a batch, which then needs at least one sample a rank.
        shares_network: whether its ranks can share a step's network by rows, where the batch must stay whole for the loss.
        shares: whether a plan's ranks may have uneven shares of a batch.
        whole: whether each rank has the whole state, so that a checkpoint is written as it is.
        builds_on_each: whether each rank builds a module of ``configure_model`` in host memory.
        replays: whether the search replays the allocations of its plans, see :meth:`replayed`.
        plainer: a simpler engine, and the words that begin the comparison: the report compares a chosen plan of this engine with that
            engine's.
        another_library: whether its plans are taken only where they are clearly faster than others.
        loop: the engine whose measured trainer's loop is as long as this one's; None to measure its own.
        reruns: whether a batch that runs out of memory is run again in more parts, where that gives the whole batch's loss.
        looks_long: whether :meth:`Engine.look` runs steps, which takes seconds. It then waits until a plan of the engine is the best
            one, or :meth:`Engine.trial` runs them beside other checks.
        measured: what calibration measures for plans of this engine besides operations and a loop on one device: collectives, and things
            of ``calibration.steps``; by default all collectives.
        takes_remedies: whether the search may add recomputed blocks, micro-batches and uneven shares to its plans.
        runs_parts: whether a rank can run its samples in parts; a plan in parts can be predicted all the same.
    """

    name: str
    several = True
    splits = True
    shares_network = False
    shares = False
    whole = True
    builds_on_each = False
    replays = False
    plainer: tuple[str, str] | None = None
    another_library = False
    loop: str | None = None
    reruns = False
    looks_long = False
    measured: tuple[str, ...] = COLLECTIVES
    takes_remedies = True
    runs_parts = True

    @abstractmethod
    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """Plans on these devices without remedies, those that take more memory and less time first.

        Args:
            devices: of one kind.
        """

    def training_arguments(self, plan: Plan, layers: Sequence[str], recomputing: Mapping[str, Any]) -> dict[str, Any]:
        """The TrainingArguments with which transformers' own Trainer runs a plan, without the batch's.

        Args:
            layers: names of the classes of the blocks that are sharded as units.
            recomputing: the arguments that switch recomputation on; empty where the plan recomputes nothing.
        """
        return dict(recomputing)

    def not_by_transformers(self, *, on_cpu: bool, own_optimizer: bool) -> str | None:
        """Why transformers' own Trainer can't run this engine's plans; None where it can.

        Args:
            on_cpu: whether the devices are CPUs.
            own_optimizer: whether the script passes an optimizer to it.
        """
        return None

    @abstractmethod
    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """What a rank holds at its fullest moments: in a step, before the first step, in a validation, while a checkpoint is written."""

    @abstractmethod
    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """The step, which gives its seconds by part, and what each rank does when."""

    @abstractmethod
    def strategy(self, run: Any, *, forked: bool) -> Any:
        """The Lightning strategy that executes a plan, in this process: one with ``EngineMixin``.

        Args:
            run: a ``RunPlan``, the plan and the devices.
            forked: whether this process is a worker, forked for the plan; a launcher has started it otherwise.
        """

    def check(self, plan: Plan) -> None:  # noqa: B027  # most plans have nothing that must fit together
        """Raise ValueError where the values of a plan's fields don't go together; asked whenever a plan is made."""

    def words(self, plan: Plan) -> dict[str, str]:
        """The words of a plan's title, in order, each by the field that it describes; an engine inserts its own."""
        told = {"devices": self.name if plan.world_size == 1 else f"{self.name} ×{plan.world_size}"}
        if plan.replicas > 1:
            told["replicas"] = f"{plan.replicas} replicas"
        if plan.shares:
            told["shares"] = f"shares {':'.join(map(str, plan.shares))}" if plan.world_size <= 4 else "uneven shares"
        if plan.offload:
            told["offload"] = f"offload {' + '.join(plan.offload)}"
        if plan.recompute:
            told["recompute"] = f"recompute {len(plan.recompute)}"
        if plan.micro_batches > 1:
            told["micro_batches"] = f"micro-batches {plan.micro_batches}"
        return told

    def refusal(self, question: Question) -> str | None:
        """Why there is no plan of this engine, in a sentence; None where there is one, or where devices alone are missing."""
        return None

    def example(self, question: Question, devices: Sequence[Device]) -> Plan:
        """A plan that stands in the report for all that are ruled out."""
        return next(iter(self.plans(question, devices)))

    def refused_parts(self, question: Question, devices: Sequence[Device]) -> Iterable[tuple[Plan, str]]:
        """What only some of its plans do and this run can't: for each, a plan that does it, and the sentence that says why not."""
        return ()

    def against(self, plan: Plan, question: Question) -> str | None:
        """Which feature of a pinned plan of this engine isn't possible here, as the end of a sentence that begins with the plan."""
        return None

    def sample(self, devices: Sequence[Device], blocks: Sequence[str], micro_batches: int) -> Plan:
        """A plan of a small module that has these blocks: calibration measures a step of it."""
        return Plan(engine=self.name, devices=tuple(device.id for device in devices))

    def sample_value(self, module: Any, batch: Any, blocks: Sequence[str]) -> Any:
        """What :meth:`look` would find out for the strategy of such a plan, from the module and two samples."""
        return None

    def unfit(self, trainer: Any, kinds: Mapping[str, str]) -> str | None:
        """Why this engine can't do what a Trainer is about to do, judged by the Trainer's options, callbacks and module; None where it can.

        Args:
            trainer: with the module attached; it is only read.
            kinds: the classes of its callbacks, bases included: each class's name, and the name of the callback that is of it.
        """
        return None

    def look(self, first: FirstStep) -> Finding:
        """What the first batch and the Trainer's options say about this engine. Called only where its plans are allowed.

        A check that it can't make is no check that passed: such plans are ruled out by a sentence, or left to :meth:`rehearse`.
        """
        return Finding()

    def trial(self, first: FirstStep) -> Any:
        """The part of :meth:`look` that takes long and needs no ``first.split``, which ``look`` finds as ``first.trial``, or else calls by
        itself. None where nothing is to be tried.
        """
        return None

    def untried(self, plan: Plan, footprint: Footprint, finding: Finding) -> bool:
        """Whether :meth:`look` left a check of such a plan to :meth:`rehearse`."""
        return finding.untried is not None

    def rehearse(self, plan: Plan, first: FirstStep, finding: Finding) -> Check:
        """Whether the step survives this very plan, tried in a forked child once it is chosen.

        Args:
            first: the step; what splitting its batch changes isn't looked at again.
        """
        raise AssertionError(f"nothing of a plan of {self.name} is left to try")

    def ruled_out(self, plan: Plan) -> tuple[str, ...]:
        """The names of ``constraints.excludable`` that planning rules out after :meth:`rehearse` failed."""
        return (self.part(plan),)

    def part(self, plan: Plan) -> str:
        """The name of ``constraints.excludable`` that rules out such plans alone."""
        return self.name

    def notes(self, constraints: Constraints) -> tuple[str, ...]:
        """What a reader should know about each of its plans, a sentence each."""
        return constraints.notes.get(self.name, ())

    def searched(self, search: Searching, devices: Sequence[Device], shown: bool) -> Iterable[Plan]:
        """Plans on these devices that only a search by bytes and seconds finds, remedies included: the best ones that fit into memory.

        Args:
            shown: whether to give one for the report even where none is of interest.
        """
        return ()

    def polished(self, search: Searching, plan: Plan) -> Plan:
        """The best plan so far, which is of this engine, after the improvements that only this engine knows."""
        return plan

    def alike(self, footprint: Footprint, plan: Plan) -> Sequence[int]:
        """A number for each rank: ranks with the same number hold the same if they have as many samples."""
        return (0,) * plan.world_size

    def replayed(self, footprint: Footprint, plan: Plan) -> Sequence[int]:
        """A number for each rank, or nothing: the replay of one rank speaks for all that have its number and as many samples."""
        return (0,) * plan.world_size if self.replays else ()

    def own_blocks(self, footprint: Footprint, plan: Plan, rank: int) -> Sequence[str]:
        """FQNs of the blocks that a rank runs."""
        return [block.fqn for block in footprint.blocks]

    def lost_share(self, plan: Plan) -> float:
        """What a GPU's caching allocator holds beyond what it hands out, as a share of that, where no replay says it. Replays of its policy
        on traces of 124M to 7B models gave 1.03 to 1.21 times the allocated bytes.
        """
        return 0.1

    def communicators(self, plan: Plan) -> tuple[int, ...]:
        """The sizes, in devices, of the NCCL communicators that one device of the plan belongs to: one of all ranks, and with replicas of
        several devices one for each dimension of the mesh.
        """
        mesh = (plan.replicas, plan.devices_per_replica) if plan.replicas > 1 else ()
        return (plan.world_size, *mesh)

    def host_bytes(self, footprint: Footprint, plan: Plan, *, precision: str, on_cpu: bool) -> tuple[int, int]:
        """Bytes of host memory that all ranks together offload to: pageable, and page-locked."""
        return 0, 0

    def player(
        self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, plan: Plan, rank: int, rows: Sequence[int]
    ) -> Player | None:
        """The player of a rank's tape on the modelled allocator; None where the tape can't be played.

        Args:
            rows: samples of each of the rank's micro-batches.
        """
        return None

    def import_early(self) -> None:  # noqa: B027  # most need nothing
        """Import what trials and workers need, while this process waits for another. Must touch no GPU."""

    def before_fork(self, devices: Sequence[Device]) -> None:  # noqa: B027  # most need nothing
        """Import what workers need, once before they are forked."""


def recomputed(footprint: Footprint, plan: Plan) -> frozenset[int]:
    """Indices of the blocks that a plan recomputes."""
    index = {block.fqn: number for number, block in enumerate(footprint.blocks)}
    return frozenset(index[fqn] for fqn in plan.recompute)


def named(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ValueError: if there is none of that name.
    """
    found: Engine = loaded(name)
    return found


def of(plan: Plan) -> Engine:
    """The engine that runs a plan."""
    return named(plan.engine)
