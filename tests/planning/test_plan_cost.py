from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.device_bytes import HostNeed
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.corrections import Corrections, plan_shape
from lightning_autopar.memory.learned.step_times import StepTime, StepTimes
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_bytes import host_bytes
from lightning_autopar.planning.plan_cost import (
    WORTHWHILE,
    Appraiser,
    Predictions,
    first_of_each_configuration,
    host_need,
    links_seconds,
    simplicity,
)
from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.report.report import Candidate, NothingFits
from lightning_autopar.text import format_bytes
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory

SINGLE = Plan(engine="single", devices=("cpu:0",))
DDP = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
OFFLOADED = Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), reshard_after_forward=True, offload=OFFLOADS)
HELD_BACK = Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=3)


def appraiser(free_bytes: int = 4 * GIB, host_bytes: int = 64 * GIB) -> Appraiser:
    here = inventory(cpu(0, free_bytes), cpu(1, free_bytes), host_free_bytes=host_bytes)
    return Appraiser(footprint(), here, Constraints(memory_margin=0.0))


def at(candidate: Candidate, seconds: float) -> Candidate:
    """The candidate, as if it took so long."""
    assert candidate.seconds is not None
    took = replace(candidate.seconds, compute=candidate.seconds.compute + seconds - candidate.seconds.step)
    return replace(candidate, seconds=took)


def test_what_fits_and_cannot_be_run_says_what_it_would_take() -> None:
    found = appraiser().candidate(HELD_BACK)
    assert not found.fits
    assert found.reason is not None
    assert found.reason.startswith("add 'zero' to allow= to use this; it would take ")
    assert found.needs


def test_what_is_offloaded_must_have_room_on_the_host() -> None:
    gpus = inventory(gpu(0), gpu(1), host_free_bytes=100 * MIB)
    plan = replace(OFFLOADED, devices=tuple(device.id for device in gpus.devices))
    found = Appraiser(footprint(), gpus, Constraints()).candidate(plan)
    assert found.host is not None
    figures = f"needs {format_bytes(found.host.total)} of the host's memory, which has 95 MiB"
    assert (found.reason or "").startswith(figures)
    assert found.short_reason == figures, "both figures are in the table, too"


def test_a_host_has_room_for_all_that_a_plan_takes_of_it() -> None:
    """What is offloaded by all ranks, what CPU devices hold, what a checkpoint takes; and what building the module in each rank does."""
    known = footprint()
    here = inventory(cpu(0, 64 * GIB), cpu(1, 64 * GIB), host_free_bytes=1024 * GIB)
    roomy = Appraiser(known, here, Constraints(memory_margin=0.0))
    held = host_bytes(known, OFFLOADED, on_cpu=True)
    need = held.offload + held.checkpoint + sum(roomy.needs(OFFLOADED).values())
    for free_bytes, fits in ((need, True), (need - 1, False)):
        tight = Appraiser(known, replace(here, host_free_bytes=free_bytes), Constraints(memory_margin=0.0))
        assert tight.holds(OFFLOADED) == fits
    reason = tight.candidate(OFFLOADED).reason or ""
    assert reason.startswith(f"needs {format_bytes(need)} of the host's memory, which has ")
    assert f"{format_bytes(held.offload)} offloaded, {format_bytes(held.checkpoint)} for a checkpoint, " in reason
    assert "free as much, as the system would kill the job" in reason
    late = replace(known, configures_model=True)
    zero = Plan(engine="zero", devices=OFFLOADED.devices, zero_stage=3, offload=OFFLOADS)
    assert Appraiser(late, replace(here, host_free_bytes=2 * known.parameter_bytes), Constraints(memory_margin=0.0)).holds(zero) is False


def test_page_locked_memory_is_told() -> None:
    gpus = inventory(gpu(0), gpu(1), host_free_bytes=100 * MIB)
    plan = replace(OFFLOADED, devices=tuple(device.id for device in gpus.devices))
    reason = Appraiser(footprint(), gpus, Constraints()).candidate(plan).reason or ""
    assert f"offloaded, {format_bytes(host_bytes(footprint(), plan).pinned)} of it page-locked" in reason


def test_what_can_be_run_comes_first_then_what_could_then_what_lacks_memory() -> None:
    enough, little = appraiser(), appraiser(free_bytes=64 * MIB)
    fitting, hidden, lacking = enough.candidate(DDP), enough.candidate(HELD_BACK), little.candidate(DDP)
    assert [fitting.fits, hidden.fits, lacking.fits] == [True, False, False]
    order = sorted([lacking, hidden, fitting], key=enough.order)
    assert [id(one) for one in order] == [id(fitting), id(hidden), id(lacking)]


