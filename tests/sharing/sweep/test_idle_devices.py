"""Idle devices at a sweep's end go to the run that would be over last, if that makes it sooner."""

from __future__ import annotations

from lightning_autopar.sharing.sweep.idle_devices import Underway, widened
from lightning_autopar.sharing.sweep.jobs import DeviceNeed, Job, RunOption, SweepDevice

DEVICES = [SweepDevice(id=f"d{index}", kind="a", free_bytes=10) for index in range(4)]


def underway(
    name: str, devices: tuple[str, ...], left_seconds: float, *seconds: float, elastic: bool = True, left: float = 0.5
) -> Underway:
    """A run whose way on n devices takes the n-th number of seconds."""
    options = tuple(RunOption(needs=(DeviceNeed(kind="a", needed_bytes=5),) * count, seconds=each) for count, each in enumerate(seconds, 1))
    return Underway(job=Job(name=name, options=options), devices=devices, left_share=left, left_seconds=left_seconds, elastic=elastic)


def test_the_last_run_gets_the_devices_on_which_it_is_over_soonest() -> None:
    long = underway("long", ("d0",), 100, 200, 110, 80, 75)
    short = underway("short", ("d1",), 50, 100, 60)
    found = widened([short, long], DEVICES[2:], DEVICES, move_seconds=5)
    assert found == {"long": ("d0", "d2", "d3")}


def test_what_is_left_goes_to_the_next() -> None:
    long = underway("long", ("d0",), 100, 200, 110)
    short = underway("short", ("d1",), 50, 100, 60)
    found = widened([short, long], DEVICES[2:], DEVICES, move_seconds=5)
    assert sorted(found) == ["long", "short"]
    assert set(found["long"]) | set(found["short"]) == {"d0", "d1", "d2", "d3"}
    assert not set(found["long"]) & set(found["short"])


def test_nobody_moves_for_nothing() -> None:
    assert widened([underway("rigid", ("d0",), 100, 200, 110, elastic=False)], DEVICES[1:], DEVICES, move_seconds=5) == {}
    assert widened([underway("nearly over", ("d0",), 4, 200, 110, left=0.02)], DEVICES[1:], DEVICES, move_seconds=5) == {}
    assert widened([underway("no faster", ("d0",), 100, 200, 210)], DEVICES[1:], DEVICES, move_seconds=5) == {}
    assert widened([underway("alone", ("d0",), 100, 200, 110)], [], DEVICES, move_seconds=5) == {}


def test_devices_without_room_help_nobody() -> None:
    full = [SweepDevice(id="d1", kind="a", free_bytes=1), SweepDevice(id="d2", kind="b", free_bytes=10)]
    assert widened([underway("run", ("d0",), 100, 200, 110)], full, [DEVICES[0], *full], move_seconds=5) == {}
