"""Which published rows are held back, and what rules about rows do."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import published  # noqa: E402
from rows.foretold import whole_footprint  # noqa: E402
from rows.held_back import SEED, draw, held_back, of_part  # noqa: E402
from rows.layers import attend  # noqa: E402
from rows.row import Fields  # noqa: E402

from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment  # noqa: E402
from lightning_autopar.memory.work.work import Work  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    return json.loads((BENCHMARKS / "rows" / "rows.json").read_text(encoding="utf-8"))


def one(rows, name):
    return next(row for row in rows if row["id"] == name)


def test_the_rows_held_back_are_those_of_the_seed(rows):
    drawn = draw(rows)
    assert json.loads((BENCHMARKS / "rows" / "held_back.json").read_text(encoding="utf-8")) == drawn
    assert drawn["seed"] == SEED
    assert drawn["rows"] != draw(rows, SEED + 1)["rows"]
    assert len(held_back()) == len(rows) // 3
    held, shown = of_part(rows, "held"), of_part(rows, "shown")
    assert sorted(row["id"] for row in held + shown) == sorted(row["id"] for row in of_part(rows, "all"))
    assert not {row["source_name"] for row in shown} & set(drawn["whole_sources"])
    assert {row["id"] for row in held} == held_back()


@pytest.mark.parametrize(
    ("framework", "keeps"),
    [
        ("HF Trainer (Jan-2022), torch eager", True),
        ("HF Trainer run_clm.py, torch 1.8 nightly, DDP", True),
        ("apex-style PyTorch (BingBertSquad)", True),
        ("torchgpipe (GPipe in PyTorch, 2019)", True),
        ("timm benchmark.py, torch 1.12, CUDA 11.3", False),
        ("HF Trainer 4.30 (2022)", False),
        ("torchtune", False),
    ],
)
def test_softmax_kept_its_input_before_torch_1_11(framework, keeps):
    assert Fields({"framework": framework}).keeps_scores is keeps


def saved(**options):
    """Bytes that attention of (2, 3, 8, 4) saves for backward, and the queries' gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    found = {}

    def pack(tensor):
        found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = attend(q, k, v, causal=True, dropout=0.0, mask=None, **options)
    y.sum().backward()
    return sum(found.values()), q.grad


def test_an_old_softmax_keeps_the_scores_and_changes_nothing_else():
    scores = 2 * 3 * 8 * 8 * 4
    today, gradient = saved(style="math")
    old, same = saved(style="math", keeps_scores=True)
    assert old == today + scores
    assert torch.equal(gradient, same)
    assert saved(style="softmax", keeps_scores=True)[0] == saved(style="softmax")[0], "a kernel of its own"


def test_autocast_keeps_casts_of_weights_to_the_end_of_forward(rows):
    row = one(rows, "hf-bert-ga4-gc-fp16")
    ((((_, (_, asked, laid, _)),),), _) = published.grouped([row])
    assert laid.caches_casts
    sizes = {f"{name}_bytes": 0 for name in ("parameter", "gradient", "optimizer", "activation", "temporary", "buffer", "input")}
    blocks = (LayerFootprint(fqn="0", parameter_rows=((3, 16, True), (5, 4, True), (7, 4, False))), LayerFootprint(fqn="1"))
    moments = tuple(Moment(phase=phase, fixed_bytes=100) for phase in ("forward", "backward", "optimizer"))
    traced = Footprint(parameters=24, trainable_parameters=17, batch_size=0, blocks=blocks, moments=moments, **sizes)
    casts = 2 * (3 * 4 + 5)  # of fp32 weights that learn, in 16 bits
    cached, without = (whole_footprint(traced, asked, replace(laid, caches_casts=one)) for one in (True, False))
    assert [one.fixed_bytes for one in cached.moments] == [100 + casts, 100, 100]
    assert [one.fixed_bytes for one in without.moments] == [100, 100, 100]
    trainer = {**row, "framework": "Lightning 2.1 trainer, torch 2.1"}
    ((((_, (_, _, laid, _)),),), _) = published.grouped([trainer])
    assert not laid.caches_casts


def test_random_numbers_are_drawn_for_a_micro_batch_where_our_engine_draws_those_of_the_batch(rows):
    ((((_, (_, asked, laid, _)),),), _) = published.grouped([one(rows, "hf-bert-vanilla")])
    dropout = Work(kind="pointwise", name="native_dropout", dtype="fp32", moved_bytes=64, drawn=True)
    sizes = {f"{name}_bytes": 0 for name in ("parameter", "gradient", "optimizer", "activation", "temporary", "buffer", "input")}
    block = LayerFootprint(fqn="0", work=(dropout,), backward_work=(dropout,), draw_bytes=(4,))
    traced = Footprint(parameters=0, trainable_parameters=0, batch_size=0, blocks=(block,), **sizes)
    (found,) = whole_footprint(traced, asked, laid).blocks
    assert found.draw_bytes == ()
    assert not any(work.drawn for work in (*found.work, *found.backward_work))
