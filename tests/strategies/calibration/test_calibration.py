"""Measuring this machine: what is measured, when, and that nothing of it can hurt a run."""

from __future__ import annotations

import datetime
import io
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autopar._fork import run_forked
from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import named
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.calibration import calibration
from lightning_autopar.strategies.calibration import device_curves as calibration_cases
from lightning_autopar.strategies.calibration import engine_overhead as calibration_steps
from lightning_autopar.strategies.calibration.between_ranks import measure_host
from lightning_autopar.strategies.calibration.calibration import Measurement
from lightning_autopar.strategies.preparation import planning_inputs
from lightning_autopar.strategies.preparation.planning_inputs import Settings
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.measured_curves import Calibration, Curve, keep_calibration, load_calibration
from lightning_autopar.timing.measured_rates import HOST, RARE, MeasuredRates
from lightning_autopar.timing.rates import COLLECTIVES

ADD = Curve(subject="cpu/1", thing="add", dtype="fp32", sizes=(1.0,), seconds=(0.5,))


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return parse_spec("2xcpu:64MiB", cores=2)


def titles(inventory: Inventory, known: Calibration = Calibration(), wanted: Any = None) -> list[str]:  # noqa: B008
    return [each.title for each in calibration.measurements(inventory, known, wanted)]


# -- what there is to measure ----------------------------------------------------------------------------------------------------------


def test_what_is_measured_depends_on_what_there_is() -> None:
    assert titles(parse_spec("cpu:64MiB")) == ["operations on CPU", "1 ranks at once", "the trainer's loop", "the host"]
    ranks = [title for title in titles(parse_spec("4xcpu:64MiB", cores=2)) if "ranks" in title]
    assert ranks == ["1 ranks at once", "2 ranks at once", "4 ranks at once"]
    assert titles(parse_spec("8xH100-80GB")) == []
    assert [calibration.rank_counts(count) for count in (1, 3, 4, 6, 16)] == [(1,), (1, 2, 3), (1, 2, 4), (1, 2, 4, 6), (1, 2, 4, 8, 16)]
    assert [title for title in titles(parse_spec("8xcpu:64MiB", cores=2)) if "8" in title] == []


def test_a_thing_that_time_did_not_suffice_for_is_left_to_the_data_sheet_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve through the smallest size alone once had an LSTM's step at 58 times what it takes."""
    passed = [0.0]
    monkeypatch.setattr(calibration_cases, "time", SimpleNamespace(perf_counter=lambda: passed[0], process_time=time.process_time))

    def some(device: torch.device, **_: Any) -> Iterator[calibration_cases.Case]:
        def run_late() -> None:
            passed[0] = 1e6

        for thing, sizes in {"small": (1.0, 2.0), "half": (1.0, 2.0), "none": (1.0,)}.items():
            for size in sizes:
                yield calibration_cases.Case(thing=thing, dtype="fp32", size=size, run=run_late if thing == "half" else lambda: None)

    monkeypatch.setattr(calibration_cases, "cases", some)
    measured = {curve.thing: curve.sizes for curve in calibration_cases.measure_device(torch.device("cpu"), "cpu/1", seconds=1.0)}
    assert measured["small"] == (1.0, 2.0)
    assert not {"half", "none"} & set(measured)


def test_what_comes_after_its_time_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(device: torch.device, **_: Any) -> Iterator[calibration_cases.Case]:
        for size in (1.0, 2.0):
            yield calibration_cases.Case(thing="late", dtype="fp32", size=size, run=lambda: sum(range(20_000)))

    monkeypatch.setattr(calibration_cases, "time", SimpleNamespace(perf_counter=lambda: 0.0, process_time=time.process_time))
    monkeypatch.setattr(calibration_cases, "cases", some)
    measured = {curve.thing: curve.sizes for curve in calibration_cases.measure_device(torch.device("cpu"), "cpu/1", seconds=1e-6)}
    assert measured["late"] == (1.0, 2.0)


