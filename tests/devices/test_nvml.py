from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lightning_autopar.devices import torch_cuda as torchcuda
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import DeviceProcess, Inventory, Link
from lightning_autopar.devices.nvml import NvmlUnavailable, read_devices, read_links
from tests.fakes import nvml as fake
from tests.fakes.nvml import GIB, FakeGpu, FakeInstance, FakeNvml

Install = Callable[..., FakeNvml]


def ids(inventory: Inventory) -> list[str]:
    return [device.id for device in inventory.devices]


def indices(inventory: Inventory) -> list[int | None]:
    return [device.index for device in inventory.devices]


def test_memory_is_that_of_each_device(install_nvml: Install) -> None:
    install_nvml(
        FakeGpu("GPU-a", total_bytes=80 * GIB, free_bytes=10 * GIB, reserved_bytes=GIB, utilization_percent=97),
        FakeGpu("GPU-b", total_bytes=40 * GIB, free_bytes=39 * GIB, reserved_bytes=GIB, name="NVIDIA A100-SXM4-40GB"),
    )
    inventory = probe()
    first, second = inventory.devices
    assert (first.id, first.kind, first.name, first.node) == ("GPU-a", "cuda", "NVIDIA H100 80GB HBM3", 0)
    assert (first.total_bytes, first.free_bytes, first.reserved_bytes) == (79 * GIB, 10 * GIB, GIB)
    assert (second.total_bytes, second.free_bytes, second.reserved_bytes) == (39 * GIB, 39 * GIB, GIB)
    assert (first.utilization, second.utilization) == (0.97, 0.0)
    assert inventory.source == "nvml"
    assert inventory.notes == ()
    assert 0 < inventory.host_free_bytes <= inventory.host_total_bytes


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (None, 0.03),
        ([], 0.03),
        ([(0.0, 3), (1.0, 100), (2.0, 95), (3.0, 2)], 0.5),
        ([(0.0, 10), (0.5, 30), (9.0, 100), (12.0, 100)], 0.2),
    ],
    ids=["an old driver", "none yet", "a job that waits now and then", "what was long ago"],
)
def test_how_busy_a_gpu_is_is_that_of_the_last_seconds(
    install_nvml: Install, samples: list[tuple[float, int]] | None, expected: float
) -> None:
    install_nvml(FakeGpu("GPU-a", free_bytes=10 * GIB, utilization_percent=3, samples=samples))
    assert probe().devices[0].utilization == pytest.approx(expected)


