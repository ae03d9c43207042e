"""The GPUs that CUDA would show to this process, in CUDA's order, read from the driver by NVML without a CUDA context.

It knows the ``pynvml`` module of ``nvidia-ml-py``, old drivers, their failures, and the two environment variables that hide and order GPUs.
A GPU that can't be read is left out with a note, never guessed. A GPU that the driver reports as faulty is listed with that as its
``error``. It also knows how GPUs reach each other: NVLink, NVSwitch and PCIe. Knows no plan.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_autopar.devices.catalogue import PCIE_LANE_BYTES_PER_SECOND, find_by_device_name
from lightning_autopar.devices.inventory import Device, DeviceProcess, Link


def cuda_order(capabilities: Sequence[tuple[int, int]], order: str | None) -> list[int]:
    """NVML indices in the order in which CUDA counts the devices.

    Under ``PCI_BUS_ID`` that is NVML's own. CUDA's default ``FASTEST_FIRST`` is documented only as a heuristic; on hosts whose GPUs are
    equal or differ in generation it is the order of compute capability, then NVML's. Two models of one capability may be in the other
    order, which is one more reason to use UUIDs.

    Args:
        capabilities: compute capability (major, minor) of each device, by NVML index.
        order: the value of ``CUDA_DEVICE_ORDER``, None if unset.
    """
    indices = list(range(len(capabilities)))
    if order == "PCI_BUS_ID":
        return indices
    return sorted(indices, key=lambda index: (-capabilities[index][0], -capabilities[index][1], index))


def visible_uuids(setting: str | None, gpus: Sequence[str], instances: Sequence[str] = ()) -> list[str]:
    """UUIDs of the devices that ``CUDA_VISIBLE_DEVICES`` leaves, in the order of their CUDA ordinals.

    As CUDA and torch read it: all entries are indices, or beginnings of GPU or of MIG UUIDs, whichever the first one is; an
    entry that names nothing ends the list, and one that comes twice empties it. An entry may name a GPU that can't be read.

    Args:
        setting: the value, None if unset (all GPUs), empty for none.
        gpus: UUIDs of the GPUs in CUDA's order; "" for one that can't be read.
        instances: UUIDs of their MIG instances.
    """
    if setting is None:
        return list(gpus)
    for prefix, uuids in (("GPU-", gpus), ("MIG-", instances)):
        if setting.startswith(prefix):
            return _of_prefixes(setting, prefix, uuids)
    indices: list[int] = []
    for entry in setting.split(","):
        index = _leading_number(entry.strip())
        if index in indices:
            return []
        if index < 0:
            break
        indices.append(index)
    end = next((place for place, index in enumerate(indices) if index >= len(gpus)), len(indices))
    return [gpus[index] for index in indices[:end]]


def _of_prefixes(setting: str, prefix: str, uuids: Sequence[str]) -> list[str]:
    """Devices named by the beginnings of their UUIDs; one that several share names nothing."""
    found: list[str] = []
    for entry in setting.split(","):
        matches = [uuid for uuid in uuids if entry.startswith(prefix) and uuid.startswith(entry)] or [""] * ("" in uuids)
        if len(matches) != 1:
            break
        if matches[0] and matches[0] in found:
            return []
        found += matches
    return found


def _leading_number(entry: str) -> int:
    """The number at the start of an entry, as C's ``strtoul`` finds it (``"1gpu"`` is 1); -1 where there is none."""
    digits = ""
    for character in entry.removeprefix("+"):
        if not (character.isascii() and character.isdigit()):
            break
        digits += character
    return int(digits) if digits else -1


_T = TypeVar("_T")
_COMPUTE_EXCLUSIVE_PROCESS, _COMPUTE_PROHIBITED = 3, 2
#: The seconds over which processes' computing is sampled.
_RECENT_SECONDS = 5.0
#: A process with less of a GPU's memory can't compute there: every CUDA context takes more.
_LEAST_CONTEXT_BYTES = 32 << 20
#: What a GPU needs before anything new can run on it, as the driver says (nvml.h, ``nvmlDeviceGpuRecoveryAction_t``).
_RECOVERY_ACTIONS = {1: "a reset", 2: "a reboot of its node", 3: "its peers to be drained", 4: "to be drained and a reset"}


