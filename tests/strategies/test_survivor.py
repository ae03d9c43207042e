"""Workers that survive a failure save the run at the batch that it was at: it is the undisturbed run under the same plan, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan
from lightning_autopar.planning.run_history import RunHistory
from lightning_autopar.strategies.boundary import Boundary
from lightning_autopar.strategies.guard import Guard
from lightning_autopar.strategies.saving import Moving

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
pytestmark = pytest.mark.filterwarnings("ignore:autopar")
BOTH = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))


class Fault:
    """Strikes a rank once, at a place of a batch; ``where`` is one of the places that :class:`Fragile` names."""

    def __init__(self, where: str, rank: int, batch: int, *, how: str = "kill") -> None:
        self.where, self.rank, self.batch, self.how = where, rank, batch, how

    def strike(self, folder: Path, where: str, batch: int) -> None:
        if (where, batch) != (self.where, self.batch) or int(os.environ.get("LOCAL_RANK", "0")) != self.rank:
            return
        marker = folder / f"{self.where}-{self.rank}-{self.batch}"
        if marker.exists():
            return
        marker.touch()
        for other in range(2):  # has left the batch before behind it: who is in it yet would fail there
            wait_for(folder / f"begun{other}", batch)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ArithmeticError("that goes away")


def wait_for(path: Path, batch: int) -> None:
    """Until a rank has begun a batch."""
    until = time.monotonic() + 30
    while not path.exists() or int(path.read_text() or "0") < batch:
        assert time.monotonic() < until, f"{path.name} doesn't come to batch {batch}"
        time.sleep(1e-3)


class Slow(torch.optim.AdamW):
    """Writes to a state and a weight before it may be struck."""

    owner: Any = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        self.owner.strike("update begins")
        super().step()
        self.owner.strike("update ends")
        return loss


class Fragile(pl.LightningModule):
    """What a batch changes here: buffers, a list, three kinds of random states; where asked, weights behind torch's back, or a metric."""

    def __init__(self, folder: Path, faults: Sequence[Fault], *, kind: str = "") -> None:
        super().__init__()
        self.folder, self.faults, self.kind = folder, list(faults), kind
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        self.shadow = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.error = MeanAbsoluteError()
        self.seen: list[float] = []

    @property
    def boundary(self) -> Boundary | None:
        """In a worker of the run; None where planning tries the module out."""
        trainer = self._trainer
        found = None if trainer is None else getattr(trainer.fit_loop.epoch_loop.advance, "__self__", None)
        return found if isinstance(found, Boundary) else None

    def strike(self, where: str) -> None:
        for fault in self.faults if self.boundary is not None else ():
            fault.strike(self.folder, where, self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(random.random())
        if self.boundary is not None:
            (self.folder / f"begun{self.global_rank}").write_text(str(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready))
        predicted = self.net(batch[0] + 0.01 * random.random()).squeeze(-1)
        self.strike("forward")
        if self.kind == "metric":
            self.error(predicted, batch[1])
            self.log("error", self.error, on_step=False, on_epoch=True)
        loss = nn.functional.mse_loss(predicted, batch[1])
        self.log("loss", loss, on_epoch=True)
        if loss.requires_grad:
            self.net[0].weight.register_hook(self._in_backward)
        return loss

    def _in_backward(self, gradient: Tensor) -> None:
        self.strike("backward")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "behind":
            self.shadow.data.mul_(0.5).add_(len(self.seen))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.boundary is None:
            return
        until = time.monotonic() + 30
        while self.boundary._elastic.gate.final:  # until its agent has seen that it runs, a failure ends the run
            assert time.monotonic() < until, "the agent doesn't look"
            time.sleep(1e-3)
        if self.global_rank == 0:
            with (self.folder / "done").open("a") as file:
                file.write(f"{self.current_epoch} {batch_idx}\n")

    def configure_optimizers(self) -> Any:
        optimizer = Slow(self.net.parameters(), 1e-2)
        optimizer.owner = self
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}}


class Mean(pl.Callback):
    """A mean of the weights."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        for name, value in pl_module.named_parameters():
            self.mean[name] = 0.9 * self.mean.get(name, 0.0) + 0.1 * value.detach()


class Hooked(pl.Callback):
    """Has a hook that is for checkpoints."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the user"] = 1


def fit(
    folder: Path, *faults: Fault, kind: str = "", plan: Plan = BOTH, accumulate: int = 1, also: Sequence[Any] = (), **how: Any
) -> tuple[Fragile, Mean, RunHistory, int]:
    """A run; and how many batches were done more than once."""
    folder.mkdir()
    pl.seed_everything(3, verbose=False)
    module, mean = Fragile(folder, faults, kind=kind), Mean()
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    migrate = CheckpointMigrate(**{"snapshot_seconds": 1000.0, "failures": 4, "survivors": True, **how})
    strategy = AutoParallelStrategy(plan=plan, devices="2xcpu:1GiB", calibrate="off")
    trainer = pl.Trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[migrate, mean, *also], log_every_n_steps=1,
        default_root_dir=folder, **QUIET,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1)), 6, shuffle=True))
    counts = Counter((folder / "done").read_text().splitlines())
    assert len(counts) == 20
    return module, mean, strategy.history, sum(counts.values()) - 20


