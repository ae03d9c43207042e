"""What of a replaced strategy is passed on, and what of it is told to be lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import FSDPPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from lightning_autopar.cli.replace_strategy import Replaced, Replacement, Wanted, strategies_replaced
from lightning_autopar.sharing.wait_options import Turn
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.processes.idle_strategy import IdleStrategy


class Own(DDPStrategy):
    """Of the user's."""


def built(make: Any, wanted: Wanted | None = None, **arguments: Any) -> tuple[Trainer, Replacement]:
    found: list[Replacement] = []
    with strategies_replaced(found, wanted or Wanted()):
        strategy: Strategy | str = make if isinstance(make, str) else make()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(strategy=strategy, **{**quiet, **arguments})
    (replacement,) = found
    assert trainer.strategy is replacement.strategy
    return trainer, replacement


def replaced(make: Any, wanted: Wanted | None = None, **arguments: Any) -> Replaced:
    found = built(make, wanted, **arguments)[1].replaced
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("auto", {}),
        ("ddp", {}),
        ("ddp_spawn", {}),
        ("ddp_find_unused_parameters_true", {"find_unused_parameters": "True"}),
        ("fsdp_cpu_offload", {"cpu_offload": "True"}),
        ("deepspeed_stage_2_offload", {"stage": "2", "offload_optimizer": "True"}),
    ],
)
def test_a_name_stands_for_its_settings(name: str, settings: dict[str, str]) -> None:
    found = replaced(name)
    assert (found.name, found.settings) == (name, settings)
    assert set(found.dropped) == set(settings)


def test_what_a_strategy_was_made_with_is_told_each_with_a_reason() -> None:
    found = replaced(
        lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True, timeout=timedelta(minutes=1), limit_all_gathers=True)
    )
    assert set(found.dropped) == {"sharding_strategy", "cpu_offload", "timeout", "limit_all_gathers"}
    assert found.dropped["limit_all_gathers"] == "autopar has no such setting"
    assert str(found).startswith("FSDPStrategy(")
    text = "\n".join(found.lines())
    assert all(f"dropped: {name}=" in text for name in found.dropped)


def test_what_belongs_to_the_run_is_passed_on() -> None:
    files = TorchCheckpointIO()
    trainer, replacement = built(
        lambda: DDPStrategy(checkpoint_io=files, parallel_devices=[torch.device("cpu")] * 2, find_unused_parameters=True),
        accelerator="auto",
    )
    assert trainer.strategy.checkpoint_io is files
    assert trainer.strategy._requested == 2
    assert replacement.replaced is not None
    assert set(replacement.replaced.dropped) == {"find_unused_parameters"}


def test_precision_that_is_a_strategys_own_is_passed_on_by_its_name() -> None:
    trainer, replacement = built(lambda: FSDPStrategy(precision_plugin=FSDPPrecision("bf16-mixed")))
    assert trainer.precision == "bf16-mixed"
    assert replacement.replaced is not None
    assert any("FSDPPrecision gives way to precision='bf16-mixed'" in note for note in replacement.replaced.notes)


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        ("ddp", {"devices": 2}, True),
        ("auto", {"devices": 3}, True),
        (lambda: DDPStrategy(), {"devices": "2"}, True),
        ("ddp", {"devices": 1}, False),
        ("auto", {}, False),
        (lambda: SingleDeviceStrategy(device="cpu"), {"devices": 1}, False),
    ],
)
def test_a_batch_that_was_several_is_told(make: Any, arguments: dict[str, Any], told: bool) -> None:
    assert any("took one" in note for note in replaced(make, **arguments).notes) is told
    assert not any("took one" in note for note in replaced(make, Wanted(options={"batch": "per_device"}), **arguments).notes)


def test_a_class_of_the_users_is_told_to_be_left_out() -> None:
    assert any("its methods aren't called" in note for note in replaced(lambda: Own()).notes)
    assert not any("aren't called" in note for note in replaced(lambda: DDPStrategy()).notes)
    assert any("self.device_mesh" in note for note in replaced(lambda: ModelParallelStrategy(), devices=1).notes)


def test_autopar_itself_is_kept() -> None:
    mine = AutoParallelStrategy(memory_margin=0.25, allow=["ddp"])
    trainer, replacement = built(lambda: mine, Wanted(options={"allow": ["single"], "memory_limit": "1GiB"}))
    assert trainer.strategy is mine
    assert replacement.replaced is None
    assert (mine.settings.allow, mine.settings.memory_limit_bytes, mine.settings.memory_margin) == (("single",), 1 << 30, 0.25)
    assert built("autopar")[1].replaced is None


def test_what_is_said_of_waiting_comes_together() -> None:
    mine = AutoParallelStrategy(wait=Turn(wait="2h", priority=1))
    built(lambda: mine, Wanted(options={"wait": Turn(priority=5)}))
    assert mine.settings.wait == Turn(wait="2h", priority=5)


def test_devices_of_the_command_line_count_more() -> None:
    trainer, _ = built("ddp", Wanted(trainer_devices="2"), devices=1)
    assert trainer.strategy._requested == "2"
    trainer, _ = built("ddp", Wanted(devices="3xcpu:1GiB"), accelerator="gpu", devices=8, num_nodes=4)
    assert len(trainer.strategy.inventory()[0].devices) == 3


def test_a_measurements_own_trainer_keeps_its_strategy() -> None:
    """``lightning-autopar plan`` measures the machine where nobody has yet."""
    found: list[Replacement] = []
    strategy = IdleStrategy()
    with strategies_replaced(found, Wanted()):
        trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert trainer.strategy is strategy
    assert not found
