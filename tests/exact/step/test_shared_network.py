"""Losses that compare samples, on ranks that share the network by rows, against plain Lightning on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as gradients_of
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.data.rank_share import Dealing, share_of
from lightning_autopar.exact.step.shared_network import Call, SharedModule, flattened
from tests.strategies.fitted import QUIET, plan


class Views(pl.LightningModule):
    """Two noisy views of each sample, told apart from all others; BatchNorm and dropout in the network, draws and a metric outside."""

    hooks = True

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 8)
        self.seen, self.mean = SumMetric(), MeanMetric()
        self.kept: list[float] = []
        self.hooked: list[float] = []

    def negatives(self, second: Tensor) -> Tensor:
        return second

    def loss(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x + 0.1 * torch.randn_like(x)])
        first, second = F.normalize(self.head(self.backbone(both)), dim=1).chunk(2)
        return F.cross_entropy(first @ self.negatives(second).T / 0.2, torch.arange(len(first)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.kept.append(loss.item())
        self.seen(len(batch[0]))
        self.mean.update(loss)
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch[0]), batch_size=len(batch[0]))

    def on_fit_start(self) -> None:
        if self.hooks:
            self.head.weight.register_hook(lambda gradient: self.hooked.append(float(gradient.norm())))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Bank(Views):
    """Earlier batches' second views are negatives as well."""

    hooks = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(32, 8)))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def negatives(self, second: Tensor) -> Tensor:
        known = self.bank.clone()
        if self.training:
            self.bank[(self.place + torch.arange(len(second))) % len(known)] = second.detach()
            self.place += len(second)
        return torch.cat([second, known])


class Towers(nn.Module):
    """Returns the loss of all pairs, with a temperature that it learns."""

    def __init__(self) -> None:
        super().__init__()
        # Its draws have one shape in two layouts: they are told apart when the checkpoint makes them again.
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.1, batch_first=True)
        self.image = nn.Sequential(nn.Unflatten(1, (3, 4)), layer, nn.Flatten(1), nn.Linear(12, 8))
        self.text = nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        one = F.normalize(checkpoint(self.image, images, use_reentrant=False), dim=1)
        logits = self.scale.exp() * one @ F.normalize(self.text(texts), dim=1).T
        return F.cross_entropy(logits, torch.arange(len(logits))) + F.cross_entropy(logits.T, torch.arange(len(logits)))


