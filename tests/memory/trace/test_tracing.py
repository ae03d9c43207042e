"""What tracing costs, what it leaves alone, what it says of validation, and that nothing that goes wrong in it escapes planning."""

from __future__ import annotations

import random
import resource
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_autopar import plan
from lightning_autopar._fork import run_forked
from lightning_autopar._lightning_compat import TrainerFn, attach_data
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.trace import trace as tracing
from lightning_autopar.memory.trace.first_batch import FirstBatch, first_batch
from lightning_autopar.memory.trace.guessed_footprint import guess
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.strategies.preparation.planning_inputs import Settings, find_prospect
from tests.conformance.zoo import ZOO
from tests.memory.measured import Copies, make_trainer, peak_bytes, real_peak_bytes
from tests.memory.trace.test_trace import GPT, Module, images, mlp, resnet, tokens, vectors
from tests.memory.trace.test_usage import contents, same
from tests.memory.trace.usage import USAGES, Classifier

# -- cost ---------------------------------------------------------------------------------------------------------------------------------


class Llama(pl.LightningModule):
    """Llama's architecture of some size, without storages."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = width // 128
        config = LlamaConfig(
            hidden_size=width, intermediate_size=hidden, num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=heads
        )
        with torch.device("meta"):
            self.net = LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_a_billion_parameters_take_no_memory() -> None:
    """Nor the minutes of such a step; the seconds of a larger one's plan are bounded where its example is tested."""
    module = Llama(2048, 5504, 22)

    def run() -> tuple[int, Any]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        footprint = trace(module, None, torch.ones((1, 1024), dtype=torch.long))
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, footprint

    extra_bytes, footprint = run_forked(run)
    assert footprint.traced, footprint.assumptions
    assert footprint.parameters == sum(parameter.numel() for parameter in module.parameters()) > 1e9
    assert len(footprint.blocks) == 22
    assert extra_bytes < 1 << 30


def test_parameters_mapped_from_a_file_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.zeros(4096, 4096)}, tmp_path / "weights.safetensors")
    module = Module(nn.Sequential(nn.Linear(128, 4096), nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 10)))
    module.net[1].weight = nn.Parameter(load_file(tmp_path / "weights.safetensors")["weight"])
    address = module.net[1].weight.data_ptr()

    def run() -> int:
        small = Module(nn.Sequential(nn.Linear(128, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 10)))
        assert trace(small, None, next(iter(DataLoader(vectors(), 8)))).traced  # the code's own pages are there from now on
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert trace(module, None, next(iter(DataLoader(vectors(), 8)))).traced
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    assert run_forked(run) < 40 << 20  # of 64 MiB
    assert module.net[1].weight.data_ptr() == address


# -- untouched ----------------------------------------------------------------------------------------------------------------------------


def state_of_loader(loader: Any) -> Any:
    """What a loader, its sampler and its data set remember."""
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)]
    generators = [part.generator.get_state() for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    return generators, [sorted(vars(part)) for part in parts if hasattr(part, "__dict__")]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_the_zoo_is_untouched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, data = ZOO[name].module(), ZOO[name].data()
    trainer = make_trainer()
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": None, "val_dataloaders": None, **data})

    def batches() -> tuple[FirstBatch, FirstBatch]:  # setting the module up and drawing is what only a child may do
        return first_batch(module, trainer, "fit"), first_batch(module, trainer, "validate", prepared=True)

    batch, validation = (part.batch for part in run_forked(_bare(batches)))
    loader = data.get("train_dataloaders")
    before, attributes, loaded = contents(module), dict(vars(trainer)), state_of_loader(loader)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.get_default_dtype()
    functions = torch.zeros, torch.compile, Tensor.numpy, Tensor.to, Tensor.__format__, nn.Module._apply, torch.autograd.backward
    footprint = trace(module, trainer, batch, validation=validation)
    assert footprint.traced, footprint.assumptions
    assert footprint.evaluation_bytes
    assert same(states, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.get_default_dtype()))
    assert same(before, contents(module))
    assert vars(trainer) == attributes
    assert same(loaded, state_of_loader(loader))
    assert functions == (torch.zeros, torch.compile, Tensor.numpy, Tensor.to, Tensor.__format__, nn.Module._apply, torch.autograd.backward)
    assert list(tmp_path.rglob("*")) == []


def _bare(batches: Any) -> Any:
    """The same without what doesn't survive a pickle."""
    return lambda: tuple(FirstBatch(batch=part.batch, batch_size=part.batch_size) for part in batches())


