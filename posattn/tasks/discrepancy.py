"""Discrepancy: how far a query's largest logit is above its second largest, as the input grows.

Definition (arXiv 2605.31558, Def. 3.1): δ = largest − second-largest logit of a query, in the units that enter the
softmax. Softmax over n keys gives the best one at least 1/(1 + (n−1)e^(−δ)), so a head stays sharp only while
δ > ln(n−1).

Published upper bounds for unit logits (same source), n keys before the query:

    index       δ ≤ min(1 − cos θ, 2π²/n²)          retrieval   δ ≤ 1 − cos(ω − nθ),  ω = 2π/|alphabet|

The second part of the index bound is Dirichlet's: among n multiples of θ two lie within 2π/n of each other on the
circle. With F angles the same argument in F dimensions, boxes of side 2π/K with K the largest integer below n^(1/F),
gives δ ≤ 1 − cos(2π/K) (`index_bound_many`, ours): every further angle makes the loss slower.

**Measured** (`model_discrepancy`): per layer and head, over documents and queries, mean and smallest δ and the mean
largest weight, at each length; from q and k of the model as it runs, one layer at a time.

**Predicted break** (`predicted_break`, ours). If added keys are like those already there, a head whose best key holds
w among n holds half of the attention at n* = 1 + (n−1)·w/(1−w). It uses the length measured at and nothing beyond.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.heads.crosslogits import move_query
from posattn.heads.documents import Queries, as_documents, batches, choose_queries, run_facts, seen
from posattn.models.base import Batch, Model
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

#: numbers in one layer's attention tensor that a batch may have
BUDGET = 2**24


def index_bound(angle: float, n: int) -> float:
    """Upper bound of an index head's discrepancy with one angle and n keys: min(1 − cos θ, 2π²/n²).

    Raises:
        InputError: n below 2: one key has no second.
    """
    _check(n)
    return min(1 - math.cos(angle), 2 * math.pi**2 / n**2)


def index_bound_many(angles: int, n: int) -> float:
    """Upper bound with so many angles, whatever they and their weights are: 1 − cos(2π/K), K^angles < n (2 if K < 2).

    Raises:
        InputError: n below 2, or no angle.
    """
    _check(n)
    if angles < 1:
        raise InputError(f"the number of angles must be at least 1, not {angles}")
    boxes = math.floor(n ** (1 / angles)) + 1
    while boxes > 1 and boxes**angles >= n:
        boxes -= 1
    return 1 - math.cos(2 * math.pi / boxes) if boxes > 2 else 2.0


def retrieval_bound(angle: float, alphabet: int, n: int) -> float:
    """Upper bound of a retrieval head's discrepancy: 1 − cos(ω − nθ), ω = 2π/alphabet.

    Raises:
        InputError: n or the alphabet below 2.
    """
    _check(n)
    if alphabet < 2:
        raise InputError(f"an alphabet needs at least 2 symbols, not {alphabet}")
    return 1 - math.cos(2 * math.pi / alphabet - n * angle)


def _check(n: int) -> None:
    if n < 2:
        raise InputError(f"a discrepancy needs at least 2 keys, not {n}")


def predicted_break(weight: Float[Tensor, "*shape"], n: int) -> Float[Tensor, "*shape"]:
    """The length at which a head whose best key holds `weight` among `n` keys holds half: 1 + (n−1)·w/(1−w).

    Raises:
        InputError: n below 2, or a weight outside [0, 1].
    """
    _check(n)
    w = weight.double()
    if bool(((w < 0) | (w > 1 + 1e-6)).any()):
        raise InputError("attention weights lie between 0 and 1")
    w = w.clamp(max=1)
    return 1 + (n - 1) * w / (1 - w)


@dataclasses.dataclass(frozen=True, eq=False)
class Discrepancy(Result):
    """Discrepancy by length, per layer and head. L lengths, T layers, H heads.

    `mean`, `worst` [L,T,H]: mean and smallest δ over documents and queries (a construction: the exact worst case in
    both). `weight` [L,T,H]: mean weight of the best key; NaN for a construction with hard attention. `bounds`: upper
    bounds [L] by name. `needed` [L] = ln(n−1): what a weight of one half among n keys takes.
    """

    kind: ClassVar[str] = "discrepancy"

    lengths: Sequence[int]
    mean: Float[Tensor, "lengths layers heads"]
    worst: Float[Tensor, "lengths layers heads"]
    weight: Float[Tensor, "lengths layers heads"]
    needed: Float[Tensor, "lengths"]
    bounds: dict[str, Float[Tensor, "lengths"]]
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a length, layer and head: mean, worst, weight, needed, and a column a bound."""
        import pandas as pd

        rows = []
        for n, length in enumerate(self.lengths):
            bounds = {f"bound_{name}": float(value[n]) for name, value in self.bounds.items()}
            for t in range(self.mean.shape[1]):
                for h in range(self.mean.shape[2]):
                    rows.append(
                        {
                            "length": length,
                            "layer": t,
                            "head": h,
                            "mean": float(self.mean[n, t, h]),
                            "worst": float(self.worst[n, t, h]),
                            "weight": float(self.weight[n, t, h]),
                            "needed": float(self.needed[n]),
                            **bounds,
                        }
                    )
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None, heads: Sequence[tuple[int, int]] | None = None) -> Any:
        """Mean δ by length of the given (layer, head) pairs (default: all, up to 12), and the bounds."""
        from posattn import plotting

        ax = plotting.axes(ax)
        layers, count = self.mean.shape[1:]
        if heads is None:
            heads = [(t, h) for t in range(layers) for h in range(count)][:12]
        for t, h in heads:
            plotting.curve(ax, self.mean[:, t, h], list(self.lengths), label=f"L{t}H{h}", marker="o")
        for name, value in self.bounds.items():
            plotting.curve(ax, value, list(self.lengths), label=f"bound: {name}", color="black", linestyle="--")
        if not self.bounds:
            plotting.curve(ax, self.needed, list(self.lengths), label="ln(n−1)", color="grey", linestyle=":")
        ax.set_xscale("log")
        if float(self.worst.min()) > 0:
            ax.set_yscale("log")
        return plotting.finish(ax, x="length", y="largest − second logit", legend=True)


