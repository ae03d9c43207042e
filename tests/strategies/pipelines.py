"""Run a LightningModule under a pipeline plan, cut as its recorded steps say, without planning; for the tests of the pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from tests.strategies.fitted import QUIET, _decided


def pipeline(cuts: Sequence[str], *, schedule: Schedule = "gpipe", micro_batches: int = 4, ranks: int | None = None, **more: Any) -> Plan:
    ranks = ranks or len(cuts) + 1
    devices = tuple(f"cpu:{rank}" for rank in range(ranks))
    return Plan(engine="pipeline", devices=devices, cuts=tuple(cuts), schedule=schedule, micro_batches=micro_batches, **more)


def stage(module: pl.LightningModule, blocks: Sequence[str], batches: dict[str, Any]) -> Staging:
    """Recordings of these hooks on these batches."""
    hooks = {}
    for hook, batch in batches.items():
        module.train(hook == "training_step")
        hooks[hook] = record(module, None, hook, batch, blocks, rows=2)
    module.train()
    return Staging(hooks=hooks)


def first_two(loader: DataLoader[Any]) -> Any:
    assert loader.collate_fn is not None
    return loader.collate_fn([loader.dataset[0], loader.dataset[1]])


class Losses(pl.Callback):
    """What each batch's end sees: the step's output, and the metrics."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else float("nan"))


def run(
    make: Callable[[], Any],
    data: Any,
    plan: Plan | None,
    *,
    blocks: Sequence[str],
    hooks: Sequence[str] = ("training_step", "validation_step"),
    fn: str = "fit",
    batch_size: int = 8,
    shuffle: bool = True,
    resume: Path | None = None,
    collate: Any = None,
    assigned: dict[str, Any] | None = None,
    train: Any = None,
    sample: Any = None,
    **options: Any,
) -> Any:
    """Under plain Lightning where there is no plan. Returns module, losses, trainer, and what the trainer's function returned.

    Training takes ``train`` for its loaders, if given; ``sample`` is two samples of its batch then.
    """
    pl.seed_everything(3, verbose=False)
    module, losses = make(), Losses()
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch_size, collate_fn=collate)
    staging = None
    if plan is not None:
        before = rng.capture({})
        batches = {hook: sample if hook == "training_step" and sample is not None else first_two(loader) for hook in hooks}
        staging = stage(module, blocks, batches)
        rng.restore(before, {})
    strategy: Any = "auto" if plan is None else AutoParallelStrategy(devices=f"{plan.world_size}xcpu:4GiB")
    settings = {"accelerator": "cpu", "devices": 1, "strategy": strategy, "max_epochs": 2, "log_every_n_steps": 1, **QUIET, **options}
    trainer = pl.Trainer(**{**settings, "callbacks": [losses, *options.get("callbacks", ())]})
    with _decided(plan, findings={"pipeline": staging}, **(assigned or {})):
        if fn == "fit":
            if train is None:
                train = DataLoader(data, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)
            result: Any = trainer.fit(module, train, loader, ckpt_path=resume)
        else:
            result = getattr(trainer, fn)(module, loader)
    return module, losses.losses, trainer, result
