"""Patterns in what a module is made of: architectures, parts of other libraries, unusual tensors and batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from tests.memory.trace.usage import Classifier, usage, vectors


def sequences(rows: int = 16, length: int = 16) -> Any:
    data = torch.randint(0, 500, (rows, length))
    return [data, torch.randint(0, 10, (rows,))]


@usage("frozen parameters")
class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[:3].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-3)


@usage("frozen backbone under no_grad")
class Backbone(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        self.net[:3].eval()
        with torch.no_grad():
            hidden = self.net[:4](x)
        return self.net[4](hidden)


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=500, use_cache=False, **{**sizes, **changes}))


class LanguageModel(Classifier):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or _llama())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


usage("hugging face llama", sequences)(LanguageModel)


@usage("hugging face gradient checkpointing", sequences)
class Gradients(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.gradient_checkpointing_enable()
        self.net.enable_input_require_grads()


@usage("lora by peft", sequences)
class Lora(LanguageModel):
    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.1)
        super().__init__(get_peft_model(_llama(), config))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


@usage("lora on casts", sequences)
class PreparedLora(LanguageModel):
    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        net = _llama(num_hidden_layers=1).to(torch.bfloat16)
        for parameter in net.parameters():  # as prepare_model_for_kbit_training does
            parameter.requires_grad_(False)
            if parameter.dim() == 1:
                parameter.data = parameter.data.to(torch.float32)
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        net.enable_input_require_grads()
        super().__init__(get_peft_model(net, LoraConfig(r=8, target_modules="all-linear", use_dora=True)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


@usage("tied weights", sequences)
class Tied(LanguageModel):
    def __init__(self) -> None:
        super().__init__(_llama(tie_word_embeddings=True))


@usage("weights of the batch's dictionary", sequences)
class Encoded(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0], attention_mask=batch[0] > 20).loss


def _encoding() -> Any:
    from transformers import BatchEncoding

    ids = sequences()[0]
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


@usage("BatchEncoding", _encoding)
class WithEncoding(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch.to(self.device)).loss


@usage("bert", sequences)
class Bert(Classifier):
    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "num_labels": 10}
        super().__init__(BertForSequenceClassification(BertConfig(vocab_size=500, **sizes)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0], attention_mask=batch[0].ne(0).long(), labels=batch[1]).loss


class Mixtral(Classifier):
    def __init__(self, experts: str) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        super().__init__(MixtralForCausalLM(MixtralConfig(vocab_size=500, num_local_experts=4, use_cache=False, **sizes)))
        self.net.config._experts_implementation = experts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


usage("mixtral, grouped", sequences)(lambda: Mixtral("grouped_mm"))
usage("mixtral, eager", sequences, within=0.15, flags="spread evenly")(lambda: Mixtral("eager"))


class Experts(Classifier):
    """Routed layers between an embedding of the input and a head."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(nn.Linear(64, 64))
        self.gate = nn.Linear(64, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(count))
        self.head = nn.Linear(64, 10)


@usage("experts by topk and index_add", lambda: vectors(512), within=0.15, flags="spread evenly")
class TopExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if rows.numel() == 0:
                continue
            output.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return self.head(output)


