"""FSDP2 on two real ranks against plain Lightning on one device; and a module made whole again."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base import process_group
from lightning_autopar.strategies.fsdp import same_collectives
from lightning_autopar.strategies.fsdp import shard as sharding
from lightning_autopar.strategies.fsdp.same_collectives import without_views
from lightning_autopar.strategies.fsdp.shard import shard, unshard
from lightning_autopar.strategies.fsdp.whole_parameters import WholeParameters
from tests.ranks import run_ranks
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, fit, mlp, numbers, plan, tokens

LAYERS = ("layers.0", "layers.1", "layers.2")


class Text(Fitted):
    """A transformer whose embedding and head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.embedding = nn.Embedding(17, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        return cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Own(Fitted):
    """Uses parameters of its own in the step, and the head's weight in the loss."""

    def __init__(self) -> None:
        super().__init__(width=7)  # no number of ranks divides it
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]) * self.scale, batch[1]) + 0.1 * self.net[4].weight.pow(2).sum()


class Tempered(Fitted):
    """Scalars: of its own, in a block, frozen, in two places, one that never gets a gradient, and one that the step itself writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.average = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        for block in self.net[1:4]:
            block.gate = self.scale
            block.register_forward_hook(lambda block, args, output: output * block.gate.exp())

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.scale, alpha=0.1)
        return mse_loss(self.net(batch[0]) * self.scale + self.fixed * self.average, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.scale.clamp_(0.2, 0.99)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)


class Frozen(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].requires_grad_(False)
        self.net[2][0].weight.requires_grad_(False)


class Recurrent(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        hidden = self.embedding(ids[:, :-1])
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


class Viewing(Fitted):
    """The blocks return views, which the step changes in place."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(x.shape)

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList([self.Block(16, 16) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0])
        for layer in self.layers:
            found = layer(hidden)
            found += hidden
            hidden = found
        return mse_loss(self.last(hidden), batch[1])


class Passing(Viewing):
    """The blocks hand a bias on to each other, as T5's hand on that of their positions."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x + bias), bias

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0])
        bias = 2 * self.first.bias[None]
        for layer in self.layers:
            hidden, bias = layer(hidden, bias)
        return mse_loss(self.last(hidden + bias), batch[1])


class Reused(Fitted):
    """One block, three times, as in ALBERT."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0])
        for _ in range(3):
            hidden = self.net[1](hidden)
        return mse_loss(self.net[4](hidden) + 0 * sum(parameter.sum() for parameter in self.net[4].parameters()), batch[1])


class Encoding(Fitted):
    """The blocks are called by a method that isn't forward."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

        def encode(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.net, self.encoder, self.out = None, self.Encoder(), nn.Linear(16, 1)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.out(self.encoder.encode(batch[0])), batch[1])


class Parametrised(Fitted):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[1][0])
        parametrizations.spectral_norm(self.net[2][0])


class Sharing(Fitted):
    """Builds in ``configure_model`` and shards by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()
        if self._device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[2], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class Probed(Fitted):
    """Shards one block by itself, and then puts modules and a number beside it, as a callback's probe does."""

    whole = False

    def configure_model(self) -> None:
        if self._device_mesh is not None:
            fully_shard(self if self.whole else self.net[2], mesh=self.device_mesh["data_parallel"])
        if not hasattr(self, "probes"):
            self.probes = nn.ModuleDict({"probe": nn.Linear(8, 1)})
            self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + mse_loss(self.scale * self.probes["probe"](batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters()], 0.05)


class ProbedWhole(Probed):
    """The same around all of it."""

    whole = True


class ProbedByHand(Probed):
    """The same with a backward pass and optimizers by hand, one of them made before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.earlier = torch.optim.SGD(self.net.parameters(), 0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self.earlier, torch.optim.AdamW([self.scale, *self.probes.parameters()], 0.05)]


class Outside(Fitted):
    """Trains a layer that it hasn't registered."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Linear(8, 1)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + mse_loss(self.held[0](batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.held[0].parameters()], 0.05)


