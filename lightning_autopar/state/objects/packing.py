"""Packs changed objects for another process that was forked from the same parent and in which the user's code ran anew.

A parcel is a pickle of changed objects, with the places where they were found, and a file of their tensors and arrays; :mod:`.unpacking`
reads it. Objects from before the fork are numbers in it. A later object comes with its place, so that the other process can look for its
own object there. Knows nothing of Lightning.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.state.objects.contents import ATOMS, CONTAINERS, get_items, is_plain, raw_bytes
from lightning_autopar.state.objects.pickles import Pickler
from lightning_autopar.state.objects.survey import ITEMS, LIMIT_BYTES, Survey

#: Arrays smaller than this stay in the pickle.
_SMALL_BYTES = 16 * 1024
_ALIGNMENT = 64
_COPIED_BYTES = 64 * 1024**2

#: Where a new object was found: in which object (a survey's number, a name, or -1 minus another new object's key), in which part, by which
#: keys.
Place = tuple[Any, str, tuple[Any, ...]]
Owner = int | tuple[Any, ...]
#: Stands in the pickle for an object that the other side finds or makes.
DEVICE, STORAGE, TENSOR, NODE, GENERATOR, OWN, MOVED = "device", "storage", "tensor", "node", "generator", "own", "moved"


class TensorFile:
    """The file beside a pickle; without one, only the sizes are summed up.

    Args:
        file: opened for writing.
    """

    def __init__(self, file: Any | None) -> None:
        self._file = file
        self._known: dict[int, tuple[int, int]] = {}
        self._held: list[Any] = []
        self.size_bytes = 0
        self.buffers: list[tuple[int, int]] = []

    def storage(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """The storage's place in the file, and its size."""
        if storage._cdata not in self._known:
            self._held.append(storage)  # otherwise another object may get its address
            start, size_bytes = self._begin(), storage.nbytes()
            if self._file is not None and size_bytes:
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for piece in data.split(_COPIED_BYTES):
                    self._file.write(raw_bytes(piece.cpu()))
            self.size_bytes += size_bytes
            self._known[storage._cdata] = start, size_bytes
        return self._known[storage._cdata]

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle, for pickle's protocol 5."""
        with buffer.raw() as view:
            if view.nbytes < _SMALL_BYTES:
                return True
            start = self._begin()
            if self._file is not None:
                self._file.write(view)
            self.size_bytes += view.nbytes
            self.buffers.append((start, view.nbytes))
            return False

    def _begin(self) -> int:
        gap = -self.size_bytes % _ALIGNMENT
        if self._file is not None:
            self._file.write(b"\0" * gap)
        self.size_bytes += gap
        return self.size_bytes


def is_node(target: Any) -> bool:
    """Whether an object consists of its ``__dict__``, and its items if it has any."""
    return type(target) not in CONTAINERS and not isinstance(target, (Tensor, torch.Generator, type)) and is_plain(target)


