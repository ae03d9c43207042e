"""Modules of other kinds than most: what they hold and how they compute changes nothing in the run, or is named."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad  # by a name of its own
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.base import process_group
from tests.strategies import fitted
from tests.strategies.fitted import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match"),  # DDP's, of gradients of gradients
]


class Blocks(pl.LightningModule):
    """Three blocks and a head; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self(batch[0]) - batch[1]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], 0.01)


def trained(make: Callable[[], Any], engine: str, **options: Any) -> Any:
    """The module after two epochs under an engine; of none, plain Lightning's."""
    pl.seed_everything(3, verbose=False)
    module = make()
    strategy: Any = AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB", exact=True) if engine else "auto"
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET, **options)  # type: ignore[arg-type]
    x = torch.randn(26, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True))
    return module


def assert_same(make: Callable[[], Any], engine: str, **options: Any) -> Any:
    ours, theirs = trained(make, engine, **options), trained(make, "", **options)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5, equal_nan=True)
    return ours


class Odd(Blocks):
    """Tensors without elements, tensors that are no numbers yet, one activation and one dropout for all, blocks that end in place."""

    def __init__(self) -> None:
        self.act, self.drop = [nn.GELU()], [nn.Dropout(0.2)]
        super().__init__()
        del self.act, self.drop
        self.register_buffer("bank", torch.empty(0))
        self.register_buffer("threshold", torch.tensor(float("nan")))
        self.unused = nn.Parameter(torch.full((2, 2), float("nan")), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 8))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("act", "drop"):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def block(self) -> nn.Module:
        block = nn.Sequential(nn.Linear(8, 8), self.act[0], nn.Linear(8, 8), self.drop[0], nn.ReLU(inplace=True))
        block.register_buffer("ids", torch.empty(0, dtype=torch.long), persistent=False)
        block.register_buffer("limit", torch.full((3,), float("inf")))
        return block


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "zero", "pipeline"])
def test_empty_tensors_nan_buffers_and_shared_layers(engine: str) -> None:
    assert_same(Odd, engine)


class Early(Blocks):
    """An optimizer from before ``configure_optimizers``, whose momentum isn't zero."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), 0.01)
        self(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.optimizer


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero", "pipeline"])
def test_an_optimizer_that_was_made_before(engine: str) -> None:
    module, plain = assert_same(Early, engine), trained(Early, "")
    assert {id(parameter) for parameter in module.parameters()} == {id(each) for each in module.optimizer.param_groups[0]["params"]}
    ours, theirs = (
        {name: dict(each.optimizer.state[parameter]) for name, parameter in each.named_parameters()} for each in (module, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Marked(Blocks):
    """Parameters with attributes of the user's, which say how they are trained; some are given and taken away meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for parameter in self.parameters():
            parameter.mark = 3.0 / (1 + parameter.ndim)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = [parameter.mark for parameter in self.parameters()]
        if self.global_step == 2:
            del self.scale.given
            self.head.weight.given = 1.0
        penalty = sum(parameter.square().sum() * parameter.mark for parameter in (self.scale, self.head.weight, self.head.bias))
        return super().training_step(batch, batch_idx) * self.scale + 0.01 * sum(found) * penalty

    def on_train_epoch_start(self) -> None:
        self.scale.given = 0.5

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("given", sum(getattr(parameter, "given", 0.0) for parameter in (self.scale, self.head.weight)))

    def configure_optimizers(self) -> Any:
        marks = {parameter.mark for parameter in self.parameters()}
        groups = {mark: [parameter for parameter in self.parameters() if parameter.mark == mark] for mark in sorted(marks)}
        return torch.optim.Adam([{"params": group, "lr": 0.01 * mark} for mark, group in groups.items()])


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline"])
def test_attributes_of_parameters(engine: str) -> None:
    ours, theirs = assert_same(Marked, engine), trained(Marked, "")
    torch.testing.assert_close(dict(ours.trainer.callback_metrics), dict(theirs.trainer.callback_metrics), rtol=1e-5, atol=1e-5)


class Pruned(Blocks):
    """A hook prunes a layer, which then has a mask and another name for its weight; another one is pruned only for a while."""

    def on_train_epoch_start(self) -> None:
        prune.l1_unstructured(self.blocks[self.current_epoch][0], "weight", amount=0.2)

    def on_train_end(self) -> None:
        prune.remove(self.blocks[1][0], "weight")


def test_what_the_run_has_renamed() -> None:
    ours, theirs = assert_same(Pruned, "ddp"), trained(Pruned, "")
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


class Gate(nn.Linear):
    """Leaves a term of the loss on itself, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        weight = super().forward(x).softmax(-1)
        self.term = weight.mean(0).square().sum()
        return x + weight


class Gated(Blocks):
    def block(self) -> nn.Module:
        return Gate(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(block.term for block in self.blocks)  # type: ignore[no-any-return,misc]


def test_a_term_of_the_loss_that_a_block_leaves_on_itself() -> None:
    assert_same(Gated, "pipeline")


class Frozen(Blocks):
    """All but the last block and the head is frozen, so that a stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_a_stage_without_gradients_is_clipped(algorithm: str) -> None:
    assert_same(Frozen, "pipeline", gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)


