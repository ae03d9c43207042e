"""Draws of a split batch: the ranks' rows together are one device's draws, and all generators end in one state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, cut, share_of
from lightning_autopar.exact.random.drawing_operators import _native_dropout
from lightning_autopar.exact.random.whole_batch_draws import Draw, DrawPlan, GlobalDraws, Rows, guess, memory_order
from lightning_autopar.plans import deal
from lightning_autopar.strategies.trials.draw_probe import observe

Step = Callable[[Tensor], Tensor]


def dealt(shares: int | tuple[int, ...]) -> Dealing:
    """As many even shares, or shares as given."""
    return Dealing.even(shares) if isinstance(shares, int) else Dealing(deal(shares))


def shares(samples: int, world: int | tuple[int, ...]) -> list[BatchShare]:
    dealing = dealt(world)
    return [share_of(samples, rank, dealing) for rank in range(dealing.holders)]


def run_split(
    step: Step, batch: Tensor, world_size: int | tuple[int, ...], plan: DrawPlan | None = None, seed: int = 7
) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's output and the state in which its generator ends."""
    outputs, states = [], []
    for share in shares(len(batch), world_size):
        torch.manual_seed(seed)
        with GlobalDraws(lambda share=share: share, plan) as draws:  # type: ignore[misc]
            draws.begin()
            outputs.append(step(cut(batch, share.rank, share.dealing)))
        states.append(torch.get_rng_state())
    return outputs, states


def check(step: Step, batch: Tensor, world_size: int | tuple[int, ...], plan: DrawPlan | None = None) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    whole, state = step(batch), torch.get_rng_state()
    assert not torch.equal(before, state), "the step draws nothing"
    outputs, states = run_split(step, batch, world_size, plan)
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, cut(whole, rank, dealt(world_size)), rtol=1e-5, atol=1e-6)
        assert torch.equal(states[rank], state), "the generators are out of step"


def plan_of(batch_size: int, *draws: tuple[str, tuple[int, ...], Rows | None]) -> DrawPlan:
    return DrawPlan(draws=tuple(Draw(op=op, shape=shape, choice=choice) for op, shape, choice in draws), batch_size=batch_size)


def seeded_module(module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return module().train()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(spread) * spread.exp())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        q, k, v = (part.view(*x.shape[:2], 2, 4).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)


class Conv(nn.Module):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.conv, self.memory_format = nn.Conv2d(3, 4, 3), memory_format

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 3, 5, 5).contiguous(memory_format=self.memory_format))
        return F.dropout(F.dropout2d(x, 0.4), 0.3)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(0.6)


def sequence_first(x: Tensor) -> Tensor:
    """Dropout on (T, B, d): twice in the memory order of (B, T, d), once of its own."""
    moved = F.dropout(x.transpose(0, 1), 0.4)
    return F.dropout(F.dropout(moved.contiguous(), 0.4), 0.4).transpose(0, 1)


def diffusion(x: Tensor) -> Tensor:
    return (
        x * torch.randint(0, 1000, (len(x),)).view(-1, 1, 1) + torch.normal(x, 2.0) + torch.normal(x, x.exp()) + torch.normal(0.5, x.exp())
    )


def masks(x: Tensor) -> Tensor:
    return (
        x * (torch.rand(x.shape[:2]) > 0.5)[..., None]
        + torch.bernoulli(x.sigmoid())
        + F.gumbel_softmax(x)
        + x.new_empty(len(x), 1, 1).exponential_()
    )


def sampling(x: Tensor) -> Tensor:
    probabilities = x[:, 0].softmax(-1)
    return torch.cat(
        [torch.multinomial(probabilities, 1), torch.multinomial(probabilities, 5, replacement=True), torch.multinomial(probabilities, 2)], 1
    )


CASES: dict[str, tuple[Callable[[], Step], tuple[int, ...]]] = {
    "dropout": (
        lambda: seeded_module(lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3), nn.AlphaDropout(0.2))),
        (6,),
    ),
    "vae": (lambda: seeded_module(VAE), (6,)),
    "gpt": (lambda: seeded_module(GPT), (5, 8)),
    "drop_path": (lambda: drop_path, (3, 2)),
    "encoder_sequence_first": (lambda: SequenceFirst(), (5, 8)),
    "diffusion": (lambda: diffusion, (3, 4)),
    "masks": (lambda: masks, (7, 4)),
    "sampling": (lambda: sampling, (2, 6)),
    "conv": (lambda: seeded_module(lambda: Conv(torch.contiguous_format)), (3, 25)),
    "channels_last": (lambda: seeded_module(lambda: Conv(torch.channels_last)), (3, 25)),
    "attention": (lambda: Attend(), (5, 8)),
    "encoder": (lambda: seeded_module(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)), (5, 8)),
    "lstm": (lambda: Recur(), (5, 8)),
    "columns": (lambda: lambda x: x * torch.ones(x.shape[1], len(x)).t().bernoulli_(0.5), (6,)),
    "sequence_first": (lambda: sequence_first, (5, 3)),
    "positions": (lambda: lambda x: F.dropout(x) * (torch.rand(4) > 0.2) + torch.randn(4, 6)[0, :4], (4,)),
    "layer_first": (lambda: lambda x: F.dropout(x) + torch.rand(len(x), 3, 1).expand(-1, -1, 2).flatten(1), (6,)),
    "gaps": (lambda: lambda x: x * torch.ones(len(x), 9)[:, :6].normal_(), (6,)),
}


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with_weights: Tensor = self.attention(x, x, x)[0]
        without: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return with_weights + without


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return output


