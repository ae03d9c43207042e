"""Unpacks changed objects in another process that was forked from the same parent, and in which the user's code ran anew.

Where this process has an object of the same kind in the same place, made by the same code, it takes over the packed object's contents, so
that others that refer to it here (a loader, a hook) see them. Knows nothing of Lightning.
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

from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.state.objects.contents import ATOMS, set_items
from lightning_autopar.state.objects.packing import DEVICE, GENERATOR, MOVED, NODE, OWN, STORAGE, TENSOR, is_common, type_name
from lightning_autopar.state.objects.survey import ITEMS, Part, Survey


class Unpacking:
    """Puts what was packed into this process's objects.

    Args:
        data: of :func:`.packing.pack`.
        instead: objects that stand here for those of some numbers.
        device: where tensors go that lay on the other process's accelerator.
        keep: storages that nothing may be written into, by ``_cdata``.
        named: objects that have names here, by ``id``: never what was packed under a place.
        leave: attributes of an instance that don't travel.
        only: the parts that count; objects of others are left as they are here.
        reached: whether what functions reach has the same numbers here.
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
        *,
        reached: bool,
    ) -> None:
        self._survey, self._resolve, self._instead, self._device, self._keep = survey, resolve, instead, device, keep
        self._named, self._leave, self._reached = named, leave, reached
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
        """Unpack, filling this process's own objects at their places."""
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
            parent = self._target(owner) if owner >= 0 else self._twins.get(-1 - owner)
        else:
            parent = self._resolve(owner)
        found = parent if part == ITEMS else getattr(parent, "__dict__", {}).get(part)
        for step in path:
            try:
                found = found[step]  # type: ignore[index]
            except (LookupError, TypeError):
                return None
        if found is None or type_name(type(found)) != name or type(found) in ATOMS:
            return None
        if id(found) in self._named or (self._survey.number(found) is not None and not _is_itself(path, part)):
            return None  # in the other process it is another object
        return None if isinstance(found, deque) and found.maxlen != maker else found

    # -- the objects of a pickle -------------------------------------------------------------------------------------------------------

    def load_persistent(self, name: Any) -> Any:
        """The object of ``name`` here."""
        if isinstance(name, int):
            return self._instead.get(name, self._target(name))
        kind, *rest = name
        if kind == DEVICE:
            return self._device
        if kind == STORAGE:
            return name
        if kind == TENSOR:
            return self._objects[rest[0]] if len(rest) == 1 else self._tensor(*rest)
        if kind == MOVED:
            return rest[0].to(self._device)
        if kind == NODE:
            return self._node(*rest)
        if kind == GENERATOR:
            return self._generator(*rest)
        if kind == OWN:
            return self._own(rest[0])
        if kind == "type":
            return type(self._target(rest[0]))
        return self._resolve(name)

    def _target(self, number: int) -> Any:
        """This process's object with a number; None if another object may have that number here."""
        return None if self._survey.is_reached(number) and not self._reached else self._survey.target(number)

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
            start = self._place_name(-1 - owner) if owner < 0 else self._survey.path(owner) if self._target(owner) is not None else "?"
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
        """The same view of this process's tensor; None if that has another layout."""
        name, size_bytes, dtype, offset = view
        base = self._resolve(name)
        if not isinstance(base, Tensor) or not is_common(base) or str(base.dtype) != dtype or base.untyped_storage().nbytes() != size_bytes:
            self.lost.append(f"that what was a view of {'.'.join(map(str, name[1:]))} still is one")
            return None
        return base.detach().as_strided(shape, stride, base.storage_offset() + offset)

    def _fits(self, twin: Any, layout: tuple[Any, ...], *, free: bool) -> bool:
        """Whether a tensor of this process doesn't share its storage, and has the packed one's layout."""
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
    """Whether a place is itself an object from before."""
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
    """Give an object from before the fork an unpacked part."""
    number, attribute = part
    target = survey.target(number)
    if attribute != ITEMS:
        vars(target)[attribute] = payload
    elif payload is not target:
        if isinstance(target, Tensor) and target.device != payload.device:
            target.data = payload
        else:
            set_items(target, payload)