def is_common(tensor: Tensor) -> bool:
    """Whether a tensor consists only of dtype, sizes and strides over a storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def maker_of(target: Any) -> Any:
    """What a container needs to be made anew, besides its items."""
    if isinstance(target, deque):
        return target.maxlen
    return target.default_factory if isinstance(target, defaultdict) else None


def type_name(kind: type) -> str:
    """The name of a class in both processes."""
    return f"{kind.__module__}.{kind.__qualname__}"


#: How many objects are found by their places, and how many items a container may have for that.
_MOST_PLACES, _MOST_ITEMS = 50_000, 10_000
#: A view of a large storage is sent without the rest of it, unless the known views make up this share.
_SEEN_SHARE = 0.25


class Packing:
    """The state of packing a process's changes.

    Args:
        survey: of before the fork.
        names: for other objects that both sides have: ``id`` → what the other side's ``resolve`` takes.
        bases: tensors whose views are to be views of the other side's: name → tensor.
        leave: attributes of an instance that aren't sent.
        shards: parts of what several ranks have, each with its whole values in host memory, which are sent in its place.
    """

    def __init__(
        self,
        survey: Survey,
        names: Mapping[int, Any],
        bases: Mapping[Any, Tensor],
        leave: Callable[[Any], frozenset[str]],
        shards: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.survey, self.names, self.leave = survey, names, leave
        self.wholes = {id(shard): whole for shard, whole in shards}
        #: Storages in host memory that are to lie on the other side's device.
        self.moved = {whole.untyped_storage()._cdata for shard, whole in shards if shard.device.type != "cpu"}
        self.bases = {tensor.untyped_storage()._cdata: name for name, tensor in bases.items() if is_common(tensor) and tensor.numel()}
        self._base_tensors = dict(bases)
        self.keys: dict[int, int] = {}
        self.found: list[tuple[Any, Place]] = []
        self.seen_bytes: dict[int, int] = {}
        self.types = {id(type(survey.target(number))): ("type", number) for number in survey.numbers()}

    def base(self, tensor: Tensor) -> tuple[Any, Tensor] | None:
        """The named tensor of which this one is a view."""
        name = self.bases.get(tensor.untyped_storage()._cdata)
        return None if name is None else (name, self._base_tensors[name])

    def look(self, owner: Owner, part: str, value: Any) -> None:
        """Find the places of the objects in a part."""
        pending: deque[tuple[Any, Place]] = deque([(value, (owner, part, ()))])
        while pending and len(self.found) < _MOST_PLACES:
            target, place = pending.popleft()
            kind = type(target)
            if kind in ATOMS or id(target) in self.keys or id(target) in self.names:
                continue
            if self.survey.number(target) is not None and (place[2] or part != ITEMS):
                continue
            if kind in (tuple, CellType):
                items = target if kind is tuple else get_items(target)
                pending.extend((item, (*place[:2], (*place[2], index))) for index, item in enumerate(items) if index < _MOST_ITEMS)
                continue
            if part == ITEMS and not place[2] and isinstance(target, (list, dict, set, deque)):
                pending.extend((item, (*place[:2], (key,))) for key, item in _children(target))
                continue
            if isinstance(target, Tensor) and is_common(target):
                storage = target.untyped_storage()
                self.seen_bytes[storage._cdata] = self.seen_bytes.get(storage._cdata, 0) + target.nbytes
            elif not (kind in CONTAINERS or kind is torch.Generator or is_node(target) or _is_opaque(target)):
                continue
            key = self._add(target, place)
            if is_node(target):
                for name, item in vars(target).items():
                    if name not in self.leave(target):
                        pending.append((item, (-1 - key, name, ())))
            if isinstance(target, (list, dict, deque)):
                pending.extend((item, (-1 - key, ITEMS, (index,))) for index, item in _children(target))

    def _add(self, target: Any, place: Place) -> int:
        self.keys[id(target)] = key = len(self.found)
        self.found.append((target, place))  # which keeps it, too
        return key

    def key(self, target: Any) -> int:
        """A tensor's key, wherever it is."""
        return self.keys[id(target)] if id(target) in self.keys else self._add(target, (None, "", ()))


def _children(target: Any) -> Iterable[tuple[Any, Any]]:
    """A container's items that can be found again by a key."""
    if len(target) > _MOST_ITEMS or isinstance(target, set):
        return []
    if isinstance(target, dict):
        return [(key, item) for key, item in target.items() if type(key) in ATOMS]
    return list(enumerate(target))


def _is_opaque(target: Any) -> bool:
    """Whether an object itself can't be pickled: a lock, a file, a thread's local, a running generator."""
    if callable(target) or isinstance(target, (Tensor, torch.UntypedStorage, torch.TypedStorage)):
        return False
    try:
        target.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except TypeError:
        return True
    except Exception:  # a user's class: then the part that contains it can't be pickled
        return False
    return False


