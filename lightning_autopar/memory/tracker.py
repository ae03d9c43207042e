"""What a step's tensors take, operation by operation: a ledger of live storages. Knows torch; no Lightning, no module, no plan.

A constant amount of work an operation, unlike ``torch.distributed._tools.MemTracker``, which walks every module (1 to 4 s a step of a 124M
model against 0.7 s) and stumbles over frozen parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from lightning_autopar.memory.footprint import Moment

Kind = Literal["parameters", "buffers", "input", "optimizer", "gradients", "activations", "temporary", "fixed"]
Phase = Literal["forward", "backward", "optimizer"]
_KINDS: tuple[Kind, ...] = ("parameters", "buffers", "input", "optimizer", "gradients", "activations", "temporary", "fixed")

aten = torch.ops.aten
#: Tensors of a parameter's shape below this size say nothing about where they come from.
_TELLING_ELEMENTS = 1024


class Cell:
    """One live storage: its bytes, what it holds, and the block in whose forward it was made."""

    __slots__ = ("__weakref__", "block", "kind", "size_bytes")

    def __init__(self, size_bytes: int, kind: Kind, block: int | None) -> None:
        self.size_bytes = size_bytes
        self.kind = kind
        self.block = block


@dataclass
class _Segment:
    """The part of a step between two changes of phase or of the block that runs; remembers its two fullest moments."""

    phase: Phase
    held: int
    block: int | None = None
    top_bytes: int = -1
    top: tuple[int, ...] = ()
    top_scaled_bytes: int = -1
    top_scaled: tuple[int, ...] = ()


class MemoryTracker(TorchDispatchMode):
    """Counts live bytes by kind while it is on, and remembers the fullest moments of each part of the step.

    The caller says what parameters, buffers, input and optimizer state are (:meth:`mark`), when a gradient is complete
    (:meth:`mark` again), which phase runs (:meth:`enter`), and which block's forward (:attr:`block`). A tensor made in forward is an
    activation; one made in backward is a gradient in the making if it has a parameter's shape (``fixed``: its size doesn't depend on the
    batch), else temporary; what the optimizer makes is fixed until marked as its state. A cast of a parameter (autocast's) is fixed, too.

    Args:
        shapes: shapes of the parameters.
        scratch: count what the CPU's convolutions take while they run.
    """

    def __init__(self, shapes: Iterable[torch.Size], *, scratch: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = dict.fromkeys(_KINDS, 0)
        self.total_bytes = 0
        self.flops = 0
        self.random_draws: dict[str, None] = {}
        self.block: int | None = None
        self.block_bytes: dict[int, int] = {}
        self.block_fixed_bytes: dict[int, int] = {}
        self.block_flops: dict[int, int] = {}
        self.phase: Phase = "forward"
        self._scratch = scratch
        self._cells: Any = WeakIdKeyDictionary()
        self._shapes = {tuple(sorted(shape)) for shape in shapes if shape.numel() >= _TELLING_ELEMENTS}
        self._segments: list[_Segment] = []
        self._segment: _Segment | None = None
        self._resize: Callable[..., Any] | None = None

    # -- what the caller says --------------------------------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Count the tensor's storage as of that kind from now on."""
        for part in _parts(tensor):
            cell = self._track(part, kind)
            if cell.kind != kind:
                self._count(cell, -cell.size_bytes)
                cell.kind = kind
                cell.block = None
                self._count(cell, cell.size_bytes)

    def enter(self, phase: Phase, held: int | None = None) -> None:
        """A phase starts, or another block's part of it.

        Args:
            held: how many leading blocks hold all that their forward saved, the one that runs excepted; by default those that hold it
                already where backward starts, else none.
        """
        if held is None:
            held = self._segment.held if phase == "backward" and self._segment is not None else 0
        self.phase = phase
        if self._segment is not None:
            self._segment = _Segment(phase, held, self.block if phase == "forward" else None)
            self._segments.append(self._segment)
            self._look()

    def record(self) -> None:
        """Start to remember moments."""
        self._segment = _Segment(self.phase, 0)
        self._segments = [self._segment]
        self.flops = 0
        self.block_flops.clear()
        self._look()

    def moments(self, held: Callable[[int], int], kept: Container[int]) -> tuple[Moment, ...]:
        """The fullest moments since :meth:`record`: of each segment, in all and without what a plan may shard or preallocate.

        Args:
            held: from a number of leading candidates for blocks to the number of blocks among them.
            kept: which candidates are blocks.
        """
        found: dict[Moment, None] = {}
        for segment in self._segments:
            for live in (segment.top, segment.top_scaled):
                if live:
                    by_kind = dict(zip(_KINDS, live, strict=True))
                    found[
                        Moment(
                            phase=segment.phase,
                            held=held(segment.held),
                            running=segment.block in kept,
                            gradient_bytes=by_kind["gradients"],
                            activation_bytes=by_kind["activations"],
                            temporary_bytes=by_kind["temporary"],
                            fixed_bytes=by_kind["fixed"],
                        )
                    ] = None
        return tuple(found)

    def cells(self, tensor: Tensor) -> list[Cell]:
        """What is known of the tensor's storages."""
        found = (self._cells.get(part.untyped_storage()) for part in _parts(tensor))
        return [cell for cell in found if cell is not None]

    # -- the ledger ------------------------------------------------------------------------------------------------------------------------

    def _track(self, tensor: Tensor, kind: Kind, size_bytes: int | None = None) -> Cell:
        """The cell of a tensor's storage, a new one if it wasn't seen before; ``size_bytes`` where the storage itself can't tell."""
        storage = tensor.untyped_storage()
        cell: Cell | None = self._cells.get(storage)
        if cell is None:
            size = storage.nbytes() if size_bytes is None else size_bytes
            cell = Cell(size, kind, self.block if self.phase == "forward" else None)
            self._cells[storage] = cell
            weakref.finalize(storage, self._free, cell).atexit = False
            self._count(cell, size)
            self._look()
        return cell

    def _count(self, cell: Cell, size_bytes: int) -> None:
        self.live[cell.kind] += size_bytes
        self.total_bytes += size_bytes
        if cell.block is not None:
            self.block_bytes[cell.block] = self.block_bytes.get(cell.block, 0) + size_bytes
            if cell.kind == "fixed":
                self.block_fixed_bytes[cell.block] = self.block_fixed_bytes.get(cell.block, 0) + size_bytes

    def _free(self, cell: Cell) -> None:
        self._count(cell, -cell.size_bytes)
        cell.size_bytes = 0

    def _look(self) -> None:
        """Is this a fuller moment than those remembered?"""
        segment = self._segment
        if segment is None:
            return
        if self.total_bytes > segment.top_bytes:
            segment.top_bytes = self.total_bytes
            segment.top = tuple(self.live.values())
        scaled_bytes = self.live["activations"] + self.live["temporary"]
        if scaled_bytes > segment.top_scaled_bytes:
            segment.top_scaled_bytes = scaled_bytes
            segment.top_scaled = tuple(self.live.values())

    def _kind(self, function: Any, args: tuple[Any, ...], output: Tensor) -> Kind:
        """What a tensor that an operation has just made is."""
        if self.phase == "optimizer":
            return "fixed"
        if self.phase == "backward":
            return "fixed" if output.numel() >= _TELLING_ELEMENTS and tuple(sorted(output.shape)) in self._shapes else "temporary"
        if function is aten._to_copy.default and isinstance(args[0], Tensor):
            source = self._cells.get(args[0].untyped_storage())
            if source is not None and source.kind == "parameters":
                return "fixed"
        return "activations"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output) if isinstance(output, (list, tuple)) else ():
            for tensor in _parts(leaf):
                if tensor.untyped_storage() not in self._cells:
                    self._track(tensor, self._kind(func, args, tensor), self._hidden_bytes(func, args, output, tensor))
        if self._scratch:
            self._add_scratch(func, args, output)
        self._note(func, args, kwargs, output)
        return output

    def _hidden_bytes(self, function: Any, args: tuple[Any, ...], output: Any, tensor: Tensor) -> int | None:
        """Bytes of an output whose fake is empty: what oneDNN's LSTM keeps for backward.

        By oneDNN's layout: four gates at each step, and about eleven and a half copies of the states (outputs, cells, and their gradients),
        each as wide as the wider of input and state. Within 2 % of torch 2.13's for widths from 64 up, within 40 % for tiny ones.
        """
        if function is not aten.mkldnn_rnn_layer.default or tensor is not output[-1] or tensor.untyped_storage().nbytes():
            return None
        if not dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)).get("train", True):
            return None
        steps, batch, width = (int(size) for size in args[0].shape)
        state = int(output[1].shape[-1])
        elements = int((steps + 1) * batch * (4 * state + 11.5 * max(width, state)))
        return elements * int(args[0].element_size())

    def _add_scratch(self, function: Any, args: tuple[Any, ...], output: Any) -> None:
        """Account for what oneDNN's convolutions take while they run: inputs, weights and outputs in its own blocked layout.

        The order was read from the profiler's memory events (torch 2.13): copies of input and weight, the blocked output; these are freed,
        then the plain output. In backward the same for the input's gradient, then for the weight's.
        """
        if function is aten.convolution.default:
            image, weight = _bytes(args[0]), _bytes(args[1])
            scaled, fixed = (image, weight) if image + weight > _bytes(output) else (_bytes(output), 0)
        elif function is aten.convolution_backward.default:
            gradient, image, weight = _bytes(args[0]), _bytes(args[1]), _bytes(args[2])
            scaled, fixed = max((image + gradient, 0), (0, weight), key=sum)
        else:
            return
        for sign in (1, -1):
            self.live["temporary"] += sign * scaled
            self.live["fixed"] += sign * fixed
            self.total_bytes += sign * (scaled + fixed)
            if sign == 1:
                self._look()

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Count the operation's FLOPs and random draws."""
        packet = getattr(function, "_overloadpacket", None)
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=output))
            self.flops += flops
            if self.block is not None and self.phase == "forward":
                self.block_flops[self.block] = self.block_flops.get(self.block, 0) + flops
        if self.phase != "optimizer" and torch.Tag.nondeterministic_seeded in function.tags and not _without_draw(function, args, kwargs):
            self.random_draws[str(packet)] = None

    def __enter__(self) -> MemoryTracker:
        original = self._resize = torch.UntypedStorage.resize_
        cells = self._cells
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            cell: Cell | None = cells.get(storage)
            if cell is not None:
                tracker._count(cell, storage.nbytes() - cell.size_bytes)
                cell.size_bytes = storage.nbytes()
                tracker._look()
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # FSDP frees its storages so
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._resize is not None
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parts(tensor: Any) -> tuple[Tensor, ...]:
    """The tensors whose storages hold it: itself, or a sparse one's indices and values."""
    if not isinstance(tensor, Tensor):
        return ()
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _without_draw(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function that may draw random numbers draws none: dropout of probability zero, or out of training."""
    values = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
    if function._schema.name in ("aten::bernoulli_", "aten::bernoulli"):
        return values.get("p") in (0, 0.0, 1, 1.0)
    if "attention" in function._schema.name:
        return not values.get("dropout_p", 0.0)
    return values.get("train", values.get("training", True)) is False


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


#: Operations that torch's own table leaves out.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
