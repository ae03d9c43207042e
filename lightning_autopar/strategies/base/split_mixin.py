"""SplitMixin: for engines that take the mean of their ranks' gradients. Their ranks have parts of the batch; or, where the loss compares
samples, they share the network and each has the whole batch.

Where each has the whole batch, what it logs is one device's, and nothing is reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_autopar._lightning import Trainer
from lightning_autopar._temporary import patched
from lightning_autopar.exact.logs.combined_values import already_global
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.exact.step.shared_network import SharedNetwork
from lightning_autopar.strategies.base.engine_mixin import EngineMixin


class SplitMixin(EngineMixin):
    """Weighs the ranks' losses, or shares the network."""

    averages = True
    _network: SharedNetwork | None = None

    def prepare_steps(self, trainer: Trainer) -> None:
        """See :class:`.EngineMixin`."""
        if not self.run_plan.shared:
            super().prepare_steps(trainer)
            return
        self.reruns_batches = False  # ranks exchange rows within a step, so that none can run its batch again alone
        module = trainer.lightning_module
        self._network = SharedNetwork(module, self.run_plan.shared)
        self._exit.enter_context(self._network.installed())
        self._step = self._network.step  # type: ignore[method-assign]  # in place of the context of a part's steps
        for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
            self._exit.enter_context(patched(loop._results, "log", _whole(loop._results.log)))
        for metric in metrics_of(module):
            self._exit.enter_context(patched(metric, "distributed_available_fn", _alone))

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Where the step has the whole batch, there is nothing to gather, as on one device."""
        return tensor if self._network is not None else super().all_gather(tensor, *args, **kwargs)  # type: ignore[safe-super]


def _whole(own: Callable[..., None]) -> Callable[..., None]:
    def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
        # Such as a norm of shards, which hooks on all ranks log. DTensor itself isn't imported here: DDP does without.
        own(fx, name, value.full_tensor() if hasattr(value, "full_tensor") else value, **already_global(arguments))

    return log


def _alone() -> bool:
    return False
