"""How much host memory it takes to load a Hugging Face model into the shards of several ranks.

Each way runs in fresh processes up to its first step, on CPU devices under FSDP2, where a rank needs no more than its shard:

- each_rank: plain Lightning, the script's ``from_pretrained`` in each process, then ``fully_shard`` by hand;
- script: autopar, the same ``from_pretrained`` in the script, from which the ranks are forked;
- load_pretrained: autopar, ``lightning_autopar.load_pretrained`` in the script, what it computes kept on disk as if memory were short;
- configure_model: autopar, ``from_pretrained`` in ``configure_model``, of which one rank alone gets weights.

Twice: from files that have the wanted dtype (float32), and from files of bfloat16, which have to be converted. Measured are the peaks, over
all processes of the run together, of what can't be evicted (anonymous and shared memory) and of the whole (PSS, pages of the files
included), less the same of a model of a few MiB; and the shards themselves, which are one model in all.

    python benchmarks/load_pretrained.py            # writes benchmarks/results/load_pretrained.json
    python benchmarks/load_pretrained.py --quick    # a smoke test: a small model, figures without meaning
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "load_pretrained.json"
WAYS = ("each_rank", "script", "load_pretrained", "configure_model")
FILES = ("float32", "bfloat16")
MIB = 1024**2
#: Rank 0 leaves what all processes hold in this file when the first step is due.
_REACHED = "reached"
_SECONDS = 0.05


# -- in processes of their own ---------------------------------------------------------------------------------------------------------


def write(folder: Path, layers: int, width: int) -> None:
    """The same model twice: in files of float32 and of bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name in FILES:
        model.to(getattr(torch, name)).save_pretrained(folder / name, max_shard_size="100MB")


def run(way: str, folder: Path, ranks: int, layers: int) -> None:
    """Load the model into shards, and end when the first step is due."""
    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    import lightning_autopar
    from lightning_autopar.state import pretrained
    from lightning_autopar.strategies.preparation import confirmed_plan

    def load() -> Any:
        if way != "load_pretrained":
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        pretrained.MEMORY_SHARE = 0.0
        return lightning_autopar.load_pretrained(AutoModelForCausalLM, folder, dtype=torch.float32)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = None if way == "configure_model" else load()

        def configure_model(self) -> None:
            if self.model is None:
                self.model = load()
            if way == "each_rank":
                from torch.distributed.fsdp import fully_shard

                for layer in self.model.model.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if way == "each_rank" or "LOCAL_RANK" in os.environ:  # not while planning tries the step
                self.trainer.strategy.barrier()
                if self.global_rank == 0:  # of the whole session, while the others wait
                    Path(_REACHED).write_text(json.dumps(held_bytes(psutil.Process(os.getsid(0)))), encoding="utf-8")
                self.trainer.strategy.barrier()
                os._exit(0)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.set_num_threads(1)
    options: dict[str, Any]
    if way == "each_rank":
        sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")
        options = {"devices": ranks, "strategy": sharded}
    else:
        confirmed_plan.LARGE_BYTES = 1  # at its real size a model counts as large from 1 GiB on
        blocks = tuple(f"model.model.layers.{index}" for index in range(layers))
        devices = tuple(f"cpu:{rank}" for rank in range(ranks))
        plan = lightning_autopar.Plan(engine="fsdp", devices=devices, shard=blocks, reshard_after_forward=True)
        options = {"strategy": lightning_autopar.AutoParallelStrategy(plan=plan, devices=f"{ranks}xcpu:8GiB", calibrate=False)}
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
    trainer.fit(Module(), DataLoader(torch.randint(0, 100, (ranks, 8)), batch_size=1 if way == "each_rank" else ranks))


# -- from outside ----------------------------------------------------------------------------------------------------------------------


def held_bytes(root: psutil.Process) -> tuple[int, int]:
    """What a process and all below it hold: that which can't be evicted, and all of it, each shared page counted once."""
    kept = whole = 0
    for process in (root, *root.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
        except OSError:
            continue  # it has ended
        sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
        kept += sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
        whole += sizes.get("Pss", 0)
    return kept, whole


def measure(way: str, folder: Path, ranks: int, layers: int) -> dict[str, float]:
    """The peaks of one run, in bytes, and its seconds up to the first step."""
    started = time.monotonic()
    command = [sys.executable, __file__, f"--run={way}", f"--folder={folder}", f"--ranks={ranks}", f"--layers={layers}"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "AUTOPAR_CACHE": "off", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    (folder / _REACHED).unlink(missing_ok=True)
    peaks, root = (0, 0), psutil.Process(process.pid)
    try:
        while process.poll() is None:
            try:
                kept, whole = held_bytes(root)
            except psutil.Error:
                break
            peaks = max(peaks[0], kept), max(peaks[1], whole)
            time.sleep(_SECONDS)
    finally:
        said = process.communicate()[0]
    if not (folder / _REACHED).exists():
        raise RuntimeError(f"{way} never came to its first step:\n{said[-3000:]}")
    then = json.loads((folder / _REACHED).read_text(encoding="utf-8"))
    peaks = max(peaks[0], then[0]), max(peaks[1], then[1])
    return {"kept_bytes": peaks[0], "whole_bytes": peaks[1], "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=12, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=1280, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.folder, options.layers, options.width)
        return
    if options.run:
        run(options.run, options.folder, options.ranks, options.layers)
        return
    width = 512 if options.quick else options.width
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        folders = {"model": Path(place) / "model", "tiny": Path(place) / "tiny"}
        for name, size in (("model", width), ("tiny", 64)):
            command = [sys.executable, __file__, "--write", f"--folder={folders[name]}", f"--layers={options.layers}", f"--width={size}"]
            subprocess.run(command, check=True, capture_output=True)
        model_bytes = sum(path.stat().st_size for path in (folders["model"] / "float32").glob("*.safetensors"))
        found: dict[str, Any] = {}
        for way in WAYS:
            base = measure(way, folders["tiny"] / "float32", options.ranks, options.layers)
            found[way] = {"tiny": base}
            for files in FILES:
                took = measure(way, folders["model"] / files, options.ranks, options.layers)
                kept, whole = ((took[name] - base[name]) / model_bytes for name in ("kept_bytes", "whole_bytes"))
                found[way][files] = {**took, "kept_models": round(kept, 2), "whole_models": round(whole, 2)}
                print(f"{way:>16} from {files:>8}: {kept:5.2f} models kept, {whole:5.2f} in all, {took['seconds']:.0f} s", flush=True)
    report = {**machine(), "quick": options.quick, "model_bytes": model_bytes, "ranks": options.ranks, "ways": found}
    if not options.quick:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
