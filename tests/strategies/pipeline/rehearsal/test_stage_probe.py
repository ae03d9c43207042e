"""What the parity probe lets through, what it refuses, and in which words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar.engines import Finding, FirstStep
from lightning_autopar.memory.trace.bare_step import Silent
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.pipeline.rehearsal import side_by_side as trial
from lightning_autopar.strategies.pipeline.rehearsal import stage_probe as probing
from lightning_autopar.strategies.pipeline.rehearsal.in_one_process import Precision, Together
from lightning_autopar.strategies.pipeline.rehearsal.side_by_side import ways_to_cut
from lightning_autopar.strategies.pipeline.rehearsal.stage_probe import (
    appended_apart,
    batches_of,
    confirm_stages,
    merged,
    nowhere,
    precision_of,
    probe_stages,
)
from lightning_autopar.strategies.pipeline.stages.cut_tensors import StepRecording


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.line, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.line(self.norm(x))))


class Stack(pl.LightningModule):
    """Words, blocks, and a head tied to the embedding."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch), "words": batch}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batch() -> FirstBatch:
    words = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(1))
    return FirstBatch(batch=words, samples=list(words), collate=torch.stack, batch_size=8)


def probed(module: pl.LightningModule, *hooks: str, fn: str = "fit", **options: Any) -> Finding:
    hooks = hooks or ("training_step",)
    return probe_stages(module, None, {hook: batch() for hook in hooks}, fn, **options)


def tried_here(module: pl.LightningModule, *, precision: Precision | None = None) -> Finding:
    """In this process, where something is patched."""
    found = probing._try(module, None, {"training_step": batch()}, "fit", precision or Precision(), 0)
    assert isinstance(found, Finding)
    return found


def cuttable(finding: Finding) -> list[str]:
    blocks = finding.value.hooks["training_step"].blocks
    return [block for block in blocks[1:] if block not in finding.uncuttable]


def test_a_plain_module_is_cut_at_every_block() -> None:
    torch.manual_seed(0)
    module = Stack()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state, attributes = torch.get_rng_state(), set(vars(module))
    finding = probed(module, "training_step", "validation_step")
    assert finding.value.refusal is None
    assert set(finding.value.hooks) == {"training_step", "validation_step"}
    assert cuttable(finding) == ["blocks.1", "blocks.2", "blocks.3"]
    assert finding.notes == ()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in weights.items())
    assert torch.equal(state, torch.get_rng_state())
    assert set(vars(module)) == attributes


class Unvalidated(Stack):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise IndexError("beyond")


def test_a_validation_that_fails_is_named() -> None:
    found = confirm_stages(Unvalidated(), None, dict.fromkeys(("training_step", "validation_step"), batch()), "fit", ("blocks.2",))
    assert "can't be run on the CPU (in validation_step: IndexError: beyond, at test_stage_probe.py:" in (found.value.refusal or "")


class Fitted(Stack):
    """Its evaluations use what its training has collected."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = [*self.seen, batch]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[:, :-1]) + torch.cat(self.seen).float().mean())


@pytest.mark.parametrize("confirmed", [False, True])
def test_an_evaluation_that_needs_training_before_it_is_named(confirmed: bool) -> None:
    hooks = dict.fromkeys(("training_step", "validation_step"), batch())
    found = confirm_stages(Fitted(), None, hooks, "fit", ("blocks.2",)) if confirmed else probed(Fitted(), *hooks)
    told = "a pipeline's cuts are recorded before any training, where validation_step fails: "
    assert (found.value.refusal or "").startswith(told), found.value.refusal
    assert "at test_stage_probe.py:" in found.value.refusal


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str) -> None:
    finding = probed(Stack(dropout=0.1), precision=precision_of(precision))
    assert cuttable(finding) == ["blocks.1", "blocks.2", "blocks.3"]


def test_names_of_precisions() -> None:
    assert precision_of("16-mixed") == Precision(autocast=torch.float16)
    assert precision_of("bf16") == Precision(autocast=torch.bfloat16)
    assert precision_of("bf16-true") == Precision(true=torch.bfloat16)
    assert precision_of("32-true") == precision_of("32") == Precision()
    assert precision_of("64-true") == Precision(true=torch.float64)
    assert precision_of("transformer-engine") == Precision(true=torch.bfloat16)


def test_predictions_are_compared() -> None:
    finding = probed(Stack(), "predict_step", fn="predict")
    assert finding.value.refusal is None
    assert set(finding.value.hooks) == {"predict_step"}


def leave_shared_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages no longer add up the gradients of parameters that they share."""
    monkeypatch.setattr(Together, "_add_shared", lambda self: None)


