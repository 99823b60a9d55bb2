"""The attention kernel of long contexts: head-mean and document-mean, added up tile by tile.

`KernelProbe` reads the pattern, [heads, N, N] numbers a document. Here the queries and keys are read as they enter
their product, and blocks of weights (`posattn.models.tiles`; on CUDA a Triton kernel) are added to the running sum as
soon as they are made. What remains is the sum itself: whole, [N,N], or binned.

**Binned** (`bins=w`, bins of w neighbouring positions): the coarse kernel

    A_c[I,J] = mean over the rows i of bin I of Σ_{j ∈ J} A[i,j]

is row-stochastic and lower triangular again. When Σ_{j ∈ J} A[i,j] is the same for all rows i of a bin, for every J
(which holds for block-constant kernels; a chain is then called lumpable), the coarse rollout is exact: it is the
rollout of A, summed over bins. In general row i of A strays from its bin by

    δ_i = ½ Σ_J |Σ_{j ∈ J} A[i,j] − A_c[I,J]|

and by telescoping the product the coarse profile is off by at most Σ_t λ_t max_i δ_i⁽ᵗ⁾ in total variation. `strays`
[T,M] is the mean of δ over the rows of a bin and over documents, `worst_strays` [T] that of the worst row; taking the
mean over documents after the distance can only enlarge them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import HookError, InputError
from posattn.models.base import Batch, Model, Point, PositionScheme
from posattn.models.positions import real_positions, rotate
from posattn.probes.base import expect_shape
from posattn.probes.kernel import KernelProbe, Kernels
from posattn.probes.kernel_mean import add_document, by_bin
from posattn.probes.statistics import Moments, Sums


@dataclasses.dataclass(frozen=True, eq=False)
class BinnedKernels(Kernels):
    """Coarse kernels [T,M,M] of bins of `width` positions; see the module docstring.

    `counts` [M] is the number of rows (documents × positions) behind each coarse row. `strays` [T,M] and `worst_strays`
    [T] say how far rows are from the mean row of their bin.
    """

    kind: ClassVar[str] = "binned_kernels"

    strays: Float[Tensor, "t m"]
    worst_strays: Float[Tensor, " t"]
    width: int

    def binning_error(self, mixing: Float[Tensor, " t"]) -> float:
        """Bound Σ_t λ_t max_i δ_i on the total variation by which binning changes the last row of the rollout.

        Above 1 it says nothing: a total variation is at most 1.
        """
        return float((mixing.to(self.worst_strays) * self.worst_strays).sum())


class StreamedKernelProbe(KernelProbe):
    """Measures head-mean kernels without ever holding a pattern; `bins` gives coarse ones. Same results otherwise."""

    def __init__(self, bins: int | None = None) -> None:
        if bins is not None and bins < 1:
            raise InputError(f"bins must be at least 1 position wide, got {bins}")
        super().__init__(per_head=False)
        self.bins = bins
        self._model: Model | None = None
        self._turned = True  # whether the model hands over q and k as they enter the product
        self._schemes: dict[tuple[int, int], PositionScheme] = {}
        self._stray: list[Sums] = []  # [n] sums over documents of δ
        self._length: tuple[Tensor, int] | None = None

    @property
    def needs(self) -> frozenset[Point]:
        return frozenset({"q_rot", "k_rot", "lse"}) if self._turned else frozenset({"q", "k"})

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "streamed": True, "bins": self.bins}

    def begin(self, model: Model) -> None:
        self._turned = model.adapter == "plain"
        self._model = model
        self._schemes.clear()
        super().begin(model)

    def _scheme(self, layer: int, mask: Tensor) -> PositionScheme:
        assert self._model is not None
        if self._length is None or self._length[0] is not mask:
            self._length = (mask, int(mask.sum(-1).max()))
        length = self._length[1]
        if not self._turned:  # tables may follow the length, and the passes before
            return self._model.scheme(layer, length)
        if (layer, length) not in self._schemes:
            self._schemes[layer, length] = self._model.scheme(layer, length)
        return self._schemes[layer, length]

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        q, k = (record["q_rot"], record["k_rot"]) if self._turned else (record["q"], record["k"])
        for name, tensor in (("queries", q), ("keys", k)):
            expect_shape(name, layer, tensor, batch)
        if q.shape[2] != self._heads[layer]:
            raise HookError(f"layer {layer}: the queries have {q.shape[2]} heads, not {self._heads[layer]}")
        scheme = self._scheme(layer, batch.mask)
        if not self._turned and scheme.rotary is not None:
            positions = real_positions(batch.mask)[..., None]
            q, k = rotate(q, scheme.rotary, positions), rotate(k, scheme.rotary, positions)
        lse = record.get("lse")
        lse = None if lse is None or not lse.numel() else lse
        alignment = self._align(batch.mask)
        n, step = alignment.width, self.bins
        size = n if step is None else -(-n // step)
        total = torch.zeros(size, size, device=q.device)
        stray = torch.zeros(n if step is not None else 0, device=q.device)
        masses = []
        add = _adder(q)
        for row in range(q.shape[0]):
            parts: list[Any] = [q[row], k[row], None if lse is None else lse[row]]
            if not alignment.full:
                real = alignment.indices(row).to(q.device)
                parts = [None if part is None else part.index_select(0, real) for part in parts]
            masses.append(add(*parts, scheme, total, stray, step))
        mass = torch.stack(masses) if self._has_sink[layer] else None
        if finished := self._pending.put(layer, (total, mass, stray), batch.mask, len(self._sums)):
            del total, stray
            for t in range(len(finished)):
                total, mass, stray = finished.pop(0)  # gone once it is added: together they are as large as the sums
                self._sums[t].add(total)
                if mass is not None:
                    self._sinks[t].update(mass)
                if step is not None:
                    self._stray[t].add(stray)
            self._counts.add(alignment.counts())

    def result(self, model: Model | None = None) -> Kernels:
        if self.bins is None or not self.documents:
            return super().result(model)
        rows = self._counts.value
        size = -(-len(rows) // self.bins)
        counts = by_bin(rows, self.bins)
        kernels, masses, strays, worst = [], [], [], []
        for sums, stray, heads in zip(self._sums, self._stray, self._heads, strict=True):
            mean = sums.value / counts[:, None] / heads
            mass = mean.sum(-1, keepdim=True)
            kernels.append((mean / torch.where(mass == 0, torch.ones_like(mass), mass)).float())
            masses.append(mass[:, 0])
            off = stray.value
            strays.append(by_bin(off, self.bins) / counts)
            worst.append((off / rows).max())
        width = max(self._heads)
        sink = torch.stack([torch.nn.functional.pad(s.mean, (0, width - s.mean.shape[0])) for s in self._sinks])
        assert kernels[0].shape == (size, size)
        return BinnedKernels(
            kernels=torch.stack(kernels),
            row_mass=torch.stack(masses),
            sink_mass=sink,
            counts=counts.long(),
            documents=self.documents,
            strays=torch.stack(strays),
            worst_strays=torch.stack(worst),
            width=self.bins,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        binned = {} if self.bins is None else {f"stray.{t}": one for t, one in enumerate(self._stray)}
        return super().statistics() | binned

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        super().restart(facts)
        self._stray = [Sums(grow_axes=1) for _ in self._sums]


def coarser(kernels: Float[Tensor, "t m m"], counts: Tensor, factor: int = 2) -> Float[Tensor, "t k k"]:
    """Kernels of bins `factor` times as wide, from coarse kernels and the rows (`counts` [M]) behind each of theirs."""
    weights = counts.double()
    sums = by_bin((by_bin(kernels.double(), factor) * weights[:, None]).mT, factor).mT
    return (sums / by_bin(weights, factor)[:, None]).to(kernels.dtype)


def _adder(q: Tensor) -> Any:
    if q.is_cuda and importlib.util.find_spec("triton") is not None:
        from posattn.probes._triton_kernel_mean import add_document_triton

        return add_document_triton
    return add_document
