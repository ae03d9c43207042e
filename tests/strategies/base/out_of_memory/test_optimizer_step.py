"""An optimizer's first step on one device that runs out of memory is undone and done again, and the run is plain Lightning's."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autopar.devices.inventory import Device
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.out_of_memory.optimizer_step import is_guarded
from lightning_autopar.strategies.ddp import strategy
from tests.strategies.fitted import Fitted, fit, numbers, plan


class Full(torch.optim.AdamW):
    """Runs out of memory when it has updated everything already, in as many of its first calls as asked for."""

    module: Any
    times = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        ours = isinstance(self.module.trainer.strategy, EngineMixin)
        if ours and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("a fake: temporary tensors")
        return loss


class LongAgo(Full):
    """The same in its third step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls < 3:
            return torch.optim.AdamW.step(self, closure)
        return super().step(closure)


class Trained(Fitted):
    """Trains with one of these.

    Args:
        optimizer: its class.
        times: how often memory runs out.
        manual: whether the module steps by hand.
    """

    def __init__(self, optimizer: type[Full], times: int, manual: bool = False) -> None:
        super().__init__()
        self.make, self.times, self.tried = optimizer, times, 0
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tried += 1
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.05, weight_decay=0.1)
        optimizer.module, optimizer.times = self, self.times
        return optimizer


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU device counts as a GPU."""
    monkeypatch.setattr(strategy, "is_guarded", lambda run_plan, optimizer: True)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("manual", [False, True])
def test_a_first_step_is_done_again(manual: bool, caplog: pytest.LogCaptureFixture) -> None:
    make = partial(Trained, Full, 1, manual)
    with caplog.at_level(logging.WARNING):
        (ours, our_losses, trainer), (theirs, their_losses, plain) = (
            fit(make, numbers(), under, accumulate_grad_batches=1 if manual else 2) for under in (plan("single", ranks=1), None)
        )
    torch.testing.assert_close((dict(ours.state_dict()), our_losses), (dict(theirs.state_dict()), their_losses), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(trainer.optimizers[0].state_dict()["state"], plain.optimizers[0].state_dict()["state"])
    assert (ours.tried, trainer.global_step) == (theirs.tried, plain.global_step), "the batch isn't run again"
    assert sum("The step is done again" in each.message for each in caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "reserved", "gigabytes", "expected"),
    [("cuda", 6, 9, True), ("cuda", None, 9, True), ("cuda", 4, 9, False), ("cuda", 4, 0, True), ("cpu", 9, 0, False)],
)
def test_much_is_copied_only_where_memory_is_short(kind: Any, reserved: int | None, gigabytes: int, expected: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(gigabytes << 28, device="meta"))])
    device = Device(id="0", kind=kind, name="one", total_bytes=10, free_bytes=10)
    run = SimpleNamespace(devices=(device,), reserved_bytes={} if reserved is None else {"0": reserved})
    assert is_guarded(run, optimizer) is expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(("optimizer", "times"), [(Full, 2), (LongAgo, 1)], ids=["twice", "later"])
def test_elsewhere_the_exception_is_raised(optimizer: type[Full], times: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="temporary tensors") as raised:
        fit(partial(Trained, optimizer, times), numbers(), plan("single", ranks=1))
    assert "With callbacks=[CheckpointMigrate()] it would go back to its latest snapshot" in "".join(raised.value.__notes__)


@pytest.mark.usefixtures("guarded")
def test_a_shortage_of_the_batch_isnt_the_optimizers() -> None:
    class InForward(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("a fake: in forward")

    with pytest.raises(torch.OutOfMemoryError, match="in forward") as raised:
        fit(partial(InForward, Full, 0), numbers(), plan("single", ranks=1))
    assert "optimizer's step" not in "".join(getattr(raised.value, "__notes__", []))


class WritesToData(Full):
    """Updates parameters past autograd, which counts no such write."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)
        if isinstance(self.module.trainer.strategy, EngineMixin) and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("a fake: temporary tensors")
        return loss


@pytest.mark.usefixtures("guarded")
def test_writes_that_leave_no_trace_are_undone() -> None:
    (ours, our_losses, _), (theirs, their_losses, _) = (
        fit(partial(Trained, WritesToData, 1), numbers(), under) for under in (plan("single", ranks=1), None)
    )
    torch.testing.assert_close((dict(ours.state_dict()), our_losses), (dict(theirs.state_dict()), their_losses), rtol=1e-6, atol=1e-6)
