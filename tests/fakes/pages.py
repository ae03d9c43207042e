"""What pages are tested with: a reader of them, a name that is markup, a report of a pipeline and a run that moved."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

from benchmarks.memory.stage_rank import GPT, make_plan
from lightning_autopar.constraints import Constraints
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.planner import make_report
from lightning_autopar.report.report import Report
from lightning_autopar.report.run_history import LossPoint, MemorySample, MemoryUse, PlanSpan, RunHistory, RunMark
from tests.fakes.values import GIB, cpu, inventory
from tests.memory.stages import ROWS

NASTY = "<img src='http://x/y' onerror=\"alert(1)\">&amp;"
_ALONE = {"meta"}


class Parsed(HTMLParser):
    """A page as its parts; what isn't closed as it was opened is an error."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.style = ""
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), f"an attribute stands twice in {self.get_starttag_text()}"
        self.tags.append((tag, dict(attributes)))
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        elif data.strip():
            self.words.append(data.strip())

    def attributes(self, tag: str, name: str) -> list[str]:
        return [found[name] or "" for each, found in self.tags if each == tag and name in found]


def pipelined() -> Report:
    """Four stages on four uneven devices, pinned."""
    model = GPT()
    tokens = torch.zeros(ROWS, model.length, dtype=torch.long)
    step = trace(model, None, FirstBatch(batch=tokens, batch_size=ROWS), stage="fit", precision="32-true", target="cpu")
    here = inventory(*(cpu(index, size * GIB) for index, size in enumerate((8, 12, 12, 16))))
    return make_report(step, here, Constraints(pinned=make_plan("1f1b", 4, 8, 8)))


SPANS = (
    PlanSpan(start_seconds=0, end_seconds=30, title="single", devices=("cpu:0",), predicted_bytes={"cpu:0": 2 * GIB}),
    PlanSpan(start_seconds=32, end_seconds=60, title="ddp ×2", devices=("cpu:0", "cpu:1"), predicted_bytes={"cpu:0": GIB, "cpu:1": GIB}),
    PlanSpan(start_seconds=60, end_seconds=80, title="parked"),
    PlanSpan(start_seconds=80, end_seconds=100, title="single", devices=("cpu:0",)),
)
MARKS = (
    RunMark(at_seconds=30, kind="move", words="a device is free again"),
    RunMark(at_seconds=60, kind="failure", words=NASTY),
    RunMark(at_seconds=80, kind="resume", words="the neighbour left"),
)
MEMORY = (
    MemorySample(at_seconds=0, devices={"cpu:0": MemoryUse(2 * GIB, 0, 4 * GIB), "cpu:1": MemoryUse(0, GIB, 4 * GIB)}),
    MemorySample(at_seconds=50, devices={"cpu:0": MemoryUse(GIB, 2 * GIB, 4 * GIB)}),
)
LOSSES = tuple(LossPoint(at, at, 2 - at / 100) for at in (*range(60), *range(80, 100)))
HISTORY = RunHistory(title=NASTY, spans=SPANS, marks=MARKS, memory=MEMORY, losses=LOSSES)
