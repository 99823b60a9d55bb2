"""Positional and symbolic score of one query over all swaps of two earlier keys, in closed form.

When the keys at positions i and j are exchanged, the two attention weights become proportional to
(e^M[i,j], e^M[j,i]); before they were proportional to (e^M[i,i], e^M[j,j]). Nothing else in the cosines depends on the
softmax's normaliser. With δ = M[i,i] − M[j,j], δ' = M[i,j] − M[j,i] and the unit vectors
(c, s) = (√σ(2δ), √σ(−2δ)), (c', s') likewise:

    cos((D'_i, D'_j), (D_i, D_j)) = c c' + s s',      cos((D'_i, D'_j), (D_j, D_i)) = s c' + c s'

which never overflows. The weight of a swap is the softmax over swaps of |D_i − D_j| / τ. Sort the keys by D: then
|D_i − D_j| = D_i − D_j for i before j, and the weight separates into exp((D_i − D_max)/τ) · exp((D_min − D_j)/τ). Rows
whose first factor, and columns whose second factor, are below the rounding error of the sum are never touched: a
head that stands on few keys costs O(n d), only a flat one O(n² d).

Source of the scores: arXiv 2511.11579 and arXiv 2605.31558; the closed form and the sorting are ours.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posattn.errors import InputError
from posattn.heads.crosslogits import cap

TAU = 1e-4  # temperature of the weights of swaps, in units of attention weight (arXiv 2605.31558)
_BUDGET = 2**24  # elements of one work tensor


def swap_scores(
    queries: Float[Tensor, "g n d"],
    keys: Float[Tensor, "g n d"],
    weights: Float[Tensor, "g n"],
    softcap: float | None = None,
    tau: float = TAU,
) -> tuple[Float[Tensor, "g"], Float[Tensor, "g"]]:
    """Positional and symbolic score (both in [0, 1]) of G queries, over all n(n−1)/2 swaps.

    Args:
        queries, keys: U and K with M = cap(U Kᵀ), see `crosslogits`.
        weights: attention weights D of those keys.
        tau: temperature of the weights of swaps; 0 is the limit: swaps of the largest |D_i − D_j| alone, ties alike.

    Raises:
        InputError: fewer than two keys, a negative τ, or weights that are not finite.
    """
    count, n, width = keys.shape
    if n < 2:
        raise InputError("a swap needs two earlier keys in view: use a longer prompt or a later query")
    _check_tau(tau)
    if not torch.isfinite(weights).all():
        raise InputError("attention weights are not finite")
    ordered, order = weights.double().sort(-1, descending=True)
    top, bottom = ordered[:, :1], ordered[:, -1:]
    if tau > 0:
        high, low = torch.exp((ordered - top) / tau), torch.exp((bottom - ordered) / tau)
    else:
        high, low = (ordered == top).double(), (ordered == bottom).double()
    # the heaviest swap has weight 1, so dropping rows and columns below this moves a score by less than `slack`
    slack = 1e-13 if weights.dtype == torch.float64 else 1e-9
    rows = (high > slack / n**2).sum(-1)
    columns = (low > slack / n**2).sum(-1)
    # heads of like size together: the exponents of the powers of two above rows and columns
    size = torch.stack([_log2(rows), _log2(columns)], -1).tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (r, c) in enumerate(size):
        groups.setdefault((r, c), []).append(index)
    positional = torch.empty(count, dtype=torch.float64, device=keys.device)
    symbolic = torch.empty_like(positional)
    for (r, c), members in groups.items():
        r, c = min(2**r, n), min(2**c, n)
        step = max(1, _BUDGET // max(r * c, (r + c) * width))
        for start in range(0, len(members), step):
            chosen = torch.tensor(members[start : start + step], device=keys.device)
            head, tail = order[chosen, :r], order[chosen, n - c :]
            block = chosen.unsqueeze(-1)
            row_q, row_k = queries[block, head], keys[block, head]
            column_q, column_k = queries[block, tail], keys[block, tail]
            row_m, column_m = cap((row_q * row_k).sum(-1), softcap), cap((column_q * column_k).sum(-1), softcap)
            before = row_m.unsqueeze(-1) - column_m.unsqueeze(-2)
            after = cap(row_q @ column_k.mT, softcap) - cap(row_k @ column_q.mT, softcap)
            weight = high[chosen, :r].unsqueeze(-1) * low[chosen, n - c :].unsqueeze(-2)
            # each pair once: the row's place in the order is before the column's
            weight = weight.triu(1 - (n - c)).to(keys.dtype)
            total = weight.sum((-1, -2), dtype=torch.float64)
            same, other = _cosines(before, after)
            positional[chosen] = same.mul_(weight).sum((-1, -2), dtype=torch.float64) / total
            symbolic[chosen] = other.mul_(weight).sum((-1, -2), dtype=torch.float64) / total
    return positional.clamp_(0, 1).to(keys.dtype), symbolic.clamp_(0, 1).to(keys.dtype)


def _log2(count: Tensor) -> Tensor:
    """The smallest e with 2^e ≥ count."""
    return torch.ceil(torch.log2(count.clamp(min=1).double())).long()


def pair_scores(
    logits: Float[Tensor, "g n n"],
    weights: Float[Tensor, "g n"],
    allowed: Bool[Tensor, "g n n"],
    tau: float = TAU,
) -> tuple[Float[Tensor, "g"], Float[Tensor, "g"]]:
    """The same from M itself, over chosen swaps alone: pair (i, j), i < j, counts where `allowed` holds.

    O(n²) memory, for short prompts. A query without an allowed swap gets NaN.

    Raises:
        InputError: a negative τ.
    """
    _check_tau(tau)
    m, d = logits.double(), weights.double()
    own = m.diagonal(dim1=1, dim2=2)
    before, after = own.unsqueeze(-1) - own.unsqueeze(-2), m - m.mT
    chosen = allowed & torch.ones_like(allowed).triu(1)
    gap = (d.unsqueeze(-1) - d.unsqueeze(-2)).abs().masked_fill(~chosen, -torch.inf)
    largest = gap.amax((-1, -2), keepdim=True)
    share = torch.exp((gap - largest) / tau) if tau > 0 else (gap == largest).double()
    share = share.masked_fill(~chosen, 0.0)
    total = share.sum((-1, -2))
    same, other = ((cosine * share).sum((-1, -2)) / total for cosine in _cosines(before, after))
    return same.to(logits.dtype), other.to(logits.dtype)


def _cosines(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """cos(D', D) and cos(D', D exchanged) from δ and δ' (module docstring)."""
    c0, s0 = torch.sigmoid(2 * before).sqrt_(), torch.sigmoid(-2 * before).sqrt_()
    c1, s1 = torch.sigmoid(2 * after).sqrt_(), torch.sigmoid(-2 * after).sqrt_()
    return torch.addcmul(c0 * c1, s0, s1), torch.addcmul(s0 * c1, c0, s1)


def _check_tau(tau: float) -> None:
    if not (tau >= 0 and math.isfinite(tau)):
        raise InputError(f"tau must be a finite number of at least 0, not {tau}")
