"""Predictions for training runs that other people measured on GPUs and published, beside what they measured.

    python benchmarks/published.py [--rows FILE] [--part shown|held|all] [--json OUT] [--only SUBSTRING] [--jobs N] [--cache FOLDER]
    python benchmarks/published.py --join FILE FILE --json OUT

For each row: the model from its dimensions on meta, in the manner of the library that was measured; traced; the row's own plan on its own
hardware, as the catalogue describes that; memory by the kind that the row publishes, seconds of a step, and whether it fits. Nothing is
fitted to the rows. What a row doesn't say is assumed, and its result says so; a row that can't be built is named with the reason.
While the planner's model is worked on, ``--part shown`` leaves out the third of the rows that :mod:`rows.held_back` names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOPAR_CACHE"] = "off"

from machine import machine  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from rows.hardware import host_slowness  # noqa: E402
from rows.held_back import Part, of_part  # noqa: E402
from rows.judged import judge, unbuilt  # noqa: E402
from rows.pictures import Picture  # noqa: E402
from rows.planned import Layout, has_apex_masters, has_first_flash, host_waits, layout, narrow_products  # noqa: E402
from rows.question import Question, question, recompute  # noqa: E402
from rows.row import Fields, NotBuilt, Row  # noqa: E402
from rows.score import summarise  # noqa: E402
from rows.tracing import Footprints, code_digest  # noqa: E402

Asked = tuple[Row, Question, Layout, list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE / "rows" / "rows.json")
    parser.add_argument("--part", choices=get_args(Part), default="all", help="rows that may be looked at, those held back, or all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="rows with this in their id or source")
    parser.add_argument("--jobs", type=int, default=2, help="processes that trace at once")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="where footprints are kept, by what they depend on")
    parser.add_argument("--join", type=Path, nargs="+", default=(), help="what earlier runs of the parts have written, instead of a run")
    options = parser.parse_args()
    begun = time.perf_counter()
    published = of_part(json.loads(options.rows.read_text(encoding="utf-8")), options.part)
    rows = [row for row in published if options.only in f"{row.get('id')} {row.get('source_name')}"]
    earlier = [json.loads(file.read_text(encoding="utf-8")) for file in options.join]
    known = {row["id"]: row for one in earlier for row in one["rows"]}
    results = [known[row["id"]] for row in rows] if known else run(rows, jobs=options.jobs, cache=options.cache)
    summary = summarise(results)
    show(results, summary)
    if options.json is not None:
        written = {
            "benchmark": "published",
            **machine(),
            "seconds": sum(one["seconds"] for one in earlier) or round(time.perf_counter() - begun, 1),
            "part": options.part,
            "summary": summary,
            "parts": {part: summarise(of_part(results, part)) for part in ("shown", "held")} if options.part == "all" else {},
            "rows": results,
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def run(rows: list[Row], *, jobs: int = 1, cache: Path | None = None) -> list[dict[str, Any]]:
    """Every row's result, in their order."""
    groups, results = grouped(rows)
    batches = sorted(groups, key=_cost, reverse=True)
    if jobs <= 1:
        for batch in batches:
            results.update(_group((batch, cache, code_digest())))
    else:
        with (
            Progress(console=Console(stderr=True)) as progress,
            ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        ):
            task = progress.add_task("rows", total=len(rows), completed=len(results))
            for done in as_completed([pool.submit(_group, (batch, cache, code_digest())) for batch in batches]):
                found = done.result()
                results.update(found)
                progress.advance(task, len(found))
    return [results[index] for index in range(len(rows))]


def _cost(batch: list[tuple[int, Asked]]) -> int:
    shape = batch[0][1][1].shape
    return getattr(shape, "layers", 30)


