"""The last plan and its checks as numbers and names of this package's own, kept for a bug report: nothing of the user's code or data.

Names of modules, parameters and logged values, and every sentence, may come from the user's code, so only their number is kept.
"""

from __future__ import annotations

import datetime
from typing import Any

from lightning_autopar.memory.learned.cache_files import cache_folder, write_json
from lightning_autopar.plans import all_engines
from lightning_autopar.report.report import Candidate
from lightning_autopar.strategies.preparation.decision import Decision

#: The file's place in the cache.
KIND, NAME = "last_plan", "plan.json"
#: Fields of a plan whose words are this package's own; of other words only the number is kept.
_OWN_WORDS = ("engine", "schedule", "offload")


def keep(decision: Decision) -> None:
    """Write what is kept of a decision; where the cache is off, or the disk full, nothing is."""
    if (folder := cache_folder(KIND)) is not None:
        write_json(folder / NAME, values_of(decision))


def values_of(decision: Decision) -> dict[str, Any]:
    """The last plan, every candidate's figures, and what the checks of the first batch found."""
    report = decision.report
    order = {device.id: f"device {index}" for index, device in enumerate(report.inventory.devices)}
    needs = report.footprint.to_dict()["bytes"]
    found: dict[str, Any] = {
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "precision": report.precision,
        "batch": {"samples": report.footprint.batch_size, "rule": decision.run_plan.batch},
        "step": {"bytes": {name: int(size) for name, size in needs.items()}, "margin": report.footprint.margin},
        "free_bytes": {order[device.id]: device.free_bytes for device in report.inventory.devices},
        "chosen": report.best_index,
        "candidates": [_of_candidate(candidate, order) for candidate in report.candidates],
        "elastic": decision.run_plan.elastic,
    }
    if decision.look is not None:
        findings = decision.look.findings
        split = findings.split
        found["checks"] = {
            "traced": findings.untraced is None and findings.footprint.conduct is not None,
            "whole_batch_only": findings.whole is not None,
            "several_loaders": findings.several_loaders,
            "data_draws": len(findings.data_draws),
            "engines": {
                name: {"refusals": sum(words is not None for words in finding.refusals.values()), "notes": len(finding.notes)}
                for name, finding in findings.engines.items()
                if name in all_engines()
            },
        }
        if split is not None:
            found["checks"]["split"] = {
                "splittable": split.splittable,
                "probed": split.probed,
                "difference": split.difference if split.difference == split.difference else None,  # NaN is no JSON
                "notes": len(split.notes),
                "logged_values": len(split.log_rules),
                "logged_without_rule": sum(not rules for rules in split.log_rules.values()),
            }
    return found


def _without_words(value: Any) -> Any:
    """A number; of anything else how many it has."""
    return value if value is None or isinstance(value, (bool, int, float)) else len(value)


def _of_candidate(candidate: Candidate, order: dict[str, str]) -> dict[str, Any]:
    plan = candidate.plan.to_dict()
    return {
        "plan": {name: value if name in _OWN_WORDS else _without_words(value) for name, value in plan.items()},
        "on": [order.get(device, "another") for device in candidate.plan.devices],
        "fits": candidate.fits,
        "held_back": candidate.held_back,
        "needs_bytes": {order.get(device, "another"): size for device, size in candidate.needs.items()},
        "seconds": candidate.seconds.to_dict() if candidate.seconds else {},
        "corrections": len(candidate.learned),
        "notes": len(candidate.notes),
    }
