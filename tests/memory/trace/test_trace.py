"""The traced step against the real one, the patterns of users' code that tracing must survive, and what a footprint tells."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_autopar.constraints import Constraints
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.trace.first_batch import FirstBatch, first_batch, indexed
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.planning.refusals import world_notes
from tests.memory.measured import attached, make_trainer, peak_bytes, real_peak_bytes


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module, *, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = net
        self._make = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs).flatten(0, -2), targets.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), 1e-3)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(200, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 200, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    stages = (Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1))
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def vectors(rows: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(rows * 10, 128), torch.randint(0, 10, (rows * 10,)))


def tokens() -> TensorDataset:
    data = torch.randint(0, 200, (40, 64))
    return TensorDataset(data, data)


def images() -> TensorDataset:
    return TensorDataset(torch.randn(40, 16, 24, 24), torch.randint(0, 10, (40,)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[Any]], int, dict[str, Any]]] = {
    "mlp": (mlp, vectors, 64, {}),
    "mlp, sgd, clipped": (lambda: mlp(), vectors, 64, {"gradient_clip_val": 1.0}),
    "mlp, accumulating": (mlp, vectors, 64, {"accumulate_grad_batches": 2}),
    "mlp, bf16-mixed": (mlp, vectors, 64, {"precision": "bf16-mixed"}),
    "mlp, bf16-true": (mlp, vectors, 64, {"precision": "bf16-true"}),
    "gpt": (GPT, tokens, 4, {}),
    "gpt, bf16-mixed": (GPT, tokens, 4, {"precision": "bf16-mixed"}),
    "resnet": (resnet, images, 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_the_real_step(name: str) -> None:
    net, data, size, kwargs = CASES[name]
    torch.manual_seed(0)
    module = Module(net(), optimizer=torch.optim.SGD if "sgd" in name else torch.optim.AdamW)
    loader = DataLoader(data(), size)
    footprint = trace(module, make_trainer(**kwargs), next(iter(loader)), precision=kwargs.get("precision", "32-true"))
    assert footprint.traced
    assert footprint.batch_size == size
    assert peak_bytes(footprint) == pytest.approx(real_peak_bytes(module, loader, **kwargs), rel=0.02)


def test_states_are_exact_and_the_module_untouched() -> None:
    module = Module(mlp())
    before = copy.deepcopy(module.state_dict())
    parameters = sum(parameter.numel() for parameter in module.parameters())
    batch = next(iter(DataLoader(vectors(), 64)))
    random_state = torch.get_rng_state()
    footprint = trace(module, None, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert footprint.parameters == footprint.trainable_parameters == parameters
    assert footprint.parameter_bytes == footprint.gradient_bytes == 4 * parameters
    assert footprint.optimizer_bytes == 8 * parameters + 4 * len(before)
    assert footprint.input_bytes == 64 * (128 * 4 + 8)
    assert footprint.largest_parameter_bytes == 256 * 256 * 4
    # Three matrices forward, two gradients each, but for the input's own.
    assert footprint.flops == 2 * 64 * (3 * (256 * 256 + 256 * 10) + 2 * 128 * 256)
    assert footprint.random_draws == ("aten.bernoulli_",)
    assert module._trainer is None
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, value in module.state_dict().items():
        assert type(value) is Tensor
        assert torch.equal(value, before[name])
    assert torch.zeros(2).numpy().sum() == 0
    assert copy.deepcopy(torch.ones(2)).sum() == 2


def test_blocks_of_a_transformer() -> None:
    footprint = trace(Module(GPT(dropout=0.1)), None, next(iter(DataLoader(tokens(), 4))))
    assert [block.fqn for block in footprint.blocks] == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    first, second, third = footprint.blocks
    assert second.activation_bytes == third.activation_bytes == first.activation_bytes
    assert second.input_bytes == 4 * 64 * 64 * 4
    assert second.input_extra_bytes == 0
    assert second.recomputable
    assert second.parameters == sum(parameter.numel() for parameter in Block(64).parameters())
    assert second.gradient_bytes == second.parameter_bytes == 4 * second.parameters
    assert second.optimizer_bytes == 8 * second.parameters + 4 * len(list(Block(64).parameters()))
    assert second.flops == 2 * 4 * 64 * 64 * 64 * (3 + 1 + 8) + 4 * 4 * 4 * 64 * 64 * 16
    assert 3 * second.activation_bytes < footprint.activation_bytes
    assert footprint.tied == (("net.tokens.weight", "net.head.weight"),)
    held = [moment.held for moment in footprint.moments if moment.phase == "backward"]
    assert held == sorted(held, reverse=True)
    assert held[0] == 3
    assert sorted({moment.held for moment in footprint.moments if moment.running}) == [0, 1, 2]


def test_batch_norm_is_named_and_not_recomputed() -> None:
    footprint = trace(Module(resnet()), None, next(iter(DataLoader(images(), 8))))
    assert footprint.batch_norm[0] == "net.0.1"
    assert len(footprint.batch_norm) == 7
    assert [block.fqn for block in footprint.blocks] == ["net.1", "net.2", "net.3"]
    assert not any(block.recomputable for block in footprint.blocks)
    module = Module(resnet())
    module.net.eval()
    frozen = trace(module, None, next(iter(DataLoader(images(), 8))))
    assert frozen.batch_norm == ()
    assert all(block.recomputable for block in frozen.blocks)


def test_blocks_that_run_twice_or_share_are_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
            self.head = nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return self.head(x)

    found = trace(Module(Twice()), None, next(iter(DataLoader(vectors(), 8)))).blocks
    assert [(block.fqn, block.repeated) for block in found] == [("net.layers.0", False), ("net.layers.1", False), ("net.head", False)]
    one = nn.Linear(8, 8)
    assert find_blocks(nn.Sequential(one, nn.ReLU(), one)) == {}
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    tied[0].weight = tied[2].weight
    assert list(find_blocks(tied)) == ["1"]


def test_blocks_are_looked_for_inside_of_lists_of_lists() -> None:
    stages = nn.Sequential(*(nn.Sequential(*(Residual(8, 8, 1) for _ in range(2))) for _ in range(2)))
    assert list(find_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    sequences = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    assert list(find_blocks(sequences)) == ["0", "1", "2"]
    kinds = (nn.Linear, nn.Bilinear, nn.Linear, nn.Bilinear, nn.Embedding)
    rows = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), kind(*[8] * (2 + (kind is nn.Bilinear))), nn.ReLU()]) for kind in kinds)
    assert list(find_blocks(rows)) == ["0.1", "1.1", "2.1", "3.1"]
    transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    assert list(find_blocks(transformer)) == [f"{part}.layers.{index}" for part in ("encoder", "decoder") for index in (0, 1)]


def test_evaluation_has_no_gradients() -> None:
    footprint = trace(Module(mlp()), None, next(iter(DataLoader(vectors(), 64))), stage="validate")
    assert not footprint.training
    assert (footprint.gradient_bytes, footprint.optimizer_bytes, footprint.activation_bytes) == (0, 0, 0)
    assert footprint.temporary_bytes == pytest.approx(2 * 64 * 256 * 4, rel=0.05)
    assert footprint.random_draws == ()
    assert footprint.flops == 2 * 64 * (128 * 256 + 256 * 256 + 256 * 10)


class Patterns(Module):
    """What users do in a step, by name."""

    def __init__(self, pattern: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
        self.pattern = pattern
        self.plain = torch.ones(10)
        self.automatic_optimization = pattern != "manual"

    def on_train_start(self) -> None:
        self.started = True
        if self.pattern == "hook fails":
            raise RuntimeError("needs the real trainer")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y, weight=self.plain)
        extra = getattr(self, "_" + self.pattern.replace(" ", "_"), lambda *_: None)(x, y, scores, loss)
        return loss if extra is None else extra

    def _log(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> None:
        self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss.detach(), "b": 1.0})
        self.print("loss", loss)

    def _item(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Any:
        self.last = loss.item()
        return None if torch.isnan(loss).any() else {"loss": loss, "scores": scores}

    def _trainer_values(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Tensor:
        assert self.started
        return loss * (1 + self.trainer.global_step / max(1, self.trainer.max_epochs or 1)) + self.current_epoch * 0

    def _manual(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def _gather(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> None:
        self.all_gather(loss)

    def _logger(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> None:
        self.logger.experiment.add_scalar("loss", loss.item(), 0)

    def _numpy(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> None:
        assert scores.detach().cpu().numpy().mean() == 0
        assert np.asarray(y).shape == (8,)

    def _masked(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Tensor:
        picked = scores[y > 4]
        assert picked.shape == (3, 10)
        assert torch.nonzero(y == 2).shape == (1, 1)
        assert y.max().item() == 7
        return loss + picked.sum()

    def _checkpoint(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Tensor:
        return loss + checkpoint(self.net, x, use_reentrant=False).sum()

    def _compile(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Tensor:
        return loss + torch.compile(self.net)(x).sum()

    def _new_tensors(self, x: Tensor, y: Tensor, scores: Tensor, loss: Tensor) -> Tensor:
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
        return loss + torch.zeros(1, device=self.device).sum() + torch.tensor([1.0, 2.0])[0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)}


PATTERNS = (
    "log",
    "item",
    "trainer values",
    "manual",
    "gather",
    "logger",
    "numpy",
    "masked",
    "checkpoint",
    "compile",
    "new tensors",
    "hook fails",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_users(pattern: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(logger=CSVLogger("unused"))
    before = dict(vars(trainer))
    footprint = trace(Patterns(pattern), trainer, [torch.randn(8, 32), torch.arange(8)])
    assert footprint.traced, footprint.assumptions
    assert footprint.gradient_bytes > 0
    assert footprint.optimizer_bytes > 2 * footprint.parameter_bytes
    assert footprint.unused_parameters == ()
    assert footprint.automatic_optimization == (pattern != "manual")
    assert list(tmp_path.rglob("*")) == []
    assert vars(trainer) == before
    if pattern == "hook fails":
        assert "on_train_start was left out" in footprint.assumptions[0]
    if pattern == "numpy":
        assert "zeros" in footprint.assumptions[0]


class Adversarial(pl.LightningModule):
    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every
        self.generator, self.critic = nn.Linear(8, 32), nn.Linear(32, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        fake = self.generator(torch.randn(16, 8, device=self.device))
        sides = ((generator, lambda: -self.critic(fake).mean()), (critic, lambda: self.critic(fake.detach()).mean()))
        for optimizer, loss in sides[batch_idx % self.every > 0 :]:
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.SGD(self.critic.parameters(), 0.1)], []


def test_two_optimizers() -> None:
    footprint = trace(Adversarial(), None, [torch.randn(16, 32)])
    assert footprint.traced, footprint.assumptions
    assert footprint.optimizers == 2
    assert footprint.optimizer_bytes == 2 * 4 * (8 * 32 + 32) + 2 * 4
    assert footprint.random_draws == ("aten.randn",)


def test_a_generator_that_steps_now_and_then_is_counted() -> None:
    """Where it stepped in the first batch, only the second one was counted: the critic's."""
    each, third = (trace(Adversarial(every), None, [torch.randn(16, 32)]) for every in (1, 3))
    assert third.tape is not None
    assert each.tape is not None
    assert (third.tape.actions, third.tape.sizes) == (each.tape.actions, each.tape.sizes)
    assert third.moments == each.moments


