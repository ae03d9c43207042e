"""What a user says of waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_autopar import AutoParallelStrategy, Turn
from lightning_autopar.text import parse_seconds


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOPAR_WAIT", "AUTOPAR_PRIORITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        *((wait, math.inf) for wait in (None, "forever", "Forever", True)),
        *((wait, 0) for wait in ("never", False, 0)),
        *((wait, 90) for wait in (90, "90", "90s", "1.5min", "1.5 M")),
        *(("2h", 7200), ("1d", 86400)),
    ],
)
def test_how_long(wait: Any, seconds: float) -> None:
    assert Turn(wait=wait).wait_seconds == seconds
    assert AutoParallelStrategy(wait=wait).settings.wait.wait_seconds == seconds


@pytest.mark.parametrize("wait", [-1, "-5s", "soon", "2 weeks", math.nan, math.inf, "", "1e3h"])
def test_what_is_no_time(wait: Any) -> None:
    with pytest.raises(ValueError, match=r"wait=.* must be 'forever', 'never' or how long to wait, at least 0 seconds: .*'2h'"):
        AutoParallelStrategy(wait=wait)


@pytest.mark.parametrize("priority", [101, -101, 0.5, "x", True])
def test_what_is_no_priority(priority: Any) -> None:
    with pytest.raises(ValueError, match=r"priority=.* must be a whole number from -100 to 100; the larger goes first"):
        Turn(priority=priority)


def test_the_variables_count_where_the_script_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_WAIT", "2h")
    monkeypatch.setenv("AUTOPAR_PRIORITY", "-7")
    said = AutoParallelStrategy().settings.wait
    assert (said.wait_seconds, said.rank) == (7200, -7)
    said = AutoParallelStrategy(wait=Turn(wait="never", priority=3)).settings.wait
    assert (said.wait_seconds, said.rank) == (0, 3)
    monkeypatch.setenv("AUTOPAR_WAIT", "later")
    with pytest.raises(ValueError, match="the environment variable AUTOPAR_WAIT='later' must be"):
        AutoParallelStrategy()
    monkeypatch.setenv("AUTOPAR_WAIT", "2h")
    monkeypatch.setenv("AUTOPAR_PRIORITY", "1000")
    with pytest.raises(ValueError, match="the environment variable AUTOPAR_PRIORITY='1000' must be a whole number"):
        AutoParallelStrategy()


def test_one_over_another() -> None:
    assert Turn(priority=1).over(Turn(wait="2h", priority=5)) == Turn(wait="2h", priority=1)
    assert Turn(wait="never").over(Turn(wait="2h", priority=5)) == Turn(wait="never", priority=5)


def test_durations() -> None:
    assert [parse_seconds(value) for value in (2, "2", "2s", "2sec", "2 min", "0.5h")] == [2, 2, 2, 2, 120, 1800]
    with pytest.raises(ValueError, match="'2 parsecs' is no duration; write seconds"):
        parse_seconds("2 parsecs")
    with pytest.raises(ValueError, match="must be 0 or more seconds"):
        parse_seconds(-1)
