"""What a generation's workers changed, in the workers of the next generation: both forked from one parent."""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_autopar._fork import run_forked
from lightning_autopar._lightning_compat import mute_hooks
from lightning_autopar.exact.absent.absent_tensor import absent_like
from lightning_autopar.state.objects import pickles as pickling
from lightning_autopar.strategies.processes.handover import back_to_script, to_next_generation
from lightning_autopar.strategies.processes.handover.to_next_generation import carry_loggers_in, read_objects, write_objects


class Note:
    """Made anew by ``setup``; holds what can't be pickled."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lock = threading.Lock()


class Dataset(TensorDataset):
    epoch = 0


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def setup(self, stage: str) -> None:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)).repeat(8, 1)  # plain Lightning knows no position in an epoch
        self.data = Dataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        self.loader = DataLoader(self.data, batch_size=4)
        return self.loader

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


class Hidden(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.kept = MeanMetric()
        self.steps = 0
        self.shapes: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=3)
        self.generator = torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(2)
        self.function = lambda x: x
        self.shadow = torch.zeros(8, 4)

    def setup(self, stage: str) -> None:
        self.note = Note()
        self.shapes["set up"] = self.shapes.get("set up", 0) + 1
        store: dict[str, Any] = {}
        self.activations = store

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            store["mean"] = float(output.detach().mean())

        self.hook = self.body.register_forward_hook(hook)
        self.drawn = torch.Generator().manual_seed(7)

    def configure_model(self) -> None:
        self.head = Hidden(8, 1)
        self.head.nothing = None

    def configure_callbacks(self) -> Any:
        return [Late()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = mse_loss(self.head(self.frozen(torch.relu(self.body(x)))), y)
        self.steps += 1
        self.seen += 1
        self.losses.append(float(loss.detach()))
        self.kept.update(loss.detach())
        self.note.lines.append(str(self.steps))
        self.tensors = {"loss": loss.detach(), "double": torch.ones(3, dtype=torch.bfloat16) * self.steps}
        self.shadow.mul_(0.5).add_(self.body.weight.detach())
        self.mine = [self.body.weight, self.seen, self.optimizers(), self.optimizers(use_pl_optimizer=False), self.lr_schedulers()]
        self.view = self.head.weight.detach()[:, :4]
        self.group = self.trainer.optimizers[0].param_groups[0]
        self.shapes[f"step {self.steps}"] = lambda scale, base=self.steps: scale * base
        torch.rand((), generator=self.generator), torch.rand((), generator=self.drawn), self.numbers.random()
        self.trainer.datamodule.data.epoch = self.steps
        if self.steps == 2:
            self.frozen.requires_grad_(False)
            self.frozen.eval()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", mse_loss(self.head(self.frozen(torch.relu(self.body(x)))), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Late(pl.Callback):
    """Made by ``configure_callbacks``."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps.append(trainer.global_step)
        trainer.gradient_clip_val = 1.0


class Keeper(pl.Callback):
    """All sorts of things."""

    def __init__(self) -> None:
        self.rows: list[Any] = [lambda: 1]
        self.names: set[str] = set()
        self.metric = MeanMetric()
        self.rng = random.Random(3)
        self.untouched = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.untouched = 7

    def state_dict(self) -> dict[str, Any]:
        return {"untouched": self.untouched}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.names.add(f"step {trainer.global_step}")
        self.metric.update(float(trainer.global_step))
        self.rng.random()
        self.flat = torch.arange(12.0) * trainer.global_step
        self.parts = [self.flat[:4], self.flat[4:].view(2, 4)]
        self.note = module.note
        self.note_again = [module.note]


class Memory(Logger):
    """A logger that keeps its rows and names its run as it opens one."""

    opened = 0
    name = "memory"

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self.runs = runs
        self.rows: list[Any] = []
        self._run_id: str | None = None
        self._client: Any = None

    @property
    def experiment(self) -> Any:
        if self._client is None:
            self._client = threading.Lock()
            if self._run_id is None:
                self._run_id = f"run {len(list(self.runs.iterdir()))}"
            (self.runs / self._run_id).touch()
        return self._client

    version = property(lambda self: self._run_id)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        return

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None}