def same(ours: tuple[Fragile, Mean, Any, int], theirs: tuple[Fragile, Mean, Any, int]) -> None:
    """To the bit."""
    for name, value in theirs[0].state_dict().items():
        assert torch.equal(ours[0].state_dict()[name], value), name
    for name, value in theirs[1].mean.items():
        assert torch.equal(ours[1].mean[name], value), name
    assert ours[0].seen == theirs[0].seen
    assert [file.read_bytes() for file in ours[0].folder.glob("**/metrics.csv")] == [
        file.read_bytes() for file in theirs[0].folder.glob("**/metrics.csv")
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(tmp_path_factory.mktemp("undisturbed") / "run")


def reasons(caught: Any) -> list[str]:
    return [str(each.message) for each in caught if "a failure at step" in str(each.message)]


def test_whoever_is_killed_no_batch_is_done_again(tmp_path: Path, undisturbed: Any) -> None:
    faults = Fault("forward", 1, 4), Fault("backward", 0, 7), Fault("forward", 0, 11), Fault("backward", 1, 14)
    with pytest.warns(UserWarning, match="where a worker that was left saved it") as caught:
        run = fit(tmp_path / "run", *faults)
    same(run, undisturbed)
    assert run[3] == 0
    assert len(reasons(caught)) == 4


def test_a_hang_and_exceptions_that_go_away_cost_no_batch(tmp_path: Path, undisturbed: Any) -> None:
    faults = Fault("backward", 1, 4, how="stop"), Fault("forward", 0, 8, how="raise"), Fault("backward", 1, 12, how="raise")
    with pytest.warns(UserWarning, match="where a worker that was left saved it") as caught:
        run = fit(tmp_path / "run", *faults, hang_seconds=3.0)
    same(run, undisturbed)
    assert run[3] == 0
    assert len(reasons(caught)) == 3


def test_a_window_of_accumulated_gradients_is_done_again_from_its_begin(tmp_path: Path) -> None:
    undisturbed = fit(tmp_path / "undisturbed", accumulate=3)
    faults = Fault("backward", 1, 9), Fault("forward", 0, 15)  # the third batch of a window, and the second one
    with pytest.warns(UserWarning, match="where a worker that was left saved it") as caught:
        run = fit(tmp_path / "run", *faults, accumulate=3)
    same(run, undisturbed)
    assert len(reasons(caught)) == 2
    assert run[3] == 3, reasons(caught)


def test_a_half_made_update_is_not_saved(tmp_path: Path, undisturbed: Any) -> None:
    faults = Fault("update begins", 0, 5, how="raise"), Fault("update ends", 1, 9)
    with pytest.warns(UserWarning, match="no worker that was left could save it: an update had begun") as caught:
        run = fit(tmp_path / "run", *faults)
    same(run, undisturbed)
    assert run[3] > 0
    assert len(reasons(caught)) == 2


@pytest.mark.parametrize(
    ("kind", "also", "survivors", "words"),
    [
        ("behind", [], True, "weights were written to outside of an update"),
        ("metric", [], True, "each worker has a part of the module's metrics"),
        ("", [Hooked()], True, "Hooked defines on_save_checkpoint"),
        ("", [], None, "notes of each batch for it would take .* more than 0.75%"),  # of batches of some ms
    ],
)
def test_what_cannot_be_vouched_for_is_not_saved(kind: str, also: list[Any], survivors: bool | None, words: str, tmp_path: Path) -> None:
    undisturbed = fit(tmp_path / "undisturbed", kind=kind)
    with pytest.warns(UserWarning, match=words):
        run = fit(tmp_path / "run", Fault("backward", 1, 14), kind=kind, also=also, survivors=survivors)
    same(run, undisturbed)
    assert run[3] > 0


def test_a_guard_sees_every_way_to_write() -> None:
    weight, state = nn.Parameter(torch.randn(100, 33)), torch.zeros(100, 33)
    guard = Guard()
    writes: list[Any] = [
        lambda: weight.data.__setitem__((50, 7), 3.0),
        lambda: weight.detach().numpy().__setitem__((99, 32), 3.0),
        lambda: weight.detach().mul_(1.0),
        lambda: setattr(weight, "data", weight.data.clone()),
        lambda: state.add_(0.0),
    ]
    for write in writes:
        guard.note([weight], [state])
        assert guard.is_same([weight], [state])
        write()
        assert not guard.is_same([weight], [state])
    guard.note([weight], [state])
    assert not guard.is_same([weight], [state.clone()])


def test_large_weights_on_the_host_are_compared_by_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.strategies.guard._SUMMED_BYTES", 64 * 1024)
    weights = [torch.randn(256, 1024), torch.randn(3), torch.randn(1025, 7)]
    guard = Guard()
    guard.note(weights)
    assert guard.is_same(weights)
    for weight in weights:
        weight.numpy()[...] *= 1.5
        assert not guard.is_same(weights)
        weight.numpy()[...] /= 1.5


def test_notes_and_snapshots_share_what_they_may_take() -> None:
    assert Moving(overhead=0.01).notes_share == pytest.approx(0.0075)
    assert Moving(survivors=False).notes_share == 0.0
    assert Moving(survivors=True).notes_share > 1
