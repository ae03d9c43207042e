"""Random draws of a split batch: each rank draws for the whole batch and keeps its own rows.

Dropout, a VAE's noise, random masks and diffusion steps would otherwise differ from those of one device. Every rank's generator starts a
step in the same state, makes the draws that one device would make, and so ends it in the same state too.

Knows shapes, generators and a batch's share. It doesn't know which operators draw (``drawing_operators`` does), nor modules, trainers or
processes.

On a GPU most of a large draw can be left out, as ``rows_of_gpu_draws`` says: the rank's rows are drawn by themselves, the same numbers.

What can't be reproduced is listed in :attr:`GlobalDraws.unreproducible`: dropout inside fused attention, rejection sampling (gamma,
Poisson), a permutation over the samples. Not seen at all are cuDNN's recurrent dropout and the draws of compiled graphs (inductor has
generators of its own). Draws of Python's ``random`` and of NumPy are the same on all ranks: right for a choice made once a batch, while one
made for each sample repeats on every rank.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from lightning_autopar.exact.data.rank_share import BatchShare, index_of

_LOG = logging.getLogger(__name__)
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The dimension of a draw that runs over the batch's samples.

    Args:
        dim: which dimension; its size is a multiple of the number of samples.
        groups_first: the order of samples in it when the multiple is k > 1: False, as (samples, k), like attention heads; True, as (k,
            samples), like two views of the batch concatenated.
        order: the whole draw's dimensions from the slowest to the fastest in memory, since generators fill memory in that order; empty
            where unknown.
        gaps: whether the whole draw is a view with gaps in memory, for which generators use another path.
    """

    dim: int
    groups_first: bool = False
    order: tuple[int, ...] = ()
    gaps: bool = False


