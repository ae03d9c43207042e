"""Lightning's result collections written to past ``self.log``: a local value taken back, and the whole batch's logged in its place.

Knows what was logged, not how the ranks came to agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_autopar.strategies.logentries import OPTIONS, Entry, already_global

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def take_back(collections: Sequence[Any], before: Mapping[tuple[int, str], dict[str, Any] | None], *, keep: bool) -> None:
    """Undo local values.

    Args:
        collections: of results.
        before: by collection and key, results as they were before; None where the values made them.
        keep: whether results that they made stay, empty; they go where ranks disagree, to be made anew in an order that all have.
    """
    for (index, key), state in before.items():
        results = collections[index]
        metric = results[key]
        if state is not None:
            metric.__dict__.clear()
            metric.__dict__.update(state)
        elif not keep:
            del results[key]
        elif metric.is_tensor:
            metric.reset()
            metric.has_reset = False


def log_again(trainer: Trainer, results: Any, entry: Entry, value: Tensor | None, batch_size: int) -> None:
    """Log the whole batch's value in the place of a local one.

    Args:
        trainer: whose module has logged it.
        results: the collection that it belongs to.
        entry: what was logged.
        value: the whole batch's; None of a metric that has its own.
        batch_size: what it weighs in its epoch's mean.
    """
    connector = trainer._logger_connector
    if connector.should_reset_tensors(entry.fx):
        results.reset(metrics=False, fx=entry.fx)
    logged: Any
    if entry.is_metric:
        logged = trainer.lightning_module.get_submodule(entry.options[OPTIONS.index("metric_attribute")])
        if value is not None:  # on every stage's rank what the one that updates it has of the step
            logged._forward_cache = value.to(logged.device, entry.dtype)
    else:
        assert value is not None
        logged = value.to(entry.dtype)
    if entry.result in results:
        # Past log(), whose moving of a result's every tensor costs more than the exchange.
        if not entry.is_metric:
            logged = logged.to(results[entry.result].value.device)
        if "begin" in vars(results):  # a resumed epoch's result begins with what was saved of it
            results.begin(entry.result)
        type(results).update_metrics(results, entry.result, logged, batch_size)
    else:
        arguments = dict(zip(OPTIONS, entry.options, strict=True), batch_size=batch_size)
        now, results.dataloader_idx = results.dataloader_idx, entry.dataloader_idx
        try:
            type(results).log(results, entry.fx, entry.name, logged, **already_global(arguments))
        finally:
            results.dataloader_idx = now
    connector._current_fx = entry.fx
