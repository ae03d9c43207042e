"""Workers that fail, hang, die or are interrupted: what the user sees, and that nothing is left of them."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.worker_exception import WorkerFailed
from lightning_autopar.strategies.processes import worker, worker_supervisor
from lightning_autopar.strategies.processes.worker_supervisor import run_folder
from tests.processes import descendants, left_since
from tests.strategies.modules import HookCounter, Regression, loader, on_rank, trainer, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:autopar. the module asks its trainer for global_rank"),
    pytest.mark.filterwarnings("ignore:.*called without a model"),  # what Lightning says to every OnExceptionCheckpoint
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


class Unwell(ValueError):
    pass


class NeedsTwo(Exception):
    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")
        self.value = value


def _unwell() -> None:
    raise Unwell("rank 1 is unwell")


def _spin() -> None:
    while True:
        pass


def _sleep() -> None:
    while True:
        time.sleep(60)


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Afterwards no process is left, adopted orphans included, nor a file of a run's folder."""
    scratch = Path(tempfile.mkdtemp())  # tmp_path is too long for a socket's name, but must be made before this one
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before, processes = _folders(), descendants()
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    yield
    try:
        assert not left_since(processes)
        assert list(scratch.iterdir()) == []
        assert _folders() <= before
    finally:
        shutil.rmtree(scratch)
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 0)
        _reap()


def _folders() -> set[Path]:
    """Folders in shared memory that this process has open, by their locks."""
    mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()}
    return {path for path in Path("/dev/shm").glob("*autopar-*") if str(path / "in-use") in mine}


def _reap() -> None:
    """Take leave of adopted zombies."""
    for process in psutil.Process().children():
        if process.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(process.pid, 0)


def _fails(
    module: Regression, kind: type[BaseException], folder: Path, *, engine: str = "ddp", **options: Any
) -> tuple[BaseException, Any, HookCounter]:
    """Fit, and expect to fail, whatever hangs for ever; then the trainer must be able to fit again."""
    counter = HookCounter(folder / "hooks")
    run = trainer(engine, folder, callbacks=[counter, *options.pop("callbacks", [])])
    with pytest.raises(kind) as raised:
        run.fit(module, loader(**options), loader())
    assert run.state.status == TrainerStatus.INTERRUPTED
    assert run.state.stage is None
    assert isinstance(run.strategy, AutoParallelStrategy)
    assert counter in run.callbacks
    return raised.value, run, counter


HOOKS = ("training_step", "validation_step", "setup", "on_fit_start")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_workers_exception_is_raised_with_its_traceback(engine: str, hook: str, tmp_path: Path) -> None:
    rank = 1 if hook.endswith("step") else 0
    module = Regression({hook: lambda module, index: os.getpid() != parent and module.global_rank == rank and _in_run() and _unwell()})
    parent = os.getpid()
    error, run, counter = _fails(module, Unwell, tmp_path, engine=engine)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_unwell"
    assert [line for line in counter.lines() if line.startswith(f"{rank} ")] == [f"{rank} 0 Unwell {engine.upper()}Engine"]
    assert len({line[0] for line in counter.lines()}) == len(counter.lines())
    module.at = {}
    module.train()
    run.fit(module, loader(), loader())
    assert run.state.status == TrainerStatus.FINISHED


def _in_run() -> bool:
    """Not while the plan is being made: there the process is a child that has no generation."""
    return "AUTOPAR_RENDEZVOUS_FILE" in os.environ


