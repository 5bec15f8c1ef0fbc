"""Calls of public functions and methods of torch that its own table of ops (``op_db``) does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as D
import torch.nn.functional as F

from halfstep.core.oplists.tables import words

__all__ = ["MORE"]

A = torch.linspace(-1.0, 1.0, 16).reshape(4, 4) + torch.eye(4)
B = torch.linspace(0.7, -0.9, 16).reshape(4, 4)
P = A.abs() / 4 + 0.1  # probabilities, scales
MASK = torch.eye(4).bool()
INDEX = torch.tensor([0, 2])


def _write(name: str, *args: Any) -> Callable[..., Any]:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        getattr(x, name)(*args, y[:2] if name != "put_" else y[0, :2])
        return x

    return write


def _assign(index: Any) -> Callable[..., Any]:
    def assign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = y[index]
        return x

    return assign


def _sampled(make: Callable[..., D.Distribution]) -> Callable[..., Any]:
    """A sample with its gradient, its log probability, and the moments."""

    def sample(*parameters: torch.Tensor) -> Any:
        made = make(*parameters)
        drawn = made.rsample() if made.has_rsample else made.sample()
        return drawn, made.log_prob(drawn.detach()), made.mean

    return sample


def _sparse(product: Callable[..., Any], layout: str = "to_sparse_coo") -> Callable[..., Any]:
    return lambda x, y: product(getattr(x * (x.detach() > 0), layout)(), y)


def _cell(cell: Callable[..., Any], gates: int, states: int = 1) -> Callable[..., Any]:
    def run(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> Any:
        return cell(x, [h] * states if states > 1 else h, w.repeat(gates, 1), w.repeat(gates, 1))

    return run


_SPECIAL = words("""
    expit psi digamma gammaln erf erfc erfinv exp2 expm1 i0 log1p logit round sinc ndtr ndtri log_ndtr bessel_j0
    bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai entr
    """)

MORE: dict[str, tuple[list[torch.Tensor], Callable[..., Any]]] = {
    # writes
    "x[mask] = y": ([A, B], _assign(MASK)),
    "x[index] = y": ([A, B], _assign(INDEX)),
    "x[slice] = y": ([A, B], _assign(slice(1, 3))),
    "index_put_": ([A, B], lambda x, y: x.clone().index_put_((INDEX,), y[:2])),
    "index_put_(accumulate=True)": ([A, B], lambda x, y: x.clone().index_put_((INDEX,), y[:2], accumulate=True)),
    "put_": ([A, B], _write("put_", INDEX)),
    "index_copy_": ([A, B], _write("index_copy_", 0, INDEX)),
    "copy_": ([A, B], lambda x, y: x.clone().copy_(y)),
    "+=": ([A, B], lambda x, y: x.clone().__iadd__(y)),
    "*=": ([A, B], lambda x, y: x.clone().__imul__(y)),
    "/=": ([A, P], lambda x, y: x.clone().__itruediv__(y)),
    "masked_fill(-1e10)": ([A], lambda x: x.masked_fill(MASK, -1e10).softmax(-1)),
    "masked_fill_(-1e10)": ([A], lambda x: (x * 1).masked_fill_(MASK, -1e10).softmax(-1)),
    "where(-1e10)": ([A], lambda x: torch.where(MASK, x, -1e10).softmax(-1)),
    # operators and products
    "@": ([A, B], lambda x, y: x @ y),
    "__rmatmul__": ([A, B], lambda x, y: x.__rmatmul__(y)),
    "chain_matmul": ([A, B, P], torch.chain_matmul),
    "conv_tbc": ([A[None], B[None, :, :2].expand(1, 4, 2), P[0, :2]], F.conv_tbc),
    "lstm_cell": ([A, B, P], _cell(torch.lstm_cell, 4, 2)),
    "gru_cell": ([A, B, P], _cell(torch.gru_cell, 3)),
    "rnn_tanh_cell": ([A, B, P], _cell(torch.rnn_tanh_cell, 1)),
    "rnn_relu_cell": ([A, B, P], _cell(torch.rnn_relu_cell, 1)),
    "bilinear": ([A, B, A[None]], F.bilinear),
    # sparse
    **{f"sparse.mm, {s}": ([A, B], _sparse(torch.sparse.mm, s)) for s in ("to_sparse_coo", "to_sparse_csr")},
    **{f"sparse @, {s}": ([A, B], _sparse(torch.matmul, s)) for s in ("to_sparse_coo", "to_sparse_csr")},
    **{
        f"addmm, {s}": ([A, B], _sparse(lambda x, y: torch.addmm(y, x, y), s))
        for s in ("to_sparse_coo", "to_sparse_csr")
    },
    "sparse.addmm": ([A, B], _sparse(lambda x, y: torch.sparse.addmm(y, x, y))),
    "sparse.softmax": ([A], lambda x: torch.sparse.softmax(x.to_sparse_coo(), 1)),
    "sparse.log_softmax": ([A], lambda x: torch.sparse.log_softmax(x.to_sparse_coo(), 1)),
    "sparse.sum": ([A], lambda x: torch.sparse.sum(x.to_sparse_coo(), 1)),
    "sparse +": ([A, B], lambda x, y: x.to_sparse_coo() + y.to_sparse_coo()),
    "sparse *": ([A, B], lambda x, y: x.to_sparse_coo() * y.to_sparse_coo()),
    "sparse_mask": ([A, B], lambda x, y: x.sparse_mask(y.detach().to_sparse_coo().coalesce())),
    "smm": ([A.detach(), B], lambda x, y: torch.smm(x.detach().to_sparse_coo(), y.detach())),
    "hspmm": ([A, B], lambda x, y: torch.hspmm(x.detach().to_sparse_coo(), y.detach())),
    "to_dense": ([A], lambda x: x.to_sparse_csr().to_dense()),
    # distributions
    "Normal": ([A, P], _sampled(D.Normal)),
    "LogNormal": ([A, P], _sampled(D.LogNormal)),
    "Laplace": ([A, P], _sampled(D.Laplace)),
    "Cauchy": ([A, P], lambda x, y: D.Cauchy(x, y).log_prob(torch.ones(4))),
    "Gumbel": ([A, P], _sampled(D.Gumbel)),
    "Exponential": ([P], _sampled(D.Exponential)),
    "Gamma": ([P, P], _sampled(lambda x, y: D.Gamma(x + 2, y))),
    "Chi2": ([P], _sampled(lambda x: D.Chi2(x + 2))),
    "Beta": ([P, P], _sampled(lambda x, y: D.Beta(x + 2, y + 2))),
    "Dirichlet": ([P], _sampled(lambda x: D.Dirichlet(x + 2))),
    "StudentT": ([P, A, P], _sampled(lambda x, y, z: D.StudentT(x + 3, y, z))),
    "Weibull": ([P, P], _sampled(lambda x, y: D.Weibull(x + 1, y + 1))),
    "Poisson": ([P], _sampled(D.Poisson)),
    "Bernoulli": ([A], lambda x: D.Bernoulli(logits=x).log_prob(MASK.float())),
    "Bernoulli(probs=)": ([P], lambda x: D.Bernoulli(x).log_prob(MASK.float())),
    "Categorical": (
        [A],
        lambda x: (D.Categorical(logits=x).log_prob(torch.arange(4)), D.Categorical(x.softmax(-1)).entropy()),
    ),
    "Multinomial": ([A], lambda x: D.Multinomial(3, logits=x).log_prob(torch.tensor([1.0, 1.0, 1.0, 0.0]))),
    "VonMises": ([A, P], lambda x, y: D.VonMises(x, y + 1).log_prob(torch.ones(4))),
    "MultivariateNormal": (
        [A[0], P],
        lambda x, y: _sampled(lambda: D.MultivariateNormal(x, scale_tril=y.tril() + torch.eye(4)))(),
    ),
    "LowRankMultivariateNormal": (
        [A[0], B, P[0]],
        lambda x, y, z: D.LowRankMultivariateNormal(x, y, z).log_prob(x * 0),
    ),
    "RelaxedBernoulli": ([A], lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample()),
    "MixtureSameFamily": (
        [A, B, P],
        lambda x, y, z: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(y, z)).log_prob(torch.ones(4)),
    ),
    "kl_divergence": ([A, P, B, P], lambda w, x, y, z: D.kl_divergence(D.Normal(w, x), D.Normal(y, z))),
    "kl_divergence(Gamma)": ([P, P], lambda x, y: D.kl_divergence(D.Gamma(x, y), D.Gamma(y, x))),
    # functions of functions
    "affine_grid": ([A[:2, :3][None]], lambda x: F.affine_grid(x, [1, 1, 4, 4], align_corners=False)),
    "fold": ([A[None]], lambda x: F.fold(x, (2, 5), (2, 2))),
    "lp_pool1d": ([P], lambda x: F.lp_pool1d(x, 2.0, 2)),
    "lp_pool2d": ([P[None]], lambda x: F.lp_pool2d(x, 2.0, 2)),
    "gumbel_softmax": ([A], F.gumbel_softmax),
    "nuclear_norm": ([A], torch.nuclear_norm),
    "frobenius_norm": ([A], lambda x: torch.frobenius_norm(x, 1)),
    "norm_except_dim": ([A], lambda x: torch.norm_except_dim(x, 2, 0)),
    "lobpcg": ([A], lambda x: torch.lobpcg((x.detach() @ x.detach().T) + torch.eye(4), k=1)[0]),
    "_weight_norm": ([A, P[:, :1]], lambda x, y: torch._weight_norm(x, y, 0)),
    "multi_head_attention_forward": (
        [A[:, None], B.repeat(3, 1), P.repeat(3, 1)[:, 0], B, P[0]],
        lambda x, w, b, v, c: F.multi_head_attention_forward(
            x, x, x, 4, 2, w, b, None, None, False, 0.0, v, c, training=False
        )[0],
    ),
    **{f"special.{name}": ([P], getattr(torch.special, name)) for name in _SPECIAL},
    **{f"special.{name}": ([P, A.abs()], getattr(torch.special, name)) for name in ("gammainc", "gammaincc", "xlogy")},
    "special.zeta": ([P, P], lambda x, y: torch.special.zeta(x.detach() + 2, y.detach() + 1)),
    "special.polygamma": ([P], lambda x: torch.special.polygamma(1, x)),
    "special.multigammaln": ([P], lambda x: torch.special.multigammaln(x + 2, 2)),
    "histogram": ([A], lambda x: tuple(torch.histogram(x.detach(), 4, range=(-2.5, 2.5)))),
    "searchsorted": ([P.sort().values, P], lambda x, y: torch.searchsorted(x.detach(), y.detach())),
    "bucketize": ([P, P[0].sort().values], lambda x, y: torch.bucketize(x.detach(), y.detach())),
    "isin": ([A, A], lambda x, y: torch.isin(x.detach(), y.detach())),
    "bincount": ([A[0]], lambda x: torch.bincount(torch.arange(4) % 2, weights=x.detach())),
}
"""The tensors of each call, and the call."""
