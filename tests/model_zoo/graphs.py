"""Networks on graphs, by the three ways in which libraries sum over edges."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .kinds import kind


def ring(n=24):
    """A graph of two rings that are joined once: edges both ways, features, and the ring of each node."""
    half = n // 2
    source = torch.arange(n)
    target = torch.where(source % half == half - 1, source - half + 1, source + 1)
    edges = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    y = (source >= half).long()
    x = torch.randn(n, 8) + y[:, None] * 0.7
    return x, edges, y


class GAT(nn.Module):
    """Attention over edges, with scatter as in libraries of graph networks."""

    def __init__(self, inp, out):
        super().__init__()
        self.lin, self.att = nn.Linear(inp, out), nn.Parameter(torch.randn(2, out) * 0.3)

    def forward(self, x, edge_index):
        (row, col), n = edge_index, x.size(0)
        x = self.lin(x)
        e = F.leaky_relu((x * self.att[0]).sum(-1)[row] + (x * self.att[1]).sum(-1)[col], 0.2)
        largest = torch.full((n,), float("-inf")).scatter_reduce(0, col, e, reduce="amax", include_self=False)
        e = (e - largest[col]).exp()
        total = torch.zeros(n).scatter_add_(0, col, e)
        alpha = e / (total[col] + 1e-16)
        index = col[:, None].expand(-1, x.size(1))
        return torch.zeros_like(x, dtype=torch.float).scatter_add(0, index, alpha[:, None] * x[row])


class SparseConv(nn.Module):
    """Kipf's GCN: a product with the sparse adjacency matrix."""

    def __init__(self, inp, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inp, out) / inp**0.5), nn.Parameter(torch.zeros(out))

    def forward(self, x, edge_index):
        n = x.size(0)
        adjacency = torch.sparse_coo_tensor(edge_index, torch.full((edge_index.size(1),), 0.5), (n, n))
        support = torch.mm(x, self.weight)
        return torch.sparse.mm(adjacency, support) + support + self.bias


class GNN(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.conv1, self.conv2 = layer(8, 16), layer(16, 2)

    def forward(self, x, edge_index):
        return F.log_softmax(self.conv2(F.elu(self.conv1(x, edge_index)), edge_index), dim=1)


def graph_network(layer):
    model = GNN(layer)
    x, edges, y = ring()
    return model, lambda: F.nll_loss(model(x, edges), y)


@kind("GNN by scatter", steps=15, lr=1e-2)
def gnn_scatter():
    return graph_network(GAT)


@kind("GNN by a sparse product", steps=20, lr=1e-2)
def gnn_sparse():
    return graph_network(SparseConv)
