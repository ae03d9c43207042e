"""One call of an operation → its kernels: FLOPs, bytes of each tensor, shapes of products. Knows torch's operators; counts nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.memory.storages import tensor_bytes
from lightning_autopar.memory.work.batch_sized import Input
from lightning_autopar.memory.work.operations import Operation, dtype_name
from lightning_autopar.memory.work.work import Work

#: From which tensors of a call depend on the batch to which entry of the shape grows with it.
Growth = Callable[[Sequence[bool]], int | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel of a call.

    Args:
        work: with everything that doesn't depend on which tensors grow.
        parts: bytes moved of each tensor, by its place among inputs and outputs.
        growth: of its shape.
    """

    work: Work
    parts: tuple[tuple[int, int], ...]
    growth: Growth | None

    def settled(self, scaled: Sequence[bool]) -> Work:
        """Its work, once it is known of each tensor whether it depends on the batch."""
        fixed = sum(size for place, size in self.parts if not scaled[place])
        return replace(self.work, fixed_bytes=fixed, growing=None if self.growth is None else self.growth(scaled))


def pieces(
    known: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Input], output: Any, made: Sequence[Input]
) -> Iterator[Piece]:
    """The kernels of a call: one, except for a convolution's backward, in which each gradient is a product."""
    call = _Arguments(known, args, kwargs, inputs, output, made)
    if known.short_name == "convolution_backward":
        yield from call.convolution_backward()
        return
    flops = 0 if known.flops is None else known.flops(args, kwargs, output)
    shape, growth = call.shape()
    yield call.piece(call.name(), flops, shape, growth)