@usage("experts by argmax and masks", lambda: vectors(512), within=0.25, flags="spread evenly")
class SwitchExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        chosen = self.gate(x).argmax(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                output[mask] = expert(x[mask])
        return self.head(output)


@usage("experts by capacity")
class CapacityExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        scores = self.gate(x).softmax(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight, rows = scores[:, index].topk(32)
            output = output.index_add(0, rows, expert(x[rows]) * weight[:, None])
        return self.head(output)


@usage("experts by torch.where")
class DenseExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        chosen = self.gate(x).argmax(-1, keepdim=True)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            output = torch.where(chosen == index, expert(x), output)
        return self.head(output)


@usage("experts by sorting", lambda: vectors(512), within=0.15, flags="spread evenly")
class SortedExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        parts = [expert(rows) for expert, rows in zip(self.experts, x[order].split(counts), strict=True)]
        return self.head(torch.cat(parts)[order.argsort()])


class Recurrent(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__(nn.Linear(64, 10))
        self.embedding = nn.Embedding(500, 64)
        self.rnn = getattr(nn, kind)(64, 64, 2, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.rnn(self.embedding(batch[0]))[0][:, -1]), batch[1])


usage("rnn", sequences, within=0.05)(lambda: Recurrent("RNN"))
usage("gru", sequences, within=0.05)(lambda: Recurrent("GRU"))
usage("lstm", sequences, within=0.05)(lambda: Recurrent("LSTM"))


def lengths() -> Any:
    return [*sequences(), torch.tensor([16, 16, 15, 14, 14, 13, 12, 10, 9, 8, 7, 5, 4, 3, 2, 1])]


@usage("packed sequences", lengths, within=0.08)
class PackedLSTM(Recurrent):
    def __init__(self) -> None:
        super().__init__("LSTM")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = rnn.pack_padded_sequence(self.embedding(batch[0]), batch[2].cpu(), batch_first=True, enforce_sorted=False)
        output, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.net(output[torch.arange(len(output)), batch[2] - 1]), batch[1])


@usage("padded in the step", lengths, within=0.05)
class Padded(Recurrent):
    def __init__(self) -> None:
        super().__init__("GRU")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [row[:length] for row, length in zip(batch[0], batch[2].tolist(), strict=True)]
        padded = rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1]) < batch[2][:, None]
        states = self.rnn(self.embedding(padded))[0]
        return F.cross_entropy(self.net((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)), batch[1])


@usage("cells in a loop", sequences)
class Cells(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10))
        self.embedding, self.cell = nn.Embedding(500, 64), nn.GRUCell(64, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = torch.zeros(len(batch[0]), 64)
        for step in self.embedding(batch[0]).unbind(1):
            state = self.cell(step, state)
        return F.cross_entropy(self.net(state), batch[1])


def graph() -> Any:
    return {"x": torch.randn(300, 64), "edges": torch.randint(0, 300, (2, 2000)), "graph": torch.arange(300) // 30}


@usage("graph by index_add", graph)
class Graph(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net[:2](batch["x"])
        source, target = batch["edges"]
        degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target))).clamp_min(1)
        x = x + torch.zeros_like(x).index_add_(0, target, x[source]) / degree[:, None]
        x = torch.zeros_like(x).scatter_reduce_(0, target[:, None].expand(-1, x.shape[1]), x[source], "amax", include_self=False)
        pooled = torch.zeros(int(batch["graph"].max()) + 1, 256).index_add_(0, batch["graph"], self.net[2:4](x))
        return self.net[4](pooled).square().mean()


@usage("graph with unique and bincount", graph)
class UniqueGraph(Graph):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes, inverse = torch.unique(batch["edges"], return_inverse=True)
        counts = torch.bincount(inverse[1], minlength=len(nodes))
        x = self.net[:2](batch["x"][nodes]) / counts.clamp_min(1).sqrt()[:, None]
        kept = (batch["edges"][0] != batch["edges"][1]).nonzero().squeeze(1)
        x = x + torch.zeros_like(x).index_add_(0, inverse[1][kept], x[inverse[0][kept]])
        parts = torch.split(x, torch.bincount(batch["graph"][nodes]).tolist())
        return self.net[2:](torch.stack([part.mean(0) for part in parts])).square().mean()