class NvmlUnavailable(RuntimeError):
    """NVML is missing, or can't read this host's devices; the message says which, as a clause without a full stop."""


class _Slot(NamedTuple):
    """What CUDA may count as a device: a GPU, or a MIG instance of one."""

    handle: Any
    uuid: str
    name: str
    bus_id: str
    part_of: str | None = None

    @property
    def mig(self) -> bool:
        return self.part_of is not None


class _Gpu(NamedTuple):
    """A GPU with the instances that replace it if MIG is on."""

    slot: _Slot
    capability: tuple[int, int]
    instances: tuple[_Slot, ...] | None

    @property
    def slots(self) -> tuple[_Slot, ...]:
        return (self.slot,) if self.instances is None else self.instances


def read_devices(
    *, pynvml: Any = None, environment: Mapping[str, str] | None = None
) -> tuple[tuple[Device, ...], tuple[Link, ...], tuple[str, ...]]:
    """Devices in the order of their CUDA ordinals, the links between them, and notes on what couldn't be read.

    Args:
        pynvml: the module to ask; by default the one that is installed.
        environment: where ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are looked up; by default this process's.

    Raises:
        NvmlUnavailable: if the module or the driver's library is missing or fails, or if it can read none of the devices.
    """
    if pynvml is None:
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable("NVML can't be asked: the package nvidia-ml-py isn't installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML can't be asked ({error})") from error
    try:
        return _read(pynvml, os.environ if environment is None else environment)
    finally:
        # No result depends on how the library ends.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_links() -> tuple[Link, ...]:
    """The links between all GPUs of this host, those included that CUDA doesn't show this process: each of several may be shown its own.

    Raises:
        NvmlUnavailable: as :func:`read_devices`.
    """
    return read_devices(environment={})[1]


def _read(pynvml: Any, environment: Mapping[str, str]) -> tuple[tuple[Device, ...], tuple[Link, ...], tuple[str, ...]]:
    """What :func:`read_devices` gives, between the library's init and shutdown."""
    notes: list[str] = []
    gpus = _gpus(pynvml, notes)
    readable = [gpu for gpu in gpus if gpu is not None]
    if not readable and notes:
        raise NvmlUnavailable(f"NVML can read none of the GPUs ({'; '.join(notes)})")
    known = {gpu.capability for gpu in readable}
    unknown = known.pop() if len(known) == 1 else (sys.maxsize, 0)
    capabilities = [unknown if gpu is None else gpu.capability for gpu in gpus]
    gpus = [gpus[place] for place in cuda_order(capabilities, environment.get("CUDA_DEVICE_ORDER"))]
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    slots: dict[str, tuple[_Slot | None, ...]] = {"": (None,)}
    slots.update({gpu.slot.uuid: gpu.slots for gpu in readable})
    slots.update({slot.uuid: (slot,) for gpu in readable for slot in gpu.instances or ()})
    instances = [slot.uuid for gpu in readable for slot in gpu.instances or ()]
    uuids = visible_uuids(setting, ["" if gpu is None else gpu.slot.uuid for gpu in gpus], instances + [""] * (None in gpus))
    if setting is not None and not uuids:
        notes.append(f"CUDA_VISIBLE_DEVICES={setting!r} leaves no GPU")
    visible = [slot for uuid in uuids for slot in slots[uuid]]
    # A process sees one MIG instance, the first, and no other GPU (MIG User Guide, "CUDA Device Enumeration").
    first_mig = next((slot for slot in visible if slot is not None and slot.mig), None)
    if first_mig is not None and len(visible) > 1:
        notes.append("a process can use one MIG instance only: for each, one of its own with the UUID in CUDA_VISIBLE_DEVICES")
    found: list[tuple[Device, Port]] = []
    in_doubt = False
    for ordinal, slot in enumerate(visible):
        if slot is None:
            in_doubt = True
            continue
        index = ordinal if first_mig is None else 0 if slot is first_mig else None
        device = _device(pynvml, slot, index, notes)
        if device is not None:
            device = replace(device, in_doubt=in_doubt)
            found.append((device, Port(slot.handle, device.id, device.name, slot.bus_id, slot.mig)))
    if visible and not found:
        raise NvmlUnavailable(f"NVML can read none of the GPUs ({'; '.join(notes)})")
    if not gpus and setting is None:
        notes.append("NVML sees no GPU")
    return tuple(device for device, _ in found), links(pynvml, [port for _, port in found]), tuple(notes)


