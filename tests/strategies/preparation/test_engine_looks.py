"""Engines look at a step; their long trials run beside other checks, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autopar import engines
from lightning_autopar.engines import Finding, FirstStep
from lightning_autopar.strategies.preparation.module_findings import begin_trials, looks

HERE = os.getpid()


class Long:
    """Tells where its trial ran; it may end its process if that isn't the test's."""

    looks_long = True

    def __init__(self, *, ends: bool = False) -> None:
        self.ends = ends

    def trial(self, first: FirstStep) -> int:
        if self.ends and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    def look(self, first: FirstStep) -> Finding:
        return Finding(value=(first.trial or self.trial(first), first.split))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    found = {
        "long": Long(),
        "ends": Long(ends=True),
        "short": SimpleNamespace(looks_long=False, look=lambda first: Finding(value=first.trial)),
    }
    monkeypatch.setattr(engines, "named", found.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return found


def look_at(names: list[str]) -> dict[str, Any]:
    told: Any = {"trainer": None, "stage": "fit", "batch": None, "validation": lambda: None, "footprint": None}
    with ExitStack() as children:
        trials = begin_trials(children, names, FirstStep(**told), timeout_seconds=60)
        later: Any = "what was found meanwhile"
        return {name: each.value for name, each in looks(names, FirstStep(split=later, **told), trials()).items()}


def test_a_look_gets_what_its_trial_found_elsewhere_and_what_was_found_meanwhile(named: Mapping[str, Any]) -> None:
    found = look_at(["long", "short"])
    (pid, split), alone = found["long"], found["short"]
    assert pid != HERE
    assert split == "what was found meanwhile"
    assert alone is None, "an engine whose look is short has no trial before it"


def test_a_trial_that_ends_its_process_is_made_again_by_the_look(named: Mapping[str, Any]) -> None:
    assert {name: pid == HERE for name, (pid, _) in look_at(["long", "ends"]).items()} == {"long": True, "ends": True}


def test_on_one_core_nothing_runs_beside_anything(named: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert look_at(["long"])["long"][0] == HERE
