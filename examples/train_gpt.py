"""Train a small byte-level GPT on the text of Python's own standard library.

Nothing here knows of lightning_autopar but the Trainer's ``strategy="autopar"``: an ordinary LightningModule, an ordinary
DataLoader, an ordinary script.

    python examples/train_gpt.py
    AUTOPAR_DEVICES="2xcpu:2GiB" python examples/train_gpt.py --layers 6 --width 192
"""

import argparse
import math
import os
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


class Passages(Dataset[tuple[Tensor, Tensor]]):
    """Passages of ``context`` bytes at every half context, each with the bytes that follow its own."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // (self.context // 2) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * (self.context // 2)
        passage = self.text[start : start + self.context + 1].long()
        return passage[:-1], passage[1:]


def standard_library() -> tuple[bytes, bytes]:
    """Python's own source as training and validation text: every twentieth file is kept for validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    train = b"\n".join(path.read_bytes() for number, path in enumerate(files) if number % 20)
    validation = b"\n".join(path.read_bytes() for path in files[::20])
    return train, validation


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteGPT(L.LightningModule):
    """A GPT over bytes whose output layer is its embedding."""

    def __init__(
        self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128, dropout: float = 0.02,
        learning_rate: float = 3e-3, steps: int = 300,
    ) -> None:  # fmt: skip
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.embedding.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.hparams.learning_rate,
            betas=(0.9, 0.98),
        )
        warm_up = max(1, self.hparams.steps // 10)

        def rate(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = min(1.0, (step - warm_up) / max(1, self.hparams.steps - warm_up))
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.inference_mode()
    def continue_text(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """The prompt and ``length`` further bytes, drawn one by one."""
        self.eval()
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.hparams.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees")
    parser.add_argument("--batch", type=int, default=32, help="passages a step, over all devices")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", default="auto", help="Lightning's devices: auto, a number, or a list such as 0,2")
    parser.add_argument("--strategy", default="autopar", help="any of Lightning's, to compare")
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    arguments = parser.parse_args()

    L.seed_everything(1)
    train_text, validation_text = standard_library()
    train = DataLoader(Passages(train_text, arguments.context), batch_size=arguments.batch, shuffle=True, drop_last=True)
    validation = DataLoader(Passages(validation_text, arguments.context), batch_size=arguments.batch)
    model = ByteGPT(layers=arguments.layers, width=arguments.width, heads=arguments.heads, context=arguments.context, steps=arguments.steps)
    trainer = L.Trainer(
        strategy=arguments.strategy,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=arguments.steps,
        val_check_interval=max(1, arguments.steps // 3),
        limit_val_batches=8,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, train, validation)

    nats = trainer.callback_metrics["val_loss"].item()
    print(f"\nvalidation loss {nats:.3f} nats, {nats / math.log(2):.2f} bits a byte\n")
    print(model.continue_text("def ", arguments.sample))


if __name__ == "__main__":
    main()
