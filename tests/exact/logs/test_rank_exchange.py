"""What ranks send each other of what they logged: values and metrics' states, whoever logged which of them and in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopar.exact.logs.combined_values import OPTIONS, Combiner, Entry
from lightning_autopar.exact.logs.rank_exchange import _MOST_NUMBERS, Exchange
from tests.ranks import run_ranks


def _entry(name: str, *, value: float | None = None, states: Tensor | None = None) -> Entry:
    """A logged number, or a metric whose states go along."""
    return Entry(
        collection=0,
        fx="training_step",
        name=name,
        options=tuple("sum" if option == "reduce_fx" else False for option in OPTIONS),
        dataloader_idx=None,
        is_metric=value is None,
        deferred=value is None,
        value=None if value is None else torch.tensor(value),
        rows=2,
        of=4,
        packed=None if states is None else states.double(),
        packed_numbers=0 if states is None else len(states),
    )


def _heard(exchange: Exchange, entries: list[Entry]) -> tuple[dict[str, Any], int]:
    """What came of an exchange by name, and how many collectives it took."""
    calls, gather = [], dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return gather(*args, **options)

    dist.all_gather = counted  # type: ignore[assignment]
    try:
        _, found = exchange(entries)
    finally:
        dist.all_gather = gather  # type: ignore[assignment]
    return {
        entry.name: entry.packed.tolist() if entry.packed is not None else None if value is None else float(value)
        for entry, value, _ in found
    }, len(calls)


def _exchanged(rank: int, world_size: int) -> list[Any]:
    exchange = Exchange(Combiner(), device=torch.device("cpu"))
    exchange.open()
    try:
        states = {name: torch.arange(count) + 10 * rank for name, count in (("a", 2), ("b", 3))}
        a, b, value = _entry("a", states=states["a"]), _entry("b", states=states["b"]), _entry("loss", value=1.0 + rank)
        alike = [_heard(exchange, [a, value, b]) for _ in range(2)]
        others = [_heard(exchange, [value, b, a] if rank else [a, value]) for _ in range(2)]
        odd = _heard(exchange, [_entry("a", states=torch.arange(2 + rank))])
        large = _entry("large", states=torch.full((1000,), float(rank)))
        larger = [_heard(exchange, [large, value])[1] for _ in range(3)]
        small = [_heard(exchange, [value])[1] for _ in range(2)]
        largest = _entry("largest", states=torch.zeros(_MOST_NUMBERS))
        return [alike, others, odd, larger, small, [_heard(exchange, [largest])[1] for _ in range(2)]]
    finally:
        exchange.close()


def test_states_go_beside_values_whoever_logged_them_and_in_which_order() -> None:
    both = {"a": [[0.0, 1.0], [10.0, 11.0]], "loss": 3.0, "b": [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]}
    for alike, others, odd, larger, small, largest in run_ranks(_exchanged, 2):
        assert alike == [(both, 1)] * 2
        assert others == [({**both, "b": [[10.0, 11.0, 12.0]]}, 1)] * 2, "rank 0 has no b"
        assert odd[0] == {"a": None}, "states of unequal lengths take the metric's own way"
        assert larger == [2, 1, 1], "there is room for as much as the last one needed"
        assert small == [1, 1]
        assert largest == [2, 2], "but no padding of every exchange to what is as large as that"
