"""`cross_logits`: M, weights and pattern of one layer for one document and query, for looking at a head closely."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError
from posattn.heads.crosslogits import check_movable, move_query, split_frequencies
from posattn.heads.documents import Schemes, as_documents, choose_queries, run_facts, seen
from posattn.models.base import Batch
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class CrossLogits(Result):
    """M of every head of one layer: `logits[h, p, t]` is the logit of token first+t's key standing at position first+p.

    `weights` [H,n+1]: the query's attention over positions first..query (its own last). `pattern` [H,N,N]: the
    layer's whole attention. `frequencies` [H,F,n,n]: M's terms by rotary frequency (before a soft cap), on request.
    """

    kind: ClassVar[str] = "cross-logits"

    logits: Float[Tensor, "heads n n"]
    weights: Float[Tensor, "heads n1"]
    pattern: Float[Tensor, "heads length length"]
    tokens: Int[Tensor, "length"]
    layer: int
    query: int
    first: int
    provenance: Provenance
    frequencies: Float[Tensor, "heads freqs n n"] | None = None

    def to_dataframe(self) -> pd.DataFrame:
        """One row a head and visible key: layer, head, position, logit (M's diagonal), weight."""
        import pandas as pd

        heads, n = self.logits.shape[:2]
        own = self.logits.diagonal(dim1=1, dim2=2)
        return pd.DataFrame(
            {
                "layer": self.layer,
                "head": torch.arange(heads).repeat_interleave(n).tolist(),
                "position": torch.arange(self.first, self.first + n).repeat(heads).tolist(),
                "logit": own.flatten().tolist(),
                "weight": self.weights[:, :-1].flatten().tolist(),
            }
        )

    def plot(self, ax: Any = None, head: int = 0) -> Any:
        """M of one head: rows positions, columns tokens."""
        from posattn import plotting

        ax = plotting.axes(ax)
        end = self.first + self.logits.shape[1] - 0.5
        extent = (self.first - 0.5, end, end, self.first - 0.5)
        title = f"layer {self.layer}, head {head}, query at {self.query}"
        return plotting.heatmap(
            ax, self.logits[head], x="token", y="position", title=title, value="logit", extent=extent, aspect="equal"
        )


def cross_logits(model: Any, tokens: Any, layer: int, query: int = -1, *, per_frequency: bool = False) -> CrossLogits:
    """Cross-logits of one layer for one document (a vector of ids) and the query at position `query`.

    Raises:
        InputError: more than one document, no such layer, or a query with fewer than two earlier keys.
        UnsupportedModelError: absolute positions.
    """
    model = seen(model)
    documents = as_documents(tokens)
    if len(documents) != 1:
        raise InputError(f"cross_logits looks at one document, got {len(documents)}")
    row = documents[0]
    if not 0 <= layer < model.n_layers:
        raise InputError(f"layer {layer} does not exist: {model.name} has layers 0 to {model.n_layers - 1}")
    position = choose_queries([query], len(row))[0]
    scheme = Schemes(model)(len(row))[layer]
    check_movable(scheme, layer)
    found: dict[str, Any] = {}

    def observer(_: int, points: Any, batch: Batch) -> None:
        moved = move_query(points["q"][0, position], points["k"][0], scheme, position)
        found["logits"], found["first"] = moved.matrix().cpu(), moved.first
        found["pattern"] = points["pattern"][0].cpu()
        found["weights"] = found["pattern"][:, position, moved.first : position + 1]
        if per_frequency:
            found["frequencies"] = split_frequencies(moved, scheme).matrix().cpu()

    with torch.no_grad(), model.observe(["q", "k", "pattern"], observer, [layer]):
        model(row[None].to(model.device))
    return CrossLogits(
        tokens=row.cpu(), layer=layer, query=position, provenance=provenance(**run_facts(model, tokens)), **found
    )
