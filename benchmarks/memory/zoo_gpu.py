"""Models of the memory benchmark on a GPU: large enough that 2 MiB segments are small beside them. Knows no measurement.

Every model comes in two sizes: for a GPU, and for a machine without one, where the benchmark must run from end to end all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from memory.job import Learner, MakeOptimizer, classification, hugging_face, own_loss, regression


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A model whose optimizer is chosen by the benchmark.

    Args:
        name: unique.
        build: makes the module, given what makes its optimizer.
        batch: makes a batch as the module's step gets it.
    """

    name: str
    build: Callable[[MakeOptimizer], pl.LightningModule]
    batch: Callable[[], Any]


def gpu_models(*, small: bool) -> list[GpuModel]:
    """Every model, in a fixed order.

    Args:
        small: sizes for a CPU.
    """
    return [*_language(small), *_encoders(small), *_sight(small), *_by_hand(small)]


def hugging_face_model(
    name: str, model: str, config: str, batch: Callable[[], Any], *, checkpointing: bool = False, **settings: Any
) -> GpuModel:
    def build(optimizer: MakeOptimizer) -> pl.LightningModule:
        net = hugging_face(model, config, checkpointing=checkpointing, **settings)
        return Learner(net, own_loss, optimizer)

    return GpuModel(name=name, build=build, batch=batch)


def token_batch(rows: int, length: int, vocabulary: int, *, mask: bool = False) -> Callable[[], Any]:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(5, vocabulary, (rows, length))
        return {"input_ids": tokens, "labels": tokens.clone()} | ({"attention_mask": torch.ones_like(tokens)} if mask else {})

    return batch


def _language(small: bool) -> list[GpuModel]:
    vocabulary = 1000 if small else 32000
    width, depth, heads = (64, 2, 4) if small else (768, 10, 12)
    rows, length = (2, 32) if small else (4, 1024)
    tokens, masked = token_batch(rows, length, vocabulary), token_batch(rows, length, vocabulary, mask=True)
    llama = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 8 * 8,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": length,
    }
    mha = {**llama, "num_key_value_heads": heads}
    gpt2 = {"vocab_size": vocabulary, "n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": length}
    neox = {name: value for name, value in llama.items() if name != "num_key_value_heads"}
    t5 = {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_ff": 4 * width,
        "num_layers": depth // 2,
        "num_decoder_layers": depth // 2,
        "num_heads": heads,
        "d_kv": width // heads,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    bart = {
        "vocab_size": vocabulary,
        "d_model": width,
        "encoder_layers": depth // 2,
        "decoder_layers": depth // 2,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_position_embeddings": length,
    }
    opt = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "word_embed_proj_dim": width,
    }
    moe = {**llama, "num_hidden_layers": max(2, depth // 3), "num_local_experts": 4, "num_experts_per_tok": 2}
    gemma = {**llama, "head_dim": width // heads}
    return [
        hugging_face_model("GPT-2", "GPT2LMHeadModel", "GPT2Config", tokens, **gpt2),
        hugging_face_model("GPT-2, padded", "GPT2LMHeadModel", "GPT2Config", masked, **gpt2),
        hugging_face_model("GPT-2, own checkpointing", "GPT2LMHeadModel", "GPT2Config", tokens, checkpointing=True, **gpt2),
        hugging_face_model("Llama", "LlamaForCausalLM", "LlamaConfig", tokens, **llama),
        hugging_face_model(
            "Llama, long",
            "LlamaForCausalLM",
            "LlamaConfig",
            token_batch(1, 4 * length, vocabulary),
            **{**mha, "max_position_embeddings": 4 * length},
        ),
        hugging_face_model("Mistral", "MistralForCausalLM", "MistralConfig", masked, **llama),
        hugging_face_model("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", tokens, **llama),
        hugging_face_model("Gemma", "GemmaForCausalLM", "GemmaConfig", tokens, **gemma),
        hugging_face_model("Phi", "PhiForCausalLM", "PhiConfig", tokens, **{**mha, "num_hidden_layers": depth}),
        hugging_face_model("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens, **neox),
        hugging_face_model("OPT", "OPTForCausalLM", "OPTConfig", tokens, **opt),
        hugging_face_model("Mixtral", "MixtralForCausalLM", "MixtralConfig", tokens, **moe),
        hugging_face_model("T5", "T5ForConditionalGeneration", "T5Config", tokens, **t5),
        hugging_face_model("BART", "BartForConditionalGeneration", "BartConfig", tokens, **bart),
    ]


def _encoders(small: bool) -> list[GpuModel]:
    vocabulary = 1000 if small else 30000
    width, depth, heads = (64, 2, 4) if small else (768, 10, 12)
    rows, length = (2, 32) if small else (16, 384)
    bert = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "max_position_embeddings": 2 * length,
        "num_labels": 4,
    }
    distil = {"vocab_size": vocabulary, "dim": width, "hidden_dim": 4 * width, "n_layers": depth, "n_heads": heads, "num_labels": 4}
    seconds = 0.5 if small else 4

    def sentences() -> dict[str, Tensor]:
        mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))).long()
        return {"input_ids": torch.randint(5, vocabulary, (rows, length)), "attention_mask": mask, "labels": torch.randint(0, 4, (rows,))}

    def speech() -> dict[str, Tensor]:
        return {"input_values": torch.randn(2, int(16000 * seconds)), "labels": torch.randint(0, 4, (2,))}

    wav2vec2 = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_labels": 4,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
        "classifier_proj_size": width,
    }
    return [
        hugging_face_model("BERT", "BertForSequenceClassification", "BertConfig", sentences, **bert),
        hugging_face_model(
            "RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", sentences, **{**bert, "max_position_embeddings": 2 * length + 2}
        ),
        hugging_face_model("ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", sentences, **bert, embedding_size=width),
        hugging_face_model("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", sentences, **distil),
        hugging_face_model("Wav2Vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", speech, **wav2vec2),
    ]


