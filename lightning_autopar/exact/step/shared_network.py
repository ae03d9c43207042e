"""A step whose network ranks share, and whose rest each rank runs whole: for a loss that compares the samples of a batch.

Every rank's step gets the whole batch. A submodule that maps rows to rows (an encoder, a projection head) runs on this rank's rows of what
it is given, and hands back the rows of all ranks. Everything else (the loss, logged values, a memory bank, what the step keeps, its random
draws) runs whole and alike on every rank, as on one device, and needs no exchange.

Gradients: every rank computes the gradient of the same whole loss. It gives its own rows' gradient to the submodule, times the number of
ranks, so that the mean over ranks, which the engine takes of every parameter's gradient, is the sum over all rows. A parameter outside of
shared submodules has the whole gradient on every rank, of which the mean is the same. Where the step asks `torch.autograd.grad` for
gradients, no engine takes that mean, and it is taken here.

Knows modules, a process group and shares of rows. It doesn't know which engine runs, nor how a trial finds the submodules.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.fingerprint import bytes_of
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, cut, share_of
from lightning_autopar.exact.random.whole_batch_draws import Choice, DrawPlan, GlobalDraws, Rows, whole_like
from lightning_autopar.exact.step.batch_norm import restore, synchronise

_Own = Callable[..., Any]
#: Types of values that aren't tensors.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class SharedModule:
    """How ranks share the calls of one submodule, as a trial found it. Tensors are named by where they lie in arguments and output.

    Args:
        cut: arguments of which a rank takes its rows.
        whole: arguments that every rank takes whole.
        gathered: outputs that have a row for each row of the arguments.
        kept: outputs that don't depend on the rows, which every rank has.
        draws: the random draws of each of its calls in a training step, in order.
        evaluated: the same in a validation step; empty where none was looked at.
    """

    cut: frozenset[str]
    whole: frozenset[str]
    gathered: frozenset[str]
    kept: frozenset[str] = frozenset()
    draws: tuple[DrawPlan, ...] = ()
    evaluated: tuple[DrawPlan, ...] = ()

    def joined(self, other: SharedModule) -> SharedModule | None:
        """The same for the calls of both; None where one cuts or gathers what the other doesn't."""
        names = {name: getattr(self, name) | getattr(other, name) for name in ("cut", "whole", "gathered", "kept")}
        apart = names["cut"] & names["whole"] or names["gathered"] & names["kept"]
        return None if apart else SharedModule(**names, draws=self.draws + other.draws, evaluated=self.evaluated + other.evaluated)


#: The submodules that ranks share, by FQN; none lies in another.
SharedModules = Mapping[str, SharedModule]


