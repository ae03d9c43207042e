import math
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints, check_allow
from tests.fakes.values import GIB, cpu


def test_allow_is_checked() -> None:
    assert check_allow("fsdp") == ("fsdp",)
    assert check_allow(["ddp", "single", "ddp"]) == ("ddp", "single")
    with pytest.raises(ValueError, match=r"unknown engine 'fdsp'.*'pipeline': did you mean 'fsdp'\?"):
        check_allow(["single", "fdsp"])
    with pytest.raises(ValueError, match="leaves no engine"):
        check_allow([])


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"max_devices": 0}, "max_devices=0"),
        ({"memory_limit_bytes": 0}, "0 bytes"),
        ({"memory_margin": 1.0}, "memory_margin=1.0"),
        ({"memory_margin": math.nan}, "memory_margin=nan"),
        ({"memory_margin": "much"}, "memory_margin='much' must be a share"),
        ({"objective": "cost"}, "choose 'speed' or 'memory'"),
        ({"allow": ("fast",)}, "unknown engine 'fast'"),
        ({"min_devices": 4, "max_devices": 2}, "4 processes were started"),
    ],
)
def test_constraints_are_checked(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Constraints(**constraints)


def test_the_budget_is_what_is_free_or_the_limit_less_the_margin() -> None:
    assert Constraints(memory_margin=0.25).budget_bytes(cpu(0, 4 * GIB)) == 3 * GIB
    assert Constraints(memory_margin=0.0, memory_limit_bytes=GIB).budget_bytes(cpu(0, 4 * GIB)) == GIB
    assert Constraints(memory_margin=0.0, memory_limit_bytes=8 * GIB).budget_bytes(cpu(0, 4 * GIB)) == 4 * GIB
