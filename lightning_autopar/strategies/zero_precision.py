"""Lightning's own precision plugins, with backward and the optimizer's step run by DeepSpeed's engine.

Lightning's ``DeepSpeedPrecision`` converts the module, and each batch, to 16 bits under mixed precision, and skips the hooks' order of a
plain run. These compute what a plain run computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_autopar.memory.conduct import GradientLooks
from lightning_autopar.strategies.zero_gradients import Clipping


class _ByDeepSpeed(Precision):
    """What DeepSpeed's engine does by itself."""

    clipping: Clipping

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Any:  # type: ignore[override]  # as Lightning's own
        """``on_after_backward``."""
        with refuse_looks(module, "on_after_backward"):
            return super().post_backward(tensor, module)

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """``on_before_optimizer_step`` and clipping."""
        with refuse_looks(model, "on_before_optimizer_step"):
            super()._after_closure(model, optimizer)

    def backward(  # type: ignore[override]  # as Lightning's own
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward, with the gradients reduced to their ranks' parts."""
        strategy: Any = model.trainer.strategy
        strategy.backward_parts(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The closure with the hooks that come after it, then the step."""
        result = self._wrap_closure(model, optimizer, closure)
        strategy: Any = model.trainer.strategy
        strategy.step_parts()
        return result

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Clip in the step, which is about to begin: gradients are in parts until then."""
        if clip_val > 0:
            self.clipping.ask(float(clip_val), by_value=gradient_clip_algorithm == GradClipAlgorithmType.VALUE)


@contextmanager
def refuse_looks(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Around a hook that looked at no gradients on the traced step, which may do so now.

    Raises:
        ValueError: if it does, as there are none in the parameters.
    """

    def refuse(parameter: Parameter) -> None:
        name = next((name for name, each in module.named_parameters() if each is parameter), "a parameter")
        raise ValueError(
            f"{hook} looks at the gradient of {name!r} in step {module.global_step}, though it looked at none in the step that was tried "
            "before the run; DeepSpeed leaves no gradients in the parameters to look at. Run with allow=['single', 'ddp', 'fsdp']"
        )

    with GradientLooks(refuse):
        yield


class _Full(_ByDeepSpeed):
    pass


class _Mixed(_ByDeepSpeed, MixedPrecision):
    pass


class _Half(_ByDeepSpeed, HalfPrecision):
    pass


def plugin(precision: str, device_type: str) -> Precision:
    """The plugin for the Trainer's precision.

    Raises:
        ValueError: if DeepSpeed can't compute what a plain run at this precision does.
    """
    if precision == "32-true":
        return _Full()
    if precision == "bf16-mixed":
        return _Mixed("bf16-mixed", device_type)
    if precision == "bf16-true":
        return _Half("bf16-true")
    raise ValueError(f"a ZeRO plan runs at precision 32-true, bf16-mixed or bf16-true, but the Trainer's is {precision!r}; choose one")
