"""What a step does to its module is told and undone, and what depends on the batch is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials.split_probe import probe_split
from lightning_autopar.strategies.trials.undo import in_double, same_values, undone
from tests.strategies.trials.test_split_probe import Base, first_of, samples


class Hoarder(Base):
    """Keeps a decaying table and a hidden state in attributes, which its loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(4)
        self.hidden: Tensor | None = None

    def loss(self, x: Tensor) -> Tensor:
        self.table = self.table * 0.9
        hidden = self.layer(x) * self.table
        hidden = hidden if self.hidden is None else hidden + self.hidden
        self.hidden = hidden.detach()
        return F.mse_loss(hidden, x)


class Codebook(Base):
    """A running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def loss(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.mean(0), 0.1)
        return F.mse_loss(self.layer(x), x)


class Renormalised(Base):
    """Writes to a parameter's rows as the batch has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4) * 5)

    def loss(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x)) if len(x) == 6 else torch.zeros(len(x), dtype=torch.long)
        return F.mse_loss(self.layer(F.embedding(index, self.table, max_norm=1.0)) * 0 + self.layer(x), x)


class Routed(Base):
    """Each sample's sign decides which of two experts it goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def loss(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, rows in zip(self.experts, ((x[:, 0] > 0).nonzero()[:, 0], (x[:, 0] <= 0).nonzero()[:, 0]), strict=True):
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return F.mse_loss(y, x)


def test_attributes_are_as_before_each_run() -> None:
    module = Hoarder()
    finding, _ = probe_split(module, None, first_of(samples()))
    assert (finding.difference, finding.reason, finding.splittable) == (0.0, None, True)
    assert module.hidden is None
    assert torch.equal(module.table, torch.ones(4))


def test_a_buffer_that_depends_on_the_batch_rules_a_split_out() -> None:
    finding, _ = probe_split(Codebook(), None, first_of(samples()))
    assert not finding.splittable
    assert "'average' depends on the batch" in str(finding.reason)


def test_a_parameter_that_the_step_writes_to_rules_a_split_out() -> None:
    module = Renormalised()
    before = module.table.detach().clone()
    finding, _ = probe_split(module, None, first_of(samples()))
    assert not finding.splittable
    assert "'table' depends on the batch" in str(finding.reason)
    assert torch.equal(module.table, before)


@pytest.mark.parametrize("signs", [(1, -1, 1, -1, 1, -1), (1, 1, 1, 1, 1, 1)])
def test_calls_that_the_samples_decide_are_named(signs: tuple[int, ...]) -> None:
    batch = [torch.full((4,), float(sign)) for sign in signs]
    first: FirstBatch = first_of(batch)
    finding, _ = probe_split(Routed(), None, first)
    assert finding.uneven_calls == (("experts.0", "experts.1") if -1 in signs else ())


def test_calls_that_single_samples_decide_are_named_where_each_part_holds_all_kinds() -> None:
    first: FirstBatch = first_of([torch.full((4,), sign) for sign in (1.0, 1.0, -1.0, -1.0)])
    assert probe_split(Routed(), None, first)[0].uneven_calls == ()
    assert probe_split(Routed(), None, first, blocks={"experts.0": 1, "experts.1": 1})[0].uneven_calls == ("experts.0", "experts.1")


def test_an_exception_is_undone_too() -> None:
    module: Any = nn.Linear(2, 2)
    module.note = 1
    weight = module.weight.detach().clone()

    def change() -> None:
        with undone(module):
            module.note = 2
            with torch.no_grad():
                module.weight.add_(1)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        change()
    assert module.note == 1
    assert torch.equal(module.weight, weight)


def test_what_a_step_writes_is_undone_at_any_size_or_the_step_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=20))  # the weight takes 16, the bias 8
    with pytest.raises(MemoryError, match=r"copy of parameters, .* takes 24 B"), undone(module):
        pass
    with undone(module, writes=["bias"]) as effects, torch.no_grad():
        module.bias.data.add_(1)
    assert list(effects.written) == ["bias"]
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


def test_a_buffer_that_a_step_makes_larger_has_changed() -> None:
    """Observers of fake quantization begin with buffers of no elements."""
    assert not same_values(torch.zeros(32), torch.zeros(0))
    assert not same_values(torch.zeros(3), torch.zeros(1))
    assert same_values(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]))


class Stubborn(dict[str, int]):
    """A mapping whose own methods take nothing back."""

    def update(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def __copy__(self) -> Any:
        raise NotImplementedError


def test_containers_are_refilled_whatever_their_own_methods_do() -> None:
    module = Hoarder()
    module.names = Stubborn(a=1)  # type: ignore[assignment]
    with undone(module, (), {}) as effects:
        module.names["b"] = 2  # type: ignore[index, operator]
    assert module.names == {"a": 1}
    assert "names" in effects.kept


def test_a_module_that_was_in_double_precision_says_its_own_type_again() -> None:
    module = Base()
    with in_double(module):
        assert module.dtype == torch.float64
    assert (module.dtype, module.layer.weight.dtype) == (torch.float32, torch.float32)


def test_fake_parameters_that_nothing_wrote_to_are_not_compared() -> None:
    with FakeTensorMode():
        module = nn.Linear(2, 2)
        with undone(module) as effects:  # to compare fake tensors without known values raises
            module(torch.zeros(1, 2))
    assert not effects.written


def test_parameters_that_torch_counts_no_writes_of_are_compared() -> None:
    with torch.inference_mode():  # as a teacher's that were loaded under it
        teacher = nn.Linear(2, 2)
    module = nn.ModuleList([teacher, nn.Linear(2, 2)])
    with undone(module) as effects, torch.no_grad():
        module[1].weight.add_(1)
    assert [*effects.written] == ["1.weight"]
