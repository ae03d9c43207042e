"""Resumes exactly where a checkpoint was saved: it adds what plain Lightning's file has no place for, and corrects what Lightning's loops
get wrong.

A checkpoint saved after a step, in ``on_train_batch_end``, comes before the validation that may be due and before the epoch's end. Plain
Lightning leaves both out when it resumes there, begins the epoch's means anew and doesn't step a plateau scheduler at that epoch's end
(Lightning 2.6, ``_TrainingEpochLoop.reset``, ``advance``, ``_FitLoop.reset``, ``on_advance_end``). The additions lie in the file under a
key of their own, which plain Lightning ignores. Knows Lightning's loops and the loaders; no shards, and of a plan only
whether it goes on from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lightning_autopar._lightning import ProgressBar, Strategy, Trainer, callbacks
from lightning_autopar._lightning_compat import RestartStage, TrainerFn, loop_position, make_result, set_loop_position
from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.loader import ExactLoader, is_loader_state
from lightning_autopar.exact.logs.metrics_over_ranks import sync_states
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.state.checkpoint import KEY, put_loader_states_back, set_loader_states_aside
from lightning_autopar.strategies.base.out_of_memory.running_step import BACKWARD, RunningStep
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.saved_modules import SavedModules

#: The fields of a logged value's metadata that are plain values; the reduction is kept besides.
_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx", "metric_attribute")


@dataclass(kw_only=True)
class Resumption:
    """What is left to do once the loops are about to go on.

    Args:
        due: whether a validation comes before the next step.
        last: whether the epoch's last batch was done, but not its end.
        loaders: the training loaders' states.
        extra: what was saved under the package's key.
        counters: the fit loop's, of a snapshot saved between two batches.
    """

    due: bool
    last: bool
    loaders: list[dict[str, Any]]
    extra: dict[str, Any]
    counters: dict[str, Any] | None = None


def _rewind(loops: dict[str, Any], *, cleared: bool) -> None:
    """Count a batch whose step was left as not begun; between two batches this changes nothing. ``cleared`` says whether gradients were
    cleared in that step.
    """
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for scope in ("total", "current"):
        batches, steps, zeroed = loops["epoch_loop.batch_progress"][scope], optimizer["step"][scope], optimizer["zero_grad"][scope]
        if batches["ready"] > batches["completed"]:
            batches.update(dict.fromkeys(("ready", "started", "processed"), batches["completed"]))
            steps["ready"] = steps["completed"]
            zeroed.update({name: count - cleared for name, count in zeroed.items()})


def take_up(checkpoint: dict[str, Any]) -> Resumption | None:
    """Prepare a checkpoint's loop counters for Lightning, and take out this package's entries before the user's hooks see it. Returns None
    where Lightning alone restores everything.
    """
    extra = checkpoint.pop(KEY, None)
    if extra is None or "fit_loop" not in checkpoint.get("loops", {}):
        return None
    boundary = extra.get("boundary", {})
    resumption = Resumption(
        due=boundary.get("due", False), last=boundary.get("last", False), loaders=list(extra.get("loaders", ())), extra=extra
    )
    if "position" in extra:
        resumption.counters = dict(checkpoint["loops"]["fit_loop"])
    if not resumption.last:  # otherwise the next epoch begins as usual, from the random state at that time
        put_loader_states_back(checkpoint, resumption.loaders)
    if resumption.due or resumption.last:
        # The batch counts as done, and everything after it as not done yet.
        for progress in ("total", "current"):
            counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"][progress]
            counts["completed"] = counts["processed"]
    return resumption


def go_on(trainer: Trainer, resumption: Resumption) -> Callable[[], None]:
    """To be called just before the first batch: correct what Lightning couldn't know; returns a function that undoes it."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    validation = epoch_loop.val_loop
    carried = _Carried(trainer, resumption.extra.get("results", {}))
    parts = _parts_per_batch(trainer) / resumption.extra.get("parts_per_batch", _parts_per_batch(trainer))
    alike = bool(getattr(getattr(trainer.strategy, "run_plan", None), "shared", ()))  # every rank has all states
    rank = 0 if alike else trainer.global_rank
    _restore_metric_states(trainer.lightning_module, resumption.extra.get("metrics", {}), rank=rank, parts=parts)
    trainer.lightning_module._metric_attributes = None  # by id(), which may be carried from another process; made anew when asked for
    trainer._logger_connector._callback_metrics.update(resumption.extra.get("callback_metrics", {}))
    fit_loop._restarting = False  # only read from here on to leave out plateau schedulers at the epoch's end, whose metrics are here
    if resumption.counters is not None:
        set_loop_position(trainer, resumption.extra["position"], resumption.counters)
    if not (resumption.due or resumption.last):
        return carried.undo
    for loader, state in zip(_train_loaders(trainer), resumption.loaders, strict=False):  # loaders may have been added since
        rng.restore(rng.from_plain(state["rng"]), loader.generators)
    if resumption.due:
        validation._restarting = False
        validation._restart_stage = RestartStage.RESTARTED_MID_EVALUATION  # makes the epoch loop validate before it trains
    else:
        _leave_at_once(epoch_loop)
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        epoch_loop._batches_that_stepped += 0 if epoch_loop._should_accumulate() else 1
    return carried.undo


