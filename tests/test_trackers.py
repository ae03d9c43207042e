"""What trackers that the script has begun get from forked processes: each row once, of the one process that goes on with them.

Event files of TensorBoard's and runs of Weights & Biases: ``tests/callbacks/test_loggers.py``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import Queue, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_autopar import _trackers
from lightning_autopar._fork import run_forked
from tests.callbacks.test_loggers import Net, fit


class Active:
    """MLflow's ``ThreadLocalVariable``: a forked process has its default again."""

    def __init__(self) -> None:
        self.default_factory: Any = list
        self.values: dict[int, tuple[int, Any]] = {}

    def get(self) -> Any:
        ident = threading.get_ident()
        if ident not in self.values or self.values[ident][0] != os.getpid():
            self.values[ident] = os.getpid(), self.default_factory()
        return self.values[ident][1]

    def get_all_thread_values(self) -> dict[int, Any]:
        return {ident: value for ident, (_, value) in self.values.items()}


class Store:
    """Keeps rows in a file, and who begins a run."""

    def __init__(self, rows: Path) -> None:
        self.rows = rows

    def log_metric(self, run_id: str, metric: str) -> None:
        with self.rows.open("a") as file:
            file.write(f"{run_id} {metric}\n")

    def get_run(self, run_id: str) -> str:
        return f"the run {run_id}"

    def create_run(self, *args: Any) -> Any:
        self.log_metric("new", "run")
        return SimpleNamespace(info=SimpleNamespace(run_id="new"))


class Client:
    """``TrackingServiceClient``; the tests have one place for rows."""

    rows: Path

    @property
    def store(self) -> Store:
        return Store(self.rows)

    def _get_artifact_repo(self, run_id: str) -> Any:
        return SimpleNamespace(log_artifact=lambda path: self.store.log_metric(run_id, path), root="here")


def log_metric(metric: str) -> None:
    """As ``mlflow.log_metric``, which begins a run where none is active."""
    runs = sys.modules["mlflow.tracking.fluent"]._active_run_stack.get()
    if not runs:
        runs.append(Client().store.create_run("0", "me", 0, [], None))
    Client().store.log_metric(runs[-1].info.run_id, metric)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MLflow with an active run; gives the file of its rows."""

    def info(run_id: str, *args: Any, run_name: str | None) -> Any:
        return SimpleNamespace(run_id=run_id, run_name=run_name)

    modules = {
        "tracking.fluent": {"_active_run_stack": Active()},
        "tracking._tracking_service.client": {"TrackingServiceClient": Client},
        "entities": {"Run": lambda info, data: SimpleNamespace(info=info), "RunInfo": info, "RunData": lambda tags: None},
    }
    for name, contents in modules.items():
        module = ModuleType(f"mlflow.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"mlflow.{name}", module)
    monkeypatch.setattr(Client, "rows", tmp_path / "rows", raising=False)
    (tmp_path / "rows").touch()
    sys.modules["mlflow.tracking.fluent"]._active_run_stack.get().append(SimpleNamespace(info=SimpleNamespace(run_id="run")))
    return tmp_path / "rows"


class Told(Net):
    """Tells a queue of ``logging``, MLflow's active run and a writer of tensorboardX's of its steps."""

    def __init__(self, log: logging.Logger, writer: Any) -> None:
        super().__init__()
        self.tell = [lambda number: log.info("%d", number), lambda number: log_metric(f"{number}"), lambda number: writer.put(number)]

    def training_step(self, batch: Any, index: int) -> Any:
        for each in self.tell:
            each(index)
        return super().training_step(batch, index)


class _EventLoggerThread(threading.Thread):
    """tensorboardX's: it ends at a signal, and writes all else."""

    def __init__(self, rows: Path) -> None:
        super().__init__(daemon=True)
        self._queue: Any = multiprocessing.Queue(3)
        self._record_writer = rows.open("a")

    def stop(self) -> None:
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        while (row := self._queue.get()) is not None:
            self._record_writer.write(f"{row}\n")


@pytest.mark.parametrize(("allow", "queue"), [("single", Queue), ("ddp", Queue), ("ddp", SimpleQueue)])
def test_each_row_is_there_once(allow: str, queue: Any, mlflow: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    lines = logging.FileHandler(tmp_path / "lines")
    listener = QueueListener(queue(), lines)
    listener.start()
    log = logging.Logger("told", logging.INFO)
    log.addHandler(QueueHandler(listener.queue))
    thread = _EventLoggerThread(tmp_path / "events")
    thread.start()
    module = Told(log, thread._queue)
    try:
        fit([], [allow], module=module)
        log.info("after")
        log_metric("after")
        thread._queue.put("after")
    finally:
        listener.stop()
        thread.stop()
        thread._record_writer.close()
        lines.close()
    every = ["0", "1", "2", "3", "after"]
    assert (tmp_path / "lines").read_text().split() == every
    assert (tmp_path / "events").read_text().split() == every
    assert mlflow.read_text().splitlines() == [f"run {row}" for row in every]
    notes = [str(each.message) for each in recwarn if "the step calls its logger or another tracker directly" in str(each.message)]
    assert len(notes) == (allow == "ddp")


def test_a_trial_reads_of_mlflow_and_writes_nothing(mlflow: Path) -> None:
    def body() -> list[Any]:
        before = _trackers.untold()
        store: Any = Client().store
        known = [store.get_run("run"), Client()._get_artifact_repo("run").root]
        Client()._get_artifact_repo("run").log_artifact("weights")
        run = store.create_run("0", "me", 0, [], "trial")
        store.log_metric(run.info.run_id, "loss")
        log_metric("loss")
        nested = run_forked(lambda: [log_metric("loss"), store.get_run(run.info.run_id).info.run_name])
        return [*known, store.get_run(run.info.run_id).info.run_name, _trackers.untold() - before, nested]

    assert run_forked(body) == ["the run run", "here", "trial", 3, [None, "trial"]]
    assert mlflow.read_text() == ""
