"""One run of a case under plain Lightning or any other strategy, and what two runs differ in. Knows no engine by name."""

from __future__ import annotations

import csv
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.conformance.features import FEATURES, PLAIN, Feature
from tests.conformance.recording import Draws, FileLogger, MemoryLogger, Recorder
from tests.conformance.zoo import ZOO, Case

ROWS: Mapping[str, Feature] = {PLAIN.name: PLAIN, **FEATURES}
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two runs may be apart and still be the same run.

    Args:
        values: of a logged or counted number: |a - b| ≤ values · max(1, |a|).
        weights: of a weight, measured in the same way; None where ``movement`` takes its place.
        movement: of all weights together: ‖a - b‖ ≤ movement · ‖a - start‖, the distance that training moved them.
    """

    values: float
    weights: float | None = None
    movement: float | None = None


# Splitting a batch changes only the order of sums. In fp32 that moves these runs by 1e-6 at most. bf16 keeps 8 significant bits, so one
# rounding errs by up to 2⁻⁸ of the value. Under bf16-mixed each gradient is off by about one rounding and the fp32 weights by the same
# share of the distance that training moved them; momentum and AdamW's division make it up to 2⁻⁷. Under bf16-true each step also rounds
# every weight and the loss itself, and what is logged is bf16 as well: 2⁻⁶ of both. The bounds are twice that. test_harness.py holds them
# against a batch computed in two halves on one device, which must pass, and the same with the ragged batch's halves weighted wrongly,
# which must not.
TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(values=1e-5, weights=1e-5),
    "bf16-mixed": Tolerance(values=2**-7, movement=2**-6),
    "bf16-true": Tolerance(values=2**-5, movement=2**-5),
}


_SCRATCH: list[Path] = []


def scratch() -> Path:
    """A new folder that lives as long as the session."""
    _SCRATCH.append(Path(mkdtemp(prefix="conformance-")))
    return _SCRATCH[-1]


def clear_scratch() -> None:
    """Remove every folder that :func:`scratch` made."""
    while _SCRATCH:
        shutil.rmtree(_SCRATCH.pop(), ignore_errors=True)


@dataclass(kw_only=True)
class Run:
    """What a run left behind, flattened to leaves under dotted names.

    Args:
        observed: everything but weights that plain Lightning also shows: rows, metrics, counters, callbacks' states, predictions, files.
        weights: of the parent's module after fit.
        start: of the same module before fit; empty for layers built later.
        processes: how many began to train.
        warnings: texts of the warnings that the parent gave.
        strategy: the trainer's, after the run.
    """

    observed: dict[str, Any]
    weights: dict[str, Tensor]
    start: dict[str, Tensor]
    processes: int
    warnings: list[str]
    strategy: Any


@dataclass(kw_only=True)
class Difference:
    """What two runs differ in: the largest numerical difference, where it is, and everything beyond the tolerance.

    Args:
        largest: of the numerical differences.
        where: it is.
        beyond: a sentence for each thing beyond the tolerance.
        apart: the numerical differences, by where they are.
    """

    largest: float = 0.0
    where: str = ""
    beyond: list[str] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)

    def see(self, where: str, size: float, bound: float, text: str) -> None:
        self.apart[where] = size
        if size > self.largest or math.isnan(size):
            self.largest, self.where = size, where
        if not size <= bound:
            self.beyond.append(f"{where}: {text}, apart by {size:.2e}, which is more than {bound:.2e}")


def run(
    case: Case,
    feature: Feature,
    strategy: Any = "auto",
    *,
    root: Path | None = None,
    seed: int = SEED,
    module: Any = None,
    trainer: Mapping[str, Any] | None = None,
) -> Run:
    """Train the case as the feature says, under ``strategy``.

    Args:
        case: the member of the zoo.
        feature: the change to its run.
        strategy: plain Lightning's by default; else a callable that makes one for each Trainer.
        root: where the run may write; an empty folder.
        seed: of weights, data order and draws.
        module: keyword arguments of the module that this run alone has.
        trainer: keyword arguments of the Trainer that this run alone has.
    """
    root, fit = root or scratch(), partial(_fit, trainer or {})
    root.mkdir(exist_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if feature.resume:
            fit(case, feature, strategy, root, seed, module or {}, epochs=1, log="rows-before.jsonl")
        begin = root / "checkpoints" / "last.ckpt" if feature.resume else feature.resume_from
        draws = [Draws.now()] if feature.resume and strategy == "auto" else []
        ran, net, data, start = fit(case, feature, strategy, root, seed, module or {}, epochs=feature.epochs, begin=begin, also=draws)
        results = _after(ran, net, data, feature)
    return left_behind(ran, net, root, start=start, warnings=[str(warning.message) for warning in caught], results=results)


def left_behind(
    trainer: Any, net: Any, root: Path, *, start: dict[str, Tensor], warnings: list[str], results: Mapping[str, Any] | None = None
) -> Run:
    """What a run that is over left behind, and under ``root``."""
    return Run(
        observed={name: _from_gpu(value) for name, value in leaves({"trainer": _state(trainer, root), **(results or {})})},
        weights={name: _from_gpu(value.detach()).clone() for name, value in net.state_dict().items()},
        start=start,
        processes=len(list(root.glob("process-*"))),
        warnings=warnings,
        strategy=trainer.strategy,
    )


def _from_gpu(value: Any) -> Any:
    """A GPU's tensors in host memory, where those are that workers hand back. What is elsewhere stays there, and is compared as such."""
    return value.cpu() if isinstance(value, Tensor) and value.device.type == "cuda" else value


