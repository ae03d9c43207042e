"""A child of a clean process for each check, also where this process isn't one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, NothingFits, _clean_process
from lightning_autopar._fork import ChildFailed
from lightning_autopar.strategies.preparation import module_findings
from tests.memory.test_pitfalls import Follows
from tests.processes import lean_path
from tests.strategies.fitted import BLOCKS, QUIET, Fitted, numbers

UNCLEAN = "this process has used a GPU already"


@pytest.fixture(scope="module")
def kept_process() -> Iterator[None]:
    """Ends the one that is kept for checks after this file's tests: each start of one takes seconds."""
    yield
    if _clean_process._process is not None:
        _clean_process._process.end()


@pytest.fixture
def unclean(kept_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can't fork for checks."""
    monkeypatch.setattr(_clean_process, "unforkable", lambda: UNCLEAN)
    monkeypatch.setenv("PYTHONPATH", lean_path())


class Keeping(Fitted):
    """Keeps a parameter besides, and changes it there in its step, which is lost on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.net[0].weight]

    def loss(self, batch: Any) -> torch.Tensor:
        self.kept[0].data.mul_(0.5)
        return super().loss(batch)


class Locked(Fitted):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Locked:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied


class Asks(Fitted):
    """Has its own loader, and its step asks for the trainer: a pickle of a module has none."""

    def train_dataloader(self) -> Any:
        return DataLoader(numbers(), batch_size=8)

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.trainer.max_steps == 1
        return super().loss(batch)


def planned(module: Any, allow: list[str]) -> AutoParallelStrategy:
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", allow=allow, calibrate="off")
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=1, limit_val_batches=0, **QUIET)  # type: ignore[arg-type]
    trainer.fit(module, None if isinstance(module, Asks) else DataLoader(numbers(), batch_size=8))
    return strategy


def test_a_clean_process_forks_the_child_itself() -> None:
    assert _clean_process.run_clean(os.getppid, timeout_seconds=60) == os.getpid()


def test_one_fresh_process_is_kept_for_all_checks(unclean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    parents = {_clean_process.run_clean(os.getppid, timeout_seconds=60) for _ in range(2)}
    assert len(parents) == 1
    assert parents != {os.getpid()}
    assert psutil.Process(parents.pop()).ppid() == os.getpid()
    monkeypatch.setenv("AUTOPAR_DISK", "set after it was started")
    assert _clean_process.run_clean(os.getenv, "AUTOPAR_DISK", timeout_seconds=60) == "set after it was started"


def test_what_fails_there_is_told_and_leaves_the_process_as_it_was(unclean: None) -> None:
    kept = _clean_process.run_clean(os.getppid, timeout_seconds=60)
    with pytest.raises(ChildFailed, match="ValueError: math domain error"):
        _clean_process.run_clean(math.sqrt, -1.0, timeout_seconds=60)
    with pytest.raises(ChildFailed, match="stopped after 1 seconds") as late:
        _clean_process.run_clean(time.sleep, 60, timeout_seconds=1)
    assert late.value.timed_out
    assert _clean_process.run_clean(os.getppid, timeout_seconds=60) == kept


def test_another_is_started_where_it_was_killed(unclean: None) -> None:
    kept = _clean_process.run_clean(os.getppid, timeout_seconds=60)
    os.kill(kept, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(kept)], timeout=20)
    assert _clean_process.run_clean(os.getppid, timeout_seconds=60) != kept


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_step_that_shards_would_change_is_refused_all_the_same(unclean: None) -> None:
    with pytest.raises(NothingFits, match=r"'kept' holds the parameter 'net.0.weight' itself"):
        planned(Keeping(), ["fsdp"])


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("make", [Fitted, Asks])
def test_a_good_one_is_taken(make: Any, unclean: None) -> None:
    module = make()
    module.follows = Follows(torch.nn.Linear(2, 2))
    strategy = planned(module, ["fsdp"])
    assert strategy.plan is not None
    assert strategy.plan.engine == "fsdp"


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_what_cannot_be_brought_there_leaves_the_plans_out_by_a_sentence(unclean: None) -> None:
    strategy = planned(Locked(), ["single", "ddp", "fsdp", "pipeline"])
    assert strategy.plan is not None
    assert strategy.plan.engine == "single"
    assert strategy.report is not None
    assert strategy.report.footprint.traced
    reasons = {candidate.plan.engine: candidate.reason or "" for candidate in strategy.report.candidates}
    for reason in (reasons["ddp"], reasons["fsdp"], reasons["pipeline"]):
        assert f"{UNCLEAN}, and the module, its trainer or its data can't be sent to one that hasn't" in reason
        assert "cannot pickle '_thread.lock' object" in reason
        assert "in a notebook after the kernel was restarted" in reason


def test_what_a_script_defines_travels_by_value(tmp_path: Path) -> None:
    """As in a notebook: nothing of it can be imported."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os
        from lightning_autopar import _clean_process
        _clean_process.unforkable = lambda: "it isn't"
        factor = 3
        class Named:
            value = 7
            def times(self):
                return self.value * factor
        def call(named):
            return named.times(), __name__, os.getppid()
        result, name, parent = _clean_process.run_clean(call, Named(), timeout_seconds=60)
        print(result, name, parent != os.getpid())
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "21 __main__ True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_ends_with_its_process(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, signal
        from lightning_autopar import _clean_process
        _clean_process.unforkable = lambda: "it isn't"
        print(_clean_process.run_clean(os.getppid, timeout_seconds=60), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    kept, until = int(done.stdout), time.monotonic() + 20
    while psutil.pid_exists(kept) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(kept)


def not_brought(*args: Any, **kwargs: Any) -> Any:
    raise _clean_process.CannotTravel("of a lock")


def test_the_step_is_traced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def footprint_of(module: Any) -> Any:
        strategy = AutoParallelStrategy(devices="2xcpu:1GiB", allow=["single"])
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=1, **QUIET)  # type: ignore[arg-type]
        loader = DataLoader(numbers(), batch_size=8)
        trainer.fit(module, loader, loader)
        assert strategy.report is not None
        return strategy.report.footprint

    torch.manual_seed(0)
    module = Fitted()
    expected = footprint_of(module)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    again = Fitted()
    monkeypatch.setattr(module_findings, "run_clean", not_brought)
    found = footprint_of(again)
    assert found.traced
    assert found.moments == expected.moments
    assert found.blocks == expected.blocks
    assert [block.fqn for block in found.blocks] == list(BLOCKS)
    torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())


class Padded(Fitted):
    """Its loss depends on how far a sample is padded, as a model's without a mask does."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(torch.cat([batch, batch.new_full((*batch.shape[:1], 8 - batch.shape[1]), 2.0)], 1)).square().mean()


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:autopar")
def test_padding_is_the_whole_batchs_where_no_copy_could_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that collated its own samples would pad them to another length."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("nothing can be looked at")

    monkeypatch.setattr(module_findings, "_find", refuse)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randn(length, generator=generator) for length in (8, 3, 5, 2, 7, 1, 4, 6)]
    weights = []
    for strategy in ("auto", AutoParallelStrategy(devices="2xcpu:1GiB", allow=["ddp"])):
        torch.manual_seed(0)
        module = Padded()
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, **QUIET)  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(samples, batch_size=4, collate_fn=padded))  # type: ignore[arg-type]
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[1], weights[0])
