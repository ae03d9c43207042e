"""SplitMixin: for engines that take the mean of their ranks' gradients. Their ranks have parts of the batch; or, where the loss compares
samples, they share the network and each has the whole batch.

Where each has the whole batch, what it logs is one device's, and nothing is reduced over ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.nn import Parameter

from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar._root import is_users, names_all_gather
from lightning_autopar._temporary import patched
from lightning_autopar.exact.logs.combined_values import already_global
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.exact.step.gradient_hooks import GradientHooks
from lightning_autopar.exact.step.shared_network import SharedNetwork
from lightning_autopar.exact.step.users_backward import average, noticed, of_whole_batch
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
    _stepping_as = ""  # the name of the step that runs, where it may gather

    def prepare_steps(self, trainer: Trainer) -> None:
        """See :class:`.EngineMixin`."""
        if not self.run_plan.shared:
            super().prepare_steps(trainer)
            if self.splits and names_all_gather(trainer.lightning_module):
                for name in ("training_step", "validation_step"):
                    vars(self).setdefault(name, partial(self._gathering_alike, getattr(self, name)))
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

    def setup_optimizers(self, trainer: Trainer) -> None:
        """See :class:`.EngineMixin`."""
        super().setup_optimizers(trainer)
        if self.splits and not self.run_plan.shared and not trainer.lightning_module.automatic_optimization:
            for optimizer in map(bare_optimizer, self.optimizers):
                self._exit.callback(optimizer.register_step_pre_hook(of_whole_batch(self._weight)).remove)

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

    def _gathering_alike(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Where a step may gather, its end is told, too: under a condition on a rank's samples, not all ranks come to a call."""
        with patched(self, "_stepping_as", step.__name__):
            output = step(*args, **kwargs)
            self._at("")
        return output

    def _at(self, line: str) -> None:
        lines = [""] * self.run_plan.plan.world_size
        dist.all_gather_object(lines, line, group=cast(Any, self._logging).host_group)
        if len({*lines}) > 1:
            calls = " and ".join(sorted({f"at {each}" for each in lines if each}))
            raise ValueError(
                f"{self._stepping_as} calls self.all_gather {calls} on some ranks and not on others, which wait for each other there: each "
                "rank has other samples of the batch. Call it whatever the samples are, or run on one device (allow=['single'])"
            )

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Where the step has the whole batch, there is nothing to gather, as on one device."""
        if self._network is not None:
            return tensor
        if self._stepping_as:
            frame: Any = sys._getframe(1)
            while frame is not None and not (is_users(frame) and "all_gather" in frame.f_code.co_names):
                frame = frame.f_back
            self._at("an unknown line" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return super().all_gather(tensor, *args, **kwargs)  # type: ignore[safe-super]


def _whole(own: Callable[..., None]) -> Callable[..., None]:
    def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
        # Such as a norm of shards, which hooks on all ranks log. DTensor itself isn't imported here: DDP does without.
        own(fx, name, value.full_tensor() if hasattr(value, "full_tensor") else value, **already_global(arguments))

    return log


def _alone() -> bool:
    return False
