"""Planning in a process whose children can't run a backward pass, as on every machine with GPUs once it has trained."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import BLOCKS, Fitted, numbers
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.strategies import backward, decide
from lightning_autopar.strategies.backward import backward_survives_fork


def test_without_threads_for_gpus_a_child_may_go_backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    assert backward_survives_fork()


def test_a_child_that_fails_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert backward_survives_fork()
    monkeypatch.setattr(backward, "_try", refuse)
    assert not backward_survives_fork()


def test_the_step_is_traced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def footprint_of(module: Any) -> Any:
        strategy = AutoParallelStrategy(devices="2xcpu:1GiB", allow=["single"])
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader(numbers(), batch_size=8)
        trainer.fit(module, loader, loader)
        assert strategy.report is not None
        return strategy.report.footprint

    torch.manual_seed(0)
    module = Fitted()
    expected = footprint_of(module)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    again = Fitted()
    monkeypatch.setattr(decide, "backward_survives_fork", lambda: False)
    found = footprint_of(again)
    assert found.traced
    assert found.moments == expected.moments
    assert found.blocks == expected.blocks
    assert [block.fqn for block in found.blocks] == list(BLOCKS)
    torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
