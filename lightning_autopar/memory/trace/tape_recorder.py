"""What a step's tensors take, operation by operation: a ledger of live storages and its tape. Knows torch; no Lightning, module or plan.

Each operation costs a constant amount of work, unlike ``torch.distributed._tools.MemTracker``, which walks every module (1 to 4 s a step of
a 124M model against 0.7 s) and fails on frozen parameters. Autograd adds gradients in place only while no mode is active; here they are
counted as added in place.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_autopar._gpus_as_cpu import stream_number
from lightning_autopar.memory.fakes.fake_mode import another, device_of
from lightning_autopar.memory.kernels.cpu_workspace import HiddenOf, ScratchOf
from lightning_autopar.memory.kernels.measured_workspace import KernelBytes, Rounds
from lightning_autopar.memory.storages import seen_storages, tensor_bytes
from lightning_autopar.memory.tape import KINDS, Action, Kind, Tape
from lightning_autopar.memory.work.batch_sized import Dependence, Input, may_hook_saving, recomputes
from lightning_autopar.memory.work.calls import tensors_in
from lightning_autopar.memory.work.operations import Operation, operation
from lightning_autopar.memory.work.tally import OPTIMIZER, Tally

aten = torch.ops.aten

#: Operations of autograd's backward formulas on a tensor that the formula has just made: the one that a mode sees, and the one that runs
#: without a mode, which changes that tensor.
_INTO_OWN = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
#: The same for single formulas; in others these operations are out of place for real tensors, too.
_INTO_OWN_BY_NODE = {
    "BinaryCrossEntropyWithLogitsBackward0": {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor},
    "Atan2Backward0": {aten.masked_fill.Scalar: aten.masked_fill_.Scalar},
}
#: Every operation for which :func:`in_place` may return another.
WRITES = frozenset({aten.add.Tensor, *_INTO_OWN, *(function for functions in _INTO_OWN_BY_NODE.values() for function in functions)})


def in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Any, *, made_by_it: bool) -> Any:
    """The operation that would have run in backward without a mode; the same one where there is no other.

    Any mode makes tensors "subclass-like" (``aten/src/ATen/TensorSubclassLikeUtils.h``), for which formulas
    (``torch/csrc/autograd/FunctionsManual.cpp``) and sums of gradients make a new tensor instead of changing one of their own.

    Args:
        node: autograd's node that runs, or has just run.
        made_by_it: whether that node has made the first argument.
    """
    if function is aten.add.Tensor:
        return aten.add_.Tensor if adds_in_place(function, args, kwargs, node, made_by_it=made_by_it) else function
    if not made_by_it or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
        return function
    return _INTO_OWN.get(function) or _INTO_OWN_BY_NODE.get(node.name(), {}).get(function, function)


def adds_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Any, *, made_by_it: bool) -> bool:
    """Whether an operation in backward that sums two gradients at one node would have been in place without a mode. As ``accumulate`` and
    ``can_accumulate_inplace`` in torch's ``torch/csrc/autograd/input_buffer.cpp``: the sum goes into the gradient that came first if
    autograd alone holds it, and it is dense. Any mode makes tensors "subclass-like" there, and a third one is made.

    Args:
        node: autograd's node that runs, or has just run.
        made_by_it: whether that node has made the first operand. Then the sum is a step of the node's own formula, unless two of its
            outputs go to one place (``x * x``).
    """
    if function is not aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
        return False
    first, second = args
    if made_by_it and len(set(node.next_functions)) == len(node.next_functions):
        return False
    if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype is not second.dtype:
        return False
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    return _references(first) == references_of_one_holder() and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _references(tensor: Tensor) -> tuple[int, int]:
    """The reference counts of a tensor and of its storage."""
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


class _Watch(TorchDispatchMode):
    """Records the reference counts of the first operand of the last sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.found = _references(args[0])
        return func(*args, **kwargs or {})


@functools.cache
def references_of_one_holder() -> tuple[int, int]:
    """The counts when only autograd holds a gradient; the call itself adds some that depend on torch's version. Found by a tiny backward
    pass: not while an operation is dispatched, and not at import, as a process that forks later must not have run autograd.
    """
    with _disable_current_modes(), torch.enable_grad(), _Watch() as watch:
        shared = torch.ones(2, requires_grad=True) * 2
        torch.autograd.backward([shared * 3, shared * 5], [torch.ones(2), torch.ones(2)])
    found: tuple[int, int] = watch.found
    return found


Phase = Literal["forward", "backward", "optimizer"]

