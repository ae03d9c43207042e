"""From a call of the trainer to a run under a plan: what the parent process sees before, during and after."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_autopar.plans import Plan
from lightning_autopar.strategies.auto import AutoParallelStrategy
from tests.processes import descendants, left_since
from tests.strategies.modules import QUIET, TWO, Regression, loader, trainer, weights

ENGINES = ("single", "ddp", "fsdp")


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)


# -- one device, in this process ---------------------------------------------------------------------------------------------------------


def test_one_device_runs_in_this_process(tmp_path: Path) -> None:
    processes = descendants()
    run, module = trainer("single", tmp_path), Regression()
    connector = run._accelerator_connector
    before, strategy, threads = dict(vars(connector)), run.strategy, torch.get_num_threads()
    run.fit(module, loader(), loader())
    assert module.pid == os.getpid()
    assert not left_since(processes, seconds=0)
    assert run.strategy is strategy
    assert {name: value for name, value in vars(connector).items() if before.get(name) is not value} == {}
    assert torch.get_num_threads() == threads
    assert strategy.plan.engine == "single"


def test_one_device_that_fails_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    parent = os.getpid()

    def fail(module: Regression, index: int) -> None:
        if index == 2 and os.getpid() == parent:
            torch.set_num_threads(2)
            raise RuntimeError("no")

    run = trainer("single", tmp_path)
    before, strategy, threads = dict(vars(run._accelerator_connector)), run.strategy, torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no"):
        run.fit(Regression({"training_step": fail}), loader(), loader())
    assert run.strategy is strategy
    assert {name for name, value in vars(run._accelerator_connector).items() if before.get(name) is not value} == set()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("loaders", "says"), [([DataLoader([])], "the loader over list has no batch"), ([], "`train_dataloader` must be implemented")]
)
def test_a_refusal_shows_no_frames_of_this_package_but_its_entrance(loaders: list[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=says) as caught:
        trainer("single", tmp_path).fit(Regression(), *loaders)
    ours = [entry.name for entry in caught.traceback if entry.frame.f_globals["__name__"].startswith("lightning_autopar.")]
    assert ours == ["launch"]


def test_fit_outside_the_main_thread(tmp_path: Path) -> None:
    run = trainer("ddp", tmp_path)
    thread = threading.Thread(target=run.fit, args=(Regression(), loader(), loader()))
    thread.start()
    thread.join()
    assert run.global_step == 8


# -- what a run gives back ---------------------------------------------------------------------------------------------------------------


def _options(name: str, folder: Path) -> dict[str, Any]:
    """One feature of the Trainer."""
    return {
        "plain": {},
        "fast_dev_run": {"fast_dev_run": 2},
        "overfit": {"overfit_batches": 2},
        "limits": {"limit_train_batches": 3, "limit_val_batches": 0.5},
        "max_time": {"max_time": "00:00:01:00"},
        "barebones": {"barebones": True},
        "profiler": {"profiler": "simple"},
        "no_sanity": {"num_sanity_val_steps": 0, "val_check_interval": 2},
        "early": {"max_epochs": 20, "callbacks": [EarlyStopping("val_loss", min_delta=0.3, patience=1)]},
        "timer": {"callbacks": [Timer("00:00:01:00")]},
        "rich": {"callbacks": [RichProgressBar()], "enable_progress_bar": True},
    }[name]


@pytest.mark.filterwarnings("ignore:.*overfit:UserWarning")
@pytest.mark.filterwarnings("ignore:.*barebones:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "features",
    [("plain", "limits", "no_sanity"), ("fast_dev_run", "overfit", "barebones"), ("profiler", "max_time", "timer"), ("early", "rich")],
    ids=",".join,
)
def test_metrics_counters_and_weights_are_plain_lightnings(features: tuple[str, ...], engine: str, tmp_path: Path) -> None:
    for feature in features:
        found = []
        for each in ("plain", engine):
            torch.manual_seed(3)
            run, module = trainer(each, tmp_path / feature, **_options(feature, tmp_path)), Regression()
            run.fit(module, loader(36), [loader(20), loader(28, seed=1)] if feature == "plain" else loader(20))
            found.append((dict(run.callback_metrics), run.global_step, run.current_epoch, run.should_stop, weights(module)))
        assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_fit_evaluate_the_best_and_fit_on(engine: str, tmp_path: Path) -> None:
    found = []
    for each in ("plain", engine):
        torch.manual_seed(3)
        checkpoint = ModelCheckpoint(tmp_path / each, monitor="val_loss")
        run, module = trainer(each, tmp_path, callbacks=[checkpoint]), Regression()
        run.fit(module, loader(36), loader(20))
        first = run.global_step, Path(checkpoint.best_model_path).name
        values = (
            run.validate(dataloaders=loader(20), ckpt_path="best", verbose=False),
            run.test(dataloaders=loader(23), ckpt_path="best", verbose=False),
            run.predict(dataloaders=loader(23), ckpt_path="best"),
        )
        run.fit_loop.max_epochs = 3
        run.fit(module, loader(36), loader(20))
        found.append((first[0], values, run.global_step, run.current_epoch, weights(module)))
        assert first[1] == "epoch=1-step=10.ckpt"
    assert_same(found[1], found[0])


class CountsTests(Regression):
    """Counts the batches of its tests in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        return super().test_step(batch, batch_idx)


