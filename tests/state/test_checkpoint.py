"""Checkpoints of every engine: ordinary files that every engine and plain Lightning go on from, at any batch."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.state.checkpoint import KEY
from tests.planned import looked_at_once
from tests.processes import lean_path
from tests.state.tied import Tied

ENGINES = ("single", "ddp", "fsdp")
STAGED = (*ENGINES, "pipeline")
#: Writer and reader, with a pipeline on either side.
PIPELINE_PAIRS = [("pipeline", reader) for reader in STAGED] + [(writer, "pipeline") for writer in ENGINES]
#: Batches an epoch and epochs.
BATCHES, EPOCHS = 5, 2


def data(*, shuffle: bool = True) -> dict[str, Any]:
    x = torch.randn(4 * BATCHES - 1, 6, generator=torch.Generator().manual_seed(2))  # the last batch is smaller
    dataset = TensorDataset(x, x.flip(1))
    return {"train_dataloaders": DataLoader(dataset, batch_size=4, shuffle=shuffle), "val_dataloaders": DataLoader(dataset, batch_size=7)}


def strategy(engine: str) -> dict[str, Any]:
    if engine == "plain":
        return {"strategy": "auto", "devices": 1}
    return {"strategy": AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB")}


def fit(engine: str, root: Path, *, ckpt_path: Any = None, module: Any = None, weights_only: Any = None, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(11, verbose=False)
    net = module or Tied()
    options = {"max_epochs": EPOCHS, "callbacks": [], "enable_checkpointing": bool(options.get("callbacks")), **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **strategy(engine),
        **options,
    )
    with warnings.catch_warnings(), looked_at_once("checkpoints", net.hparams.dropout > 0):
        warnings.simplefilter("ignore")
        trainer.fit(net, **data(shuffle=net.hparams.dropout > 0), ckpt_path=ckpt_path, weights_only=weights_only)
    return trainer, net


def outcome(trainer: Any, net: Any) -> dict[str, Any]:
    return {**net.state_dict(), **{f"metric {name}": value for name, value in trainer.callback_metrics.items() if name != "train_step"}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def scratch() -> Path:
    """A folder for the session; workers and planning children leave without Python's exit, so only this process removes it."""
    path = Path(mkdtemp(prefix="autopar-test-"))
    atexit.register(shutil.rmtree, path, True)
    return path


@cache
def whole() -> dict[str, Any]:
    """The uninterrupted run of plain Lightning."""
    return outcome(*fit("plain", scratch()))


@cache
def steps(engine: str) -> Path:
    """A folder with a checkpoint after each training step."""
    root = scratch()
    every = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(engine, root, callbacks=[every], max_epochs=2)
    return root


@cache
def epochs(engine: str) -> Path:
    """A checkpoint at the end of the first epoch, after its validation."""
    root = scratch()
    every = ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    fit(engine, root, callbacks=[every], max_epochs=2)
    return root / "epoch=0.ckpt"


@pytest.mark.parametrize(
    ("step", "writer", "reader"),
    [(step, writer, reader) for step in (3, 5, 8) for writer in ENGINES for reader in ENGINES]
    + [(3 if writer == reader else 8, writer, reader) for writer, reader in PIPELINE_PAIRS],
)
def test_going_on_in_the_middle_of_an_epoch_is_the_uninterrupted_run(step: int, writer: str, reader: str, tmp_path: Path) -> None:
    trainer, net = fit(reader, tmp_path, ckpt_path=steps(writer) / f"step={step}.ckpt")
    assert trainer.global_step == EPOCHS * BATCHES
    assert_same(whole(), outcome(trainer, net))
    assert net.seen["mine"] == ("Tensor", (6, 6))
    assert net.seen["type"] == "Tensor"


class Recorder(pl.Callback):
    """Each epoch's and each validation's metrics, and the learning rate."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append(("validation", trainer.global_step, float(trainer.callback_metrics["val"])))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append(("epoch", trainer.current_epoch, rate, metrics))


class Plateau(Tied):
    """With a validation in the middle of an epoch, a scheduler that waits for a plateau, and a metric object."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__(dropout)
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.error.update(self.embed(batch[0]), batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 1e-1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


OPTIONS = {"val_check_interval": 2, "max_epochs": 3}


@cache
def plateau(engine: str) -> tuple[Path, dict[str, Any], list[Any]]:
    root, recorder = scratch(), Recorder()
    every = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    pl.seed_everything(11, verbose=False)
    trainer, net = fit(engine, root, module=Plateau(), callbacks=[recorder, every], **OPTIONS)
    return root, outcome(trainer, net), recorder.rows


@pytest.mark.parametrize(
    ("step", "engine"), [*((step, engine) for step in (6, 7, 9, 10) for engine in ENGINES), (7, "pipeline"), (9, "pipeline")]
)
def test_validations_epoch_means_and_plateaus_are_those_of_the_uninterrupted_run(step: int, engine: str, tmp_path: Path) -> None:
    _, expected, rows = plateau("plain")
    recorder = Recorder()
    pl.seed_everything(11, verbose=False)
    trainer, net = fit(
        engine, tmp_path, module=Plateau(), callbacks=[recorder], ckpt_path=plateau(engine)[0] / f"step={step}.ckpt", **OPTIONS
    )
    assert_same(expected, outcome(trainer, net))
    rest = rows[-len(recorder.rows) :]
    first = recorder.rows[0]
    assert first[:2] == {6: ("validation", 7), 7: ("validation", 7), 9: ("validation", 9), 10: ("epoch", 1)}[step]
    for one, other in zip(rest, recorder.rows, strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=1e-5)
        if one[0] == "epoch":
            assert one[3] == pytest.approx(other[3], rel=1e-4)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [*((writer, reader) for writer in ("plain", *ENGINES) for reader in ("plain", *ENGINES)), ("pipeline", "plain"), ("plain", "pipeline")],
)
def test_going_on_at_the_end_of_an_epoch_is_the_uninterrupted_run(writer: str, reader: str, tmp_path: Path) -> None:
    if "plain" in (writer, reader):  # plain Lightning knows no random states: without draws it is exact
        expected = outcome(*fit("plain", tmp_path, module=still(), max_epochs=2))
        root = tmp_path / "checkpoints"
        every = ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
        fit(writer, tmp_path, module=still(), callbacks=[every], max_epochs=1)
        assert_same(expected, outcome(*fit(reader, tmp_path, module=still(), ckpt_path=root / "epoch=0.ckpt")))
    else:
        assert_same(whole(), outcome(*fit(reader, tmp_path, ckpt_path=epochs(writer))))


