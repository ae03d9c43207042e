"""Predicted against real memory of every rank: FSDP2 and DDP over gloo on two CPU devices, and rank 0 of a world of eight by itself.

Each job is run by the Trainer with ``strategy=AutoParallelStrategy(plan=…)``, as a user's would be. Measured is what torch's CPU allocator
holds at the fullest moment of a step, over all threads of the rank (``live_bytes.c``), less what the process held before the run began. Of
three steps the lowest peak counts, the highest is told besides: gloo frees its copy of a buffer in a thread of its own, which comes to it
late where cores are scarce. Predicted is what the report of the same run said. Larger worlds run without the Trainer and without the other
ranks (``memory/fake_world.py``).

    python benchmarks/memory_fsdp.py                 # writes benchmarks/results/memory_fsdp.json
    python benchmarks/memory_fsdp.py --quick         # a few cases
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["AUTOPAR_CACHE"] = "off"  # what is compared is the prediction, not what earlier runs taught it

from live_bytes import live_bytes, peak_bytes, reset_peak, restarted_with_counter  # noqa: E402

RESULTS = HERE / "results" / "memory_fsdp.json"
GOAL = 0.02
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
#: Cases that run in every precision; half precision is slow on a CPU.
ALL_PRECISIONS = ("mlp", "odd")
QUICK = ("gpt", "odd")
WORLD = 8


def run(case: Any, engine: str, *, reshard: bool | None, recompute: bool, precision: str, folder: Path) -> list[dict[str, Any]]:
    """Train for a few steps on two ranks; measured and predicted bytes of each."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from lightning_autopar import AutoParallelStrategy
    from lightning_autopar.memory.trace.find_blocks import find_blocks
    from lightning_autopar.plans import Plan

    class Recorder(pl.Callback):
        """Each rank's peaks of the last steps; the first two have no optimizer state, or the gradients of another kind of step."""

        def __init__(self) -> None:
            self.peaks: list[int] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % trainer.accumulate_grad_batches == 0:
                reset_peak()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                self.peaks.append(peak_bytes())
                (folder / f"rank{trainer.global_rank}").write_text(json.dumps(self.peaks[2:]))

    module, data = case.module(), case.data()
    blocks = tuple(find_blocks(module))
    plan = Plan(
        engine=engine,  # type: ignore[arg-type]
        devices=("cpu:0", "cpu:1"),
        reshard_after_forward=reshard,
        shard=blocks if engine == "fsdp" else (),
        recompute=blocks if recompute else (),
    )
    strategy = AutoParallelStrategy(plan=plan, devices="2xcpu:4GiB")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_steps": 5, **dict(case.trainer), **quiet}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, precision=precision, callbacks=[Recorder()], **options)
    # The first process's parameters stay with it, and FSDP's ranks never write to them; DDP's make them their own.
    own = (*module.parameters(), *module.buffers()) if engine == "ddp" else tuple(module.buffers())
    gc.collect()
    before = live_bytes() - sum({t.data_ptr(): t.untyped_storage().nbytes() for t in own}.values())
    del own
    trainer.fit(module, DataLoader(data, case.batch_size))
    assert strategy.report is not None
    assert strategy.report.best_candidate is not None
    found = []
    for rank, device in enumerate(plan.devices):
        predicted = strategy.report.best_candidate.bytes[device]
        peaks = [peak - before for peak in json.loads((folder / f"rank{rank}").read_text())]
        found.append(_compared(min(peaks), predicted, highest=max(peaks)))
    return found


