"""Changed objects packed in one process and unpacked in another that was forked from the same parent, where the user's code ran anew.

Objects from before the fork are numbers, as in :mod:`objects`. An object that came later is packed with the place where it was found; where
the other process has one of its kind in that place, made by the same code, it takes over the packed one's contents, so that whoever else
refers to it there (a loader, a hook) sees them. Tensors and arrays lie beside the pickle in a file, each storage once. Knows nothing of
Lightning.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_autopar.state import rng
from lightning_autopar.strategies.objects import (
    ATOMS,
    CONTAINERS,
    ITEMS,
    LIMIT_BYTES,
    Part,
    Pickler,
    Survey,
    get_items,
    is_plain,
    set_items,
)
from lightning_autopar.strategies.staged.hole import is_hole

#: How many objects are looked for by their places, and how many items a container may have for that.
_MOST_PLACES, _MOST_ITEMS = 50_000, 10_000
#: Smaller arrays stay in the pickle.
_SMALL_BYTES = 16 * 1024
_ALIGNMENT = 64
_COPIED_BYTES = 64 * 1024**2
#: A view of a large storage travels without the rest of it, unless the views that are seen make up this share.
_SEEN_SHARE = 0.25

#: Where a new object was found: in what (a survey's number, a name, or -1 less another new object's key), in which part, by which keys.
Place = tuple[Any, str, tuple[Any, ...]]
Owner = int | tuple[Any, ...]
_DEVICE, _STORAGE, _TENSOR, _VIEW, _NODE, _GENERATOR, _OWN, _MOVED = (
    "device",
    "storage",
    "tensor",
    "view",
    "node",
    "generator",
    "own",
    "moved",
)


class Bin:
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
        """Where it lies, and its size."""
        if storage._cdata not in self._known:
            self._held.append(storage)  # else its address may be another one's soon
            start, size_bytes = self._begin(), storage.nbytes()
            if self._file is not None and size_bytes:
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for piece in data.split(_COPIED_BYTES):
                    self._file.write(memoryview(piece.cpu().numpy()))
            self.size_bytes += size_bytes
            self._known[storage._cdata] = start, size_bytes
        return self._known[storage._cdata]

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is to stay in the pickle, as pickle's protocol 5 asks."""
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


# -- packing ---------------------------------------------------------------------------------------------------------------------------


class Packing:
    """What is known while a process's changes are packed.

    Args:
        survey: of before the fork.
        names: for other objects that both sides have: ``id`` → what the other side's ``resolve`` takes.
        bases: tensors whose views are to be views of the other side's: name → tensor.
        leave: attributes of an instance that don't travel.
    """

    def __init__(
        self, survey: Survey, names: Mapping[int, Any], bases: Mapping[Any, Tensor], leave: Callable[[Any], frozenset[str]]
    ) -> None:
        self.survey, self.names, self.leave = survey, names, leave
        self.bases = {tensor.untyped_storage()._cdata: name for name, tensor in bases.items() if _is_common(tensor) and tensor.numel()}
        self._base_tensors = dict(bases)
        self.keys: dict[int, int] = {}
        self.found: list[tuple[Any, Place]] = []
        self.seen_bytes: dict[int, int] = {}
        self.types = {id(type(survey.target(number))): ("type", number) for number in survey.numbers()}

    def base(self, tensor: Tensor) -> tuple[Any, Tensor] | None:
        """Of which of the named tensors this one is a view."""
        name = self.bases.get(tensor.untyped_storage()._cdata)
        return None if name is None else (name, self._base_tensors[name])

    def look(self, owner: Owner, part: str, value: Any) -> None:
        """Find the places of what a part consists of."""
        pending: deque[tuple[Any, Place]] = deque([(value, (owner, part, ()))])
        while pending and len(self.found) < _MOST_PLACES:
            target, place = pending.popleft()
            kind = type(target)
            if kind in ATOMS or id(target) in self.keys or id(target) in self.names:
                continue
            if self.survey.number(target) is not None and (place[2] or part != ITEMS):
                continue
            if kind is tuple:
                pending.extend((item, (*place[:2], (*place[2], index))) for index, item in enumerate(target) if index < _MOST_ITEMS)
                continue
            if part == ITEMS and not place[2] and isinstance(target, (list, dict, set, deque)):
                pending.extend((item, (*place[:2], (key,))) for key, item in _children(target))
                continue
            if isinstance(target, Tensor) and _is_common(target):
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
        """A tensor's, wherever it is."""
        return self.keys[id(target)] if id(target) in self.keys else self._add(target, (None, "", ()))


