"""Gradients of unmodified LightningModules in pipeline stages against one process's, over three optimizer steps, for many architectures.

Each member runs by its model's own loss in a plain LightningModule, with AdamW, a batch of 8 samples in 4 micro-batches, in 2 and 3 stages
cut evenly and unevenly wherever the parity probe lets it. Reference is one process's gradient of the whole batch; where the loss is no mean
over samples (contrastive losses), of the same parts. Or the probe refuses the member, with a sentence.

    python benchmarks/pipeline_zoo.py                   # writes benchmarks/results/pipeline_zoo.json
    python benchmarks/pipeline_zoo.py --quick           # a few members, a table only
    python benchmarks/pipeline_zoo.py --only GPT-2 T5   # those members, a table only
    python benchmarks/pipeline_zoo.py --processes       # one way to cut each through Trainer.fit in processes as well, a table only
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.zoo.compare import alone, errors, look, parts_of, staged, ways  # noqa: E402
from benchmarks.zoo.member import Member  # noqa: E402
from benchmarks.zoo.members import MEMBERS  # noqa: E402
from benchmarks.zoo.processes import fitted  # noqa: E402

RESULTS = HERE / "results" / "pipeline_zoo.json"
#: A gradient may differ by so much of the parameter's largest entry.
GOAL = 1e-6
#: How many members have to run.
GOAL_RUN = 22


def row_of(member: Member, *, processes: bool = False) -> dict[str, Any]:
    """One member's row of the table; with ``processes`` one of the ways to cut it is run by the real engine as well."""
    row: dict[str, Any] = {"name": member.name, "family": member.family, "reference": "whole batch" if member.mean else "same parts"}
    began = time.perf_counter()
    module = member.build()
    row["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    finding = look(member)
    row["probe_seconds"] = round(time.perf_counter() - began, 3)
    if finding.value.refusal is not None:
        return row | {"verdict": "refused", "reason": finding.value.refusal}
    blocks = finding.value.hooks["training_step"].blocks
    parts = parts_of(member, module)
    row |= {"blocks": len(blocks), "uncuttable": dict(finding.uncuttable), "micro_batches": parts, "cuts": {}}
    whole = 1 if member.mean else parts
    references = {"float32": alone(member, double=False, micro_batches=whole)}
    row["accumulated"] = errors(alone(member, double=False, micro_batches=parts), references["float32"]).to_dict()
    try:
        references["float64"] = alone(member, double=True, micro_batches=whole)
    except Exception as error:  # the model's own kernels may know single precision only
        row["not_in_double"] = f"{type(error).__name__}: {error}"
    for name, cuts in ways(finding).items():
        found = row["cuts"][name] = {"cuts": list(cuts)}
        try:
            for precision, theirs in references.items():
                ours = staged(member, finding, cuts, double=precision == "float64", micro_batches=parts)
                found[precision] = errors(ours, theirs).to_dict()
        except Exception as error:  # loud, where the probe said that it would run
            found["failure"] = f"{type(error).__name__}: {error}"
    if processes:
        name = next(name for name in ("3 uneven", "3 even", "2 even") if name in row["cuts"])
        found = row["cuts"][f"{name}, in processes"] = {"cuts": row["cuts"][name]["cuts"]}
        try:
            ours = fitted(member, found["cuts"], micro_batches=parts)
            found["float32"] = errors(ours, references["float32"]).to_dict()
            found["beside_stages_in_one_process"] = errors(
                ours, staged(member, finding, found["cuts"], double=False, micro_batches=parts)
            ).to_dict()
        except Exception as error:
            found["failure"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.perf_counter() - began, 3)
    return row | {"verdict": "right" if all(is_right(found) for found in row["cuts"].values()) else "wrong"}


def is_right(found: dict[str, Any]) -> bool:
    """Whether gradients are within the goal: in single precision, or in double precision where rounding explains more in single."""
    measured = [found[key] for key in ("float32", "float64", "beside_stages_in_one_process") if key in found]
    if "failure" in found or any("missing" in each for each in measured):
        return False
    return any(each["relative"] <= GOAL and each["max_abs"] <= GOAL * max(1.0, each["largest_gradient"]) for each in measured)


def worst(row: dict[str, Any], precision: str, kind: str) -> float:
    """The largest error of all ways to cut."""
    return max((found[precision][kind] for found in row["cuts"].values() if precision in found), default=float("nan"))


def line_of(row: dict[str, Any]) -> str:
    if row["verdict"] == "refused":
        return f"{row['name']:<22} refused: {row['reason']}"
    failures = [found["failure"] for found in row["cuts"].values() if "failure" in found]
    figures = [f"{worst(row, precision, kind):.1e}" for precision in ("float32", "float64") for kind in ("max_abs", "relative")]
    return (
        f"{row['name']:<22} {row['verdict']:<6} {len(row['cuts'])} ways to cut {row['blocks']} blocks: "
        f"float32 {figures[0]}, relative {figures[1]} (accumulating alone {row['accumulated']['relative']:.1e}); "
        f"float64 {figures[2]}, relative {figures[3]}; {row['seconds']:.1f} s" + "".join(f"\n    {failure}" for failure in failures[:1])
    )


def cpu_seconds() -> float:
    """Of this process and its children, which a busy machine doesn't change much."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    """Run the benchmark; the exit status says whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few members, a table only")
    parser.add_argument("--only", nargs="*", help="names of members, a table only")
    parser.add_argument("--processes", action="store_true", help="run one way to cut each by the real engine, too; a table only")
    parser.add_argument("--json", type=Path, help=f"where to write the result; {RESULTS} unless given")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = [member for member in MEMBERS.values() if member.name in arguments.only] if arguments.only else list(MEMBERS.values())
    if arguments.quick:
        chosen = [member for member in chosen if member.quick]
    began, rows = time.perf_counter(), []
    for member in chosen:
        rows.append(row_of(member, processes=arguments.processes))
        print(line_of(rows[-1]), flush=True)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("right", "wrong", "refused")}
    whole = not (arguments.quick or arguments.only or arguments.processes)
    result = machine() | {
        "goal": {"gradient_error": GOAL, "run": GOAL_RUN, "wrong": 0},
        "counts": counts,
        "hugging_face_right": sum(row["verdict"] == "right" and row["family"] == "Hugging Face" for row in rows),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(cpu_seconds(), 1),
        "steps": 3,
        "normalisation": (
            "max_abs: the largest difference of any entry of any gradient in any step; relative: the same over the largest entry of the "
            "same parameter's gradient, or over a thousandth of the largest entry of all gradients where that is more. A member is right "
            "if the relative error is at most 1e-6 in single precision or, where summing in another order rounds more than that "
            "(accumulated: what one process without stages differs by when it works the batch off in the same parts), in double precision"
        ),
        "rows": rows,
    }
    seconds = f"{result['seconds']:.0f} s, {result['cpu_seconds']:.0f} s of a core"
    print(f"{counts['right']} right, {counts['refused']} refused, {counts['wrong']} wrong in {seconds}")
    path = arguments.json or (RESULTS if whole else None)
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if counts["wrong"] == 0 and (not whole or counts["right"] >= GOAL_RUN) else 1


if __name__ == "__main__":
    sys.exit(main())
