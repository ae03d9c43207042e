"""What Lightning's own loggers get of a plan: hyperparameters in every run, numbers by PlanMonitor, each change of plan once."""

from __future__ import annotations

import csv
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan, PlanMonitor
from tests.strategies.elastic.test_elastic import Regression, Watch, to

#: Lightning reads event files with tensorboard, which is no dependency.
tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
PLAN = {
    "autopar/plan",
    "autopar/engine",
    "autopar/devices",
    "autopar/world_size",
    "autopar/predicted_step_seconds",
    "autopar/predicted_peak_bytes",
}
TOGETHER = ("cpu:0", "cpu:1")
_WANDB_FOLDERS = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
NOW = {"autopar/world_size", "autopar/predicted_step_seconds", "autopar/predicted_peak_bytes"}


class Net(Regression):
    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        if width is not None:
            self.save_hyperparameters()

    def training_step(self, batch: Any, index: int) -> Any:
        self.log("loss", loss := super().training_step(batch, index))
        return loss


def fit(
    loggers: list[Logger], allow: list[str], *callbacks: pl.Callback, width: int | None = None, module: Any = None, **options: Any
) -> pl.Trainer:
    pl.seed_everything(5, verbose=False)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    strategy: Any = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off", allow=allow) if allow else "auto"
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", logger=loggers, callbacks=list(callbacks), **{**quiet, "max_steps": 4, **options}
    )
    trainer.fit(module or Net(width), DataLoader(TensorDataset(x, x.sum(1)), 8, shuffle=True))
    return trainer


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def hyperparameters(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "version_0" / "hparams.yaml").read_text())
    return found


def events(folder: Path, version: str = "version_0") -> Any:
    found = tensorboard.EventAccumulator(str(folder / version))
    found.Reload()
    return found