class LateModel(Module):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        rates = [rate.item() for rate in torch.linspace(0, 0.2, 2)]
        self.net = nn.Sequential(nn.Linear(128, 64), nn.Dropout(rates[1]), nn.Linear(64, 10))


def test_configure_model_runs_on_the_copy_alone() -> None:
    module = LateModel()
    footprint = trace(module, None, next(iter(DataLoader(vectors(), 8))))
    assert footprint.configures_model
    assert footprint.parameters == 128 * 64 + 64 + 64 * 10 + 10
    assert isinstance(module.net, nn.Identity)


def test_unused_and_frozen_parameters() -> None:
    module = Module(mlp())
    module.spare = nn.Linear(4, 4)
    module.net[0].requires_grad_(False)
    footprint = trace(module, None, next(iter(DataLoader(vectors(), 8))))
    assert footprint.unused_parameters == ("spare.weight", "spare.bias")
    frozen = sum(parameter.numel() for parameter in module.net[0].parameters())
    assert footprint.parameters - footprint.trainable_parameters == frozen
    assert footprint.gradient_bytes == 4 * footprint.trainable_parameters


def test_later_unfreezing_is_told() -> None:
    class Finetuned(Module):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.backbone = nn.Identity()

    footprint = trace(Finetuned(), make_trainer(callbacks=[BackboneFinetuning()]), next(iter(DataLoader(vectors(), 8))))
    assert "BackboneFinetuning" in footprint.assumptions[0]


