"""One stage of a step: the user's own hook, run from its beginning to the stage's end.

Code of other stages gives absent tensors. Where the stage's own code begins, they are provided with the received tensors; where it ends, a
private exception carries out the tensors that the next stage needs. Knows recordings; nothing of schedules, processes or Lightning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_autopar.exact.absent.absent_tensor import (
    AbsentMode,
    AbsentTensor,
    OverwrittenTensor,
    filled,
    is_absent,
    make_hole,
    name_of,
    provide,
    resolved,
)
from lightning_autopar.exact.absent.rules import recording_absence, set_strict
from lightning_autopar.strategies.pipeline.stages.block_router import BlockResults, Router
from lightning_autopar.strategies.pipeline.stages.cut_tensors import EXTRA, CutTensor, Staging, StepRecording, block_of
from lightning_autopar.strategies.pipeline.stages.tainted_tensors import TaintMode, mark, results_of, updates_metric, written_by


class StageRange:
    """What a stage runs of a hook.

    Attributes:
        low, high: its first block, and the one that isn't its own any more.
        own: the parts that it runs.
        ends: the last part that it or a stage before it runs.
        entering, leaving: what crosses the cuts at its ends.
    """

    def __init__(self, recording: StepRecording, cuts: Sequence[str], stage: int) -> None:
        bounds = recording.bounds(cuts)
        self.recording = recording
        self.stage = stage
        self.first, self.last = stage == 0, stage == len(cuts)
        self.low, self.high = bounds[stage], bounds[stage + 1]
        blocks = [block_of(part, recording.calls) for part in range(len(recording.firsts))]
        self.own = frozenset(
            part for part, block in enumerate(blocks) if (self.first or block >= self.low) and (self.last or block < self.high)
        )
        self.ends = max(part for part, block in enumerate(blocks) if self.last or block < self.high)
        self.entering: tuple[CutTensor, ...] = () if self.first else recording.crossings[recording.blocks[self.low]]
        self.leaving: tuple[CutTensor, ...] = () if self.last else recording.crossings[recording.blocks[self.high]]
        #: Numbers of the tensors that are needed, at the stage's entry or exit.
        self.wanted = frozenset(index for each in (*self.entering, *self.leaving) for index in (each.index, *each.aliases))
        #: Calls that return some of them.
        self.looked_at = frozenset(
            call
            for call, outputs in enumerate(recording.outputs)
            if any(leaf.index in self.wanted for output in outputs for leaf in output.leaves)
        )
        #: Parts outside of blocks where one of them is made: there the step must run as recorded.
        firsts = (*recording.firsts, EXTRA)
        self.checked = frozenset(
            part for part in range(len(recording.firsts)) if any(firsts[part] <= index < firsts[part + 1] for index in self.wanted)
        )
        #: Of each received number, the part that makes it, where stages before this one run again later.
        self.parts = {index: bisect_right(recording.firsts, index) - 1 for index in self.wanted} if recording.runs_again else {}


class StageExit(BaseException):
    """Ends the user's hook where the stage ends; no ``except Exception`` of the user's catches it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.tensors = tensors


class UnlikeRecordedError(RuntimeError):
    """The step runs other code than when it was recorded."""


