"""Parameters that engines refuse: those with sparse gradients, and those that begin to be trained after the run has begun, new ones or ones
that were frozen. Knows modules and hooks on parameters; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack

from torch import Tensor, nn

from lightning_autopar.exact.step.gradient_hooks import OurHook


def sparse_gradients(module: nn.Module, why: str) -> str | None:
    """A sentence on the first trained embedding with sparse gradients; None if there is none. A frozen one has no gradients.

    Args:
        why: the engine can't take them, such as ``"which NCCL can't reduce"``.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight.requires_grad:
            return f"{name!r} has sparse gradients, {why}; build it with sparse=False"
    return None


def refuse_new(
    module: nn.Module,
    is_known: Callable[[str, nn.Parameter], bool],
    engine: str,
    frozen: Collection[int] = (),
    *,
    watch: ExitStack | None = None,
) -> None:
    """Refuse trained parameters whose gradients the engine doesn't reduce.

    Args:
        is_known: of a parameter's FQN and the parameter.
        engine: who doesn't reduce them, for the message.
        frozen: ids of parameters that the engine knows as frozen, and couldn't train.
        watch: refuse a new one only when a gradient reaches it, until this is closed: a callback may keep a copy of the network in the
            module, which nobody trains and which is the same on every rank. None: refuse it at once, as the engine may not use it at all.

    Raises:
        ValueError: if there is one.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in frozen:
            raise ValueError(
                f"{name!r} was frozen when the run began, and is trained now. {engine} doesn't notice that, so its ranks would drift "
                "apart. Freeze it after the run has begun (in on_train_start), or run with allow=['single', 'ddp', 'fsdp']"
            )
        if is_known(name, parameter):
            continue
        if watch is None:
            _refuse(name, engine)
        elif not any(isinstance(hook, OurHook) for hook in (parameter._backward_hooks or {}).values()):
            watch.callback(parameter.register_hook(OurHook(_refuse, name, engine)).remove)


def _refuse(name: str, engine: str, *_: Tensor) -> None:
    raise ValueError(
        f"{name!r} was put into the module after the run had begun. {engine} doesn't notice that, so its ranks would drift apart. "
        "Put it there before (in __init__ or configure_model), freeze it if it isn't to be trained (requires_grad_(False)), or run with "
        "allow=['single']"
    )
