"""Norms of gradients over all stages, where Lightning or a hook asks for one; and an error where a hook reads a gradient that isn't here.

``Trainer(gradient_clip_val=…)``, ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and Lightning's ``grad_norm`` become collectives:
each rank works out the norms of the gradients that it has, and all of them take all of these together as one device would. For all other
code a parameter of another stage has an absent tensor for its gradient, whose values can't be read: a norm of part of the gradients never
looks like one of all of them. Knows gradients, absent tensors and ranks; no plan, no trainer.

Parameters that several stages use: their gradients are added up over the stages, so that their copies stay one.

A tied embedding, say, which the first stage looks tokens up in and the last one multiplies by: each stage has a gradient of its own use,
and one device would have the sum. Every copy then takes the same step from the same values, and stays equal to the others bit by bit.
Knows ranks, absent tensors and gradients; no plan, no trainer.

When: once a backward, what this backward gave alone. Not on what gradients have come to when the optimizer steps: a sum that lies in
``.grad`` already would be added up again by the next one wherever gradients aren't set to zero in between, which is the user's to say
(accumulation, ``optimizer_zero_grad``, a step left out). And ``on_after_backward`` finds what it would find on one device.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_autopar._lightning import grads as lightning_grads
from lightning_autopar.exact.absent.absent_tensor import MissingValue, absent_like, is_absent
from lightning_autopar.exact.data.rank_share import index_of
from lightning_autopar.strategies.pipeline.weights.gathered_weights import Group, Pipeline


class StageGradients:
    """The gradients of a module in stages, as hooks and optimizers see them.

    Args:
        module: with absent tensors.
        pipeline: the ranks over which it is spread; every rank makes one at the same time.
        optimizers: those that step on its parameters. They skip parameters without a gradient, so absent tensors have none in their steps.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module = module
        self._pipeline = pipeline
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._depth = 0
        holders = pipeline.tell({name for name, parameter in module.named_parameters() if not is_absent(parameter)})
        self._numbers = {name: number for number, (name, _) in enumerate(module.named_parameters())}
        #: The first place in the pipeline that has each parameter: there its gradient counts.
        self._homes = {name: next(place for place, names in enumerate(holders) if name in names) for name in self._numbers}
        #: By the parameters for which all ranks have computed a norm together before: those that had a gradient then, and the others.
        self._asked: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
        self._exit = ExitStack()
        for optimizer in optimizers:
            self._exit.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._exit.callback(optimizer.register_step_post_hook(self._after_step).remove)
        self._exit.enter_context(_rerouted(self))

    def close(self) -> None:
        """Restore torch, Lightning, the optimizers and the absent tensors. An absent tensor with a gradient couldn't be moved to another
        device: torch reads the gradient after it has set the tensor's data (``Module._apply``), which turns an absent tensor into another
        one.
        """
        self._exit.close()
        with _past_holes():
            for absent, _ in self._absent_tensors:
                absent.grad = None
        self._hidden.clear()

    # -- absent tensors' gradients ---------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Gradients are complete: give each absent tensor that is trained one, which can't be read."""
        self._hidden.clear()
        with _past_holes():
            for parameter, gradient in self._absent_tensors:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = gradient

    @cached_property
    def _absent_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that aren't here, each with what stands for its gradient; made once, as that costs a step's time."""
        return [
            (parameter, absent_like(parameter.detach(), f"the gradient of the parameter {name!r}"))
            for name, parameter in self._module.named_parameters()
            if is_absent(parameter)
        ]

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While open, absent tensors have no gradients: for code that uses all gradients."""
        self._hide()
        try:
            yield
        finally:
            self._reveal()

    def _hide(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        with _past_holes():
            for name, parameter in self._module.named_parameters():
                if not is_absent(parameter) and is_absent(parameter.grad):
                    raise MissingValue(
                        f"the gradient of {name!r} was changed by values that another stage has; the optimizer can't step by it. "
                        "Use torch.nn.utils.clip_grad_norm_ or get_total_norm, which work over all stages, or run without a pipeline"
                    )
            for absent, _ in self._absent_tensors:
                if absent.grad is not None:
                    self._hidden.append((absent, absent.grad))
                    absent.grad = None

    def _reveal(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            with _past_holes():
                for absent, gradient in self._hidden:
                    absent.grad = gradient
            self._hidden.clear()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hide them after the closure, in which hooks run and gradients are clipped."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer itself
        self._depth, self._hidden = 0, []  # what an exception may have left
        if closure is None:
            self._hide()
            return args, kwargs
        stepping = False

        @functools.wraps(closure)
        def then_hide() -> Any:
            nonlocal stepping
            if stepping:  # the optimizer may call it again
                self._reveal()
            result = closure()
            self._hide()
            stepping = True
            return result

        if len(args) > 1:
            return (args[0], then_hide, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_hide}

    def _after_step(self, *_: Any) -> None:
        if self._depth:
            self._reveal()

    # -- norms -------------------------------------------------------------------------------------------------------------------------

    def names_of(self, gradients: Sequence[Tensor]) -> list[str] | None:
        """The names of the parameters whose gradients these very objects are; None if none of them is a gradient.

        Raises:
            MissingValue: if some of them are, and some aren't.
        """
        with _past_holes():
            known = {id(parameter.grad): name for name, parameter in self._module.named_parameters() if parameter.grad is not None}
        return self._names(gradients, known)

    def names_of_parameters(self, parameters: Sequence[Tensor]) -> list[str] | None:
        """The names of these parameters, as :meth:`names_of`."""
        return self._names(parameters, {id(parameter): name for name, parameter in self._module.named_parameters()})

    @staticmethod
    def _names(tensors: Sequence[Tensor], known: Mapping[int, str]) -> list[str] | None:
        names = [known.get(id(tensor)) for tensor in tensors]
        if not any(names) and not any(is_absent(tensor) for tensor in tensors):
            return None
        found = [name for name in names if name is not None]
        if len(found) < len(names):
            raise MissingValue(
                f"a norm was asked for of {len(found)} gradients of the module and {len(names) - len(found)} other tensors; in a pipeline "
                "it can be taken over the parameters' own .grad alone: pass these, or run without a pipeline (allow=['single', 'ddp'])"
            )
        return found

    def norms(self, names: Sequence[str], norm_type: float) -> dict[str, Tensor]:
        """The norms of these parameters' gradients, on every rank, without those that have none; a collective, for which the host waits.

        Each in its gradient's type, on the pipeline's device.

        Raises:
            RuntimeError: if the ranks don't ask for the same ones.
        """
        table = self._gather_norms(names, norm_type)
        parameters = dict(self._module.named_parameters())
        there = self._check(table)
        return {
            name: table[0, self._numbers[name]].to(parameters[name].dtype) for name in dict.fromkeys(names) if there[self._numbers[name]]
        }

    def _gather_norms(self, names: Sequence[str], norm_type: float) -> Tensor:
        """By parameter (column): the norm, 0 where there is no gradient; whether there is one; how many ranks compute it. On the device."""
        parameters = dict(self._module.named_parameters())
        place, device = self._pipeline.place, self._pipeline.device
        here = {name: None for name, home in self._homes.items() if home == place and parameters[name].grad is not None}
        own = [name for name in dict.fromkeys(names) if name in here]
        said = torch.zeros(3, len(self._numbers), dtype=torch.float64)
        said[1, [self._numbers[name] for name in here]] = 1.0
        said[2, [self._numbers[name] for name in dict.fromkeys(names)]] = 1.0
        table = said.to(device, non_blocking=True)
        if own:
            columns = index_of(tuple(self._numbers[name] for name in own), device)
            norms = torch.stack([_norm(parameters[name].grad, norm_type).to(device, torch.float64) for name in own])
            # Only one rank's norm of each parameter isn't 0, so that sums are exact.
            table[0].index_copy_(0, columns, norms)
        dist.all_reduce(table, group=self._pipeline.group)
        return table

    def _check(self, table: Tensor) -> list[float]:
        """Whether each parameter has a gradient on some rank; the host waits for it.

        Raises:
            RuntimeError: if the ranks didn't ask for the same ones.
        """
        there, asking = table[1:].tolist()
        for name, number in self._numbers.items():
            if there[number] and 0 < asking[number] < len(self._pipeline.ranks):
                raise RuntimeError(
                    f"a norm of gradients that counts {name!r} was asked for on {int(asking[number])} of {len(self._pipeline.ranks)} ranks "
                    "only; every rank of a pipeline has to ask for the norm of the same parameters"
                )
        found: list[float] = there
        return found

    def total_norm(self, names: Sequence[str], norm_type: float, error_if_nonfinite: bool, like: Tensor) -> Tensor:
        """Like ``torch.nn.utils.get_total_norm`` of all stages' gradients; the same number on every rank. The host waits for the device the
        first time that the ranks compute the norm of these parameters.
        """
        types = {parameter.dtype for parameter in self._module.parameters()}
        if norm_type > 0 and len(types) == 1:
            table, dtype = self._gather_norms(names, norm_type), types.pop()
            if (key := tuple(names)) not in self._asked:
                there = self._check(table)
                late = [name for name in names if not there[self._numbers[name]]]
                self._asked[key] = [name for name in names if there[self._numbers[name]]] or late, late

            def total_of(some: Sequence[str]) -> tuple[Tensor, Tensor]:
                rows = table.index_select(1, index_of(tuple(self._numbers[name] for name in some), table.device))
                return torch.linalg.vector_norm(rows[0].to(dtype), norm_type), rows[1]

            # The norm of one without a gradient, a 0 in their midst, can change the total's last bit, as torch adds them up in groups: on
            # the ranks alone, perhaps, where its gradient is an absent tensor. So it counts where it has a gradient by now.
            early, late = self._asked[key]
            total, _ = total_of(early)
            if late:
                total = torch.where(total_of(late)[1].any(), total_of(names)[0], total)
        else:
            norms = self.norms(names, norm_type)
            found = [norms[name] for name in names if name in norms]
            if not found:
                return torch.tensor(0.0, device=like.device)
            total = torch.linalg.vector_norm(torch.stack(found), norm_type)
        return self._finite(total, norm_type, error_if_nonfinite).to(like.device)

    def _finite(self, total: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return total

    def owns_all(self, module: nn.Module) -> bool:
        """Whether these are parameters of the module in stages."""
        own = {id(parameter) for parameter in self._module.parameters()}
        return any(id(parameter) in own for parameter in module.parameters())

    def module_norms(self, module: nn.Module, norm_type: float) -> dict[str, Tensor]:
        """The norms of a submodule's gradients, by their names in it."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        wanted = {name: names[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in names}
        norms = self.norms(list(wanted.values()), norm_type)
        return {name: norms[whole] for name, whole in wanted.items() if whole in norms}


def _past_holes() -> AbstractContextManager[None]:
    """While open, properties of absent tensors are read without ``__torch_function__``, which costs some µs each time."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def _norm(gradient: Any, norm_type: float) -> Tensor:
    """The norm of one gradient; of a shard, that of the whole gradient: the ranks with the other shards compute it, too."""
    dense = gradient.coalesce().values() if gradient.layout != torch.strided else gradient
    norm: Any = torch.linalg.vector_norm(dense.detach(), norm_type)
    whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole


# -- the functions of torch and Lightning that ask for norms ---------------------------------------------------------------------------

#: The gradients of this process's run in stages.
_current: StageGradients | None = None
#: The original functions' code, by name.
_originals: dict[str, Callable[..., Any]] = {}


def _get_total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> Any:
    from lightning_autopar.strategies.pipeline.weights import clipping_norms as norms

    return norms.get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def _clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Any:
    from lightning_autopar.strategies.pipeline.weights import clipping_norms as norms

    return norms.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
    from lightning_autopar.strategies.pipeline.weights import clipping_norms as norms

    norms.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)


def _clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    from lightning_autopar.strategies.pipeline.weights import clipping_norms as norms

    norms.clip_grad_value_(parameters, clip_value, foreach)


def _grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    from lightning_autopar.strategies.pipeline.weights import clipping_norms as norms

    return norms.grad_norm(module, norm_type, group_separator)


_ROUTES = (
    ("_get_total_norm", clip_grad, _get_total_norm),
    ("clip_grad_norm_", clip_grad, _clip_grad_norm_),
    ("_clip_grads_with_norm_", clip_grad, _clip_grads_with_norm_),
    ("clip_grad_value_", clip_grad, _clip_grad_value_),
    ("grad_norm", lightning_grads, _grad_norm),
)


@contextmanager
def _rerouted(gradients: StageGradients) -> Iterator[None]:
    """While open, these functions are ours, also where they were imported by name: their code is replaced, not their names."""
    global _current
    assert _current is None, "a process runs one module at a time"
    functions: dict[str, Any] = {name: inspect.unwrap(getattr(home, name)) for name, home, _ in _ROUTES}
    codes = {name: function.__code__ for name, function in functions.items()}
    for name, _, ours in _ROUTES:
        function = functions[name]
        _originals[name] = types.FunctionType(codes[name], function.__globals__, name, function.__defaults__)
        function.__code__ = ours.__code__
    _current = gradients
    try:
        yield
    finally:
        _current = None
        for name, function in functions.items():
            function.__code__ = codes[name]
        _originals.clear()


def get_total_norm(tensors: Any, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> Tensor:
    """``torch.nn.utils.get_total_norm`` over all stages."""
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    assert _current is not None
    names = _current.names_of(gradients)
    if names is None:
        total: Tensor = _originals["_get_total_norm"](gradients, norm_type, error_if_nonfinite, foreach)
        return total
    return _current.total_norm(names, float(norm_type), error_if_nonfinite, gradients[0])


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over all stages."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    assert _current is not None
    names = _current.names_of_parameters(given)
    if names is None:
        total: Tensor = _originals["clip_grad_norm_"](given, max_norm, norm_type, error_if_nonfinite, foreach)
        return total
    total = _current.total_norm(names, float(norm_type), error_if_nonfinite, given[0])
    clip_grads_with_norm_(given, max_norm, total, foreach)
    return total


def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None) -> None:
    """``torch.nn.utils.clip_grads_with_norm_`` on this rank's gradients."""
    if is_absent(total_norm):
        raise MissingValue("gradients are to be clipped by a norm that was made of another stage's gradients; use get_total_norm for it")
    _originals["_clip_grads_with_norm_"](_here(parameters), max_norm, total_norm, foreach)


def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None) -> None:
    """``torch.nn.utils.clip_grad_value_`` on this rank's gradients."""
    here = [parameter for parameter in _here(parameters) if parameter.grad is not None]
    if here:  # torch's function takes no empty list
        _originals["clip_grad_value_"](here, clip_value, foreach)


def grad_norm(module: nn.Module, norm_type: Any, group_separator: str) -> dict[str, Any]:
    """Lightning's ``grad_norm`` (``lightning.pytorch.utilities.grads``) over all stages."""
    assert _current is not None
    if float(norm_type) <= 0 or not _current.owns_all(module):
        given: dict[str, Any] = _originals["grad_norm"](module, norm_type, group_separator)
        return given
    norm_type = float(norm_type)
    found = _current.module_norms(module, norm_type)
    norms: dict[str, Any] = {f"grad_{norm_type}_norm{group_separator}{name}": norm for name, norm in found.items()}
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.tensor(list(norms.values())).norm(norm_type)
    return norms


def _here(parameters: Any) -> list[Tensor]:
    """Those that this rank has."""
    return [parameter for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters) if not is_absent(parameter)]


