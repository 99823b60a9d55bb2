"""The rollout of structured kernels: no N x N matrix unless the whole of P is asked for, or N is small enough to pay.

The row form of `dense`, p ← (1-λ) p + λ p A, with `Applied.left` for p A. Every depth at once: going down from the last
layer, the rollout that starts at layer t joins when layer t is reached, so one pass serves all depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posattn.errors import InputError
from posattn.results import provenance
from posattn.rollout.dense import (
    Rollout,
    _broadcast,
    _pick,
    _run,
    check_mixing,
    query_indices,
)
from posattn.rollout.kernels import Applied, StructuredKernel, layers_of


def rollout_structured(
    mixing: Any,
    kernels: StructuredKernel | Sequence[StructuredKernel],
    length: int,
    queries: str | int | Sequence[int] | Tensor = "last",
    *,
    impl: str = "auto",
    depth: str = "final",
    dtype: torch.dtype | None = None,
) -> Rollout:
    """`rollout` for structured kernels; see there. `impl="structured"` never builds a dense kernel, "auto" may.

    Args:
        mixing: λ [..., T]; kernels: one for all layers, one with the layers as its last batch dimension, or a list.

    Returns:
        `Rollout` with profile [..., Q, N], or [..., T, Q, N] for every depth; float64 unless `dtype` says otherwise.

    Raises:
        InputError: as `rollout`.
    """
    items = [kernels] if isinstance(kernels, StructuredKernel) else list(kernels)
    if not items or not all(isinstance(item, StructuredKernel) for item in items):
        raise InputError("kernels must be a tensor [..., T, N, N], one structured kernel, or a list of them")
    count = layers_of(kernels)
    device = items[0].weights.device
    weights = check_mixing(mixing, count if count != 1 or not isinstance(kernels, StructuredKernel) else None, device)
    if weights.ndim == 0:
        raise InputError("mixing is one number, but nothing says how many layers there are: pass a list")
    layers = weights.shape[-1]
    weights = weights.to(dtype or torch.float64)
    rows = query_indices(queries, length, device)
    shared = isinstance(kernels, StructuredKernel) and count in (None, 1)
    parts = (
        [items[0].layer(0)]
        if shared
        else [kernels.layer(t) if isinstance(kernels, StructuredKernel) else kernels[t] for t in range(layers)]
    )
    lead = _broadcast(weights.shape[:-1], torch.broadcast_shapes(*(part.batch_shape for part in parts)))

    every = depth == "every"
    name, profile = "structured", None
    if impl == "auto" and dtype in (None, torch.float64) and _dense_pays(parts, layers, length, len(rows), every, lead):
        dense = torch.stack([quick_dense(part, length) for part in parts], -3)
        dense = dense.expand(*dense.shape[:-3], layers, length, length)
        causal = all(not part.full and part.prefix <= 1 for part in parts)
        name = _pick(weights, dense, rows, depth, causal)
        profile = _run(name, weights, dense, rows, every, causal)
    else:
        profile = _scan(weights, parts, rows, length, lead, every)
    return Rollout(
        profile=profile,
        queries=rows,
        impl=name,
        depths=torch.arange(1, layers + 1, device=device) if every else None,
        provenance=provenance(
            dtype=str(profile.dtype).removeprefix("torch."),
            device=str(device),
            layers=layers,
            length=length,
            renormalised=False,
        ),
    )


def _scan(
    mixing: Tensor, parts: list[StructuredKernel], rows: Tensor, length: int, lead: torch.Size, every: bool
) -> Tensor:
    layers, shared = mixing.shape[-1], len(parts) == 1
    start = torch.nn.functional.one_hot(rows, length).to(mixing.dtype).expand(*lead, len(rows), length)
    ready = parts[0].at(length, mixing.dtype) if shared else None
    profile = start[..., :0, :] if every else start
    for layer in reversed(range(layers)):
        if every:  # the rollout that ends with this layer joins, at the front
            profile = torch.cat([start, profile], -2)
        kernel: Applied = ready if ready is not None else parts[layer].at(length, mixing.dtype)
        weight = mixing[..., layer, None, None]
        profile = (1 - weight) * profile + weight * kernel.left(profile)
    return profile.unflatten(-2, (layers, len(rows))) if every else profile


def _dense_pays(
    parts: list[StructuredKernel], layers: int, n: int, queries: int, every: bool, lead: torch.Size
) -> bool:
    """Whether building dense kernels and multiplying by them is cheaper than scanning (and fits in 256 MB)."""
    if n > 1024 or len(parts) * math.prod(lead) * n * n > 1 << 25:
        return False
    heads = parts[0].heads
    applications = queries * layers * ((layers + 1) / 2 if every else 1)
    dense = len(parts) * heads * n * n + min(applications, layers * n) * n * n
    return dense < applications * heads * n * 64 + len(parts) * heads * n * 64


def quick_dense(kernel: StructuredKernel, n: int) -> Tensor:
    """A [..., N, N] in float64; for plain causal ALiBi from one matrix product over heads instead of H softmaxes."""
    plain = kernel.slopes is not None and (kernel.window is None or kernel.window >= n) and not kernel.full
    if not plain or kernel.prefix > 1 or n == 1:
        return kernel.dense(n)
    ready = kernel.at(n)
    assert kernel.slopes is not None
    position = torch.arange(n, device=kernel.weights.device)
    slopes = kernel.slopes[..., None]
    coefficients = ready._low_coefficients(position, -slopes)  # [..., H, N]
    decay = torch.exp(-slopes * position)  # by distance - 1
    by_distance = coefficients.transpose(-1, -2) @ decay  # [..., N, distance - 1]
    lag = position[:, None] - position[None, :]
    below = by_distance.gather(-1, (lag - 1).clamp(min=0).expand(by_distance.shape)).tril(-1)
    return below + torch.diag_embed(ready.diagonal())
