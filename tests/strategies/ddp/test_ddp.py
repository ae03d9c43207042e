"""DDP on two real ranks against plain Lightning on one device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_autopar import engines
from lightning_autopar._lightning_compat import TrainerFn
from tests.strategies.fitted import Fitted, assert_same, fit, numbers, plan
from tests.strategies.pipeline.test_precision import Scaled, Scales


class Skipping(Fitted):
    """Leaves a block out of every other step, as LayerDrop does."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0])
        for index in (1, 2, 3):
            if index != 2 or self.global_step % 2:
                hidden = self.net[index](hidden)
        return mse_loss(self.net[4](hidden), batch[1])


class ByHand(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.first_backward(loss)
        self.manual_backward(0.1 * self.loss(batch))
        optimizer.step()
        self.log("loss", loss)

    def first_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class ByLoss(torch.optim.SGD):
    """Takes longer steps where the loss that its closure returns is large."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.01 * float(loss)
        super().step()
        return loss


class ByHandByLoss(Fitted):
    """Gives such an optimizer a closure, past Lightning's wrapper in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=batch_idx % 2 == 0)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss.detach() if batch_idx % 3 else loss.item()

        self.log("loss", optimizer.step(closure))

    def configure_optimizers(self) -> Any:
        return ByLoss(self.parameters(), 0.01)


class Hooked(Fitted):
    """Has hooks on its own forward, which some of its steps call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
        self.register_forward_hook(lambda module, inputs, output: output * 3)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss((self if self.global_step % 2 else self.net)(batch[0]), batch[1])


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
@pytest.mark.parametrize("make", [Fitted, Skipping, Hooked])
def test_training_is_plain_lightnings(make: Any, options: dict[str, Any]) -> None:
    assert_same(make, numbers(), plan("ddp"), **options)


def test_a_closure_of_manual_optimization_returns_the_whole_batch_s_loss() -> None:
    assert_same(ByHandByLoss, numbers(26), plan("ddp", shares=(1, 3)))


@pytest.mark.parametrize("make", [Fitted, ByHand])
def test_torch_s_advice_is_kept_from_the_user(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert_same(make, numbers(), plan("ddp"))
    assert "find_unused_parameters" not in capfd.readouterr().err


def test_what_else_is_on_stderr_stays(capfd: pytest.CaptureFixture[str]) -> None:
    class Talking(Fitted):
        def loss(self, batch: Any) -> Tensor:
            import os

            os.write(2, b"said in the step\n")
            return super().loss(batch)

    fit(Talking, numbers(8), plan("ddp"), max_epochs=1)
    assert "said in the step" in capfd.readouterr().err


def test_three_ranks_and_a_last_batch_of_two() -> None:
    torch.manual_seed(0)
    assert_same(Fitted, numbers(26), plan("ddp", ranks=3))


class Steep(Fitted):
    """The gradient of its prediction passes half precision's largest number in some batches; those of its weights are small."""

    def loss(self, batch: Any) -> Tensor:
        prediction = Scaled.apply(self.net(batch[0]).float(), 1 / 64)  # type: ignore[no-untyped-call]
        return mse_loss(Scaled.apply(prediction.half(), 64.0).float(), batch[1])  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("shares", [(), (1, 3)])
def test_a_step_is_left_out_where_gradients_overflow_on_one_device(shares: tuple[int, ...], tmp_path: Path) -> None:
    """The scale, as the run tells it, is one device's as well."""

    def trained(under: Any) -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
        return fit(Steep, numbers(), under, plugins=[plugin], callbacks=[Scales(tmp_path)])

    ours, losses, _ = trained(plan("ddp", shares=shares))
    theirs, their_losses, _ = trained(None)
    torch.testing.assert_close(losses, their_losses, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=2**-8, atol=2**-8)
    one, first, second = ((tmp_path / name).read_text() for name in ("1-0", "2-0", "2-1"))
    assert first == second == one
    assert len(set(one.split(","))) > 2


@pytest.mark.parametrize(("device", "trained", "refused"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_sparse_gradients_are_refused_where_nccl_would_reduce_them(device: str, trained: bool, refused: bool) -> None:
    module = nn.Sequential(nn.Embedding(3, 2, sparse=True).requires_grad_(trained), nn.Linear(2, 1))
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(strategy=strategy, lightning_module=module, state=SimpleNamespace(fn=TrainerFn.FITTING))
    refusal = engines.of(plan("ddp")).unfit(trainer, {})
    assert refusal == ("'0' has sparse gradients, which NCCL can't reduce; build it with sparse=False" if refused else None)


class Outside(Fitted):
    """Trains a layer in a list, and a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Linear(8, 1)]
        self.scale = torch.zeros((), requires_grad=True)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale.exp() + mse_loss(self.held[0](batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict({"outside": self.held[0].weight.sum(), "scale": self.scale.detach()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.held[0].parameters(), self.scale], 0.01, momentum=0.9)


class OutsideByHand(ByHand, Outside):
    def first_backward(self, loss: Tensor) -> None:
        loss.backward()


class OutsideAlone(Outside):
    """Has nothing in the module that DDP could train."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "options", "micro_batches"),
    [
        (Outside, {"gradient_clip_val": 0.5}, 1),
        (Outside, {"accumulate_grad_batches": 3}, 2),
        (OutsideByHand, {}, 1),
        (OutsideAlone, {}, 1),
    ],
)
def test_gradients_of_what_is_trained_outside_of_the_module_are_averaged(make: Any, options: dict[str, Any], micro_batches: int) -> None:
    ours, theirs = assert_same(make, numbers(), plan("ddp", micro_batches=micro_batches), **options)
    torch.testing.assert_close(ours.held[0].weight, theirs.held[0].weight)
    torch.testing.assert_close(ours.scale, theirs.scale)