def _gpus(pynvml: Any, notes: list[str]) -> list[_Gpu | None]:
    """Every GPU in NVML's order; None for one that can't be identified."""
    gpus: list[_Gpu | None] = []
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML can't count the GPUs ({error})") from error
    for number in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            slot = _Slot(
                handle,
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetName(handle),
                bus_id(pynvml.nvmlDeviceGetPciInfo(handle)),
            )
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        except pynvml.NVMLError as error:
            notes.append(f"GPU {number} can't be read ({error}) and is left out")
            gpus.append(None)
            continue
        gpus.append(_Gpu(slot, (capability[0], capability[1]), _mig_instances(pynvml, slot, notes)))
    return gpus


def _mig_instances(pynvml: Any, gpu: _Slot, notes: list[str]) -> tuple[_Slot, ...] | None:
    """The instances of a GPU on which MIG is on; None where it is off or unknown to the GPU or the driver."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu.handle)
    except pynvml.NVMLError:
        return None
    if not current:
        return None
    instances = []
    most = _answer(pynvml, 0, lambda: int(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)))
    for number in range(most):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, number)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            name = pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            # The numbers of instances have gaps.
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                notes.append(f"MIG instance {number} of {gpu.uuid} can't be read ({error}) and is left out")
            continue
        instances.append(_Slot(handle, uuid, name, gpu.bus_id, part_of=gpu.uuid))
    if not instances:
        notes.append(f"{gpu.uuid} has MIG on but no instance, so nothing can run on it")
    return tuple(instances)


def _device(pynvml: Any, slot: _Slot, index: int | None, notes: list[str]) -> Device | None:
    """The device of a slot; None, with a note, where it can't be read or used."""
    try:
        total_bytes, free_bytes, reserved_bytes = _memory(pynvml, slot.handle)
    except pynvml.NVMLError as error:
        notes.append(f"the memory of {slot.uuid} ({slot.name}) can't be read ({error}), so it is left out")
        return None
    processes = _processes(pynvml, slot, notes)
    mode = _answer(pynvml, 0, lambda: int(pynvml.nvmlDeviceGetComputeMode(slot.handle)))
    if mode == _COMPUTE_PROHIBITED:
        notes.append(f"{slot.uuid} ({slot.name}) is in compute mode 'prohibited', so it is left out")
        return None
    if mode == _COMPUTE_EXCLUSIVE_PROCESS and any(not process.own for process in processes):
        notes.append(f"{slot.uuid} ({slot.name}) is in compute mode 'exclusive process' and taken, so it is left out")
        return None
    own_bytes = sum(process.used_bytes or 0 for process in processes if process.own)
    alone = total_bytes - free_bytes - own_bytes < _LEAST_CONTEXT_BYTES
    return Device(
        id=slot.uuid,
        kind="cuda",
        name=slot.name,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        reserved_bytes=reserved_bytes,
        index=index,
        utilization=_utilization(pynvml, slot, alone=alone),
        processes=processes,
        error=_error(pynvml, slot),
        part_of=slot.part_of,
    )