def test_a_thing_that_the_device_cannot_do_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(thing: str, size: float) -> calibration_cases.Case:
        return calibration_cases.Case(thing=thing, dtype="fp32", size=size, run=lambda: None)

    def fails(device: torch.device) -> Iterator[calibration_cases.Case]:
        yield case("half", 1.0)
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")

    def at_once(device: torch.device) -> Iterator[calibration_cases.Case]:
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        yield case("none", 1.0)

    monkeypatch.setattr(calibration_cases, "_attention", fails)
    monkeypatch.setattr(calibration_cases, "_recurrent", at_once)
    for name in ("_products", "_pointwise", "_convolutions", "_rows", "_images"):
        monkeypatch.setattr(calibration_cases, name, lambda *_: iter(()))
    monkeypatch.setattr(calibration_cases, "_indices", lambda _: iter([case("whole", 1.0), case("whole", 2.0)]))
    measured = {curve.thing: curve.sizes for curve in calibration_cases.measure_device(torch.device("cpu"), "cpu/1", seconds=1.0)}
    assert measured.pop("whole") == (1.0, 2.0)
    assert all(thing.startswith("issue") for thing in measured)


def test_what_is_known_is_not_measured_again() -> None:
    inventory = parse_spec("2xcpu:64MiB", cores=2)
    things = [("cpu/1", "matmul/64", 1), ("cpu/1", "adam", 1), ("cpu/1", "crowd/matmul", 1), ("cpu/1", "call", 1), (HOST, "adam", 1)]
    things += [("cpu/1", thing, 1) for thing in ("loop/ddp", "loop/fsdp", "unit", *(mark for marks in RARE.values() for mark in marks))]
    curves = [Curve(subject=subject, thing=thing, ranks=ranks, sizes=(1,), seconds=(1,)) for subject, thing, ranks in things]
    assert titles(inventory, Calibration().with_curves(curves, day="d", took_seconds=1)) == ["2 ranks at once", "a pipeline's stages"]
    curves.append(Curve(subject="cpu/1", thing="action", sizes=(1,), seconds=(1,)))
    assert titles(inventory, Calibration().with_curves(curves, day="d", took_seconds=1)) == ["2 ranks at once"]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("single", ["operations on CPU", "1 ranks at once", "2 ranks at once", "the trainer's loop", "the host"]),
        ("pipeline", ["operations on CPU", "1 ranks at once", "2 ranks at once", "the trainer's loop", "a pipeline's stages", "the host"]),
    ],
)
def test_what_no_allowed_engine_needs_is_not_measured(engine: str, expected: list[str]) -> None:
    assert titles(parse_spec("2xcpu:64MiB", cores=2), wanted=named(engine).measured) == expected


def test_another_engine_later_measures_what_it_needs_besides() -> None:
    inventory = parse_spec("2xcpu:64MiB", cores=2)
    of_ddp = [("matmul/64", 1), ("adam", 1), ("crowd/matmul", 1), ("crowd/matmul", 2), ("call", 1), ("loop/ddp", 1), ("all_reduce", 2)]
    curves = [Curve(subject="cpu/1", thing=thing, ranks=ranks, sizes=(1,), seconds=(1,)) for thing, ranks in of_ddp]
    known = Calibration().with_curves([*curves, Curve(subject=HOST, thing="adam", sizes=(1,), seconds=(1,))], day="d", took_seconds=1)
    assert titles(inventory, known, named("ddp").measured) == []
    assert titles(inventory, known, named("fsdp").measured) == ["2 ranks at once", "the trainer's loop"]
    assert titles(inventory, known, {*named("ddp").measured, "pictures"}) == ["pictures on CPU"]


