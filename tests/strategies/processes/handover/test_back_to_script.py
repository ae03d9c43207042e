"""What a script sees after ``fit``: the same under every engine as under plain Lightning."""

from __future__ import annotations

import copy
import os
import random
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_autopar import AutoParallelStrategy
from tests.planned import looked_at_once
from tests.processes import processor_seconds

ENGINES = ("single", "ddp", "fsdp")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)  # before a BatchNorm a bias has no gradient but noise, which AdamW blows up
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.hidden += 1
            self.calls.append(len(self.calls))
        return self.second(torch.relu(self.norm(self.first(x))))


class Memory(Logger):
    """A logger that keeps its rows."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        return


@dataclass
class Note:
    text: str
    values: list[int] = field(default_factory=list)


class Keeper(pl.Callback):
    """Keeps all sorts of things."""

    def __init__(self, module: Any, rows: list[int]) -> None:
        self.module = module
        self.epochs = rows
        self.mixed: list[Any] = [lambda: 1]
        self.lock = threading.Lock()
        self.note = Note("before")
        self.alias = self.note
        self.shadow = {name: value.detach().clone() for name, value in module.inner.named_parameters()}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.mixed.append(trainer.current_epoch)
        self.note.text = "after"
        self.note.values.append(trainer.global_step)
        self.seen = {"step": trainer.global_step, "note": self.note}
        for value in self.shadow.values():
            value.data.mul_(0.5)


class Net(pl.LightningModule):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = Inner()
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.mine = list(self.parameters())
        self.function = lambda x: x
        self.error = MeanSquaredError()
        self.mean = MeanMetric()
        self.kept = MeanMetric()
        self.epochs_seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.inner(self.frozen(x))
        loss = mse_loss(out, y)
        self.mean.update(loss.detach(), weight=len(x))
        self.kept.update(out.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.inner(self.frozen(x))
        self.error.update(out, y)
        self.log("error", self.error)
        self.log("val", mse_loss(out, y), prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.epochs_seen.append(self.current_epoch)
        self.last = {"epoch": self.current_epoch}
        self.mean_of_epoch = float(self.mean.compute())
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        used = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.hparams.optimizer == "adamw":
            optimizer: Any = torch.optim.AdamW([{"params": used[:2], "weight_decay": 0.1}, {"params": used[2:], "weight_decay": 0.0}], 1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}]
        optimizer = torch.optim.SGD(used, 1e-2, momentum=0.9)
        if self.hparams.optimizer == "locked":
            lock = threading.Lock()
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 if lock.locked() else 1.0)]
        if self.hparams.optimizer == "lambda":
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
        if self.hparams.optimizer == "onecycle":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


def make_strategy(engine: str) -> dict[str, Any]:
    if engine == "plain":
        return {"strategy": "auto", "devices": 1}
    return {"strategy": AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB")}


def train(engine: str, root: Path, *, optimizer: str = "adamw", module: Any = None, **options: Any) -> tuple[Any, Any, list[str]]:
    """A Trainer after ``fit``, its module, and the warnings that ``fit`` gave."""
    pl.seed_everything(3, verbose=False)
    net = module or Net(optimizer)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=1,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        **make_strategy(engine),
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    with warnings.catch_warnings(record=True) as caught, looked_at_once("back to the script"):
        warnings.simplefilter("always")
        trainer.fit(net, datamodule=Data())
    return trainer, net, [str(warning.message) for warning in caught if "could not be brought back" in str(warning.message)]


def script(engine: str, root: Path) -> dict[str, Any]:
    """An ordinary script, and all that its author could look at after ``fit``."""
    pl.seed_everything(3, verbose=False)
    net, data = Net(), Data()
    epochs: list[int] = []
    rows: list[Any] = []
    keeper = Keeper(net, epochs)
    stop = EarlyStopping("val", patience=1, min_delta=1.0)
    best = ModelCheckpoint(root, monitor="val", save_top_k=2, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        log_every_n_steps=1,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[CSVLogger(root, "csv"), Memory(rows)],
        callbacks=[keeper, stop, best],
        **make_strategy(engine),
    )
    parameters = dict(net.named_parameters())
    shadow = keeper.shadow["first.weight"]
    trainer.fit(net, datamodule=data)
    after = torch.rand(()), random.random()
    trainer.save_checkpoint(root / "after.ckpt")
    saved = torch.load(root / "after.ckpt", weights_only=False)
    saved.pop("callbacks")
    csv: Any = trainer.loggers[0]
    optimizer: Any = trainer.optimizers[0]
    return {
        "identity": {
            "parameters": [value is parameters[name] for name, value in net.named_parameters()],
            "module": [keeper.module is net, trainer.model is net, trainer.lightning_module is net, net.trainer is trainer],
            "mine": [one is other for one, other in zip(net.mine, net.parameters(), strict=True)],
            "script's": [keeper.epochs is epochs, trainer.loggers[1].rows is rows, keeper.shadow["first.weight"] is shadow],
            "alias": [keeper.alias is keeper.note, keeper.seen["note"] is keeper.note],
            "in the optimizer": [any(p is q for q in net.parameters()) for group in optimizer.param_groups for p in group["params"]],
            "callbacks": [trainer.early_stopping_callback is stop, trainer.checkpoint_callback is best, keeper in trainer.callbacks],
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.optimizer is optimizer,
            "data": [trainer.train_dataloader.dataset is data.data, trainer.val_dataloaders.dataset is data.data],
        },
        "weights": dict(net.state_dict()),
        "buffers": dict(net.named_buffers()),
        "calls": net.inner.calls,
        "flags": [(p.requires_grad, p.dtype, p.device.type, type(p).__name__) for p in net.parameters()],
        "training": [submodule.training for submodule in net.modules()],
        "metrics": [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)],
        "best": [best.best_model_path, best.best_model_score, best.best_k_models, best.last_model_path, best.kth_best_model_path],
        "stop": [stop.stopped_epoch, stop.best_score, stop.wait_count],
        "counters": [trainer.current_epoch, trainer.global_step, trainer.num_training_batches, trainer.num_val_batches],
        "state": [trainer.should_stop, trainer.state.status.value, str(trainer.state.fn), str(trainer.state.stage)],
        "estimated": trainer.estimated_stepping_batches,
        "csv": [csv.version, csv.log_dir, (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0], len(csv.experiment.metrics)],
        "rows": rows,
        "kept": [epochs, keeper.mixed[1:], keeper.note.text, keeper.note.values, keeper.seen["step"], keeper.shadow],
        "module's": [net.epochs_seen, net.last, net.mean_of_epoch],
        "data's": [data.stages, len(data.data)],
        "metric objects": [net.kept.compute(), net.error._update_count, net.mean._update_count],
        "optimizers": [optimizer.state_dict(), type(optimizer).__name__],
        "schedulers": [trainer.lr_scheduler_configs[0].scheduler.state_dict(), trainer.lr_scheduler_configs[0].interval],
        "random": after,
        "saved": saved,
        "hyperparameters": dict(net.hparams),
    }


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{name}.{key}")
        yield f"{name} keys", list(value)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
        yield f"{name} length", len(value)
    else:
        yield name, value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-5, atol=1e-5)
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-5, abs=1e-5)
    return bool(one == other)


def differences(one: Any, other: Any) -> list[str]:
    left, right = dict(leaves(one)), dict(leaves(other))
    names = dict.fromkeys([*left, *right])
    return [f"{name}: {left.get(name)!r} != {right.get(name)!r}" for name in names if not same(left.get(name), right.get(name))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plain")
    return relative(script("plain", root), root)


def relative(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        return {relative(key, root): relative(item, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [relative(item, root) for item in value]
    return value.replace(str(root), "") if isinstance(value, str) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_sees_after_fit_what_it_sees_after_plain_lightning(plain: dict[str, Any], engine: str, tmp_path: Path) -> None:
    assert not differences(plain, relative(script(engine, tmp_path), tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["onecycle", "plateau", "lambda"])
def test_schedulers_and_momentum_come_back(optimizer: str, engine: str, tmp_path: Path) -> None:
    expected, _, _ = train("plain", tmp_path, optimizer=optimizer)
    trainer, net, lost = train(engine, tmp_path, optimizer=optimizer)
    assert not lost
    for one, other in ((expected, trainer),):
        states = [[each.optimizers[0].state_dict(), each.lr_scheduler_configs[0].scheduler.state_dict()] for each in (one, other)]
        assert not differences(*states)
    state = trainer.optimizers[0].state[net.inner.second.weight]
    assert state["momentum_buffer"].shape == net.inner.second.weight.shape
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.optimizer is trainer.optimizers[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_scheduler_that_cannot_be_pickled_is_named_as_left_behind(engine: str, tmp_path: Path) -> None:
    trainer, net, lost = train(engine, tmp_path, optimizer="locked")
    assert len(lost) == 1
    assert "the learning-rate schedulers" in lost[0]
    assert "optimizers" not in lost[0]
    assert "momentum_buffer" in trainer.optimizers[0].state[net.inner.second.weight]
    assert trainer.lr_scheduler_configs == []


class Two(Net):
    """Manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(mse_loss(self.inner(self.frozen(x)), y))
            optimizer.step()
        self.mean.update(1.0)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.inner.first.parameters(), 1e-2, momentum=0.9)
        self.own = torch.optim.AdamW([*self.inner.norm.parameters(), *self.inner.second.parameters()], 1e-3)
        return [first, self.own]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_two_optimizers_come_back_and_the_modules_own_reference_with_them(engine: str, tmp_path: Path) -> None:
    expected, _, _ = train("plain", tmp_path, module=pl.seed_everything(3, verbose=False) and Two())
    trainer, net, lost = train(engine, tmp_path, module=pl.seed_everything(3, verbose=False) and Two())
    assert not lost
    assert not differences(*([optimizer.state_dict() for optimizer in each.optimizers] for each in (expected, trainer)))
    assert net.own is trainer.optimizers[1]


