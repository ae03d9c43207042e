"""Losses that are a mean over something that the batch counts (unmasked tokens, nodes) or a sum: every plan computes one device's run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_autopar import AutoParallelStrategy, Batch, Plan
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.preparation import split_findings

TWO = ("cpu:0", "cpu:1")


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Tokens(pl.LightningModule):
    """Logs the loss, its exponential, and a mean over samples."""

    #: Whether the loss is a mean, so that it has a perplexity.
    is_mean = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(ids)))
        return logits

    def loss(self, batch: Any) -> Tensor:
        ids, mask = batch
        each = F.cross_entropy(self(ids).flatten(0, 1), (ids.flatten() + 1) % 20, reduction="none").view_as(mask)
        return (each * mask).sum() / mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.is_mean:
            self.log("perplexity", loss.exp(), on_step=True, on_epoch=True)
        self.log("first", self._first(batch))
        return loss

    def _first(self, batch: Any) -> Tensor:
        return batch[0][:, 0].float().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        if self.is_mean:
            self.log("val_perplexity", loss.exp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Manual(Tokens):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # by hand it returns nothing
        loss = self.loss(batch)
        self.optimizers().zero_grad()  # type: ignore[union-attr]  # one optimizer
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers().step()  # type: ignore[union-attr]
        self.log("loss", loss, on_step=True, on_epoch=True)


class Kept(Tokens):
    """Keeps its losses, as many do who plot them."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.history.append(loss.item())
        return loss


class Scarce(Tokens):
    """On rank 0 the third batch fits one sample at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineMixin) and strategy.global_rank == 0 and batch_idx == 2 and len(batch[0]) > 1:
            raise torch.OutOfMemoryError("a fake")
        return loss


class Summed(Tokens):
    """A sum over samples, as those of many variational autoencoders."""

    is_mean = False

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), (batch[0].flatten() + 1) % 20, reduction="sum") / 100


class Unmasked(Dataset[tuple[Tensor, Tensor]]):
    """In every second batch of four, samples 0 and 2 count nothing: a part's loss is NaN then, and not the whole batch's."""

    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(0, 20, (samples, 6), generator=drawn(samples))
        self.mask = (torch.rand(samples, 6, generator=drawn(1)) < torch.linspace(0.2, 0.9, samples)[:, None]).float()
        self.mask[:, 1] = 1.0
        self.mask[4::8] = self.mask[6::8] = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.mask[index]


class Sentences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        length = int(torch.randint(3, 12, (), generator=drawn(index)))
        return torch.randint(4, 20, (length,), generator=drawn(100 + index))


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    """As transformers' collators do it."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=3)
    return {"input_ids": ids, "attention_mask": (ids != 3).long(), "labels": ids.masked_fill(ids == 3, -100)}


class Pretrained(Tokens):
    """One of transformers' models, which computes its loss itself."""

    def __init__(self, kind: str) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        told: dict[str, Any] = {"vocab_size": 20, "decoder_start_token_id": 0, "dropout_rate": 0.0}
        if kind == "causal":
            config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, **told)
            self.model = transformers.T5ForConditionalGeneration(config)

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def _first(self, batch: Any) -> Tensor:
        return batch["input_ids"][:, 0].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)  # Adam makes steps of the rounding in gradients that are 0, as the bias of keys has


class Graphs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        nodes = int(torch.randint(2, 9, (), generator=drawn(index)))
        x = torch.randn(nodes, 4, generator=drawn(index))
        return {"x": x, "y": x.sum(1), "edges": torch.randint(0, nodes, (2, nodes + index % 3), generator=drawn(index))}


