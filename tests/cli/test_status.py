"""The command line's page about the host: everyone's runs, and who else is on the GPUs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_autopar.cli import device_users as users
from lightning_autopar.cli import main
from lightning_autopar.cli import runs as status
from lightning_autopar.devices import nvml
from lightning_autopar.devices.inventory import Device, DeviceProcess
from lightning_autopar.sharing.runs import requests as run_requests
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.status import RunFiles, RunStatus, open_run

GIB = 1 << 30
UUIDS = ("GPU-7c1e9b04-1111-2222-3333-444455556666", "GPU-90aa77b1-1111-2222-3333-444455556666")
WATCH = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # whatever this process ignores
    "from lightning_autopar.cli import main; sys.exit(main({}))"
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(status, "leftovers", tuple)  # other tests' runs are killed meanwhile
    gpus(monkeypatch)


def gpus(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> None:
    """Those that the driver shows."""

    def read_devices(**_: Any) -> Any:
        if not devices:
            raise nvml.NvmlUnavailable("there is no driver")
        return devices, (), ("a note\x1b[2J",)

    monkeypatch.setattr(nvml, "read_devices", read_devices)
    monkeypatch.setattr(users, "is_drivers", lambda pid: pid < 2**22)


def running(files: RunFiles, **changes: Any) -> None:
    values: dict[str, Any] = {
        "state": "running",
        "elastic": True,
        "plan": "FSDP[2]",
        "devices": UUIDS,
        "leased_bytes": dict.fromkeys(UUIDS, 3 * GIB),
        "used_bytes": {UUIDS[0]: 2 * GIB},
        "predicted_bytes": dict.fromkeys(UUIDS, 5 * GIB // 2),
        "step": 12,
        "steps": 400,
        "step_seconds": 0.1234,
        "since": time.time() - 3 * 3600,
        "ends_at": time.time() + 48 * 60 + 20,
        "reason": "12 GiB became free [on both]",
    }
    files.show(replace(files.status, **{**values, **changes}))


def test_without_runs_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "No runs on this host.\n"
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["runs"], shown["devices"], shown["notes"]) == ([], [], [])


def test_each_run_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("/at/train_gpt.py") as files, open_run("other.py") as other, open_run("third.py") as third:
        running(files)
        other.show(replace(other.status, task="test"))
        third.show(
            replace(third.status, state="queued", waits_for="20 GiB on GPU-90aa77b1, behind x-1234", predicted_bytes={UUIDS[1]: 20 * GIB})
        )
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
    me = user_name()
    (at,) = (place for place, line in enumerate(lines) if line.startswith(files.run_id))
    assert lines[at : at + 5] == [
        f"{files.run_id}  {me}  train_gpt.py  running 3 h  FSDP[2]",
        "  GPU-7c1e9b04  2 GiB used, 3 GiB leased, 2.5 GiB predicted",
        "  GPU-90aa77b1  3 GiB leased, 2.5 GiB predicted",
        "  step 12/400, 0.123 s/step, ends in 48 min",
        "  12 GiB became free [on both]",
    ]
    assert f"{other.run_id}  {me}  other.py (test)  planning now" in lines
    (at,) = (place for place, line in enumerate(lines) if line.startswith(third.run_id))
    assert lines[at : at + 3] == [
        f"{third.run_id}  {me}  third.py  queued now",
        "  GPU-90aa77b1  20 GiB wanted",
        "  20 GiB on GPU-90aa77b1, behind x-1234",
    ]


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        running(files)
        assert main(["status", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["run_id"], run["own"], run["user"], run["pid"]) == (files.run_id, True, user_name(), os.getpid())
    assert (run["devices"], run["leased_bytes"]) == (list(UUIDS), dict.fromkeys(UUIDS, 3 * GIB))
    assert run["silent_seconds"] < 60
    assert {"script", "state", "step", "steps", "step_seconds", "ends_at", "priority", "elastic", "waits_for", "predicted_bytes"} <= set(
        run
    )


def test_a_run_that_says_nothing_any_more_is_called_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        shown = {**files.status.to_dict(), "shown_at": time.time() - 600}
        (files.folder / "status.json").write_text(json.dumps(shown))
        assert main(["status"]) == 0
        assert "silent for 10 min: planning takes long, or it hangs" in capsys.readouterr().out
        (files.folder / "status.json").write_text(json.dumps({**shown, "state": "running"}))
        assert main(["status"]) == 0
        assert "silent for 10 min: in a long step, or it hangs" in capsys.readouterr().out


def test_a_stopped_process_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run("train_gpt.py"):
        monkeypatch.setattr(status, "is_stopped", lambda pid: pid == os.getpid())
        assert main(["status"]) == 0
        assert f"stopped; kill -CONT {os.getpid()} lets it go on" in capsys.readouterr().out


def test_a_narrow_terminal_keeps_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with open_run("train_gpt.py") as files:
        running(files)
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) == 5


def test_an_expectation_that_is_past_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with open_run("train_gpt.py") as files:
        running(files, ends_at=time.time() - 5)
        assert main(["status"]) == 0
        assert "ends" not in capsys.readouterr().out


# -- others ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[bytes], RunFiles]]:
    """A GPU on which this user's run is, a stranger's process, and one of which nobody can tell whose it is; and ada's run on another."""
    with open_run("train_gpt.py") as files, subprocess.Popen(["sleep", "60"]) as stranger:
        monkeypatch.setattr(psutil.Process, "parents", lambda process: [])  # that one was started here
        running(files, devices=UUIDS[:1])
        processes = (
            DeviceProcess(pid=os.getpid(), used_bytes=4 * GIB),
            DeviceProcess(pid=stranger.pid, used_bytes=7 * GIB),
            DeviceProcess(pid=2**22 + 1, used_bytes=None),
        )
        there = {"kind": "cuda", "name": "NVIDIA H200", "total_bytes": 100 * GIB}
        first = Device(id=UUIDS[0], free_bytes=20 * GIB, processes=processes, **there)  # type: ignore[arg-type]
        gpus(monkeypatch, first, Device(id=UUIDS[1], free_bytes=100 * GIB, **there))  # type: ignore[arg-type]
        theirs = replace(files.status, run_id="adas-1234", user="ada", pid=2**22 + 2, devices=UUIDS[1:])
        monkeypatch.setattr(run_requests, "_theirs", lambda: [(Path("/nowhere"), theirs)])
        try:
            yield stranger, files
        finally:
            stranger.kill()


