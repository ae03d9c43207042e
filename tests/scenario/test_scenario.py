"""A shared box: six runs of different sizes and priorities on three devices, with a stranger who comes and goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenario.scenario_box import killed, play
from tests.scenario.scenario_runs import SPECS, train


def check(box: dict[str, Any], folder: Path) -> None:
    """All that must hold however the runs and the stranger come together."""
    gone = killed(box)
    for spec in box["specs"]:
        if spec["name"] in gone:
            continue
        log = (folder / f"{spec['name']}.log").read_text(encoding="utf-8")[-3000:]
        assert box["ended"][spec["name"]]["code"] == 0, f"{spec['name']}: {log}"
    assert box["left"] == [], "a lease or a place was left behind"
    for sample in box["samples"]:
        for device in ("cpu:0", "cpu:1", "cpu:2"):
            leased = sum(sizes.get(device, 0) for sizes in sample["leases"].values())
            assert leased + sample["taken"].get(device, 0) <= box["device_bytes"], sample
            used = sum(run[3].get(device, 0) for run in sample["runs"].values())
            assert used + sample["taken"].get(device, 0) <= box["device_bytes"], sample
    for spec in SPECS:
        if spec.name in gone:
            continue
        shared, plain = (torch.load(folder / f"{spec.name}-{kind}.pt") for kind in ("shared", "plain"))
        for name, weight in plain.items():
            torch.testing.assert_close(shared[name], weight, rtol=1e-5, atol=1e-6, msg=f"{spec.name}: {name}")


def train_plainly(folder: Path) -> None:
    """The undisturbed runs, by plain Lightning."""
    for spec in SPECS:
        train(spec, folder, plainly=True)


@pytest.mark.timeout(400)
def test_everybody_gets_through(tmp_path: Path) -> None:
    box = play(tmp_path, 0)
    train_plainly(tmp_path)
    check(box, tmp_path)
    states = {name: [sample["runs"][name][0] for sample in box["samples"] if name in sample["runs"]] for name in box["ended"]}
    assert "queued" in states["plain"], "it came when nothing was free"
    assert "queued" in states["urgent"]
    assert any("parked" in states[name] for name in ("large", "middle", "patient")), "somebody made room"
    assert not any("parked" in states[name] for name in ("plain", "small", "urgent")), "who isn't elastic is never asked"
    asked = next(sample for sample in box["samples"] if any(place[0] == "urgent" and place[2] for place in sample["places"]))
    given = next(sample for sample in box["samples"] if "urgent" in sample["leases"])
    assert given["at"] - asked["at"] < 10, "within seconds"
    assert box["ended"]["urgent"]["at"] < box["ended"]["large"]["at"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(1, 7))
def test_everybody_gets_through_whatever_happens(seed: int, tmp_path: Path) -> None:
    """Other priorities and moments; a run is killed, and another one is stopped for a while."""
    box = play(tmp_path, seed)
    train_plainly(tmp_path)
    check(box, tmp_path)