def together(graphs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    first = torch.tensor([0, *(len(graph["x"]) for graph in graphs)]).cumsum(0).tolist()
    edges = torch.cat([graph["edges"] + begin for graph, begin in zip(graphs, first, strict=False)], 1)
    return {"x": torch.cat([graph["x"] for graph in graphs]), "y": torch.cat([graph["y"] for graph in graphs]), "edges": edges}


class Network(Tokens):
    """Its loss is a mean over the nodes of all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def loss(self, batch: Any) -> Tensor:
        h = torch.tanh(self.layer(batch["x"]))
        found = self.out(h + torch.zeros_like(h).index_add(0, batch["edges"][1], h[batch["edges"][0]]))
        return F.mse_loss(found.squeeze(-1), batch["y"])

    def _first(self, batch: Any) -> Tensor:
        return batch["x"].abs().amax()


def train(make: Any, data: Any, strategy: Any, collate: Any = None, **options: Any) -> tuple[dict[str, float], list[Tensor]]:
    pl.seed_everything(1, workers=True)
    module = make()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, *(DataLoader(data, batch_size=4, collate_fn=collate) for _ in range(2)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {f"history {number}": loss for number, loss in enumerate(getattr(module, "history", ()))}
    return metrics, [p.detach() for p in module.parameters()]


def is_one_devices(make: Any, data: Any, plan: Plan, **options: Any) -> str:
    """Asserts that the plan's run is plain Lightning's; returns what the report says of it."""
    metrics, weights = train(make, data, "auto", **options)
    strategy = AutoParallelStrategy(plan=plan, exact=True, devices=f"{len(plan.devices)}xcpu:1GiB")
    found_metrics, found_weights = train(make, data, strategy, **options)
    assert found_metrics == pytest.approx(metrics, abs=1e-5)
    for found, weight in zip(found_weights, weights, strict=True):
        torch.testing.assert_close(found, weight, atol=2e-5, rtol=1e-5)
    assert strategy.report is not None
    best = strategy.report.best_candidate
    return " ".join(() if best is None else best.notes)


PLANS = {
    "ddp": Plan(engine="ddp", devices=TWO),
    "ddp in parts": Plan(engine="ddp", devices=TWO, micro_batches=2),
    "uneven ddp": Plan(engine="ddp", devices=TWO, shares=(2, 1)),
    "fsdp": Plan(engine="fsdp", devices=TWO, reshard_after_forward=True),
    "fsdp in parts": Plan(engine="fsdp", devices=TWO, reshard_after_forward=True, micro_batches=2),
    "zero": Plan(engine="zero", devices=TWO, zero_stage=2),
    "pipeline": Plan(engine="pipeline", devices=TWO, micro_batches=2, schedule="1f1b", cuts=("blocks.1",)),
    "single in parts": Plan(engine="single", devices=TWO[:1], micro_batches=3),
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("plan", PLANS)
def test_parts_of_which_nothing_counts(plan: str) -> None:
    notes = is_one_devices(Tokens, Unmasked(22), PLANS[plan], gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert "the loss is a mean over the sum of batch[1]" in notes


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("make", [Manual, Summed, Kept, Scarce])
def test_other_losses(make: Any) -> None:
    is_one_devices(make, Unmasked(22), PLANS["ddp"])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(("kind", "count"), [("causal", "labels[:, 1:] != -100"), ("translating", "labels != -100")])
def test_models_that_compute_their_loss(kind: str, count: str) -> None:
    plan = PLANS["ddp" if kind == "causal" else "single in parts"]
    assert f"a mean over batch.{count}:" in is_one_devices(lambda: Pretrained(kind), Sentences(), plan, collate=padded)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("plan", ["ddp", "single in parts"])
def test_nodes_of_graphs(plan: str) -> None:
    assert "the rows of batch.x" in is_one_devices(Network, Graphs(), PLANS[plan], collate=together)


class Late(Unmasked):
    """All counts in the first batch and in the last one."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.mask[:] = 1.0
        self.mask[9, 2:] = self.mask[10:13, 3:] = 0.0


class ByClass(Tokens):
    """Every token of class 3 weighs five times as much: none is in the first batch, nor in the last one."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), weight=torch.ones(20).index_fill(0, torch.tensor(3), 5.0))


class Classes(Late):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], (3.0 - self.mask[index] * 2.0).long()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("plan", ["ddp", "single in parts"])
def test_what_counts_in_the_first_batch_and_not_in_others(plan: str) -> None:
    """Training and validation, whose data are the same."""
    assert "the loss is a mean over the sum of batch[1]" in is_one_devices(Tokens, Late(22), PLANS[plan])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_mask_that_comes_later_is_found_however_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_findings, "QUICK_FLOPS", 0)
    assert "the loss is a mean over the sum of batch[1]" in is_one_devices(Tokens, Late(22), PLANS["ddp"])


class Sevens(Late):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], torch.where(self.mask[index] > 0, self.ids[index], -7)


class Ignoring(Tokens):
    def loss(self, batch: Any) -> Tensor:
        counts = batch[1] != -7
        return F.cross_entropy(self(batch[0])[counts], batch[1][counts])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_labels_below_0_that_come_later_in_a_validation_are_found_however_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_findings, "QUICK_FLOPS", 0)
    assert "the loss is a mean over batch[1] != -7" in is_one_devices(Ignoring, Sevens(22), PLANS["ddp"])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_class_that_weighs_more_and_is_not_in_the_first_batch() -> None:
    is_one_devices(ByClass, Classes(22), PLANS["ddp"])


class Streamed(IterableDataset[Any]):
    """Planning sees the first batch alone."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[number] for number in range(22))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "pipeline", "single in parts"])
def test_a_mask_that_comes_later_in_a_stream(plan: str) -> None:
    assert "the loss is a mean over the sum of batch[1]" in is_one_devices(Tokens, Streamed(Late(22)), PLANS[plan])


class Lengths(Late):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.ids[index], int(self.mask[index].sum())


class ByLength(Tokens):
    def loss(self, batch: Any) -> Tensor:
        ids, lengths = batch
        return super().loss((ids, (torch.arange(ids.shape[1]) < torch.as_tensor(lengths).view(-1, 1)).float()))

    def _first(self, batch: Any) -> Tensor:
        return self.loss(batch)


def listed(samples: list[Any]) -> list[Any]:
    return [torch.stack([ids for ids, _ in samples]), [length for _, length in samples]]


def in_a_column(samples: list[Any]) -> list[Any]:
    return [torch.stack([ids for ids, _ in samples]), torch.tensor([[length] for _, length in samples])]


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("plan", "collate"), [("ddp", None), ("single in parts", None), ("ddp", listed), ("single in parts", in_a_column)])
def test_lengths_that_differ_later_in_a_stream(plan: str, collate: Any) -> None:
    """In the first batch all are the same, and the loss is a mean over samples as well."""
    assert "the loss is a mean over the sum of batch[1]" in is_one_devices(ByLength, Streamed(Lengths(22)), PLANS[plan], collate=collate)