class Packer(Pickler):
    """Writes one pickle of a packing.

    Args:
        beside: for tensors and arrays.
    """

    def __init__(self, sink: Any, packing: Packing, beside: TensorFile) -> None:
        super().__init__(sink, packing.survey, packing.names, buffer_callback=beside.buffer)
        self._packing, self._beside = packing, beside
        self._left = 1 << 62
        self.begun: set[int] = set()

    def persistent_id(self, target: Any) -> Any:
        """A number, a name, or how to find or make an object that came later."""
        kind = type(target)
        if kind is torch.device:
            return (DEVICE,) if target.type not in ("cpu", "meta") else None
        if kind in ATOMS:
            return None
        known = super().persistent_id(target)
        if known is not None:
            return known
        if isinstance(target, Tensor):
            return self._tensor(target)
        if kind is torch.UntypedStorage:
            return (STORAGE, *self._beside.storage(target), target.device.type != "cpu" or target._cdata in self._packing.moved)
        if isinstance(target, type):
            return None if "<locals>" not in target.__qualname__ else self._packing.types.get(id(target))
        key = self._packing.keys.get(id(target))
        if key is None and kind is torch.Generator:
            key = self._packing.key(target)
        if key is None:
            return None
        if key in self.begun:
            return (NODE, key)
        self.begun.add(key)
        if kind is torch.Generator:
            return (GENERATOR, key, target.device.type != "cpu", target.get_state())
        if kind in CONTAINERS or is_node(target):
            leave = self._packing.leave(target)
            fields = None if kind in CONTAINERS else {name: value for name, value in vars(target).items() if name not in leave}
            items = get_items(target) if isinstance(target, (list, dict, set, deque)) else None
            return (NODE, key, (kind, maker_of(target)), items, fields)
        return (OWN, key)

    def _tensor(self, tensor: Tensor) -> Any:
        values = self._packing.wholes.get(id(tensor), tensor)
        if not is_common(values):
            if is_absent(tensor):
                raise pickle.PicklingError("an absent tensor has no values")
            return (MOVED, tensor.detach().cpu()) if tensor.device.type not in ("cpu", "meta") else None
        key = self._packing.key(tensor)
        if key in self.begun:
            return (TENSOR, key)
        self.begun.add(key)
        base = self._packing.base(values)
        if base is not None:
            name, of = base
            view = (name, of.untyped_storage().nbytes(), str(of.dtype), tensor.storage_offset() - of.storage_offset())
        else:
            view = None
        storage, bare = values.untyped_storage(), values.detach()
        seen_bytes = max(self._packing.seen_bytes.get(storage._cdata, 0), values.nbytes)
        if storage.nbytes() > LIMIT_BYTES and seen_bytes < _SEEN_SHARE * storage.nbytes():
            bare = bare.clone()
        layout = bare.dtype, tuple(bare.shape), bare.stride(), bare.storage_offset(), bare.untyped_storage()
        kind = isinstance(tensor, nn.Parameter), tensor.requires_grad and tensor.is_leaf
        return (TENSOR, key, layout, kind, view, dict(vars(values)))


def pack(packing: Packing, parts: Mapping[Any, Any], sent: Mapping[str, Any], beside: TensorFile) -> bytes:
    """A pickle of parts and of further values to send; see :class:`.unpacking.Unpacking`."""
    sink, table, earlier = io.BytesIO(), io.BytesIO(), len(beside.buffers)
    packer = Packer(sink, packing, beside)
    packer.dump((parts, sent))
    wanted, pending = set(packer.begun), list(packer.begun)
    while pending:  # the container of an object is on the path to it
        owner = packing.found[pending.pop()][1][0]
        if isinstance(owner, int) and owner < 0 and -1 - owner not in wanted:
            wanted.add(-1 - owner)
            pending.append(-1 - owner)
    places = {}
    for key in sorted(wanted):
        target, place = packing.found[key]
        made = key in packer.begun and (type(target) in CONTAINERS or is_node(target))
        places[key] = (place, type_name(type(target)), type(target) if made else None, maker_of(target) if made else None)
    Packer(table, packing, beside).dump(places)
    return pickle.dumps((table.getvalue(), sink.getvalue(), beside.buffers[earlier:]))


def travels(packing: Packing, value: Any) -> int | None:
    """How many bytes a value takes, in a pickle and in the file beside it; None if it can't be pickled."""
    beside, sink = TensorFile(None), _Counting()
    try:
        Packer(sink, packing, beside).dump(value)
    except Exception:  # a user's __reduce__ may raise anything
        return None
    return beside.size_bytes + sink.size_bytes


class _Counting:
    """A file that keeps nothing."""

    size_bytes = 0

    def write(self, data: Any) -> int:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self.size_bytes += size
        return size
