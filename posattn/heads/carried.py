"""Position that is carried inside the hidden states, and which heads go by it.

A swap of hidden states moves everything that a state holds, so a head that goes by a position *written into* the
states by earlier layers looks symbolic: the position moves along with the token. To tell the two apart, the state of
token t is split into what its position alone predicts and the rest, over documents of one length:

    x_t = μ_t + r_t,      μ_p = mean over documents of the layer's input at position p

and only r moves: the key of "token t at position p, carried position kept" is made by the layer's own norm and
projection from μ_p + r_t, and its logits M'[p, t] go into the same scores as M[p, t] of `crosslogits`. A head whose
positional score rises when μ stays goes by carried position; one whose score is high both ways goes by the layer's own
position scheme; one that stays symbolic goes by the token.

How much position the states hold is measured by itself:

* share: the part of the states' variance that the position explains, ω² = (SS_pos − (n−1) MS_rest)/(SS + MS_rest),
  which is 0 on average where position says nothing;
* decoded: how often the nearest position mean of one half of the documents is the right one for states of the other
  half (in the metric of the residual's own variance per dimension); chance is 1/n.

μ also holds what positions predict of *tokens* (a text that always begins alike), which no swap of states can tell
apart from position: layer 0 shows how much that is, since nothing else can be in there.

The coarsest thing that positions predict of tokens is their kind, where each place of a prompt holds one kind (letters
first, then numbers). A head that goes by distance but also prefers one kind looks mixed, since an exchange across kinds
changes both. With `kinds`, the scores are taken over exchanges within a kind too, which needs no splitting of states.

Since a key depends on its own state alone, the n cyclic shifts of r give all n² logits: n + 1 forward passes a layer.

Source of the scores: arXiv 2511.11579; splitting the states is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import DataError, InputError
from posattn.heads.crosslogits import cap, check_movable, move_query
from posattn.heads.documents import as_documents, run_facts, seen
from posattn.heads.swaps import TAU, pair_scores, swap_scores
from posattn.models.base import Batch, Model
from posattn.plotting import axes, curve, finish
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

#: fields that hold scores
SCORES = tuple(f"{how}_{kind}" for how in ("moves", "stays", "within") for kind in ("positional", "symbolic"))


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedPosition(Result):
    """What position the input of each layer holds, and each head's scores when it moves with the token or stays.

    `share`, `decoded` [L]: over the layers in `layers`. `moves_positional`, `moves_symbolic` [L,H,B]: scores of the
    last query, whole states exchanged (those of `score_heads`), per document; `stays_positional`, `stays_symbolic`: the
    same when only the part that position does not predict is exchanged; `within_positional`, `within_symbolic`: whole
    states, exchanged only with states of the same kind (None where no kinds were given).
    """

    kind: ClassVar[str] = "carried position"

    layers: Sequence[int]
    share: Float[Tensor, "layers"]
    decoded: Float[Tensor, "layers"]
    chance: float
    moves_positional: Float[Tensor, "layers heads documents"]
    moves_symbolic: Float[Tensor, "layers heads documents"]
    stays_positional: Float[Tensor, "layers heads documents"]
    stays_symbolic: Float[Tensor, "layers heads documents"]
    provenance: Provenance
    within_positional: Float[Tensor, "layers heads documents"] | None = None
    within_symbolic: Float[Tensor, "layers heads documents"] | None = None

    def to_dataframe(self) -> pd.DataFrame:
        """One row a head: layer, head, mean scores, their standard errors over documents, share, decoded."""
        import pandas as pd

        rows = []
        for i, layer in enumerate(self.layers):
            for head in range(self.moves_positional.shape[1]):
                row: dict[str, Any] = {"layer": layer, "head": head}
                for name in SCORES:
                    if (found := getattr(self, name)) is None:
                        continue
                    values = found[i, head].double()
                    row[name] = values.mean().item()
                    row[f"{name}_error"] = (values.std() / len(values) ** 0.5).item()
                rows.append({**row, "share": self.share[i].item(), "decoded": self.decoded[i].item()})
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """By layer (mean over heads): positional score with the carried position moved and kept; position decoded."""
        ax = axes(ax)
        curves = {
            "s_pos, carried position moves": self.moves_positional.mean((-1, -2)),
            "s_pos, carried position stays": self.stays_positional.mean((-1, -2)),
            "position decoded from the state": self.decoded,
        }
        for index, (label, values) in enumerate(curves.items()):
            curve(ax, values, self.layers, label=label, index=index, marker="o")
        return finish(
            ax,
            x="layer",
            y="score or accuracy (0 to 1)",
            title="Position carried in hidden states",
            legend=True,
            ylim=(-0.02, 1.05),
        )


@torch.no_grad()
def carried_position(
    model: Any,
    tokens: Any,
    layers: Iterable[int] | None = None,
    *,
    kinds: Int[Tensor, "documents length"] | None = None,
    tau: float = TAU,
    batch_size: int = 64,
) -> CarriedPosition:
    """Measure carried position on documents of one length (at least four; a few hundred make μ sharp).

    `kinds` [B,N]: a number for each token's kind. Costs length + 1 forward passes a layer, so it is meant for prompts
    of some dozens of tokens.

    Raises:
        DataError: fewer than four documents, different lengths, or fewer than three tokens.
        InputError: no such layer, or `kinds` of another shape.
        UnsupportedModelError: absolute or shortformer positions, which are all carried.
    """
    model = seen(model)
    documents = as_documents(tokens)
    if len(documents) < 4:
        raise DataError(f"position means need at least 4 documents, got {len(documents)}")
    length = len(documents[0])
    if any(len(row) != length for row in documents):
        raise DataError("position means need documents of one length: pass documents cut to the same number of tokens")
    if length < 3:
        raise DataError("two earlier keys need documents of at least three tokens")
    chosen = sorted(set(range(model.n_layers) if layers is None else layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= model.n_layers:
        raise InputError(f"layers must lie in 0 to {model.n_layers - 1}, got {chosen}")
    for layer in chosen:
        check_movable(model.scheme(layer, length), layer)
    rows = torch.stack(documents).to(model.device)
    if kinds is not None and kinds.shape != rows.shape:
        raise InputError(f"kinds must be one number a token, {list(rows.shape)}, not {list(kinds.shape)}")
    parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    heads = max(model.layers[layer].n_heads for layer in chosen)
    scores = torch.full((6 if kinds is not None else 4, len(chosen), heads, len(rows)), float("nan"))
    share, decoded = torch.empty(len(chosen)), torch.empty(len(chosen))
    for index, layer in enumerate(chosen):
        states = torch.cat([_states(model, part, layer) for part in parts])
        share[index], decoded[index] = _explained(states), _decode(states)
        mean = states.mean(0)
        count = model.layers[layer].n_heads
        first = 0
        for part in parts:
            slot = slice(first, first + len(part))
            scores[:, index, :count, slot] = _scores(
                model, part, layer, states[slot], mean, tau, None if kinds is None else kinds[slot].to(rows.device)
            ).cpu()
            first += len(part)
    return CarriedPosition(
        chosen,
        share,
        decoded,
        1 / length,
        **dict(zip(SCORES, scores, strict=False)),
        provenance=provenance(**run_facts(model, tokens, tau=tau)),
    )


def _states(model: Model, rows: Tensor, layer: int) -> Tensor:
    found: list[Tensor] = []
    with model.observe(["resid_pre"], lambda _, points, __: found.append(points["resid_pre"].float().clone()), [layer]):
        model(rows)
    return found[0]


def _explained(states: Float[Tensor, "b n d"]) -> float:
    """ω² of position, summed over dimensions."""
    x = states.double()
    b, n, _ = x.shape
    means = x.mean(0)
    between = b * (means - x.mean((0, 1))).square().sum()
    rest = (x - means).square().sum()
    spread = rest / (n * (b - 1))
    return float((between - (n - 1) * spread) / (between + rest + spread).clamp_min(1e-300))


def _decode(states: Float[Tensor, "b n d"]) -> float:
    """Two-fold accuracy of the nearest position mean; a tie counts by its share, so equal means give chance."""
    x = states.double()
    n = x.shape[1]
    hits = []
    for learn, test in ((x[0::2], x[1::2]), (x[1::2], x[0::2])):
        means = learn.mean(0)
        scale = (learn - means).square().mean((0, 1)).clamp_min(1e-12).rsqrt()
        distance = torch.cdist(test * scale, (means * scale).expand(len(test), n, -1))
        nearest = distance <= distance.amin(-1, keepdim=True) * (1 + 1e-9)
        own = nearest.diagonal(dim1=1, dim2=2).double()
        hits.append((own / nearest.double().sum(-1)).mean())
    return float(torch.stack(hits).mean())


def _scores(
    model: Model, rows: Tensor, layer: int, states: Tensor, mean: Tensor, tau: float, kinds: Tensor | None
) -> Tensor:
    """[4 or 6, H, B], in the order of `SCORES`."""
    n = rows.shape[1] - 1
    scheme = model.scheme(layer, n + 1)
    found: dict[str, Tensor] = {}

    def keep(_: int, points: Any, batch: Batch) -> None:
        found.update({name: points[name].clone() for name in ("q", "k")})

    with model.observe(["q", "k"], keep, [layer]):
        model(rows)
    query = found["q"][:, n]
    moved = move_query(query, found["k"], scheme, n)  # [B, H, n+1, d]
    first, seen_keys = moved.first, moved.n
    if seen_keys < 2:
        raise InputError(f"layer {layer} sees {seen_keys} earlier key: a swap needs two")
    weights = moved.weights()[..., :-1]
    shape = weights.shape[:-1]
    whole = (moved.queries[..., :-1, :] @ moved.keys[..., :-1, :].mT).flatten(0, 1)
    kept = torch.empty_like(whole).view(*shape, seen_keys, seen_keys)
    rest = (states - mean)[:, first:n]
    place = torch.arange(seen_keys, device=rows.device)
    for shift in range(seen_keys):
        token = (place + shift) % seen_keys

        def change(_: int, x: Tensor, batch: Batch, token: Tensor = token) -> Tensor:
            x = x.clone()
            x[:, first:n] = (mean[first:n] + rest[:, token]).to(x.dtype)
            return x

        with model.intervene("resid_pre", change, [layer]), model.observe(["q", "k"], keep, [layer]):
            model(rows)
        at = move_query(query, found["k"], scheme, n)
        kept[..., place, token] = (at.queries * at.keys).sum(-1)[..., :-1]
    one = torch.eye(seen_keys, dtype=whole.dtype, device=whole.device).expand(len(whole), -1, -1)
    flat = weights.flatten(0, 1)
    result = [
        *swap_scores(whole, one, flat, moved.softcap, tau),
        *swap_scores(kept.flatten(0, 1), one, flat, moved.softcap, tau),
    ]
    if kinds is not None:
        alike = kinds[:, first:n].unsqueeze(-1) == kinds[:, first:n].unsqueeze(-2)
        alike = alike.unsqueeze(1).expand(*shape, -1, -1).flatten(0, 1)
        result += pair_scores(cap(whole, moved.softcap), flat, alike, tau)
    return torch.stack([value.view(shape).mT for value in result]).float()