def test_runs_of_others_and_strangers_are_there(
    box: tuple[subprocess.Popen[bytes], RunFiles], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, files = box
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{files.run_id}  {user_name()}")
    assert lines[1] == "  GPU-7c1e9b04  4 GiB used, 3 GiB leased, 2.5 GiB predicted", "what the driver sees"
    assert any(line.startswith("adas-1234  ada  train_gpt.py  running") for line in lines)
    at = next(place for place, line in enumerate(lines) if line.startswith("GPU-7c1e9b04  NVIDIA H200, 80 GiB of 100 GiB used"))
    assert lines[at].endswith("by no run, or by one that isn't visible here:")
    assert lines[at + 1].split() == [str(stranger.pid), "7", "GiB", psutil.Process().username(), "sleep", "60"]
    assert lines[at + 2].split() == [str(2**22 + 1), "?", "MiB", "not", "told"]
    assert lines[at + 3 :] == ["a note\ufffd[2J"]
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(run["run_id"], run["own"]) for run in shown["runs"]] == [(files.run_id, True), ("adas-1234", False)]
    page = (Path(__file__).parents[2] / "docs" / "commandline.md").read_text(encoding="utf-8")
    for each in (shown, *shown["runs"], *shown["devices"], *shown["devices"][0]["users"]):
        assert not [name for name in each if f"`{name}`" not in page], "each is on the page"
    assert [[user["run"] for user in device["users"]] for device in shown["devices"]] == [[None, files.run_id, None], ["adas-1234"]]


def test_a_command_line_does_not_reach_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nasty = "\x1b]0;owned\x07"
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", nasty], stdin=subprocess.PIPE) as stranger:
        device = Device(
            id=UUIDS[0],
            kind="cuda",
            name=nasty,
            total_bytes=100 * GIB,
            free_bytes=20 * GIB,
            processes=(DeviceProcess(pid=stranger.pid, used_bytes=GIB),),
        )
        gpus(monkeypatch, device)
        assert main(["status"]) == 0
        shown = capsys.readouterr().out
        stranger.kill()
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_containers_run_is_known_by_the_number_that_its_process_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "is_drivers", lambda pid: True)
    monkeypatch.setattr(users, "inner_pid", lambda pid: 7 if pid == os.getpid() else None)
    device = Device(
        id="GPU-a", kind="cuda", name="x", total_bytes=1, free_bytes=1, processes=(DeviceProcess(pid=os.getpid(), used_bytes=1),)
    )
    name = psutil.Process().username()
    inside = RunStatus(
        run_id="a-1234", pid=7, user=name, script="a.py", state="running", since=0.0, devices=("GPU-a",), namespace="pid:[1]"
    )
    assert [user.run for user in users.users_of(device, [inside])] == ["a-1234"]
    for other in (replace(inside, user="somebody"), replace(inside, pid=8), replace(inside, devices=("GPU-b",))):
        assert None in [user.run for user in users.users_of(device, [other])]


# -- again and again ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--watch"], "--watch draws on a terminal"),
        (["--watch", "0"], "--watch 0 must be at least 0.2 seconds"),
        (["--watch", "nan"], "--watch nan must be at least 0.2 seconds"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_watching_in_json_is_a_line_at_each_look_until_ctrl_c_or_nobody_reads() -> None:
    command = [sys.executable, "-c", WATCH.format(["status", "--watch", "0.2", "--json"])]
    with open_run("train_gpt.py") as files:
        for ends in ("interrupt", "close"):
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                for _ in range(2):
                    assert json.loads(process.stdout.readline())["runs"][0]["run_id"] == files.run_id
                process.send_signal(signal.SIGINT) if ends == "interrupt" else process.stdout.close()
                assert process.wait(30) == 0
                assert process.stderr.read() == ""


def test_watching_draws_on_a_terminal_until_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    with open_run("train_gpt.py") as files:
        command = [sys.executable, "-c", WATCH.format(["status", "--watch", "0.2"])]
        with subprocess.Popen(
            command, stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        ) as process:
            os.close(theirs)
            shown = b""
            while shown.count(b"Ctrl-C ends it") < 2:
                shown += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            while True:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # so a terminal's other end says that nobody is there any more
                    break
            assert process.wait(30) == 0
    os.close(ours)
    assert files.run_id.encode() in shown
    assert b"Traceback" not in shown
