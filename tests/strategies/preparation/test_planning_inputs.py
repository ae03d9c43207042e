"""Planning in the parent: it leaves everything as it was, and says what plain Lightning would say."""

from __future__ import annotations

import random
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, NothingFits
from lightning_autopar._lightning_compat import TrainerFn, attach_data
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.pipeline.rehearsal import stage_probe
from lightning_autopar.strategies.preparation import module_findings
from lightning_autopar.strategies.preparation import planning_inputs as deciding
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.planning_inputs import Settings, decide_again, find_prospect
from lightning_autopar.strategies.trials import fewer_blocks


class Custom(Exception):
    """With a constructor that no pickle calls rightly."""

    def __init__(self, code: int, *, word: str) -> None:
        super().__init__(f"{word} {code}")
        self.code = code


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.notes: list[str] = []

    def setup(self, stage: str) -> None:
        self.notes.append(stage)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.notes.append("step")
        random.random()
        numpy.random.rand()
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.notes.append("optimizers")
        return torch.optim.Adam(self.parameters())


class Dataset(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.randn(12, 4), torch.randn(12, 1))
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        torch.rand(1)
        return super().__getitem__(index)


def trainer_for(module: Any, loader: Any, root: Path, strategy: Any = None, **options: Any) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy or AutoParallelStrategy(devices="2xcpu:1GiB"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": loader})
    return trainer


def plan(trainer: Any, *, spec: str = "2xcpu:1GiB", elastic: bool = False, **settings: Any) -> Decision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        allowed = Settings(**{"allow": ("single", "ddp", "fsdp"), **settings})
        return find_prospect(trainer, allowed, (parse_spec(spec), None), elastic=elastic).decision()


def test_nothing_is_changed_by_planning(tmp_path: Path) -> None:
    module, generator = Net(), torch.Generator().manual_seed(3)
    dataset = Dataset()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
    trainer = trainer_for(module, loader, tmp_path)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    names = set(vars(module))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy(), generator.get_state()
    plan(trainer)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert torch.equal(states[3], generator.get_state())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in weights.items())
    assert (module.notes, dataset.read, set(vars(module)), list(tmp_path.iterdir())) == ([], 0, names, [])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert trainer.train_dataloader is None


@pytest.mark.parametrize("where", ["prepare_data", "setup", "loader", "dataset", "collate"])
def test_what_the_users_data_code_raises_is_raised_as_it_is(where: str, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Custom(7, word=where)

    module: Any = Net()
    loader: Any = DataLoader(Dataset(), batch_size=4)
    if where == "dataset":
        loader.dataset.__class__ = type("Failing", (Dataset,), {"__getitem__": fail})
    elif where == "collate":
        loader.collate_fn = fail
    elif where == "loader":
        module.train_dataloader, loader = fail, None
    else:
        setattr(module, where, fail)
    trainer = trainer_for(module, loader, tmp_path)
    with pytest.raises(Custom, match=f"{where} 7") as caught:
        plan(trainer)
    assert caught.value.code == 7
    assert caught.traceback[-1].name == "fail"


def test_a_missing_loader_or_step_is_lightnings_own_error(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="train_dataloader"):
        plan(trainer_for(Net(), None, tmp_path))

    class Stepless(pl.LightningModule):
        pass

    with pytest.raises(MisconfigurationException, match="No `training_step"):
        plan(trainer_for(Stepless(), DataLoader(Dataset()), tmp_path))


def test_a_step_that_takes_too_long_to_look_at_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any, **kwargs: Any) -> Any:
        time.sleep(60)

    monkeypatch.setattr(module_findings, "trace", wait)
    monkeypatch.setattr(module_findings, "TRACE_SECONDS", 2.0)
    trainer = trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path)
    with pytest.warns(UserWarning, match="guessed: the child process was stopped after 2 seconds"):
        decision = find_prospect(trainer, Settings(allow=("ddp",)), (parse_spec("2xcpu:1GiB"), None)).decision()
    assert any("guess" in text for text in decision.report.footprint.assumptions)
    assert decision.run_plan.plan.engine == "ddp"