def test_gradients_of_shared_parameters_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they not added up over the stages, the probe would say so."""
    leave_shared_gradients(monkeypatch)
    finding = tried_here(Stack())
    assert finding.value.refusal is not None
    assert "can't be cut before any of its blocks: in stages the gradient of 'words.weight' differs by" in finding.value.refusal


def test_a_loss_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Together.training_step
    monkeypatch.setattr(Together, "training_step", lambda self, *args: (step(self, *args) or torch.zeros(())) + 1e-3)
    finding = tried_here(Stack())
    assert finding.value.refusal is not None
    assert "in stages the loss is" in finding.value.refusal


class Global(torch.optim.SGD):
    """Steps by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(0.1 * parameter.grad / norm)
        return loss


class Learning(torch.optim.SGD):
    """Chooses its learning rate by all parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        (group,) = self.param_groups
        group["lr"] = 1e-3 * sum(float(parameter.grad.sum()) for parameter in group["params"] if parameter.grad is not None)
        return loss


class Counting(torch.optim.SGD):
    """Keeps one number of all parameters beside the states of each."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["seen"] = {"steps": self.state.get("seen", {"steps": 0})["steps"] + 1}
        return loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters, max_iter=3), "the optimizer LBFGS asks for the step 3 times"),
        (lambda parameters: Global(parameters, 0.1), "as if it looked at all parameters together"),
        (lambda parameters: Learning(parameters, 0.1), "the optimizer sets 'lr' by all parameters together"),
        (lambda parameters: Counting(parameters, 0.1), "the optimizer Counting keeps a state that isn't torch's"),
    ],
    ids=["LBFGS", "norm", "settings", "state"],
)
def test_optimizers_that_look_at_all_parameters(make: Callable[[Any], Any], words: str) -> None:
    module = Stack(2)
    module.configure_optimizers = lambda: make(module.parameters())  # type: ignore[method-assign]
    finding = probed(module)
    assert finding.value.refusal is not None
    assert words in finding.value.refusal


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor, torch.optim.RMSprop])
def test_optimizers_of_single_parameters(make: Callable[..., Any]) -> None:
    module = Stack(2)
    module.configure_optimizers = lambda: make(module.parameters(), lr=1e-2)  # type: ignore[method-assign]
    assert probed(module).value.refusal is None


class Mixes(Stack):
    """Mixes samples by a share that NumPy draws before the first block, and that the loss takes again after the last, as timm's Mixup."""

    def loss(self, batch: Any) -> Tensor:
        share = float(np.random.beta(0.8, 0.8))
        x = self.words(batch[:, :-1])
        x = share * x + (1 - share) * x.flip(0)
        for block in self.blocks:
            x = block(x)
        logits, target = self.head(x).transpose(1, 2), batch[:, 1:]
        mixed = [nn.functional.cross_entropy(logits, each) for each in (target, target.flip(0))]
        return share * mixed[0] + (1 - share) * mixed[1]


def test_what_numpy_draws_before_the_cut_is_the_same_on_every_stage() -> None:
    np.random.seed(3)
    finding = probed(Mixes(), "training_step", "validation_step")
    assert finding.value.refusal is None
    assert cuttable(finding) == ["blocks.1", "blocks.2", "blocks.3"]


class Shared(Stack):
    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Decides(Stack):
    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
            if x.mean() > 100:
                x = x / 2
        return self.head(x)