#: Kinds that grow with the batch.
_SCALED = frozenset({"input", "activations", "temporary"})
#: The number that autograd gives the nodes that put gradients into ``.grad`` (``torch/csrc/autograd/functions/accumulate_grad.cpp``).
_ACCUMULATE_GRAD = 2**64 - 1
_CURRENT = -1
_SCRATCH_KINDS: tuple[Kind, Kind] = ("temporary", "fixed")
_DEVICE = torch.ops.prim.device.default
#: The operation that makes its mask before its output, on every device (``Dropout.cpp``, ``cuda/Dropout.cu``).
_DROPOUT = torch.ops.aten.native_dropout.default
_DETACH = torch.ops.aten.detach.default
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})

_current_node: Callable[[], Any] = torch._C._current_autograd_node


def _running() -> int:
    """The number of autograd's running node; -1 where none runs."""
    node = _current_node()
    return -1 if node is None else int(node._sequence_nr())


class Cell(weakref.ReferenceType[torch.UntypedStorage]):
    """One live storage: its number, its bytes and what it holds."""

    __slots__ = ("key", "kind", "node", "number", "size_bytes")
    key: int
    node: int
    number: int
    size_bytes: int
    kind: Kind


class Name(weakref.ReferenceType[Tensor]):
    """A tensor on a storage that the step's code holds, not autograd."""

    __slots__ = ("number",)
    number: int