def flattened(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of nested containers with their places, and the structure to put them back into."""
    leaves, structure = tree_flatten_with_path(value)
    return [(keystr(place), leaf) for place, leaf in leaves], structure


def travels(leaf: Any) -> bool:
    """Whether rows of it can be taken and put together: a tensor of the user's class has its values as torch's own, and beside them
    attributes that are plain values.
    """
    if not isinstance(leaf, Tensor):
        return type(leaf) in PLAIN
    if type(leaf) in (Tensor, nn.Parameter):
        return True
    inner = type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (inner or isinstance(leaf, nn.Parameter)) and all(type(each) in PLAIN for each in tree_leaves(vars(leaf)))


def same_kind(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one class, and have the same attributes where that is the user's."""
    return type(one) is type(other) and (type(one) in (Tensor, nn.Parameter) or vars(one) == vars(other))


def plain(tensor: Tensor) -> Tensor:
    """The same values as a tensor of torch's own class; autograd passes through."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def like(kept: Tensor, rows: Tensor) -> Tensor:
    """These rows in the class of a tensor of the user's, with its attributes: labels of columns, say."""
    if type(kept) in (Tensor, nn.Parameter):
        return rows
    made = rows.as_subclass(type(kept))
    vars(made).update(vars(kept))
    return made


@dataclass
class Call:
    """One call of a shared submodule.

    Args:
        name: the submodule's FQN.
    """

    name: str
    shared: SharedModule
    given: tuple[tuple[Any, ...], dict[str, Any]]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        leaves, self._structure = flattened(self.given)
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, Tensor)}
        self._leaves = leaves
        if unknown := sorted(set(tensors) - self.shared.cut - self.shared.whole):
            raise RuntimeError(self._words(f"is called with a tensor at {unknown[0]}, which it wasn't given in what planning looked at"))
        sizes = {place: tensor.shape[0] if tensor.ndim else 0 for place, tensor in tensors.items() if place in self.shared.cut}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise RuntimeError(self._words(f"is called with tensors of {sorted(sizes.values())} rows, of which each rank takes a part"))
        self.rows = next(iter(sizes.values()))

    def part(self, take: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with only these rows of the tensors that are cut."""
        taken = (place in self.shared.cut and isinstance(leaf, Tensor) for place, leaf in self._leaves)
        leaves = [like(leaf, take(plain(leaf))) if cuts else leaf for cuts, (_, leaf) in zip(taken, self._leaves, strict=True)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    def put_together(self, output: Any, share: BatchShare, gather: Callable[[Tensor], Tensor]) -> Any:
        """The output for all rows, made of that for this share's."""
        leaves, structure = flattened(output)
        whole = []
        for place, leaf in leaves:
            gathers = isinstance(leaf, Tensor) and place not in self.shared.kept
            if gathers and place not in self.shared.gathered:
                raise RuntimeError(self._words(f"returned a tensor at {place or 'its top'}, which it didn't in what planning looked at"))
            if gathers and (not leaf.ndim or leaf.shape[0] != share.fed):
                rows = leaf.shape[0] if leaf.ndim else "no"
                raise RuntimeError(self._words(f"gave {rows} rows for {share.fed} rows of its input, and not one for each"))
            whole.append(like(leaf, gather(plain(leaf))) if gathers else leaf)
        return tree_unflatten(whole, structure)

    def _words(self, what: str) -> str:
        return (
            f"the ranks share {self.name!r} by rows, but it {what}; run on one device (allow=['single']), or plan with a first batch that "
            "shows this"
        )


class SharingSteps(ABC):
    """Shares the calls of a module's submodules while :meth:`step` is open. How rows come together is the subclass's matter.

    Args:
        names: FQNs of the submodules whose calls may be shared.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, Any] | frozenset[str]) -> None:
        self._module, self._names = module, names
        #: Whether the module's step runs, and whether a shared submodule does.
        self._active = self._inside = False

    @contextmanager
    def shadowed(self) -> Iterator[None]:
        """While open, the submodules' forwards are shared ones. A bound method of that name: a copy of a module gets its own."""
        with ExitStack() as undo:
            for name, child in self._module.named_modules():
                if name in self._names:
                    undo.enter_context(patched(child, "forward", types.MethodType(self._forward(name, child.forward), child)))
            yield

    def _forward(self, name: str, own: _Own) -> _Own:
        def forward(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # In backward a checkpoint of the user's runs a part of the step again.
            runs = self._active or torch._C._current_graph_task_id() != -1
            return own(*args, **kwargs) if self._inside or not runs else self.call(name, child, own, args, kwargs)

        disabled: _Own = torch.compiler.disable(forward)
        return disabled

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of one of the user's steps, which every rank runs on the whole batch."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @abstractmethod
    def call(self, name: str, child: nn.Module, own: _Own, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The submodule's output for all rows."""


@dataclass(frozen=True)
class _Running:
    """A call that runs, or whose backward does.

    Args:
        share: this rank's rows of its arguments.
        draws: its random draws.
        chosen: how they were made, for a forward that is recomputed in backward.
    """

    share: BatchShare
    draws: DrawPlan
    chosen: dict[tuple[object, ...], Choice] = field(default_factory=dict)


class SharedNetwork(SharingSteps):
    """Runs the shared submodules on this rank's rows and gathers the rows of all ranks; a collective for each output.

    Args:
        shared: what a trial found.
    """

    def __init__(self, module: nn.Module, shared: SharedModules) -> None:
        super().__init__(module, shared)
        self._shared = shared
        self._rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._dealing = Dealing.even(self.ranks)
        #: The call whose forward runs; and the one whose backward does, which may recompute: then its draws are made again.
        self._running: _Running | None = None
        self._behind: _Running | None = None
        #: The backward pass in which that began. One that runs within it has a greater number, and the one around it a smaller one.
        self._pass = -1
        self._draws = _CallDraws(self._share_now)
        self._calls: dict[str, int] = {}
        #: How the draws of each submodule's calls were made in this step. The user's checkpoint makes a call anew in backward.
        self._chosen: dict[str, dict[tuple[object, ...], Choice]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While open, steps are shared."""
        synchronise(self._module, self._share_now)
        try:
            with self._draws, self.shadowed():
                yield
        finally:
            restore(self._module)

    @contextmanager
    def step(self) -> Iterator[None]:
        """See :class:`SharingSteps`."""
        self._calls.clear()
        self._chosen.clear()
        self._behind = None
        with super().step(), gradients_asked_for(_mean):
            yield

    def _share_now(self) -> BatchShare | None:
        # Where a call's arguments need no gradient, nothing tells that its backward has ended, unless the pass has.
        running = self._running or (self._behind if torch._C._current_graph_task_id() >= self._pass != -1 else None)
        return None if running is None else running.share

    def call(self, name: str, child: nn.Module, own: _Own, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`SharingSteps`."""
        call = Call(name, self._shared[name], (args, kwargs))
        number = self._calls[name] = self._calls.get(name, -1) + 1
        # Whether it is a training step says the whole module: a frozen submodule isn't in training mode.
        plans = self._shared[name].draws if self._module.training else self._shared[name].evaluated
        # In backward the user's checkpoint calls it once more.
        draws = plans[min(number, len(plans) - 1)] if plans else DrawPlan()
        running = _Running(share_of(call.rows, self._rank, self._dealing), draws, self._chosen.setdefault(name, {}))
        part, options = call.part(lambda whole: _Cut.apply(whole, running, self))  # type: ignore[no-untyped-call]
        self._inside, self._running = True, running
        self._draws.take(running)
        try:
            output = own(*part, **options)
        finally:
            self._inside, self._running = False, None
            self._draws.take(self._behind, again=True)
        return call.put_together(output, running.share, lambda rows: _Gather.apply(rows, running, self))  # type: ignore[no-untyped-call]

    def behind(self, running: _Running | None) -> None:
        """The backward of a call begins, or has come to its arguments."""
        self._behind, self._pass = running, torch._C._current_graph_task_id()
        self._draws.take(running, again=True)

    def gathered(self, own: Tensor, share: BatchShare) -> Tensor:
        """The rows of all ranks, laid out in memory as this rank's; a collective."""
        most = -(-share.of // self.ranks)
        # A rank without rows was fed one, which lies behind the last.
        padded = torch.cat([own, own.new_zeros((most - share.fed, *own.shape[1:]))]).contiguous() if share.fed < most else own.contiguous()
        everyone = padded.new_empty((self.ranks, *padded.shape))
        if padded.numel():  # as bytes: gloo doesn't know every type
            dist.all_gather([bytes_of(each) for each in everyone.unbind()], bytes_of(padded))
        whole = everyone.transpose(0, 1).reshape(-1, *own.shape[1:])[: share.of]
        return whole if own.is_contiguous() else whole_like(own, Rows(dim=0), share).copy_(whole)


@contextmanager
def gradients_asked_for(change: Callable[[Tensor, Any], Tensor]) -> Iterator[None]:
    """While open, what `torch.autograd.grad` returns is changed, whatever name the user's code has imported it by.

    Args:
        change: gets a gradient and what it is the gradient of.
    """
    original = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if kwargs.get("accumulate_grad", True):  # a backward pass
            return found
        return tuple(each if each is None else change(each, given) for each, given in zip(found, args[4], strict=True))

    with patched(torch.autograd, "_engine_run_backward", run):
        yield


def _mean(gradient: Tensor, _: Any) -> Tensor:
    return like(gradient, _Mean.apply(plain(gradient)))  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    """The mean over ranks of a gradient, and of its own gradient where that is differentiated in turn."""

    @staticmethod
    def forward(_: Any, gradient: Tensor) -> Tensor:
        whole = gradient.clone(memory_format=torch.contiguous_format) / dist.get_world_size()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return _mean(gradients[0], None)


class _CallDraws(GlobalDraws):
    """The draws of one call after another, each by its own plan."""

    #: Whether only what the calls' forwards have drawn is drawn again, in backward.
    _again = False

    def take(self, running: _Running | None, *, again: bool = False) -> None:
        """A call's forward or backward begins."""
        self._again = again
        if running is not None:
            self._plan, self._places = running.draws, {}
            self.go_on(running.chosen, 0)

    def rows_for(self, op: str, tensor: Tensor, generator: torch.Generator | None, shape: tuple[int, ...] | None = None) -> Choice:
        """The choice; None for what no call's forward has drawn, as a checkpoint of the user's runs again what lies between calls."""
        drawn = not self._again or (op, tuple(tensor.shape) if shape is None else shape) in self._chosen
        return super().rows_for(op, tensor, generator, shape) if drawn else None


class _Cut(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks have. Its gradient is that of all rows. Where gradients are differentiated in turn, the
    factors are those of :class:`_Gather`.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, running: _Running, network: SharedNetwork) -> Tensor:
        ctx.running, ctx.network = running, network
        own: Tensor = cut(whole, running.share.rank, running.share.dealing)
        return own.clone() if own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() else own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        network = ctx.network
        network.behind(None)
        gathered = _Gather.apply(plain(gradients[0]) / network.ranks, ctx.running, network)  # type: ignore[no-untyped-call]
        return like(gradients[0], gathered), None, None


class _Gather(torch.autograd.Function):
    """The rows of all ranks. This rank's gradient is its own rows' times the number of ranks, as the engine takes the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, running: _Running, network: SharedNetwork) -> Tensor:
        ctx.running, ctx.network = running, network
        return network.gathered(own, running.share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        running, network = ctx.running, ctx.network
        network.behind(running)
        own = _Cut.apply(plain(gradients[0]), running, network)  # type: ignore[no-untyped-call]
        return like(gradients[0], own * (network.ranks if running.share.rows else 0)), None, None
