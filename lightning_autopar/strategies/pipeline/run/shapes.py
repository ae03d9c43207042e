"""How a stage learns the shapes that it is about to receive: the stage before sends a message, once for each kind of micro-batch.

To receive a tensor a stage needs a buffer of its shape. Shapes change with sequence lengths and short last batches, and only the sender
knows them. All stages see the batch's *signature*, from which the shapes follow. When a signature comes up for the first time, the message
precedes the tensors; from then on both sides remember it. A step may also depend on the batch's index (two networks that train in turns),
so a signature's message is repeated for a few batches until it is clear that it doesn't change. Knows tensors and a process group; no
schedule and no module.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None  # type: ignore[assignment]

#: After so many batches whose words were all the same, the batch's index doesn't matter.
TRIALS = 4
#: As many signatures are remembered. Both sides of a boundary see the same ones in the same order, and so forget the same.
KEPT = 512


@dataclass(frozen=True)
class Signature:
    """All that the shapes and gradients of what crosses a boundary may depend on; hashable.

    Args:
        shapes: of a micro-batch and of the step.
        index: of the batch.
    """

    shapes: Any
    index: Any = None


@dataclass
class _Fact:
    """What is known of shapes.

    Args:
        value: the last one.
        index: of the batch that it was about.
        times: of how many batches it was the same, one after the other.
        by_index: whether it changed once; each index is known by itself then.
    """

    value: Any
    index: Any
    times: int = 1
    by_index: bool = False


class Known:
    """What follows from a signature, and until it is clear that it does, from the batch's index as well."""

    def __init__(self) -> None:
        self._facts: OrderedDict[Any, _Fact] = OrderedDict()

    def recall(self, signature: Signature | None) -> Any:
        """What is known of it; None where it has to be found out."""
        if signature is None:
            return None
        for key in (signature, signature.shapes):
            fact = self._facts.get(key)
            if fact is not None and (fact.index == signature.index or (fact.times >= TRIALS and not fact.by_index)):
                self._facts.move_to_end(key)
                return fact.value
        return None

    def remember(self, signature: Signature | None, value: Any) -> None:
        """What was found out."""
        if signature is None:
            return
        fact = self._facts.get(signature.shapes)
        if fact is None:
            self._facts[signature.shapes] = _Fact(value, signature.index)
        elif fact.by_index or fact.value != value:
            fact.by_index = True
            self._facts[signature] = _Fact(value, signature.index)
        else:
            fact.index, fact.times = signature.index, fact.times + 1
        while len(self._facts) > KEPT:
            self._facts.popitem(last=False)


@dataclass(frozen=True)
class Meta:
    """A tensor that crosses a boundary, but for its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class ShapeMessages:
    """One direction over one boundary between two stages, seen from one side.

    Args:
        peer: global rank of the process on the other side.
        group: a gloo group that both are in, used for nothing else between the two: its messages are matched by their order.
        tag: of this relay, as two processes may share several.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        self._peer, self._group, self._tag = peer, group, tag
        self._known = Known()
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def tell(self, signature: Signature | None, word: Any) -> Any:
        """The sender's side: tell the other one about what is to be sent, unless it knows.

        Args:
            signature: of the micro-batch; None where nobody can tell two apart, so that each is told.
            word: anything that can be pickled.

        Returns:
            What the other side takes it for: what was told of this signature before.
        """
        known = self._known.recall(signature)
        if known is not None:
            return known
        message = torch.frombuffer(bytearray(pickle.dumps(word)), dtype=torch.uint8)
        for piece in (torch.tensor([message.numel()]), message):
            work = dist.isend(piece, self._peer, group=self._group, tag=self._tag)
            assert work is not None, "the peer is in the group"
            self._sending.append((work, piece))
        self._known.remember(signature, word)
        return word

    def hear(self, signature: Signature | None) -> Any:
        """The receiver's side: what is about to come. Waits for the other side's word where the signature is new."""
        word = self._known.recall(signature)
        if word is None:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, self._peer, group=self._group, tag=self._tag)
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, self._peer, group=self._group, tag=self._tag)
            word = pickle.loads(message.numpy().tobytes())
            self._known.remember(signature, word)
        return word

    def settle(self) -> None:
        """The schedule is over: what was told has been heard."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def signature_of(batch: Any) -> Any:
    """What shapes can depend on, hashable: those of the batch's tensors, their types, its numbers. None where it holds strange objects."""
    try:
        return _signature(batch)
    except TypeError:
        return None


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.shape, str(value.dtype)
    if isinstance(value, (bool, int)):
        return value
    if value is None or isinstance(value, (str, bytes, float, complex)) or (numpy is not None and isinstance(value, numpy.generic)):
        return type(value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_signature(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_signature(getattr(value, field.name)) for field in fields(value))
    raise TypeError(type(value))


def as_told(told: Sequence[Meta], tensors: Sequence[Tensor]) -> None:
    """Whether tensors are what the receiver takes them for.

    Raises:
        RuntimeError: if an earlier micro-batch of the same signature gave others.
    """
    metas = tuple(map(Meta.of, tensors))
    if metas != told:
        raise RuntimeError(
            f"two batches of the same shapes gave different tensors between two stages: {_words(told)} and {_words(metas)}. "
            "The step's shapes depend on the batch's values, which stages can't know in advance; pad to fixed lengths, or run without "
            'a pipeline (allow=["single", "ddp", "fsdp"])'
        )


def _words(metas: Sequence[Meta]) -> str:
    words = (f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}{'' if meta.requires_grad else ' without grad'}" for meta in metas)
    return ", ".join(words) or "nothing"
