"""Evidence for what a head does, each figure beside its chance level.

Every figure is a mean share of attention (0 to 1) over documents and query positions i ≥ 2:

    previous_token   A[i, i−1]            self          A[i, i]           first_position  A[i, 0]
    local_window     the `LOCAL` positions before i
    duplicate        earlier positions that hold the query's token       (queries that have one)
    induction        positions right after an earlier copy of it         (queries that have one)
    duplicate_repeat, induction_repeat   the same on random tokens repeated once, where there is exactly one such
                     position and neither statistics of text nor distance can stand in for it

Chance is what a head with uniform attention over the keys it sees (its layer's window included) would give on the same
queries. Attention that goes to a learned sink counts for none of them.

Sources: induction and previous-token heads, Olsson et al. arXiv 2209.11895 (repeated random tokens); duplicate-token
heads, Wang et al. arXiv 2211.00593; first-position sinks, Xiao et al. arXiv 2309.17453.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.distributed import world
from posattn.errors import DataError
from posattn.heads.documents import Schemes, as_documents, batches, run_facts, seen
from posattn.models.base import Batch, Model
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

LOCAL = 8
FIGURES = ("previous_token", "self", "first_position", "local_window", "duplicate", "induction")
REPEATED = ("duplicate_repeat", "induction_repeat")


@dataclasses.dataclass(frozen=True, eq=False)
class HeadEvidence(Result):
    """Measured attention shares and their chance levels, by name: each [T,H]; NaN where no query allowed the figure."""

    kind: ClassVar[str] = "head evidence"

    measured: dict[str, Float[Tensor, "layers heads"]]
    chance: dict[str, Float[Tensor, "layers heads"]]
    queries: dict[str, int]  # how many query positions stand behind each figure
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """Columns evidence, layer, head, value, chance."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "evidence": name,
                    "layer": t,
                    "head": h,
                    "value": float(x[t, h]),
                    "chance": float(self.chance[name][t, h]),
                }
                for name, x in self.measured.items()
                for t in range(x.shape[0])
                for h in range(x.shape[1])
            ]
        )

    def plot(self, ax: Any = None, name: str = "induction_repeat") -> Any:
        """One figure as a layer-by-head map."""
        from posattn import plotting

        ax = plotting.axes(ax)
        return plotting.heatmap(
            ax,
            self.measured[name],
            x="head",
            y="layer",
            title=name.replace("_", " "),
            value="share of attention",
            limits=(0, 1),
            origin="lower",
        )


class EvidenceCounter:
    """Running sums of the figures; `add` takes one layer's pattern of a batch without padding."""

    def __init__(self, layers: int, heads: int) -> None:
        names = FIGURES + REPEATED
        self._sums = {name: torch.zeros(layers, heads, dtype=torch.float64) for name in names}
        self._chance = {name: torch.zeros(layers, heads, dtype=torch.float64) for name in names}
        self._counts = {name: torch.zeros(layers, dtype=torch.long) for name in names}

    def add(self, layer: int, pattern: Tensor, tokens: Tensor, window: int | None) -> None:
        """`pattern` [B,H,N,N] of `tokens` [B,N]."""
        n = tokens.shape[-1]
        tokens = tokens.to(pattern.device)
        i, j = torch.arange(n, device=pattern.device)[:, None], torch.arange(n, device=pattern.device)
        seen = (j <= i) if window is None else (j <= i) & (i - j < window)
        same = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)  # [B,N,N]
        after = torch.zeros_like(same)
        after[..., 1:] = same[..., :-1]  # token j−1 equals token i
        plain = {
            "previous_token": i - j == 1,
            "self": i == j,
            "first_position": (j == 0) & (i > 0),
            "local_window": (i - j >= 1) & (i - j <= LOCAL),
        }
        for name, where in plain.items():
            self._count(name, layer, pattern, (where & seen).expand(same.shape), seen, every=True)
        self._count("duplicate", layer, pattern, same & (j < i) & seen, seen)
        self._count("induction", layer, pattern, after & seen, seen)

    def add_repeated(self, layer: int, pattern: Tensor, period: int, window: int | None) -> None:
        """`pattern` [B,H,N,N] of sequences whose last `period` tokens repeat the `period` before."""
        n = pattern.shape[-1]
        i, j = torch.arange(n, device=pattern.device)[:, None], torch.arange(n, device=pattern.device)
        seen = (j <= i) if window is None else (j <= i) & (i - j < window)
        second = i >= n - period
        shape = (pattern.shape[0], n, n)
        self._count("duplicate_repeat", layer, pattern, ((i - j == period) & second & seen).expand(shape), seen)
        self._count("induction_repeat", layer, pattern, ((i - j == period - 1) & second & seen).expand(shape), seen)

    def _count(self, name: str, layer: int, pattern: Tensor, where: Tensor, seen: Tensor, every: bool = False) -> None:
        queries = torch.ones_like(where[..., 0]) if every else where.any(-1)  # [B,N]
        queries = queries & (torch.arange(queries.shape[-1], device=queries.device) >= 2)
        weights = where.to(pattern.dtype) * queries.unsqueeze(-1).to(pattern.dtype)
        mass = torch.einsum("bhij,bij->h", pattern, weights)
        chance = (where.sum(-1) / seen.sum(-1)).where(queries, 0).sum()
        self._sums[name][layer] += mass.double().cpu()
        self._chance[name][layer] += chance.double().cpu()
        self._counts[name][layer] += int(queries.sum())

    def state(self) -> list[dict[str, Tensor]]:
        """The running sums."""
        return [self._sums, self._chance, self._counts]

    def replace(self, parts: list[list[dict[str, Tensor]]]) -> None:
        """Hold the sum of `parts`, the states of several counters."""
        self._sums, self._chance, self._counts = (
            {name: torch.stack([table[name] for table in tables]).sum(0) for name in tables[0]}
            for tables in zip(*parts, strict=True)
        )

    def result(self, facts: dict[str, Any]) -> HeadEvidence:
        """The means; NaN where no query allowed a figure."""
        measured, chance, counts = {}, {}, {}
        for name, sums in self._sums.items():
            count = self._counts[name].double().unsqueeze(-1)
            measured[name] = (sums / count).float()
            chance[name] = (self._chance[name] / count).float()
            counts[name] = int(self._counts[name].max())
        return HeadEvidence(measured, chance, counts, provenance(**facts))


