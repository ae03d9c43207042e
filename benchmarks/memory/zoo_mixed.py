"""Sequences, graphs, tables, and the ways of training that are special: adversarial, frozen, adapted, differentiated twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memory.job import Job, Learner, MakeOptimizer, adam, adamw, classification, momentum, own_loss, regression, sgd

TOKENS = 2000


class _Recurrent(nn.Module):
    """Embedding, recurrent layers, a head over each step."""

    def __init__(self, kind: Any, width: int = 256, layers: int = 2, **settings: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.layers = kind(width, width, layers, batch_first=True, **settings)
        self.head = nn.Linear(width * (2 if settings.get("bidirectional") else 1), TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens))[0]).transpose(1, 2)


class _Seq2Seq(nn.Module):
    """Two GRUs and attention between them."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, width), nn.Embedding(TOKENS, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, TOKENS)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        memory, state = self.encoder(self.source(pair[0]))
        output, _ = self.decoder(self.target(pair[1]), state)
        context, _ = self.attention(output, memory, memory)
        return self.head(torch.cat([output, context], -1)).transpose(1, 2)


class _Transformer(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.net = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(pair[1].shape[1])
        return self.head(self.net(self.tokens(pair[0]), self.tokens(pair[1]), tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)


class _TCN(nn.Module):
    """Dilated causal convolutions over time."""

    def __init__(self, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        self.inputs = nn.Conv1d(16, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=1 << index) for index in range(depth))
        self.head = nn.Conv1d(width, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for index, layer in enumerate(self.layers):
            x = x + F.relu(layer(F.pad(x, (2 << index, 0))))
        return self.head(x)


class _Graph(nn.Module):
    """Message passing by gather and scatter."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, graph: tuple[Tensor, Tensor]) -> Tensor:
        x, (source, target) = F.relu(self.inputs(graph[0])), graph[1]
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([x[source], x[target]], -1)))
            x = update(torch.zeros_like(x).index_add(0, target, sent), x)
        return self.head(x)


class _DLRM(nn.Module):
    """Bags of embeddings and their products, as recommenders have them."""

    def __init__(self, tables: int = 6, rows: int = 5000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        dense = self.dense(inputs[0])
        bags = torch.stack([dense, *(table(ids) for table, ids in zip(self.tables, inputs[1].unbind(1), strict=True))], 1)
        row, column = torch.tril_indices(bags.shape[1], bags.shape[1], -1)
        return self.top(torch.cat([dense, (bags @ bags.mT)[:, row, column]], 1)).squeeze(1)


class _Experts(nn.Module):
    """A layer of experts, each of which gets the tokens routed to it."""

    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.inputs = nn.Linear(32, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        weight, choice = self.router(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(choice == index)
            output = output.index_add(0, rows, expert(x[rows]) * weight[rows, slot, None])
        return self.head(output)


class _MLP(nn.Module):
    """Layers that the user recomputes."""

    def __init__(self, width: int = 512, depth: int = 6, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(x)


class _GAN(pl.LightningModule):
    """Two networks against each other, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(64, 128 * 64),
            nn.Unflatten(1, (128, 8, 8)),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128 * 64, 1),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        noise = torch.randn(len(batch), 64, device=batch.device)
        fake = self.generator(noise)
        loss = F.softplus(-self.critic(batch)).mean() + F.softplus(self.critic(fake.detach())).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        loss = F.softplus(-self.critic(fake)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()

    def configure_optimizers(self) -> Any:
        betas = (0.5, 0.99)
        return torch.optim.Adam(self.generator.parameters(), 2e-4, betas), torch.optim.Adam(self.critic.parameters(), 2e-4, betas)


class _Lion(torch.optim.Optimizer):
    """Sign of a mixture of momentum and gradient (arXiv:2302.06675)."""

    def __init__(self, parameters: Any, lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.add_(average.mul(0.9).add_(parameter.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                average.mul_(0.99).add_(parameter.grad, alpha=0.01)
        return loss


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 1e-3, max_iter=2, history_size=1)


def _towers(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Contrastive: each row's partner among all."""
    left, right = (F.normalize(tower(side), dim=-1) for tower, side in zip(net.children(), batch, strict=True))
    scores = left @ right.T / 0.07
    targets = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def _triplets(net: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.triplet_margin_loss(*(net(part) for part in batch))


def _physics(net: nn.Module, batch: Tensor) -> Tensor:
    """The residual of the heat equation: derivatives of the network's output by its input, differentiated again."""
    points = batch.detach().requires_grad_()
    value = net(points)
    (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    return (slope[:, 0] - bend[:, 1]).square().mean() + value.square().mean()


def _lora() -> pl.LightningModule:
    import peft

    config = transformers.GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    settings = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return Learner(peft.get_peft_model(transformers.GPT2LMHeadModel(config), settings), own_loss, adamw)


def _frozen() -> nn.Module:
    backbone = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))


def _mlp(*widths: int, activation: Any = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def _job(name: str, family: str, net: Callable[[], nn.Module], batch: Any, loss: Any = classification,
         optimizer: MakeOptimizer = adamw, quick: bool = False, **trainer: Any) -> Job:  # fmt: skip
    build = lambda: Learner(net(), loss, optimizer)  # noqa: E731
    return Job(name=name, family=family, build=build, batch=batch, trainer=trainer, quick=quick)


def _text(rows: int = 8, length: int = 48) -> Any:
    return lambda: (torch.randint(0, TOKENS, (rows, length)), torch.randint(0, TOKENS, (rows, length)))


def _pairs(rows: int = 8, length: int = 32) -> Any:
    tokens = lambda: torch.randint(0, TOKENS, (rows, length))  # noqa: E731
    return lambda: ((tokens(), tokens()), tokens())


def _vectors(rows: int, width: int) -> Any:
    return lambda: (torch.randn(rows, width), torch.randint(0, 10, (rows,)))


def _nodes(nodes: int = 2000, edges: int = 8000) -> Any:
    return lambda: ((torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges))), torch.randint(0, 10, (nodes,)))


def _clicks(rows: int = 512) -> Any:
    return (torch.randn(rows, 13), torch.randint(0, 5000, (rows, 6, 4))), torch.rand(rows)


def _click_loss(net: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(net(batch[0]), batch[1])


MIXED: list[Job] = [
    _job("LSTM", "sequence", lambda: _Recurrent(nn.LSTM), _text(), quick=True),
    _job("LSTM (bidirectional)", "sequence", lambda: _Recurrent(nn.LSTM, bidirectional=True, dropout=0.1), _text(), optimizer=adam),
    _job("GRU", "sequence", lambda: _Recurrent(nn.GRU), _text(), gradient_clip_val=0.5),
    _job("Seq2seq with attention", "sequence", _Seq2Seq, _pairs(), optimizer=adam),
    _job("nn.Transformer", "sequence", _Transformer, _pairs()),
    _job("TCN", "sequence", _TCN, lambda: (torch.randn(8, 16, 512), torch.randn(8, 16, 512)), regression),
    _job("Graph network", "other", _Graph, _nodes(), quick=True),
    _job("DLRM", "other", _DLRM, _clicks, _click_loss, sgd),
    _job("Mixture of experts", "other", _Experts, _vectors(1024, 32)),
    _job("MLP (LBFGS)", "other", lambda: _mlp(128, 512, 512, 10), _vectors(256, 128), optimizer=_lbfgs),
    _job("MLP (Lion)", "other", _MLP, _vectors(256, 512), optimizer=_Lion, quick=True),
    _job("MLP (own checkpointing)", "other", lambda: _MLP(recompute=True), _vectors(1024, 512), optimizer=momentum),
    _job("MLP (bf16-true)", "other", _MLP, _vectors(64, 512), precision="bf16-true"),
    Job(name="GAN", family="other", build=_GAN, batch=lambda: torch.randn(16, 3, 32, 32)),
    Job(name="LoRA", family="other", build=_lora, batch=lambda: dict.fromkeys(("input_ids", "labels"), torch.randint(0, 8000, (4, 128)))),
    _job("Frozen backbone", "other", _frozen, _vectors(512, 512)),
    _job(
        "Two towers",
        "other",
        lambda: nn.ModuleList([_mlp(256, 1024, 128), _mlp(128, 1024, 128)]),
        lambda: (torch.randn(512, 256), torch.randn(512, 128)),
        _towers,
    ),
    _job(
        "Triplets", "other", lambda: _mlp(256, 1024, 1024, 128), lambda: tuple(torch.randn(256, 256) for _ in range(3)), _triplets, momentum
    ),
    _job("Physics-informed", "other", lambda: _mlp(2, 128, 128, 128, 1, activation=nn.Tanh), lambda: torch.rand(2048, 2), _physics, adam),
]