class LeftOut(Fitted):
    """Puts a parameter right into a module that it has sharded."""

    def configure_model(self) -> None:
        if self._device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        self.net.register_parameter("late", nn.Parameter(torch.ones(2)))


class Late(Fitted):
    """Builds in ``configure_model``, buffers included."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()
            self.register_buffer("kept", torch.randn(1))
            self.register_buffer("unkept", torch.randn(1), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]) * self.kept * self.unkept, batch[1])


@pytest.mark.parametrize(
    ("make", "data", "units"),
    [
        (Fitted, numbers(), BLOCKS),
        (Fitted, numbers(), ()),
        (Own, numbers(), BLOCKS),
        (Frozen, numbers(), BLOCKS),
        (Reused, numbers(), ("net.1",)),
        (Encoding, numbers(), ("encoder.layers.0", "encoder.layers.1")),
        (Parametrised, numbers(), BLOCKS),
        (Recurrent, tokens(), LAYERS),
        (Viewing, numbers(), LAYERS),
        (Passing, numbers(), LAYERS),
        (Sharing, numbers(), BLOCKS),
        (Probed, numbers(), ()),
        (ProbedWhole, numbers(), ()),
        (ProbedByHand, numbers(), ()),
        (Tempered, numbers(), BLOCKS),
    ],
)
def test_training_is_plain_lightnings(make: Any, data: Any, units: tuple[str, ...]) -> None:
    assert_same(make, data, plan("fsdp", shard=units))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (LeftOut, "configure_model has sharded a module around 'net.late' without it"),
        (Outside, r"SGD steps a parameter of shape \[1, 8\] that isn't in the module"),
    ],
)
def test_a_parameter_whose_gradient_nobody_would_average_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fit(make, numbers(), plan("fsdp"), limit_val_batches=0)


def test_what_a_unit_hands_on_takes_memory_once() -> None:
    made, came = (torch.ones(4, requires_grad=True).view(2, 2) for _ in range(2))
    given, bias = without_views(nn.Identity(), (), {"bias": came}, (made, came))
    assert bias is came
    assert not given._is_view()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recompute", [(), LAYERS])
def test_tied_weights_recomputation_and_both_ways_of_resharding(reshard: bool, recompute: tuple[str, ...]) -> None:
    assert_same(Text, tokens(), plan("fsdp", shard=LAYERS, reshard=reshard, recompute=recompute))


def test_dimensions_that_three_ranks_do_not_divide() -> None:
    assert_same(lambda: Fitted(width=2), numbers(), plan("fsdp", shard=BLOCKS, ranks=3))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"accumulate_grad_batches": 2}, 1e-5),
        ({"gradient_clip_val": 0.1}, 1e-5),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 1e-5),
        ({"precision": "bf16-mixed"}, 2e-2),
        ({"precision": "bf16-true"}, 5e-2),
        ({"precision": "64-true"}, 1e-12),
    ],
)
def test_trainer_options(options: dict[str, Any], tolerance: float) -> None:
    assert_same(Fitted, numbers(), plan("fsdp", shard=BLOCKS, reshard=False), tolerance=tolerance, **options)


def test_a_large_module_is_built_on_rank_0_alone() -> None:
    assert_same(Late, numbers(), plan("fsdp", shard=BLOCKS), large=True)


# -- manual optimization -----------------------------------------------------------------------------------------------------------------


class Adversarial(Fitted):
    """Two optimizers; forward between a backward pass and its optimizer's step leaves whole parameters behind."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = None
        self.g = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        x = batch[0]
        made = self.g(x.flip(1))
        loss = softplus(-self.d(x)).mean() + softplus(self.d(made.detach())).mean()
        d.zero_grad()
        self.manual_backward(loss)
        d.step()
        loss_g = softplus(-self.d(made)).mean()
        g.zero_grad()
        self.manual_backward(loss_g)
        with torch.no_grad():
            before = self.d(self.g(x)).mean()
        g.step()
        with torch.no_grad():
            after = self.d(self.g(x)).mean()
        self.log_dict({"loss": loss + loss_g, "before": before, "after": after})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.d(self.g(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.g.parameters(), 1e-2), torch.optim.Adam(self.d.parameters(), 1e-2)


@pytest.mark.parametrize("reshard", [True, False])
def test_two_optimizers_by_hand(reshard: bool) -> None:
    assert_same(Adversarial, numbers(), plan("fsdp", reshard=reshard))


class TiedByHand(Text):
    """Its embedding and its head, two modules that the step calls, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def test_tied_weights_by_hand() -> None:
    assert_same(TiedByHand, tokens(), plan("fsdp"))


# -- hooks -------------------------------------------------------------------------------------------------------------------------------


class Generating(Text):
    def on_train_epoch_end(self) -> None:
        ids = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            whole = self(ids).mean()
            for _ in range(3):
                hidden = self.embedding(ids)
                for layer in self.layers:
                    hidden = layer(hidden)
                ids = torch.cat([ids, self.head(hidden)[:, -1:].argmax(-1)], 1)
        self.log_dict({"whole": whole, "ids": ids.sum().float()})


class Meddling(Fitted):
    """Calls a part and changes parameters between steps: what was whole for the call must be shards for the change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]) * self.scale.sum(), batch[1]) + 0.1 * mse_loss(self.average(batch[0]), self.net(batch[0]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.log("part", self.net(torch.ones(1, 8)).sum())
        self.log("norm", torch.stack([parameter.grad.norm() for parameter in self.parameters() if parameter.requires_grad]).norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net(batch[0])
            for parameter in (*self.net.parameters(), self.scale):
                parameter.clamp_(-0.3, 0.9)
            for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


class Averaging(Fitted):
    """Averages the weights where a step's forward is over and its backward not begun: some are gathered, and the average's are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.net)


@pytest.mark.parametrize("clipping", ["norm", "value"])
@pytest.mark.parametrize("under", [plan("fsdp", ranks=4, replicas=2, reshard=False, shard=BLOCKS), plan("fsdp", ranks=1, shard=BLOCKS)])
def test_scalars_are_clipped_and_reduced_over_copies(under: Plan, clipping: str) -> None:
    assert_same(Tempered, numbers(), under, gradient_clip_val=0.05, gradient_clip_algorithm=clipping, accumulate_grad_batches=2)


def test_text_is_generated_in_a_hook() -> None:
    assert_same(Generating, tokens(), plan("fsdp", shard=LAYERS))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("make", [Meddling, Averaging])
def test_hooks_may_call_parts_and_change_parameters(make: Any, reshard: bool) -> None:
    assert_same(make, numbers(), plan("fsdp", shard=BLOCKS, reshard=reshard))


class Routing(nn.Module):
    """Calls an expert for the samples that choose it: with few samples, on some ranks only; the last one for none."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = (hidden.detach()[:, 0] > 0).long() + (hidden.detach()[:, 1] > 0).long()
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]).tanh())
        return hidden + out