class Placed(Tokens):
    """Where its sentence begins and ends in a sample."""

    def loss(self, batch: Any) -> Tensor:
        ids, begin, end = (batch[0], *batch[1].T) if len(batch) == 2 else batch
        position = torch.arange(ids.shape[1])
        return super().loss((ids, ((position >= begin[:, None]) & (position < end[:, None])).float()))


class Places(Late):
    def __init__(self, column: bool) -> None:
        super().__init__(22)
        self.column = column

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        begin = 0 if bool(self.mask[index].all()) else 2
        return self.ids[index], *([torch.tensor([begin, 6])] if self.column else [begin, 6])


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*is no mean, root mean square, sum")
@pytest.mark.parametrize(("plan", "column", "words"), [("ddp", False, "0"), ("single in parts", True, "0 and 6")])
def test_a_stream_whose_samples_begin_elsewhere_later_ends_the_run(plan: str, column: bool, words: str) -> None:
    """As long as all are alike, the loss is a mean over samples; and no count of a batch's entries is what it is a mean over."""
    strategy = AutoParallelStrategy(plan=PLANS[plan], devices=f"{len(PLANS[plan].devices)}xcpu:1GiB")
    with pytest.raises(ValueError, match=rf"this batch has other numbers than {words} in batch\[1\], and .*, so this batch can't be split"):
        train(Placed, Streamed(Places(column)), strategy, limit_val_batches=0)


class Sorted(Late):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.ids[index], max(0, index - 11) // 4


class Classed(Tokens):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0])[:, 0], batch[1])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stream_in_which_one_class_comes_after_the_other_is_split() -> None:
    is_one_devices(Classed, Streamed(Sorted(22)), PLANS["ddp"])


