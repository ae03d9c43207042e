"""What it costs the host to issue an operation: steps of a model so small that there is nothing else to do. Knows torch; no planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar.planning.calibrate_curves import Curve
from lightning_autopar.strategies.calibration_clock import Clock


class _Small(nn.Module):
    """A block of the common operations, so small that a step on it is nothing but issuing them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.mix(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return torch.add(x, self.down(F.relu(self.up(x))))


class _Names(TorchDispatchMode):
    """Names of the operations that run, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten":
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def issue_curves(device: torch.device, subject: str, least: dict[str, float], *, steps: int = 40) -> list[Curve]:
    """Seconds of host time an operation, in forward, backward and the optimizer's step of a very small model.

    Args:
        device: where.
        subject: under which the curves are kept.
        least: what the smallest measured run of each operation takes beyond that.
        steps: how many are timed.
    """
    now = Clock(device).now
    model = nn.Sequential(_Small(), _Small()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, 4, 8, device=device)
    loss: list[Tensor] = []
    phases: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss.append(model(x).square().mean()),
        "backward": lambda: loss.pop().backward(),
        "optimizer": lambda: (optimizer.step(), optimizer.zero_grad()),
    }
    for run in [*phases.values()] * 3:
        run()
    taken: dict[str, list[float]] = {phase: [] for phase in phases}
    for _ in range(steps):
        for phase, run in phases.items():
            begun = now()
            run()
            taken[phase].append(now() - begun)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    curves = []
    for phase, run in phases.items():
        with _Names() as seen:
            run()
        known = 0.0 if device.type == "cuda" else sum(least.get(name, 0.0) for name in seen.names)
        spent = sorted(taken[phase])[steps // 4]
        curves.append(
            Curve(subject=subject, thing=f"issue/{phase}", sizes=(1,), seconds=(max(spent - known, spent / 4) / max(1, len(seen.names)),))
        )
    return curves