class Routed(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = Routing(), Routing()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)  # a gradient of zeros would move what none moves not


@pytest.mark.parametrize("under", [plan("fsdp", shard=BLOCKS), plan("fsdp", ranks=4, replicas=2, reshard=False, shard=BLOCKS)])
def test_experts_in_a_block_may_have_samples_on_some_ranks_only(under: Plan) -> None:
    """FSDP2 alone sums up the gradients of different experts, as they are equally large, or hangs."""
    module, _ = assert_same(Routed, numbers(), under, findings={"fsdp": ("net.1.experts.0", "net.1.experts.1", "net.1.experts.2", "net.3")})
    assert not [name for name, state in module.net[1].experts[3].named_parameters() if state.grad is not None]


def test_an_expert_that_is_first_left_out_later_is_told_from_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_collectives, "SKEW", datetime.timedelta(seconds=1))

    def train(rank: int, world_size: int) -> str:
        module = nn.Sequential(Routing(2))
        shard_alone(module)
        WholeParameters(module)
        both = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]])
        try:
            for batch in (both, both, both[rank:]):
                module(batch).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    def shard_alone(module: nn.Module) -> None:
        fully_shard(module[0], mesh=init_device_mesh("cpu", (2,)))  # type: ignore[index]
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))

    assert "other parameters than in the batch before got a gradient on rank 1" in run_ranks(train, 2)[1]