def _fit(
    options: Mapping[str, Any],
    case: Case,
    feature: Feature,
    strategy: Any,
    root: Path,
    seed: int,
    module: Mapping[str, Any],
    *,
    epochs: int,
    log: str = "rows.jsonl",
    begin: Path | None = None,
    also: Sequence[pl.Callback] = (),
) -> tuple[Any, Any, dict[str, Any], dict[str, Tensor]]:
    """One Trainer's fit, built afresh as a script would."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(seed, verbose=False)
    net = case.module(**{**feature.module, **module})
    start = {name: value.detach().clone() for name, value in net.state_dict().items()}
    data = case.data(**feature.data)
    arguments = feature.trainer(root)
    arguments["logger"] = [FileLogger(root / log), *arguments.get("logger", [])]
    arguments["callbacks"] = [Recorder(root), *arguments.get("callbacks", []), *also]
    keeps = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in arguments["callbacks"])
    trainer = pl.Trainer(
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_epochs=epochs,
        log_every_n_steps=1,
        default_root_dir=root,
        enable_checkpointing=keeps,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", **({"devices": 1} if isinstance(strategy, str) else {}), **options},
        **arguments,
    )
    trainer.fit(net, **data, ckpt_path=begin)
    return trainer, net, data, start


def _after(trainer: Any, net: Any, data: Mapping[str, Any], feature: Feature) -> dict[str, Any]:
    """What the feature calls once fit is over."""
    loader = data.get("val_dataloaders")
    results: dict[str, Any] = {}
    if "validate" in feature.after:
        results["validate"] = trainer.validate(net, loader, verbose=False)
    if "predict" in feature.after:
        results["predict"] = trainer.predict(net, loader)
    return results


def _state(trainer: Any, root: Path) -> dict[str, Any]:
    """What a script can ask its Trainer after fit, with paths told from the run's own folder."""
    state: dict[str, Any] = {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "batches": [trainer.num_training_batches, trainer.fit_loop.total_batch_idx],
        "status": str(trainer.state.status),
        "should_stop": trainer.should_stop,
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "files": sorted(str(path.relative_to(root)) for path in root.rglob("*.ckpt")),
    }
    for logger in trainer.loggers:
        if isinstance(logger, FileLogger):
            state["rows"] = logger.rows()
        elif isinstance(logger, MemoryLogger):
            state["memory rows"] = logger.rows
        else:
            with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
                state["csv rows"] = [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]
    for callback in trainer.callbacks:
        if isinstance(callback, Recorder):
            state["events"] = callback.events
        elif not isinstance(callback, Draws):
            state[type(callback).__name__] = _relative(callback.state_dict(), root)
        if isinstance(callback, pl.callbacks.ModelCheckpoint):
            best = torch.load(callback.best_model_path, weights_only=True, map_location="cpu")
            state["best checkpoint"] = {name: best[name] for name in ("state_dict", "global_step", "epoch")}
    return state


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _relative(value: Any, root: Path) -> Any:
    """The value with the run's own folder cut out of every text."""
    if isinstance(value, str):
        return value.replace(str(root), "")
    if isinstance(value, Mapping):
        return {_relative(key, root): _relative(item, root) for key, item in value.items()}
    return value


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings and sequences under its dotted name; lengths of sequences too."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield f"{prefix}.length", len(value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}.{index}")
    else:
        yield prefix, value