def test_planning_by_hand_leaves_the_module_alone() -> None:
    module = Module(GPT(dropout=0.1))
    batch = next(iter(DataLoader(tokens(), 4)))
    before, states = contents(module), (torch.get_rng_state(), random.getstate())
    report = plan(module, batch=batch, devices="2xcpu:1GiB")
    assert report.best is not None
    assert same(before, contents(module))
    assert same(states, (torch.get_rng_state(), random.getstate()))


# -- validation ---------------------------------------------------------------------------------------------------------------------------


def test_validation_is_traced_with_its_own_batch() -> None:
    data = vectors()
    small, large = next(iter(DataLoader(data, 16))), next(iter(DataLoader(data, 512)))
    module = Module(mlp())
    assert trace(module, None, small).evaluation_bytes is None
    found = [trace(module, None, small, validation=batch).evaluation_bytes for batch in (small, large)]
    assert found[1] is not None
    # The batch, and two layers' outputs at a time.
    assert found[1] == pytest.approx(512 * (128 * 4 + 8) + 2 * 512 * 256 * 4, rel=0.05)
    assert found[0] == pytest.approx(found[1] / 32, rel=0.1)
    plain, evaluated = trace(module, None, small), trace(module, None, small, validation=large)
    assert peak_bytes(plain) == peak_bytes(evaluated)


def test_a_traced_validation_changes_nothing_else_that_is_known_of_the_step() -> None:
    """Such as which layers take their statistics over the batch: validation leaves the module in eval mode."""
    module, batch = Module(resnet()), next(iter(DataLoader(images(), 4)))
    plain, evaluated = trace(module, None, batch), trace(module, None, batch, validation=batch)
    assert plain.batch_norm
    other = [field.name for field in fields(plain) if getattr(plain, field.name) != getattr(evaluated, field.name)]
    assert other == ["evaluation_bytes", "evaluation_parts"]