class Pairs(pl.LightningModule):
    """CLIP: its towers are shared, but not the module around them. One tower has its weights tied to what the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.towers(*batch) + 0.01 * self.towers.text.weight.square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dice(pl.LightningModule):
    """Overlap over the whole batch; the mask of each row comes from a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 3, padding=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found, wanted = self.net(batch[0]).sigmoid().flatten(), (batch[0] > 0).float().flatten()
        loss = 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adapted(Dice):
    """MAML: one half of the batch moves the weights, the other half's loss at these is differentiated through that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights, (first, second) = dict(self.net.named_parameters()), torch.tensor_split(batch[0], 2)
        inner = functional_call(self.net, weights, (first,)).square().mean()
        slopes = gradients_of(inner, list(weights.values()), create_graph=True)
        moved = {name: weight - 0.5 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        loss: Tensor = (functional_call(self.net, moved, (second,)) - 1).square().mean()
        self.log("loss", loss)
        return loss


class Noisy(nn.Module):
    """Draws its weight's noise, whose rows aren't samples, in validation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(8, 12) / 4), nn.Parameter(torch.full((8, 12), -2.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mean + F.softplus(self.spread) * torch.randn_like(self.mean))


class Bayes(Views):
    """The weights' prior weighs by the samples of a batch, so that the loss is no mean over them."""

    hooks = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(Noisy(), nn.ReLU()), nn.Linear(8, 1)

    def loss(self, x: Tensor) -> Tensor:
        return (self.head(self.backbone(x)) - x[:, :1]).square().mean() + self.backbone[0].mean.square().sum() / len(x)


class Between(pl.LightningModule):
    """Draws between two layers that ranks share, where its checkpoint runs again: all of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 8)

    def embed(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(F.dropout(hidden - hidden.mean(0), 0.3))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = checkpoint(self.embed, batch[0], use_reentrant=False)
        loss = F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cached(Between):
    """The gradient of the embeddings, from a forward without a graph. A hook of the loss embeds the batch in pieces once more, each with
    the draws that it had, and runs a backward pass of its own for each.
    """

    def piece(self, x: Tensor, state: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            return self.embed(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pieces, states, rows = batch[0].split(4), [], []
        for x in pieces:
            states.append(torch.get_rng_state())
            with torch.no_grad():
                rows.append(self.embed(x))
        found = torch.cat(rows).requires_grad_()
        loss = F.cross_entropy(found @ found.T, torch.arange(len(found)))
        slopes = torch.autograd.grad(loss, found)[0].split(4)

        @torch.enable_grad()
        def hook(gradient: Tensor) -> None:
            for x, state, slope in zip(pieces, states, slopes, strict=True):
                (gradient * (self.piece(x, state) * slope).sum()).backward()

        self.log("loss", loss)
        loss = loss.detach().requires_grad_()
        loss.register_hook(hook)
        return loss


class Columns(Tensor):
    """Rows with names for their columns, as pina's labelled tensors are."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Tensor, *names: str) -> Columns:
        made = rows.as_subclass(cls)
        made.names = names
        return made


class Named(nn.Module):
    """Looks at its columns' names, and gives its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, points: Columns) -> Columns:
        if points.names != ("x", "y"):
            raise TypeError(f"the names of the columns are lost: {getattr(points, 'names', None)}")
        return Columns.of(self.net(points), "u")


class Physics(pl.LightningModule):
    """A loss of second derivatives after the inputs, with a weight for each point that the step writes by all points of the batch; in
    double precision. Its loader makes batches by itself, and it takes them apart as they arrive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Named()
        self.register_buffer("weights", torch.zeros(24, 1, dtype=torch.float64))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [(name, points.to(device)) for name, points in batch.items()]

    def residual(self, points: Tensor) -> Tensor:
        given = Columns.of(points.clone().requires_grad_(), "x", "y")
        found = self.net(given)
        if getattr(found, "names", None) != ("u",):
            raise TypeError("the names of the output's columns are lost")
        slopes = gradients_of(found, given, torch.ones_like(found), create_graph=True)[0]
        bends = [gradients_of(each.sum(), given, create_graph=True)[0] for each in slopes.unbind(1)]
        return bends[0][:, :1] + bends[1][:, 1:] + 3 * found * slopes[:, :1] - points.sum(1, keepdim=True).sin()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ((_, points),) = batch
        residual, place = self.residual(points), (8 * batch_idx + torch.arange(len(points))) % len(self.weights)
        with torch.no_grad():
            size = residual.abs().as_subclass(Tensor)
            self.weights[place] = 0.9 * self.weights[place] + 0.1 * size / size.max()
        loss = (residual.square() * self.weights[place]).mean().as_subclass(Tensor)
        self.log("loss", loss, batch_size=len(points))
        return loss

    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ((_, points),) = batch
        self.log("validated", self.residual(points).square().mean().as_subclass(Tensor), batch_size=len(points))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Made:
    """A loader that makes its batches by itself."""

    def __init__(self, rows: int) -> None:
        self.batches = data(rows).tensors[0][:, :2].double().split(8)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter([{"points": batch.clone()} for batch in self.batches])


def data(rows: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 12, generator=draw), torch.randn(rows, 5, generator=draw))


