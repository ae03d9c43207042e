from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.data.batch_structure import take_rows
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, share_of
from lightning_autopar.exact.logs.metrics_over_ranks import hold_metrics
from lightning_autopar.exact.logs.self_log import GlobalLogging
from tests.ranks import run_ranks
from tests.work import counted


class SplitDDP(DDPStrategy):
    """DDP whose ranks each take their rows of the loader's batch, with the module's logging made global."""

    current: BatchShare | None = None
    logging: GlobalLogging

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.logging = GlobalLogging(trainer, lambda: self.current)
        self.logging.install()

    def teardown(self) -> None:
        self.logging.uninstall()
        super().teardown()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        of, batch = take_rows(batch, self.global_rank, Dealing.even(self.world_size))
        self.current = share_of(of, self.global_rank, Dealing.even(self.world_size))
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.logging.step():
            output = super().training_step(*args, **kwargs)
            self.logging.note_loss(output)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.logging.step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.logging.step():
            return super().test_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.current is not None
        return super().backward(closure_loss * self.current.weight, *args, **kwargs)


class Module(pl.LightningModule):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.val_accuracy = MulticlassAccuracy(3, average="micro")
        self.mean = MeanMetric()
        self.auroc = BinaryAUROC()
        self.collection = MetricCollection({"a": MulticlassAccuracy(3, average="micro"), "p": MulticlassPrecision(3)}, prefix="set_")
        self.read: list[Any] = []
        self.losses: list[float] = []

    def compute(self, batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.layer(x)
        return logits, y, nn.functional.cross_entropy(logits, y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits, y, loss = self.compute(batch)
        correct = (logits.argmax(-1) == y).float()
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_epoch=True, sync_dist=True)
        self.log("correct", correct.sum(), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"largest": logits.max(), "first": -logits.min().double()}, reduce_fx=torch.max, on_epoch=True)
        self.log("smallest", logits.min(), reduce_fx=min, on_epoch=True, on_step=False)
        self.log("one", loss, batch_size=1, on_epoch=True)
        self.log("constant", loss, batch_size=5, on_epoch=True)
        self.log("sized", loss, batch_size=len(y), on_epoch=True)
        self.log("index", float(batch_idx), on_epoch=True)
        self.log("twice", correct.mean(), on_epoch=True)
        self.log("twice", loss, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", loss)
        self.read.append("loss" in self.trainer.callback_metrics)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean(loss, weight=len(y))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict({f"step_{name}": value for name, value in self.collection(logits, y).items()})
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.layer.weight.grad is not None
        self.log("norm", self.layer.weight.grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean_input", batch[0].mean(), on_step=True, on_epoch=True)
        self.read.append(float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))
        self.log("epoch_accuracy", self.accuracy.compute(), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, y, loss = self.compute(batch)
        self.log("val_loss", loss)
        self.val_accuracy.update(logits, y)
        if dataloader_idx == 0:
            self.auroc.update(logits.softmax(-1)[:, 0], (y == 0).long())
            self.log("val_auroc", self.auroc)
        self.losses += [float(loss)] * len(y)

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", self.val_accuracy.compute())
        self.val_accuracy.reset()
        self.log("ready", 1.0, sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, _, loss = self.compute(batch)
        self.log("test_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return LossDriven(self.parameters(), lr=0.1)


class LossDriven(torch.optim.SGD):
    """Chooses its steps by the loss, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.param_groups[0]["lr"] = 0.1 * float(loss)
        super().step()
        return loss


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float]]] = []

    def record(self, hook: str, trainer: pl.Trainer) -> None:
        values = {**trainer.callback_metrics, **{f"bar {name}": value for name, value in trainer.progress_bar_metrics.items()}}
        self.seen.append((hook, {name: float(value) for name, value in values.items()}))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.record("batch end", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.record("validation end", trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.record("end", trainer)


class MemoryLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((step, dict(metrics)))


def loader(samples: int, batch_size: int, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()), batch_size=batch_size)


def trainer_of(rank: int, world_size: int, *callbacks: pl.Callback, logger: Any = False, **arguments: Any) -> pl.Trainer:
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", WORLD_SIZE=str(world_size), NODE_RANK="0", LOCAL_RANK=str(rank))
        arguments |= {"strategy": SplitDDP(process_group_backend="gloo"), "use_distributed_sampler": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    return pl.Trainer(accelerator="cpu", devices=world_size, callbacks=list(callbacks), logger=logger, **{**quiet, **arguments})


def run_module(rank: int, world_size: int, samples: int, batch_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, recorder, logger = Module(), Recorder(), MemoryLogger()
    trainer = trainer_of(rank, world_size, recorder, logger=logger, max_epochs=2)
    trainer.fit(module, loader(samples, batch_size), [loader(samples, batch_size, 1), loader(7, 4, 2)])
    tested = trainer.test(module, loader(samples, batch_size, 3), verbose=False)
    left = "on_train_epoch_end" in module.__dict__
    return {"seen": recorder.seen, "logged": logger.seen, "tested": tested, "read": module.read, "left": left}


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers to 1e-6."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(actual[name], value, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6), where
    else:
        assert actual == expected, where


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("world_size", "samples"), [(2, 13), (2, 11), (3, 11)], ids=["ragged", "empty rank", "three ranks"])
def test_everything_logged_is_what_one_device_logs(world_size: int, samples: int) -> None:
    (single,) = run_ranks(run_module, 1, samples, 5)
    for rank, result in enumerate(run_ranks(run_module, world_size, samples, 5)):
        assert len(result["seen"]) > 8
        if rank:  # Lightning gives the logger's calls to rank 0 alone
            result["logged"] = single["logged"]
        assert_same(result, single, f"rank {rank}")


class Disagreeing(pl.LightningModule):
    """Logs other things on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.mean, self.other = MeanMetric(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rank = torch.distributed.get_rank()
        names = ["a", "b", "c"] if rank == 0 else ["c", "a"]
        for name in names:
            self.log(name, float(batch[0].shape[0] * (rank + 1)), on_epoch=True)
        if rank == 1:
            self.log("only", 7.0, on_step=True, on_epoch=True)
            self.mean.update(3.0)
            self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.other.update(float(rank))
        self.log("other", self.other, on_step=False, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("zero", 5.0, rank_zero_only=True)
        return self.layer(batch[0]).mean()

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("end", 4.0)
        self.log("monitored", float(torch.distributed.get_rank() + self.current_epoch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_disagreeing(rank: int, world_size: int, samples: int, folder: str) -> dict[str, Any]:
    recorder = Recorder()
    stopping = EarlyStopping("monitored", patience=1, mode="min")
    checkpoint = ModelCheckpoint(folder, "{epoch}-{monitored:.4f}", monitor="monitored", save_top_k=2)
    trainer = trainer_of(rank, world_size, recorder, stopping, checkpoint, max_epochs=5, enable_checkpointing=True)
    trainer.fit(Disagreeing(), loader(samples, 5))
    score = float(checkpoint.best_model_score or -1)
    return {"seen": recorder.seen, "epochs": trainer.current_epoch, "best": checkpoint.best_model_path, "score": score}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("samples", [13, 6], ids=["ragged", "empty rank"])
def test_ranks_that_log_different_names(tmp_path: Any, samples: int) -> None:
    first, second = run_ranks(run_disagreeing, 2, samples, str(tmp_path))
    for hook, values in first["seen"]:
        values.pop("zero", None)
        values.pop("zero_step", None)
        assert hook
    assert_same(second, first)
    steps = [values for hook, values in first["seen"] if hook == "batch end"]
    assert steps[0]["a_step"] == pytest.approx((3 * 3 + 2 * 4) / 5)
    assert steps[0]["b_step"] == 3
    assert steps[0]["only_step"] == 7
    end = first["seen"][-1][1]
    assert end["only_epoch"] == 7
    assert end["metric"] == 3
    assert end["end"] == 4
    # Σ rows · value: 3·3 + 2·4 for five samples, 2·2 + 1·2 for three, 1·1 for one
    assert end["a_epoch"] == pytest.approx((17 + 17 + 6) / 13 if samples == 13 else (17 + 1) / 6)
    assert first["epochs"] == 2, "EarlyStopping stops all ranks after the second epoch"
    assert first["score"] == pytest.approx(5 / 13 if samples == 13 else 2 / 6), "weighted by the epoch's samples"


def run_installation(rank: int, world_size: int) -> dict[str, Any]:
    trainer, module = trainer_of(rank, world_size), Module()
    strategy = trainer.strategy
    strategy._lightning_module = module
    logging = GlobalLogging(trainer, lambda: None)
    results = trainer.fit_loop.epoch_loop._results
    before = (dict(trainer._logger_connector.__dict__), dict(results.__dict__), set(module.__dict__))
    metric = dict(module.accuracy.__dict__)
    logging.install()
    logging.install()
    changed = module.accuracy.dist_sync_on_step and "log" in results.__dict__
    copied = copy.deepcopy(module.accuracy)
    loaded = pickle.loads(pickle.dumps(module.accuracy))
    copied.update(torch.tensor([0, 1]), torch.tensor([0, rank]))
    together = float(copied.compute())
    logging.uninstall()
    return {
        "changed": changed,
        "together": together,
        "copied": copied._sync_dist.__self__ is copied and loaded._sync_dist.__self__ is loaded,
        "restored": before == (dict(trainer._logger_connector.__dict__), dict(results.__dict__), set(module.__dict__)),
        "metric": metric.keys() == module.accuracy.__dict__.keys() and not module.accuracy.dist_sync_on_step,
    }


def test_install_and_uninstall() -> None:
    (single,) = run_ranks(run_installation, 1)
    assert not single["changed"]
    assert single["restored"]
    first, second = run_ranks(run_installation, 2)
    for result in (first, second):
        # Of class 0's three samples two are found, and class 1's only one.
        assert result["together"] == pytest.approx((2 / 3 + 1) / 2)
        assert result["changed"]
        assert result["copied"]
        assert result["restored"]
        assert result["metric"]


def test_hold_metrics() -> None:
    collection = MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)])
    module = nn.ModuleDict({"mean": MeanMetric(), "auroc": BinaryAUROC(), "set": collection})
    module["mean"].update(2.0)
    update = module["mean"].update
    with hold_metrics(module):
        module["mean"](5.0)
        module["mean"].update(5.0)
        module["auroc"].update(torch.rand(2), torch.tensor([0, 1]))
        module["set"].update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert module["mean"].compute() == 2
    assert module["mean"].update is update
    assert not module["auroc"].update_called
    assert not module["set"]._groups_checked
    module["set"].update(torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert module["set"].compute()["MulticlassAccuracy"] == pytest.approx(1)


class Ragged(Metric):
    """List states without a reduction, one entry a sample, and a mean that ranks' samples weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", default=[], dist_reduce_fx=None)
        self.add_state("level", default=torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, x: Tensor) -> None:
        self.samples += list(x)
        self.level = x.mean()

    def compute(self) -> Tensor:
        return torch.stack([torch.stack(self.samples).sum(), self.level])


def run_ragged(rank: int, world_size: int) -> tuple[Tensor, bool]:
    trainer, module = trainer_of(rank, world_size), pl.LightningModule()
    module.metric = Ragged()
    trainer.strategy._lightning_module = module
    logging = GlobalLogging(trainer, lambda: None)
    logging.install()
    if rank == 0:
        module.metric.update(torch.tensor([1.0, 2.0, 3.0]))
    elif rank == 1:
        module.metric.update(torch.tensor([8.0]))
    return module.metric.compute(), len(module.metric.samples) == [3, 1, 0][rank]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_metric_states_of_unequal_lengths() -> None:
    for values, unsynced in run_ranks(run_ragged, 3):
        assert values.tolist() == [14.0, 5.0]
        assert unsynced


def run_overhead(rank: int, world_size: int) -> int:
    trainer, module = trainer_of(rank, world_size), Disagreeing()
    strategy = trainer.strategy
    strategy._lightning_module = module
    module._trainer = trainer
    logging = GlobalLogging(trainer, lambda: BatchShare(rows=2, of=4, rank=rank, world_size=world_size))
    logging.install()
    trainer.state.fn, trainer.training = pl.trainer.states.TrainerFn.FITTING, True
    connector = trainer._logger_connector
    for _ in range(3):
        connector.on_batch_start([torch.zeros(2, 4)])
        torch.distributed.barrier()
        module._current_fx_name = "training_step"
        step = logging.step()
        step.__enter__()
        for name in ("a", "b", "c"):
            module.log(name, 1.0, on_epoch=True)
        _, calls = counted(step.__exit__, None, None, None)
    return calls


def test_overhead_of_a_step() -> None:
    assert max(run_ranks(run_overhead, 2)) < 150, "the exchange's own work is about 0.3 ms; waiting for the other rank comes on top"


class Hidden(pl.LightningModule):
    """Logs by a name that isn't in its step's code."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.verb = nn.Linear(3, 1), "log"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        getattr(self, self.verb)("hidden", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_hidden(strategy: Any) -> dict[str, float]:
    pl.seed_everything(1, verbose=False)
    module, data = Hidden(), DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=8)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **quiet)
    trainer.fit(module, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_log_that_no_code_told_of_is_told_and_the_epochs_value_is_right() -> None:
    with pytest.raises(UserWarning, match="by code that planning didn't find in it"):  # tests make warnings errors
        fit_hidden(AutoParallelStrategy(allow=["ddp"], devices="2xcpu:1GiB"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="autopar: training_step logs values")
        ours = fit_hidden(AutoParallelStrategy(allow=["ddp"], devices="2xcpu:1GiB"))
    assert ours == pytest.approx(fit_hidden("auto"), rel=1e-5)
