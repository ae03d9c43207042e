"""A plan for the longest batch that a run will meet, not for its first one."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.exact.data import longest_batch
from lightning_autopar.memory.trace.first_batch import indexed
from lightning_autopar.report.report import Report
from lightning_autopar.strategies.preparation.longest_footprint import seen_sizes
from lightning_autopar.strategies.preparation.planning_inputs import plan_only
from tests.strategies.modules import QUIET, weights

SHORT, LONG = 16, 160


class Texts(Dataset[Tensor]):
    """Token ids of several lengths, the first ones short."""

    def __init__(self, count: int = 64, long: int = LONG) -> None:
        chance = random.Random(1)
        self.lengths = [SHORT] * 8 + [chance.randint(SHORT, long) for _ in range(count - 9)] + [long]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(self.lengths[index]) % 50


class Reader(pl.LightningModule):
    """Attention whose scores are kept for backward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.lengths: list[int] = []

    def loss(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + (block(x) @ x.transpose(1, 2)).tanh() @ x / x.shape[1]
        return x.square().mean((1, 2)).mean()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        self.lengths.append(ids.shape[1])
        return self.loss(ids)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def texts(*, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Texts(**options), batch_size=8, shuffle=shuffle, collate_fn=padded)


def trainer(root: Path, strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=root, enable_checkpointing=False, **{**QUIET, "max_epochs": 1, **options}
    )


def planned(
    root: Path, monkeypatch: pytest.MonkeyPatch, loader: Any, *, limit: Any = None, devices: str = "1xcpu:1GiB", **options: Any
) -> Report:
    """The report for a fit with this loader."""
    found: list[Report] = []

    def launch(launcher: Any, function: Any, *args: Any, trainer: Any, **kwargs: Any) -> None:
        from lightning_autopar._lightning_compat import attach_data, run_arguments

        attach_data(trainer, run_arguments(function, args, kwargs))
        strategy = launcher._strategy
        found.append(plan_only(trainer, strategy.settings, strategy.inventory())[0])

    monkeypatch.setattr("lightning_autopar.strategies.launcher.AutoLauncher.launch", launch)
    torch.manual_seed(0)
    strategy = AutoParallelStrategy(devices=devices, memory_limit=limit, memory_margin=0, calibrate="off", **options)
    trainer(root, strategy).fit(Reader(), loader)
    return found[0]


def need(report: Report) -> int:
    """Bytes of the plan on one whole device."""
    whole = next(
        each for each in report.candidates if each.plan.engine == "single" and each.plan.micro_batches == 1 and not each.plan.recompute
    )
    return max(whole.needs.values())


def fixed(length: int) -> DataLoader[Any]:
    """Batches of one length."""
    return DataLoader([torch.zeros(length, dtype=torch.long)] * 64, batch_size=8)


def test_memory_is_the_longest_batchs_and_time_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    varied = planned(tmp_path, monkeypatch, texts())
    assert need(varied) == need(planned(tmp_path, monkeypatch, fixed(LONG)))
    assert varied.footprint.flops == planned(tmp_path, monkeypatch, fixed(SHORT)).footprint.flops
    assert "the longest batch has size 160 (of the batch's dimension 1), a usual one 16." in " ".join(str(varied).split())


def test_what_fits_with_the_first_batch_alone_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = need(planned(tmp_path, monkeypatch, fixed(LONG))) * 9 // 10
    first = planned(tmp_path, monkeypatch, fixed(SHORT), limit=limit, allow=["single"]).best
    assert first is not None
    assert (first.micro_batches, first.recompute) == (1, ())
    report = planned(tmp_path, monkeypatch, texts(), limit=limit, allow=["single"])
    assert report.best is not None
    assert report.best.micro_batches > 1 or report.best.recompute
    assert report.best_candidate is not None
    assert max(report.best_candidate.needs.values()) <= limit


def test_which_length_fits_is_what_its_own_batch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2 * need(planned(tmp_path, monkeypatch, fixed(LONG)))
    report = planned(tmp_path, monkeypatch, texts(), limit=limit)
    told = re.match(r"a batch of up to ([\d,]+) .*? fits as planned", report.lengths)
    assert told is not None, report.lengths
    length = int(told[1].replace(",", ""))
    assert need(planned(tmp_path, monkeypatch, fixed(length))) <= limit * 1.01
    assert need(planned(tmp_path, monkeypatch, fixed(round(length * 1.08)))) > limit


def test_samples_that_were_not_looked_at_get_a_margin_where_something_fits_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.exact.data.longest_batch.MOST", 60)
    some: dict[str, Any] = {"loader": texts(shuffle=True, count=4000), "plan": Plan(engine="single", devices=("cpu:0",))}
    report = planned(tmp_path, monkeypatch, **some)
    lengths = report.footprint.lengths
    assert lengths is not None
    assert (lengths.looked, lengths.of) == (68, 4000)
    assert lengths.reach > 1
    without = need(planned(tmp_path, monkeypatch, fixed(lengths.longest[1])))
    assert without < need(report)
    tight = planned(tmp_path, monkeypatch, **some, limit=(without + need(report)) // 2)
    assert need(tight) == pytest.approx(without, rel=1e-3)
    assert "without a margin, as nothing fits with one" in " ".join(str(tight).split())


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(Texts())


def test_a_stream_is_not_looked_at_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = planned(tmp_path, monkeypatch, DataLoader(Stream(), batch_size=8, collate_fn=padded))
    assert need(report) == need(planned(tmp_path, monkeypatch, fixed(SHORT)))
    assert "Lengths: the sizes of later batches weren't looked at, as the dataset is a stream" in " ".join(str(report).split())


def test_a_hook_that_fails_on_longer_batches_leaves_the_one_with_something_new() -> None:
    class Moving(Reader):
        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            assert batch.shape[1] == SHORT
            return batch

    class New(Texts):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) - 100 * (index > 8)

    loader = DataLoader(New(), batch_size=8, collate_fn=padded)
    first = indexed(loader, list(range(8)))
    assert first is not None
    found = seen_sizes(Moving(), replace(first, loaders=(loader,), epoch_batches=8), None).look
    assert found.lengths.unseen == "a hook of the module fails on others (AssertionError)"
    assert found.unlike is not None


def test_where_no_batch_of_something_new_can_be_made_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class New(Texts):
        def __getitem__(self, index: int) -> Tensor:
            return torch.arange(8).index_fill(0, torch.tensor(3), -1 if index == 20 else 3)

    def collate(samples: list[Tensor]) -> Tensor:
        if any(bool((sample < 0).any()) for sample in samples):
            raise ValueError("such a sample is left out by another sampler")
        return torch.stack(samples)

    loader = DataLoader(New(), batch_size=4, collate_fn=collate, sampler=[*range(8), 20, *range(8, 15)])
    monkeypatch.setattr(longest_batch, "ALIKE_SECONDS", 0.0)  # one batch of the sampler's own
    report = planned(tmp_path, monkeypatch, loader, devices="2xcpu:1GiB", allow=["ddp"])
    (note,) = (note for note in report.candidates[0].notes if "what the first batch hasn't" in note)
    assert note.startswith("not checked: whether a batch in parts gives the same values")
    assert "(ValueError: such a sample is left out by another sampler, at " in note


# -- runs -------------------------------------------------------------------------------------------------------------------------------


def fitted(strategy: Any, root: Path, *, seed: int = 5) -> tuple[Reader, list[Tensor]]:
    torch.manual_seed(seed)
    module = Reader()
    trainer(root, strategy, max_epochs=2).fit(module, texts(shuffle=True), texts())
    return module, weights(module)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_a_look_changes_nothing_of_the_run(engine: str, tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices="1xcpu:1GiB" if engine == "single" else "2xcpu:1GiB", allow=[engine])
    module, ours = fitted(strategy, tmp_path)
    plain, theirs = fitted("auto", tmp_path)
    assert strategy.report is not None
    assert strategy.report.footprint.lengths is not None
    assert strategy.report.footprint.lengths.vary
    if engine == "single":
        assert module.lengths == plain.lengths
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_longer_than_planned_for_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_autopar.exact.data.longest_batch.MOST", 1)
    monkeypatch.setattr("lightning_autopar.exact.data.longest_batch.reach_of", lambda sizes, of: 1.01)
    loader = DataLoader(Texts(), batch_size=8, collate_fn=padded, sampler=[*range(8), *range(8, 16), *range(56, 64), *range(56, 64)])
    monkeypatch.setattr("lightning_autopar.exact.data.longest_batch._Samples.population", lambda samples, first: list(range(8, 12)))
    strategy = AutoParallelStrategy(devices="1xcpu:1GiB")
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, strategy).fit(Reader(), loader, fixed(SHORT))
    told = [record.message for record in caplog.records if "has memory for at most" in record.message]
    assert told
    assert "rank 0 has a batch of size 160 (the batch's dimension 1)" in told[-1]
    assert len(told) <= 2, "the last batch comes twice"


def test_bytes_of_another_batch_than_the_measured_ones_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lightning_autopar.strategies.preparation.finished_run.add_record", lambda key, record: kept.append(record))
    trainer(tmp_path, AutoParallelStrategy(devices="1xcpu:1GiB"), max_epochs=2).fit(Reader(), fixed(LONG), fixed(SHORT))
    assert len(kept) == 1
    trainer(tmp_path, AutoParallelStrategy(devices="1xcpu:1GiB"), max_epochs=2).fit(Reader(), texts(), fixed(SHORT))
    assert len(kept) == 1


def test_an_evaluation_is_planned_for_its_longest_batch(tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices="1xcpu:1GiB")
    run = trainer(tmp_path, strategy)
    run.validate(Reader(), texts(), verbose=False)
    assert strategy.report is not None
    assert strategy.report.footprint.input_bytes == 8 * LONG * 8
