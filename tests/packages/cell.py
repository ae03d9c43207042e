"""A model under one plan after another, each in a process of its own, held against plain Lightning's run in one more.

    python -m tests.packages.cell MODEL RESULTS cpu|gpu PLAN...

The model's package is imported once: each run is a fork of this process, which has trained nothing.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy

from lightning_autopar.devices.discover import probe
from tests.conformance.devices import CPUS, GPUS, Devices, composed_attention
from tests.conformance.harness import SEED, Run, left_behind
from tests.conformance.recording import FileLogger, Recorder
from tests.conformance.verdict import keep, sentence
from tests.nullgpu.control import on_stub
from tests.packages.judge import Ended, Finding, judge, missing_on_the_stub
from tests.packages.member import Member
from tests.packages.plans import Cell, engine, strategy
from tests.packages.zoo import MEMBERS, PACKAGES

#: Seconds that a run may take, which is many times what it takes alone.
LIMIT = 400
PLAIN = "plain"
SINGLE = "32-true"
#: Ways to train in double precision: with all that is built in it, which every engine runs; and with batches changed as well, where a
#: package makes its own in single precision.
DOUBLE = ("float64", "64-true")
#: How often plain Lightning's run is repeated with other roundings.
ROUNDED = 3


def main(name: str, results: str, accelerator: str, *plans: str) -> None:
    member = MEMBERS[name]
    devices = GPUS if accelerator == "gpu" else CPUS
    gpus = f"{'stub ' if on_stub() else ''}{probe(accelerator='cuda').devices[0].name}" if devices is GPUS else ""
    importlib.import_module(PACKAGES[member.package])
    for plan, finding in findings(member, plans, devices):
        finding = replace(finding, gpus=gpus)
        keep(Cell(member=name, plan=plan).id, finding, Path(results))


def findings(member: Member, plans: Sequence[str], devices: Devices = CPUS) -> Iterator[tuple[str, Finding]]:
    """What the model comes to under each plan, told on the way.

    Raises:
        SystemExit: if plain Lightning doesn't train it.
    """
    name = member.name
    with TemporaryDirectory(prefix=f"packages-{name}-") as folder:
        root, run = Path(folder), partial(_run, devices)

        @cache
        def rounded() -> list[Run]:
            others = (run(member, PLAIN, root / f"{PLAIN}-{seed}", rounding=seed).run for seed in range(1, ROUNDED + 1))
            return [other for other in others if other is not None]

        plain = run(member, PLAIN, root / PLAIN)
        if plain.run is None and on_stub() and (missing := missing_on_the_stub(plain.error)):
            print(f"{name}: not on the stub: {missing}", flush=True)
            yield from ((plan, Finding(outcome="not on the stub", reason=missing)) for plan in plans)
            return
        if plain.run is None:
            raise SystemExit(f"plain Lightning doesn't train {name}:\n{plain.error}")
        exact: dict[str, Ended] = {}
        noisy: dict[str, Run] = {}
        for plan in plans:
            ended = run(member, plan, root / plan)
            finding = judge(plain.run, ended, plan)
            # Is it single precision's noise? In double precision there is none.
            for way in DOUBLE if finding.outcome == "differs" else ():
                if way not in exact:
                    exact[way] = run(member, PLAIN, root / f"{PLAIN}-{way}", precision=way)
                if (reference := exact[way].run) is not None:
                    finding = finding.in_double(judge(reference, run(member, plan, root / f"{plan}-{way}", precision=way), plan))
                if finding.double:
                    noisy[plan] = ended.run  # type: ignore[assignment]
                    break
            finding = finding.like_another(ended, noisy)
            if finding.outcome == "differs" and "in float64 differs" not in finding.reason:
                finding = finding.as_rounded(plain.run, ended, rounded())
            print(
                f"{name} {plan} {ended.seconds:.0f} s: {finding.outcome} {finding.difference} {finding.where} {finding.reason}", flush=True
            )
            if finding.outcome in ("differs", "crashed"):
                print("    " + (ended.error or "\n".join(finding.beyond)).replace("\n", "\n    ")[-4000:], flush=True)
            yield plan, finding


def _run(devices: Devices, member: Member, plan: str, root: Path, *, precision: str = SINGLE, rounding: int = 0) -> Ended:
    """The model's run in a fork of this process, which ends with all that it started when its time is over."""
    root.mkdir()
    begun = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        _in_child(lambda: _train(devices, member, plan, root, precision, rounding), root)
    try:
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() - begun > LIMIT:
                return Ended(error=f"no end after {LIMIT} seconds\n{_log(root)}")
            time.sleep(0.05)
    finally:
        _end(child)
    saved = root / "ended.pt"
    ended: Ended = (
        torch.load(saved, map_location="cpu", weights_only=False) if saved.exists() else Ended(error=f"the process died\n{_log(root)}")
    )
    ended.seconds = time.monotonic() - begun
    return ended


