"""Predicted against real memory under DeepSpeed's ZeRO, on CPU devices with gloo.

Each case trains a language model like GPT for five steps with ``deepspeed.initialize``, under the configuration that Lightning's
``DeepSpeedStrategy`` writes but for smaller buckets. Measured is the most that torch's CPU allocator holds in the last two steps, over all
threads (``live_bytes.c``). Here the device is host memory, too: predicted is the sum of both, and what would lie where is by construction.

    python benchmarks/memory_zero.py                 # writes benchmarks/results/memory_zero.json
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from benchmarks.live_bytes import live_bytes, peak_bytes, reset_peak, restarted_with_counter  # noqa: E402

RESULTS = HERE / "results" / "memory_zero.json"
GOAL = 0.05
MODEL = {"width": 192, "depth": 8, "words": 1000, "length": 32, "heads": 6}
ROWS = 8
BUCKET = {"reduce_bucket_elements": 1_000_000}
TIGHT = {"max_reuse_elements": 1_000, "max_live_elements": 1_000_000, "persistence_elements": 1_000, "prefetch_elements": 500_000}
BOTH = ["optimizer", "parameters"]
#: By what name DeepSpeed knows a setting.
KEYS = {
    "reduce_bucket_elements": "reduce_bucket_size",
    "prefetch_elements": "stage3_prefetch_bucket_size",
    "max_live_elements": "stage3_max_live_parameters",
    "max_reuse_elements": "stage3_max_reuse_distance",
    "persistence_elements": "stage3_param_persistence_threshold",
    "overlap_comm": "overlap_comm",
}
CASES: list[dict[str, Any]] = [
    {"stage": 1, "settings": BUCKET},
    {"stage": 1, "settings": BUCKET, "micro_batches": 2},
    {"stage": 1, "settings": BUCKET, "ranks": 1},
    {"stage": 2, "settings": BUCKET},
    {"stage": 2, "settings": {**BUCKET, "overlap_comm": False}},
    {"stage": 2, "settings": {"reduce_bucket_elements": 20_000_000}},
    {"stage": 2, "settings": BUCKET, "micro_batches": 2},
    {"stage": 2, "settings": BUCKET, "offload": ["optimizer"]},
    {"stage": 2, "settings": {"reduce_bucket_elements": 10_000_000}, "precision": "bf16-true"},
    {"stage": 3, "settings": BUCKET},
    {"stage": 3, "settings": {**BUCKET, **TIGHT}},
    {"stage": 3, "settings": BUCKET, "micro_batches": 2},
    {"stage": 3, "settings": BUCKET, "offload": ["optimizer"]},
    {"stage": 3, "settings": BUCKET, "offload": BOTH},
    {"stage": 3, "settings": BUCKET, "offload": BOTH, "ranks": 1},
    {"stage": 3, "settings": {"reduce_bucket_elements": 10_000_000}, "precision": "bf16-true"},
]


def configuration(case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's, as Lightning writes it, with the optimizer that the module has."""
    zero: dict[str, Any] = {
        "stage": case["stage"],
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "sub_group_size": 10**12,
        **{KEYS[name]: value for name, value in case["settings"].items()},
    }
    offload = case.get("offload", ())
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": False}} if "optimizer" in offload else {}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": False}} if "parameters" in offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.get("micro_batches", 1),
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if case.get("precision", "32-true").startswith("bf16") else {}),
    }


def run_rank(rank: int, ranks: int, port: int, case: dict[str, Any]) -> int:
    """In a process of its own: the peak of the last two of five steps."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "DEEPSPEED_LOG_LEVEL": "error"}
    import torch

    torch.set_num_threads(1)
    import deepspeed

    # DeepSpeed's shared-memory transport would be compiled for minutes; gloo carries the same tensors.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)
    from benchmarks.memory.stage_rank import GPT

    torch.manual_seed(0)
    gc.collect()
    before = live_bytes()
    model = GPT(**MODEL)
    model.forward = lambda tokens: model.training_step(tokens, 0)  # type: ignore[method-assign, assignment]
    if case.get("precision", "32-true").startswith("bf16"):
        model = model.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=rank),
        config=configuration(case),
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        dist_init_required=False,
    )
    for step in range(5):
        if step == 3:
            gc.collect()
            reset_peak()
        batch = torch.randint(0, model.words, (ROWS, model.length))
        for rows in batch.chunk(case.get("micro_batches", 1)):
            engine.backward(engine(rows))
            engine.step()
    return peak_bytes() - before


def predicted(case: dict[str, Any], footprint: Any) -> tuple[Any, tuple[int, int]]:
    """What the package says of the fullest rank: on the device, and in host memory (pageable, page-locked)."""
    from lightning_autopar.memory.zero_bytes import ZeroSettings, zero_bytes, zero_host_bytes
    from lightning_autopar.plans import Plan

    plan = Plan(
        engine="zero",
        devices=tuple(f"cpu:{index}" for index in range(case.get("ranks", 2))),
        zero_stage=case["stage"],
        offload=tuple(case.get("offload", ())),
        micro_batches=case.get("micro_batches", 1),
    )
    precision, settings = case.get("precision", "32-true"), ZeroSettings(**case["settings"])
    device = zero_bytes(footprint, plan, share=1.0, precision=precision, on_cpu=True, settings=settings)
    return device, zero_host_bytes(footprint, plan, precision=precision, settings=settings)


def footprint_of(precision: str) -> Any:
    """The trace of the module's step."""
    import torch

    from benchmarks.memory.stage_rank import GPT
    from lightning_autopar.memory.trace import trace

    model = GPT(**MODEL)
    return trace(model, None, torch.zeros(ROWS, model.length, dtype=torch.long), precision=precision)


def measured_earlier() -> list[dict[str, Any]]:
    """The rows of the result file."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="measure only what the result file lacks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not restarted_with_counter(Path(folder)):
            return 0
    from benchmarks.machine import machine

    footprints = {precision: footprint_of(precision) for precision in ("32-true", "bf16-true")}
    known = {json.dumps(row["case"]): row["measured_bytes"] for row in measured_earlier()} if arguments.resume else {}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        ranks = case.get("ranks", 2)
        if (measured := known.get(json.dumps(case))) is None:
            with multiprocessing.get_context("spawn").Pool(ranks) as pool:
                of_rank = [(rank, ranks, 29_600 + os.getpid() % 300 + number, case) for rank in range(ranks)]
                measured = max(pool.starmap_async(run_rank, of_rank).get(timeout=300))
        device, host = predicted(case, footprints[case.get("precision", "32-true")])
        total = device.allocated + sum(host)
        row = {"case": case, "measured_bytes": measured, "predicted_bytes": total, "error": total / measured - 1}
        rows.append({**row, "device": device.to_dict(), "host": host})
        print(f"{json.dumps(case):130} {measured:>12,} {total:>12,} {rows[-1]['error']:+.2%}", flush=True)
        errors = [abs(row["error"]) for row in rows]
        summary = {"cases": len(rows), "median_error": statistics.median(errors), "largest_error": max(errors), "goal": GOAL}
        RESULTS.parent.mkdir(exist_ok=True)
        text = json.dumps({**machine(), "model": MODEL, "rows_of_batch": ROWS, "summary": summary, "rows": rows}, indent=2)
        RESULTS.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))
    return int(max(errors) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