@pytest.mark.parametrize(("kind", "words"), [(Shared, "blocks.0"), (Decides, "")])
def test_steps_that_have_no_stages(kind: type[Stack], words: str) -> None:
    finding = probed(kind())
    assert finding.value.refusal is not None
    assert words in finding.value.refusal


def test_a_module_without_blocks() -> None:
    module = Stack(1)
    assert (
        probed(module).value.refusal
        == "a pipeline is cut between blocks or layers that share no parameters and run once a step, and the module has 0"
    )


class OwnNoise(Stack):
    """Draws from a generator that is made when the run starts."""

    def on_fit_start(self) -> None:
        self.noise = torch.Generator(device=self.device).manual_seed(3)

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + torch.randn(16, generator=self.noise)


def test_draws_from_a_generator_that_a_hook_makes_are_refused_before_the_run() -> None:
    assert "draws from a torch.Generator of its own" in (probed(OwnNoise()).value.refusal or "")


def test_what_needs_no_trial() -> None:
    module = Stack()
    module.late = nn.LazyLinear(2)
    assert probed(module).value.refusal == "the parameter 'late.weight' gets its shape in the first step, and a pipeline is cut before"
    module = Stack()
    module.automatic_optimization = False
    assert probed(module).value.refusal == "a pipeline's schedule runs backward, but the module calls backward by itself"


class Remembers(Stack):
    """The way that Lightning's guide has it since 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class Averages(Remembers):
    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


class Smooths(Remembers):
    """Keeps a value in place of the one before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.smooth = 0.9 * getattr(self, "smooth", 0.0) + 0.1 * float(loss.detach().sum())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("smooth", self.smooth)


def test_what_a_step_keeps_for_later_hooks() -> None:
    finding = probed(Averages())
    assert finding.value.refusal is None
    assert finding.value.appended == ("losses",)
    assert appended_apart(finding.value) == "the step appends to the module's 'losses': each part of a batch would append"
    finding = probed(Remembers())
    assert finding.value.refusal is None
    assert finding.value.appended == ()
    assert appended_apart(finding.value) is None
    assert probed(Smooths()).value.refusal is not None
    found = confirmed(Averages())
    assert found.value.refusal == "the step appends values to the module's 'losses' that only the last stage would have"


class Clips(Stack):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Looks(Stack):
    def on_after_backward(self) -> None:
        self.log("largest", max(float(parameter.grad.abs().max()) for parameter in self.parameters()))


def test_hooks_that_look_at_gradients() -> None:
    """Norms are the engine's to take over all stages; anything else would be of a part of the gradients."""
    assert probed(Clips()).value.refusal is None
    refusal = probed(Looks()).value.refusal
    assert refusal is not None
    assert "on_after_backward" in refusal
    assert "the gradient of the parameter" in refusal


class Tells(Stack):
    """Logs in hooks what every stage knows, and gives a logger what is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.board: Any = Silent()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        self.board.add_scalar("batch", batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("parameters", float(sum(parameter.numel() for parameter in self.parameters())))


class Watches(Tells):
    """Gives a logger its parameters."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            self.board.add_histogram(name, parameter, batch_idx)


class Weighs(Tells):
    """Logs a norm after each epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("norm", self.head.weight.norm())


class Renames(Tells):
    """Changes names in a checkpoint, and adds what every stage knows."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}
        checkpoint["parameters"] = sum(parameter.numel() for parameter in self.parameters())


class Replaces(Tells):
    """Puts weights of its own into a checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.clear()
        checkpoint.update(self.state_dict())


def test_what_is_added_to_checkpoints() -> None:
    assert probed(Renames()).value.refusal is None
    refusal = probed(Replaces()).value.refusal
    assert refusal is not None
    assert re.search(r"in stages on_save_checkpoint fails \('.*' reads the values of the parameter '.*', which another stage has", refusal)


def test_hooks_that_look_at_parameters() -> None:
    assert probed(Tells()).value.refusal is None
    for kind, hook in ((Watches, "on_train_batch_end"), (Weighs, "on_train_epoch_end")):
        refusal = probed(kind()).value.refusal
        assert refusal is not None
        assert re.search(
            rf"in stages {hook} fails \('\w+' reads the values of the parameter '.*', which another stage has, at \w+.py:\d+\)", refusal
        )


class ReadsOutput(Stack):
    """Reads what its step returns beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "words": batch}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.same = bool((outputs["words"] == batch).all())


