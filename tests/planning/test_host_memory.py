from dataclasses import replace

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.device_bytes import HostNeed
from lightning_autopar.planning.appraisal import Appraiser, host_need
from lightning_autopar.planning.memory import host_bytes
from lightning_autopar.planning.planner import make_report
from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.report.report import NothingFits
from lightning_autopar.text import format_bytes
from tests.fakes.values import GIB, MIB, footprint, gpu, inventory

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
    assert "Host memory: 94.6 GiB, assumed (twice the devices', at most 256 GiB a device; 'RTX4090-24GB@128GiB'" in words
    larger = replace(LARGE, blocks=(), optimizer_bytes=200 * GIB, parameter_bytes=4 * GIB, gradient_bytes=4 * GIB)
    reason = Appraiser(larger, parse_spec("2xRTX4090"), Constraints()).candidate(plan_on("2xRTX4090")).reason
    assert "which has 89.8 GiB (94.6 GiB assumed less the 5 % margin; " in (reason or "")


def test_what_offloads_nothing_takes_nothing_that_is_counted() -> None:
    plan = Plan(engine="single", devices=("RTX4090-24GB:0",))
    assert host_need(LARGE, plan, parse_spec("RTX4090@1GiB"), {}, precision="32-true", margin=0.05) is None
