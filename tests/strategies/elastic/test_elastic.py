"""Elastic runs from outside: neighbours that come and go, requests by command, gradients that are kept; each as plain Lightning has it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan, Plan
from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.devices.simulated_neighbours import Neighbour, write_neighbours
from lightning_autopar.sharing.runs.requests import ask, runs, yield_run
from lightning_autopar.sharing.runs.status import Request, RunStatus
from lightning_autopar.strategies.elastic import start_elastic_fit as elastic
from lightning_autopar.strategies.elastic.agent import Agent
from lightning_autopar.strategies.preparation.decision import MoveRequest

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
BUDGET_BYTES = 1024**3


class Regression(pl.LightningModule):
    """Small, with dropout; each step takes a while in a worker, so that a run lasts long enough to be moved."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
        self.automatic_optimization = not manual
        self.home = os.getpid()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        if os.getpid() != self.home:
            time.sleep(0.02)
        loss = nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 3)
        if (index + 1) % 3 == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Watch(pl.Callback):
    """Does something in the agent when the run has come to a boundary; each once, in order."""

    interval_seconds = 0.01

    def __init__(self, *acts: tuple[int, Callable[[Any], MoveRequest | None]]) -> None:
        self.acts = list(acts)

    def look(self, run: Agent) -> MoveRequest | None:
        step = run.step
        if not self.acts or step is None or step < self.acts[0][0]:
            return None
        return self.acts.pop(0)[1](run)


def to(plan: Plan) -> Callable[[Any], MoveRequest]:
    """A move to a plan."""

    def act(run: Agent) -> MoveRequest:
        inventory, now = run.inventory(), run.decision
        devices = tuple(inventory.device(device) for device in plan.devices)
        return MoveRequest(
            action="move",
            decision=replace(now, run_plan=replace(now.run_plan, plan=plan, devices=devices, candidate=None)),
            reason="the test",
        )

    return act


def fit(root: Path, callbacks: list[pl.Callback], *, elastic: bool = True, manual: bool = False, epochs: int = 3) -> tuple[Any, Any]:
    pl.seed_everything(5, verbose=False)
    module = Regression(manual=manual)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=draws)
    strategy: Any = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off", allow=["single", "ddp"]) if elastic else "auto"
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices="auto" if elastic else 1, max_epochs=epochs, callbacks=callbacks,
        default_root_dir=root, **QUIET,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1)), 8, shuffle=True))
    return module, trainer


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.fixture
def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_NEIGHBOURS", str(tmp_path / "neighbours.json"))
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "runs"))
    return tmp_path / "neighbours.json"


def test_a_run_leaves_a_full_device_parks_and_resumes(tmp_path: Path, neighbours: Path) -> None:
    full = Neighbour(taken_bytes=BUDGET_BYTES)

    def say(there: dict[str, Neighbour]) -> Callable[[Any], None]:
        return lambda run: write_neighbours(neighbours, there)

    def make_room(run: Any) -> None:
        if run.parked:
            write_neighbours(neighbours, {"cpu:1": full})
        else:
            watch.acts.append((0, make_room))

    device = "cpu:0"
    off, nowhere = say({device: full}), say({device: full, "cpu:1": full})
    watch = Watch((4, off), (12, nowhere), (12, make_room))
    plain, _ = fit(tmp_path / "plain", [], elastic=False)
    replan = ElasticReplan(interval_seconds=0.05, patience=1, min_seconds_between_moves=0.0)
    moved, trainer = fit(tmp_path / "moved", [CheckpointMigrate(), replan, watch])
    titles = [(span.title, span.devices) for span in trainer.strategy.history.spans]
    assert titles == [("single", (device,)), ("single", ("cpu:1",)), ("parked", ()), ("single", (device,))]
    assert difference(plain, moved) == 0.0
    assert trainer.global_step == 36


