"""Runs that wait for their turn: who goes when, what is left behind, and what is said meanwhile."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lightning_autopar import NothingFits, Turn
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.sharing import queue_order as turns
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Ledger, without_leased
from lightning_autopar.sharing.queue import Place, live_places
from lightning_autopar.sharing.queue_order import Need
from lightning_autopar.sharing.runs.own_status import RunDisplay
from lightning_autopar.sharing.take_leases import Leases
from lightning_autopar.sharing.waiting import Waiting, _amounts, _ordinal
from tests.strategies.modules import TWO, Regression, fit, loader

GIB = 1 << 30


def until(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What it gives as soon as it is something."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it doesn't happen"
        time.sleep(0.01)
    return found


class Child:
    """Another process, which does something and tells lines."""

    def __init__(self, body: Callable[[Child], None]) -> None:
        self._told, self._end = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._end[1])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
            code = 1
            try:
                body(self)
                code = 0
            except SystemExit as error:
                code = int(str(error.code))
            except KeyboardInterrupt:
                code = 130
            finally:
                os._exit(code)
        os.close(self._told[1])
        os.close(self._end[0])

    def tell(self, words: str) -> None:
        os.write(self._told[1], f"{words}\n".encode())

    def wait_for_end(self) -> None:
        os.read(self._end[0], 1)

    def hear(self) -> str:
        """The next line; nothing once it is over."""
        words = b""
        while not words.endswith(b"\n") and (more := os.read(self._told[0], 1)):
            words += more
        return words.decode().strip()

    def end(self) -> int:
        """Let it end; the exit code, as the shell has it."""
        with suppress(BrokenPipeError):  # it has ended by itself
            os.write(self._end[1], b"1")
        _, status = os.waitpid(self.pid, 0)
        os.close(self._end[1])
        os.close(self._told[0])
        return os.waitstatus_to_exitcode(status)


def holder(folder: Path, wants: dict[str, int], *, ends_in: float | None = None, **about: Any) -> Child:
    """A run that has this until it is told to end."""

    def body(child: Child) -> None:
        held = Ledger(folder).claim(wants, lambda: lambda leases: wants, run="holder", **about)
        assert isinstance(held, LeaseFile)
        held.expect(None if ends_in is None else time.monotonic_ns() + int(ends_in * 1e9))
        child.tell("held")
        child.wait_for_end()

    child = Child(body)
    assert child.hear() == "held"
    return child


class Some:
    """A prospect that needs so much of one device, or of both."""

    def __init__(self, size: int, *, devices: int = 1, seconds: float | None = None) -> None:
        self._size, self._devices, self._seconds = size, devices, seconds

    def need(self, inventory: Inventory) -> Need | None:
        there = [device.id for device in inventory.devices if device.free_bytes >= self._size][: self._devices]
        return Need(bytes=dict.fromkeys(there, self._size), seconds=self._seconds) if len(there) == self._devices else None

    def decision(self, inventory: Inventory) -> Any:
        need = self.need(inventory)
        if need is None:
            raise NothingFits(SimpleNamespace(best_index=None, candidates=()))  # type: ignore[arg-type]
        plan = SimpleNamespace(title=lambda: ", ".join(need.bytes))
        return SimpleNamespace(need=need, expected_seconds=need.seconds, run_plan=SimpleNamespace(needed_bytes=dict(need.bytes), plan=plan))


def waiting(some: Some, *, priority: int = 0, wait_seconds: float = 30.0, spec: str = TWO) -> tuple[Waiting, Leases]:
    leases = Leases()
    leases.ask_as(priority=priority, elastic=False)
    made = Waiting(
        some,  # type: ignore[arg-type]
        leases,
        inventory=lambda: without_leased(parse_spec(spec), leases.others()),
        devices=lambda: parse_spec(spec),
        wait_seconds=wait_seconds,
        shown=RunDisplay(None, dict),
    )
    return made, leases


def runner(some: Some, **options: Any) -> Child:
    """A run that waits for its turn, tells when it has come, and runs until it is told to end."""

    def body(child: Child) -> None:
        made, leases = waiting(some, **options)
        try:
            made.start()
        except NothingFits:
            child.tell("nothing fits")
            return
        child.tell(" ".join(sorted(leases.held_bytes)))
        child.wait_for_end()
        leases.release()

    return Child(body)


def places(folder: Path, count: int) -> list[Place]:
    """So many who wait and have told what for."""
    found = live_places(folder)
    return found if len(found) == count and all(place.wants for place in found) else []


def all_have_looked(folder: Path, count: int) -> None:
    """So many who wait, and have done so several times since."""
    for _ in range(3):
        now_ns = time.monotonic_ns()
        until(lambda after_ns=now_ns: all(place.seen_ns > after_ns for place in live_places(folder)))
    assert len(live_places(folder)) == count


def started(folder: Path) -> set[int]:
    return {lease.pid for lease in Ledger(folder).leases()}


def test_where_nothing_is_leased_nobody_queues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices are each run's own, unless a ledger is named."""
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB})
    other = runner(Some(GIB))
    until(lambda: places(folder, 1))
    monkeypatch.setattr("lightning_autopar.sharing.waiting.is_leased", lambda device: False)
    idle = lambda: parse_spec(TWO)  # noqa: E731
    shown = RunDisplay(None, dict)
    leases = Leases()
    leases.take = lambda wants, probe: None  # type: ignore[method-assign]
    made = Waiting(Some(GIB), leases, inventory=idle, devices=idle, wait_seconds=30, shown=shown)  # type: ignore[arg-type]
    assert made.start().need.bytes == {"cpu:0": GIB}
    made = Waiting(Some(1 << 60), Leases(), inventory=idle, devices=idle, wait_seconds=30, shown=shown)  # type: ignore[arg-type]
    with pytest.raises(NothingFits) as caught:
        made.start()
    assert "waited" not in str(caught.value)
    has.end()
    other.end()


