"""A member in stages, all in one process, beside one process that knows no stages: gradients over some optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks.zoo.member import ROWS, Member
from lightning_autopar.engines import Finding
from lightning_autopar.exact.step.micro_batches import take_part
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.pipeline.rehearsal.in_one_process import Together
from lightning_autopar.strategies.pipeline.rehearsal.stage_probe import probe_stages
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record

STEPS = 3
MICRO_BATCHES = 4
#: A parameter of small gradients is judged beside this part of the model's largest: where they are zero but for rounding, nothing is there.
_SMALL = 1e-3

Gradients = list[dict[str, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far the gradients of stages are from one process's.

    Args:
        absolute: the largest difference of any entry in any step.
        largest: the largest entry of any gradient, beside which that is to be seen.
        relative: the largest difference beside the largest entry of the same parameter's gradient, or of a thousandth of the largest
            entry of all parameters' where that is more.
        missing: FQNs of parameters that have a gradient on one side only.
    """

    absolute: float = 0.0
    largest: float = 0.0
    relative: float = 0.0
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"max_abs": self.absolute, "relative": self.relative, "largest_gradient": self.largest} | (
            {"missing": list(self.missing)} if self.missing else {}
        )


def look(member: Member) -> Finding:
    """What the parity probe says of a member."""
    module = member.build()
    first = FirstBatch(batch=member.batch(0), batch_size=ROWS)
    return probe_stages(module, None, {"training_step": first})


def ways(finding: Finding) -> dict[str, tuple[str, ...]]:
    """Two and three stages, even and uneven, as far as the blocks allow."""
    blocks = finding.value.hooks["training_step"].blocks
    possible = [block for block in blocks[1:] if block not in finding.uncuttable]
    count, all_ = len(possible), len(possible) + 1
    found: dict[tuple[str, ...], str] = {}
    if count:
        found[(possible[all_ // 2 - 1],)] = "2 even"
        found.setdefault((possible[-1],), "2 uneven")
    if count > 1:
        found[(possible[max(1, all_ // 3) - 1], possible[max(2, 2 * all_ // 3) - 1])] = "3 even"
        found.setdefault((possible[0], possible[1]), "3 uneven")
    if count > 2:
        found.setdefault((possible[-2], possible[-1]), "3 uneven")
    return {name: cuts for cuts, name in reversed(found.items())}


def parts_of(member: Member, module: nn.Module) -> int:
    """Micro-batches; one where the statistics of BatchNorm span the batch, as planning has it."""
    return 1 if any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules()) else MICRO_BATCHES


def alone(member: Member, *, double: bool, micro_batches: int = 1) -> Gradients:
    """One process's gradients of the whole batch, or of its parts one after the other."""
    module = _built(member, double)
    rehearsal = BareStep(module, None, "fit", autocast_dtype=None, default_dtype=None, enter=_nothing)
    rehearsal.build()
    (optimizer,) = rehearsal.optimizers
    found: Gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for make, weight in _parts(member, step, double, micro_batches):
            (module.training_step(make(), step) * weight).backward()
        found.append({name: _copied(parameter.grad) for name, parameter in module.named_parameters()})
        optimizer.step()
    return found


def staged(member: Member, finding: Finding, cuts: Sequence[str], *, double: bool, micro_batches: int) -> Gradients:
    """The gradients of the same steps in stages, all micro-batches one after the other."""
    module = _built(member, double)
    staging = finding.value
    if double:
        recording = record(module, None, "training_step", _batch(member, 0, True)(), list(find_blocks(module)), rows=ROWS)
        staging = Staging(hooks={"training_step": recording})
    together = Together(module, None, staging, cuts)
    found: Gradients = []
    for step in range(STEPS):
        together.training_step(_parts(member, step, double, micro_batches), step)
        gradients: dict[str, Tensor | None] = {}
        for stage in together.stages:
            own = {name: parameter.grad for name, parameter in stage.module.named_parameters() if name in stage.owned.names}
            gradients.update({name: _copied(value) for name, value in own.items() if name not in gradients})
        found.append(gradients)
    return found


def errors(ours: Gradients, theirs: Gradients) -> Errors:
    """The largest of all steps."""
    found = Errors()
    for one, other in zip(ours, theirs, strict=True):
        largest = max(float(value.abs().max()) for value in other.values() if value is not None)
        found = replace(found, largest=max(found.largest, largest))
        for name, theirs_ in other.items():
            ours_ = one.get(name)
            if ours_ is None or theirs_ is None:
                if ours_ is not theirs_:
                    found = replace(found, missing=tuple(dict.fromkeys((*found.missing, name))))
                continue
            apart = float((ours_.double() - theirs_.double()).abs().max())
            scale = max(float(theirs_.abs().max()), _SMALL * largest)
            found = replace(found, absolute=max(found.absolute, apart), relative=max(found.relative, apart / scale))
    return found


def _built(member: Member, double: bool) -> pl.LightningModule:
    module = copy.deepcopy(member.build())
    module.__dict__["log"] = _nothing
    return module.double() if double else module


def _batch(member: Member, number: int, double: bool) -> Callable[[], Any]:
    return lambda: tree_map(_doubled, member.batch(number)) if double else member.batch(number)


def _parts(member: Member, number: int, double: bool, micro_batches: int) -> list[tuple[Callable[[], Any], float]]:
    whole = _batch(member, number, double)
    if micro_batches == 1:
        return [(whole, 1.0)]
    return [(lambda index=index: take_part(whole(), index, micro_batches), 1 / micro_batches) for index in range(micro_batches)]


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _nothing(*_: Any, **__: Any) -> None:
    return None