@torch.library.custom_op("autopar_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


class Opaque(Module):
    """Uses an operation that nobody taught fakes; ``real`` says whether it works on real tensors."""

    def __init__(self, *, real: bool) -> None:
        super().__init__(mlp())
        self.real = real

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opaque(batch[0])
        if not self.real:
            raise RuntimeError("needs a GPU\nand more")
        return super().training_step(batch, batch_idx)


def test_small_module_is_run_for_real_where_fakes_fail() -> None:
    batch = next(iter(DataLoader(vectors(), 64)))
    expected = trace(Module(mlp()), None, batch)
    module = Opaque(real=True)
    before = copy.deepcopy(module.state_dict())
    footprint = trace(module, None, batch)
    assert not footprint.traced
    assert footprint.margin == 0.1
    assert "run once for real" in footprint.assumptions[0]
    assert peak_bytes(footprint) == pytest.approx(peak_bytes(expected), rel=0.1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_guess_where_nothing_works() -> None:
    batch = next(iter(DataLoader(vectors(), 64)))
    expected = trace(Module(mlp()), None, batch)
    footprint = trace(Opaque(real=False), None, batch)
    assert not footprint.traced
    assert footprint.margin == 0.5
    assert "can't be traced" in footprint.assumptions[0]
    assert "\n" not in footprint.assumptions[0]
    for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "input_bytes", "batch_size", "optimizers"):
        assert getattr(footprint, name) == getattr(expected, name)
    assert expected.activation_bytes / 3 < footprint.activation_bytes < 3 * expected.activation_bytes
    assert footprint.moments == ()
    assert [block.fqn for block in footprint.blocks] == ["net.0", "net.2", "net.5"]


def test_attributes_that_cannot_be_copied_are_shared() -> None:
    module = Module(mlp())
    module.stream = (number for number in range(3))
    assert trace(module, None, next(iter(DataLoader(vectors(), 8)))).traced


@pytest.mark.filterwarnings("ignore:.*capturable")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adafactor", "ASGD"])
def test_what_optimizers_count_by_is_on_the_host(name: str) -> None:
    """As their state's devices say where the parameters are on another device than the CPU."""

    def footprint(target: Target, **kwargs: Any) -> int:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        module = Module(net, optimizer=functools.partial(getattr(torch.optim, name), **kwargs))
        return trace(module, None, (torch.randn(4, 8), torch.randint(0, 2, (4,))), target=target).optimizer_bytes

    weight = nn.Parameter(torch.ones(8, 8, device="meta"))
    weight.grad = torch.ones_like(weight)
    optimizer = getattr(torch.optim, name)([weight], lr=1e-3)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # its state is made, and then meta tensors have no values
        optimizer.step()
    numbers = sum(isinstance(value, Tensor) and value.device.type == "cpu" for value in optimizer.state[weight].values())
    assert footprint("cpu") - footprint("sm90") == 4 * 4 * numbers
    if name == "AdamW":
        assert numbers == 1
        assert footprint("sm90", capturable=True) == footprint("cpu")


class Held(nn.Module):
    """Saves what it has made first; its code holds that until the end, or lets go of it."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__()
        self.weight, self.holds = nn.Parameter(torch.ones(64, 64)), holds

    def forward(self, x: Tensor) -> Tensor:
        first = x.exp()
        second = first.sin()
        if not self.holds:
            del first
        third = (second @ self.weight).cos()
        return third.tan()


@pytest.mark.parametrize("holds", [True, False])
def test_blocks_have_done_with_what_they_save_when_their_code_lets_go_of_it(holds: bool) -> None:
    """Without autograd, as where the block is recomputed, that is when it is freed."""
    net = nn.Sequential(*(Held(holds=holds) for _ in range(2)))
    tape = trace(Module(net), None, (torch.randn(8, 64), torch.randint(0, 64, (8,)))).tape
    assert tape is not None
    events = list(tape)
    begin = next(place for place, event in enumerate(events) if (event.action, event.storage) == ("forward", 1))
    end = next(place for place, event in enumerate(events) if (event.action, event.storage) == ("leave", 1))
    made = [event.storage for event in events[begin:end] if event.action == "allocate" and event.size_bytes == 8 * 64 * 4]
    done = events.index(("unsaved", made[0], 0, None))
    product = next(place for place, event in enumerate(events) if event.action == "allocate" and event.storage == made[2])
    last = next(place for place, event in enumerate(events) if event.action == "allocate" and event.storage == made[-1])
    assert product < last < done if holds else done < product


def test_target_cuda_uses_fused_attention_and_foreach_optimizers() -> None:
    batch = next(iter(DataLoader(tokens(), 4)))
    module = Module(GPT(dropout=0.1))
    cpu, cuda = trace(module, None, batch), trace(module, None, batch, target="cuda")
    assert cuda.traced, cuda.assumptions
    # Three dropouts keep a mask of one byte an element instead of four.
    assert cuda.activation_bytes < cpu.activation_bytes
    scratch = {
        target: max(m.fixed_bytes for m in footprint.moments if m.phase == "optimizer")
        for target, footprint in (("cpu", cpu), ("cuda", cuda))
    }
    assert scratch["cuda"] >= cuda.parameter_bytes > scratch["cpu"]
    assert trace(module, None, batch, target="cuda", precision="bf16-mixed").traced


@pytest.mark.parametrize("arguments", [{"precision": "8-bit"}, {"stage": "training"}])
def test_unknown_settings_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"8-bit|training"):
        trace(Module(mlp()), None, [torch.randn(8, 128), torch.zeros(8, dtype=torch.long)], **arguments)


# -- the first batch ---------------------------------------------------------------------------------------------------------------------


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index**2])


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in itertools.count())


class Played(IterableDataset[Tensor]):
    """Makes its samples by the network, as a loader that plays a game."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(8):
            with torch.no_grad():
                self.network(torch.ones(1, 128))
            yield torch.ones(128)


def test_a_first_batch_knows_which_part_of_the_module_made_it() -> None:
    module = Module(mlp())
    played = first_batch(module, attached(module, train_dataloaders=DataLoader(Played(module.net), 4)), "fit")
    assert played.calls == "net"
    assert first_batch(module, attached(module, train_dataloaders=DataLoader(Played(mlp()), 4)), "fit").calls == ""
    assert not any(child._forward_pre_hooks for child in module.modules())


def test_first_batch_of_a_map_style_dataset() -> None:
    module = Module(mlp())
    loader = DataLoader(Squares(), 4, num_workers=2)
    first = first_batch(module, attached(module, train_dataloaders=loader), "fit")
    assert first.kind == "map"
    assert first.batch_size == 4
    assert torch.equal(first.batch, torch.stack([Squares()[index] for index in range(4)]))
    assert first.samples is not None
    assert first.collate is not None
    assert torch.equal(first.collate(first.samples[1:3]), first.batch[1:3])


def test_first_batch_of_a_stream_and_of_several_loaders() -> None:
    module = Module(mlp())
    stream = first_batch(module, attached(module, train_dataloaders=DataLoader(Endless(), 3)), "fit")
    assert stream.kind == "iterable"
    assert torch.equal(stream.batch, torch.tensor([[0], [1], [2]]))
    both = {"a": DataLoader(Endless(), 3), "b": DataLoader(Squares(), 2)}
    several = first_batch(module, attached(module, train_dataloaders=both), "fit")
    assert several.kind == "combined"
    assert several.batch_size == 2
    assert {name: tuple(part.shape) for name, part in several.batch.items()} == {"a": (3, 1), "b": (2, 2)}
    assert several.samples is None


def test_first_batch_goes_through_the_hooks_of_a_datamodule() -> None:
    calls: list[str] = []

    class Data(pl.LightningDataModule):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(stage)
            self.data = Squares()

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, 5)

        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch.float() / 10

    module = Module(mlp())
    first = first_batch(module, attached(module, datamodule=Data()), "fit")
    assert calls == ["prepare_data", "fit"]
    assert first.batch.dtype == torch.float32
    assert isinstance(first, FirstBatch)