def test_a_loader_that_never_gives_a_batch_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Dataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60)

    monkeypatch.setattr(module_findings, "TRACE_SECONDS", 0.3)
    with pytest.raises(RuntimeError, match=r"needs the run's first batch, but couldn't load it: .* stopped after 0.3 seconds"):
        plan(trainer_for(Net(), DataLoader(Slow(), batch_size=4), tmp_path))


def test_a_notebook_that_cant_have_workers_runs_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(Net(), DataLoader(Dataset(), 4), tmp_path)
    assert plan(trainer, allow=("ddp",)).report.best
    monkeypatch.setattr(deciding, "unforkable", lambda: "this process has used a GPU already")
    assert plan(trainer, allow=("ddp",)).report.best  # the script is started again for the other ranks
    monkeypatch.setattr(deciding, "runs_script", lambda: False)
    report = plan(trainer, allow=("single", "ddp", "fsdp", "pipeline")).report
    assert report.best is not None
    assert report.best.world_size == 1
    several = [candidate for candidate in report.candidates if candidate.plan.world_size > 1]
    assert {candidate.plan.engine for candidate in several} >= {"ddp", "pipeline"}
    for candidate in several:
        assert "no workers can be forked from it" in (candidate.reason or ""), candidate
    with pytest.raises(NothingFits, match="restart the kernel and call fit before anything else"):
        plan(trainer, allow=("ddp",))
    with pytest.raises(ValueError, match="no workers can be forked from it"):
        plan(trainer, plan=Plan(engine="ddp", devices=("cpu:0", "cpu:1")))


def test_devices_of_the_catalogue_are_not_run_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be planned for, not run on; give devices that are here"):
        plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path), spec="8xH100-80GB")


def test_a_module_that_fits_nowhere_is_told_with_the_table(tmp_path: Path) -> None:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(4096, 4096)

    with pytest.raises(NothingFits, match="needs") as caught:
        plan(trainer_for(Large(), DataLoader(Dataset(), batch_size=4), tmp_path), spec="2xcpu:64MiB")
    report = caught.value.report
    assert report.best is None
    assert {candidate.plan.engine for candidate in report.candidates} >= {"single", "ddp", "fsdp"}
    assert "ddp" in str(caught.value)
    assert report.advice


