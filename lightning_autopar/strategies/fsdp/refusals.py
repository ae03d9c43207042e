"""What of a Trainer's options and callbacks can't keep the promise under FSDP2, by a sentence. Knows Lightning's options alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_autopar._lightning import BitsandbytesPrecision, Trainer
from lightning_autopar._lightning_compat import TrainerFn, graph_logger

#: Precisions with which FSDP2 runs a plain run's arithmetic: not 16-mixed, whose gradient scaler doesn't know shards.
_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")


def unsharded_run(trainer: Trainer, kinds: Mapping[str, str]) -> str | None:
    """Why this run can't use shards; None where nothing is known against it."""
    if any(isinstance(submodule, torch._dynamo.OptimizedModule) for submodule in trainer.lightning_module.modules()):
        return "a part of the module was compiled before sharding, and FSDP2 has to shard first"
    if "ModelPruning" in kinds and trainer.state.fn == TrainerFn.FITTING:
        return f"the callback {kinds['ModelPruning']} works on whole parameters, and FSDP2 shards them"
    if logger := graph_logger(trainer):
        return f"{logger}(log_graph=True) traces the whole module on rank 0, and FSDP2 shards its parameters; log_graph=False allows it"
    if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
        return "quantised bitsandbytes layers can't be sharded by FSDP2"
    if trainer.precision not in _PRECISIONS:
        return f"precision {trainer.precision!r} doesn't work on sharded parameters; FSDP2 takes {', '.join(_PRECISIONS)}"
    return None