class ReadsLoss(Tells):
    """Of a step that returns a tensor, Lightning's hooks get a dictionary; then it reads a parameter."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.board.add_scalar("ratio", outputs["loss"].item() / next(self.blocks.parameters()).norm().item())


def test_hooks_get_the_steps_output() -> None:
    assert probed(ReadsOutput()).value.refusal is None
    assert "reads the values of the parameter" in (probed(ReadsLoss()).value.refusal or "")


class PrunesLater(Tells):
    """From the third step on, sets the smallest weights of all blocks to zero, by their gradients."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weighed = [(parameter * parameter.grad).abs() for parameter in self.blocks.parameters()]
        if self.global_step > 2:
            bound = torch.cat([each.flatten() for each in weighed]).kthvalue(3)[0].item()
            for parameter, each in zip(self.blocks.parameters(), weighed, strict=True):
                parameter.data.masked_fill_(each <= bound, 0.0)


def test_a_hook_that_looks_at_parameters_in_later_steps() -> None:
    refusal = probed(PrunesLater()).value.refusal
    assert refusal is not None
    assert re.search(
        r"in stages on_train_batch_end fails \('item' reads the values of the parameter '.*', which another stage has", refusal
    )


class ReadsMomentsLater(Tells):
    """From the third step on, reads what the optimizer keeps of each parameter: a stage's optimizer keeps nothing of other stages'."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step > 2:
            state = self.optimizers().state  # type: ignore[union-attr]  # no list: it has one
            self.numbers = [state[parameter]["step"] for parameter in self.parameters()]


class FailsAnyway(Tells):
    """From the third step on, fails on the whole module as well."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step > 2:
            raise KeyError(sum(parameter.numel() for parameter in self.parameters()))


def test_a_hook_that_fails_in_later_steps_on_stages_alone() -> None:
    refusal = probed(ReadsMomentsLater()).value.refusal
    assert refusal is not None
    assert re.search(r"in stages on_train_batch_end fails \(KeyError: 'step', at \w+.py:\d+\)", refusal)
    assert probed(FailsAnyway()).value.refusal is None


class Careless(torch.optim.SGD):
    """Takes it for granted that each parameter has a gradient."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.size = sum(parameter.grad.norm() for group in self.param_groups for parameter in group["params"])
        return loss


class SteppedCarelessly(Tells):
    """Is stepped by such an optimizer."""

    def configure_optimizers(self) -> Any:
        return Careless(self.parameters(), 0.1)


def test_an_optimizer_that_wants_a_gradient_of_each_parameter() -> None:
    refusal = probed(SteppedCarelessly()).value.refusal
    assert refusal is not None
    words = (
        r"the optimizer Careless fails on a stage, where other stages' parameters have no gradient \(AttributeError: .*\), at \w+.py:\d+"
    )
    assert re.search(words, refusal)


class Follows(Tells):
    """Sets a parameter's data to what another stage's values make of it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, *_, last = self.blocks.parameters()
        last.data = last.data + first.data.sum()


def test_a_hook_that_sets_data_to_what_another_stage_has() -> None:
    refusal = probed(Follows()).value.refusal
    assert refusal is not None
    assert re.search(r"the data of 'blocks\.3\.\S+' is set to a tensor whose values another stage has", refusal)