def trained(make: Callable[[], Any], strategy: Any, rows: int, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(3, verbose=False)
    module = make()
    loaders: list[Any] = [DataLoader(data(rows), batch_size=8, shuffle=True), DataLoader(data(10), batch_size=8)][
        : 1 + isinstance(module, Views)
    ]
    if isinstance(module, Physics):
        loaders = [Made(rows), Made(10)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if strategy == "auto" else "auto",
        strategy=strategy,
        max_epochs=2,
        log_every_n_steps=1,
        **QUIET,
        **options,
    )
    trainer.fit(module, *loaders)
    return module, trainer


# The last batch of 17 rows has one row, fewer than there are ranks.
@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of gradients that a second derivative makes, under DDP
@pytest.mark.parametrize(
    ("make", "engine", "ranks", "rows", "options"),
    [
        (Views, "ddp", 3, 22, {"gradient_clip_val": 0.5}),
        (Bank, "fsdp", 2, 22, {}),
        (Pairs, "ddp", 2, 19, {"accumulate_grad_batches": 2}),
        (Dice, "ddp", 3, 17, {}),
        (Bayes, "ddp", 2, 22, {}),
        (Adapted, "ddp", 3, 22, {}),
        (Adapted, "fsdp", 2, 22, {}),
        (Bank, "ddp", 2, 22, {}),
        (Bank, "fsdp", 3, 22, {"gradient_clip_val": 0.5}),
        (Pairs, "zero", 2, 17, {"accumulate_grad_batches": 2}),
        (Bank, "zero", 2, 22, {}),
        (Physics, "ddp", 2, 22, {}),
        (Between, "ddp", 2, 22, {}),
        (Cached, "fsdp", 2, 22, {}),
    ],
)
def test_a_loss_that_compares_samples_is_one_devices(make: Any, engine: str, ranks: int, rows: int, options: dict[str, Any]) -> None:
    if engine == "zero":
        pytest.importorskip("deepspeed")
    theirs, alone = trained(make, "auto", rows, **options)
    pinned = plan(engine, ranks=ranks) if ranks > 2 else None
    strategy = AutoParallelStrategy(allow=[engine], plan=pinned, devices=f"{ranks}xcpu:2GiB", exact=True)
    ours, trainer = trained(make, strategy, rows, **options)
    assert (strategy.plan.engine, strategy.plan.world_size) == (engine, ranks)
    assert pinned or any("on its own rows" in reason for reason in strategy.plan.reasons)
    logged = {name: value.float() for name, value in alone.callback_metrics.items()}
    torch.testing.assert_close({name: value.float() for name, value in trainer.callback_metrics.items()}, logged, rtol=1e-5, atol=1e-5)
    close = 1e-11 if make is Physics else 1e-5
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=close, atol=close)
    if isinstance(ours, Views):
        torch.testing.assert_close(ours.kept, theirs.kept, rtol=1e-5, atol=1e-5)
        if engine == "ddp":  # FSDP2 hands hooks their shard
            torch.testing.assert_close(ours.hooked, theirs.hooked, rtol=1e-5, atol=1e-5)


SHARED = SharedModule(cut=frozenset({"[0][0]"}), whole=frozenset({"[1]['mask']"}), gathered=frozenset({""}))


def test_a_call_takes_a_ranks_rows_and_leaves_the_rest_whole() -> None:
    call = Call("net", SHARED, ((torch.arange(5.0),), {"mask": torch.ones(5)}))
    args, kwargs = call.part(lambda tensor: tensor[1::2])
    assert args[0].tolist() == [1.0, 3.0]
    assert len(kwargs["mask"]) == 5


@pytest.mark.parametrize(
    ("given", "output", "words"),
    [
        (((torch.ones(4), torch.ones(4)), {}), torch.ones(2), "a tensor at \\[0\\]\\[1\\]"),
        (((torch.ones(()),), {}), torch.ones(2), "tensors of \\[0\\] rows"),
        (((torch.ones(4),), {}), torch.ones(3), "3 rows for 2 rows"),
        (((torch.ones(4),), {}), {"more": torch.ones(2)}, "returned a tensor at \\['more'\\]"),
    ],
)
def test_a_call_that_planning_did_not_see_ends_the_run(given: Any, output: Any, words: str) -> None:
    share = share_of(4, 0, Dealing.even(2))
    with pytest.raises(RuntimeError, match=f"'net'.*{words}.*allow="):
        Call("net", SHARED, given).put_together(output, share, lambda rows: rows)


def test_calls_of_a_module_are_known_together_unless_they_contradict() -> None:
    other = SharedModule(cut=frozenset({"[0][1]"}), whole=frozenset(), gathered=frozenset({"[0]"}))
    joined = SHARED.joined(other)
    assert joined is not None
    assert joined.cut == {"[0][0]", "[0][1]"}
    assert SHARED.joined(SharedModule(cut=frozenset({"[1]['mask']"}), whole=frozenset(), gathered=frozenset())) is None


def test_places_are_those_of_nested_containers() -> None:
    leaves, _ = flattened(((1, {"a": [2]}), {"b": 3}))
    assert [place for place, _ in leaves] == ["[0][0]", "[0][1]['a'][0]", "[1]['b']"]
