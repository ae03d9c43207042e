import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.memory.spec import parse_spec
from lightning_autopar.planning.candidates import Constraints, SplitFinding
from lightning_autopar.planning.planner import make_report
from lightning_autopar.planning.report import Candidate, NothingFits, Report, devices_label
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory


def report(step: Any = None, here: Any = None, **constraints: Any) -> Report:
    return make_report(step or footprint(), here or inventory(cpu(0), cpu(1)), Constraints(**constraints))


def lines(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_json_has_the_documented_shape() -> None:
    found = report(allow=("single", "ddp", "zero"))
    data = json.loads(found.to_json())
    assert data == found.to_dict()
    assert set(data) == {"inventory", "footprint", "best", "candidates", "advice"}
    assert {"id", "kind", "free_bytes", "total_bytes"} <= set(data["inventory"]["devices"][0])
    assert {"parameters", "bytes", "flops", "assumptions"} <= set(data["footprint"])
    assert data["best"] == 0
    for candidate in data["candidates"]:
        assert set(candidate) == {"plan", "fits", "reason", "bytes", "seconds", "notes", "replayed"}
        assert candidate["fits"] == (candidate["reason"] is None)
        assert Plan.from_dict(candidate["plan"]).to_dict() == candidate["plan"]
        if candidate["bytes"]:
            assert set(candidate["bytes"]) == set(candidate["plan"]["devices"])
            assert all({"parameters", "allocated", "reserved"} <= set(sizes) for sizes in candidate["bytes"].values())
            assert {"compute", "step"} <= set(candidate["seconds"])
    assert [c["reason"] for c in data["candidates"] if not c["bytes"]] == [
        "not in allow=['single', 'ddp', 'zero']",
        "engine 'zero' is not built yet",
    ]


def test_the_best_plan_is_the_candidate_it_is_the_index_of() -> None:
    found = report()
    assert found.best_candidate is found.candidates[0]
    assert found.best is found.candidates[0].plan


def test_a_candidate_fits_or_says_why_not() -> None:
    plan = Plan(engine="single", devices=("cpu:0",))
    with pytest.raises(AssertionError):
        Candidate(plan=plan, fits=False)
    with pytest.raises(AssertionError):
        Candidate(plan=plan, fits=True, reason="it doesn't")


def test_the_table_names_the_model_the_devices_and_the_plans() -> None:
    step = footprint(assumptions=("routing is taken to be even",), margin=0.05)
    text = str(report(step, allow=("single", "ddp"), split=SplitFinding(difference=0.25)))
    assert max(map(len, text.splitlines())) <= 110
    assert lines(text, "Model: 33,554,432 parameters", "batch of 8")
    assert lines(text, "parameters 128 MiB", "gradients 128 MiB", "optimizer 256 MiB", "activations 512 MiB")
    assert lines(text, "Assumed: routing is taken to be even")
    assert lines(text, "Devices: cpu:0-1 (4 GiB free of 4 GiB each)")
    assert lines(text, "▸1", "/ 3.8 GiB", "%", "s")
    assert lines(text, "Chosen:")
    assert "0.25 of it" in " ".join(text.split())
    assert lines(text, "–", "fsdp ×2", "not in")


def test_brackets_of_reasons_are_not_markup() -> None:
    assert "not in allow=['single']" in " ".join(str(report(allow=("single",))).split())


def test_long_lists_collapse_but_every_engine_shows() -> None:
    step = footprint(batch_size=64, parameter_bytes=8 * GIB, activation_bytes=8 * GIB, flops=10**15)
    text = str(report(step, parse_spec("8xH100-80GB")))
    assert lines(text, "more that fit")
    assert lines(text, "more that don't fit")
    assert lines(text, "–", "single")
    assert lines(text, "–", "ddp ×")
    assert len(text.splitlines()) < 50
    fitting = footprint(batch_size=64, flops=10**15)
    text = str(report(fitting, parse_spec("8xH100-80GB")))
    assert lines(text, "single")
    assert lines(text, "ddp ×8")
    assert lines(text, "fsdp ×8")


def test_a_gpu_is_called_by_its_number_and_others_work_is_shown() -> None:
    text = str(report(here=inventory(gpu(0, 40 * GIB, utilization=0.5), gpu(1))))
    assert lines(text, "cuda:0 (NVIDIA H100 80GB HBM3, 40 GiB free of 79 GiB, 50% busy)")
    assert "GPU-0000" not in text


def test_devices_are_drawn_together() -> None:
    assert devices_label([cpu(index) for index in (0, 1, 2, 4, 10)]) == "cpu:0-2,4,10"
    assert devices_label([replace(gpu(0), index=None), cpu(3)]) == "cpu:3, GPU-0000"
    assert devices_label([cpu(0)]) == "cpu:0"


def test_nothing_fits_says_what_is_needed_what_is_there_and_what_would_help() -> None:
    with pytest.raises(NothingFits) as caught:
        report(here=inventory(cpu(0, 256 * MIB)))
    error = caught.value
    assert str(error).startswith("no plan fits: the one that needs least memory, single, recompute 4, needs ")
    assert "on cpu:0, which has 243 MiB (256 MiB free less the 5 % margin)" in str(error)
    assert "Nothing fits." in str(error)
    assert any("more on cpu:0: single, recompute 4 would fit" in advice for advice in error.report.advice)
    assert all(f"Advice: {advice}"[:60] in str(error) for advice in error.report.advice)


def test_nothing_fits_survives_the_way_from_another_process() -> None:
    with pytest.raises(NothingFits) as caught:
        report(here=inventory(cpu(0, MIB)))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.report.to_dict() == caught.value.report.to_dict()


def test_where_every_engine_is_ruled_out_the_message_gives_the_reasons() -> None:
    with pytest.raises(NothingFits, match=r"no plan fits: single: not in allow=\['zero'\].*zero: engine 'zero' is not built yet"):
        report(allow=("zero",))
