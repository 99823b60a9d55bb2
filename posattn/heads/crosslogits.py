"""Cross-logits: what a head would give the key of token t if it stood at position p.

For a query at position i the logit of the key of token t, placed at position p, is

    M[p, t] = cap(scale · u_p · k_t + b_p),    u_p = R(p)ᵀ R(i) q

because moving a key by a rotation is the same as moving the query by the inverse one. So one product of an n×d by a
d×n matrix gives all n² of them, and k is never rotated. R(p) is the 2×2-block matrix of the layer's own tables, its
attention factor included (cos² + sin² = f²), so u_p carries f². Dimensions beyond the rotated width, and every
dimension of a layer without rotary embedding, have u_p = q. ALiBi adds b_p = −m_h (i − p); a soft cap c is
c·tanh(·/c). The bias is carried as one more dimension (u_p gains b_p, k_t gains 1), so that everything that
follows sees M = cap(U Kᵀ).

"Visible" keys are the earlier ones inside the layer's window; the query's own key takes part in the softmax but is
never exchanged, since its row is the query's row. M's diagonal is the head's own logits.

Per rotary frequency, U and K split into pairs of dimensions: M = cap(Σ_t M_t), with
M_t[p, j] = scale·f²·‖q⁽ᵗ⁾‖‖k⁽ᵗ⁾‖·cos(φ_q − φ_k + θ_t (i − p)); dimensions that are not rotated form one more term.

Source: arXiv 2511.11579 (permuted keys), arXiv 2605.31558 (per-frequency logits); moving the query is ours.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError, UnsupportedModelError
from posattn.models.base import PositionScheme, Rotary
from posattn.models.positions import rotate


@dataclasses.dataclass(frozen=True)
class Moved:
    """One query of every head, moved to each visible position, and the keys: M = cap(U Kᵀ).

    `queries` U and `keys` K are [..., n+1, d'] over the n visible earlier positions and, last, the query's own;
    `first` is the position of the first one. Scale and bias are in U (and its extra dimension). `sink` [H] is the
    learned sink logit, which takes part in the softmax and is then dropped.
    """

    queries: Float[Tensor, "*batch n1 d"]
    keys: Float[Tensor, "*batch n1 d"]
    first: int
    softcap: float | None
    sink: Float[Tensor, "h"] | None

    @property
    def n(self) -> int:
        """How many earlier keys are visible (and can be exchanged)."""
        return self.keys.shape[-2] - 1

    def matrix(self) -> Float[Tensor, "*batch n n"]:
        """M[p, t], rows positions, columns tokens."""
        return cap(self.queries[..., :-1, :] @ self.keys[..., :-1, :].transpose(-1, -2), self.softcap)

    def logits(self) -> Float[Tensor, "*batch n1"]:
        """The head's own logits of the visible keys (M's diagonal, without building M) and, last, of its own key."""
        return cap((self.queries * self.keys).sum(-1), self.softcap)

    def weights(self) -> Float[Tensor, "*batch n1"]:
        """Attention weights of the visible keys, the own one last; they sum to 1, or to less with a sink."""
        logits = self.logits()
        if self.sink is not None:
            logits = torch.cat([logits, self.sink.to(logits).expand(logits.shape[:-1]).unsqueeze(-1)], -1)
        return torch.softmax(logits, -1)[..., : self.n + 1]


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped logits c·tanh(x/c); unchanged without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def pairs(x: Float[Tensor, "*batch d"], rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Split the last dimension into the two halves of every rotated pair, each [..., d_rot/2], and the rest."""
    width = rotary.width
    rotated, rest = x[..., :width], x[..., width:]
    if rotary.interleaved:
        return rotated[..., 0::2], rotated[..., 1::2], rest
    return rotated[..., : width // 2], rotated[..., width // 2 :], rest


def check_movable(scheme: PositionScheme, layer: int | None = None) -> None:
    """Refuse layers whose keys carry their own position.

    Raises:
        UnsupportedModelError: absolute or shortformer positions; names `level="tokens"` as the way out.
    """
    if scheme.kind in ("absolute", "shortformer"):
        where = "this layer" if layer is None else f"layer {layer}"
        raise UnsupportedModelError(
            f'level="keys" needs keys that can be moved without changing them, but {where} has '
            f"{scheme.kind} position embeddings, which are part of the hidden states; "
            'use level="tokens", which exchanges tokens of the prompt and runs the model again'
        )


def visible_from(scheme: PositionScheme, query: int) -> int:
    """The first position that a query at `query` sees (window w: exactly w keys, its own included)."""
    return 0 if scheme.window is None else max(0, query - scheme.window + 1)


def move_query(
    q: Float[Tensor, "*batch h d"], k: Float[Tensor, "*batch n kv d"], scheme: PositionScheme, query: int
) -> Moved:
    """Move the query at position `query` to every visible earlier position.

    Args:
        q: that query in each head, as the position scheme receives it (after bias and QK-norm, before rotation).
        k: keys of all positions 0..n−1 with n > query, likewise; H must be a multiple of their number of heads.

    Raises:
        InputError: fewer than one earlier key, or heads that do not fit.
        UnsupportedModelError: absolute or shortformer positions.
    """
    check_movable(scheme)
    heads, key_heads = q.shape[-2], k.shape[-2]
    if heads % key_heads:
        raise InputError(f"{heads} query heads cannot share {key_heads} key heads")
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    first = visible_from(scheme, query)
    if not first < query < k.shape[-3]:
        raise InputError(f"a query at position {query} sees no earlier key among {k.shape[-3]}")
    keys = k[..., first : query + 1, :, :].transpose(-2, -3).repeat_interleave(heads // key_heads, -3)  # [..., H, n, d]
    positions = torch.arange(first, query + 1, device=q.device)
    if scheme.rotary is None:
        queries = q.unsqueeze(-2).expand(keys.shape)
    else:
        turned = rotate(q, scheme.rotary, torch.full((1,), query, device=q.device))  # R(i) q
        queries = rotate(turned.unsqueeze(-2).expand(keys.shape), scheme.rotary, positions, inverse=True).to(dtype)
    queries = queries * scheme.scale
    if scheme.alibi is not None:
        if scheme.alibi.table is not None:
            bias = scheme.alibi.table.to(q)[:, positions]  # [H, n]
        else:
            bias = -scheme.alibi.slopes.to(q)[:, None] * (query - positions)
        bias = bias.expand(queries.shape[:-1]).unsqueeze(-1)
        queries = torch.cat([queries, bias], -1)
        keys = torch.cat([keys, torch.ones_like(bias)], -1)
    return Moved(queries, keys, first, scheme.softcap, scheme.sinks)


def split_frequencies(moved: Moved, scheme: PositionScheme) -> Moved:
    """`moved` with every rotary frequency as a head of its own: U and K are [..., H, F, n, 2] (F last batch axis of H).

    Dimensions that are not rotated become one last term when there are any; a narrower pair is padded with zeros.
    The soft cap is dropped, because it does not distribute over a sum: Σ_t M_t is M before its cap.

    Raises:
        InputError: the layer has no rotary embedding.
    """
    if scheme.rotary is None:
        raise InputError("only a layer with a rotary embedding splits into frequencies")
    rotary = scheme.rotary

    def terms(x: Tensor) -> Tensor:
        a, b, rest = pairs(x, rotary)
        rotated = torch.stack([a, b], -1).transpose(-2, -3)  # [..., F, n, 2]
        if not rest.shape[-1]:
            return rotated
        size = max(2, rest.shape[-1])
        rotated = torch.nn.functional.pad(rotated, (0, size - 2))
        rest = torch.nn.functional.pad(rest, (0, size - rest.shape[-1]))
        return torch.cat([rotated, rest.unsqueeze(-3)], -3)

    return Moved(terms(moved.queries), terms(moved.keys), moved.first, None, None)