def _images(rows: int, size: int, labels: int = 10) -> Callable[[], Any]:
    def batch() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, labels, (rows,))}

    return batch


def _sight(small: bool) -> list[GpuModel]:
    width, depth, heads = (64, 2, 4) if small else (768, 12, 12)
    images = _images(2, 32) if small else _images(32, 224)
    vit = {
        "image_size": 32 if small else 224,
        "patch_size": 8 if small else 16,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_labels": 10,
    }
    widths = [16, 32, 64, 128] if small else [96, 192, 384, 768]
    layers = [1, 1, 2, 1] if small else [2, 2, 6, 2]
    convnext = {"hidden_sizes": widths, "depths": layers, "num_labels": 10, "image_size": 224}
    swin = {"image_size": 224, "embed_dim": 96, "depths": layers, "num_heads": [3, 6, 12, 24], "num_labels": 10}
    resnet = {"hidden_sizes": [4 * size for size in widths], "depths": [2, 2, 3, 2], "num_labels": 10}
    return [
        hugging_face_model("ViT", "ViTForImageClassification", "ViTConfig", images, **vit),
        hugging_face_model("DeiT", "DeiTForImageClassification", "DeiTConfig", images, **vit),
        hugging_face_model("ConvNeXt", "ConvNextForImageClassification", "ConvNextConfig", images, **convnext),
        hugging_face_model("Swin", "SwinForImageClassification", "SwinConfig", _images(1, 224) if small else images, **swin),
        hugging_face_model("ResNet, bottlenecks", "ResNetForImageClassification", "ResNetConfig", images, **resnet),
    ]


