"""From what was found out once follows the best plan for any devices, and what it needs of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_autopar import NothingFits
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.preparation import confirmed_plan
from lightning_autopar.strategies.preparation.planning_inputs import Settings, find_prospect
from tests.strategies.preparation.test_planning_inputs import Dataset, Net, trainer_for


def test_what_failed_its_trial_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits plans many times, on devices that come and go."""
    tries = []

    def fail(trainer: Any, look: Any, plan: Plan) -> Any:
        tries.append(plan.engine)
        return replace(look.constraints, excluded={**look.constraints.excluded, plan.engine: "it fails"})

    monkeypatch.setattr(confirmed_plan, "after_trial", fail)
    trainer = trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path)
    inventory = parse_spec("2xcpu:1GiB")
    found = find_prospect(trainer, Settings(allow=("single", "ddp")), (inventory, None))
    assert found.need(inventory) is not None
    for _ in range(2):
        with pytest.raises(NothingFits, match="it fails"):
            found.decision(inventory)
    assert sorted(tries) == ["ddp", "single"]
    assert found.need(inventory) is None


def test_what_must_be_free_for_a_plan(tmp_path: Path) -> None:
    """With so much free the same plan fits, and with a byte less it doesn't."""
    trainer = trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path)
    inventory = parse_spec("cpu:1GiB")
    found = find_prospect(trainer, Settings(allow=("single",), memory_margin=0.3), (inventory, None))
    decision = found.decision(inventory)
    assert decision.need.seconds == decision.expected_seconds == pytest.approx(3 * decision.candidate.step_seconds)
    (wanted,) = decision.need.bytes.values()
    (device,) = inventory.devices
    pinned = Settings(allow=("single",), memory_margin=0.3, plan=decision.run_plan.plan)
    for free_bytes, fits in ((wanted, True), (wanted - 2, False)):
        there = replace(inventory, devices=(replace(device, free_bytes=free_bytes),))
        need = find_prospect(trainer, pinned, (there, None)).need(there)
        assert (need is not None) is fits
        assert need is None or dict(need.bytes) == {"cpu:0": wanted}
