"""A stand-in for the module ``pynvml`` whose devices are settable. It has the calls that the package makes and no others.

An unknown call is an AttributeError, a call before init or after shutdown an error, as in the driver's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30

ERROR_UNINITIALIZED = 1
ERROR_INVALID_ARGUMENT = 2
ERROR_NOT_SUPPORTED = 3
ERROR_NO_PERMISSION = 4
ERROR_NOT_FOUND = 6
ERROR_DRIVER_NOT_LOADED = 9
ERROR_LIBRARY_NOT_FOUND = 12
ERROR_FUNCTION_NOT_FOUND = 13
ERROR_GPU_IS_LOST = 15

_MESSAGES = {
    ERROR_UNINITIALIZED: "Uninitialized",
    ERROR_INVALID_ARGUMENT: "Invalid Argument",
    ERROR_NOT_SUPPORTED: "Not Supported",
    ERROR_NO_PERMISSION: "Insufficient Permissions",
    ERROR_NOT_FOUND: "Not Found",
    ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
    ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    ERROR_FUNCTION_NOT_FOUND: "Function Not Found",
    ERROR_GPU_IS_LOST: "GPU is lost",
}


class NVMLError(Exception):
    """As the real one: ``value`` is NVML's return code, the message its text."""

    def __init__(self, value: int) -> None:
        super().__init__(_MESSAGES[value])
        self.value = value


