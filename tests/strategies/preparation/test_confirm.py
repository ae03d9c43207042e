"""What tracing didn't try of a plan is tried before the plan is taken, in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import NothingFits
from lightning_autopar.engines import Finding
from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.strategies.pipeline.rehearsal import stage_probe
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.preparation import confirmed_plan as confirm
from tests.strategies.preparation.test_planning_inputs import Stack, pinned, plan, staged, trainer_for


@pytest.mark.parametrize("found", ["right", "wrong", "unknown"])
def test_stages_that_were_only_recorded_are_tried_before_they_are_taken(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, after_trial, asked, unchanged = stage_probe.probe_stages, confirm.after_trial, [], []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        why = "a step is too long to try on the CPU"
        return replace(probe(*args, **kwargs), untried=why, notes=(stage_probe.untried_words(why),))

    def confirmed(module: Any, trainer: Any, batches: Any, fn: str, cuts: Any, **options: Any) -> Finding:
        assert set(batches) == {"training_step"}
        asked.append(cuts)
        refusal = "in stages the loss is 1 instead of 2" if found == "wrong" else None
        return Finding(value=Staging(refusal=refusal), untried="of its length" if found == "unknown" else None)

    def after(trainer: Any, look: Any, plan: Any) -> Any:
        constraints = after_trial(trainer, look, plan)
        unchanged.append(constraints is look.constraints)
        return constraints

    monkeypatch.setattr(confirm, "after_trial", after)
    monkeypatch.setattr(stage_probe, "probe_stages", recorded)
    monkeypatch.setattr(stage_probe, "confirm_stages", confirmed)
    monkeypatch.setattr(confirm, "run_clean", lambda function, *args, timeout_seconds: function(*args))  # in here, to be counted
    decision = staged(Stack(), tmp_path, allow=("ddp", "pipeline"), plan=pinned("blocks.2")) if found != "wrong" else None
    if decision is None:
        with pytest.raises(NothingFits, match="in stages the loss is 1 instead of 2"):
            staged(Stack(), tmp_path)
        assert asked
        return
    assert asked == [("blocks.2",)]
    noted = any("only checked as they run: no trial was made, as a step is too long" in note for note in decision.candidate.notes)
    assert noted == unchanged[0] == (found == "unknown"), "what a trial left as it was isn't planned for anew"


def test_a_plans_stages_are_tried_in_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, pids = Stack(), tmp_path / "pids"
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)
    trainer = trainer_for(module, loader, tmp_path)
    footprint = plan(trainer).report.footprint
    confirm_stages = stage_probe.confirm_stages

    def noted(*args: Any, **kwargs: Any) -> Finding:
        pids.write_text(str(os.getpid()))
        return confirm_stages(*args, **kwargs)

    monkeypatch.setattr(stage_probe, "confirm_stages", noted)
    found = confirm.rehearse(trainer, footprint, pinned("blocks.2"), Finding(notes=("it was only recorded",)))
    assert (found.refusal, found.notes) == (None, ())
    assert int(pids.read_text()) != os.getpid()
    monkeypatch.setattr(stage_probe, "confirm_stages", lambda *args, **kwargs: os._exit(3))
    lost = confirm.rehearse(trainer, footprint, pinned("blocks.2"), Finding())
    assert "couldn't be checked, as its trial didn't finish" in str(lost.refusal)


@pytest.mark.parametrize(("spec", "trials"), [("2xcpu:1GiB", 0), ("1xcpu:1GiB", 1)])
def test_a_step_that_was_rehearsed_on_shards_is_not_tried_again_for_an_offload_plan(
    spec: str, trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse, tried = confirm.rehearse, []

    def noted(trainer: Any, footprint: Any, plan: Plan, finding: Finding) -> Any:
        tried.append(plan)
        return rehearse(trainer, footprint, plan, finding)

    monkeypatch.setattr(confirm, "rehearse", noted)
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)
    alone = Plan(engine="fsdp", devices=("cpu:0",), reshard_after_forward=True, offload=OFFLOADS, shard=("blocks.0", "blocks.1"))
    decision = plan(trainer_for(Stack(), loader, tmp_path), spec=spec, plan=alone)
    assert decision.report.best == alone
    assert len(tried) == trials