class Lookahead(torch.optim.Optimizer):
    """As packages write it: it doesn't call torch's ``__init__``, and its state is the inner one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]  # as some of them are
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, defaultdict(dict)
        self.calls = 0
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            if self.calls % 2 == 0:
                torch._foreach_lerp_(slow, group["params"], 0.5)
                torch._foreach_copy_(group["params"], slow)
        return loss

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Ahead(Net):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_optimizer_around_another_one_comes_back_with_it(engine: str, tmp_path: Path) -> None:
    expected, theirs, _ = train("plain", tmp_path, module=pl.seed_everything(3, verbose=False) and Ahead())
    trainer, net, lost = train(engine, tmp_path, module=pl.seed_everything(3, verbose=False) and Ahead())
    (found,) = trainer.optimizers
    assert type(found) is Lookahead
    assert type(found.inner) is torch.optim.AdamW
    assert found.calls == expected.optimizers[0].calls
    assert all("optimizer.slow" in words for words in lost)  # which are shards
    torch.testing.assert_close(net.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)
    assert not differences(*([optimizer.state_dict()["state"] for optimizer in each.optimizers] for each in (expected, trainer)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["plain", *ENGINES])
def test_weights_of_bf16_true_come_back_in_bf16(engine: str, tmp_path: Path) -> None:
    _, net, lost = train(engine, tmp_path, precision="bf16-true")
    assert not lost
    assert net.inner.first.weight.dtype == net.inner.hidden.dtype == net.dtype == torch.bfloat16


class Hoarder(pl.Callback):
    """Holds what no pickle takes, and much data."""

    def __init__(self) -> None:
        self.data = torch.zeros(250 * 2**18)
        self.lock = threading.Lock()
        self.file = open(__file__, encoding="utf-8")  # noqa: SIM115
        self.function = lambda: None
        self.stream = (index for index in range(3))
        self.text = [f"{index}" for index in range(1000)]

    def __del__(self) -> None:
        self.file.close()


@pytest.mark.filterwarnings("ignore")
class Described(Net):
    """Writes more than tensors into its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "_metadata": {"width": 4}}


