"""What planning finds out beside memory and splits: how many batches a fit has, as Lightning counts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.constraints import LOSS, Constraints, SplitFinding
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.planning.refusals import split_notes
from lightning_autopar.strategies.preparation import module_findings, split_findings
from lightning_autopar.strategies.preparation.confirmed_plan import Prospect
from lightning_autopar.strategies.preparation.module_findings import Findings, Questions, find_out
from lightning_autopar.strategies.preparation.planning_inputs import find_prospect
from lightning_autopar.strategies.preparation.split_findings import whole_of
from tests.strategies.modules import QUIET

QUICK = {"accelerator": "cpu", "enable_checkpointing": False, **QUIET}


class Net(pl.LightningModule):
    """Counts its batches."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = automatic
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        first = batch
        while not isinstance(first, Tensor):
            first = next(iter(first.values() if isinstance(first, dict) else [each for each in first if each is not None]))
        loss: Tensor = self.layer(first).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    """Of no known length."""

    def __iter__(self) -> Any:
        return iter(torch.randn(100, 2))


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(2 * batches, 2)), batch_size=2)


def found(module: Net, data: Any, root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int | None:
    """What is found out before the run, which then doesn't happen."""
    seen: list[int | None] = []

    class Enough(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> Prospect:
        seen.append(find_prospect(*args, **kwargs).decision().batches)
        raise Enough

    monkeypatch.setattr("lightning_autopar.strategies.launcher.find_prospect", stop)
    strategy = AutoParallelStrategy(devices="cpu:1GiB", allow=["single"], calibrate="off")
    with pytest.raises(Enough):
        pl.Trainer(strategy=strategy, default_root_dir=root, **QUICK, **options).fit(module, data)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (lambda: loader(5), {"max_epochs": 3}),
        (lambda: loader(5), {"max_epochs": 3, "max_steps": 7}),
        (lambda: loader(5), {"max_steps": 7}),
        (lambda: loader(5), {"max_epochs": 0}),
        (lambda: loader(5), {"max_epochs": 2, "limit_train_batches": 3}),
        (lambda: loader(5), {"max_epochs": 2, "limit_train_batches": 0.5}),
        (lambda: loader(5), {"max_steps": 7, "accumulate_grad_batches": 2}),
        (lambda: loader(5), {"max_epochs": 2, "accumulate_grad_batches": 4}),
        (lambda: loader(5), {"fast_dev_run": 2}),
        (lambda: loader(5), {"overfit_batches": 2, "max_epochs": 3}),
        (lambda: [loader(5), loader(2)], {"max_epochs": 2}),
        (lambda: CombinedLoader({"a": loader(5), "b": loader(2)}, "min_size"), {"max_epochs": 2}),
        (lambda: CombinedLoader({"a": loader(5), "b": loader(2)}, "max_size_cycle"), {"max_epochs": 2, "limit_train_batches": 4}),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_steps": 6, "accumulate_grad_batches": 2}),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_epochs": 2, "limit_train_batches": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_batches_of_a_fit_are_lightnings(data: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net()
    pl.Trainer(default_root_dir=tmp_path, devices=1, **QUICK, **options).fit(plain, data())  # type: ignore[arg-type]
    assert found(Net(), data(), tmp_path, monkeypatch, **options) == plain.count


@pytest.mark.parametrize(
    ("data", "options", "automatic"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), {"max_epochs": 2}, True),
        (lambda: loader(5), {"max_epochs": -1}, True),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_steps": 6}, False),
    ],
)
def test_what_nobody_knows_is_unknown(
    data: Any, options: dict[str, Any], automatic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(Net(automatic=automatic), data(), tmp_path, monkeypatch, **options) is None


class Annealing(Net):
    """Weighs a term by the batch's share of the trainer's data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, loader = self.layer(batch[0]), self.trainer.train_dataloader
        return out.square().mean() + len(batch[0]) / len(loader.dataset) * out.mean()  # type: ignore[union-attr]


def _found_out(
    module: Net,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: Any = "cpu",
    validating: Any = None,
    engines: tuple[str, ...] = (),
    **options: Any,
) -> SplitFinding:
    """What is found out of a split of its batch before the run, which then doesn't happen."""
    seen: list[Findings] = []

    class Enough(Exception):
        pass

    def stop(trainer: Any, *args: Any, **kwargs: Any) -> Prospect:
        seen.append(find_out(trainer, Questions(split=True, target=target, engines=engines, later=True)))
        raise Enough

    monkeypatch.setattr("lightning_autopar.strategies.launcher.find_prospect", stop)
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off")
    with pytest.raises(Enough):
        pl.Trainer(strategy=strategy, default_root_dir=root, **{**QUICK, **options}).fit(module, loader(2), validating)  # type: ignore[arg-type]
    assert seen[0].split is not None
    return seen[0].split


def test_a_step_that_asks_the_trainer_for_its_loaders_is_tried_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = _found_out(Annealing(), tmp_path, monkeypatch)
    assert split.probed
    assert split.differs


class Counted(Net):
    """A sum over the samples, where the run has as many batches as it has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.layer(batch[0])
        counts = self.trainer.num_training_batches, self.trainer.estimated_stepping_batches
        return out.sum() if counts == (len(self.trainer.train_dataloader), 2 * len(self.trainer.train_dataloader)) else out.mean()  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.layer(batch[0])
        self.log("all", out.sum() if self.trainer.num_val_batches[0] == len(self.trainer.val_dataloaders) else out.mean())  # type: ignore[arg-type]


def test_a_step_that_asks_how_long_the_run_is_is_tried_with_the_true_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found_out(Counted(), tmp_path, monkeypatch, validating=loader(3), max_epochs=2)
    assert found.log_rules == {("training_step", ""): ("sum",), ("validation_step", "all"): ("sum",)}


class Drawing(Net):
    """Attention with dropout, or a recurrent layer with or without, or numbers that are drawn until they fit."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.net = nn.LSTM(2, 4, 2, dropout=0.1 if what == "lstm" else 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layer(batch[0])
        if "lstm" in self.what:
            x = x + self.net(batch[0][:, None])[0].mean()
        if self.what == "poisson":
            x = x + torch.poisson(torch.ones_like(x))
        if self.what == "attention":
            heads = x[:, None, None].repeat(1, 2, 8, 16)
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return x.square().mean()


@pytest.mark.parametrize(
    ("what", "target", "apart"),
    [
        ("poisson", "cpu", ("poisson",)),
        ("attention", "cuda", ("_scaled_dot_product_efficient_attention",)),
        ("attention", "cpu", ()),
        ("lstm", "cuda", ("_cudnn_rnn",)),
        ("lstm without", "cuda", ()),
        ("none", "cuda", ()),
    ],
)
def test_draws_that_no_rank_can_make_as_one_device_would_are_named(
    what: str, target: Any, apart: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _found_out(Drawing(what), tmp_path, monkeypatch, target).drawn_apart == apart


def _batch(collate: Any) -> FirstBatch:
    samples = list(torch.ones(4, 2))
    return FirstBatch(batch=collate(samples), samples=samples, collate=collate, batch_size=4, kind="map")


@pytest.mark.parametrize(
    ("collate", "named"),
    [
        (lambda samples: {"x": torch.stack(samples), "meta": {"n": len(samples)}}, "['meta']['n']"),
        (lambda samples: (torch.stack(samples), float(sum(each.sum() for each in samples))), "[1]"),
        (lambda samples: {"x": torch.stack(samples), "longest": max(len(each) for each in samples), "temperature": 0.5}, None),
    ],
)
def test_a_number_that_samples_add_up_to_keeps_a_batch_whole(collate: Any, named: str | None) -> None:
    words = whole_of((_batch(collate),), "fit", collates=True)
    assert words == (named and f"parts are cut out of the collated batch, whose number {named} is that of all its samples")


def test_a_number_of_which_nobody_can_try_that_keeps_a_batch_whole() -> None:
    def fours(samples: Any) -> Any:
        assert len(samples) == 4
        return {"x": torch.stack(samples), "n": 4}

    words = whole_of((_batch(fours),), "fit", collates=True)
    assert words is not None
    assert words.startswith("parts are cut out of the collated batch, and whether its number ['n'] is a sum over samples couldn't be tried")
    assert whole_of((_batch(lambda samples: torch.stack(samples) if len(samples) == 4 else fours(samples)),), "fit", collates=True) is None


@pytest.mark.parametrize(("layer", "splittable"), [(nn.LazyLinear(3), False), (nn.Linear(2, 3), True)])
def test_a_parameter_without_a_shape_needs_one_device(layer: nn.Module, splittable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_findings, "run_forked", lambda *_: (SplitFinding(), DrawPlan()))
    module, step = pl.LightningModule(), SimpleNamespace(flops=0, conduct=None, blocks=())
    module.late = layer
    split, _ = split_findings.split_of(module, pl.Trainer(accelerator="cpu", **QUIET), _batch(torch.stack), footprint=step, despite=())  # type: ignore[arg-type]
    assert split.splittable is splittable
    assert splittable or "'late.weight' gets its shape in the first step, or in configure_model, and parts" in str(split.reason)


class Longer(pl.Callback):
    """Repeats a batch's samples, as test-time augmentation does."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0].repeat(3, 1)
        pl_module.log("samples", len(batch[0]))


class Lost(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0].to(self.device)  # type: ignore[attr-defined]  # as a callback's setup on a device makes it


@pytest.mark.parametrize(("callback", "times"), [(Longer(), 3), (Lost(), 1)])
def test_the_trace_gets_the_batch_as_callbacks_leave_it(callback: pl.Callback, times: int) -> None:
    batch = FirstBatch(batch=[torch.ones(4, 2)], batch_size=4)

    def traced(*callbacks: pl.Callback) -> Any:
        trainer, module = pl.Trainer(**QUICK, callbacks=list(callbacks)), Net()  # type: ignore[arg-type]
        trainer.strategy.connect(module)
        return module_findings._traced_apart(trainer, Questions(), batch)

    alone, changed = traced(), traced(callback)
    assert changed.input_bytes == times * alone.input_bytes
    said = [words for words in changed.assumptions if "what on_train_batch_start of the callback Lost makes of a batch" in words]
    assert len(said) == (times == 1)
    assert batch.batch[0].shape == (4, 2)


class ByLoader(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        found = self.layer(batch[0])
        if dataloader_idx == 0:
            self.log("mean", found.mean())
        elif dataloader_idx == 1:
            self.log("count", float(len(found)))
            self.log("mean", found.mean())
        else:
            self.log("spread", found.std())
            self.log("masked", found[batch[1]].mean())

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 1:
            self.log("sum", batch[0].sum())


def test_each_loader_of_a_validation_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = DataLoader(TensorDataset(torch.randn(8, 2), torch.arange(8) % 4 > 0), batch_size=8)
    found = _found_out(ByLoader(), tmp_path, monkeypatch, validating=[loader(4), loader(4), masked])
    rules = {name: rules[:1] for (hook, name), rules in found.log_rules.items() if "validation" in hook}
    assert rules == {"mean": ("mean",), "count": ("sum",), "sum": ("sum",)}
    assert [note.partition(" is ")[0] for note in found.notes] == [
        f"the value {name!r} logged in validation_step" for name in ("spread", "masked")
    ]
    assert "which the first loader's batches lack" in found.notes[1]


@pytest.mark.parametrize(("engines", "routes"), [(("single", "ddp"), False), (("ddp", "fsdp"), True)])
def test_single_samples_are_tried_where_a_plan_may_have_a_part_of_the_module(
    engines: tuple[str, ...], routes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(*args: Any, routes: bool, **told: Any) -> Any:
        return SplitFinding(probed=False, notes=(f"single samples: {routes}",)), DrawPlan()

    monkeypatch.setattr(split_findings, "probe_split", split)
    found = _found_out(Net(), tmp_path, monkeypatch, engines=engines)
    assert found.notes[:1] == (f"single samples: {routes}",)


def test_a_count_that_another_batch_contradicts_makes_a_difference_so_that_ranks_share_the_network() -> None:
    """As where a sum is divided by how many samples of a class there are, and at least by 1: a part of a later batch may have none."""
    first, other = (FirstBatch(batch=torch.ones(size, 2), batch_size=size) for size in (8, 4))
    counted = SplitFinding(log_rules={LOSS: (Count(path=(), kind="above"),)})
    split, _ = split_findings.with_others(
        lambda batch, **_: (counted if batch is first else SplitFinding(log_rules={LOSS: ()}), DrawPlan()),
        Net(), [first, other], counted, DrawPlan(),
    )  # fmt: skip
    assert split.differs
    assert split_notes(Constraints(split=split))[0] == (
        "the split batch's loss differs from the whole batch's in some batches (parts of another batch than the first, of 4 samples, weigh "
        "by something else); exact=True rules such plans out"
    )