def _utilization(pynvml: Any, slot: _Slot, *, alone: bool) -> float | None:
    """The share of the last seconds in which it computed for others; None where that isn't known, as for MIG instances. The driver keeps
    samples of some seconds, so that a job that waits for data only for a moment counts as computing. If no other process has even a context
    there, the samples are of a process that has ended.
    """
    now = _answer(pynvml, None, lambda: float(pynvml.nvmlDeviceGetUtilizationRates(slot.handle).gpu) / 100)
    ask = getattr(pynvml, "nvmlDeviceGetSamples", None)
    if now is None or alone or ask is None:
        return now if now is None or not alone else 0.0
    samples: list[Any] = _answer(pynvml, [], lambda: list(ask(slot.handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]))
    latest = max((sample.timeStamp for sample in samples), default=0)
    recent = [sample.sampleValue.uiVal for sample in samples if latest - sample.timeStamp <= _RECENT_SECONDS * 1e6]
    return min(1.0, sum(recent) / len(recent) / 100) if recent else now


def _error(pynvml: Any, slot: _Slot) -> str | None:
    """What the driver says is wrong with a GPU that can still be read; None if nothing is known. An instance has the errors of its GPU, but
    isn't asked for them.
    """
    ask = getattr(pynvml, "nvmlDeviceGetRemappedRows", None)
    if ask is not None and _answer(pynvml, False, lambda: bool(ask(slot.handle)[3])):
        return "a broken row of its memory couldn't be replaced"
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    action = 0 if field is None else _answer(pynvml, 0, lambda: _field(pynvml, slot, field))
    return f"the driver says that it needs {_RECOVERY_ACTIONS.get(action, f'recovery action {action}')}" if action else None


def _field(pynvml: Any, slot: _Slot, field: int) -> int:
    """One of NVML's fields, a whole number; 0 where the GPU doesn't have it."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(slot.handle, [field])
    return 0 if value.nvmlReturn else int(value.value.uiVal)


def _memory(pynvml: Any, handle: Any) -> tuple[int, int, int]:
    """Bytes that processes can have, that are free, and that the driver keeps; the first without the last. Only the second version of the
    call tells what the driver keeps; older drivers and modules have only the first version.
    """
    version = getattr(pynvml, "nvmlMemory_v2", None)
    if version is not None:
        with contextlib.suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            return int(memory.total) - int(memory.reserved), int(memory.free), int(memory.reserved)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.free), 0


def _processes(pynvml: Any, slot: _Slot, notes: list[str]) -> tuple[DeviceProcess, ...]:
    """The processes on the device, each once, however they use it."""
    used: dict[int, int | None] = {}
    for call in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            entries = call(slot.handle)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                notes.append(f"the driver doesn't tell this user which processes are on {slot.uuid}")
                break
            continue
        for entry in entries:
            known = used.get(int(entry.pid))
            used[int(entry.pid)] = known if entry.usedGpuMemory is None else max(int(entry.usedGpuMemory), known or 0)
    own = os.getpid()
    return tuple(DeviceProcess(pid=pid, used_bytes=used_bytes, own=pid == own) for pid, used_bytes in sorted(used.items()))


def _answer(pynvml: Any, otherwise: _T, ask: Callable[[], _T]) -> _T:
    """The result of a call that this device or driver may not support."""
    try:
        return ask()
    except pynvml.NVMLError:
        return otherwise


# As in nvml.h. The module's own NVML_P2P_CAPS_INDEX_READ is a tuple by a stray comma, which ctypes refuses.
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_OK = 0
_TOPOLOGY_HOSTBRIDGE = 30

# Bytes per second and link, one direction, by NVML's number of the version (2 and 3 are NVLink 2, 4 and 5 NVLink 3).
# Only for models that the catalogue doesn't know: boards of one version run their links at different rates.
_NVLINK_BYTES_PER_SECOND = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}


class Port(NamedTuple):
    """An end of links: a device with NVML's handle and the PCI address of its GPU."""

    handle: Any
    id: str
    name: str
    bus_id: str
    mig: bool


class _NvLinks(NamedTuple):
    """Active NVLinks of a GPU: how many to each GPU, how many to anything else (an NVSwitch), and the rate of one."""

    to_gpus: Counter[str]
    to_switch: int
    bytes_per_second: float | None


def bus_id(pci: Any) -> str:
    """The PCI address of NVML's structure, spelt so that two can be compared."""
    return str(pci.busId).strip("\0 ").lower()