def _by_hand(small: bool) -> list[GpuModel]:
    wide, rows = (64, 8) if small else (4096, 2048)
    channels, side, pictures = (8, 16, 2) if small else (64, 128, 16)
    state, steps = (32, 8) if small else (1024, 256)

    def learner(make: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[MakeOptimizer], pl.LightningModule]:
        return lambda optimizer: Learner(make(), loss, optimizer)

    def mlp() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)), nn.Linear(wide, 10))

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = block(channels, channels), block(channels, channels)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.first(x))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [channels, 2 * channels, 4 * channels]
            self.down = nn.ModuleList(block(before, after) for before, after in zip([3, *sizes], sizes, strict=False))
            self.up = nn.ModuleList(block(after + before, before) for before, after in zip(sizes[-2::-1], sizes[:0:-1], strict=True))
            self.head = nn.Conv2d(channels, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.down:
                x = layer(x)
                kept.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = kept.pop()
            for layer in self.up:
                x = layer(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1))
            return self.head(x)

    class Recurrent(nn.Module):
        def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(1000, state), cell(state, state, 2, batch_first=True), nn.Linear(state, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embed(x))[0][:, -1])

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(state, 4, 4 * state, batch_first=True)
            self.embed, self.encoder, self.head = nn.Embedding(1000, state), nn.TransformerEncoder(layer, 4), nn.Linear(state, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(x)).mean(1))

    def lora(optimizer: MakeOptimizer) -> pl.LightningModule:
        from peft import LoraConfig, get_peft_model

        base: Any = _language(small)[3].build(optimizer)
        targets = ["q_proj", "v_proj"]
        return Learner(get_peft_model(base.net, LoraConfig(r=8, target_modules=targets)), own_loss, optimizer)

    def frozen(optimizer: MakeOptimizer) -> pl.LightningModule:
        module: Any = _sight(small)[0].build(optimizer)
        for name, parameter in module.net.named_parameters():
            parameter.requires_grad_("classifier" in name or ".layer.1." in name)
        return module

    def rows_of(*shape: int, labels: int | None = 10) -> Callable[[], Any]:
        def batch() -> tuple[Tensor, Tensor]:
            inputs = torch.randn(*shape)
            return inputs, inputs.clone() if labels is None else torch.randint(0, labels, shape[:1])

        return batch

    def words() -> tuple[Tensor, Tensor]:
        return torch.randint(0, 1000, (rows // 64 or 2, steps)), torch.randint(0, 10, (rows // 64 or 2,))

    volume = 8 if small else 48
    length = 128 if small else 16384
    return [
        GpuModel(name="MLP", build=learner(mlp, classification), batch=rows_of(rows, wide)),
        GpuModel(
            name="residual CNN",
            build=learner(
                lambda: nn.Sequential(
                    block(3, channels), *(Residual() for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
                ),
                classification,
            ),
            batch=rows_of(pictures, 3, side, side),
        ),
        GpuModel(name="U-Net", build=learner(UNet, regression), batch=rows_of(pictures, 3, side, side, labels=None)),
        GpuModel(
            name="3-D CNN",
            build=learner(
                lambda: nn.Sequential(
                    *(
                        nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())
                        for before, after in ((1, 16), (16, 32), (32, 32))
                    ),
                    nn.AdaptiveAvgPool3d(1),
                    nn.Flatten(),
                    nn.Linear(32, 10),
                ),
                classification,
            ),
            batch=rows_of(4, 1, volume, volume, volume),
        ),
        GpuModel(
            name="1-D CNN",
            build=learner(
                lambda: nn.Sequential(
                    *(
                        nn.Sequential(nn.Conv1d(b, a, 9, padding=4), nn.BatchNorm1d(a), nn.ReLU())
                        for b, a in ((1, 64), (64, 128), (128, 128))
                    ),
                    nn.AdaptiveAvgPool1d(1),
                    nn.Flatten(),
                    nn.Linear(128, 10),
                ),
                classification,
            ),
            batch=rows_of(16, 1, length),
        ),
        GpuModel(name="LSTM", build=learner(lambda: Recurrent(nn.LSTM), classification), batch=words),
        GpuModel(name="GRU", build=learner(lambda: Recurrent(nn.GRU), classification), batch=words),
        GpuModel(name="nn.Transformer", build=learner(Transformer, classification), batch=words),
        GpuModel(name="Llama, LoRA", build=lora, batch=_language(small)[3].batch),
        GpuModel(name="ViT, mostly frozen", build=frozen, batch=_sight(small)[0].batch),
    ]
