"""How many functions Python and its builtins call in a training step under each engine: by step, parameter, module, unit and bucket.

What an engine costs the host is its calls times what a call costs on a machine, which calibration measures. The counts are the same on
every machine: they belong to the versions of DeepSpeed, torch and Lightning. Steps of small modules of several shapes are counted under
``sys.setprofile``, and the counts taken apart by least squares; ``lightning_autopar/strategies/fsdp/timing.py`` has what comes of it.

    python benchmarks/python_calls.py
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.plans import OFFLOADS

_STEPS, _COUNTED = 9, 7
_QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
#: Linear layers, their width, whether they have a bias, whether a module without parameters follows each, whether each is a unit of FSDP.
SHAPES = ((4, 8, True, False, True), (12, 8, True, False, True), (12, 8, False, False, True), (12, 8, True, True, True))
WIDE, FLAT = (12, 256, True, False, True), (12, 8, True, False, False)


class Counted(pl.LightningModule):
    """Counts the calls of one step on rank 0."""

    def __init__(self, layers: int, width: int, bias: bool, followed: bool, out: Path) -> None:
        super().__init__()
        self.out, self.counter = out, Counter[str]()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts.append(nn.Linear(width, width, bias=bias))
            parts += [nn.Identity()] if followed else []
        self.layers, self.width = nn.Sequential(*parts), width

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == _COUNTED:
            counter = self.counter
            threading.setprofile(lambda frame, event, argument: counter.update((event,)))
            sys.setprofile(lambda frame, event, argument: counter.update((event,)))
        elif batch_idx == _COUNTED + 1:
            sys.setprofile(None)
            threading.setprofile(None)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.out.write_text(json.dumps(self.counter["call"] + self.counter["c_call"]))


def plans(shape: tuple[int, int, bool, bool, bool]) -> dict[str, Plan]:
    """By name."""
    layers, _, _, followed, cut = shape
    units = tuple(f"layers.{index * (2 if followed else 1)}" for index in range(layers)) if cut else ()
    one, two = ("cpu:0",), ("cpu:0", "cpu:1")
    found = {"single": Plan(engine="single", devices=one)}
    for name, devices in (("x1", one), ("x2", two)):
        found[f"fsdp offload {name}"] = Plan(engine="fsdp", devices=devices, shard=units, reshard_after_forward=True, offload=OFFLOADS)
        found[f"zero-2 offload {name}"] = Plan(engine="zero", devices=devices, zero_stage=2, offload=("optimizer",))
        found[f"zero-3 offload {name}"] = Plan(engine="zero", devices=devices, zero_stage=3, offload=OFFLOADS)
    for stage in (1, 2, 3):
        found[f"zero-{stage} x2"] = Plan(engine="zero", devices=two, zero_stage=stage)
    return found


def count(shape: tuple[int, int, bool, bool, bool], plan: Plan) -> int:
    """Calls of a step, found out in a forked child."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(writer, shape, plan))
    child.start()
    writer.close()
    answer = reader.recv()
    child.join()
    if isinstance(answer, str):
        raise RuntimeError(f"{plan.title()}:\n{answer}")
    return int(answer)


def _answer(writer: Any, shape: tuple[int, int, bool, bool, bool], plan: Plan) -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_autopar"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    layers, width, bias, followed, _ = shape
    try:
        strategy = AutoParallelStrategy(plan=plan, devices=f"{plan.world_size}xcpu:2GiB", calibrate="off")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "count"
            trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, default_root_dir=folder, **_QUIET)
            trainer.fit(
                Counted(layers, width, bias, followed, out), DataLoader(TensorDataset(torch.randn(_STEPS * 4, width)), batch_size=4)
            )
            writer.send(json.loads(out.read_text()))
    except BaseException:  # whatever it is, it is the answer
        writer.send(traceback.format_exc())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed

    import_deepspeed("cpu")
    alone = {shape: count(shape, plans(shape)["single"]) for shape in (*SHAPES, WIDE, FLAT)}
    print("single", {str(shape): calls for shape, calls in alone.items()}, flush=True)
    for name in plans(SHAPES[0]):
        if name == "single":
            continue
        shards = name.startswith("fsdp")
        shapes = (*SHAPES, FLAT if shards else WIDE)
        rows, beside = [], []
        for shape in shapes:
            layers, width, bias, followed, cut = shape
            parameters = layers * (2 if bias else 1)
            modules = layers * (2 if followed else 1) + 2  # with the root and the sequence
            elements = layers * (width * width + width * bias)
            # Of ZeRO the buckets of gradients that fill; of FSDP the units.
            pieces = (layers if cut else 0) + 1 if shards else elements // max(1 << 16, elements // 16)
            rows.append((1, parameters, modules, pieces))
            beside.append(count(shape, plans(shape)[name]) - alone[shape])
        found, *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(beside, dtype=float), rcond=None)
        words = dict(
            zip(("step", "parameter", "module", "unit" if shards else "bucket"), (round(float(each)) for each in found), strict=True)
        )
        print(f"{name:18} {words}, beside one device's: {beside}", flush=True)


if __name__ == "__main__":
    main()
