"""The stub GPUs are what they say: torch's own code runs on them, with right values, and what the host waits for is counted."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.nullgpu import control

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_memory_is_counted_as_torch_asks_for_it() -> None:
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.mem_get_info(0) == (free_bytes - 512 * MIB, total_bytes)
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(0)[0] == free_bytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total_bytes, dtype=torch.uint8, device="cuda:0")


@pytest.mark.parametrize("kind", ["linear", "convolution", "normalised", "attention"])
def test_a_step_has_the_values_of_a_cpus(kind: str) -> None:
    layers = {
        "linear": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 16)),
        "normalised": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.LayerNorm(16)),
        "attention": lambda: nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True),
    }
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        module = layers[kind]().to(device)
        # The bias of attention's keys, and one before a batch norm, have gradients of rounding alone, of which AdamW makes as large a step
        # as of any other.
        rounded = kind in ("attention", "normalised")
        optimizer = torch.optim.SGD(module.parameters(), 0.1) if rounded else torch.optim.AdamW(module.parameters(), 1e-2)
        for _ in range(3):
            x = torch.linspace(-1, 1, 128).view(8, 16).to(device)
            x = x.view(2, 4, 16) if kind == "attention" else x
            (module(x).square() * torch.linspace(0, 1, 16, device=device)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[device] = torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.BatchNorm1d(8)], ids=["layer", "group", "batch"]
)
def test_a_normalisation_in_half_precision_has_gradients_within_its_rounding(layer: Callable[[], nn.Module]) -> None:
    """The operators of CPUs want the moments in half precision, too, and a GPU's keep them in float."""

    def gradients(device: str, dtype: torch.dtype) -> torch.Tensor:
        x = (2.3 * torch.arange(64)).sin().view(8, 8).to(device, dtype).requires_grad_()
        module = layer().to(device, dtype)
        (module(x).float() * torch.linspace(0, 1, 8, device=device)).sum().backward()
        return torch.cat([each.grad.flatten().float().cpu() for each in (x, *module.parameters()) if each.grad is not None])

    expected = gradients("cpu", torch.float32)
    for dtype, tolerance in ((torch.bfloat16, 2**-4), (torch.float16, 2**-7)):
        torch.testing.assert_close(gradients("cuda", dtype), expected, rtol=tolerance, atol=tolerance)


def test_whole_numbers_are_counted() -> None:
    """As a mixture of experts counts its tokens; the CPU counts fractions alone."""
    assert torch.histc(torch.tensor([0, 1, 1, 3], device="cuda"), bins=4, min=0, max=3).tolist() == [1, 2, 0, 1]


@pytest.mark.stub
def test_what_the_cpu_has_not_got_is_an_error_and_no_number() -> None:
    with pytest.raises(NotImplementedError, match="not on the stub GPU: aten::_convert_weight_to_int4pack isn't computed"):
        torch.ops.aten._convert_weight_to_int4pack(torch.zeros(32, 64, dtype=torch.uint8, device="cuda"), 2)


@pytest.mark.stub
def test_operators_that_torch_compiles_when_they_are_called_have_the_values_of_a_cpus() -> None:
    numbers = torch.linspace(0.5, 4, 7)
    for operator in (torch.lgamma, torch.digamma, torch.special.i0, torch.sinc):
        torch.testing.assert_close(operator(numbers.cuda()).cpu(), operator(numbers))
    wave = torch.polar(numbers, numbers)
    torch.testing.assert_close(torch.tanh(wave.cuda()).cpu(), torch.tanh(wave))
    mine = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    with pytest.raises(NotImplementedError, match="not on the stub GPU"):
        mine(numbers.cuda())


@pytest.mark.not_on_stub("cuDNN's recurrent layers")
def test_a_recurrent_layer_has_the_values_of_a_cpus() -> None:
    layer = nn.LSTM(8, 8)
    x = torch.randn(5, 2, 8)
    expected = layer(x)[0]
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(layer.cuda()(x.cuda())[0].cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.not_on_stub("replay of CUDA graphs")
def test_a_graph_computes_anew_what_it_recorded() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6, 6, 6, 6]


@pytest.mark.filterwarnings("ignore:.*script_method.*is deprecated:DeprecationWarning")
@pytest.mark.not_on_stub("Triton, and so torch.compile")
def test_a_compiled_function_has_the_same_values() -> None:
    x = torch.randn(64, device="cuda")
    torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1)(x), x.sin() + 1)


@pytest.mark.stub
def test_what_the_host_waits_for_is_counted() -> None:
    x = torch.ones(8, device="cuda")
    pinned = torch.ones(8).pin_memory()
    with control.counted() as done:
        y = x * 2 + 1
        y.copy_(pinned, non_blocking=True)
    assert done["waits"] == 0
    assert done["launches"] >= 2
    waiting = {
        "item": lambda: y.sum().item(),
        "cpu": lambda: y.cpu(),
        "nonzero": lambda: y.nonzero(),
        "mask": lambda: y[y > 0],
        "device": lambda: torch.cuda.synchronize(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "to": lambda: torch.ones(8).to("cuda"),
    }
    for name, wait in waiting.items():
        with control.counted() as done:
            wait()
        assert done["waits"] == 1, name
    with control.counted() as done:
        torch.ones(8).to("cuda", non_blocking=True)
    assert done["waits"] == 0
    assert done["pageable_copies"] == 1, "from memory that isn't pinned, for which a driver may wait"