def test_a_simpler_plan_is_preferred_unless_another_is_worth_it() -> None:
    measure = appraiser()
    single, double = at(measure.candidate(SINGLE), 1.0), measure.candidate(DDP)
    assert measure.preferred([single, at(double, 1 - WORTHWHILE / 2)]).plan is SINGLE
    assert measure.preferred([single, at(double, 1 - 2 * WORTHWHILE)]).plan is DDP
    staged = replace(double, plan=replace(DDP, engine="pipeline", schedule="1f1b", micro_batches=2, cuts=("net.1",)))
    assert measure.preferred([at(double, 1.0), at(staged, 0.987)]).plan is DDP, "a pipeline's seconds aren't known to 1.3 %"
    assert measure.preferred([at(double, 1.0), at(staged, 0.98)]).plan is staged.plan
    assert simplicity(SINGLE) < simplicity(DDP) < simplicity(replace(DDP, micro_batches=2))


def test_predictions_are_asked_for_once() -> None:
    asked: list[Plan] = []
    here = inventory(cpu(0), cpu(1))
    predict = Appraiser(footprint(), here, Constraints()).predict
    measure = Appraiser(footprint(), here, Constraints(), lambda step, plan, there: asked.append(plan) or predict(step, plan, there))
    assert measure.holds(SINGLE)
    assert measure.candidate(SINGLE).fits
    assert asked == [SINGLE]


def test_questions_about_one_step_on_the_same_devices_share_predictions() -> None:
    asked: list[tuple[Footprint, Plan]] = []
    here, known, shared = inventory(cpu(0), cpu(1)), footprint(), Predictions()
    predict = Appraiser(known, here, Constraints()).predict

    def counted(step: Footprint, plan: Plan, there: Inventory) -> Any:
        asked.append((step, plan))
        return predict(step, plan, there)

    def measure(step: Footprint, there: Inventory, **constraints: Any) -> Appraiser:
        return Appraiser(step, there, Constraints(**constraints), counted, predictions=shared)

    held = Constraints().residuals
    assert measure(known, here, residuals=held).holds(DDP)
    less = replace(here, devices=tuple(replace(one, free_bytes=1) for one in here.devices))
    assert not measure(known, less, residuals=held, memory_margin=0.0).holds(DDP)
    assert len(asked) == 1
    measure(scaled(known, 16), here, residuals=held).holds(DDP)
    measure(known, here, residuals=held, precision="bf16-true").holds(DDP)
    assert len(asked) == 3


def test_of_a_configuration_the_first_stands_for_all() -> None:
    measure = appraiser()
    candidates = [measure.candidate(plan) for plan in (replace(DDP, micro_batches=2), DDP, replace(DDP, micro_batches=4))]
    assert [one.plan.micro_batches for one in first_of_each_configuration(candidates).values()] == [2, 1]


def test_a_run_under_load_makes_no_plan_look_slower_than_one_that_never_ran() -> None:
    """Neither where its load went unnoticed, nor where another plan ran quietly afterwards."""
    here = inventory(cpu(0), cpu(1))

    def planned(*runs: tuple[Plan, float]) -> list[Candidate]:
        names = {device.id: "cpu: CPU" for device in here.devices}
        measure = Appraiser(footprint(), here, Constraints())
        made = []
        for plan, ratio in runs:
            raw = measure.candidate(plan).seconds
            assert raw is not None
            devices = tuple(names[device] for device in plan.devices)
            took = {"predicted": raw.step, "links": links_seconds(raw), "measured": raw.step * ratio}
            made.append(StepTime(module="m", shape=plan_shape(plan), devices=devices, rates="data sheet", day="2026-11-22", **took))
        residuals = Corrections(devices=names, times=StepTimes(records=tuple(made), module="m"))
        found = make_report(footprint(), here, Constraints(residuals=residuals)).candidates
        return [replace(one, plan=replace(one.plan, reasons=())) for one in found if one.fits]

    quiet = planned()
    best, others = quiet[0].plan, [one.plan for one in quiet[1:6]]
    assert [one.plan for one in planned((best, 2.0))] == [one.plan for one in quiet]
    for other in others:
        assert planned((other, 1.0), (best, 1.9))[0].plan == best, f"{other.title()} has run as predicted"
        corrected = planned((best, 1.5), (other, 1.5))
        assert [one.plan for one in corrected] == [one.plan for one in quiet]
        assert corrected[0].step_seconds == pytest.approx(1.5 * quiet[0].step_seconds)


