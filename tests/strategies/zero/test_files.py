"""Runs under ZeRO: their files are plain Lightning's, their snapshots everybody's, and a run goes on from any of them elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.state.checkpoint import KEY
from lightning_autopar.state.snapshot import save_snapshot
from lightning_autopar.state.snapshot_folder import is_snapshot
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
from tests.state import test_checkpoint as files
from tests.strategies.fitted import Fitted, _decided, assert_same, numbers, plan

pytest.importorskip("deepspeed")
BOTH = ("optimizer", "parameters")
PLANS = {
    "single": plan("single", ranks=1),
    "fsdp": plan("fsdp", shard=("block.0", "block.2")),
    "zero-1": plan("zero", zero_stage=1),
    "zero-3": plan("zero", zero_stage=3),
    "zero-2 on three, offloaded": plan("zero", ranks=3, zero_stage=2, offload=("optimizer",)),
    "zero-3 on three": plan("zero", ranks=3, zero_stage=3),
    "zero-3 on one, offloaded": plan("zero", ranks=1, zero_stage=3, offload=BOTH),
}


@pytest.fixture(autouse=True, scope="module")
def _deepspeed() -> None:
    """Once, for all processes that are forked."""
    doorway.import_deepspeed("cpu")


class Snapshots(pl.Callback):
    """Saves after the third step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            save_snapshot(trainer, self.root / "snapshot")


class Unlent(pl.Callback):
    """No module has taken what it doesn't use: DeepSpeed would gather that each time."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        lent = {name: len(child._external_params) for name, child in pl_module.named_modules() if getattr(child, "_external_params", None)}
        assert not lent, lent


def fit(name: str, root: Path, *, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """What comes of a run of two epochs without random draws."""
    if name == "plain":
        return outcome(*files.fit("plain", root, module=files.still(), ckpt_path=ckpt_path, **options))
    under = PLANS[name]
    strategy = {"strategy": AutoParallelStrategy(devices=f"{under.world_size}xcpu:1GiB")}
    with pytest.MonkeyPatch.context() as patch, _decided(under, from_snapshot=is_snapshot(ckpt_path)):
        patch.setattr(files, "strategy", lambda _: strategy)
        return outcome(*files.fit(name, root, module=files.still(), ckpt_path=ckpt_path, **options))


def outcome(trainer: Any, net: Any) -> dict[str, Any]:
    """Weights, metrics, and the optimizer's state."""
    state = trainer.optimizers[0].state_dict()["state"]
    assert [id(each) for group in trainer.optimizers[0].param_groups for each in group["params"]] == [
        id(each) for dim in (True, False) for each in net.parameters() if each.requires_grad and (each.dim() > 1) == dim
    ]
    states = {f"state {position} {key}": value for position in sorted(state) for key, value in sorted(state[position].items())}
    return {**files.outcome(trainer, net), **states}


@cache
def expected() -> dict[str, Any]:
    return fit("plain", files.scratch())


@cache
def saved(name: str) -> Path:
    """Files of a run: after some steps, after epochs, the best, weights alone, and a snapshot."""
    root = files.scratch()
    steps = ModelCheckpoint(root, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    epochs = ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    top = ModelCheckpoint(root / "top", filename="{step}", monitor="train_step", every_n_train_steps=2, save_top_k=2)
    only = ModelCheckpoint(root, filename="only", save_weights_only=True, every_n_train_steps=4)
    snapshots = [Snapshots(root), Unlent()] if name != "plain" else []
    files.assert_same(expected(), fit(name, root, callbacks=[steps, epochs, top, only, *snapshots]))
    return root


@pytest.mark.parametrize(
    ("writer", "file", "reader"),
    [
        ("zero-3 on three", "step=3.ckpt", "single"),
        ("zero-3 on three", "step=3.ckpt", "zero-1"),
        ("zero-3 on three", "snapshot", "single"),
        ("zero-3 on three", "snapshot", "zero-2 on three, offloaded"),
        ("zero-2 on three, offloaded", "step=3.ckpt", "zero-3"),
        ("zero-2 on three, offloaded", "snapshot", "fsdp"),
        ("fsdp", "snapshot", "zero-3 on three"),
        ("single", "step=3.ckpt", "zero-3 on one, offloaded"),
    ],
)
def test_a_run_goes_on_under_another_plan(writer: str, file: str, reader: str, tmp_path: Path) -> None:
    files.assert_same(expected(), fit(reader, tmp_path, ckpt_path=saved(writer) / file))


@pytest.mark.parametrize("name", ["zero-3 on three", "zero-2 on three, offloaded"])
def test_a_file_is_built_as_plain_lightnings_is(name: str, tmp_path: Path) -> None:
    plain, ours = (torch.load(saved(each) / "step=3.ckpt", weights_only=True) for each in ("plain", name))
    ours.pop(KEY)
    files.assert_built_alike(plain, ours)


def test_plain_lightning_goes_on_and_takes_the_weights_alone(tmp_path: Path) -> None:
    root = saved("zero-3 on three")
    files.assert_same(expected(), fit("plain", tmp_path, ckpt_path=root / "epoch=0.ckpt"))
    best = sorted(path.name for path in (root / "top").iterdir())
    assert best == sorted(path.name for path in (saved("plain") / "top").iterdir())
    assert len(best) == 2, "of five"
    only = torch.load(root / "only.ckpt", weights_only=True)
    assert "optimizer_states" not in only
    loaded = files.Tied.load_from_checkpoint(root / "only.ckpt")
    assert loaded.head.weight is loaded.embed.weight


class Looking(Fitted):
    """Hooks that look at parameters, change them, and call the module; a step that uses all of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 1e-2 * torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", torch.stack([parameter.detach().norm() for parameter in self.parameters()]).norm())
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.3, 0.3)
            self.net[1][0].weight.data *= 0.99
            self.log("part", self.net[0](batch[0]).mean())

    def on_validation_epoch_end(self) -> None:
        self.log("scale", self.net[0].weight.detach().abs().max() + len(self.net[0].bias))


@pytest.mark.filterwarnings("ignore:autopar. .* is used outside of a step")
@pytest.mark.parametrize(
    "under", [plan("zero", zero_stage=3, offload=("optimizer",)), plan("zero", ranks=1, zero_stage=2, offload=("optimizer",))]
)
def test_hooks_see_and_change_whole_parameters(under: Any) -> None:
    assert_same(Looking, numbers(), under)
