"""Stochastic monotonicity of a kernel: later targets should look later.

For targets i < k and every j, Σ_{l≤j} A_il ≥ Σ_{l≤j} A_kl (the assumption under which arXiv 2602.16837 proves the
direction of each force). The worst violation is the largest Σ_{l≤j} (A_kl - A_il) over i < k and j. For each k only the
smallest earlier cumulative sum at j matters, so one pass over the rows with a running minimum finds it: O(N²) time for
N² weights, O(N) memory for a structured kernel (times the heads).

Single heads may violate it while their mean does not; the mean over heads is what the rollout uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.results import Provenance, Result, provenance
from posattn.rollout.dense import check_kernels
from posattn.rollout.kernels import StructuredKernel

if TYPE_CHECKING:
    import pandas as pd

_ROWS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Monotonicity(Result):
    """The worst violation of stochastic monotonicity, [...] over the kernels' leading dimensions, and where it is.

    `violation` is 0 for a monotone kernel; rounding alone gives up to about 1e-15. `earlier`, `later` and `cut` [...]
    are i, k and j of the worst case. `head_violation` [..., H] is the same for single heads, where asked for.
    """

    violation: Tensor
    earlier: Tensor
    later: Tensor
    cut: Tensor
    head_violation: Tensor | None = None
    provenance: Provenance = dataclasses.field(default_factory=dict)

    def holds(self, tolerance: float = 1e-9) -> Tensor:
        """Whether each kernel is monotone up to `tolerance`."""
        return self.violation <= tolerance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a kernel: kernel, violation, earlier, later, cut; with single heads, one row a head more."""
        import pandas as pd

        flat = {name: getattr(self, name).reshape(-1).tolist() for name in ("violation", "earlier", "later", "cut")}
        table = pd.DataFrame({"kernel": range(len(flat["violation"])), "head": "mean", **flat})
        if self.head_violation is None:
            return table.drop(columns="head")
        heads = self.head_violation.reshape(-1, self.head_violation.shape[-1]).tolist()
        single = [
            {"kernel": k, "head": str(h), "violation": value}
            for k, row in enumerate(heads)
            for h, value in enumerate(row)
        ]
        return pd.concat([table, pd.DataFrame(single)], ignore_index=True)

    def plot(self, ax: Any = None) -> Any:
        """The worst violation of each kernel (of each head, as points)."""
        from posattn import plotting

        axes = plotting.axes(ax)
        mean = self.violation.reshape(-1)
        if self.head_violation is not None:
            heads = self.head_violation.reshape(len(mean), -1)
            for index, row in enumerate(heads):
                axes.plot([index] * len(row), row.numpy(), ".", color="grey", label="one head" if index == 0 else None)
        axes.plot(range(len(mean)), mean.numpy(), "o", color=plotting.colour(0), label="mean over heads")
        return plotting.finish(axes, x="kernel", y="worst violation (mass)", legend=self.head_violation is not None)


def monotonicity(
    kernels: Tensor | StructuredKernel, length: int | None = None, *, per_head: bool = False
) -> Monotonicity:
    """The worst violation of stochastic monotonicity, and where it is.

    Args:
        kernels: A [..., N, N], or a structured kernel (its mean over heads is judged).
        length: N, needed with a structured kernel.
        per_head: judge single heads too. A tensor is then [..., H, N, N], and its mean over H is judged beside them.

    Raises:
        InputError: rows that do not sum to 1, a missing length, shapes that do not fit.
    """
    if isinstance(kernels, StructuredKernel):
        if length is None:
            raise InputError("a structured kernel has no length of its own: pass length=N")
        found = _structured(kernels, length)
        heads = None
        if per_head:
            heads = torch.stack([_structured(kernels.head(h), length)[0] for h in range(kernels.heads)], -1)
    else:
        if kernels.ndim < 2 + per_head or kernels.shape[-1] != kernels.shape[-2]:
            raise InputError(f"kernels must be [..., {'H, ' if per_head else ''}N, N], not {list(kernels.shape)}")
        if length is not None and length != kernels.shape[-1]:
            raise InputError(f"length={length}, but the kernels have {kernels.shape[-1]} positions")
        check_kernels(kernels.reshape(-1, *kernels.shape[-2:]))
        length = kernels.shape[-1]
        found = _dense(kernels.mean(-3) if per_head else kernels)
        heads = _dense(kernels)[0] if per_head else None
    violation, earlier, later, cut = found
    return Monotonicity(
        violation=violation,
        earlier=earlier,
        later=later,
        cut=cut,
        head_violation=heads,
        provenance=provenance(length=length),
    )


_Found = tuple[Tensor, Tensor, Tensor, Tensor]


def _dense(kernels: Float[Tensor, "*batch n n"]) -> _Found:
    n = kernels.shape[-1]
    exact = kernels.detach().double()
    return _worst(lambda a, b: exact[..., a:b, :], n, exact.shape[:-2], exact.device)


def _structured(kernel: StructuredKernel, length: int) -> _Found:
    ready = kernel.at(length)
    position = torch.arange(length, device=ready.device)
    return _worst(
        lambda a, b: ready.entries(position[a:b, None], position[None, :]), length, kernel.batch_shape, ready.device
    )


def _worst(rows: Callable[[int, int], Tensor], n: int, batch: torch.Size, device: Any) -> _Found:
    """The running minimum over earlier rows of the cumulative sums, and the largest excess over it."""
    least = torch.full((*batch, n), torch.inf, dtype=torch.float64, device=device)
    least_row = torch.zeros((*batch, n), dtype=torch.long, device=device)
    best = torch.zeros(batch, dtype=torch.float64, device=device)
    where = [torch.zeros(batch, dtype=torch.long, device=device) for _ in range(3)]
    for start, stop in _blocks(n):
        sums = rows(start, stop).cumsum(-1)
        joined = torch.cat([least.unsqueeze(-2), sums], -2)
        running, from_row = joined.cummin(-2)
        index = from_row + start - 1
        index = torch.where(from_row == 0, least_row.unsqueeze(-2), index)
        excess = (sums - running[..., :-1, :]).flatten(-2)  # row k against the least row before it
        value, place = excess.max(-1)
        better = value > best
        row, column = place // n, place % n
        before = index[..., :-1, :].flatten(-2).gather(-1, place.unsqueeze(-1)).squeeze(-1)
        best = torch.where(better, value, best)
        for slot, candidate in enumerate((before, row + start, column)):
            where[slot] = torch.where(better, candidate, where[slot])
        least, least_row = running[..., -1, :], index[..., -1, :]
    return best, where[0], where[1], where[2]


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, _ROWS):
        yield start, min(n, start + _ROWS)