class Parent:
    """A script up to ``fit``, in the process that forks generations.

    Args:
        root: where files go.
        callbacks: besides the usual ones.
    """

    def __init__(self, root: Path, callbacks: Callable[[], list[Any]] = list, *, data: Any = Data, **options: Any) -> None:
        pl.seed_everything(3, verbose=False)
        self.root, self.folder = root, root / "snapshot"
        self.folder.mkdir()
        (root / "runs").mkdir()
        self.net, self.data, self.keeper = Net(), data(), Keeper()
        self.checkpoint = ModelCheckpoint(monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=1)
        self.trainer = pl.Trainer(
            accelerator="cpu",
            default_root_dir=root,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            logger=[CSVLogger(root, "csv", flush_logs_every_n_steps=4), Memory(root / "runs")],
            callbacks=[self.keeper, self.checkpoint, EarlyStopping("loss", patience=9, check_on_train_epoch_end=True), *callbacks()],
            **{"max_epochs": 4, "enable_progress_bar": False, **options},
        )
        self.trainer.strategy._lightning_module = self.net
        self.trainer.datamodule = self.data
        self.before = back_to_script.survey(self.trainer)

    def old(self, at: int, look: Callable[[Parent], Any]) -> Any:
        """A generation that writes what it has before the batch after ``at`` steps, and trains on; what there was to see then."""
        seen: list[Any] = []
        loop: Any = self.trainer.fit_loop.epoch_loop
        advance = loop.advance

        def meet_and_advance(fetcher: Any) -> None:
            if self.trainer.global_step == at and not seen:
                before = look(self)
                write_objects(self.trainer, self.before, self.folder, 0)
                self.trainer.save_checkpoint(self.folder / "weights.ckpt")
                seen.append(look(self))
                assert repr(before) == repr(seen[0]), "looking on changes nothing"
            advance(fetcher)

        loop.advance = meet_and_advance
        self.trainer.fit(self.net, datamodule=self.data)
        return seen[0]

    def new(self, look: Callable[[Parent], Any]) -> Any:
        """A generation that goes on: what there is to see when its loops begin, what warnings there were, and what it is at the end."""
        carry_loggers_in(self.trainer, self.before, self.folder)
        self.trainer.enable_autolog_hparams = False
        unmute = mute_hooks({"on_fit_start", "on_train_start"}, heard_by=pl.callbacks.ProgressBar)
        seen: list[Any] = []
        on_train_start = self.trainer.strategy.on_train_start

        def begin() -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                read_objects(self.trainer, self.before, self.folder)
            unmute()
            on_train_start()
            seen.extend([look(self), [str(each.message) for each in caught if "were lost when the run moved" in str(each.message)]])

        self.trainer.strategy.on_train_start = begin  # type: ignore[method-assign]
        self.trainer.fit(self.net, datamodule=self.data, ckpt_path=self.folder / "weights.ckpt", weights_only=False)
        return seen


def look(parent: Parent) -> dict[str, Any]:
    """What a user could look at between two batches; each thing as text."""
    net, keeper, data, best, trainer = parent.net, parent.keeper, parent.data, parent.checkpoint, parent.trainer
    csv, memory = trainer.loggers
    late = next(each for each in trainer.callbacks if isinstance(each, Late))
    optimizer = trainer.optimizers[0]
    found = {
        "counters": (net.steps, net.losses, net.losses.maxlen, net.head.calls, late.steps, data.data.epoch),
        "tensors": (net.tensors, net.shadow, net.seen, net.view),
        "flags": ([each.requires_grad for each in net.parameters()], [each.training for each in net.modules()]),
        "generators": (
            net.generator.get_state().sum(),
            net.drawn.get_state().sum(),
            net.numbers.bit_generator.state,
            keeper.rng.getstate()[1][-1],
        ),
        "functions": (net.shapes["step 3"](2), net.shapes["set up"], sorted(net.shapes)),
        "own": (net.note.lines, net.activations["mean"]),
        "identity": {
            "optimizers": [net.mine[2] is net.optimizers(), net.mine[3] is optimizer, net.mine[4] is net.lr_schedulers()],
            "module": [net.mine[0] is net.body.weight, net.mine[1] is net.seen, net.group is optimizer.param_groups[0]],
            "view": net.view.data_ptr() == net.head.weight.data_ptr(),
            "note": [keeper.note is net.note, keeper.note_again[0] is net.note],
            "hook": net.activations is next(iter(net.body._forward_hooks.values())).__closure__[0].cell_contents,
            "data": [data.loader.dataset is data.data, trainer.train_dataloader.dataset is data.data],
            "storage": keeper.flat.data_ptr() == keeper.parts[0].data_ptr(),
        },
        "lock": type(net.note.lock).__name__,
        "keeper": (sorted(keeper.names), keeper.metric.compute(), keeper.flat, keeper.parts, keeper.untouched, len(keeper.rows)),
        "best": (best.best_model_path, best.best_k_models, best.last_model_path, best.dirpath, best.best_model_score),
        "trainer": (trainer.gradient_clip_val, trainer.should_stop, trainer.fit_loop.max_epochs),
        "csv": (csv.version, csv.log_dir, csv.experiment.metrics, csv.experiment.metrics_keys),
        "memory": (memory.version, memory.rows),
        "extra": {type(each).__name__: more(each) for each in trainer.callbacks},
    }
    return {name: repr(value) for name, value in found.items()}


