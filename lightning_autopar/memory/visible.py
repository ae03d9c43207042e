"""Visible: which GPUs CUDA shows a process, and in which order. Knows the two environment variables, no library."""

from __future__ import annotations

from collections.abc import Sequence


def cuda_order(capabilities: Sequence[tuple[int, int]], order: str | None) -> list[int]:
    """NVML indices in the order in which CUDA counts the devices.

    Under ``PCI_BUS_ID`` that is NVML's own. CUDA's default ``FASTEST_FIRST`` is documented as a heuristic and no more; the
    compute capability, then NVML's order, is what it comes to on a host whose GPUs differ in generation, and on one whose
    GPUs are alike. Two models of one capability may come the other way round, which is one more reason to go by UUID.

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
    entry that names nothing ends the list, and one that comes twice empties it.

    Args:
        setting: the value, None if unset (all GPUs), empty for none.
        gpus: UUIDs of the GPUs in CUDA's order.
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
        matches = [uuid for uuid in uuids if entry.startswith(prefix) and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in found:
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
