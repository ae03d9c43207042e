"""How good predictions are, source by source. Statistics alone: it predicts nothing."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's τ-b of two sequences; None where either has no order."""
    agree = ties_a = ties_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            x, y = _sign(a[i] - a[j]), _sign(b[i] - b[j])
            pairs += 1
            agree += x * y
            ties_a += x == 0
            ties_b += y == 0
    scale = ((pairs - ties_a) * (pairs - ties_b)) ** 0.5
    return agree / scale if scale else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def spread(errors: Iterable[float]) -> dict[str, float | int] | None:
    """Count, median and 90th percentile of absolute relative errors, and the median with its sign; None of none."""
    signed = sorted(errors)
    if not signed:
        return None
    sizes = sorted(abs(error) for error in signed)
    return {
        "n": len(sizes),
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "signed_median": statistics.median(signed),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By source, and over sources the mean and the median of the source's median."""
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row)
    sources = {source: _source(found) for source, found in by_source.items()}
    medians = {name: [one[name]["median"] for one in sources.values() if one[name] is not None] for name in ("memory", "seconds")}
    taus = [one["kendall_tau"] for one in sources.values() if one["kendall_tau"] is not None]
    missed = [row["id"] for row in rows if row["built"] and row["measured"]["fits"] is False and row["predicted"]["fits"]]
    refused = [row["id"] for row in rows if row["built"] and row["measured"]["fits"] and not row["predicted"]["fits"]]
    transformers = [row for row in rows if row["transformer"]]
    return {
        "rows": len(rows),
        "built": sum(row["built"] for row in rows),
        "transformers": len(transformers),
        "transformers_built": sum(row["built"] for row in transformers),
        "not_built": dict(Counter(row["reason"] for row in rows if not row["built"])),
        **{f"{name}_mean_of_medians": _mean(found) for name, found in medians.items()},
        **{f"{name}_median_of_medians": statistics.median(found) if found else None for name, found in medians.items()},
        "kendall_tau_mean": _mean(taus),
        "kendall_tau_least": min(taus, default=None),
        "out_of_memory_missed": missed,
        "fitting_refused": refused,
        "sources": sources,
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _source(rows: list[dict[str, Any]]) -> dict[str, Any]:
    built = [row for row in rows if row["built"]]
    timed = [row for row in built if row["seconds_error"] is not None]
    judged = [row for row in built if row["measured"]["fits"] is not None]

    def order(name: str) -> float | None:
        return kendall([row["predicted"][name] for row in timed], [row["measured"][name] for row in timed]) if len(timed) > 2 else None

    return {
        "rows": len(rows),
        "built": len(built),
        "memory": spread(row["memory_error"] for row in built if row["memory_error"] is not None),
        "seconds": spread(row["seconds_error"] for row in timed),
        "kendall_tau": order("step_seconds"),
        "kendall_tau_throughput": order("samples_per_second_per_gpu"),
        "fits_judged": len(judged),
        "wrong_fits": [row["id"] for row in judged if row["measured"]["fits"] != row["predicted"]["fits"]],
    }