def test_batches_of_each_device_are_planned_as_such(tmp_path: Path) -> None:
    loader = DataLoader(Dataset(), batch_size=1)
    with pytest.raises(NothingFits, match="a batch of 1 sample"):
        plan(trainer_for(Net(), loader, tmp_path), allow=("ddp",))
    decision = plan(trainer_for(Net(), loader, tmp_path), allow=("ddp",), batch="per_device")
    assert decision.run_plan.batch == "per_device"
    whole = plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=8), tmp_path), allow=("ddp",), batch="per_device")
    split = plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=8), tmp_path), allow=("ddp",))
    assert whole.candidate.bytes["cpu:0"].input == 2 * split.candidate.bytes["cpu:0"].input


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.blocks(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twice(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first = self.head(batch[0])
        return nn.functional.mse_loss(self.head(self.blocks(self.blocks(batch[0]))) + first, batch[1])


class Counting(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


def staged(module: Any, root: Path, **settings: Any) -> Decision:
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)
    trainer = trainer_for(module, loader, root)
    return plan(trainer, **{"allow": ("pipeline",), **settings})


def pinned(*cuts: str, micro_batches: int = 2) -> Plan:
    devices = tuple(f"cpu:{index}" for index in range(len(cuts) + 1))
    return Plan(engine="pipeline", devices=devices, cuts=cuts, schedule="gpipe", micro_batches=micro_batches)


def test_where_a_module_is_cut_into_stages_goes_to_the_engine(tmp_path: Path) -> None:
    decision = staged(Stack(), tmp_path)
    staging = decision.run_plan.finding
    assert decision.run_plan.plan.engine == "pipeline"
    assert staging is not None
    assert staging.refusal is None
    assert staging.hooks["training_step"].blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert set(decision.run_plan.plan.cuts) <= set(staging.hooks["training_step"].crossings)
    assert staged(Stack(), tmp_path, plan=pinned("blocks.3")).run_plan.finding is not None


def test_stages_are_looked_for_where_a_plan_may_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody asked for stages")

    monkeypatch.setattr(stage_probe, "probe_stages", refuse)
    assert staged(Stack(), tmp_path, allow=("single", "ddp")).run_plan.findings == {}
    assert staged(Stack(), tmp_path, allow=("single", "pipeline"), spec="1xcpu:1GiB").run_plan.findings == {}
    module = Stack()
    module.noise = torch.Generator()  # type: ignore[assignment]
    assert staged(module, tmp_path, allow=("single", "pipeline")).run_plan.findings == {}, "it is ruled out anyway"


def test_an_engine_that_fails_to_look_at_the_step_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("stages")

    monkeypatch.setattr(stage_probe, "probe_stages", fail)
    decision = staged(Stack(), tmp_path, allow=("single", "pipeline"), elastic=True)
    (words,) = {each.reason for each in decision.report.candidates if each.plan.engine == "pipeline"}
    assert words == "whether it runs the step right couldn't be checked, as looking at it failed (KeyError: 'stages')"
    assert decision.report.footprint.traced, "what others found holds"


def test_an_engine_that_looks_long_waits_until_a_plan_of_its_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_stages(*args: Any, **kwargs: Any) -> Any:
        return stage_probe.refused("it has no stages")

    note = "not checked on the first batch, as another plan was chosen"
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)
    trainer, two, allow = trainer_for(Stack(), loader, tmp_path), parse_spec("2xcpu:1GiB"), ("single", "pipeline")
    decision = plan(trainer, allow=allow)
    assert decision.look is not None
    assert decision.run_plan.plan.engine == "single"
    assert decision.look.findings.later == ("pipeline",)
    assert {each.notes for each in decision.report.candidates if each.plan.engine == "pipeline"} == {(note,)}
    staged_after_all = decide_again(trainer, decision, two, plan=pinned("blocks.2"))
    assert staged_after_all.run_plan.finding is not None
    assert staged_after_all.candidate.notes == ()
    monkeypatch.setattr(stage_probe, "probe_stages", no_stages)
    with pytest.raises(ValueError, match="can't be taken: it has no stages"):
        decide_again(trainer, decision, two, plan=pinned("blocks.2"))
    everything = plan(trainer, allow=allow, elastic=True)
    assert everything.look is not None
    assert everything.look.findings.later == (), "an elastic run may come to any plan"


def test_what_a_late_look_rules_out_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plan of those that are left is the one that is found where all engines look at once."""

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        return replace(probe(*args, **kwargs), uncuttable={"blocks.2": "it is read by Python"}, notes=("a note",))

    probe = stage_probe.probe_stages
    monkeypatch.setattr(stage_probe, "probe_stages", narrowed)
    found = [staged(Stack(), tmp_path, allow=("pipeline", "fsdp"), elastic=elastic, objective="memory") for elastic in (False, True)]
    assert replace(found[0].run_plan.plan, reasons=()) == replace(found[1].run_plan.plan, reasons=()), "they count the plans that fit"
    assert found[0].candidate.notes == found[1].candidate.notes


def test_an_engine_that_has_not_looked_at_the_step_is_not_moved_to(tmp_path: Path) -> None:
    trainer = trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path)
    decision, two = plan(trainer, plan=Plan(engine="ddp", devices=("cpu:0", "cpu:1"))), parse_spec("2xcpu:1GiB")
    assert decide_again(trainer, decision, two, plan=Plan(engine="single", devices=("cpu:1",))).run_plan.plan.engine == "single"
    with pytest.raises(ValueError, match="'fsdp' hasn't looked at the run's first batch, so it"):
        decide_again(trainer, decision, two, plan=Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), reshard_after_forward=True))


def test_a_module_without_stages_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NothingFits, match=r"the step can't be cut before any of its blocks: '(head|blocks\.\d)' runs"):
        staged(Twice(), tmp_path)
    with pytest.raises(ValueError, match="can't be taken: the step can't be cut before any of its blocks"):
        staged(Twice(), tmp_path, plan=pinned("blocks.1"))
    decision = staged(Twice(), tmp_path, allow=("single", "pipeline"), elastic=True)
    assert decision.run_plan.plan.engine == "single"
    assert decision.run_plan.finding is None
    assert decision.run_plan.findings["pipeline"].refusal is not None


def test_a_block_that_no_stage_begins_with_is_no_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = stage_probe.probe_stages

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        return replace(probe(*args, **kwargs), uncuttable={"blocks.2": "it is read by Python", "blocks.3": "it is read by Python"})

    monkeypatch.setattr(stage_probe, "probe_stages", narrowed)
    assert staged(Stack(), tmp_path).run_plan.plan.cuts == ("blocks.1",)
    with pytest.raises(ValueError, match=r"cuts at 'blocks\.2', with which no stage may begin: it is read by Python"):
        staged(Stack(), tmp_path, plan=pinned("blocks.2"))


def test_a_step_that_counts_in_a_buffer_is_not_run_in_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the step changes the buffer 'count', which each part of a batch would do"):
        staged(Counting(), tmp_path, plan=pinned("blocks.2"))
    assert staged(Counting(), tmp_path, plan=pinned("blocks.2", micro_batches=1)).run_plan.finding is not None
    assert staged(Counting(), tmp_path).run_plan.plan.micro_batches == 1
    alone = Plan(engine="single", devices=("cpu:0",), micro_batches=2)
    with pytest.raises(ValueError, match="the step changes the buffer 'count', which each part of a batch would do"):
        staged(Counting(), tmp_path, plan=alone, allow=("single",))
    assert staged(Stack(), tmp_path, plan=alone, allow=("single",)).run_plan.plan == alone


class Skipping(Stack):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx <= self.last else None


@pytest.mark.parametrize("last", [-1, 3])
def test_a_step_that_returns_none_runs_on_one_device(last: int, tmp_path: Path) -> None:
    found = staged(Skipping(last), tmp_path, allow=("single", "ddp", "fsdp"))
    reasons = {each.plan.engine: each.reason for each in found.report.candidates if each.plan.world_size > 1}
    words = "training_step returns None in some steps, where Lightning ends a run on several devices; return a loss in every step"
    assert (found.run_plan.plan.engine, reasons["ddp"], reasons["fsdp"]) == ("single", words, words)


def test_a_batch_is_not_run_again_in_parts_of_which_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has pinned a plan that runs it in parts, which is told what isn't known."""
    monkeypatch.setattr(fewer_blocks, "FLOPS_A_THREAD", 0)
    unknown = "whether parts of a batch give its loss is not known (a step of "

    def planned(**settings: Any) -> Any:
        return staged(Stack(), tmp_path, **{"allow": ("single", "ddp"), **settings}).run_plan

    assert str(planned().undivided).startswith(unknown)
    pinned = planned(plan=Plan(engine="single", devices=("cpu:0",), micro_batches=2))
    assert pinned.undivided is None
    assert pinned.unknown.startswith(unknown)


class TwoLoaders(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["near"], batch_idx) + self.layer(batch["far"][0]).square().mean()


def two(near: int, far: int, **options: Any) -> dict[str, Any]:
    """Loaders of so many samples each, eight to a batch."""
    data = {name: TensorDataset(torch.randn(count, 4), torch.randn(count, 1)) for name, count in (("near", near), ("far", far))}
    return {name: DataLoader(each, 8, **options) for name, each in data.items()}


@pytest.mark.parametrize(
    ("together", "holders", "words"),
    [
        (((8, 4),), (2,), None),
        (((8, 8), (3, 3)), (2,), None),
        (((8, 8), (3, 4)), (2,), "3 and 4 samples"),
        (((6, 3),), (2, 3), None),
        (((6, 3), (4, 2)), (2, 3), "6 and 3 samples, so that their parts weigh differently on each of 2 devices or micro-batches"),
        (((8,), ()), (2,), None),
        ((), (2, 3), None),
    ],
)
def test_several_loaders_batches_are_dealt_out_where_each_rank_gets_the_same_share_of_each(
    together: Any, holders: tuple[int, ...], words: str | None
) -> None:
    found = deciding.unevenly_dealt(together, holders)
    assert found is None if words is None else words in str(found)


def test_a_later_step_of_several_loaders_is_looked_at_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(NothingFits, match="the loaders' batches of one step have 3 and 4 samples"):
        plan(trainer_for(TwoLoaders(), two(27, 28), tmp_path), allow=("ddp",))
    for near, far, options in ((24, 16, {}), (27, 28, {"drop_last": True})):
        assert plan(trainer_for(TwoLoaders(), two(near, far, **options), tmp_path), allow=("ddp",)).run_plan.plan.engine == "ddp"
