"""How torch's caching allocator is set: the options of ``PYTORCH_CUDA_ALLOC_CONF``. Knows neither torch nor what is allocated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
#: ``roundup_power2_divisions`` has an interval for each power of two from 1 MiB to 32 GiB (``c10/core/AllocatorConfig.cpp``).
INTERVALS = 16
#: The variables, in the order in which ``c10/cuda/CUDAAllocatorConfig.h`` reads them: the first that is set counts.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_PAIR = re.compile(r"\s*([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+?)\s*(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AllocatorOptions:
    """Settings of the allocator, with torch's own defaults (``c10/core/AllocatorConfig.h``, torch 2.13; unchanged since 2.11).

    Args:
        expandable_segments: one growing segment for each pool and stream instead of one for each large request. Off by default, also in
            torch 2.13.
        max_split_bytes: blocks of this size and more aren't split; None: any block may be.
        max_non_split_rounding_bytes: how much larger than the request such a block may be.
        roundup_power2_divisions: for each of the 16 intervals between powers of two from 1 MiB up, into how many steps sizes are rounded
            within it; 0 or 1: to multiples of 512.
        garbage_collection_threshold: share of the limit from which old unused segments are given back; 0: never.
        large_segment_bytes: the segment for requests above 1 and below 10 MiB, and the page of expandable segments.
        memory_fraction: of the device's total memory that the process may take; 1: all of it.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = 20 * MIB
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        assert len(self.roundup_power2_divisions) == INTERVALS, "one number of divisions for each interval"

    def divisions(self, size_bytes: int) -> int:
        """Into how many steps the interval of this size is divided."""
        return self.roundup_power2_divisions[min(max(0, size_bytes.bit_length() - 21), INTERVALS - 1)]


def parse_options(text: str) -> AllocatorOptions:
    """The options of a setting such as ``"expandable_segments:True,max_split_size_mb:128"``.

    Options that don't change how much device memory is taken (pinned memory, locks) are ignored.

    Raises:
        ValueError: if the value of an option isn't allowed.
    """
    values: dict[str, Any] = {}
    for name, value in _PAIR.findall(text):
        try:
            if name == "expandable_segments":
                values[name] = {"True": True, "False": False}[value]
            elif name == "max_split_size_mb":
                values["max_split_bytes"] = int(value) * MIB
            elif name == "max_non_split_rounding_mb":
                values["max_non_split_rounding_bytes"] = int(value) * MIB
            elif name == "large_segment_size_mb":
                values["large_segment_bytes"] = int(value) * MIB
            elif name == "garbage_collection_threshold":
                values[name] = float(value)
            elif name == "per_process_memory_fraction":
                values["memory_fraction"] = float(value)
            elif name == "roundup_power2_divisions":
                values[name] = _divisions(value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{VARIABLES[0]} has {name}:{value}, which torch can't read either; correct or unset it") from error
    return AllocatorOptions(**values)


def options_from_environment(environment: Mapping[str, str]) -> AllocatorOptions:
    """The options that a process with this environment would run with.

    Raises:
        ValueError: as :func:`parse_options`.
    """
    return parse_options(next((environment[name] for name in VARIABLES if name in environment), ""))


def _divisions(value: str) -> tuple[int, ...]:
    """The divisions from one number for all, or a list such as ``[256:1,512:2,>:8]``: up to and at 256 MiB, at 512 MiB, above."""
    if not value.startswith("["):
        return (int(value),) * INTERVALS
    found = [0] * INTERVALS
    last = -1
    for pair in value[1:-1].split(","):
        bound, _, number = pair.partition(":")
        if bound.strip() == ">":
            first, last = last + 1, INTERVALS - 1
        else:
            index = min(int(bound).bit_length() - 1, INTERVALS - 1)
            first, last = (0 if last < 0 else index), index
        found[first : last + 1] = [int(number)] * (last + 1 - first)
    return tuple(found)
