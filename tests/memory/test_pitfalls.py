"""One test or more for each pitfall that was met in predicting a step's memory; numbers are those of the list of findings."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.fakes.fake_copies import as_if_real, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.plans import Engine, Plan
from tests.memory.measured import Copies, make_trainer, peak_bytes, real_peak_bytes
from tests.memory.trace.test_trace import GPT, Module, mlp, tokens, vectors
from tests.memory.trace.usage import Classifier
from tests.memory.trace.usage_parts import Recurrent, sequences

aten = torch.ops.aten


def gpt(**kwargs: Any) -> Footprint:
    return trace(Module(GPT(**kwargs)), None, next(iter(DataLoader(tokens(), 8))))


def planned(footprint: Footprint, engine: Engine, devices: int) -> Any:
    inventory = parse_spec(f"{devices}xcpu:4GiB")
    ids = tuple(device.id for device in inventory.devices)
    shard = tuple(block.fqn for block in footprint.blocks) if engine == "fsdp" else ()
    plan = Plan(engine=engine, devices=ids, shard=shard, reshard_after_forward=True if engine == "fsdp" else None)
    return predict(footprint, plan, inventory)[ids[0]]


# -- 1 and 9: shards and replicas are no part of the trace ----------------------------------------------------------------------------


def test_1_shards_are_not_counted_twice() -> None:
    footprint = gpt(width=128)
    one, sharded = planned(footprint, "single", 1), planned(footprint, "fsdp", 8)
    for name in ("parameters", "optimizer"):
        assert getattr(sharded, name) <= getattr(one, name) / 8 * 1.1
    assert sharded.allocated < one.allocated / 2


def test_9_the_buckets_of_replicas_are_added() -> None:
    footprint = gpt()
    assert planned(footprint, "single", 1).communication == 0
    replica = planned(footprint, "ddp", 2)
    assert footprint.gradient_bytes <= replica.communication + replica.gradients <= 2.1 * footprint.gradient_bytes


# -- 2 and 3: optimizers --------------------------------------------------------------------------------------------------------------


def test_2_foreach_takes_a_temporary_of_all_parameters() -> None:
    batch = next(iter(DataLoader(tokens(), 2)))
    scratch = {}
    for foreach in (None, False):
        module = Module(GPT(), optimizer=lambda parameters, rate, choice=foreach: torch.optim.AdamW(parameters, rate, foreach=choice))
        footprint = trace(module, None, batch, target="cuda")
        scratch[foreach] = max(moment.fixed_bytes for moment in footprint.moments if moment.phase == "optimizer")
    assert scratch[None] >= footprint.parameter_bytes > scratch[False]


def test_3_the_counted_step_finds_the_optimizer_with_its_state() -> None:
    footprint = gpt()
    tape = footprint.tape
    assert tape is not None
    events = list(tape)
    first_mark = next(index for index, event in enumerate(events) if event.action == "leave")
    made = sum(event.size_bytes for event in events[:first_mark] if event.kind == "optimizer")
    assert made == footprint.optimizer_bytes > 2 * footprint.parameter_bytes
    assert not any(event.action in ("allocate", "become") and event.kind == "optimizer" for event in events[first_mark:])


# -- 4: libraries that look at what they are given ------------------------------------------------------------------------------------


def test_4_hugging_face_takes_fakes_for_real_tensors() -> None:
    from transformers.utils import import_utils

    mode = fake_mode()
    with mode:
        fake = torch.empty(3)
    assert import_utils.is_fake_tensor(fake)
    with as_if_real(ShadowValues(), "cpu"), mode:
        assert not import_utils.is_fake_tensor(fake)
        assert not import_utils.is_tracing(fake)
    assert import_utils.is_fake_tensor(fake)


# -- 5: values ------------------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([True, False, True, True, False, False])
NUMBERS = torch.tensor([3, 1, 3, 0, 2, 1])
KNOWN: dict[str, Any] = {
    "masked_select": lambda m, n: torch.masked_select(n, m),
    "mask": lambda m, n: n[m],
    "nonzero": lambda m, n: m.nonzero(),
    "where": lambda m, n: torch.where(n > 1)[0],
    "argwhere": lambda m, n: torch.argwhere(n == 3),
    "unique": lambda m, n: torch.unique(n),
    "unique_consecutive": lambda m, n: torch.unique_consecutive(n.sort().values),
    "counts": lambda m, n: torch.unique(n, return_counts=True)[1],
    "bincount": lambda m, n: torch.bincount(n),
    "repeat_interleave": lambda m, n: torch.repeat_interleave(n, n),
    "item": lambda m, n: torch.zeros(int(n.sum()), int(n.max())),
    "tolist": lambda m, n: torch.zeros(n.tolist()[:3]),
    "range": lambda m, n: torch.arange(n[0].item(), n.sum().item()),
    "one_hot": lambda m, n: F.one_hot(n),
    "split": lambda m, n: torch.split(torch.zeros(10), n.tolist())[4],
    "equal": lambda m, n: torch.zeros(2 + torch.equal(n, n)),
    "written": lambda m, n: n.clone().masked_fill_(m, 7).eq(7).nonzero(),
    "assigned": lambda m, n: _assigned(m, n).nonzero(),
    "topk": lambda m, n: torch.zeros(2)[n.topk(2).indices > 0],
}


def _assigned(mask: Tensor, numbers: Tensor) -> Tensor:
    numbers = numbers.clone()
    numbers[mask] = 0
    numbers[1:3] += 1
    return numbers


@pytest.mark.parametrize("name", KNOWN)
def test_5_known_values_give_the_true_shapes_without_a_guess(name: str) -> None:
    mode, shadow = fake_mode(), ShadowValues()
    mask, numbers = fake_copy([MASK, NUMBERS], mode, shadow)
    with as_if_real(shadow, "cpu"), mode, shadow:
        found = KNOWN[name](mask, numbers)
    assert isinstance(found, FakeTensor)
    assert found.shape == KNOWN[name](MASK, NUMBERS).shape
    assert shadow.guesses == {}


def unknown(*shape: int) -> Tensor:
    return torch.empty(shape) * 2


UNKNOWN: dict[str, Any] = {
    "item": lambda: unknown(1).item() == 0,
    "isnan": lambda: not unknown(5000).isnan().any(),
    "isfinite": lambda: bool(unknown(5000).isfinite().all()) and bool(torch.isfinite(unknown(5000).sum())),
    "isinf": lambda: not (unknown(2, 2).isinf() | unknown(2, 2).isnan()).any(),
    "compare": lambda: not unknown(1) > 3 and bool(unknown(1) < 3),
    "mask": lambda: unknown(6, 3)[unknown(6) > 0].shape == (6, 3),
    "nonzero": lambda: (unknown(6, 3) > 0).nonzero().shape == (18, 2),
    "masked_select": lambda: unknown(6, 1).masked_select(unknown(6, 4) > 0).shape == (24,),
    "unique": lambda: [part.shape for part in torch.unique(unknown(7), return_inverse=True)] == [(7,), (7,)],
    "bincount": lambda: torch.bincount(unknown(6).argsort(), minlength=9).shape == (9,),
    "equal": lambda: not torch.equal(unknown(2), unknown(2)),
    "numpy": lambda: unknown(2).numpy().sum() == 0,
    "format": lambda: f"{unknown(1).sum():.1f}" == "0.0",
    "overwritten": lambda: _overwritten().nonzero().shape == (4, 1),
}


def _overwritten() -> Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[1:3] = unknown(2) > 0
    return mask


@pytest.mark.parametrize("name", UNKNOWN)
def test_5_unknown_values_are_guessed_and_told(name: str) -> None:
    mode, shadow = fake_mode(), ShadowValues()
    with as_if_real(shadow, "cpu"), mode, shadow:
        assert UNKNOWN[name]()
    if name != "bincount":  # an argsort is a permutation whatever it sorts
        assert shadow.guesses


@pytest.mark.parametrize("k", [1, 2])
def test_5_routing_is_spread_evenly_over_experts(k: int) -> None:
    mode, shadow = fake_mode(), ShadowValues()
    with mode, shadow:
        chosen = unknown(32, 4).topk(k, dim=-1).indices
        rows = [torch.where(chosen == expert)[0].shape[0] for expert in range(4)]
    assert rows == [32 * k // 4] * 4
    assert shadow.shaped
    with unset_fake_temporarily():
        assert all(len(set(row)) == k for row in shadow.get(chosen).tolist())


class Routed(Classifier):
    """Experts that depend on scores: two of four, on their own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(4))
        self.gate = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).topk(2).indices
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            output = output.index_add(0, rows, checkpoint(expert, x[rows], use_reentrant=False))
        return self.net(output)


