"""A rank's first steps → what torch's allocator holds, by playing the tape of the step to a model of it.

Slower than the arithmetic on moments (tenths of a second instead of microseconds), for the plans that matter: what is reserved depends on
the order of allocations, and fragments are left by the steps before. Which player stands for a rank is for its engine to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, Category, OutOfDeviceMemory
from lightning_autopar.memory.allocator.options import AllocatorOptions
from lightning_autopar.memory.allocator.plain_allocator import PlainAllocator
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_player import Player

#: The most steps of a first look. The first step finds no optimizer state, and scattered free blocks may force a later one to reserve one
#: more segment. So steps are played until two after each other leave as much reserved and give as much back, or until three gave nothing
#: back.
_FIRST_STEPS = 4
#: Free blocks go on scattering for a while. With all blocks recomputed, GPT-2 holds 3,334 MiB after step 6 and 3,834 MiB after step 7,
#: MPNet in bf16-true takes 128 MiB more in step 16, and mBART and Cohere 250 MiB after it (on a stub GPU; replays say the same).
#: So steps are played until one leaves each thing where an earlier one left it: then the steps between them come again and again. Where
#: none does, the replay ends with step 100, or before: once so many steps after each other have left as much reserved and given as much
#: back, and so many allocations were played.
_ALIKE, _MOST_STEPS, _QUICKLY_PLAYED = 5, 100, 100_000


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay.

    Args:
        allocated_peak_bytes: the most that was allocated, rounded as torch counts it; where it doesn't fit, up to then.
        by_category: of the allocated peak.
        fits: whether the steps went through under the limit.
        released: how many segments the last step that was played gave back to the driver, to go on; no step after it gives back more.
        missing_bytes: by how many bytes the request went over the limit; 0 where it fits.
        allocations: how many were played, which says how long it took.
        beyond: what a replay without a limit comes to, if it was asked for, and found by going on from where the limit was met.
        go_on: plays the steps that a first look has left out.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    by_category: Mapping[Category, int] = field(default_factory=dict)
    fits: bool = True
    released: int = 0
    missing_bytes: int = 0
    allocations: int = field(default=0, compare=False)
    beyond: Replayed | None = field(default=None, compare=False)
    go_on: Callable[[], Replayed] | None = field(default=None, compare=False, repr=False)


def played(
    make_player: Callable[[PlayedDevice], Player],
    *,
    limit_bytes: int | None = None,
    options: AllocatorOptions | None = None,
    workspaces: Sequence[int] = (),
    first_look: bool = False,
    beyond: bool = False,
) -> Replayed:
    """Play a rank's start and its steps on the modelled allocator, until they come again or are alike.

    Args:
        limit_bytes: the most that may be reserved; None: no limit.
        workspaces: the bytes that libraries take from the allocator outside of the tape: in forward's thread, then in backward's.
        first_look: whether a few steps will do.
        beyond: of a first look, whether to go on without the limit where it is met, if no earlier step gave anything back.
    """
    options = options or AllocatorOptions()
    allocator = (PlainAllocator if PlainAllocator.serves(options) else CachingAllocator)(limit_bytes=limit_bytes, options=options)
    machine = PlayedDevice(allocator)
    player = make_player(machine)
    player.workspaces = workspaces
    steps = released = alike = 0
    repeats = False
    left: object = None
    given_back: list[int] = []
    found: dict[object, int] = {}
    short: Replayed | None = None

    def allocations() -> int:
        number = next(machine.numbers)
        machine.numbers = count(number)
        return number - 1

    def told(error: OutOfDeviceMemory | None) -> Replayed:
        return Replayed(
            allocated_peak_bytes=machine.allocator.peak_allocated_bytes,
            reserved_peak_bytes=machine.allocator.peak_reserved_bytes,
            by_category=machine.allocator.fullest,
            fits=error is None,
            released=released if error is None else 0,
            missing_bytes=0 if error is None else max(1, error.reserved_bytes + error.requested_bytes - error.limit_bytes),
            allocations=allocations(),
        )

    def goes_on(error: OutOfDeviceMemory) -> bool:
        nonlocal short
        short = told(error)
        return beyond

    def step() -> None:
        nonlocal steps, released, alike, left, repeats
        released = -machine.allocator.released
        machine.goes_on = goes_on
        try:
            player.step()
        finally:  # nothing is left that only Python's collector would find
            machine.goes_on = machine.fork = None
        released += machine.allocator.released
        before, left = left, (machine.allocator.reserved_bytes, released)
        steps, alike = steps + 1, alike + 1 if left == before else 0
        given_back.append(released)
        if (layout := machine.layout()) is not None and (first := found.setdefault(layout, steps)) < steps:
            repeats, released = True, max(given_back[first:])

    @cache  # searches that share a first look may each go on from it
    def last() -> Replayed:
        machine.forks = False
        try:
            while not repeats and steps < _MOST_STEPS and (alike < _ALIKE or allocations() < _QUICKLY_PLAYED):
                step()
        except OutOfDeviceMemory as error:
            return told(error)
        return told(None)

    machine.forks = beyond
    try:
        player.start()
        while not (alike or repeats) and steps < (_FIRST_STEPS if machine.allocator.released else 3):
            step()
    except OutOfDeviceMemory as error:
        return told(error)
    if short is not None:
        forked = machine.allocator is not allocator
        return replace(short, beyond=replace(told(None), go_on=last if forked and not repeats else None))
    return replace(told(None), go_on=last) if first_look and not repeats else last()