# -- without a module ----------------------------------------------------------------------------------------------------------------


def test_two_wait_and_each_gets_its_turn(folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB})
    first = runner(Some(GIB))
    until(lambda: places(folder, 1))
    second = runner(Some(GIB, devices=2))
    (ahead, behind) = until(lambda: places(folder, 2))
    assert (ahead.pid, behind.pid) == (first.pid, second.pid)
    assert (ahead.start_ns, behind.start_ns) == (None, None), "nobody knows when the holder ends"
    assert sorted(behind.wants) == ["cpu:0", "cpu:1"]
    has.end()
    assert first.hear() == "cpu:0"
    assert started(folder) == {first.pid}
    (behind,) = until(lambda: places(folder, 1))
    assert behind.pid == second.pid
    assert first.end() == 0
    assert second.hear() == "cpu:0 cpu:1"
    assert second.end() == 0
    assert os.listdir(folder) == []


def test_the_more_important_goes_first(folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB})
    early = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 1))
    late = runner(Some(GIB, devices=2), priority=1)
    until(lambda: places(folder, 2))
    has.end()
    assert late.hear() == "cpu:0 cpu:1"
    assert started(folder) == {late.pid}
    late.end()
    assert early.hear() == "cpu:0 cpu:1"
    early.end()