def test_a_callbacks_exception(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1:
                raise NeedsTwo("x", 3)

    error, _, _ = _fails(Regression(), NeedsTwo, tmp_path, callbacks=[Fails()])
    assert isinstance(error, NeedsTwo)
    assert error.value == 3


@pytest.mark.parametrize("hang", [_spin, _sleep], ids=["spin", "sleep"])
def test_ranks_that_hang_are_ended_with_their_data_loader_workers(hang: Callable[[], None], tmp_path: Path) -> None:
    def step(module: Regression, index: int) -> None:
        on_rank(0, hang, batch_idx=2)(module, index)
        on_rank(1, _unwell, batch_idx=2)(module, index)

    _, run, counter = _fails(Regression({"training_step": step}), Unwell, tmp_path, num_workers=2)
    assert counter.lines() == ["1 2 Unwell DDPEngine"]
    assert run.global_step == 0  # rank 0 could not say how far it was


def test_a_group_that_cant_be_left_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's can't while its work on the device waits for a rank that is gone."""
    monkeypatch.setattr(worker, "abort_process_group", _sleep)
    monkeypatch.setattr(worker, "_ABORT_SECONDS", 0.5)
    module = Regression({"training_step": on_rank(1, _unwell, batch_idx=2)})
    _, _, counter = _fails(module, Unwell, tmp_path)
    assert not [line for line in counter.lines() if line.startswith("1 ")]  # a hook would wait, too


def test_a_worker_that_is_killed_and_doesnt_go_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_supervisor, "_KILL_SECONDS", 0.1)
    monkeypatch.setattr(worker_supervisor._Worker, "look", lambda self: None)  # the system waits in it for a driver
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    pipe, theirs = multiprocessing.Pipe(duplex=False)
    stuck = worker_supervisor._Worker(rank=0, process=process, pipe=pipe)
    os.setpgid(process.pid or 0, process.pid or 0)
    with pytest.warns(UserWarning, match=f"process {process.pid}, the worker of rank 0, was killed but doesn't end"):
        stuck.end()
    process.join()
    theirs.close()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 on cpu:1 ended without a word: killed by SIGKILL"),
        (lambda: os._exit(3), "rank 1 on cpu:1 ended without a word: exit code 3"),
    ],
    ids=["sigkill", "exit"],
)
def test_a_worker_that_dies_is_named(action: Callable[[], None], words: str, tmp_path: Path) -> None:
    module = Regression({"training_step": on_rank(1, action, batch_idx=2)})
    error, _, _ = _fails(module, WorkerFailed, tmp_path, num_workers=2)
    assert words in str(error)


def _crash_once_gone(pid_file: Path, number: int) -> None:
    """End by a signal as soon as the process that the file names has ended."""
    pid = int(pid_file.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(1e-4)
    faulthandler.disable()  # pytest's, which reads other threads' stacks while they run, and may crash in another way at that
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_who_dies_first_is_named_and_whoever_crashes_of_it_as_a_consequence(number: int, tmp_path: Path) -> None:
    def step(module: Regression, index: int) -> None:
        if module.global_rank == 1 and index == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
        if index == 2 and _in_run():
            if module.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _crash_once_gone(tmp_path / "pid", number)

    error, _, _ = _fails(Regression({"training_step": step}), WorkerFailed, tmp_path)
    assert str(error).startswith("the worker of rank 1 on cpu:1 ended without a word: killed by SIGKILL")
    assert f"; rank 0 on cpu:0 ended after that: killed by {signal.Signals(number).name}" in str(error)


def test_an_exception_that_follows_a_death_is_its_cause_in_the_report_and_not_the_runs_end(tmp_path: Path) -> None:
    def step(module: Regression, index: int) -> None:
        if index == 2 and _in_run():
            if module.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)
            _unwell()  # in words that nobody knows as those of a lost peer

    error, _, _ = _fails(Regression({"training_step": step}), WorkerFailed, tmp_path)
    assert str(error).startswith("the worker of rank 1 on cpu:1 ended without a word: killed by SIGKILL")
    assert re.search(r"; rank 0 on cpu:0 failed in _unwell \(test_worker_supervisor.py:\d+\)$", str(error))
    assert isinstance(error.__cause__, Unwell)


@pytest.mark.parametrize("engine", ["plain", "ddp"])
def test_system_exit_and_the_users_own_interrupt(engine: str, tmp_path: Path) -> None:
    def leave(kind: type[BaseException], *args: int) -> Callable[[Regression, int], None]:
        def act(module: Regression, index: int) -> None:
            if index == 2 and (engine == "plain" or torch.distributed.group.WORLD is not None):
                raise kind(*args)

        return act

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as raised:
        trainer(engine, tmp_path, callbacks=[HookCounter(tmp_path / "hooks")]).fit(
            Regression({"training_step": leave(SystemExit, 4)}), loader(), loader()
        )
    assert raised.value.code == 4
    with pytest.raises(SystemExit) as raised:  # Lightning makes that of a KeyboardInterrupt
        trainer(engine, tmp_path, callbacks=[HookCounter(tmp_path / "hooks")]).fit(
            Regression({"training_step": leave(KeyboardInterrupt)}), loader(), loader()
        )
    assert raised.value.code == 1
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert [line.split()[1:3] for line in HookCounter(tmp_path / "hooks").lines() if line.startswith("0")] == [
        ["2", "KeyboardInterrupt"],
        ["2", "SystemExit"],
    ]


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero", "pipeline"])
def test_the_state_of_a_failed_run_is_here_afterwards(engine: str, tmp_path: Path) -> None:
    """As after plain Lightning: weights and counters of the step before, and a second fit goes on as Lightning's does."""
    found = {}
    for name in ("plain", engine):
        torch.manual_seed(1)
        module = Regression()

        def act(module: Regression, index: int, name: str = name) -> None:
            if index == 2 and (name == "plain" or _in_run()):
                _unwell()

        module.at = {"training_step": act}
        run = trainer(name, tmp_path)
        with pytest.raises(Unwell):
            run.fit(module, loader(), loader())
        first = run.global_step, run.current_epoch, weights(module)
        module.at = {}
        run.fit(module, loader(), loader())
        found[name] = *first, run.global_step, run.current_epoch, weights(module)
    assert found[engine][:2] == found["plain"][:2] == (2, 0)
    torch.testing.assert_close(found[engine][2], found["plain"][2], rtol=0, atol=1e-5)
    assert found[engine][3:5] == found["plain"][3:5]
    torch.testing.assert_close(found[engine][5], found["plain"][5], rtol=0, atol=1e-5)


# -- interruptions -----------------------------------------------------------------------------------------------------------------------


def _script(engine: str, folder: Path) -> None:
    """A user's script, in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    script = os.getpid()

    def step(module: Regression, index: int) -> None:
        if torch.distributed.group.WORLD is not None or os.getpid() == script:
            if index == 5:
                (folder / "ready").write_text("")
            time.sleep(0.01)

    torch.manual_seed(0)
    run = trainer(engine, folder, max_epochs=-1, callbacks=[HookCounter(folder / "hooks"), OnExceptionCheckpoint(folder)])
    run.fit(Regression({"training_step": step}), loader(8000, num_workers=1), loader())


def _interrupt(engine: str, folder: Path, number: int) -> int | None:
    """Run the script, and interrupt it in its sixth step; the exit status of a script that ends, with all that it forked."""
    process = multiprocessing.get_context("fork").Process(target=_script, args=(engine, folder))
    process.start()
    assert process.pid is not None
    while not (folder / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    # Lightning's data loader workers look every five seconds whether their parent is alive; ours to end after a kill are the ranks.
    family = psutil.Process(process.pid).children(recursive=number != signal.SIGKILL)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    psutil.wait_procs(family)
    process.join()
    return process.exitcode


def test_a_checkpoint_that_no_hook_can_write_after_an_exception_is_told_of(tmp_path: Path) -> None:
    """Ranks that have a part of the weights each, one of which fails alone."""
    told = logging.FileHandler(tmp_path / "told")
    logging.getLogger(worker.__name__).addHandler(told)

    def fail() -> None:
        raise ArithmeticError("on this rank alone")

    run = trainer("fsdp", tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ArithmeticError, match="on this rank alone"):
        run.fit(Regression({"training_step": on_rank(0, fail, batch_idx=3)}), loader(), loader())
    assert not list(tmp_path.glob("*.ckpt"))
    logging.getLogger(worker.__name__).removeHandler(told)
    told.close()
    said = (tmp_path / "told").read_text()
    assert said.count("a hook for the run's exception failed: ") == 1
    assert said.endswith("not all of them have raised the run's exception, so that no checkpoint can be written\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_an_interruption_ends_all_ranks_at_the_same_batch(engine: str, number: int, tmp_path: Path) -> None:
    status = _interrupt(engine, tmp_path, number)
    assert status == {signal.SIGINT: 1, signal.SIGTERM: 0}[signal.Signals(number)]  # plain Lightning's; see the next test
    name = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "SIGTERMException"}[signal.Signals(number)]
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    step = saved["global_step"]
    assert step >= 5
    ranks = range(1 if engine == "single" else 2)
    assert HookCounter(tmp_path / "hooks").lines() == [
        f"{rank} {step} {name} {'Single' if engine == 'single' else engine.upper()}Engine" for rank in ranks
    ]
    torch.manual_seed(0)
    expected = Regression()
    trainer("plain", tmp_path, max_steps=step).fit(expected, loader(8000), loader())
    found = Regression()
    found.load_state_dict(saved["state_dict"])
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_plain_lightnings_exit_status(number: int, tmp_path: Path) -> None:
    status = _interrupt("plain", tmp_path, number)
    assert status == {signal.SIGINT: 1, signal.SIGTERM: 0}[signal.Signals(number)]


def test_workers_die_with_a_killed_parent_and_the_next_run_removes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_usage", lambda path: type("Full", (), {"free": 0})())  # so that its folder isn't in shared memory
    processes = descendants()
    _interrupt("ddp", tmp_path, signal.SIGKILL)
    assert not left_since(processes)  # its data loader workers
    scratch = Path(tempfile.gettempdir())
    assert len(list(scratch.glob("autopar-*"))) == 1
    with run_folder(1) as folder:
        assert list(scratch.glob("autopar-*")) == [folder]


def test_a_folder_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_usage", lambda path: type("Full", (), {"free": 0})())
    with run_folder(1) as first, run_folder(1) as second:
        assert first.is_dir()
        assert first != second
    assert not first.exists()


# -- OpenMP ------------------------------------------------------------------------------------------------------------------------------


def _after_openmp(folder: Path) -> None:
    torch.set_num_threads(2)
    torch.randn(600, 600) @ torch.randn(600, 600)
    torch.randn(2_000_000).exp()

    def threads(module: Regression, index: int) -> None:
        torch.set_num_threads(2)
        torch.randn(2_000_000).exp()

    trainer("ddp", folder, max_steps=2).fit(Regression({"training_step": threads}), loader(), loader())
    (folder / "done").write_text("")


def test_workers_with_several_threads_run_after_a_parent_that_used_several(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_after_openmp, args=(tmp_path,))
    process.start()
    process.join()
    assert (tmp_path / "done").exists()