class _Arguments:
    """The tensors of one call by the names of the arguments, and the bytes moved of each."""

    def __init__(
        self, known: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Input], output: Any, made: Sequence[Input]
    ) -> None:
        self.known = known
        self.named = known.named(args, kwargs)
        self.inputs = inputs
        self.made = made
        #: Places of the tensors of each argument.
        self.places: dict[str, range] = {}
        place = 0
        for name, value in self.named.items():
            count = sum(1 for _ in tensors_in((value,)))
            self.places[name] = range(place, place + count)
            place += count
        #: Places of the outputs, by their place in what the operator gives; None where that is no tensor.
        self.outputs: list[int | None] = []
        place = len(inputs)
        for value in output if isinstance(output, (list, tuple)) else (output,):
            is_tensor = isinstance(value, Tensor)
            self.outputs.append(place if is_tensor else None)
            place += is_tensor
        self.moved = self._moved()
        self.drawn = known.kind != "attention" and known.has_drawn(args, kwargs) and bool(made) and made[0].scaled

    def _moved(self) -> list[int]:
        """Bytes read or written of each tensor, by its place among inputs and outputs. For a table that is read in places, the output or
        the targets count, whatever the table's size; for one that is written in places, the source counts.
        """
        known = self.known
        written = [tensor_bytes(item.tensor) for item in self.made]
        read = [min(tensor_bytes(item.tensor), item.storage_bytes) for item in self.inputs]
        unread = known.unread | {"self"} if self.named.get("beta", 1) == 0 else known.unread
        again = known.again if self.named.get("training", self.named.get("train", True)) else {}
        # A fused optimizer's gradients are unscaled in place, where there is a scale; steps are numbers.
        writes = known.writes if self.named.get("grad_scale") is not None else known.writes - {"grads"}
        for name, places in self.places.items():
            for place in places:
                read[place] *= 1 + again.get(name, 0)
                if name in writes:
                    read[place] *= 1 if name in unread else 2
                elif name in unread:
                    read[place] = 0
                elif name in known.picks:
                    goes = self.places["target"][0] if self.has("target") else None
                    picked = sum(written) if goes is None else self._elements("target", of=place)
                    if picked < read[place]:
                        read[place] = 0
                        if goes is None:
                            written[0] += picked
                        else:
                            read[goes] += picked
        source = next((name for name in ("values", "source", "src", "index", "indices") if self.has(name)), None)
        if known.touches and source is not None:
            read[0], written = 0, [0 for _ in written]
            read[self.places[source][0]] += 2 * self._elements(source, of=0)
        return [*read, *written]

    def _elements(self, name: str, *, of: int) -> int:
        """Bytes of as many elements as an argument has, of the type of the tensor at a place."""
        return self.tensor(name).numel() * self.inputs[of].tensor.element_size()

    def tensor(self, name: str) -> Tensor:
        """The first tensor of an argument."""
        return self.inputs[self.places[name][0]].tensor

    def has(self, name: str) -> bool:
        return bool(self.places.get(name))

    def name(self, ending: str = "") -> str:
        """The operation's, with what decides about its kernel."""
        if self.named.get("is_causal") is True:
            ending += ".causal"
        elif self.known.kind == "convolution" and any(channels_last(item.tensor) for item in self.inputs):
            ending += ".channels_last"
        return self.known.short_name + ending

    def dtype(self) -> torch.dtype:
        """The type in which it computes: for products that of the factors; else that of its output, if that has numbers."""
        read = [item.tensor.dtype for item in self.inputs]
        if self.known.kind in ("matmul", "attention", "convolution", "recurrent"):
            first = "mat1" if self.has("mat1") else "batch1" if self.has("batch1") else None
            return read[0] if first is None else self.tensor(first).dtype
        written = [item.tensor.dtype for item in self.made]
        floating = [dtype for dtype in (*written, *read) if dtype.is_floating_point or dtype.is_complex]
        return floating[0] if floating else (*written, *read, torch.float32)[0]

    def piece(
        self, name: str, flops: int, shape: tuple[int, ...] = (), growth: Growth | None = None, moved: Sequence[int] | None = None
    ) -> Piece:
        parts = tuple((place, size) for place, size in enumerate(self.moved if moved is None else moved) if size)
        work = Work(
            kind=self.known.kind,
            name=name,
            dtype=dtype_name(self.dtype()),
            flops=flops,
            moved_bytes=sum(size for _, size in parts),
            shape=shape,
            drawn=self.drawn,
        )
        return Piece(work, parts, growth)

    # -- shapes ----------------------------------------------------------------------------------------------------------------------------

    def shape(self) -> tuple[tuple[int, ...], Growth | None]:
        """The shape, as in :class:`Work`, and what grows in it."""
        kind = self.known.kind
        if kind == "matmul":
            return self._product()
        if kind == "attention" and self.has("query") and self.tensor("query").dim() == 4:
            query, key = self.tensor("query"), self.tensor("key")
            batch, heads, length, width = query.shape
            if self.known.short_name.startswith(("_flash_attention", "_efficient_attention")):  # these have the length before the heads
                return (batch, length, heads, key.shape[1], width), self._grows("query", 0)
            return (batch, heads, length, key.shape[2], width), self._grows("query", 0)
        if kind == "convolution" and self.has("weight") and "stride" in self.named and self.made:
            return self._convolution(self.made[0].tensor), self._grows("input", 0)
        if kind == "recurrent":
            return self._recurrent(), self._grows("input", 1)
        return (), None

    def _grows(self, name: str, entry: int) -> Growth:
        """An entry that grows if an argument does."""
        place = self.places[name][0]
        return lambda scaled: entry if scaled[place] else None

    def _product(self) -> tuple[tuple[int, ...], Growth | None]:
        """(batch, m, n, k) of a product, and which of them grows.

        Of a product of two factors: m if the first grows, n if the second does; k if both do and the product doesn't, as in a weight's
        gradient; the batch of products if all three do, or a factor that doesn't is repeated for each of the batch.
        """
        names = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("mat", "vec"), ("self", "vec"), ("self", "tensor"))
        pair = next(((a, b) for a, b in names if self.has(a) and self.has(b)), None)
        if pair is None or not self.made:
            return (), None
        first, second = (self.places[name][0] for name in pair)
        a, b = self.inputs[first], self.inputs[second]
        left, right = a.tensor.shape, b.tensor.shape
        if not left or not 0 < len(right) <= 3 or len(left) > 3:
            return (), None
        width = left[-1]
        rows = left[-2] if len(left) > 1 else 1
        columns = right[-1] if len(right) > 1 else 1
        batch = left[0] if len(left) == 3 else right[0] if len(right) == 3 else 1
        product = len(self.inputs)
        repeated = len(left) == 3 and (a.expanded or b.expanded)

        def growth(scaled: Sequence[bool]) -> int | None:
            grows = scaled[first], scaled[second], scaled[product]
            if grows == (True, True, False):
                return 3
            if not any(grows[:2]):
                return None
            if len(left) == 3 and (all(grows) or repeated):
                return 0
            return 1 if grows[0] else 2 if len(right) > 1 else None

        return (batch, rows, columns, width), growth

    def _convolution(self, output: Tensor) -> tuple[int, ...]:
        input, weight, groups = self.tensor("input"), self.tensor("weight"), self.named.get("groups", 1)
        transposed = bool(self.named.get("transposed", False))
        over = input if transposed else output
        return (
            input.shape[0],
            input.shape[1],
            weight.shape[1] * groups if transposed else weight.shape[0],
            math.prod(over.shape[2:]),
            math.prod(weight.shape[2:]),
            groups,
        )

    def convolution_backward(self) -> Iterator[Piece]:
        """Two products, of the gradient with the weight and with the input; the bias's gradient comes along with the weight's."""
        gradient, read, weight = (self.places[name][0] for name in ("grad_output", "input", "weight"))
        wanted = [place is not None and asked for place, asked in zip(self.outputs, self.named["output_mask"], strict=True)]
        shape = self._convolution(self.tensor("grad_output"))
        args = tuple(self.named.values())
        products = sum(wanted[:2])
        assert self.known.flops is not None
        flops = self.known.flops(args, {}, None) // max(1, products)
        growth = self._grows("grad_output", 0)

        def moved(*places: int | None) -> list[int]:
            return [size if place in places else 0 for place, size in enumerate(self.moved)]

        if wanted[0]:
            yield self.piece(self.name(".input"), flops, shape, growth, moved(gradient, weight, self.outputs[0]))
        if wanted[1]:
            outputs = self.outputs[1:] if wanted[2] else self.outputs[1:2]
            yield self.piece(self.name(".weight"), flops, shape, growth, moved(gradient, read, *outputs))
        if not products:
            yield self.piece(self.name(), 0, (), None, moved(gradient, self.outputs[2]))

    def _recurrent(self) -> tuple[int, ...]:
        """(steps, rows, width of the input, of the state, layers × directions); of packed sequences the rows of an average step."""
        shape = self.tensor("input").shape
        packed = self.named.get("batch_sizes") or ()
        if len(shape) == 2:
            steps, rows = max(1, len(packed)), -(-shape[0] // max(1, len(packed)))
        elif self.known.short_name.startswith("_cudnn") and self.named.get("batch_first"):
            rows, steps = shape[:2]
        else:
            steps, rows = shape[:2]
        together = 1  # oneDNN runs each layer and direction separately, whatever the arguments are
        if not self.known.short_name.startswith("mkldnn"):
            together = self.named["num_layers"] * (2 if self.named.get("bidirectional") else 1)
        return steps, rows, shape[-1], self.named["hidden_size"], together


def channels_last(tensor: Tensor) -> bool:
    """Whether it is laid out channels last, and not also channels first."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or outputs, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