@pytest.mark.parametrize("engine", ["single", "ddp"])
@pytest.mark.parametrize("width", [None, 7])
def test_the_plan_is_among_the_hyperparameters_and_nothing_among_the_metrics(engine: str, width: int | None, tmp_path: Path) -> None:
    fit([CSVLogger(tmp_path / "plain", "csv")], [], width=width)
    trainer = fit([CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")], [engine], width=width)
    users = {} if width is None else {"width": 7}
    for kind in ("csv", "tb"):
        found = hyperparameters(tmp_path / kind)
        assert {name: value for name, value in found.items() if name not in PLAN} == users
        assert set(found) - set(users) == PLAN
        assert (found["autopar/engine"], found["autopar/world_size"]) == (engine, trainer.strategy.plan.world_size)
        assert found["autopar/predicted_peak_bytes"] > 1000
    assert [set(row) for row in rows(tmp_path)] == [set(row) for row in rows(tmp_path / "plain")]
    written = events(tmp_path / "tb")
    assert set(written.Tags()["scalars"]) == {"loss", "epoch", *(() if width is None else ("hp_metric",))}
    if width is None:
        return  # TensorBoard shows no hyperparameters without a metric, and the user's run has none
    # TensorBoard shows the first of these; there is one, with all of them
    shown = written.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert all(name.encode() in shown for name in PLAN | set(users))


def test_who_wants_no_hyperparameters_gets_none(tmp_path: Path) -> None:
    fit([CSVLogger(tmp_path, "csv")], ["single"], enable_autolog_hparams=False, width=7)
    assert not (tmp_path / "csv" / "version_0" / "hparams.yaml").exists()


def test_the_monitor_logs_predictions_at_the_first_step(tmp_path: Path) -> None:
    trainer = fit([CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")], ["ddp"], PlanMonitor())
    written = events(tmp_path / "tb")
    predicted = trainer.strategy.report.best_candidate.seconds.step
    (first,) = written.Scalars("autopar/predicted_step_seconds")
    assert (first.step, first.value) == (0, pytest.approx(predicted))
    (row,) = (row for row in rows(tmp_path) if row["autopar/world_size"])
    assert (row["step"], float(row["autopar/world_size"])) == ("0", 2.0)
    assert not any("autopar/plan_changes" in row for row in rows(tmp_path))


def kill(run: Any) -> None:
    os.kill(run._run.generation.pids()[0], signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:autopar. a failure at step:UserWarning")
def test_each_change_of_plan_is_logged_once_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "runs"))
    loggers: list[Logger] = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")]
    moves = Watch((4, to(Plan(engine="ddp", devices=TOGETHER))), (20, kill), (26, to(Plan(engine="single", devices=("cpu:1",)))))
    migrate = CheckpointMigrate(snapshot_seconds=1000.0)  # so that the failure goes back to the move's own snapshot
    began = time.monotonic()
    trainer = fit(loggers, ["single", "ddp"], migrate, PlanMonitor(), moves, max_steps=36, default_root_dir=tmp_path, width=7)
    took_seconds = time.monotonic() - began
    titles = [span.title for span in trainer.strategy.history.spans]
    assert titles == ["single", "ddp ×2", "ddp ×2", "single"]

    found = rows(tmp_path)
    changes = [row for row in found if row["autopar/plan_changes"]]
    assert [float(row["autopar/plan_changes"]) for row in changes] == [1.0, 2.0, 3.0]
    steps = [int(row["step"]) for row in changes]
    assert steps == sorted(steps)
    assert 4 <= steps[0] == steps[1] < steps[2] < 36
    assert all(0.0 < float(row["autopar/pause_seconds"]) < took_seconds for row in changes)
    assert [row["step"] for row in found if row["loss"]] == [str(step) for step in range(36)]
    known = hyperparameters(tmp_path / "csv")
    assert (known["width"], known["autopar/plan"]) == (7, "single")
    assert "from single on cpu:0 to ddp ×2 on cpu:0-1 after" in known["autopar/change_1"]
    assert known["autopar/change_1"].endswith(": the test")
    assert "WorkerFailed at step" in known["autopar/change_2"]
    assert known["autopar/change_3"].startswith(f"step {steps[2]}: from ddp ×2")

    written = events(tmp_path / "tb")
    assert [(event.step, event.value) for event in written.Scalars("autopar/plan_changes")] == list(
        zip(steps, (1.0, 2.0, 3.0), strict=True)
    )
    assert len(written.Tensors("autopar/changes/text_summary")) == 3
    assert len(written.Scalars("hp_metric")) == 1


class Writing(Net):
    """Has a writer of its own, whose queue takes ten events, and writes more in a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.writer = SummaryWriter(str(folder))

    def training_step(self, batch: Any, index: int) -> Any:
        for number in range(12):
            self.writer.add_scalar(f"own/{number}", index, index)
        return super().training_step(batch, index)


@pytest.mark.parametrize("allow", ["single", "ddp"])
def test_event_files_that_the_script_began_get_each_event_once(allow: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A writer's thread doesn't live in trials of planning, nor in workers."""
    logger, module = TensorBoardLogger(tmp_path), Writing(tmp_path / "own")
    logger.experiment.add_scalar("before", 1, 0)
    module.writer.add_scalar("before", 1, 0)
    fit([logger], [allow], module=module)
    for writer in (logger.experiment, module.writer):
        writer.add_scalar("after", 1, 0)
        writer.close()
    counts = [
        {name: len(found.Scalars(name)) for name in found.Tags()["scalars"]}
        for found in (events(tmp_path / "lightning_logs"), events(tmp_path / "own", ""))
    ]
    assert counts[0] == {"before": 1, "loss": 4, "epoch": 4, "after": 1}
    assert counts[1] == {"before": 1, **{f"own/{number}": 4 for number in range(12)}, "after": 1}
    assert not [each for each in recwarn if "brought back" in str(each.message)]


class Tracker(ModuleType):
    """Does what W&B's module does with the run of a process that was forked from: calls connect to it, but not those of its summary."""

    def __init__(self, rows: Path) -> None:
        super().__init__("wandb")
        self.config = Config(lr=3)
        self.run: Any = Run(self, rows)

    def init(self, *, mode: str, config: dict[str, Any], reinit: str) -> Any:
        assert (mode, config, reinit) == ("disabled", {"lr": 3}, "create_new")
        self.run = SilentRun(self, Path(os.devnull))
        return self.run


class Config(dict[str, Any]):
    def update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(values)


class Run:
    def __init__(self, tracker: Tracker, rows: Path) -> None:
        self.tracker, self.rows = tracker, rows
        self.summary: Any = Summary(self)
        self.config = tracker.config
        self.connected = os.getpid()

    @property
    def dir(self) -> str:
        self.connected = os.getpid()
        return ""

    def log(self, name: str, number: int) -> None:
        assert self.dir == ""
        with self.rows.open("a") as file:
            file.write(f"{name} {number}\n")


class SilentRun(Run):
    def __init__(self, tracker: Tracker, rows: Path) -> None:
        super().__init__(tracker, rows)
        self.summary: Any = {}


class Summary:
    def __init__(self, run: Run) -> None:
        self.run = run

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __setitem__(self, name: str, value: int) -> None:
        assert self.run.connected == os.getpid(), "not valid in a forked process"


class Tracked(Net):
    """Tells the tracker of its steps, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.run = sys.modules["wandb"].run

    def training_step(self, batch: Any, index: int) -> Any:
        self.run.summary["step"] = index
        self.run.log("own", index)
        sys.modules["wandb"].run.log("module's", index)
        return super().training_step(batch, index)

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.summary["epoch"] = self.current_epoch  # type: ignore[union-attr]


class Held(CSVLogger):
    """Its experiment has a summary."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        found: Any = super().experiment
        found.summary = {}
        return found


@pytest.mark.parametrize("allow", [[], ["single"], ["ddp"], ["fsdp"]])
def test_a_tracker_s_run_that_the_script_began_gets_each_step_once(
    allow: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of planning are forked from the script as workers are; of these rank 0 speaks for all."""
    monkeypatch.setitem(sys.modules, "wandb", Tracker(tmp_path / "rows"))
    with pytest.warns(match="calls its logger or another tracker directly") if allow in (["ddp"], ["fsdp"]) else nullcontext():
        trainer = fit([Held(tmp_path)], allow, module=Tracked())
    module: Any = trainer.lightning_module
    module.run.log("after", 0)
    every = [f"{name} {index}" for index in range(4) for name in ("own", "module's")]
    assert (tmp_path / "rows").read_text().splitlines() == [*every, "after 0"]
    assert type(module.run) is Run


@pytest.mark.parametrize("allow", ["single", "ddp"])
def test_weights_and_biases(allow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_GIT": "true",
        **dict.fromkeys(_WANDB_FOLDERS, str(tmp_path)),
    }.items():
        monkeypatch.setenv(name, value)
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="tests")
    fit([logger], [allow], PlanMonitor(), width=7)
    config = dict(logger.experiment.config)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert config["width"] == 7
    assert set(config) >= PLAN
    assert set(summary) >= NOW
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
