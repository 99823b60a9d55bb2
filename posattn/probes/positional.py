"""What position alone does in a head: mean logit by distance, and how much its content prefers its own token.

With S_ij the logit as it enters the softmax (scaled, rotated or biased, soft-capped) and C_ij the same with query and
key at one position (no rotation beyond position 0's, no bias), this keeps for every layer and head, over documents and
over the pairs that the mask shows,

    s(d) = mean of S_ij over i − j = d,      β = mean C_ii − mean_(j<i) C_ij      (arXiv 2602.16837, section 5)

so that content and position together make s, and β says how far content lifts the diagonal. For ALiBi β is free of the
bias; for rotary layers S_ii = C_ii, since a rotation by nothing turns nothing. Where the scheme has a window, pairs
outside of it count nowhere. Attention sinks are no pairs.

Logits are made for a few heads and rows at a time and are added up along their diagonals by a skewed view: row i of a
tile, read backwards, is shifted by i through padding it with as many zeros as there are rows, so that a diagonal
becomes a column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import HookError, NothingMeasuredError
from posattn.models.base import Batch, Model, Point, PositionScheme
from posattn.models.positions import rotate
from posattn.probes.base import Probe, expect_shape
from posattn.probes.statistics import Aligner, Moments, Pending, Sums, accumulator
from posattn.results import Result

if TYPE_CHECKING:
    import pandas as pd

_TILE = 1 << 22  # logits held at a time


@dataclasses.dataclass(frozen=True, eq=False)
class PositionalLogits(Result):
    """Mean logits of T layers and H heads by distance; see the module docstring.

    `logits` [T,H,N] is s(d), 0 where no pair is d apart; `diagonal` [T,H] is β; `content` [T,H,N] is the mean of C by
    distance; `counts` [T,N] pairs (over documents) stand behind each distance. `kinds`, `windows` and `slopes` [T,H]
    say what each layer does with position. Layers with fewer than H heads (`heads`) are filled up with zeros.
    """

    kind: ClassVar[str] = "positional_logits"

    logits: Float[Tensor, "t h n"]
    diagonal: Float[Tensor, "t h"]
    content: Float[Tensor, "t h n"]
    slopes: Float[Tensor, "t h"]
    counts: Int[Tensor, "t n"]
    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    heads: tuple[int, ...]
    documents: int

    def to_dataframe(self) -> pd.DataFrame:
        """The mean logits: columns layer, head, distance, value (heads that a layer has, distances that occur)."""
        import pandas as pd

        rows = []
        for t, heads in enumerate(self.heads):
            seen = self.counts[t].nonzero()[:, 0].tolist()
            for h in range(heads):
                values = self.logits[t, h].tolist()
                rows += [{"layer": t, "head": h, "distance": d, "value": values[d]} for d in seen]
        return pd.DataFrame(rows, columns=["layer", "head", "distance", "value"])

    def plot(self, ax: Any = None, layer: int = 0) -> Any:
        """s(d) of the heads of one layer (at most eight lines)."""
        from posattn import plotting

        ax = plotting.axes(ax)
        seen = self.counts[layer].nonzero()[:, 0]
        for head in range(min(self.heads[layer], 8)):
            ax.plot(seen.numpy(), self.logits[layer, head, seen].numpy(), label=f"head {head}")
        return plotting.finish(ax, x="distance", y="mean logit", title=f"layer {layer}")


class PositionalProbe(Probe):
    """Measures mean logits by distance and β of every layer and head."""

    name: ClassVar[str] = "positional"

    def __init__(self) -> None:
        self._align = Aligner()
        self._pending = Pending()
        self._model: Model | None = None
        self._heads: list[int] = []
        self._logits: list[Sums] = []  # [h,n] sums over pairs
        self._content: list[Sums] = []
        self._counts: list[Sums] = []  # [n] pairs
        self._kinds: list[str] = []
        self._windows: list[int | None] = []
        self._slopes: list[Tensor] = []
        self._schemes: dict[tuple[int, int], PositionScheme] = {}
        self._documents = Sums()

    @property
    def needs(self) -> frozenset[Point]:
        return frozenset({"q", "k"})

    @property
    def documents(self) -> int:
        return int(self._documents.value)

    def begin(self, model: Model) -> None:
        self._check_layers(len(self._logits), model)
        self._model = model
        self._pending.clear()
        self._schemes.clear()
        self._heads = [layer.n_heads for layer in model.layers]
        schemes = [model.scheme(t, 2) for t in range(model.n_layers)]
        self._kinds = [scheme.kind for scheme in schemes]
        self._windows = [scheme.window for scheme in schemes]
        self._slopes = [
            torch.zeros(heads) if scheme.alibi is None else scheme.alibi.slopes.detach().float().cpu()
            for heads, scheme in zip(self._heads, schemes, strict=True)
        ]
        if not self._logits:
            self.restart({"layers": torch.tensor(model.n_layers)})

    def _scheme(self, layer: int, length: int) -> PositionScheme:
        assert self._model is not None
        if self._model.adapter != "plain":  # tables may follow the length, and the passes before
            return self._model.scheme(layer, length)
        if (layer, length) not in self._schemes:
            self._schemes[layer, length] = self._model.scheme(layer, length)
        return self._schemes[layer, length]

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        q, k = record["q"], record["k"]
        for name, tensor in (("queries", q), ("keys", k)):
            expect_shape(name, layer, tensor, batch)
        if q.shape[2] != self._heads[layer] or q.shape[2] % k.shape[2]:
            raise HookError(
                f"layer {layer}: {q.shape[2]} query heads and {k.shape[2]} key heads do not fit {self._heads[layer]}"
            )
        alignment = self._align(batch.mask)
        n = alignment.width
        scheme = self._scheme(layer, n)
        shape = (q.shape[2], n)
        logits = torch.zeros(shape, dtype=accumulator(q.device), device=q.device)
        content = torch.zeros_like(logits)
        lengths = []
        for row in range(q.shape[0]):
            queries, keys = q[row], k[row]
            if not alignment.full:
                # padding is left out, not zeroed: it may hold anything, NaN included
                real = alignment.indices(row).to(q.device)
                queries, keys = queries.index_select(0, real), keys.index_select(0, real)
            if not len(queries):
                continue
            lengths.append(len(queries))
            with_position, alone = document_sums(queries, keys, scheme)
            logits[:, : lengths[-1]] += with_position
            content[:, : lengths[-1]] += alone
        reach = n if scheme.window is None else min(scheme.window, n)
        pairs = torch.zeros(n)
        for length in lengths:
            pairs[: min(reach, length)] += length - torch.arange(min(reach, length))
        part = (logits, content, pairs)
        if finished := self._pending.put(layer, part, batch.mask, len(self._logits)):
            for t, (logits, content, pairs) in enumerate(finished):
                self._logits[t].add(logits)
                self._content[t].add(content)
                self._counts[t].add(pairs)
            self._documents.add(torch.tensor(float(len(lengths))))

    def result(self, model: Model | None = None) -> PositionalLogits:
        if not self.documents:
            raise NothingMeasuredError(
                "the positional probe saw no document: run the model while the probe is attached"
            )
        width = max(self._heads)

        def wide(values: Tensor) -> Tensor:
            spare = values.new_zeros(width - values.shape[0], *values.shape[1:])
            return torch.cat([values, spare])

        logits, contents, diagonals, counts = [], [], [], []
        for with_position, alone, pairs in zip(self._logits, self._content, self._counts, strict=True):
            count, sums, content = pairs.value, with_position.value, alone.value
            below = count[1:].sum()
            # with one position (or a window of one) nothing is below the diagonal, and β has nothing to differ from
            lower = content[:, 1:].sum(-1) / below.clamp(min=1)
            diagonals.append(wide((content[:, 0] / count[0] - lower) * (below > 0)))
            logits.append(wide(sums / count.clamp(min=1)))
            contents.append(wide(content / count.clamp(min=1)))
            counts.append(count.long())
        return PositionalLogits(
            logits=torch.stack(logits),
            diagonal=torch.stack(diagonals),
            content=torch.stack(contents),
            slopes=torch.stack([wide(slopes.double()) for slopes in self._slopes]),
            counts=torch.stack(counts),
            kinds=tuple(self._kinds),
            windows=tuple(self._windows),
            heads=tuple(self._heads),
            documents=self.documents,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        parts: dict[str, Moments | Sums] = {"documents": self._documents}
        for name, sums in (("logits", self._logits), ("content", self._content), ("pairs", self._counts)):
            parts |= {f"{name}.{t}": one for t, one in enumerate(sums)}
        return parts

    def facts(self) -> dict[str, Tensor]:
        return {"layers": torch.tensor(len(self._logits))}

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        layers = range(int(facts["layers"]) if facts else len(self._logits))
        self._logits, self._content, self._counts = ([Sums(grow_axes=1) for _ in layers] for _ in range(3))
        self._documents = Sums()

    def adopt(self, other: PositionalProbe) -> None:
        self._heads, self._kinds = other._heads, other._kinds
        self._windows, self._slopes = other._windows, other._slopes


def document_sums(
    q: Float[Tensor, "n h d"], k: Float[Tensor, "n g d"], scheme: PositionScheme
) -> tuple[Float[Tensor, "h n"], Float[Tensor, "h n"]]:
    """Sums of S and of C over the visible pairs of one document by distance (0 beyond the window).

    Args:
        q, k: as the scheme receives them, real tokens only; position = index.
        scheme: with a rotary table of at least N positions.
    """
    n = q.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    reach = n if scheme.window is None else min(scheme.window, n)
    here = torch.zeros(n, 1, dtype=torch.long, device=q.device)
    # at position 0 a rotation does nothing, but a scaled one still multiplies by its factor
    same = (q, k) if scheme.rotary is None else tuple(rotate(x, scheme.rotary, here) for x in (q, k))
    content = diagonal_sums(same[0].to(dtype), same[1].to(dtype), scheme.scale, reach, scheme.softcap)
    if scheme.rotary is None and scheme.alibi is None:
        return content, content
    slopes = None if scheme.alibi is None else scheme.alibi.slopes.to(q.device)
    if scheme.rotary is None and scheme.softcap is None:  # the bias is the same for all pairs of a distance
        assert slopes is not None
        distance = torch.arange(n, device=q.device)
        pairs = (n - distance) * (distance < reach)
        return content - slopes.to(content.dtype)[:, None] * (distance * pairs), content
    if scheme.rotary is not None:
        positions = torch.arange(n, device=q.device)[:, None]
        q, k = rotate(q, scheme.rotary, positions), rotate(k, scheme.rotary, positions)
    return diagonal_sums(q.to(dtype), k.to(dtype), scheme.scale, reach, scheme.softcap, slopes), content


def diagonal_sums(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n g d"],
    scale: float,
    reach: int,
    softcap: float | None = None,
    slopes: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "h n"]:
    """Σ over i − j = d of the logits, for d = 0 to `reach` − 1; 0 for greater distances."""
    n, heads = q.shape[:2]
    groups = k.shape[1]
    repeats = heads // groups
    queries = q.unflatten(1, (groups, repeats)).permute(1, 2, 0, 3)  # [g,r,n,d]
    keys = k.permute(1, 2, 0)  # [g,d,n]
    total = torch.zeros(groups, repeats, n, dtype=accumulator(q.device), device=q.device)
    height = min(n, max(16, _TILE // max(1, n * repeats)))
    step = max(1, _TILE // max(1, height * n * repeats))
    for top in range(0, n, height):
        bottom = min(top + height, n)
        left = max(0, top - reach + 1)  # sources before this are out of sight of all these rows
        rows, columns = bottom - top, bottom - left
        for g in range(0, groups, step):
            tile = (queries[g : g + step, :, top:bottom].flatten(1, 2) @ keys[g : g + step, :, left:bottom]) * scale
            tile = tile.unflatten(1, (repeats, rows))
            if slopes is not None:
                lag = torch.arange(top, bottom, device=q.device)[:, None] - torch.arange(left, bottom, device=q.device)
                own = slopes.to(tile.dtype).unflatten(0, (groups, repeats))[g : g + step]
                tile = tile - own[..., None, None] * lag
            if softcap is not None:
                tile = softcap * torch.tanh(tile / softcap)
            # reversed, source j of row r is column bottom−1−j; skewed, column bottom−1−j+r = distance + rows − 1
            skewed = torch.nn.functional.pad(tile.flip(-1), (0, rows)).flatten(-2)[..., : rows * (columns + rows - 1)]
            sums = skewed.unflatten(-1, (rows, columns + rows - 1)).sum(-2, dtype=total.dtype)[..., rows - 1 :]
            width = min(sums.shape[-1], reach)
            total[g : g + step, :, :width] += sums[..., :width]
    return total.flatten(0, 1)
