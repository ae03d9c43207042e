"""Schedules of random sweeps: sound, no worse than simple lists, and close to the best there is."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest

from benchmarks.sweep_exact import TooMany, best_schedule, bound_seconds
from lightning_autopar.sharing.sweep.scheduler import DeviceNeed, Job, Listing, Placed, RunOption, Schedule, SweepDevice, at_most, schedule
from tests.work import counted


def devices_of(*kinds: str, free_bytes: int = 16) -> list[SweepDevice]:
    return [SweepDevice(id=f"{kind}:{index}", kind=kind, free_bytes=free_bytes) for index, kind in enumerate(kinds)]


def option(count: int, seconds: float, *, kind: str = "a", needed_bytes: int = 0, among: tuple[frozenset[str], ...] = ()) -> RunOption:
    return RunOption(needs=tuple(DeviceNeed(kind=kind, needed_bytes=needed_bytes) for _ in range(count)), seconds=seconds, among=among)


def sweep_of(draw: random.Random, jobs: int, devices: int, *, uneven: bool = False) -> tuple[list[Job], list[SweepDevice]]:
    """A random sweep: lengths of all sizes, and for each further device some share of its speed."""
    kinds = [draw.choice("ab") if uneven else "a" for _ in range(devices)]
    there = [
        SweepDevice(id=f"{kind}:{index}", kind=kind, free_bytes=draw.choice([8, 16]) if uneven else 16) for index, kind in enumerate(kinds)
    ]
    made = []
    for index in range(jobs):
        seconds, efficiency, needed = draw.lognormvariate(0, 1) * 100, draw.uniform(0.3, 1), draw.choice([2, 6, 7, 12])
        options = []
        for kind in sorted(set(kinds)):
            for count in range(1, kinds.count(kind) + 1):
                sharded = draw.random() < 0.5
                takes = seconds / (1 + (count - 1) * efficiency) / (1.6 if kind == "b" else 1) + 5
                options.append(option(count, takes, kind=kind, needed_bytes=needed // count + 1 if sharded else needed))
        made.append(Job(name=f"job {index}", options=tuple(options)))
    try:
        Listing(made, there)
    except ValueError:  # one fits nowhere
        return sweep_of(draw, jobs, devices, uneven=uneven)
    return made, there


def check_schedule(schedule: Schedule, jobs: Sequence[Job], devices: Sequence[SweepDevice]) -> None:
    """Each job once, no device twice at a time, no more memory than is free."""
    by_id = {device.id: device for device in devices}
    assert sorted(place.job for place in schedule.placed) == sorted(job.name for job in jobs), "each job has one place"
    options = {job.name: job.options for job in jobs}
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for device, seconds in schedule.busy_seconds.items():
        taken[device].append((0.0, seconds))
    for place in schedule.placed:
        assert place.option in options[place.job], f"{place.job} runs in a way of its own"
        assert len(set(place.devices)) == len(place.devices) == len(place.option.needs), f"{place.job} has a device for each rank"
        for device_need, device in zip(place.option.needs, place.devices, strict=True):
            assert device_need.kind == by_id[device].kind, f"{place.job} needs {device_need.kind}"
            assert device_need.needed_bytes <= by_id[device].free_bytes, f"{place.job} needs more memory than {device} has"
            taken[device].append((place.start_seconds, place.end_seconds))
        assert not place.option.among or frozenset(place.devices) in place.option.among, f"{place.job} can't have these devices"
    for device, spans in taken.items():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-9 * max(1.0, end), f"two jobs are on {device} at a time"


@pytest.mark.parametrize("uneven", [False, True])
def test_schedules_of_random_sweeps_are_sound(uneven: bool) -> None:
    draw = random.Random(1)
    for _ in range(25):
        jobs, devices = sweep_of(draw, draw.randint(1, 15), draw.randint(1, 6), uneven=uneven)
        busy = {device.id: draw.uniform(0, 200) for device in devices if draw.random() < 0.4}
        found = schedule(jobs, devices, busy)
        check_schedule(found, jobs, devices)
        assert found.makespan_seconds >= bound_seconds(Listing(jobs, devices, busy)) * (1 - 1e-9)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_schedule_is_no_worse_than_the_list_of_any_one_number_of_devices(uneven: bool) -> None:
    draw = random.Random(2)
    for _ in range(15):
        jobs, devices = sweep_of(draw, draw.randint(2, 12), draw.randint(2, 6), uneven=uneven)
        listing = Listing(jobs, devices)
        lists = []
        for most in range(1, len(devices) + 1):
            options = [at_most(each, most) for each in listing.options]
            order = sorted(range(len(jobs)), key=lambda job: -listing.options[job][options[job]].seconds)
            lists.append(listing.length(order, options)[0])
        assert schedule(jobs, devices).makespan_seconds <= min(lists) * (1 + 1e-9)


def test_small_sweeps_come_close_to_the_best_schedule() -> None:
    """Most such cases come out as the best; how many is in `benchmarks/results/sweep.json` (of_best_as_planned)."""
    draw = random.Random(3)
    ratios = []
    for index in range(24):
        jobs, devices = sweep_of(draw, draw.randint(3, 6), draw.randint(2, 4), uneven=index % 2 == 1)
        try:
            best = best_schedule(jobs, devices, most_nodes=20_000)
        except TooMany:
            continue
        check_schedule(best, jobs, devices)
        found = schedule(jobs, devices).makespan_seconds
        assert found >= best.makespan_seconds * (1 - 1e-9)
        ratios.append(found / best.makespan_seconds)
    assert len(ratios) >= 20
    assert max(ratios) <= 1.15
    assert sorted(ratios)[len(ratios) // 2] <= 1.01


def brute_force(jobs: list[Job], devices: list[SweepDevice]) -> float:
    """Every order, way and set of devices, each job as early as these are free."""
    from lightning_autopar.sharing.sweep.scheduler import seatings

    def go(left: frozenset[int], free_at: tuple[float, ...]) -> float:
        if not left:
            return max(free_at)
        ends = []
        for job in left:
            for each in jobs[job].options:
                for chosen in seatings(each, devices):
                    end = max(free_at[index] for index in chosen) + each.seconds
                    ends.append(go(left - {job}, tuple(end if index in chosen else at for index, at in enumerate(free_at))))
        return min(ends)

    return go(frozenset(range(len(jobs))), (0.0,) * len(devices))


def test_the_exact_search_finds_what_trying_everything_finds() -> None:
    draw = random.Random(4)
    for index in range(8):
        jobs, devices = sweep_of(draw, 3, 3, uneven=index % 2 == 1)
        assert best_schedule(jobs, devices).makespan_seconds == pytest.approx(brute_force(jobs, devices))


def test_fifty_jobs_on_eight_devices_take_seconds_at_most_and_come_out_the_same() -> None:
    jobs, devices = sweep_of(random.Random(5), 50, 8)
    found, calls = counted(schedule, jobs, devices)
    assert calls < 4_000_000, "a second"
    check_schedule(found, jobs, devices)
    assert found == schedule(jobs, devices)
    assert found.makespan_seconds < 1.1 * bound_seconds(Listing(jobs, devices))


def test_two_short_jobs_make_room_for_a_long_one_on_all_devices() -> None:
    jobs = [
        Job(name="long", options=(option(1, 100), option(2, 50))),
        Job(name="x", options=(option(1, 10),)),
        Job(name="y", options=(option(1, 10),)),
    ]
    found = schedule(jobs, devices_of("a", "a"))
    assert found.makespan_seconds == 60


def test_higher_priorities_start_first_though_the_sweep_takes_longer() -> None:
    jobs = [
        Job(name="long", options=(option(1, 100),)),
        *(Job(name=f"short {index}", options=(option(1, 10),), priority=1) for index in range(2)),
    ]
    found = schedule(jobs, devices_of("a", "a"))
    starts = {place.job: place.start_seconds for place in found.placed}
    assert starts == {"long": 10, "short 0": 0, "short 1": 0}


def test_what_runs_already_is_waited_for() -> None:
    found = schedule([Job(name="job", options=(option(2, 5),))], devices_of("a", "a", "a"), {"a:0": 30.0, "a:1": 7.0})
    (placed,) = found.placed
    assert set(placed.devices) == {"a:1", "a:2"}
    assert placed.start_seconds == 7
    assert not found.now
    assert found.makespan_seconds == 30


def test_a_small_job_leaves_the_large_device_to_who_needs_it() -> None:
    devices = [SweepDevice(id="large", kind="a", free_bytes=16), SweepDevice(id="small", kind="a", free_bytes=4)]
    jobs = [Job(name="any", options=(option(1, 10, needed_bytes=2),)), Job(name="needs", options=(option(1, 10, needed_bytes=10),))]
    found = schedule(jobs, devices)
    assert {place.job: place.devices for place in found.placed} == {"any": ("small",), "needs": ("large",)}


def test_a_pair_that_must_be_linked_well_gets_such_a_pair() -> None:
    pairs = (frozenset(("a:0", "a:1")), frozenset(("a:2", "a:3")))
    jobs = [Job(name=f"job {index}", options=(option(2, 10, among=pairs),)) for index in range(2)]
    found = schedule(jobs, devices_of("a", "a", "a", "a"), {"a:0": 1.0})
    check_schedule(found, jobs, devices_of("a", "a", "a", "a"))
    assert {frozenset(place.devices) for place in found.placed} <= set(pairs)
    assert found.makespan_seconds == 11


def test_seats_that_need_different_memory_get_it() -> None:
    devices = [SweepDevice(id=f"d{size}", kind="a", free_bytes=size) for size in (4, 8, 16)]
    stages = RunOption(needs=(DeviceNeed(kind="a", needed_bytes=3), DeviceNeed(kind="a", needed_bytes=12)), seconds=10)
    found = schedule([Job(name="pipeline", options=(stages,))], devices)
    assert found.placed[0].devices == ("d4", "d16")
    check_schedule(found, [Job(name="pipeline", options=(stages,))], devices)


def test_a_job_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="big fits on none of the devices a:0"):
        schedule([Job(name="big", options=(option(1, 10, needed_bytes=17),))], devices_of("a"))
    with pytest.raises(ValueError, match="big fits on none"):
        schedule([Job(name="big", options=(option(2, 10),))], devices_of("a", "b"))


def test_nothing_to_do_takes_as_long_as_what_runs() -> None:
    assert schedule([], devices_of("a"), {"a:0": 3.0}).makespan_seconds == 3
    assert best_schedule([], devices_of("a")).makespan_seconds == 0


@pytest.mark.parametrize("make", [lambda: option(0, 1.0), lambda: option(1, 0.0), lambda: option(1, float("inf"))])
def test_a_way_needs_devices_and_time(make: Callable[[], RunOption]) -> None:
    with pytest.raises(ValueError, match="the plan"):
        make()


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ([("x", ("a:0",), 0.0), ("y", ("a:0",), 5.0)], "two jobs are on a:0"),
        ([("x", ("a:0",), 0.0)], "each job has one place"),
        ([("x", ("a:0", "a:1"), 0.0), ("y", ("a:1",), 0.0)], "a device for each rank"),
        ([("x", ("b:2",), 0.0), ("y", ("a:1",), 0.0)], "x needs a"),
        ([("x", ("a:0",), 0.0), ("y", ("a:3",), 0.0)], "more memory than a:3 has"),
    ],
)
def test_the_check_finds_what_is_wrong(placed: list[tuple[str, tuple[str, ...], float]], words: str) -> None:
    jobs = [Job(name="x", options=(option(1, 10, needed_bytes=5),)), Job(name="y", options=(option(1, 10, needed_bytes=5),))]
    devices = [*devices_of("a", "a", "b"), SweepDevice(id="a:3", kind="a", free_bytes=1)]
    options = {job.name: job.options[0] for job in jobs}
    places = tuple(Placed(job=job, option=options[job], devices=ids, start_seconds=start) for job, ids, start in placed)
    with pytest.raises(AssertionError, match=words):
        check_schedule(Schedule(placed=places), jobs, devices)