@pytest.mark.parametrize(
    ("skipped", "told"),
    [(0, "'experts.1' was called before 'experts.0' on rank 1"), (2, "a step ended without a call of 'experts.2' on rank 1")],
)
def test_a_unit_that_no_sample_of_a_rank_calls_is_told_from_a_mix_of_parameters(
    monkeypatch: pytest.MonkeyPatch, skipped: int, told: str
) -> None:
    """Ranks that gather units of equal size at once would each get parts of both. Where all skip it, none has to wait."""
    monkeypatch.setattr(same_collectives, "SKEW", datetime.timedelta(seconds=1))

    def train(rank: int, world_size: int) -> str:
        module = Routing(2)
        module.automatic_optimization = True
        shard_alone(module)
        gathered = WholeParameters(module)
        try:
            for skips in (steps := [(), (skipped,), (), (skipped,) * rank]):
                with gathered.inside("training_step"):
                    loss = sum(expert(torch.ones(1, 2)).sum() for index, expert in enumerate(module.experts) if index not in skips)
                with gathered.inside(None):
                    loss.backward()
        except RuntimeError as error:
            assert skips is steps[-1]
            return str(error)
        return ""

    def shard_alone(module: Routing) -> None:
        module.experts = module.experts[:3]
        for each in (*module.experts, module):
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))

    assert told in run_ranks(train, 2)[1]


def test_a_call_on_one_rank_alone_is_told_from_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "PATIENCE", datetime.timedelta(seconds=1))

    def call(rank: int, world_size: int) -> str:
        module = Fitted()
        shard(module, BLOCKS, init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
        WholeParameters(module)
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="Sequential was called outside of a step on rank 0") as caught:
            module.net(torch.ones(2, 8))
        return str(caught.value)

    assert "remove the condition on the rank" in run_ranks(call, 2)[0]


# -- whole again -------------------------------------------------------------------------------------------------------------------------