class TwoMeans(Tokens):
    """No count explains it, once a mask has zeros."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (F.cross_entropy(self(batch[0])[:, 0], batch[0][:, 1], reduction="none") * batch[1][:, 5]).mean()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("plan", ["ddp", "single in parts"])
def test_a_batch_whose_parts_do_not_weigh_anything_known_ends_the_run(plan: str) -> None:
    """What was trained before comes back; on one device it is a batch like others, and the user may have it split."""
    told: dict[str, Any] = {"limit_val_batches": 0}
    module, spec = TwoMeans(), f"{len(PLANS[plan].devices)}xcpu:1GiB"
    copied = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=r"this batch has other numbers than 1 in .*on one device in one piece .*despite=..later_entries"):
        train(lambda: module, Streamed(Late(22)), AutoParallelStrategy(plan=PLANS[plan], devices=spec), **told)
    assert module.trainer.global_step > 0
    assert any(not torch.equal(ours, before) for ours, before in zip(module.parameters(), copied, strict=True))
    one = Plan(engine="single", devices=TWO[:1])
    assert train(TwoMeans, Streamed(Late(22)), AutoParallelStrategy(plan=one, devices="1xcpu:1GiB"), **told)[0]["loss"] > 0.0
    despite = AutoParallelStrategy(plan=PLANS[plan], batch=Batch(despite=["later_entries"]), devices=spec)
    with pytest.warns(UserWarning, match="despite=..later_entries..: parts of a batch that has other numbers than 1 in "):
        assert train(TwoMeans, Streamed(Late(22)), despite, **told)[0]["loss"] > 0.0


class Shrinking(IterableDataset[Any]):
    """Long after the batches that planning reads there is one without a mask."""

    def __iter__(self) -> Iterator[Any]:
        samples = Unmasked(22)
        yield from (samples[index % 22] for index in range(400))
        yield from ((samples[index][0], "none") for index in range(4))


class Lenient(Tokens):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0], batch[1] if isinstance(batch[1], Tensor) else torch.ones(batch[0].shape)))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_batch_that_lacks_what_counts_ends_the_run_with_a_sentence() -> None:
    with pytest.raises(
        ValueError, match=re.escape("this batch lacks batch[1] of 2 dimensions, unlike the batches that planning looked at")
    ):
        train(Lenient, Shrinking(), AutoParallelStrategy(plan=PLANS["ddp"], devices="2xcpu:1GiB"))


class Growing(IterableDataset[Any]):
    """Batches as they are, of which the third one has a mask."""

    def __iter__(self) -> Iterator[Any]:
        ids, mask = Unmasked(16).ids, Unmasked(16).mask
        yield from (
            {"ids": ids[begin : begin + 4], **({"mask": mask[begin : begin + 4]} if begin > 7 else {})} for begin in range(0, 16, 4)
        )


class MaskedIfThere(Tokens):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["ids"], batch.get("mask", torch.ones(batch["ids"].shape))))

    def _first(self, batch: Any) -> Tensor:
        return batch["ids"][:, 0].float().mean()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(("plan", "validates"), [("ddp", True), ("single in parts", False)])
def test_a_tensor_that_comes_later_ends_a_run_that_splits_batches(plan: str, validates: bool) -> None:
    """In a validation's sanity check, or in training. A pipeline that runs each batch in one piece goes on."""
    words = r"this batch has batch\['mask'\] of 2 dimensions, unlike the batches that planning looked at.*despite=..later_entries"
    told: dict[str, Any] = {"num_sanity_val_steps": 3 if validates else 0, "limit_val_batches": 3 * validates}
    with pytest.raises(ValueError, match=words):
        fit_as_it_is(AutoParallelStrategy(plan=PLANS[plan], devices=f"{len(PLANS[plan].devices)}xcpu:1GiB"), **told)
    whole = Plan(engine="pipeline", devices=TWO, micro_batches=1, schedule="gpipe", cuts=("blocks.1",))
    assert fit_as_it_is(AutoParallelStrategy(plan=whole, devices="2xcpu:1GiB"), limit_val_batches=0) == 4
    despite = AutoParallelStrategy(plan=PLANS["ddp"], batch=Batch(despite=["later_entries"]), devices="2xcpu:1GiB")
    assert fit_as_it_is(despite, limit_val_batches=0) == 4


def fit_as_it_is(strategy: Any, **options: Any) -> int:
    module = MaskedIfThere()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, *(DataLoader(Growing(), batch_size=None) for _ in range(2)))
    return trainer.global_step