def test_a_validation_step_that_fails_is_an_assumption() -> None:
    class Fails(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("no such thing")

    batch = [torch.randn(8, 64), torch.arange(8)]
    footprint = trace(Fails(), None, batch, validation=batch)
    assert footprint.traced
    assert footprint.evaluation_bytes is None
    assert any("validation step" in assumption and "KeyError" in assumption for assumption in footprint.assumptions)


def fitting(module: pl.LightningModule, loader: Any, **options: Any) -> pl.Trainer:
    validation = options.pop("val_dataloaders", None)
    trainer = make_trainer(**options)
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": loader, "val_dataloaders": validation})
    return trainer


def decided(trainer: pl.Trainer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_prospect(trainer, Settings(allow=("single",)), (parse_spec("1xcpu:1GiB"), None)).decision().report.footprint


class Watching(CSVLogger):
    """Is not to begin a run in planning."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    def watch(self, module: nn.Module) -> None:
        raise AssertionError(module)


class Wraps(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.logger.watch(pl_module)
        pl_module.net = nn.Sequential(pl_module.net, nn.Identity())


class Opens(pl.Callback):
    """Leaves the module alone, so that it is not to be called."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        raise AssertionError(stage)


class Needs(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.seen = trainer.strategy.nothing


def test_what_callbacks_make_of_the_module_in_setup_is_planned_for() -> None:
    module, data = ZOO["vae"].module(), ZOO["vae"].data()
    module.net = nn.Linear(2, 2)
    trainer = make_trainer(callbacks=[Opens(), Needs(), Wraps()], logger=(logger := Watching()))
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": None, "val_dataloaders": None, **data})
    batch = first_batch(module, trainer, "fit")
    assert isinstance(module.net, nn.Sequential)
    assert not hasattr(module, "seen")
    assert [sentence.split(" (")[0] for sentence in batch.unprepared] == ["the callback Needs couldn't be set up in planning"]
    assert trainer.loggers == [logger]


@pytest.mark.parametrize(
    ("options", "evaluated"), [({}, True), ({"num_sanity_val_steps": 0}, True), ({"limit_val_batches": 0}, False)], ids=str
)
def test_planning_looks_at_validation_where_there_is_any(options: dict[str, Any], evaluated: bool) -> None:
    trainer = fitting(Module(mlp()), DataLoader(vectors(), 16), val_dataloaders=DataLoader(vectors(), 64), **options)
    found = decided(trainer).evaluation_bytes
    assert (found is not None and found > 64 * 128 * 4) is evaluated


def test_without_validation_data_there_is_no_figure() -> None:
    assert decided(fitting(Module(mlp()), DataLoader(vectors(), 16))).evaluation_bytes is None


# -- guesses ------------------------------------------------------------------------------------------------------------------------------

#: Parts of the table whose step is one of known layers, seen once: what a guess is for.
GUESSED = (
    "gan",
    "clipped by norm",
    "frozen parameters",
    "hugging face llama",
    "tied weights",
    "bert",
    "nn.Transformer",
    "lstm",
    "cells in a loop",
    "embedding bags",
    "experts by capacity",
    "optimizer: SGD",
    "optimizer: Adafactor",
    "averaged copy inside",
    "configure_model on meta",
    "lbfgs",
)


@pytest.mark.parametrize("name", [*GUESSED, "resnet", "gpt"])
@pytest.mark.filterwarnings("ignore")
def test_a_guess_is_enough_and_not_absurd(name: str) -> None:
    made = {"resnet": (lambda: Module(resnet()), images), "gpt": (lambda: Module(GPT()), tokens)}
    if name in made:
        build, data = made[name]
        module, batch = build(), next(iter(DataLoader(data(), 8)))
    else:
        module, batch = USAGES[name].module(), USAGES[name].batch()
    size = len(batch[0])
    footprint = guess(module, None, FirstBatch(batch=batch, batch_size=size), stage="fit", dtype=None, reason="a test")
    real = real_peak_bytes(module, Copies(batch))
    assert real <= peak_bytes(footprint) * (1 + footprint.margin)
    assert peak_bytes(footprint) < 4 * real


# -- faults -------------------------------------------------------------------------------------------------------------------------------


class Faulty(TorchDispatchMode):
    """Raises at one operation, or where a fake tensor is asked for its device.

    Args:
        at: at which one, counted from 1.
        error: what is raised.
        kind: ``"aten"`` for operations, ``"prim"`` for such questions.
    """

    def __init__(self, at: int, error: BaseException, kind: str) -> None:
        super().__init__()
        self.left, self.error, self.kind = at, error, kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func.namespace == self.kind
        if self.left == 0 and func.namespace == self.kind:
            raise self.error
        return func(*args, **(kwargs or {}))


FAULTS = (RuntimeError("broken"), MemoryError(), AssertionError(), KeyError("x"), RecursionError("too deep"), SystemExit(3))


def _planted(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, kind: str) -> Any:
    """The footprint of a step that such a fault strikes, under fake tensors as well as for real."""
    original = tracing.fake_copy

    def planted(value: Any, *args: Any, **kwargs: Any) -> Any:
        copied = original(value, *args, **kwargs)
        if isinstance(copied, pl.LightningModule):
            step = copied.training_step

            def faulty(batch: Any, batch_idx: int) -> Any:
                with Faulty(at, error, kind):
                    loss = step(batch, batch_idx)
                    loss.backward(retain_graph=True)
                    return loss

            copied.__dict__["training_step"] = faulty
        return copied

    monkeypatch.setattr(tracing, "fake_copy", planted)
    return decided(fitting(Module(GPT(depth=1)), DataLoader(tokens(), 4)))


@pytest.mark.parametrize("at", [1, 17, 60])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_fault_at_any_operation_ends_in_a_flagged_plan(at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    footprint = _planted(monkeypatch, at, error, "aten")
    assert not footprint.traced
    assert footprint.margin > 0
    assert type(error).__name__ in footprint.assumptions[0], "no process may end by it"
    assert footprint.parameter_bytes > 0


def test_a_process_that_ends_while_it_traces_leaves_the_step_to_be_run_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    footprint = _planted(monkeypatch, 1, RuntimeError("broken"), "prim")
    assert footprint.margin == tracing._MARGIN_REAL
    assert footprint.assumptions[0].endswith("killed by SIGABRT), and was run once for real on the CPU instead")
    assert not footprint.traced


@pytest.mark.parametrize("name", ["_Tracing.measure", "BlockWatcher", "layers", "MemoryTracker.mark", "guess", "first step"])
def test_a_fault_of_our_own_ends_in_a_flagged_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ours")

    if name == "guess":  # with it gone as well, the other child's own guess is left
        monkeypatch.setattr(tracing, "guess", fail)
        monkeypatch.setattr(tracing._Tracing, "measure", fail)
    elif name == "first step":
        monkeypatch.setattr(tracing.BareStep, "training_step", fail)
    else:
        owner, _, attribute = name.rpartition(".")
        monkeypatch.setattr(getattr(tracing, owner) if owner else tracing, attribute, fail)
    footprint = decided(fitting(Module(mlp()), DataLoader(vectors(), 16)))
    assert not footprint.traced
    assert footprint.margin > 0
    assert "ours" in footprint.assumptions[0]