def grouped(rows: list[Row]) -> tuple[list[list[tuple[int, Asked]]], dict[int, dict[str, Any]]]:
    """Rows that ask of one model with one length, which one trace answers at any batch; and the results of those that can't be built."""
    groups: dict[Question, list[tuple[int, Asked]]] = defaultdict(list)
    results = {}
    for index, row in enumerate(rows):
        fields = Fields(row)
        try:
            laid = layout(fields)
            asked = question(fields)
            laid = replace(
                laid,
                keeps_gradients=fields.is_old and laid.engine in ("single", "ddp"),
                whole_gradients=laid.engine == "fsdp" and laid.accumulate > 1 and fields.family in ("litgpt", "lightning", "hf"),
                inputs_on_host="activation" in fields.text("offload") and recompute(fields) == "full",
                frees_late=fields.family == "lightning",
                tf32="tf32" in str(fields.precision.get("compute")).casefold(),
                first_flash=has_first_flash(fields),
                buckets=laid.engine == "ddp" and fields.text("strategy").startswith("ddp"),
                holds_loss=fields.family in ("litgpt", "plain"),
                reduce_bytes=4 if "32" in str(fields.precision.get("reduce")) else 2,
                balanced=fields.family in ("gpipe", "nanotron"),
                host_update=laid.engine == "single" and asked.optimizer.startswith("cpu "),
                fused_update="fused" in fields.text("optimizer"),
                slow_host=host_slowness(fields),
                narrow=narrow_products(fields),
                all_kernels=fields.loads_all_kernels,
                # torchtune's ``OffloadActivations`` (training/_activation_offloading.py); torch's ``save_on_cpu`` waits for its copies.
                copies_aside=fields.family == "torchtune",
                # ``max_grad_norm`` of transformers' TrainingArguments, ``max_norm`` of torchtitan and litgpt, llm-foundry's and nanotron's
                # configurations: 1.0 each.
                clips=fields.family in ("hf", "torchtitan", "litgpt", "composer", "nanotron"),
                tensor_by_tensor=fields.is_old,
                masters=has_apex_masters(fields),
                # BingBertSquad's ``gradClipper.step`` (nvidia_run_squad_baseline.py, 091e430) comes before it asks whether to update.
                clips_each="bingbert" in fields.text("framework"),
                waits=host_waits(fields),
                # ``torch.autocast`` keeps casts of weights until it is left; Lightning's Trainer alone asks it not to (precision/amp.py).
                caches_casts=asked.precision.endswith("-mixed") and recompute(fields) == "full" and fields.family != "lightning",
                whole_stages=fields.family == "gpipe",
                # torch 2.0 was the first for Python 3.11, which runs 1.25 times as fast as 3.10 (docs.python.org, "What's New In 3.11").
                slow_python=1.25 if fields.is_old else 1.0,
                # DeepSpeed's own default (``reduce_bucket_size``); Hugging Face's and ms-swift's configurations have Lightning's.
                bucket_elements=500_000_000 if fields.family in ("megatron", "plain") else None,
            )
            if isinstance(asked.shape, Picture) and recompute(fields) == "full":
                laid = replace(laid, recompute=True)
            if laid.engine == "zero" and asked.optimizer.startswith(("master", "cpu ")):
                asked = replace(asked, optimizer="adamw fused")  # DeepSpeed's copies are the engine's, not the optimizer's
        except NotBuilt as error:
            results[index] = unbuilt(row, str(error))
        except Exception as error:  # whatever a row of an unknown source may hold
            results[index] = unbuilt(row, f"its fields can't be read ({type(error).__name__})", detail=str(error))
        else:
            groups[replace(asked, rows=1)].append((index, (row, asked, laid, fields.assumptions)))
    return list(groups.values()), results


def _group(given: tuple[list[tuple[int, Asked]], Path | None, str]) -> dict[int, dict[str, Any]]:
    """The results of rows that ask of one model."""
    batch, cache, digest = given
    return dict(_judged(batch, Footprints(cache, digest)))


def _judged(batch: list[tuple[int, Asked]], footprints: Footprints) -> Iterator[tuple[int, dict[str, Any]]]:
    most = max((asked for _, (_, asked, _, _) in batch), key=lambda asked: asked.rows)
    for index, (row, asked, laid, assumptions) in batch:
        try:
            yield index, judge(row, asked, laid, assumptions, most, footprints)
        except NotBuilt as error:
            yield index, unbuilt(row, str(error))
        except Exception as error:  # one row's trouble isn't the others'
            yield index, unbuilt(row, f"it can't be predicted ({type(error).__name__})", detail=str(error))


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The table, by source."""
    console = Console()
    table = Table()
    for title in ("source", "rows", "built", "memory n", "median", "p90", "seconds n", "median", "p90", "τ step", "τ rate", "wrong fits"):
        table.add_column(title)
    for source, one in summary["sources"].items():
        memory, seconds = one["memory"], one["seconds"]
        table.add_row(
            source,
            str(one["rows"]),
            str(one["built"]),
            *_cells(memory),
            *_cells(seconds),
            *("" if one[name] is None else f"{one[name]:.2f}" for name in ("kendall_tau", "kendall_tau_throughput")),
            f"{len(one['wrong_fits'])} of {one['fits_judged']}",
        )
    console.print(table)
    for reason, count in summary["not_built"].items():
        console.print(f"{count} not built: {reason}")
    console.print({name: value for name, value in summary.items() if name not in ("sources", "not_built")})


def _cells(found: dict[str, float] | None) -> tuple[str, str, str]:
    if found is None:
        return "", "", ""
    return f"{found['n']}", f"{found['median']:.1%} ({found['signed_median']:+.1%})", f"{found['p90']:.1%}"


if __name__ == "__main__":
    main()