def test_what_did_not_change_is_not_named_and_costs_little(tmp_path: Path) -> None:
    def spent(*callbacks: pl.Callback) -> float:
        begin = processor_seconds()
        assert train("ddp", tmp_path, callbacks=[*callbacks], module=Described())[2] == []
        return processor_seconds() - begin

    spent(Keeper(Net(), []))
    hoarder = Hoarder()
    # Some 0.4 more, of three processes together; the lesser of two, as a child of an earlier test may be reaped meanwhile.
    assert min(spent(hoarder), spent(hoarder)) < spent() + 3


class Breaker(Hoarder):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.data[7] = 1
        self.function = lambda: 1
        self.text.append("new")
        self.stream = (index for index in range(4))


@pytest.mark.filterwarnings("ignore")
def test_what_can_not_come_back_is_named_in_one_warning(tmp_path: Path) -> None:
    breaker = Breaker()
    function = breaker.function
    _, _, lost = train("ddp", tmp_path, callbacks=[breaker])
    assert len(lost) == 1
    assert "Breaker.data, Breaker.stream (" in lost[0]
    assert breaker.text[-1] == "new"
    assert breaker.function is not function
    assert breaker.function() == 1


class Averages(pl.Callback):
    """Keeps on one rank what it finds of the weights: under FSDP2 its shards, which are nobody's weights."""

    kept: Any = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.kept = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}