def test_no_data_is_refused() -> None:
    module = Module(mlp())
    with pytest.raises(MisconfigurationException, match="train_dataloader"):  # Lightning's own words
        first_batch(module, attached(module), "fit")
    with pytest.raises(ValueError, match="no data for the stage"):
        first_batch(module, attached(module), "predict")
    with pytest.raises(ValueError, match="has no batch"):
        first_batch(module, attached(module, train_dataloaders=DataLoader(Squares(), 20, drop_last=True)), "fit")


class Asking(pl.LightningModule):
    """Asks its trainer for something before it trains."""

    def __init__(self, ask: Callable[[pl.LightningModule], Any]) -> None:
        super().__init__()
        self.ask = ask
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ask(self)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (lambda module: module.trainer.world_size, ()),  # it is told 1
        (lambda module: module.global_rank, ("global_rank",)),
        (lambda module: module.trainer.is_global_zero, ("is_global_zero",)),
        (lambda module: module.print(""), ()),  # Lightning's own question
        (lambda module: module.trainer.global_step, ()),
        (lambda module: module.logger.log_metrics({"mean": 1.0}), ("logger",)),
        (lambda module: module.log("mean", 1.0), ()),
    ],
)
def test_asking_for_what_differs_between_ranks_is_noticed(ask: Any, asked: tuple[str, ...], tmp_path: Path) -> None:
    module = Asking(ask)
    trainer = attached(module, train_dataloaders=DataLoader(torch.randn(6, 4), batch_size=3))
    trainer.logger = CSVLogger(tmp_path)
    assert trace(module, trainer, torch.randn(3, 4)).asked == asked