def _children(target: Any) -> Iterable[tuple[Any, Any]]:
    """A container's items that can be found again by a key."""
    if len(target) > _MOST_ITEMS or isinstance(target, set):
        return []
    if isinstance(target, dict):
        return [(key, item) for key, item in target.items() if type(key) in ATOMS]
    return list(enumerate(target))


def is_node(target: Any) -> bool:
    """Whether an object is its ``__dict__``, and items if it has any."""
    return type(target) not in CONTAINERS and not isinstance(target, (Tensor, torch.Generator, type)) and is_plain(target)


def _is_common(tensor: Tensor) -> bool:
    """Whether a tensor is dtype, sizes and strides over a storage, and no more."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_opaque(target: Any) -> bool:
    """Whether an object refuses to be pickled by itself: a lock, a file, a thread's local, a running generator."""
    if callable(target) or isinstance(target, (Tensor, torch.UntypedStorage, torch.TypedStorage)):
        return False
    try:
        target.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except TypeError:
        return True
    except Exception:  # a stranger's: then the part that it lies in has no pickle
        return False
    return False


class Packer(Pickler):
    """Writes one pickle of a packing.

    Args:
        sink: a file.
        packing: what is known.
        beside: for tensors and arrays.
    """

    def __init__(self, sink: Any, packing: Packing, beside: Bin) -> None:
        super().__init__(sink, packing.survey, packing.names, buffer_callback=beside.buffer)
        self._packing, self._beside = packing, beside
        self._left = 1 << 62
        self.begun: set[int] = set()

    def persistent_id(self, target: Any) -> Any:
        """A number, a name, or how to find or make an object that came later."""
        kind = type(target)
        if kind is torch.device:
            return (_DEVICE,) if target.type not in ("cpu", "meta") else None
        if kind in ATOMS:
            return None
        known = super().persistent_id(target)
        if known is not None:
            return known
        if isinstance(target, Tensor):
            return self._tensor(target)
        if kind is torch.UntypedStorage:
            return (_STORAGE, *self._beside.storage(target), target.device.type != "cpu")
        if isinstance(target, type):
            return None if "<locals>" not in target.__qualname__ else self._packing.types.get(id(target))
        key = self._packing.keys.get(id(target))
        if key is None and kind is torch.Generator:
            key = self._packing.key(target)
        if key is None:
            return None
        if key in self.begun:
            return (_NODE, key)
        self.begun.add(key)
        if kind is torch.Generator:
            return (_GENERATOR, key, target.device.type != "cpu", target.get_state())
        if kind in CONTAINERS or is_node(target):
            leave = self._packing.leave(target)
            fields = None if kind in CONTAINERS else {name: value for name, value in vars(target).items() if name not in leave}
            items = get_items(target) if isinstance(target, (list, dict, set, deque)) else None
            return (_NODE, key, (kind, maker_of(target)), items, fields)
        return (_OWN, key)

    def _tensor(self, tensor: Tensor) -> Any:
        if not _is_common(tensor):
            if hasattr(tensor, "device_mesh"):
                raise pickle.PicklingError("a DTensor is a part of what several ranks have")
            if is_hole(tensor):
                raise pickle.PicklingError("a hole has no values")
            return (_MOVED, tensor.detach().cpu()) if tensor.device.type not in ("cpu", "meta") else None
        key = self._packing.key(tensor)
        if key in self.begun:
            return (_TENSOR, key)
        self.begun.add(key)
        base = self._packing.base(tensor)
        if base is not None:
            name, of = base
            view = (name, of.untyped_storage().nbytes(), str(of.dtype), tensor.storage_offset() - of.storage_offset())
        else:
            view = None
        storage, bare = tensor.untyped_storage(), tensor.detach()
        seen_bytes = max(self._packing.seen_bytes.get(storage._cdata, 0), tensor.nbytes)
        if storage.nbytes() > LIMIT_BYTES and seen_bytes < _SEEN_SHARE * storage.nbytes():
            bare = bare.clone()
        layout = bare.dtype, tuple(bare.shape), bare.stride(), bare.storage_offset(), bare.untyped_storage()
        kind = isinstance(tensor, nn.Parameter), tensor.requires_grad and tensor.is_leaf
        return (_TENSOR, key, layout, kind, view, dict(vars(tensor)))


