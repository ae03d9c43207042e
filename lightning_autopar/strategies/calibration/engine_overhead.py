"""Measures what an engine adds to a step, on a module so small that its step contains nothing else.

Each function runs in a forked child. Knows engines and how plans run; nothing of how plans are chosen, nor of where measurements are kept.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import engines
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import Launcher, attach_data, run_arguments
from lightning_autopar.devices.inventory import Device
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.calibration.between_ranks import torch_device, usual, waiter
from lightning_autopar.strategies.processes.idle_strategy import IdleStrategy
from lightning_autopar.strategies.processes.worker import make_job
from lightning_autopar.strategies.processes.worker_supervisor import run_folder, run_generation

_WIDTH, _LAYERS, _STEPS = 8, 4, 18
TINY_BLOCKS = tuple(f"layers.{index}" for index in range(_LAYERS))
#: The first steps aren't measured: no optimizer state, and memory is recorded.
_WARM_UP = 5
#: Wall-clock time beyond this multiple of a step's processor time is others' work on the machine: so small a step hardly waits.
_MOST_WAITING = 1.5


class Taken(NamedTuple):
    """The time and the calls of a step.

    Args:
        seconds: of the wall clock.
        calls: all of Python's calls, of functions and of builtins.
    """

    seconds: float
    calls: int


class _Tiny(LightningModule):
    """So small that a step only takes the time of what surrounds it. Rank 0 records how long one took, and the last one's calls."""

    def __init__(self, out: Path | None = None) -> None:
        super().__init__()
        self.out = out
        self.begun: list[tuple[float, float]] = []
        self.calls: Counter[str] = Counter()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.mean(self.layers(batch[0]).square())
        self.log("loss", loss)  # as nearly everybody's step does; with several ranks that takes a collective
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == _STEPS - 1:
            sys.setprofile(None)
        self.begun.append((time.perf_counter(), time.process_time()))
        if batch_idx == _STEPS - 2:
            calls = self.calls
            sys.setprofile(lambda frame, event, argument: calls.update((event,)))

    def on_train_end(self) -> None:
        if self.out is not None and self.global_rank == 0:
            steps = list(itertools.pairwise(self.begun))[_WARM_UP:-1]
            taken, busy = (usual([after[clock] - before[clock] for before, after in steps]) for clock in (0, 1))
            self.out.write_text(json.dumps([min(taken, _MOST_WAITING * busy), _calls(self.calls)]), encoding="utf-8")


class _Launcher(Launcher):
    """Runs a given plan in forked workers without planning, and drops their results."""

    def __init__(self, run_plan: RunPlan) -> None:
        self.run_plan = run_plan

    @property
    def is_interactive_compatible(self) -> bool:
        """Forked workers run in notebooks too."""
        return True

    def kill(self, signum: Any) -> None:
        """The generation that started the workers ends them."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function``."""
        assert trainer is not None
        call = partial(function, **run_arguments(function, args, kwargs))
        attach_data(trainer, call.keywords)
        with run_folder(1 << 20) as folder:
            outcome = run_generation(make_job(self.run_plan, trainer, call, folder))
        if outcome.error is not None:
            raise outcome.error


class _Calibrating(IdleStrategy):
    def __init__(self, launcher: _Launcher) -> None:
        super().__init__()
        self._started_by = launcher

    def _configure_launcher(self) -> None:
        self._launcher = self._started_by


def step_taken(plan: Plan, devices: Sequence[Device]) -> Taken:
    """Measure a step of a tiny module under a plan, in real workers; in a forked child, so that the trainer leaves no traces here."""
    size = max(2 * len(devices), 2 * plan.micro_batches)
    value = engines.of(plan).sample_value(_Tiny(), [torch.zeros(2, _WIDTH)], TINY_BLOCKS)
    launcher = _Launcher(RunPlan(plan=plan, devices=tuple(devices), findings={plan.engine: value}))
    strategy = _Calibrating(launcher)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu" if devices[0].kind == "cpu" else "cuda",
        devices=1,
        strategy=strategy,
        max_steps=_STEPS,
        limit_val_batches=0,
        **quiet,  # type: ignore[arg-type]
    )
    samples = TensorDataset(torch.zeros(_STEPS * size, _WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds"
        trainer.fit(_Tiny(out), DataLoader(samples, batch_size=size))
        return Taken(*json.loads(out.read_text(encoding="utf-8")))


#: The tiny module's FSDP units, its root included.
TINY_UNITS = _LAYERS + 1
#: Bytes of one unit's parameters.
TINY_BYTES = 4 * (_WIDTH + 1) * _WIDTH


def plain_step(device: Device) -> Taken:
    """Times the tiny module's own operations of a step, in a bare loop."""
    where = torch_device(device)
    module, wait = _Tiny().to(where), waiter(where)
    optimizer = module.configure_optimizers()
    batch = (torch.zeros(2, _WIDTH, device=where),)
    calls: Counter[str] = Counter()

    def step() -> None:
        torch.mean(module.layers(batch[0]).square()).backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - begun)
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        step()
    finally:
        sys.setprofile(None)
    return Taken(usual(taken), _calls(calls))


def _calls(events: Counter[str]) -> int:
    return events["call"] + events["c_call"]
