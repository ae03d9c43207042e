"""The LightningModule of a recipe, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch import callbacks
from torch import Tensor

from tests.fuzz.data import Module, apart, training, validation
from tests.fuzz.losses import Loss
from tests.fuzz.nets import OUTPUTS, make
from tests.fuzz.recipe import Recipe
from tests.packages.member import Member, Options


class Generated(pl.LightningModule):
    """The parts of a recipe put together as people do."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.net = make(recipe.net, recipe.dropout)
        self.criterion = Loss(recipe.loss)
        self.automatic_optimization = not recipe.manual
        if recipe.logs == "metric":
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=OUTPUTS)

    def loss(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self.recipe.loader == "combined" and isinstance(batch, dict) and "second" in batch:
            first, given, classes = self.loss(batch["first"])
            return first + 0.5 * self.loss(batch["second"])[0], given, classes
        features, classes = apart(batch)
        given = self.net(features)
        loss = self.criterion(given, classes)
        if self.recipe.loss == "penalty":
            loss = loss + 1e-3 * sum(parameter.square().sum() for parameter in self.net.parameters())
        return loss, given, classes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, given, classes = self.loss(batch)
        match self.recipe.logs:
            case "loss":
                self.log("train_loss", loss)
            case "epoch":
                self.log("train_loss", loss, on_step=False, on_epoch=True)
            case "both":
                self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            case "several":
                self.log_dict({"train_loss": loss.detach(), "mean": given.detach().mean(), "rate": self.learning_rate})
            case "metric":
                self.accuracy(given, classes)
                self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            case "greatest":
                self.log("greatest", given.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
            case "sizes":
                self.log("samples", float(len(classes)), on_step=False, on_epoch=True, reduce_fx="sum")
        if self.recipe.manual:
            self.step_by_hand(batch)
        return loss

    def step_by_hand(self, batch: Any) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch)[0])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    @property
    def learning_rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, _, _ = self.loss(batch)
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        makes: dict[str, Callable[..., Any]] = {
            "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            "adam": partial(torch.optim.Adam, lr=1e-3),
            "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
        }
        make_one = makes.get(self.recipe.optimizer, partial(torch.optim.AdamW, lr=1e-3))
        if self.recipe.optimizer == "groups":
            flat = [parameter for parameter in trained if parameter.ndim < 2]
            matrices = [parameter for parameter in trained if parameter.ndim >= 2]
            optimizers = [make_one([{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}])]
        elif self.recipe.optimizer == "two-manual":
            optimizers = [make_one(trained[::2]), make_one(trained[1::2])]
        else:
            optimizers = [make_one(trained)]
        scheduled = self.recipe.schedule != "none" and not self.recipe.manual
        return optimizers, [self.schedule(optimizer) for optimizer in optimizers] if scheduled else []

    def schedule(self, optimizer: Any) -> Any:
        match self.recipe.schedule:
            case "step":
                return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}
            case "epoch":
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            case "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
                return {"scheduler": plateau, "monitor": self.recipe.monitored}
            case _:
                cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
                return {"scheduler": cycle, "interval": "step"}


class ByHand(Generated):
    """Sums its losses up by itself."""

    total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.total += float(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("total", self.total)
        self.total = 0.0


class Followed(Generated):
    """A second network is an average of the first, and the first is drawn to it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.follower = deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss, given, classes = super().loss(batch)
        features, _ = apart(batch["first"] if isinstance(batch, dict) and "first" in batch else batch)
        with torch.no_grad():
            teacher = self.follower(features)
        return loss + 0.1 * (given - teacher).square().mean(), given, classes

    def follow(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.net.parameters(), self.follower.parameters(), strict=True):
                theirs.lerp_(mine, 0.1)


class FollowedAfter(Followed):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow()


class FollowedInside(Followed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)


class Counts(Generated):
    """Counts its batches in a buffer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("count", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


class Scales(Generated):
    """Changes its gradients."""

    def on_after_backward(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.01)


class Norms(Generated):
    """Logs the norm of its gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.net.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class Outputs(Generated):
    """Keeps what validation steps give until the epoch's end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.outputs.append(self.loss(batch)[1].detach())

    def on_validation_epoch_end(self) -> None:
        if self.outputs:
            self.log("spread", torch.cat(self.outputs).std())
            self.outputs.clear()


class Clips(Generated):
    """Clips its gradients itself."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


#: Appended to beside the class, as notebooks do.
SEEN: list[float] = []


class Appends(Generated):
    """Appends to a list that isn't its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(float(batch_idx))
        return super().training_step(batch, batch_idx)


HOOKS: dict[str, type[Generated]] = {
    "average-after": FollowedAfter,
    "average-inside": FollowedInside,
    "counts": Counts,
    "noise": Scales,
    "norms": Norms,
    "outputs": Outputs,
    "clips": Clips,
    "closure": Appends,
    "by-hand": ByHand,
}


class Counting(pl.Callback):
    """A user's own callback, with a state."""

    def __init__(self) -> None:
        self.batches, self.greatest = 0, 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.greatest = max(self.greatest, float(trainer.global_step))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "greatest": self.greatest}


def train(recipe: Recipe, options: Options) -> None:
    """Two epochs of the recipe's script with a Trainer of these options."""
    SEEN.clear()
    own: dict[str, Callable[[], list[Any]]] = {
        "stopping": lambda: [callbacks.EarlyStopping(recipe.monitored, patience=1)],
        "rates": lambda: [callbacks.LearningRateMonitor("step")],
        "averaging": lambda: [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        "own": lambda: [Counting()],
    }
    extra = own.get(recipe.callback, list)()
    bounds = {"norm": 0.5, "value": 0.01}
    clip = {"gradient_clip_val": bounds[recipe.clip], "gradient_clip_algorithm": recipe.clip} if recipe.clip in bounds else {}
    settings = {"max_epochs": 2, **options, **clip, "accumulate_grad_batches": recipe.accumulate}
    trainer = pl.Trainer(**{**settings, "callbacks": [*options["callbacks"], *extra]})
    module = HOOKS.get(recipe.hook, Generated)(recipe)
    if recipe.loader == "datamodule":
        trainer.fit(module, datamodule=Module(recipe))
    else:
        trainer.fit(module, training(recipe), validation(recipe))
    module.register_buffer("appended", torch.tensor(SEEN))


def member(recipe: Recipe) -> Member:
    """The recipe as a model that the matrix of packages can run."""
    return Member(name=f"seed-{recipe.seed}", package="", about=str(recipe), train=partial(train, recipe))
