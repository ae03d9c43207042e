"""What pages are tested with: a reader of them, a name that is markup, a report of a pipeline."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

from benchmarks.memory.stage_rank import GPT, make_plan
from lightning_autopar.constraints import Constraints
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.report.report import Report
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
