"""Predictions of several ranks, in the order that one process would give them."""

from __future__ import annotations

from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.trainer_loaders import Dropped, interleaved, put_together


def test_interleaving_leaves_dropped_batches_out() -> None:
    assert interleaved([[0, 2, 4], [1, 3, Dropped()]]) == [0, 1, 2, 3, 4]
    assert interleaved([[[0, 2], ["a"]], [[1, Dropped()], [Dropped()]]]) == [[0, 1, 2], ["a"]]
    assert interleaved([None, None]) is None


def test_ranks_of_one_replica_predict_the_same() -> None:
    devices = tuple(f"cpu:{index}" for index in range(4))
    values = [[0, 2], [0, 2], [1, Dropped()], [1, Dropped()]]
    pipelines = Plan(engine="pipeline", devices=devices, cuts=("net.1",), schedule="gpipe", replicas=2)
    assert put_together(values, pipelines) == [0, 1, 2]
    assert put_together(values[::2], Plan(engine="ddp", devices=devices[:2])) == [0, 1, 2]
