from __future__ import annotations

import copy
import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_autopar.strategies.base.host_optimizers import on_host
from lightning_autopar.strategies.zero import optimizer_on_disk as disk_states
from lightning_autopar.strategies.zero.optimizer_on_disk import DiskStates, disk_folder, no_disk
from tests.strategies.base.test_host_optimizers import CASES, groups, parameters, tensors, train
from tests.strategies.fitted import Fitted, fit, numbers, plan

PAGE = os.sysconf("SC_PAGESIZE")
_open: list[DiskStates] = []


@pytest.fixture(autouse=True)
def every_state_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_states, "SMALL_BYTES", 200)
    monkeypatch.setattr(disk_states, "_PIECE_ELEMENTS", PAGE // 4)
    yield
    while _open:
        _open.pop().close()


def on_disk(optimizer: Optimizer, folder: Path) -> DiskStates:
    _open.append(DiskStates(optimizer, folder))
    return _open[-1]


def in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is mapped from a file of ours, by the kernel's word."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return name.endswith("(deleted)")
    return False


def hosted(kind: type[Optimizer], folder: Path, **options: Any) -> tuple[list[nn.Parameter], Optimizer, DiskStates]:
    weights = parameters()
    optimizer = on_host(kind(groups(weights, kind), **options))
    return weights, optimizer, on_disk(optimizer, folder)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value))
