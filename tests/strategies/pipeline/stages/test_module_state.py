"""Each stage has what it uses, nothing else, and nothing is nowhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.pipeline.stages.module_state import assign, take_stages
from tests.strategies.pipeline.chained import CPU, Block, Chained, Stacked, numbers, recorded


class Model(Stacked):
    """Tied ends, a table of positions for all, running statistics in blocks, and what no step uses."""

    def __init__(self) -> None:
        super().__init__(Counting)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.stem.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("positions", torch.rand(8))
        self.register_buffer("nowhere", torch.rand(8))
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        x = self.rnn(x[:, None])[0][:, 0]
        ramp = self.positions + 1
        return super().run(x) + self.out(x * ramp[:4]).mean()


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return super().forward(x)


CUTS = ("blocks.1", "blocks.3")


@pytest.fixture(scope="module")
def staged() -> tuple[Model, Staging]:
    torch.manual_seed(0)
    module = Model()
    return module, Staging(hooks={"training_step": recorded(copy.deepcopy(module))})


def test_stages_keep_what_they_use_and_everything_is_somewhere(staged: tuple[Model, Staging]) -> None:
    module, staging = staged
    parts = [copy.deepcopy(module) for _ in range(3)]
    before = [dict(part.named_parameters()) for part in parts]
    owned = [take_stages(part, staging, CUTS, [index], CPU) for index, part in enumerate(parts)]
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)} | {name for name, _ in module.named_buffers()}
    assert set.union(*(set(each.names) for each in owned)) == names == set(owned[0].primary)
    for part, each, parameters in zip(parts, owned, before, strict=True):
        for name, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers()):
            assert is_absent(tensor) != (name in each.names), name
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter is parameters[name] or name not in each.names
        assert part.out.weight is part.stem.weight
        assert list(part.state_dict()) == list(module.state_dict())
    assert {"unused.weight", "nowhere", "rnn.weight_hh_l0", "positions", "blocks.0.seen", "out.weight"} <= owned[0].names
    assert {"positions", "blocks.1.seen", "blocks.2.layer.bias"} <= owned[1].names
    assert "head.bias" not in owned[1].names
    assert {"head.bias", "out.weight", "stem.weight", "blocks.3.seen"} <= owned[2].names
    assert owned[0].shared == {"out.weight": (0, 2), "stem.weight": (0, 2)}
    assert owned[0].primary["blocks.2.seen"] == 1
    assert owned[0].primary["positions"] == owned[0].primary["unused.bias"] == 0


def test_the_names_of_a_stages_parameters(staged: tuple[Model, Staging]) -> None:
    module, staging = staged
    users, parameters = assign(module, staging, CUTS), {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names = [frozenset(name for name in parameters if index in users[name]) for index in range(3)]
    assert frozenset.union(*names) == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert names[0] & names[2] == {"out.weight", "stem.weight"}
    assert names[1] == {
        "blocks.1.layer.weight",
        "blocks.1.layer.bias",
        "blocks.2.layer.weight",
        "blocks.2.layer.bias",
    }


def test_meta_parameters_make_way_for_holes_and_the_own_ones_stay_meta(staged: tuple[Model, Staging]) -> None:
    _, staging = staged
    with torch.device("meta"):
        part = Model()
    take_stages(part, staging, CUTS, [1], CPU)
    assert is_absent(part.head.weight)
    assert part.head.weight.device == CPU
    assert part.blocks[1].layer.weight.is_meta
    assert not is_absent(part.blocks[1].layer.weight)


def test_buffers_in_blocks_count_once_a_micro_batch_where_they_are(staged: tuple[Model, Staging]) -> None:
    module, staging = staged
    chained = Chained(module, staging, CUTS)
    chained.train([numbers(), numbers()])
    assert [float(stage.module.blocks[index].seen) for index, stage in ((0, chained.stages[0]), (2, chained.stages[1]))] == [2, 2]


def test_a_cut_that_a_hook_doesnt_allow_is_refused(staged: tuple[Model, Staging]) -> None:
    module, staging = staged
    with pytest.raises(ValueError, match="cut at another block"):
        take_stages(copy.deepcopy(module), staging, ["elsewhere"], [0], CPU)
