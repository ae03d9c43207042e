from __future__ import annotations

import random
import threading
import time

import pytest

from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.strategies.brake import Brake


@pytest.mark.parametrize("reason", [KeyboardInterrupt, SIGTERMException])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_any_pace_leave_at_the_same_boundary(seed: int, reason: type[BaseException]) -> None:
    brake = Brake(4)
    left_at: dict[int, tuple[int, type[BaseException]]] = {}
    running = threading.Barrier(5)

    def run(rank: int) -> None:
        dice = random.Random(100 * seed + rank)
        for count in range(1, 10_000):
            try:
                brake.boundary(rank)
            except BaseException as error:
                left_at[rank] = count, type(error)
                return
            if count == 5:
                running.wait()
            time.sleep(dice.random() * 0.003)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    running.wait()
    assert not brake.pulled
    brake.pull(reason)
    for thread in threads:
        thread.join(timeout=20)
    assert len(left_at) == 4
    assert len(set(left_at.values())) == 1
    assert left_at[0][0] > 5
    assert left_at[0][1] is reason
    assert brake.pulled
    assert 0 < brake.longest_seconds < 5


def test_watching_makes_each_batch_a_boundary() -> None:
    class Engine:
        def batch_to_device(self, batch: int, device: str | None = None, dataloader_idx: int = 0) -> tuple[int, int]:
            return batch, dataloader_idx

    brake, engine = Brake(1), Engine()
    brake.watch(engine, 0)
    assert engine.batch_to_device(3, dataloader_idx=2) == (3, 2)
    brake.pull(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.batch_to_device(4)
