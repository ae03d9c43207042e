"""When and in which order DeepSpeed reduces gradients, which parameters are stepped, and how gradients are clipped.

DeepSpeed 0.19.8 puts gradients into buckets as they arrive, and reduces a full one. Where ranks get them in different orders, or some of
them not at all, they reduce different things together. What a parameter without a gradient is stepped by is zeros, or what an earlier step
left in a buffer (stage 3 and offload). A gradient that isn't finite skips the step. None of that is what one device does; here

- gradients are reduced in one order on all ranks, those that a rank lacks as zeros;
- a parameter is stepped where some rank has a gradient of it;
- clipping is torch's, and happens where the Trainer asks for it. DeepSpeed's own is off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Norm = Callable[[], Iterator[Tensor]]


class Reduction:
    """Keeps an order of the trained parameters in which gradients are reduced; a gradient waits until those before it have arrived. The
    order is at first that of the module, backwards; then that of rank 0's first backward pass.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._order = list(reversed(parameters))
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._by_number = parameters
        self._arrived: dict[int, tuple[Any, ...]] = {}
        self._seen: list[int] = []
        self._next = 0
        self._learnt = len(parameters) < 2
        self._course = 0
        self._used = torch.zeros(len(parameters), dtype=torch.uint8)
        #: The ranks' combined answer, on its way from the GPU to the host.
        self._said: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def note(self, parameter: nn.Parameter) -> None:
        """A gradient has arrived, and isn't reduced yet."""
        self._used[self._numbers[id(parameter)]] = 1

    def arrive(self, reduce: Callable[..., Any], parameter: nn.Parameter, *more: Any) -> None:
        """A gradient has arrived: reduce all whose turn it is.

        Args:
            reduce: DeepSpeed's method, which takes the parameter and what else there is.
            more: for ``reduce``.
        """
        self.note(parameter)
        self._arrived[id(parameter)] = more
        if not self._learnt:
            self._seen.append(self._numbers[id(parameter)])
        while self._next < len(self._order) and (found := self._arrived.get(id(self._order[self._next]))) is not None:
            reduce(self._order[self._next], *found)
            self._next += 1

    def finish(self, reduce: Callable[..., Any], more: Callable[[nn.Parameter], tuple[Any, ...]]) -> None:
        """The backward pass is over: reduce what is left, zeros where there is nothing.

        Args:
            more: what else ``reduce`` takes for a parameter.
        """
        for parameter in self._order[self._next :]:
            _fill(parameter)
            reduce(parameter, *more(parameter))
        self.begin()

    def begin(self) -> None:
        """A backward pass begins: no gradient has arrived yet."""
        self._arrived.clear()
        self._next = 0

    def ran(self, number: int) -> None:
        """Record that this rank has gathered a module's parameters, which all ranks must do together."""
        self._course = hash((self._course, number))

    def settle(self, device: torch.device) -> set[int]:
        """The ids of the parameters of which some rank had a gradient since the last call; a collective, once a step.

        Raises:
            RuntimeError: if the ranks have gathered different modules, which mixes up their parameters; on GPUs possibly one step later.
        """
        if dist.get_world_size() > 1:
            course = torch.tensor(list((self._course % 2**64).to_bytes(8, "big")), dtype=torch.uint8)
            everyones = torch.cat([self._used, course, 255 - course]).to(device, non_blocking=True)
            dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
            self._hear(everyones)
        used = {id(parameter) for parameter, flag in zip(self._by_number, self._used.tolist(), strict=True) if flag}
        self._used, self._course = torch.zeros_like(self._used), 0
        if not self._learnt:
            self._learn()
        return used

    def _hear(self, everyones: Tensor) -> None:
        """Read the ranks' combined answer. If this rank had all gradients, a GPU's host reads it later, without waiting."""
        if everyones.is_cuda and bool(self._used.all()):
            said = torch.empty(everyones.shape, dtype=everyones.dtype, pin_memory=True)
            said.copy_(everyones, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
            self._said.append((there, said))
            while self._said and self._said[0][0].query():
                self._compare(self._said.popleft()[1])
            return
        said = everyones.cpu()
        self._compare(said)
        self._used = said[: len(self._used)]

    def _compare(self, everyones: Tensor) -> None:
        _, highest, lowest = everyones.split([len(self._used), 8, 8])
        if not torch.equal(highest, 255 - lowest):
            raise RuntimeError(
                "the ranks ran different modules in this step, depending on their samples, and stage 3 gathers each module's "
                "parameters from all ranks at once; run with zero_stage 2, or allow=['ddp']"
            )

    def _learn(self) -> None:
        """Take rank 0's order on all ranks."""
        seen = [self._seen]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(seen, src=0)
        first = list(dict.fromkeys(seen[0]))
        known = set(first)
        rest = [self._numbers[id(parameter)] for parameter in self._order if self._numbers[id(parameter)] not in known]
        self._order = [self._by_number[number] for number in (*first, *rest)]
        self._learnt, self._seen = True, []


def _fill(parameter: nn.Parameter) -> None:
    """Give the parameter a gradient of zeros, if it has none. A partitioned parameter gets its shape for that time."""
    if parameter.grad is not None:
        return
    shape = getattr(parameter, "ds_shape", parameter.shape)
    data = parameter.data
    with torch._C.DisableTorchFunctionSubclass():  # this isn't a write by the user
        if data.shape != shape:
            parameter.data = data.new_zeros(1).expand(shape)
        parameter.grad = torch.zeros(shape, dtype=data.dtype, device=data.device)
        parameter.data = data


class Clipping:
    """Clips gradients as ``torch.nn.utils`` does, over all ranks' parts.

    Args:
        parts: this rank's parts of all gradients, when the step is about to begin.
    """

    def __init__(self, parts: Norm) -> None:
        self._parts = parts
        self._value: float | None = None
        self._norm: float | None = None
        #: The factor, by the device that needs it.
        self._coefficient: dict[torch.device, Tensor] = {}

    def ask(self, bound: float, *, by_value: bool) -> None:
        """Clip in the coming step."""
        self._value, self._norm = (bound, None) if by_value else (None, bound)

    def measure(self, device: torch.device) -> None:
        """Take the norm, if gradients are clipped by norm; a collective."""
        self._coefficient.clear()
        if self._norm is None:
            return
        squares = [torch.linalg.vector_norm(part, dtype=torch.float32).double().square() for part in self._parts() if part.numel()]
        total = torch.stack(squares).sum().to(device, non_blocking=True) if squares else torch.zeros((), dtype=torch.float64, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        self._coefficient[total.device] = (self._norm / (total.sqrt() + 1e-6)).clamp(max=1.0).float()

    def apply(self, gradient: Tensor) -> None:
        """Clip a part of the gradients."""
        if self._value is not None:
            gradient.clamp_(-self._value, self._value)
        elif self._coefficient:
            if gradient.device not in self._coefficient:
                self._coefficient[gradient.device] = next(iter(self._coefficient.values())).to(gradient.device)
            gradient.mul_(self._coefficient[gradient.device])

    def done(self) -> None:
        """The step is over: the next step's clipping must be requested anew."""
        self._value = self._norm = None
        self._coefficient.clear()