def _end(child: int) -> None:
    """Whatever is left of the child's session."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _log(root: Path) -> str:
    return (root / "log").read_text(encoding="utf-8", errors="replace")[-3000:]


def _in_child(train: Callable[[], Ended], root: Path) -> None:
    """Train, leave what came of it in a file, and be gone."""
    with (root / "log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        torch.save(train(), root / "ended.pt")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def watched(rounding: int = 0) -> Iterator[list[Any]]:
    """The Trainers whose ``fit`` is called meanwhile, each with its module: some packages keep theirs to themselves."""
    fitted: list[Any] = []
    fit = pl.Trainer.fit

    def watching(self: pl.Trainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        fitted.append((self, model))
        if rounding:
            round_otherwise(model, rounding)
        return fit(self, model, *args, **kwargs)

    pl.Trainer.fit = watching  # type: ignore[method-assign]
    try:
        yield fitted
    finally:
        pl.Trainer.fit = fit  # type: ignore[method-assign]


def round_otherwise(module: torch.nn.Module, seed: int) -> None:
    """Put every weight off by one rounding, up or down, and from now on every gradient as well; no other draw changes."""
    draw = torch.Generator().manual_seed(seed)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=draw, dtype=torch.int8) * 2 - 1
        return tensor * (1 + signs.to(tensor.device) * torch.finfo(tensor.dtype).eps)

    for parameter in module.parameters():
        if parameter.is_floating_point() and not is_lazy(parameter):
            parameter.data.copy_(rounded(parameter.data))
            if parameter.requires_grad:
                parameter.register_hook(rounded)


def _train(devices: Devices, member: Member, plan: str, root: Path, precision: str, rounding: int) -> Ended:
    writes = root / "run"
    writes.mkdir()
    os.chdir(writes)
    if devices is GPUS:
        composed_attention()
    options = {
        "strategy": "auto" if plan == PLAIN else strategy(plan, devices)(),
        "accelerator": devices.accelerator,
        **({"devices": 1} if plan == PLAIN else {"devices": "auto", **devices.trainer(2)}),
        "precision": SINGLE if precision == "float64" else precision,
        "logger": FileLogger(writes / "rows.jsonl"),
        "callbacks": [Recorder(writes)],
        "log_every_n_steps": 1,
        "default_root_dir": str(writes),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if precision in DOUBLE:
        torch.set_default_dtype(torch.float64)
    pl.seed_everything(SEED, verbose=False)
    with warnings.catch_warnings(record=True) as caught, watched(rounding) as fitted:
        warnings.simplefilter("always")
        try:
            member.train(options)
        except Exception as error:
            traceback.print_exc()
            began = list(writes.glob("process-*"))
            if isinstance(error, ValueError) and not began and plan != PLAIN:
                return Ended(refused=sentence(error, engine(plan)))
            return Ended(error=traceback.format_exc())
    trainer, module = fitted[-1]
    ran = left_behind(trainer, module, writes, start={}, warnings=[str(warning.message) for warning in caught])
    ran.observed = {name: _bare(value) for name, value in ran.observed.items()} | dict(_optimizers(trainer))
    used, ran.strategy = ran.strategy, None
    if plan == PLAIN:
        return Ended(run=ran)
    notes = used.report.best_candidate.notes
    return Ended(run=ran, engine=used.plan.engine, title=used.plan.title(), world_size=used.plan.world_size, notes=notes)


def _bare(value: Any) -> Any:
    """A logged number of a tensor's subclass, such as MONAI's, is compared as a number."""
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) else value


def _optimizers(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What every optimizer has of every parameter; of none, Lightning has one without a state."""
    for index, optimizer in enumerate(trainer.optimizers):
        for parameter, state in optimizer.state_dict().get("state", {}).items():
            yield from ((f"optimizer.{index}.{parameter}.{key}", value) for key, value in state.items())


if __name__ == "__main__":
    main(*sys.argv[1:])