def construction_discrepancy(head: Any, lengths: Sequence[int]) -> Discrepancy:
    """Exact worst cases of a head of `posattn.tasks.constructions` with the published bound that belongs to it.

    Raises:
        InputError: a length below 2.
    """
    from posattn.tasks.constructions import IndexHead, RetrievalHead

    for n in lengths:
        _check(n)
    exact = torch.tensor([head.discrepancy(int(n)) for n in lengths], dtype=torch.float64)
    bounds: dict[str, Tensor] = {}
    if isinstance(head, IndexHead):
        single = len(head.angles) == 1
        values = [
            index_bound(float(head.angles[0]), n) if single else index_bound_many(len(head.angles), n) for n in lengths
        ]
        bounds["index"] = torch.tensor(values, dtype=torch.float64)
    elif isinstance(head, RetrievalHead):
        values = [retrieval_bound(float(head.angles[0]), head.alphabet, n) for n in lengths]
        bounds["retrieval"] = torch.tensor(values, dtype=torch.float64)
    count = torch.tensor([float(n) for n in lengths], dtype=torch.float64)
    soft = math.isfinite(head.scale)
    weight = 1 / (1 + (count - 1) * torch.exp(-head.scale * exact)) if soft else torch.full_like(exact, math.nan)
    facts = {"angles": head.angles.tolist(), "weights": head.weights.tolist(), "scale": head.scale if soft else "hard"}
    return Discrepancy(
        lengths=tuple(int(n) for n in lengths),
        mean=exact[:, None, None],
        worst=exact[:, None, None],
        weight=weight[:, None, None],
        needed=(count - 1).log(),
        bounds=bounds,
        provenance=provenance(model=type(head).__name__, construction=facts),
    )


