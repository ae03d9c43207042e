"""A plan as TrainingArguments, and what becomes of a script's own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autopar.huggingface.last_batches import shared_out, weighed
from lightning_autopar.huggingface.relaunch import command_of, environment_of
from lightning_autopar.huggingface.settings import VARIABLE, Batch, Settings, handed_over, told_by, watch_arguments
from lightning_autopar.huggingface.train_calls import _check
from lightning_autopar.plans import Plan

_TWO = ("cuda:0", "cuda:1")


def _settings(plan: Plan, **more: Any) -> Settings:
    told: dict[str, Any] = {"number": 1, "batch": Batch(per_device=8, accumulation=2), "checkpointing": bool(plan.recompute)}
    told |= {"checkpointed": "activation_checkpointing", "layers": ("Layer",), "on_cpu": False, "step_seconds": 0.5, "peak_bytes": 1 << 30}
    return Settings(plan=plan, **{**told, **more})


def test_batches_stay_whatever_the_plan() -> None:
    ddp = _settings(Plan(engine="ddp", devices=_TWO, micro_batches=4))
    assert ddp.fields() == {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert ddp.lines({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2})[1:3] == [
        "  per_device_train_batch_size: 8 → 2",
        "  gradient_accumulation_steps: 2 → 4",
    ]
    assert ddp.lines({})[-1] == "  a step's batch stays: 16 samples = 2 × 2 × 4 (devices × samples of each at once × accumulation)"


def test_fsdp_shards_layers_and_reduces_after_each_part() -> None:
    shards = ("model.layers.0", "model.layers.1")
    plan = Plan(
        engine="fsdp", devices=_TWO, reshard_after_forward=True, shard=shards, recompute=shards, offload=("optimizer", "parameters")
    )
    fields = _settings(plan).fields()
    assert fields["fsdp"] is True
    assert "activation_checkpointing" not in fields
    assert fields["fsdp_config"] == {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["Layer"],
        "cpu_offload": True,
        "activation_checkpointing": True,
    }
    assert not _settings(plan).accumulates_in_shards
    assert _settings(replace(plan, micro_batches=2)).accumulates_in_shards


def test_deepspeed_gets_stage_and_offload_and_leaves_the_rest_to_the_trainer() -> None:
    plan = Plan(engine="zero", devices=_TWO, zero_stage=3, offload=("optimizer", "parameters"), recompute=("model.layers.0",))
    fields = _settings(plan).fields()
    assert fields["activation_checkpointing"] is True
    wanted = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert fields["deepspeed"]["zero_optimization"] == wanted
    assert fields["deepspeed"]["train_batch_size"] == "auto"
    assert "optimizer" not in fields["deepspeed"]


def test_settings_are_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(Plan(engine="ddp", devices=_TWO, reasons=("two",)))
    environment = environment_of(settings, {"PATH": "/bin"})
    assert environment["PATH"] == "/bin"
    assert environment["CUDA_VISIBLE_DEVICES"] == "cuda:0,cuda:1"
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(replace(settings, on_cpu=True), {})
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    assert handed_over() == settings
    assert VARIABLE not in os.environ
    assert handed_over() is None


def test_several_processes_are_started_by_torchs_launcher() -> None:
    words = ["-m", "lightning_autopar", "run", "train.py"]
    assert command_of(_settings(Plan(engine="single", devices=("cpu:0",))), words) == [sys.executable, *words]
    launched = command_of(_settings(Plan(engine="ddp", devices=_TWO)), words)
    assert launched[1:3] == ["-m", "torch.distributed.run"]
    assert launched[-6:] == ["--nproc-per-node", "2", *words]


@dataclass
class _Arguments:
    """As transformers' class, with what is watched of it."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    use_cpu: bool = False
    fp16: bool = False
    fsdp: bool | None = None

    def __post_init__(self) -> None:
        self.made_with = self.use_cpu, self.fp16
        self.accelerator_config = SimpleNamespace(gradient_accumulation_kwargs=None)


def _kind() -> type[_Arguments]:
    """The class, with a ``__post_init__`` that can be replaced."""
    return type("Arguments", (_Arguments,), {"__post_init__": _Arguments.__post_init__})


def test_planning_keeps_off_gpus_and_the_arguments_say_what_the_script_says() -> None:
    kind = _kind()
    stop = watch_arguments(kind, None)
    first, second = kind(fp16=True), kind()
    assert first.made_with == (True, False)
    assert (first.use_cpu, first.fp16) == (False, True)
    assert [told_by(each).number for each in (first, second)] == [0, 1]
    with pytest.raises(ValueError, match="the script sets fsdp=True"):
        kind(fsdp=True)
    stop()
    assert kind(fp16=True).made_with == (False, True)


def test_only_the_arguments_that_were_planned_for_are_set() -> None:
    kind = _kind()
    shards = Plan(engine="fsdp", devices=_TWO, reshard_after_forward=True, micro_batches=2)
    watch_arguments(kind, _settings(shards))
    other, planned = kind(), kind()
    assert (other.per_device_train_batch_size, other.gradient_accumulation_steps, other.fsdp) == (8, 2, None)
    assert (planned.per_device_train_batch_size, planned.gradient_accumulation_steps, planned.fsdp) == (4, 2, True)
    assert planned.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert other.accelerator_config.gradient_accumulation_kwargs is None


