"""Logging where every rank runs each step on the whole batch: its values are those of one device, and nothing is reduced over ranks.

Knows Lightning's result collections and torchmetrics; not how a step is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_autopar._temporary import patched
from lightning_autopar.exact.logs.logged_values import already_global
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@contextmanager
def alike_on_all_ranks(trainer: Trainer) -> Iterator[None]:
    """While open, neither ``self.log`` nor a metric of the module exchanges anything, whatever ``sync_dist`` says."""
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    module = trainer.lightning_module
    assert module is not None
    with ExitStack() as undo:
        for loop in loops:
            undo.enter_context(patched(loop._results, "log", _whole(loop._results.log)))
        for metric in metrics_of(module):
            undo.enter_context(patched(metric, "distributed_available_fn", _alone))
        yield


def _whole(own: Callable[..., None]) -> Callable[..., None]:
    def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
        own(fx, name, value, **already_global(arguments))

    return log


def _alone() -> bool:
    return False