@usage("nn.Transformer", sequences, within=0.05)
class Transformer(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10))
        self.embedding = nn.Embedding(500, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        output = self.transformer(x, x, tgt_mask=mask, src_key_padding_mask=batch[0] == 0, tgt_is_causal=True)
        return F.cross_entropy(self.net(output[:, -1]), batch[1])


@usage("averaged copy inside")
class Teacher(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.average = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        return F.cross_entropy(self(batch[0]), target)

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        self.average.update_parameters(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters())


@usage("buffers written in forward")
class Buffers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(1024, 10))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.norm = nn.BatchNorm1d(64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(self.norm(batch[0]))
        place = int(self.place)
        self.queue[place : place + len(scores)] = scores.detach()
        self.place = (self.place + len(scores)) % len(self.queue)
        self.seen += 1
        return F.cross_entropy(scores @ self.queue.clone().T, batch[1])


@usage("reparametrised")
class Reparametrised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.spectral_norm(self.net[2])
        register_parametrization(self.net[4], "weight", nn.Softplus())


@usage("old weight_norm and spectral_norm")
class OldNorms(Classifier):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            torch.nn.utils.spectral_norm(self.net[2])
        if hasattr(torch.nn.utils, "weight_norm"):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                weight_norm(self.net[0])


@usage("hooks on tensors and modules")
class Hooked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.net[1].register_forward_hook(lambda module, args, output: self.outputs.append(output.detach().mean()))
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.net[3].register_full_backward_hook(lambda module, inputs, outputs: None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[:4](batch[0])
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        hidden.retain_grad()
        return F.cross_entropy(self.net[4](hidden), batch[1])


@usage("functional_call and torch.func")
class Functional(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parameters = dict(self.net.named_parameters())

        def loss(values: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.net, values, x[None]), y[None])

        gradients = torch.func.grad(loss)(parameters, batch[0][0], batch[1][0])
        faster = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
        return F.cross_entropy(torch.func.functional_call(self.net, faster, batch[0]), batch[1])


@usage("vmap over samples", lambda: vectors(16), within=0.05)
class PerSample(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parameters = {name: value.detach() for name, value in self.net.named_parameters()}

        def loss(values: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.net, values, x[None]), y[None])

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, batch[0], batch[1])
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)
        return (F.cross_entropy(self(batch[0]), batch[1], reduction="none") / norms).mean()


@usage("complex numbers", within=0.05)
class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.filter
        return self.net(torch.fft.irfft(spectrum, 64) + torch.view_as_real(spectrum).sum(-1).mean(-1, keepdim=True) + spectrum.abs().sum())


@usage("nested tensors", lengths, within=None, traced=False, flags="run once for real")
class NestedTensors(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [self.embedding(row[:length]) for row, length in zip(batch[0], batch[2].tolist(), strict=True)]
        nested = torch.nested.nested_tensor(rows, layout=torch.strided)
        return self.net(torch.nested.to_padded_tensor(nested, 0.0)).square().mean()


@usage("jagged tensors", lengths, within=None, traced=False, flags="run once for real")
class JaggedTensors(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [self.embedding(row[:length]) for row, length in zip(batch[0], batch[2].tolist(), strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return self.net(nested).values().square().mean()


@usage("sparse embeddings", sequences, within=0.25, flags="select everything")
class SparseEmbeddings(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10))
        self.embedding = nn.Embedding(500, 64, sparse=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(self.embedding(batch[0]).mean(1)), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SparseAdam(self.embedding.parameters()), torch.optim.AdamW(self.net.parameters())], []


@usage("embedding bags", sequences)
class Bags(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10))
        self.embedding = nn.EmbeddingBag(500, 64, mode="mean")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.embedding(batch[0])), batch[1])


@usage("sparse coo matrix", graph, within=0.05)
class Coo(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        matrix = torch.sparse_coo_tensor(batch["edges"], torch.ones(2000), (300, 300))
        return self.net[4](torch.sparse.mm(matrix, self.net[:4](batch["x"]))).square().mean()


@usage("sparse matrix held as a buffer", lambda: [torch.randn(300, 64)], within=0.05)
class HeldSparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(300).to_sparse())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net[4](torch.sparse.mm(self.matrix, self.net[:4](batch[0]))).square().mean()


@usage("sparse csr matrix", lambda: [torch.randn(300, 64)], within=0.12, traced=False, flags="run once for real")
class Csr(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        matrix = torch.sparse_csr_tensor(torch.arange(301), torch.arange(300), torch.ones(300), (300, 300))
        return self.net[4](matrix @ self.net[:4](batch[0])).square().mean()


@usage("dynamic quantisation of a frozen part", within=None, traced=False, flags="run once for real")
class Quantised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            frozen = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.frozen = torch.ao.quantization.quantize_dynamic(frozen, {nn.Linear}, dtype=torch.qint8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.net(x)


@usage("weights of eight bits", within=0.05)
class EightBits(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 127, (64, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.linear(x, self.codes.float() * self.scale))


@usage("fake quantisation")
class FakeQuantised(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.net[0].weight, 0.1, 0, -128, 127)
        return self.net[1:](F.linear(x, weight, self.net[0].bias))


@usage("convolutions of all kinds", lambda: [torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))], within=0.1)
class Convolutions(Classifier):
    def __init__(self) -> None:
        layers = (nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, groups=32, padding=1))
        more = (nn.ConvTranspose2d(32, 16, 2, 2), nn.InstanceNorm2d(16), nn.Upsample(scale_factor=0.5), nn.MaxPool2d(2), nn.Flatten())
        super().__init__(nn.Sequential(*layers, *more, nn.LazyLinear(10)))
        self.net(torch.zeros(1, 3, 32, 32))


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = "a"


@usage("dataclass as batch", lambda: Sample(*vectors()))
class DataclassBatch(Classifier):
    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch.x), batch.y)