def links(pynvml: Any, ports: Sequence[Port]) -> tuple[Link, ...]:
    """One link for each pair; what the driver doesn't tell counts as absent, so that no link is assumed wrongly."""
    buses = {port.bus_id for port in ports}
    nvlinks = [_nvlinks(pynvml, port, buses) for port in ports]
    pcie = [_pcie_bytes_per_second(pynvml, port) for port in ports]
    return tuple(
        _link(pynvml, ports[a], ports[b], (nvlinks[a], nvlinks[b]), _smaller(pcie[a], pcie[b]))
        for a, b in itertools.combinations(range(len(ports)), 2)
    )


def _link(pynvml: Any, a: Port, b: Port, nvlinks: tuple[_NvLinks, _NvLinks], pcie: float | None) -> Link:
    """The best way between two devices."""
    if a.mig or b.mig:
        # MIG instances have no access to each other's memory, on one GPU or two.
        return Link(a=a.id, b=b.id, kind="host", bytes_per_second=pcie)
    nvlink = _p2p(pynvml, a, b, _P2P_NVLINK)
    direct = min(nvlinks[0].to_gpus[b.bus_id], nvlinks[1].to_gpus[a.bus_id])
    count = direct or min(nvlinks[0].to_switch, nvlinks[1].to_switch)
    # Links can be active but unusable (no fabric manager, peer access switched off), or usable though a virtual machine hides them.
    if nvlink or (nvlink is None and direct):
        rate = _smaller(nvlinks[0].bytes_per_second, nvlinks[1].bytes_per_second)
        return Link(a=a.id, b=b.id, kind="nvlink", bytes_per_second=count * rate if count and rate else None)
    kind: Literal["p2p", "pcie", "host"] = "host"
    if _p2p(pynvml, a, b, _P2P_READ) and _p2p(pynvml, a, b, _P2P_WRITE):
        kind = "p2p"
    else:
        with contextlib.suppress(pynvml.NVMLError):
            kind = "pcie" if pynvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle) <= _TOPOLOGY_HOSTBRIDGE else "host"
    return Link(a=a.id, b=b.id, kind=kind, bytes_per_second=pcie)


def _p2p(pynvml: Any, a: Port, b: Port, capability: int) -> bool | None:
    """Whether peer access of that kind works; None where the driver doesn't tell."""
    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(a.handle, b.handle, capability) == _P2P_OK)
    except pynvml.NVMLError:
        return None


def _nvlinks(pynvml: Any, port: Port, gpus: set[str]) -> _NvLinks:
    """The active NVLinks of a GPU, by where they lead."""
    to_gpus: Counter[str] = Counter()
    to_switch = 0
    version = None
    for number in range(0 if port.mig else int(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(port.handle, number)
        except pynvml.NVMLError:
            # A GPU without NVLink, or the number past the last link.
            break
        if not active:
            continue
        try:
            remote = bus_id(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(port.handle, number))
            version = version or pynvml.nvmlDeviceGetNvLinkVersion(port.handle, number)
        except pynvml.NVMLError:
            remote = ""
        if remote in gpus:
            to_gpus[remote] += 1
        else:
            to_switch += 1
    model = find_by_device_name(port.name)
    if model is not None and model.nvlink_bytes_per_second is not None:
        rate: float | None = model.nvlink_bytes_per_second / model.nvlink_links
    else:
        rate = _NVLINK_BYTES_PER_SECOND.get(version) if version is not None else None
    return _NvLinks(to_gpus, to_switch, rate)


def _pcie_bytes_per_second(pynvml: Any, port: Port) -> float | None:
    """One direction of the widest and fastest PCIe that GPU and slot agree on; the data sheet's where NVML doesn't tell."""
    with contextlib.suppress(pynvml.NVMLError):
        rate = PCIE_LANE_BYTES_PER_SECOND.get(int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(port.handle)))
        if rate is not None:
            return rate * int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(port.handle))
    model = find_by_device_name(port.name)
    return model.pcie_bytes_per_second if model is not None else None


def _smaller(a: float | None, b: float | None) -> float | None:
    """The smaller rate, None if one is unknown."""
    return None if a is None or b is None else min(a, b)
