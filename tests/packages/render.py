"""docs/packages.md from what the cells last came to: `python -m tests.packages.render`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conformance.render import in_words
from tests.packages.judge import Finding
from tests.packages.own import Suite, section, suites
from tests.packages.plans import PLANS, Cell
from tests.packages.zoo import MEMBERS, OTHER_LIGHTNING, PACKAGES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: What the cells came to, by the cells' ids.
RESULTS = HERE / "results.json"
#: The same on GPUs.
CUDA_RESULTS = HERE / "results_cuda.json"
PAGE = ROOT / "docs" / "packages.md"
#: What the versions are told of, beside the packages.
BELOW = ("torch", "lightning", "peft", "deepspeed")
#: The first two lines of each table of cells.
COLUMNS = ("| Model | " + " | ".join(PLANS) + " |", "|---|" + "---|" * len(PLANS))

HEAD = """# Other people's packages

Models that others wrote, small and built from their configurations, on synthetic data. Every cell is a real run on CPU devices in a process
of its own, compared with plain Lightning's `Trainer(devices=1)` with the same seed: every logged row, the metrics, counters, callbacks'
states, the final weights, and what the optimizers hold. Logged values are compared as numbers, whatever subclass of a tensor holds them.

- **✓** the same run: the number is the largest difference, relative above 1 and absolute below, at most 1e-5. Where single precision's own
  noise is larger, the run and plain Lightning's were repeated in **float64**: the number is from these, and float32's stands beside it.
  DeepSpeed runs no float64: there the run in float32 must be **as** that of another plan, which was the same in float64.
  Where noise hides even that, plain Lightning's run was repeated three times with each initial weight and each gradient off by its last
  bit. **Rounding** is the largest difference of these at this value; nothing in the cell's run differs by more than four times that.
- **warned** the loss isn't a mean over samples, and changes where a batch runs in parts one after the other; the report says so, with the
  size of the difference, before the run. `AutoParallelStrategy(exact=True)` excludes such plans.
- **refused** by a sentence, before any process starts.
- **differs** and **crashed** are defects, listed below.

`micro-batches` is one device that runs each batch in two parts, `zero-3` DeepSpeed's third stage; the others are two devices with
one engine allowed, whose plan the planner chooses. Each cell shows its last run; a whole run of `make packages` renews all of them.
"""

CUDA_HEAD = """## On two GPUs