def test_where_nobody_else_has_a_context_nobody_computes(install_nvml: Install) -> None:
    gpu = FakeGpu("GPU-a", free_bytes=80 * GIB - GIB // 2 - (9 << 20), utilization_percent=100, samples=[(0.0, 100)])
    install_nvml(gpu)
    assert probe().devices[0].utilization == 0.0, "whoever did has left"
    gpu.free_bytes -= GIB
    assert probe().devices[0].utilization == 1.0, "somebody whom this container doesn't see"
    gpu.compute = [(os.getpid(), GIB)]
    assert probe().devices[0].utilization == 0.0, "this very process"


@pytest.mark.parametrize("module_knows", [True, False])
def test_an_old_driver_knows_the_first_version_only(install_nvml: Install, module_knows: bool) -> None:
    nvml = install_nvml(FakeGpu("GPU-a", total_bytes=16 * GIB, free_bytes=15 * GIB), memory_v2=False)
    if module_knows:
        nvml.nvmlMemory_v2 = 0x2000028
    (device,) = probe().devices
    assert (device.total_bytes, device.free_bytes, device.reserved_bytes) == (16 * GIB, 15 * GIB, 0)


def test_processes_are_merged_and_the_own_one_is_marked(install_nvml: Install) -> None:
    install_nvml(FakeGpu("GPU-a", compute=[(30, 2 * GIB), (20, None), (os.getpid(), GIB)], graphics=[(30, GIB), (40, 5), (20, 7)]))
    (device,) = probe().devices
    assert sorted(device.processes, key=lambda process: process.pid) == sorted(
        (
            DeviceProcess(pid=20, used_bytes=7),
            DeviceProcess(pid=30, used_bytes=2 * GIB),
            DeviceProcess(pid=40, used_bytes=5),
            DeviceProcess(pid=os.getpid(), used_bytes=GIB, own=True),
        ),
        key=lambda process: process.pid,
    )


def test_a_process_whose_memory_the_driver_hides_is_still_there(install_nvml: Install) -> None:
    install_nvml(FakeGpu("GPU-a", compute=[(20, None)]))
    assert probe().devices[0].processes == (DeviceProcess(pid=20, used_bytes=None),)


def test_hidden_processes_are_noted(install_nvml: Install) -> None:
    install_nvml(FakeGpu("GPU-a", compute=[(20, 5)], errors={"nvmlDeviceGetComputeRunningProcesses": fake.ERROR_NO_PERMISSION}))
    inventory = probe()
    assert inventory.devices[0].processes == ()
    assert "which processes are on GPU-a" in inventory.notes[0]


def test_unsupported_details_are_unknown_not_fatal(install_nvml: Install) -> None:
    details = ("UtilizationRates", "ComputeRunningProcesses", "GraphicsRunningProcesses", "ComputeMode", "MigMode", "MaxPcieLinkGeneration")
    errors = {f"nvmlDeviceGet{detail}": fake.ERROR_NOT_SUPPORTED for detail in details}
    install_nvml(FakeGpu("GPU-a", errors=errors), FakeGpu("GPU-b", errors=errors, name="Something unknown"))
    inventory = probe()
    assert ids(inventory) == ["GPU-a", "GPU-b"]
    assert inventory.devices[0].utilization is None
    assert inventory.devices[0].processes == ()
    assert inventory.links == (Link(a="GPU-a", b="GPU-b", kind="host", bytes_per_second=None),)


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "*"])
@pytest.mark.parametrize("error", [fake.ERROR_GPU_IS_LOST, fake.ERROR_NO_PERMISSION])
def test_an_unreadable_device_is_left_out_with_a_note(install_nvml: Install, call: str, error: int) -> None:
    install_nvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", errors={call: error}), FakeGpu("GPU-c"))
    inventory = probe()
    assert ids(inventory) == ["GPU-a", "GPU-c"]
    (note,) = inventory.notes
    assert ("GPU is lost" if error == fake.ERROR_GPU_IS_LOST else "Insufficient Permissions") in note
    assert "left out" in note
    assert [(link.a, link.b) for link in inventory.links] == [("GPU-a", "GPU-c")]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [("GPU-b", 1, True), ("GPU-c", 2, True)]),
        ("2,0", [("GPU-c", 0, False)]),
        ("0,1", [("GPU-b", 1, True)]),
        ("GPU-a,GPU-c", [("GPU-c", 1, True)]),
        ("GPU-c,GPU-a", [("GPU-c", 0, False)]),
    ],
)
def test_behind_an_unreadable_gpu_cudas_count_is_in_doubt(
    install_nvml: Install, monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: list[tuple[str, int, bool]]
) -> None:
    install_nvml(FakeGpu("GPU-a", errors={"*": fake.ERROR_GPU_IS_LOST}), FakeGpu("GPU-b"), FakeGpu("GPU-c"))
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [(device.id, device.index, device.in_doubt) for device in probe().devices] == expected


def test_a_device_that_vanishes_while_it_is_read(install_nvml: Install) -> None:
    gone = FakeGpu("GPU-b")
    gone.hooks["nvmlDeviceGetMemoryInfo"] = lambda: gone.errors.update({"*": fake.ERROR_GPU_IS_LOST})
    install_nvml(FakeGpu("GPU-a"), gone, FakeGpu("GPU-c"))
    inventory = probe()
    assert ids(inventory) == ["GPU-a", "GPU-c"]
    # CUDA still counts what it could identify: the third device's ordinal doesn't move.
    assert indices(inventory) == [0, 2]
    assert "GPU-b" in inventory.notes[0]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"remapping_failed": True}, "row of its memory"),
        ({"recovery_action": 1}, "needs a reset"),
        ({"recovery_action": 6}, "recovery action 6"),
    ],
)
def test_a_device_in_error_is_there_with_its_error(install_nvml: Install, figures: dict[str, Any], words: str) -> None:
    install_nvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", **figures))
    first, second = probe().devices
    assert first.error is None
    assert second.error is not None
    assert words in second.error


