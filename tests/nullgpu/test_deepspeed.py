"""DeepSpeed on two stub GPUs, or real ones: with torch's optimizers, without an operator of its own compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

RANK = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed
rank, store = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
deepspeed = import_deepspeed("cuda")
losses = []
for stage in (1, 2, 3):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    for step in range(4):
        x = torch.linspace(-1, 1, 256).view(16, 16)[8 * rank : 8 * rank + 8].cuda()
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
print(json.dumps(losses), flush=True)
os._exit(0)
"""


def test_zero_trains_as_one_gpu_does(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL_RANK": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"), "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=110) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    losses = json.loads(said[0][0].splitlines()[-1])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    expected = []
    for _ in range(4):
        loss = module(torch.linspace(-1, 1, 256).view(16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(3 * expected, rel=1e-4), "under ZeRO-1, 2 and 3"
    assert not (tmp_path / "compiled").exists()