def test_a_device_with_less_memory_gets_fewer_samples_where_an_even_share_is_too_much() -> None:
    measure = appraiser()
    even = max(measure.needs(DDP).values())
    here = inventory(cpu(0, even * 9 // 10), cpu(1, 2 * even))
    constraints = Constraints(memory_margin=0.0, allow=("ddp",), excluded={"micro_batches": "not here", "recompute": "not here"})
    best = make_report(footprint(flops=10**13), here, constraints).best
    assert best is not None
    assert len(best.shares) == 2
    assert best.shares[0] < best.shares[1]
    assert any("divided by speed and free memory" in reason for reason in best.reasons)


#: 8 GiB of parameters, 16 GiB of optimizer state: more than a card of 24 GB has, for a plan without offload.
LARGE = footprint(blocks=32, parameter_bytes=256 * MIB, activation_bytes=64 * MIB)


def plan_on(spec: str) -> Plan:
    devices = tuple(device.id for device in parse_spec(spec).devices)
    return Plan(engine="fsdp", devices=devices, reshard_after_forward=True, offload=OFFLOADS)


def need_on(spec: str) -> HostNeed:
    found = host_need(LARGE, plan_on(spec), parse_spec(spec), {}, precision="32-true", margin=0.0)
    assert found is not None
    return found


def test_a_host_that_is_only_planned_for_holds_the_module_as_well() -> None:
    held = host_bytes(LARGE, plan_on("2xRTX4090"))
    need = need_on("2xRTX4090@64GiB")
    assert (need.offload, need.pinned, need.module, need.checkpoint) == (held.offload, held.pinned, held.module, held.checkpoint)
    assert need.module == LARGE.parameter_bytes
    assert need.total == held.offload + held.pinned + max(held.module, held.checkpoint)
    assert (need.budget, need.assumed) == (64 * GIB, False)
    here = inventory(gpu(0), gpu(1), host_free_bytes=64 * GIB)
    on_gpus = replace(plan_on("2xRTX4090"), devices=tuple(device.id for device in here.devices))
    found = host_need(LARGE, on_gpus, here, {}, precision="32-true", margin=0.0)
    assert found is not None
    assert found.module == 0, "the process that plans holds it already"


def test_of_several_hosts_the_one_with_least_to_spare_counts() -> None:
    need = need_on("2x2xRTX4090@64GiB,2xRTX4090@48GiB")
    assert (need.node, need.budget) == (2, 48 * GIB)
    assert need.offload == host_bytes(LARGE, plan_on("6xRTX4090")).offload // 3, "a third of the ranks is there"
    assert need_on("2x2xRTX4090").assumed
    assert not need_on("2x2xRTX4090@64GiB").assumed


def test_a_plan_is_refused_where_its_host_lacks_memory_and_taken_where_the_spec_says_that_it_has_it() -> None:
    with pytest.raises(NothingFits) as refused:
        make_report(LARGE, parse_spec("RTX4090@16GiB"), Constraints(allow=("single", "fsdp")))
    message = str(refused.value)
    assert "of the host's memory, which has 15.2 GiB (16 GiB free less the 5 % margin; " in message
    assert "if it has more, say so in the spec, as in 'RTX4090-24GB@64GiB'" in message
    report = make_report(LARGE, parse_spec("RTX4090@128GiB"), Constraints(allow=("single", "fsdp")))
    best = report.best_candidate
    assert best is not None
    assert best.host is not None
    words = " ".join(str(report).split())
    assert f"host {best.host.words()}" in words
    assert f"it takes {format_bytes(best.host.total)} of the host's memory, of {format_bytes(best.host.budget)}" in words
    assert report.to_dict()["candidates"][0]["host_bytes"]["total"] == best.host.total


def test_an_assumption_is_told() -> None:
    report = make_report(footprint(), parse_spec("2xRTX4090"), Constraints())
    words = " ".join(str(report).split())
    assumed = "Host memory: 94.6 GiB, assumed (twice the devices', at most 256 GiB a device; to say that a node has 128 GiB, write "
    assert f"{assumed}'RTX4090-24GB@128GiB' in the spec)" in words
    larger = replace(LARGE, blocks=(), optimizer_bytes=200 * GIB, parameter_bytes=4 * GIB, gradient_bytes=4 * GIB)
    reason = Appraiser(larger, parse_spec("2xRTX4090"), Constraints()).candidate(plan_on("2xRTX4090")).reason
    assert "which has 89.8 GiB (94.6 GiB assumed less the 5 % margin; " in (reason or "")


def test_what_offloads_nothing_takes_nothing_that_is_counted() -> None:
    plan = Plan(engine="single", devices=("RTX4090-24GB:0",))
    assert host_need(LARGE, plan, parse_spec("RTX4090@1GiB"), {}, precision="32-true", margin=0.05) is None


def test_what_a_plan_of_a_known_sort_loses_more_says_nothing_of_other_sorts() -> None:
    """A failed replay raises the loss by which its plan was judged: its own sort's, once that is known, and not that of all of its kind."""
    here = inventory(*(gpu(index) for index in range(2)))
    appraiser = Appraiser(replace(footprint(), batch_size=8), here, Constraints())
    appraiser.replays = lambda plan: True
    first, other = (Plan(engine="ddp", devices=tuple(one.id for one in here.devices), micro_batches=parts) for parts in (2, 4))
    appraiser.learn(first, 300 * MIB, 300 * MIB, failed=True)
    appraiser.hopeful = False
    assumed = appraiser.needs(other)
    appraiser.learn(first, 250 * MIB, 250 * MIB, failed=True)
    assert appraiser.needs(other) == assumed
    appraiser.learn(other, 250 * MIB, 250 * MIB, failed=True)  # by what its kind had lost it should have gone through
    third = replace(other, micro_batches=1)
    assert min(appraiser.needs(third).values()) > max(assumed.values())
