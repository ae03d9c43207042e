"""What a pipeline's stages have apart, as the user sees it: clipped and logged gradients, results in the parent, a summary, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

from lightning_autopar.plans import Plan
from tests.strategies.fitted import Fitted, tokens
from tests.strategies.pipelines import pipeline, run

BLOCKS = ("layers.0", "layers.1", "layers.2")
PLAN = pipeline(("layers.1", "layers.2"), micro_batches=4, schedule="1f1b")


class Block(nn.Module):
    def __init__(self, width: int, scale: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale  # one for all blocks
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x)) * self.scale
        self.last = y.detach().mean()
        return y


class Tied(Fitted):
    """Tokens; the head is the embedding, and all blocks share a scale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        del self.net
        self.embed = nn.Embedding(17, width)
        scale = nn.Parameter(torch.full((width,), 0.5))
        self.layers = nn.ModuleList(Block(width, scale) for _ in range(3))
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.texts: list[str] = []
        self.logits: Any = None
        self.steps = 0

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        self.logits = self.head(x).detach()[:1, 0, :3]
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), batch[0].roll(-1, 1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def compare(make: Any, plan: Plan = PLAN, *, beside: Any = None, **options: Any) -> Any:
    """Losses, metrics and weights are plain Lightning's. Returns both modules and both trainers; ``beside`` are options of ours alone."""
    ours, our_losses, our_trainer, _ = run(make, tokens(), plan, blocks=BLOCKS, **options, **(beside or {}))
    theirs, their_losses, their_trainer, _ = run(make, tokens(), None, blocks=BLOCKS, **options)
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-5, atol=1e-5)
    metrics = {name: value.float() for name, value in their_trainer.callback_metrics.items()}
    found = {name: value.float() for name, value in our_trainer.callback_metrics.items()}
    torch.testing.assert_close(found, metrics, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    return ours, theirs, our_trainer, their_trainer


class Logged(Tied):
    """Logs the norms of all gradients, and clips by itself in two groups."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(self.layers.parameters(), 0.05)
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Tied, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        (Tied, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
        (Logged, {"gradient_clip_val": 0.1}),
    ],
)
def test_gradients_are_clipped_over_all_stages(make: Any, options: dict[str, Any]) -> None:
    compare(make, **options)


def test_shards_of_stages_are_clipped_added_up_and_saved(tmp_path: Path) -> None:
    """Two pipelines side by side, whose stages' parameters are sharded over the two; a tied weight is first and last."""
    plan = pipeline(("layers.2",), ranks=4, replicas=2, shard=BLOCKS, schedule="1f1b", micro_batches=2)
    saves = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    beside = {"callbacks": [saves], "enable_checkpointing": True}
    ours, _, trainer, _ = compare(Logged, plan, gradient_clip_val=0.1, accumulate_grad_batches=2, max_epochs=1, beside=beside)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(ours.state_dict())
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in ours.state_dict().items())
    torch.testing.assert_close(saved["optimizer_states"][0], trainer.optimizers[0].state_dict(), rtol=0, atol=0)


class Partial(Tied):
    """Clips by a norm that it works out by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class Read(Tied):
    """Stops by a norm that it works out by itself."""

    def on_after_backward(self) -> None:
        self.norm = sum(each.grad.pow(2).sum().item() for each in self.parameters() if each.grad is not None) ** 0.5


def test_a_norm_of_ones_own_making_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"on_before_optimizer_step of a pipeline, which doesn't have its value"):
        run(Partial, tokens(), PLAN, blocks=BLOCKS)
    with pytest.raises(RuntimeError, match=r"reads the values of the gradient of the parameter '.*', which another stage has"):
        run(Read, tokens(), PLAN, blocks=BLOCKS)


def test_results_of_all_stages_come_back() -> None:
    ours, theirs, our_trainer, their_trainer = compare(Tied)
    assert ours.head.weight is ours.embed.weight
    assert ours.layers[0].scale is ours.layers[2].scale
    assert ours.steps == theirs.steps == 8
    ours_state, theirs_state = our_trainer.optimizers[0].state_dict(), their_trainer.optimizers[0].state_dict()
    torch.testing.assert_close(ours_state, theirs_state, rtol=1e-4, atol=1e-6)
    assert [id(each) for each in our_trainer.optimizers[0].param_groups[0]["params"]] == [id(each) for each in ours.parameters()]
    assert isinstance(ours.logits, Tensor), "set by the last stage alone"
    assert ours.logits.shape == theirs.logits.shape
    for layer in ours.layers:  # set by a stage each
        assert isinstance(layer.last, Tensor)
        assert layer.last.isfinite()


class Summarised(pl.Callback):
    """Keeps the summary that Lightning makes at the beginning of a fit."""

    def __init__(self) -> None:
        self.words = ""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.words = str(summarize(pl_module, max_depth=2))


def test_a_summary_counts_the_whole_module() -> None:
    ours, theirs = Summarised(), Summarised()
    run(Tied, tokens(), PLAN, blocks=BLOCKS, callbacks=[ours], max_epochs=1)
    run(Tied, tokens(), None, blocks=BLOCKS, callbacks=[theirs], max_epochs=1)
    assert "Total params" in theirs.words
    assert ours.words == theirs.words


class Exporting(Tied):
    """Looks at the weights that are saved, and leaves some of them out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value.half() for name, value in state.items() if not name.startswith("layers.1")}


def test_hooks_see_the_whole_weights_where_they_are_saved(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    ours, _, _, _ = run(Exporting, tokens(), PLAN, blocks=BLOCKS, callbacks=[saves], max_epochs=1, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == [name for name in ours.state_dict() if not name.startswith("layers.1")]
    for name, value in saved.items():
        assert torch.equal(value, ours.state_dict()[name].half())
