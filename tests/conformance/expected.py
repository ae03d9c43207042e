"""The columns, and what is expected of each cell: parity, unless it is listed here. A change of outcome is a change of this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn

from lightning_autopar.plans import Offload, Plan
from tests.conformance.devices import CPUS
from tests.conformance.features import FEATURES, PLAIN, Feature
from tests.conformance.pinned import PINNED
from tests.conformance.zoo import ZOO

Outcome = Literal["parity", "warned", "refused"]

#: The columns: how many processes each runs on the two devices. A new engine is a new entry.
ENGINES: dict[str, int] = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "pipeline": 2,
    "zero-2": 2,
    "zero-3": 2,
    "zero-3 offload": 2,
    "fsdp offload": 2,
}
_TWO = CPUS.ids(2)
_BOTH: tuple[Offload, ...] = ("optimizer", "parameters")
#: Columns that are one engine's plans of a kind, which is pinned; in the others the planner chooses, with that engine alone allowed.
KINDS: dict[str, Plan] = {
    "zero-2": Plan(engine="zero", devices=_TWO, zero_stage=2),
    "zero-3": Plan(engine="zero", devices=_TWO, zero_stage=3),
    "zero-3 offload": Plan(engine="zero", devices=_TWO, zero_stage=3, offload=_BOTH),
    "fsdp offload": Plan(engine="fsdp", devices=_TWO, reshard_after_forward=True, offload=_BOTH),
}
#: Those of them that DeepSpeed runs.
ZERO = tuple(kind for kind, plan in KINDS.items() if plan.engine == "zero")
#: The engines that split every batch over their ranks, whatever the module.
SPLITTING = ("ddp", "fsdp")
#: What a pipeline tries features with: a module that can be cut, where none of a feature's can.
CUT = {"bf16-true": ("metrics",), "weight-averaging": ("metrics",)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to compare with plain Lightning: a member of the zoo with a feature, or as it is under a pinned plan, on an engine."""

    case: str
    feature: str
    engine: str

    @property
    def id(self) -> str:
        return f"{self.case}-{self.feature}-{self.engine.replace(' ', '-')}"


#: Modules without repeated blocks, which a pipeline cuts between their layers; it tries features on others.
LAYERS = ("lstm", "masked-tokens", "frozen-backbone", "unused-parameters", "nested")
#: (module, engine): words of the sentence that refuses it.
UNCUT: dict[tuple[str, str], str] = {
    ("unused-parameters", "pipeline"): "the code must not dep",
    ("sums", "pipeline"): "the step keeps 'correct' for the next one",
    ("gan", "pipeline"): "the module calls backward by itself",
    **{("gan", kind): "configures 2" for kind in ZERO},
}

MODULE_CELLS = tuple(Cell(case=case, feature=PLAIN.name, engine=engine) for case in ZOO for engine in ENGINES)


def cases_of(feature: Feature, engine: str) -> tuple[str, ...]:
    """The modules that a feature is tried on; under a pipeline one that can be cut: features of those that can't are as their modules."""
    if engine in KINDS:
        # One of them, in each column another, as each takes seconds.
        return feature.cases[list(KINDS).index(engine) % len(feature.cases) :][:1]
    if engine != "pipeline":
        return feature.cases
    return CUT.get(feature.name) or tuple(case for case in feature.cases if (case, engine) not in UNCUT and case not in LAYERS)[:1]


FEATURE_CELLS = tuple(
    Cell(case=case, feature=feature.name, engine=engine)
    for feature in FEATURES.values()
    for engine in ENGINES
    for case in cases_of(feature, engine)
)