@pytest.mark.filterwarnings("ignore")
def test_shards_that_a_callback_keeps_on_one_rank_are_named(tmp_path: Path) -> None:
    averages = Averages()
    _, _, lost = train("fsdp", tmp_path, callbacks=[averages])
    assert len(lost) == 1
    assert "Averages.kept (" in lost[0]
    assert averages.kept is None


class Tracker(Net):
    def configure_callbacks(self) -> Any:
        self.stop = EarlyStopping("val")
        return [self.stop]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["plain", "ddp"])
def test_callbacks_of_the_module_are_the_trainers_afterwards(engine: str, tmp_path: Path) -> None:
    trainer, net, lost = train(engine, tmp_path, module=Tracker())
    assert not lost
    assert trainer.early_stopping_callback is net.stop
    assert net.stop.best_score == trainer.callback_metrics["val"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_fit_goes_on_as_under_plain_lightning(engine: str, tmp_path: Path) -> None:
    results = []
    for each in ("plain", engine):
        trainer, net, _ = train(each, tmp_path)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(net, datamodule=trainer.datamodule)
        validated = trainer.validate(net, datamodule=trainer.datamodule, verbose=False)
        results.append([dict(net.state_dict()), trainer.global_step, trainer.current_epoch, validated, net.epochs_seen])
    assert results[0][1] == 15
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loaders_own_generator_and_the_global_ones_go_on(engine: str, tmp_path: Path) -> None:
    results = []
    for each in ("plain", engine):
        pl.seed_everything(3, verbose=False)
        net = Net()
        data = Data()
        data.setup("fit")
        loader = DataLoader(data.data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, barebones=False, **make_strategy(each)
        )
        trainer.fit(net, loader)
        results.append([torch.rand(3, generator=loader.generator), torch.rand(3), random.random(), dict(net.state_dict())])
        assert trainer.train_dataloader is loader
    assert not differences(*results)


class Odd(pl.LightningModule):
    """Keeps what has no pickle, or only an unsafe one, in every place that comes back."""

    def __init__(self, *, optimizer: bool) -> None:
        super().__init__()
        self.net, self.has_optimizer = nn.Linear(4, 1), optimizer
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        class Local(list[int]):
            pass

        self.made, self.kind = Local([1]), Local
        self.seen += 1
        loss = mse_loss(self.net(batch[0]), batch[1])
        if self.has_optimizer:
            group = self.trainer.optimizers[0].param_groups[0]
            group["lr"], group["odd"] = np.float64(0.05), Local([2])
        return loss if self.has_optimizer else loss.detach()

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return threading.Lock()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9) if self.has_optimizer else None


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", [True, False])
def test_what_has_no_pickle_costs_nothing_but_itself(engine: str, optimizer: bool, tmp_path: Path) -> None:
    expected, module = Odd(optimizer=optimizer), Odd(optimizer=optimizer)
    module.load_state_dict(expected.state_dict())
    if not optimizer:
        expected.automatic_optimization = module.automatic_optimization = False
    x = torch.randn(16, 4)
    trainers = {}
    for each, how in ((expected, "plain"), (module, engine)):
        trainers[how] = pl.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, accelerator="cpu", **make_strategy(how),
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainers[how].fit(each, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    (said,) = [str(each.message) for each in caught if "brought back" in str(each.message)]
    assert "module.made" in said
    assert "module.kind" in said
    assert ("odd" in said) == optimizer, "the optimizer's own, too"
    assert int(module.seen) == 4
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    if optimizer:
        state, theirs = (trainers[how].optimizers[0].state_dict()["state"] for how in (engine, "plain"))
        torch.testing.assert_close(state, theirs, rtol=1e-5, atol=1e-6)
        assert type(trainers[engine].optimizers[0].param_groups[0]["lr"]) is np.float64


def test_what_predict_returns_is_named_where_it_has_no_pickle(tmp_path: Path) -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu",
                         **make_strategy("ddp"))  # fmt: skip
    with pytest.warns(UserWarning, match=r"brought back.*what the trainer's function returned"):
        assert trainer.predict(Odd(optimizer=True), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)) is None