def test_states_on_disk_change_nothing(kind: type[Optimizer], options: dict[str, Any], tmp_path: Path) -> None:
    options = {"lr": 0.01} | options
    plain = parameters()
    expected = kind(groups(plain, kind), **copy.deepcopy(options))
    weights, optimizer, disk = hosted(kind, tmp_path, **copy.deepcopy(options))
    shared = optimizer.param_groups
    train(plain, expected)
    train(weights, optimizer)

    for weight, other in zip(plain, weights, strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(tensors(optimizer.state[other]), tensors(expected.state[weight]), strict=True):
            assert in_file(mine) == (mine.nbytes >= 200)
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    assert optimizer.param_groups is shared
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    states = (tensor.nbytes for weight in weights for tensor in tensors(optimizer.state[weight]))
    assert disk.size_bytes == sum(-(-size // PAGE) * PAGE for size in states if size >= 200)  # each once, though stepped twelve times
    assert not list(tmp_path.iterdir())  # the file has no name: nothing stays, however the process ends


def test_loaded_states_go_to_the_disk(tmp_path: Path) -> None:
    weights, optimizer, disk = hosted(AdamW, tmp_path)
    train(weights, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    values = [weight.detach().clone() for weight in weights]
    train(weights, optimizer)
    size = disk.size_bytes
    expected = [weight.detach().clone() for weight in weights]

    optimizer.load_state_dict(kept)
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    assert not in_file(optimizer.state[weights[0]]["exp_avg"])
    for weight in weights:
        disk.settle(weight)
    assert in_file(optimizer.state[weights[0]]["exp_avg"])
    train(weights, optimizer)
    assert disk.size_bytes == size  # in the room that they had before
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, value, rtol=0, atol=0)


def test_states_that_are_loaded_into_the_file_stay_where_they_are(tmp_path: Path) -> None:
    weights, optimizer, disk = hosted(AdamW, tmp_path)
    train(weights, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    others, resumed, taken = hosted(AdamW, tmp_path)
    with torch.no_grad():
        for weight, value in zip(others, weights, strict=True):
            weight.copy_(value)
    loaded = {at: {name: taken.take(value) for name, value in state.items()} for at, state in kept["state"].items()}
    resumed.load_state_dict(kept | {"state": loaded})
    assert in_file(resumed.state[others[0]]["exp_avg"])
    size = taken.size_bytes
    train(weights, optimizer)
    train(others, resumed)
    assert taken.size_bytes == size == disk.size_bytes
    for weight, value in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, value, rtol=0, atol=0)


def test_a_schedule_that_was_there_before_says_nothing(tmp_path: Path) -> None:
    weights = parameters()
    optimizer = SGD(weights, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    on_disk(optimizer, tmp_path)
    weights[0].grad = torch.ones_like(weights[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()


def test_closing_gives_the_optimizer_its_step_back(tmp_path: Path) -> None:
    weights, optimizer, disk = hosted(SGD, tmp_path, lr=0.1, momentum=0.9)
    train(weights, optimizer)
    before = optimizer.state[weights[0]]["momentum_buffer"].clone()
    disk.close()
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weights[0]]["momentum_buffer"], 0.9 * before + 1)


def test_a_failed_step_leaves_the_groups_whole(tmp_path: Path) -> None:
    weights, optimizer, _ = hosted(AdamW, tmp_path)
    shared = optimizer.param_groups
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups is shared
    assert [len(group["params"]) for group in shared] == [2, 2]
    assert set(optimizer.state_dict()["state"]) <= {0}  # what a checkpoint of the failed run takes


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer, _ = hosted(AdamW, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    weights[0].grad = torch.ones_like(weights[0])
    with pytest.raises(RuntimeError, match=r"no room for .* more of the optimizer's state, .*No space left.*AUTOPAR_DISK"):
        optimizer.step()


def test_the_folder_is_the_users_or_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_DISK", raising=False)
    assert disk_folder(tmp_path / "run") == tmp_path / "run"
    monkeypatch.setenv("AUTOPAR_DISK", str(tmp_path / "disk"))
    assert disk_folder(tmp_path / "run") == tmp_path / "disk"


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states, "_SPARE_BYTES", 0)
    assert no_disk(tmp_path / "not" / "yet", 1) is None
    on_disk(SGD(parameters(), lr=0.1), tmp_path / "not" / "yet")
    assert (tmp_path / "not" / "yet").is_dir()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("tmpfs", r"is no disk but memory \(tmpfs\); set AUTOPAR_DISK"), ("nfs4", r"lies behind a network \(nfs4\); set AUTOPAR_DISK")],
)
def test_what_is_no_local_disk_is_refused(kind: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states, "_file_system", lambda _: kind)
    with pytest.raises(ValueError, match=sentence):
        DiskStates(SGD(parameters(), lr=0.1), tmp_path)


def test_the_kernel_says_what_a_file_system_is(tmp_path: Path) -> None:
    assert disk_states._file_system(Path("/proc")) == "proc"
    assert disk_states._file_system(tmp_path)


def test_only_linux_has_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states, "_sync_file_range", None)
    with pytest.raises(ValueError, match="under Linux alone"):
        on_disk(SGD(parameters(), lr=0.1), tmp_path)


def test_what_the_disk_cannot_write_ends_the_run(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="Invalid argument"):
        disk_states._sync(file.fileno(), -1, 1, 7)


def test_room_is_asked_for_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no room on the disk" in (no_disk(tmp_path, 1 << 60) or "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "can't be written to; set AUTOPAR_DISK" in (no_disk(tmp_path, 1) or "")


class Wide(Fitted):
    """Weights of two pieces a rank, with groups of their own, and a schedule."""

    def __init__(self) -> None:
        super().__init__(width=64)

    def configure_optimizers(self) -> Any:
        first, *others = self.net
        rest = [parameter for part in others for parameter in part.parameters()]
        optimizer = AdamW([{"params": rest, "weight_decay": 0.3}, {"params": list(first.parameters()), "betas": (0.5, 0.9)}], lr=3e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Pages(pl.Callback):
    """How many of the optimizer's states lie in a file at the end of each epoch of training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer: Any = trainer.optimizers[0]
        there = sum(in_file(tensor) for state in optimizer.state.values() for tensor in tensors(state))
        (self.folder / f"{trainer.global_rank}-{trainer.current_epoch}").write_text(str(there))


def test_a_run_is_plain_lightnings_from_a_checkpoint_of_it_to_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("AUTOPAR_DISK", str(tmp_path / "disk"))
    begun, more, seen = tmp_path / "begun.ckpt", tmp_path / "more.ckpt", tmp_path / "seen"
    seen.mkdir()
    under = plan("zero", zero_stage=3, offload=("optimizer", "parameters"), optimizer_on_disk=True)
    _, _, trainer = fit(Wide, numbers(), None, max_epochs=1)
    trainer.save_checkpoint(begun)
    ours, our_losses, trainer = fit(Wide, numbers(), under, resume=begun, callbacks=[Pages(seen)], gradient_clip_val=0.5)
    trainer.save_checkpoint(more)
    theirs, their_losses, trainer = fit(Wide, numbers(), None, resume=begun, gradient_clip_val=0.5)

    torch.testing.assert_close(our_losses, their_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    mine, expected = torch.load(more)["optimizer_states"][0], trainer.optimizers[0].state_dict()
    torch.testing.assert_close(mine["state"], expected["state"], rtol=1e-5, atol=1e-5)
    assert mine["param_groups"] == expected["param_groups"]
    assert {path.name for path in seen.iterdir()} == {"0-1", "1-1"}
    assert {path.read_text() for path in seen.iterdir()} == {"8"}  # both moments of a half of each of the four large weights
    assert not list((tmp_path / "disk").iterdir())
