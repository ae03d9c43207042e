"""Optimizers as libraries outside of torch have them: what state they keep, in which type, and what they need on the way. Knows no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: torch's own, by name; foreach is what torch takes by itself on a GPU since 2.0, a loop over parameters before.
_TORCH: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, 1e-4, foreach=False),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3),
    "sgd loop": lambda parameters: torch.optim.SGD(parameters, 1e-3, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "momentum loop": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-3, foreach=False),
}


@dataclass(frozen=True, kw_only=True)
class States:
    """What an optimizer keeps for each parameter; its step is one kernel that reads and writes all of it.

    Args:
        master: a copy of the parameter in fp32, which is what it updates.
        wide: states in fp32, element by element.
        same: states in the parameter's own type.
        bytes_each: whole bytes an element, of states that are quantised.
        nibbles: states of half a byte an element.
        block: elements that share one fp32 scale in each quantised state.
        small: parameters of fewer elements keep quantised states in fp32.
        cast: gradients are copied to fp32 for the step, all of them at once (Megatron's, apex's ``FP16_Optimizer``).
        gradients: beside them, an fp32 buffer of every gradient, which lives from step to step (nanotron).
        elsewhere: states lie outside of the device's memory as torch counts it (paged, or on the host).
    """

    master: bool = False
    wide: int = 0
    same: int = 0
    bytes_each: int = 0
    nibbles: int = 0
    block: int = 256
    small: int = 4096
    cast: bool = False
    gradients: bool = False
    elsewhere: bool = False


#: By name; ``paged`` and ``cpu`` in front of one mean that its states lie elsewhere.
KEPT: dict[str, States] = {
    "kernel": States(wide=2),
    "kernel same": States(same=2),
    "wide loop": States(wide=2),
    "master": States(master=True, wide=2),
    "master cast": States(master=True, wide=2, cast=True),
    "master gradients": States(master=True, wide=2, gradients=True),
    "master momentum": States(master=True, wide=1),
    "adam8bit": States(bytes_each=2),
    "adam fp8": States(bytes_each=2, small=4096),
    "adam4bit": States(nibbles=2, block=128),
}


class Stated(torch.optim.Optimizer):
    """An optimizer that has the state and makes the passes of the one it stands for; it computes nothing of use.

    Args:
        parameters: to be trained.
        states: what it keeps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], states: States) -> None:
        super().__init__(parameters, {})
        self.states = states

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        states, count = self.states, parameter.numel()
        kept: dict[str, Tensor] = {}
        if states.gradients:
            kept["gradient"] = torch.zeros_like(parameter, dtype=torch.float32)
        if states.elsewhere:
            return kept
        if states.master:
            kept["master"] = parameter.detach().float()
        for index in range(states.wide):
            kept[f"wide{index}"] = torch.zeros_like(parameter, dtype=torch.float32)
        for index in range(states.same):
            kept[f"same{index}"] = torch.zeros_like(parameter)
        quantised = states.bytes_each + states.nibbles
        for index in range(quantised):
            if count < states.small:
                kept[f"small{index}"] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            size = -(-count // 2) if states.nibbles else count
            kept[f"codes{index}"] = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
            kept[f"scales{index}"] = torch.zeros(-(-count // states.block), dtype=torch.float32, device=parameter.device)
        return kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Each state, the gradient and the parameter read and written once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        casts = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self._fresh(parameter))
                if self.states.cast and parameter.dtype != torch.float32:
                    casts.append(parameter.grad.float())
                for value in state.values():
                    value.mul_(1)
                parameter.add_(parameter.grad)
        return loss


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer by its name: one of torch's, or a key of :data:`KEPT`, perhaps with ``"paged "`` or ``"cpu "`` in front.

    Raises:
        KeyError: for a name that isn't known.
    """
    if name in _TORCH:
        return _TORCH[name](parameters)
    for prefix in ("paged ", "cpu "):
        if name.startswith(prefix):
            kept = KEPT[name.removeprefix(prefix)]
            return Stated(parameters, States(**{**kept.__dict__, "elsewhere": True}))
    return Stated(parameters, KEPT[name])
