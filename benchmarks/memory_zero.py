"""Predicted against real memory under DeepSpeed's ZeRO and under FSDP2's offload, run by the Trainer on CPU devices as a user's would be.

Language models under pinned plans: by a few hand-made blocks like GPT's, and by Hugging Face, whole and with LoRA. Measured is what the run
itself reports (``strategy.measured``): the device's side by itself, and beside it what the plan offloads to the host's memory. Predicted is
what the report of the same run said of the fullest rank, and what planning counts against the host's memory.

    python benchmarks/memory_zero.py                 # writes benchmarks/results/memory_zero.json
    python benchmarks/memory_zero.py --only "zero-3" # those whose title contains it, a table only
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# One thread a rank; and what is compared is the prediction, not what earlier runs taught it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.job import Batches, Learner, adamw, hugging_face, own_loss  # noqa: E402
from benchmarks.memory.stage_rank import GPT  # noqa: E402
from lightning_autopar import AutoParallelStrategy, Plan  # noqa: E402
from lightning_autopar.planning.plan_bytes import host_bytes  # noqa: E402

RESULTS = HERE / "results" / "memory_zero.json"
#: What the fullest rank's device may differ from its prediction.
GOAL = 0.05
ROWS = 8
#: The third and the fourth are recorded.
STEPS = 5
NOTHING: tuple[str, ...] = ()
OPTIMIZER = ("optimizer",)
BOTH = ("optimizer", "parameters")


@dataclass(frozen=True)
class Case:
    """A model, a plan, and how the Trainer runs it.

    Args:
        model: one of :data:`MODELS`.
        stage: of ZeRO; None for FSDP2.
        ranks: devices.
        offload: the plan's.
        precision: the Trainer's.
        accumulate: the Trainer's ``accumulate_grad_batches``.
        recompute: whether all blocks are.
    """

    model: str
    stage: int | None
    ranks: int = 2
    offload: tuple[str, ...] = NOTHING
    precision: str = "32-true"
    accumulate: int = 1
    recompute: bool = False

    def plan(self) -> Plan:
        """The plan."""
        blocks = MODELS[self.model][1]
        return Plan(
            engine="fsdp" if self.stage is None else "zero",
            devices=tuple(f"cpu:{index}" for index in range(self.ranks)),
            zero_stage=self.stage,
            reshard_after_forward=True if self.stage is None else None,
            shard=blocks if self.stage is None else (),
            offload=self.offload,  # type: ignore[arg-type]
            recompute=blocks if self.recompute else (),
        )

    def title(self) -> str:
        """For a table."""
        words = [self.model, self.plan().title(), self.precision]
        return ", ".join([*words, f"accumulate {self.accumulate}"] if self.accumulate > 1 else words)


def _gpt() -> pl.LightningModule:
    return GPT(width=192, depth=8, words=1000, length=32, heads=6)


_LLAMA = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}


def _llama() -> pl.LightningModule:
    return Learner(hugging_face("LlamaForCausalLM", "LlamaConfig", vocab_size=512, **_LLAMA), own_loss, adamw)


def _lora() -> pl.LightningModule:
    import peft

    net = hugging_face("LlamaForCausalLM", "LlamaConfig", vocab_size=512, **_LLAMA)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return Learner(peft.get_peft_model(net, settings), own_loss, adamw)


#: By name how a model is made, and the FQNs of its blocks.
MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gpt": (_gpt, tuple(f"blocks.{index}" for index in range(8))),
    "llama": (_llama, tuple(f"net.model.layers.{index}" for index in range(6))),
    "lora": (_lora, tuple(f"net.base_model.model.model.layers.{index}" for index in range(6))),
}


def cases() -> Iterator[Case]:
    """All of them."""
    for model in ("gpt", "llama"):
        for stage, offload in ((1, NOTHING), (2, NOTHING), (3, NOTHING), (2, OPTIMIZER), (3, OPTIMIZER), (3, BOTH), (None, BOTH)):
            yield Case(model, stage, offload=offload)
        for stage, offload in ((2, OPTIMIZER), (3, BOTH), (None, BOTH)):
            yield Case(model, stage, ranks=1, offload=offload)
    yield Case("gpt", 1, offload=OPTIMIZER)
    for stage, offload in ((2, NOTHING), (3, NOTHING), (2, OPTIMIZER), (3, BOTH)):
        yield Case("gpt", stage, offload=offload, recompute=True)
        yield Case("gpt", stage, offload=offload, accumulate=2)
        yield Case("llama", stage, offload=offload, precision="bf16-mixed")
        yield Case("lora", stage, offload=offload)
    yield Case("gpt", 1, accumulate=2)
    yield Case("llama", 3, ranks=1, offload=BOTH, precision="bf16-mixed", recompute=True)
    yield Case("lora", 3, ranks=1, offload=BOTH, recompute=True)
    yield Case("lora", None, ranks=1, offload=BOTH)
    yield Case("gpt", None, ranks=1, offload=BOTH, recompute=True)
    yield Case("gpt", None, offload=BOTH, accumulate=2)


@cache
def _tokens(model: str) -> Any:
    words, length = (1000, 32) if model == "gpt" else (512, 64)
    tokens = torch.randint(0, words, (length,), generator=torch.Generator().manual_seed(0))
    return tokens if model == "gpt" else {"input_ids": tokens, "labels": tokens.clone()}


def run(case: Case) -> dict[str, Any]:
    """Train for a few steps: measured and predicted.

    Raises:
        RuntimeError: if a rank couldn't be measured.
    """
    began = time.monotonic()
    torch.manual_seed(0)
    plan = case.plan()
    strategy = AutoParallelStrategy(plan=plan, devices=f"{plan.world_size}xcpu:2GiB")
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    rows = ROWS * STEPS * case.accumulate + (ROWS * case.accumulate if case.accumulate > 1 else 0)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, precision=case.precision, accumulate_grad_batches=case.accumulate, **quiet
    )
    trainer.fit(MODELS[case.model][0](), DataLoader(Batches(_tokens(case.model), rows), ROWS))
    assert strategy.report is not None
    assert strategy.report.best_candidate is not None
    ranks = [strategy.measured[device] for device in plan.devices]
    if any(rank["peak_bytes"] is None for rank in ranks):
        raise RuntimeError(f"a rank wasn't measured under {case.title()!r}")
    predicted = strategy.report.best_candidate.bytes[plan.devices[0]]
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"])
    host = host_bytes(strategy.report.footprint, plan, precision=case.precision, on_cpu=True)
    host_measured = sum(rank["host_bytes"] for rank in ranks)
    row = {
        "title": case.title(),
        "measured_bytes": fullest["peak_bytes"],
        "predicted_bytes": predicted.allocated,
        "error": predicted.allocated / fullest["peak_bytes"] - 1,
        "host_measured_bytes": host_measured,
        "host_predicted_bytes": host.offload + host.pinned,
        "host_error": (host.offload + host.pinned) / host_measured - 1 if host_measured else None,
        "ranks": [rank["bytes"] for rank in ranks],
        "predicted": {name: value for name, value in predicted.to_dict().items() if value},
    }
    hosts = f"host {host_measured:>11,} {row['host_error']:+7.2%}" if host_measured else ""
    print(f"{row['title']:70} {row['measured_bytes']:>11,} {row['error']:+7.2%} {hosts} ({time.monotonic() - began:.0f} s)", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="those whose title contains this; nothing written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning_autopar"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    rows = [run(case) for case in cases() if not arguments.only or arguments.only in case.title()]
    errors = [abs(row["error"]) for row in rows]
    hosts = [abs(row["host_error"]) for row in rows if row["host_error"] is not None]
    summary: dict[str, Any] = {
        "cases": len(rows),
        "goal": GOAL,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "within_goal": sum(error <= GOAL for error in errors) / len(errors),
    }
    if hosts:
        summary["host"] = {"cases": len(hosts), "median_error": statistics.median(hosts), "largest_error": max(hosts)}
    print(json.dumps(summary, indent=2))
    if not arguments.only:
        RESULTS.parent.mkdir(exist_ok=True)
        head = json.dumps({**machine(), "summary": summary}, indent=2).removesuffix("\n}")
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        RESULTS.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    return int(summary["largest_error"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
