"""Which submodules ranks can share by rows, so that the rest of a step runs whole on every rank. Found out on a batch, on the CPU.

The step runs on the whole batch. Each call of a submodule with parameters, from the outermost on, is tried on parts of its arguments' rows:
where these give the rows of the whole's output, it is shared; else its own submodules are tried. Then loss, gradients, logged values,
buffers and what the step keeps must be those of the step as it is, for two and for three ranks. Meant for a forked child.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_unflatten

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import transfer_batch
from lightning_autopar._root import FRAMEWORK, package_of
from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import Dealing, share_of
from lightning_autopar.exact.data.rank_share import cut as own_rows
from lightning_autopar.exact.logs.log_rules import recorded_logs
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan, Rows
from lightning_autopar.exact.step.attribute_rules import Before
from lightning_autopar.exact.step.batch_norm import NormRuns, norms_of
from lightning_autopar.exact.step.shared_network import (
    Call,
    SharedModule,
    SharedModules,
    SharingSteps,
    flattened,
    like,
    plain,
    same_kind,
    travels,
)
from lightning_autopar.memory.footprint import Conduct, Footprint, Sharing
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.work.operations import operation
from lightning_autopar.strategies.trials.draw_probe import DrawObserver, everything
from lightning_autopar.strategies.trials.fewer_blocks import do_without, extent
from lightning_autopar.strategies.trials.first_batch_parts import BatchParts
from lightning_autopar.strategies.trials.nudged_weights import nudged
from lightning_autopar.strategies.trials.own_functions import next_node, not_linear, own_functions, signature
from lightning_autopar.strategies.trials.split_probe import _Probe, configure_model
from lightning_autopar.strategies.trials.undo import put_back, undone

_LOG = logging.getLogger(__name__)
#: Relative differences that are rounding, in double precision and in single precision.
_EQUAL_DOUBLE, _EQUAL = 1e-8, 1e-5
#: The most seconds until it is known what is shared; and how much more work than a forward that is, about.
_SECONDS, _RUNS = 60.0, 8
#: How often the step runs while submodules are ruled out one after the other.
_ROUNDS = 20


def with_shared_network(
    footprint: Footprint,
    module: LightningModule,
    trainer: Trainer,
    first: FirstBatch,
    more: Sequence[FirstBatch],
    evaluated: Sequence[FirstBatch],
) -> tuple[Footprint, SharedModules]:
    """Find out in a forked child which submodules ranks can share: the footprint with what that means, and the submodules.

    Args:
        module: the user's module, set up.
        more: others, on which it must hold as well.
        evaluated: batches of the validation, on which it must hold as well.
    """
    try:
        sharing, shared = run_forked(probe_sharing, module, trainer, first, more, evaluated, footprint, timeout_seconds=2 * _SECONDS)
    except ChildFailed:
        _LOG.debug("whether ranks can share the network can't be tried", exc_info=True)
        return footprint, {}
    return replace(footprint, sharing=sharing), shared


def probe_sharing(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    more: Sequence[FirstBatch] = (),
    evaluated: Sequence[FirstBatch] = (),
    footprint: Footprint | None = None,
) -> tuple[Sharing | None, SharedModules]:
    """The same in this process, which changes the module: None and nothing where ranks can't share the network."""
    size = max(1, first.batch_size)
    counts = [size] if first.samples is None else [size, *(few for few in (8, 4) if few < size)]
    blocks = {} if footprint is None else {block.fqn: _RUNS * block.flops for block in footprint.blocks if block.repeated}
    flops = 0 if footprint is None else footprint.flops
    chosen = extent(module, blocks, _RUNS * flops / 3 / size, counts, size)
    if chosen is None:
        _LOG.debug("the step is too long to try whether ranks can share its network")
        return None, {}
    state, hooks = rng.capture({}), trainer is not None
    try:
        configure_model(module, trainer)
        do_without(module, chosen.without)
        found = _SharingProbe(module, trainer, BatchParts(first, chosen.samples, hooks=hooks), footprint.conduct if footprint else None)
        with nudged(module):
            modules = found.find()
            for batch, hook in [(each, "training_step") for each in more] + [(each, "validation_step") for each in evaluated]:
                few = min(max(1, batch.batch_size), chosen.samples) if chosen.samples < size else max(1, batch.batch_size)
                modules = found.confirm(BatchParts(batch, few, hooks=hooks), hook, modules)
        sharing = replace(found.sharing, gathered_bytes=round(found.sharing.gathered_bytes * size / chosen.samples))
    except Exception:  # the user's step, under conditions that it isn't made for; or it says why not
        _LOG.debug("ranks can't share the network", exc_info=True)
        return None, {}
    finally:
        rng.restore(state, {})
    if chosen.without:  # the other blocks' draws aren't known, and are guessed
        if not all(_as_guessed(plan) for each in modules.values() for plan in each.draws + each.evaluated):
            _LOG.debug("ranks can't share the network: not all of its draws are over samples, and only some of its blocks were tried")
            return None, {}
        modules = {name: replace(each, draws=(), evaluated=()) for name, each in modules.items()}
    return sharing, modules


