"""SplitMixin: for engines that take the mean of their ranks' gradients. Their ranks have parts of the batch; or, where the loss compares
samples, they share the network and each has the whole batch.

Where each has the whole batch, what it logs is one device's, and nothing is reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch.nn import Parameter

from lightning_autopar._lightning import Trainer
from lightning_autopar._temporary import patched
from lightning_autopar.exact.logs.combined_values import already_global
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.exact.step.gradient_hooks import GradientHooks
from lightning_autopar.exact.step.shared_network import SharedNetwork
from lightning_autopar.exact.step.users_backward import average, noticed
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks

#: The hooks of a fit in which a user may run a backward pass of another network. Without any, none has to be noticed.
_HOOKS = (
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start", "on_before_zero_grad"),
    *("optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step"),
    *("configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_start", "on_validation_start", "on_validation_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_fit_start", "on_save_checkpoint"),
)
#: Why a hook's own training needs all ranks.
_ALONE = "its gradient is the mean over all ranks' parts of the batch: remove the condition on the rank around it"


class SplitMixin(EngineMixin):
    """Weighs the ranks' losses, or shares the network."""

    averages = True
    _network: SharedNetwork | None = None

    def prepare_steps(self, trainer: Trainer) -> None:
        """See :class:`.EngineMixin`."""
        if not self.run_plan.shared:
            super().prepare_steps(trainer)
            if self.splits and any(overridden(trainer, _HOOKS)):
                self._exit.enter_context(noticed(self._weight, self._steps, self._exchange_in_hooks, GradientHooks(())))
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

    def _weight(self) -> float:
        return 1.0 if self._share is None else self._share.weight

    def _steps(self) -> bool:
        """Whether a step or its backward pass runs, rather than a hook."""
        return self._share is None or self._drawing is not False

    def _exchange_in_hooks(self, reached: list[Parameter]) -> None:
        """A hook has trained a network of its own on its rank's part of the batch (a linear probe beside a self-supervised module, say)."""
        own = set(map(id, cast(Any, self.lightning_module).parameters()))
        if others := [parameter for parameter in reached if id(parameter) not in own]:
            wait_for_all_ranks("a hook ran backward through a network of its own", _ALONE)
            average(others, others)

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