def test_files_that_a_step_writes_are_told_where_each_rank_writes_them(tmp_path: Path) -> None:
    """As code does that asks whether there is a process group: of that it sees nothing."""

    def write(module: pl.LightningModule) -> None:
        if not is_initialized():
            (tmp_path / "losses").open("a").close()

    footprint = trace(Asking(write), None, torch.randn(3, 4))
    assert footprint.asked == (str(tmp_path / "losses"),)
    (note,) = world_notes(footprint, Constraints(split_batch=True))
    assert f"the module writes {str(tmp_path / 'losses')!r}: each rank writes it" in note
    assert not world_notes(footprint, Constraints(split_batch=False))


class Augmented(Dataset[Tensor]):
    """Draws from a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        self.transform, self.draw = [generator], draw

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(self.draw(self.transform[0])))


@pytest.mark.parametrize(
    ("generator", "draw", "draws"),
    [
        (np.random.default_rng(1), lambda own: own.random(), ("samples",)),
        (np.random.RandomState(1), lambda own: own.rand(), ("samples",)),
        (random.Random(1), lambda own: own.random(), ("samples",)),
        (torch.Generator(), lambda own: torch.rand((), generator=own), ("samples",)),
        (np.random.default_rng(1), lambda own: 1.0, ()),
    ],
)
def test_draws_of_a_datasets_own_generator_are_noticed(generator: Any, draw: Any, draws: tuple[str, ...]) -> None:
    found = indexed(DataLoader(Subset(Augmented(generator, draw), range(4)), batch_size=2), [0, 1])
    assert found is not None
    assert found.draws == draws


class Net(nn.Module):
    """No two layers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 8, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
        self.head = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.stem(x)).flatten(1))
        return found