class Exports(Tells):
    """Saves its weights after each epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_epoch_end(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "epoch.txt").write_text("done")
        torch.save(self.head.weight, self.folder / "head.pt")


def test_hooks_that_save_parameters_write_nothing_in_the_trial(tmp_path: Path) -> None:
    """What a trial saved would hold the weights from before the run."""
    refusal = probed(Exports(tmp_path / "new")).value.refusal
    assert refusal is not None
    assert "in stages on_train_epoch_end fails" in refusal
    assert "reads the values of the parameter" in refusal
    assert not list(tmp_path.iterdir())


class Sparse(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_sparse_gradients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(Sparse()).value.refusal is None
    add = Together._add_shared

    def spoilt(self: Together) -> None:
        add(self)
        for stage in self.stages:
            if (gradient := stage.module.words.weight.grad) is not None:  # type: ignore[union-attr]
                gradient.mul_(1.1)  # type: ignore[operator]

    monkeypatch.setattr(Together, "_add_shared", spoilt)
    assert probed(Sparse()).value.refusal is not None


class Observes(Stack):
    """Begins with a buffer of no elements, as observers of fake quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def forward(self, words: Tensor) -> Tensor:
        found = super().forward(words)
        seen = found.detach().abs().amax((0, 1))
        before = seen if not self.largest.numel() else self.largest
        self.largest.resize_(seen.shape).copy_(torch.maximum(before, seen))
        return found


def test_a_buffer_that_the_first_step_makes_larger() -> None:
    module = Observes()
    assert probed(module).value.refusal is None
    assert not module.largest.numel()


class Normalised(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))

    def loss(self, batch: Any) -> Tensor:
        x = self.words(batch[:, 0])
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_buffers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(Normalised()).value.refusal is None
    step = Together.training_step

    def spoilt(self: Together, *args: Any) -> Any:
        loss = step(self, *args)
        self.stages[-1].module.get_buffer("blocks.2.1.running_mean").add_(1.0)
        return loss

    monkeypatch.setattr(Together, "training_step", spoilt)
    refusal = tried_here(Normalised()).value.refusal
    assert refusal is not None
    assert "the buffer 'blocks.2.1.running_mean' has other values after the step" in refusal


class Stem(Stack):
    """Statistics of a batch outside of the blocks, in validation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.words(words).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


def test_buffers_that_a_step_writes() -> None:
    stem = probed(Stem(), "training_step", "validation_step")
    assert cuttable(stem) == ["blocks.1", "blocks.2", "blocks.3"]
    assert set(stem.counted) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert probed(Counts()).counted == probed(Counts(), flops=10**15).counted == ("count",)
    assert probed(Stack()).counted == ()


class Late(Stack):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            torch.manual_seed(2)
            made = Stack()
            self.words, self.blocks, self.head = made.words, made.blocks, made.head


def test_a_module_that_is_built_late() -> None:
    module = Late()
    finding = probed(module)
    assert cuttable(finding) == ["blocks.1", "blocks.2", "blocks.3"]
    assert not hasattr(module, "blocks")


def test_a_step_too_large_to_try_is_recorded_only() -> None:
    finding = probed(Stack(), flops=10**15)
    assert finding.value.refusal is None
    assert cuttable(finding) == ["blocks.1", "blocks.2", "blocks.3"]
    assert finding.notes == (
        "whether its stages compute the same is only checked as they run: no trial was made, as a step of 1.0e+15 floating-point "
        "operations is too long to try on the CPU",
    )
    module = Stack()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    refusal = probed(module, flops=10**15).value.refusal
    assert refusal is not None
    assert refusal == "the optimizer LBFGS updates a parameter by the values of others, and no stage has them all"


def confirmed(module: pl.LightningModule, cuts: tuple[str, ...] = ("blocks.2",), flops: int = 10**11) -> Finding:
    return confirm_stages(copy.deepcopy(module), None, {"training_step": batch()}, "fit", cuts, flops=flops)


def test_a_plans_cuts_are_tried_where_they_were_only_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = confirmed(Stack())
    assert found.untried is None
    assert found.value.refusal is None
    assert found.value.hooks["training_step"].rows == 8
    assert confirmed(Stack(), flops=10**12).value.hooks["training_step"].rows == 2
    assert confirmed(Stack(), flops=10**14).untried == "a step of 1.0e+14 floating-point operations is too long to try on the CPU"
    leave_shared_gradients(monkeypatch)
    refusal = confirmed(Stack()).value.refusal
    assert refusal is not None
    assert "in stages the gradient of 'words.weight' differs" in refusal


def test_a_long_step_is_tried_on_two_samples() -> None:
    finding = probed(Stack(), flops=3 * 10**10)
    assert finding.notes == ()
    assert finding.value.hooks["training_step"].rows == 2


def test_double_precision_decides_where_rounding_might(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of some millionths in single precision that isn't there in double is rounding; one that is there is none."""
    step, doubles = Together.training_step, []

    def rounded(error: float) -> Callable[..., Any]:
        def run(self: Together, *args: Any) -> Any:
            loss = step(self, *args)
            assert loss is not None
            doubles.append(loss.dtype is torch.float64)
            return loss * (1 + (3e-6 if loss.dtype is torch.float32 else error))

        return run

    monkeypatch.setattr(Together, "training_step", rounded(0.0))
    assert tried_here(Stack(2)).value.refusal is None
    assert any(doubles)
    monkeypatch.setattr(Together, "training_step", rounded(3e-6))
    refusal = tried_here(Stack(2)).value.refusal
    assert refusal is not None
    assert "in stages the loss is" in refusal


