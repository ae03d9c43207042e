"""Lets the user's optimizer step the parts of the user's parameters, where DeepSpeed would have it step flat buffers.

DeepSpeed puts a group's parameters into one flat tensor and lets the optimizer step this rank's part of that. An optimizer then knows one
parameter for each group: it steps parameters without a gradient as well, with zeros, so that they decay or move on, and all have one count
of steps. Here the optimizer gets a fragment of each parameter instead, a view into the flat tensor, and treats it as it would treat the
parameter on one device. That is right for optimizers that treat each element by itself. Knows no plan and no LightningModule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar.state.flat_parts import NUMBERS, FlatPart

#: How many elements are summed at once.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPart:
    """This rank's part of a parameter.

    Args:
        fragment: the part, in one dimension; empty where the rank has none. What the user's optimizer steps.
        offset: how many elements of the flattened parameter come before it.
    """

    parameter: nn.Parameter
    fragment: nn.Parameter
    offset: int

    def cut(self, whole: Tensor) -> Tensor:
        """Cut the same part out of another tensor of the parameter's shape."""
        return whole.flatten()[self.offset : self.offset + self.fragment.numel()]


def fragment_parts(pieces: Iterable[ParameterPart], weights: Mapping[int, FlatPart]) -> dict[int, FlatPart]:
    """The pieces as parts of tensors, by the fragment's id.

    Args:
        weights: by id, its part of each partitioned parameter, whose own shape is empty.
    """
    return {
        id(piece.fragment): FlatPart(
            parameter=piece.parameter,
            shape=weights[id(piece.parameter)].shape if id(piece.parameter) in weights else tuple(piece.parameter.shape),
            flat=piece.fragment.detach(),
            start=piece.offset,
        )
        for piece in pieces
    }


class OptimizerBridge(Optimizer):
    """The optimizer that DeepSpeed gets: it passes each step on to the user's.

    Args:
        users: the user's optimizer, with the module's parameters in its groups.
    """

    def __init__(self, users: Optimizer) -> None:
        self.users = users
        #: For each of DeepSpeed's groups, the user's group: DeepSpeed doesn't work with groups in which nothing is trained.
        self.numbers = [
            number for number, group in enumerate(users.param_groups) if any(_is_trained(parameter) for parameter in group["params"])
        ]
        members = [[each for each in users.param_groups[number]["params"] if _is_trained(each)] for number in self.numbers]
        groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 0.0} for parameters in members]
        #: The parameters that are trained, by DeepSpeed's groups.
        self.trained: list[list[nn.Parameter]] = [list(parameters) for parameters in members]
        super().__init__(groups, {})
        self.pieces: list[list[ParameterPart]] = [[] for _ in users.param_groups]
        self._flat: dict[int, tuple[int, list[tuple[ParameterPart, int, int]]]] = {}
        #: The ids of the parameters that have a gradient, and the clipping of gradients; set before each step.
        self.used: set[int] = set()
        self.clip: Callable[[Tensor], None] = lambda gradient: None

    def attach(self, partitions: Iterable[tuple[int, Any, list[tuple[nn.Parameter, int, int, int]]]]) -> None:
        """Give the user's optimizer its fragments, with its existing state; see ``deepspeed.partitions`` for the argument."""
        known: dict[int, ParameterPart] = {}
        for index, flat, found in partitions:
            number, inside = self.numbers[index], []
            for parameter, start, end, offset in found:
                fragment = nn.Parameter(flat.data[start:end])
                piece = ParameterPart(parameter=parameter, fragment=fragment, offset=offset)
                known[id(parameter)] = piece
                inside.append((piece, start, end))
            self._flat[id(flat)] = number, inside
        state, self.users.state = self.users.state, type(self.users.state)(dict)
        for number, group in enumerate(self.users.param_groups):
            for position, parameter in enumerate(group["params"]):
                if (its := known.get(id(parameter))) is None:
                    continue
                self.pieces[number].append(its)
                group["params"][position] = its.fragment
                if parameter in state:  # Adagrad makes its state when it is built.
                    self.users.state[its.fragment] = {
                        name: its.cut(value).clone().to(its.fragment.device)
                        if isinstance(value, Tensor) and value.numel() == parameter_numel(parameter) and name not in NUMBERS
                        else value
                        for name, value in state[parameter].items()
                    }

        self._groups = len(self.users.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step those fragments that lie in the flat tensors of this optimizer's groups."""
        groups = self.users.param_groups
        if len(groups) != self._groups:
            raise ValueError(
                "the optimizer was given a group of parameters during the run, which DeepSpeed doesn't notice; add all "
                "groups in configure_optimizers, or run with allow=['single', 'fsdp']"
            )
        for group in self.param_groups:
            for flat in group["params"]:
                number, inside = self._flat[id(flat)]
                self.clip(flat.grad)
                for piece, start, end in inside:
                    if end > start and id(piece.parameter) in self.used:
                        piece.fragment.grad = flat.grad[start:end]
                self.users.param_groups = [groups[number]]
                try:
                    self.users.step()
                finally:
                    self.users.param_groups = groups
                    for piece, _, _ in inside:
                        piece.fragment.grad = None


class Edits:
    """Takes over writes into parameters between two steps, which DeepSpeed wouldn't see. If the optimizer steps copies in host memory, a
    CPU device simply copies again, which costs less than comparing; elsewhere a sum over the parts shows whether they have changed since
    the step. A parameter whose ``data`` was exchanged is put back to where DeepSpeed updates it.

    Args:
        pairs: a copy, and the part of the parameters that it is of.
        places: parameters, each with its view of a flat buffer; none at stage 3.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], places: list[tuple[nn.Parameter, Tensor]]) -> None:
        self._pairs = pairs
        self._places = [(parameter, place, place.data_ptr()) for parameter, place in places if place.numel()]
        self._sums: list[Tensor] = []
        self.remember()

    def remember(self) -> None:
        """To be called after a step."""
        self._sums = [_sum(own) for _, own in self._pairs if own.device.type != "cpu"]

    def take_over(self) -> None:
        """To be called before a step."""
        for parameter, place, address in self._places:
            if parameter.data_ptr() != address:
                _put_back(parameter, place)
        found = [_sum(own) for _, own in self._pairs if own.device.type != "cpu"]
        same = bool(found) and bool((torch.stack(found) == torch.stack(self._sums)).all())
        for copy, own in self._pairs:
            if not same:
                copy.data.copy_(own.data)


def _put_back(parameter: nn.Parameter, place: Tensor) -> None:
    if parameter.untyped_storage().data_ptr() == place.untyped_storage().data_ptr():
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} was made to share another one's memory (by its .data), but DeepSpeed updates "
            "each by itself; copy the values instead (with torch.no_grad(): parameter.copy_(other)), or run with allow=['single', 'ddp']"
        )
    place.copy_(parameter.data)
    parameter.data = place


def _sum(tensor: Tensor) -> Tensor:
    """A sum that almost certainly differs if any bit of the tensor does."""
    bits = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(_CHUNK):
        total = total * 31 + (part * torch.arange(1, part.numel() + 1, dtype=torch.int64, device=part.device)).sum()
    return total


def parameter_numel(parameter: nn.Parameter) -> int:
    """How many elements the whole parameter has; partitioned ones look empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.numel() > 0
