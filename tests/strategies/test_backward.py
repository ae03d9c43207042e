"""Planning in a process whose children can't run a backward pass, as on every machine with GPUs once it has trained."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import BLOCKS, Fitted, numbers
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.strategies import backward, findings
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
    monkeypatch.setattr(findings, "backward_survives_fork", lambda: False)
    found = footprint_of(again)
    assert found.traced
    assert found.moments == expected.moments
    assert found.blocks == expected.blocks
    assert [block.fqn for block in found.blocks] == list(BLOCKS)
    torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())


class Padded(Fitted):
    """Its loss depends on how far a sample is padded, as a model's without a mask does."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(torch.cat([batch, batch.new_full((*batch.shape[:1], 8 - batch.shape[1]), 2.0)], 1)).square().mean()


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:autopar")
@pytest.mark.parametrize("looked", ["here", "not at all"])
def test_padding_is_the_whole_batchs_where_no_copy_could_be_run(looked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that collated its own samples would pad them to another length."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("nothing can be looked at")

    if looked == "here":
        monkeypatch.setattr(findings, "backward_survives_fork", lambda: False)
    else:
        monkeypatch.setattr(findings, "_find", refuse)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randn(length, generator=generator) for length in (8, 3, 5, 2, 7, 1, 4, 6)]
    weights = []
    for strategy in ("auto", AutoParallelStrategy(devices="2xcpu:1GiB", allow=["ddp"])):
        torch.manual_seed(0)
        module = Padded()
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples, batch_size=4, collate_fn=padded))  # type: ignore[arg-type]
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[1], weights[0])
