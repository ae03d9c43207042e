"""Each sentence that rules an engine out, from a trainer that has the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_autopar.strategies.preparation.trainer_options import exclusions
from tests.strategies.modules import Regression, trainer


class Iterates(Regression):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def excluded(
    folder: Path, module: Regression | None = None, stage: TrainerFn = TrainerFn.FITTING, *, on_gpus: bool = True, **options: Any
) -> dict[str, str]:
    run = trainer("single", folder, **options)
    run.strategy._lightning_module = module or Regression()
    run.state.fn = stage
    return exclusions(run, on_gpus=on_gpus)


def unstaged(folder: Path, module: Regression | None = None, stage: TrainerFn = TrainerFn.FITTING, **options: Any) -> str:
    found = excluded(folder, module, stage, **options)
    return found["pipeline"]


def test_nothing_is_ruled_out_by_what_works_everywhere(tmp_path: Path) -> None:
    assert excluded(tmp_path, callbacks=[EarlyStopping("val_loss")], gradient_clip_val=1.0, accumulate_grad_batches=2) == {}
    assert excluded(tmp_path, precision="bf16-mixed") == {}


@pytest.mark.parametrize(
    ("callback", "engines", "words"),
    [
        (ModelPruning("l1_unstructured"), ["fsdp"], "ModelPruning works on whole parameters"),
        (LearningRateFinder(), ["multi"], "LearningRateFinder judges by the loss on its own device"),
        (BatchSizeFinder(), ["micro_batches", "multi"], "BatchSizeFinder runs on one device, as in Lightning"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_callbacks(callback: Any, engines: list[str], words: str, tmp_path: Path) -> None:
    found = excluded(tmp_path, callbacks=[callback])
    assert sorted(found.keys() - {"pipeline", "zero"}) == engines  # those two have tests of their own
    assert words in found[engines[-1]]


def test_weight_averaging(tmp_path: Path) -> None:
    weight_averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    found = excluded(tmp_path, callbacks=[weight_averaging.WeightAveraging()])
    assert sorted(found) == ["pipeline", "zero"]
    assert "WeightAveraging works on the whole module's weights" in found["pipeline"]


def test_callbacks_of_training_rule_nothing_out_of_an_evaluation(tmp_path: Path) -> None:
    callbacks = [StochasticWeightAveraging(1e-2), LearningRateFinder()]
    assert excluded(tmp_path, stage=TrainerFn.VALIDATING, callbacks=callbacks) == {}


def test_precisions(tmp_path: Path) -> None:
    assert excluded(tmp_path, precision="64-true").keys() <= {"zero"}
    for precision, options in (("16-mixed", {"plugins": [MixedPrecision("16-mixed", "cpu")]}), ("transformer-engine", {})):
        try:
            found = excluded(tmp_path, **(options or {"precision": precision}))
        except ModuleNotFoundError:
            continue
        assert f"precision '{precision}' doesn't work on sharded parameters" in found["fsdp"]
        assert "multi" not in found
        assert ("pipeline" in found) == precision.startswith("transformer")


def test_an_iterator_in_training_step(tmp_path: Path) -> None:
    assert "takes dataloader_iter" in excluded(tmp_path, Iterates())["multi"]
    assert excluded(tmp_path, Iterates(), stage=TrainerFn.PREDICTING) == {}


def test_an_embedding_that_rescales_its_rows(tmp_path: Path) -> None:
    module = Regression()
    module.words = torch.nn.Embedding(4, 2, max_norm=1.0)
    assert "'words' has max_norm" in excluded(tmp_path, module)["multi"]


class OnFirst(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = [torch.ones(1, device=device) for device in ("cuda:0",)]
        return super().training_step(batch, batch_idx) * weights[0]


class OnItsOwn(Regression):
    """Says where it was, once cuda:0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * torch.ones(1, device="cuda")