class MemoryTracker(TorchDispatchMode):
    """Counts live bytes by kind while it is on, and records them on a tape.

    The caller says what parameters, buffers, input and optimizer state are (:meth:`mark`), when a gradient is complete
    (:meth:`mark` again), which phase runs (:meth:`enter`), and which block's forward (:meth:`begin_block`, :meth:`end_block`).

    A part of the step is 2 i + 1 for the i-th block, and 2 i for what runs before it and after the one before. In backward, autograd's
    nodes tell the part: they carry the number of the forward operation that made them, and run in descending order.

    What the optimizer makes is ``fixed`` (its size doesn't depend on the batch) until marked as its state. So is what is made only of fixed
    tensors and parameters (casts, masks, tables of positions), and the gradient of such tensors. The rest of what forward makes are
    activations, and of what backward makes temporaries.

    Args:
        batch_size: samples in the batch; 0 where it has none.
        scratch: the temporaries of kernels, by operation.
        hidden: true sizes of outputs whose fakes are empty, by operation.
        see: called after each operation with the operation, its arguments and its output.
    """

    def __init__(
        self,
        *,
        batch_size: int = 0,
        scratch: Mapping[Any, ScratchOf] | None = None,
        hidden: Mapping[Any, HiddenOf] | None = None,
        see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self.live: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.total_bytes = 0
        self.random_draws: dict[str, None] = {}
        self.phase: Phase = "forward"
        self.tape: Tape | None = None
        #: The operations since :meth:`record`.
        self.tally = Tally()
        #: The parts whose forward uses a parameter or buffer, in order, by its id.
        self.uses: dict[int, dict[int, None]] = {}
        #: Storages in which gradients of parameters have arrived.
        self.arrived: set[int] = set()
        #: Position on the tape after the last operation of forward that used a storage, by its number.
        self.last_uses: dict[int, int] = {}
        #: Position on the tape at which a block's code dropped what it had made, by the storage's number, in that order.
        self.let_go: dict[int, int] = {}
        #: Position on the tape at which the node of backward that frees what a block saved had read it, by the storage's number.
        self.reads: dict[int, int] = {}
        self._scratch = scratch or {}
        self._hidden = hidden or {}
        self._dependence = Dependence(batch_size)
        self._cells: dict[int, Cell] = {}
        self._number = 0
        self._part = 0
        self._outer = 0
        #: The block's part to which work and uses of parameters count, where it runs again in another part.
        self._worker: int | None = None
        self._pending: tuple[Action, int] | None = None
        self._starts: list[int] = []
        self._started: list[int] = []
        self._workers: list[int | None] = []
        self._repeating = -1
        self._multiplied: set[int] = set()
        self.streams: dict[object, int] = {None: 0}
        self._resize: Callable[..., Any] | None = None
        #: While a recorded block runs: gives autograd other tensors than the block's code has.
        self._saving: saved_tensors_hooks | None = None
        self._names: dict[int, Name] = {}
        #: Where, and which, the last node was that dropped a storage that a block had saved for it, by the storage's number.
        self._read: dict[int, tuple[int, int]] = {}
        #: The id of the tensor that a node gets, until autograd has made its own tensor from it (``SavedVariable::unpack``).
        self._given = 0

    # -- what the caller says --------------------------------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Count the tensor's storage as of that kind from now on."""
        if kind in ("parameters", "buffers"):
            self.uses.setdefault(id(tensor), {})
        elif kind == "input":
            self._dependence.add_batch(tuple(tensor.shape))
        for storage in seen_storages(tensor):
            cell = self._track(storage, kind)
            if cell.kind != kind and (kind, cell.kind) != ("buffers", "parameters"):  # some modules keep parameters in lists, too
                self.live[cell.kind] -= cell.size_bytes
                self.live[kind] += cell.size_bytes
                cell.kind = kind
                self._write("become", cell.number, cell.size_bytes, kind)

    def forget(self, tensor: Tensor) -> None:
        """The tensor isn't on the device, and no longer counts."""
        for cell in self._cells_of((tensor,)):
            self._free(cell)

    def begin_step(self) -> None:
        """A batch starts."""
        self._outer = self._part = 0
        self._worker = None
        self._starts, self._started, self._workers, self._repeating = [], [], [], -1
        self._dependence.begin_step()

    def enter(self, phase: Phase) -> None:
        """A phase starts."""
        self.phase = phase
        self._worker = None
        if phase == "backward":
            # What autograd makes from here on (double backward, recomputation) belongs to the part that runs then.
            self._begin(_CURRENT)
            self._pending = None
            self._write("return", self._part // 2)
        elif phase == "forward":
            self._part = self._outer
            self._begin(self._part)
            self._pending = "leave", self._outer // 2 - 1
        else:
            self._pending = "optimizer", -1

    def begin_block(self, block: int, inputs: Iterable[Tensor]) -> None:
        """The forward of a block begins, and these tensors enter it."""
        self._part = 2 * block + 1
        self._begin(self._part)
        self._flush()
        self._write("forward", block)
        for cell in self._cells_of(inputs):
            self._write("input", cell.number)
        if self.tape is not None and torch.is_grad_enabled() and may_hook_saving():
            self._saving = saved_tensors_hooks(another, self._unpacked)
            self._saving.__enter__()

    def repeat_block(self, block: int) -> None:
        """The forward of a block begins once more, inside of backward.

        Autograd's numbers don't show it: with reentrant checkpointing, the node that runs it was made before the block began.
        """
        part = 2 * block + 1
        self._repeating = self._node()
        self._worker = None
        if part != self._part:
            self._part = part
            self._write("backward", block)

    def end_block(self, block: int, outputs: Iterable[Tensor]) -> None:
        """The forward of a block has ended, and these tensors leave it."""
        self._save_as_ever()
        for cell in self._cells_of(outputs):
            self._write("output", cell.number)
        self._part = self._outer = 2 * block + 2
        self._begin(self._part)
        self._write("leave", block)

    def run_again(self, block: int | None) -> int:
        """A block's forward begins again, in code outside of blocks, or has ended (None). Returns the part that runs."""
        self._worker = None if block is None else 2 * block + 1
        self._begin(self._part)
        return self._part

    def _save_as_ever(self) -> None:
        if self._saving is not None:
            self._saving.__exit__()
            self._saving = None

    def _unpacked(self, saved: Any) -> Any:
        """The tensor that a node gets from what was saved: unlike that, it is freed when the node has run, as recomputed ones are."""
        given = another(saved)
        if given is not saved:
            self._name((given,))
            self._given = id(given)
        return given

    def _name(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for cell in self._cells_of((tensor,)):
                name = Name(tensor, self._let_go)
                name.number = cell.number
                self._names[id(name)] = name

    def _let_go(self, name: Name) -> None:
        """The step's code has dropped a tensor: without autograd its storage would be freed now, unless other tensors use it."""
        del self._names[id(name)]
        if self.tape is None:
            return
        if self.phase == "forward":
            self.let_go.pop(name.number, None)
            self.let_go[name.number] = len(self.tape)
        elif self.phase == "backward":
            self._read[name.number] = len(self.tape), _running()

    def record(self) -> None:
        """Start the tape with what is alive now; then all changes follow."""
        self.tape = Tape()
        self.tally, self.last_uses, self.let_go, self.reads, self._multiplied = Tally(), {}, {}, {}, set()
        for uses in self.uses.values():
            uses.clear()
        for cell in sorted(self._cells.values(), key=lambda cell: cell.number):
            self._write("allocate", cell.number, cell.size_bytes, cell.kind)
        self._pending = None
        self._write("leave", -1)

    # -- the ledger ------------------------------------------------------------------------------------------------------------------------

    def _cells_of(self, tensors: Iterable[Tensor]) -> list[Cell]:
        """The cells of the tensors' known storages, each once."""
        found = (self._cells.get(storage._cdata) for tensor in tensors for storage in seen_storages(tensor))
        return list({cell.number: cell for cell in found if cell is not None}.values())

    def _track(self, storage: torch.UntypedStorage, kind: Kind, size_bytes: int | None = None) -> Cell:
        """The cell of a storage, a new one if it is new; ``size_bytes`` where the storage's own size is wrong."""
        key = storage._cdata
        cell = self._cells.get(key)
        if cell is None:
            cell = Cell(storage, self._free)
            cell.key, cell.node = key, -1
            cell.kind = kind
            cell.size_bytes = size = storage.nbytes() if size_bytes is None else size_bytes
            cell.number = self._count_up()
            self._cells[key] = cell
            self.live[kind] += size
            self.total_bytes += size
            self._flush()
            self._write("allocate", cell.number, size, kind)
        return cell

    def _count_up(self) -> int:
        self._number += 1
        return self._number - 1

    def _free(self, cell: Cell) -> None:
        if self._cells.get(cell.key) is not cell:
            return  # freed after the tracker was closed
        del self._cells[cell.key]
        self.live[cell.kind] -= cell.size_bytes
        self.total_bytes -= cell.size_bytes
        if cell.number in self._read:
            position, node = self._read.pop(cell.number)
            if self.phase == "backward" and node >= 0 and node == _running():
                self.reads[cell.number] = position
        self._write("free", cell.number, 0, cell.kind)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        cell = self._cells.get(storage._cdata)
        if cell is not None:
            size = storage.nbytes()
            self.live[cell.kind] += size - cell.size_bytes
            self.total_bytes += size - cell.size_bytes
            cell.size_bytes = size
            self._write("resize", cell.number, size, cell.kind)

    def _write(self, action: Action, storage: int, size_bytes: int = 0, kind: Kind | None = None) -> None:
        if self.tape is not None:
            self.tape.add(action, storage, size_bytes, kind)

    def _flush(self) -> None:
        """Write the mark of a phase that was entered, now that something happens in it."""
        if self._pending is not None:
            action, index = self._pending
            self._pending = None
            self._write(action, index)

    # -- which part runs -------------------------------------------------------------------------------------------------------------------

    def _begin(self, part: int) -> None:
        """The nodes that autograd makes from here on belong to that part."""
        self._starts.append(_get_sequence_nr())
        self._started.append(part)
        self._workers.append(self._worker)

    def _node(self) -> int:
        """In backward: enter the part whose node runs. Returns the node's number; -1 where none does."""
        node = _current_node()
        if node is None:
            return -1
        number: int = node._sequence_nr()
        if number not in (_ACCUMULATE_GRAD, self._repeating):
            place = bisect_right(self._starts, number) - 1
            part = self._started[place] if place >= 0 else _CURRENT
            self._worker = self._workers[place] if place >= 0 else None
            if part not in (_CURRENT, self._part):
                self._part = part
                self._write("backward" if part % 2 else "return", part // 2)
        return number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in :class:`FastFakeMode`."""
        return False

    # -- one operation ---------------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return device_of(args[0])
        if any(kind is not FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper's own dispatch comes first; its operations on the tensors inside come here again
        kwargs = kwargs or {}
        known = operation(func)
        node = self._node() if self.phase == "backward" else -1
        if node >= 0 and func in WRITES:
            own = any(cell.node == node for cell in self._cells_of(args[:1]))
            func = in_place(func, args, kwargs, _current_node(), made_by_it=own)
            known = operation(func)
        output = func(*args, **kwargs)
        if self._see is not None:
            self._see(func, args, kwargs, output)
        if self._given and func is _DETACH and id(args[0]) == self._given:
            self._name((output,))
            self._given = 0
        inputs = self._inputs(args, kwargs)
        before = self._number
        made = self._account(func, known, node, args, kwargs, inputs, output)
        scratch = self._scratch.get(func)
        if scratch is not None:
            self._add_scratch(scratch(args, kwargs, output))
        handle = 2 * stream_number(self.streams) + (self.phase == "backward") if known.short_name in _PRODUCTS else -1
        if handle >= 0 and handle not in self._multiplied:
            self._multiplied.add(handle)
            self._write("product", handle)
        if known.draws and self.phase != "optimizer" and known.has_drawn(args, kwargs):
            self.random_draws[known.name] = None
            if self.tape is not None and made and made[0].scaled and (sizes := known.drawn_bytes(made[0].tensor)):
                self.tape.draws.update(dict.fromkeys(made[-1].storages, sizes))
        if self.tape is not None and known.moves:
            part = OPTIMIZER if self.phase == "optimizer" else self._part if self._worker is None else self._worker
            self.tally.add(part, self.phase == "backward", func, known, args, kwargs, inputs, output, made)
        if self.phase == "forward" and self.tape is not None:
            position = len(self.tape)
            self.last_uses.update((number, position) for item in inputs for number in item.storages)
            self.last_uses.update((number, position) for number in range(before, self._number))
            if self._saving is not None:
                self._name(tensors_in((output,)))
        return output

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Input]:
        """The tensors that an operation reads; records which part uses which parameter."""
        inputs = []
        for tensor in tensors_in((*args, *kwargs.values()) if kwargs else args):
            if type(tensor) is FakeTensor and tensor.layout is torch.strided:
                cell = self._cells.get(tensor.untyped_storage()._cdata)
                cells = [] if cell is None else [cell]
            else:
                cells = self._cells_of((tensor,))
            size_bytes = sum(cell.size_bytes for cell in cells) if cells else tensor_bytes(tensor)
            scaled = any(cell.kind in _SCALED for cell in cells)
            inputs.append(Input(tensor, scaled, size_bytes, tuple(cell.number for cell in cells)))
            if self.phase == "forward":
                uses = self.uses.get(id(tensor))
                if uses is not None:
                    uses[self._part if self._worker is None else self._worker] = None
        return inputs

    def _account(
        self, function: Any, known: Operation, node: int, args: Any, kwargs: dict[str, Any], inputs: list[Input], output: Any
    ) -> list[Input]:
        """Count what the operation has made; returns its outputs."""
        if node == _ACCUMULATE_GRAD:
            if id(_current_node().variable) in self.uses:  # not a leaf of the user's, or of reentrant checkpointing
                self.arrived |= {cell.number for cell in self._cells_of(item.tensor for item in inputs)}
        elif self.phase != "optimizer":
            maker = self._dependence.maker()
            if maker is not None:
                self._dependence.note(maker, inputs, output if known.is_view and isinstance(output, Tensor) else None)
        if known.is_view:
            return []
        if inputs and output is inputs[0].tensor:
            for zeros in self._cells_of((output,)) if node >= 0 else ():
                # A formula's own tensors, made without inputs: what is written into them decides.
                if zeros.node == node and zeros.kind == "fixed" and self._dependence.of_backward(node, inputs, output, 0):
                    self.mark(output, "temporary")
            return inputs[:1]
        hidden = self._hidden.get(function)
        made = []
        outputs = list(enumerate(tensors_in((output,))))
        for place, tensor in reversed(outputs) if function is _DROPOUT else outputs:
            cell: Cell | None = None
            for storage in seen_storages(tensor):
                cell = self._cells.get(storage._cdata)
                if cell is not None or tensor.device.type == "meta":
                    continue
                if self.phase == "forward":
                    kind: Kind = "activations" if self._dependence.of_forward(inputs, tensor) else "fixed"
                elif self.phase == "backward" and recomputes():
                    kind = "temporary" if self._dependence.of_forward(inputs, tensor) else "fixed"
                elif self.phase == "backward":
                    kind = "temporary" if self._dependence.of_backward(node, inputs, tensor, place) else "fixed"
                else:
                    kind = "fixed"
                cell = self._track(storage, kind, None if hidden is None else hidden(args, kwargs, output, tensor))
                cell.node = node
            made.append(Input(tensor, False, 0) if cell is None else Input(tensor, cell.kind in _SCALED, cell.size_bytes, (cell.number,)))
        return made[::-1] if function is _DROPOUT else made

    def _add_scratch(self, scratch: KernelBytes | Rounds | None) -> None:
        """Record a temporary that is freed at once."""
        if scratch is None:
            return
        for blocks in scratch if isinstance(scratch, Rounds) else [[scratch]]:
            sizes = [(size, kind, block.slope_bytes) for block in blocks for size, kind in zip(block, _SCRATCH_KINDS, strict=False) if size]
            taken = [(self._count_up(), *each) for each in sizes]
            for number, size, kind, slope in taken:
                self._write("allocate", number, size, kind)
                if slope and kind == "fixed" and self.tape is not None:
                    self.tape.slopes[number] = slope
            for number, _, kind, _ in reversed(taken):
                self._write("free", number, 0, kind)

    def __enter__(self) -> MemoryTracker:
        original = self._resize = torch.UntypedStorage.resize_
        references_of_one_holder()  # can't be found out while an operation is dispatched
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # FSDP frees its storages so
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        """Counting and the tape end here: what is freed later isn't recorded."""
        assert self._resize is not None
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._save_as_ever()
        self._names = {}
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._cells = {}