class Recur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lstm = nn.LSTM(8, 4, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output.contiguous()


def batch_of(samples: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))


def observed(step: Step, shape: tuple[int, ...]) -> DrawPlan:
    """The plan that the probe finds on a batch of four samples."""
    batch = batch_of(4, shape)
    return observe(step, lambda share: cut(batch, share.rank, share.dealing), shares(4, 2)).draws


@pytest.mark.parametrize(("samples", "world_size"), [(4, 2), (5, 2), (7, 3), (8, 3), (7, (1, 2))])
@pytest.mark.parametrize("name", sorted(set(CASES) - {"lstm", "encoder_sequence_first", "sequence_first", "columns", "positions"}))
def test_ranks_draw_what_one_device_draws(name: str, samples: int, world_size: int | tuple[int, ...]) -> None:
    """By shapes alone, where dimension 0 runs over the samples."""
    make, shape = CASES[name]
    check(make(), batch_of(samples, shape), world_size)


@pytest.mark.parametrize(("samples", "world_size"), [(1, 2), (2, 2), (2, 3), (3, 2), (4, 3), (5, 3), (7, 2), (2, (1, 2)), (7, (3, 1, 2))])
@pytest.mark.parametrize("name", CASES)
def test_planned_draws(name: str, samples: int, world_size: int | tuple[int, ...]) -> None:
    """With one sample on a rank, or none, only the plan tells what runs over the samples."""
    make, shape = CASES[name]
    step = make()
    check(step, batch_of(samples, shape), world_size, observed(step, shape))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_recomputation_draws_the_same_again(world_size: int, use_reentrant: bool) -> None:
    """Gradients of checkpointed blocks, whose forward runs again in backward, last block first, are those without checkpointing."""
    torch.manual_seed(1)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(3))

    def step(x: Tensor, recompute: bool) -> Tensor:
        x = x.clone().requires_grad_()
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant) if recompute else block(y)
            y = y * (torch.rand(6) > 0.2)  # as large as a batch of six: by its shape alone it would be split
        grad: Tensor = torch.autograd.grad(y.sum(), x, retain_graph=True)[0] if not use_reentrant else _grad(y, x)
        return torch.cat([y.detach(), grad], 1)

    batch = batch_of(6, (6,))
    torch.manual_seed(7)
    whole = step(batch, recompute=False)
    plan = observe(partial(step, recompute=False), lambda share: cut(batch, share.rank, share.dealing), shares(6, 2)).draws
    for recompute in (False, True):
        outputs, states = run_split(partial(step, recompute=recompute), batch, world_size, plan)
        for rank, output in enumerate(outputs):
            torch.testing.assert_close(output, cut(whole, rank, dealt(world_size)))
        assert all(torch.equal(state, states[0]) for state in states)


def _grad(y: Tensor, x: Tensor) -> Tensor:
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_recomputation_in_another_order_is_told_apart_by_the_random_state() -> None:
    """Two draws of one shape, of which one runs over the samples."""
    first, second = (lambda x: F.dropout(x, 0.5)), (lambda x: x * torch.ones(2, 2).bernoulli_(0.5))

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)
        return torch.cat([y.detach(), torch.autograd.grad(y.sum(), x)[0]], 1)

    plan = plan_of(4, ("bernoulli_", (4, 2), Rows(dim=0)), ("bernoulli_", (2, 2), None))
    for seed in range(5):
        for rank, output in enumerate(run_split(step, torch.ones(4, 2), 2, plan, seed)[0]):
            forward, gradient = output.chunk(2, 1)
            assert torch.equal(forward, gradient), f"rank {rank} drew another mask in backward"


