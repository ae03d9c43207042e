"""What becomes of a run's figures when it is over: they are shown beside the prediction, and kept for the next one."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_autopar._lightning import rank_zero_info
from lightning_autopar.memory.learned.corrections import make_record, make_shortage, plan_shape
from lightning_autopar.memory.learned.memory_records import add_record
from lightning_autopar.memory.learned.step_times import StepTime, add_step_time, disturbance
from lightning_autopar.planning.plan_cost import links_seconds
from lightning_autopar.report.report import Report
from lightning_autopar.strategies.base.worker_exception import LACKED
from lightning_autopar.text import format_bytes, format_change, format_seconds


def announce_measured(report: Report, measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Log what was predicted beside what was measured, once, on rank 0."""
    candidate, lengths = report.best_candidate, report.footprint.lengths
    assert candidate is not None, "a plan has run"
    lines = []
    for device, values in measured.items():
        words = []
        peak_bytes, step_seconds = values["peak_bytes"], values["step_seconds"]
        if peak_bytes is not None and device in candidate.bytes:
            predicted_bytes = candidate.bytes[device].allocated
            occasion = candidate.bytes[device].to_dict().get("occasion", "step")
            when = "" if occasion == "step" else f" for a {occasion}"
            if lengths is not None and lengths.vary:
                when += f" with a batch of {lengths.size(lengths.reach)}"
            # Training steps alone are measured: a validation's prediction has nothing to be compared with.
            seen = f"({format_change(peak_bytes, predicted_bytes)})" if occasion == "step" else "in a training step"
            words.append(f"memory {format_bytes(predicted_bytes)} predicted{when}, {format_bytes(peak_bytes)} measured {seen}")
        if step_seconds and candidate.seconds is not None:
            words.append(f"step {format_seconds(candidate.seconds.step)} predicted, {format_seconds(step_seconds)} measured")
        if words:
            lines.append(f"  {device}: {'; '.join(words)}")
    if lines:
        rank_zero_info("\n".join([f"autopar: plan {candidate.plan.title()}", *lines]))


def learn(report: Report, measured: Mapping[str, Mapping[str, Any]]) -> None:
    """For the next plan of the same module, store a training run's measured figures with the predicted ones, before any correction.

    Args:
        report: of the plan that ran.
        measured: of each of its devices; a run that is too short to be measured teaches nothing. One that ran its batches in more parts
            than planned teaches what the plan lacked, and nothing else.
    """
    candidate, residuals = report.best_candidate, report.residuals
    assert candidate is not None, "a plan has run"
    devices = candidate.plan.devices
    held = [candidate.raw[device] for device in devices if device in candidate.raw]
    if residuals.key is None or len(held) < len(devices) or any(device not in measured for device in devices):
        return
    lacked = {device: measured[device].get("lacked_bytes") for device in devices}
    if any(size is not None for size in lacked.values()):
        _learn_lacked(report, lacked)
        return
    names = [residuals.devices[device] for device in devices]
    today = datetime.date.today().isoformat()
    record = make_record(candidate.plan, names, held, [measured[device] for device in devices], today)
    if record is not None and not (report.footprint.lengths is not None and report.footprint.lengths.vary):
        add_record(residuals.key, record)  # otherwise the bytes were predicted for a longer batch than the measured ones
    _learn_time(report, names, measured, today)


def learn_shortage(report: Report | None, error: BaseException) -> None:
    """Store that a run ran out of a GPU's memory, though it was predicted to fit, so that its next start plans with more.

    Args:
        report: of the plan that ran.
        error: what ended it; any other exception teaches nothing.
    """
    lacked = getattr(error, LACKED, None)
    if isinstance(lacked, Mapping) and report is not None:
        _learn_lacked(report, lacked)


def _learn_lacked(report: Report, lacked: Mapping[str, int | None]) -> None:
    """Store that a plan needs more of some devices than these bytes."""
    candidate = report.best_candidate
    if candidate is None or report.residuals.key is None:
        return
    devices = candidate.plan.devices
    held = [candidate.raw[device] for device in devices if device in candidate.raw]
    if len(held) < len(devices):
        return
    names = [report.residuals.devices[device] for device in devices]
    today = datetime.date.today().isoformat()
    record = make_shortage(candidate.plan, names, held, [lacked.get(device) for device in devices], today)
    if record is not None:
        add_record(report.residuals.key, record)


def disturbed(report: Report, measured: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why a run's step times say nothing about the next run's; None where they do."""
    assert report.best is not None, "a plan has run"
    devices = [report.inventory.device(device) for device in report.best.devices]
    spreads, waits = ([measured[device.id][name] for device in devices] for name in ("step_spread", "waited_share"))
    threads = sum(device.threads or 0 for device in devices)
    cores = report.inventory.host_threads
    return disturbance(
        spread=None if None in spreads else max(spreads),
        waited=None if None in waits else max(waits),
        own_wait=max(0.0, 1 - cores / threads) if threads and cores else 0.0,
        busy=max(max(device.utilization or 0.0, 1 - 1 / device.slowdown) for device in devices),
    )


def _learn_time(report: Report, names: Sequence[str], measured: Mapping[str, Mapping[str, Any]], today: str) -> None:
    """Store the slowest rank's seconds a step with those predicted before any correction, unless the run was disturbed."""
    candidate, residuals = report.best_candidate, report.residuals
    assert candidate is not None, "a plan has run"
    assert residuals.key is not None, "something is to be kept"
    taken = [measured[device]["step_seconds"] for device in candidate.plan.devices]
    predicted = candidate.raw_seconds or candidate.seconds
    if predicted is None or not all(taken):
        return
    if (why := disturbed(report, measured)) is not None:
        rank_zero_info(f"autopar: this run's step times don't count for the next plan: {why}")
        return
    record = StepTime(
        module=residuals.key,
        shape=plan_shape(candidate.plan),
        devices=tuple(names),
        rates=residuals.times.rates,
        predicted=predicted.step,
        links=links_seconds(predicted),
        measured=max(taken),
        day=today,
    )
    add_step_time(report.inventory.host_threads, record)
