"""What parts of a batch logged, brought together: numbers alone, without a trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_autopar.exact.logs.combined_values import OPTIONS, Combiner, Entry


def entry(name: str, value: float | None, rows: int, *, reduce_fx: str = "mean", **more: Any) -> Entry:
    options = tuple(reduce_fx if option == "reduce_fx" else False for option in OPTIONS)
    values = {"collection": 0, "fx": "training_step", "dataloader_idx": None, "batch_size": rows, "of": 5, **more}
    tensor = None if value is None else torch.tensor(value)
    return Entry(name=name, options=options, is_metric=value is None, value=tensor, rows=rows, **values)


def folded(parts: list[list[Entry]], **more: Any) -> dict[str, Any]:
    rules = {("training_step", "told"): "sum"}
    return {each.name: (each.number, each.batch_size, each.rows) for each in Combiner(rules).fold(parts, **more)}


def test_parts_that_logged_alike() -> None:
    parts = [
        [
            entry("loss", loss, rows),
            entry("count", float(rows), rows, reduce_fx="sum"),
            entry("top", loss, rows, reduce_fx="max"),
            entry("told", 1.0, rows),
            entry("f1", 0.5 + rows / 10, rows),
            entry("metric", None, rows),
            entry("constant", 1.0, rows, batch_size=1),
        ]
        for loss, rows in ((1.0, 3), (4.0, 2), (float("nan"), 0))
    ]
    found = folded(parts, last={"f1"})
    assert found["loss"] == (pytest.approx(2.2), 5, 5)
    assert found["count"][0] == 5
    assert found["top"][0] == 4
    assert found["told"][0] == 2  # by the rule that was found out
    assert found["f1"][0] == 0.5  # the last part's, of all that came before
    assert found["metric"][0] == 0
    assert found["constant"] == (1, 1, 5)


def test_parts_that_logged_differently() -> None:
    parts = [[entry("loss", 1.0, 3), entry("rare", 2.0, 3)], [entry("loss", 4.0, 2)], [entry("lost", 9.0, 0), entry("loss", 9.0, 0)]]
    with pytest.warns(UserWarning, match="'rare', logged in training_step, was logged for 3 of a batch's 5 samples, and is a mean") as told:
        found = folded(parts)
    assert len(told) == 1
    assert found["loss"] == (pytest.approx(2.2), 5, 5)
    assert found["rare"] == (2.0, 3, 3)
    assert list(found) == ["loss", "rare", "lost"]


def test_a_sum_of_some_samples_is_one_of_all(recwarn: pytest.WarningsRecorder) -> None:
    assert folded([[entry("rare", 2.0, 3, reduce_fx="sum")], []])["rare"] == (2.0, 3, 3)
    assert not recwarn


def test_a_rank_without_samples_weighs_its_parts_alike() -> None:
    assert folded([[entry("loss", 1.0, 0)], [entry("loss", 3.0, 0)]])["loss"] == (2.0, 0, 0)


def test_one_part_is_taken_as_it_is() -> None:
    parts = [[entry("loss", 1.0, 3)]]
    assert Combiner().fold(parts)[0] is parts[0][0]


def test_what_added_up_once_is_no_constant_later() -> None:
    """A hook halves each batch: of the last one, each part is left with one row of two."""
    combiner = Combiner()
    sizes = [
        combiner.fold([[entry("loss", 1.0, rows, batch_size=rows // 2, of=2 * rows)] for _ in range(2)])[0].batch_size for rows in (4, 2)
    ]
    assert sizes == [4, 2]


def test_sizes_of_two_views_are_on_one_scale() -> None:
    """Each sample counts twice, so that each of two ranks names the number of all samples, as a constant would."""
    combiner = Combiner()
    sizes = [
        combiner.fold([[entry("loss", 1.0, rows, batch_size=2 * rows, of=sum(batch))] for rows in batch])[0].batch_size
        for batch in ((5, 5), (5, 4), (3, 3), (2, 1))
    ]
    assert sizes == [10, 9, 6, 3]
