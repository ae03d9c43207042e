"""Half precision in the parts of a batch: gradients overflow in a rank's part where they do in the whole batch.

A rank's loss is a mean over its own samples, and counts once for each rank, as the ranks average their gradients. So its backward pass has
gradients that are as many times as large as one device's as there are ranks. Knows a GradScaler; nothing of engines or trainers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_autopar._temporary import patched


@contextmanager
def scaled_as_on_one_device(scaler: Any, ranks: int) -> Iterator[None]:
    """While open, the scale is one device's over the number of ranks, and so each gradient of a sample is one device's. What the scaler
    tells of its scale, as to a checkpoint or a logger, and what it is told, is one device's.

    Args:
        scaler: a ``torch.amp.GradScaler``.
        ranks: how many average their gradients.
    """
    if not scaler.is_enabled():
        yield
        return
    get_scale, load_state_dict = scaler.get_scale, scaler.load_state_dict

    def load(state: Mapping[str, Any]) -> None:
        load_state_dict({**state, "scale": state["scale"] / ranks})

    def multiply(factor: float) -> None:
        scaler._init_scale *= factor
        if scaler._scale is not None:
            scaler._scale *= factor

    multiply(1 / ranks)
    try:
        # Its state_dict, too, asks get_scale.
        with patched(scaler, "get_scale", lambda: get_scale() * ranks), patched(scaler, "load_state_dict", load):
            yield
    finally:
        multiply(ranks)