def test_every_block_is_cut_at_somewhere() -> None:
    for count in (1, 2, 3, 7, 8, 23):
        blocks = [f"blocks.{index}" for index in range(count)]
        ways = ways_to_cut(blocks)
        assert {cut for cuts in ways for cut in cuts} == set(blocks)
        assert all(list(cuts) == [block for block in blocks if block in cuts] for cuts in ways)
        assert max(map(len, ways)) <= 7
        assert len(ways) == len(set(ways))
    assert any(len(cuts) == 1 for cuts in ways_to_cut(["a", "b", "c", "d"]))


def test_hooks_know_what_the_others_write_to() -> None:
    writes = {"training_step": {"a"}, "validation_step": {"b"}, "test_step": {"a", "b"}}
    asked: list[tuple[str, frozenset[str]]] = []

    def record(hook: str, written: frozenset[str]) -> StepRecording:
        asked.append((hook, written))
        return StepRecording(hook=hook, blocks=(), crossings={}, written=frozenset(writes[hook]) | written)

    found = trial.recorded_together(list(writes), record)
    assert all(each.written == {"a", "b"} for each in found.values())
    assert [hook for hook, _ in asked] == ["training_step", "validation_step", "test_step", "training_step"]


def recording(hook: str, *blocks: str, **uncuttable: str) -> StepRecording:
    return StepRecording(hook=hook, blocks=blocks, crossings={}, uncuttable=uncuttable)


def test_a_cut_has_to_suit_all_hooks() -> None:
    recordings = {
        "training_step": recording("training_step", "a", "b", "c", "d", b="it is read by Python"),
        "validation_step": recording("validation_step", "a", "b", "d", c="it runs twice"),
    }
    assert merged(recordings) == {
        "b": "it is read by Python",
        "c": "in validation_step, it runs twice",
        "d": "'d' comes at another place in validation_step than in training_step",
    }
    assert nowhere(recordings, merged(recordings)) is not None
    assert nowhere(recordings, {"b": "it is read by Python"}) is None
    alone = {"training_step": recording("training_step", "a")}
    assert nowhere(alone, {}) == "a pipeline is cut between blocks that run once each, and the step has 1"


class Evaluated(Stack):
    """Of each second loader the loss is logged of another number of passes, or by other code."""

    again = early = later = False

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            super().validation_step(batch, batch_idx)
            return
        if self.early:
            self.log("kept", self.words(batch).mean())
        loss = self.loss(batch)
        self.log("val_loss", self.loss(batch) if self.again else loss)
        if self.later:
            self.log("half", loss / 2)


def evaluated(flops: int = 0, **how: bool) -> Finding:
    """What is found of two loaders."""
    module, trainer = Evaluated(), pl.Trainer(logger=False, accelerator="cpu")
    for name in how:
        setattr(module, name, True)
    trainer.strategy.connect(module)
    loaders = tuple(DataLoader(batch().batch[rows:], batch_size=4) for rows in (0, 2))
    told: Any = {"stage": "fit", "footprint": None, "validation": lambda: replace(batch(), loaders=loaders)}
    return probe_stages(module, trainer, batches_of(FirstStep(trainer=trainer, batch=batch(), **told)), flops=flops)


