"""The largest Llama-shaped model that trains on one GPU with offload to host memory, by DeepSpeed and by FSDP2, the card capped.

For each cap and way the number of layers is looked for by prediction alone; then the largest that is predicted to fit is trained for a few
steps with the allocator capped, and one with some layers more, which should not. Last comes a model of ten billion parameters on the whole
card, or of as many as the host's memory is predicted to have room for (published: "ZeRO-Offload", https://arxiv.org/abs/2101.06840, more
than 10 billion on one V100 with 32 GB, beside 1.5 TB of host memory). Configurations are written here; nothing is downloaded.

    python benchmarks/offload_gpu.py --json results/offload_gpu.json           # at most nine minutes
    python benchmarks/offload_gpu.py --devices 1xcpu:2GiB --json out.json      # a rehearsal with tiny sizes: its figures are no GPU's
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.planning.plan_cost import Appraiser
from lightning_autopar.plans import OFFLOADS
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.strategies import launcher
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.calibration.calibration import calibrate
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed
from lightning_autopar.text import format_bytes

GIB, MIB = 1 << 30, 1 << 20
WAYS = ("deepspeed", "fsdp")
#: Published for one GPU of 32 GB.
CLAIMED_PARAMETERS = 10_000_000_000
_STEPS, _WARM_UP = 5, 2
_MOST_LAYERS = 96
#: A tenth more layers than the most that fit should not.
_MORE = 0.1
_QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model's shape, and the batch's."""

    width: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int


#: Of Llama 2 7B, whose layers are of 202 million parameters.
LLAMA = Size(width=4096, hidden=11008, heads=32, vocabulary=32000, length=1024, batch=4)
TINY = Size(width=128, hidden=344, heads=4, vocabulary=512, length=64, batch=4)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Layer(nn.Module):
    """Attention with rotary positions and a gated perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = RMSNorm(size.width), RMSNorm(size.width)
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.before(x)
        query, key, value = (
            each(normed).view(batch, length, self.heads, width // self.heads).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_turned(query, cos, sin), _turned(key, cos, sin), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(pl.LightningModule):
    """Built where it is trained; weights are constants, as nothing here depends on them. Ends its process when the steps are measured."""

    def __init__(self, size: Size, layers: int, out: Path | None = None) -> None:
        super().__init__()
        self.size, self.depth, self.out = size, layers, out
        self.layers: Any = None
        self.begun: list[float] = []

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        size = self.size
        home = torch.get_default_device()
        with torch.device("meta"):
            self.embed = nn.Embedding(size.vocabulary, size.width)
            self.layers = nn.ModuleList(Layer(size) for _ in range(self.depth))
            self.norm, self.head = RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.to_empty(device=home)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0 if parameter.dim() == 1 else 0.5 / size.width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        half = self.size.width // self.size.heads // 2
        rates = 10000.0 ** (-torch.arange(half, device=self.device) / half)
        angles = torch.arange(tokens.shape[1] - 1, device=self.device)[:, None] * rates
        x = self.embed(tokens[:, :-1])
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.begun.append(time.perf_counter())
        if self.out is not None and batch_idx == _STEPS:
            steps = [after - before for before, after in zip(self.begun, self.begun[1:], strict=False)][_WARM_UP:]
            strategy: Any = self.trainer.strategy
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else strategy.meter.measured.peak_bytes
            reserved = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else None
            self.out.write_text(json.dumps({"seconds": statistics.median(steps), "peak": peak, "reserved": reserved}))
            if self.device.type == "cuda":
                os._exit(0)  # what it would hand back to the parent is as large as the host


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model: on which device, in which precision, at most how much of it."""

    spec: str | None
    inventory: Inventory
    size: Size
    precision: Any
    cap_bytes: int
    rates: Any

    @property
    def on_cpu(self) -> bool:
        return self.inventory.devices[0].kind == "cpu"


_TRACED: dict[tuple[Size, int], Footprint] = {}


def traced(question: Question, layers: int) -> Footprint:
    """A step of a model with so many layers; nothing of it is allocated."""
    key = question.size, layers
    if key not in _TRACED:
        size = question.size
        tokens = torch.zeros(size.batch, size.length + 1, dtype=torch.long)
        first = FirstBatch(batch=[tokens], batch_size=size.batch)
        target = "cpu" if question.on_cpu else "cuda"
        _TRACED[key] = trace(Llama(size, layers), None, first, precision=question.precision, target=target)
    return _TRACED[key]


def plan_of(way: str, footprint: Footprint, device: str, *, recompute: bool) -> Plan:
    """Everything in host memory between uses."""
    again = tuple(block.fqn for block in footprint.blocks) if recompute else ()
    if way == "fsdp":
        shard = shardable(footprint)[0]
        return Plan(engine="fsdp", devices=(device,), reshard_after_forward=True, shard=shard, offload=OFFLOADS, recompute=again)
    return Plan(engine="zero", devices=(device,), zero_stage=3, offload=OFFLOADS, recompute=again)


