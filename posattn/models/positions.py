"""What a layer does with position, as pure functions of its `PositionScheme`.

For queries q and keys k as the scheme receives them (after bias and QK-norm, before any rotation), the weights are

    S_ij = scale · ⟨R_i q_i, R_j k_j⟩ − slope·(i − j)          (rotary: Su et al., 2104.09864, section 3; ALiBi: Press
                                                                et al., 2108.12409, section 3; either may be absent)
    S_ij ← c · tanh(S_ij / c)                                   (soft cap)
    A_i  = softmax over the visible j (and the sink) of S_i     (the sink's own weight is then dropped)

Query head h reads key head h // (H / K). Everything is computed in float32 or better.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posattn.errors import InputError
from posattn.models.base import PositionScheme, Rotary


def real_positions(mask: Bool[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """The index of each real token among the real tokens of its row; 0 at padding before the first one."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def rotate(
    x: Float[Tensor, "*shape d"], rotary: Rotary, positions: Int[Tensor, "..."], inverse: bool = False
) -> Float[Tensor, "*shape d"]:
    """Rotate the leading `rotary.width` features of `x` to `positions` (broadcast against the shape before features).

    For queries [B,N,H,d] at positions [B,N], pass `positions[..., None]`. `inverse` applies the transpose of the
    forward map: it turns back by the same angle and keeps the attention factor, so that
    ⟨rotate(x, p), y⟩ = ⟨x, rotate(y, p, inverse=True)⟩ holds exactly for every scaling variant.

    Raises:
        InputError: a position lies outside the table (0 … N-1), or `x` is narrower than the rotation.
    """
    if x.shape[-1] < rotary.width:
        raise InputError(f"cannot rotate {rotary.width} features of a tensor that has {x.shape[-1]}")
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= rotary.cos.shape[0]):
        raise InputError(
            f"positions {int(positions.min())}…{int(positions.max())} lie outside the rotary table of "
            f"{rotary.cos.shape[0]} positions: ask for the scheme at a greater length"
        )
    dtype = torch.promote_types(torch.promote_types(x.dtype, rotary.cos.dtype), torch.float32)
    positions = positions.to(rotary.cos.device)
    cos, sin = rotary.cos.to(dtype)[positions], rotary.sin.to(dtype)[positions]
    if inverse:
        sin = -sin
    turned, rest = x[..., : rotary.width].to(dtype), x[..., rotary.width :].to(dtype)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    a, b = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if rotary.interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def visible(scheme: PositionScheme, n: int, device: torch.device | None = None) -> Bool[Tensor, "n n"]:
    """Which keys (columns) each query (row) may see: causal, and within the window when the layer has one."""
    index = torch.arange(n, device=device)
    distance = index[:, None] - index[None, :]
    seen = distance >= 0
    if scheme.window is not None:
        seen &= distance < scheme.window
    return seen


def logits(
    q: Float[Tensor, "b n h d"],
    k: Float[Tensor, "b n g d"],
    scheme: PositionScheme,
    mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n n"]:
    """Attention logits as they enter the softmax (scaled, biased, soft-capped), before the causal mask.

    `mask` (True at real tokens) gives the positions; nothing is masked out here.
    """
    batch, n, heads, width = q.shape
    groups = k.shape[2]
    if heads % groups:
        raise InputError(f"{heads} query heads cannot share {groups} key heads")
    dtype = torch.promote_types(q.dtype, torch.float32)
    if mask is None:
        positions = torch.arange(n, device=q.device).expand(batch, n)
    else:
        positions = real_positions(mask)
    if scheme.rotary is not None:
        q, k = rotate(q, scheme.rotary, positions[..., None]), rotate(k, scheme.rotary, positions[..., None])
    grouped = q.to(dtype).view(batch, n, groups, heads // groups, width)
    scores = torch.einsum("bigrd,bjgd->bgrij", grouped, k.to(dtype)).reshape(batch, heads, n, n) * scheme.scale
    if scheme.alibi is not None:
        if scheme.alibi.table is not None:
            bias = scheme.alibi.table.to(dtype)[:, positions].movedim(0, 1)[:, :, None, :]  # [B,H,1,N]: keys only
        else:
            distance = (positions[:, None, :, None] - positions[:, None, None, :]).to(dtype)
            bias = -scheme.alibi.slopes.to(dtype)[None, :, None, None] * distance
        scores = scores + bias
    if scheme.softcap is not None:
        scores = scheme.softcap * torch.tanh(scores / scheme.softcap)
    return scores


def attention(
    q: Float[Tensor, "b n h d"],
    k: Float[Tensor, "b n g d"],
    scheme: PositionScheme,
    mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n n"]:
    """Attention weights [B,H,N,N] from q, k and the scheme. Rows and columns at padding are 0.

    Rows of real queries sum to 1, or to 1 minus the sink's weight where the layer has a sink.
    """
    n = q.shape[1]
    allowed = visible(scheme, n, q.device)[None, None]
    if mask is not None:
        allowed = allowed & mask[:, None, None, :] & mask[:, None, :, None]
    scores = logits(q, k, scheme, mask).masked_fill(~allowed, -torch.inf)
    if scheme.sinks is not None:
        sink = scheme.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.masked_fill(~allowed, 0.0)  # a padded row is all −inf: NaN out of the softmax


def table_logits(scheme: PositionScheme, n: int, device: torch.device | None = None) -> Float[Tensor, "h n n"] | None:
    """The additive position bias [H,N,N] of an ALiBi layer (None where the layer has none), in units of the logits."""
    if scheme.alibi is None:
        return None
    index = torch.arange(n, device=device)
    slopes = scheme.alibi.slopes.to(device=device)
    return -slopes[:, None, None] * (index[:, None] - index[None, :]).to(slopes.dtype)
