"""`rotary_usage`: which frequencies of its rotary embedding a head uses, and what they point at.

The logit of a query at i for a key at j is a sum over frequencies t (and the unrotated rest, if any), before a soft
cap,

    ℓ_t = scale·f²·‖q⁽ᵗ⁾‖‖k⁽ᵗ⁾‖ cos(φ_q − φ_k + θ_t (i − j))

Over the chosen queries and the keys each sees (its own included), per layer, head and frequency:

* `norm` = mean scale·f²·‖q⁽ᵗ⁾‖‖k⁽ᵗ⁾‖, `energy` = mean of its square; `mean_logit`; `max_logit` = mean over queries of
  the largest ℓ_t;
* `variance_share` = Σ cov(ℓ_t, ℓ) / Σ var(ℓ), each query's row by itself: the shares of all terms sum to 1 (one may be
  negative: it works against the others);
* positional and symbolic score of the frequency by itself (`score_heads(..., per_frequency=True)`).

**Frequency id of a layer** (arXiv 2605.31558): Σ_t t·softmax_t(mean maximum logit of t), ids from 1 (fastest) on, the
mean over documents and, here, over queries and heads too. The logits here are the products q·k before the layer's
scale 1/√d: so read, a GPT-J trained on the paper's tasks shows ids like the published ones; with the scale the
softmax over t is nearly flat and every id lies near the middle. `head_id` is the same for one head. `energy_id` weighs
ids by `energy` instead of e^logit: it does not hang on one large logit.

**Geometry.** From the mean query q̄ and mean key k̄ (unrotated, over documents and positions ≥ 1; the first position,
often a sink with a key unlike any other, is left out): `angle` = φ_q̄ − φ_k̄ and `pull` = scale·f²·‖q̄⁽ᵗ⁾‖‖k̄⁽ᵗ⁾‖ per
frequency; the distance at which that frequency peaks, Δ_t = (−angle/θ_t) mod 2π/θ_t; and the distance profile ℓ̄(Δ) =
Σ_t pull_t cos(angle_t + θ_t Δ). Its softmax over the keys in sight, averaged over the queries, is the predicted
attention by distance; next to it stands the real one. `offset` = −argmax of ℓ̄ (−1: a previous-token head),
`sharpness` = the largest predicted attention by distance, `profile_distance` = total variation between the predicted
and the real curve.

`symbol_scale` is the standard deviation, in logits, of what the symbol alone contributes to M (`exact`): the scale of
a symbolic head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.distributed import combined, world
from posattn.errors import InputError, UnsupportedModelError
from posattn.heads.crosslogits import cap, move_query, pairs, split_frequencies
from posattn.heads.documents import (
    Queries,
    Schemes,
    as_documents,
    batches,
    check_varied,
    choose_queries,
    run_facts,
    seen,
)
from posattn.heads.exact import exact
from posattn.heads.swaps import TAU, swap_scores
from posattn.models.base import Batch, Model, PositionScheme, Rotary
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

_BY_FREQUENCY = ("norm", "energy", "mean_logit", "max_logit", "variance_share", "positional", "symbolic")
_GEOMETRY = ("angle", "pull", "peak_distance")


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryUsage(Result):
    """Rotary use of every head (T layers, H heads, F terms: frequencies, fast first, and the unrotated rest, if any).

    All float64; NaN where a layer has no rotary embedding or fewer terms. `frequencies` [T,F] in radians a position
    (0 for the rest). [T,H,F]: `norm`, `energy`, `mean_logit`, `max_logit`, `variance_share`, `positional`,
    `symbolic`, `angle` (radians, −π to π), `pull` (logits), `peak_distance` (positions; NaN for the rest). [T]:
    `layer_id`, `layer_energy_id`; [T,H]: `head_id`, `head_energy_id`, `offset` (positions, ≤ 0), `sharpness`,
    `symbol_scale` (logits), `profile_distance`. `predicted_attention`, `real_attention` [T,H,N]: attention by
    distance, averaged over the queries.
    """

    kind: ClassVar[str] = "rotary usage"

    frequencies: Float[Tensor, "layers freqs"]
    norm: Float[Tensor, "layers heads freqs"]
    energy: Float[Tensor, "layers heads freqs"]
    mean_logit: Float[Tensor, "layers heads freqs"]
    max_logit: Float[Tensor, "layers heads freqs"]
    variance_share: Float[Tensor, "layers heads freqs"]
    positional: Float[Tensor, "layers heads freqs"]
    symbolic: Float[Tensor, "layers heads freqs"]
    angle: Float[Tensor, "layers heads freqs"]
    pull: Float[Tensor, "layers heads freqs"]
    peak_distance: Float[Tensor, "layers heads freqs"]
    layer_id: Float[Tensor, "layers"]
    layer_energy_id: Float[Tensor, "layers"]
    head_id: Float[Tensor, "layers heads"]
    head_energy_id: Float[Tensor, "layers heads"]
    offset: Float[Tensor, "layers heads"]
    sharpness: Float[Tensor, "layers heads"]
    symbol_scale: Float[Tensor, "layers heads"]
    predicted_attention: Float[Tensor, "layers heads n"]
    real_attention: Float[Tensor, "layers heads n"]
    profile_distance: Float[Tensor, "layers heads"]
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a layer, head and frequency (id from 1), with every figure of that frequency."""
        import pandas as pd

        layers, heads, terms = self.norm.shape
        index = torch.cartesian_prod(torch.arange(layers), torch.arange(heads), torch.arange(terms)).reshape(-1, 3)
        frame = pd.DataFrame(index.tolist(), columns=["layer", "head", "frequency_id"])
        frame["frequency_id"] += 1
        frame["frequency"] = self.frequencies[:, None].expand(layers, heads, terms).flatten().tolist()
        for name in (*_BY_FREQUENCY, *_GEOMETRY):
            frame[name] = getattr(self, name).flatten().tolist()
        return frame

    def heads_dataframe(self) -> pd.DataFrame:
        """One row a head: ids, offset, sharpness, symbol scale, how far the predicted profile is from the real one."""
        import pandas as pd

        layers, heads = self.offset.shape
        columns = {
            "layer": torch.arange(layers).repeat_interleave(heads),
            "head": torch.arange(heads).repeat(layers),
            "layer_id": self.layer_id[:, None].expand(layers, heads),
        }
        for name in ("head_id", "head_energy_id", "offset", "sharpness", "symbol_scale", "profile_distance"):
            columns[name] = getattr(self, name)
        return pd.DataFrame({name: value.flatten().tolist() for name, value in columns.items()})

    def plot(self, ax: Any = None, value: str = "variance_share") -> Any:
        """A layer-by-frequency map of one figure, averaged over heads."""
        from posattn import plotting

        ax = plotting.axes(ax)
        figures = getattr(self, value).nanmean(1)
        layers, terms = figures.shape
        extent = (0.5, terms + 0.5, -0.5, layers - 0.5)  # ids count from 1
        shown, name = "frequency id (1 = fastest)", value.replace("_", " ")
        return plotting.heatmap(ax, figures, x=shown, y="layer", value=name, origin="lower", extent=extent)


