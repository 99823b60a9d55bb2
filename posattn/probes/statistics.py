"""Running statistics: what a probe keeps instead of the data.

Memory does not grow with the number of batches; two statistics merge into the one that all data would have given;
`state` and `load` move them to and from named tensors. Neither the batch size nor the order of documents
changes a result beyond rounding: everything is added up in float64 (on devices that lack it, in float32 with a
compensation term).

* `Moments`: mean and variance by the pairwise update of Chan, Golub and LeVeque (1979): for two groups with counts n,
m,
  mean = mean_a + δ m/(n+m), M2 = M2_a + M2_b + δ² nm/(n+m), δ = mean_b − mean_a.
* `Sums`: plain sums of tensors that are large, `[positions, ...]`-shaped, and may grow with the longest document.
* `Alignment`: where the real tokens of a padded batch are, so that position = index among the real tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posattn.errors import InputError

#: numbers that are widened to float64 at a time
_WIDENED = 1 << 20


def accumulator(device: torch.device) -> torch.dtype:
    """The dtype in which running sums are kept on `device`."""
    return torch.float32 if device.type == "mps" else torch.float64


class Moments:
    """Count, mean and sum of squared deviations of `shape`-shaped values, entry by entry.

    The last axis is the position axis when `grows` is set: it is padded with empty entries when longer data arrives.
    """

    def __init__(self, shape: tuple[int, ...] = (), grows: bool = False) -> None:
        self.shape = tuple(shape)
        self.grows = grows
        self.count = torch.zeros(self.shape, dtype=torch.float64)
        self.mean = torch.zeros(self.shape, dtype=torch.float64)
        self.m2 = torch.zeros(self.shape, dtype=torch.float64)

    def update(self, values: Float[Tensor, "b *shape"], valid: Bool[Tensor, "b *shape"] | None = None) -> None:
        """Add `b` observations of every entry; entries where `valid` is False are not observations."""
        values = values.cpu().double()  # one after the other: some devices have no float64
        if valid is None:
            count = torch.full(values.shape[1:], float(values.shape[0]), dtype=torch.float64)
            mean = values.mean(0)
            m2 = (values - mean).square().sum(0)
        else:
            valid = valid.cpu().expand(values.shape)
            values = values.where(valid, 0.0)  # what is not valid may be NaN
            count = valid.sum(0).to(torch.float64)
            mean = values.sum(0) / count.clamp(min=1)
            m2 = (values - mean).where(valid, 0.0).square().sum(0)
        self._add(count, mean, m2)

    def merge(self, other: Moments) -> None:
        """Take in the observations of `other`."""
        self._add(other.count, other.mean, other.m2)

    def _add(self, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        if self.grows and count.shape[-1] != self.shape[-1]:
            width = max(count.shape[-1], self.shape[-1])
            self.count, self.mean, self.m2 = (_widen(t, width) for t in (self.count, self.mean, self.m2))
            count, mean, m2 = (_widen(t, width) for t in (count, mean, m2))
            self.shape = tuple(self.count.shape)
        if tuple(count.shape) != self.shape:
            raise InputError(f"statistics of shape {list(self.shape)} cannot take {list(count.shape)}")
        total = self.count + count
        share = count / total.clamp(min=1)
        delta = mean - self.mean
        self.m2 = self.m2 + m2 + delta.square() * self.count * share
        self.mean = self.mean + delta * share
        self.count = total

    @property
    def std(self) -> Tensor:
        """Standard deviation with the n−1 denominator; 0 where fewer than two observations were made."""
        return (self.m2 / (self.count - 1).clamp(min=1)).clamp(min=0).sqrt()

    def state(self, prefix: str) -> dict[str, Tensor]:
        """The statistics as named tensors."""
        return {f"{prefix}.count": self.count, f"{prefix}.mean": self.mean, f"{prefix}.m2": self.m2}

    def load(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Go on from what `state(prefix)` gave; from nothing where `tensors` does not hold it."""
        if f"{prefix}.count" in tensors:
            self.count, self.mean, self.m2 = (tensors[f"{prefix}.{part}"].clone() for part in ("count", "mean", "m2"))
            self.shape = tuple(self.count.shape)


