"""Patterns in the step, the hooks and the optimizers."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.memory.trace.usage import Classifier, usage, vectors


@usage("log in all forms", flags="taken to")
class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]), reduce_fx="max")
        self.log_dict({"a": loss.detach(), "b": 1.0, "c": loss.item()}, prog_bar=True)
        self.print("loss", loss.item(), f"{loss:.3f}")
        return loss


@usage("torchmetrics", flags="taken to")
class Metrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        kwargs = {"task": "multiclass", "num_classes": 10}
        self.accuracy = torchmetrics.Accuracy(**kwargs)
        self.metrics = torchmetrics.MetricCollection([torchmetrics.F1Score(**kwargs), torchmetrics.Precision(**kwargs)], prefix="train_")
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("accuracy", self.accuracy(scores, batch[1]))
        self.log_dict(self.metrics(scores.softmax(-1), batch[1]))
        self.mean.update(loss)
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("all", self.accuracy.compute())


@usage("torchmetrics with lists", within=0.05, flags="taken to")
class ListMetrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=10)
        self.cat = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        self.auroc.update(scores.softmax(-1), batch[1])
        self.cat.update(scores.detach()[:, 0])
        return F.cross_entropy(scores, batch[1])


@usage("item", flags="taken to")
class Item(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last = loss.item() + float(loss) + loss.tolist()
        return loss


@usage("nan guards", flags="taken to")
class NanGuards(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        scores = self(batch[0])
        if not torch.isfinite(scores).all():
            raise ValueError("scores are not finite")
        loss = F.cross_entropy(scores, batch[1])
        if torch.isnan(loss) or loss.isinf().any() or loss != loss:
            return None
        assert torch.isfinite(loss)
        assert not (loss.isnan() | loss.isinf()).item()
        return torch.nan_to_num(loss)

    def on_after_backward(self) -> None:
        if not all(torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


@usage("if loss is above", flags="taken to")
class Threshold(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss > 100:
            loss = loss / loss.detach()
        if loss.detach() < getattr(self, "best", float("inf")):
            self.best = float("inf")
        return loss


@usage("known masks")
class KnownMasks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self(x)
        picked = y > 4
        if picked.any():
            return F.cross_entropy(scores[picked], y[picked]) + F.cross_entropy(scores[~picked], y[~picked])
        return F.cross_entropy(scores, y)


@usage("masks of computed values", within=None, flags="selection by values")
class UnknownMasks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        kept = losses[losses > losses.median()]
        return kept.mean() + torch.masked_select(losses, losses > 0).mean()


@usage("assignment by mask")
class MaskedAssignment(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].repeat(4, 1)
        x[x.isnan()] = 0
        x[x > 3] = 3.0
        return F.cross_entropy(self(x), batch[1].repeat(4))


@usage("where and argmax")
class Where(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        hits = (scores.argmax(-1) == batch[1]).float().mean()
        self.log("hits", hits)
        losses = F.cross_entropy(scores, batch[1], reduction="none")
        return torch.where(losses > 1, losses, losses**2).mean()


@usage("hard examples by topk")
class TopK(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()


@usage("numpy", flags="array of values")
class Numpy(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        array = scores.detach().cpu().numpy()
        assert array.shape == (128, 10)
        assert np.asarray(batch[1]).max() < 10
        weight = torch.from_numpy(np.ones(10, dtype=np.float32)) + torch.as_tensor(array.mean(0) * 0)
        return F.cross_entropy(scores, batch[1], weight=weight)


@usage("logger's experiment", trainer={"logger": CSVLogger("unused")}, within=None, flags="taken to")
class Experiment(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.experiment.log_metrics({"y": loss.item()}, self.global_step)
        self.logger.log_metrics({"x": 1.0}, step=self.global_step)
        for logger in self.loggers:
            logger.experiment.log_metrics({"x": 1})
        self.trainer.logger.log_hyperparams({})
        return loss


@usage(
    "the second of two loggers, and one by its class", trainer={"logger": [CSVLogger("unused"), TensorBoardLogger("unused")]}, within=None
)
class TwoLoggers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        board = next(each for each in self.trainer.loggers if isinstance(each, TensorBoardLogger))
        board.experiment.add_scalar("x", 1.0, self.global_step)
        self.loggers[1].log_metrics({"y": 1.0}, step=self.global_step)
        return self.loss(batch)


@usage("logger's experiment without a logger")
class NoLogger(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 100 == 0 and self.logger is not None:
            self.logger.experiment.add_scalar("x", 1.0)
        return self.loss(batch)


@usage("manual optimization")
class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@usage("accumulation by hand")
class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@usage("backward by hand in parts")
class Parts(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            self.manual_backward(self.loss((x, y)) / 4)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()


@usage("gan")
class GAN(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64)))
        self.critic = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        generator, critic = self.optimizers()
        noise = torch.randn(len(x), 16).type_as(x)
        one, zero = x.new_ones(len(x), 1), torch.zeros(len(x), 1, device=self.device)
        self.toggle_optimizer(generator)
        loss = F.binary_cross_entropy_with_logits(self.critic(self(noise)), one)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        with critic.toggle_model(sync_grad=batch_idx % 2 == 0):
            loss = F.binary_cross_entropy_with_logits(self.critic(x), one)
            loss = loss + F.binary_cross_entropy_with_logits(self.critic(self(noise).detach()), zero)
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters()) for part in (self.net, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


@usage("gradient penalty")
class Penalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_(True)
        scores = self(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + ((gradient.norm(2, dim=1) - 1) ** 2).mean()


@usage("sharpness-aware minimisation")
class SAM(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in self.parameters()]
            for p, move in zip(self.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def _scheduler(name: str) -> Any:
    rate = torch.optim.lr_scheduler
    return {
        "cosine": lambda o, m: {"scheduler": rate.CosineAnnealingLR(o, m.trainer.estimated_stepping_batches), "interval": "step"},
        "one cycle": lambda o, m: rate.OneCycleLR(o, 0.1, total_steps=int(m.trainer.estimated_stepping_batches)),
        "plateau": lambda o, m: {"scheduler": rate.ReduceLROnPlateau(o), "monitor": "val_loss"},
        "warm restarts": lambda o, m: rate.CosineAnnealingWarmRestarts(o, 10),
        "sequential": lambda o, m: rate.SequentialLR(o, [rate.LinearLR(o), rate.ExponentialLR(o, 0.9)], [5]),
        "lambda": lambda o, m: rate.LambdaLR(o, lambda step: min(1.0, step / m.trainer.max_steps)),
    }[name]


class Scheduled(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": _scheduler(self.kind)(optimizer, self)}


for _kind in ("cosine", "one cycle", "plateau", "warm restarts", "sequential", "lambda"):
    usage(f"scheduler: {_kind}", within=None)(lambda kind=_kind: Scheduled(kind))


@usage("scheduler stepped by a hook")
class OwnSchedule(Classifier):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([{"params": self.net[0].parameters(), "lr": 1e-4}, {"params": self.net[2:].parameters()}], 1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step", "frequency": 2}]


@usage("optimizer_step with warm-up")
class WarmUp(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 500:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 500) * 1e-3

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@usage("hooks that log gradients")
class GradientHooks(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({name: p.grad.norm() for name, p in self.named_parameters()})
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("lr", self.lr_schedulers() is None)
        assert self.optimizers().param_groups


@usage("clipped by norm", trainer={"gradient_clip_val": 1.0})
class ClippedByNorm(Classifier):
    pass


@usage("clipped by value", trainer={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"})
class ClippedByValue(Classifier):
    pass


@usage("own clipping", trainer={"gradient_clip_val": 1.0})
class OwnClipping(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val or 1.0, gradient_clip_algorithm="norm")


@usage("accumulation", trainer={"accumulate_grad_batches": 2})
class Accumulated(Classifier):
    pass


@usage("checkpointing")
class Checkpointed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(checkpoint(self.net, batch[0].repeat(4, 1), use_reentrant=False), batch[1].repeat(4))


@usage("reentrant checkpointing")
class Reentrant(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.net[:4], batch[0].repeat(4, 1).requires_grad_(True), use_reentrant=True)
        return F.cross_entropy(self.net[4](hidden), batch[1].repeat(4))


@usage("checkpoint_sequential with dropout")
class Sequential(Classifier):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU()) for _ in range(4)), nn.Linear(64, 10))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = torch.utils.checkpoint.checkpoint_sequential(self.net, 2, batch[0].repeat(8, 1), use_reentrant=False)
        return F.cross_entropy(scores, batch[1].repeat(8))


@usage("saved tensors packed")
class Packed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float()):
            hidden = self.net[0](batch[0]).sin().exp()
        return F.cross_entropy(self.net[2:](hidden), batch[1])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.large = float(x.shape[0])
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


@usage("autograd.Function")
class OwnFunction(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net[2:](Square.apply(self.net[0](x)))


@torch.library.custom_op("autopar_usage::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@usage("custom op without fake", traced=False, within=0.1, flags="run once for real")
class CustomOp(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(opaque(batch[0])), batch[1])


@torch.library.custom_op("autopar_usage::clear", mutates_args=())
def clear(x: Tensor) -> Tensor:
    return x * 2


@clear.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


clear.register_autograd(lambda ctx, gradient: gradient * 2)


@usage("custom op with fake")
class ClearOp(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net[4](clear(self.net[:4](batch[0]))), batch[1])


@usage("compiled in the step", within=None, flags="torch.compile")
class CompiledInStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        @torch.compile(fullgraph=True)
        def scale(x: Tensor) -> Tensor:
            return x * 2

        return F.cross_entropy(scale(torch.compile(self.net)(batch[0])), batch[1])


@usage("compiled in the constructor", within=None, flags="torch.compile")
class CompiledInConstructor(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x)


@usage("compiled in place", within=None, flags="torch.compile")
class CompiledInPlace(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile()


@usage("compiled in configure_model", within=None, flags="torch.compile")
class CompiledLate(Classifier):
    def configure_model(self) -> None:
        self.net = torch.compile(self.net)


@usage("compiled method", within=None, flags="torch.compile")
class CompiledMethod(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.compile(self.loss)  # type: ignore[method-assign]


@usage("configure_model on meta")
class OnMeta(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
            self.net.to_empty(device="cpu")
            for layer in (self.net[0], self.net[2]):
                layer.reset_parameters()


@usage("reads of the trainer", within=None, trainer={"max_epochs": 3})
class Reads(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        progress = (trainer.global_step + 1) / max(1, trainer.estimated_stepping_batches)
        assert trainer.optimizers[0].param_groups[0]["lr"] > 0
        assert trainer.training
        assert trainer.is_global_zero
        assert trainer.world_size == 1
        assert trainer.num_training_batches > 0
        assert not trainer.sanity_checking
        trainer.should_stop = trainer.current_epoch > 5
        trainer.strategy.barrier()
        trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        if "val_loss" in trainer.callback_metrics:
            progress += trainer.callback_metrics["val_loss"]
        assert self.global_rank == self.local_rank == 0
        return self.loss(batch) * progress

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


@usage("freezing by the epoch")
class Freezing(Classifier):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 3)


@usage("returns a dict")
class ReturnsDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        return {"loss": F.cross_entropy(scores, batch[1]), "scores": scores.detach(), "names": ["a"]}


@usage("returns None", within=None, flags="no loss")
class ReturnsNone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


@usage("returns None for every other batch", flags="no loss for a batch")
class ReturnsNoneNowAndThen(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx % 2 else loss


@usage("returns None at first", flags="no loss for a batch")
class ReturnsNoneAtFirst(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return loss if batch_idx else None


@usage("returns a loss without gradient", within=None, flags="no gradient")
class NoGradient(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch).detach()


@usage("skips batches", within=None, flags="-1")
class Skips(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1


@usage("no optimizer")
class NoOptimizer(Classifier):
    def configure_optimizers(self) -> None:
        return None


@usage("lbfgs", within=0.15, flags="taken to")
class LBFGS(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=3)


@usage("lbfgs with line search", within=0.3, flags="taken to")
class LineSearch(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")


class Optimized(Classifier):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Lion(torch.optim.Optimizer):
    """A third party's optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4, "b1": 0.9, "b2": 0.99})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = (state["average"] * group["b1"] + p.grad * (1 - group["b1"])).sign_()
                p.add_(update, alpha=-group["lr"])
                state["average"].lerp_(p.grad, 1 - group["b2"])
        return loss