def test_which_operations_a_step_needs_measured() -> None:
    def things(*works: Work) -> set[str]:
        layer = LayerFootprint(fqn="block", work=works)
        sizes = ("parameters", "trainable_parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
        more = ("activation_bytes", "temporary_bytes", "input_bytes", "batch_size")
        footprint = Footprint(**dict.fromkeys((*sizes, *more), 1), blocks=(layer,))
        return set(calibration.things_of(["ddp"], footprint)) - set(named("ddp").measured)

    assert things(Work(kind="matmul", name="aten.mm", dtype="fp32")) == set()
    assert things(Work(kind="convolution", name="aten.convolution", dtype="fp32")) == {"pictures"}
    assert things(Work(kind="pointwise", name="aten.native_batch_norm", dtype="fp32")) == {"pictures"}
    assert things(Work(kind="attention", name="aten.attention", dtype="fp32")) == {"attention"}
    assert things() == set(RARE), "a step that wasn't traced may have any of them"


def test_what_a_measurement_does_not_give_is_not_tried_at_every_start(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_cpus(devices: Any, inventory: Any, known: Calibration, wanted: Any) -> Iterator[Measurement]:
        yield Measurement(title="it", names=("it",), run=lambda _: [ADD])  # which isn't all that it was to give

    monkeypatch.setattr(calibration, "of_cpus", of_cpus)
    monkeypatch.setattr(calibration, "of_host", lambda *_: [Curve(subject=HOST, thing="adam", sizes=(1,), seconds=(1,))])
    assert calibration.calibrate(inventory).calibration.measured("cpu/1")
    assert calibration.is_calibrated(inventory)


def test_how_many_threads_share_a_core() -> None:
    inventory = parse_spec("4xcpu:64MiB", cores=2)
    assert calibration._sharing(inventory.devices[:2], inventory) == 1.0
    assert calibration._sharing(inventory.devices, inventory) == 2.0


# -- measuring -------------------------------------------------------------------------------------------------------------------------


def test_it_is_measured_once_and_kept(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    def measurements(_: Inventory, known: Calibration, wanted: Any = None) -> list[Measurement]:
        return [] if known else [Measurement(title="it", run=lambda _: [ADD])]

    def forked(function: Any, run: Any, known: Calibration, timeout_seconds: float, gpus: bool) -> list[Curve]:
        runs.append(1)
        assert "measuring how fast these 2 devices are, alone and together" in caplog.text, "it is said before it takes its time"
        return run(known)  # type: ignore[no-any-return]  # a measurement's

    monkeypatch.setattr(calibration, "measurements", measurements)
    monkeypatch.setattr(calibration, "run_forked", forked)
    assert calibration.calibrated(inventory) is None
    with caplog.at_level("INFO"):
        found = calibration.calibrate(inventory)
    assert [curve.seconds for curve in found.calibration.all()] == [(0.5,)]
    assert found.work_seconds(inventory.devices[0], Work(kind="pointwise", name="add", dtype="fp32", moved_bytes=1)) == 0.5
    assert calibration.calibrate(inventory).identity == found.identity
    assert len(runs) == 1
    with caplog.at_level("INFO"):
        calibration.calibrate(inventory, again=True)
    assert len(runs) == 2
    kept = calibration.calibrated(inventory)
    assert kept is not None
    assert kept.calibration.day


def test_what_fails_or_hangs_is_left_to_the_data_sheet(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Calibration) -> list[Curve]:
        raise RuntimeError("no such instruction")

    def hangs(_: Calibration) -> list[Curve]:
        threading.Event().wait()
        return []

    wanted = [Measurement(title=run.__name__, run=run) for run in (fails, hangs)] + [Measurement(title="works", run=lambda _: [ADD])]
    monkeypatch.setattr(calibration, "measurements", lambda *_: wanted)
    monkeypatch.setattr(calibration, "_LIMIT_SECONDS", 0.5)
    with pytest.warns(UserWarning, match="could not be measured") as warned:
        found = calibration.calibrate(inventory)
    texts = [str(each.message) for each in warned]
    assert "fails could not be measured (RuntimeError: no such instruction, at test_calibration.py:" in texts[0]
    assert "); the data sheet is used instead" in texts[0]
    assert "hangs could not be measured (the child process was stopped after 0.5 seconds" in texts[1]
    assert [curve.thing for curve in found.calibration.all()] == ["add"]


def test_all_together_has_a_limit(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 5.0, 99.0])
    monkeypatch.setattr(calibration.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(calibration, "run_forked", lambda function, run, known, **_: run(known))
    wanted = [Measurement(title=name, run=lambda _: [ADD]) for name in ("first", "late")]
    curves, failures = calibration._measure(wanted, Calibration(), 20.0, progress=False)
    assert curves == [ADD]
    assert [failure.words for failure in failures] == ["late could not be measured within 20 s"]


def test_later_measurements_know_the_earlier_ones(inventory: Inventory) -> None:
    def later(known: Calibration) -> list[Curve]:
        assert known.measured("cpu/1")
        return [Curve(subject="cpu/1", thing="later", sizes=(1,), seconds=(known.all()[0].seconds[0] * 2,))]

    wanted = [Measurement(title="add", run=lambda _: [ADD]), Measurement(title="later", run=later)]
    curves, failures = calibration._measure(wanted, Calibration(), 20.0, progress=False)
    assert not failures
    assert curves[1].seconds == (1.0,)


def test_a_measurement_leaves_no_trace_in_this_process(inventory: Inventory, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)

    def noisy(_: Calibration) -> list[Curve]:
        print("something")
        assert torch.get_default_dtype() == torch.float32
        torch.manual_seed(5)
        return [ADD]

    try:
        curves, failures = calibration._measure([Measurement(title="noisy", run=noisy)], Calibration(), 20.0, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (curves, failures) == ([ADD], [])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), torch.get_default_dtype())
    assert capfd.readouterr().out == ""


def test_what_failed_is_not_tried_at_every_start(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fails(known: Calibration) -> list[Curve]:
        raise RuntimeError("no such instruction")

    def of_cpus(*_: Any) -> Iterator[Measurement]:
        tried.append(1)
        yield Measurement(title="it", names=("it",), run=fails)

    monkeypatch.setattr(calibration, "of_cpus", of_cpus)
    keep_calibration(
        inventory, Calibration().with_curves([Curve(subject=HOST, thing="adam", sizes=(1,), seconds=(1,))], day="d", took_seconds=1)
    )
    assert not calibration.is_calibrated(inventory)
    with pytest.warns(UserWarning, match="it could not be measured"):
        calibration.calibrate(inventory)
    assert calibration.is_calibrated(inventory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration.calibrate(inventory)
    with pytest.warns(UserWarning, match="it could not be measured"):
        calibration.calibrate(inventory, again=True)
    long_ago = (datetime.date.today() - datetime.timedelta(days=8)).isoformat()
    keep_calibration(inventory, load_calibration(inventory).with_failures({"it": long_ago}))
    assert not calibration.is_calibrated(inventory)


# -- where this process has used a GPU -------------------------------------------------------------------------------------------------


def test_a_process_that_cannot_fork_asks_another_python(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibration, "unforkable", lambda: "this process has used a GPU already")
    monkeypatch.setattr(calibration, "measurements", lambda *_: [Measurement(title="it", run=lambda _: [ADD])])

    def answers(command: list[str], *, input: bytes, **_: Any) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        monkeypatch.setattr(sys, "argv", ["-c", command[-1]])
        calibration.answer()

    monkeypatch.setattr(subprocess, "run", answers)
    assert [curve.thing for curve in calibration.calibrate(inventory).calibration.all()] == ["add"]


def test_another_python_that_fails_costs_a_warning(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "unforkable", lambda: "this process has used a GPU already")

    def fails(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 3)

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.warns(UserWarning, match="this machine could not be measured"):
        assert not calibration.calibrate(inventory).calibration


# -- when it is measured ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "devices", "changes", "measures"),
    [
        ("auto", "2xcpu:64MiB", {}, "what is missing"),
        ("auto", "cpu:64MiB", {}, "nothing"),
        ("auto", "2xcpu:64MiB", {"bound": 1}, "nothing"),
        ("auto", "2xcpu:64MiB", {"fast_dev_run": True}, "nothing"),
        ("auto", "2xcpu:64MiB", {"fn": TrainerFn.VALIDATING}, "nothing"),
        ("auto", "2xcpu:64MiB", {"allow": ("single",)}, "nothing"),
        ("auto", "2xcpu:64MiB", {"plan": Plan(engine="ddp", devices=("cpu:0", "cpu:1"))}, "nothing"),
        ("auto", "2xcpu:64MiB", {"cache": "off"}, "nothing"),
        ("auto", "8xH100-80GB", {}, "asks nobody"),
        ("now", "cpu:64MiB", {}, "everything"),
        ("now", "8xH100-80GB", {}, "asks nobody"),
        ("off", "2xcpu:64MiB", {}, "asks nobody"),
    ],
)
def test_when_it_is_measured(
    rule: Any, devices: str, changes: dict[str, Any], measures: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(
        planning_inputs, "calibrate", lambda _, wanted, again=False: asked.append("everything" if again else "what is missing")
    )
    monkeypatch.setattr(planning_inputs, "calibrated", lambda _: asked.append("nothing"))
    monkeypatch.setenv("AUTOPAR_CACHE", changes.get("cache", str(tmp_path)))
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn=changes.get("fn", TrainerFn.FITTING)), fast_dev_run=changes.get("fast_dev_run", False)
    )
    settings = Settings(allow=changes.get("allow", ("single", "ddp", "fsdp")), plan=changes.get("plan"), calibrate=rule)
    planning_inputs._rates(trainer, settings, parse_spec(devices), changes.get("bound"))
    assert asked == ([] if measures == "asks nobody" else [measures])


# -- really --------------------------------------------------------------------------------------------------------------------------


def test_every_case_runs_and_has_a_size() -> None:
    def measure() -> list[tuple[str, str, float]]:
        found = []
        for case in calibration_cases.cases(torch.device("cpu")):
            case.run()
            found.append((case.thing, case.dtype, case.size))
        return found

    found = run_forked(measure, timeout_seconds=100)
    assert len(found) == len(set(found)), "each point once"
    assert all(size > 0 for _, _, size in found)
    things = {thing for thing, _, _ in found}
    assert {"matmul/1", "matmul/512", "add", "add_", "convolution", "attention.causal", "recurrent_backward", "embedding"} <= things


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = calibration_cases.cases

    def few(device: torch.device, **_: Any) -> Iterator[calibration_cases.Case]:
        for case in real(device):
            if case.thing.startswith(("convolution", "bernoulli")):
                return
            yield case

    monkeypatch.setattr(calibration_cases, "cases", few)
    device = parse_spec("cpu:64MiB", cores=1).devices[0]
    curves = run_forked(calibration._device, device, 2.0, True, (), Calibration(), timeout_seconds=100)
    by_thing = {curve.thing: curve for curve in curves}
    assert {"matmul/64", "add", "add_", "issue/forward", "issue/backward", "issue/optimizer"} <= set(by_thing)
    assert by_thing["add"].seconds[-1] > by_thing["add"].seconds[0]
    assert all(1e-7 < by_thing[f"issue/{phase}"].seconds[0] < 1 for phase in ("forward", "backward", "optimizer"))


def test_ranks_are_measured_together() -> None:
    inventory = parse_spec("2xcpu:64MiB", cores=2)

    def measured(count: int) -> list[Curve]:
        return calibration._ranks(inventory.devices[:count], {count: "cpu/1"}, 1.0, COLLECTIVES, Calibration())

    curves, alone = (run_forked(measured, count, timeout_seconds=100) for count in (2, 1))
    assert {(curve.thing, curve.ranks) for curve in curves} == {
        *((thing, 2) for thing in ("crowd/matmul", "crowd/add", "all_reduce", "all_gather", "reduce_scatter", "send"))
    }
    assert {(curve.thing, curve.ranks) for curve in alone} == {("crowd/matmul", 1), ("crowd/add", 1)}
    known = Calibration().with_curves([*curves, *alone], day="d", took_seconds=1.0)
    rates = MeasuredRates(known, DataSheet()).among(inventory.devices, inventory)
    assert rates.collective_seconds("all_reduce", 1 << 23, inventory.devices, inventory) > rates.collective_seconds(
        "all_reduce", 1 << 10, inventory.devices, inventory
    )


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_a_tiny_step_of_every_engine(engine: str) -> None:
    devices = parse_spec("2xcpu:64MiB", cores=2).devices[: 1 if engine == "single" else 2]

    def measure(_: Calibration) -> list[Curve]:
        seconds = calibration_steps.step_taken(named(engine).sample(devices, calibration_steps.TINY_BLOCKS, 1), devices).seconds
        return [Curve(subject="cpu/1", thing=engine, sizes=(1,), seconds=(seconds,))]

    curves, failures = calibration._measure([Measurement(title=engine, run=measure)], Calibration(), 60.0, progress=False)
    assert not failures
    assert 1e-5 < curves[0].seconds[0] < 10


def test_the_host_is_measured() -> None:
    curves = run_forked(measure_host, HOST, 1, timeout_seconds=100)
    assert [curve.thing for curve in curves] == ["adam"]


def test_kept_rates_are_found_again(inventory: Inventory) -> None:
    keep_calibration(inventory, Calibration().with_curves([ADD], day="d", took_seconds=1.0))
    assert load_calibration(inventory).measured("cpu/1")
    found = calibration.calibrated(inventory)
    assert found is not None
    assert (found.name, found.identity) == ("measured on d", "measured on d in 1.000 s")