class Forces(Blocks):
    """Its outputs are an energy and the energy's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        energy = super().forward(x)
        (force,) = grad(energy.sum(), x, create_graph=True)
        return energy + force.pow(2).sum(1, keepdim=True)


class InPlace(Blocks):
    """Blocks that write to what they are given."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0)


@pytest.mark.parametrize("make", [Forces, InPlace])
@pytest.mark.parametrize("engine", ["ddp", "zero"])
def test_outputs_by_a_gradient_and_blocks_in_place(make: Any, engine: str) -> None:
    assert_same(make, engine)


class Scaled(Blocks):
    """Scales its learning rate and its loss by the number of devices."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.num_devices

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05 * self.trainer.world_size)


class Compared(Blocks):
    """Compares each sample with those of all ranks, which it gathers where there are several."""

    rank = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.blocks[1](self.blocks[0](batch[0]))
        mine, others = self.blocks[2](x), self.head(x) * x
        if self.trainer.world_size > 1:
            others = self.all_gather(others, sync_grads=True).flatten(0, 1)
        return nn.functional.cross_entropy(mine @ others.T, torch.arange(len(mine)) + self.rank * len(mine))


class ComparedByRank(Compared):
    """The same, with labels that begin at the rank's first sample."""

    @property
    def rank(self) -> int:  # type: ignore[override]  # it is a number in the class above
        return self.global_rank


@pytest.mark.filterwarnings("ignore:autopar. the module asks its trainer for")
@pytest.mark.parametrize(
    ("make", "engine"), [(Scaled, "ddp"), (Scaled, "pipeline"), (Compared, "ddp"), (Compared, "fsdp"), (ComparedByRank, "pipeline")]
)
def test_a_module_that_asks_how_many_devices_there_are(make: Any, engine: str) -> None:
    assert_same(make, engine)


class EmptyWeight(Blocks):
    """A layer of no features, whose weight has no elements and gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(8, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + nn.functional.linear(x[:, :0], self.none))


class OneNorm(Blocks):
    """All blocks have one normalisation."""

    def __init__(self) -> None:
        self.__dict__["norm"] = nn.LayerNorm(8)
        super().__init__()
        del self.__dict__["norm"]

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), self.__dict__["norm"])


class OneLayer(Blocks):
    """Nothing to cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()


class Different(Blocks):
    """Layers of different kinds, a buffer that moves, an LSTM on packed sequences; the step appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.1))])
        self.rnn = nn.LSTM(3, 8, batch_first=True)
        self.losses: list[Tensor] = []
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        sequences = self.blocks[0](x).view(len(x), 4, 3)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, torch.arange(len(x)) % 3 + 2, batch_first=True, enforce_sorted=False)
        again, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        out, _ = self.rnn(torch.tanh(again))
        found: Tensor = self.head(out.sum(1))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        assert all(isinstance(loss.item(), float) for loss in self.losses)
        self.losses.clear()


@pytest.mark.parametrize("make", [Different, OneNorm])
def test_a_module_without_repeated_blocks_in_a_pipeline(make: Any) -> None:
    assert_same(make, "pipeline")


@pytest.mark.parametrize(
    ("make", "engine", "sentence"),
    [
        (Forces, "fsdp", "the step differentiates by itself (torch.autograd.grad), through parameters that FSDP2 frees after each use"),
        (Forces, "pipeline", "differentiates by itself"),
        (InPlace, "fsdp", "'blocks.1' writes in place to the tensor that it is given, at test_module_kinds.py:"),
        (InPlace, "pipeline", "'blocks.0' writes to a tensor that it is given"),
        (EmptyWeight, "fsdp", "the parameter 'none' has no elements and gets a gradient, which FSDP2 can't reduce"),
        (OneLayer, "pipeline", "blocks or layers that share no parameters and run once a step, and the module has 1"),
    ],
)
def test_what_an_engine_cannot_run_is_named(make: Any, engine: str, sentence: str) -> None:
    with pytest.raises(NothingFits) as refused:
        trained(make, engine)
    assert sentence in str(refused.value)


class Inherited(Blocks):
    """Its step logs in the class that it inherits from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def test_a_step_logs_through_super(capfd: pytest.CaptureFixture[str]) -> None:
    assert_same(Inherited, "ddp")
    assert "planning didn't find" not in capfd.readouterr().err


