"""How to run: the one value that passes from planning to execution.

The ground floor. It imports nothing of ours and neither torch nor Lightning; it doesn't know how a plan is found or run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

Engine = Literal["single", "ddp", "fsdp", "zero", "pipeline"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
#: The engines that this version can run.
BUILT_ENGINES: tuple[Engine, ...] = ("single", "ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a module. Frozen, and the same after a round trip through JSON.

    Args:
        engine: what executes it.
        devices: ids of the devices (a GPU's NVML UUID, ``"cpu:0"``), in rank order; one rank a device.
        reshard_after_forward: FSDP only: whether a block's gathered parameters are freed between forward and backward.
        shard: FSDP only: FQNs of the modules that are sharded as units of their own, besides the root.
        recompute: FQNs of the blocks whose activations are recomputed in backward.
        reasons: why each automatic choice was made, a sentence each.
    """

    engine: Engine
    devices: tuple[str, ...]
    reshard_after_forward: bool | None = None
    shard: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"unknown engine {self.engine!r}; choose one of {', '.join(ENGINES)}")
        if not self.devices:
            raise ValueError(f"a plan needs at least one device, but its devices are {self.devices!r}")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a plan names each device once, but its devices are {self.devices!r}")
        if self.engine == "single" and len(self.devices) != 1:
            raise ValueError(f"engine 'single' runs on one device, but the plan names {len(self.devices)}: {self.devices!r}")

        if self.engine == "fsdp" and not isinstance(self.reshard_after_forward, bool):
            raise ValueError(f"an fsdp plan needs reshard_after_forward, true or false, but it is {self.reshard_after_forward!r}")

    @property
    def world_size(self) -> int:
        """How many ranks the plan starts."""
        return len(self.devices)

    def title(self) -> str:
        """A few words for a table: ``"fsdp ×2, reshard, recompute 4"``."""
        words = [self.engine if self.world_size == 1 else f"{self.engine} ×{self.world_size}"]
        if self.engine == "fsdp":
            words.append("reshard" if self.reshard_after_forward else "keep gathered")
        if self.recompute:
            words.append(f"recompute {len(self.recompute)}")
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every field by its name."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def to_json(self) -> str:
        """The plan as a JSON object, readable by :meth:`from_json`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan of a mapping as :meth:`to_dict` gives it.

        Raises:
            ValueError: on an unknown or missing field, or a value that no plan can have.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown field {unknown[0]!r} in a plan; it has {', '.join(sorted(known))}")
        if missing := sorted({"engine", "devices"} - set(data)):
            raise ValueError(f"a plan needs the field {missing[0]!r}, but has only {', '.join(sorted(data)) or 'none'}")
        for name in ("devices", "shard", "recompute", "reasons"):
            value = data.get(name, [])
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"a plan's {name!r} must be a list of strings, but is {value!r}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**cast(dict[str, Any], values))

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """The plan of a JSON text, or of the file that a path names.

        Raises:
            ValueError: if the file can't be read or what it holds is no plan.
        """
        text = str(source)
        if isinstance(source, Path) or not text.lstrip().startswith("{"):
            try:
                text = Path(source).read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"the plan file {str(source)!r} can't be read ({error.strerror}); give the path of a plan's JSON"
                ) from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a plan's JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"a plan is a JSON object, but this is a {type(data).__name__}")
        return cls.from_dict(data)