@pytest.mark.parametrize("engine", [*ENGINES, "pipeline"])
def test_after_a_test_the_script_has_the_checkpoints_weights(engine: str, tmp_path: Path) -> None:
    found = []
    for each in ("plain", engine):
        torch.manual_seed(3)
        checkpoint = ModelCheckpoint(tmp_path / each, save_top_k=-1, filename="{epoch}")
        run, module = trainer(each, tmp_path, callbacks=[checkpoint]), CountsTests()
        run.fit(module, loader(36), loader(20))
        last = weights(module)
        run.test(module, loader(23), ckpt_path=str(tmp_path / each / "epoch=0.ckpt"), verbose=False)
        first = weights(module)
        run.test(module, loader(23), verbose=False)
        found.append((last, first, weights(module), module.batches))
        assert not torch.equal(first, last)
    assert_same(found[1], found[0])


def test_the_table_of_an_evaluation_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer("ddp", tmp_path).validate(Regression(), loader(23))
    assert capfd.readouterr().out.count("val_loss") == 1


# -- predictions -------------------------------------------------------------------------------------------------------------------------


class Words(Regression):
    """Predicts what ``form`` makes of a batch."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        value = self.net(batch[0])
        return {"dict": {"y": value, "i": batch_idx}, "tuple": (value, batch_idx, dataloader_idx), "none": None, "scalar": batch_idx}[
            self.form
        ]


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["dict", "tuple", "none", "scalar"])
def test_predictions_of_any_form_in_order(form: str, engine: str, tmp_path: Path) -> None:
    found = []
    for each in ("plain", engine):
        torch.manual_seed(3)
        module = Words(form)
        found.append([trainer(each, tmp_path, **limit).predict(module, loader(39)) for limit in ({}, {"limit_predict_batches": 3})])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [1.0, 0.5, 2])
def test_predictions_of_several_loaders(limit: float, engine: str, tmp_path: Path) -> None:
    found = []
    for each in ("plain", engine):
        torch.manual_seed(3)
        loaders = [loader(20), loader(33, seed=1), loader(39, seed=2)]
        found.append(trainer(each, tmp_path, limit_predict_batches=limit).predict(Words("tuple"), loaders))
    assert_same(found[1], found[0])


def test_predictions_that_nobody_wants(tmp_path: Path) -> None:
    assert trainer("ddp", tmp_path).predict(Regression(), loader(), return_predictions=False) is None


# -- the tuner ---------------------------------------------------------------------------------------------------------------------------


class Tunable(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(64, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(16)


def _tuned(strategy: Any, folder: Path) -> tuple[Any, ...]:
    torch.manual_seed(3)
    module = Tunable()
    run = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=False, **QUIET
    )
    size = Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    finder = Tuner(run).lr_find(module, num_training=12)
    assert finder is not None
    return size, module.batch_size, finder.results["loss"], module.lr, weights(module), run.global_step


@pytest.mark.filterwarnings("ignore:.*LR finder")
def test_the_tuner_finds_what_lightnings_does(tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices=TWO)
    assert_same(_tuned(strategy, tmp_path), _tuned("auto", tmp_path))
    assert strategy.plan is not None
    assert strategy.plan.engine == "single"


# -- refused before any process starts -----------------------------------------------------------------------------------------------------


def test_several_nodes_need_an_external_launcher(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_nodes=2 needs a process on each device of each node.*torchrun --nnodes=2"):
        trainer("ddp", tmp_path, num_nodes=2).fit(Regression(), loader(), loader())


def test_a_pinned_plan_of_another_modules_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(engine="ddp", devices=("cpu:0", "cpu:1"), recompute=("net.99",))
    monkeypatch.setattr("lightning_autopar.strategies.launcher.run_generation", lambda job: pytest.fail("a process was started"))
    strategy = AutoParallelStrategy(devices=TWO, plan=plan)
    run = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, default_root_dir=tmp_path, enable_checkpointing=False, **QUIET)
    with pytest.raises(ValueError, match=r"recomputes 'net\.99'"):
        run.fit(Regression(), loader(), loader())
