"""One look at a step for many fits of it: planning for the same module under the same options finds the same.

For files whose tests are about what comes after planning. Whatever a plan's findings decide is decided as in any run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_autopar.strategies.preparation import planning_inputs
from lightning_autopar.strategies.preparation.decision import PlanningInputs

#: The inputs of planning that this process has made, by the step that they are of.
_FOUND: dict[Any, PlanningInputs] = {}


def _same_step(trainer: Any, settings: Any, bound: Any, world_size: int | None, told: dict[str, Any]) -> Any:
    """All that differs between fits of a file whose data are always the same."""
    module = trainer.lightning_module
    return (
        type(module),
        repr(dict(module.hparams)),
        tuple((name, parameter.shape, parameter.dtype, parameter.requires_grad) for name, parameter in module.named_parameters()),
        tuple(name for name, _ in module.named_modules()),
        (
            str(trainer.state.fn),
            trainer.precision,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.check_val_every_n_epoch,
        ),
        (trainer.val_check_interval, trainer.limit_train_batches, trainer.limit_val_batches, trainer.max_steps, trainer.max_epochs),
        tuple(type(callback) for callback in trainer.callbacks),
        tuple(type(logger) for logger in trainer.loggers),
        (repr(settings), repr(bound[0].devices), bound[1], world_size, repr(told)),
    )


@contextmanager
def looked_at_once(*more: Any) -> Iterator[None]:
    """While open, planning looks at a step once in this process.

    Args:
        more: what else tells this file's steps apart, as its loaders' batch size.
    """
    real = planning_inputs.look_at_step

    def look(trainer: Any, settings: Any, bound: Any, world_size: int | None, **told: Any) -> PlanningInputs:
        key = (more, _same_step(trainer, settings, bound, world_size, told))
        if key not in _FOUND:
            _FOUND[key] = real(trainer, settings, bound, world_size, **told)
        return _FOUND[key]

    with mock.patch.object(planning_inputs, "look_at_step", look):
        yield