@pytest.mark.parametrize("overload", ["out", "in-place"])
def test_functions_of_tensors_match_their_own_kernels(overload: str) -> None:
    """What is composed anew here gives the bits of torch's kernels."""
    batch = batch_of(6, (5,))

    def step(x: Tensor) -> Tensor:
        if overload == "in-place":
            return x.clone().bernoulli_(x.sigmoid())
        out = torch.empty(0)
        return torch.stack(
            [
                torch.bernoulli(x.sigmoid(), out=torch.empty_like(x)),
                torch.normal(x, x.exp(), out=out).clone(),
                torch.normal(x, 0.3, out=out).clone(),
                torch.normal(0.3, x.exp(), out=out).clone(),
                torch.multinomial(x.softmax(-1), 5, replacement=True, out=torch.empty(0, dtype=torch.int64)).float(),
            ],
            1,
        )

    check(step, batch, 2)


def test_scalar_and_shared_draws_are_left_alone() -> None:
    """One decision for the whole batch stays one; a permutation of positions isn't taken apart."""

    def step(x: Tensor) -> Tensor:
        scale = torch.rand(()) + torch.distributions.Beta(2.0, 3.0).sample() + torch.randn(7)[0]
        return (scale * x)[:, torch.randperm(9)]

    check(step, batch_of(5, (9,)), 2)


def test_generators_of_the_user_are_drawn_from() -> None:
    """A generator that is passed to the draw moves on as on one device."""
    generator = torch.Generator()

    def step(x: Tensor) -> Tensor:
        generator.manual_seed(3)
        x = x + torch.randn(x.shape, generator=generator)
        return torch.cat([x + torch.randn(x.shape, generator=generator), F.dropout(x)], 1)

    check(step, batch_of(5, (4,)), 2)


def test_a_permutation_of_the_samples_stays_within_a_rank() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.randperm(len(x))

    torch.manual_seed(7)
    step(torch.ones(7))
    state = torch.get_rng_state()
    outputs, states = run_split(step, torch.ones(7), 3, plan_of(4, ("randperm", (4,), Rows(dim=0))))
    assert [sorted(output.tolist()) for output in outputs] == [[0, 1, 2], [0, 1], [0, 1]]
    assert all(torch.equal(other, state) for other in states)
    outputs, states = run_split(step, torch.ones(7), (1, 2), plan_of(4, ("randperm", (4,), Rows(dim=0))))
    assert [sorted(output.tolist()) for output in outputs] == [[0, 1], [0, 1, 2, 3, 4]]
    assert all(torch.equal(other, state) for other in states)


def test_what_rejection_sampling_consumes_keeps_ranks_in_step() -> None:
    """Each rank draws its own, and all generators move on alike, however long their samples took."""

    def step(x: Tensor) -> Tensor:
        gamma = torch.distributions.Gamma(x.exp(), 1.0).sample()
        return torch.cat([gamma + torch.poisson(20 * x.exp()), F.rrelu(x, training=True), F.dropout(x)], 1)

    batch = batch_of(6, (4,))
    outputs, states = run_split(step, batch, 2)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(outputs[0][:, :4], outputs[1][:, :4])
    with GlobalDraws(lambda: shares(6, 2)[0]) as draws:
        step(batch[::2])
    assert draws.unreproducible == {"_standard_gamma", "poisson", "rrelu_with_noise"}


def test_seeded_draws_keep_ranks_in_step_whatever_their_shapes() -> None:
    """A plan whose shapes depend on the data: a layer is skipped on all ranks or none, and masks differ between ranks."""

    def step(x: Tensor) -> Tensor:
        skipped = torch.rand(())
        noise = torch.randn(len(x), 3 if x[0, 0] > 0 else 8)[:, :2]
        return torch.cat([noise, torch.rand(()).expand(len(x), 1), skipped.expand(len(x), 1)], 1)

    batch = torch.tensor([[1.0], [-1.0]]).repeat(2, 1)
    plan = DrawPlan(
        draws=plan_of(4, ("uniform_", (), None), ("normal_", (4, 3), Rows(dim=0)), ("uniform_", (), None)).draws, batch_size=4, seeded=True
    )
    outputs, states = run_split(step, batch, 2, plan)
    assert torch.equal(states[0], states[1])
    assert torch.equal(outputs[0][:, 2:], outputs[1][:, 2:])
    assert not torch.equal(outputs[0][:, :2], outputs[1][:, :2])


def test_skipped_draws_are_found_again() -> None:
    """Stochastic depth: draws of a skipped block are missing from the sequence."""

    def step(x: Tensor, blocks: int) -> Tensor:
        for _ in range(blocks):
            x = F.dropout(x, 0.3) * (torch.ones(4, 3).bernoulli_(0.7))[0]
        return x + torch.randn(4).sum()

    batch = batch_of(8, (3,))
    plan = observe(partial(step, blocks=3), lambda share: cut(batch, share.rank, share.dealing), shares(8, 2)).draws
    for blocks in (1, 2, 3):
        check(partial(step, blocks=blocks), batch, 2, plan)


