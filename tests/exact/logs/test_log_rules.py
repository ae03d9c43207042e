import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.logs.log_rules import Logged, compare_logs, recorded_logs
from lightning_autopar.strategies.preparation import split_findings


def logged(*values: float, reduce_fx: str = "mean", hook: str = "training_step") -> list[dict[tuple[str, str], Logged]]:
    return [{(hook, "x"): Logged(value=value, reduce_fx=reduce_fx)} for value in values]


@pytest.mark.parametrize(
    ("whole", "parts", "reduce_fx", "rule"),
    [
        (1.6, (1.0, 2.5), "mean", "mean"),  # (3 × 1 + 2 × 2.5) / 5
        (1.6, (1.0, 2.5), "max", "mean"),  # a mean loss whose maximum over steps is wanted
        (3.5, (1.0, 2.5), "mean", "sum"),  # a count logged with the default
        (2.5, (1.0, 2.5), "max", "max"),
        (1.0, (1.0, 2.5), "min", "min"),
        (4.0, (4.0, 4.0), "sum", "mean"),  # a constant
        (0.0, (0.0, 0.0), "mean", "mean"),
        (1.7606817, (1.0, 2.5), "mean", "root mean square"),  # ((3 × 1 + 2 × 2.5²) / 5) ** 0.5
        (1.4426999, (1.0, 2.5), "mean", "geometric mean"),  # exp of (3 × log 1 + 2 × log 2.5) / 5: a perplexity
    ],
)
def test_the_rule_is_what_gives_the_whole_batchs_value(whole: float, parts: tuple[float, float], reduce_fx: str, rule: str) -> None:
    found = compare_logs(logged(whole, reduce_fx=reduce_fx)[0], logged(*parts, reduce_fx=reduce_fx), [3, 2])
    assert found.rules == {("training_step", "x"): rule}
    assert not found.notes


def test_a_value_that_no_rule_explains_is_named_with_the_difference() -> None:
    found = compare_logs(logged(10.0, hook="validation_step")[0], logged(1.0, 2.0, hook="validation_step"), [3, 2])
    assert not found.rules
    assert "'x'" in found.notes[0]
    assert "validation_step" in found.notes[0]


def test_a_value_that_some_parts_do_not_log_is_a_mean_over_what_counts_a_sum_or_unknown() -> None:
    count = Count(path=("y",), kind="equals", ignored=2)
    parts: list[dict[tuple[str, str], Logged]] = [*logged(2.0), {}]
    assert compare_logs(logged(2.0)[0], parts, [3, 2], weights={count: [1.0, 0.0]}).matching["training_step", "x"][0] == count
    assert "'x' logged in training_step is no mean" in compare_logs(logged(2.0)[0], parts, [3, 2]).notes[0]
    summed: list[dict[tuple[str, str], Logged]] = [*logged(2.0, reduce_fx="sum"), {}]
    assert compare_logs(logged(2.0, reduce_fx="sum")[0], summed, [3, 2]).matching["training_step", "x"] == ("sum",)


def test_other_means_may_be_over_what_counts() -> None:
    count = Count(path=("y",), kind="differs", ignored=-100)
    for whole, mean in ((math.exp(0.25 * math.log(2.5)), "geometric mean"), ((0.75 + 0.25 * 2.5**2) ** 0.5, "root mean square")):
        found = compare_logs(logged(whole)[0], logged(1.0, 2.5), [3, 2], weights={count: [0.75, 0.25]})
        assert found.matching["training_step", "x"] == (replace(count, mean=mean),)
    near = compare_logs(logged(1.00005)[0], logged(1.0, 1.0002), [3, 2], weights={count: [0.75, 0.25]})
    assert count in near.matching["training_step", "x"]
    assert len(near.matching["training_step", "x"]) == 3
    assert not near.ambiguous
    assert compare_logs(logged((0.75 + 0.25 * 1.006**2) ** 0.5)[0], logged(1.0, 1.006), [3, 2], weights={count: [0.75, 0.25]}).rules == {
        ("training_step", "x"): replace(count, mean="root mean square")
    }  # 3e-6 from the usual mean, as rounding wouldn't be
    one_counts = [*logged(3.0), *logged(math.nan)]
    assert count in compare_logs(logged(3.0)[0], one_counts, [3, 2], weights={count: [1.0, 0.0]}).matching["training_step", "x"]


