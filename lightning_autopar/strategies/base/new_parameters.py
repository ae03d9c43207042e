"""Parameters that hooks put into the module after the run has begun: no engine reduces their gradients. Knows modules; no engine."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def refuse_new(module: nn.Module, is_known: Callable[[str, nn.Parameter], bool], engine: str) -> None:
    """Refuse parameters that the engine doesn't know.

    Args:
        module: the user's.
        is_known: of a parameter's FQN and the parameter.
        engine: who doesn't know them, for the message.

    Raises:
        ValueError: if there is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not is_known(name, parameter):
            raise ValueError(
                f"{name!r} was put into the module after the run had begun. {engine} doesn't notice that, so its ranks would drift apart. "
                "Put it there before (in __init__ or configure_model), or run with allow=['single']"
            )
