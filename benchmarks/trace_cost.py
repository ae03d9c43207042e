"""What tracing costs: seconds of two steps under fake tensors, and host memory beyond the module, which lies on meta.

    python benchmarks/trace_cost.py                  # writes benchmarks/results/trace_cost.json

Each model in a process of its own, one thread. The memory is the rise of the process's peak over what it held before tracing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402  # after the thread count is set
from machine import machine  # noqa: E402  # from this folder
from memory.job import Learner, adamw, hugging_face, own_loss  # noqa: E402

from lightning_autopar._fork import run_forked  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402

RESULTS = HERE / "results" / "trace_cost.json"
_LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096}
#: Model class, configuration, its settings, rows and length of the batch, and the goal in seconds, where there is one.
MODELS: dict[str, tuple[str, str, dict[str, int], tuple[int, int], float | None]] = {
    "GPT-2 124M": ("GPT2LMHeadModel", "GPT2Config", {}, (8, 1024), None),
    "Llama 1B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
        (4, 2048),
        5.0,
    ),
    "Llama 7B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        (1, 4096),
        10.0,
    ),
}
MOST_BYTES = 1 << 30


def cost(name: str, target: str) -> dict[str, Any]:
    """Of one model, in this process."""
    warnings.simplefilter("ignore")
    model, config, settings, (rows, length), goal = MODELS[name]
    with torch.device("meta"):
        module = Learner(hugging_face(model, config, **settings), own_loss, adamw)
    tokens = torch.randint(5, 30000, (rows, length))
    before = _peak_bytes()
    begun, busy = time.perf_counter(), time.process_time()
    footprint = trace(module, None, {"input_ids": tokens, "labels": tokens}, precision="bf16-mixed", target=target)  # type: ignore[arg-type]
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    extra = _peak_bytes() - before
    return {
        "parameters": footprint.parameters,
        "target": target,
        "seconds": round(seconds, 3),
        "process_seconds": round(busy, 3),
        "goal_seconds": goal,
        "extra_bytes": extra,
        "within": (goal is None or seconds <= goal) and extra < MOST_BYTES and footprint.traced,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    found = []
    for name in MODELS:
        for target in ("cpu", "cuda"):
            row = {"model": name, **run_forked(cost, name, target)}
            found.append(row)
            print(f"{name:12s} {target:5s} {row['seconds']:6.2f} s, {row['extra_bytes'] / 2**20:6.0f} MiB beyond the module")
    options.out.write_text(json.dumps({**machine(), "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
