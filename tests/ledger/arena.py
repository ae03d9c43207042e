"""Rounds of processes that claim memory at the same moment, some of which die in the middle: a program of its own, without torch.

    python arena.py FOLDER ROUNDS SEED [UID ...]

Prints one line of JSON: rounds, claims, grants, deaths, the seconds of the claims, and what went wrong.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_autopar.sharing import lease_files, ledger, live_files
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Ledger, Room

RUNS, TOTAL, DEVICES = 16, 80, ("gpu:0", "gpu:1", "gpu:2")
FILES = {live_files.__file__, lease_files.__file__, ledger.__file__}


class Board:
    """What each process has taken of each device, as a driver would know."""

    def __init__(self) -> None:
        self._taken = mmap.mmap(-1, 8 * RUNS * len(DEVICES))

    def take(self, run: int, device: str, size: int) -> None:
        struct.pack_into("q", self._taken, 8 * (run * len(DEVICES) + DEVICES.index(device)), size)

    def free(self) -> dict[str, int]:
        taken = struct.unpack(f"{RUNS * len(DEVICES)}q", self._taken[:])
        return {device: TOTAL - sum(taken[number :: len(DEVICES)]) for number, device in enumerate(DEVICES)}

    def look(self) -> Room:
        free = self.free()
        return lambda leases: {device: size - sum(lease.pending_bytes(device) for lease in leases) for device, size in free.items()}

    def clear(self) -> None:
        self._taken[:] = bytes(len(self._taken))


def die_at(line: int) -> Any:
    """A tracer that ends this process before the ledger's so-manieth line."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def play(run: int, plan: dict[str, Any], folder: Path, board: Board, start: int, pipe: int, end: int) -> None:
    """One process: it waits for the start, claims, tells, and holds on until the end."""
    if plan["uid"]:
        os.setgid(plan["uid"])
        os.setuid(plan["uid"])
    random.seed(plan["seed"])
    book = Ledger(folder)
    os.read(start, 1)
    if plan["dies_at"]:
        sys.settrace(die_at(plan["dies_at"]))
    began = time.perf_counter()
    found = book.claim(plan["wants"], board.look, run=f"run {run}", within_seconds=60.0)
    seconds = time.perf_counter() - began
    if isinstance(found, LeaseFile) and plan["shows"]:
        for device, size in plan["wants"].items():
            board.take(run, device, size)
            found.show(device, size)
    sys.settrace(None)
    os.write(pipe, json.dumps({"granted": isinstance(found, LeaseFile), "seconds": seconds}).encode())
    os.close(pipe)
    os.read(end, 1)
    if isinstance(found, LeaseFile) and plan["releases"]:
        found.release()
    os._exit(0)


def a_round(folder: Path, draw: random.Random, uids: list[int], board: Board) -> tuple[list[dict[str, Any]], list[dict[str, Any] | None]]:
    """What each process was to do, and what it told: None of one that died."""
    some_show = draw.random() < 0.5
    plans = [
        {
            "uid": draw.choice(uids) if uids else 0,
            "seed": draw.random(),
            "wants": {device: draw.randint(5, 60) for device in draw.sample(DEVICES, draw.randint(1, 2))},
            "dies_at": draw.randint(1, 400) if draw.random() < 0.4 else 0,
            "shows": some_show and draw.random() < 0.7,
            "releases": draw.random() < 0.5,
        }
        for _ in range(RUNS)
    ]
    if draw.random() < 0.3:
        for plan in plans:
            plan["dies_at"] = 0
    board.clear()
    start, end = os.pipe(), os.pipe()
    pipes, children = [], []
    for run, plan in enumerate(plans):
        pipe = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(start[1])
            os.close(end[1])
            try:
                play(run, plan, folder, board, start[0], pipe[1], end[0])
            except BaseException as error:
                os.write(pipe[1], json.dumps({"granted": False, "seconds": 0.0, "error": repr(error)}).encode())
            os._exit(1)
        os.close(pipe[1])
        pipes.append(pipe[0])
        children.append(child)
    os.close(start[0])
    os.close(start[1])
    told = []
    for pipe_end, child in zip(pipes, children, strict=True):
        words = os.read(pipe_end, 4096)
        told.append(json.loads(words) if words else None)
        os.close(pipe_end)
        if not words:  # its pipe is closed before its lease is
            os.waitpid(child, 0)
    alive = Ledger(folder).leases()
    granted = [plan for plan, said in zip(plans, told, strict=True) if said is not None and said["granted"]]
    assert len(alive) == len(granted), f"{len(alive)} leases of {len(granted)} runs"
    os.close(end[0])
    os.close(end[1])
    for said, child in zip(told, children, strict=True):
        if said is not None:
            os.waitpid(child, 0)
    return plans, told


def faults(plans: list[dict[str, Any]], told: list[dict[str, Any] | None]) -> list[str]:
    """What is wrong with what was granted, and with what wasn't."""
    found = []
    taken = dict.fromkeys(DEVICES, 0)
    for plan, said in zip(plans, told, strict=True):
        if said is not None and said["granted"]:
            for device, size in plan["wants"].items():
                taken[device] += size
    found += [said["error"] for said in told if said is not None and "error" in said]
    found += [f"{size} of {TOTAL} granted on {device}" for device, size in taken.items() if size > TOTAL]
    # Nobody's death gave anything back, and nothing was counted twice between its being taken and its being shown.
    if all(said is not None for said in told) and not any(plan["shows"] for plan in plans):
        found += [
            f"{plan['wants']} was refused beside {taken}"
            for plan, said in zip(plans, told, strict=True)
            if said is not None and not said["granted"] and all(taken[device] + size <= TOTAL for device, size in plan["wants"].items())
        ]
    return found


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    uids = [int(uid) for uid in sys.argv[4:]]
    draw, board = random.Random(seed), Board()
    wrong: list[str] = []
    seconds: list[float] = []
    counts = {"rounds": rounds, "claims": 0, "grants": 0, "deaths": 0}
    for number in range(rounds):
        plans, told = a_round(folder, draw, uids, board)
        wrong += [f"round {number}: {fault}" for fault in faults(plans, told)]
        counts["claims"] += RUNS
        counts["grants"] += sum(said is not None and said["granted"] for said in told)
        counts["deaths"] += sum(said is None for said in told)
        seconds += [said["seconds"] for said in told if said is not None]
    list(lease_files.live_leases(folder))  # what the dead left is removed by whoever comes next
    print(json.dumps({**counts, "wrong": wrong[:20], "seconds": sorted(seconds), "left": os.listdir(folder)}))


if __name__ == "__main__":
    main()
