"""What a report says of particular devices, as ways that any of their kind may have."""

from __future__ import annotations

from typing import Any

from lightning_autopar.sharing.sweep.scheduler import SweepDevice, devices_of, options_of, scaled

GiB = 2**30


def report(
    *candidates: dict[str, Any], links: dict[tuple[int, int], str] | None = None, free: tuple[int, ...] = (8, 8, 8, 8)
) -> dict[str, Any]:
    devices = [
        {
            "id": f"d{index}",
            "kind": "cuda",
            "name": "H100",
            "node": 0,
            "slowdown": 1.0,
            "threads": None,
            "error": None,
            "free_bytes": size * GiB,
        }
        for index, size in enumerate(free)
    ]
    found = [{"a": f"d{a}", "b": f"d{b}", "kind": kind, "bytes_per_second": None} for (a, b), kind in (links or {}).items()]
    budgets = {f"d{index}": size * GiB - 1000 for index, size in enumerate(free)}
    return {
        "inventory": {"devices": devices, "links": found},
        "budgets": budgets,
        "candidates": list(candidates),
    }


def candidate(engine: str, ids: str, run_seconds: float | None, *, needs: int = GiB, fits: bool = True) -> dict[str, Any]:
    devices = ids.split()
    step = 1.0 if run_seconds is None else run_seconds / 100
    return {
        "plan": {"engine": engine, "devices": devices},
        "fits": fits,
        "seconds": {"step": step},
        "needs_bytes": dict.fromkeys(devices, needs),
        "run_seconds": run_seconds,
    }


def test_the_fastest_fitting_plan_of_each_number_of_devices_is_a_way() -> None:
    found = options_of(
        report(
            candidate("fsdp", "d0 d1", 60),
            candidate("ddp", "d0 d1", 50),
            candidate("single", "d0", 90),
            candidate("zero", "d0 d1 d2", 10, fits=False),
        ),
        start_seconds=5,
    )
    assert [(option.title, option.seconds, len(option.needs)) for option in found] == [("single", 95, 1), ("ddp on 2", 55, 2)]
    assert found[0].needs[0].needed_bytes == GiB + 1000  # with what must be left alone
    assert not found[1].among


def test_more_devices_that_bring_nothing_are_no_way() -> None:
    found = options_of(report(candidate("single", "d0", 50), candidate("ddp", "d0 d1", 50), candidate("fsdp", "d0 d1 d2", 70)))
    assert [option.title for option in found] == ["single"]


def test_a_slower_plan_that_runs_on_smaller_devices_stays() -> None:
    found = options_of(
        report(candidate("single", "d0", 50, needs=6 * GiB), candidate("fsdp", "d0", 80, needs=GiB), free=(8, 8, 2, 2)),
    )
    assert sorted(option.title for option in found) == ["fsdp", "single"]


def test_where_links_differ_a_way_has_only_sets_that_are_linked_as_well() -> None:
    links = {(0, 1): "nvlink", (2, 3): "nvlink", (0, 2): "pcie", (0, 3): "pcie", (1, 2): "pcie", (1, 3): "pcie"}
    fast, slow = options_of(report(candidate("ddp", "d0 d1", 50), candidate("ddp", "d1 d2 d3", 40), links=links))
    assert set(fast.among) == {frozenset(("d0", "d1")), frozenset(("d2", "d3"))}
    assert len(slow.among) == 4


def test_a_length_that_nobody_knows_counts_as_it_is_said_to() -> None:
    words = report(candidate("single", "d0", None))
    assert options_of(words) == ()
    (option,) = options_of(words, unknown_seconds=300, start_seconds=10)
    assert option.seconds == 310


def test_devices_with_an_error_are_nobodys() -> None:
    words = report(candidate("single", "d0", 50), candidate("ddp", "d0 d1", 20))
    words["inventory"]["devices"][1]["error"] = "XID 79"
    assert devices_of(words) == [SweepDevice(id=f"d{index}", kind="H100", free_bytes=8 * GiB) for index in (0, 2, 3)]
    assert [option.title for option in options_of(words)] == ["single"]


def test_scaled_ways_take_longer_and_nothing_else() -> None:
    options = options_of(report(candidate("single", "d0", 50)))
    assert [option.seconds for option in scaled(options, 1.5)] == [75]
    assert scaled(options, 1.5)[0].needs == options[0].needs