def repeated_random(
    model: Model, period: int = 64, samples: int = 4, seed: int = 0, bos: int | None = None
) -> Int[Tensor, "s n"]:
    """Random tokens, no special ones, repeated once: [samples, 2·period], one more with `bos` in front.

    No token comes twice in one period, which is cut to what the vocabulary and the context allow.

    Raises:
        DataError: the model's context is too short for two repeats of two tokens.
    """
    room = None if model.context is None else (model.context - (bos is not None)) // 2
    if room is not None and room < 2:
        raise DataError(f"a context of {model.context} tokens is too short for repeated text")
    period = period if room is None else min(period, room)
    special = set(getattr(model.tokenizer, "all_special_ids", None) or [])
    allowed = torch.tensor([t for t in range(model.vocab_size) if t not in special])
    generator = torch.Generator().manual_seed(seed)
    # no token twice in one period: one place to look at, not more
    rows = torch.stack([torch.randperm(len(allowed), generator=generator)[:period] for _ in range(samples)])
    half = allowed[rows]
    text = torch.cat([half, half], -1)
    return text if bos is None else torch.cat([torch.full((samples, 1), bos), text], -1)


def add_repeated_text(
    counter: EvidenceCounter, model: Model, schemes: Schemes, bos: int | None, period: int, samples: int, seed: int
) -> None:
    """Run repeated random tokens through the model and count them."""
    text = repeated_random(model, period, samples, seed, bos)
    period = text.shape[-1] // 2
    windows = [scheme.window for scheme in schemes(text.shape[-1])]

    def observer(layer: int, points: Any, batch: Batch) -> None:
        counter.add_repeated(layer, points["pattern"], period, windows[layer])

    with torch.no_grad(), model.observe(["pattern"], observer):
        model(text.to(model.device))


def measure_evidence(
    model: Any, tokens: Any, *, batch_size: int = 8, period: int = 64, repeats: int = 4, seed: int = 0
) -> HeadEvidence:
    """Every figure of the module docstring, on `tokens` and on `repeats` rows of repeated random text (0: none)."""
    model = seen(model)
    documents = as_documents(tokens)
    counter, schemes = EvidenceCounter(model.n_layers, model.layers[0].n_heads), Schemes(model)
    for _, batch_tokens in batches(documents, batch_size, shared=True):
        windows = [scheme.window for scheme in schemes(batch_tokens.shape[-1])]

        def observer(layer: int, points: Any, batch: Batch, tokens=batch_tokens, windows=windows) -> None:
            counter.add(layer, points["pattern"], tokens, windows[layer])

        with torch.no_grad(), model.observe(["pattern"], observer):
            model(batch_tokens.to(model.device))
    if world().size > 1:
        counter.replace(world().gather(counter.state()))
    if repeats:
        add_repeated_text(counter, model, schemes, shared_first(documents, model), period, repeats, seed)
    return counter.result(run_facts(model, tokens, seed=seed))


def shared_first(documents: list[Tensor], model: Model) -> int | None:
    """The BOS token, when every document starts with it."""
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return bos if bos is not None and all(int(row[0]) == bos for row in documents) else None
