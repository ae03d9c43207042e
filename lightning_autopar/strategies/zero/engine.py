"""The contract for DeepSpeed's ZeRO: the optimizer's state, gradients and parameters in partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Check, Engine, Finding, FirstStep, Question, Rank
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.enumerate_plans import build_plan
from lightning_autopar.planning.refusals import feature_refusal
from lightning_autopar.plans import OFFLOADS, ZERO_STAGES, Offload, Plan
from lightning_autopar.strategies.zero.memory import rank_bytes, zero_host_bytes
from lightning_autopar.strategies.zero.settings import ZeroSettings
from lightning_autopar.strategies.zero.timing import ZeroStep
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Step

#: The precisions, by Lightning's names, with which a ZeRO run equals the plain run.
_PRECISIONS = ("None", "32", "32-true", "bf16", "bf16-mixed", "bf16-true")
#: The name that rules out stage 3.
_STAGE_3 = "zero_3"
_STAGE_REASONS: Mapping[int, str] = {
    1: "DeepSpeed partitions the optimizer's state: each device updates its part of the parameters",
    2: "DeepSpeed partitions the optimizer's state and the gradients: each device updates its part of the parameters",
    3: "DeepSpeed partitions parameters, gradients and the optimizer's state, and gathers parameters module by module",
}


@dataclass(frozen=True)
class Zero(Engine):
    """Partitions on each device.

    Args:
        settings: DeepSpeed's, where another program's run is predicted; those of our engine, unless given.
    """

    settings: ZeroSettings | None = None
    name = "zero"
    shares_network = True
    whole = False
    builds_on_each = True
    runs_parts = False
    another_library = True
    loop = "single"  # DeepSpeed's share is predicted from its calls

    def check(self, plan: Plan) -> None:
        """Raise unless the stage exists and can offload what the plan says."""
        if isinstance(plan.zero_stage, bool) or not isinstance(plan.zero_stage, int) or plan.zero_stage not in ZERO_STAGES:
            raise ValueError(f"a zero plan needs zero_stage 1, 2 or 3, but it is {plan.zero_stage!r}")
        if "parameters" in plan.offload and plan.zero_stage != 3:
            raise ValueError(
                f"ZeRO offloads parameters at stage 3, but zero_stage is {plan.zero_stage}; raise it, or offload the optimizer alone"
            )

    def words(self, plan: Plan) -> dict[str, str]:
        """The title's words, with the stage."""
        told = super().words(plan)
        told["devices"] = told["devices"].replace(self.name, f"{self.name}-{plan.zero_stage}", 1)
        return told

    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """Plans of each stage, with and without offload."""
        kinds: list[tuple[int, tuple[Offload, ...]]] = [(stage, ()) for stage in ZERO_STAGES]
        if feature_refusal("offload", question.footprint, question.constraints) is None:
            kinds += [(2, ("optimizer",)), (3, ("optimizer",)), (3, OFFLOADS)]
        for stage, offload in kinds:
            if stage != 3 or _STAGE_3 not in question.constraints.excluded:
                yield self._plan(question, devices, stage, offload)

    def example(self, question: Question, devices: Sequence[Device]) -> Plan:
        """A plan of stage 2, for all stages."""
        return self._plan(question, devices, 2, ())

    def refused_parts(self, question: Question, devices: Sequence[Device]) -> Iterable[tuple[Plan, str]]:
        """Plans of stage 3, which may be ruled out by itself."""
        if (reason := question.constraints.excluded.get(_STAGE_3)) is not None:
            yield replace(self.example(question, devices), zero_stage=3), reason

    def part(self, plan: Plan) -> str:
        """Stage 3 may be ruled out by itself."""
        return _STAGE_3 if plan.zero_stage == 3 else self.name

    def refusal(self, question: Question) -> str | None:
        """Refuse what DeepSpeed can't run."""
        footprint, constraints = question.footprint, question.constraints
        if not footprint.training:
            asked_for = constraints.pinned is not None or set(constraints.allow) == {self.name}
            return None if asked_for else "a step without gradients has no optimizer's state to partition"
        if footprint.optimizers != 1:
            return f"DeepSpeed needs one optimizer, and the module configures {footprint.optimizers}"
        if not footprint.automatic_optimization:
            return "DeepSpeed runs backward and the optimizer's step, but the module calls them by itself"
        if constraints.precision not in _PRECISIONS:
            return f"precision {constraints.precision!r} isn't plain Lightning's under DeepSpeed; ZeRO takes 32-true, bf16-mixed, bf16-true"
        return None

    def _plan(self, question: Question, devices: Sequence[Device], stage: int, offload: tuple[Offload, ...]) -> Plan:
        return build_plan(question, devices, self.name, _STAGE_REASONS[stage], zero_stage=stage, offload=offload)

    def training_arguments(self, plan: Plan, layers: Sequence[str], recomputing: Mapping[str, Any]) -> dict[str, Any]:
        """DeepSpeed's stage and offload; the Trainer fills in the rest, and makes the optimizer."""
        partition: dict[str, Any] = {"stage": plan.zero_stage}
        partition |= {"offload_optimizer": {"device": "cpu"}} if "optimizer" in plan.offload else {}
        partition |= {"offload_param": {"device": "cpu"}} if "parameters" in plan.offload else {}
        told = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        types = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
        optimizer = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        return {**recomputing, "deepspeed": {"zero_optimization": partition, **dict.fromkeys(told, "auto"), **types, **optimizer}}

    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """Partitions, and DeepSpeed's buffers."""
        return rank_bytes(rank, self.settings)

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """A step that reduces gradients by the bucket; at stage 3 it gathers parameters ahead of the modules that use them."""
        return ZeroStep(footprint, plan, inventory, precision, rates, self.settings)

    def strategy(self, run: Any, *, forked: bool) -> Any:
        """DeepSpeed's engine in a strategy with the mixin."""
        from lightning_autopar.strategies.zero.strategy import ZeroEngine

        return ZeroEngine(run, forked=forked)

    def unfit(self, trainer: Any, kinds: Mapping[str, str]) -> str | None:
        """Refuse by precision, callbacks, hooks and parameters; only for a fit."""
        from lightning_autopar._lightning_compat import TrainerFn
        from lightning_autopar.strategies.zero.refusals import unpartitioned_run

        return unpartitioned_run(trainer, kinds) if trainer.state.fn == TrainerFn.FITTING else None

    def look(self, first: FirstStep) -> Finding:
        """Looks at the module, its optimizer and hooks, and the submodules that the samples call."""
        from lightning_autopar.strategies.zero.refusals import routed, unpartitioned, unseen_gradients

        trainer, footprint, whole = first.trainer, first.footprint, None
        module = trainer.lightning_module
        if first.stage == "fit" and first.fakes:
            whole = unpartitioned(module, trainer)
        if footprint.training:
            whole = whole or unseen_gradients(module, footprint.conduct)
        uneven = () if first.split is None else first.split.uneven_calls
        return Finding(refusals={self.name: whole, _STAGE_3: routed(module, uneven)})

    def untried(self, plan: Plan, footprint: Footprint, finding: Finding) -> bool:
        """True: planning tries none of these plans, as few are chosen."""
        return footprint.training

    def rehearse(self, plan: Plan, first: FirstStep, finding: Finding) -> Check:
        """Tries its stage, offload and recomputation, on at most two ranks."""
        from lightning_autopar.strategies.zero.rehearsal import rehearse_zero

        told: dict[str, Any] = {"flops": first.footprint.flops, "conduct": first.footprint.conduct}
        return rehearse_zero(first.trainer.lightning_module, first.trainer, first.batch, plan, **told)

    def before_fork(self, devices: Sequence[Device]) -> None:
        """Import DeepSpeed once, rather than in each worker; not for GPUs, where it calls CUDA, which mustn't happen before a fork."""
        if devices[0].kind == "cpu":
            from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed

            import_deepspeed("cpu")

    def lost_share(self, plan: Plan) -> float:
        """Of ten models under our settings (``benchmarks/results/memory_nullgpu_zero.json``) the allocator held up to 1.24 times the bytes
        that it had given out, 1.33 where parameters come from the host, and 1.42 with recomputation. A twentieth of that may be lacking.
        """
        if self.settings is not None:
            return super().lost_share(plan)
        return 0.32 if plan.recompute else 0.26 if "parameters" in plan.offload else 0.19

    def communicators(self, plan: Plan) -> tuple[int, ...]:
        """One more than the default's: DeepSpeed makes another communicator of all ranks (``groups.py``, ``_clone_world_group``)."""
        return plan.world_size, plan.world_size

    def host_bytes(self, footprint: Footprint, plan: Plan, *, precision: str, on_cpu: bool) -> tuple[int, int]:
        """The optimizer's copy of the parameters, its gradients and its state; and parameters between uses."""
        pageable, locked = zero_host_bytes(footprint, plan, precision=precision, on_cpu=on_cpu, settings=self.settings)
        return pageable * plan.world_size, locked * plan.world_size
