"""Small questions to a CUDA device that a stub can answer wrongly, a figure or a few each. A group of them has a process of its own.

python benchmarks/nullgpu_probes.py GROUP          # prints JSON, name to figure; a probe that fails is a sentence
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

MIB = 1 << 20
Probes = dict[str, Callable[[], Any]]


class Attention(nn.Module):
    def __init__(self, heads: int = 4, width: int = 256) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))


#: Layers by name: what makes one, and the shape of what enters it.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(512, 1000), (64, 512)),
    "linear without bias": (lambda: nn.Linear(512, 1000, bias=False), (64, 512)),
    "mlp": (_net, (128, 256)),
    "convolution": (lambda: nn.Conv2d(3, 64, 7, 2, 3), (8, 3, 64, 64)),
    "convolution 3x3": (lambda: nn.Conv2d(64, 64, 3, padding=1), (8, 64, 32, 32)),
    "convolution depthwise": (lambda: nn.Conv2d(64, 64, 3, groups=64), (8, 64, 32, 32)),
    "convolution transposed": (lambda: nn.ConvTranspose2d(16, 32, 3), (8, 16, 32, 32)),
    "batch norm": (lambda: nn.BatchNorm2d(64), (8, 64, 32, 32)),
    "layer norm": (lambda: nn.LayerNorm(768), (512, 768)),
    "rms norm": (lambda: nn.RMSNorm(768), (512, 768)),
    "group norm": (lambda: nn.GroupNorm(4, 64), (8, 64, 32, 32)),
    "max pool": (lambda: nn.MaxPool2d(2), (8, 64, 32, 32)),
    "attention": (Attention, (4, 128, 256)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(256, 4, batch_first=True), (4, 128, 256)),
    "softmax": (lambda: nn.Softmax(-1), (256, 1000)),
    "lstm": (lambda: nn.LSTM(64, 64), (20, 4, 64)),
    "gru": (lambda: nn.GRU(64, 64), (20, 4, 64)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


def _settle() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _memory(work: Callable[[], Any]) -> list[int]:
    """Allocated above what there was: the most, and what is left; and reserved at the most. The second time, when libraries keep theirs."""
    work()
    _settle()
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    result = work()
    torch.cuda.synchronize()
    found = [torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_reserved() - held]
    del result
    return found


def _step(make: Callable[[], nn.Module], shape: tuple[int, ...], precision: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    module = make().cuda()
    x = torch.randn(shape).cuda().requires_grad_()

    def work() -> Any:
        for parameter in module.parameters():
            parameter.grad = None
        x.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        y.float().square().mean().backward()
        return y.detach()

    return work


def memory_of_layers() -> Probes:
    return {
        f"{name} {precision}": lambda make=make, shape=shape, precision=precision: _memory(_step(make, shape, precision))
        for name, (make, shape) in LAYERS.items()
        for precision in ("32", "bf16")
    }


def values_of_layers() -> Probes:
    """The mean of what leaves a layer, of its square, and the norm of its gradients."""

    def values(make: Callable[[], nn.Module], shape: tuple[int, ...], precision: str) -> list[float]:
        torch.manual_seed(0)
        module = make().cuda().eval()
        x = torch.randn(shape).cuda().requires_grad_()
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            y = module.train(isinstance(module, (nn.BatchNorm2d, nn.RNNBase)))(x)  # cuDNN has no backward of a layer that evaluates
        y = (y[0] if isinstance(y, tuple) else y).float()
        y.square().mean().backward()
        assert x.grad is not None
        return [float(y.mean()), float(y.square().mean()), float(x.grad.norm())]

    return {
        f"{name} {precision}": lambda make=make, shape=shape, precision=precision: values(make, shape, precision)
        for name, (make, shape) in LAYERS.items()
        for precision in ("32", "bf16")
    }


def memory_of_optimizers() -> Probes:
    def step(make: Callable[[Any], torch.optim.Optimizer]) -> list[int]:
        module = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, 512)).cuda()
        optimizer = make(module.parameters())

        def work() -> None:
            module(torch.ones(8, 1024, device="cuda")).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return _memory(work)

    return {name: lambda make=make: step(make) for name, make in OPTIMIZERS.items()}


def memory_of_operations() -> Probes:
    torch.manual_seed(0)
    x = torch.randn(1 << 18, device="cuda")
    square = torch.randn(256, 256, device="cuda")
    classes = torch.randint(0, 1000, (1 << 14,), device="cuda")
    operations: Probes = {
        "sort": lambda: x.sort(),
        "topk": lambda: x.topk(100),
        "cumsum": lambda: x.cumsum(0),
        "unique": lambda: classes.unique(),
        "nonzero": lambda: (x > 0).nonzero(),
        "mask": lambda: x[x > 0],
        "index": lambda: x[classes],
        "median": lambda: x.median(),
        "argmax": lambda: x.argmax(),
        "sum": lambda: x.sum(),
        "cat": lambda: torch.cat([x, x]),
        "where": lambda: torch.where(x > 0, x, -x),
        "bincount": lambda: classes.bincount(),
        "multinomial": lambda: x.abs().multinomial(10),
        "randperm": lambda: torch.randperm(100_000, device="cuda"),
        "scatter_add": lambda: torch.zeros(1000, device="cuda").scatter_add_(0, classes, x[: 1 << 14]),
        "index_put": lambda: torch.zeros(1000, device="cuda").index_put_((classes,), x[: 1 << 14], accumulate=True),
        "cross entropy": lambda: F.cross_entropy(x.view(256, 1024), classes[:256]),
        "matmul": lambda: square @ square,
        "bmm": lambda: torch.bmm(square.view(4, 64, 256), square.view(4, 256, 64)),
        "addmm in half precision": lambda: torch.addmm(square[0].half(), square.half(), square.half()),
        "einsum": lambda: torch.einsum("ij,kj->ik", square, square),
        "norm": lambda: torch.linalg.vector_norm(x),
        "cdist": lambda: torch.cdist(square, square),
        "interpolate": lambda: F.interpolate(square[None, None], scale_factor=2, mode="bilinear"),
    }
    return {name: lambda work=work: _memory(work) for name, work in operations.items()}


def workspaces() -> Probes:
    """What cuBLAS and cuDNN keep from their first use on, in the order of first use."""

    def kept(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    a = torch.randn(256, 256, device="cuda")
    bias, half, stream = a[0].clone(), a.bfloat16(), torch.cuda.Stream()

    def elsewhere() -> None:
        with torch.cuda.stream(stream):
            a @ a

    def backward() -> None:
        w = nn.Linear(256, 256, device="cuda")
        w(a).sum().backward()

    return {
        "addition": lambda: kept(lambda: a + a),
        "matmul": lambda: kept(lambda: a @ a),
        "matmul again": lambda: kept(lambda: a @ a),
        "matmul in bf16": lambda: kept(lambda: half @ half),
        "addmm": lambda: kept(lambda: torch.addmm(bias, a, a)),
        "backward": lambda: kept(backward),
        "another stream": lambda: kept(elsewhere),
        "convolution": lambda: kept(lambda: F.conv2d(torch.ones(1, 3, 8, 8, device="cuda"), torch.ones(4, 3, 3, 3, device="cuda"))),
    }


def draws() -> Probes:
    """The first four, the last, and the sum of all; and where the generator stands after."""

    def drawn(work: Callable[[Tensor], Tensor], count: int) -> list[float]:
        torch.cuda.manual_seed(42)
        found = work(torch.full((count,), 0.5, device="cuda")).double().flatten()
        offset = float(int.from_bytes(torch.cuda.get_rng_state()[8:16].numpy().tobytes(), "little"))
        return [*found[:4].tolist(), float(found[-1]), float(found.sum()), offset]

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "uniform": lambda x: x.uniform_(),
        "normal": lambda x: x.normal_(),
        "bernoulli": lambda x: x.bernoulli_(0.3),
        "bernoulli of a tensor": lambda x: torch.bernoulli(x),
        "exponential": lambda x: x.exponential_(),
        "geometric": lambda x: x.geometric_(0.3),
        "cauchy": lambda x: x.cauchy_(),
        "log normal": lambda x: x.log_normal_(),
        "random": lambda x: x.random_(),
        "randint": lambda x: torch.randint(0, 1000, x.shape, device="cuda"),
        "randint of 64 bits": lambda x: torch.randint(0, 1 << 40, x.shape, device="cuda"),
        "randperm": lambda x: torch.randperm(len(x), device="cuda"),
        "dropout": lambda x: F.dropout(x, 0.1),
        "dropout, trained": lambda x: F.dropout(x.requires_grad_(), 0.1).detach(),
        "rrelu": lambda x: F.rrelu(-x, training=True),
        "multinomial": lambda x: x[:1000].multinomial(100, replacement=True),
        "poisson": lambda x: torch.poisson(x),
        "normal in half precision": lambda x: x.half().normal_(),
    }
    return {
        f"{name}, {count}": lambda work=work, count=count: drawn(work, count) for name, work in kinds.items() for count in (10, 1_000_003)
    }


def device() -> Probes:
    about = torch.cuda.get_device_properties(0)
    fields = ("major", "minor", "multi_processor_count", "max_threads_per_multi_processor", "warp_size", "regs_per_multiprocessor")
    more = ("shared_memory_per_block", "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "L2_cache_size")
    probes: Probes = {name: lambda name=name: getattr(about, name, "unknown to this torch") for name in (*fields, *more)}
    probes["bf16"] = lambda: int(torch.cuda.is_bf16_supported())
    for dtype in (torch.float32, torch.bfloat16):
        for width in (64, 96, 256):
            q = torch.zeros(2, 4, 32, width, device="cuda", dtype=dtype)
            name = f"attention's kernel, {str(dtype)[6:]}, width {width}"
            probes[name] = lambda q=q: torch.ops.aten._fused_sdp_choice(q, q, q)
            probes[f"{name}, causal, dropped"] = lambda q=q: torch.ops.aten._fused_sdp_choice(q, q, q, None, 0.1, True)
    return probes


def driver() -> Probes:
    """The caching allocator's segments, and what lies outside of it: bytes by the driver's own count."""

    def taken(work: Callable[[], Any]) -> int:
        _settle()
        before = torch.cuda.mem_get_info()[0]
        kept = work()
        torch.cuda.synchronize()
        after = before - torch.cuda.mem_get_info()[0]
        del kept
        return after

    def by_nvml() -> dict[str, int]:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        used = {entry.pid: entry.usedGpuMemory for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        return {
            "own": used.get(os.getpid()) or 0,
            "reserved": pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved,
        }

    torch.ones(1, device="cuda")
    return {
        "context and first kernels": lambda: by_nvml()["own"] - torch.cuda.memory_reserved(),
        "the driver's reserve": lambda: by_nvml()["reserved"],
        "a tensor of 1 MiB": lambda: taken(lambda: torch.empty(MIB, dtype=torch.uint8, device="cuda")),
        "a tensor of 9 MiB": lambda: taken(lambda: torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")),
        "a tensor of 33 MiB and 1 byte": lambda: taken(lambda: torch.empty(33 * MIB + 1, dtype=torch.uint8, device="cuda")),
        "cuBLAS's handle": lambda: taken(lambda: torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")),
        "alignment": lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").data_ptr() % (2 * MIB),
    }


def calls() -> Probes:
    """The runtime's calls in a step: synchronisations, copies and kernels of torch's own."""
    try:
        from tests.nullgpu import control

        stub = control.on_stub()
    except ImportError:
        stub = False

    def counted(work: Callable[[], Any]) -> dict[str, int]:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        if stub:
            with control.counted() as done:
                work()
            return {"synchronised": done["stream_syncs"] + done["device_syncs"] + done["event_syncs"], "copied": done["copies"]}
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
        times = {event.key: event.count for event in profile.key_averages()}
        # The profiler itself synchronises the device once, at its end.
        waits = sum(times.get(name, 0) for name in ("cudaStreamSynchronize", "cudaEventSynchronize")) + max(
            0, times.get("cudaDeviceSynchronize", 0) - 1
        )
        return {"synchronised": waits, "copied": times.get("cudaMemcpyAsync", 0) + times.get("cudaMemcpy", 0)}

    module, x = _net().cuda(), torch.randn(128, 256, device="cuda")
    pinned = torch.randn(128, 256).pin_memory()
    optimizers = {name: make(module.parameters()) for name, make in OPTIMIZERS.items()}

    def step(optimizer: torch.optim.Optimizer, clip: bool = False) -> None:
        module(x).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    works: Probes = {f"step, {name}": lambda optimizer=optimizer: step(optimizer) for name, optimizer in optimizers.items()}
    works |= {
        "step, clipped": lambda: step(optimizers["adamw foreach"], clip=True),
        "item": lambda: x.sum().item(),
        "to the host": lambda: x.cpu(),
        "from the host": lambda: torch.ones(8).to("cuda"),
        "from pinned memory": lambda: x.copy_(pinned, non_blocking=True),
        "nonzero": lambda: (x > 0).nonzero(),
        "mask": lambda: x[x > 0],
        "mask assigned": lambda: x.clone().__setitem__(x > 0, 0.0),
        "unique": lambda: x.unique(),
        "repeat_interleave": lambda: x.repeat_interleave(torch.full((128,), 2, device="cuda"), 0),
        "multinomial": lambda: x.abs().multinomial(3),
        "randperm": lambda: torch.randperm(100, device="cuda"),
        "a tensor made there": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "is finite": lambda: bool(torch.isfinite(x).all()),
        "embedding's gradient": lambda: F.embedding(torch.arange(8, device="cuda"), x.detach().clone().requires_grad_()).sum().backward(),
    }
    return {name: lambda work=work: counted(work) for name, work in works.items()}


GROUPS: dict[str, Callable[[], Probes]] = {
    function.__name__: function
    for function in (
        device,
        driver,
        workspaces,
        draws,
        memory_of_operations,
        memory_of_layers,
        memory_of_optimizers,
        values_of_layers,
        calls,
    )
}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {}
    for name, probe in GROUPS[sys.argv[1]]().items():
        try:
            found[name] = probe()
        except (RuntimeError, AssertionError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
