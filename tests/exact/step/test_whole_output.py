"""A batch's output, put together from its parts'."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_autopar.exact.step.micro_batches import joined
from lightning_autopar.strategies.base.out_of_memory.predictions import lists_of_samples, same_output, whole_output

Pair = namedtuple("Pair", ["guess", "label"])
ROWS = torch.arange(10.0).reshape(5, 2)
OUTPUTS: dict[str, Any] = {
    "tensor": lambda rows: rows,
    "dictionary": lambda rows: {"guess": rows, "mode": "greedy", "nothing": None},
    "tuple": lambda rows: (rows, rows[:, 0] > 3),
    "named tuple": lambda rows: Pair(rows, rows.long()),
    "list of fields": lambda rows: [rows, rows + 1, rows + 2],
    "texts": lambda rows: [str(row) for row in rows.tolist()],
    "samples of different sizes": lambda rows: {"boxes": [torch.ones(int(row[0]), 4) for row in rows]},
    "model output": lambda rows: SequenceClassifierOutput(logits=rows),
}


def parts_of(make: Any, number: int) -> tuple[list[Any], list[int]]:
    cut = [ROWS[index::number] for index in range(number)]
    return [make(part) for part in cut], [len(part) for part in cut]


@dataclass(frozen=True)
class Guess:
    logits: torch.Tensor
    share: float


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("number", [2, 3])
def test_hooks_after_a_batch_in_parts_get_the_whole(name: str, number: int) -> None:
    outputs, rows = parts_of(OUTPUTS[name], number)
    whole = joined([{"output": output} for output in outputs], rows)
    assert same_output(whole.get("output"), OUTPUTS[name](ROWS), 0.0)


def test_hooks_after_a_batch_in_parts_get_means_in_dataclasses() -> None:
    outputs, rows = parts_of(lambda rows: Guess(logits=rows, share=rows.mean().item()), 2)
    whole = joined([{"output": output} for output in outputs], rows)["output"]
    assert torch.equal(whole.logits, ROWS)
    assert whole.share == pytest.approx(ROWS.mean().item())


def test_what_parts_do_not_make_is_the_last_ones() -> None:
    outputs, rows = parts_of(lambda rows: {"most": rows.amax(0), "guess": rows}, 2)
    whole = joined([{"output": output} for output in outputs], rows)["output"]
    assert torch.equal(whole["most"], outputs[-1]["most"])
    assert torch.equal(whole["guess"], ROWS)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("number", [2, 3])
def test_parts_make_the_whole(name: str, number: int) -> None:
    outputs, rows = parts_of(OUTPUTS[name], number)
    more, counts = parts_of(OUTPUTS[name], 5)
    lists = lists_of_samples([*outputs, *more], [*rows, *counts])
    found, whole = whole_output(outputs, rows, lists), OUTPUTS[name](ROWS)
    assert type(found) is type(whole)
    assert same_output(found, whole, 0.0)


def test_a_part_without_samples_counts_for_nothing() -> None:
    assert torch.equal(whole_output([ROWS[:1], ROWS[:1]], [1, 0], ()), ROWS[:1])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], "no row for each sample"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "different shapes"),
        ([1, 2], "different values"),
        ([{"a": ROWS[:2]}, {"b": ROWS[:2]}], "different keys"),
        ([ROWS[:2], None], "no row for each sample"),
        ([object(), object()], "nobody knows"),
    ],
)
def test_what_cant_be_put_together(outputs: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        whole_output(outputs, [2, 2], ())


def test_outputs_differ_by_more_than_rounding() -> None:
    assert same_output(ROWS, ROWS * (1 + 1e-6), 1e-3)
    assert not same_output(ROWS, ROWS + 1, 1e-3)
    assert not same_output([ROWS], [ROWS, ROWS], 1e-3)
    assert not same_output(ROWS.long(), ROWS.long() + 1, 1.0)
