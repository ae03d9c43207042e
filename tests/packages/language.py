"""transformers with peft, and x-transformers: sequences, some of them padded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.packages.member import Member, Options, Supervised, fit, images, loaders


class Pretrained(pl.LightningModule):
    """A model of transformers, which gives its own loss, with their schedule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=5e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _sentences(count: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(count)
    lengths = torch.randint(4, 12, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, 64, (length,), generator=draw), "labels": index % 3} for index, length in enumerate(lengths)]


def _padded(samples: list[dict[str, Any]]) -> Any:
    """What transformers' DataCollatorWithPadding gives: as long as the longest sample."""
    from transformers import BatchEncoding

    words = [sample["input_ids"] for sample in samples]
    tokens = nn.utils.rnn.pad_sequence(words, batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return BatchEncoding({"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels})


def _bert(options: Options) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(num_labels=3, **sizes))
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    fit(options, Pretrained(get_peft_model(model, lora)), *loaders(_sentences, collate_fn=_padded))


def _blocks(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _gpt2(options: Options) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=2))
    fit(options, Pretrained(model), *loaders(_blocks), gradient_clip_val=1.0, accumulate_grad_batches=2)


def _llama(options: Options) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    fit(options, Pretrained(get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), lora)), *loaders(_blocks))


class Autoregressive(pl.LightningModule):
    """x-transformers' wrapper gives the loss of the next token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _decoder(options: Options) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=4, heads=2, attn_dim_head=16, attn_dropout=0.1, rotary_pos_emb=True)
    tokens = torch.randint(64, (28, 13), generator=torch.Generator().manual_seed(1))
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers))
    fit(options, Autoregressive(model), DataLoader(TensorDataset(tokens), 8, shuffle=True))


def _image_encoder(options: Options) -> None:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=4, heads=2, attn_dim_head=16, ff_dropout=0.1)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=4, attn_layers=layers)
    fit(options, Supervised(model), *loaders(images))


def _continuous(options: Options) -> None:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    def walks(count: int) -> TensorDataset:
        steps = torch.randn(count, 12, 4, generator=torch.Generator().manual_seed(count))
        return TensorDataset(steps, steps.cumsum(1))

    layers = Encoder(dim=32, depth=4, heads=2, attn_dim_head=16, use_rmsnorm=True, ff_glu=True)
    model = ContinuousTransformerWrapper(dim_in=4, dim_out=4, max_seq_len=12, attn_layers=layers)
    fit(options, Supervised(model, nn.MSELoss()), *loaders(walks))


MEMBERS = (
    Member(name="bert-lora", package="transformers", about="BERT classifier with peft's LoRA, padded by batch", train=_bert),
    Member(name="gpt2", package="transformers", about="GPT-2, clipped, two batches a step", train=_gpt2),
    Member(name="llama-lora", package="transformers", about="Llama with peft's LoRA and its dropout", train=_llama),
    Member(name="decoder", package="x-transformers", about="autoregressive decoder, rotary positions, dropout", train=_decoder),
    Member(name="image-encoder", package="x-transformers", about="ViTransformerWrapper, dropout", train=_image_encoder),
    Member(name="continuous", package="x-transformers", about="ContinuousTransformerWrapper, RMSNorm, GLU", train=_continuous),
)