#: How a rank makes one draw: as a part of the whole batch's (Rows), as one device would (None), or alone ("own") where the whole batch's
#: isn't known.
Choice: TypeAlias = Rows | Literal["own"] | None


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One random draw of a step: the operator, the shape that it had for ``DrawPlan.batch_size`` samples, and how ranks make it."""

    op: str
    shape: tuple[int, ...]
    choice: Choice

    def shape_for(self, samples: int, batch_size: int) -> tuple[int, ...]:
        """Its shape for another number of samples."""
        if not isinstance(self.choice, Rows):
            return self.shape
        dim = self.choice.dim
        return (*self.shape[:dim], self.shape[dim] // batch_size * samples, *self.shape[dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class DrawPlan:
    """A step's random draws in order, as the probe found them.

    Args:
        draws: in the order in which the step's forward makes them; None where it is unknown.
        batch_size: samples in the batch that was probed.
        seeded: whether the whole batch's draws can't be known from a part of it, as shapes depend on the data (padding to the longest
            sample, routing). Each rank then draws alone, from generators that are seeded alike and so stay in step.
    """

    draws: tuple[Draw, ...] | None = None
    batch_size: int = 0
    seeded: bool = False


class GlobalDraws:
    """Makes the random draws of a split batch those of the whole batch, while installed and while there is a share.

    Works below autograd and in every thread, on the operators that generate numbers; it doesn't matter how the user's code calls them (a
    function's module-level name, a C++ composite such as attention's dropout, recomputation in backward). A draw costs some 50 µs more and,
    for a moment, the memory of the whole batch's draw. Where ``share`` gives None, draws aren't changed.

    Args:
        share: the rank's share of the current batch, None outside the user's step and where the batch isn't split.
        plan: the step's draws as the probe found them. Without it, a draw is assumed to run over the samples if its dimension 0 is
            divisible by their number; see :func:`guess`.
    """

    def __init__(self, share: Callable[[], BatchShare | None], plan: DrawPlan | None = None) -> None:
        self._share = share
        self._plan = plan or DrawPlan()
        #: Names of draws that weren't those of one device.
        self.unreproducible: set[str] = set()
        #: Called with a generator that a draw uses instead of the default one.
        self.on_generator: Callable[[torch.Generator], None] = _ignore
        #: The step's place in the plan: the next draw is the one there.
        self.place = 0
        #: Whether the step has drawn something, or goes on from somewhere else than its beginning.
        self.moved = False
        self._paused = False
        self._warned = False
        self._chosen: dict[tuple[object, ...], Choice] = {}
        self._places: dict[int, dict[tuple[str, tuple[int, ...]], list[int]]] = {}
        self._uninstall: Callable[[], None] | None = None

    def __enter__(self) -> GlobalDraws:
        """Replace the random operators' kernels in this process; one instance at a time."""
        from lightning_autopar.exact.random.drawing_operators import override

        assert self._uninstall is None, "already installed"
        self._uninstall = override(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the operators' own kernels back."""
        if self._uninstall is not None:
            self._uninstall()
            self._uninstall = None

    def begin(self, place: int = 0) -> None:
        """A forward of the step, or of a part of it, begins: the next draw is the one at this place of the plan."""
        self.go_on({}, place)

    def go_on(self, chosen: dict[tuple[object, ...], Choice], place: int) -> None:
        """Another part's forward or backward begins, or goes on.

        Args:
            chosen: the decisions on the part's draws, which its backward may need; new ones are added.
            place: the next draw is the one at this place of the plan.
        """
        self.place, self._chosen, self.moved = place, chosen, place > 0 or bool(chosen)

    def fingerprint(self) -> int:
        """A number that is the same on all ranks as long as their generators are in step (63 bits)."""
        states = [zlib.crc32(torch.get_rng_state().numpy().tobytes())]
        if cast(Any, torch.cuda).is_initialized():
            cuda = default_generator(torch.device("cuda"))
            states += [cuda.initial_seed(), cuda.get_offset()]
        return _mix(*states) >> 1

    # -- for drawing_operators and the probe ----------------------------------------------------------------------------------------------

    @property
    def share(self) -> BatchShare | None:
        """The share to draw for; None where draws aren't changed."""
        return None if self._paused else self._share()

    @property
    def seeded(self) -> bool:
        """Whether each rank draws alone. A rank that has the whole batch draws as one device does, whatever is known of the draws."""
        share = self._share()
        return self._plan.seeded and not (share is not None and share.whole)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, draws aren't changed."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def rows_for(self, op: str, tensor: Tensor, generator: torch.Generator | None, shape: tuple[int, ...] | None = None) -> Choice:
        """How this rank makes a draw into ``tensor`` (of ``shape``, where that isn't the tensor's own)."""
        shape = tuple(tensor.shape) if shape is None else shape
        share = self._share()
        assert share is not None
        if generator is not None:
            self.on_generator(generator)
        if share.whole:
            return None
        samples = max(share.rows, 1)
        if self._plan.draws is None:
            return guess(op, shape, samples)
        by_shape = (op, shape)
        by_state = (op, shape, state_of(generator or default_generator(tensor.device)))
        if torch._C._current_graph_task_id() != -1:
            # Recomputation in backward draws in another order. The checkpoint restores the generator's state, which tells draws of one
            # shape apart.
            for key in (by_state, by_shape):
                if key in self._chosen:
                    return self._chosen[key]
            found = self._find(op, shape, samples)
        else:
            found = self._find(op, shape, samples)
            if found is not None:
                self.place = found + 1
        if found is None:
            self._check_rows(op, shape, samples)
            choice = guess(op, shape, samples)
            self._warn(op, shape, choice)
        else:
            choice = self._plan.draws[found].choice
        self._chosen[by_shape] = self._chosen[by_state] = choice
        self.moved = True
        return choice

    @contextmanager
    def with_own_generator(self, device: torch.device, generator: torch.Generator | None, *, own: bool) -> Iterator[None]:
        """While open, draw from a seed, so that the generator advances equally on every rank, however much is drawn.

        Args:
            device: where the draw is made.
            generator: the one that was asked for, None for the default one.
            own: whether each rank gets another seed.
        """
        share = self._share()
        assert share is not None
        base = generator or default_generator(device)
        if base.device.type == "cuda":
            seed = _mix(base.initial_seed(), base.get_offset())  # read on the host: no synchronisation
            base.set_offset(base.get_offset() + 4)
        else:
            with self.paused():
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=base))
        after = base.get_state()
        base.manual_seed(_mix(seed, share.rank + 1 if own else 0) >> 1)
        try:
            yield
        finally:
            base.set_state(after)

    def _find(self, op: str, shape: tuple[int, ...], samples: int) -> int | None:
        """The index of this draw in the plan: the next one if it matches, else an equal one, else one of its kind."""
        draws, size = self._plan.draws, self._plan.batch_size
        assert draws is not None
        places = self._places.get(samples)
        if places is None:
            places = self._places[samples] = {}
            for index, draw in enumerate(draws):
                places.setdefault((draw.op, draw.shape_for(samples, size)), []).append(index)
        if equal := places.get((op, shape)):
            return equal[bisect.bisect_left(equal, self.place) % len(equal)]
        for index in itertools.chain(range(self.place, len(draws)), range(self.place)):
            draw = draws[index]
            if draw.op != op or len(draw.shape) != len(shape):
                continue
            if not isinstance(draw.choice, Rows) or shape[draw.choice.dim] % samples == 0:
                return index
        return None

    def _check_rows(self, op: str, shape: tuple[int, ...], samples: int) -> None:
        """Raise where a draw that ran over the samples no longer does: its rows may be nodes, say, that were evenly divided by chance."""
        for draw in self._plan.draws or ():
            if draw.op != op or len(draw.shape) != len(shape) or not isinstance(draw.choice, Rows):
                continue
            dim = draw.choice.dim
            if (*shape[:dim], *shape[dim + 1 :]) == (*draw.shape[:dim], *draw.shape[dim + 1 :]) and shape[dim] % samples:
                had = f"{draw.shape[dim]} rows for {self._plan.batch_size} samples"
                raise RuntimeError(
                    f"a random draw ({op}) had {had} in what planning looked at, and now has {shape[dim]} for {samples}: it isn't over "
                    "samples, so a part of a batch can't draw what one device would; run on one device "
                    '(allow=["single"]), or let each device draw its own (batch=Batch(draws="per-rank"))'
                )

    def _warn(self, op: str, shape: tuple[int, ...], choice: Choice) -> None:
        if not self._warned:
            self._warned = True
            how = f"as rows of the batch along dimension {choice.dim}" if isinstance(choice, Rows) else "as one draw for all ranks"
            _LOG.warning("a random draw (%s of shape %s) wasn't among those of the probed step; it is made %s", op, shape, how)


