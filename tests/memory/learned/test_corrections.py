"""What earlier runs took corrects the next prediction: the arithmetic, the cache on disk, and two real runs in a row."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar import _version
from lightning_autopar.constraints import Constraints
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.learned.corrections import (
    MOST,
    MOST_BY_OTHERS,
    Corrections,
    RankRecord,
    RunRecord,
    make_record,
    make_shortage,
    plan_shape,
)
from lightning_autopar.memory.learned.memory_records import add_record, cache_folder, load_records, load_residuals, module_hash
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.preparation import planning_inputs
from tests.fakes.values import MIB, cpu, footprint, inventory
from tests.strategies.modules import Regression, loader, trainer

SINGLE = Plan(engine="single", devices=("cpu:0",))
DDP = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
DEVICES = {"cpu:0": "cpu: CPU", "cpu:1": "cpu: CPU"}
HELD = DeviceBytes(parameters=100, gradients=100, optimizer=200, activations=500, temporary=100)


def used(step_bytes: int, **values: Any) -> dict[str, Any]:
    return {"bytes": {"parameters": 100, "rest": step_bytes - 100}, "reserved_bytes": None, "context_bytes": None, **values}


def record(plan: Plan, held: Sequence[DeviceBytes], taken: Sequence[int], *, day: str = "2026-11-21", **values: Any) -> RunRecord:
    made = make_record(plan, ["cpu: CPU"] * len(held), held, [used(size, **values) for size in taken], day)
    assert made is not None
    return made


def known(*records: RunRecord) -> Corrections:
    return Corrections(records=records, devices=DEVICES)


# -- arithmetic ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [(1023, 1000), (1500, 1400), (900, 950), (1000, 1000)])
def test_the_same_plan_is_predicted_as_each_rank_was_measured(taken: tuple[int, int]) -> None:
    sizes, notes = known(record(DDP, [HELD, HELD], taken)).corrected(DDP, {"cpu:0": HELD, "cpu:1": HELD})
    assert [sizes["cpu:0"].allocated, sizes["cpu:1"].allocated] == list(taken)
    assert [sizes["cpu:0"].correction, sizes["cpu:1"].correction] == [size - HELD.allocated for size in taken]
    assert len(notes) == (taken != (1000, 1000))
    if taken == (1023, 1000):
        assert notes == ("memory corrected by +23 B, as this plan was measured on 2026-11-21",)


def test_of_several_runs_the_largest_counts() -> None:
    records = [record(SINGLE, [HELD], [size], day=f"2026-11-{day}") for size, day in ((900, 23), (1100, 22), (1050, 21))]
    assert known(*records).corrected(SINGLE, {"cpu:0": HELD})[0]["cpu:0"].allocated == 1100


@pytest.mark.parametrize(("taken", "expected"), [(1300, 1150), (700, 1000)])
def test_what_another_plan_missed_is_believed_by_half_and_only_upwards(taken: int, expected: int) -> None:
    sizes, notes = known(record(SINGLE, [HELD], [taken])).corrected(DDP, {"cpu:0": HELD, "cpu:1": HELD})
    assert [size.allocated for size in sizes.values()] == [expected, expected]
    assert bool(notes) == (expected > 1000)
    assert all("single was measured on 2026-11-21" in note for note in notes)


def test_the_same_plan_at_another_batch_misses_in_proportion_to_its_activations() -> None:
    larger = DeviceBytes(parameters=100, gradients=100, optimizer=200, activations=1000, temporary=200)
    sizes, notes = known(record(SINGLE, [HELD], [1300])).corrected(SINGLE, {"cpu:0": larger})
    assert sizes["cpu:0"].allocated == 1600 + 600
    assert "at another batch" in notes[0]


def test_a_correction_is_bounded_but_never_below_what_was_measured_downwards() -> None:
    wild = known(record(SINGLE, [HELD], [100_000]))
    assert wild.corrected(SINGLE, {"cpu:0": HELD})[0]["cpu:0"].allocated == MOST * HELD.allocated
    assert wild.corrected(DDP, {"cpu:0": HELD, "cpu:1": HELD})[0]["cpu:0"].allocated == MOST_BY_OTHERS * HELD.allocated
    down = known(record(SINGLE, [HELD], [101])).corrected(SINGLE, {"cpu:0": HELD})[0]["cpu:0"]
    assert down.allocated == 500 > 101


def test_what_a_gpu_held_around_tensors_is_taken_over() -> None:
    held = DeviceBytes(parameters=400, activations=600, rounding=300, context=500 * MIB)
    made = record(SINGLE, [held], [1000], reserved_bytes=1200, context_bytes=700 * MIB)
    sizes, notes = known(made).corrected(SINGLE, {"cpu:0": held})
    assert (sizes["cpu:0"].rounding, sizes["cpu:0"].context) == (200, 700 * MIB)
    assert "around tensors by +200 MiB" in notes[0]
    other = known(made).corrected(Plan(engine="single", devices=("cpu:1",), recompute=("net.0",)), {"cpu:1": held})[0]["cpu:1"]
    assert (other.rounding, other.context) == (300, 700 * MIB)


@pytest.mark.parametrize(
    ("residuals", "held"),
    [
        (Corrections(), HELD),
        (Corrections(records=(record(SINGLE, [HELD], [1300]),), devices={"cpu:0": "cuda: NVIDIA H100"}), HELD),
        (known(record(SINGLE, [HELD], [1300])), DeviceBytes(activations=500, occasion="validation")),
    ],
    ids=["nothing known", "another device", "not a step's peak"],
)
def test_what_was_measured_elsewhere_changes_nothing(residuals: Corrections, held: DeviceBytes) -> None:
    assert residuals.corrected(SINGLE, {"cpu:0": held}) == ({"cpu:0": held}, ())


def test_a_run_without_figures_makes_no_record() -> None:
    nothing = {"bytes": {}, "reserved_bytes": None, "context_bytes": None}
    assert make_record(SINGLE, ["cpu: CPU"], [HELD], [nothing], "2026-11-21") is None
    validation = DeviceBytes(activations=5, occasion="validation")
    assert make_record(SINGLE, ["cpu: CPU"], [validation], [used(200)], "2026-11-21") is None


def test_a_shortage_is_reckoned_with_beyond_what_was_not_enough() -> None:
    made = make_shortage(DDP, ["cpu: CPU"] * 2, [HELD, HELD], [1100, None], "2026-11-22")
    assert made is not None
    assert made.short
    sizes, notes = known(made).corrected(DDP, {"cpu:0": HELD, "cpu:1": HELD})
    assert [size.reserved for size in sizes.values()] == [1155, 1000], "the rank that ran out, a twentieth beyond what it had"
    assert notes == ("memory corrected by +155 B, as this plan ran out of memory on 2026-11-22",)
    later = record(DDP, [HELD, HELD], [1300, 1000], day="2026-11-23")
    assert known(later, made).corrected(DDP, {"cpu:0": HELD, "cpu:1": HELD})[0]["cpu:0"].reserved == 1300
    assert RunRecord.from_dict(json.loads(json.dumps(asdict(made)))) == made
    old = {name: value for name, value in asdict(made).items() if name != "short"}
    assert not RunRecord.from_dict(old).short, "written before there were any"
    with pytest.raises(ValueError, match="not a record"):
        RunRecord.from_dict({**old, "short": "yes"})


def test_a_shortage_that_the_prediction_has_no_part_in_teaches_nothing() -> None:
    assert make_shortage(SINGLE, ["cpu: CPU"], [HELD], [900], "2026-11-22") is None, "a stranger took the rest"
    assert make_shortage(SINGLE, ["cpu: CPU"], [HELD], [None], "2026-11-22") is None
    assert make_shortage(SINGLE, ["cpu: CPU"], [DeviceBytes(parameters=9, occasion="start")], [99], "2026-11-22") is None


def test_the_shape_of_a_plan_is_all_but_its_devices() -> None:
    assert plan_shape(SINGLE) == plan_shape(Plan(engine="single", devices=("cpu:1",), reasons=("because",)))
    others = [DDP, Plan(engine="single", devices=("cpu:0",), recompute=("a",)), Plan(engine="ddp", devices=("cpu:0", "cpu:1", "cpu:2"))]
    assert len({plan_shape(plan) for plan in (SINGLE, *others)}) == 4


# -- planning --------------------------------------------------------------------------------------------------------------------------


def test_planning_goes_by_the_corrected_prediction_and_says_so() -> None:
    here, step = inventory(cpu(0)), footprint()
    before = make_report(step, here, Constraints(allow=("single",)))
    best = before.best_candidate
    assert best is not None
    raw = best.bytes["cpu:0"]
    assert isinstance(raw, DeviceBytes)
    made = record(best.plan, [raw], [int(raw.allocated * 1.5)])
    after = make_report(step, here, Constraints(allow=("single",), residuals=known(made)))
    again = after.best_candidate
    assert again is not None
    assert again.plan == best.plan
    assert again.bytes["cpu:0"].allocated == pytest.approx(1.5 * raw.allocated, rel=1e-6)
    assert again.raw == best.bytes
    assert any(note.startswith("memory corrected by +50.0%") for note in again.learned)
    assert not again.notes
    found = json.loads(after.to_json())["candidates"][0]
    assert found["bytes"]["cpu:0"]["correction"] == again.bytes["cpu:0"].allocated - raw.allocated
    assert "memory corrected by +50.0%" in " ".join(str(after).split())
    tight = inventory(cpu(0, int(raw.reserved * 1.2)))
    plain = Constraints(allow=("single",), pinned=best.plan)
    assert make_report(step, tight, plain).best == best.plan
    with pytest.raises(NothingFits, match="no plan fits"):
        make_report(step, tight, Constraints(allow=("single",), pinned=best.plan, residuals=known(made)))


# -- the cache -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    assert folder.is_relative_to(tmp_path)
    return folder


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_autopar" / "residuals"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lightning_autopar" / "residuals"
    for off in ("off", "0", "OFF"):
        monkeypatch.setenv("AUTOPAR_CACHE", off)
        assert cache_folder() is None
        assert load_records("key") == ()
        add_record("key", record(SINGLE, [HELD], [1300]))
        assert load_residuals(nn.Linear(2, 2), "32-true", inventory(cpu(0))) == Corrections()
    assert list(tmp_path.iterdir()) == []


def test_records_come_back_the_newest_first(cache: Path) -> None:
    first, second = record(SINGLE, [HELD], [1300]), record(DDP, [HELD, HELD], [1300, 1200])
    add_record("key", first)
    add_record("key", second)
    assert load_records("key") == (second, first)
    assert load_records("other") == ()


def test_the_cache_is_bounded(cache: Path) -> None:
    for index in range(6):
        add_record("key", record(SINGLE, [HELD], [1300 + index]))
    assert [each.ranks[0].measured for each in load_records("key")] == [1305, 1304, 1303]
    for index in range(40):
        add_record("key", record(SINGLE, [DeviceBytes(activations=1000 * (index + 1))], [10]))
    assert len(load_records("key")) == 32
    for index in range(300):
        path = cache / f"old{index:03d}.json"
        path.write_text("{}")
        os.utime(path, (index, index))
    add_record("key", record(SINGLE, [HELD], [1300]))
    assert len(list(cache.iterdir())) == 256
    assert (cache / "key.json").exists()
    assert not (cache / "old000.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"records": 3}',
        '{"records": [3]}',
        '{"records": [{"shape": "x"}]}',
        '{"records": [{"shape": "x", "title": "single", "devices": ["cpu"], "ranks": [{"predicted": "1"}], "day": "today"}]}',
        '{"records": [{"shape": 1, "title": "", "devices": ["a"], "ranks": [{"predicted": 1, "variable": 1, "measured": 1}], "day": ""}]}',
        '{"records": [{"shape": "", "title": "", "devices": ["a"], "ranks": [{"predicted": 0, "variable": 1, "measured": 1}], "day": ""}]}',
        '{"records": [{"shape": "", "title": "", "devices": ["a"], "ranks": [{"predicted": 1, "variable": 1, "measured": -1}], "day":""}]}',
        '{"records": [{"shape": "", "title": "", "devices": [], "ranks": [], "day": ""}]}',
        "[" * 100_000,
        "x" * (1 << 21),
    ],
    ids=str.__len__,
)
def test_a_spoilt_cache_is_left_out_with_a_word(cache: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(parents=True)
    (cache / "key.json").write_text(text)
    assert load_records("key") == ()
    assert "can't be read" in caplog.text
    add_record("key", record(SINGLE, [HELD], [1300]))
    assert len(load_records("key")) == 1


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    add_record("key", record(SINGLE, [HELD], [1300]))
    assert (tmp_path / "file").read_text() == "not a folder"


def _write(worker: int) -> int:
    seen = 0
    for index in range(40):
        add_record("key", record(SINGLE, [DeviceBytes(activations=100_000 * (worker + 1) + 1000 * index)], [10 + worker]))
        seen += bool(load_records("key"))
    return seen


def test_runs_beside_each_other_cannot_spoil_it(cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(_write, range(3))) == [40, 40, 40]  # at any time it can be read
    assert 1 <= len(load_records("key")) <= 32
    assert [path.name for path in cache.iterdir()] == ["key.json"]


# -- whose it is -----------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_module_is_its_structure_and_its_code_not_its_values() -> None:
    same = Net()
    same.layer.weight.data.zero_()
    assert module_hash(Net()) == module_hash(same)
    frozen = Net()
    frozen.requires_grad_(False)
    different = [Net(16), Net(dtype=torch.float64), Other(), nn.Sequential(Net()), nn.Linear(4, 8), frozen]
    assert len({module_hash(module) for module in (same, *different)}) == len(different) + 1


def test_residuals_are_of_one_module_precision_and_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = inventory(cpu(0))
    mine = load_residuals(Net(), "32-true", here)
    assert mine.key is not None
    assert mine.devices == {"cpu:0": "cpu: CPU"}
    add_record(mine.key, record(SINGLE, [HELD], [1300]))
    assert len(load_residuals(Net(), "32-true", here).records) == 1
    assert load_residuals(Net(16), "32-true", here).records == ()
    assert load_residuals(Net(), "bf16-mixed", here).records == ()
    monkeypatch.setattr(_version, "__version__", "0.0.0")
    assert load_residuals(Net(), "32-true", here).records == ()


# -- two runs in a row -----------------------------------------------------------------------------------------------------------------

SCRATCH_BYTES = 3 * MIB


@torch.library.custom_op("autopar_tests::hungry", mutates_args=())
def hungry(x: Tensor) -> Tensor:
    """Takes memory inside that no trace can see."""
    scratch = torch.zeros(SCRATCH_BYTES // 4)
    return x + scratch[0]


@hungry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


hungry.register_autograd(lambda context, gradient: gradient)


class Hungry(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(hungry(self.net(x)), y)


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_module_whose_trace_is_off_is_predicted_right_the_second_time(
    cache: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_inputs, "calibrate", lambda _, **__: None)  # how fast the machine is doesn't matter here
    runs = []
    for index in range(2):
        torch.manual_seed(0)
        run = trainer(engine, tmp_path / str(index), max_epochs=1)
        run.fit(Hungry(), loader(64, 8), loader(8, 8))
        runs.append(run.strategy)
    first, second = runs
    for device in first.plan.devices:
        measured = [strategy.measured[device]["peak_bytes"] for strategy in runs]
        predicted = [strategy.report.best_candidate.bytes[device].allocated for strategy in runs]
        assert measured[0] > 1.1 * predicted[0]
        assert predicted[1] == pytest.approx(measured[1], rel=0.01)
    assert [note[:21] for note in second.report.best_candidate.learned if note.startswith("memory")] == ["memory corrected by +"]
    assert first.report.best_candidate.learned == ()


def test_a_run_that_is_too_short_teaches_nothing(cache: Path, tmp_path: Path) -> None:
    trainer("single", tmp_path, max_steps=2).fit(Regression(), loader(), loader())
    assert not cache.exists()


def test_a_record_knows_itself() -> None:
    made = record(SINGLE, [HELD], [1300])
    assert RunRecord.from_dict(json.loads(json.dumps(asdict(made)))) == made
    assert made.ranks == (RankRecord(predicted=1000, variable=600, measured=1300),)