def test_5_a_guess_that_shapes_the_step_has_a_margin_in_proportion() -> None:
    batch = [torch.randn(4096, 64), torch.randint(0, 10, (4096,))]
    routed = trace(Routed(), None, batch)
    assert any("spread evenly" in assumption for assumption in routed.assumptions)
    # Crowded into half of the experts, each of them recomputes twice the rows.
    assert 0.05 < routed.margin < 1

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.last = loss.item()
            return loss

    logs = trace(Logs(), None, batch)
    assert any("taken to be zero" in assumption for assumption in logs.assumptions)
    assert logs.margin == 0

    class Grows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            return loss + (self(batch[0].repeat(4, 1)).mean() if loss > 2 else 0)

    assert trace(Grows(), None, batch).margin > 1


# -- 6: copies ------------------------------------------------------------------------------------------------------------------------


def test_6_a_fake_copy_reaches_everything_and_copies_no_storage() -> None:
    module = Module(GPT())
    module.metric = torchmetrics.Accuracy(task="multiclass", num_classes=10)
    module.plain = {"deep": [torch.ones(3)]}
    copied = fake_copy(module, fake_mode(), ShadowValues())
    assert copied.net.head.weight is copied.net.tokens.weight
    assert all(isinstance(parameter, FakeTensor) for parameter in copied.parameters())
    assert all(isinstance(value, FakeTensor) for value in copied.metric._defaults.values())
    assert isinstance(copied.plain["deep"][0], FakeTensor)
    for tensor in (module.plain["deep"][0], *module.parameters(), *module.metric._defaults.values()):
        assert not isinstance(tensor, FakeTensor)


