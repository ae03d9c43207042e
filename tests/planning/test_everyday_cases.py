"""Everyday cases on one and two GPUs, once planned up to 3.4 times slower than need be: the choice is no slower than a pinned plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.scaling import scaled
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.planner import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits

transformers = pytest.importorskip("transformers")
#: Plans that are hardly slower may be simpler.
NO_SLOWER = 1.01


@dataclass(frozen=True, kw_only=True)
class Everyday:
    """A Llama, what trains it on what, and a plan by hand, which ``fits`` but for one that takes more in the optimizer's step, it is
    predicted by now, than was thought; ``seconds`` is the most that the chosen plan may take by prediction.

    The figures are the search's of the day on which kernels lost L2's bandwidth for what doesn't stay in it: 0.279 to 0.375 s in the first.
    """

    blocks: int
    width: int
    inner: int
    heads: int
    key_heads: int
    words: int
    length: int
    batch: int
    precision: Any
    optimizer: str
    devices: str
    seconds: float
    recompute: int = 0
    parts: int = 1
    fits: bool = True


CASES = {
    "RTX4090": Everyday(
        blocks=24, width=2048, inner=5632, heads=16, key_heads=16, words=32000, length=512, batch=4, precision="bf16-mixed",
        optimizer="AdamW, fused", devices="1xRTX4090", seconds=0.38, recompute=24, parts=2,
    ),
    "A10G": Everyday(
        blocks=12, width=3072, inner=8192, heads=24, key_heads=24, words=32000, length=512, batch=8, precision="32-true",
        optimizer="SGD, fused", devices="1xA10G", seconds=2.02, parts=8,
    ),
    "L4, bf16": Everyday(
        blocks=12, width=2048, inner=5632, heads=16, key_heads=16, words=32000, length=512, batch=8, precision="bf16-true",
        optimizer="AdamW", devices="1xL4", seconds=0.65, parts=4,
    ),
    "L4, mixed": Everyday(
        blocks=12, width=2560, inner=6912, heads=20, key_heads=20, words=32000, length=1024, batch=4, precision="bf16-mixed",
        optimizer="AdamW", devices="1xL4", seconds=1.43, recompute=12, fits=False,
    ),
    "2xA100-40GB": Everyday(
        blocks=32, width=4096, inner=14336, heads=32, key_heads=8, words=128256, length=1024, batch=8, precision="bf16-true",
        optimizer="AdamW, fused", devices="2xA100-40GB", seconds=1.67, recompute=32, parts=8,
    ),
}  # fmt: skip


class Llama(pl.LightningModule):
    """A Llama of random weights that learns its own tokens."""

    def __init__(self, case: Everyday) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=case.words,
            hidden_size=case.width,
            intermediate_size=case.inner,
            num_hidden_layers=case.blocks,
            num_attention_heads=case.heads,
            num_key_value_heads=case.key_heads,
            max_position_embeddings=case.length,
            use_cache=False,
        )
        self.net, self.case = transformers.LlamaForCausalLM(config), case

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The case's."""
        name, _, fused = self.case.optimizer.partition(", ")
        made: Any = getattr(torch.optim, name)
        optimizer: torch.optim.Optimizer = made(self.parameters(), 1e-4, fused=bool(fused) or None)
        return optimizer


def step_of(case: Everyday) -> Footprint:
    """The case's step."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Llama(case)
    return trace(model, None, torch.zeros(4, case.length, dtype=torch.long), target="cuda", precision=case.precision)


def pinned(case: Everyday, footprint: Footprint) -> Plan:
    """The plan that somebody found by hand."""
    blocks = [block.fqn for block in footprint.blocks]
    devices = tuple(device.id for device in parse_spec(case.devices).devices)
    several = len(devices) > 1
    return Plan(
        engine="pipeline" if several else "single",
        devices=devices,
        cuts=(blocks[len(blocks) // 2],) if several else (),
        schedule="1f1b" if several else None,
        micro_batches=case.parts,
        recompute=tuple(blocks[: case.recompute]),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_no_slower_than_a_plan_by_hand(name: str) -> None:
    case = CASES[name]
    footprint, here = scaled(step_of(case), case.batch), parse_spec(case.devices)
    constraints = Constraints(precision=case.precision)
    chosen = make_report(footprint, here, constraints).best_candidate
    assert chosen is not None
    assert chosen.step_seconds <= case.seconds, chosen.plan.title()
    by_hand = Constraints(precision=case.precision, pinned=pinned(case, footprint))
    if not case.fits:
        with pytest.raises(NothingFits):
            make_report(footprint, here, by_hand)
        return
    other = make_report(footprint, here, by_hand).best_candidate
    assert other is not None
    assert chosen.step_seconds <= NO_SLOWER * other.step_seconds, chosen.plan.title()