def test_a_module_without_blocks_has_layers_which_are_no_units() -> None:
    batch = next(iter(DataLoader(images(), 8)))
    net = Net()
    net(batch[0])
    footprint = trace(Module(net), None, batch)
    assert [block.fqn for block in footprint.blocks] == ["net.stem", "net.body", "net.head"]
    assert not any(block.repeated or block.recomputable for block in footprint.blocks)
    assert shardable(footprint, None) == ((), ())
    assert sum(part.parameters for part in (*footprint.blocks, *footprint.outer)) == footprint.parameters
    assert [block.fqn for block in trace(Module(net), None, batch, stage="validate").blocks] == ["net.stem", "net.body", "net.head"]


class OnItsOwnStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 10)
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.side = self.side or torch.cuda.Stream()
        x = self.first(x)
        with torch.cuda.stream(self.side):
            return self.second(x)


@pytest.mark.parametrize(("net", "streams"), [(OnItsOwnStream, 1), (mlp, 0)])
def test_streams_on_which_a_step_multiplies(net: Any, streams: int) -> None:
    """Each has workspaces of its own, which were left out."""
    footprint = trace(Module(net()), None, next(iter(DataLoader(vectors(), 64))), target="cuda")
    assert footprint.streams == streams
    assert footprint.tape is not None
    assert [event.storage for event in footprint.tape if event.action == "product"] == [0, *[2] * streams, 1]