def _there_and_back(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(0)
    module = Text()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    classes = [type(child) for child in module.modules()]
    x = torch.randint(0, 17, (2, 5))
    expected = module(x)
    shard(module, LAYERS, init_device_mesh("cpu", (world_size,)), reshard_after_forward=False)
    for parameter in module.parameters():
        assert vars(parameter).keys() <= {"_is_param"}, "torch's notes on the originals, which each gather would hand on"
    sharded = module(x)
    unshard(module)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close([sharded, module(x)], [expected, expected])
    assert [type(child) for child in module.modules()] == classes
    assert module.head.weight is module.embedding.weight
    copy.deepcopy(module)
    shard(module, (), init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
    torch.testing.assert_close(module(x), expected)
    return [isinstance(module, FSDPModule)]


def test_a_module_is_whole_again_after_unshard() -> None:
    assert run_ranks(_there_and_back, 2) == [[True], [True]]


class Watchful(Fitted):
    """Looks at whole-tensor numbers in hooks, as people do to watch their weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("weights", sum(float(parameter.detach().norm()) for parameter in self.parameters()))
        self.log("slope", self.net[0].weight.grad.abs().sum().item())


def test_a_number_asked_of_a_shard_is_the_whole_tensors() -> None:
    ours, theirs = assert_same(Watchful, numbers(), plan("fsdp", shard=BLOCKS))
    metrics, expected = ours.trainer.callback_metrics, theirs.trainer.callback_metrics
    assert float(metrics["weights"]) == pytest.approx(float(expected["weights"]), rel=1e-5)
    assert float(metrics["slope"]) == pytest.approx(float(expected["slope"]), rel=1e-5)


class Histograms(Fitted):
    """Gives its gradients to a logger, and keeps what NumPy says of them and of its parameters."""

    def on_fit_start(self) -> None:
        self.read: list[float] = []

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            self.logger.experiment.add(parameter.grad)  # type: ignore[union-attr]
            self.read.append(float(np.abs(parameter.grad.numpy()).max()))  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        self.read += [float(np.abs(parameter.detach().tolist()).sum()) for parameter in self.parameters()]


class Reading(DummyLogger):
    """A logger that reads what it is given, on rank 0."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return SimpleNamespace(add=self.write)

    def write(self, values: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"{np.abs(values.numpy()).sum():.4f}\n")


def test_loggers_and_numpy_read_whole_parameters(tmp_path: Path) -> None:
    read = []
    for number, under in enumerate((plan("fsdp", shard=BLOCKS), None)):
        file = tmp_path / str(number)
        module, _, _ = fit(Histograms, numbers(), under, logger=Reading(file), limit_val_batches=0, max_epochs=1)
        read.append((module.read, [float(line) for line in file.read_text().split()]))
    (ours, our_lines), (theirs, their_lines) = read
    assert len(their_lines) == 4 * len(list(Fitted().parameters()))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert our_lines == pytest.approx(their_lines, abs=2e-4)


class Saves(Fitted):
    """Saves its weights by itself at each epoch's end, as every rank does."""

    def on_train_epoch_end(self) -> None:
        torch.save([self.net.state_dict(), [parameter.data for parameter in self.parameters()]], f"weights{self.global_rank}.pt")


class SavesAlone(Saves):
    """Does so on rank 0 alone."""

    on_train_epoch_end = rank_zero_only(Saves.on_train_epoch_end)


class SavesIfFirst(Saves):
    """Asks whether it is rank 0."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            super().on_train_epoch_end()


def test_files_that_hooks_write_hold_whole_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, _, _ = fit(Saves, numbers(), plan("fsdp", shard=BLOCKS), limit_val_batches=0, max_epochs=1)
    for rank in range(2):
        state, values = torch.load(f"weights{rank}.pt")
        torch.testing.assert_close(state, module.net.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(values, [parameter.data for parameter in module.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize(("make", "when"), [(SavesAlone, " alone;"), (SavesIfFirst, ", but not on all ranks within 0:00:01;")])
def test_a_hook_that_saves_on_one_rank_alone_is_named(make: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process_group, "PATIENCE", datetime.timedelta(seconds=1))
    hook = rf"read or saved in Saves\w*.on_train_epoch_end \(test_fsdp.py:\d+\) on rank 0{when}.*trainer.save_checkpoint"
    with pytest.raises(RuntimeError, match=hook):
        fit(make, numbers(), plan("fsdp", shard=BLOCKS), limit_val_batches=0, max_epochs=1)


class Checkpoints(Fitted):
    """Makes a checkpoint on rank 0 alone, as MLflow's autolog does."""

    @rank_zero_only
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint("weights.ckpt")


def test_a_checkpoint_of_one_rank_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hook = r"the state dict was asked for in Checkpoints.on_train_epoch_end \(test_fsdp.py:\d+\) on rank 0 alone; .*trainer.save_checkpoint"
    with pytest.raises(RuntimeError, match=hook):
        fit(Checkpoints, numbers(), plan("fsdp", shard=BLOCKS), limit_val_batches=0, max_epochs=1)


def _found_by_fully_shard(rank: int, world_size: int) -> tuple[int, int]:
    """How many parameter objects fully_shard meets, and how many of them somebody else held before."""
    module = Text()
    outside = {id(parameter): parameter for parameter in module.parameters()}
    met: dict[int, Tensor] = {}

    def watching(unit: nn.Module, **options: Any) -> Any:
        met.update((id(parameter), parameter) for parameter in unit.parameters() if not isinstance(parameter, DTensor))
        return fully_shard(unit, **options)

    sharding.fully_shard = watching  # type: ignore[assignment]
    shard(module, LAYERS, init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
    assert module.head.weight is module.embedding.weight
    return len(met), len(met.keys() & outside.keys())


def test_what_fully_shard_moves_to_the_device_is_held_by_nobody_else() -> None:
    distinct = len(list(Text().parameters()))
    assert run_ranks(_found_by_fully_shard, 2) == [(distinct, 0)] * 2
