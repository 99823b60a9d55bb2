"""`score_heads`: is each head positional or symbolic, and how surely.

The model runs once over every document; each layer hands over its q, k and attention weights and is forgotten, so one
layer is in memory at a time. From them come, for each head and chosen query, exactly:

* s_pos and s_sym over all swaps of two earlier visible keys (`swaps`), at τ and, on request, in the limit τ → 0 and per
  rotary frequency (each frequency as if it were a head of its own: its logits alone make its weights);
* the entropy of the query's attention row, in nats;
* the exclusion bound and the analysis of variance (`exact`);
* the share of the variance of the logits (each query's row centred, since the softmax ignores constants) that their
  distance alone explains: Σ_d n_d·mean_d² / Σ x², over all queries and documents; with few of them a part of it is
  chance, (distances − 1) / (logits − queries), which is given beside it.

`level="tokens"` (`blocks`) exchanges tokens of the prompt and runs the model again: for absolute positions, and for
the question what the whole model below a head does with a swap.

The attention weights D are the model's own (recomputed from q and k where the model rounds them to half precision), and
are checked against q, k and the position scheme, so that a wrong scheme cannot pass.

Source: scores arXiv 2511.11579 and 2605.31558, τ = 1e-4 from there; exact companions ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.distributed import world
from posattn.errors import InputError, SelfCheckError
from posattn.heads.blocks import Blocks, as_blocks, token_scores
from posattn.heads.crosslogits import Moved, check_movable, move_query, split_frequencies
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
from posattn.heads.evidence import EvidenceCounter, HeadEvidence, add_repeated_text, measure_evidence, shared_first
from posattn.heads.exact import Exact, exact
from posattn.heads.swaps import TAU, swap_scores
from posattn.models.base import Batch, Model, PositionScheme
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

_SCORES = ("positional", "symbolic", "entropy")
_EXACT = tuple(field.name for field in dataclasses.fields(Exact))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclasses.dataclass(frozen=True, eq=False)
class HeadScores(Result):
    """Scores of every head. T layers, H heads, S documents, F frequencies; all figures float64.

    `positional`, `symbolic` in [0,1] and `entropy` in nats: means over documents of each document's mean over queries.
    `*_std`: standard deviation over all (document, query) pairs, 0 for a single one. `*_interval`: bootstrap over
    `interval_over` ("documents", or "queries" when there is one document), NaN when there is just one of either.
    `document_*` [S,T,H]: each document's own scores, in the order given.
    `limit_*`: τ → 0. `frequency_*` [T,H,F]: per rotary frequency (fast first), NaN in layers without; the last one is
    the unrotated rest where there is one. `exact` [T,H] by name (see `posattn.heads.exact.Exact`), `distance_share`
    and `distance_share_chance` [T,H] (see the module docstring): None for level="tokens".
    """

    kind: ClassVar[str] = "head scores"

    positional: Float[Tensor, "layers heads"]
    symbolic: Float[Tensor, "layers heads"]
    entropy: Float[Tensor, "layers heads"]
    positional_std: Float[Tensor, "layers heads"]
    symbolic_std: Float[Tensor, "layers heads"]
    positional_interval: Float[Tensor, "layers heads 2"]
    symbolic_interval: Float[Tensor, "layers heads 2"]
    document_positional: Float[Tensor, "docs layers heads"]
    document_symbolic: Float[Tensor, "docs layers heads"]
    document_entropy: Float[Tensor, "docs layers heads"]
    level: str
    tau: float
    queries: Sequence[Sequence[int]]
    confidence: float
    interval_over: str | None
    provenance: Provenance
    limit_positional: Float[Tensor, "layers heads"] | None = None
    limit_symbolic: Float[Tensor, "layers heads"] | None = None
    frequency_positional: Float[Tensor, "layers heads freqs"] | None = None
    frequency_symbolic: Float[Tensor, "layers heads freqs"] | None = None
    exact: dict[str, Float[Tensor, "layers heads"]] | None = None
    distance_share: Float[Tensor, "layers heads"] | None = None
    distance_share_chance: Float[Tensor, "layers heads"] | None = None
    evidence: HeadEvidence | None = None

    @property
    def documents(self) -> int:
        return self.document_positional.shape[0]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a head: layer, head, positional, symbolic, their spread and intervals, entropy, exact figures."""
        import pandas as pd

        columns = {name: getattr(self, name) for name in (*_SCORES, "positional_std", "symbolic_std")}
        for name in ("positional", "symbolic"):
            interval = getattr(self, f"{name}_interval")
            columns[f"{name}_low"], columns[f"{name}_high"] = interval[..., 0], interval[..., 1]
        for name in ("limit_positional", "limit_symbolic", "distance_share", "distance_share_chance"):
            if (value := getattr(self, name)) is not None:
                columns[name] = value
        columns.update(self.exact or {})
        layers, heads = self.positional.shape
        grid = {
            "layer": torch.arange(layers).repeat_interleave(heads).tolist(),
            "head": torch.arange(heads).repeat(layers).tolist(),
        }
        return pd.DataFrame({**grid, **{name: x.flatten().tolist() for name, x in columns.items()}})

    def documents_dataframe(self) -> pd.DataFrame:
        """One row a document and head: document, layer, head, positional, symbolic, entropy."""
        import pandas as pd

        s, t, h = self.document_positional.shape
        index = torch.cartesian_prod(torch.arange(s), torch.arange(t), torch.arange(h)).reshape(-1, 3)
        frame = pd.DataFrame(index.tolist(), columns=["document", "layer", "head"])
        for name in _SCORES:
            frame[name] = getattr(self, f"document_{name}").flatten().tolist()
        return frame

    def compare_documents(self, first: int, second: int) -> pd.DataFrame:
        """Which heads change behaviour between two documents: differences of their scores, largest move first.

        Raises:
            InputError: no such document.
        """
        for index in (first, second):
            if not 0 <= index < self.documents:
                raise InputError(f"there is no document {index}: {self.documents} were scored")
        table = self.documents_dataframe().set_index(["document", "layer", "head"])
        a, b = table.loc[first], table.loc[second]
        moved = (b - a).add_suffix("_change").reset_index()
        moved["distance"] = (moved["positional_change"] ** 2 + moved["symbolic_change"] ** 2) ** 0.5
        return moved.sort_values("distance", ascending=False, ignore_index=True)

    def plot(self, ax: Any = None) -> Any:
        """The plane: symbolic against positional score, one dot a head, colour by layer."""
        from posattn import plotting

        ax = plotting.axes(ax)
        layers, heads = self.positional.shape
        colour = torch.arange(layers).repeat_interleave(heads).numpy()
        at = self.positional.flatten().numpy(), self.symbolic.flatten().numpy()
        plotting.scatter(ax, *at, values_colour=colour)
        ax.figure.colorbar(ax.collections[-1], ax=ax, label="layer")
        ends = (-0.03, 1.03)
        return plotting.finish(ax, x="positional score", y="symbolic score", xlim=ends, ylim=ends)