def run_alone(case: Any, *, reshard: bool, recompute: bool, precision: str) -> list[dict[str, Any]]:
    """Rank 0 of a larger world, in a child of its own."""
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.memory.fake_world import measure_fsdp_rank
    from lightning_autopar._fork import run_forked
    from lightning_autopar.memory.fullest_moments import moments_of
    from lightning_autopar.memory.trace.trace import trace
    from lightning_autopar.plans import Plan
    from lightning_autopar.strategies.fsdp.memory import fsdp_bytes

    batch = next(iter(DataLoader(case.data(), case.batch_size)))
    footprint = run_forked(lambda: trace(case.module(), None, batch, precision=precision), timeout_seconds=300)
    blocks = tuple(block.fqn for block in footprint.blocks)
    devices = tuple(f"cpu:{index}" for index in range(WORLD))
    plan = Plan(engine="fsdp", devices=devices, reshard_after_forward=reshard, shard=blocks, recompute=blocks if recompute else ())
    part = [tensor[::WORLD] for tensor in batch]
    share = len(part[0]) / footprint.batch_size
    moments = moments_of(footprint, range(len(blocks)) if recompute else (), share)
    predicted = fsdp_bytes(footprint, plan, moments, rank=0, share=share, copies=False)  # no gloo, no copies
    live = live_bytes, peak_bytes, reset_peak

    def measured() -> int:
        found = measure_fsdp_rank(case.module(), part, plan, precision=precision, device=torch.device("cpu"), live=live)["allocated"]
        assert found is not None
        return found

    return [_compared(run_forked(measured, timeout_seconds=300), predicted)]


def _compared(measured: int, predicted: Any, **more: int) -> dict[str, Any]:
    return {"measured": measured, **more, "predicted": predicted.to_dict(), "error": predicted.allocated / measured - 1}


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if restarted_with_counter(Path(name)):
            measure(arguments, Path(name))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """In a process that counts."""
    import logging

    import torch
    from memory_fsdp_models import CASES

    from benchmarks.machine import machine

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        if (arguments.only and arguments.only not in name) or (arguments.quick and name not in QUICK):
            continue
        kinds = _QUICK_KINDS if arguments.quick else _KINDS
        precisions = PRECISIONS if name in ALL_PRECISIONS and not arguments.quick else PRECISIONS[:1]
        for precision, (engine, reshard, world), recompute in itertools.product(precisions, kinds, (False, True)):
            if recompute and (engine == "ddp" or not case.recomputable or (arguments.quick and world == WORLD)):
                continue
            if world == WORLD and "accumulate_grad_batches" in dict(case.trainer):
                continue
            began = time.monotonic()
            row = {"case": name, "engine": engine, "world": world, "reshard": reshard, "recompute": recompute, "precision": precision}
            if world == WORLD:
                ranks = run_alone(case, reshard=bool(reshard), recompute=recompute, precision=precision)
            else:
                ranks = run(case, engine, reshard=reshard, recompute=recompute, precision=precision, folder=folder)
            rows.append({**row, "ranks": ranks})
            errors = " ".join(f"{rank['error']:+.2%} of {rank['measured'] / 2**20:.2f} MiB" for rank in ranks)
            how = {True: "reshard", False: "keep", None: ""}[reshard]
            words = f"{engine} x{world} {how} {'recompute' if recompute else ''} {precision}"
            print(f"{name:20} {words:40} {errors} ({time.monotonic() - began:.1f} s)", flush=True)
            arguments.out.parent.mkdir(exist_ok=True)
            arguments.out.write_text(json.dumps({**machine(), "summary": summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


_KINDS = [("fsdp", True, 2), ("fsdp", False, 2), ("ddp", None, 2), ("fsdp", True, WORLD), ("fsdp", False, WORLD)]
_QUICK_KINDS = [("fsdp", True, 2), ("fsdp", False, WORLD)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of real ranks, and of those without others."""
    found = {}
    for words, alone in (("real ranks", False), (f"rank 0 of {WORLD}", True)):
        errors = sorted(abs(rank["error"]) for row in rows if (row["world"] == WORLD) == alone for rank in row["ranks"])
        if errors:
            within = sum(error <= GOAL for error in errors) / len(errors)
            found[words] = {"ranks": len(errors), "median": statistics.median(errors), "largest": errors[-1], "within_goal": within}
    return {"goal": GOAL, **found}


if __name__ == "__main__":
    main()