def _ignore(generator: torch.Generator) -> None:
    """Do nothing: on one device, and on ranks that all do the same, a user's generator works like torch's."""


def guess(op: str, shape: tuple[int, ...], samples: int) -> Choice:
    """How to make a draw of which only the shape is known, on a rank with ``samples`` samples.

    With two or more samples, dimension 0 runs over them if it is divisible by their number. With one sample, everything is divisible: then
    dimension 0 does if its size is 1, or if the draw looks like a dropout mask of activations. A permutation does if it is one of exactly
    the samples.
    """
    if not shape or shape[0] == 0 or (op == "_sample_dirichlet" and len(shape) == 1):  # whose last dimension is that of one draw
        return None
    if op == "randperm":
        return Rows(dim=0) if shape[0] == samples > 1 else None
    if samples > 1:
        return Rows(dim=0) if shape[0] % samples == 0 else None
    return Rows(dim=0) if shape[0] == 1 or (op == "bernoulli_" and len(shape) > 1) else None


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's dimensions from the slowest to the fastest in memory."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


def has_gaps(tensor: Tensor) -> bool:
    """Whether the tensor is a view that leaves parts of its memory out."""
    dense = _strides(tensor.shape, memory_order(tensor))
    return any(size > 1 and stride != want for size, stride, want in zip(tensor.shape, tensor.stride(), dense, strict=True))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that an operator on ``device`` uses if it is given none."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def state_of(generator: torch.Generator) -> int:
    """A number that tells a generator's states apart, in this process."""
    if generator.device.type == "cuda":
        return hash((generator.initial_seed(), generator.get_offset()))
    return hash(generator.get_state().numpy().tobytes())


def whole_like(part: Tensor, rows: Rows, share: BatchShare, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor for the whole batch's draw, laid out in memory as one device's would be, given the rank's part of it."""
    shape = list(part.shape)
    shape[rows.dim] = shape[rows.dim] // max(share.rows, 1) * share.of
    order, gaps = memory_order(part), has_gaps(part)
    if rows.order and part.shape[rows.dim] == 1:  # the place of a dimension of size 1 doesn't matter
        order, gaps = rows.order, rows.gaps
    return torch.empty_strided(shape, _strides(shape, order, 2 if gaps else 1), dtype=dtype or part.dtype, device=part.device)


def pick_rows(whole: Tensor, part: Tensor, rows: Rows, share: BatchShare) -> None:
    """Copy the rank's rows of the whole batch's draw into ``part``: those of sample 0 where it has none."""
    place, own = rows.dim + rows.groups_first, share.indices
    samples, target = _split(whole, rows, share.of), _split(part, rows, max(share.rows, 1))
    if isinstance(own, range):
        target.copy_(_sliced(samples, place, own))
    else:
        target.copy_(samples.index_select(place, index_of(own, whole.device)))


def scatter_rows(part: Tensor, whole: Tensor, rows: Rows, share: BatchShare) -> None:
    """The reverse of :func:`pick_rows`."""
    place, own = rows.dim + rows.groups_first, share.indices
    target, samples = _split(whole, rows, share.of), _split(part, rows, max(share.rows, 1))
    if isinstance(own, range):
        _sliced(target, place, own).copy_(samples)
    else:
        target.index_copy_(place, index_of(own, whole.device), samples.to(whole.dtype))


def _sliced(tensor: Tensor, dim: int, own: range) -> Tensor:
    """A view."""
    return tensor[(slice(None),) * dim + (slice(own.start, own.stop, own.step),)]


def _split(tensor: Tensor, rows: Rows, samples: int) -> Tensor:
    """The view with samples in a dimension of their own: ``rows.dim``, or the one after it where groups come first."""
    shape = tuple(tensor.shape)
    each = shape[rows.dim] // samples
    both = (each, samples) if rows.groups_first else (samples, each)
    return tensor.view(*shape[: rows.dim], *both, *shape[rows.dim + 1 :])


def _strides(shape: Sequence[int], order: Sequence[int], gap: int = 1) -> list[int]:
    strides, step = [0] * len(shape), gap
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


def _mix(*values: int) -> int:
    """Well-mixed 64 bits of some integers (SplitMix64's finaliser)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
