"""The nightly form: at least 100 moves and 40 kills over all engines, each run drawn from its seed; the figures are kept as a result."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import machine
from tests.chaos.chaos_modules import Variant, draw_variant
from tests.chaos.chaos_runs import Figures, compare, fit_plainly, fit_with
from tests.chaos.chaos_schedules import draw_actions, fsdp, of_one_device, pipeline, pool

pytestmark = [pytest.mark.nightly_chaos, pytest.mark.timeout(400)]

_RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"
MOVES, KILLS = 100, 40
_EPOCHS = 5
_found: dict[str, Figures] = {}
_began = time.monotonic()


def _run(name: str, variant: Variant, folder: Path, actions: Any, **options: Any) -> None:
    exact = options.pop("exact", False)
    plain = fit_plainly(variant, folder / "plain")
    figures = compare(plain, fit_with(variant, folder / "moved", actions, **options), exact=exact)
    _found[name] = figures
    shutil.rmtree(folder)
    print(f"{name}: {figures.moves} moves, {figures.faults} kills, losses within {figures.loss:.1e}, weights within {figures.weight:.1e}")


@pytest.mark.parametrize("seed", range(100, 114))
def test_any_plans(seed: int, tmp_path: Path) -> None:
    variant = draw_variant(seed, epochs=_EPOCHS)
    if variant.data == "two":
        variant = draw_variant(seed, epochs=_EPOCHS, data="map")
    actions = draw_actions(seed, variant, pool(variant, 3), moves=7, kills=3, parks=seed % 2)
    _run(f"any plans, seed {seed}", variant, tmp_path, actions)


@pytest.mark.parametrize("seed", range(200, 203))
def test_the_same_plan(seed: int, tmp_path: Path) -> None:
    variant = draw_variant(seed, epochs=_EPOCHS, data=("two", "map", "stream")[seed % 3], workers=seed % 2)
    actions = draw_actions(seed, variant, of_one_device(3), moves=8, kills=4, parks=1)
    _run(f"one device, seed {seed}", variant, tmp_path, actions, exact=True, allow=["single"])


def test_hybrids(tmp_path: Path) -> None:
    variant = draw_variant(300, epochs=_EPOCHS, data="map", ema=False)
    every = fsdp(0, 1, 2, 3, replicas=2), pipeline(0, 1, 2, 3, replicas=2), fsdp(0, 1, 2, 3)
    actions = draw_actions(300, variant, pool(variant, 4), moves=8, kills=3, every=every)
    _run("hybrids on four devices", variant, tmp_path, actions, devices="4xcpu:1GiB")


def test_there_were_enough_of_them() -> None:
    """Comes last; a run that failed above isn't counted."""
    found = list(_found.values())
    counts = {
        "runs": len(found),
        "moves": sum(each.moves for each in found),
        "parks": sum(each.parks for each in found),
        "kills": sum(each.faults for each in found),
        "batches_done_again": sum(each.again for each in found),
        "samples_lost_or_repeated": 0,  # else the run's comparison would have failed
        "largest_loss_difference": max(each.loss for each in found),
        "largest_weight_difference": max(each.weight for each in found),
        "largest_logged_difference": max(each.logged for each in found),
        "seconds": round(time.monotonic() - _began),
    }
    summed: dict[str, dict[str, int]] = {}
    for kind in ("entered", "left", "struck"):
        summed[kind] = {}
        for each in found:
            for name, count in getattr(each, kind).items():
                summed[kind][name] = summed[kind].get(name, 0) + count
    print(json.dumps(counts, indent=1))
    runs = {
        name: {"moves": each.moves, "kills": each.faults, "loss": each.loss, "weight": each.weight, "logged": each.logged}
        for name, each in _found.items()
    }
    _RESULT.write_text(json.dumps({**machine(), **counts, **summed, "by_run": runs}, indent=1) + "\n", encoding="utf-8")
    assert counts["moves"] >= MOVES
    assert counts["kills"] >= KILLS