def foresee(question: Question, way: str, layers: int, *, recompute: bool) -> Candidate:
    """The prediction for a model with so many layers."""
    footprint = traced(question, layers)
    plan = plan_of(way, footprint, question.inventory.devices[0].id, recompute=recompute)
    constraints = Constraints(memory_limit_bytes=question.cap_bytes, memory_margin=0.0, precision=question.precision, pinned=plan)
    return Appraiser(footprint, question.inventory, constraints, rates=question.rates).candidate(plan)


def largest(question: Question, way: str, *, recompute: bool = False) -> int:
    """The most layers that are predicted to fit; 0 if not even one does. What a plan needs grows with the layers."""

    def needs(layers: int) -> int:
        return max(foresee(question, way, layers, recompute=recompute).needs.values())

    # A straight line through two small models says where to look.
    few, more = needs(4), needs(8)
    guess = 4 + 4 * (question.cap_bytes - few) / max(1, more - few)
    most = max(2, min(_MOST_LAYERS, round(1.03 * guess) + 1))
    least = max(0, min(most - 1, round(0.97 * guess) - 1))
    while least and not foresee(question, way, least, recompute=recompute).fits:
        least, most = least * 3 // 4, least
    while most < _MOST_LAYERS and foresee(question, way, most, recompute=recompute).fits:
        least, most = most, min(_MOST_LAYERS, most + max(1, most // 16))
    while most - least > max(1, least // 32):
        middle = (least + most) // 2
        if foresee(question, way, middle, recompute=recompute).fits:
            least = middle
        else:
            most = middle
    return least


def train(question: Question, way: str, layers: int, *, recompute: bool, seconds: float) -> dict[str, Any]:
    """A few steps in a child process, and what they took beside the prediction."""
    candidate = foresee(question, way, layers, recompute=recompute)
    (held,) = candidate.bytes.values()
    assert candidate.seconds is not None
    row: dict[str, Any] = {
        "way": way,
        "plan": candidate.plan.title(),
        "precision": question.precision,
        "cap_bytes": question.cap_bytes,
        "layers": layers,
        "parameters": traced(question, layers).parameters,
        "predicted_to_fit": candidate.fits,
        "reason": candidate.reason,
        "predicted_bytes": held.allocated,
        "predicted_seconds": candidate.seconds.to_dict(),
    }
    context = multiprocessing.get_context("spawn")  # tracing ran a backward, after which torch can't be forked
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder) / "out", Path(folder) / "error"
        child = context.Process(target=_train, args=(question, candidate, traced(question, layers), layers, out, error))
        begun = time.monotonic()
        child.start()
        child.join(seconds)
        if child.exitcode is None:
            child.terminate()
            child.join(10)
            child.kill()
            child.join()
        row["run_seconds"] = round(time.monotonic() - begun, 1)
        if out.exists():
            found = json.loads(out.read_text())
            within = question.on_cpu is False or (found["peak"] or 0) <= question.cap_bytes
            row |= {"trained": within, "measured_bytes": found["peak"], "reserved_bytes": found["reserved"]}
            row["measured_seconds"] = found["seconds"]
            row["seconds_ratio"] = candidate.seconds.step / found["seconds"]
            row["bytes_ratio"] = held.allocated / found["peak"] if found["peak"] else None
        else:
            words = error.read_text().strip().splitlines() if error.exists() else [f"no end within {seconds:.0f} s"]
            row |= {"trained": False, "error": words[-1][:400]}
    return row


def _train(question: Question, candidate: Candidate, footprint: Footprint, layers: int, out: Path, error: Path) -> None:
    warnings.simplefilter("ignore")
    if question.on_cpu and candidate.plan.engine == "zero":
        import_deepspeed("cpu")
    os.environ["AUTOPAR_CACHE"] = "off"
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_autopar"):
        logging.getLogger(name).setLevel(logging.ERROR)
    size = question.size
    # The engine caps the allocator at what is free of its device.
    (device,) = question.inventory.devices
    capped = device if question.on_cpu else replace(device, free_bytes=min(device.free_bytes, question.cap_bytes))
    report = Report(inventory=question.inventory, footprint=footprint, candidates=(candidate,), best_index=0)
    run_plan = RunPlan(plan=candidate.plan, devices=(capped,), candidate=candidate)
    decision = Decision(report=report, run_plan=run_plan)
    samples = TensorDataset(torch.randint(size.vocabulary, (size.batch * (_STEPS + 2), size.length + 1)))
    try:
        strategy = AutoParallelStrategy(devices=question.spec)
        accelerator = "cpu" if question.on_cpu else "cuda"
        trainer = pl.Trainer(accelerator=accelerator, strategy=strategy, precision=question.precision, max_epochs=1, **_QUIET)
        with (
            mock.patch.object(launcher, "find_prospect", return_value=mock.Mock(decision=lambda inventory: decision)),
            mock.patch.object(Decision, "announce"),
            mock.patch.object(launcher.AutoLauncher, "_account"),
        ):
            trainer.fit(Llama(size, layers, out), DataLoader(samples, batch_size=size.batch))
    except BaseException as failure:  # out of memory is an answer, and so is the measured worker that left without a word
        error.write_text("".join(traceback.format_exception_only(failure)))
        sys.exit(1)


def words(row: dict[str, Any]) -> str:
    """A row for people."""
    found = f"{format_bytes(row['predicted_bytes'])} predicted"
    if row["trained"]:
        found += f", {format_bytes(row['measured_bytes'] or 0)} measured; {row['predicted_seconds']['step']:.3g} s a step predicted, "
        found += f"{row['measured_seconds']:.3g} s measured"
    else:
        found += f", does not train ({row.get('error') or 'over the cap'})"
    billions = row["parameters"] / 1e9
    cap = format_bytes(row["cap_bytes"])
    return f"{cap:8} {row['way']:9} {row['layers']:3} layers, {billions:.3g} billion parameters, {row['precision']}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="a CPU device such as 1xcpu:2GiB, for a rehearsal; by default the first GPU")
    parser.add_argument("--caps", type=float, nargs="+", help="GiB of the card; 16, 24 and 40 by default, in a rehearsal shares of them")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which nothing new is begun")
    parser.add_argument("--json", type=Path, help="where the result goes")
    arguments = parser.parse_args()
    from machine import machine

    begun = time.monotonic()
    spec = arguments.devices
    inventory = probe(spec)
    inventory = replace(inventory, devices=inventory.devices[:1], links=())
    on_cpu = inventory.devices[0].kind == "cpu"
    if on_cpu:
        import_deepspeed("cpu")
    caps = [round(cap * (GIB if arguments.caps or not on_cpu else MIB)) for cap in arguments.caps or (16, 24, 40)]
    size, precision = (TINY, "32-true") if on_cpu else (LLAMA, "bf16-true")
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []

    def left() -> float:
        return arguments.seconds - (time.monotonic() - begun)

    def attempt(question: Question, way: str, layers: int, *, recompute: bool = False) -> bool:
        if left() < 20:
            skipped.append(f"{format_bytes(question.cap_bytes)} {way} {layers} layers: no time left")
            return False
        rows.append(train(question, way, layers, recompute=recompute, seconds=min(150.0, left())))
        print(words(rows[-1]), flush=True)
        return bool(rows[-1]["trained"])

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder
        rates = calibrate(inventory, progress=False)
        os.environ["AUTOPAR_CACHE"] = "off"
        found: dict[str, dict[str, Any]] = {}
        for cap in caps:
            question = Question(spec=spec, inventory=inventory, size=size, precision=precision, cap_bytes=cap, rates=rates)
            for way in WAYS:
                layers = largest(question, way)
                entry: dict[str, Any] = {"layers": layers, "trained": None, "more_trained": None}
                found[f"{format_bytes(cap)} {way}"] = entry
                if layers:
                    entry["trained"] = attempt(question, way, layers)
                    more = max(layers + 1, round(layers * (1 + _MORE)))
                    prediction = foresee(question, way, more, recompute=False)
                    entry["more_layers"], entry["more_reason"] = more, prediction.reason
                    if prediction.reason is not None and "host" in prediction.reason:
                        skipped.append(
                            f"{format_bytes(cap)} {way} {more} layers: {prediction.reason}"
                        )  # the host would be killed, not the card
                    else:
                        entry["more_trained"] = attempt(question, way, more)
        # The published claim: a batch of one, every layer recomputed, the whole card.
        free = inventory.devices[0].free_bytes
        question = Question(spec=spec, inventory=inventory, size=replace(size, batch=1), precision=precision, cap_bytes=free, rates=rates)
        one = traced(question, 8).parameters - traced(question, 4).parameters
        claimed = 8 if on_cpu else min(_MOST_LAYERS, -(-4 * CLAIMED_PARAMETERS // one))
        for way in WAYS:
            fits = foresee(question, way, claimed, recompute=True).fits
            layers = claimed if fits else min(claimed, largest(question, way, recompute=True))
            if layers:
                attempt(question, way, layers, recompute=True)
    trained = [row for row in rows if row["trained"] and row["predicted_to_fit"]]
    ratios = [abs(row["seconds_ratio"] - 1) for row in trained]
    summary = {
        "on_gpu": not on_cpu,
        "largest": found,
        "most_parameters_trained": max((row["parameters"] for row in rows if row["trained"]), default=0),
        "claimed_parameters": CLAIMED_PARAMETERS,
        "fits_told_right": sum(row["trained"] == row["predicted_to_fit"] for row in rows),
        "of": len(rows),
        "worst_seconds_error": max(ratios, default=None),
        "worst_bytes_error": max((abs(row["bytes_ratio"] - 1) for row in trained if row["bytes_ratio"]), default=None),
        "skipped": skipped,
        "took_seconds": round(time.monotonic() - begun),
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "largest"}, indent=1))
    if on_cpu:
        print("a rehearsal on a CPU device: none of these figures is a GPU's")
    if arguments.json:
        result = {**machine(), "size": asdict(size), "summary": summary, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
