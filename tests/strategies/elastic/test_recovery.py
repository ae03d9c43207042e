"""What a run goes on from after a failure."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.strategies.elastic.agent import is_still_there, with_more
from lightning_autopar.strategies.preparation.decision import Decision
from tests.strategies.base.out_of_memory.test_gpu_limit import GIB, assigned


class Promised:
    """An elastic run's promises, granted or not."""

    def __init__(self, *, granted: bool = True, held: bool = True) -> None:
        self.held_bytes = {"cuda:0": 10 * GIB} if held else {}
        self.granted, self.asked = granted, list[dict[str, int]]()

    def take(self, wants: dict[str, int], running: object) -> str | None:
        assert running is None, "the generation that ran out is gone"
        self.asked.append(wants)
        return None if self.granted else "others have it"


@pytest.mark.parametrize(
    ("promises", "kind", "grown"),
    [
        (Promised(), "cuda", True),
        (Promised(granted=False), "cuda", False),
        (Promised(held=False), "cuda", False),
        (Promised(), "cpu", False),
    ],
    ids=["granted", "refused", "no leases", "CPU device"],
)
def test_an_elastic_run_keeps_its_plan_where_it_is_promised_more(promises: Promised, kind: str, grown: bool) -> None:
    decision = Decision(report=SimpleNamespace(), run_plan=assigned(kind))  # type: ignore[arg-type]
    found = with_more(decision, promises)  # type: ignore[arg-type]
    assert (found is not None) == grown
    if found is not None:
        assert promises.asked == [{"cuda:0": int(12.5 * GIB)}]
        assert found.run_plan.needed_bytes == promises.asked[0]
        assert found.run_plan.plan == decision.run_plan.plan


@pytest.mark.parametrize(("spec", "there"), [("cpu:20GiB", True), ("cpu:9GiB", True), ("cpu:8GiB", False)])
def test_a_plan_stays_where_its_devices_have_room_for_it(spec: str, there: bool) -> None:
    decision = Decision(report=SimpleNamespace(), run_plan=assigned())  # type: ignore[arg-type]
    assert decision.run_plan.reserved_bytes == {"cpu:0": 9 * GIB}
    assert is_still_there(decision, parse_spec(spec)) is there


def test_a_plan_whose_device_has_gone_does_not_stay() -> None:
    decision = Decision(report=SimpleNamespace(), run_plan=assigned())  # type: ignore[arg-type]
    inventory = parse_spec("cpu:20GiB")
    elsewhere = replace(inventory, devices=(replace(inventory.devices[0], id="cpu:1"),))
    assert not is_still_there(decision, elsewhere)
