"""Pipelines in other types than float32, against plain Lightning on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from tests.strategies.fitted import BLOCKS, Fitted, numbers
from tests.strategies.pipelines import pipeline, run

UNDER = pipeline(("net.2",), schedule="1f1b", micro_batches=2)


def compared(make: Any, tolerance: float, **options: Any) -> tuple[Any, Any]:
    """Losses and weights are plain Lightning's. Returns both trainers."""
    results = []
    for plan in (UNDER, None):
        given = {name: value() if callable(value) else value for name, value in options.items()}
        results.append(run(make, numbers(), plan, blocks=BLOCKS, **given))
    (ours, our_losses, our_trainer, _), (theirs, their_losses, their_trainer, _) = results
    torch.testing.assert_close(our_losses, their_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=tolerance, atol=tolerance)
    return our_trainer, their_trainer


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("bf16-true", 5e-2), ("64-true", 1e-12)])
def test_other_types_cross_the_boundary(precision: Any, tolerance: float) -> None:
    """Autocast is around forward alone; what a stage receives has the type that the stage before made."""
    compared(Fitted, tolerance, precision=precision)


class Overflows(Fitted):
    """In the fourth batch the last stage's gradients are infinite, in the sixth the first one's."""

    step = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step = batch_idx + 4 * self.current_epoch
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step = -1
        super().validation_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        hidden = Scaled.apply(self.net[0](batch[0]), torch.inf if self.step == 5 else 1.0)  # type: ignore[no-untyped-call]
        for layer in self.net[1:]:
            hidden = layer(hidden)
        loss = torch.nn.functional.mse_loss(hidden, batch[1])
        return Scaled.apply(loss, torch.inf if self.step == 3 else 1.0)  # type: ignore[no-untyped-call, no-any-return]


class Scaled(torch.autograd.Function):
    """A gradient of another scale."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


class Scales(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        (self.folder / f"{trainer.world_size}-{trainer.global_rank}").write_text(str(self.scales))


def test_all_stages_leave_out_a_step_where_one_overflows(tmp_path: Path) -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))

    compared(Overflows, 5e-3, plugins=plugin, callbacks=lambda: [Scales(tmp_path)], shuffle=False)
    one, first, second = (path.read_text() for path in (tmp_path / "1-0", tmp_path / "2-0", tmp_path / "2-1"))
    assert first == second == one
    assert one == "[1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 512.0, 512.0, 512.0]"
