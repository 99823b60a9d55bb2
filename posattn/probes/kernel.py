"""The attention kernel: where a layer looks, averaged over documents (and heads).

`A[i,j]` is the mean weight of source j in target i. Only real query rows count, each row with its own number of
documents, and positions count real tokens. An attention sink (a learned extra column) takes weight away: the rows'
mean sum is kept as `row_mass`, the mean missing mass of each head as `sink_mass`, and the rows themselves are
renormalised to sum to 1, as a rollout needs them (which also removes the rounding of patterns held in bfloat16).

The pattern is summed over documents and heads first, in float32, and only that [N,N] sum is added to the float64
total, so neither time nor memory grows with the number of heads unless `per_head` asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import HookError, NothingMeasuredError
from posattn.models.base import Batch, Model, Point
from posattn.probes.base import Probe, expect_shape
from posattn.probes.statistics import Aligner, Moments, Pending, Sums
from posattn.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels(Result):
    """Attention kernels [T,N,N], or [T,H,N,N] when measured per head; rows sum to 1.

    `row_mass` [T,N] or [T,H,N] is what the rows summed to before (1 without a sink); `sink_mass` [T,H] the mean mass
    that goes to a head's sink; `counts` [N] the number of documents behind each row.
    """

    kind: ClassVar[str] = "kernels"

    kernels: Float[Tensor, "t *h n n"]
    row_mass: Float[Tensor, "t *h n"]
    sink_mass: Float[Tensor, "t h"]
    counts: Int[Tensor, " n"]
    documents: int

    @property
    def per_head(self) -> bool:
        """Whether the heads were kept apart."""
        return self.kernels.dim() == 4

    def to_dataframe(self) -> pd.DataFrame:
        """The last row of every kernel: columns layer, head (when kept), position, value."""
        return last_rows(self.kernels)

    def plot(self, ax: Any = None, layer: int = 0, head: int | None = None) -> Any:
        """One kernel as a heat map; the mean over heads unless `head` is given."""
        from posattn import plotting

        kernel = self.kernels[layer]
        if kernel.dim() == 3:
            kernel = kernel.mean(0) if head is None else kernel[head]
        title = f"layer {layer}" + ("" if head is None else f", head {head}")
        return plotting.heatmap(plotting.axes(ax), kernel, x="source position", y="target position", title=title)


def last_rows(kernels: Float[Tensor, "t *h n n"]) -> pd.DataFrame:
    """The last row of every kernel as a tidy table."""
    import pandas as pd

    rows = kernels[..., -1, :]
    names = ["layer", "head", "position"] if rows.dim() == 3 else ["layer", "position"]
    index = pd.MultiIndex.from_product([range(size) for size in rows.shape], names=names)
    return pd.DataFrame({"value": rows.flatten().tolist()}, index=index).reset_index()


class KernelProbe(Probe):
    """Measures the attention kernel of every layer; `per_head=True` keeps the heads apart."""

    name: ClassVar[str] = "kernel"

    def __init__(self, per_head: bool = False) -> None:
        self.per_head = per_head
        self._align = Aligner()
        self._pending = Pending()
        self._sums: list[Sums] = []  # [n,n] or [h,n,n], on the layer's device
        self._counts = Sums(grow_axes=1)  # [n] documents behind each row
        self._sinks: list[Moments] = []  # [h]
        self._heads: list[int] = []
        self._has_sink: list[bool] = []

    @property
    def needs(self) -> frozenset[Point]:
        return frozenset({"pattern"})

    @property
    def documents(self) -> int:
        return 0 if self._counts.total is None else int(self._counts.total[0])

    def settings(self) -> dict[str, Any]:
        return {"per_head": self.per_head}

    def begin(self, model: Model) -> None:
        self._check_layers(len(self._sums), model)
        self._pending.clear()
        self._heads = [layer.n_heads for layer in model.layers]
        if self.per_head and len(set(self._heads)) > 1:
            raise HookError(f"per-head kernels need equally many heads in every layer, the model has {self._heads}")
        self._has_sink = [model.scheme(t, 2).sinks is not None for t in range(model.n_layers)]
        if not self._sums:
            self.restart({})

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        pattern = record["pattern"]
        expect_shape("pattern", layer, pattern, batch, square=True)
        if pattern.shape[1] != self._heads[layer]:
            raise HookError(f"layer {layer}: the pattern has {pattern.shape[1]} heads, not {self._heads[layer]}")
        dtype = torch.float64 if pattern.dtype == torch.float64 else torch.float32
        alignment = self._align(batch.mask)
        axes = 0 if self.per_head else (0, 1)
        sink = self._has_sink[layer]
        if alignment.full:
            total = pattern.sum(axes, dtype=dtype)
            mass = pattern.sum(-1, dtype=dtype).mean(-1) if sink else None  # [b,h]
        else:
            shape = (pattern.shape[1],) if self.per_head else ()
            total = torch.zeros(*shape, alignment.width, alignment.width, dtype=dtype, device=pattern.device)
            rows = []
            for b in range(pattern.shape[0]):
                # rows and columns of padding are left out, not zeroed: they may hold anything, NaN included
                real = alignment.indices(b).to(pattern.device)
                block = pattern[b].index_select(1, real).index_select(2, real)
                total[..., : len(real), : len(real)] += block.to(dtype) if self.per_head else block.sum(0, dtype=dtype)
                if sink:
                    rows.append(block.sum(-1, dtype=dtype).mean(-1))
            mass = torch.stack(rows) if rows else None
        if finished := self._pending.put(layer, (total, mass), batch.mask, len(self._sums)):
            del total
            for sums, moments in zip(self._sums, self._sinks, strict=True):
                total, mass = finished.pop(0)  # gone once it is added: together they are as large as the sums
                sums.add(total)
                if mass is not None:
                    moments.update(1 - mass)
            self._counts.add(alignment.counts())

    def result(self, model: Model | None = None) -> Kernels:
        if not self.documents:
            raise NothingMeasuredError("the kernel probe saw no document: run the model while the probe is attached")
        counts = self._counts.value
        kernels, masses = [], []
        for sums, heads in zip(self._sums, self._heads, strict=True):
            mean = sums.value / counts[:, None]
            mean = mean if self.per_head else mean / heads
            mass = mean.sum(-1, keepdim=True)
            # a row without any mass (everything in the sink) stays empty rather than becoming NaN
            kernels.append((mean / torch.where(mass == 0, torch.ones_like(mass), mass)).float())
            masses.append(mass[..., 0])
        width = max(self._heads)
        sink = torch.stack([torch.nn.functional.pad(s.mean, (0, width - s.mean.shape[0])) for s in self._sinks])
        return Kernels(
            kernels=torch.stack(kernels),
            row_mass=torch.stack(masses),
            sink_mass=sink,
            counts=counts.long(),
            documents=self.documents,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        parts: dict[str, Moments | Sums] = {"count": self._counts}
        parts |= {f"sum.{t}": one for t, one in enumerate(self._sums)}
        return parts | {f"sink.{t}": one for t, one in enumerate(self._sinks)}

    def facts(self) -> dict[str, Tensor]:
        return {"heads": torch.tensor(self._heads)}

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        if facts:
            self._heads = facts["heads"].tolist()
        layers = range(len(self._heads))
        self._sums = [Sums(grow_axes=2) for _ in layers]
        self._counts = Sums(grow_axes=1)
        self._sinks = [Moments((heads,)) for heads in self._heads]
