"""When a rank waits for the others before it gathers a unit."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autopar.strategies.fsdp import same_collectives
from lightning_autopar.strategies.fsdp.same_collectives import GatherOrder


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        (["abc", "abc"], [[], []]),
        (["bac", "bac"], [["b", "a"], []]),  # a step's own order is known from its first time on
        (["ac", "ac"], [["c"], []]),  # a unit that no step needs costs nothing after the first
        (["abcab", "abcab"], [["a", "b"], []]),  # gathered again for each call
        (["ab", "ab", "abc"], [["c"], [], ["c"]]),
        (["", ""], [["a"], []]),
    ],
)
def test_a_rank_waits_where_its_order_is_another_than_in_the_step_before(
    steps: list[str], waits: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    def wait(what: str, *_: Any, **__: Any) -> None:
        assert "was called" in what or "ended without" in what
        waited.append(what.split("'")[1])

    monkeypatch.setattr(same_collectives, "wait_for_all_ranks", wait)
    order = GatherOrder(list("abc"))
    for step, expected in zip(steps, waits, strict=True):
        waited.clear()
        order.begin()
        for name in step:
            order.gathers(name)
        order.end()
        assert waited == expected
