import fcntl
import io
import json
import os
import pickle
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import devices_label
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Engine, Plan, offered_engines
from lightning_autopar.report.report import Candidate, NothingFits, Report
from lightning_autopar.report.table import by_category, by_part, time_words
from lightning_autopar.timing.step_seconds import Seconds
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory


def report(step: Any = None, here: Any = None, **constraints: Any) -> Report:
    return make_report(step or footprint(), here or inventory(cpu(0), cpu(1)), Constraints(**constraints))


def lines(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


WITH_ZERO: tuple[Engine, ...] = ("single", "ddp", "zero")


def test_json_has_the_documented_shape() -> None:
    found = report(allow=WITH_ZERO)
    data = json.loads(found.to_json())
    assert data == found.to_dict()
    assert set(data) == {"inventory", "footprint", "precision", "budgets", "lengths", "best", "candidates", "advice"}
    assert {"id", "kind", "free_bytes", "total_bytes"} <= set(data["inventory"]["devices"][0])
    assert {"parameters", "bytes", "flops", "assumptions"} <= set(data["footprint"])
    assert data["best"] == 0
    for candidate in data["candidates"]:
        assert set(candidate) == {
            "plan", "fits", "reason", "runnable", "bytes", "needs_bytes", "host_bytes", "headroom_bytes", "seconds", "notes", "replayed"
        }  # fmt: skip
        assert candidate["fits"] == (candidate["reason"] is None)
        assert Plan.from_dict(candidate["plan"]).to_dict() == candidate["plan"]
        if candidate["bytes"]:
            assert set(candidate["bytes"]) == set(candidate["plan"]["devices"])
            assert all({"parameters", "allocated", "reserved"} <= set(sizes) for sizes in candidate["bytes"].values())
            assert {"compute", "step"} <= set(candidate["seconds"])
            parts = [part for name, part in candidate["seconds"].items() if name != "step"]
            assert sum(parts) == pytest.approx(candidate["seconds"]["step"])
            for device in candidate["plan"]["devices"]:
                assert candidate["headroom_bytes"][device] == data["budgets"][device] - candidate["needs_bytes"][device]
    assert "not in allow=['single', 'ddp', 'zero']" in [c["reason"] for c in data["candidates"] if not c["bytes"]]
    zero = {
        allow: [c for c in report(allow=allow).to_dict()["candidates"] if c["plan"]["engine"] == "zero"]
        for allow in (WITH_ZERO, offered_engines())
    }
    assert all(c["fits"] and c["runnable"] for c in zero[WITH_ZERO])
    assert all(c["reason"].startswith("add 'zero' to allow= to use this") and not c["runnable"] for c in zero[offered_engines()])
    assert zero[WITH_ZERO]
    assert zero[offered_engines()]


def test_the_documented_fields_are_there() -> None:
    """docs/report.md names every field of the JSON."""
    documented = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    data = report(allow=("single",)).to_dict()
    assert data["advice"]
    for fields in (data, data["inventory"], data["inventory"]["devices"][0], data["footprint"], data["candidates"][0], data["advice"][0]):
        assert not [name for name in fields if f"`{name}`" not in documented]
    for fields in (data["candidates"][0]["seconds"], data["candidates"][0]["bytes"]["cpu:0"]):
        assert not [name for name in fields if f"`{name}`" not in documented]


def test_headroom_is_what_the_plan_leaves() -> None:
    found = report(here=inventory(cpu(0, 4 * GIB), cpu(1, GIB // 2)))
    for candidate in found.candidates:
        left = found.headroom_bytes(candidate)
        assert set(left) == set(candidate.needs)
        if candidate.needs and candidate.runnable:
            assert candidate.fits == (min(left.values()) >= 0)


def test_advice_in_json_says_what_to_change() -> None:
    (advice,) = report(footprint(flops=10**13), allow=("single",)).to_dict()["advice"]
    assert advice["kind"] == "setting"
    assert advice["change"] == {"allow": ["single", "ddp", "fsdp", "pipeline"]}
    assert Plan.from_dict(advice["plan"]).world_size == 2
    assert advice["speedup"] > 1.2
    assert advice["text"].startswith("allow=['single', 'ddp', 'fsdp', 'pipeline']: ")


def test_the_best_plan_is_the_candidate_it_is_the_index_of() -> None:
    found = report()
    assert found.best_candidate is found.candidates[0]
    assert found.best is found.candidates[0].plan
    assert found.shown_candidate() is found.candidates[0]


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


@pytest.mark.parametrize("stream", ["__stdout__", "__stderr__"])
def test_the_text_is_as_wide_as_the_terminal(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(footprint(batch_size=64), parse_spec("8xH100-80GB"))
    controller, terminal = os.openpty()
    monkeypatch.setattr(sys, "__stdout__", None)
    monkeypatch.setattr(sys, "__stderr__", None)
    with os.fdopen(terminal, "w") as opened, os.fdopen(controller):
        monkeypatch.setattr(sys, stream, opened)
        texts = {}
        for width in (80, 200):
            fcntl.ioctl(opened, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            texts[width] = str(found)
    assert max(map(len, texts[80].splitlines())) <= 80
    assert 150 < max(map(len, texts[200].splitlines())) <= 200
    whole = {*texts[200].split(), *["memory", "fullest"]}
    assert {word for word in texts[80].split() if word.isalpha()} <= whole  # none is broken


SIZES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "temporary_bytes", "input_bytes")


def test_kibibytes_have_no_percentage() -> None:
    found = report(replace(footprint(**dict.fromkeys(SIZES, 1000)), blocks=()))
    assert not [line for line in lines(str(found), " KiB / ") if "%" in line]
    assert lines(str(found), " KiB / ")
    assert lines(str(report()), "/ 3.8 GiB", "%")


def test_the_plan_that_needs_least_memory_is_the_one_in_the_table() -> None:
    """What allow leaves out may need less; then the message names both."""
    with pytest.raises(NothingFits) as caught:
        report(here=inventory(cpu(0, 64 * MIB), cpu(1, 64 * MIB)), excluded=dict.fromkeys(("micro_batches", "offload"), "no"))
    told = str(caught.value).splitlines()[0]
    needs = {each.plan.title(): max(each.needs.values()) for each in caught.value.report.candidates if each.needs}
    least = min(needs, key=lambda title: needs[title])
    assert f"is {least}; it needs" in told or f"({least} needs" in told


def test_brackets_of_reasons_are_not_markup() -> None:
    assert "not in allow=['single']" in " ".join(str(report(allow=("single",))).split())


def test_long_lists_collapse_but_every_engine_shows() -> None:
    step = footprint(batch_size=64, parameter_bytes=8 * GIB, activation_bytes=8 * GIB, flops=10**15)
    found = report(step, parse_spec("8xH100-80GB"))
    fit = [one for one in found.candidates if one.fits]
    unfit = [one for one in found.candidates if not one.fits and one.bytes and one.runnable]
    long = replace(found, candidates=(*fit[:1] * 12, *fit, *unfit[:1] * 6, *unfit))
    text = str(long)
    assert lines(text, f"… {12 + len(fit) - 8} more that fit")
    assert lines(text, "more that don't fit")
    for engine in {one.plan.engine for one in (*fit, *unfit)}:
        assert lines(text, engine)
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("width", [40, 60, 99, 100, 130, 150, 200])
def test_the_table_keeps_to_the_terminal_and_loses_nothing(width: int) -> None:
    step = footprint(batch_size=64, parameter_bytes=2 * GIB, activation_bytes=2 * GIB, flops=10**15)
    found = report(step, inventory(gpu(0, 24 * GIB), gpu(1), gpu(2)), allow=("single", "ddp"))
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(found.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("▸1", "a step", "cuda:1-2", "Chosen: ddp", "not in allow", "single", "%"):
        assert part.replace(" ", "") in words.replace(" ", "")  # wrapped anywhere
    assert ("headroom" in words) == (width >= 150)
    assert ("where the time goes" in words) == (width >= 150)
    assert ("why, or why not" in words) == (width >= 100)


@pytest.mark.parametrize("width", [100, 110, 150, 200])
def test_long_titles_leave_room_for_the_reasons(width: int) -> None:
    found = report(footprint(batch_size=64), parse_spec("8xH100-80GB"))
    best = found.candidates[0]
    titled = Plan(
        engine="fsdp",
        devices=best.plan.devices,
        reshard_after_forward=True,
        replicas=1,
        micro_batches=64,
        recompute=tuple(f"net.{index}" for index in range(4)),
        offload=("optimizer", "parameters"),
    )
    long = replace(best, plan=titled, fits=False, reason="can't be run by these devices alone (offload to host memory)")
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(replace(found, candidates=(best, long)).table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert any("why, or why not" in line for line in text.splitlines())
    assert any("can't be run by" in line for line in text.splitlines())


def test_where_the_time_goes_is_named_largest_first() -> None:
    assert time_words(Seconds(compute=0.2, communication=0.7, overhead=0.1)) == "communication 70 %, compute 20 %, overhead 10 %"
    assert time_words(Seconds(compute=0.99, overhead=0.01)) == "compute 99 %"
    assert time_words(None) == "–"


def test_what_cannot_be_run_yet_has_a_place_of_its_own() -> None:
    found = report()
    zero = Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=2)
    best = found.candidates[0]
    reason = "add 'zero' to allow= to use this; it would take 1 s a step"
    shown = replace(best, plan=zero, fits=False, reason=reason, held_back=True)
    assert not shown.runnable
    assert best.runnable
    text = " ".join(str(replace(found, candidates=(best, shown, shown, shown, shown))).split())
    assert "zero-2 ×2" in text
    assert "… 1 more that are held back" in text
    assert "it would take" not in text
    assert replace(found, candidates=(shown, replace(best, fits=False, reason="x")), best_index=None).shown_candidate() is not shown
    with pytest.raises(AssertionError, match="held back"):
        Candidate(plan=zero, fits=True, held_back=True)


def test_tables_by_category_and_by_part() -> None:
    found = report(here=inventory(cpu(0, 4 * GIB), cpu(1, 2 * GIB)), allow=("ddp",))

    def text(table: Any) -> str:
        console = Console(width=120, file=io.StringIO(), color_system=None, legacy_windows=False)
        console.print(table)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    categories = text(by_category(found, found.candidates[0]))
    assert lines(categories, "cpu:0", "cpu:1")
    assert lines(categories, "parameters", "128 MiB")
    assert lines(categories, "may be used", "3.8 GiB", "1.9 GiB")
    (headroom,) = lines(categories, "headroom")
    assert len(headroom.split("iB")) == 3
    parts = text(by_part(found, found.candidates[0]))
    assert lines(parts, *(candidate.plan.title() for candidate in found.candidates if candidate.seconds and candidate.fits))
    assert lines(parts, "compute", "s")
    assert lines(parts, "step", "s")


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
        report(here=inventory(cpu(0, 256 * MIB)), excluded=dict.fromkeys(("micro_batches", "offload"), "all stays as it is"))
    error = caught.value
    assert str(error).startswith("no plan fits: the allowed plan that needs least memory is single, recompute 4; it needs ")
    assert "on cpu:0, which has 243 MiB (256 MiB free less the 5 % margin)" in str(error)
    assert "Nothing fits." in str(error)
    assert any("more on cpu:0: single, recompute 4 would fit" in advice.text for advice in error.report.advice)
    assert all(f"Advice: {advice}"[:60] in str(error) for advice in error.report.advice)


def test_nothing_fits_survives_the_way_from_another_process() -> None:
    with pytest.raises(NothingFits) as caught:
        report(here=inventory(cpu(0, MIB)))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.report.to_dict() == caught.value.report.to_dict()


def test_where_every_engine_is_ruled_out_the_message_gives_the_reasons() -> None:
    with pytest.raises(NothingFits) as caught:
        report(allow=("ddp",), excluded={"ddp": "the run has its reasons"})
    message = str(caught.value).splitlines()[0]
    assert message.count("ddp: the run has its reasons") == 1
    assert "single: not in allow=['ddp']" in message


def test_what_many_rows_say_is_said_once_below_the_table() -> None:
    found = report()
    fitting = [index for index, candidate in enumerate(found.candidates) if candidate.fits][:4]
    candidates = list(found.candidates)
    for nth, index in enumerate(fitting):
        learned = f"memory corrected by +{nth % 3 + 1}.0%, as single was measured on 2026-11-27"
        notes = ("each rank makes its own draws, as always",) if nth else ("said by one row, as single was measured on 2026-11-27",)
        candidates[index] = replace(candidates[index], notes=notes, learned=(learned,))
    printed = " ".join(str(replace(found, candidates=tuple(candidates))).split())
    assert printed.count("each rank makes its own draws, as always") == printed.count("single was measured on 2026-11-27") - 1 == 1
    below = printed.partition("Note 1: ")[2]
    assert below.startswith("single was measured on 2026-11-27 Note 2: each rank makes its own draws, as always Chosen: ")
    rows = printed.partition("Note 1: ")[0]
    assert (rows.count("(note 1)"), rows.count("see note 2")) == (4, 3)


def test_what_two_rows_say_stays_in_the_rows() -> None:
    found = report()
    fitting = [index for index, candidate in enumerate(found.candidates) if candidate.fits][:2]
    notes = ("said by two",)
    candidates = [replace(each, notes=notes) if index in fitting else each for index, each in enumerate(found.candidates)]
    printed = " ".join(str(replace(found, candidates=tuple(candidates))).split())
    assert printed.count("said by two") == 2
    assert "ote 1" not in printed