def gaps(
    model: Any,
    tokens: Any,
    queries: Queries = "last",
    batch_size: int = 8,
    seed: int = 0,
    budget: int = BUDGET,
) -> tuple[Float[Tensor, "docs layers heads"], Float[Tensor, "docs layers heads"], Float[Tensor, "docs layers heads"]]:
    """Per document, over its queries: mean δ, smallest δ, mean largest weight. All visible keys count, the own too.

    Raises:
        UnsupportedModelError: positions are added to queries and keys outside of any scheme (shortformer).
    """
    model = seen(model)
    documents = as_documents(tokens)
    chosen = [choose_queries(queries, len(row), seed) for row in documents]
    shape = (len(documents), model.n_layers, max(layer.n_heads for layer in model.layers))
    mean, worst, weight = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(3))
    longest = max(map(len, documents))
    batch_size = max(1, min(batch_size, budget // (shape[2] * longest**2)))
    for indices, rows in batches(documents, batch_size, keys=chosen):
        positions = chosen[indices[0]]
        place = torch.tensor(indices)

        def observer(
            layer: int, points: Mapping[str, Tensor], batch: Batch, place: Tensor = place, at: list[int] = positions
        ) -> None:
            scheme = model.scheme(layer, points["q"].shape[1])
            if scheme.kind == "absolute":  # q and k hold the positions already
                scheme = dataclasses.replace(scheme, kind="none")
            found, best = [], []
            for query in at:
                moved = move_query(points["q"][:, query], points["k"], scheme, query)
                top = moved.logits().topk(2, -1).values.double()
                found.append(top[..., 0] - top[..., 1])
                best.append(moved.weights().amax(-1).double())
            stacked = torch.stack(found).cpu()
            heads = stacked.shape[-1]
            mean[place, layer, :heads] = stacked.mean(0)
            worst[place, layer, :heads] = stacked.amin(0)
            weight[place, layer, :heads] = torch.stack(best).mean(0).cpu()

        with torch.no_grad(), model.observe(["q", "k"], observer):
            model(rows.to(model.device))
    return mean, worst, weight


def model_discrepancy(
    model: Any,
    tokens: Any,
    lengths: Sequence[int] | None = None,
    queries: Queries = "last",
    *,
    bounds: Mapping[str, Sequence[float]] | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Discrepancy:
    """Discrepancy of every head by length.

    Args:
        tokens: documents (each length takes the *last* so many tokens, so that the queries stay the same), or a mapping
            from length to documents of it.
        lengths: default: the documents' own length, halved down to 8.

    Raises:
        InputError: documents shorter than a length, or a length below 3.
    """
    model = seen(model)
    by_length = _by_length(tokens, lengths)
    parts = [gaps(model, rows, queries, batch_size, seed) for rows in by_length.values()]
    count = torch.tensor([float(n) for n in by_length], dtype=torch.float64)
    return Discrepancy(
        lengths=tuple(by_length),
        mean=torch.stack([mean.mean(0) for mean, _, _ in parts]),
        worst=torch.stack([worst.amin(0) for _, worst, _ in parts]),
        weight=torch.stack([weight.mean(0) for _, _, weight in parts]),
        needed=(count - 1).log(),
        bounds={name: torch.as_tensor(value, dtype=torch.float64) for name, value in (bounds or {}).items()},
        provenance=provenance(**_facts(model, tokens, seed)),
    )


def _facts(model: Model, tokens: Any, seed: int) -> dict[str, Any]:
    return run_facts(model, None if isinstance(tokens, Mapping) else tokens, seed=seed)


def _by_length(tokens: Any, lengths: Sequence[int] | None) -> dict[int, list[Tensor]]:
    if isinstance(tokens, Mapping):
        found = {int(n): as_documents(rows) for n, rows in sorted(tokens.items())}
        wanted = list(found) if lengths is None else [int(n) for n in lengths]
        missing = [n for n in wanted if n not in found]
        if missing:
            raise InputError(f"no documents of length {missing[0]} were given")
        return {n: found[n] for n in wanted}
    documents = as_documents(tokens)
    shortest = min(map(len, documents))
    if lengths is None:
        wanted = []
        while shortest >= 8:
            wanted.insert(0, shortest)
            shortest //= 2
        wanted = wanted or [min(map(len, documents))]
    else:
        wanted = sorted({int(n) for n in lengths})
    if not wanted or wanted[0] < 3:
        raise InputError(f"lengths must be at least 3 tokens, not {wanted[0] if wanted else 'none'}")
    if wanted[-1] > min(map(len, documents)):
        raise InputError(f"length {wanted[-1]} was asked for, but a document has {min(map(len, documents))} tokens")
    return {n: [row[len(row) - n :] for row in documents] for n in wanted}
