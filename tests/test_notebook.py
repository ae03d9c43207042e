"""A notebook in a real kernel: examples/notebook.ipynb, and what only shows there: bars of forked workers, and the stop button."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
_CELL_SECONDS = 120
_BARS = """
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar


def replicas(*callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "max_epochs": 1}
    return L.Trainer(strategy=AutoParallelStrategy(allow=["ddp"]), callbacks=list(callbacks), **{**quiet, **options})


replicas(TQDMProgressBar()).fit(Waves(), loader)
"""
_RICH = "replicas(RichProgressBar()).fit(Waves(), loader)"
_ENDLESS = """
from pathlib import Path


class Told(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and trainer.is_global_zero:
            print("printed by a worker")
            Path({flag!r}).touch()


stopped = replicas(Told(), max_epochs=-1, enable_progress_bar=False)
stopped.fit(Waves(), loader)
"""
_AFTERWARDS = """
print("stopped after", stopped.global_step > 0, stopped.state.status)
again = replicas(enable_progress_bar=False)
again.fit(Waves(), loader)
print("again", again.global_step)
"""


class Session:
    """The example with further cells, executed by one kernel."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "running"
        self.book = nbformat.read(NOTEBOOK, as_version=4)
        self.own = len(self.book.cells)
        for source in (_BARS, _RICH, _ENDLESS.format(flag=str(self.flag)), _AFTERWARDS):
            self.book.cells.append(nbformat.v4.new_code_cell(source))
        self.stopped_at = self.own + 2
        self.left_behind: list[str] = []
        self.client = nbclient.NotebookClient(
            self.book, timeout=_CELL_SECONDS, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        # Its stand-in for an Output widget answers on the socket that it waits on, and now and then misses what comes in meanwhile; without
        # it what a widget shows is the cell's.
        self.client.comm_open_handlers = {}
        self.client.on_cell_execute = self._begun
        self.client.execute()

    def _begun(self, cell: Any, cell_index: int) -> None:
        if cell_index == self.stopped_at:
            threading.Thread(target=self._stop, daemon=True).start()
        if cell_index == self.stopped_at + 1:  # after the stop: the kernel alone
            self.left_behind = [child.name() for child in psutil.Process(self._kernel()).children(recursive=True)]

    def _kernel(self) -> int:
        return int(self.client.km.provisioner.pid)

    def _stop(self) -> None:
        """The stop button, once the run is on."""
        ends = time.monotonic() + _CELL_SECONDS
        while not self.flag.exists() and time.monotonic() < ends:
            time.sleep(0.02)
        asked = self.client.km.interrupt_kernel()
        if inspect.isawaitable(asked):
            asyncio.run(asked)  # type: ignore[arg-type]

    def outputs(self, index: int) -> list[Any]:
        return list(self.book.cells[index].get("outputs", []))

    def data(self, index: int, mime: str) -> list[str]:
        return [output["data"][mime] for output in self.outputs(index) if mime in output.get("data", {})]

    def text(self, index: int, name: str = "stdout") -> str:
        return "".join(output["text"] for output in self.outputs(index) if output["output_type"] == "stream" and output["name"] == name)

    def errors(self, index: int) -> list[str]:
        """What was raised in a cell: of ours that went wrong the whole traceback, so that a failure here can be read."""
        found = [output for output in self.outputs(index) if output["output_type"] == "error"]
        return ["\n".join(output["traceback"]) if index < self.own else output["ename"] for output in found]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_DEVICES", "2xcpu:2GiB")
        patch.setenv("AUTOPAR_CACHE", "off")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("IPYTHONDIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parent.parent), os.environ.get("PYTHONPATH", "")]))
        yield Session(folder)


def _cell(session: Session, words: str) -> int:
    (index,) = (index for index, cell in enumerate(session.book.cells) if cell.cell_type == "code" and words in cell.source)
    return index


def test_the_example_has_no_outputs_and_is_small() -> None:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert NOTEBOOK.stat().st_size < 20_000


def test_the_example_runs(session: Session) -> None:
    for index in range(session.own):
        assert session.errors(index) == []
    assert session.text(_cell(session, "took")).startswith("ddp ×2 took {'cpu:0'")
    accuracy = session.text(_cell(session, "argmax"))
    assert float(accuracy.split()[1].rstrip("%")) > 50  # of four waves: the weights that the workers trained are here


def test_reports_show_themselves_as_pages_and_runs_as_text(session: Session) -> None:
    (report,) = session.data(_cell(session, "lightning_autopar.plan("), "text/html")
    assert report.startswith('<div id="autopar-')
    assert "Memory of each device" in report
    (plain,) = session.data(_cell(session, "lightning_autopar.plan("), "text/plain")
    assert plain.startswith("Model: ")  # the table, for where no HTML is shown
    history = session.data(_cell(session, "strategy.history"), "text/plain")[-1]
    assert history.startswith("Waves, ")


def test_progress_bars_of_forked_workers_are_shown(session: Session) -> None:
    assert session.errors(session.own) == []
    (view,) = session.data(session.own, "application/vnd.jupyter.widget-view+json")
    states = session.client.widget_state
    parts = [states[name.removeprefix("IPY_MODEL_")] for name in states[view["model_id"]]["children"]]
    assert any("16/16" in str(part.get("value")) for part in parts)
    assert any("100%" in str(part.get("value")) for part in parts)
    assert any("loss=" in str(part.get("value")) for part in parts)
    rich = session.data(session.own + 1, "text/plain")
    assert any("16/16" in words and "loss:" in words for words in rich)


def test_the_stop_button_ends_the_run_and_the_next_cell_works(session: Session) -> None:
    assert session.flag.exists()
    assert "printed by a worker" in session.text(session.stopped_at)
    # Lightning answers an interrupt by exit(1), which ends the cell.
    assert session.errors(session.stopped_at) in (["SystemExit"], ["KeyboardInterrupt"])
    assert session.left_behind == []
    assert session.errors(session.stopped_at + 1) == []
    said = session.text(session.stopped_at + 1)
    assert "stopped after True" in said
    assert "interrupted" in said.lower()
    assert "again 16" in said