def more(callback: Any) -> Any:
    """Of Lightning's own callbacks what they know."""
    if isinstance(callback, WeightAveraging):
        average = callback._average_model
        return average.n_averaged, dict(average.state_dict()), callback._latest_update_step
    if isinstance(callback, LearningRateMonitor):
        return callback.lrs
    if isinstance(callback, Timer):
        return callback._start_time, callback._offset
    if isinstance(callback, StochasticWeightAveraging):
        scheduler = callback._swa_scheduler
        return callback.n_averaged, dict(callback._average_model.state_dict()), callback._max_epochs, scheduler and scheduler.state_dict()
    return {"wait": callback.wait_count, "best": callback.best_score} if isinstance(callback, EarlyStopping) else None


def lines_of(root: Path) -> list[str]:
    """The rows of all CSV files."""
    return [line for path in sorted(root.glob("csv/*/metrics.csv")) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore")
def test_everything_is_as_it_was(tmp_path: Path) -> None:
    parent = Parent(tmp_path, lambda: [WeightAveraging(avg_fn=get_ema_avg_fn(0.5)), LearningRateMonitor(), Timer()])
    there = run_forked(parent.old, 6, look)
    rows = lines_of(tmp_path)
    here, said = run_forked(parent.new, look)
    assert here == there
    assert said == []
    assert lines_of(tmp_path)[1:] == rows[1:], "the same training over again"
    assert [path.name for path in tmp_path.glob("csv/*")] == ["version_0"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run 0"]


@pytest.mark.filterwarnings("ignore")
def test_averaging_goes_on_with_the_scheduler_that_it_has_put_in(tmp_path: Path) -> None:
    parent = Parent(tmp_path, lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)], max_epochs=3)
    there = run_forked(parent.old, 20, look)
    rows = lines_of(tmp_path)
    here, said = run_forked(parent.new, look)
    assert here == there
    assert "SWALR" in run_forked(parent.new, lambda each: repr(each.trainer.lr_scheduler_configs))[0]
    assert said == []
    assert lines_of(tmp_path) == rows


class Heavy(pl.Callback):
    """Copies that are large for a pickle (in this test), and things that have none."""

    def __init__(self) -> None:
        self.before = torch.zeros(1000, 300)
        self.rows: list[Any] = [1]

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        step = float(trainer.global_step)
        self.before += step
        self.shadow = {"a": torch.full((1000, 300), step), "b": np.full(300_000, step)}
        self.numbers = [step] * 300_000
        self.rows.append(threading.Lock())
        self.thread = threading.Lock()
        trainer.datamodule.table = torch.full((1000, 300), step)
        trainer.datamodule.lost = torch.full((1000, 300), step)


class HeavyData(Data):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.table = torch.zeros(1000, 300)


@pytest.mark.filterwarnings("ignore")
def test_what_is_large_travels_and_what_can_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_next_generation, "LIMIT_BYTES", 1000_000)
    monkeypatch.setattr(pickling, "MOST_OBJECTS", 1000)
    parent = Parent(tmp_path, lambda: [Heavy()], data=HeavyData)

    def see(parent: Parent) -> Any:
        heavy = next(each for each in parent.trainer.callbacks if isinstance(each, Heavy))
        sums = float(heavy.before.sum()), float(heavy.shadow["a"].sum()), float(heavy.shadow["b"].sum()), sum(heavy.numbers)
        heavy.shadow["b"][0] = heavy.shadow["b"][0]  # it can be written to
        return sums

    there = run_forked(parent.old, 3, see)
    here, said = run_forked(parent.new, see)
    assert here == there == (1_800_000.0, 900_000.0, 900_000.0, 900_000.0)
    assert len(said) == 1
    assert "lost when the run moved: Heavy.rows[1], Heavy.rows[2], Heavy.rows[3], Heavy.thread, datamodule.lost (" in said[0], (
        "setup has made the table again"
    )