PLAN_CELLS = tuple(
    Cell(case=case, feature=pinned.name, engine=engine) for pinned in PINNED.values() for case in pinned.cases for engine in pinned.plans
)
CELLS = MODULE_CELLS + FEATURE_CELLS + PLAN_CELLS
#: Features that other tests of every run compare with plain Lightning, and where: of these it has only what is refused here.
ELSEWHERE = {
    "clip-norm": "tests/strategies/fsdp/test_fsdp.py, tests/strategies/pipeline/test_state.py, tests/exact/step/test_micro_batches.py",
    "schedule-step": "tests/strategies/processes/handover/test_back_to_script.py",
    "schedule-epoch": "tests/strategies/processes/handover/test_back_to_script.py",
    "schedule-plateau": "tests/strategies/zero/test_zero.py, tests/strategies/processes/handover/test_back_to_script.py",
    "early-stopping": "tests/strategies/zero/test_zero.py, tests/strategies/test_launcher.py",
    "checkpoint": "tests/state/test_checkpoint.py",
    "resume": "tests/state/test_checkpoint.py, tests/state/test_snapshot.py",
    "mid-epoch-validation": "tests/strategies/pipeline/test_evaluation.py, tests/strategies/zero/test_zero.py",
    "weight-averaging": "tests/strategies/fsdp/test_module_copies.py",
    "workers": "tests/exact/data/test_loader_in_lightning.py, tests/exact/data/test_worker_random.py",
    "after-fit": "tests/strategies/processes/handover/test_back_to_script.py, tests/strategies/test_launcher.py",
}


def is_quick(cell: Cell) -> bool:
    """Whether every run of the tests has it; `make conformance` has all.

    What is refused is quick. Of the rest, each module runs under one of the engines that split any batch or as a pipeline, in turns; each
    feature that isn't :data:`ELSEWHERE` under one engine, in turns and on one of its modules; each pinned plan under all of its engines,
    each on another module.
    """
    if cell.engine in KINDS:
        return False
    if cell in PLAN_CELLS:
        pinned = PINNED[cell.feature]
        return cell.case == pinned.cases[list(pinned.plans).index(cell.engine) % len(pinned.cases)]
    engine = list(ENGINES).index(cell.engine)
    if cell in MODULE_CELLS:
        return refusal(cell) is not None or cell.engine == _turn(cell.case)
    feature, number = FEATURES[cell.feature], list(FEATURES).index(cell.feature)
    if feature.name in ELSEWHERE:
        return expected(cell) != "parity"
    first = cell.engine == "pipeline" or cell.case == feature.cases[(number + engine) % len(feature.cases)]
    return first and (expected(cell) != "parity" or cell.engine == _TURNS[number % len(_TURNS)])


def _turn(case: str) -> str:
    """The engine under which every run of the tests has the module."""
    number = list(ZOO).index(case)
    return "pipeline" if number % 3 == 0 and (case, "pipeline") not in UNCUT else SPLITTING[number % 2]


#: In this order every run of the tests tries features: replicated, staged, sharded, and now and then on one device.
_TURNS = ("ddp", "pipeline", "fsdp", "ddp", "pipeline", "fsdp", "single")


#: (feature, engine): words of the sentence that refuses it, whatever the module.
REFUSED: dict[tuple[str, str], str] = {
    ("weight-averaging", "pipeline"): "works on the whole module's weights",
    **{("weight-averaging", kind): "works on whole parameters" for kind in ZERO},
}

#: (module, feature): what it takes of a CPU; without, plain Lightning fails as well.
NEEDED: dict[tuple[str, str], str] = {("lstm", "bf16-mixed"): "an LSTM in bf16-mixed needs a CPU with AVX-512"}


def needed(cell: Cell) -> str | None:
    """What the cell needs that not every CPU has; None if any will do."""
    return NEEDED.get((cell.case, cell.feature))


def why_not_here(cell: Cell) -> str | None:
    """Why this CPU can't run the cell; None if it can."""
    return None if _runs_lstm_in_bf16() else needed(cell)


def not_on_the_stub(cell: Cell) -> str | None:
    """What the cell needs that stub GPUs don't have; None if they can run it. Plain Lightning fails on them as well."""
    return {"lstm": "cuDNN's recurrent layers", "graph": "sparse matrices"}.get(cell.case)


@cache
def _runs_lstm_in_bf16() -> bool:
    """Whether this CPU has oneDNN's LSTM in bfloat16."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(4, 12)(torch.zeros(1, 1, 4))
    except RuntimeError:
        return False
    return True


def refusal(cell: Cell) -> str | None:
    """Words of the sentence that refuses the cell; None where it runs."""
    return REFUSED.get((cell.feature, cell.engine)) or UNCUT.get((cell.case, cell.engine))


def expected(cell: Cell) -> Outcome:
    """What the cell must come to."""
    if refusal(cell) is not None:
        return "refused"
    return "parity"
