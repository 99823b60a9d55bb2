"""One document's head-mean kernel, block by block: what `StreamedKernelProbe` adds up, in plain torch."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.models.base import PositionScheme
from posattn.models.tiles import weight_blocks


def add_document(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n g d"],
    lse: Float[Tensor, "n h"] | None,
    scheme: PositionScheme,
    total: Float[Tensor, "m m"],
    stray: Float[Tensor, " s"],
    bins: int | None,
) -> Float[Tensor, " h"]:
    """Add one document's weights, summed over heads, to `total`, and its δ to `stray`; each head's mean sink mass.

    `total` is [N,N], or [M,M] sums over rows and columns of bins. δ is that of the document's head-mean kernel.
    """
    n, heads, _ = q.shape
    sinks = torch.zeros(heads, dtype=torch.float64)
    sharing = heads // k.shape[1]
    rows: Tensor | None = None
    for block in weight_blocks(q, k, scheme, lse, align=bins or 1):
        if scheme.sinks is not None:
            heads_here = slice(block.group * sharing, (block.group + 1) * sharing)
            sinks[heads_here] += block.sink.sum(-1).double().cpu() / n
        part = block.weights.sum(0) if block.weights.dtype == torch.float32 else block.weights.sum(0).float()
        rows = part if block.group == 0 or rows is None else rows.add_(part)
        if block.group < k.shape[1] - 1:
            continue
        if bins is None:
            total[block.first : block.last, block.low : block.last] += rows
            continue
        columns = by_bin(rows, bins)
        top, left = block.first // bins, block.low // bins
        corner = total[top : top + -(-len(columns) // bins), left : left + columns.shape[1]]
        bin_rows(columns, bins, heads, corner, stray[block.first : block.last])
    return sinks.float()


def bin_rows(
    columns: Float[Tensor, "r m"], bins: int, heads: int, total: Float[Tensor, "q m"], stray: Float[Tensor, " r"]
) -> None:
    """Add the sums over the bins of rows to `total`, and each row's distance from its bin's mean to `stray`."""
    padded = torch.nn.functional.pad(columns, (0, 0, 0, -len(columns) % bins)).unflatten(0, (-1, bins))
    summed = padded.sum(1)
    total += summed
    members = torch.full((len(summed), 1), float(bins), device=columns.device)
    members[-1] = len(columns) - bins * (len(summed) - 1)
    off = (padded - (summed / members)[:, None]).abs_().sum(-1).flatten()[: len(columns)]
    stray += off / (2 * heads)


def by_bin(values: Float[Tensor, "*any n"], bins: int) -> Float[Tensor, "*any m"]:
    """Sums over bins of so many neighbours along the last axis; the last bin may be smaller."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % bins)).unflatten(-1, (-1, bins)).sum(-1)