class Sums:
    """A running sum of tensors whose last `grow_axes` axes may grow; lives where the data lives.

    Terms come in float32 (one batch's own sum) and are added to a float64 total. Where float64 is missing, the total
    is float32 with Kahan's compensation, which keeps the error independent of the number of batches.
    """

    def __init__(self, grow_axes: int = 0) -> None:
        self.grow_axes = grow_axes
        self.total: Tensor | None = None
        self._lost: Tensor | None = None

    def add(self, term: Float[Tensor, "..."]) -> None:
        """Add one batch's sum."""
        if self.total is None:
            self.total = torch.zeros_like(term, dtype=accumulator(term.device))
            if self.total.dtype == torch.float32:
                self._lost = torch.zeros_like(self.total)
        self._move(term.device)
        total = self._fit(term)
        if self._lost is None:
            _add(total, term)
            return
        part = self._lost[_corner(term, self.grow_axes)]
        corrected = term - part
        summed = total + corrected
        part.copy_((summed - total) - corrected)
        total.copy_(summed)

    def merge(self, other: Sums) -> None:
        """Take in the terms of `other`."""
        if other.total is not None:
            for part, sign in ((other.total, 1), (other._lost, -1)):
                if part is not None:
                    self.add(sign * (part if self.total is None else part.to(self.total.device)))

    def state(self, prefix: str) -> dict[str, Tensor]:
        """The sum as named tensors."""
        if self.total is None:
            return {}
        lost = {} if self._lost is None else {f"{prefix}.lost": self._lost}
        return {f"{prefix}.total": self.total, **lost}

    def load(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Go on from what `state(prefix)` gave, on the device of the next term; from nothing where there is none."""
        if f"{prefix}.total" in tensors:
            self.total = tensors[f"{prefix}.total"].clone()
            lost = tensors.get(f"{prefix}.lost")
            self._lost = None if lost is None else lost.clone()

    @property
    def value(self) -> Tensor:
        """The sum in float64 on the CPU; 0 before anything was added."""
        return torch.zeros((), dtype=torch.float64) if self.total is None else self.total.cpu().double()

    def _move(self, device: torch.device) -> None:
        """After `load`, the total is on the CPU: bring it to where the data is."""
        if self.total is None or self.total.device == device:
            return
        dtype = accumulator(device)
        self.total = self.total.to(device, dtype)
        if dtype == torch.float32:
            lost = torch.zeros_like(self.total) if self._lost is None else self._lost.to(device)
            self._lost = lost
        elif self._lost is not None:
            self.total, self._lost = self.total - self._lost.to(device, dtype), None

    def _fit(self, term: Tensor) -> Tensor:
        assert self.total is not None
        sizes = [max(a, b) for a, b in zip(self.total.shape, term.shape, strict=True)]
        if list(self.total.shape) != sizes:
            fixed = len(sizes) - self.grow_axes
            if list(self.total.shape[:fixed]) != sizes[:fixed]:
                raise InputError(f"sums of shape {list(self.total.shape)} cannot take {list(term.shape)}")
            for name in ("total", "_lost"):
                old = getattr(self, name)
                if old is not None:
                    new = old.new_zeros(sizes)
                    new[_corner(old, self.grow_axes)] = old
                    setattr(self, name, new)
        return self.total[_corner(term, self.grow_axes)]


def share(part: Tensor, whole: Tensor) -> Tensor:
    """part/whole, and 0 where the whole is 0."""
    nothing = whole == 0
    return torch.where(nothing, torch.zeros_like(part), part / torch.where(nothing, torch.ones_like(whole), whole))


def _add(total: Tensor, term: Tensor) -> None:
    """total += term, a few rows at a time where they are large: PyTorch widens the whole operand before it adds."""
    if term.dim() < 2 or term.numel() <= _WIDENED:
        total.add_(term)
        return
    rows = max(1, _WIDENED * term.shape[-2] // term.numel())
    for ours, theirs in zip(total.split(rows, -2), term.split(rows, -2), strict=True):
        ours.add_(theirs)


def _corner(term: Tensor, axes: int) -> tuple[Any, ...]:
    return (..., *(slice(0, size) for size in term.shape[term.dim() - axes :]))


def _widen(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


class Alignment:
    """The real tokens of a batch. `full`: there is no padding at all.

    `order` [b,n] lists each row's real positions first, in order; `valid` [b,n] says which entries of an aligned row
    are real; `lengths` [b] counts them.
    """

    def __init__(self, mask: Bool[Tensor, "b n"]) -> None:
        self.mask = mask
        self.full = bool(mask.all())
        self.lengths: Int[Tensor, " b"] = mask.sum(-1)
        self.valid = mask
        self.order: Tensor | None = None
        self.width = mask.shape[1]
        if not self.full:
            self.width = int(self.lengths.max())
            self.order = mask.logical_not().long().argsort(dim=-1, stable=True)[:, : self.width]
            self.valid = torch.arange(self.width, device=mask.device) < self.lengths[:, None]

    def rows(self, values: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        """Values by position among the real tokens; 0 beyond a row's length."""
        if self.order is None:
            return values
        return values.gather(1, self.order).where(self.valid, 0.0)

    def counts(self) -> Float[Tensor, " m"]:
        """How many rows reach each position, on the CPU."""
        if self.full:
            return torch.full((self.width,), float(self.mask.shape[0]))
        return (torch.arange(self.width) < self.lengths.cpu()[:, None]).sum(0).float()

    def indices(self, row: int) -> Int[Tensor, " m"]:
        """The real positions of one row."""
        return self.mask[row].nonzero()[:, 0]


class Aligner:
    """Builds one `Alignment` a batch, however many layers ask (asking a GPU whether there is padding is slow)."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._alignment: Alignment | None = None

    def __call__(self, mask: Bool[Tensor, "b n"]) -> Alignment:
        if self._alignment is None or self._mask is not mask:
            self._mask, self._alignment = mask, Alignment(mask)
        return self._alignment


class Pending:
    """What the layers of one forward pass left, until the last of them has reported.

    Only finished passes are counted: when a pass breaks off (out of memory, Ctrl-C) and the same documents are run
    again, they must not count twice in the layers that had already reported.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Any] = {}
        self._mask: Tensor | None = None

    def clear(self) -> None:
        """Forget an unfinished pass."""
        self._parts.clear()
        self._mask = None

    def put(self, layer: int, part: Any, mask: Tensor, layers: int) -> list[Any] | None:
        """Keep `part`; once the pass is complete, the parts of all layers. `mask` tells one pass from the next."""
        if mask is not self._mask or layer in self._parts:
            self._parts.clear()
            self._mask = mask
        self._parts[layer] = part
        if len(self._parts) < layers:
            return None
        parts = [self._parts[t] for t in sorted(self._parts)]
        self.clear()
        return parts