@dataclass(eq=False)
class FakeInstance:
    """A MIG instance."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    total_bytes: int = 20 * GIB
    free_bytes: int = 19 * GIB


@dataclass(eq=False)
class FakeGpu:
    """A GPU; every attribute may be set at any time, also while it is being read.

    ``errors`` maps the name of a call, or ``"*"`` for every one, to the code that it fails with. ``hooks`` maps the name of
    a call to something that runs just before it. ``nvlinks`` holds, link by link, the bus id that it leads to, or None
    where it isn't active. ``samples`` are how busy it was, by how many seconds ago; older drivers keep none. What isn't known
    to the GPU is None.
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total_bytes: int = 80 * GIB
    free_bytes: int = 79 * GIB
    reserved_bytes: int = GIB // 2
    utilization_percent: int = 0
    samples: list[tuple[float, int]] | None = None
    capability: tuple[int, int] = (9, 0)
    bus_id: str = ""
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    compute_mode: int = 0
    mig: bool | None = False
    instances: dict[int, FakeInstance] = field(default_factory=dict)
    nvlinks: list[str | None] = field(default_factory=list)
    nvlink_version: int = 6
    pcie_generation: int = 5
    pcie_width: int = 16
    remapping_failed: bool | None = False
    recovery_action: int | None = 0
    errors: dict[str, int] = field(default_factory=dict)
    hooks: dict[str, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bus_id = self.bus_id or f"00000000:{sum(self.uuid.encode()) % 256:02X}:00.0"


class FakeNvml:
    """The module: ``FakeNvml(FakeGpu("GPU-a"), …)``. ``gpus`` is in NVML's order.

    Args:
        gpus: what there is.
        init_error: the code that ``nvmlInit`` fails with; None if it doesn't.
        memory_v2: whether driver and module know the second version of the memory call.
        p2p: pairs of UUIDs between which peer access works, by NVML's number of its kind (0 read, 1 write, 2 NVLink).
        p2p_error: the code that asking for it fails with.
        levels: NVML's level of the closest ancestor of a pair of UUIDs; 50, through the processors' link, otherwise.
    """

    NVML_ERROR_NOT_FOUND = ERROR_NOT_FOUND
    NVML_ERROR_NO_PERMISSION = ERROR_NO_PERMISSION
    NVML_NVLINK_MAX_LINKS = 18
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None, memory_v2: bool = True) -> None:
        self.gpus = list(gpus)
        self.init_error = init_error
        self.p2p: dict[int, set[frozenset[str]]] = {0: set(), 1: set(), 2: set()}
        self.p2p_error: int | None = None
        self.levels: dict[frozenset[str], int] = {}
        self.initialised = 0
        self.calls: list[str] = []
        self._memory_v2 = memory_v2
        if memory_v2:
            self.nvmlMemory_v2 = 0x2000028

    def connect(self, a: FakeGpu, b: FakeGpu, *kinds: int) -> None:
        """Let peer access of those kinds work between two GPUs."""
        for kind in kinds:
            self.p2p[kind].add(frozenset((a.uuid, b.uuid)))

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.initialised -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not 0 <= index < len(self.gpus):
            raise NVMLError(ERROR_INVALID_ARGUMENT)
        self._called("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeInstance:
        handles: list[FakeGpu | FakeInstance] = [*self.gpus, *(one for gpu in self.gpus for one in gpu.instances.values())]
        for handle in handles:
            if handle.uuid == uuid:
                self._called("nvmlDeviceGetHandleByUUID", handle)
                return handle
        raise NVMLError(ERROR_NOT_FOUND)

    def nvmlDeviceGetRemappedRows(self, handle: FakeGpu | FakeInstance) -> tuple[int, int, int, int]:
        self._called("nvmlDeviceGetRemappedRows", handle)
        failed = self._gpu(handle).remapping_failed
        if failed is None:
            raise NVMLError(ERROR_NOT_SUPPORTED)
        return 0, 0, 0, int(failed)

    def nvmlDeviceGetFieldValues(self, handle: FakeGpu | FakeInstance, fields: list[int]) -> list[Any]:
        self._called("nvmlDeviceGetFieldValues", handle)
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        action = self._gpu(handle).recovery_action
        unknown = ERROR_NOT_SUPPORTED if action is None else 0
        return [SimpleNamespace(nvmlReturn=unknown, value=SimpleNamespace(uiVal=action or 0))]

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeInstance) -> str:
        self._called("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeInstance) -> str:
        self._called("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        self._called("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(busId=handle.bus_id)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        self._called("nvmlDeviceGetCudaComputeCapability", handle)
        return handle.capability

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        self._called("nvmlDeviceGetMigMode", handle)
        if handle.mig is None:
            raise NVMLError(ERROR_NOT_SUPPORTED)
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        self._called("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeInstance:
        self._called("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        if index not in handle.instances:
            raise NVMLError(ERROR_NOT_FOUND)
        return handle.instances[index]

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeInstance, version: int | None = None) -> Any:
        self._called("nvmlDeviceGetMemoryInfo", handle)
        if version is None:
            return SimpleNamespace(total=handle.total_bytes, free=handle.free_bytes, used=handle.total_bytes - handle.free_bytes)
        if not self._memory_v2:
            raise NVMLError(ERROR_FUNCTION_NOT_FOUND)
        reserved = handle.reserved_bytes if isinstance(handle, FakeGpu) else 0
        used = handle.total_bytes - handle.free_bytes - reserved
        return SimpleNamespace(total=handle.total_bytes, free=handle.free_bytes, reserved=reserved, used=used)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu | FakeInstance) -> Any:
        self._called("nvmlDeviceGetUtilizationRates", handle)
        if isinstance(handle, FakeInstance):
            raise NVMLError(ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=handle.utilization_percent, memory=0)

    def nvmlDeviceGetSamples(self, handle: FakeGpu | FakeInstance, kind: int, since: int) -> tuple[int, list[Any]]:
        self._called("nvmlDeviceGetSamples", handle)
        assert (kind, since) == (self.NVML_GPU_UTILIZATION_SAMPLES, 0)
        if not isinstance(handle, FakeGpu) or handle.samples is None:
            raise NVMLError(ERROR_NOT_SUPPORTED)
        now = 1_700_000_000_000_000
        values = [(now - int(ago * 1e6), percent) for ago, percent in handle.samples]
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent)) for at, percent in values]

    def nvmlDeviceGetComputeMode(self, handle: FakeGpu | FakeInstance) -> int:
        self._called("nvmlDeviceGetComputeMode", handle)
        return handle.compute_mode if isinstance(handle, FakeGpu) else 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu | FakeInstance) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses", handle)
        return self._processes(handle.compute if isinstance(handle, FakeGpu) else [])

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu | FakeInstance) -> list[Any]:
        self._called("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return self._processes(handle.graphics if isinstance(handle, FakeGpu) else [])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeGpu | FakeInstance) -> int:
        self._called("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        return self._gpu(handle).pcie_generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: FakeGpu | FakeInstance) -> int:
        self._called("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return self._gpu(handle).pcie_width

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu | FakeInstance, link: int) -> int:
        self._called("nvmlDeviceGetNvLinkState", handle)
        gpu = self._gpu(handle)
        if link >= len(gpu.nvlinks):
            raise NVMLError(ERROR_INVALID_ARGUMENT if gpu.nvlinks else ERROR_NOT_SUPPORTED)
        return int(gpu.nvlinks[link] is not None)

    def nvmlDeviceGetNvLinkVersion(self, handle: FakeGpu, link: int) -> int:
        self._called("nvmlDeviceGetNvLinkVersion", handle)
        return handle.nvlink_version

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> Any:
        self._called("nvmlDeviceGetNvLinkRemotePciInfo", handle)
        remote = handle.nvlinks[link]
        assert remote is not None
        return SimpleNamespace(busId=remote)

    def nvmlDeviceGetP2PStatus(self, a: FakeGpu, b: FakeGpu, kind: int) -> int:
        self._called("nvmlDeviceGetP2PStatus", a)
        if self.p2p_error is not None:
            raise NVMLError(self.p2p_error)
        return 0 if frozenset((a.uuid, b.uuid)) in self.p2p[kind] else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, a: FakeGpu, b: FakeGpu) -> int:
        self._called("nvmlDeviceGetTopologyCommonAncestor", a)
        return self.levels.get(frozenset((a.uuid, b.uuid)), 50)

    def _called(self, call: str, handle: FakeGpu | FakeInstance | None = None) -> None:
        """What every call does: hooks, then errors."""
        self.calls.append(call)
        if not self.initialised:
            raise NVMLError(ERROR_UNINITIALIZED)
        if isinstance(handle, FakeGpu):
            if call in handle.hooks:
                handle.hooks[call]()
            error = handle.errors.get(call, handle.errors.get("*"))
            if error is not None:
                raise NVMLError(error)

    def _gpu(self, handle: FakeGpu | FakeInstance) -> FakeGpu:
        """The handle, which for these calls may not be an instance's."""
        if isinstance(handle, FakeInstance):
            raise NVMLError(ERROR_NOT_SUPPORTED)
        return handle

    @staticmethod
    def _processes(processes: list[tuple[int, int | None]]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used_bytes) for pid, used_bytes in processes]