def test_views_of_the_batch_one_after_the_other() -> None:
    """Two views concatenated: samples lie at a stride in dimension 0."""

    def step(x: Tensor) -> Tensor:
        return torch.cat(F.dropout(torch.cat([x, x + 1]), 0.5).chunk(2), 1)

    plan = plan_of(4, ("bernoulli_", (8, 3), Rows(dim=0, groups_first=True)))
    for samples in (1, 5, 6):
        check(step, batch_of(samples, (3,)), 2, plan)


def test_unplanned_draws_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with GlobalDraws(lambda: shares(4, 2)[0], DrawPlan(draws=(), batch_size=4)) as draws:
        draws.begin()
        torch.randn(2, 3), torch.randn(2, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "normal_ of shape (2, 3)" in caplog.text


def test_nothing_changes_outside_a_share_and_after_uninstalling() -> None:
    def draw() -> Tensor:
        torch.manual_seed(5)
        return torch.cat([torch.randn(4), torch.ones(4).bernoulli_(), torch.multinomial(torch.ones(4), 2).float()])

    expected = draw()
    with GlobalDraws(lambda: None):
        assert torch.equal(draw(), expected)
    with GlobalDraws(lambda: shares(4, 2)[1]):
        assert not torch.equal(draw(), expected)
    assert torch.equal(draw(), expected)


def test_cuda_dropout_takes_the_mask_of_the_whole_batch() -> None:
    """Its handler, around the CPU's kernel of the same operator."""
    native = torch.library.get_kernel("aten::native_dropout", "CPU")
    call = partial(native.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))
    batch = batch_of(5, (3, 2))
    torch.manual_seed(7)
    whole, mask = torch.native_dropout(batch, 0.4, True)
    for share in shares(5, 2):
        torch.manual_seed(7)
        with GlobalDraws(lambda share=share: share) as draws:  # type: ignore[misc]
            part, kept = _native_dropout(draws, call, cut(batch, share.rank, share.dealing), 0.4, True)
        torch.testing.assert_close(part, cut(whole, share.rank, share.dealing))
        assert torch.equal(kept, cut(mask, share.rank, share.dealing))


def test_fingerprints_tell_generators_apart() -> None:
    draws = GlobalDraws(lambda: None)
    torch.manual_seed(3)
    before = draws.fingerprint()
    torch.rand(1)
    after = draws.fingerprint()
    torch.manual_seed(3)
    assert draws.fingerprint() == before != after
    assert 0 <= after < 2**63


@pytest.mark.parametrize(
    ("op", "shape", "samples", "dim"),
    [
        ("normal_", (6, 3), 3, 0),
        ("normal_", (7, 3), 3, None),
        ("normal_", (), 3, None),
        ("normal_", (5,), 1, None),
        ("random_", (1,), 1, 0),
        ("bernoulli_", (8, 5, 5), 1, 0),
        ("randperm", (3,), 3, 0),
        ("randperm", (6,), 3, None),
        ("randperm", (1,), 1, None),
    ],
)
def test_guess(op: str, shape: tuple[int, ...], samples: int, dim: int | None) -> None:
    assert guess(op, shape, samples) == (None if dim is None else Rows(dim=dim))


def test_memory_order() -> None:
    assert memory_order(torch.empty(2, 3, 4)) == (0, 1, 2)
    assert memory_order(torch.empty(2, 3, 4).transpose(0, 1)) == (1, 0, 2)
    assert memory_order(torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)


def test_a_draw_that_is_over_samples_by_chance_is_not_made_wrongly() -> None:
    """Three nodes for each of four samples at first; later their numbers differ."""
    plan = DrawPlan(draws=(Draw(op="bernoulli_", shape=(12, 8), choice=Rows(dim=0)),), batch_size=4)
    draws = GlobalDraws(lambda: share_of(4, 0, Dealing.even(2)), plan)
    with draws:
        for rows in (6, 10):
            draws.begin()
            assert not draws.moved
            torch.nn.functional.dropout(torch.ones(rows, 8), 0.5)
            assert draws.moved
        draws.begin()
        with pytest.raises(RuntimeError, match=r"bernoulli_\) had 12 rows for 4 samples .* now has 7 for 2: it isn't over samples"):
            torch.nn.functional.dropout(torch.ones(7, 8), 0.5)
        draws.begin()
        torch.nn.functional.dropout(torch.ones(7, 5), 0.5)  # another draw altogether
