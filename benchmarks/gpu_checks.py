"""What one GPU shows first: do fits end and come back, do the caps hold, do the commands run, where do a step's seconds go.

    python3 benchmarks/gpu_checks.py fits --json OUT [--seconds 120]
    python3 benchmarks/gpu_checks.py workers --json OUT     # those whose processes are other than the script's, and must come back
    python3 benchmarks/gpu_checks.py caps --json OUT
    python3 benchmarks/gpu_checks.py commands --json OUT    # where the package is installed
    python3 benchmarks/gpu_checks.py seconds --json OUT

Each check runs in a fresh process under a time limit of its own, so that one that hangs or crashes is a result, and costs no other. Plain
Lightning on the same GPU is what fits are compared with. Needs torch, lightning, transformers, peft and the package.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
# Nothing of earlier runs counts, and nobody else is told of these.
os.environ.update(AUTOPAR_CACHE="off", AUTOPAR_WAIT="never", HF_HUB_OFFLINE="1")
os.environ.setdefault("AUTOPAR_LEDGER", "off")

_BEGUN = time.monotonic()
GIB = 1 << 30
#: What the runs of a check may differ by: GPUs add up in another order.
_TOLERANCE = 1e-4
#: Steps of a fit; and how many pairs of fits are timed, as far as the time goes.
_STEPS, _TIMED_STEPS = 16, 30
_LEAST_PAIRS, _MOST_PAIRS, _PAIRS_SECONDS = 3, 20, 40.0
_LANGUAGE = ("llama", "llama, large", "lora")
#: A check may take so long, whatever is left for all of them.
_MOST_SECONDS = 90.0
_COMMAND_SECONDS = 70.0
#: What a check's process has in its environment besides. On a stub GPU the CPU would compute what calibration measures, for minutes; no
#: figure of a stub's says how long anything takes. A real GPU doesn't read it.
_ENVIRONMENT = {"calibration": {"NULLGPU_COMPUTE_BYTES": "65536"}}


def _module(kind: str, *, hungry_row_bytes: int = 0) -> Any:
    """A module of these: ``"wide"``, ``"long"`` (each sample 3,072 times, for its activations), ``"conv"``, ``"llama"`` (of transformers),
    ``"llama, large"``, ``"lora"`` (of peft, on the small one).

    Args:
        kind: which.
        hungry_row_bytes: taken besides for each sample, in the middle of the run.
    """
    import lightning.pytorch as pl
    import torch
    from torch import nn

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(kind)
            self.losses: list[Any] = []

        def forward(self, batch: Any) -> Any:
            if kind in _LANGUAGE:
                return self.net(input_ids=batch[0], labels=batch[0]).loss
            if kind == "long":
                return nn.functional.mse_loss(self.net(batch[0][:, None].expand(-1, 3072, -1)).mean(1), batch[1])
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if hungry_row_bytes and self.global_step == _STEPS // 2:
                torch.empty(hungry_row_bytes * len(batch[0]), dtype=torch.uint8, device=self.device)
            loss = self(batch)
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self(batch))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            # AdamW would make as large a step of a gradient that is rounding alone as of any other.
            return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-2, momentum=0.9)

    return Module()


def _net(kind: str) -> Any:
    from torch import nn

    if kind == "conv":
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 3, 3, padding=1))
    if kind in ("wide", "long"):
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = (768, 10) if kind == "llama, large" else (128, 4)
    sizes = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "max_position_embeddings": 64,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False))
    if kind != "lora":
        return llama
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def _data(kind: str, rows: int = 16 * _STEPS) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    draw = torch.Generator().manual_seed(0)
    if kind in _LANGUAGE:
        return DataLoader(TensorDataset(torch.randint(512, (rows, 32), generator=draw)), 16)
    x = torch.randn(rows, *((3, 32, 32) if kind == "conv" else (256,)), generator=draw)
    return DataLoader(TensorDataset(x, x if kind == "conv" else x.sum(1, keepdim=True) / 16), 16)


def _fit(kind: str, strategy: Any, *, steps: int = _STEPS, hungry_row_bytes: int = 0, **options: Any) -> tuple[Any, Any]:
    """(trainer, module) of a run on one GPU."""
    import lightning.pytorch as pl

    pl.seed_everything(1, verbose=False)
    module = _module(kind, hungry_row_bytes=hungry_row_bytes)
    usual = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual |= {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(accelerator="gpu", devices=1, strategy=strategy, max_steps=steps, **{**usual, **options})
    trainer.fit(module, _data(kind, 16 * steps), _data(kind, 64))
    return trainer, module


def _difference(ours: Any, theirs: Any) -> float:
    """The largest of two modules' weights, by the size of the weight."""
    mine, others = ours.state_dict(), theirs.state_dict()
    return max(
        float((mine[name].cpu().float() - other.cpu().float()).abs().max() / (other.cpu().float().abs().max() + 1e-12))
        for name, other in others.items()
        if other.is_floating_point()
    )


