"""The contract for pipelines: blocks spread over the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Engine, Finding, FirstStep, Question, Rank, Searching, not_made, recomputed
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeParts
from lightning_autopar.memory.allocator.tape_player import Player
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import cuttable
from lightning_autopar.planning.enumerate_plans import build_plan
from lightning_autopar.plans import INTERLEAVED, SCHEDULES, Plan, Schedule
from lightning_autopar.strategies.pipeline.memory import own_blocks, rank_bytes, runs_again, starts_of
from lightning_autopar.strategies.pipeline.plans import REASON, pipeline_plans, with_better_cuts
from lightning_autopar.strategies.pipeline.schedules import played_micro_batches, rank_actions, receives
from lightning_autopar.strategies.pipeline.tape_player import PipelinePlayer
from lightning_autopar.strategies.pipeline.timing import PipelineStep
from lightning_autopar.timing.rates import COLLECTIVES, Rates
from lightning_autopar.timing.step_seconds import Step


class Pipeline(Engine):
    """Stages of the module, one after the other."""

    name = "pipeline"
    whole = False
    splits = False
    takes_remedies = False
    looks_long = True
    replays = True
    measured = (*COLLECTIVES, "loop/pipeline", "action")

    def check(self, plan: Plan) -> None:
        """Raise unless each cut is named once, and there are as many stages and micro-batches as the schedule needs."""
        if not plan.cuts:
            raise ValueError("a pipeline plan needs at least one cut, but has none; name the blocks with which its later stages begin")
        if len(set(plan.cuts)) != len(plan.cuts):
            raise ValueError(f"a pipeline plan names each cut once, but its cuts are {plan.cuts!r}")
        if plan.schedule not in SCHEDULES:
            raise ValueError(f"a pipeline plan needs a schedule, but it is {plan.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        ranks, count = plan.devices_per_replica, len(plan.cuts)
        if plan.replicas == plan.world_size > 1:
            raise ValueError(
                f"{plan.replicas} replicas leave each one device of {plan.world_size}; a pipeline needs at least two, have fewer"
            )
        if ranks == 1:
            raise ValueError(f"a pipeline needs at least two devices, but the plan names {plan.devices!r}; choose engine 'single'")
        if plan.schedule in INTERLEAVED:
            if plan.stages % ranks or plan.stages == ranks:
                raise ValueError(
                    f"{plan.schedule} on {ranks} devices needs {2 * ranks} stages, or a larger multiple of {ranks}, "
                    f"but {count} cuts make {plan.stages}; have {2 * ranks - 1} cuts, or schedule '1f1b'"
                )
        elif plan.stages != ranks:
            raise ValueError(
                f"schedule {plan.schedule!r} on {ranks} devices needs as many stages, but {count} cuts make {plan.stages}; "
                f"have {ranks - 1} of them"
            )
        # As torch.distributed.pipelining demands it (schedules.py: Schedule1F1B, ScheduleInterleaved1F1B).
        if plan.schedule == "1f1b" and plan.micro_batches < plan.stages:
            raise ValueError(
                f"1f1b needs as many micro_batches as stages at least, but they are {plan.micro_batches} and {plan.stages}; "
                f"choose {plan.stages}, or schedule 'gpipe'"
            )
        rounds = max(1, plan.micro_batches // ranks)
        if plan.schedule in INTERLEAVED and plan.micro_batches % rounds:
            raise ValueError(
                f"{plan.schedule} runs micro_batches in {rounds} equal rounds on {ranks} devices, but they are {plan.micro_batches}; "
                f"choose {plan.micro_batches // ranks * ranks}"
            )
        if plan.shard and plan.replicas == 1:
            raise ValueError(
                f"a pipeline shards over its replicas, but has 1 and shards {plan.shard[0]!r}; raise replicas, or leave shard empty"
            )

    def words(self, plan: Plan) -> dict[str, str]:
        """Stages, micro-batches by their schedule, and whether replicas are shards."""
        told = super().words(plan)
        told |= {"devices": f"pipeline {plan.stages} stages, {plan.schedule} ×{plan.micro_batches}", "micro_batches": ""}
        return {**told, "replicas": f"{plan.replicas} sharded replicas"} if plan.shard else told

    def against(self, plan: Plan, question: Question) -> str | None:
        """Cuts where no stage may begin."""
        reasons = question.constraints.uncuttable
        for fqn in plan.cuts:
            if fqn in reasons:
                return f"cuts at {fqn!r}, with which no stage may begin: {reasons[fqn]}; cut elsewhere"
        return None

    def sample(self, devices: Sequence[Device], blocks: Sequence[str], micro_batches: int) -> Plan:
        """Two stages."""
        ids, cuts = tuple(device.id for device in devices), (blocks[len(blocks) // 2],)
        schedule: Schedule = "gpipe" if micro_batches == 1 else "1f1b"
        return Plan(engine=self.name, devices=ids, cuts=cuts, schedule=schedule, micro_batches=micro_batches)

    def sample_value(self, module: Any, batch: Any, blocks: Sequence[str]) -> Any:
        """Records its step."""
        from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
        from lightning_autopar.strategies.pipeline.stages.possible_cuts import record

        return Staging(hooks={"training_step": record(module, None, "training_step", batch, list(blocks), rows=2)})

    def refusal(self, question: Question) -> str | None:
        """Refuse what ``torch.distributed.pipelining`` can't run."""
        footprint, constraints = question.footprint, question.constraints
        if footprint.tape is None or not footprint.outer:
            return "the step wasn't traced, and can't be cut into stages without its trace"
        if len(footprint.blocks) < 2:
            found = len(footprint.blocks)
            return f"a pipeline is cut between blocks or layers that share no parameters and run once a step, and the module has {found}"
        if not constraints.split_batch:
            return "each rank takes a batch of its own, but the ranks of a pipeline work on the same batch"
        if footprint.batch_size == 0:
            return "the batch has no batch dimension along which a pipeline could split it"
        if (reason := _nowhere_cuttable(footprint, constraints)) is not None or not footprint.training:
            return reason
        if footprint.optimizers != 1:
            return f"a pipeline needs one optimizer, and the module configures {footprint.optimizers}"
        if not footprint.automatic_optimization:
            return "a pipeline's schedule runs backward, but the module calls backward by itself"
        return None

    def example(self, question: Question, devices: Sequence[Device]) -> Plan:
        """Stages with equally many blocks. There is no pipeline on one device, so a plan without stages stands for it."""
        blocks = question.footprint.blocks
        devices = devices[: max(2, len(blocks))]
        plan = build_plan(question, devices[:1], "single", "one device: nothing to communicate")
        if len(devices) == 1:
            return plan
        names = [block.fqn for block in blocks] if len(blocks) > 1 else ["", "(no block)"]
        cuts = tuple(names[len(names) * stage // len(devices)] for stage in range(1, len(devices)))
        ids = tuple(device.id for device in devices)
        return replace(plan, engine=self.name, devices=ids, cuts=cuts, schedule="gpipe", reasons=(REASON,))

    def unfit(self, trainer: Any, kinds: Mapping[str, str]) -> str | None:
        """Refuse by precision, callbacks, compiled parts, generators and parameters."""
        from lightning_autopar.strategies.pipeline.refusals import unstaged_run

        return unstaged_run(trainer, kinds)

    def look(self, first: FirstStep) -> Finding:
        """Finds where the steps of the run can be cut into stages; runs the stages and the whole module, and compares them."""
        from lightning_autopar.strategies.pipeline.rehearsal import stage_probe

        found = first.trial or self.trial(first)
        if found is None:
            return Finding(refusals=stage_probe.kept_apart(first))
        kept = stage_probe.kept_apart(first, found.value.appended)
        apart = stage_probe.appended_apart(found.value)
        by_loader = stage_probe.needed_by_loaders(first)
        refusals = {**kept, self.name: by_loader or found.value.refusal or kept.get(self.name), "pipeline_replicas": apart}
        return replace(found, refusals={**refusals, "pipeline_parts": apart or kept.get("pipeline_parts")})

    def trial(self, first: FirstStep) -> Finding | None:
        """The stages beside the whole module."""
        from lightning_autopar.strategies.pipeline.rehearsal import stage_probe

        if not first.several or "multi" in first.excluded:
            return None
        if first.untried is not None:
            return stage_probe.refused(not_made(first.untried).reason if first.fakes else first.untried)
        told: Any = {"precision": stage_probe.precision_of(str(first.trainer.precision)), "flops": first.footprint.flops}
        told["blocks"] = stage_probe.layers_of(first.footprint)
        return stage_probe.probe_stages(first.trainer.lightning_module, first.trainer, stage_probe.batches_of(first), first.stage, **told)

    def rehearse(self, plan: Plan, first: FirstStep, finding: Finding) -> Any:
        """Compares the stages of these cuts with the whole module."""
        from lightning_autopar.strategies.pipeline.rehearsal.stage_probe import check_cuts

        several = finding.value is not None and any(recording.runs_again for recording in finding.value.hooks.values())
        return check_cuts(first, plan.cuts, finding.notes, runs_again=several)

    def searched(self, search: Searching, devices: Sequence[Device], shown: bool) -> Iterable[Plan]:
        """For each schedule, the fastest pipeline that fits into memory."""
        return pipeline_plans(search.appraiser, [devices], search.speed, search.rates, search.limit, shown=shown)

    def polished(self, search: Searching, plan: Plan) -> Plan:
        """The plan with its cuts moved."""
        return with_better_cuts(search.appraiser, plan, search.speed, search.rates)

    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """None: where to cut depends on bytes and seconds, so :meth:`searched` gives them."""
        return ()

    def not_by_transformers(self, *, on_cpu: bool, own_optimizer: bool) -> str | None:
        """Refuse: its loop runs whole models."""
        return "transformers' Trainer has no pipelines"

    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """A rank's stages, and its micro-batches in flight."""
        return rank_bytes(rank)

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """The step as its schedule plays it."""
        return PipelineStep(footprint, plan, inventory, precision, rates)

    def import_early(self) -> None:
        """Torch's schedules, and what records stages."""
        import lightning_autopar.strategies.pipeline.rehearsal.stage_probe
        import lightning_autopar.strategies.pipeline.strategy  # noqa: F401

    def strategy(self, run: Any, *, forked: bool) -> Any:
        """Stages recorded from the user's step, in a strategy with the mixin."""
        from lightning_autopar.strategies.pipeline.strategy import PipelineEngine

        return PipelineEngine(run)

    def alike(self, footprint: Footprint, plan: Plan) -> Sequence[int]:
        """Ranks at the same place of their pipelines are alike."""
        return [*range(plan.devices_per_replica)] * plan.replicas

    def replayed(self, footprint: Footprint, plan: Plan) -> Sequence[int]:
        """Each stage by itself; neither replicas that are shards nor stages whose layers run again after a cut are replayed."""
        return () if plan.shard or runs_again(footprint, plan) else self.alike(footprint, plan)

    def own_blocks(self, footprint: Footprint, plan: Plan, rank: int) -> Sequence[str]:
        """Those of its stages."""
        return own_blocks(footprint, plan, rank)

    def player(
        self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, plan: Plan, rank: int, rows: Sequence[int]
    ) -> Player | None:
        """The player of a rank that runs its stages."""
        if plan.shard or runs_again(footprint, plan):
            return None
        assert plan.schedule is not None, "a pipeline has one"
        position, ranks = rank % plan.devices_per_replica, plan.devices_per_replica
        number = played_micro_batches(plan.schedule, plan.stages, len(rows))
        return PipelinePlayer(
            machine,
            script,
            footprint,
            [*rows[: -(-number // 2)], *rows[len(rows) - number // 2 :]],
            recomputed(footprint, plan),
            borders=starts_of(footprint, plan),
            actions=rank_actions(plan.schedule, position, ranks, plan.stages, number),
            receives=receives(plan.schedule, position, ranks, plan.stages, number),
            schedule=plan.schedule,
            samples=sum(rows),
            replicas=plan.replicas,
        )


def _nowhere_cuttable(footprint: Footprint, constraints: Constraints) -> str | None:
    """Why no block can begin a stage: the reason that most blocks have; None where one can."""
    allowed = cuttable(footprint, constraints.uncuttable)
    if any(allowed[1:]):
        return None
    reasons = [constraints.uncuttable.get(block.fqn, "it shares a parameter with a block before it") for block in footprint.blocks[1:]]
    most = max(reasons, key=reasons.count)
    return f"no block can begin a stage: {most}"