class SharedParameters:
    """The parameters that stages on several ranks use, and the process groups of those ranks.

    Every rank of all replicas must make one at the same time.

    Args:
        module: with absent tensors.
        replicas: the global ranks of every replica, this one's among them, in the pipeline's order.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline, replicas: Sequence[Sequence[int]]) -> None:
        self._module = module
        self._pipeline = pipeline
        holders = pipeline.tell({name for name, parameter in module.named_parameters() if not is_absent(parameter)})
        #: The places in the pipeline that hold each parameter, by its first name, where there are several.
        self.places: dict[str, tuple[int, ...]] = {}
        for name, _ in module.named_parameters():
            places = tuple(place for place, names in enumerate(holders) if name in names)
            if len(places) > 1:
                self.places[name] = places
        self._groups: dict[tuple[int, ...], Group] = {}
        for places in sorted(set(self.places.values())):  # all ranks make all groups, in one order
            if len(places) == len(pipeline.ranks):
                self._groups[places] = pipeline.group
                continue
            for ranks in replicas:
                group = dist.new_group([ranks[place] for place in places])
                if tuple(ranks) == pipeline.ranks:
                    self._groups[places] = group

    def close(self) -> None:
        """Leave the groups that were made."""
        for places, group in self._groups.items():
            if len(places) < len(self._pipeline.ranks) and self._pipeline.place in places:
                dist.destroy_process_group(group)
        self._groups.clear()

    def sum_gradients(self, gradients: MutableMapping[Any, Tensor]) -> None:
        """Add up the gradients of one backward over the stages, in place; every rank must call it, once a backward.

        Args:
            gradients: by parameter, of this backward alone. A parameter that got one only on another stage has one afterwards.
        """
        parameters = dict(self._module.named_parameters())
        underway: list[Any] = []
        for places, group in self._groups.items():
            if self._pipeline.place not in places:
                continue
            shared = [parameters[name] for name in self.places if self.places[name] == places]
            anywhere = self._anywhere([gradients.get(parameter) is not None for parameter in shared], group)
            underway += [self._sum(parameter, gradients, group) for parameter, has in zip(shared, anywhere, strict=True) if has]
        for finish in underway:
            finish()

    def _anywhere(self, here: list[bool], group: Group) -> list[bool]:
        """Whether each parameter has a gradient on some rank. If all have one here, this rank needn't wait for the others."""
        counted = torch.tensor(here, dtype=torch.int32).to(self._pipeline.device, non_blocking=True)
        dist.all_reduce(counted, group=group)
        everyones: list[bool] = here if all(here) else counted.bool().tolist()
        return everyones

    def _sum(self, parameter: Tensor, gradients: MutableMapping[Any, Tensor], group: Group) -> Any:
        """Begin with one parameter; the returned function must be called after all have begun. A sparse gradient becomes a dense one."""
        own = gradients.get(parameter)
        if own is None:
            total = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
        else:
            total = own.to_dense() if own.layout != torch.strided else own
        local = total.to_local() if isinstance(total, DTensor) else total
        # Collectives need contiguous tensors; a copy of one that isn't is copied back below.
        sent = local.contiguous()
        work = dist.all_reduce(sent, group=group, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            if sent is not local:
                local.copy_(sent)
            gradients[parameter] = total

        return finish
