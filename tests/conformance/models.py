"""Modules over everything but sequences, as users write them. Knows of no plan, engine or strategy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from tests.conformance.sequence_models import Base


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class ResNet(Base):
    """A small residual network whose BatchNorm statistics span the batch.

    Its activations are smooth: of the 10⁵ ReLUs of a run, one within rounding of zero would flip and move the weights by 1e-4.
    """

    def __init__(self, checkpointing: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.checkpointing = checkpointing
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 16), nn.BatchNorm1d(16), nn.SiLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return self.head(self.neck(x))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)


class VAE(Base):
    """A variational autoencoder: ``randn_like`` inside the step, Adam as everybody leaves it, the parts of the loss logged."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"lr": 1e-3, **kwargs})
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 12))

    def loss(self, batch: Any) -> Tensor:
        (x,) = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.mse_loss(self.decoder(z), x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum() / len(x)
        if self.training:
            self.log_dict({"reconstruction": reconstruction, "divergence": divergence})
        return reconstruction + 0.1 * divergence

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class GAN(Base):
    """Manual optimization with two optimizers, as in Lightning's documentation."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def adversarial(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        generator, discriminator = self.optimizers()
        noise = torch.randn(len(x), 4, device=self.device)

        self.toggle_optimizer(generator)
        generator_loss = self.adversarial(self.generator(noise), real=True)
        generator.zero_grad()
        self.manual_backward(generator_loss)
        generator.step()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        fake = self.generator(noise).detach()
        discriminator_loss = (self.adversarial(x, real=True) + self.adversarial(fake, real=False)) / 2
        discriminator.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.log_dict({"generator_loss": generator_loss, "discriminator_loss": discriminator_loss}, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.adversarial(batch[0], real=True))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=self.lr, momentum=0.5) for part in (self.generator, self.discriminator)]


class Contrastive(Base):
    """Two views of each sample, told apart from the other samples of the batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))

    def loss(self, batch: Any) -> Tensor:
        a, b = (F.normalize(self.encoder(view), dim=-1) for view in batch)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a), device=a.device))


class FrozenBackbone(Base):
    """A head trained on a frozen backbone that stays in eval mode."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            features = self.backbone(batch[0])
        return F.cross_entropy(self.head(features), batch[1])


class ConfigureModel(Base):
    """Layers that come into being in ``configure_model``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Metrics(Base):
    """torchmetrics objects, logged by step and by epoch, and an area under the curve that no mean over ranks can give."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2))
        self.train_accuracy = MulticlassAccuracy(num_classes=2, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes=2, average="macro")
        self.val_auroc = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss)
        self.log("train_loss_max", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.val_accuracy.update(logits, y)
        self.val_auroc.update(logits.softmax(-1)[:, 1], y)
        self.log("val_accuracy", self.val_accuracy, on_step=False, on_epoch=True)
        self.log("val_auroc", self.val_auroc, on_step=False, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, y))


class Sums(Base):
    """Sums up, counts and collects by itself over an epoch, and logs at its end what came of it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))

    def on_train_epoch_start(self) -> None:
        self.total, self.steps = 0.0, 0
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.total += loss.item() * len(batch[0])
        self.steps += 1
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({"train_total": self.total, "train_steps": float(self.steps), "train_loss": torch.stack(self.losses).mean()})

    def on_validation_epoch_start(self) -> None:
        self.correct, self.seen = torch.zeros((), device=self.device), 0
        self.outputs: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.correct += (logits.argmax(-1) == batch[1]).sum()
        self.seen += len(logits)
        self.outputs.append({"logits": logits, "y": batch[1]})

    def on_validation_epoch_end(self) -> None:
        logits, y = (torch.cat([output[name] for output in self.outputs]) for name in ("logits", "y"))
        self.log_dict({"val_accuracy": self.correct / self.seen, "val_loss": F.cross_entropy(logits, y)})


class GraphNetwork(Base):
    """Message passing over the edges of a batch of graphs of different sizes; the loss is a mean over graphs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.inward = nn.Linear(4, 12)
        self.messages = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 1)

    def size(self, batch: Any) -> int:
        return len(batch["y"])

    def loss(self, batch: Any) -> Tensor:
        x = self.inward(batch["x"])
        source, target = batch["edge_index"]
        for message in self.messages:
            adjacency = torch.sparse_coo_tensor(batch["edge_index"].flip(0), torch.ones_like(source, dtype=x.dtype), (len(x), len(x)))
            degree = torch.zeros(len(x), dtype=x.dtype, device=x.device).index_add_(0, target, torch.ones_like(target, dtype=x.dtype))
            x = F.relu(x + torch.sparse.mm(adjacency, message(x)) / degree.clamp(min=1)[:, None])
        graphs = torch.zeros(len(batch["y"]), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, batch["graph"], x)
        return F.mse_loss(self.head(graphs)[:, 0], batch["y"])

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr / 50, momentum=0.9)


class Regression(Base):
    """A plain multi-layer perceptron, trained by AdamW as it comes; its step returns a dict."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"lr": 1e-3, **kwargs})
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class UnusedParameters(Base):
    """One head is trained; the other, and a gate that only odd steps use, often get no gradient."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.trunk = nn.Linear(10, 16)
        self.head, self.spare = nn.Linear(16, 4), nn.Linear(16, 4)
        self.gate = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.relu(self.trunk(batch[0]))
        if batch_idx % 2:
            x = x + torch.tanh(self.gate(x))
        loss = F.cross_entropy(self.head(x), batch[1])
        self.log("train_loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.trunk(batch[0]))), batch[1])


class Nested(Base):
    """A batch of dicts in dicts, with names and lists of tensors beside the tensors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.image, self.text = nn.Linear(6, 12), nn.EmbeddingBag(20, 12)
        self.head = nn.Linear(12, 2)

    def size(self, batch: Any) -> int:
        return len(batch["name"])

    def loss(self, batch: Any) -> Tensor:
        assert len(batch["name"]) == len(batch["inputs"]["image"]), "a batch's names and tensors must be of the same samples"
        x = self.image(batch["inputs"]["image"]) + self.text(batch["inputs"]["text"])
        a, b = self.head(torch.tanh(x)).unbind(-1)
        return F.mse_loss(a, batch["targets"][0]) + F.smooth_l1_loss(b, batch["targets"][1])