The same cells on two stub GPUs (tests/nullgpu), against plain Lightning on one. **Not on the stub**: plain Lightning's own run fails
there, since stub GPUs lack something that it needs, such as cuDNN's recurrent layers. **Not run**: the cell has no result yet, or plain
Lightning's own run fails for another reason (torch-uncertainty's SWAG adds tensors on the CPU to tensors on a GPU). Neither counts as a
pass. Attention is computed by its parts in both runs: a fused kernel draws the dropout inside, so each rank of a split batch would draw
its own. A cell shows that the run is right and ends. It says nothing about a GPU's own rounding, nor about time. `make packages-cuda`
renews these cells.
"""

#: Kinds of refusals by their sentences, whether such a cell can't run by nature, and why.
KINDS: Mapping[str, tuple[bool, str]] = {
    r"the statistics of \d+ batch norms?": (
        True,
        "Batch norm takes its statistics over the whole batch. Parts that run one after the other would have to wait for one another at"
        " every layer and keep all that they computed before it, which is the memory that parts are for.",
    ),
    r"which is no mean over the samples": (
        True,
        "A part's gradient needs the value of the whole batch, which is known when the last part has run.",
    ),
    r"is written to, and used before it": (
        False,
        "The step writes to a later stage's weights by those of an earlier one. A stage could do so for its own, if it had the others too.",
    ),
    r"blocks that run once each": (
        False,
        "None of the blocks is seen to run in the step, which also differentiates by itself in the midst of its forward.",
    ),
    r"reads a value of the model's": (True, "The step decides by a value that a later stage would have to wait for."),
    r"what the step does to whole parameters|what the step does is another thing": (
        False,
        "What a step does to parameters by hand could be done on shards where it is elementwise.",
    ),
    r"parameters have no \.grad to read": (
        False,
        "DeepSpeed reduces gradients into parts as they come. They could be gathered for the hook, at the price of the memory saved.",
    ),
    r"the step keeps '": (False, "What a step appends to an attribute could be brought from the stage that has it to the others."),
    r"parts are cut out of the collated batch": (False, "Each part of such a batch could be collated of its own samples."),
    r"in stages": (
        False,
        "The stages compute something else, as the trial before the run has shown; its code would have to be understood.",
    ),
}


def page(findings: Mapping[str, Finding], on_gpus: Mapping[str, Finding], own: Mapping[str, Suite]) -> str:
    """The page's text; cells may be missing that weren't run.

    Args:
        findings: what was found on CPU devices, by the cells' ids.
        on_gpus: what was found on GPUs.
        own: what the packages' own tests came to.
    """
    cells = [Cell(member=name, plan=plan) for name in MEMBERS for plan in PLANS]
    found = [findings[cell.id] for cell in cells if cell.id in findings]
    lines = [HEAD, _summary(found, len(cells)), ""]
    footnotes: list[str] = []
    for package in PACKAGES:
        lines += [
            f"## {package} {_versions()[_normal(package)]}",
            "",
            *COLUMNS,
        ]
        for member in MEMBERS.values():
            if member.package == package:
                words = [_words(findings.get(f"{member.name}-{plan}"), footnotes) for plan in PLANS]
                lines.append(f"| **{member.name}**: {member.about} | " + " | ".join(words) + " |")
        lines.append("")
    lines += _on_gpus(on_gpus, cells, footnotes)
    if footnotes:
        lines += ["## Refused and crashed", ""] + [f"{number}. {_plain(reason)}" for number, reason in enumerate(footnotes, start=1)] + [""]
        lines += ["### By kind", "", "On CPU devices:", ""] + [f"- {line}" for line in _by_kind(findings, cells)] + [""]
    every = [(cell.id, found.get(cell.id)) for found in (findings, on_gpus) for cell in cells]
    if differing := [(cell, finding) for cell, finding in every if finding is not None and finding.outcome == "differs"]:
        lines += ["## What differs", ""]
        lines += [f"- {cell}{' on GPUs' * bool(finding.gpus)}: {_plain(_first(finding))}" for cell, finding in differing] + [""]
    lines += [
        *section(own),
        "## Not run",
        "",
        f"{' and '.join(OTHER_LIGHTNING)}: their modules belong to `pytorch_lightning`, and this matrix runs modules of"
        " `lightning.pytorch` alone.",
        "",
        "Generated by `make packages`; don't edit.",
    ]
    return "\n".join(lines) + "\n"


def _on_gpus(findings: Mapping[str, Finding], cells: list[Cell], footnotes: list[str]) -> list[str]:
    """One table of all models."""
    found = [findings[cell.id] for cell in cells if cell.id in findings]
    gpus = ", ".join(sorted({finding.gpus for finding in found})) or "none"
    lines = [CUDA_HEAD, f"{_summary(found, len(cells))} GPUs: {gpus}.", "", *COLUMNS]
    for name in MEMBERS:
        lines.append(f"| **{name}** | " + " | ".join(_words(findings.get(f"{name}-{plan}"), footnotes) for plan in PLANS) + " |")
    return [*lines, ""]


def _by_kind(findings: Mapping[str, Finding], cells: list[Cell]) -> Iterator[str]:
    """How many cells each kind of refusal has, and whether more could run."""
    counts: Counter[str] = Counter()
    for cell in cells:
        if cell.id in findings and findings[cell.id].outcome == "refused":
            reason = findings[cell.id].reason
            counts[next((kind for kind in KINDS if re.search(kind, reason)), "")] += 1
    for kind, count in counts.most_common():
        nature, why = KINDS.get(kind, (False, "Other sentences."))
        yield f"{count} {'by nature' if nature else 'could run'}: {why}"


def _summary(found: list[Finding], asked: int) -> str:
    counts = Counter(finding.outcome for finding in found)
    ran = counts["parity"] + counts["warned"]
    missing = f", {counts['not on the stub']} not on the stub" if counts["not on the stub"] else ""
    days = sorted({finding.day for finding in found}) or ["never"]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    beneath = ", ".join(f"{name} {_versions()[name]}" for name in BELOW)
    return (
        f"**{len(found)} of {asked} cells were tried: {counts['parity']} the same, {counts['warned']} warned of, {counts['refused']}"
        f" refused, {counts['differs']} different, {counts['crashed']} crashed{missing}; {ran / max(1, len(found)):.0%} ran.**"
        f" {when}, with {beneath}."
    )


def _words(finding: Finding | None, footnotes: list[str]) -> str:
    if finding is None:
        return "not run"
    if finding.outcome == "not on the stub":
        return finding.outcome
    words = in_words(finding.outcome, [finding], footnotes)
    if finding.single is not None:
        words += f" ({f'as {finding.like}' if finding.like else 'float64'}; {finding.single:.0e})".replace("e-0", "e-")
    if finding.swing is not None:
        words += f" (rounding: {finding.swing:.0e})".replace("e-0", "e-")
    return words


def _first(finding: Finding) -> str:
    first = finding.beyond[0] if finding.beyond else finding.where
    return f"{first}; {finding.reason}" if finding.reason else first


def _plain(text: str) -> str:
    """Without what Markdown would read as its own."""
    return re.sub(r"([<>*_`|\[\]])", r"\\\1", text.replace("\n", " "))


def _versions() -> dict[str, str]:
    listed = (HERE / "requirements.txt").read_text(encoding="utf-8") + (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {_normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", listed, re.M)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(results: Path) -> dict[str, Finding]:
    kept = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    return {name: Finding(**finding) for name, finding in kept.items()}


def write() -> None:
    PAGE.write_text(page(read(RESULTS), read(CUDA_RESULTS), suites()), encoding="utf-8")


if __name__ == "__main__":
    write()
