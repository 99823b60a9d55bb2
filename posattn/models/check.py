"""Is what the hooks record what the model computes? Asked once, on the first batch.

Four identities, each over real tokens only (a padded row may be uniform, non-causal or NaN):

* residual: resid_pre + attn_out + mlp_out = resid_post, relative to the norms of the three parts;
* causal:   no query gives weight to a later key or to padding;
* rows:     the weights of a query sum to 1 (to at most 1 where the layer has a sink);
* pattern:  the weights recomputed from q, k and the position scheme are the ones that the model used. The figure is the
            total variation distance, averaged over the queries of the worst head.

The plain adapter has no pattern but what posattn makes of the q and k that it was handed, already rotated, so two more:

* values:   the weights times the values are what the model's attention gave;
* rotation: queries and keys that are turned back depend on the stream alone, not on the position.

There the first document is cut where its pattern would be large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posattn.errors import SelfCheckError
from posattn.models._numbers import unsound
from posattn.models.base import Batch, Model, Point
from posattn.models.plain import PlainModel
from posattn.models.positions import attention

#: allowed figures by the model's dtype: rounding of that dtype, with room for the order of summation
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {
        "residual": 1e-8,
        "causal": 1e-8,
        "rows": 1e-6,
        "pattern": 1e-4,
        "values": 1e-6,
        "rotation": 1e-4,
    },
    torch.float32: {
        "residual": 1e-4,
        "causal": 1e-6,
        "rows": 1e-4,
        "pattern": 1e-3,
        "values": 1e-3,
        "rotation": 1e-3,
    },
    torch.float16: {
        "residual": 1e-2,
        "causal": 1e-4,
        "rows": 1e-2,
        "pattern": 3e-2,
        "values": 2e-2,
        "rotation": 2e-2,
    },
    torch.bfloat16: {
        "residual": 5e-2,
        "causal": 1e-3,
        "rows": 3e-2,
        "pattern": 1e-1,
        "values": 1e-1,
        "rotation": 1e-1,
    },
}

_MEANING = {
    "residual": "resid_pre + attn_out + mlp_out misses the block's output",
    "causal": "queries give weight to later keys or to padding",
    "rows": "the attention weights of a query do not sum to 1",
    "pattern": "the attention weights are not the ones that q, k and the position scheme give",
    "values": "the attention weights times the values are not what the model's attention gave",
    "rotation": "queries and keys depend on the position where the stream does not",
}
_REMEDY = {
    "residual": "a hook that edits the stream, or a block of a kind that the adapter does not know, is the usual cause",
    "causal": "only causal decoder models can be measured; check the attention mask and padding",
    "rows": "check for hooks that edit the pattern and for an attention sink that the adapter does not know",
    "pattern": "remove hooks that edit q, k or the pattern; else this architecture's positions are not supported yet",
    "values": "the attention in use computes something else: choose another one, or use the bridge",
    "rotation": "this architecture's positions are not understood by the plain adapter: use the bridge",
}
#: how many weights the check of the plain adapter may write down
_MOST = 2**26


def self_check(
    model: Model,
    tokens: Int[Tensor, "b n"],
    mask: Bool[Tensor, "b n"] | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Run `tokens` once and verify in every layer that the recorded points are what the model computes.

    Args:
        tolerance: replaces every bound but the causal one (defaults by the model's dtype).

    Returns:
        The worst figure of each identity with its layer, and the bounds: plain numbers, for provenance.

    Raises:
        SelfCheckError: an identity fails; the message names the layer, the figure and what to do.
        HookError: a point never fired.
    """
    bounds = dict(TOLERANCES.get(model.dtype, TOLERANCES[torch.float32]))
    if tolerance is not None:
        bounds.update({name: tolerance for name in bounds if name != "causal"})
    worst: dict[str, tuple[float, int]] = {}
    plain = isinstance(model, PlainModel)
    if plain:
        tokens, mask = _short(model, tokens, mask)

    def observe(layer: int, points: Mapping[str, Tensor], batch: Batch) -> None:
        judge(layer, _figures(model, layer, points, batch))

    def judge(layer: int, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise SelfCheckError(
                    f"layer {layer} of {model.name} ({model.adapter}) computes what is no number (NaN or infinite)"
                    f"{unsound(model.module)}"
                )
            if not figure <= bounds[name]:
                raise SelfCheckError(
                    f"layer {layer} of {model.name} ({model.adapter}): {_MEANING[name]} by {figure:.2g}, where "
                    f"{bounds[name]:.0e} is allowed in {str(model.dtype).removeprefix('torch.')}: {_REMEDY[name]}"
                )
            if name not in worst or figure > worst[name][0]:
                worst[name] = (figure, layer)

    wanted: tuple[Point, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post", "q", "k", "pattern")
    wanted += ("v", "z") if plain else ()
    with torch.no_grad(), model.observe(wanted, observe):
        model(tokens, mask)
    if plain:
        one = tokens[:1] if mask is None else tokens[:1, mask[0]]
        for layer, figure in enumerate(model.rotation_error(one).tolist()):
            judge(layer, {"rotation": figure})
    return {
        **{
            name: {"figure": figure, "layer": layer, "allowed": bounds[name]} for name, (figure, layer) in worst.items()
        },
        "layers": model.n_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _figures(model: Model, layer: int, points: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    real = batch.mask
    if not bool(real.any()):
        raise SelfCheckError(f"{model.name}: the batch for the self-check holds no real token")
    precise = torch.promote_types(points["resid_post"].dtype, torch.float32)
    parts = torch.stack([points[name].to(precise) for name in ("resid_pre", "attn_out", "mlp_out") if name in points])
    missed = parts.sum(0) - points["resid_post"].to(precise)
    size = parts.norm(dim=-1).sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    residual = (missed.norm(dim=-1) / size)[real].max()

    pattern = points["pattern"].to(precise)
    n = pattern.shape[-1]
    index = torch.arange(n, device=pattern.device)
    # [B,1,N,N]: keys that a query must not see; rows of padded queries are left out below
    forbidden = (index[None, :] > index[:, None])[None] | ~real[:, None, :]
    rows = real[:, None, :].expand(-1, pattern.shape[1], -1)
    leaked = pattern.masked_fill(~forbidden[:, None], 0.0).sum(-1)[rows].max()
    kept = pattern.masked_fill(forbidden[:, None], 0.0)
    scheme = model.scheme(layer, int(real.sum(-1).max()))
    excess = kept.sum(-1)[rows] - 1
    sums = excess.max().clamp_min(0) if scheme.sinks is not None else excess.abs().max()
    again = attention(points["q"], points["k"], scheme, None if bool(real.all()) else real)
    distance = 0.5 * (kept - again).abs().sum(-1)  # [B,H,N], total variation
    distance = distance.masked_fill(~rows, 0.0).sum((0, 2)) / rows.sum((0, 2))
    figures = {
        "residual": float(residual),
        "causal": float(leaked),
        "rows": float(sums),
        "pattern": float(distance.max()),
    }
    if "z" in points:
        v, z = points["v"].to(precise), points["z"].to(precise)
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2).masked_fill(~real[..., None, None], 0.0)
        off = (torch.einsum("bhij,bjhd->bihd", kept, v) - z)[real].abs().max()
        figures["values"] = float(off / v.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return figures


def _short(model: Model, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Documents whose patterns fit; where they do not, as many real tokens of the first one as do."""
    heads = max(info.n_heads for info in model.layers)
    if tokens.shape[0] * heads * tokens.shape[1] ** 2 <= _MOST:
        return tokens, mask
    one = tokens[:1] if mask is None else tokens[:1, mask[0]]
    return one[:, : int((_MOST / heads) ** 0.5)], None
