"""torch_geometric: batches of graphs, whose nodes and edges lie behind one another."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from tests.packages.member import Member, Options, fit


class Graphs(pl.LightningModule):
    """Which class a graph is of: two convolutions and the mean over its nodes."""

    def __init__(self, convolution: Any, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([convolution(5, 16), convolution(16, 16)])
        self.norm, self.out = norm or nn.Identity(), nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        nodes = batch.x
        for convolution in self.convolutions:
            nodes = convolution(nodes, batch.edge_index).relu()
        nodes = dropout(self.norm(nodes), 0.2, self.training)
        loss = cross_entropy(self.out(global_mean_pool(nodes, batch.batch)), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def _graphs(count: int = 28) -> list[Any]:
    from torch_geometric.data import Data

    draw = np.random.default_rng(0)
    graphs = []
    for _ in range(count):
        nodes = int(draw.integers(4, 9))
        edges = torch.tensor(draw.integers(0, nodes, (2, int(draw.integers(nodes, 3 * nodes)))))
        features = torch.tensor(draw.normal(size=(nodes, 5)), dtype=torch.get_default_dtype())
        graphs.append(Data(x=features, edge_index=edges, y=torch.tensor([int(draw.integers(0, 3))])))
    return graphs


def _gcn(options: Options) -> None:
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import BatchNorm, GCNConv

    fit(options, Graphs(GCNConv, BatchNorm(16)), DataLoader(_graphs(), batch_size=8, shuffle=True))


def _gat(options: Options) -> None:
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GATv2Conv

    fit(options, Graphs(GATv2Conv), LightningDataset(_graphs(), batch_size=8, shuffle=True))


def _by_nodes(options: Options) -> None:
    from torch_geometric.loader import DataLoader, DynamicBatchSampler
    from torch_geometric.nn import SAGEConv

    graphs = _graphs()
    sampler: Any = DynamicBatchSampler(graphs, max_num=40, mode="node", shuffle=True, num_steps=4)
    fit(options, Graphs(SAGEConv), DataLoader(graphs, batch_sampler=sampler))


MEMBERS = (
    Member(name="gcn", package="torch-geometric", about="GCN, BatchNorm over nodes, dropout", train=_gcn),
    Member(name="gat", package="torch-geometric", about="GATv2 with torch_geometric's LightningDataset", train=_gat),
    Member(name="sage", package="torch-geometric", about="SAGE, batches of at most 40 nodes", train=_by_nodes),
)
