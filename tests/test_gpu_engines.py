"""Each engine on several GPUs, to the run's end: processes that end, results that come back, and numbers that are plain Lightning's on one.

NCCL's calls return when they are enqueued, so that what ends too early on GPUs ends well on CPUs, where gloo's return when they are done.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_autopar import AutoParallelStrategy, Plan, engines
from lightning_autopar.devices.discover import probe
from tests.fresh import fresh
from tests.nullgpu.control import on_stub

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import ByteGPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
TOLERANCE = 1e-5


class Gentle(ByteGPT):
    """Under SGD: AdamW makes as large a step of a gradient that is rounding alone as of any other."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class TiedLlama(pl.LightningModule):
    """Of transformers, its output layer being its embedding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 32}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def gpt() -> pl.LightningModule:
    return Gentle(layers=4, width=32, context=16, dropout=0.1)


MODELS: dict[str, tuple[Callable[[], pl.LightningModule], str]] = {"gpt": (gpt, "blocks"), "llama": (TiedLlama, "net.model.layers")}


def plans(model: str) -> dict[str, dict[str, Any]]:
    """By name: what a plan says beside its devices."""
    blocks = tuple(f"{MODELS[model][1]}.{index}" for index in range(4))
    stages = {"engine": "pipeline", "cuts": (blocks[2],), "micro_batches": 2}
    fsdp = {"engine": "fsdp", "reshard_after_forward": True, "shard": blocks}
    return {
        "single": {"engine": "single"},
        "ddp": {"engine": "ddp"},
        "fsdp": fsdp,
        "fsdp offload": {**fsdp, "offload": ("optimizer", "parameters")},
        "pipeline": {**stages, "schedule": "1f1b"},
        "zero-2": {"engine": "zero", "zero_stage": 2},
        "zero-3": {"engine": "zero", "zero_stage": 3},
        "hybrid": {**fsdp, "replicas": 2},
        "pipelines": {**stages, "schedule": "1f1b", "replicas": 2},
        "sharded pipelines": {**stages, "schedule": "1f1b", "replicas": 2, "shard": blocks},
    }


def planned(model: str, name: str) -> Plan:
    devices = tuple(device.id for device in probe(accelerator="cuda").devices)[: gpus(name)]
    return Plan(devices=devices, **plans(model)[name])


def gpus(name: str) -> int:
    return {"single": 1, "hybrid": 4, "pipelines": 4, "sharded pipelines": 4}.get(name, 2)


def fit(model: str, plan: Plan | None = None) -> tuple[pl.Trainer, pl.LightningModule]:
    pl.seed_everything(1)
    module = MODELS[model][0]()
    tokens = torch.randint(0, 256, (44, 17))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    trainer = pl.Trainer(
        accelerator="gpu", devices=1 if plan is None else plan.world_size,
        strategy="auto" if plan is None else AutoParallelStrategy(plan=plan),
        max_epochs=2, max_steps=8, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=22))
    return trainer, module


@cache
def plain(model: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    return fresh(finished, model)


def finished(model: str, name: str | None = None, gathering_seconds: float = 0.0) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The metrics and weights of a run under a plan, by default under plain Lightning. It ends in mid-epoch, after its eighth step.

    Args:
        model: of :data:`MODELS`.
        name: of :func:`plans`.
        gathering_seconds: how long rank 0 takes over each tensor that it gathers.
    """
    gather = DTensor.full_tensor

    def slowly(tensor: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            time.sleep(gathering_seconds)
        return gather(tensor, **options)

    plan = None if name is None else planned(model, name)
    with mock.patch.object(DTensor, "full_tensor", slowly):
        trainer, module = fit(model, plan)
    assert trainer.global_step == 8
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, dict(module.state_dict())


def provide(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have so many GPUs in the processes of this test, at least two."""
    if on_stub():
        monkeypatch.setenv("NULLGPU_DEVICES", str(max(2, count)))
    elif torch.cuda.device_count() < count:
        pytest.skip(f"not compared: needs {count} GPUs")


def assert_plain(model: str, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    provide(gpus(name), monkeypatch)
    expected_metrics, expected_weights = plain(model)
    metrics, weights = fresh(partial(finished, **options), model, name)
    assert metrics == pytest.approx(expected_metrics, abs=TOLERANCE)
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", plans("gpt"))
def test_an_engines_run_is_plain_lightnings(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    assert_plain(model, name, monkeypatch)


def test_a_rank_waits_until_the_weights_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has enqueued its part of all gathers long before rank 0 comes to them."""
    assert_plain("gpt", "fsdp", monkeypatch, gathering_seconds=0.05)


class Counting(Gentle):
    """Notes what its worker has when training begins."""

    def on_train_start(self) -> None:
        self.threads = torch.get_num_threads()
        self.communicators = sum("nccl" in str(backend) for backend, _ in distributed_c10d._world.pg_map.values())


class Clipping(Gentle):
    """Clips by hand and logs the norm, which is a tensor on the GPU; under FSDP2 torch computes it of shards."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 1.0))
        optimizer.step()


def clipped(name: str | None) -> float:
    """The last norm that a run logs."""
    with mock.patch.dict(MODELS, gpt=(lambda: Clipping(layers=4, width=32, context=16), "blocks")):
        trainer, _ = fit("gpt", None if name is None else planned("gpt", name))
    return float(trainer.callback_metrics["norm"])


def test_a_norm_of_shards_is_logged_as_the_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(2, monkeypatch)
    assert fresh(clipped, "fsdp") == pytest.approx(fresh(clipped, None), rel=1e-4)


class Labelled(Tensor):
    """A tensor subclass whose ``new_empty`` takes sizes as a tuple alone, as MONAI's does."""

    def new_empty(self, size: tuple[int, ...], **options: Any) -> Any:  # type: ignore[override]
        return self.as_subclass(Tensor).new_empty(size=size, **options)


class Labelling(Gentle):
    """Logs such a tensor, and a metric of such tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach().as_subclass(Labelled))
        self.log("labelled", loss.detach().as_subclass(Labelled), on_epoch=True)
        self.log("mean", self.mean, on_epoch=True)
        return loss


def labelled(name: str | None) -> dict[str, float]:
    """What such a run logs."""
    with mock.patch.dict(MODELS, gpt=(lambda: Labelling(layers=2, width=32, context=16), "blocks")):
        trainer, _ = fit("gpt", None if name is None else planned("gpt", name))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_values_of_a_tensor_subclass_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(2, monkeypatch)
    assert fresh(labelled, "ddp") == pytest.approx(fresh(labelled, None), abs=TOLERANCE)


class Naming(Gentle):
    """Calls its GPU by its name, as code for one GPU does, and has a stream of its own."""

    def setup(self, stage: str) -> None:
        self.draws = torch.Generator(device="cuda").manual_seed(3)
        self.weights = torch.rand(256, device="cuda", generator=self.draws) + 0.5

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.cuda.synchronize()
        logits = self(batch[0].cuda())
        targets = batch[1].to("cuda")
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            weights = self.weights[targets].flatten() * torch.ones(targets.numel(), device="cuda")
        current.wait_stream(side)
        weights.record_stream(current)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights).mean()


def naming(name: str | None) -> list[Tensor]:
    """The weights after a run."""
    with mock.patch.dict(MODELS, gpt=(lambda: Naming(layers=4, width=32, context=16), "blocks")):
        _, module = fit("gpt", None if name is None else planned("gpt", name))
    return [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_code_that_names_its_gpu_is_tried_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning's trials see no GPU; in a worker "cuda" is its own."""
    provide(2, monkeypatch)
    for ours, plain in zip(fresh(naming, name), fresh(naming, None), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def counted(name: str) -> tuple[int, int]:
    """How many threads and how many of NCCL's communicators a worker has."""
    os.environ.pop("OMP_NUM_THREADS", None)
    with mock.patch.dict(MODELS, gpt=(lambda: Counting(layers=4, width=32, context=16), "blocks")):
        _, module = fit("gpt", planned("gpt", name))
    return module.threads, module.communicators


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp offload", "hybrid", "pipeline", "pipelines"])
def test_a_worker_has_its_share_of_cores_and_the_communicators_that_are_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(gpus(name), monkeypatch)
    cores = len(os.sched_getaffinity(0))
    plan = Plan(devices=tuple(str(index) for index in range(gpus(name))), **plans("gpt")[name])
    assert fresh(counted, name) == (max(1, cores // gpus(name)), len(engines.of(plan).communicators(plan)))
