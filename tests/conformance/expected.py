"""The engines, and what is expected of each cell: parity, unless it is listed here. A change of outcome is a change of this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.conformance.features import FEATURES, PLAIN
from tests.conformance.pinned import PINNED
from tests.conformance.zoo import ZOO

Outcome = Literal["parity", "warned", "refused"]

#: The columns: how many processes each runs on the two devices. A new engine is a new entry.
ENGINES: dict[str, int] = {"single": 1, "ddp": 2, "fsdp": 2}
DEVICES = "2xcpu:4GiB"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to compare with plain Lightning: a member of the zoo with a feature, or as it is under a pinned plan, on an engine."""

    case: str
    feature: str
    engine: str

    @property
    def id(self) -> str:
        return f"{self.case}-{self.feature}-{self.engine}"


MODULE_CELLS = tuple(Cell(case=case, feature=PLAIN.name, engine=engine) for case in ZOO for engine in ENGINES)
FEATURE_CELLS = tuple(
    Cell(case=case, feature=feature.name, engine=engine) for feature in FEATURES.values() for case in feature.cases for engine in ENGINES
)

PLAN_CELLS = tuple(
    Cell(case=case, feature=pinned.name, engine=engine) for pinned in PINNED.values() for case in pinned.cases for engine in pinned.plans
)
CELLS = MODULE_CELLS + FEATURE_CELLS + PLAN_CELLS

#: (feature, engine): words of the sentence that refuses it, whatever the module.
REFUSED: dict[tuple[str, str], str] = {("weight-averaging", "fsdp"): "works on whole parameters"}


def expected(cell: Cell) -> Outcome:
    """What the cell must come to."""
    if (cell.feature, cell.engine) in REFUSED:
        return "refused"
    if not ZOO[cell.case].mean and ENGINES[cell.engine] > 1:
        return "warned"
    return "parity"
