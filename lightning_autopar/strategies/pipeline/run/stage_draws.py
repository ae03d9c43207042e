"""Random draws of a batch that runs in stages: each stage begins where the one before it ended, whatever the schedule.

One device draws for the whole batch, block after block. A stage draws for its blocks alone, once a micro-batch and interleaved with other
micro-batches and with backward. So each stage is told once a batch, by a message beside the first micro-batch's activations, in which state
the generators were when the stage before it had ended; it enters every micro-batch with that state, and each draws for the whole batch and
keeps its own rows (``whole_batch_draws.GlobalDraws``). The last stage's end is the state in which all ranks leave
the batch. What was drawn needn't be known for it, only that all micro-batches draw as often.

Python's and NumPy's generators are replayed instead: every stage runs the step's outer code from its beginning. They begin a batch as they
are on the first stage's rank, which says so in the first batch, and from then on if steps draw from them.

Knows generators, shares and a process group; nothing of schedules, modules or activations.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws, default_generator
from lightning_autopar.strategies.pipeline.stages.stage_module import StageModule

_LOG = logging.getLogger(__name__)
#: The tag of stage 0's messages, different from those of other messages between the same ranks.
_TAG = 1 << 20
_TAG_OF_START = _TAG - 1
#: A message's fields: the place in the plan of draws, hashes of Python's and NumPy's states (now, and at the batch's beginning), and the
#: bytes that follow in another message.
_NUMBERS = 4
#: The room for Python's and NumPy's pickled states, which take some 6 KB.
_ROOM = 1 << 14


@dataclass(frozen=True, kw_only=True)
class _State:
    """Where generators are at a cut.

    Args:
        generators: torch's, the CPU's and the device's, one after the other.
        place: in the plan of draws.
        python: Python's and NumPy's, in short.
        began: the same as the batch began.
    """

    generators: Tensor
    place: int
    python: int
    began: int

    @property
    def moved(self) -> bool:
        """Whether the step has drawn from Python's or NumPy's generators."""
        return self.python != self.began


class StageDraws:
    """Makes the random draws of a batch that runs in stages those of one device.

    Draws that can't be reproduced on a split batch (:attr:`.GlobalDraws.unreproducible`, a plan that is ``seeded``), each micro-batch makes
    by itself, as under any plan that splits batches; the generators stay in step. Draws from a user's own generator are refused. Python's
    and NumPy's generators, whose draws don't belong to samples, give every stage and micro-batch what they give one device.

    Args:
        draws: makes draws those of the whole batch; None where the step draws nothing from torch.
        ranks: of this rank's replica: the rank that runs each stage.
        group: of all ranks, for tensors on the host; None where the default group can take those.
    """

    def __init__(
        self, draws: GlobalDraws | None, *, ranks: Sequence[int], device: torch.device | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._draws = draws
        self._ranks = tuple(ranks)
        self._group = group
        self._generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            self._generators.append(default_generator(device))
        self._share: BatchShare | None = None
        self._parts = 1
        #: The share for which a draw is made now.
        self.share: BatchShare | None = None
        #: Python's and NumPy's generators when the batch began; whether steps draw from them, None before the first step.
        self._start: rng.RngState = {}
        self._draws_python: bool | None = None
        self._arrived = False
        self._began: _State | None = None
        #: For each stage of this rank, its state at the batch's first micro-batch.
        self._entered: dict[int, _State] = {}
        self._left: dict[int, _State] = {}
        self._end: tuple[_State, rng.RngState] | None = None
        self._choices: dict[int, dict[Any, Any]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._warned = False
        if draws is not None:
            draws.on_generator = self._refuse

    def adopt(self, stage: StageModule, index: int) -> None:
        """Add one of this rank's stages.

        Args:
            stage: tells when its own code begins and ends.
        """
        stage.on_entry.append(lambda: self._enter(index))
        stage.on_exit.append(lambda: self._leave(index))

    def arrive(self, share: BatchShare | None) -> None:
        """A batch is about to be transferred: the draws of the module's hooks on it come before the step's draws.

        Args:
            share: the replica's of the batch; None where draws stay as they are.
        """
        self.share, self._arrived = share, True
        if self._draws is not None:
            self._draws.begin()

    def begin(self, share: BatchShare | None, parts: int) -> None:
        """A batch's step begins.

        Args:
            parts: into how many micro-batches it is split.
        """
        if not self._arrived:
            self.arrive(share)
        self.share, self._arrived = None, False
        self._share, self._parts = share, parts
        if self._draws_python is not False:
            self._agree_on_start()
        self._start = python_states()
        python = in_short(self._start)
        self._began = _State(generators=self._captured(), place=self._place, python=python, began=python)
        self._entered.clear()
        self._left.clear()
        self._choices.clear()
        self._end = None

    @contextmanager
    def forward(self, chunk: int, stage: int | None = None) -> Iterator[None]:
        """The context of a stage's forward on a micro-batch.

        Args:
            stage: which stage. Code before its own doesn't draw, but may save the generators' state: checkpointing saves it before a block
                begins, where the stage's own code may begin.
        """
        assert self._began is not None
        assert stage is not None
        if self._left and (self._draws_python is not False or any(state.moved for state in self._left.values())):
            rng.restore(self._start, {})
        self._take_up(chunk)
        if self._draws is not None:
            self._draws.go_on(self._choices[chunk], self._began.place)
        self._restore(self._entry(stage))
        try:
            yield
        finally:
            self.share = None

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """The context of a stage's backward on a micro-batch: recomputation repeats the forward's draws.

        Raises:
            RuntimeError: if backward draws anything else, which one device would draw after the whole batch's forward.
        """
        self._take_up(chunk)
        before = self._captured()
        if self._draws is not None:
            self._draws.go_on(self._choices[chunk], self._draws.place)
        try:
            yield
        finally:
            self.share = None
        if not torch.equal(before, self._captured()):
            raise RuntimeError(
                "the step draws random numbers in backward, which stages can't do in one device's order; keep checkpoint()'s "
                "preserve_rng_state, or run without a pipeline (allow=['single', 'ddp', 'fsdp'])"
            )

    def finish(self) -> None:
        """The batch is over: set all generators to where one device's would be. Every rank of the replica calls this."""
        assert self._began is not None
        last = len(self._ranks) - 1
        if self._end is None:
            self._end = self._receive(last, at_end=True)
        state, python = self._end
        self._draws_python = bool(self._draws_python or state.moved)
        self._restore(state)
        rng.restore(python or self._start, {})
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._choices.clear()
        self._end = self._began = None

    # -- a stage's own code ----------------------------------------------------------------------------------------------------------------

    def _enter(self, stage: int) -> None:
        assert self._began is not None
        state = self._entry(stage)
        if stage not in self._left:  # for the first micro-batch
            own = in_short(python_states())
            if (state.moved or own != self._began.python) and (state.began, state.python) != (self._began.python, own):
                raise RuntimeError(
                    f"Python's random or NumPy's isn't in one state on all ranks where stage {stage} of a pipeline begins: a block before "
                    "it draws from them, which later stages skip, or draws outside of steps are made on some ranks only. Draw with torch "
                    "there, or run without a pipeline (allow=['single', 'ddp', 'fsdp'])"
                )
        self._restore(state)

    def _entry(self, stage: int) -> _State:
        """Where the generators are when a stage's own code begins; the stage before has sent it by then."""
        assert self._began is not None
        if stage not in self._entered:
            if stage == 0:
                self._entered[stage] = self._began
            elif self._ranks[stage - 1] == self._ranks[stage]:
                self._entered[stage] = self._left[stage - 1]
            else:
                self._entered[stage] = self._receive(stage - 1)[0]
        return self._entered[stage]

    def _leave(self, stage: int) -> None:
        assert self._began is not None
        generators, left = self._captured(), self._left.get(stage)
        if left is not None:
            if not self._warned and not torch.equal(left.generators, generators):
                self._warned = True
                _LOG.warning("micro-batches of one batch draw unequally many random numbers: they aren't one device's")
            return
        python = python_states()
        state = _State(generators=generators, place=self._place, python=in_short(python), began=self._began.python)
        self._left[stage] = state
        if stage + 1 < len(self._ranks):
            if self._ranks[stage + 1] != self._ranks[stage]:
                self._send(stage, state, {}, {self._ranks[stage + 1]})
            return
        self._end = state, python if state.moved else {}
        self._send(stage, *self._end, set(self._ranks) - {self._ranks[stage]})

    def _take_up(self, chunk: int) -> None:
        self._choices.setdefault(chunk, {})
        self.share = None if self._share is None else self._share.part(chunk, self._parts)

    def _refuse(self, generator: torch.Generator) -> None:
        """Refuse draws from a user's generator: each rank has a copy, and advances it only for its own stages."""
        if self.share is not None and generator not in self._generators:
            raise RuntimeError(
                "the step draws from a torch.Generator of its own, which a pipeline's stages can't keep in step; draw from torch's default "
                "one, or run without a pipeline (allow=['single', 'ddp', 'fsdp'])"
            )

    def _agree_on_start(self) -> None:
        """Give all ranks of the replica the states of Python's and NumPy's generators of the first stage's rank."""
        first, others = self._ranks[0], sorted(set(self._ranks) - {self._ranks[0]})
        if dist.get_rank() == first:
            states = pickle.dumps(python_states())
            message = torch.frombuffer(bytearray(len(states).to_bytes(8, "little") + states), dtype=torch.uint8)
            padded = torch.zeros(_ROOM, dtype=torch.uint8)
            padded[: len(message)] = message
            self._sent += [(dist.isend(padded, rank, group=self._group, tag=_TAG_OF_START), padded) for rank in others]
        else:
            padded = torch.empty(_ROOM, dtype=torch.uint8)
            dist.recv(padded, first, group=self._group, tag=_TAG_OF_START)
            states = padded.numpy().tobytes()
            rng.restore(pickle.loads(states[8 : 8 + int.from_bytes(states[:8], "little")]), {})

    # -- states ----------------------------------------------------------------------------------------------------------------------------

    def _captured(self) -> Tensor:
        return torch.cat([generator.get_state() for generator in self._generators])

    @property
    def _place(self) -> int:
        return 0 if self._draws is None else self._draws.place

    def _restore(self, state: _State) -> None:
        sizes = [generator.get_state().numel() for generator in self._generators]
        for generator, part in zip(self._generators, state.generators.split(sizes), strict=True):
            generator.set_state(part.clone())
        if self._draws is not None:
            self._draws.place = state.place

    def _send(self, stage: int, state: _State, python: rng.RngState, ranks: set[int]) -> None:
        more = torch.frombuffer(bytearray(pickle.dumps(python)), dtype=torch.uint8) if python else None
        numbers = torch.tensor([state.place, state.python, state.began, 0 if more is None else len(more)], dtype=torch.int64)
        message = torch.cat([numbers.view(torch.uint8), state.generators])
        for rank in sorted(ranks):
            for tensor in (message, more):
                if tensor is not None:
                    self._sent.append((dist.isend(tensor, rank, group=self._group, tag=_TAG + stage), tensor))

    def _receive(self, stage: int, *, at_end: bool = False) -> tuple[_State, rng.RngState]:
        assert self._began is not None
        message = torch.empty(_NUMBERS * 8 + self._began.generators.numel(), dtype=torch.uint8)
        dist.recv(message, self._ranks[stage], group=self._group, tag=_TAG + stage)
        place, python, began, more = message[: _NUMBERS * 8].view(torch.int64).tolist()
        assert at_end or not more
        states: rng.RngState = {}
        if more:
            pickled = torch.empty(more, dtype=torch.uint8)
            dist.recv(pickled, self._ranks[stage], group=self._group, tag=_TAG + stage)
            states = pickle.loads(pickled.numpy().tobytes())
        return _State(generators=message[_NUMBERS * 8 :], place=place, python=python, began=began), states


def python_states() -> rng.RngState:
    """The states of Python's and NumPy's generators."""
    return {name: state for name, state in rng.capture({}, cuda=False).items() if name != "torch"}


def in_short(states: rng.RngState) -> int:
    """A hash of the states of Python's and NumPy's generators, the same in every process (62 bits)."""
    _, words, gauss = states["python"]
    numbers = [hash((words, gauss is None, gauss or 0.0))]
    kind = states["numpy"]
    numbers += [zlib.crc32(kind[1].tobytes()), int(kind[2]), int(kind[3]), hash(float(kind[4]))]
    return hash(tuple(numbers)) >> 2
