"""Attention weights block by block: what a fast attention never writes down, without ever holding [heads, N, N].

A block of R queries sees every key that it may look at, so its softmax is complete and no running maximum is needed:

    S = scale · Q_block Kᵀ,  soft cap,  mask,  A = exp(S − L),  L = log(Σ_j exp S_j [+ exp sink])

Key heads are taken one after the other, each with the query heads that read it. What is held at once is
R × N × (heads per key head) numbers, and R is chosen so that this stays within `BUDGET`. Everything is float32 or
better, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posattn.errors import InputError
from posattn.models.base import PositionScheme

#: numbers of one block of weights: 8 MiB of float32, which the caches of most machines still like
BUDGET = 2**21


class Block(NamedTuple):
    """Weights of the queries `first` … `last`−1 for the keys from `low` to `last`−1, of the heads of one key head.

    `weights` [r, R, keys] with r query heads a key head; `sink` [r, R]: what went to the sink, 0 without one.
    """

    first: int
    last: int
    low: int
    group: int
    weights: Tensor
    sink: Tensor


def block_rows(n: int, sharing: int, align: int = 1, budget: int | None = None) -> int:
    """How many queries make a block: within the budget, at least 16, and a multiple of `align`."""
    budget = BUDGET if budget is None else budget
    rows = max(min(budget // max(sharing * n, 1), n), min(16, n), 1)
    return max(rows // align, 1) * align


def weight_blocks(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n g d"],
    scheme: PositionScheme,
    lse: Float[Tensor, "n h"] | None = None,
    *,
    align: int = 1,
    budget: int | None = None,
) -> Iterator[Block]:
    """All attention weights of one document without padding, for queries and keys as they enter the product.

    That is, after any rotation. Of `scheme` the scale, the window, the soft cap, the sinks and an ALiBi table are used.
    `lse` is the logarithm of each row's normaliser (the sink in it) where it is known already. `align` makes each block
    begin at a multiple of it, and `low` one too.

    Raises:
        InputError: query heads that cannot share the key heads.
    """
    n, heads, _ = q.shape
    groups = k.shape[1]
    if heads % groups:
        raise InputError(f"{heads} query heads cannot share {groups} key heads")
    sharing = heads // groups
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = block_rows(n, sharing, align, budget)
    index = torch.arange(n, device=q.device)
    slopes = table = None
    if scheme.alibi is not None and scheme.alibi.table is not None:
        table = scheme.alibi.table.to(q.device, dtype)
    elif scheme.alibi is not None:
        slopes = scheme.alibi.slopes.to(q.device, dtype)[:, None, None]
    for first in range(0, n, rows):
        last = min(first + rows, n)
        low = 0 if scheme.window is None else max(0, first - scheme.window + 1) // align * align
        distance = index[first:last, None] - index[low:last]
        hidden = distance < 0
        if scheme.window is not None:
            hidden |= distance >= scheme.window
        for group in range(groups):
            mine = slice(group * sharing, (group + 1) * sharing)
            queries = q[first:last, mine].to(dtype).transpose(0, 1)  # [r,R,d]
            scores = torch.matmul(queries, k[low:last, group].to(dtype).T).mul_(scheme.scale)
            if table is not None:
                scores += table[mine, None, low:last]
            elif slopes is not None:
                scores -= slopes[mine] * distance
            if scheme.softcap is not None:
                scores.div_(scheme.softcap).tanh_().mul_(scheme.softcap)
            scores.masked_fill_(hidden, -torch.inf)
            sink = None
            if scheme.sinks is not None:
                sink = scheme.sinks[mine].to(q.device, dtype)[:, None]
            if lse is not None:
                level = lse[first:last, mine].to(dtype).T
                weights = scores.sub_(level[..., None]).exp_()
                lost = torch.zeros_like(level) if sink is None else (sink - level).exp()
            else:
                top = scores.amax(-1)
                top = top if sink is None else torch.maximum(top, sink)
                weights = scores.sub_(top[..., None]).exp_()
                lost = torch.zeros_like(top) if sink is None else (sink - top).exp()
                total = weights.sum(-1) + lost
                weights.div_(total[..., None])
                lost = lost / total
            yield Block(first, last, low, group, weights, lost)


def blockwise_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    scale: float,
    mask: Bool[Tensor, "b 1 n n"] | Bool[Tensor, "1 1 n n"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    budget: int | None = None,
) -> Float[Tensor, "b n h e"]:
    """The attention's output where no fast attention of PyTorch computes it: soft caps and sinks. Differentiable.

    `mask` is True where a query may look; None is causal. Rows that may look nowhere (padding) come out finite.
    """
    batch, heads, n, _ = q.shape
    groups = k.shape[1]
    sharing = heads // groups
    dtype = torch.promote_types(q.dtype, torch.float32)
    least = torch.finfo(dtype).min
    rows = block_rows(n, sharing * batch, budget=budget)
    index = torch.arange(n, device=q.device)
    parts = []
    for first in range(0, n, rows):
        last = min(first + rows, n)
        seen = last if mask is None else n
        if mask is None:
            hidden = index[first:last, None] < index[:last]
        else:
            hidden = ~mask[:, :, first:last]  # [B or 1, 1, R, N]
        outputs = []
        for group in range(groups):
            mine = slice(group * sharing, (group + 1) * sharing)
            scores = q[:, mine, first:last].to(dtype) @ k[:, group, None, :seen].to(dtype).mT * scale  # [B,r,R,seen]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, least)
            if sinks is not None:
                extra = sinks[mine].to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
                weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            outputs.append(weights @ v[:, group, None, :seen].to(dtype))
        parts.append(torch.cat(outputs, 1).to(v.dtype))
    return torch.cat(parts, 2).transpose(1, 2)