class Nodes(Blocks):
    """Drops nodes of graphs, of which each batch has another number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes, target, graph = batch
        for block in self.blocks:
            nodes = nodes + block(nodes)
        nodes = nn.functional.dropout(nodes, 0.3, self.training)
        sizes = torch.bincount(graph, minlength=len(target))[:, None]
        graphs = torch.zeros(len(target), 8).index_add(0, graph, nodes) / sizes
        loss: Tensor = (self.head(graphs) - target).pow(2).mean()
        self.log("loss", loss, batch_size=len(target))
        return loss


def _graphs(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = torch.tensor([len(nodes) for nodes, _ in samples])
    nodes, targets = torch.cat([nodes for nodes, _ in samples]), torch.stack([target for _, target in samples])
    return nodes, targets, torch.arange(len(samples)).repeat_interleave(sizes)


def test_a_pipeline_draws_for_shapes_that_change_as_one_device_does() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [size for nodes in (25, 24, 23, 32) for size in (nodes // 4 + nodes % 4, *[nodes // 4] * 3)]
    data = [(torch.randn(size, 8, generator=generator), torch.randn(1, generator=generator)) for size in sizes]
    weights = []
    for engine in ("pipeline", ""):
        pl.seed_everything(3, verbose=False)
        module = Nodes()
        strategy: Any = AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB", exact=True) if engine else "auto"
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(data, 4, collate_fn=_graphs))  # type: ignore[arg-type]  # a list is a dataset
        weights.append(dict(module.state_dict()))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


class Still(Nodes):
    """Graphs without a row a sample, nothing drawn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.eval()
        return super().training_step(batch, batch_idx)


class Looks(Still):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Might change the batch, and parts that were collated before would miss it."""


class Lengths(Still):
    """Sequences, padded to the longest of those that it is given: a mask as wide as that doesn't fit a part with more padding."""

    def forward(self, batch: Any) -> Tensor:
        x, lengths, _ = batch
        for block in self.blocks:
            x = block(x)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        pooled: Tensor = self.head((x * mask[..., None]).sum(1))
        return pooled

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch) - batch[2]).pow(2).mean()


def _padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    rows, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(each) for each in rows]), torch.stack(targets)


@pytest.mark.parametrize(("make", "looks", "collate"), [(Still, Looks, _graphs), (Lengths, type("", (Looks, Lengths), {}), _padded)])
def test_parts_that_cannot_be_cut_out_are_collated_of_their_own_samples(make: Any, looks: Any, collate: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3 + index % 4, 8, generator=generator), torch.randn(1, generator=generator)) for index in range(11)]
    plan = Plan(engine="single", devices=("cpu:0",), micro_batches=2)
    weights = []
    for strategy in (AutoParallelStrategy(plan=plan, devices="1xcpu:1GiB", exact=True), "auto"):
        pl.seed_everything(3, verbose=False)
        module = make()
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET)  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(data, 4, shuffle=True, collate_fn=collate))  # type: ignore[arg-type]  # a list is a dataset
        weights.append(dict(module.state_dict()))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
    strategy = AutoParallelStrategy(plan=plan, devices="1xcpu:1GiB")
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parts are cut out of the collated batch"):
        trainer.fit(looks(), DataLoader(data, 4, collate_fn=collate))  # type: ignore[arg-type]  # a list is a dataset


class Probe(pl.Callback):
    """A linear probe beside the module, trained at each batch's end on what a block gives."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.layer = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), 0.05)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("probe_loss", loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.probed.copy_(self.layer.weight.detach())


class Probed(Blocks):
    """Has such a callback, whose weights it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("probed", torch.zeros(1, 8))

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Probe()]


class ByAnotherName(Probe):
    """Its code doesn't say that it runs a backward pass."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        getattr((self.layer(batch[0]) - batch[1]).square().mean(), "drawkcab"[::-1])()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pass


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_callbacks_own_network_is_trained_on_the_whole_batch(engine: str) -> None:
    assert_same(Probed, engine)


def test_a_callback_may_reach_its_backward_pass_by_any_name() -> None:
    probes = ByAnotherName(), ByAnotherName()
    for probe, under in zip(probes, (fitted.plan("ddp"), None), strict=True):
        fitted.fit(fitted.Fitted, fitted.numbers(), under, callbacks=[probe])
    torch.testing.assert_close(probes[0].layer.weight, probes[1].layer.weight, rtol=1e-5, atol=1e-5)


def test_a_callback_that_trains_on_one_rank_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Probe):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.is_global_zero:
                super().on_train_batch_end(trainer, pl_module, *args)

    monkeypatch.setattr(process_group, "PATIENCE", timedelta(seconds=2))
    with pytest.raises(
        RuntimeError,
        match=r"a network of its own in .*Alone.on_train_batch_end \(test_module_kinds.py:\d+\) on rank 0, but not on all ranks",
    ):
        fitted.fit(fitted.Fitted, fitted.numbers(), fitted.plan("ddp"), callbacks=[Alone()])


class Ragged(Blocks):
    """Has a nested tensor of torch's first layout for a batch, which has no shape."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch.to_padded_tensor(0.0)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:autopar. the step could not be traced")
def test_batches_without_a_shape_run_on_one_device() -> None:
    rows = [torch.ones(2 + index % 3, 8) for index in range(8)]
    trainer = pl.Trainer(accelerator="cpu", strategy=AutoParallelStrategy(allow=["single"], devices="2xcpu:1GiB"), max_epochs=1, **QUIET)  # type: ignore[arg-type]
    trainer.fit(Ragged(), DataLoader(rows, 4, collate_fn=torch.nested.nested_tensor))  # type: ignore[arg-type]
    assert trainer.global_step == 2
