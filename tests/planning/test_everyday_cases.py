"""Everyday cases on one and two GPUs, once planned up to 3.4 times slower than need be: the choice is no slower than a plan by hand.

Of each case the most seconds that the chosen plan may take by prediction, as it was once kernels had L2's bandwidth no more for what isn't
kept there (0.375 s instead of 0.279 in the first), and a plan by hand; one of those takes more in the optimizer's step than was thought.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits

transformers = pytest.importorskip("transformers")


class Llama(pl.LightningModule):
    def __init__(self, optimizer: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        names = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
        config = transformers.LlamaConfig(**dict(zip(names, shape, strict=True)), max_position_embeddings=2048, use_cache=False)
        self.net, self.optimizer = transformers.LlamaForCausalLM(config), optimizer

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        name, _, fused = self.optimizer.partition(", ")
        made: torch.optim.Optimizer = getattr(torch.optim, name)(self.parameters(), 1e-4, fused=bool(fused) or None)
        return made


@pytest.mark.parametrize(
    ("shape", "length", "batch", "precision", "optimizer", "devices", "seconds", "recompute", "parts", "fits"),
    [
        ((24, 2048, 5632, 16, 16, 32000), 512, 4, "bf16-mixed", "AdamW, fused", "1xRTX4090", 0.38, 24, 2, True),
        ((12, 3072, 8192, 24, 24, 32000), 512, 8, "32-true", "SGD, fused", "1xA10G", 2.02, 0, 8, True),
        ((12, 2048, 5632, 16, 16, 32000), 512, 8, "bf16-true", "AdamW", "1xL4", 0.65, 0, 4, True),
        ((12, 2560, 6912, 20, 20, 32000), 1024, 4, "bf16-mixed", "AdamW", "1xL4", 1.43, 12, 1, False),
        ((32, 4096, 14336, 32, 8, 128256), 1024, 8, "bf16-true", "AdamW, fused", "2xA100-40GB", 1.67, 32, 8, True),
    ],
)
def test_the_choice_is_no_slower_than_a_plan_by_hand(
    shape: tuple[int, ...], length: int, batch: int, precision: Any, optimizer: str, devices: str, seconds: float, recompute: int,
    parts: int, fits: bool,
) -> None:  # fmt: skip
    with torch.device("meta"):
        model = Llama(optimizer, shape)
    footprint = scaled(trace(model, None, torch.zeros(4, length, dtype=torch.long), target="cuda", precision=precision), batch)
    here = parse_spec(devices)
    chosen = make_report(footprint, here, Constraints(precision=precision)).best_candidate
    assert chosen is not None
    assert chosen.step_seconds <= seconds, chosen.plan.title()
    blocks, ids = tuple(block.fqn for block in footprint.blocks), tuple(device.id for device in here.devices)
    staged: dict[str, Any] = {"cuts": blocks[len(blocks) // 2 :][:1], "schedule": "1f1b"} if len(ids) > 1 else {}
    engine: Any = "pipeline" if staged else "single"
    pinned = Plan(engine=engine, devices=ids, micro_batches=parts, recompute=blocks[:recompute], **staged)
    if not fits:
        with pytest.raises(NothingFits):
            make_report(footprint, here, Constraints(precision=precision, pinned=pinned))
        return
    other = make_report(footprint, here, Constraints(precision=precision, pinned=pinned)).best_candidate
    assert other is not None
    assert chosen.step_seconds <= 1.01 * other.step_seconds, chosen.plan.title()  # a simpler plan may be hardly slower