class StageModule(nn.Module):
    """One stage, as ``torch.distributed.pipelining`` takes it.

    Args:
        module: the user's, its blocks' ``forward`` is replaced on the instance; stages of one module share it.
        call: runs the user's hook of that name on that micro-batch, and returns its result.

    Raises:
        ValueError: if a hook can't be cut there.
    """

    def __init__(self, module: nn.Module, staging: Staging, cuts: Sequence[str], stage: int, call: Callable[[str, int], Any]) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # no submodule: its parameters aren't this module's
        self.stage = stage
        self.stages = len(cuts) + 1
        self.hook = "training_step"
        self.chunk = 0
        self.on_entry: list[Callable[[], None]] = []
        self.on_exit: list[Callable[[], None]] = []
        self.outputs: dict[int, Any] = {}
        self._call = call
        self._router = Router.of(module)
        self._hooks = {name: StageRange(recording, cuts, stage) for name, recording in staging.hooks.items()}
        self._router.add(stage, staging.hooks.values())
        self._run: _Run | None = None

    @property
    def owns_now(self) -> bool:
        """Whether the code that runs now belongs to this stage."""
        return self._run is not None and self._run.owns

    def forward(self, *received: Tensor) -> Any:
        """Run the stage.

        Args:
            received: what crosses its first cut, in the order of the recording.

        Returns:
            The tensors that cross the next cut; in the last stage the loss, zero where the hook has none.

        Raises:
            RuntimeError: if the step runs differently than when it was recorded.
        """
        span = self._hooks.get(self.hook)
        if span is None:
            raise RuntimeError(f"no {self.hook} was recorded, so that none can run in stages")
        run = _Run(span, received, self._router, self.on_entry, self.on_exit)
        self._run = run
        try:
            with self._router.counting(span.recording, self.stage, self.chunk):
                result = run(lambda: self._call(self.hook, self.chunk))
        finally:
            self._run = None
        if not span.last:
            return result[0] if len(result) == 1 else result
        self.outputs[self.chunk] = result
        loss = result.get("loss") if isinstance(result, Mapping) else result
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else torch.zeros((), device=_device(self.__dict__["_module"]))


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