class _Run:
    """Everything gathered on the way; `observe` is the observer of one batch."""

    def __init__(self, model: Model, documents: int, tau: float, limit: bool, frequencies: bool, exact: bool) -> None:
        self.model, self.tau, self.limit, self.exact = model, tau, limit, exact
        layers, heads = model.n_layers, model.layers[0].n_heads
        self.names = [*_SCORES, *(["limit_positional", "limit_symbolic"] if limit else [])]
        if exact:
            self.names += _EXACT
        self.values: list[dict[str, Tensor]] = [{} for _ in range(documents)]  # per document: name -> [Q,T,H]
        self.frequencies = frequencies
        self.by_frequency: list[list[Tensor]] = [[] for _ in range(layers)]  # per layer: sums [2,H,F] over documents
        self.layers, self.heads = layers, heads
        self.distance: list[dict[int, Tensor]] = [{} for _ in range(layers)]  # per layer and length: [2,H,N] sum, count
        self.squares = torch.zeros(layers, heads, dtype=torch.float64)
        self.rows = torch.zeros(layers, dtype=torch.float64)  # queries that went into it
        self.logits = torch.zeros(layers, dtype=torch.float64)

    def start(self, indices: list[int], tokens: Tensor, queries: list[int], schemes: list[PositionScheme]) -> None:
        """Announce the next batch."""
        self.indices, self.tokens, self.queries = indices, tokens, queries
        self.schemes = schemes
        for layer, scheme in enumerate(self.schemes):
            check_movable(scheme, layer)
            if scheme.window is not None and min(scheme.window - 1, min(queries)) < 2:
                raise InputError(
                    f"layer {layer} sees only {scheme.window} keys (window), so no two earlier ones can be exchanged"
                )
        shape = (len(queries), self.layers, self.heads)
        for index in indices:
            self.values[index] = {name: torch.full(shape, math.nan, dtype=torch.float64) for name in self.names}

    def observe(self, layer: int, points: Any, batch: Batch) -> None:
        q, k, pattern = points["q"], points["k"], points["pattern"]
        if q.shape[2] != self.heads:
            raise InputError(f"layer {layer} has {q.shape[2]} heads, layer 0 has {self.heads}: score them apart")
        scheme = self.schemes[layer]
        for place, query in enumerate(self.queries):
            moved = move_query(q[:, query], k, scheme, query)  # [B,H,n+1,d]
            own = pattern[:, :, query, moved.first : query + 1]
            computed = moved.weights()
            self._check(layer, query, own, computed)
            weights = own if own.dtype in _TOLERANCE else computed
            found = {"entropy": _entropy(weights)}
            found["positional"], found["symbolic"] = _swap(moved, weights, self.tau)
            if self.limit:
                found["limit_positional"], found["limit_symbolic"] = _swap(moved, weights, 0.0)
            if self.exact:
                found.update(vars(exact(moved)))
            if self.frequencies and scheme.rotary is not None:
                self._frequency(layer, moved, scheme)
            for name, value in found.items():
                value = value.double().cpu()
                for index, row in zip(self.indices, value, strict=True):
                    self.values[index][name][place, layer] = row
            self._distances(layer, moved, q.shape[1])

    def _check(self, layer: int, query: int, own: Tensor, computed: Tensor) -> None:
        error = float((own.double() - computed.double()).abs().max())
        if not error <= _TOLERANCE.get(own.dtype, 0.05):
            raise SelfCheckError(
                f"layer {layer}, query {query}: attention weights recomputed from q, k and the position scheme "
                f"({self.schemes[layer].kind}) differ from the model's own by {error:.2g}; this model is not "
                'understood well enough for level="keys": use level="tokens" and report it'
            )

    def _frequency(self, layer: int, moved: Moved, scheme: PositionScheme) -> None:
        split = split_frequencies(moved, scheme)
        pair = torch.stack(_swap(split, split.weights(), self.tau))  # [2,B,H,F]
        # the mean over queries within a document, then the sum over documents
        self.by_frequency[layer].append(pair.double().sum(1).cpu() / len(self.queries))

    def _distances(self, layer: int, moved: Moved, length: int) -> None:
        logits = moved.logits().double()
        logits = logits - logits.mean(-1, keepdim=True)
        batch, heads, count = logits.shape
        if length not in self.distance[layer]:
            self.distance[layer][length] = torch.zeros(2, heads, length, dtype=torch.float64)
        sums = self.distance[layer][length]
        # column c of `logits` is distance count − 1 − c
        sums[0, :, :count] += logits.sum(0).flip(-1).cpu()
        sums[1, :, :count] += batch
        self.squares[layer] += logits.square().sum((0, 2)).cpu()
        self.rows[layer] += batch
        self.logits[layer] += batch * count

    def state(self) -> dict[str, Any]:
        """What this process has gathered of its share of the documents."""
        names = ("values", "by_frequency", "distance", "squares", "rows", "logits")
        return {name: getattr(self, name) for name in names}

    def merge(self, parts: list[dict[str, Any]]) -> None:
        """Become what one process would have gathered of all documents: `parts` are the states by rank."""
        self.values = [next(v for v in entries if v) for entries in zip(*(p["values"] for p in parts), strict=True)]
        self.by_frequency = [
            list(itertools.chain(*lists)) for lists in zip(*(p["by_frequency"] for p in parts), strict=True)
        ]
        distance: list[dict[int, Tensor]] = [{} for _ in range(self.layers)]
        for part in parts:
            for mine, theirs in zip(distance, part["distance"], strict=True):
                for length, sums in theirs.items():
                    mine[length] = mine[length] + sums if length in mine else sums
        self.distance = distance
        for name in ("squares", "rows", "logits"):
            setattr(self, name, torch.stack([part[name] for part in parts]).sum(0))

    def distance_share(self) -> tuple[Tensor, Tensor]:
        """Explained share of the logits' variance and its chance level, [T,H] each."""
        share = torch.zeros(self.layers, self.heads, dtype=torch.float64)
        chance = torch.zeros_like(share)
        for layer, lengths in enumerate(self.distance):
            longest = max(lengths)
            sums = torch.zeros(2, self.heads, longest, dtype=torch.float64)
            for length, part in lengths.items():
                sums[..., :length] += part
            between = (sums[0].square() / sums[1].clamp(min=1)).sum(-1)
            total = self.squares[layer]
            share[layer] = torch.where(total > 0, between / total.clamp(min=1e-300), 0.0)
            distances = (sums[1] > 0).sum(-1).double()
            chance[layer] = (distances - 1) / (self.logits[layer] - self.rows[layer]).clamp(min=1)
        return share, chance