class _Layer:
    """Running sums of one layer, float64."""

    def __init__(self, heads: int, width: int, length: int) -> None:
        self.rotary: Rotary | None = None
        self.scheme: PositionScheme | None = None
        self.sums: dict[str, Tensor] = {}
        self.pairs = self.rows = 0
        self.query = torch.zeros(heads, width, dtype=torch.float64)
        self.key = torch.zeros(heads, width, dtype=torch.float64)
        self.vectors = 0
        self.real = torch.zeros(heads, length, dtype=torch.float64)
        self.seen: dict[int, int] = {}  # how many queries saw so many keys

    def add(self, name: str, value: Tensor) -> None:
        value = value.double().cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def plus(self, other: _Layer) -> _Layer:
        """What one process would have gathered of the documents of both."""
        if self.scheme is None:
            return other
        for name, value in other.sums.items():
            self.add(name, value)
        for name in ("pairs", "rows", "query", "key", "vectors", "real"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for count, rows in other.seen.items():
            self.seen[count] = self.seen.get(count, 0) + rows
        return self


def rotary_usage(
    model: Any,
    tokens: Any,
    queries: Queries = 16,
    *,
    scores: bool = True,
    tau: float = TAU,
    batch_size: int = 4,
    seed: int = 0,
) -> RotaryUsage:
    """Use of every rotary frequency by every head, see the module docstring for what is measured.

    Args:
        queries: which queries the logits are taken at: "last", "all", a number (a seeded sample) or positions.
        scores: the positional and symbolic score of each frequency too, at the last of the chosen queries (NaN
        otherwise).

    Raises:
        UnsupportedModelError: no layer of the model has a rotary embedding.
        DataError, InputError: as `score_heads`.
    """
    model = seen(model)
    documents = as_documents(tokens)
    chosen = [choose_queries(queries, len(row), seed) for row in documents]
    for index, (row, positions) in enumerate(zip(documents, chosen, strict=True)):
        check_varied(row, positions[-1], index, model.tokenizer)
    longest = max(map(len, documents))
    known = Schemes(model)
    if all(scheme.rotary is None for scheme in known(longest)):
        raise UnsupportedModelError(
            f"{model.name} has no rotary embedding in any layer: there are no frequencies to use"
        )
    layers = [_Layer(info.n_heads, info.head_dim, longest) for info in model.layers]
    for indices, batch_tokens in batches(documents, batch_size, keys=chosen, shared=True):
        schemes = known(batch_tokens.shape[-1])
        positions = chosen[indices[0]]

        def observer(layer: int, points: Any, batch: Batch, schemes=schemes, positions=positions) -> None:
            if schemes[layer].rotary is not None:
                _gather(layers[layer], points, schemes[layer], positions, tau if scores else None)

        with torch.no_grad(), model.observe(["q", "k", "pattern"], observer):
            model(batch_tokens.to(model.device))
    if world().size > 1:
        parts = world().gather(layers)
        layers = [combined(own, _Layer.plus) for own in zip(*parts, strict=True)]
    return _result(model, layers, longest, run_facts(model, tokens, seed=seed))


def _gather(into: _Layer, points: Any, scheme: PositionScheme, queries: list[int], tau: float | None) -> None:
    q, k, pattern = points["q"], points["k"], points["pattern"]
    into.rotary, into.scheme = scheme.rotary, scheme
    group = q.shape[2] // k.shape[2]
    into.query += q[:, 1:].double().sum((0, 1)).cpu()
    into.key += k[:, 1:].double().sum((0, 1)).repeat_interleave(group, 0).cpu()
    into.vectors += q.shape[0] * (q.shape[1] - 1)
    for query in queries:
        moved = move_query(q[:, query], k, scheme, query)
        split = split_frequencies(moved, scheme)
        logits = split.queries * split.keys
        norms = split.queries.norm(dim=-1) * split.keys.norm(dim=-1)  # moving a query keeps its length up to f²
        logits = logits.sum(-1).double()  # [B,H,F,n+1]
        batch, _, _, count = logits.shape
        into.pairs += batch * count
        into.rows += batch
        into.add("norm", norms.double().sum((0, -1)))
        into.add("energy", norms.double().square().sum((0, -1)))
        into.add("mean_logit", logits.sum((0, -1)))
        into.add("max_logit", logits.amax(-1).sum(0))
        centred = logits - logits.mean(-1, keepdim=True)
        into.add("covariance", (centred * centred.sum(-2, keepdim=True)).sum((0, -1)))
        into.add("symbol_scale", exact(moved).symbol_scale.sum(0))
        into.seen[count] = into.seen.get(count, 0) + batch
        row = pattern[:, :, query, moved.first : query + 1].double()
        into.real[:, :count] += (row / row.sum(-1, keepdim=True)).sum(0).flip(-1).cpu()
        if tau is not None and query == queries[-1]:
            weights = split.weights()[..., :-1].flatten(0, -2)
            flat = [x[..., :-1, :].flatten(0, -3) for x in (split.queries, split.keys)]
            pair = swap_scores(flat[0], flat[1], weights, None, tau)
            for name, value in zip(("positional", "symbolic"), pair, strict=True):
                into.add(name, value.view(split.keys.shape[:-2]).sum(0))
            into.add("scored", torch.tensor(batch))


def _result(model: Model, layers: list[_Layer], length: int, facts: dict[str, Any]) -> RotaryUsage:
    heads = model.layers[0].n_heads
    terms = max(part.sums["norm"].shape[-1] for part in layers if part.sums)

    def empty(*shape: int) -> Tensor:
        return torch.full((len(layers), *shape), math.nan, dtype=torch.float64)

    fields = {name: empty(heads, terms) for name in (*_BY_FREQUENCY, *_GEOMETRY)}
    fields.update({name: empty(heads) for name in ("head_id", "head_energy_id", "offset", "sharpness")})
    fields.update({name: empty(heads) for name in ("symbol_scale", "profile_distance")})
    fields.update({name: empty(heads, length) for name in ("predicted_attention", "real_attention")})
    fields.update({name: empty() for name in ("layer_id", "layer_energy_id")}, frequencies=empty(terms))
    for t, part in enumerate(layers):
        if not part.sums or part.rotary is None or part.scheme is None:
            continue
        if part.query.shape[0] != heads:
            raise InputError(f"layer {t} has {part.query.shape[0]} heads, layer 0 has {heads}")
        own = part.sums["norm"].shape[-1]
        theta = torch.zeros(own, dtype=torch.float64)
        rotated = len(part.rotary.frequencies)
        theta[:rotated] = part.rotary.frequencies.double().cpu()
        fields["frequencies"][t, :own] = theta
        for name in ("norm", "energy", "mean_logit"):
            fields[name][t, :, :own] = part.sums[name] / part.pairs
        fields["max_logit"][t, :, :own] = part.sums["max_logit"] / part.rows
        total = part.sums["covariance"].sum(-1, keepdim=True)
        fields["variance_share"][t, :, :own] = part.sums["covariance"] / total.where(total > 0, 1)
        for name in ("positional", "symbolic"):
            if name in part.sums:
                fields[name][t, :, :own] = part.sums[name] / part.sums["scored"]
        fields["symbol_scale"][t] = part.sums["symbol_scale"] / part.rows
        # the published id ranges over rotary frequencies, so the unrotated rest has none
        maxima, energy = fields["max_logit"][t, :, :rotated], fields["energy"][t, :, :rotated]
        ids = torch.arange(1, rotated + 1, dtype=torch.float64)
        products = maxima / part.scheme.scale
        fields["head_id"][t] = torch.softmax(products, -1) @ ids
        fields["layer_id"][t] = torch.softmax(products.mean(0), -1) @ ids
        fields["head_energy_id"][t] = (energy @ ids) / energy.sum(-1).clamp(min=1e-300)
        fields["layer_energy_id"][t] = (energy.mean(0) @ ids) / energy.mean(0).sum().clamp(min=1e-300)
        for name, value in _geometry(part, theta, length).items():
            if value.dim() == 2 and name in _GEOMETRY:
                fields[name][t, :, : value.shape[-1]] = value
            else:
                fields[name][t] = value
    return RotaryUsage(**fields, provenance=provenance(**facts))


def _geometry(part: _Layer, theta: Tensor, length: int) -> dict[str, Tensor]:
    """What the mean query and mean key of one layer say about distance."""
    rotary, scheme = part.rotary, part.scheme
    assert rotary is not None
    assert scheme is not None
    rotated = len(rotary.frequencies)
    qa, qb, q_rest = pairs(part.query / part.vectors, rotary)
    ka, kb, k_rest = pairs(part.key / part.vectors, rotary)
    query, key = torch.complex(qa, qb), torch.complex(ka, kb)
    factor = (rotary.cos[0].double().square() + rotary.sin[0].double().square()).cpu()
    angle = torch.remainder(query.angle() - key.angle() + math.pi, 2 * math.pi) - math.pi
    pull = scheme.scale * factor * query.abs() * key.abs()
    rest = scheme.scale * (q_rest * k_rest).sum(-1)  # the same at every distance
    distance = torch.arange(length, dtype=torch.float64)
    waves = torch.cos(angle.unsqueeze(-1) + theta[:rotated, None] * distance)  # [H,F,N]
    profile = cap((pull.unsqueeze(-1) * waves).sum(-2) + rest.unsqueeze(-1), scheme.softcap)
    predicted = torch.zeros_like(profile)
    for count, rows in part.seen.items():
        predicted[:, :count] += rows * torch.softmax(profile[:, :count], -1)
    predicted, real = predicted / part.rows, part.real / part.rows
    period = 2 * math.pi / theta[:rotated].abs().clamp(min=1e-300)
    reach = max(part.seen)
    out = {
        "angle": angle,
        "pull": pull,
        "peak_distance": torch.remainder(-angle / theta[:rotated], period),
        "offset": -profile[:, :reach].argmax(-1).double(),
        "sharpness": predicted.amax(-1),
        "predicted_attention": predicted,
        "real_attention": real,
        "profile_distance": (predicted - real).abs().sum(-1) / 2,
    }
    if len(theta) > rotated:
        blank = torch.zeros(len(angle), 1, dtype=torch.float64)
        out["angle"] = torch.cat([angle, blank], -1)
        out["pull"] = torch.cat([pull, rest.unsqueeze(-1)], -1)
        out["peak_distance"] = torch.cat([out["peak_distance"], torch.full_like(blank, math.nan)], -1)
    return out
