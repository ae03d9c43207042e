"""torch-uncertainty and pina: weights that are averaged between epochs, and physics on tensors that have labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.packages.member import Member, Options, fit, loaders


def _vectors(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 10, generator=draw), torch.randint(4, (count,), generator=draw))


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def _swag(options: Options) -> None:
    from torch_uncertainty.methods import SWAG
    from torch_uncertainty.routines import ClassificationRoutine

    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    averaged = SWAG(net, cycle_start=0, cycle_length=1, num_estimators=3)
    routine = ClassificationRoutine(averaged, 4, nn.CrossEntropyLoss(), optim_recipe=_adam, is_ensemble=True)
    fit(options, routine, *loaders(_vectors), max_epochs=3)


def _mimo(options: Options) -> None:
    from torch_uncertainty.models.mlp import mimo_mlp
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import MIMOBatchFormat

    net = mimo_mlp(in_features=10, num_outputs=4, hidden_dims=[32, 32], num_estimators=2)
    batches = MIMOBatchFormat(2)
    routine = ClassificationRoutine(net, 4, nn.CrossEntropyLoss(), optim_recipe=_adam, is_ensemble=True, format_batch_fn=batches)
    fit(options, routine, *loaders(_vectors))


def _physics(options: Options, make: Any) -> None:
    from pina import Trainer
    from pina.model import FeedForward
    from pina.optim import TorchOptimizer
    from pina.problem.zoo import Poisson2DSquareProblem

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(24, "random")
    optimizer = TorchOptimizer(torch.optim.Adam, lr=1e-2)
    solver = make(problem=problem, model=FeedForward(2, 1, inner_size=16, n_layers=3), optimizer=optimizer)
    Trainer(solver, **{"max_epochs": 2, "batch_size": 10, "train_size": 0.8, "val_size": 0.2, **options}).train()


def _pinn(options: Options) -> None:
    from pina.solver import PhysicsInformedSingleModelSolver

    _physics(options, PhysicsInformedSingleModelSolver)


def _attention(options: Options) -> None:
    from pina.solver import RBAPhysicsInformedSingleModelSolver

    _physics(options, RBAPhysicsInformedSingleModelSolver)


MEMBERS = (
    Member(name="swag", package="torch-uncertainty", about="SWAG, weights averaged and drawn before each validation", train=_swag),
    Member(name="mimo", package="torch-uncertainty", about="MIMO, samples mixed in the step", train=_mimo),
    Member(name="pinn", package="pina-mathlab", about="physics-informed, batches of labelled tensors", train=_pinn),
    Member(name="rba", package="pina-mathlab", about="the same with a weight for each point, in buffers", train=_attention),
)