class EightBit(Lion):
    """Keeps its state in blocks of bytes, with a scale for each, as the optimizers of bitsandbytes do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["codes"] = 0, torch.zeros(p.numel(), dtype=torch.int8)
                    state["scales"] = torch.zeros(-(-p.numel() // 64))
                state["step"] += 1
                full = F.pad(state["codes"].float(), (0, -p.numel() % 64)).view(-1, 64) * state["scales"].unsqueeze(1)
                average = full.flatten()[: p.numel()].view_as(p).lerp_(p.grad, 0.1)
                blocks = F.pad(average.flatten(), (0, -p.numel() % 64)).view(-1, 64)
                state["scales"].copy_(blocks.abs().amax(1) / 127)
                state["codes"].copy_((blocks / state["scales"].clamp_min(1e-12).unsqueeze(1)).flatten()[: p.numel()])
                p.add_(average.sign_(), alpha=-group["lr"])
        return loss


def _own(parameters: Any) -> Any:
    return Lion(parameters)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "capturable NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
    "third-party": _own,
    "8-bit": EightBit,
}
usage("optimizer: Adafactor", flags="taken to be zero")(lambda: Optimized(torch.optim.Adafactor))
for _name, _make in OPTIMIZERS.items():
    usage(f"optimizer: {_name}")(lambda make=_make: Optimized(make))


@usage("callback: finetuning", within=None, trainer={"callbacks": [callbacks.BackboneFinetuning(1)]}, flags="BackboneFinetuning")
class Finetuned(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad])


@usage("callback: weight averaging", within=None, trainer={"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]}, flags="averag")
class Averaged(Classifier):
    pass


@usage("callback: learning rate finder", within=None, trainer={"callbacks": [callbacks.LearningRateFinder(num_training_steps=3)]})
class RateFound(Classifier):
    lr = 1e-3


@usage("seeded draws and generators")
class Draws(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + torch.randn(batch[0].shape, generator=self.generator)
        chosen = torch.randperm(len(x), generator=self.generator)[:64]
        x = x[chosen] * (1 + 0 * random.random() * np.random.rand())
        return F.cross_entropy(self(x), batch[1][chosen])


@usage("random masks", within=0.05, flags="random")
class RandomMask(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].repeat(8, 1), batch[1].repeat(8)
        kept = torch.rand(len(x)) < 0.25
        return F.cross_entropy(self(x[kept]), y[kept])


@usage("inference and contexts")
class Contexts(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            teacher = self(batch[0])
        with torch.inference_mode():
            self(batch[0]).mean()
        with torch.autocast("cpu", torch.bfloat16), nullcontext():
            hidden = self.net[:4](batch[0])
        with torch.autocast("cpu", enabled=False):
            scores = self.net[4](hidden.float())
        return F.cross_entropy(scores, batch[1]) + F.mse_loss(scores, teacher)


@usage("deep copies in the step")
class Copies(Classifier):
    def on_train_start(self) -> None:
        self.__dict__["teacher"] = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        return F.cross_entropy(scores, batch[1]) + F.mse_loss(scores, self.__dict__["teacher"](batch[0]))


@usage("to and type_as in the step", batch=lambda: [vectors()[0].double(), vectors()[1].int()])
class Moves(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].to(self.device).to(torch.float32).to(self.dtype)
        return F.cross_entropy(self(x.cpu().type_as(self.net[0].weight)), batch[1].long().to(x.device, non_blocking=True))


@usage("data pointers and storage", within=None)
class Pointers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not batch[0].is_shared() or batch[0].is_contiguous()
        assert batch[0].storage_offset() == 0
        assert batch[0].untyped_storage().nbytes() == 128 * 64 * 4
        return self.loss(batch)


@usage("data of parameters")
class Data(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.data.clamp_(-2, 2)
            p.data[p.data.isnan()] = 0


@usage("data of parameters replaced", within=None)
class NewData(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.data = p.data * 1.0


@usage("GPUs named in the code", within=None)
class Named(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].cuda(non_blocking=True), batch[1].to("cuda:0")
        x = x + torch.zeros(64, device="cuda") + torch.arange(64, device=torch.device("cuda", 0)) * 0
        return F.cross_entropy(self.net.cuda()(x), y)