def _strategy(**options: Any) -> Any:
    from lightning_autopar import AutoParallelStrategy

    return AutoParallelStrategy(calibrate="off", **options)


def _plan(engine: str = "single", **options: Any) -> Any:
    from lightning_autopar import Plan
    from lightning_autopar.devices.discover import probe

    return Plan(engine=engine, devices=(probe().devices[0].id,), **options)


def _against_plain(kind: str, strategy: Any, **options: Any) -> dict[str, Any]:
    """A fit under autopar beside plain Lightning's: what differs, and predicted beside measured memory."""
    trainer, module = _fit(kind, strategy, **options)  # first, as no worker can be forked once this process has used the GPU
    alike = {name: value for name, value in options.items() if name not in ("callbacks", "hungry_row_bytes")}
    _, plain = _fit(kind, "auto", **alike)
    found: dict[str, Any] = {"difference": _difference(module, plain), "steps": trainer.global_step, "plan": strategy.plan.title()}
    for device, measured in strategy.measured.items():
        held = strategy.report.best_candidate.bytes[device]
        found["memory"] = {
            "predicted": {"allocated": held.allocated, "reserved": held.reserved, "context": held.context},
            "measured": measured,
        }
    found["passed"] = found["difference"] <= _TOLERANCE and trainer.global_step == _STEPS
    return found


# -- do fits end and come back -----------------------------------------------------------------------------------------------------------


def single() -> dict[str, Any]:
    """One device, in the main process."""
    return _against_plain("wide", _strategy())


def half_precision() -> dict[str, Any]:
    """bf16 under autocast."""
    return _against_plain("wide", _strategy(), precision="bf16-mixed")


def micro_batches() -> dict[str, Any]:
    """A batch worked off in four parts."""
    return _against_plain("wide", _strategy(plan=_plan(micro_batches=4)))


def tied_llama() -> dict[str, Any]:
    """A model of transformers with tied weights."""
    return _against_plain("llama", _strategy())


def lora() -> dict[str, Any]:
    """The same with adapters of peft."""
    return _against_plain("lora", _strategy())


def recomputed() -> dict[str, Any]:
    """Activations computed again in the backward, and draws with them."""
    return _against_plain("llama", _strategy(plan=_plan(recompute=tuple(f"net.model.layers.{number}" for number in range(4)))))


def offload() -> dict[str, Any]:
    """FSDP2 on one GPU, with parameters and optimizer in host memory."""
    blocks = tuple(f"net.model.layers.{number}" for number in range(4))
    plan = _plan("fsdp", reshard_after_forward=True, shard=blocks, offload=("optimizer", "parameters"))
    return _against_plain("llama", _strategy(plan=plan))


def averaged() -> dict[str, Any]:
    """The same with the averaging callback that most people copy: a deep copy at the fit's start, which follows the weights."""
    import copy

    import lightning.pytorch as pl
    import torch

    class Average(pl.Callback):
        copy: Any = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.copy = copy.deepcopy(pl_module.net)

        @torch.no_grad()
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for mine, theirs in zip(self.copy.parameters(), pl_module.net.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)

    blocks = tuple(f"net.model.layers.{number}" for number in range(4))
    plan = _plan("fsdp", reshard_after_forward=True, shard=blocks, offload=("optimizer", "parameters"))
    ours, theirs = Average(), Average()
    _, module = _fit("llama", _strategy(plan=plan), callbacks=[ours])
    _, plain = _fit("llama", "auto", callbacks=[theirs])
    difference, of_averages = _difference(module, plain), _difference(ours.copy, theirs.copy)
    return {"difference": difference, "of_averages": of_averages, "passed": max(difference, of_averages) <= _TOLERANCE}