def show_epoch(trainer: Trainer) -> None:
    """Let progress bars begin within an epoch, of which Lightning tells them nothing: with the total that they had at the epoch's start."""
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    done = loop.batch_progress.current.completed
    if not fit_loop.restarted_mid_epoch:
        return
    automatic = trainer.lightning_module.automatic_optimization
    steps = loop.automatic_optimization.optim_progress.optimizer.step if automatic else loop.manual_optimization.optim_step_progress
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if isinstance(callback, ProgressBar):
            with patched(loop, "max_steps", loop.max_steps + steps.current.completed):  # a total may be what is left of these
                callback.on_train_epoch_start(trainer, trainer.lightning_module)
        if isinstance(callback, callbacks.TQDMProgressBar):
            callback.train_progress_bar.initial = callback.train_progress_bar.n = done  # else the first batch counts for all in its rate


def _leave_at_once(epoch_loop: Any) -> None:
    """Make the epoch loop's next run keep its counters and run no batch; the run after that is a new epoch."""

    def reset() -> None:
        del epoch_loop.reset
        epoch_loop.reset()
        epoch_loop._restarting = False
        epoch_loop.reset_restart_stage()

    epoch_loop.reset = reset


class ResumedStrategy(Strategy):
    """A strategy that resumes from a snapshot, or from a checkpoint of Lightning's, and saves either."""

    run_plan: RunPlan
    running: RunningStep
    splits: bool
    _exit: ExitStack
    _trainer: Any
    _resumption: Resumption | None = None
    _resumed = 0
    _saved_gradients: Mapping[str, Tensor] | None = None
    #: Of the hyperparameters' modules, where ranks have parts of the weights.
    saved_modules: SavedModules | None = None
    #: Whether the state is saved between two batches rather than in a hook.
    at_boundary = False
    #: Called when Lightning is about to enter its loops.
    before_loops: Callable[[], None] | None = None

    def resume_loader(self, trainer: Trainer, loader: ExactLoader) -> None:
        """Give a training loader its saved state; Lightning does that too, except where the saved epoch was over."""
        states = trainer.fit_loop._combined_loader_states_to_load
        if self._resumed < len(states) and is_loader_state(states[self._resumed]):
            loader.load_state_dict(states[self._resumed])
        self._resumed += 1

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Restore after setup: a snapshot is loaded into module and optimizers as this plan lays them out."""
        return self.run_plan.from_snapshot or super().restore_checkpoint_after_setup

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizers: not from a snapshot, which does so itself."""
        return not self.run_plan.from_snapshot and super().lightning_restore_optimizer

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a snapshot, or a checkpoint of Lightning's."""
        snapshot: Any = import_module("lightning_autopar.state.snapshot") if self.run_plan.from_snapshot else None  # slow to import
        weights_only = self.run_plan.weights_only if weights_only is None else weights_only
        checkpoint = snapshot.load_snapshot(self, checkpoint_path) if snapshot else super().load_checkpoint(checkpoint_path, weights_only)
        self._saved_gradients = checkpoint.pop(snapshot.GRADIENTS, None) if snapshot else None
        self._resumption = take_up(checkpoint)
        return checkpoint

    def complete_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to Lightning's dictionary, which was just dumped, what it takes to go on exactly; every rank calls it."""
        if self.saved_modules is not None:
            self.saved_modules.in_file(checkpoint)
        set_loader_states_aside(checkpoint)
        if KEY not in checkpoint:
            return  # no training is going on
        extra, trainer = checkpoint[KEY], self._trainer
        loop = trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress
        if self.at_boundary:
            extra["position"] = loop_position(trainer)
            _rewind(checkpoint["loops"]["fit_loop"], cleared=self.running.place == BACKWARD)
        elif batches.total.completed == batches.total.processed - 1 and batches.total.ready == batches.total.processed:
            fetcher = trainer.fit_loop._data_fetcher
            assert fetcher is not None
            extra["boundary"] = {"due": bool(loop._should_check_val_fx(fetcher)), "last": bool(loop._num_ready_batches_reached())}
        metrics = {name: value.detach() for name, value in trainer.callback_metrics.items()}
        # In a snapshot each tensor stays on its device; a checkpoint file may be read where there is no GPU.
        extra["callback_metrics"] = metrics if self.at_boundary else {name: value.cpu() for name, value in metrics.items()}
        epochs: Any = trainer.fit_loop.epoch_progress.total
        if epochs.processed < epochs.started:  # otherwise the logged values have been read, and are about to be reset
            extra["results"] = _plain_results(loop._results)
            # In a pipeline, only one stage may call a metric.
            extra["metrics"] = dict(_metric_states(trainer.lightning_module, self.splits or getattr(self, "holders", 1) > 1))
            extra["parts_per_batch"] = _parts_per_batch(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write one ordinary ``.ckpt``; what it takes to go on exactly is stored where plain Lightning doesn't look. The user's hooks got
        the dictionary itself, so it stays as it is; the additions go into a copy that is written.
        """
        checkpoint = dict(checkpoint)
        self.complete_checkpoint(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, except from a snapshot, whose weights are loaded already."""
        if not self.run_plan.from_snapshot:
            super().load_model_state_dict(checkpoint, strict)

    def on_train_start(self) -> None:
        """Called before the loops begin; a resumed run goes on where its checkpoint was saved."""
        if self.before_loops is not None:
            self.before_loops()
        if self._resumption is not None:
            self._exit.callback(go_on(self._trainer, self._resumption))
        show_epoch(self._trainer)
        if self._saved_gradients:
            for name, parameter in self._trainer.lightning_module.named_parameters():
                parameter.grad = self._saved_gradients.get(name)
        self._saved_gradients = None
        super().on_train_start()

    def on_validation_end(self) -> None:
        """Called after a validation. A resumed run's first one may have been due when the checkpoint was saved: the loaders go on after its
        random draws.
        """
        resumption = self._resumption
        if resumption is not None and self._trainer.state.fn == TrainerFn.FITTING:
            if resumption.due and not resumption.last:
                now = rng.to_plain(rng.capture({}))
                for loader, state in zip(_train_loaders(self._trainer), resumption.loaders, strict=False):
                    loader.load_state_dict({**state, "rng": {**state["rng"], **now}})
            self._resumption = None
        super().on_validation_end()


def _train_loaders(trainer: Trainer) -> list[ExactLoader]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else [loader for loader in combined.flattened if isinstance(loader, ExactLoader)]


# -- what was logged in the epoch so far -----------------------------------------------------------------------------------------------


def _plain_results(results: Any) -> dict[str, dict[str, Any]]:
    """The values logged in this epoch, by key: how, and their sum with its weight so far. The same on every rank."""
    saved = {}
    for key, result in results.items():
        if result.has_reset and not result.update_called:
            continue
        meta = result.meta
        options = {name: getattr(meta, name) for name in _OPTIONS}
        saved[key] = {**options, "reduce_fx": meta.reduce_fx.__name__, "updates": int(result._update_count)}
        if result.is_tensor:
            weight = getattr(result, "cumulated_batch_size", None)
            saved[key] |= {"value": result.value.detach().cpu(), "weight": None if weight is None else weight.detach().cpu()}
    return saved


class _Carried:
    """Lets each name that is logged in the rest of an epoch continue from its saved sum. Lightning compares a name's arguments, functions
    included, with those of its first call. So a saved entry only holds the place until the user's own call of ``log`` makes the entry anew;
    that one then begins with the saved sum.
    """

    def __init__(self, trainer: Trainer, saved: dict[str, dict[str, Any]]) -> None:
        self._trainer = trainer
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._epoch = trainer.current_epoch
        self._saved = saved
        self._places: set[str] = set()
        self._before = {name: vars(self._results).get(name) for name in ("log", "update_metrics")}
        self._log, self._update = self._results.log, self._results.update_metrics
        module = trainer.lightning_module
        for key, each in saved.items():
            metric = None if "value" in each else module.get_submodule(each["metric_attribute"])
            result = make_result({name: each[name] for name in (*_OPTIONS, "reduce_fx")}, metric, trainer.strategy.root_device)
            if metric is None:
                self._fill(result, each)
            result._update_count = each["updates"]
            self._results[key] = result
            self._places.add(key)
        vars(self._results).update(log=self.log, update_metrics=self.update_metrics, begin=self.begin)

    def log(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """``_ResultCollection.log``, after removing the entry that holds this name's place."""
        key = f"{fx}.{name}"
        if key in self._places:
            self._places.discard(key)
            del self._results[key]
        self._log(fx, name, value, **arguments)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """``_ResultCollection.update_metrics``, on an entry that begins with its saved sum."""
        self.begin(key)
        self._update(key, value, batch_size)

    def begin(self, key: str) -> None:
        """Give an entry its saved sum, if it has seen no value yet in the resumed epoch."""
        result = self._results[key]
        if key in self._saved and self._trainer.current_epoch == self._epoch and result.is_tensor and not result.update_called:
            self._fill(result, self._saved[key])

    def undo(self) -> None:
        """Leave the collection as it was found."""
        vars(self._results).pop("begin", None)
        for name, before in self._before.items():
            vars(self._results).pop(name, None)
            if before is not None:
                vars(self._results)[name] = before

    @staticmethod
    def _fill(result: Any, saved: dict[str, Any]) -> None:
        if result.meta.is_mean_reduction and saved.get("weight") is not None:
            result.cumulated_batch_size = saved["weight"].to(result.value.device)
        result.value = saved["value"].to(result.value.device)


# -- torchmetrics objects --------------------------------------------------------------------------------------------------------------


def _metric_states(module: nn.Module, splits: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The states of metrics that were updated since their last reset, combined over all ranks; a collective where batches are split."""
    metrics = [(name, each) for name, each in module.named_modules() if isinstance(each, Metric) and not each._is_synced]
    counts: list[Any] = [[metric._update_count for _, metric in metrics]]
    if splits:
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, [metric._update_count for _, metric in metrics])
    for (name, metric), seen in zip(metrics, zip(*counts, strict=True), strict=True):
        if not any(seen):
            continue
        before = {state: getattr(metric, state) for state in metric._defaults}
        if splits:
            sync_states(metric, None)
        yield name, {"updates": sum(seen), "states": {state: _on_host(getattr(metric, state)) for state in metric._defaults}}
        for state, value in before.items():
            setattr(metric, state, value)


def _parts_per_batch(trainer: Trainer) -> int:
    """The number of parts of a batch, over ranks and one after the other: so many steps run for it."""
    run_plan = getattr(trainer.strategy, "run_plan", None)
    return 1 if run_plan is None or run_plan.batch == "per_device" else run_plan.data_ranks * run_plan.plan.micro_batches


def _restore_metric_states(module: nn.Module, saved: dict[str, Any], *, rank: int, parts: float) -> None:
    """Give rank 0 all saved states; the other ranks begin with none. A mean that gets one value a step (a loss, say) counted each part of a
    batch once. If a batch now has ``parts`` times as many parts, the saved values must count as many times more, or the batches after the
    resumption would count too much.
    """
    metrics = {name: each for name, each in module.named_modules() if isinstance(each, Metric)}
    for name, state in saved.items():
        metric = metrics.get(name)
        if metric is None or not set(state["states"]) <= set(metric._defaults) or rank != 0:
            continue
        for key, value in state["states"].items():
            moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, key, moved)
        metric._update_count, metric._computed = state["updates"], None
        if isinstance(metric, MeanMetric) and parts != 1 and bool(torch.all(metric.weight == state["updates"])):
            metric.mean_value, metric.weight = metric.mean_value * parts, metric.weight * parts
            metric._update_count = round(state["updates"] * parts)


def _on_host(state: Any) -> Any:
    return [_on_host(item) for item in state] if isinstance(state, list) else state.detach().cpu() if isinstance(state, Tensor) else state