def test_what_the_ranks_of_a_pipeline_changed_is_put_together(tmp_path: Path) -> None:
    """Two stages, one after the other in one process: each knows what its layers did."""
    parent = Parent(tmp_path)
    trainer, net = parent.trainer, parent.net
    engine: Any = trainer.strategy

    def stages() -> None:
        engine.holders = 2
        engine.run_plan = SimpleNamespace(plan=SimpleNamespace(devices_per_replica=2), batch="global")
        pristine = {each: dict(vars(each)) for each in (net, parent.keeper)}
        for rank in range(2):
            net.steps, parent.keeper.seen = 5, f"by rank {rank}"
            setattr(net, f"by_{rank}", [rank])
            net.seen = torch.full((1,), 4.0) if rank else absent_like(net.seen, "the buffer")
            net.output = torch.ones(2) if rank else absent_like(torch.ones(2), "the output of stage 1")
            write_objects(trainer, parent.before, parent.folder, rank)
            for each, values in pristine.items():
                vars(each).clear()
                vars(each).update(values)
        write_objects(trainer, parent.before, parent.folder, 2)  # another replica's

    def next_one() -> Any:
        carry_loggers_in(trainer, parent.before, parent.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_objects(trainer, parent.before, parent.folder)
        return net.steps, net.by_0, net.by_1, net.output.sum().item(), net.seen.item(), parent.keeper.seen

    run_forked(stages)
    assert run_forked(next_one) == (5, [0], [1], 2.0, 4.0, "by rank 0")


def test_each_rank_keeps_what_its_own_setup_made(tmp_path: Path) -> None:
    """Rank 1 of a new generation: what ``setup`` makes differs by rank, and no part of it comes from the old rank 0."""
    parent = Parent(tmp_path)
    trainer, net = parent.trainer, parent.net

    def set_up(rank: int) -> None:
        net.place, net.table = f"rank {rank}", [rank]

    def old() -> None:
        set_up(0)
        net.steps, net.table = 7, [*net.table, 5]
        write_objects(trainer, parent.before, parent.folder, 0)

    def rank_0() -> Any:
        sent: list[Any] = []
        trainer.strategy.broadcast = lambda value: sent.append(value) or value  # type: ignore[method-assign, func-returns-value]
        carry_loggers_in(trainer, parent.before, parent.folder)
        set_up(0)
        read_objects(trainer, parent.before, parent.folder)
        return sent[0]

    def rank_1(said: Any) -> Any:
        carry_loggers_in(trainer, parent.before, parent.folder)
        trainer.strategy.broadcast = lambda value: said  # type: ignore[method-assign]
        set_up(1)
        net.kept.update(3.0)
        read_objects(trainer, parent.before, parent.folder)
        return net.place, net.table, net.steps, net.kept._update_count

    run_forked(old)
    assert run_forked(rank_1, run_forked(rank_0)) == ("rank 1", [0, 5], 7, 0)


def test_a_script_started_anew_with_other_objects_takes_what_has_names(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    run_forked(parent.old, 3, look)
    with pytest.raises(AssertionError, match="nothing was handed over"):
        carry_loggers_in(parent.trainer, parent.before, tmp_path)
    trainer, net = parent.trainer, parent.net
    net.steps, net.more = 70, [1]
    parent.before = back_to_script.survey(trainer)
    carry_loggers_in(trainer, parent.before, parent.folder)
    with pytest.warns(UserWarning, match="held other objects than now: what Lightning's checkpoints hold goes on") as caught:
        read_objects(trainer, parent.before, parent.folder)
    assert len(caught) == 1
    csv, memory = trainer.loggers
    assert (csv.version, memory.version, [row["step"] for row in csv.experiment.metrics]) == (0, "run 0", [])
    assert (net.steps, net.seen, trainer.gradient_clip_val, net.frozen.training) == (70, 3, 1.0, False)
    assert len(lines_of(tmp_path)) == 4, "the rows of the later steps are gone"


def test_a_log_folder_that_was_removed_between_two_starts_is_made_anew(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    run_forked(parent.old, 3, look)
    shutil.rmtree(tmp_path / "csv")
    trainer = parent.trainer
    parent.net.steps, parent.net.more = 70, [1]  # type: ignore[assignment]  # another script's objects
    carry_loggers_in(trainer, back_to_script.survey(trainer), parent.folder)
    experiment = trainer.loggers[0].experiment
    experiment.log_metrics({"loss": 1.0}, 9)
    experiment.save()
    assert "1.0" in lines_of(tmp_path)[-1]
