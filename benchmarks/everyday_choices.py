"""Everyday cases, drawn at random: is the chosen plan the fastest of 40 pinned ones and their neighbours, and does advice hold?

A case is a Llama of 0.1 to 13 billion parameters, sequences of 512 to 32,768 words, a batch of 1 to 256, a precision, an optimizer, and one
GPU of the catalogue or 2 to 16, even or with different free memory. The plans to compare with are the referee's (``referee/judge.py``),
each pinned before it counts. Advice on memory and on the batch is planned for again, changed as it says.

    python benchmarks/everyday_choices.py --cases 60            # writes benchmarks/results/everyday_choices.json
    python benchmarks/everyday_choices.py --first 17 --cases 1 --dry
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from machine import machine  # noqa: E402
from memory.zoo_gpu import hugging_face_model, token_batch  # noqa: E402
from referee.judge import Referee  # noqa: E402
from search_against_all import GOAL  # noqa: E402

from lightning_autopar.constraints import Constraints  # noqa: E402
from lightning_autopar.devices.inventory import Inventory  # noqa: E402
from lightning_autopar.devices.spec import parse_spec  # noqa: E402
from lightning_autopar.memory.batch_scaling import scaled  # noqa: E402
from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402
from lightning_autopar.planning.make_report import make_report  # noqa: E402
from lightning_autopar.planning.what_if import more_devices, with_host  # noqa: E402
from lightning_autopar.report.report import Advice, NothingFits, Report  # noqa: E402

RESULTS = HERE / "results" / "everyday_choices.json"
PLANS = 40
#: Blocks, width, heads, those of keys and values, inner width, words.
SHAPES = ((12, 768, 12, 12, 2048, 32000), (24, 1024, 16, 16, 2816, 50257), (16, 2048, 32, 8, 8192, 128256), (22, 2048, 32, 4, 5632, 32000))
SHAPES += (
    (28, 3072, 24, 8, 8192, 128256),
    (32, 3072, 32, 32, 8192, 32064),
    (32, 4096, 32, 8, 14336, 128256),
    (40, 5120, 40, 40, 13824, 32000),
)
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
DEVICES = ("RTX4090", "A10G", "L4", "A100-40GB", "A100-80GB", "H100-80GB")


def case_of(seed: int) -> tuple[str, Footprint, Inventory, str]:
    """The case of a seed: its words, the step at its batch, the devices and the precision."""
    draw = random.Random(seed)
    blocks, width, heads, key_heads, inner, words = draw.choice(SHAPES[:6] if draw.random() < 0.7 else SHAPES)
    length, batch = 2 ** draw.randint(9, 15), 2 ** draw.randint(0, 8) + draw.choice((0, 0, 1))
    batch = max(1, min(batch, 2**19 // length))
    precision = draw.choice(("bf16-true", "bf16-mixed", "32-true", "16-mixed"))
    optimizer, count, kind = draw.choice(list(OPTIMIZERS)), draw.choice((1, 1, 1, 2, 4, 8, 16)), draw.choice(DEVICES)
    here = parse_spec(f"{count}x{kind}" if count <= 8 else f"2x8x{kind}")
    uneven = count > 1 and draw.random() < 0.3
    devices = (
        tuple(replace(one, free_bytes=int(one.free_bytes * draw.uniform(0.4, 1.0))) for one in here.devices) if uneven else here.devices
    )
    values = {"vocab_size": words, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks}
    values |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": length}
    model = hugging_face_model("Llama", "LlamaForCausalLM", "LlamaConfig", token_batch(2, length, words), **values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            built = model.build(OPTIMIZERS[optimizer])
        step = trace(built, None, model.batch(), precision=precision, target="cuda")
    told = f"{blocks} × {width}, length {length}, {optimizer}, {precision}, batch {batch}, {count}x{kind}{', uneven' if uneven else ''}"
    return told, scaled(step, batch), replace(here, devices=devices), precision


def planned(step: Footprint, here: Inventory, precision: str) -> Report:
    """The report, whether anything fits or not."""
    try:
        return make_report(step, here, Constraints(precision=precision))
    except NothingFits as nothing:
        return nothing.report


def broken(advice: Advice, before: Report, step: Footprint, here: Inventory, precision: str) -> str | None:
    """What is wrong with a piece of advice, planned for as it says; None where it holds, or is of another kind."""
    if more := advice.change.get("more_free_bytes"):
        free = {one.id: one.free_bytes + more.get(one.id, 0) for one in here.devices}
        devices = tuple(replace(one, free_bytes=free[one.id], total_bytes=max(one.total_bytes, free[one.id])) for one in here.devices)
        after = planned(step, replace(here, devices=devices), precision)
    elif set(advice.change) == {"batch_size"}:
        after = planned(scaled(step, advice.change["batch_size"]), here, precision)
    elif set(advice.change) == {"more_devices"}:
        after = planned(step, more_devices(here, advice.change["more_devices"]) or here, precision)
    elif set(advice.change) == {"host_bytes"}:
        after = planned(step, with_host(here, advice.change["host_bytes"]), precision)
    else:
        return None
    if after.best is None:
        return f"nothing fits after: {advice.text}"
    was, batch = before.candidates[0], advice.change.get("batch_size", step.batch_size)
    speedup = was.step_seconds / step.batch_size / (after.candidates[0].step_seconds / batch) if was.fits and batch else None
    return f"{speedup:.2f} times as fast after: {advice.text}" if speedup and advice.speedup and speedup < 0.98 * advice.speedup else None


def judged(seed: int) -> dict[str, Any]:
    """One case: the choice, how much longer it takes than the best pinned plan, and what is wrong with its advice."""
    words, step, here, precision = case_of(seed)
    began = time.process_time()
    report = planned(step, here, precision)
    taken, one = time.process_time() - began, report.candidates[0] if report.best else None
    verdict = Referee(step, here, Constraints(precision=precision), seed).verdict(PLANS, one.step_seconds if one else float("inf"))
    ratio = 1.0 if verdict.best is None else one.step_seconds / verdict.seconds if one else None
    wrong = [fault for advice in report.advice if (fault := broken(advice, report, step, here, precision))]
    found = {"seed": seed, "case": words, "chosen": one and one.plan.title(), "seconds": one and one.step_seconds, "ratio": ratio}
    replayed = one.replayed if one else None
    return {
        **found,
        "best": verdict.best and verdict.best.title(),
        "replayed": replayed,
        "advice": wrong,
        "planning_seconds": round(taken, 3),
    }


def main() -> None:
    """Judge, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--cases", type=int, default=60, help="how many")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    rows = []
    for seed in range(options.first, options.first + options.cases):
        rows.append(judged(seed))
        print(*rows[-1].values(), sep=" | ", flush=True)
        missed = [row["seed"] for row in rows if row["ratio"] is None or row["ratio"] > GOAL]
        wrong = [row["seed"] for row in rows if row["advice"]]
        found = {"benchmark": "everyday_choices", **machine(), "goal": GOAL, "missed": missed, "advice_wrong": wrong, "rows": rows}
        if not options.dry:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(len(rows), "cases, missed:", missed, "advice wrong:", wrong)


if __name__ == "__main__":
    main()