def test_small_ones_go_before_where_they_delay_nobody(folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB}, ends_in=60)
    big = runner(Some(GIB, devices=2))
    (ahead,) = until(lambda: places(folder, 1))
    assert [lease.ends_ns for lease in Ledger(folder).leases()] == [ahead.start_ns]
    long = runner(Some(GIB // 2, seconds=1000))
    until(lambda: places(folder, 2))
    short = runner(Some(GIB // 2, seconds=20))
    assert short.hear() == "cpu:1", "it has ended when the big one starts"
    assert short.end() == 0
    assert started(folder) == {has.pid}, "whoever wouldn't have ended waits"
    has.end()
    assert big.hear() == "cpu:0 cpu:1"
    big.end()
    assert long.hear() == "cpu:0"
    long.end()


def test_a_big_one_is_not_overtaken_for_ever(folder: Path) -> None:
    has = [holder(folder, {"cpu:0": GIB // 2}), holder(folder, {"cpu:0": GIB // 2, "cpu:1": GIB})]
    big = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 1))
    small = runner(Some(GIB // 2))
    until(lambda: places(folder, 2))
    has[0].end()
    all_have_looked(folder, 2)
    assert started(folder) == {has[1].pid}
    has[1].end()
    assert big.hear() == "cpu:0 cpu:1"
    big.end()
    assert small.hear() == "cpu:0"
    small.end()


def test_what_comes_free_elsewhere_is_for_the_first(folder: Path) -> None:
    has = [holder(folder, {"cpu:0": GIB}), holder(folder, {"cpu:1": GIB})]
    first = runner(Some(GIB))
    (ahead,) = until(lambda: places(folder, 1))
    assert list(ahead.wants) == ["cpu:0"]
    second = runner(Some(GIB // 2))
    until(lambda: places(folder, 2))
    has[1].end()  # which nobody reserves
    assert first.hear() == "cpu:1"
    assert started(folder) == {has[0].pid, first.pid}
    has[0].end()
    assert second.hear() == "cpu:0"
    first.end()
    second.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_nothing(number: int, folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB})
    gone = runner(Some(GIB))
    until(lambda: places(folder, 1))
    behind = runner(Some(GIB))
    until(lambda: places(folder, 2))
    os.kill(gone.pid, number)
    assert gone.end() == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[signal.Signals(number)]
    assert [place.pid for place in live_places(folder)] == [behind.pid]
    assert len(os.listdir(folder)) == 2
    os.kill(has.pid, signal.SIGKILL)
    has.end()
    assert behind.hear() == "cpu:0"
    behind.end()
    assert os.listdir(folder) == []


def test_a_run_that_is_stopped_is_passed_over_until_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SILENT_SECONDS", 2.0)
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB})
    stopped = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 1))
    second = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 2))
    third = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 3))
    os.kill(stopped.pid, signal.SIGSTOP)
    has.end()
    assert second.hear() == "cpu:0 cpu:1"
    os.kill(stopped.pid, signal.SIGCONT)
    seen_ns = time.monotonic_ns()
    until(lambda: live_places(folder)[0].seen_ns > seen_ns)
    second.end()
    assert stopped.hear() == "cpu:0 cpu:1", "before the third"
    assert started(folder) == {stopped.pid}
    stopped.end()
    assert third.hear() == "cpu:0 cpu:1"
    third.end()