def _swap(moved: Moved, weights: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Scores of every leading index of `moved`; `weights` [..., n+1] with the own key last."""
    lead = moved.keys.shape[:-2]
    flat = [x[..., :-1, :].flatten(0, -3) for x in (moved.queries, moved.keys)]
    pos, sym = swap_scores(flat[0], flat[1], weights[..., :-1].flatten(0, -2), moved.softcap, tau)
    return pos.view(lead), sym.view(lead)


def _entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of the (renormalised) rows."""
    weights = weights.double()
    total = weights.sum(-1, keepdim=True)
    return torch.special.entr(weights / total.where(total > 0, 1)).sum(-1)


def score_heads(
    model: Any,
    tokens: Any,
    level: str = "keys",
    queries: Queries = "last",
    per_frequency: bool = False,
    tau: float = TAU,
    *,
    limit: bool = False,
    blocks: Blocks = None,
    max_swaps: int | None = None,
    companions: bool = True,
    evidence: bool = True,
    batch_size: int = 8,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> HeadScores:
    """Positional and symbolic score of every head over all swaps of two earlier keys (see the module docstring).

    Args:
        model: a `posattn` model or anything `as_model` takes.
        tokens: `Tokens`, ids [M,N], vectors of ids or a `BindingTask`; three tokens a document at least. Padding
            is dropped; a binding task brings its blocks and queries.
        level: "keys" exchanges hidden keys (positions stay); "tokens" exchanges blocks of the prompt and runs again.
        queries: "last", "all", a number (a seeded sample of so many per document) or positions (negative from the end).
        tau: temperature of the weights of swaps, in attention weight; 0 for the limit alone. `limit` gives both.
        blocks: for "tokens": None (every earlier token), a block length, (start, end) pairs, or such a list a document.
        max_swaps: for "tokens": a seeded sample of so many swaps per document instead of all.
        companions: exclusion bound, analysis of variance and distance share too ("keys").
        evidence: attention figures by name too, including a run on repeated random tokens.
        bootstrap: resamples behind the intervals; 0 for none.

    Raises:
        DataError: a prompt that is too short, or holds one token over and over.
        InputError: an argument out of range.
        SelfCheckError: the model's weights are not what q, k and its position scheme give.
        UnsupportedModelError: level="keys" on a model with absolute positions; the message names the alternative.
    """
    if level not in ("keys", "tokens"):
        raise InputError(f'level is "keys" or "tokens", not {level!r}')
    if not (tau >= 0 and math.isfinite(tau)):
        raise InputError(f"tau must be a finite number of at least 0, not {tau}")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1, not {confidence}")
    if level == "keys" and (blocks is not None or max_swaps is not None):
        raise InputError('blocks and max_swaps go with level="tokens"; level="keys" takes every swap of single keys')
    if level == "tokens" and per_frequency:
        raise InputError('per_frequency goes with level="keys": only cross-logits split into frequencies')
    model = seen(model)
    if blocks is None and level == "tokens":
        blocks = getattr(tokens, "blocks", None)
    if queries == "last":
        queries = getattr(tokens, "queries", queries)
    documents = as_documents(tokens)
    schemes = Schemes(model)
    if level == "keys":  # before any work: a model whose keys cannot be moved
        for layer, scheme in enumerate(schemes(len(documents[0]))):
            check_movable(scheme, layer)
    chosen = _choose(queries, documents, seed)
    for index, (row, positions) in enumerate(zip(documents, chosen, strict=True)):
        check_varied(row, positions[-1], index, model.tokenizer)
    settings: dict[str, Any] = {"level": level, "tau": tau, "bootstrap": bootstrap}
    optional: dict[str, Any] = {}
    if level == "keys":
        run = _score_keys(
            model, documents, chosen, schemes, tau, limit, per_frequency, companions, evidence, batch_size, seed
        )
        values, optional = run
    else:
        layout = as_blocks(blocks, documents, chosen)
        settings.update(blocks=[len(b) for b in layout], max_swaps=max_swaps)
        values = token_scores(model, documents, layout, chosen, schemes, tau, limit, batch_size, max_swaps, seed)
        if evidence:
            optional["evidence"] = measure_evidence(model, documents, batch_size=batch_size, seed=seed)
    if limit:
        for name in ("limit_positional", "limit_symbolic"):
            optional[name] = torch.stack([v[name].mean(0) for v in values]).mean(0)
    per_document = {name: torch.stack([v[name].mean(0) for v in values]) for name in _SCORES}
    pooled = {name: torch.cat([v[name] for v in values]) for name in _SCORES}
    units, over = (per_document, "documents") if len(documents) > 1 else (pooled, "queries")
    if len(units["positional"]) < 2:
        over = None
    return HeadScores(
        **{name: per_document[name].mean(0) for name in _SCORES},
        **{f"{name}_std": pooled[name].std(0, correction=int(len(pooled[name]) > 1)) for name in _SCORES[:2]},
        **{f"{name}_interval": _interval(units[name], bootstrap, confidence, seed) for name in _SCORES[:2]},
        **{f"document_{name}": per_document[name] for name in _SCORES},
        level=level,
        tau=tau,
        queries=tuple(tuple(positions) for positions in chosen),
        confidence=confidence,
        interval_over=over,
        provenance=provenance(**run_facts(model, tokens, seed=seed, scores=settings)),
        **optional,
    )


def _choose(queries: Any, documents: list[Tensor], seed: int) -> list[list[int]]:
    nested = isinstance(queries, Sequence) and not isinstance(queries, str) and len(queries) > 0
    if nested and all(isinstance(entry, Sequence) for entry in queries):
        if len(queries) != len(documents):
            raise InputError(f"queries for {len(queries)} documents, but there are {len(documents)}")
        return [choose_queries(entry, len(row), seed) for entry, row in zip(queries, documents, strict=True)]
    return [choose_queries(queries, len(row), seed) for row in documents]


def _score_keys(
    model: Model,
    documents: list[Tensor],
    chosen: list[list[int]],
    schemes: Schemes,
    tau: float,
    limit: bool,
    per_frequency: bool,
    companions: bool,
    evidence: bool,
    batch_size: int,
    seed: int,
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Per document the raw figures [Q,T,H] by name, and the optional fields of the result."""
    run = _Run(model, len(documents), tau, limit, per_frequency, companions)
    counter = EvidenceCounter(model.n_layers, model.layers[0].n_heads) if evidence else None

    def observer(layer: int, points: Any, batch: Batch) -> None:
        run.observe(layer, points, batch)
        if counter is not None:
            counter.add(layer, points["pattern"], run.tokens, run.schemes[layer].window)

    for indices, batch_tokens in batches(documents, batch_size, keys=chosen, shared=True):
        run.start(indices, batch_tokens, chosen[indices[0]], schemes(batch_tokens.shape[-1]))
        with torch.no_grad(), model.observe(["q", "k", "pattern"], observer):
            model(batch_tokens.to(model.device))
    if world().size > 1:
        run.merge(world().gather(run.state()))
        if counter is not None:
            counter.replace(world().gather(counter.state()))
    optional: dict[str, Any] = {}
    if counter is not None:
        add_repeated_text(counter, model, schemes, shared_first(documents, model), 64, 4, seed)
        optional["evidence"] = counter.result(run_facts(model, None, seed=seed))
    if companions:
        optional["exact"] = {name: torch.stack([v[name].mean(0) for v in run.values]).mean(0) for name in _EXACT}
        optional["distance_share"], optional["distance_share_chance"] = run.distance_share()
    if per_frequency:
        widest = max((part.shape[-1] for parts in run.by_frequency for part in parts), default=0)
        if not widest:
            raise InputError("per_frequency needs a rotary embedding, and no layer of this model has one")
        table = torch.full((2, run.layers, run.heads, widest), math.nan, dtype=torch.float64)
        for layer, parts in enumerate(run.by_frequency):
            if parts:
                mean = torch.stack(parts).sum(0) / len(documents)
                table[:, layer, :, : mean.shape[-1]] = mean
        optional["frequency_positional"], optional["frequency_symbolic"] = table[0], table[1]
    return run.values, optional


def _interval(units: Tensor, resamples: int, confidence: float, seed: int) -> Tensor:
    """Bootstrap interval [T,H,2] of the mean over the first dimension; NaN when it has one entry."""
    count, shape = len(units), units.shape[1:]
    if count < 2 or resamples < 1:
        return torch.full((*shape, 2), math.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    share = torch.nn.functional.one_hot(drawn, count).sum(1).double() / count  # [R,S]
    # sorted, so that the order of documents cannot matter
    means = share @ units.flatten(1).double().sort(0).values
    tail = (1 - confidence) / 2
    bounds = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return bounds.T.reshape(*shape, 2)
