"""The matrix's own judgement, and its page; the cells themselves are `make packages`'s."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.harness import Run
from tests.lightning_suite.suite import Case, cases, passing
from tests.packages.cell import round_otherwise
from tests.packages.judge import Ended, Finding, judge, missing_on_the_stub
from tests.packages.own import compared, section, suites
from tests.packages.plans import PLANS
from tests.packages.render import CUDA_RESULTS, PAGE, RESULTS, page, read
from tests.packages.zoo import MEMBERS, PACKAGES

NOT_THERE = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
#: Another project's test, which passes where its Trainer got ``autopar``.
TRAINS = """
from lightning.pytorch import Trainer

def test_strategy():
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert type(trainer.strategy).__module__.startswith("lightning_autopar")
"""
NOTE = "the loss on parts of the batch differs from the whole batch's by 1e-02 of it"


def left(**values: Any) -> Run:
    kept: dict[str, Any] = {"weights": {"w": torch.ones(2)}, "processes": 2, "warnings": [], **values}
    return Run(observed={"trainer.rows.0.loss": 1.0}, start={}, strategy=None, **kept)


def ended(**values: Any) -> Ended:
    return Ended(run=left(**values), engine="ddp", world_size=2, title="DDP on 2", notes=(NOTE,))


OFF = {"w": torch.tensor([1.0, 1.0 + 2e-5])}


@pytest.mark.parametrize(
    ("how", "outcome", "reason"),
    [
        (ended(), "parity", ""),
        (ended(weights=OFF), "differs", ""),
        (ended(weights=OFF, warnings=[f"autopar: {NOTE}"]), "warned", NOTE),
        (ended(processes=1), "crashed", "ran as DDP on 2 in 1 processes"),
        (Ended(refused="a sentence"), "refused", "a sentence"),
        (Ended(error="Traceback\n  File\nValueError: lost\n"), "crashed", "ValueError: lost"),
    ],
)
def test_what_a_run_came_to(how: Ended, outcome: str, reason: str) -> None:
    finding = judge(left(processes=1), how, "ddp")
    assert (finding.outcome, finding.reason) == (outcome, reason)


def test_only_what_the_stub_says_it_has_not_got_is_not_on_the_stub() -> None:
    assert missing_on_the_stub(f"Traceback\n  File\n{NOT_THERE}\n") == NOT_THERE
    assert missing_on_the_stub("Traceback\nRuntimeError: Expected all tensors to be on the same device\n") == ""


def test_a_difference_counts_as_noise_only_where_float64_shows_none() -> None:
    differs = judge(left(), ended(weights=OFF), "ddp")
    same = judge(left(), ended(), "ddp")
    assert differs.in_double(Finding(outcome="refused", reason="a sentence")).reason == "in float64 refused: a sentence"
    assert differs.in_double(differs).outcome == "differs"
    found = differs.in_double(same)
    assert (found.outcome, found.double, found.difference, found.single) == ("parity", True, 0.0, differs.difference)


def test_where_an_engine_has_no_float64_its_run_must_be_that_of_a_plan_that_has() -> None:
    run = ended(weights=OFF)
    differs = judge(left(), run, "ddp")
    found = differs.like_another(run, {"fsdp": left(weights={"w": torch.tensor([1.0, 1.0 + 2.5e-5])}), "ddp": left(weights=OFF)})
    assert (found.outcome, found.like, found.single) == ("parity", "fsdp", differs.difference)
    assert differs.like_another(run, {"fsdp": left(weights={"w": torch.ones(2)})}) is differs


def test_what_rounding_moves_as_far_is_no_difference_and_what_it_does_not_is_one() -> None:
    run = ended(weights=OFF)
    differs = judge(left(), run, "ddp")
    swinging, still = (left(weights={"w": torch.tensor([1.0, 1.0 + swing])}) for swing in (6e-6, 4e-6))
    found = differs.as_rounded(left(), run, [still, swinging])
    assert (found.outcome, found.swing) == ("parity", pytest.approx(6e-6, rel=0.02))
    assert differs.as_rounded(left(), run, [still]) is differs
    elsewhere = left(weights={"w": torch.ones(2), "v": torch.tensor([9.0])})
    assert differs.as_rounded(left(), run, [elsewhere]) is differs
    lost = ended(weights={})
    assert judge(left(), lost, "ddp").as_rounded(left(), lost, [swinging]).outcome == "differs"


def test_rounding_moves_weights_and_gradients_by_their_last_bits_and_no_other_draw() -> None:
    layer, untouched = torch.nn.Linear(64, 64), torch.random.get_rng_state()
    before = layer.weight.detach().clone()
    round_otherwise(layer, 1)
    assert torch.equal(untouched, torch.random.get_rng_state())
    assert 0 < float(((layer.weight.detach() - before) / before).abs().max()) <= 2 * torch.finfo(torch.float32).eps
    layer.bias.sum().backward()
    elsewhere = torch.nn.Linear(2, 2, device="meta")  # as on a GPU: weights and gradients aren't where the signs are drawn
    round_otherwise(elsewhere, 1)
    elsewhere.bias.sum().backward()
    assert layer.bias.grad is not None
    assert 0 < float((layer.bias.grad - 1).abs().max()) <= torch.finfo(torch.float32).eps


def test_the_matrix_has_three_models_of_each_of_ten_packages_and_more() -> None:
    counts = Counter(member.package for member in MEMBERS.values())
    assert set(counts) == set(PACKAGES)
    assert sum(count >= 3 for count in counts.values()) >= 10
    assert min(counts.values()) >= 2


def test_the_page_is_what_the_last_run_came_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read(RESULTS), read(CUDA_RESULTS), suites()), "run `python -m tests.packages.render`"


def test_defects_are_on_the_page() -> None:
    name, others = (
        next(iter(MEMBERS)),
        {f"{member}-{plan}": Finding(outcome="parity", difference=0.0) for member in MEMBERS for plan in PLANS},
    )
    bad = {
        f"{name}-ddp": Finding(outcome="differs", difference=0.5, beyond=("weights w: 2 where 1",)),
        f"{name}-fsdp": Finding(outcome="crashed", reason="lost"),
    }
    missing = Finding(outcome="not on the stub", reason=NOT_THERE, gpus="stub GPU")
    on_gpus = {**others, f"{name}-single": missing, f"{name}-ddp": replace(bad[f"{name}-ddp"], gpus="stub GPU")}
    text = page({**others, **bad}, on_gpus, {})
    assert text.count("1 different, 1 crashed") == 1
    assert "1 different, 0 crashed, 1 not on the stub" in text
    assert f"| **{name}** | not on the stub |" in text
    assert f"{name}-ddp on GPUs: weights w: 2 where 1" in text
    assert f"{name}-ddp: weights w: 2 where 1" in text
    assert "differs: 5e-1" in text
    assert "crashed [1]" in text
    assert "1. lost" in text
    assert "not run" not in page(others, others, {}).replace("## Not run", "")
    assert replace(others[f"{name}-ddp"], double=True, single=2e-5).double


def test_a_test_that_passes_as_it_is_and_not_with_autopar_differs() -> None:
    good, bad, skipped = Case(True, False, 1.0), Case(False, False, 9.0), Case(False, True, 0.0)
    plain = {"same": good, "differs": good, "fails": bad, "skipped": skipped, "lost": good}
    found = compared(plain, {"same": Case(True, False, 3.0), "differs": bad, "fails": good, "skipped": skipped}, ["tests"], "1.0")
    assert (found.plain, found.differing, found.failing, found.seconds) == (3, ["differs", "lost"], ["fails"], (1.0, 3.0))
    text = "\n".join(section({"name": found}, {"name: lost": "It looks at the strategy."}))
    assert "| name 1.0 | `tests` | 3 | 1 | 2 | 1 | 3 |" in text
    assert "- `name: differs`: a defect" in text
    assert "- `name: lost`: It looks at the strategy." in text
    assert "1 of name" in text


def test_another_projects_tests_run_from_its_folder_and_must_be_some(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_them.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    (tmp_path / "tests" / "test_trainer.py").write_text(TRAINS)
    found = cases(tmp_path, ["tests"], everywhere=True, options=("-o", "addopts="))
    assert passing(found) == {"test_them::test_good", "test_trainer::test_strategy"}
    assert set(found) == {*passing(found), "test_them::test_bad"}
    with pytest.raises(RuntimeError, match="no Trainer got autopar"):
        cases(tmp_path, ["tests/test_them.py"], everywhere=True)
    with pytest.raises(RuntimeError, match="ran no test"):
        cases(tmp_path, ["nothing"], everywhere=False)