def test_who_does_not_wait_keeps_behind_those_who_do(folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB})
    big = runner(Some(GIB, devices=2))
    until(lambda: places(folder, 1))
    never = runner(Some(GIB // 2), wait_seconds=0)
    assert never.hear() == "nothing fits", "what is free is reserved"
    never.end()
    os.kill(big.pid, signal.SIGKILL)
    big.end()
    never = runner(Some(GIB // 2), wait_seconds=0)
    assert never.hear() == "cpu:1"
    never.end()
    has.end()


def test_what_would_never_fit_does_not_wait(folder: Path) -> None:
    has = holder(folder, {"cpu:0": GIB})
    too_big, in_turn = runner(Some(2 * GIB)), runner(Some(GIB, devices=2))
    assert too_big.hear() == "nothing fits"
    too_big.end()
    until(lambda: places(folder, 1))
    too_big = runner(Some(2 * GIB))
    assert too_big.hear() == "nothing fits", "nor behind others"
    too_big.end()
    has.end()
    assert in_turn.hear() == "cpu:0 cpu:1"
    in_turn.end()


def test_elastic_runs_of_smaller_priority_are_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_QUANTUM", "0.5")
    fixed = holder(folder, {"cpu:0": GIB}, priority=-1)
    elastic = holder(folder, {"cpu:1": GIB}, priority=-1, elastic=True)
    asks = runner(Some(GIB))
    (place,) = until(lambda: [place for place in live_places(folder) if place.asks])
    (lease,) = [lease for lease in Ledger(folder).leases() if lease.elastic]
    assert (place.asks, dict(place.wants)) == ((lease.name,), {"cpu:1": GIB})
    assert time.monotonic_ns() - lease.made_ns > 0.5e9, "not before it had its quantum"
    elastic.end()
    assert asks.hear() == "cpu:1"
    asks.end()
    fixed.end()


def test_without_a_ledger_it_waits_by_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    looks = itertools.count()

    def inventory() -> Inventory:
        found = parse_spec("cpu:1GiB")
        return turns.left_for_later(found, (), [_stranger()], 0) if next(looks) < 3 else found

    made = Waiting(Some(GIB), Leases(), inventory=inventory, devices=inventory, wait_seconds=20, shown=RunDisplay(None, dict))  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert made.start().need.bytes == {"cpu:0": GIB}
    assert caplog.text.count("waits for free memory, but in no queue") == 1
    assert "waiting for 1 GiB on cpu:0, held by processes that have no lease" in caplog.text


def test_on_a_terminal_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB}, ends_in=900)
    out = io.StringIO()
    monkeypatch.setattr("lightning_autopar.sharing.waiting.Console", lambda **_: Console(file=out, force_terminal=True, width=200))
    made, _ = waiting(Some(GIB), wait_seconds=1.0)
    with caplog.at_level("INFO"), pytest.raises(NothingFits, match=r"it waited .*s for 1 GiB on cpu:0, held by holder of .*"):
        made.start()
    assert "waiting for 1 GiB on cpu:0, held by holder of" in out.getvalue()
    assert re.search(r"expected to start in about 1[45].* min, 1st in turn", out.getvalue())
    assert "waiting for" not in caplog.text
    has.end()


def _stranger() -> Place:
    return Place(name="", uid=0, pid=1, run="", made_ns=0, since_ns=0, seen_ns=0, wants={"cpu:0": GIB}, start_ns=None)


def test_words() -> None:
    assert [_ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 112)] == ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "112th"]
    assert _amounts({"cpu:0": GIB}) == "1 GiB on cpu:0"
    assert _amounts({"a": GIB, "b": 2 * GIB}) == "1 GiB on a and 2 GiB on b"
    assert _amounts({"a": GIB, "b": GIB, "c": GIB}) == "1 GiB on each of 3 devices"
    assert _amounts({"a": GIB, "b": GIB, "c": 2 * GIB}) == "1 GiB to 2 GiB on each of 3 devices"


# -- with a module -------------------------------------------------------------------------------------------------------------------


def test_a_run_starts_by_itself_when_there_is_room(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB - 1000})
    seen: list[Place] = []

    def let_go() -> None:
        seen.extend(until(lambda: places(folder, 1)))
        has.end()

    helper = threading.Thread(target=let_go)
    helper.start()
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, wait=Turn(wait="60s", priority=3), allow=["single"])
    helper.join()
    assert trainer.global_step > 0
    (place,) = seen
    assert (place.pid, place.priority, place.start_ns) == (os.getpid(), 3, None)
    assert place.seconds == pytest.approx(trainer.strategy.report.best_candidate.step_seconds * len(loader()))
    assert "waiting for" in caplog.text
    assert "held by holder of" in caplog.text
    assert "it is this run's turn: single" in caplog.text
    assert os.listdir(folder) == []


def test_the_time_is_over(folder: Path, tmp_path: Path) -> None:
    has = holder(folder, {"cpu:0": GIB, "cpu:1": GIB - 1000})
    with pytest.raises(NothingFits, match=r"it waited .*s for 4.* KiB on cpu:., held by holder of .*") as error:
        fit(tmp_path, wait=0.5)
    assert "GiB" in str(error.value)
    has.end()
    assert live_places(folder) == []


def test_others_read_when_a_run_expects_to_end(folder: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"

    def look(module: Regression, index: int) -> None:
        leases = Ledger(folder).leases()
        if not leases:  # planning runs the step before the run has one
            return
        (lease,) = leases
        seen.write_text(json.dumps([lease.ends_ns, lease.priority, lease.elastic, time.monotonic_ns()]), encoding="utf-8")

    trainer = fit(tmp_path, Regression(at={"training_step": look}), allow=["single"], wait=Turn(priority=-7))
    ends_ns, priority, elastic, at_ns = json.loads(seen.read_text(encoding="utf-8"))
    assert (priority, elastic) == (-7, False)
    expected = trainer.strategy.report.best_candidate.step_seconds * len(loader())
    assert -60 < (ends_ns - at_ns) / 1e9 <= expected