class Follows(nn.Module):
    """A module whose ``__new__`` wants its argument, as ema_pytorch's: copy and pickle call it without."""

    def __new__(cls, net: nn.Module) -> Follows:
        return super().__new__(cls)

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def test_6_a_class_whose_new_wants_arguments_is_copied() -> None:
    module = Module(nn.Linear(2, 2))
    module.follows = Follows(module.net)
    copied = fake_copy(module, None, None)
    assert type(copied.follows) is Follows
    assert copied.follows.net is copied.net
    assert copied.net is not module.net
    assert torch.equal(copied.net.weight, module.net.weight)


def test_6_modules_are_moved_and_cast_on_fakes() -> None:
    mode, shadow = fake_mode(), ShadowValues()
    copied = fake_copy(Module(GPT()), mode, shadow).net
    with as_if_real(shadow, "cpu"), mode, shadow:
        assert copied.to(torch.bfloat16).head.weight.dtype is torch.bfloat16
        assert copied.cuda().half().norm.weight.dtype is torch.float16
        with torch.device("meta"):
            late = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            late[1].weight = late[0].weight
        late.to_empty(device="cpu")
    assert late[1].weight is late[0].weight
    assert late[0].weight.device.type == "cpu"
    assert copied.head.weight is copied.tokens.weight


def test_6_functions_that_lead_back_to_the_module_lead_to_the_copy() -> None:
    class Collects(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Tensor] = []
            self.net[1].register_forward_hook(lambda module, args, output: self.outputs.append(output.detach()))

    module = Collects()
    assert trace(module, None, [torch.randn(8, 64), torch.arange(8)]).traced
    assert module.outputs == []
    assert all(parameter.grad is None for parameter in module.parameters())


# -- 7: in backward -------------------------------------------------------------------------------------------------------------------


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.numpy().shape == gradient.shape
        assert f"{gradient.sum():.2f}" == "0.00"
        return gradient if not gradient.isnan().any() else gradient.nan_to_num()