@pytest.mark.parametrize("how", [{}, {"later": True}])
def test_loaders_whose_steps_run_alike_may_be_cut(how: dict[str, bool]) -> None:
    assert cuttable(evaluated(**how)) == [f"blocks.{number}" for number in range(1, 4)]


@pytest.mark.parametrize("flops", [0, 10**18])
def test_a_loader_for_which_blocks_run_another_number_of_times_is_named(flops: int) -> None:
    words = "in validation_step, for loader 1 it runs other blocks than for the first one, or runs them another number of times"
    found = evaluated(flops, again=True)
    assert (found.untried is None) == (flops == 0), "a long step is only recorded"
    assert found.value.refusal == f"the step can't be cut before any of its blocks: {words}"


def test_a_loader_whose_code_before_a_cut_is_other_code_is_named() -> None:
    words = "in validation_step, for loader 1 the code before it makes other tensors than for the first one"
    assert evaluated(early=True).uncuttable == {"blocks.0": words}, "what blocks return crosses the other cuts"


def test_norms_are_put_aside_for_who_imported_them_by_name() -> None:
    parameter = nn.Parameter(torch.full((3,), 5.0))
    parameter.grad = torch.full((3,), 5.0)
    clip = torch.nn.utils.clip_grad_norm_
    with trial.norms_aside():
        assert float(clip([parameter], 0.1)) == 1.0
        assert float(parameter.grad.max()) == 5.0
    assert float(clip([parameter], 0.1)) > 8
    assert float(parameter.grad.max()) < 1


class Snapshots(Tells):
    """Keeps a copy of its head now and then, or calls a block, before a validation."""

    def __init__(self, *, keeps: bool, every: int) -> None:
        super().__init__()
        self.keeps, self.every = keeps, every
        self.kept: list[Any] = []

    def on_validation_start(self) -> None:
        if self.current_epoch % self.every == self.every - 1:
            if self.keeps:
                self.kept.append(copy.deepcopy(self.head))
            else:
                self.mean = float(self.blocks[0](torch.ones(1, 8)).mean())


@pytest.mark.parametrize("every", [1, 2])
def test_hooks_around_a_validation_are_tried_in_later_epochs(every: int) -> None:
    def refused(*, keeps: bool, every: int) -> str:
        trainer = pl.Trainer(accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        return probe_stages(Snapshots(keeps=keeps, every=every), trainer, {"training_step": batch()}, "fit").value.refusal or ""

    keeps = "in stages on_validation_start keeps a copy of weights in 'kept', and each stage holds a part of them"
    assert refused(keeps=True, every=every).startswith(keeps)
    assert "in stages on_validation_start fails ('__float__' reads the values of the parameter" in refused(keeps=False, every=every)
    assert not refused(keeps=True, every=5)


class Fills(Stack):
    """Puts its logits into its batch, as anomalib's models do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words = batch["words"]
        batch["logits"] = self(words[:, :-1])
        return nn.functional.cross_entropy(batch["logits"].transpose(1, 2), words[:, 1:])


class ReadsLogits(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch["logits"].mean()


class OnlyCounts(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(batch_idx)


@pytest.mark.parametrize("callbacks", [[ReadsLogits()], [OnlyCounts()], []])
def test_what_a_step_puts_into_its_batch_is_missed_by_callbacks_alone(callbacks: list[pl.Callback]) -> None:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet)
    words = batch().batch
    first = FirstBatch(
        batch={"words": words},
        samples=list(words),
        collate=lambda rows: {"words": torch.stack(rows)},
        batch_size=8,
    )
    refusal = probe_stages(Fills(), trainer, {"training_step": first}, "fit").value.refusal or ""
    assert ("ReadsLogits.on_train_batch_end wouldn't find it" in refusal) is any(isinstance(each, ReadsLogits) for each in callbacks)
    assert "wouldn't find it" in refusal or not refusal
