"""What a training step changes is put back where it fails half-way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, SumMetric

from lightning_autopar.exact.step.step_rollback import StepState


class Module(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(size))
        self.total, self.seen = SumMetric(), CatMetric()
        self.generator = torch.Generator().manual_seed(5)
        self.losses: list[float] = []


def noted(module: Module) -> StepState:
    connector = SimpleNamespace(_first_loop_iter=False, _current_fx="on_train_batch_start")
    results: dict[str, Any] = {}
    trainer: Any = SimpleNamespace(lightning_module=module, _logger_connector=connector, _results=results)
    state = StepState(trainer, {("losses", "+"): "same"})
    state.note(None, None)
    return state


def test_everything_is_put_back() -> None:
    module = Module()
    module.total.update(1.0)
    module.seen.update(torch.ones(2))
    buffer, states = module.running, (module.total.sum_value, module.seen.value)
    state = noted(module)
    drawn = torch.rand(2), torch.rand(2, generator=module.generator)
    module.running += 1  # type: ignore[operator]
    module.total.update(5.0)
    module.seen.update(torch.zeros(3))
    module.losses.append(0.5)
    assert state.why_not() is None
    state.put_back(None, None)
    assert module.running is buffer
    assert module.running.tolist() == [0.0] * 3
    assert (float(module.total.compute()), module.seen.compute().tolist()) == (1.0, [1.0, 1.0])
    assert module.total.sum_value is states[0]
    assert module.losses == []
    assert torch.equal(torch.rand(2), drawn[0])
    assert torch.equal(torch.rand(2, generator=module.generator), drawn[1])


def test_a_buffer_without_a_value_may_get_one() -> None:
    module = Module()
    module.register_buffer("later", None)
    state = noted(module)
    module.later = torch.ones(2)
    assert state.why_not() is None
    state.put_back(None, None)
    assert module.later is None


def test_large_buffers_are_copied_only_after_a_step_has_written_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.exact.step.step_rollback.COPIED_BYTES", 8)
    module = Module()
    state = noted(module)
    module.running += 1  # type: ignore[operator]
    assert state.why_not() == "the step has written to the buffer 'running', for the first time"
    state.note(None, None)
    module.running += 1  # type: ignore[operator]
    assert state.why_not() is None
    state.put_back(None, None)
    assert module.running.tolist() == [1.0] * 3


def test_a_step_that_writes_to_parameters() -> None:
    module = Module()
    state = noted(module)
    with torch.no_grad():
        module.net.weight += 1
    assert state.why_not() == "the step has written to parameters in its forward"


def test_gradients_that_a_failed_backward_pass_has_completed() -> None:
    module = Module()
    state = noted(module)
    weight, bias = module.net.weight, module.net.bias
    state.note_gradients()
    bias.grad = torch.ones(2)
    assert state.unfinished() == ([weight], False)
    state.note_gradients()
    assert state.unfinished() == ([weight, bias], False)
    bias.grad += 1
    assert state.unfinished() == ([weight], False)


def test_a_tensor_whose_entries_share_memory_is_put_back() -> None:
    module = Module()
    module.scale = torch.zeros(1, 2).expand(3, 2)
    trainer: Any = SimpleNamespace(
        lightning_module=module, _results={}, _logger_connector=SimpleNamespace(_first_loop_iter=False, _current_fx="on_train_batch_start")
    )
    state = StepState(trainer, {("scale",): "same"})
    state.note(None, None)
    kept = module.scale
    kept[0].add_(1)  # type: ignore[index]
    state.put_back(None, None)
    assert module.scale is kept
    assert kept.tolist() == [[0.0, 0.0]] * 3  # type: ignore[operator]
