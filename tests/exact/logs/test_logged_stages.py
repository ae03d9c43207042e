"""What stages of a pipeline log: everybody has it, once. The stages here are marks in a step that each rank runs up to its own end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_autopar.exact.absent.absent_tensor import hole_of
from lightning_autopar.exact.data.batch_structure import take_rows
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, share_of
from lightning_autopar.exact.logs.combined_values import OPTIONS, Combiner, Entry
from lightning_autopar.exact.logs.rank_exchange import Exchange
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.step.micro_batches import take_part
from tests.exact.logs.test_self_log import MemoryLogger, Module, Recorder, assert_same, loader
from tests.ranks import run_ranks


class Ended(BaseException):
    """A stage's own code is over."""


class Staged(Module):
    """Logs in the first stages, too; what the code before a stage's own has is an absent tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = MeanMetric()
        self.stage: int | None = None
        self.at = 0

    @property
    def owns_now(self) -> bool:
        return self.stage is None or self.at == self.stage

    def mark(self, stage: int) -> None:
        self.at = stage
        if self.stage is not None and stage > self.stage:
            raise Ended

    def here(self, value: Tensor) -> Tensor:
        return value if self.owns_now else hole_of(tuple(value.shape), value.dtype, value.device, "a value of another stage")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mark(0)
        self.log("input", self.here(batch[0].mean()), on_epoch=True, prog_bar=True)
        self.inputs(self.here(batch[0].mean()), weight=len(batch[0]))
        self.log("inputs", self.inputs, on_step=True, on_epoch=True)
        self.mark(1)
        self.log_dict({"top": self.here(batch[0].amax())}, reduce_fx="max", on_epoch=True)
        self.log("twice", self.here(batch[0].mean()), on_epoch=True)  # and twice more by the last stage
        self.mark(2)
        self.log("rows", float(len(batch[0])), reduce_fx="sum")
        self.mark(3)
        if batch_idx == 1:
            self.log("rare", self.here(batch[0].mean()), rank_zero_only=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mark(0)
        self.log("val_input", self.here(batch[0].mean()), add_dataloader_idx=dataloader_idx > 0)
        self.mark(3)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mark(3)
        super().test_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("input_at_end", self.inputs.compute())


class MarkedStages(DDPStrategy):
    """Each rank runs its stages' own part of the step, in parts of the batch, and differentiates the whole on its own."""

    def __init__(self, stages: tuple[tuple[int, ...], ...], parts: int) -> None:
        super().__init__(process_group_backend="gloo")
        self.stages, self.parts = stages, parts
        self.current: BatchShare | None = None

    @property
    def replicas(self) -> int:
        return self.world_size // len(self.stages)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.logging = GlobalLogging(trainer, lambda: self.current, parts=True, ranks_per_replica=len(self.stages))
        self.logging.install()

    def teardown(self) -> None:
        self.logging.uninstall()
        super().teardown()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        rank, dealing = self.global_rank // len(self.stages), Dealing.even(self.replicas)
        of, batch = take_rows(batch, rank, dealing)
        self.current = share_of(of, rank, dealing)
        return super().batch_to_device(batch, device, dataloader_idx)

    def run(self, step: Callable[..., Any], parts: int, args: Any, kwargs: Any) -> None:
        module: Any = self.lightning_module
        assert self.current is not None
        mine = self.stages[self.global_rank % len(self.stages)]
        for number in range(parts):
            for stage in mine if number % 2 else reversed(mine):
                module.stage = stage
                rows = take_part(args[0], number, parts)
                try:
                    with self.logging.part(self.current.part(number, parts), rows, number, stage=stage, owns=lambda: bool(module.owns_now)):
                        output = step(rows, *args[1:], **kwargs)
                        self.logging.note_loss(output)
                except Ended:
                    continue
                finally:
                    module.stage = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        with self.logging.step():
            self.run(module.training_step, self.parts, args, kwargs)
        assert self.logging.loss is not None
        loss = module.compute(args[0])[2]
        return loss + (self.logging.loss - loss.detach())

    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        with self.logging.step():
            module: Any = self.lightning_module
            self.run(module.validation_step, 1, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> None:
        with self.logging.step():
            module: Any = self.lightning_module
            self.run(module.test_step, 1, args, kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.current is not None
        loss: Tensor = super().backward(closure_loss * self.current.weight, *args, **kwargs)
        for parameter in self.lightning_module.parameters():  # type: ignore[union-attr]
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)  # type: ignore[union-attr]
        return loss

    def configure_ddp(self) -> None:
        """Nothing here goes through DDP."""


def trainer_of(rank: int, world_size: int, stages: Any, parts: int, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    if stages:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", WORLD_SIZE=str(world_size), NODE_RANK="0", LOCAL_RANK=str(rank))
        arguments |= {"strategy": MarkedStages(stages, parts), "use_distributed_sampler": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    return pl.Trainer(accelerator="cpu", devices=world_size, callbacks=list(callbacks), **{"logger": False, **quiet, **arguments})


def run_staged(rank: int, world_size: int, stages: Any, parts: int, samples: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, recorder, logger = Staged(), Recorder(), MemoryLogger()
    stopping = EarlyStopping("val_auroc/dataloader_idx_0", patience=1, mode="max")
    checkpoint = ModelCheckpoint(folder, "{epoch}-{loss_epoch:.5f}", monitor="loss_epoch", save_top_k=2)
    trainer = trainer_of(
        rank, world_size, stages, parts, recorder, stopping, checkpoint, logger=logger, max_epochs=3, enable_checkpointing=True
    )
    trainer.fit(module, loader(samples, 5), [loader(samples, 5, 1), loader(7, 4, 2)])
    tested = trainer.test(module, loader(samples, 5, 3), verbose=False)
    # Which losses the step itself saw isn't for the other stages to know.
    read = [each for each in module.read if isinstance(each, float)]
    return {
        "seen": recorder.seen,
        "logged": logger.seen,
        "tested": tested,
        "read": read,
        "epochs": trainer.current_epoch,
        "best": os.path.basename(checkpoint.best_model_path),
        "score": float(checkpoint.best_model_score or 0.0),
        "wrapped": sorted(name for name in module.inputs.__dict__ if name in ("forward", "update", "compute")),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("world_size", "stages", "samples", "parts"),
    [(2, ((0, 1), (2, 3)), 13, 3), (2, ((0, 2), (1, 3)), 11, 3), (4, ((0, 1, 2), (3,)), 13, 1)],
    ids=["two stages", "interleaved", "two replicas"],
)
def test_everything_logged_is_what_one_device_logs(world_size: int, stages: Any, samples: int, parts: int, tmp_path: Any) -> None:
    (single,) = run_ranks(run_staged, 1, None, 1, samples, str(tmp_path / "single"))
    assert single["seen"][2][1].keys() >= {"rare", "input_step", "inputs_step"}
    for rank, result in enumerate(run_ranks(run_staged, world_size, stages, parts, samples, str(tmp_path / "staged"))):
        assert len(result["seen"]) > 8
        if rank:  # Lightning gives the logger's calls to rank 0 alone
            result["logged"] = single["logged"]
        assert_same(result, single, f"rank {rank}")


class Hooks(pl.LightningModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = torch.nn.Linear(4, 1), what

    def compute(self, batch: list[Tensor]) -> tuple[None, None, Tensor]:
        return None, None, self.layer(batch[0]).mean()

    owns_now, stage = True, None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.compute(batch)[2]

    def on_train_batch_end(self, *_: Any) -> None:
        rank = torch.distributed.get_rank()
        if self.what == "hole":
            self.log("norm", hole_of((), torch.float32, torch.device("cpu"), "the gradient of a parameter"))
        elif self.what == "tensor":
            self.log("norm", torch.tensor(1.0 + rank))
        elif rank:  # some ranks only
            self.log("norm", torch.tensor(3.0))
        self.log("seconds", 2.0 + rank)
        self.log("alike", torch.tensor(5.0), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_hooks(rank: int, world_size: int, what: str) -> Any:
    recorder = Recorder()
    trainer = trainer_of(rank, world_size, ((0,), (1,)), 2, recorder, max_steps=2)
    try:
        trainer.fit(Hooks(what), loader(8, 4))
    except RuntimeError as error:
        return str(error)
    return recorder.seen[-1][1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_hooks_log() -> None:
    for result in run_ranks(run_hooks, 2, "hole"):
        assert "'norm' is logged in the hook on_train_batch_end of a pipeline" in result
    for result in run_ranks(run_hooks, 2, "tensor"):
        assert "'norm', logged in on_train_batch_end, isn't the same on all ranks of a pipeline: 1 on rank 0, 2 on rank 1" in result
    for result in run_ranks(run_hooks, 2, "some"):
        assert result["norm"] == 3
        assert result["seconds"] == 2, "the first rank's, with a warning"
        assert result["alike"] == 5, "once, not once a rank"


def run_exchange(rank: int, world_size: int) -> Any:
    """Each rank logs other names than the other; counts the collectives that pickle."""
    exchange = Exchange(Combiner(), device=torch.device("cpu"), ranks_per_replica=world_size)
    exchange.open()
    pickled: list[int] = []
    gather = torch.distributed.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        pickled.append(1)
        gather(*args, **kwargs)

    torch.distributed.all_gather_object = counted
    options = tuple("mean" if option == "reduce_fx" else False for option in OPTIONS)
    found = []
    for step, rows in enumerate((4, 4, 3, 4)):
        entries = [
            Entry(
                collection=0,
                fx="training_step",
                name=f"{rank}-{index}",
                options=options,
                dataloader_idx=None,
                is_metric=False,
                result=f"training_step.{rank}-{index}",
                value=torch.tensor(float(step + index)),
                batch_size=rows,
                rows=rows,
                of=rows,
                stage=rank,
            )
            for index in range(70 if rank and step == 3 else 2)
        ]
        agreed, together = exchange(entries)
        found.append([(entry.name, float(value or 0), size, entry.of) for entry, value, size in together])
        assert not agreed
    return found, len(pickled)


def test_who_logs_what_is_told_once() -> None:
    (first, pickled), (second, _) = run_ranks(run_exchange, 2)
    assert first == second
    assert first[0] == [("0-0", 0, 4, 4), ("0-1", 1, 4, 4), ("1-0", 0, 4, 4), ("1-1", 1, 4, 4)]
    assert first[2] == [("0-0", 2, 3, 3), ("0-1", 3, 3, 3), ("1-0", 2, 3, 3), ("1-1", 3, 3, 3)]
    assert len(first[3]) == 72, "more than one exchange has room for"
    assert first[3][-1] == ("1-69", 72, 4, 4)
    assert pickled == 2, "once for each combination of names"
