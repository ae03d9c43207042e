"""What stages tell each other besides tensors: the shapes that the next one is about to receive, whether all have the same batch, and
whether gradients overflowed under half precision's loss scale. A message about shapes is sent once for each kind of micro-batch.

To receive a tensor a stage needs a buffer of its shape. Shapes change with sequence lengths and short last batches, and only the sender
knows them. All stages see the batch's *signature*, from which the shapes follow. When a signature comes up for the first time, the message
precedes the tensors; from then on both sides remember it. A step may also depend on the batch's index (two networks that train in turns),
so a signature's message is repeated for a few batches until it is clear that it doesn't change.

Every rank of a pipeline loads its batches itself. A dataset that draws from generators which nobody else knows of (NumPy's
``default_rng()``, the system's entropy) would give each rank another crop or mask, and the step would silently combine one stage's inputs
with another stage's targets. Knows tensors, batches, a process group and a GradScaler; no schedule and no module.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

#: After so many batches with equal shapes, the batch's index doesn't matter.
TRIALS = 4
#: How many signatures are remembered. Both sides of a boundary see the same ones in the same order, and so forget the same ones.
KEPT = 512


@dataclass(frozen=True)
class Signature:
    """Everything on which the shapes and gradients at a boundary may depend; hashable.

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
        index: of the batch that it was about.
        times: of how many batches it was the same, one after the other.
        by_index: whether it changed once; each index is known by itself then.
    """

    value: Any
    index: Any
    times: int = 1
    by_index: bool = False


class Known:
    """What is known for a signature; until it is clear that it depends on nothing else, for a signature and the batch's index."""

    def __init__(self) -> None:
        self._facts: OrderedDict[Any, _Fact] = OrderedDict()

    def recall(self, signature: Signature | None) -> Any:
        """What is known for a signature; None where nothing is."""
        if signature is None:
            return None
        for key in (signature, signature.shapes):
            fact = self._facts.get(key)
            if fact is not None and (fact.index == signature.index or (fact.times >= TRIALS and not fact.by_index)):
                self._facts.move_to_end(key)
                return fact.value
        return None

    def remember(self, signature: Signature | None, value: Any) -> None:
        """Remember what was found out."""
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
    """A tensor that crosses a boundary, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """The description of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class ShapeMessages:
    """The messages about shapes in one direction over one boundary between two stages, on one side.

    Args:
        peer: global rank of the process on the other side.
        group: a gloo group that both are in, used for nothing else between the two: its messages are matched by their order.
        tag: of these messages, as two processes may share several boundaries.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        self._peer, self._group, self._tag = peer, group, tag
        self._known = Known()
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def tell(self, signature: Signature | None, word: Any) -> Any:
        """The sender's side: tell the receiver the shapes to come, unless it knows them.

        Args:
            signature: of the micro-batch; None where two can't be told apart, so that each is told.
            word: anything that can be pickled.

        Returns:
            What the receiver assumes: the last word about this signature.
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
        """The receiver's side: the shapes to come. Waits for the sender's message where the signature is new."""
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
        """The schedule is over: all messages have arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def signature_of(batch: Any) -> Any:
    """What shapes can depend on, hashable: shapes and types of the batch's tensors, and its numbers. None where it has other objects."""
    try:
        return _signature(batch)
    except TypeError:
        return None


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, numpy.ndarray):
        return value.shape, str(value.dtype)
    if isinstance(value, (bool, int)):
        return value
    if value is None or isinstance(value, (str, bytes, float, complex, numpy.generic)):
        return type(value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_signature(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_signature(getattr(value, field.name)) for field in fields(value))
    raise TypeError(type(value))


def as_told(told: Sequence[Meta], tensors: Sequence[Tensor]) -> None:
    """Check that tensors are what the receiver assumes.

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


class SameBatch:
    """Compares a batch's fingerprint over the ranks of a pipeline.

    Args:
        group: a gloo group of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pair: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, number: int) -> None:
        """A step begins; doesn't wait."""
        self._pair = torch.tensor([number, -number])
        self._work = dist.all_reduce(self._pair, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """The step is over.

        Raises:
            RuntimeError: if the ranks had different batches.
        """
        pair, work = self._pair, self._work
        if pair is None or work is None:
            return
        self._pair = self._work = None
        work.wait()
        if int(pair[0]) != -int(pair[1]):
            raise RuntimeError(
                "the stages of the pipeline were given different batches: the dataset, its transforms or the collate function draw from a "
                "generator of their own, which differs from process to process (as numpy.random.default_rng() without a seed does). Draw "
                "from torch's, NumPy's or Python's global generators, seed the generator by the sample's index, or run without a pipeline "
                '(allow=["single", "ddp", "fsdp"])'
            )


def agree_on_overflow(
    scaler: Any, device: torch.device, *, hidden: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """Make a GradScaler skip a step, and lower its scale, on all ranks if one finds an infinite gradient; returns what undoes it. Each rank
    looks at its own stages' gradients; if one rank skips a step that another takes, their weights diverge. A rank without gradients, whose
    parameters are frozen, has no answer, which torch reports as an error. Both of the scaler's ways to the answer, its own unscaling and
    that of fused optimizers, use ``_unscale_grads_`` (torch 2.13, ``torch/amp/grad_scaler.py``).

    Args:
        scaler: a ``torch.amp.GradScaler``.
        device: where this rank's gradients are.
        hidden: makes a context in which parameters of other ranks have no gradients.
    """
    original = scaler._unscale_grads_

    def unscale(*args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with hidden():
            found: dict[torch.device, torch.Tensor] = original(*args, **kwargs)
        if not found:
            found = {device: torch.zeros(1, device=device)}
        for overflowed in found.values():
            dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale

    def undo() -> None:
        del scaler._unscale_grads_

    return undo