def test_arguments_that_differ_from_those_that_were_planned_for_are_refused() -> None:
    kind = _kind()
    watch_arguments(kind, _settings(Plan(engine="single", devices=("cpu:0",)), number=0))
    with pytest.raises(ValueError, match=r"have per_device_train_batch_size=4 .* now, but had 8 and 2 when the plan was made"):
        kind(per_device_train_batch_size=4)


def test_epochs_are_counted_as_the_script_counts_them() -> None:
    """38 samples in parts of 4, three a step, and in parts of 2, six a step."""
    pytest.importorskip("transformers")
    settings = _settings(Plan(engine="single", devices=("cpu:0",), micro_batches=6), number=0, batch=Batch(per_device=4, accumulation=3))
    args = SimpleNamespace(gradient_accumulation_steps=6, per_device_train_batch_size=2, world_size=1, dataloader_drop_last=False)
    callbacks: list[Any] = []
    trainer = SimpleNamespace(args=args, train_dataset=range(38), callback_handler=SimpleNamespace(callbacks=callbacks))
    trainer.accelerator = SimpleNamespace(ddp_handler=None)
    _check(trainer, settings)
    for ours, scripts in ((6 / 19, 0.3), (12 / 19, 0.6), (18 / 19, 0.9), (1, 1), (1 + 6 / 19, 1.3)):
        state = SimpleNamespace(epoch=ours)
        callbacks[0].on_step_end(args, state, None, train_dataloader=range(19))
        assert state.epoch == pytest.approx(scripts)


def _dealt(samples: int, devices: int, per_device: int, accumulation: int = 1) -> list[list[list[int]]]:
    """The batches of each process, by accelerate's own loaders."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, DataLoader

    found = []
    for rank in range(devices):
        batches = BatchSampler(range(samples), per_device, drop_last=False)
        loader = DataLoader(range(samples), batch_sampler=BatchSamplerShard(batches, devices, rank))
        trainer = SimpleNamespace(get_train_dataloader=lambda loader=loader: loader, args=SimpleNamespace())
        trainer.args.gradient_accumulation_steps = accumulation
        shared_out(trainer)
        found.append(list(trainer.get_train_dataloader().batch_sampler))
        assert len(loader) == len(found[-1])
    return found


@pytest.mark.parametrize(("samples", "devices", "per_device"), [(38, 2, 4), (34, 2, 4), (39, 2, 4), (40, 2, 4), (7, 2, 4), (23, 3, 2)])
def test_an_epochs_last_batch_is_shared_out_and_not_filled_up(samples: int, devices: int, per_device: int) -> None:
    """38 samples were 40 on two devices, the last batch with two of the epoch's first."""
    pytest.importorskip("accelerate")
    dealt = _dealt(samples, devices, per_device)
    steps = [sorted(chain(*step)) for step in zip(*dealt, strict=True)]
    assert steps == [list(range(first, min(first + devices * per_device, samples))) for first in range(0, samples, devices * per_device)]


def test_a_last_step_of_several_batches_is_shared_out_among_all_of_them() -> None:
    """Of 21 samples in steps of two devices, two batches and two samples, the last five left one for a last batch of both devices."""
    pytest.importorskip("accelerate")
    assert [rank[-2:] for rank in _dealt(21, 2, 2, accumulation=2)] == [[[16, 17], [19]], [[18], [20]]]


def test_a_last_batch_with_fewer_samples_than_devices_stays_filled_up() -> None:
    pytest.importorskip("accelerate")
    assert _dealt(17, 2, 2, accumulation=2)[1][-1] == [1, 2]
    assert _dealt(33, 2, 4)[1][-1] == [3, 4, 5, 6]


def test_parts_of_an_epochs_last_batch_weigh_by_their_samples(tmp_path: Path) -> None:
    """Seven samples in batches of four: of the last three, transformers counts a part of one as much as one of two."""
    transformers = pytest.importorskip("transformers")

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - target).square().mean()}

    rows = [{"x": torch.full((4,), 0.1 * row), "target": torch.tensor([float(row)])} for row in range(7)]

    def trained(parts: int, *, ours: bool) -> tuple[list[float], list[float]]:
        quiet = {"output_dir": str(tmp_path), "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
        steps = {"num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "epoch", "learning_rate": 0.1, "optim": "sgd"}
        batch = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts}
        args = transformers.TrainingArguments(**quiet, **steps, **batch)
        trainer = transformers.Trainer(model=Linear(), args=args, train_dataset=rows, eval_dataset=rows[:3])
        if ours:
            weighed(trainer)
        trainer.train()
        history = trainer.state.log_history
        return [each[name] for each in history for name in ("loss", "eval_loss") if name in each], trainer.model.layer.weight[0].tolist()

    plain = trained(1, ours=False)
    assert trained(2, ours=False)[1] != pytest.approx(plain[1], rel=1e-3)
    for mine, theirs in zip(trained(2, ours=True), plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
