"""How to run: the one value that passes from planning to execution.

The ground floor. It imports nothing of ours and neither torch nor Lightning; it doesn't know how a plan is found or run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import import_module
from itertools import chain
from math import gcd
from pathlib import Path
from typing import Any, Literal, cast, get_args

#: An engine's name.
Engine = str


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """What is known of an engine without importing it.

    Args:
        path: where its class is, as ``"package.module:Class"``.
        offered: whether planning takes its plans by default; if not, only where ``allow`` names it.
        package: the package that it needs to run, and our extra that installs that package.
        takes: the fields, of those that not every engine has, that its plans may have.
        parts: names of features of some of its plans that a run may rule out alone.
    """

    path: str
    offered: bool = True
    package: tuple[str, str] | None = None
    takes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


#: The engines by name; where all else is equal, the earlier one is preferred.
ENGINES: dict[Engine, EngineEntry] = {
    "single": EngineEntry(path="lightning_autopar.strategies.ddp.engine:Single"),
    "ddp": EngineEntry(path="lightning_autopar.strategies.ddp.engine:DDP", takes=("shares",)),
    "fsdp": EngineEntry(path="lightning_autopar.strategies.fsdp.engine:FSDP", takes=("replicas", "shares", "offload")),
    "zero": EngineEntry(
        path="lightning_autopar.strategies.zero.engine:Zero",
        offered=False,
        package=("deepspeed", "deepspeed"),
        takes=("zero_stage", "offload"),
        parts=("zero_3",),
    ),
    "pipeline": EngineEntry(path="lightning_autopar.strategies.pipeline.engine:Pipeline", takes=("replicas", "cuts", "schedule")),
}
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Offload = Literal["optimizer", "parameters"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
#: How many stages a pipeline's rank has under these schedules; under others it has one.
INTERLEAVED: tuple[Schedule, ...] = ("interleaved_1f1b",)
ZERO_STAGES = (1, 2, 3)
#: Fields of a plan that not every engine has, and their values for other engines.
_OWN: Mapping[str, Any] = {
    "replicas": 1,
    "shares": (),
    "zero_stage": None,
    "offload": (),
    "cuts": (),
    "schedule": None,
}
#: The group of entry points under which other packages register engines, each an :class:`EngineEntry` by its name.
GROUP = "lightning_autopar.engines"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a module. Frozen, and the same after a round trip through JSON.

    Args:
        engine: what executes it.
        devices: ids of the devices (a GPU's NVML UUID, ``"cpu:0"``), in rank order; one rank a device.
        reshard_after_forward: FSDP only: whether a block's gathered parameters are freed between forward and backward. A pipeline that
            shards keeps them, as its stages run many micro-batches.
        shard: FQNs of the modules that are sharded as units of their own, besides the root: by FSDP over the devices of a replica, by a
            pipeline over its replicas.
        recompute: FQNs of the blocks whose activations are recomputed in backward.
        micro_batches: parts of a rank's batch that run one after the other, with their gradients added up; for a pipeline those in flight.
        replicas: how many copies of the model the devices hold. Fsdp: 1 is one copy sharded over all, more is hybrid sharding. Pipeline:
            how many pipelines run side by side. Rank ``r`` belongs to replica ``r // (world_size / replicas)``.
        shares: ddp and fsdp: how much of a batch each rank gets in proportion to the others; empty where all get equally much. The samples
            are dealt out in turns, see :func:`deal`.
        zero_stage: ZeRO only: 1 shards the optimizer's state, 2 the gradients as well, 3 the parameters, too.
        offload: what lies in host memory between uses, in the order of ``OFFLOADS``: ``"optimizer"`` (its state and its step),
            ``"parameters"``. ZeRO: stage 3 can offload parameters. FSDP: both or none, as its ``CPUOffloadPolicy`` moves parameters,
            gradients and the optimizer together.
        cuts: pipeline only: FQNs of the blocks with which the second and every later stage begins.
        schedule: pipeline only. The interleaved one has several stages a rank: stage ``s`` runs on pipeline rank ``s mod ranks``.
            ``"1f1b"`` needs as many micro-batches as stages at least.
        reasons: why each automatic choice was made, a sentence each.
        options: further plain values by name, for an engine of another package; may be given as a mapping.

    Raises:
        ValueError: if no engine could run it, with the value, what is allowed and what to do.
    """

    engine: Engine
    devices: tuple[str, ...]
    reshard_after_forward: bool | None = None
    shard: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    micro_batches: int = 1
    replicas: int = 1
    shares: tuple[int, ...] = ()
    zero_stage: int | None = None
    offload: tuple[Offload, ...] = ()
    cuts: tuple[str, ...] = ()
    schedule: Schedule | None = None
    reasons: tuple[str, ...] = ()
    options: tuple[tuple[str, str | int | float | bool | None], ...] = ()

    def __post_init__(self) -> None:
        entry = entry_of(self.engine)
        if not self.devices:
            raise ValueError(f"a plan needs at least one device, but its devices are {self.devices!r}")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a plan names each device once, but its devices are {self.devices!r}")
        for name in _OWN:
            if (value := getattr(self, name)) != _OWN[name] and name not in entry.takes:
                takers = " or ".join(repr(other) for other, its in all_engines().items() if name in its.takes)
                raise ValueError(f"{name} is {value!r}, but the engine is {self.engine!r}; leave it out, or choose {takers}")
        self._check_replicas()
        self._check_shares()
        self._check_offload()
        self._check_options()
        loaded(self.engine).check(self)

    def _check_replicas(self) -> None:
        """Check micro-batches and copies of the model."""
        for name, value in (("micro_batches", self.micro_batches), ("replicas", self.replicas)):
            if not _is_whole(value) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, but is {value!r}")
        if self.world_size % self.replicas:
            raise ValueError(
                f"replicas must divide the number of devices, but {self.replicas} doesn't divide {self.world_size}; "
                f"choose one of {', '.join(str(count) for count in range(1, self.world_size) if self.world_size % count == 0)}"
            )

    def _check_shares(self) -> None:
        """Check for one whole number a rank, and reduce them; equal shares become none."""
        if not self.shares:
            return
        if len(self.shares) != self.world_size or not all(_is_whole(share) and share >= 1 for share in self.shares):
            raise ValueError(f"shares needs a whole number of at least 1 for each of {self.world_size} ranks, but is {self.shares!r}")
        common = gcd(*self.shares)
        even = len(set(self.shares)) == 1
        object.__setattr__(self, "shares", () if even else tuple(share // common for share in self.shares))

    def _check_offload(self) -> None:
        """Check what is offloaded, and put it in order."""
        if unknown := [what for what in self.offload if what not in OFFLOADS]:
            raise ValueError(f"unknown offload {unknown[0]!r}; choose from {', '.join(OFFLOADS)}")
        if len(set(self.offload)) != len(self.offload):
            raise ValueError(f"a plan names each offload once, but they are {self.offload!r}")
        object.__setattr__(self, "offload", tuple(what for what in OFFLOADS if what in self.offload))

    def _check_options(self) -> None:
        """Names with values, put in order."""
        given: Any = self.options
        pairs = tuple(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, tuple) or any(type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str for pair in pairs):
            raise ValueError(f"a plan's options are plain values by name, but they are {given!r}; write options={{'name': value}}")
        object.__setattr__(self, "options", tuple(sorted(dict(pairs).items())))

    @property
    def world_size(self) -> int:
        """How many ranks the plan starts."""
        return len(self.devices)

    @property
    def devices_per_replica(self) -> int:
        """How many devices together hold one copy of the model; for a pipeline, its ranks."""
        return self.world_size // self.replicas

    @property
    def data_ranks(self) -> int:
        """Into how many parts ranks split a batch, micro-batches not counted: all ranks of a pipeline get their replica's part."""
        return self.world_size if loaded(self.engine).splits else self.replicas

    def data_rank(self, rank: int) -> int:
        """The number of the part, of :attr:`data_ranks`, that a rank works on."""
        return rank if loaded(self.engine).splits else rank // self.devices_per_replica

    @property
    def stages(self) -> int:
        """How many stages the module has: 1 where it isn't a pipeline."""
        return len(self.cuts) + 1

    @property
    def dealing(self) -> tuple[int, ...]:
        """Which data rank gets which sample, in turns: sample ``i`` goes to data rank ``dealing[i % len(dealing)]``."""
        return deal(self.shares) if self.shares else tuple(range(self.data_ranks))

    def rows(self, batch_size: int) -> tuple[int, ...]:
        """How many samples of a batch each rank gets; in a pipeline, the replica's samples divided evenly among its ranks."""
        whole, rest = divmod(batch_size, sum(self.shares) or self.data_ranks)
        if self.shares:
            counts = count_dealt(self.dealing, batch_size) if rest else tuple(whole * share for share in self.shares)
        else:
            counts = (whole + 1,) * rest + (whole,) * (self.data_ranks - rest)
        if loaded(self.engine).splits:
            return counts
        return tuple(chain.from_iterable((count,) * self.devices_per_replica for count in counts))

    @property
    def may_share_network(self) -> bool:
        """Whether its ranks share a step's network, each with the whole batch, where the loss compares samples."""
        return self.world_size > 1 and self.micro_batches == 1 and not self.shares and bool(loaded(self.engine).shares_network)

    def title(self) -> str:
        """A few words for a table: ``"fsdp ×2, reshard, recompute 4"``."""
        return ", ".join(filter(None, loaded(self.engine).words(self).values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every field by its name."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        options = dict(values.pop("options"))
        return {**values, "options": options} if options else values

    def to_json(self) -> str:
        """The plan as a JSON object, readable by :meth:`from_json`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan from a mapping that :meth:`to_dict` made.

        Raises:
            ValueError: on an unknown or missing field, or a value that no plan can have.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown field {unknown[0]!r} in a plan; it has {', '.join(sorted(known))}")
        if missing := sorted({"engine", "devices"} - set(data)):
            raise ValueError(f"a plan needs the field {missing[0]!r}, but has only {', '.join(sorted(data)) or 'none'}")
        for name in ("devices", "shard", "recompute", "offload", "cuts", "reasons"):
            value = data.get(name, [])
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"a plan's {name!r} must be a list of strings, but is {value!r}")
        if not isinstance(shares := data.get("shares", []), (list, tuple)):
            raise ValueError(f"a plan's 'shares' must be a list of whole numbers, but is {shares!r}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**cast(dict[str, Any], values))

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """The plan from a JSON text, or from the file that a path names.

        Raises:
            ValueError: if the file can't be read or doesn't hold a plan.
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


@lru_cache
def registered() -> Mapping[Engine, EngineEntry]:
    """The engines of other packages.

    Raises:
        ValueError: if a package registers something else, or an engine with another's name.
    """
    from importlib.metadata import entry_points

    found: dict[Engine, EngineEntry] = {}
    for point in entry_points(group=GROUP):
        if point.name in ENGINES or point.name in found:
            raise ValueError(f"two engines are called {point.name!r}, one of them {point.value!r}; rename that, or uninstall its package")
        entry = point.load()
        if not isinstance(entry, EngineEntry):
            raise ValueError(f"the engine {point.name!r} is registered as {point.value!r}, which is no EngineEntry; name one")
        found[point.name] = entry
    return found


def all_engines() -> Mapping[Engine, EngineEntry]:
    """Every engine by name: this package's, then those of others."""
    return {**ENGINES, **registered()}


def offered_engines() -> tuple[Engine, ...]:
    """The engines that planning chooses from unless ``allow`` names others."""
    return tuple(name for name, entry in all_engines().items() if entry.offered)


def entry_of(name: str) -> EngineEntry:
    """The entry of the engine of that name.

    Raises:
        ValueError: if there is none.
    """
    found = ENGINES.get(name) or registered().get(name)
    if found is None:
        raise ValueError(f"unknown engine {name!r}; choose one of {', '.join(all_engines())}")
    return found


@lru_cache
def loaded(name: str) -> Any:
    """The engine of that name, an ``engines.Engine``.

    Raises:
        ValueError: if there is none.
    """
    module, _, kind = entry_of(name).path.partition(":")
    return getattr(import_module(module), kind)()


@lru_cache
def order_of(name: str) -> int:
    """An engine's place in the table: among equal plans, the first engine's is taken."""
    return list(all_engines()).index(name)


@lru_cache(maxsize=256)
def deal(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks in turns, each as often as its share, spread as evenly as possible: (1, 2) gives (1, 0, 1). Every prefix has each rank's share
    to within one turn, so that a short last batch is shared alike, and a sample's rank depends only on its place in the batch. (Smooth
    weighted round-robin, as in nginx's upstream module.)
    """
    total, turns = sum(shares), []
    # Ranks with equal shares take turns in order, so only the next rank of each share needs a look.
    alike = {share: [rank for rank, its in enumerate(shares) if its == share] for share in dict.fromkeys(shares)}
    taken = dict.fromkeys(alike, 0)
    for turn in range(1, total + 1):
        whole = {share: divmod(taken[share], len(ranks)) for share, ranks in alike.items()}
        credit = {ranks[whole[share][1]]: share * turn - total * whole[share][0] for share, ranks in alike.items()}
        rank = max(credit, key=lambda rank: (credit[rank], -rank))
        taken[shares[rank]] += 1
        turns.append(rank)
    return tuple(turns)


@lru_cache(maxsize=4096)
def count_dealt(dealing: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """How many of a batch's samples each rank gets when they are dealt out in these turns."""
    whole, rest = divmod(batch_size, len(dealing))
    counts = [0] * (max(dealing) + 1)
    for turn, rank in enumerate(dealing):
        counts[rank] += whole + (turn < rest)
    return tuple(counts)


def _is_whole(value: object) -> bool:
    """Whether it is a whole number; true and false aren't."""
    return isinstance(value, int) and not isinstance(value, bool)
