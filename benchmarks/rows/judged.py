"""One row's prediction beside what was measured. Knows what a row publishes; traces and predicts nothing itself."""

from __future__ import annotations

from typing import Any

from rows.foretold import foresee_bytes, foresee_fit, foresee_seconds, of_kind, whole_footprint
from rows.hardware import inventory
from rows.planned import Layout
from rows.question import Question
from rows.row import Fields, Row
from rows.tracing import Footprints

_GIB = 1 << 30
_TRANSFORMERS = ("decoder", "encoder", "vit", "encoder-decoder")


def _head(row: Row) -> dict[str, Any]:
    fields = Fields(row)
    return {
        "id": row.get("id"),
        "source": row.get("source_name"),
        "model": row.get("model"),
        "transformer": fields.kind in _TRANSFORMERS,
    }


def unbuilt(row: Row, reason: str, detail: str | None = None) -> dict[str, Any]:
    """A row without a prediction."""
    return {**_head(row), "built": False, "reason": reason, **({"detail": detail} if detail else {})}


def measured(row: Row) -> dict[str, Any]:
    """What the row says was measured, as far as it says so."""
    fields = Fields(row)
    usable = row.get("usable_for") or ()
    memory = fields.dimension_of("measured_peak_memory_gib")
    outcome = fields.text("outcome")
    return {
        "memory_gib": memory if "memory" in usable else None,
        "memory_kind": row.get("memory_kind"),
        "step_seconds": _step_seconds(row) if "throughput" in usable else None,
        "fits": False if outcome.startswith("oom") else True if outcome.startswith("ok") else None,
    }


def _step_seconds(row: Row) -> float | None:
    """Seconds of a step of the whole batch: as derived, as measured, or from a rate and the batch."""
    for part in ("derived", "measured"):
        found = row.get(part)
        if isinstance(found, dict) and isinstance(found.get("step_seconds"), (int, float)) and found["step_seconds"] > 0:
            return float(found["step_seconds"])
    rates = {**(row.get("derived") or {}), **{k: v for k, v in (row.get("measured") or {}).items() if v}}
    fields = Fields(row)
    batch = fields.dimension_of("global_batch")
    if batch and rates.get("samples_per_s"):
        return float(batch / rates["samples_per_s"])
    length, count = fields.dimension("seq_len"), fields.dimension_of("n_gpus") or 1
    if batch and length and rates.get("tokens_per_s_per_gpu"):
        return float(batch * length / (rates["tokens_per_s_per_gpu"] * count))
    return None


def judge(row: Row, asked: Question, laid: Layout, assumptions: list[str], most: Question, footprints: Footprints) -> dict[str, Any]:
    """A row's result.

    Args:
        row: as published.
        asked: what it asks.
        laid: how its run is laid out.
        assumptions: that were made to read it.
        most: the same question at the largest batch that any row asks it with; what is traced.
        footprints: traces.

    Raises:
        NotBuilt: if its GPU or its stages are none that we know.
    """
    found = measured(row)
    fields = Fields(row, list(assumptions))
    devices = inventory(fields)
    kind = str(found["memory_kind"] or "").casefold()
    traced = footprints.of(most, whole=False)
    if traced.tape is None and laid.engine in ("zero", "pipeline"):  # stages and DeepSpeed's buckets are worked out from it
        traced = footprints.of(most, whole=True)
    footprint = whole_footprint(traced, asked, laid)
    held, plan = foresee_bytes(footprint, asked, laid, devices)
    fits = foresee_fit(footprint, held, laid, plan, devices.devices[0].total_bytes)
    seconds = foresee_seconds(footprint, asked, laid, plan, devices)
    memory_gib = of_kind(held, kind) / _GIB
    samples = asked.rows * laid.data * laid.accumulate
    global_batch = fields.dimension_of("global_batch")
    step = seconds["step"]
    if global_batch and abs(global_batch / samples - 1) > 0.01:
        # A step of another size than micro-batch, ranks and accumulation make: the published one counts.
        step *= global_batch / samples
        fields.assume(f"the batch of {global_batch:g} isn't what micro-batch, ranks and accumulation make ({samples}); time in proportion")
    per_gpu = (global_batch or samples) / laid.ranks
    real = found["step_seconds"]
    return {
        **_head(row),
        "built": True,
        "plan": plan.title(),
        "precision": asked.precision,
        "optimizer": asked.optimizer,
        "predicted": {
            "memory_gib": memory_gib,
            "step_seconds": step,
            "samples_per_second_per_gpu": per_gpu / step if step else None,
            "fits": fits,
            "bytes": held.to_dict(),
            "seconds": seconds,
        },
        "measured": {**found, "samples_per_second_per_gpu": per_gpu / real if real else None},
        "memory_error": memory_gib / found["memory_gib"] - 1 if found["memory_gib"] else None,
        "seconds_error": step / real - 1 if real and step else None,
        "margin": footprint.margin,
        "assumptions": fields.assumptions,
    }