def test_a_run_can_be_asked_to_leave_a_device(tmp_path: Path, neighbours: Path) -> None:
    """By another process of its user, and by a signal."""

    def ask(run: Any) -> None:
        (found,) = (tmp_path / "runs").glob("*/*/status.json")
        yield_run(found.parent.name, device="cpu:0")

    plain, _ = fit(tmp_path / "plain", [], elastic=False)

    def tell(run: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def allow(run: Any) -> None:
        if run.parked:
            run.allow_again()
        else:
            watch.acts.append((0, allow))

    watch = Watch((4, ask), (20, tell), (20, allow))
    replan = ElasticReplan(interval_seconds=0.05, patience=1, min_seconds_between_moves=0.0)
    moved, trainer = fit(tmp_path / "moved", [CheckpointMigrate(), replan, watch])
    spans = trainer.strategy.history.spans
    assert [span.devices for span in spans] == [("cpu:0",), ("cpu:1",), (), ("cpu:0",)]
    assert difference(plain, moved) == 0.0


def test_a_run_is_paused_and_resumed_from_another_process(tmp_path: Path, neighbours: Path) -> None:
    plain, _ = fit(tmp_path / "plain", [], elastic=False)

    def shown(state: str, step: int) -> RunStatus:
        """The run, once it is that far."""
        until = time.monotonic() + 60
        while not (found := runs()) or found[0].state != state or (found[0].step or 0) < step:
            assert time.monotonic() < until, found
            time.sleep(0.02)  # another process's page
        return found[0]

    child = os.fork()
    if not child:
        code = 1
        try:
            run_id = shown("running", 3).run_id
            paused = ask(run_id, Request(ask="park"), wait_seconds=60.0)
            seen = shown("parked", 3)
            again = ask(run_id, Request(ask="park"), wait_seconds=60.0)
            resumed = ask(run_id, Request(ask="resume"), wait_seconds=60.0)
            goes_on = ask(run_id, Request(ask="resume"), wait_seconds=60.0) if shown("running", 4) else None
            told = [seen.to_dict(), *(each.answered for each in (paused, again, resumed, goes_on) if each)]
            (tmp_path / "told.json").write_text(json.dumps(told))
            code = 0
        finally:
            os._exit(code)
    moved, trainer = fit(tmp_path / "moved", [CheckpointMigrate()])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seen, paused, again, resumed, goes_on = json.loads((tmp_path / "told.json").read_text())
    assert paused == "it saves a snapshot after this batch, releases its devices, and stays parked until it is resumed"
    assert again == "it is parked already, and stays parked until it is resumed"
    assert resumed == "it goes on as soon as there is room for it"
    assert goes_on == "the run isn't paused; it uses any device again"
    assert (seen["devices"], seen["leased_bytes"], seen["predicted_bytes"], seen["ends_at"]) == ([], {}, {}, None)
    assert seen["elastic"]
    assert seen["reason"].endswith("asked for it")
    assert [span.devices for span in trainer.strategy.history.spans] == [("cpu:0",), (), ("cpu:0",)]
    assert trainer.global_step == 36
    assert difference(plain, moved) == 0.0


def test_who_is_terminated_twice_goes_on_at_the_next_start(tmp_path: Path, neighbours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second SIGTERM isn't waited for, and the latest snapshot is there all the same."""

    def terminate(run: Any) -> None:
        if run.has_snapshot:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        watch.acts.append((0, terminate))

    plain, _ = fit(tmp_path / "plain", [], elastic=False)
    number = elastic._runs
    watch = Watch((6, terminate))
    with pytest.raises((SystemExit, SIGTERMException)):
        fit(tmp_path / "run", [CheckpointMigrate(snapshot_seconds=0.1), watch])
    monkeypatch.setattr(elastic, "_runs", number)  # as in the process of the next start
    with pytest.warns(UserWarning, match="resumes from its snapshot of step"):
        again, trainer = fit(tmp_path / "run", [CheckpointMigrate()])
    assert trainer.global_step == 36
    assert difference(plain, again) == 0.0


def test_what_the_agent_fails_by_leaves_the_snapshots(tmp_path: Path, neighbours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Any) -> None:
        if run.has_snapshot:
            raise ArithmeticError("a watcher's own")
        watch.acts.append((0, fail))

    plain, _ = fit(tmp_path / "plain", [], elastic=False)
    number = elastic._runs
    watch = Watch((6, fail))
    with pytest.raises(ArithmeticError, match="a watcher's own"):
        fit(tmp_path / "run", [CheckpointMigrate(snapshot_seconds=0.1), watch])
    monkeypatch.setattr(elastic, "_runs", number)  # as in the process of the next start
    with pytest.warns(UserWarning, match="resumes from its snapshot of step"):
        again, trainer = fit(tmp_path / "run", [CheckpointMigrate()])
    assert trainer.global_step == 36
    assert difference(plain, again) == 0.0


@pytest.mark.parametrize("same", [True, False])
def test_gradients_that_a_module_keeps_between_batches_move_too(same: bool, tmp_path: Path, neighbours: Path) -> None:
    other = Plan(engine="single", devices=("cpu:1",))
    both = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
    sharded = Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), reshard_after_forward=True)
    tour = [other, other] if same else [both, sharded, other]
    plain, _ = fit(tmp_path / "plain", [], elastic=False, manual=True)
    watch = Watch(*((2 * number, to(plan)) for number, plan in enumerate(tour, 1)))
    moved, trainer = fit(tmp_path / "moved", [CheckpointMigrate(), watch], manual=True)
    assert len(trainer.strategy.history.spans) == len(tour) + 1
    assert difference(plain, moved) <= (0.0 if same else 1e-6)


def test_batches_of_each_devices_own_are_refused(tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off", batch="per_device")
    trainer = pl.Trainer(strategy=strategy, callbacks=[CheckpointMigrate()], max_epochs=1, default_root_dir=tmp_path, **QUIET)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="would have other batches"):
        trainer.fit(Regression(), DataLoader(TensorDataset(torch.zeros(8, 8), torch.zeros(8)), 4))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"snapshot_seconds": 0}, "more than 0"),
        ({"overhead": 0.9}, "at most 0.5"),
        ({"hang_seconds": -1}, "more than 0"),
        ({"failures": 0}, "at least 1"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CheckpointMigrate(**arguments)