def compare(plain: Run, other: Run, tolerance: Tolerance) -> Difference:
    """What ``other`` differs from ``plain`` in."""
    difference = Difference()
    compare_leaves(plain.observed, other.observed, tolerance.values, difference)
    if tolerance.weights is not None:
        compare_leaves(plain.weights, other.weights, tolerance.weights, difference, "weights")
    else:
        assert tolerance.movement is not None
        compare_leaves(plain.weights, other.weights, math.inf, Difference(), "weights")
        moved = distance(plain.weights, plain.start)
        size = distance(plain.weights, other.weights) / moved if moved else math.inf
        difference.see("weights", size, tolerance.movement, f"moved by {moved:.3g}")
    return difference


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Euclidean distance over all floating-point weights."""
    squares = (((a[name].double() - b[name].double()) ** 2).sum() for name in a if a[name].is_floating_point())
    return math.sqrt(float(sum(squares)))


def compare_leaves(a: Mapping[str, Any], b: Mapping[str, Any], bound: float, difference: Difference, kind: str = "") -> None:
    prefix = f"{kind} " if kind else ""
    for name in sorted(a.keys() ^ b.keys()):
        side = "only in plain Lightning's run" if name in a else "not in plain Lightning's run"
        difference.beyond.append(f"{prefix}{name} is {side}: {(a if name in a else b)[name]!r}")
    for name in a.keys() & b.keys():
        left, right = a[name], b[name]
        if isinstance(left, Tensor) != isinstance(right, Tensor) or (
            isinstance(left, Tensor)
            and (type(left), left.shape, left.dtype, left.device) != (type(right), right.shape, right.dtype, right.device)
        ):
            difference.beyond.append(f"{prefix}{name} is {_kind(right)} where plain Lightning has {_kind(left)}")
        elif isinstance(left, Tensor) or (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            size = _apart(torch.as_tensor(left), torch.as_tensor(right))
            difference.see(f"{prefix}{name}", size, bound, f"{_short(right)} where plain Lightning has {_short(left)}")
        elif left != right:
            difference.beyond.append(f"{prefix}{name} is {right!r} where plain Lightning has {left!r}")


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest |a - b| / max(1, |a|); two NaNs are equal, as are equal infinities."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs() / a.abs().clamp(min=1))
    return float(apart.max()) if apart.numel() else 0.0


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} {tuple(value.shape)} of {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _short(value: Any) -> str:
    return f"{float(value):.7g}" if not isinstance(value, Tensor) or value.numel() == 1 else f"a tensor {tuple(value.shape)}"


@cache
def plain(case: str, feature: str) -> Run:
    """The same case under Lightning's own single-device strategy; run once a session."""
    return run(ZOO[case], ROWS[feature])