@usage("nested batch", lambda: {"a": [vectors()[0], {"b": (vectors()[1], None)}], "names": ["x"] * 128, "n": 3})
class NestedBatch(Classifier):
    def forward(self, inputs: dict[str, list[Tensor]]) -> list[Tensor]:
        return [self.net(x) for x in inputs["x"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self({"x": [batch["a"][0]]})[0], batch["a"][1]["b"][0])


@usage("dictionary as a module", vectors)
class Parts(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ParameterDict({"scale": nn.Parameter(torch.ones(64)), "spare": nn.Parameter(torch.ones(64))})
        self.held = {"weight": torch.ones(10), "list": [torch.ones(3)]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] * self.extra["scale"]), batch[1], weight=self.held["weight"])


@usage("jit script", within=None, traced=False, flags="can't be traced")
class Scripted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.net = torch.jit.script(self.net)


@usage("lazy layers", vectors, within=None, traced=False, flags="no shape yet")
class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.LazyLinear(10)))


@usage("tensor subclass as a batch", lambda: [vectors()[0].as_subclass(Marked), vectors()[1]], within=None)
class SubclassBatch(Classifier):
    pass


class Marked(Tensor):
    """A tensor with a name, as libraries of images or points have."""


@usage("einsum, scan and loops of tensors")
class Loops(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        x = torch.einsum("bi,bj->bij", x[:, :32], x[:, 32:64]).cumsum(1).flatten(1)[:, :256]
        states = [x[0]]
        for row in x[1:16]:
            states.append(states[-1] * 0.5 + row)
        return F.cross_entropy(self.net[4](torch.stack(states)), batch[1][:16])


@usage("linear algebra", within=0.1)
class Algebra(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        covariance = x.T @ x / len(x) + torch.eye(256)
        factor = torch.linalg.cholesky(covariance)
        whitened = torch.linalg.solve_triangular(factor, x.T, upper=False).T
        return F.cross_entropy(self.net[4](whitened), batch[1]) + torch.logdet(covariance) * 1e-3


@usage("ctc loss", lambda: [torch.randn(50, 16, 64), torch.randint(1, 10, (16, 12))], within=0.05)
class Ctc(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0]).log_softmax(-1)
        return F.ctc_loss(scores, batch[1], torch.full((16,), 50), torch.full((16,), 12))


@usage("matching on the host", lambda: vectors(32), flags="array of values")
class Matching(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        cost = torch.cdist(scores, F.one_hot(batch[1], 10).float())
        columns = cost.detach().cpu().numpy().argmin(1)
        return cost[torch.arange(len(cost)), torch.as_tensor(columns)].mean()


@usage("distributions")
class Distributions(Classifier):
    """torch checks their arguments: that each element is a number, or positive."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[:4](batch[0])
        drawn = torch.distributions.Normal(hidden, hidden.exp()).rsample()
        return -torch.distributions.Categorical(logits=self.net[4](drawn)).log_prob(batch[1]).mean()