class _CannotShareError(Exception):
    """Says why ranks can't share the network."""


@dataclass
class _Outcome:
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    left: dict[str, Tensor]

    def difference(self, other: _Outcome) -> tuple[float, str]:
        """The largest relative difference, and of what."""
        largest = (0.0, "")
        for mine, others in ((self.losses, other.losses), (self.gradients, other.gradients), (self.left, other.left)):
            if mine.keys() != others.keys():
                return math.inf, ", ".join(sorted(mine.keys() ^ others.keys())[:3])
            floor = 1e-2 * max((float(each.abs().max()) for each in mine.values() if each.numel()), default=0.0)
            for name, tensor in mine.items():
                largest = max(largest, (_apart(tensor, others[name], floor if mine is self.gradients else 0.0), name))
        return largest


class _SharingProbe(_Probe):
    """The step with parts of its network run in parts."""

    def __init__(self, module: LightningModule, trainer: Trainer | None, batches: BatchParts, conduct: Conduct | None) -> None:
        super().__init__(module, trainer, batches, conduct)
        #: The function of torch.distributed that the user's step has called; empty if it has called none.
        self.asks = ""
        #: FLOPs of the step's forward.
        self.flops = 0
        self.ends_at = time.monotonic() + _SECONDS

    def find(self) -> SharedModules:
        """The submodules to share.

        Raises:
            _CannotShareError: if there are none, or the step comes to something else with them.
        """
        if not self.module.automatic_optimization:
            raise _CannotShareError("the module runs backward by hand")
        self._prepare()
        return self._precisely(self._found)

    def _precisely(self, look: Callable[[float], SharedModules]) -> SharedModules:
        """What is found in double precision; in single precision where the step insists on that."""
        try:
            with self._in_double():
                return look(_EQUAL_DOUBLE)
        except _CannotShareError:
            raise
        except Exception:
            _LOG.debug("the step can't be run in double precision", exc_info=True)
            return look(_EQUAL)

    def _found(self, tolerance: float) -> SharedModules:
        reference = self._reference("training_step")
        trial = _Trial(self.module, tolerance)
        for trial.ranks in (2, 3):
            shared = self._search(trial, "training_step")
            self._check(trial, "training_step", reference, tolerance)
        if not shared:
            raise _CannotShareError("none of its submodules with parameters maps rows to rows")
        share = trial.flops / self.flops if self.flops else 0.0
        self.sharing = Sharing(modules=tuple(shared), work_share=share, gathered_bytes=sum(trial.sent), gathers=len(trial.sent))
        return shared

    def confirm(self, batches: BatchParts, hook: str, modules: SharedModules) -> SharedModules:
        """The same submodules, with what another batch shows of their calls.

        Raises:
            _CannotShareError: if that batch's step comes to something else with them.
        """
        batches.converted, self.batches = self.batches.converted, batches
        if hook != "training_step":
            self.rehearsal.begin_evaluation("validation")
        return self._precisely(partial(self._confirmed, hook, modules))

    def _confirmed(self, hook: str, modules: SharedModules, tolerance: float) -> SharedModules:
        reference = self._reference(hook)
        trial = _Trial(self.module, tolerance, modules)
        for trial.ranks in (2, 3):
            self._check(trial, hook, reference, tolerance)
        if trial.excluded:
            raise _CannotShareError(f"in another batch {sorted(trial.excluded)[0]!r} doesn't map rows to rows")
        for name, seen in trial.shared.items():
            drawn = () if hook == "training_step" or modules[name].evaluated else seen.draws
            joined = modules[name].joined(replace(seen, draws=(), evaluated=drawn))
            if joined is None:
                raise _CannotShareError(f"{name!r} is called in another way in another batch")
            modules = {**modules, name: joined}
        return modules

    def _reference(self, hook: str) -> _Outcome:
        """The step as it is; run twice where it keeps something."""
        reference = self._outcome(hook)
        if self.asks:
            raise _CannotShareError(f"{hook} asks torch.distributed ({self.asks}), which gives other answers on several ranks")
        kept = [name for name in self.effects[-1].kept if name not in ("trainer", *vars(LightningModule()))]
        self.watched = tuple(dict.fromkeys(kept))
        return self._outcome(hook) if self.watched else reference

    def _search(self, trial: _Trial, hook: str) -> SharedModules:
        """What is shared when nothing is ruled out any more."""
        for _ in range(_ROUNDS):
            ruled_out = len(trial.excluded)
            with trial.shadowed():
                self._outcome(hook, trial)
            trial.excluded |= {name for name in trial.shared if _within(name, trial.shared)} | trial.bypassed
            if len(trial.excluded) == ruled_out:
                return dict(trial.shared)
            if time.monotonic() > self.ends_at:
                break
        raise _CannotShareError("it takes too long to find out which of its submodules map rows to rows")

    def _check(self, trial: _Trial, hook: str, reference: _Outcome, tolerance: float) -> None:
        with trial.shadowed():
            outcome = self._outcome(hook, trial)
        if trial.bypassed:
            raise _CannotShareError(f"the loss uses values of {sorted(trial.bypassed)[0]!r} that aren't in its output")
        difference, where = reference.difference(outcome)
        if not difference <= tolerance:
            raise _CannotShareError(f"with a shared network {where!r} differs by {difference:.2g} of it")

    def _outcome(self, hook: str, trial: _Trial | None = None) -> _Outcome:
        """Run the step on the whole batch, from the same state each time."""
        state, training = rng.capture({}), hook == "training_step"
        batch = self.batches.part(everything(self.batches.count))
        rng.restore(state, {})
        if trial is not None:
            trial.begin()
        self.metrics.next_run()
        gradients: dict[str, Tensor] = {}
        with self._harmless(), torch.enable_grad() if training else torch.no_grad(), recorded_logs(self.module) as logged, self._noted():
            batch = transfer_batch(self.module, batch) if self.batches.raw else batch
            self.rehearsal.batch_hooks("start", batch, 0)
            with _Flops() if trial is None else trial.step() as counted:
                output = self.rehearsal._call(hook, batch, 0)
            self.flops = self.flops if counted is None else counted.flops
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if training:
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise _CannotShareError("training_step returns no loss that has a gradient")
                self.module.zero_grad()
                if trial is not None:
                    trial.follow(loss)
                loss.backward()
                named = self.module.named_parameters()
                gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
                self.module.zero_grad()
        losses = {name: torch.tensor(value.value, dtype=torch.float64) for name, value in logged.items()}
        losses |= {f"the loss{place}": leaf.detach() for place, leaf in flattened(loss)[0] if isinstance(leaf, Tensor)}
        left = {f"{name}{place}": value for name, kept in self.left[-1].items() for place, value in _tensors_in(kept)}
        left |= {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        put_back(self.module, self.buffers)
        rng.restore(state, {})
        return _Outcome(losses=losses, gradients=gradients, left=left)

    def _noted(self) -> ExitStack:
        """While open, notes whether the user's code asks for its rank; and checkpoints recompute nothing, as what is tried runs
        more often than what ranks run.
        """
        stack = ExitStack()
        for name, instead in (("_checkpoint_without_reentrant_generator", _without_hooks), ("CheckpointFunction", _CALLED)):
            if hasattr(torch.utils.checkpoint, name):
                stack.enter_context(patched(torch.utils.checkpoint, name, instead))
        for name in ("get_rank", "get_world_size"):
            stack.enter_context(patched(dist, name, self._noting(name, getattr(dist, name))))
        return stack

    def _noting(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in FRAMEWORK:
                self.asks = name
            return own(*args, **kwargs)

        return asked


class _Trial(SharingSteps):
    """Runs submodules on parts of their arguments' rows, one rank's after the other, and puts the rows together.

    Args:
        tolerance: relative difference up to which outputs are the same.
        only: the submodules that are known to be shared; None to find them.
    """

    def __init__(self, module: nn.Module, tolerance: float, only: SharedModules | None = None) -> None:
        able = {name for name, child in module.named_modules() if name and _may_be_shared(child)}
        super().__init__(module, frozenset(able) if only is None else only)
        self.tolerance, self.ranks = tolerance, 2
        self.excluded: set[str] = set()
        self.shared: dict[str, SharedModule] = {}

    def begin(self) -> None:
        """A step begins."""
        self.shared.clear()
        #: FLOPs of what is shared, and the bytes of each tensor whose rows ranks gather.
        self.flops, self.sent = 0, list[int]()
        #: For each shared call, numbers of nodes of autograd's graph: its first, the first after its runs, and the first after all.
        self._calls: list[tuple[int, int, int, str]] = []
        #: The numbers of the nodes that each backward pass within the step has made.
        self._passes = list[range]()
        #: Submodules whose parts' tensors come to the loss by another way than their output, as a hook within may keep them.
        self.bypassed: set[str] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """See :class:`SharingSteps`. Gradients that the step asks for are followed from and to a call's output and arguments alone."""
        own = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            nodes = (getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in (*args[0], *args[4]))
            calls = (self._call_around(node._sequence_nr()) for node in nodes if node is not None)
            self.bypassed.update(call[-1] for call in calls if call is not None)
            began = next_node()
            try:
                return own(*args, **kwargs)
            finally:
                self._passes.append(range(began, next_node()))

        with super().step(), patched(torch.autograd, "_engine_run_backward", run):
            yield

    def _call_around(self, number: int) -> tuple[int, int, int, str] | None:
        """The call within whose runs a node of autograd's graph was made."""
        place = bisect_right(self._calls, number, key=lambda call: call[0]) - 1
        return self._calls[place] if place >= 0 and number < self._calls[place][1] else None

    def follow(self, loss: Tensor) -> None:
        """Find the submodules that are bypassed. On a rank, such a tensor has its own rows alone; here, there is one of each part. A
        gradient's own graph leads into a call from outside as well: a rank makes it of its rows, with a gradient's factors.
        """
        seen, waiting = set[Any](), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            outer = node._sequence_nr()
            for inner, _ in node.next_functions if not any(outer in made for made in self._passes) else ():
                call = None if inner is None else self._call_around(inner._sequence_nr())
                if call is not None and not call[0] <= outer < call[2]:
                    self.bypassed.add(call[3])
            waiting += [inner for inner, _ in node.next_functions]

    def call(self, name: str, child: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output as ranks would put it together; the submodule's own where it can't be shared."""
        if torch._C._current_graph_task_id() != -1:  # a function's own backward calls it (an adjoint solver's), as checkpoints don't here
            self.bypassed.add(name)
        if name in self.excluded | self.bypassed:
            return own(*args, **kwargs)
        known: SharedModule | None = self._names[name] if isinstance(self._names, Mapping) else None
        if known is not None and Call(name, known, (args, kwargs)).rows == 1:  # nothing to take apart
            self.shared.setdefault(name, replace(known, draws=(), evaluated=()))
            return own(*args, **kwargs)
        state, buffers = rng.capture({}), {each: buffer.clone() for each, buffer in child.named_buffers()}
        began = next_node()
        try:
            self._inside = True
            found = self._tried(name, known, child, own, (args, kwargs))
        except Exception:  # a part has other shapes than the submodule is made for
            _LOG.debug("%s can't be run on parts of its rows", name, exc_info=True)
            found = None
        finally:
            self._inside = False
        seen = None if found is None else self.shared[name].joined(found[1]) if name in self.shared else found[1]
        if found is None or seen is None:
            self.excluded.add(name)
            self.shared.pop(name, None)
            rng.restore(state, {})
            put_back(child, buffers)
            return own(*args, **kwargs)
        self.shared[name] = seen
        self._calls.append((began, found[2], next_node(), name))
        return found[0]

    def _tried(self, name: str, known: SharedModule | None, child: nn.Module, own: Any, given: Any) -> tuple[Any, SharedModule, int] | None:
        leaves, _ = flattened(given)
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, Tensor)}
        # On a rank the user's hooks within it would see this rank's rows; a hook on itself sees all.
        watched = any(_users_hooks(inner) for inner in child.modules() if inner is not child)
        if watched or rng.find_generators(child.named_modules()):
            return None
        if not all(map(travels, (leaf for _, leaf in leaves))):
            return None
        run, began = _Runs(child, own), next_node()
        with _Flops() as counted:
            observer = DrawObserver(everything(1), None, False)
            whole, ended = run.on(given, observer)
        run.draws = observer.draws
        before, drawn = flattened(whole)
        outputs = {place: leaf for place, leaf in before if isinstance(leaf, Tensor)}
        sizes = {leaf.shape[0] for place, leaf in tensors.items() if leaf.ndim and (known is None or place in known.cut)}
        rows = next((leaf.shape[0] for leaf in outputs.values() if leaf.ndim and leaf.shape[0] in sizes), 0)
        if rows < 2 or not all(travels(leaf) and not isinstance(leaf, Parameter) for _, leaf in before):
            return None
        cut = known.cut if known else frozenset(place for place, leaf in tensors.items() if leaf.ndim and leaf.shape[0] == rows)
        seen = SharedModule(cut=cut, whole=frozenset(tensors) - cut, gathered=frozenset(), kept=frozenset())
        call = Call(name, seen, given)
        shares = [share for rank in range(self.ranks) if (share := share_of(rows, rank, Dealing.even(self.ranks))).rows]
        parts, functions = [], own_functions(outputs.values(), began)
        for share in shares:
            observer = DrawObserver(share, run.draws, False)
            part, end = run.on(call.part(partial(own_rows, rank=share.rank, dealing=share.dealing)), observer)
            others, structure = flattened(part)
            alike = {signature(node) for node in own_functions((leaf for _, leaf in others if isinstance(leaf, Tensor)), began)}
            if not_linear([node for node in functions if signature(node) in alike], {})[1]:
                return None  # each rank would give it a part of the gradient that it is to see whole
            if any(mine != value for (_, mine), (_, value) in zip(others, before, strict=True) if not isinstance(value, Tensor)):
                return None  # it says how many rows it got
            if observer.irregular or len(observer.draws) != len(run.draws) or rng.changed(ended, end) or structure != drawn:
                return None
            parts.append((dict(others), [draw.choice for draw in observer.draws]))
        if run.changes or run.norms.apart() is not None or any(choices != parts[0][1] for _, choices in parts):
            return None
        joined, ran = dict[str, Tensor](), next_node()
        for place, leaf in outputs.items():
            if not all(same_kind(leaf, each[place]) for each, _ in parts):
                return None  # its attributes say which rows it has
            pieces = [plain(each[place]) for each, _ in parts]
            together = _joined(plain(leaf), pieces, [share.rank for share in shares], self.ranks)
            if together is None:
                if any(each.shape != leaf.shape or _apart(leaf, each) > self.tolerance for each in pieces):
                    return None
                joined[place] = pieces[0].view_as(pieces[0])  # a node of its own, for `follow`
                seen = replace(seen, kept=seen.kept | {place})
            elif not _apart(leaf, together) <= self.tolerance:
                return None
            else:
                joined[place] = together
                seen = replace(seen, gathered=seen.gathered | {place})
        for place, each in joined.items():
            joined[place] = like(outputs[place], each)
            if each.requires_grad:
                each.register_hook(partial(self._look_at_gradient, name))
        self.flops += counted.flops
        sent = [outputs[place] for place in seen.gathered] + [tensors[place] for place in cut if tensors[place].requires_grad]
        self.sent += [leaf.numel() * min(4, leaf.element_size()) for leaf in sent]
        return _replaced(whole, joined), replace(seen, draws=(observer.plan(),)), ran

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        """Ranks can't exchange a batch of gradients (``is_grads_batched``, which computes Jacobians): it isn't in memory as one tensor."""
        try:
            gradient.untyped_storage()
        except NotImplementedError:
            self.bypassed.add(name)


class _Runs:
    """Runs of a submodule from one state; whether it changes anything but its output."""

    def __init__(self, child: nn.Module, own: Any) -> None:
        self.child, self.own = child, own
        self.state, self.buffers = rng.capture({}), {name: buffer.clone() for name, buffer in child.named_buffers()}
        self.draws: list[Any] = []
        self.changes = False
        self.norms = NormRuns(norms_of(child))
        self._after: dict[str, Tensor] | None = None

    def on(self, given: Any, observer: DrawObserver) -> tuple[Any, rng.RngState]:
        """The output, and the generators' states then."""
        rng.restore(self.state, {})
        put_back(self.child, self.buffers)
        with undone(self.child, ()) as effects, self.norms.noted():
            output = observer.run(lambda arguments: self.own(*arguments[0], **arguments[1]), lambda share: given)
        ended = rng.capture({})
        after = {name: buffer.clone() for name, buffer in self.child.named_buffers()}
        self._after = after if self._after is None else self._after
        same = after.keys() == self._after.keys() and all(_apart(self._after[name], value) <= _EQUAL for name, value in after.items())
        self.changes |= bool(effects.kept) or not same
        return output, ended


def _without_hooks(*_: Any, **__: Any) -> Iterator[None]:
    """Replaces what torch's checkpoint does before and after the function that it calls."""
    yield


#: Replaces the reentrant checkpoint.
_CALLED = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))


class _Flops(TorchDispatchMode):
    """Counts the FLOPs of what runs while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = operation(func).flops
        self.flops += formula(args, kwargs or {}, output) if formula is not None else 0
        return output


def _may_be_shared(child: nn.Module) -> bool:
    return any(True for _ in child.parameters()) and not isinstance(child, (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin))


def _users_hooks(child: nn.Module) -> bool:
    """Whether it has hooks around forward of the user's; torch's compute a weight from its norm."""
    hooks = (*child._forward_hooks.values(), *child._forward_pre_hooks.values())
    return any(package_of(hook if getattr(hook, "__module__", None) else type(hook)) not in FRAMEWORK for hook in hooks)


def _as_guessed(plan: DrawPlan) -> bool:
    """Whether each draw has a row for each sample, first in memory as well, as it is assumed to where nothing is known of it."""
    return all(
        isinstance(draw.choice, Rows)
        and draw.choice in (Rows(dim=0), Rows(dim=0, order=tuple(range(len(draw.shape)))))
        and draw.shape[0] == plan.batch_size
        for draw in plan.draws or ()
    )


def _within(name: str, others: Collection[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _joined(whole: Tensor, pieces: Sequence[Tensor], ranks: Sequence[int], step: int) -> Tensor | None:
    """The rows of all parts, laid out in memory as the whole's; None where a part hasn't its rows."""
    if not whole.ndim or any(not piece.ndim or piece.shape[1:] != whole.shape[1:] for piece in pieces):
        return None
    if any(len(piece) != len(range(rank, len(whole), step)) for rank, piece in zip(ranks, pieces, strict=True)):
        return None
    joined = torch.empty_like(whole, requires_grad=False)
    for rank, piece in zip(ranks, pieces, strict=True):
        joined[rank::step] = piece
    return joined


def _replaced(output: Any, joined: Mapping[str, Tensor]) -> Any:
    leaves, structure = flattened(output)
    return tree_unflatten([joined.get(place, leaf) for place, leaf in leaves], structure)


def _tensors_in(kept: Any, place: str = "") -> list[tuple[str, Tensor]]:
    """The numbers in what a step kept."""
    if isinstance(kept, Before):
        return _tensors_in(kept.copy, place)
    if isinstance(kept, (bool, int, float)):
        return [(place, torch.tensor(float(kept), dtype=torch.float64))]
    if isinstance(kept, Tensor):
        return [(place, kept)]
    items = enumerate(kept) if isinstance(kept, (list, tuple)) else kept.items() if isinstance(kept, dict) else ()
    return [found for key, item in items for found in _tensors_in(item, f"{place}.{key}")]


def _apart(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest value; infinite where shapes or types differ."""
    one, other = plain(one), plain(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.numel() or torch.equal(one, other):
        return 0.0
    left, right = (each.detach().to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other))
    same = (left == right) | (left.isnan() & right.isnan())
    finite = left[left.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor)
    distance = float((left - right)[~same].abs().max()) if not bool(same.all()) else 0.0
    return 0.0 if not distance else distance / scale if scale else math.inf
