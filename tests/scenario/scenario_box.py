"""A shared box for some time: starts the runs, has a stranger come and go, and looks at the ledger all the while.

Run as ``python scenario_box.py FOLDER [SEED]``; it leaves ``box.json`` there. Each run is forked from this process, which has imported all
that they need, and lives as a script's own process would.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_autopar.devices.simulated_neighbours import Neighbour, write_neighbours
from lightning_autopar.sharing.lease_files import live_leases
from lightning_autopar.sharing.queue import live_places
from lightning_autopar.sharing.runs.requests import runs
from tests.scenario.scenario_runs import DEVICE_BYTES, DEVICES, SPECS, Spec, train

#: When the stranger comes, when it goes, to which device, and for which share of what is left of it then.
STRANGER = ((9.0, 20.0, "cpu:1", 0.9), (24.0, 30.0, "cpu:0", 0.5))
_LOOK_SECONDS = 0.05
#: With another seed than 0 one run is killed, and another one stopped for a while, at some moment after their beginnings.
_LATEST_FAULT_SECONDS, _STOPPED_SECONDS = 12.0, 12.0
_LONGEST_SECONDS = 240.0


def play(folder: Path, seed: int) -> dict[str, Any]:
    """What happened on the box, played in a process of its own.

    Raises:
        subprocess.CalledProcessError: if it couldn't be played to its end.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, str(folder), str(seed)]
    subprocess.run(command, env=environment, check=True, timeout=_LONGEST_SECONDS + 60)
    return json.loads((folder / "box.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # main has written it


def killed(box: dict[str, Any]) -> set[str]:
    """The runs that were ended by force, rather than just before by themselves."""
    return {name for _, name, number in box["faults"] if number == signal.SIGKILL and box["ended"][name]["code"] == -number}


def shaken(specs: Sequence[Spec], seed: int) -> tuple[Spec, ...]:
    """The runs with other beginnings and priorities; as they are where the seed is 0."""
    if not seed:
        return tuple(specs)
    chance = random.Random(seed)
    return tuple(
        replace(spec, at_seconds=chance.uniform(0, 9), priority=chance.randint(-5, 5), elastic=chance.random() < 0.6, after=())
        for spec in specs
    )


def main(folder: Path, seed: int = 0) -> None:
    """Play it."""
    specs, chance = shaken(SPECS, seed), random.Random(seed)
    strangers = [
        (at + (chance.uniform(-3, 3) if seed else 0), until + (chance.uniform(-2, 6) if seed else 0), device, share)
        for at, until, device, share in STRANGER
    ]
    faults = _faults(specs, chance) if seed else []
    neighbours = folder / "neighbours.json"
    ledger = Path(tempfile.mkdtemp(prefix="autopar-scenario-", dir="/dev/shm"))
    os.environ.update(
        AUTOPAR_DEVICES=DEVICES,
        AUTOPAR_LEDGER=str(ledger),
        AUTOPAR_RUNS=str(ledger),
        AUTOPAR_NEIGHBOURS=str(neighbours),
        AUTOPAR_CACHE="off",
        AUTOPAR_QUANTUM="3",
        AUTOPAR_WAIT="forever",
    )
    try:
        samples, ended = _play(specs, strangers, faults, folder, ledger, neighbours)
        left = sorted(path.name for path in ledger.iterdir() if path.name.startswith(("autopar-lease", "autopar-place")))
    finally:
        shutil.rmtree(ledger, ignore_errors=True)
    words = {
        "seed": seed,
        "device_bytes": DEVICE_BYTES,
        "specs": [asdict(spec) for spec in specs],
        "strangers": strangers,
        "faults": faults,
        "ended": ended,
        "left": left,
        "samples": samples,
    }
    (folder / "box.json").write_text(json.dumps(words), encoding="utf-8")


def _faults(specs: Sequence[Spec], chance: random.Random) -> list[tuple[float, str, int]]:
    """When which run gets which signal."""
    killed, stopped = chance.sample(specs, 2)
    at = stopped.at_seconds + chance.uniform(3, _LATEST_FAULT_SECONDS)
    return [
        (killed.at_seconds + chance.uniform(3, _LATEST_FAULT_SECONDS), killed.name, signal.SIGKILL),
        (at, stopped.name, signal.SIGSTOP),
        (at + _STOPPED_SECONDS, stopped.name, signal.SIGCONT),
    ]


def _play(
    specs: Sequence[Spec],
    strangers: Sequence[tuple[float, float, str, float]],
    faults: Sequence[tuple[float, str, int]],
    folder: Path,
    ledger: Path,
    neighbours: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Samples of the box, and how each run ended."""
    waiting, to_come = list(specs), list(faults)
    alive: dict[int, Spec] = {}
    names: dict[int, str] = {}
    ended: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    begun: dict[str, float] = {}
    taken: dict[str, int] = {}
    began = time.monotonic()
    try:
        while waiting or alive:
            now = time.monotonic() - began
            assert now < _LONGEST_SECONDS, f"still there: {sorted(names.values())}"
            for spec in [each for each in waiting if each.at_seconds <= now - _since(each, begun, now)]:
                waiting.remove(spec)
                pid = _start(spec, folder)
                alive[pid], names[pid] = spec, spec.name
            for fault in [each for each in to_come if each[0] <= now]:
                to_come.remove(fault)
                for pid in [pid for pid, spec in alive.items() if spec.name == fault[1]]:
                    os.kill(pid, fault[2])
            _let_strangers(now, strangers, taken, ledger, neighbours)
            samples.append(_sample(now, ledger, names, taken))
            for name, run in samples[-1]["runs"].items():
                if run[0] == "running":
                    begun.setdefault(name, now)
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[alive.pop(pid).name] = {"code": os.waitstatus_to_exitcode(status), "at": time.monotonic() - began}
            time.sleep(_LOOK_SECONDS)
    finally:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return samples, ended


def _since(spec: Spec, begun: Mapping[str, float], now: float) -> float:
    """From when on a run's time counts; not yet while those before it aren't there."""
    return max((begun.get(name, now + 1) for name in spec.after), default=0.0)


def _start(spec: Spec, folder: Path) -> int:
    """Fork its process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{spec.name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(spec, folder, plainly=False)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _let_strangers(
    now: float, strangers: Sequence[tuple[float, float, str, float]], taken: dict[str, int], ledger: Path, neighbours: Path
) -> None:
    """Somebody without autopar, who can only take what nobody has, comes or goes."""
    for at, until, device, share in strangers:
        if at <= now < until and device not in taken:
            leased = sum(lease.bytes.get(device, 0) for lease in live_leases(ledger))
            taken[device] = int(share * max(0, DEVICE_BYTES - leased))
        elif now >= until and at <= now and taken.get(device) and not any(a <= now < u and d == device for a, u, d, _ in strangers):
            taken[device] = 0
        else:
            continue
        write_neighbours(neighbours, {each: Neighbour(taken_bytes=size) for each, size in taken.items()})


def _sample(now: float, ledger: Path, names: dict[int, str], taken: dict[str, int]) -> dict[str, Any]:
    """What everybody has, waits for and says of itself."""
    leases: dict[str, dict[str, int]] = {}
    for lease in live_leases(ledger):
        if lease.granted:
            mine = leases.setdefault(names.get(lease.pid, str(lease.pid)), {})
            for device, size in lease.bytes.items():
                mine[device] = max(mine.get(device, 0), size)  # of one that moves, which never holds both
    places = [[names.get(place.pid, str(place.pid)), place.priority, list(place.asks)] for place in live_places(ledger)]
    shown = {names.get(run.pid, str(run.pid)): [run.state, run.plan, run.step, dict(run.used_bytes)] for run in runs()}
    return {"at": now, "leases": leases, "places": places, "runs": shown, "taken": {key: size for key, size in taken.items() if size}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
