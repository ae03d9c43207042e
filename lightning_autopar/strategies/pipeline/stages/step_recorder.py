"""Records a step while it runs once: tainted tensors by number, their uses, blocks' results; and what follows for each cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_autopar.exact.absent.absent_tensor import AbsentMode, AbsentTensor, MissingValue, absent_like
from lightning_autopar.exact.absent.rules import READING
from lightning_autopar.exact.step.users_backward import parameters_behind
from lightning_autopar.memory.work.operations import operation
from lightning_autopar.strategies.pipeline.stages.block_outputs import EscapedOutputs, describe, flattened, places
from lightning_autopar.strategies.pipeline.stages.block_router import computed_from_shapes, find_block, opaque_methods
from lightning_autopar.strategies.pipeline.stages.cut_tensors import EXTRA, CutTensor, Output, StepRecording, block_of
from lightning_autopar.strategies.pipeline.stages.module_state import ModuleState, host_generators
from lightning_autopar.strategies.pipeline.stages.tainted_tensors import (
    Inside,
    TaintMode,
    is_marked,
    mark,
    replaced_forward,
    results_of,
    tensors,
    updates_metric,
    written_by,
)
from lightning_autopar.text import running_line

_DIFFERENTIATING = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
_END = 1 << 30


@dataclass
class _Number:
    """A tainted tensor that code outside of blocks got.

    Args:
        first: the first number of the very same tensor.
        state: whether it is a parameter or a buffer, which stages have and don't send.
        last_use: the last part that uses it.
        uses: all parts that do; only where blocks have several calls.
    """

    part: int
    tensor: Tensor
    first: int
    state: bool
    last_use: int = -1
    uses: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Cut:
    """A place where a step may be cut.

    Args:
        part: the first call of the block with which the stage begins.
        later: of each part, whether this stage or a later one runs it.
        ends: the last part that an earlier stage runs.
    """

    part: int
    later: tuple[bool, ...]
    ends: int


class StepRecorder:
    """Watches one run of a step.

    Args:
        again: whether a block that runs again has several calls; unless it does, the later ones are code outside of blocks.

    Raises:
        ValueError: if there is no block of a name.
    """

    def __init__(self, module: nn.Module, hook: str, blocks: Sequence[str], sources: ModuleState, *, again: bool = False) -> None:
        self._module = module
        self._hook = hook
        self._sources = sources
        self._blocks = {fqn: find_block(module, fqn) for fqn in blocks}
        self._watch = TaintMode(sources.ids, self._outer_call, self.use, self._gradient_read, self._padded)
        self._part = 0
        self._order: list[str] = []
        self._again = again
        self._calls: list[int] = []
        #: Whether a block has run again.
        self.ran_again = False
        #: Parts that draw random numbers from torch's generators; only where blocks have several calls.
        self._drew: list[int] = []
        self._numbers: list[_Number] = []
        self._firsts = [0]
        self._operations: list[list[str]] = [[]]
        self._outputs: list[tuple[Output, ...]] = []
        self._users: dict[str, set[int]] = defaultdict(set)
        #: The memory that is written to in place, and the part that does so.
        self._writes: list[tuple[int, int]] = []
        #: Ranges of parts, each with a reason: no stage begins with a block whose part is above the first and at most the second.
        self._joined: list[tuple[int, int, str]] = []
        self._running: str | None = None
        #: The function outside of blocks that runs, and of each block that such a function ran, why no stage can begin with it.
        self._calling: str | None = None
        self._called: dict[str, str] = {}
        #: Attributes with a tensor of the previous step that this step uses.
        self.kept: set[str] = set()
        #: What leaves a block without being returned: what hooks within it catch, and attributes.
        self._caught: list[list[EscapedOutputs]] = []
        self._extras: dict[int, _Number] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, what runs is recorded."""
        with ExitStack() as stack:
            for fqn, block in self._blocks.items():
                stack.enter_context(replaced_forward(block, self._block(fqn, block.forward)))
            stack.enter_context(self._watch.watching(opaque_methods(self._module)))
            if self._again:
                stack.enter_context(_Draws(lambda: self._drew.append(self._part)))
            began = host_generators() if self._again else None
            yield
            if began is not None and host_generators() != began:
                self.refuse("it draws random numbers from Python's or NumPy's generator, and its blocks run several times")

    def finish(self, result: Any) -> None:
        """The step is over: its last part uses what it returns."""
        self.use(tree_leaves(result))
        for call, index in enumerate(self._calls):
            block = self._blocks[self._order[index]] if index >= 0 else nn.Module()
            for tensor in (*block.parameters(), *block.buffers()):
                for name in self._sources.names(tensor):
                    self._users[name].add(2 * call + 1)
        for metric, method in opaque_methods(self._module):  # what these read isn't watched; all stages have it
            for buffer in metric.buffers(recurse=False) if method == "update" else ():
                for name in self._sources.names(buffer):
                    self._users[name].add(0)

    def use(self, value: Any) -> None:
        """Record that the running part uses these tensors."""
        for tensor in tensors(value):
            number = self._number_of(tensor)
            if number is not None:
                number.last_use = max(number.last_use, self._part)
                if self._again:
                    number.uses.add(self._part)
                continue
            for fqn in self._sources.names(tensor):
                self._users[fqn].add(self._part)
            if (name := getattr(tensor, "_autopar_kept", None)) is not None:
                self.kept.add(name)
                continue
            made: int | None = getattr(tensor, "_autopar_block", None)
            if made is not None and made < self._part:
                self._use_extra(tensor, made)
            elif made is None and self._running is None and tensor.requires_grad and not tensor.is_leaf and not is_marked(tensor):
                own = "asks for gradients of a tensor that isn't a parameter (requires_grad_), to which every stage would add a part"
                hidden = "uses parameters in code that torch doesn't show, such as TorchScript"
                self.refuse(f"the step {hidden if parameters_behind([tensor.grad_fn]) else own}")

    def _use_extra(self, tensor: Tensor, made: int) -> None:
        """A tensor is used that a block made and didn't return: it can cross cuts if a hook or an attribute gave it out."""
        place = next(
            ((caught, leaf) for caught in self._caught[made // 2] for leaf, each in enumerate(caught.flat) if each is tensor),
            None,
        )
        mark(tensor)
        if place is None or self._again:
            fqn = self._order[self._calls[made // 2]]
            self._join(made, _END, f"a tensor that {fqn!r} makes is used after it without having been returned by it")
            return
        caught, leaf = place
        index = caught.numbers.get(leaf)
        if index is None:
            index = caught.numbers[leaf] = EXTRA + len(self._extras)
            self._extras[index] = _Number(made, tensor, index, state=False)
        self._extras[index].last_use = max(self._extras[index].last_use, self._part)

    # -- code outside of blocks ----------------------------------------------------------------------------------------------------------

    def _outer_call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func in _DIFFERENTIATING:
            self.refuse(f"the {self._hook} differentiates by itself ({name})")
            return func(*args, **kwargs)
        if self._again and self._calls and self._calls[-1] >= 0 and self._begins_again(args, kwargs):
            self._calls.append(-1)
            self._caught.append([])
            self._outputs.append(())
            self._next_part()
            self._next_part()
        self.use((args, kwargs))
        if func in READING:
            told = f"code before it reads a value of the model's ({name}{running_line()}), which every later stage would need"
            self._join(self._part, _END, told)
            return func(*args, **kwargs)
        target = written_by(name, args, kwargs)
        self._calling = name
        try:
            shapes = self._without_values(func, name, args, kwargs)
            result = func(*args, **kwargs)
        finally:
            self._calling = None
        if shapes is not None and shapes != _shapes(result):
            self._join(self._part, _END, f"code before it gives tensors whose shapes depend on values ({name})")
        self._number(name, results_of(name, result, target, args, self._watch.tainted), target)
        return result

    def _begins_again(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is of the code before the first block, for another view: an embedding's, say."""
        return any(0 in self._users.get(name, ()) for used in self._watch.alone(args, kwargs) for name in self._sources.names(used))

    def _gradient_read(self) -> None:
        """In the recording there is no gradient yet. In the run there is one from the second step on, in one of the stages."""
        self.refuse(
            f"the {self._hook} asks for a parameter's gradient, as module.to() and module.zero_grad() do, which one stage alone has"
        )

    def _without_values(self, func: Any, name: str, args: Any, kwargs: Any) -> list[Any] | None:
        """The shapes of a call's results in a stage without the values; None where it can't run so, which is recorded."""
        if updates_metric(name):
            return []
        try:
            with AbsentMode(simulated=True), torch.no_grad():
                return _shapes(func(*self._absent_tensors(args), **self._absent_tensors(kwargs)))
        except Exception as error:  # a user's function without values may raise anything
            reason = str(error) if isinstance(error, MissingValue) else f"{type(error).__name__}: {error}"
            self._join(self._part, _END, f"code before it can't run for shapes alone: {name} ({reason.strip().splitlines()[0]})")
            return None

    def _absent_tensors(self, value: Any) -> Any:
        """The arguments, with absent tensors in place of tainted ones."""
        if isinstance(value, Tensor):
            return absent_like(value, "a tensor") if self._watch.tainted(value) else value
        if type(value) in (tuple, list):
            return type(value)(self._absent_tensors(item) for item in value)
        if type(value) is dict:
            return {key: self._absent_tensors(item) for key, item in value.items()}
        return value

    def _number(self, name: str, results: list[Tensor], target: Tensor | None) -> None:
        """Give tainted results their numbers."""
        for tensor in results:
            self._operations[-1].append(name)
            self._add(tensor)
        if target is not None:
            if target._base is not None:
                mark(target._base)
            self._writes.append((_memory(target), self._part))

    def _add(self, tensor: Tensor) -> int:
        """Add a tensor; returns its number, the next one."""
        index = len(self._numbers)
        known = self._number_of(tensor)
        state = self._sources.is_state(tensor)
        if known is None and not state:
            tensor._autopar_number = index  # type: ignore[attr-defined]
            mark(tensor)
        self._numbers.append(_Number(self._part, tensor, index if known is None else known.first, state))
        return index

    def _number_of(self, tensor: Tensor) -> _Number | None:
        """The record of a tensor under its first number; None where it has none."""
        index: int | None = getattr(tensor, "_autopar_number", None)
        if index is None or index >= len(self._numbers) or self._numbers[index].tensor is not tensor:
            return None
        return self._numbers[index]

    # -- blocks --------------------------------------------------------------------------------------------------------------------------

    def _block(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Run a block's forward, and record it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # recomputation
                return forward(*args, **kwargs)
            if self._calling is not None:
                self._called[fqn] = f"{self._calling} runs {fqn!r} within itself"
                if any(isinstance(tensor, AbsentTensor) for tensor in tensors((args, kwargs))):
                    raise MissingValue(f"it runs {fqn!r}")
                self.use(list(self._blocks[fqn].parameters()))
                return forward(*args, **kwargs)
            if self._running is not None:
                self._join(self._part - 1, self._part, f"it runs while {self._running!r} does")
                return forward(*args, **kwargs)
            self.ran_again |= fqn in self._order
            if fqn in self._order and not self._again:
                self._join(2 * self._order.index(fqn) + 1, self._part, f"{fqn!r} runs before it and again after it")
                self.use(list(self._blocks[fqn].parameters()))
                return forward(*args, **kwargs)
            if torch.is_inference_mode_enabled():  # torch doesn't count writes to tensors there
                self.refuse(f"{fqn!r} runs under torch.inference_mode, in which stages can't hand tensors on; use torch.no_grad() there")
                return forward(*args, **kwargs)
            self._begin(fqn)
            given = list(places((args, kwargs)))
            versions = [(leaf, leaf._version) for _, leaf in given if isinstance(leaf, Tensor)]
            self.use((args, kwargs))
            generators = host_generators()
            with self._watch.paused(), Inside(self.use, self._made_inside), self._catching(fqn, given):
                result = forward(*args, **kwargs)
            if host_generators() != generators:
                self._join(self._part, _END, f"{fqn!r} draws random numbers from Python's or NumPy's generator")
            described = describe(result, given)
            if isinstance(described, Output) and any(leaf.computed for leaf in described.leaves):
                with self._watch.paused():
                    described = computed_from_shapes(forward, args, kwargs, described)
            self._end(fqn, result, given, described, [place for place, _ in places((args, kwargs))], versions)
            return result

        return run

    @contextmanager
    def _catching(self, fqn: str, given: list[tuple[Any, Any]]) -> Iterator[None]:
        """The context of a block: catches what hooks on modules within it may see, and the tensors that it leaves in attributes."""
        block, caught = self._blocks[fqn], list[EscapedOutputs]()
        self._caught.append(caught)

        def hook(name: str) -> Callable[..., None]:
            return lambda _, __, output: caught.append(EscapedOutputs.of(output, given, module=name))

        with ExitStack() as stack:
            for name, child in block.named_modules():
                if name and child._forward_hooks:
                    stack.callback(child.register_forward_hook(hook(name)).remove)
            yield
        for name, child in block.named_modules():
            for attribute, value in list(vars(child).items()):
                if isinstance(value, Tensor) and getattr(value, "_autopar_block", None) == self._part:
                    caught.append(EscapedOutputs.of(value, given, module=name, attribute=attribute))

    def _begin(self, fqn: str) -> None:
        if fqn not in self._order:
            self._order.append(fqn)
        self._calls.append(self._order.index(fqn))
        self._running = fqn
        self._next_part()

    def _next_part(self) -> None:
        self._part += 1
        self._firsts.append(len(self._numbers))
        self._operations.append([])

    def _end(
        self,
        fqn: str,
        result: Any,
        given: list[tuple[Any, Any]],
        described: Output | str,
        after: list[Any],
        versions: list[tuple[Tensor, int]],
    ) -> None:
        """A block has run: number its results, and record what it did to its arguments."""
        for tensor, version in versions:
            if tensor._version == version:
                continue
            if self._watch.tainted(tensor):
                self._writes.append((_memory(tensor), self._part))
            elif not self._sources.is_state(tensor):
                self._join(self._part, _END, f"{fqn!r} writes to a tensor that it is given")
                mark(tensor)
        if after != [place for place, _ in given]:
            self._join(self._part, _END, f"{fqn!r} changes a list or dictionary that it is given")
        if isinstance(described, str):
            self._join(self._part, _END, f"{fqn!r} can't be left out: {described}")
            for tensor in tensors(result):
                self._add(tensor)
            self._outputs.append(())
        else:
            leaves = []
            for leaf, value in zip(described.leaves, flattened(result, given)[0], strict=True):
                made = isinstance(value, Tensor) and leaf.same_as is None
                leaves.append(replace(leaf, index=self._add(value)) if made else leaf)
            self._outputs.append((replace(described, leaves=tuple(leaves)),))
        self._running = None
        self._next_part()

    def _made_inside(self, result: Any, args: Any) -> None:
        """A function returned these tensors within a block; it may return an argument unchanged."""
        given = {id(tensor) for tensor in tensors(args)}
        for tensor in tensors(result):
            if id(tensor) not in given and not self._sources.is_state(tensor) and self._number_of(tensor) is None:
                tensor._autopar_block = self._part  # type: ignore[attr-defined]
                mark(tensor)

    # -- what follows --------------------------------------------------------------------------------------------------------------------

    def _padded(self, there: Tensor) -> None:
        """On one device padded places are zero after the encoder, and in stages they aren't: a batch must show that nobody looks there."""
        if bool(there.all()):
            self.refuse("nn.TransformerEncoder's first batch of an evaluation has no padding, so what code makes of padding can't be tried")

    def refuse(self, reason: str) -> None:
        """Record that no cut is possible anywhere."""
        self._join(-1, _END, reason)

    def _join(self, above: int, until: int, reason: str) -> None:
        """Record that no stage begins with a block whose part is above the one and at most the other; up to the step's end, that no stage
        that doesn't run that part itself gets past it.
        """
        self._joined.append((above, until, reason))

    def recorded(
        self, *, rows: int, autocast: torch.dtype | None, changes_batch: bool, counters: tuple[tuple[str, str], ...]
    ) -> StepRecording:
        """The finished recording."""
        crossings, uncuttable = {}, dict(self._called)
        outputs = self._outputs
        if self._extras:
            outputs = [
                (*main, *(each.numbered() for each in caught if main and each.is_needed(caught)))
                for main, caught in zip(outputs, self._caught, strict=True)
            ]
        for index, fqn in enumerate(self._order):
            cut = self._cut(index)
            crossings[fqn] = self._crossing(cut)
            if (reason := self._joins(cut) or self._entangled(cut)) is not None:
                uncuttable[fqn] = reason
        parameters = {name: frozenset(self._users.get(name, ())) for name, _ in self._module.named_parameters(remove_duplicate=False)}
        buffers = {name: frozenset(self._users.get(name, ())) for name, _ in self._module.named_buffers(remove_duplicate=False)}
        return StepRecording(
            hook=self._hook,
            blocks=tuple(self._order),
            crossings=crossings,
            uncuttable=uncuttable,
            parameters=parameters,
            buffers=buffers,
            rows=rows,
            calls=tuple(self._calls),
            outputs=tuple(outputs),
            operations=tuple(map(tuple, self._operations)),
            firsts=tuple(self._firsts),
            written=self._sources.written,
            counters=counters,
            autocast=autocast,
            changes_batch=changes_batch,
        )

    def _cut(self, index: int) -> _Cut:
        """The cut before a block."""
        later = tuple(block_of(part, self._calls) >= index for part in range(len(self._firsts)))
        return _Cut(later.index(True), later, max(part for part, each in enumerate(later) if not each))

    def _joins(self, cut: _Cut) -> str | None:
        """Why a stage can't begin there by what was recorded of single parts."""
        for above, until, reason in self._joined:
            if above < cut.part <= until < _END or (until == _END and (above < 0 or not cut.later[above] or cut.ends > above)):
                return reason
        return None

    def _alive(self, cut: _Cut) -> list[tuple[int, _Number]]:
        """The tensors that stages before a cut make and later ones use, by their first numbers."""
        return [
            (index, number)
            for index, number in (*enumerate(self._numbers), *self._extras.items())
            if number.first == index
            and not number.state
            and not cut.later[number.part]
            and number.last_use >= cut.part
            and (not self._again or any(cut.later[part] for part in number.uses))
        ]

    def _crossing(self, cut: _Cut) -> tuple[CutTensor, ...]:
        aliases = defaultdict(list)
        for index, number in enumerate(self._numbers):
            if not cut.later[number.part]:
                aliases[number.first].append(index)
        return tuple(
            CutTensor(
                index=index,
                shape=tuple(number.tensor.shape),
                dtype=number.tensor.dtype,
                requires_grad=number.tensor.requires_grad,
                written=any(memory == _memory(number.tensor) and cut.later[written] for memory, written in self._writes),
                aliases=tuple(aliases.get(index, (index,))),
            )
            for index, number in self._alive(cut)
        )

    def _entangled(self, cut: _Cut) -> str | None:
        """Why a cut would separate tensors that share memory, or what belongs together in time."""
        memory: dict[int, int] = defaultdict(int)
        made: dict[int, int] = {}
        for _, number in self._alive(cut):
            memory[_memory(number.tensor)] += 1
            made.setdefault(_memory(number.tensor), number.part)
        for storage, written in self._writes:
            if cut.later[written] and memory[storage] > 1:
                return "two tensors that cross the cut share memory, which is written to after it"
            if self._again and written > made.get(storage, written):
                return "a tensor that crosses the cut is written to later, and blocks run several times"
        for name in sorted(self._sources.written):
            users = self._users.get(name, set())
            if any(not cut.later[user] for user in users) and any(cut.later[user] for user in users):
                return f"{name!r} is written to, and used before it and after it"
        return self._out_of_order(cut) if self._again else None

    def _out_of_order(self, cut: _Cut) -> str | None:
        """Why the calls before a cut can't all run before those after it."""
        if not cut.later[-1]:
            return f"{self._order[max(0, self._calls[-1])]!r} runs before it and again after it, up to the step's end"
        for number in self._numbers:
            early = [part for part in number.uses if not cut.later[part]] if cut.later[number.part] and not number.state else ()
            if early:
                block = self._order[max(0, block_of(min(early), self._calls))]
                return f"{block!r} runs before it and again after it, on what was computed between"
        drew = [cut.later[part] for part in self._drew]
        if drew != sorted(drew):
            return "the blocks before it run again after it, and both draw random numbers, whose order stages would change"
        return None


class _Draws(TorchDispatchMode):
    """Tells of each operation that draws random numbers, also under fake tensors."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs it."""
        if operation(func).has_drawn(args, kwargs or {}):
            self._tell()
        return func(*args, **(kwargs or {}))


def _shapes(result: Any) -> list[Any]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors(result)]


def _memory(tensor: Tensor) -> int:
    """The memory of which a tensor is a view."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