class BuiltInSetup(pl.LightningModule):
    """Builds its layers when it knows the data, and fills an attribute that ``setup`` makes."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.Linear(len(self.trainer.datamodule.data[0][0]), 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_layers_that_setup_builds_come_back(engine: str, tmp_path: Path) -> None:
    trainer, net, lost = train(engine, tmp_path, module=BuiltInSetup())
    _, plain, _ = train("plain", tmp_path, module=BuiltInSetup())
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))
    assert net.seen == plain.seen == 2 * list(range(5))
    assert set(map(id, net.parameters())) == {id(each) for group in trainer.optimizers[0].param_groups for each in group["params"]}
    assert lost == []


class RegisteredInSetup(pl.LightningModule):
    """Has a layer, and gets tensors of its own when it knows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shift = nn.Linear(4, 1), 0.0

    def setup(self, stage: str) -> None:
        del self.shift
        self.register_buffer("shift", self.trainer.datamodule.data[:][0].mean(0))
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.net.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return mse_loss(self.net(batch[0] - self.shift) * self.net.scale, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_tensors_that_setup_registers_come_back(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    start = RegisteredInSetup().state_dict()
    found = {}
    for each in ("plain", engine):
        module = RegisteredInSetup()
        module.load_state_dict(start)
        _, found[each], lost = train(each, tmp_path, module=module)
        assert lost == []
    net, plain = found[engine], found["plain"]
    assert list(net.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))
    assert int(net.steps) == int(plain.steps) == 10
    assert "shift" not in vars(net)


class Growing(BuiltInSetup):
    """Puts modules into one of its own as it trains, as a metric for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = nn.ModuleList()

    def on_train_epoch_start(self) -> None:
        self.errors.append(MeanSquaredError())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.errors[-1].update(self.net(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_modules_that_a_run_adds_come_back(engine: str, tmp_path: Path) -> None:
    _, net, lost = train(engine, tmp_path, module=Growing())
    _, plain, _ = train("plain", tmp_path, module=Growing())
    torch.testing.assert_close([each.compute() for each in net.errors], [each.compute() for each in plain.errors])
    assert lost == []


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class WrappedInSetup(BuiltInSetup):
    """Puts its layers into a wrapper under their own name, as PEFT's adapters and ``torch.compile`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def setup(self, stage: str) -> None:
        self.net, self.seen = Scaled(self.net), []


class Wrapping(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net = Scaled(pl_module.net)


class Wrapped(WrappedInSetup):
    def setup(self, stage: str) -> None:
        self.seen = []


@pytest.mark.parametrize(
    ("engine", "kind", "callbacks"), [("ddp", WrappedInSetup, []), ("fsdp", WrappedInSetup, []), ("fsdp", Wrapped, [Wrapping()])]
)
def test_layers_that_setup_wraps_come_back_in_their_wrapper(engine: str, kind: Any, callbacks: list[Any], tmp_path: Path) -> None:
    module = kind()
    _, net, lost = train(engine, tmp_path, module=copy.deepcopy(module), callbacks=callbacks)
    _, plain, _ = train("plain", tmp_path, module=module, callbacks=callbacks)
    assert [type(each) for each in net.modules()][2:] == [type(each) for each in plain.modules()][2:]
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))
    assert net.seen == plain.seen
    assert lost == []


class BuiltElsewhere(BuiltInSetup):
    def __init__(self) -> None:
        super().__init__()
        self.script = os.getpid()

    def setup(self, stage: str) -> None:
        if os.getpid() == self.script:
            raise OSError("the vocabulary is gone")
        super().setup(stage)
        self.net.lock = threading.Lock()


def test_a_setup_that_fails_afterwards_is_told(tmp_path: Path) -> None:
    """A network that can't be pickled is to be built by ``setup`` here, too."""
    _, net, lost = train("fsdp", tmp_path, module=BuiltElsewhere())
    assert "what BuiltElsewhere.setup builds, which failed in this process (OSError: the vocabulary is gone)" in lost[0]
    assert net.seen == 2 * list(range(5))