def test_a_gpu_named_by_its_number(tmp_path: Path) -> None:
    assert excluded(tmp_path, OnFirst())["multi"].startswith("OnFirst.training_step names 'cuda:0', which is one GPU for all ranks; let it")
    assert "multi" not in excluded(tmp_path, OnItsOwn())
    assert "multi" not in excluded(tmp_path, OnFirst(), on_gpus=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch, on importing its compiler
def test_a_part_compiled_before_sharding(tmp_path: Path) -> None:
    module = Regression()
    module.net = torch.compile(module.net)  # type: ignore[assignment]
    assert "compiled before sharding" in excluded(tmp_path, module)["fsdp"]
    assert "a pipeline cuts the code as it was written" in unstaged(tmp_path, module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch, on importing its compiler
def test_a_part_compiled_in_place_has_no_stages(tmp_path: Path) -> None:
    module = Regression()
    module.net[0].compile()
    found = excluded(tmp_path, module)
    assert sorted(found) == ["pipeline", "zero"]
    assert "a part of the module is compiled" in found["pipeline"]


@pytest.mark.parametrize(
    "callback",
    [StochasticWeightAveraging(1e-2), ModelPruning("l1_unstructured"), BackboneFinetuning()],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_need_all_weights_have_no_stages(callback: Any, tmp_path: Path) -> None:
    assert f"{type(callback).__name__} works on the whole module's weights" in unstaged(tmp_path, callbacks=[callback])
    assert excluded(tmp_path, stage=TrainerFn.VALIDATING, callbacks=[callback]) == {}


class Average(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = [parameter.clone() for parameter in pl_module.parameters()]


class Count(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.count = sum(parameter.numel() for parameter in pl_module.parameters())


class Norms(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.logger.log_metrics({name: parameter.norm() for name, parameter in pl_module.named_parameters()})


def test_callbacks_that_read_weights_have_no_stages(tmp_path: Path) -> None:
    words = "the callback Norms reads weights (its code names 'parameters' and 'norm')"
    assert words in unstaged(tmp_path, callbacks=[Norms()]).replace("named_parameters", "parameters")
    assert excluded(tmp_path, stage=TrainerFn.VALIDATING, callbacks=[Norms()]) == {}


class Queue(Callback):
    """Keeps what a layer gives."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen: list[torch.Tensor] = []
        pl_module.net[0].register_forward_hook(lambda layer, given, output: self.seen.append(output))


def test_callbacks_that_put_hooks_on_modules_have_no_stages(tmp_path: Path) -> None:
    words = "the callback Queue puts hooks on modules (register_forward_hook), which run only in the stage that has the module"
    assert words in unstaged(tmp_path, callbacks=[Queue()])
    assert excluded(tmp_path, stage=TrainerFn.VALIDATING, callbacks=[Queue()]) == {}


class Exports(Regression):
    def on_train_epoch_end(self) -> None:
        self.write()

    def write(self) -> None:
        torch.jit.trace(self.net, torch.ones(1, 8)).save("net.pt")


class Diagonal(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.sum = torch.trace(torch.ones(2, 2))


def test_hooks_that_record_the_module_have_no_stages(tmp_path: Path) -> None:
    assert "Exports.on_train_epoch_end records the module's code" in unstaged(tmp_path, Exports())
    assert "pipeline" not in excluded(tmp_path, callbacks=[Diagonal()])


def test_a_logger_that_traces_the_module_needs_all_of_it(tmp_path: Path) -> None:
    found = excluded(tmp_path, logger=TensorBoardLogger(tmp_path, log_graph=True))
    assert set(found) == {"fsdp", "pipeline", "zero"}
    assert all("TensorBoardLogger(log_graph=True) traces the whole module" in sentence for sentence in found.values())
    assert excluded(tmp_path, logger=TensorBoardLogger(tmp_path)) == {}


def test_callbacks_that_copy_weights_have_no_stages(tmp_path: Path) -> None:
    assert "the callback Average copies or changes weights (its code names 'parameters' and 'clone')" in unstaged(
        tmp_path, callbacks=[Average()]
    )
    assert "pipeline" not in excluded(tmp_path, callbacks=[Count(), EarlyStopping("val_loss")])
    assert excluded(tmp_path, stage=TrainerFn.VALIDATING, callbacks=[Average()]) == {}


def test_parameters_without_a_shape_have_no_stages(tmp_path: Path) -> None:
    module = Regression()
    module.late = torch.nn.LazyLinear(3)
    assert "'late.weight' gets its shape in the first step" in unstaged(tmp_path, module)


def test_generators_of_its_own_have_no_stages(tmp_path: Path) -> None:
    module = Regression()
    module.net.noise = torch.Generator()
    assert "draws from 'net.noise', a generator of its own" in unstaged(tmp_path, module)


def test_a_hook_on_a_complete_gradient_has_no_stages(tmp_path: Path) -> None:
    module = Regression()
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "'net.0.weight' has a hook for when its gradient is complete" in unstaged(tmp_path, module)


def test_a_prediction_writer(tmp_path: Path) -> None:
    writer = BasePredictionWriter("epoch")
    assert "BasePredictionWriter" in excluded(tmp_path, stage=TrainerFn.PREDICTING, callbacks=[writer])["multi"]
    assert excluded(tmp_path, callbacks=[writer]) == {}