def still() -> Tied:
    pl.seed_everything(11, verbose=False)
    return Tied(dropout=0.0)


def tree(value: Any) -> Any:
    """The structure of a checkpoint: keys, types and shapes."""
    if isinstance(value, dict):
        return {key: tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(item) for item in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.parametrize("engine", STAGED)
def test_a_file_is_built_as_plain_lightnings_is(engine: str) -> None:
    plain, ours = (torch.load(steps(each) / "step=3.ckpt", weights_only=True) for each in ("plain", engine))
    extra = ours.pop(KEY)
    assert_built_alike(plain, ours)
    assert ours["loops"] == plain["loops"]
    assert set(extra) == {"loaders", "boundary", "results", "callback_metrics", "metrics", "parts_per_batch"}


def assert_built_alike(plain: Any, ours: Any) -> None:
    """Two checkpoints but for what callbacks store."""
    for each in (plain, ours):
        each.pop("callbacks")
    assert tree(ours) == tree(plain)
    assert ours["state_dict"]["head.weight"].data_ptr() == ours["state_dict"]["embed.weight"].data_ptr(), "tied weights are stored once"
    for name, value in plain["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-5, atol=1e-5)
    for one, other in zip(plain["optimizer_states"], ours["optimizer_states"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        for position, state in one["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(other["state"][position][name], value, rtol=1e-4, atol=1e-6)


SCRIPT = """
import sys, warnings
sys.modules["lightning_autopar"] = None
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset
from tests.state.tied import Tied

torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(19, 6), torch.randn(19, 6)), batch_size=4)
for path in sys.argv[1:]:
    saved = torch.load(path, weights_only=True)
    module = Tied.load_from_checkpoint(path)
    assert module.head.weight is module.embed.weight
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in module.state_dict().items())
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader, ckpt_path=path)
    assert (trainer.global_step, trainer.current_epoch) == (10, 2), (path, trainer.global_step)
    assert module.count == 10, module.count
"""


def test_plain_lightning_goes_on_where_this_package_is_missing() -> None:
    paths = [str(steps(engine) / f"step={step}.ckpt") for engine in STAGED for step in (3, 8)] + [str(epochs(engine)) for engine in ENGINES]
    command = [sys.executable, "-c", SCRIPT, *paths]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": lean_path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", STAGED)
def test_weights_alone_can_be_saved_and_loaded(engine: str, tmp_path: Path) -> None:
    only = ModelCheckpoint(tmp_path, filename="only", save_weights_only=True)
    trainer, net = fit(engine, tmp_path, callbacks=[only])
    saved = torch.load(tmp_path / "only.ckpt", weights_only=True)
    assert "optimizer_states" not in saved
    loaded = Tied.load_from_checkpoint(tmp_path / "only.ckpt")
    assert_same(dict(net.state_dict()), dict(loaded.state_dict()))
    metrics = trainer.validate(net, data()["val_dataloaders"], verbose=False)
    again = trainer.validate(Tied(), data()["val_dataloaders"], ckpt_path=tmp_path / "only.ckpt", verbose=False)
    assert again[0]["val"] == pytest.approx(metrics[0]["val"], rel=1e-5)
    with pytest.raises(KeyError, match="contains only the model"):
        fit(engine, tmp_path, ckpt_path=tmp_path / "only.ckpt")


class Counting(TorchCheckpointIO):
    """A user's plugin: says where it was used."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def note(self, word: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(word + "\n")

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.note("save")
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: Any = None) -> Any:
        self.note(f"load {weights_only}")
        return super().load_checkpoint(path, map_location, weights_only)


@pytest.mark.parametrize("engine", STAGED)
def test_the_users_plugin_reads_and_writes(engine: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    last = ModelCheckpoint(tmp_path, filename="a", save_on_train_epoch_end=True)
    fit(engine, tmp_path, callbacks=[last], plugins=[Counting(log)], max_epochs=1)
    ranks = 1 if engine == "single" else 2
    assert log.read_text().split("\n")[:-1] == ["save"]
    log.unlink()
    for value in (None, False, True):
        fit(engine, tmp_path, plugins=[Counting(log)], ckpt_path=tmp_path / "a.ckpt", weights_only=value)
    assert log.read_text().split("\n")[:-1] == [f"load {value}" for value in (None, False, True) for _ in range(ranks)]


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_only_refuses_what_plain_refuses(engine: str, tmp_path: Path) -> None:
    saved = torch.load(epochs(engine), weights_only=False)
    saved["something"] = Path("x")
    path = tmp_path / "odd.ckpt"
    torch.save(saved, path)
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        fit(engine, tmp_path, ckpt_path=path, weights_only=True)
    trainer, _ = fit(engine, tmp_path, ckpt_path=path, weights_only=False)
    assert trainer.global_step == 2 * BATCHES