def test_7_what_is_replaced_holds_within_backward() -> None:
    class Backward(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return Reads.apply(self.net(x))

    footprint = trace(Backward(), None, [torch.randn(64, 64), torch.randint(0, 10, (64,))])
    assert footprint.traced, footprint.assumptions


def test_7_recomputed_attention_takes_the_gpus_kernel_in_backward() -> None:
    class Recomputed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.net[:2](batch[0]).view(1, 1024, 4, 64).transpose(1, 2)
            attended = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
            return self.net[2:](attended.transpose(1, 2).reshape(1024, 256)).mean()

    footprint = trace(Recomputed(), None, [torch.randn(1024, 64)], target="cuda", precision="bf16-true")
    assert footprint.traced, footprint.assumptions
    scores_bytes = 4 * 1024 * 1024 * 2
    assert max(event.size_bytes for event in footprint.tape) < scores_bytes  # no matrix of scores at any time


# -- 8: storages that shrink ----------------------------------------------------------------------------------------------------------


def test_8_a_storage_that_is_resized_is_followed() -> None:
    class Shrinks(Classifier):
        def __init__(self, shrink: bool) -> None:
            super().__init__()
            self.shrink = shrink

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first = torch.empty(1 << 20)
            if self.shrink:
                first.untyped_storage().resize_(0)
            second = torch.empty(1 << 20)
            return self.loss(batch) + 0 * len((first, second))

    batch = [torch.randn(64, 64), torch.randint(0, 10, (64,))]
    kept, shrunk = (peak_bytes(trace(Shrinks(shrink), None, batch)) for shrink in (False, True))
    assert kept - shrunk == 4 << 20


# -- 10: modules without storages -----------------------------------------------------------------------------------------------------


def test_10_parameters_on_meta_are_told_apart() -> None:
    with torch.device("meta"):
        module = Module(nn.Sequential(nn.Linear(128, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.Linear(1000, 10)))
    footprint = trace(module, None, next(iter(DataLoader(vectors(), 8))))
    assert footprint.parameters == sum(parameter.numel() for parameter in module.parameters()) == 129_000 + 1_001_000 + 10_010
    assert footprint.parameter_bytes == 4 * footprint.parameters
    assert all(parameter.is_meta for parameter in module.parameters())


# -- 11 to 15: kernels ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_11_cudnns_reserve_is_counted(kind: str) -> None:
    footprint = trace(Recurrent(kind), None, sequences(), target="cuda")
    assert footprint.traced, footprint.assumptions
    gates = {"LSTM": 4, "GRU": 3}[kind]
    assert footprint.activation_bytes > 2 * gates * 16 * 16 * 64 * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_12_compiled_modules_are_traced_as_they_are_written() -> None:
    batch = next(iter(DataLoader(vectors(), 64)))
    torch.manual_seed(0)
    plain, compiled = Module(mlp()), Module(mlp())
    compiled.net = torch.compile(compiled.net)
    found = trace(compiled, None, batch)
    assert found.traced, found.assumptions
    assert peak_bytes(found) == peak_bytes(trace(plain, None, batch))
    assert torch.compile.__module__ == "torch"


@torch.library.custom_op("autopar_pitfalls::unknown", mutates_args=())
def unknown_op(x: Tensor) -> Tensor:
    return x.clone()


def test_13_an_operation_without_a_fake_is_run_or_guessed_and_told() -> None:
    class Uses(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(unknown_op(x))

    footprint = trace(Uses(), None, [torch.randn(64, 64), torch.randint(0, 10, (64,))])
    assert not footprint.traced
    assert footprint.margin > 0
    assert "autopar_pitfalls" in footprint.assumptions[0] or "unknown" in footprint.assumptions[0]


def test_14_autocast_for_gpus_acts_without_one() -> None:
    class Cast(Classifier):
        def __init__(self, enabled: bool) -> None:
            super().__init__()
            self.enabled = enabled

        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.autocast("cuda", torch.bfloat16, enabled=self.enabled):
                    return self.net(x)

    batch = [torch.randn(4096, 64), torch.randint(0, 10, (4096,))]
    half, full = (trace(Cast(enabled), None, batch, target="cuda") for enabled in (True, False))
    assert half.activation_bytes < 0.8 * full.activation_bytes


def test_15_dropout_keeps_a_byte_an_element_on_a_gpu() -> None:
    module = Classifier(nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 10)))
    batch = [torch.randn(128, 64), torch.randint(0, 10, (128,))]
    cpu, cuda = trace(module, None, batch), trace(module, None, batch, target="cuda")
    assert cpu.activation_bytes - cuda.activation_bytes == pytest.approx(3 * 128 * 256, rel=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_15_checkpointing_empties_forwards_end(reentrant: bool) -> None:
    class Recomputed(Classifier):
        def __init__(self, recompute: bool) -> None:
            super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))))
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_(True)
            for part in self.net:
                x = checkpoint(part, x, use_reentrant=reentrant) if self.recompute else part(x)
            return x

    batch = [torch.randn(1024, 64), torch.randint(0, 10, (1024,))]
    plain, recomputed = (trace(Recomputed(recompute), None, batch) for recompute in (False, True))
    assert recomputed.traced, recomputed.assumptions
    assert recomputed.activation_bytes < plain.activation_bytes / 2
    if reentrant:
        assert peak_bytes(recomputed) == pytest.approx(real_peak_bytes(Recomputed(True), Copies(batch)), rel=0.02)


# -- a LightningModule's own ----------------------------------------------------------------------------------------------------------


class Watched(Classifier):
    """Notes what it sees of its surroundings."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(device=self.device, logger=self.logger, step=self.global_step, training=self.trainer.training)
        self.trainer.should_stop = True
        self.trainer.fit_loop = None
        self.log("x", 1.0)
        return self.loss(batch)


def test_a_modules_trainer_is_read_only_and_its_logger_silent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, module = make_trainer(), Watched()
    before = dict(vars(trainer))
    state = copy.deepcopy(trainer.callback_metrics)
    assert trace(module, trainer, [torch.randn(8, 64), torch.arange(8)]).traced
    assert Watched.seen == {"device": torch.device("cpu"), "logger": None, "step": 0, "training": True}
    assert vars(trainer) == before
    assert trainer.callback_metrics == state
    assert not trainer.should_stop
    assert isinstance(module, LightningModule)
    assert module._trainer is None
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_is_not_there_is_missed_as_in_the_run() -> None:
    class Asks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.experiment.add_scalar("x", 1.0)
            return self.loss(batch)

    footprint = trace(Asks(), make_trainer(), [torch.randn(8, 64), torch.arange(8)])
    assert not footprint.traced
    assert "AttributeError" in footprint.assumptions[0]
