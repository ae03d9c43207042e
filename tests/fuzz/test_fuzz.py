"""A few generated scripts under a plan each; many more are `make fuzz`'s."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.fresh import fresh
from tests.fuzz.module import member
from tests.fuzz.recipe import KINDS, draw
from tests.fuzz.run import DEFECTS
from tests.packages.cell import findings
from tests.packages.judge import Finding
from tests.packages.plans import PLANS

#: Seeds and plans that once came out otherwise than plain Lightning.
MENDED = ((2, "micro-batches"), (739, "ddp"), (740, "ddp"))


def test_a_seed_names_the_same_parts_for_ever() -> None:
    assert str(draw(2)).startswith("seed=2, net=mlp, dropout=0.0, loss=classes, batch=dict, loader=plain, samples=32, validation=none")
    assert str(draw(2)).endswith("hook=average-inside, optimizer=groups, schedule=none, clip=none, accumulate=2, callback=own")
    assert all(asdict(draw(seed))[name] in kinds for seed in range(50) for name, kinds in KINDS.items())


def found(seed: int, plan: str) -> Finding:
    """What a seed comes to under a plan. Its runs are forked off the calling process, which must have trained nothing."""
    ((_, finding),) = findings(member(draw(seed)), [plan])
    return finding


@pytest.mark.parametrize(("seed", "plan"), [*zip(range(101, 107), PLANS, strict=True), *MENDED])
def test_a_generated_script_is_plain_lightnings_run_or_refused(seed: int, plan: str) -> None:
    finding = fresh(found, seed, plan)
    assert finding.outcome not in DEFECTS, f"{finding.reason} {finding.where}: {finding.beyond}"