def maker_of(target: Any) -> Any:
    """What a container needs to be made of besides its items."""
    if isinstance(target, deque):
        return target.maxlen
    return target.default_factory if isinstance(target, defaultdict) else None


def pack(packing: Packing, parts: Mapping[Any, Any], sent: Mapping[str, Any], beside: Bin) -> bytes:
    """A pickle of parts and of what is sent along; see :class:`Unpacking`."""
    sink, table, earlier = io.BytesIO(), io.BytesIO(), len(beside.buffers)
    packer = Packer(sink, packing, beside)
    packer.dump((parts, sent))
    wanted, pending = set(packer.begun), list(packer.begun)
    while pending:  # what an object lies in is on the way to it
        owner = packing.found[pending.pop()][1][0]
        if isinstance(owner, int) and owner < 0 and -1 - owner not in wanted:
            wanted.add(-1 - owner)
            pending.append(-1 - owner)
    places = {}
    for key in sorted(wanted):
        target, place = packing.found[key]
        made = key in packer.begun and (type(target) in CONTAINERS or is_node(target))
        places[key] = (place, _name(type(target)), type(target) if made else None, maker_of(target) if made else None)
    Packer(table, packing, beside).dump(places)
    return pickle.dumps((table.getvalue(), sink.getvalue(), beside.buffers[earlier:]))


def travels(packing: Packing, value: Any) -> int | None:
    """How many bytes a value takes, in and beside a pickle; None if it has none."""
    beside, sink = Bin(None), _Counting()
    try:
        Packer(sink, packing, beside).dump(value)
    except Exception:  # whatever comes out of a stranger's __reduce__
        return None
    return beside.size_bytes + sink.size_bytes


class _Counting:
    """A file that keeps nothing."""

    size_bytes = 0

    def write(self, data: Any) -> int:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self.size_bytes += size
        return size


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# -- unpacking -------------------------------------------------------------------------------------------------------------------------