def zero_offload() -> dict[str, Any]:
    """DeepSpeed's ZeRO 3, likewise."""
    return _against_plain("llama", _strategy(plan=_plan("zero", zero_stage=3, offload=("optimizer", "parameters"))))


def asked_for_cuda_first() -> dict[str, Any]:
    """``torch.cuda.is_available()`` before Lightning is imported; then a fit, and a test in the same process."""
    import torch

    assert torch.cuda.is_available()
    trainer, module = _fit("wide", _strategy())
    (value,) = trainer.test(module, _data("wide", 64), verbose=False)
    return {"passed": trainer.global_step == _STEPS, "test": value}


def elastic() -> dict[str, Any]:
    """A worker process on the GPU, from which weights come back."""
    from lightning_autopar import CheckpointMigrate

    return _against_plain("wide", _strategy(), callbacks=[CheckpointMigrate()])


def killed_worker() -> dict[str, Any]:
    """That worker is killed in the middle: another one goes on from the last snapshot, to the same weights."""
    import lightning.pytorch as pl

    from lightning_autopar import CheckpointMigrate

    marker = Path(tempfile.mkdtemp()) / "killed"

    class Killer(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == _STEPS // 2 and os.environ.get("WORLD_SIZE") and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer, module = _fit("wide", _strategy(), callbacks=[CheckpointMigrate(snapshot_seconds=0.1), Killer()])
    _, plain = _fit("wide", "auto")
    difference = _difference(module, plain)
    return {"passed": marker.exists() and trainer.global_step == _STEPS and difference <= _TOLERANCE, "difference": difference}


# -- do the caps hold --------------------------------------------------------------------------------------------------------------------


def _leased(**environment: str) -> None:
    os.environ.update(AUTOPAR_LEDGER=tempfile.mkdtemp(), **environment)


def within_the_lease() -> dict[str, Any]:
    """What the allocator holds of the GPU, beside what the run leased."""
    import torch

    _leased()
    strategy = _strategy()
    trainer, _ = _fit("wide", strategy)
    (device,) = strategy.plan.devices
    leased = strategy.report.best_candidate.needs[device]
    held = torch.cuda.max_memory_reserved()
    return {"passed": trainer.global_step == _STEPS and held <= 1.1 * leased, "held_bytes": held, "leased_bytes": leased}


def beyond_the_lease() -> dict[str, Any]:
    """A step that takes far more than predicted ends in the run's own out-of-memory, although the GPU has that."""
    import torch

    from lightning_autopar.devices.discover import probe

    _leased()
    free_bytes = probe().devices[0].free_bytes
    hungry = min(free_bytes // 2, 16 * GIB)
    try:
        _fit("wide", _strategy(memory_limit=f"{4 * GIB}"), hungry_row_bytes=hungry)
    except torch.OutOfMemoryError as error:
        return {
            "passed": True,
            "taken_bytes": hungry,
            "free_bytes": free_bytes,
            "said": [str(error)[:300], *getattr(error, "__notes__", ())],
        }
    return {"passed": False, "taken_bytes": hungry, "free_bytes": free_bytes, "said": "it was given that"}


def in_more_parts() -> dict[str, Any]:
    """A batch that runs out of the memory that the run may use is run again in two micro-batches, to the same weights."""
    _leased()
    return _against_plain("long", _strategy(memory_limit="1900MiB"), hungry_row_bytes=80 * GIB // 1024)


def searching_kernels() -> dict[str, Any]:
    """cuDNN tries algorithms that take workspace, which no prediction knows: on a GPU that nobody shares it goes through."""
    _leased()
    trainer, _ = _fit("conv", _strategy(), benchmark=True)
    return {"passed": trainer.global_step == _STEPS}


# -- do the commands run -----------------------------------------------------------------------------------------------------------------


def _command(*words: str) -> dict[str, Any]:
    """What a command says, and whether it ends well; where it doesn't end, where it is."""
    os.environ.update(AUTOPAR_CACHE=tempfile.mkdtemp(), PYTHONFAULTHANDLER="1")
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            printed, said = process.communicate(timeout=_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            printed, said = process.communicate()
    return {"passed": process.returncode == 0, "printed": printed[-4000:], "said": said[-6000:]}


def devices() -> dict[str, Any]:
    """What is free."""
    return _command("-m", "lightning_autopar", "devices")


def doctor() -> dict[str, Any]:
    """The file for a bug report."""
    return _command("-m", "lightning_autopar", "doctor")


def planned_script() -> dict[str, Any]:
    """Plans for a script, which knows nothing of the package."""
    return _command("-m", "lightning_autopar", "plan", str(HERE.parent / "examples/train_gpt.py"))


def script() -> dict[str, Any]:
    """``strategy="autopar"`` by its name alone, calibration included."""
    return _command(str(HERE.parent / "examples/train_gpt.py"), "--steps", "60")


def transformers_trainer() -> dict[str, Any]:
    """A script of transformers' own Trainer, under the best plan."""
    return _command("-m", "lightning_autopar", "run", str(HERE.parent / "examples/hf/trainer.py"), "--steps", "30")


# -- where seconds go --------------------------------------------------------------------------------------------------------------------


def overhead() -> dict[str, Any]:
    """Seconds a step beside plain Lightning's, pair by pair, the GPU's part by CUDA events."""
    pairs: list[dict[str, Any]] = []
    while len(pairs) < _MOST_PAIRS and (len(pairs) < _LEAST_PAIRS or time.monotonic() - _BEGUN < _PAIRS_SECONDS):
        number = len(pairs)
        order: list[tuple[str, Callable[[], Any]]] = [("plain", lambda: "auto"), ("autopar", lambda: _strategy(plan=_plan()))]
        taken = {name: _step_seconds(make()) for name, make in (order if number % 2 else order[::-1])}
        pairs.append(taken)
    ratios = sorted(pair["autopar"]["wall"] / pair["plain"]["wall"] for pair in pairs)
    spread = (ratios[5], ratios[-6]) if len(ratios) == _MOST_PAIRS else None  # of twenty the 95 % interval of the median
    return {"passed": True, "median_ratio": statistics.median(ratios), "interval": spread, "pairs": pairs}


def _step_seconds(strategy: Any) -> dict[str, float]:
    """The median step of a fit: on the clock, on the GPU, and of this process."""
    import lightning.pytorch as pl
    import torch

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.at: list[tuple[float, float]] = []
            self.events: list[Any] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.at.append((time.perf_counter(), time.process_time()))
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    clock = Clock()
    _fit("wide", strategy, steps=_TIMED_STEPS, callbacks=[clock], limit_val_batches=0)
    torch.cuda.synchronize()
    walls = [after[0] - before[0] for before, after in zip(clock.at, clock.at[1:], strict=False)][5:]
    cores = [after[1] - before[1] for before, after in zip(clock.at, clock.at[1:], strict=False)][5:]
    gpu = [before.elapsed_time(after) / 1e3 for before, after in zip(clock.events, clock.events[1:], strict=False)][5:]
    return {name: statistics.median(values) for name, values in (("wall", walls), ("cores", cores), ("gpu", gpu))}


def waits() -> dict[str, Any]:
    """How often torch says that the host waits for the GPU in a step, under plain Lightning and under autopar; with micro-batches, too."""
    import lightning.pytorch as pl
    import torch

    class Debug(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                torch.cuda.set_sync_debug_mode("warn")

        def on_train_end(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    found = {}
    kinds = {"plain": lambda: "auto", "single": _strategy, "micro_batches": lambda: _strategy(plan=_plan(micro_batches=4))}
    for name, make in kinds.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _fit("wide", make(), callbacks=[Debug()], limit_val_batches=0)
        found[name] = sum("synchroniz" in str(each.message) for each in said) / (_STEPS - 4)
    return {"passed": found["single"] <= found["plain"], "a_step": found}


def profile() -> dict[str, Any]:
    """Of some steps of one device's plan the operations that take the host longest, and those that take the GPU longest."""
    return _profiled("llama", _strategy(plan=_plan()))


def profile_offload() -> dict[str, Any]:
    """The same with parameters and optimizer in host memory."""
    blocks = tuple(f"net.model.layers.{number}" for number in range(10))
    plan = _plan("fsdp", reshard_after_forward=True, shard=blocks, offload=("optimizer", "parameters"))
    return _profiled("llama, large", _strategy(plan=plan))


def _profiled(kind: str, strategy: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        _fit(kind, strategy, steps=10, callbacks=[_profiler(out)], limit_val_batches=0)
        return {"passed": True, **json.loads(out.read_text(encoding="utf-8"))}


def _profiler(out: Path) -> Any:
    """A callback, which goes to the process that trains."""
    import cProfile
    import pstats

    import lightning.pytorch as pl
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    class Profiler(pl.Callback):
        """Steps 4 and 5 by torch's profiler, 6 and 7 by Python's."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.begun = time.perf_counter()
                self.taken = torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                self.taken.__enter__()
            elif batch_idx == 6:
                self.taken.__exit__(None, None, None)
                self.seconds = time.perf_counter() - self.begun
                self.calls = cProfile.Profile()
                self.calls.enable()
            elif batch_idx == 8:
                self.calls.disable()
                rows = self.taken.key_averages()
                top = {
                    name: [
                        (row.key[:80], row.count, getattr(row, by) / 1e6)
                        for row in sorted(rows, key=lambda row, by=by: -getattr(row, by))[:16]  # type: ignore[misc]
                    ]
                    for name, by in (("host", "self_cpu_time_total"), ("gpu", "self_device_time_total"))
                }
                stats: Any = pstats.Stats(self.calls).stats  # type: ignore[attr-defined]
                python = sorted(((*key, *value[1:4]) for key, value in stats.items()), key=lambda row: -row[4])
                ours = sorted((row for row in python if "lightning_autopar" in row[0]), key=lambda row: -row[5])
                found = {**top, "seconds": self.seconds, "python": python[:25], "ours": ours[:25]}
                out.write_text(json.dumps(found), encoding="utf-8")

    return Profiler()


def calibration() -> dict[str, Any]:
    """How long measuring this machine takes, and what it finds."""
    os.environ["AUTOPAR_CACHE"] = tempfile.mkdtemp()
    from lightning_autopar.cli.devices import speeds
    from lightning_autopar.devices.discover import probe
    from lightning_autopar.strategies.calibration.calibration import calibrate

    inventory, begun = probe(), time.monotonic()
    found = calibrate(inventory, progress=False).calibration
    taken = time.monotonic() - begun
    told = {device.name: speeds(found, device).to_dict() for device in inventory.devices}
    return {"passed": taken < 12 and not found.failures, "seconds": taken, "failures": dict(found.failures), "speeds": told}


SECTIONS: dict[str, tuple[Callable[[], dict[str, Any]], ...]] = {
    "fits": (
        single,
        half_precision,
        micro_batches,
        tied_llama,
        lora,
        recomputed,
    ),
    "workers": (offload, averaged, asked_for_cuda_first, elastic, killed_worker, zero_offload),
    "caps": (within_the_lease, beyond_the_lease, in_more_parts, searching_kernels),
    "commands": (devices, doctor, planned_script, script, transformers_trainer),
    "seconds": (calibration, profile_offload, profile, overhead, waits),
}


def _run(section: str, name: str, seconds: float) -> dict[str, Any]:
    """One check in a process of its own."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, str(Path(__file__).resolve()), section, "--check", name, "--json", str(out)]
        environment = {**os.environ, **_ENVIRONMENT.get(name, {})}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=seconds)
            status = "ended" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, status = process.communicate()[0], f"stopped after {seconds:.0f} s"
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"passed": False}
    passed = bool(found.pop("passed")) and status == "ended"
    tail = "" if passed else said[-1500:]
    return {"check": name, "passed": passed, "status": status, "seconds": time.monotonic() - begun, "found": found, "said": tail}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=sorted(SECTIONS))
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all checks together; what it doesn't suffice for is left out")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checks = {check.__name__: check for check in SECTIONS[arguments.section]}
    if arguments.check:
        warnings.simplefilter("ignore")
        arguments.json.write_text(json.dumps(checks[arguments.check]()), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # a race of torch's own at exit, where a backward was the last thing, isn't looked for here
    from machine import machine

    until, rows, left_out = _BEGUN + arguments.seconds, [], list(checks)
    report = {**machine(), "section": arguments.section, "checks": rows, "left_out": left_out}
    for name in checks:
        left = until - time.monotonic()
        if left > 5:
            rows.append(_run(arguments.section, name, min(left, _MOST_SECONDS)))
            left_out.remove(name)
            print(f"{name}: {'passed' if rows[-1]['passed'] else 'FAILED'} ({rows[-1]['status']}, {rows[-1]['seconds']:.1f} s)", flush=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if not left_out and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