def test_what_is_nearly_a_mean_is_told_from_one() -> None:
    near = compare_logs(logged(1.00003)[0], logged(1.0, 1.00001), [1, 1])
    assert "differs by 2.5e-05" in near.notes[0]
    parts = logged(1.0, 1.000004)
    largest = compare_logs(logged(1.000004)[0], parts, [1, 1])
    assert largest.matching["training_step", "x"] == ("mean", "max", "min", "root mean square", "geometric mean")
    largest = compare_logs(logged(1.000004)[0], parts, [1, 1], double=True)
    assert largest.rules == {("training_step", "x"): "max"}


def test_other_batches_decide_what_the_first_leaves_open() -> None:
    nothing = compare_logs(logged(0.0)[0], logged(0.0, 0.0), [1, 1])
    count = compare_logs(logged(3.0)[0], logged(1.0, 2.0), [1, 1])
    assert nothing.narrowed(count).rules == {("training_step", "x"): "sum"}
    near = compare_logs(logged(1.0001)[0], logged(1.0, 1.0002), [1, 1])
    assert near.matching["training_step", "x"] == ("mean", "root mean square", "geometric mean")
    assert not near.ambiguous  # as that would take another batch for every loss whose parts are close
    assert near.narrowed(compare_logs(logged(5**0.5)[0], logged(1.0, 3.0), [1, 1])).rules == {("training_step", "x"): "root mean square"}
    mean = compare_logs(logged(1.5)[0], logged(1.0, 2.0), [1, 1])
    assert "'x' logged in training_step is no mean, root mean square, sum, maximum or minimum" in mean.narrowed(count).notes[0]


def test_recording_takes_every_way_to_log_and_is_undone() -> None:
    module = pl.LightningModule()
    with recorded_logs(module) as found:
        module.log("a", torch.tensor([1.0, 3.0]).mean(), reduce_fx=torch.max)
        module.log_dict({"b": 1, "c": 2.5}, on_epoch=True)
    assert found == {
        name: Logged(value=value, reduce_fx=fx) for name, value, fx in (("a", 2.0, "max"), ("b", 1.0, "mean"), ("c", 2.5, "mean"))
    }
    assert not {"log", "log_dict"} & set(vars(module))


class Verbose(pl.LightningModule):
    """Logs one loss and one count in every way that Lightning reduces them over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def step(self, batch: list[Tensor], prefix: str) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).abs()
        for fx in ("mean", "max", "min", "sum"):
            self.log(f"{prefix}_loss_{fx}", error.mean(), reduce_fx=fx, on_step=False, on_epoch=True)
            self.log(f"{prefix}_bad_{fx}", (error > 1).float().sum(), reduce_fx=fx, on_step=False, on_epoch=True)
        # None in any but the last batch of the loader without shuffle.
        self.log(f"{prefix}_far", (batch[0][:, 0] > 5).float().sum(), on_step=False, on_epoch=True)
        self.log(f"{prefix}_worst", error.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log(f"{prefix}_rmse", error.square().mean().sqrt(), on_step=False, on_epoch=True)
        self.log(f"{prefix}_perplexity", error.mean().exp(), on_step=False, on_epoch=True)
        return error.mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(strategy: Any) -> dict[str, float]:
    pl.seed_everything(5)
    x = torch.randn(19, 4)
    x[-1, 0] = 9
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Verbose(), DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_every_reduction_of_every_kind_of_value_is_one_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_findings, "QUICK_FLOPS", -1)  # a step too long to be probed on other batches
    assert fit(AutoParallelStrategy(allow=["ddp"], devices="2xcpu:1GiB")) == pytest.approx(fit("auto"), abs=1e-5)