class _Run:
    def __init__(
        self,
        span: StageRange,
        received: tuple[Tensor, ...],
        router: Router,
        on_entry: Sequence[Callable[[], None]],
        on_exit: Sequence[Callable[[], None]],
    ) -> None:
        self._span = span
        self._recording = span.recording
        self._received = received
        self._router = router
        self._on_entry, self._on_exit = on_entry, on_exit
        self.owns = False
        self._written = router.named(span.recording.written)
        self._watch = TaintMode(frozenset(id(buffer) for _, _, buffer in self._written), self._outer_call)
        self._next_call = 0
        self._entered = False
        #: The received tensors, each with the numbers of the absent ones that it hasn't filled yet.
        self._unfilled: list[tuple[CutTensor, Tensor, list[int]]] = []
        self._part = 0
        self._index = 0
        self._inside = False
        self._ran: set[str] = set()
        self._found: dict[int, Tensor] = {}
        self._exited: tuple[Tensor, ...] | None = None

    def __call__(self, step: Callable[[], Any]) -> Any:
        """Returns the hook's result in the last stage, else what the next stage needs."""
        assert self._router.run is None, "a stage runs within another one"
        if len(self._received) != len(self._span.entering):
            raise RuntimeError(
                f"stage {self._span.stage} gets {len(self._received)} tensors, but {len(self._span.entering)} cross its cut as recorded"
            )
        for carried, tensor in zip(self._span.entering, self._received, strict=True):
            self._unfilled.append((carried, tensor, list(carried.aliases or (carried.index,))))
        self._router.run = self
        before = set_strict(False)
        try:
            with recording_absence(self._router.ids), ExitStack() as stack:
                if self._span.first:
                    self._enter()
                stack.enter_context(self._router.around(self._recording.hook, self._hook))
                result = step()
        except StageExit as exit:
            if self._exited is None:
                raise
            return exit.tensors
        finally:
            self._router.run = None
            self.owns = False
            set_strict(before)
            # Code of another stage may have replaced buffers
            for owner, name, buffer in self._written:
                if is_absent(owner._buffers[name]) and not is_absent(buffer):
                    owner._buffers[name] = buffer
            # Break cycles, so that nothing of the run waits for Python's garbage collector.
            self._watch.forget()
            self._found.clear()
            self._unfilled.clear()
            self._received, self._exited = (), None
        if not self._span.last:
            raise RuntimeError(
                f"the {self._recording.hook} ended before the block {self._recording.blocks[self._span.high]!r} ran, with which the next "
                "stage begins; it ran when the step was recorded"
            )
        if not self._entered:
            raise RuntimeError(
                f"the {self._recording.hook} ended before the block {self._recording.blocks[self._span.low]!r} ran, with which the stage "
                "begins; it ran when the step was recorded"
            )
        result = _returned(result)
        for hook in self._on_exit:
            hook()
        return result

    def _hook(self, hook: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's hook, which is watched; making the batch isn't."""
        with self._watch.watching(self._router.opaque):
            return hook(*args, **kwargs)

    # -- code outside of blocks ----------------------------------------------------------------------------------------------------------

    def _outer_call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A tainted call; if another stage owns it, run only for the shapes of its result."""
        if self._recording.at_first and self._expected() == -1 and self._begins_again(args, kwargs):
            self._begin_call()
            self._begin_part(self._part + 1)
        target = written_by(name, args, kwargs)
        if self.owns:
            result = func(*args, **kwargs)
        elif updates_metric(name):
            return None
        else:
            # What a block of another stage gives has no graph here, and torch forbids writing to it as to a parameter.
            with AbsentMode(), torch.set_grad_enabled(torch.is_grad_enabled() and not (target is not None and _is_root(target))):
                result = func(*args, **kwargs)
            if target is not None:  # __setitem__ writes to a view of it
                make_hole(target, f"what {name!r} writes {self._where()}")
        self._number(name, results_of(name, result, target, args, self._watch.tainted), target)
        return result

    def _number(self, name: str, results: list[Tensor], target: Tensor | None) -> None:
        operations = self._recording.operations[self._part]
        first = self._recording.firsts[self._part]
        for tensor in results:
            place = self._index - first
            if self._part in self._span.checked and (place >= len(operations) or operations[place] != name):
                recorded = repr(operations[place]) if place < len(operations) else "nothing more"
                raise UnlikeRecordedError(
                    f"{self._where()} the step calls {name!r} where it called {recorded} when it was recorded, so that it can't be told "
                    "which of its tensors another stage needs; the code must not depend on the data there"
                )
            self._keep(self._index, tensor)
            self._index += 1
        if target is not None and target._base is not None:
            mark(target._base)

    def _expected(self) -> int | None:
        """The index of the block that is called next, None for no other; see :class:`.cut_tensors.StepRecording`."""
        calls = self._recording.calls
        return calls[self._next_call] if self._next_call < len(calls) else None

    def _begins_again(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is of the code before the first block, as the recorder finds out."""
        used = [id(tensor) for tensor in self._watch.alone(args, kwargs)]
        return bool(used) and any(id(self._router.parameter(name)) in used for name in self._recording.at_first)

    def _keep(self, index: int, tensor: Tensor) -> None:
        mark(tensor)
        if index in self._span.wanted:
            self._found[index] = tensor

    def _where(self) -> str:
        blocks, calls = self._recording.blocks, self._recording.calls
        after = self._part // 2
        return f"before the block {blocks[max(0, calls[after])]!r}" if after < len(calls) else "after the last block"

    # -- blocks --------------------------------------------------------------------------------------------------------------------------

    def block(self, fqn: str, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called."""
        recording, span, call = self._recording, self._span, self._next_call
        if self._inside or (fqn in self._ran and not recording.runs_again):  # in another block, or again: as code outside of blocks
            return forward(*args, **kwargs)
        index = self._expected()
        expected = "no other block" if index is None else recording.blocks[index] if index >= 0 else "code before the first block"
        if expected != fqn:
            raise UnlikeRecordedError(f"the {recording.hook} runs the block {fqn!r} where {expected!r} ran when it was recorded")
        self._ran.add(fqn)
        self._begin_call()
        results = BlockResults.of(block, fqn, recording, call)
        if self.owns:
            args, kwargs = resolved(args), resolved(kwargs)
        self._inside = True
        try:
            with self._watch.paused():
                if self.owns:
                    with results.catching():
                        result = forward(*args, **kwargs)
                else:
                    result = results.left_out(forward, args, kwargs)
        finally:
            self._inside = False
        if call in span.looked_at if not self.owns else not span.last:
            for number, tensor in results.numbered(result, args, kwargs):
                self._keep(number, tensor)
        self._begin_part(2 * call + 2)
        return result

    def _begin_call(self) -> None:
        self._check_part()
        self._begin_part(2 * self._next_call + 1)
        self._next_call += 1
        if self._part > self._span.ends:
            self._exit()
        if self._part not in self._span.own:
            self._own(False)
        elif not self.owns:
            self._enter()

    def _begin_part(self, part: int) -> None:
        self._part = part
        self._index = self._recording.firsts[part]

    def _check_part(self) -> None:
        """At the end of a part outside of blocks, check that all needed tensors were made."""
        if self._part in self._span.checked and not (self._span.last and self._part in self._span.own):
            made, recorded = self._index - self._recording.firsts[self._part], len(self._recording.operations[self._part])
            if made != recorded:
                raise UnlikeRecordedError(
                    f"{self._where()} the step makes {made} tensors of the model's where it made {recorded} when it was recorded; the code "
                    "must not depend on the data there"
                )

    def _own(self, owns: bool) -> None:
        """The code that follows is the stage's own, or isn't."""
        self.owns = owns
        set_strict(owns)

    def _enter(self) -> None:
        """The stage's own code begins, for the first time or again: fill absent tensors with what was received."""
        self._fill_all()
        self._own(True)
        if self._entered:
            return
        self._entered = True
        if self._span.last and len(self._span.own) == len(self._recording.firsts) - self._part:
            self._watch.stop()  # no further tensors need numbers
        for hook in self._on_entry:
            hook()

    def _fill_all(self) -> None:
        """Fill the absent tensors that were made so far: all of them, unless stages before this one run again later."""
        for carried, tensor, indices in self._unfilled:
            due = [index for index in indices if index in self._found or self._span.parts.get(index, 0) < self._part]
            self._fill(carried, tensor, due)
            indices[:] = [index for index in indices if index not in due]
        self._unfilled = [each for each in self._unfilled if each[2]]

    def _fill(self, carried: CutTensor, tensor: Tensor, indices: Sequence[int]) -> None:
        if tensor.requires_grad and carried.index in indices:
            tensor.register_hook(_contiguous)
        if carried.written:  # received tensors stay unchanged: autograd forbids writing to them, and another buffer may share them
            tensor = tensor.clone()
        for index in indices:
            absent = self._found.get(index)
            if absent is None:
                raise RuntimeError(f"the tensor {index} that crosses the stage's cut wasn't made {self._where()}")
            if not isinstance(absent, (AbsentTensor, OverwrittenTensor)):
                raise RuntimeError(
                    f"the tensor {index} that crosses the stage's cut doesn't depend on the model here, but did when recorded"
                )
            if tuple(absent.shape) != tuple(tensor.shape) or absent.dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, was received for {name_of(absent)}, which has shape "
                    f"{tuple(absent.shape)}, {absent.dtype}, in this stage"
                )
            provide(absent, tensor)

    def _exit(self) -> None:
        """The stage's own code ends: return the tensors for the next stage."""
        self._fill_all()
        tensors = []
        for carried in self._span.leaving:
            tensor = self._found.get(carried.index)
            if tensor is None:
                raise RuntimeError(f"the tensor {carried.index} that the next stage needs wasn't made")
            tensor = filled(tensor)
            if is_absent(tensor):
                raise RuntimeError(f"the next stage needs {name_of(tensor)}, which isn't here")
            tensor = tensor.contiguous()
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(_contiguous)
            tensors.append(tensor)
        self._own(False)
        for hook in self._on_exit:
            hook()
        self._exited = tuple(tensors)
        raise StageExit(self._exited)


def _is_root(tensor: Tensor) -> bool:
    """Whether it is where a graph begins, or a view of it."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _contiguous(gradient: Tensor) -> Tensor:
    """A contiguous gradient: gradients are sent as they lie in memory, without gaps."""
    return gradient.contiguous()


def _returned(value: Any) -> Any:
    """Check that the hook's result has no absent tensors."""

    def check(leaf: Any) -> Any:
        leaf = filled(leaf)
        if is_absent(leaf):
            raise RuntimeError(f"the step returns {name_of(leaf)}, which another stage has")
        return leaf

    return tree_map(check, value)
