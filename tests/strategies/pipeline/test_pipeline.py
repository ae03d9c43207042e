"""Pipelines on real ranks, against plain Lightning on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.plans import Plan
from tests.strategies.fitted import BLOCKS, Fitted, numbers
from tests.strategies.pipelines import pipeline, run


def same(make: Any, data: Any, under: Plan, *, tolerance: float = 1e-5, blocks: Any = BLOCKS, **options: Any) -> Any:
    """Losses, metrics and weights are plain Lightning's. Returns the trainer."""
    ours, our_losses, our_trainer, _ = run(make, data, under, blocks=blocks, **options)
    theirs, their_losses, their_trainer, _ = run(make, data, None, blocks=blocks, **options)
    assert len(our_losses) == len(their_losses) > 0
    torch.testing.assert_close(our_losses, their_losses, rtol=tolerance, atol=tolerance, equal_nan=True)
    metrics = {name: value.float() for name, value in their_trainer.callback_metrics.items()}
    found = {name: value.float() for name, value in our_trainer.callback_metrics.items()}
    torch.testing.assert_close(found, metrics, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=tolerance, atol=tolerance)
    return our_trainer


class Records(Dataset[Any]):
    """Sequences; those of a batch are of one length, which changes from batch to batch where ``lengths`` does."""

    def __init__(self, rows: int = 26, lengths: tuple[int, ...] = (5,)) -> None:
        self.rows, self.lengths = rows, lengths

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        length = self.lengths[index // 8 % len(self.lengths)]
        x = torch.randn(length, 6, generator=generator)
        return {"inputs": (x, x.sum(1)), "weight": x.abs().mean(), "name": f"record {index}"}


def collate(samples: list[Any]) -> Any:
    """Nested, with texts, and with what belongs to no sample."""
    batch = default_collate(samples)
    return {**batch, "scale": torch.tensor(0.5), "kind": "records", "none": None}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, hidden: Tensor, first: Tensor, *, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A skip connection from the first layer's input, a mask that each stage makes for itself, a nested result."""
        hidden = torch.tanh(self.linear(hidden) + self.shift) * mask + first
        return hidden, {"norm": hidden.pow(2).mean()}


class Rich(pl.LightningModule):
    """Sequences through five layers of a ModuleList; the loss uses what each layer gives beside."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.layers[1].linear.bias.requires_grad_(False)
        self.head = nn.Linear(6, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, _ = batch["inputs"]
        mask = (torch.arange(x.shape[1], device=x.device) % 3 > 0).unsqueeze(1).to(x.dtype)
        first = hidden = self.inlet(x) * batch["scale"]
        norms = []
        for layer in self.layers:
            hidden, beside = layer(hidden, first, mask=mask)
            norms.append(beside["norm"])
        return self.head(hidden).squeeze(2), torch.stack(norms).mean()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        given, norm = self.predicted(batch)
        error = (given - batch["inputs"][1]).pow(2).mean(1) * batch["weight"]
        return error.mean() + 0.01 * norm, error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, error = self.losses(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(error))
        return {"loss": loss, "error": error.detach(), "mean": error.detach().mean(), "text": batch["kind"]}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, error = self.losses(batch)
        self.log("val_loss", loss, batch_size=len(error))
        return {"error": error}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


LAYERS = tuple(f"layers.{index}" for index in range(5))


class Watch(pl.Callback):
    """Writes down, on each rank, what hooks are called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()

    def note(self, *words: Any) -> None:
        self.lines.append(" ".join(f"{word:.4f}" if isinstance(word, float) else str(word) for word in words))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("zero_grad")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.note("before_backward", float(loss.detach()))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.note("after_backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("optimizer_step")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("train_end", outputs["text"], float(outputs["mean"]), [round(value, 3) for value in outputs["error"].tolist()])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validation_end", [round(value, 3) for value in outputs["error"].tolist()])

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        learned = sum(0 if is_absent(parameter) else parameter.numel() for parameter in module.parameters())
        states = sum(len(state) > 0 for state in trainer.optimizers[0].state.values())
        text = "\n".join([*self.lines, f"{trainer.optimizers[0].param_groups[0]['lr']:.5f}"])
        (self.folder / f"{trainer.global_rank}.txt").write_text(text)
        (self.folder / f"{trainer.global_rank}.numbers").write_text(f"{learned} {states}")


def watched(folder: Path, name: str) -> tuple[Watch, Path]:
    (folder / name).mkdir()
    return Watch(folder / name), folder / name


def test_two_stages_are_one_devices_run() -> None:
    """26 samples in batches of 8: the last one has two, fewer than there are micro-batches."""
    same(Fitted, numbers(), pipeline(("net.2",), schedule="1f1b"))


@pytest.mark.parametrize(
    "under",
    [
        pipeline(LAYERS[1:3], schedule="1f1b"),
        pipeline(LAYERS, schedule="interleaved_1f1b", ranks=3, micro_batches=2),  # fewer than ranks
        pipeline(LAYERS[3:4], schedule="gpipe", micro_batches=3),
    ],
    ids=lambda plan: plan.title(),
)
def test_every_rank_sees_one_devices_run(under: Plan, tmp_path: Path) -> None:
    """Sequences of changing lengths; hooks, outputs and schedulers on every rank; accumulated gradients; a rank holds its stages alone."""
    data = Records(lengths=(5, 3, 7))
    found = {}
    for name, plan in (("ours", under), ("theirs", None)):
        watch, folder = watched(tmp_path, name)
        options = {"blocks": LAYERS, "collate": collate, "callbacks": [watch], "accumulate_grad_batches": 2, "shuffle": False}
        module, losses, trainer, _ = run(Rich, data, plan, **options)
        found[name] = module, losses, trainer, [path.read_text().splitlines() for path in sorted(folder.glob("*.txt"))]
        if plan is not None:
            held = [[int(word) for word in (folder / f"{rank}.numbers").read_text().split()] for rank in range(plan.world_size)]
            assert sum(parameters for parameters, _ in held) == sum(parameter.numel() for parameter in module.parameters())
            assert max(parameters for parameters, _ in held) < 0.75 * sum(parameters for parameters, _ in held)
    (module, losses, trainer, lines), (other, other_losses, other_trainer, (expected,)) = found["ours"], found["theirs"]
    torch.testing.assert_close(losses, other_losses, rtol=1e-5, atol=1e-5)
    assert len(lines) == under.world_size
    for own in lines:
        assert own == expected
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(other_trainer.callback_metrics), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()), rtol=1e-5, atol=1e-5)
