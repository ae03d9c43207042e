"""What one rank hands to the next generation, as two files: a pickle, and its tensors and arrays beside it.

Knows how they are written and read, not which rank writes when, nor what becomes of them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopar.state.objects.contents import ATOMS, dispensable, get_items
from lightning_autopar.state.objects.packing import TensorFile, pack, travels
from lightning_autopar.state.objects.survey import LIMIT_BYTES, Changes, is_under
from lightning_autopar.state.objects.unpacking import Unpacking
from lightning_autopar.strategies.processes.handover.run_objects import DATA, MODULE, RunObjects, not_carried
from lightning_autopar.text import format_bytes


@dataclass(kw_only=True)
class CarriedObjects(Changes):
    """What one rank hands over; the parts' keys are a survey's, or a name with an attribute.

    Args:
        signature: of the survey to which the numbers belong.
        reached_signature: the same for objects that functions reach.
        left: names of such objects that changed in earlier generations and couldn't be handed over.
        ranks: how many ranks, from rank 0 on, together have everything.
        schedulers: their classes, by their position.
        extras: a pickle of values under names of parameters and the like, which another process understands, too.
        loggers: by position, each one's class name and the state that another process can take over.
    """

    signature: bytes
    reached_signature: bytes
    left: list[str] = field(default_factory=list)
    ranks: int = 1
    schedulers: list[Any] = field(default_factory=list)
    extras: bytes = b""
    loggers: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)


def write(
    parcel: CarriedObjects,
    things: RunObjects,
    values: Mapping[Any, tuple[Any, Any]],
    path: Path,
    *,
    sent: dict[str, Any],
    extras: dict[str, Any],
    digests: bool,
) -> None:
    """Write a parcel's two files, with those of the values that can be pickled.

    Args:
        parcel: what is known of it so far; the parts that are written are added to it.
        things: this process's.
        values: the parts that differ, each with its digest where that is known.
        path: of both files, less their endings.
        sent: to send along, where it can be.
        extras: see :class:`CarriedObjects`.
        digests: whether others' versions are compared with this one, however large it is.
    """
    survey, packing = things.survey, things.packing()
    payloads: dict[Any, Any] = {}
    for (owner, part), (value, _) in values.items():
        its = isinstance(owner, int) and value is survey.target(owner)
        payloads[owner, part] = _items(value) if its else value
        packing.look(owner, part, payloads[owner, part] if its and isinstance(value, Tensor) else value)
    looked_at: dict[int, tuple[int | None, Any]] = {}  # layers of one kind may share a configuration
    for (owner, part), (value, digest) in values.items():
        payload = payloads[owner, part]
        size_bytes, alike = looked_at.get(id(payload), (None, None))
        if id(payload) not in looked_at:
            size_bytes = 0 if type(payload) in ATOMS else travels(packing, payload)
        of_data = isinstance(owner, int) and is_under(survey.path(owner), DATA)
        if size_bytes is None or (of_data and size_bytes > LIMIT_BYTES):
            del payloads[owner, part]
            if not (isinstance(owner, int) and dispensable(survey.target(owner), part)):
                name = survey.name(owner, part) if isinstance(owner, int) else f"{MODULE}.{owner[1]}.{part}"
                parcel.kept[owner, part] = name
            continue
        if digest is None and (digests or size_bytes <= LIMIT_BYTES):
            digest = alike if alike is not None else survey.digest(owner, part, value, things.names)
        looked_at[id(payload)] = size_bytes, digest if payload is value and not isinstance(owner, int) else None
        parcel.parts[owner, part] = digest
    parcel.unsent = [key for key, value in sent.items() if travels(packing, value) is None]
    sent = {key: value for key, value in sent.items() if key not in parcel.unsent}
    with _file(path, ".bin").open("wb") as file:
        beside = TensorFile(file)
        parcel.data = pack(packing, payloads, sent, beside)
        parcel.extras = pack(packing, {}, extras, beside)
    partial = _file(path, ".part")
    partial.write_bytes(pickle.dumps(parcel))
    partial.replace(_file(path, ".pkl"))


def _file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _items(target: Any) -> Any:
    """The contents of an object from before the run, without copying large ones."""
    if isinstance(target, Tensor):
        return target.detach()
    return target.view() if type(target).__module__ == "numpy" and hasattr(target, "view") else get_items(target)


def read(path: Path) -> CarriedObjects:
    """Read what :func:`write` wrote, without the tensors' file."""
    file = _file(path, ".pkl")
    assert file.is_file(), f"{file} isn't there: nothing was handed over"
    parcel: CarriedObjects = pickle.loads(file.read_bytes())
    return parcel


def unpacking_of(data: bytes, parcel: CarriedObjects, things: RunObjects, path: Path, only: set[Any]) -> Unpacking:
    """Makes the object that unpacks one of its pickles into this process's objects; see :class:`Unpacking`."""
    survey = things.survey
    instead: dict[int, Any] = {number: things.tensors[name] for name, number in things.before.tensors.items() if name in things.tensors}
    instead[things.before.strategy] = things.engine
    strangers = {target.untyped_storage()._cdata for target in map(survey.target, survey.numbers()) if _has_storage(target)}
    keep = {each.untyped_storage()._cdata for each in things.all_tensors() if _has_storage(each)}
    return Unpacking(
        data,
        _file(path, ".bin"),
        survey,
        things.resolver(parcel.schedulers),
        instead,
        things.engine.root_device,
        keep | strangers,
        set(things.names),
        not_carried,
        only,
        reached=parcel.reached_signature == survey.reached_signature,
    )


def _has_storage(target: Any) -> bool:
    return type(target) in (Tensor, nn.Parameter) and target.layout == torch.strided


def warn_of(lost: list[str]) -> None:
    """Warn of what couldn't be handed over, by name."""
    warnings.warn(
        f"these changes were lost when the run moved: {', '.join(sorted(set(lost)))} (they can't be pickled, are parts of "
        f"sharded tensors, or belong to the DataModule and are larger than {format_bytes(LIMIT_BYTES)})",
        stacklevel=3,
    )