class Unpacking:
    """What was packed, about to be put into this process's objects.

    Args:
        data: of :func:`pack`.
        beside: the file beside it.
        survey: of before the fork.
        resolve: the object that a name stands for.
        instead: objects that stand here for those of some numbers.
        device: where tensors go that lay on the other process's accelerator.
        keep: storages that nothing may be written into, by ``_cdata``.
        named: objects that have names here, by ``id``: never what was packed under a place.
        leave: attributes of an instance that don't travel.
        only: the parts that count; objects of others are left as they are here.
    """

    def __init__(
        self,
        data: bytes,
        beside: Path,
        survey: Survey,
        resolve: Callable[[Any], Any],
        instead: Mapping[int, Any],
        device: torch.device,
        keep: set[int],
        named: set[int],
        leave: Callable[[Any], frozenset[str]],
        only: set[Any],
    ) -> None:
        self._survey, self._resolve, self._instead, self._device, self._keep = survey, resolve, instead, device, keep
        self._named, self._leave = named, leave
        table, self._data, self._buffers = pickle.loads(data)
        self._bytes = beside.stat().st_size
        self._file = beside
        self._map: mmap.mmap | None = None
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._objects: dict[int, Any] = {}
        self._twins: dict[int, Any] = {}
        #: Names of places that couldn't be filled.
        self.lost: list[str] = []
        self._places: dict[int, Any] = _Unpacker(table, self, []).load()
        claimed: set[int] = set()
        roots: dict[int, Any] = {}
        for key in sorted(self._places):  # those on the way come before what lies in them
            owner, part, _ = self._places[key][0]
            roots[key] = roots[-1 - owner] if isinstance(owner, int) and owner < 0 else (owner, part)
            twin = self._look_up(key)
            if twin is not None and id(twin) not in claimed:
                claimed.add(id(twin))
                self._twins[key] = twin
        self._left_alone = {key for key, root in roots.items() if root[0] is not None and root not in only}

    def load(self) -> Any:
        """Unpack, with this process's own objects in their places already filled."""
        if self._bytes:
            with self._file.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        buffers = [bytearray(memoryview(cast(Any, self._map))[start : start + size]) for start, size in self._buffers]
        return _Unpacker(self._data, self, buffers).load()

    def _look_up(self, key: int) -> Any:
        """This process's object of the same kind in the same place; None without one."""
        (owner, part, path), name, _, maker = self._places[key]
        if owner is None:
            return None
        if isinstance(owner, int):
            parent = self._survey.target(owner) if owner >= 0 else self._twins.get(-1 - owner)
        else:
            parent = self._resolve(owner)
        found = parent if part == ITEMS else getattr(parent, "__dict__", {}).get(part)
        for step in path:
            try:
                found = found[step]  # type: ignore[index]
            except (LookupError, TypeError):
                return None
        if found is None or _name(type(found)) != name or type(found) in ATOMS:
            return None
        if id(found) in self._named or (self._survey.number(found) is not None and not _is_itself(path, part)):
            return None  # there it is another one
        return None if isinstance(found, deque) and found.maxlen != maker else found

    # -- the objects of a pickle -------------------------------------------------------------------------------------------------------

    def load_persistent(self, name: Any) -> Any:
        """What stands for ``name`` here."""
        if isinstance(name, int):
            return self._instead.get(name, self._survey.target(name))
        kind, *rest = name
        if kind == _DEVICE:
            return self._device
        if kind == _STORAGE:
            return name
        if kind == _TENSOR:
            return self._objects[rest[0]] if len(rest) == 1 else self._tensor(*rest)
        if kind == _MOVED:
            return rest[0].to(self._device)
        if kind == _NODE:
            return self._node(*rest)
        if kind == _GENERATOR:
            return self._generator(*rest)
        if kind == _OWN:
            return self._own(rest[0])
        if kind == "type":
            return type(self._survey.target(rest[0]))
        return self._resolve(name)

    def _node(self, key: int, made_of: Any = None, items: Any = None, fields: dict[str, Any] | None = None) -> Any:
        if key not in self._objects:
            twin = self._twins.get(key)
            self._objects[key] = twin if twin is not None else _make(*self._places[key][2:])
        target = self._objects[key]
        if made_of is None or (key in self._left_alone and key in self._twins):
            return target
        if items is not None:
            set_items(target, items)
        if fields is not None:
            own = vars(target)
            for name in [name for name in own if name not in fields and name not in self._leave(target)]:
                del own[name]
            own.update(fields)
        return target

    def _generator(self, key: int, moved: bool, state: Tensor) -> Any:
        twin = self._twins.get(key)
        device = self._device if moved else torch.device("cpu")
        if twin is None or twin.device.type != device.type:
            twin = torch.Generator(device)
        elif key in self._left_alone:
            state = twin.get_state()
        rng.set_generator(twin, state)
        self._objects[key] = twin
        return twin

    def _own(self, key: int) -> Any:
        if key not in self._objects:
            self._objects[key] = self._twins.get(key)
            if self._objects[key] is None:
                self.lost.append(self._place_name(key))
        return self._objects[key]

    def _place_name(self, key: int) -> str:
        (owner, part, path), *_ = self._places[key]
        if isinstance(owner, int):
            start = self._place_name(-1 - owner) if owner < 0 else self._survey.path(owner)
        else:
            start = ".".join(map(str, owner))
        return (f"{start}.{part}" if part else start) + "".join(f"[{step!r}]" for step in path)

    def _tensor(
        self, key: int, layout: tuple[Any, ...], kind: tuple[bool, bool], view: tuple[Any, ...] | None, attributes: dict[str, Any]
    ) -> Tensor:
        dtype, shape, stride, offset, where = layout
        is_parameter, requires_grad = kind
        twin = self._twins.get(key)
        if twin is not None and key in self._left_alone:
            self._objects[key] = twin
            return cast(Tensor, twin)
        tensor = self._view_of(view, shape, stride) if view is not None else None
        if tensor is None:
            if twin is not None and self._fits(twin, layout, free=not _is_itself(*self._places[key][0][:0:-1])):
                self._fill(twin.untyped_storage(), where)
                self._storages[where[1]] = twin.untyped_storage()
                tensor = twin
            else:
                storage = self._storage(where)
                tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
                if is_parameter:
                    tensor = nn.Parameter(tensor, requires_grad=requires_grad)
        if tensor.is_leaf and tensor.requires_grad != requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_(requires_grad)
        vars(tensor).update(attributes)
        self._objects[key] = tensor
        return tensor

    def _view_of(self, view: tuple[Any, ...], shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor | None:
        """The same view of this process's tensor; None where that one isn't laid out as it was."""
        name, size_bytes, dtype, offset = view
        base = self._resolve(name)
        if (
            not isinstance(base, Tensor)
            or not _is_common(base)
            or str(base.dtype) != dtype
            or base.untyped_storage().nbytes() != size_bytes
        ):
            self.lost.append(f"that what was a view of {'.'.join(map(str, name[1:]))} still is one")
            return None
        return base.detach().as_strided(shape, stride, base.storage_offset() + offset)

    def _fits(self, twin: Any, layout: tuple[Any, ...], *, free: bool) -> bool:
        """Whether a tensor of this process has its storage for itself, and that one is laid out as the packed one."""
        dtype, shape, stride, offset, (_, start, size_bytes, moved) = layout
        storage = twin.untyped_storage()
        return (
            start not in self._storages
            and not (free and storage._cdata in self._keep)
            and (twin.dtype, tuple(twin.shape), twin.stride(), twin.storage_offset()) == (dtype, shape, stride, offset)
            and twin.device == (self._device if moved else torch.device("cpu"))
            and storage.nbytes() == size_bytes
            and twin.nbytes == size_bytes
        )

    def _storage(self, where: tuple[Any, ...]) -> torch.UntypedStorage:
        _, start, size_bytes, moved = where
        if start not in self._storages or not size_bytes:
            storage = torch.UntypedStorage(size_bytes, device=self._device if moved else "cpu")
            self._fill(storage, where)
            self._storages[start] = storage
        return self._storages[start]

    def _fill(self, storage: torch.UntypedStorage, where: tuple[Any, ...]) -> None:
        """Copy from the file, whose pages all ranks share."""
        _, start, size_bytes, _ = where
        self._keep.add(storage._cdata)  # it belongs to this tensor from now on
        if size_bytes:
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            data.copy_(torch.frombuffer(cast(Any, self._map), dtype=torch.uint8, count=size_bytes, offset=start))


def _is_itself(path: tuple[Any, ...], part: str) -> bool:
    """Whether a place is an object from before itself."""
    return part == ITEMS and not path


def _make(kind: Any, maker: Any) -> Any:
    """An empty object of a class."""
    assert kind is not None
    if kind is deque:
        return deque(maxlen=maker)
    if kind is defaultdict:
        return defaultdict(maker)
    if kind in (list, dict, set, OrderedDict, Counter):
        return kind()
    return kind.__new__(kind)


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, unpacking: Unpacking, buffers: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._unpacking = unpacking

    def persistent_load(self, name: Any) -> Any:
        return self._unpacking.load_persistent(name)


def put(survey: Survey, part: Part, payload: Any) -> None:
    """Give an object from before the fork a part as it was unpacked."""
    number, attribute = part
    target = survey.target(number)
    if attribute != ITEMS:
        vars(target)[attribute] = payload
    elif payload is not target:
        if isinstance(target, Tensor) and target.device != payload.device:
            target.data = payload
        else:
            set_items(target, payload)
