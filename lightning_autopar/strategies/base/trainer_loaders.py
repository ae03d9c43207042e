"""A trainer's loaders under a plan: made exact where the plan asks for it; and predictions of all ranks, put into the user's order.

Knows how the ranks share the order and which rank predicts which batches; not what they do with a batch, nor how predictions reach this
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.data.collate import Loading, collation_for, loader_key
from lightning_autopar.exact.data.loader import ExactLoader, orders_alike
from lightning_autopar.exact.data.pass_record import fit_progress
from lightning_autopar.exact.data.rank_share import Dealing
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.run_plan import RunPlan


def exact_loader(
    dataloader: object,
    trainer: Trainer,
    run_plan: RunPlan,
    *,
    rank: int,
    broadcast: Callable[[Any], Any],
    alike: Callable[[int], bool] | None = None,
) -> ExactLoader | None:
    """A loader of this rank's samples of each batch, in the user's order, resumable at any batch; None where the loader stays as it is.

    Args:
        broadcast: gives every rank the object that rank 0 called it with.
        alike: whether all ranks called it with the same number; a collective.
    """
    # Several ranks go through one order of the samples, whether each has its part or all have the same.
    plan, data_ranks = run_plan.plan, run_plan.data_ranks
    shares_order = plan.world_size > 1 and run_plan.batch == "global"
    if run_plan.batch == "per_device" or isinstance(dataloader, ExactLoader):
        return None
    if not isinstance(dataloader, DataLoader) and not shares_order and not (run_plan.elastic and trainer.training):
        return None
    collation, draws = collation_for(dataloader, run_plan.loadings)
    draws = (*run_plan.data_draws, *draws)
    splits = data_ranks > 1 and not trainer.predicting
    return ExactLoader(
        dataloader,
        rank=plan.data_rank(rank) if data_ranks > 1 else 0,
        world_size=data_ranks,
        dealing=Dealing(plan.dealing) if data_ranks > 1 else None,
        whole_batches=trainer.predicting,
        of_trainer=True,
        sync=broadcast if shares_order and (trainer.training or not orders_alike(dataloader)) else None,
        progress=fit_progress(trainer) if trainer.training else None,
        # With several loaders it isn't known whether their samples draw random numbers; a single rank loads all samples anyway.
        load_all="samples" in draws or (run_plan.elastic and data_ranks == 1),
        collate_all=splits and ("collate" in draws or collation in ("whole", None)),
        by_samples=collation is None and "collate" not in draws,
        parts=plan.micro_batches if trainer.training and run_plan.loadings.get(loader_key(dataloader), Loading()).parts else 1,
        alike=alike if splits and collation == "rows" and "collate" not in draws else None,
    )


class Dropped:
    """Replaces the prediction of a batch that a rank ran only so that all ranks run as many."""


def put_together(values: list[Any], plan: Plan) -> Any:
    """What ``predict`` returns, made of each rank's results; the ranks of one replica, which are neighbours, have the same batches.

    Args:
        values: in rank order.
    """
    return interleaved(values[:: plan.world_size // plan.data_ranks])


def interleaved(values: list[Any]) -> Any:
    """All ranks' predictions in the user's order: rank r has batches r, r + W, r + 2W, … of each data loader."""
    first = values[0]
    if first is None:
        return None
    if first and isinstance(first[0], list) and all(isinstance(part, list) for value in values for part in value):
        return [interleaved(list(parts)) for parts in zip(*values, strict=True)]
    merged: list[Any] = []
    for index in range(max(len(value) for value in values)):
        merged.extend(value[index] for value in values if index < len(value))
    return [prediction for prediction in merged if not isinstance(prediction, Dropped)]
