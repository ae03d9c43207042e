"""What can be set of the stub GPUs, seen as the project sees it: through NVML, torch and NCCL, each time in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nullgpu import control

pytestmark = [pytest.mark.gpu, pytest.mark.stub]
MIB = 1 << 20

DEVICES = """
import json
from lightning_autopar.devices import nvml
devices, links, notes = nvml.read_devices()
print(json.dumps({
    "devices": [[d.id, d.index, d.name, d.total_bytes, d.free_bytes, [[p.pid, p.used_bytes] for p in d.processes], d.utilization, d.error]
                for d in devices],
    "links": [[l.kind, l.bytes_per_second] for l in links], "notes": notes}))
"""


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of these tests, alone with GPUs of their own."""
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    yield
    control.reset()


def python(program: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100)


def answer(program: str, **environment: str) -> Any:
    done = python(program, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_gpu_has_its_name_and_memory() -> None:
    names = "NVIDIA A100-SXM4-40GB,NVIDIA GeForce RTX 4090"
    found = answer(DEVICES, NULLGPU_DEVICES="3", NULLGPU_NAME=names, NULLGPU_MEMORY_MIB="40000,24000")["devices"]
    expected = [("NVIDIA A100-SXM4-40GB", 40000 * MIB), ("NVIDIA GeForce RTX 4090", 24000 * MIB), ("NVIDIA GeForce RTX 4090", 24000 * MIB)]
    assert [(name, total) for _, _, name, total, *_ in found] == expected


@pytest.mark.parametrize(
    ("link", "kind"), [("nvswitch", "nvlink"), ("nvlink", "nvlink"), ("p2p", "p2p"), ("pcie", "pcie"), ("host", "host")]
)
def test_links_are_as_set(link: str, kind: str) -> None:
    assert {found for found, _ in answer(DEVICES, NULLGPU_DEVICES="3", NULLGPU_LINK=link)["links"]} == {kind}
    peers = "import torch; print(int(torch.cuda.can_device_access_peer(0, 1)))"
    assert bool(answer(peers, NULLGPU_LINK=link)) == (kind in ("nvlink", "p2p"))


def test_links_of_gpus_that_are_joined_directly_are_shared_between_them() -> None:
    (two,), (four, *_) = (answer(DEVICES, NULLGPU_DEVICES=n, NULLGPU_LINK="nvlink")["links"] for n in ("2", "4"))
    assert two[1] == pytest.approx(3 * four[1])


def test_instances_take_the_place_of_their_gpu() -> None:
    settings = {"NULLGPU_DEVICES": "2", "NULLGPU_MIG": "0:3g.40gb/2g.20gb"}
    found = answer(DEVICES, **settings)
    assert [index for _, index, *_ in found["devices"]] == [0, None, None], "a process has one instance, and nothing beside it"
    assert [name.split("HBM3")[1] for _, _, name, *_ in found["devices"]] == [" MIG 3g.40gb", " MIG 2g.20gb", ""]
    second = found["devices"][1][0]
    shown = answer(
        "import json, torch; print(json.dumps([torch.cuda.device_count(), *torch.cuda.mem_get_info(0)]))",
        **settings,
        CUDA_VISIBLE_DEVICES=second,
    )
    assert shown[0] == 1
    assert shown[2] == 20_000_000_000


def test_other_processes_take_memory_while_a_process_runs() -> None:
    assert answer(DEVICES)["devices"][0][5] == []
    with control.occupied(0, 1000 * MIB, pid=os.getpid()), control.occupied(0, 24 * MIB, pid=1):
        control.utilize(0, 70)
        first, second = answer(DEVICES, NULLGPU_OTHERS="1:1:500")["devices"]
        assert sorted(first[5]) == sorted([[os.getpid(), 1000 * MIB], [1, 24 * MIB]])
        assert first[3] - first[4] == 1024 * MIB
        assert first[6] == pytest.approx(0.7)
        assert second[5] == [[1, 500 * MIB]]
        assert second[3] - second[4] == 500 * MIB
    assert answer(DEVICES)["devices"][0][5] == []


GROWS = """
import os, torch
from tests.nullgpu import control
held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:0")
free = torch.cuda.mem_get_info(0)[0]
control.occupy(0, free - (300 << 20))
torch.empty(200 << 20, dtype=torch.uint8, device="cuda:0")
torch.cuda.empty_cache()
try:
    torch.empty(400 << 20, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError:
    print(1)
"""


def test_what_others_take_is_not_to_be_had() -> None:
    assert answer(GROWS) == 1


def test_a_lost_gpu_is_lost_to_nvml_and_to_cuda() -> None:
    control.lose(1)
    found = answer(DEVICES)
    assert len(found["devices"]) == 1
    assert "GPU 1 can't be read (GPU is lost)" in found["notes"][0]
    control.lose(1, 0)
    assert len(answer(DEVICES)["devices"]) == 2
    assert len(answer(DEVICES, NULLGPU_LOST="0")["devices"]) == 1


LOSES = """
import torch
from tests.nullgpu import control
x = torch.ones(4, device="cuda:0")
control.lose(0)
for attempt in (lambda: x + 1, torch.cuda.synchronize, lambda: x.cpu(), lambda: torch.empty(64 << 20, device="cuda:0")):
    try:
        attempt()
    except torch.AcceleratorError as error:
        assert "busy or unavailable" in str(error), error
    else:
        raise SystemExit("a lost GPU worked")
print(1)
"""


def test_a_gpu_that_vanishes_fails_whatever_is_asked_of_it() -> None:
    done = python(LOSES)
    assert done.stdout == "1\n", done.stderr[-2000:]


def test_an_ailing_gpu_says_so() -> None:
    control.ail(0, recovery=1)
    control.ail(1, remap_failed=True)
    assert [error for *_, error in answer(DEVICES)["devices"]] == [
        "the driver says that it needs a reset", "a broken row of its memory couldn't be replaced"
    ]  # fmt: skip


FAILS = """
import sys, torch
from tests.nullgpu import control
kept = []
for number in range(4):
    try:
        kept.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda:0"))
    except torch.OutOfMemoryError:
        print(number)
"""


def test_the_nth_allocation_fails() -> None:
    control.fail_allocations(0, after=2)
    assert python(FAILS).stdout == "2\n"
    assert python(FAILS).stdout == "", "once"
    assert python(FAILS, NULLGPU_FAIL="0:1").stdout == "1\n"
    control.fail_allocations(0, from_bytes=31 * MIB)
    assert python(FAILS).stdout == "", "these are smaller"


def test_a_childs_counts_are_read_from_outside() -> None:
    program = (
        "import sys, torch; x = torch.ones(4, device='cuda'); [x.sum().item() for _ in range(7)]; print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = control.counters(child.pid)
        child.communicate()
    assert found["stream_syncs"] == 7


RANK = """
import os, sys, time, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.full((4,), float(rank + 1), device="cuda")
for number in range(3):
    if number == 1:
        dist.broadcast(x, 0)
    else:
        work = dist.all_reduce(x, async_op=True)
        until = time.monotonic() + 5
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        print("done" if work.is_completed() else "open", flush=True)
os._exit(0)
"""


@pytest.mark.two_gpus
@pytest.mark.parametrize("action", control.ACTIONS)
def test_a_peer_fails_at_the_nth_collective_of_a_kind(action: str, tmp_path: Path) -> None:
    control.fault(action, rank=1, kind="all_reduce", nth=2)
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        assert ranks[0].communicate(timeout=60)[0].split() == ["done", "open"]
        if action == "kill":
            assert ranks[1].wait(10) == -signal.SIGKILL
        if action == "stop":
            assert "T (stopped)" in Path(f"/proc/{ranks[1].pid}/status").read_text()
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


@pytest.mark.two_gpus
def test_a_peer_that_hangs_for_a_while_goes_on(tmp_path: Path) -> None:
    control.fault("hang", rank=1, nth=3, seconds=1)
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    assert [each.communicate(timeout=60)[0].split() for each in ranks] == [["done", "done"]] * 2


def test_settings_are_mirrored_whole() -> None:
    """The state as Python maps it ends where C's lock begins."""
    torch.ones(1, device="cuda")
    control.occupy(15, 7)
    assert control._state().units[15].others[0].bytes == 7
    assert control.counters(os.getpid())["launches"] >= 0