def test_a_device_that_doesnt_know_of_errors_has_none(install_nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(FakeGpu("GPU-a", remapping_failed=None, recovery_action=None))
    assert probe().devices[0].error is None
    for name in ("nvmlDeviceGetRemappedRows", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"):
        monkeypatch.delattr(FakeNvml, name)  # an old module
    assert probe().devices[0].error is None


def test_a_device_that_vanishes_after_its_memory_was_read_has_no_links_that_promise_speed(install_nvml: Install) -> None:
    a, b = FakeGpu("GPU-a", bus_id="00000000:0A:00.0"), FakeGpu("GPU-b", bus_id="00000000:0B:00.0", nvlinks=["00000000:0A:00.0"])
    a.nvlinks = [b.bus_id]
    for call in ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"):
        a.errors[call] = fake.ERROR_GPU_IS_LOST
    install_nvml(a, b)
    assert [link.kind for link in probe().links] == ["host"]


@pytest.mark.parametrize(("mode", "compute", "kept"), [(2, [], False), (3, [(1, 5)], False), (3, [], True), (0, [(1, 5)], True)])
def test_compute_modes(install_nvml: Install, mode: int, compute: list[tuple[int, int]], kept: bool) -> None:
    install_nvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", compute_mode=mode, compute=list(compute)))
    inventory = probe()
    assert ids(inventory) == ["GPU-a", "GPU-b"][: 1 + kept]
    assert any("compute mode" in note for note in inventory.notes) is not kept


def test_an_own_process_doesnt_take_an_exclusive_device(install_nvml: Install) -> None:
    install_nvml(FakeGpu("GPU-a", compute_mode=3, compute=[(os.getpid(), GIB)]))
    assert ids(probe()) == ["GPU-a"]


def test_no_gpu_at_all(install_nvml: Install) -> None:
    install_nvml()
    inventory = probe()
    assert inventory.devices == ()
    assert inventory.notes == ("NVML sees no GPU",)


def test_the_default_order_is_fastest_first(install_nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(FakeGpu("GPU-old", capability=(7, 5)), FakeGpu("GPU-new", capability=(9, 0)), FakeGpu("GPU-newer", capability=(9, 0)))
    assert (ids(probe()), indices(probe())) == (["GPU-new", "GPU-newer", "GPU-old"], [0, 1, 2])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert ids(probe()) == ["GPU-old"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert ids(probe()) == ["GPU-newer"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert ids(probe()) == ["GPU-old", "GPU-new", "GPU-newer"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("2,0", ["GPU-c3", "GPU-a1"]), ("GPU-b", ["GPU-b2"]), ("GPU-c3,GPU-a1", ["GPU-c3", "GPU-a1"]), ("1,-1,2", ["GPU-b2"])],
)
def test_visible_devices_give_the_index(install_nvml: Install, monkeypatch: pytest.MonkeyPatch, setting: str, expected: list[str]) -> None:
    install_nvml(FakeGpu("GPU-a1"), FakeGpu("GPU-b2"), FakeGpu("GPU-c3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert ids(probe()) == expected
    assert indices(probe()) == list(range(len(expected)))


@pytest.mark.parametrize("setting", ["", "-1", "NoDevFiles", "GPU-x", "7", "0,0", "MIG-x"])
def test_no_device_is_visible(install_nvml: Install, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    install_nvml(FakeGpu("GPU-a1"), FakeGpu("GPU-b2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    inventory = probe()
    assert inventory.devices == ()
    assert inventory.source == "nvml"
    assert "CUDA_VISIBLE_DEVICES" in inventory.notes[0]


def mig_gpu(uuid: str, *numbers: int) -> FakeGpu:
    return FakeGpu(uuid, mig=True, instances={number: FakeInstance(f"MIG-{uuid[-1]}{number}") for number in numbers})


def test_instances_take_the_place_of_their_gpu(install_nvml: Install) -> None:
    install_nvml(FakeGpu("GPU-a"), mig_gpu("GPU-b", 0, 3))
    inventory = probe()
    assert ids(inventory) == ["GPU-a", "MIG-b0", "MIG-b3"]
    # A process sees the first instance and nothing else.
    assert indices(inventory) == [None, 0, None]
    assert any("a process can use one MIG instance only" in note for note in inventory.notes)
    instance = inventory.device("MIG-b3")
    assert (instance.total_bytes, instance.free_bytes, instance.utilization) == (20 * GIB, 19 * GIB, None)
    assert {link.kind for link in inventory.links} == {"host"}
    assert [device.part_of for device in inventory.devices] == [None, "GPU-b", "GPU-b"]


@pytest.mark.parametrize(("setting", "expected"), [("MIG-b3", ["MIG-b3"]), ("1", ["MIG-b0", "MIG-b3"]), ("GPU-a", ["GPU-a"])])
def test_visible_instances(install_nvml: Install, monkeypatch: pytest.MonkeyPatch, setting: str, expected: list[str]) -> None:
    install_nvml(FakeGpu("GPU-a"), mig_gpu("GPU-b", 0, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    inventory = probe()
    assert ids(inventory) == expected
    assert inventory.devices[0].index == 0


def test_mig_without_an_instance_is_noted(install_nvml: Install) -> None:
    install_nvml(mig_gpu("GPU-a"), FakeGpu("GPU-b"))
    inventory = probe()
    assert ids(inventory) == ["GPU-b"]
    assert "no instance" in inventory.notes[0]


def test_an_instance_that_may_not_be_read_is_noted(install_nvml: Install) -> None:
    gpu = mig_gpu("GPU-a", 0)
    gpu.errors["nvmlDeviceGetMigDeviceHandleByIndex"] = fake.ERROR_NO_PERMISSION
    install_nvml(gpu, FakeGpu("GPU-b"))
    inventory = probe()
    assert ids(inventory) == ["GPU-b"]
    assert any("MIG instance 0 of GPU-a can't be read" in note for note in inventory.notes)


def pair(name: str = "NVIDIA H100 80GB HBM3") -> tuple[FakeGpu, FakeGpu]:
    return FakeGpu("GPU-a", name, bus_id="00000000:0A:00.0"), FakeGpu("GPU-b", name, bus_id="00000000:0B:00.0")


def test_direct_nvlinks_count_those_between_the_two(install_nvml: Install) -> None:
    a, b = pair("NVIDIA A100-SXM4-40GB")
    a.nvlinks, b.nvlinks = [b.bus_id.lower()] * 4 + ["00000000:0c:00.0", None], [a.bus_id] * 4
    install_nvml(a, b).connect(a, b, 0, 1, 2)
    assert probe().links == (Link(a="GPU-a", b="GPU-b", kind="nvlink", bytes_per_second=100e9),)


def test_through_a_switch_all_nvlinks_count(install_nvml: Install) -> None:
    a, b = pair()
    a.nvlinks = b.nvlinks = ["00000000:f0:00.0"] * 18
    install_nvml(a, b).connect(a, b, 0, 1, 2)
    assert probe().links == (Link(a="GPU-a", b="GPU-b", kind="nvlink", bytes_per_second=450e9),)


def test_an_unknown_models_nvlinks_go_by_version(install_nvml: Install) -> None:
    a, b = pair("NVIDIA Somewhat New")
    a.nvlinks, b.nvlinks = [b.bus_id] * 2, [a.bus_id] * 2
    a.nvlink_version = b.nvlink_version = 7
    nvml = install_nvml(a, b)
    nvml.connect(a, b, 2)
    assert probe().links[0].bytes_per_second == 100e9
    a.nvlink_version = b.nvlink_version = 99
    assert probe().links == (Link(a="GPU-a", b="GPU-b", kind="nvlink", bytes_per_second=None),)


def test_nvlinks_whose_peer_access_is_off_are_not_promised(install_nvml: Install) -> None:
    a, b = pair()
    a.nvlinks = b.nvlinks = ["00000000:f0:00.0"] * 18
    nvml = install_nvml(a, b)
    assert probe().links[0].kind == "host"
    # Where the driver doesn't tell, links to a switch prove nothing, but links to each other do.
    nvml.p2p_error = fake.ERROR_NOT_SUPPORTED
    assert probe().links[0].kind == "host"
    a.nvlinks, b.nvlinks = [b.bus_id], [a.bus_id]
    assert probe().links[0].kind == "nvlink"


def test_nvlink_whose_links_are_hidden_has_no_known_rate(install_nvml: Install) -> None:
    a, b = pair()
    install_nvml(a, b).connect(a, b, 2)
    assert probe().links == (Link(a="GPU-a", b="GPU-b", kind="nvlink", bytes_per_second=None),)


def test_pcie_kinds_and_the_slower_end(install_nvml: Install) -> None:
    a, b = pair()
    a.pcie_generation, a.pcie_width, b.pcie_generation = 4, 8, 5
    nvml = install_nvml(a, b)
    (link,) = probe().links
    assert (link.kind, link.bytes_per_second) == ("host", pytest.approx(8 * 1.969e9))
    nvml.levels[frozenset(("GPU-a", "GPU-b"))] = 30
    assert probe().links[0].kind == "pcie"
    nvml.connect(a, b, 0)
    assert probe().links[0].kind == "pcie"
    nvml.connect(a, b, 1)
    assert probe().links[0].kind == "p2p"


def test_links_name_every_pair_once(install_nvml: Install) -> None:
    install_nvml(*(FakeGpu(f"GPU-{letter}") for letter in "abcd"))
    assert [link.a[-1] + link.b[-1] for link in probe().links] == ["ab", "ac", "ad", "bc", "bd", "cd"]


@pytest.mark.parametrize("error", [fake.ERROR_LIBRARY_NOT_FOUND, fake.ERROR_DRIVER_NOT_LOADED])
def test_without_the_library_torch_is_asked(install_nvml: Install, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    install_nvml(FakeGpu("GPU-a"), init_error=error)
    monkeypatch.setattr(torchcuda, "read_devices", lambda: ((), (), ("asked torch",)))
    inventory = probe()
    assert inventory.source == "torch.cuda"
    assert "NVML can't be asked" in inventory.notes[0]
    assert inventory.notes[1] == "asked torch"


def test_without_the_package_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torchcuda, "read_devices", lambda: ((), (), ()))
    inventory = probe()
    assert inventory.source == "torch.cuda"
    assert "nvidia-ml-py isn't installed" in inventory.notes[0]


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"])
def test_when_no_device_can_be_read_torch_is_asked(call: str) -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", errors={call: fake.ERROR_NOT_SUPPORTED}))
    with pytest.raises(NvmlUnavailable, match="none of the GPUs"):
        read_devices(pynvml=nvml, environment={})
    assert nvml.initialised == 0


def test_the_library_is_shut_down_when_something_unforeseen_fails() -> None:
    gpu = FakeGpu("GPU-a")

    def burst() -> None:
        raise KeyboardInterrupt

    gpu.hooks["nvmlDeviceGetMemoryInfo"] = burst
    nvml = FakeNvml(gpu)
    with pytest.raises(KeyboardInterrupt):
        read_devices(pynvml=nvml, environment={})
    assert nvml.initialised == 0


def test_the_fake_has_nothing_that_the_real_module_lacks() -> None:
    real = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 20
    assert [name for name in names if not hasattr(real, name)] == []
    assert hasattr(real, "nvmlMemory_v2")
    codes = {name: value for name, value in vars(fake).items() if name.startswith("ERROR_")}
    assert {name: getattr(real, f"NVML_{name}") for name in codes} == codes


def test_links_are_known_between_gpus_that_cuda_hides_from_this_process(install_nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair()
    a.nvlinks, b.nvlinks = [b.bus_id] * 18, [a.bus_id] * 18
    install_nvml(a, b).connect(a, b, 0, 1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert probe().links == ()
    assert [(link.a, link.b, link.kind) for link in read_links()] == [("GPU-a", "GPU-b", "nvlink")]
