"""Attention kernels that an architecture implies, as a few numbers per head instead of N x N weights.

A head gives target i and source j the weight exp(s(i-j) + β [i=j]) over what its mask lets it see; the kernel is the
weighted mean over heads (arXiv 2602.16837, section 4, with the diagonal content term β; constant content adds the same
to every score of a row and cancels). With Z_i the log of row i's sum, a head is three parts,

    A = diag(e^(β+s(0)-Z))  +  diag(e^-Z) · strictly lower Toeplitz  +  diag(e^-Z) · strictly upper Toeplitz,

the last only within a prefix (or everywhere, without a causal mask). So p A and A x need one Toeplitz product each way:

* ALiBi and uniform heads, e^(-m d): the scan y_i = x_i + e^-m y_(i-1), in chunks of `CHUNK` positions by small matrix
  products and between chunks by carried sums. Every factor is at most 1, so nothing overflows; every sum has terms of
  one sign when x has, so nothing cancels. Time O(N·H), memory one tile. Where a row's sum has converged to double
  precision (m·i > `SATURATED`) the heads share one matrix, which is most of a long sequence.
* With a window the plain difference of two scans cancels. Sums over a window of W are instead put together from a
  suffix of one block of W and a prefix of the next (van Herk, Gil and Werman), which only ever adds.
* Any other score by distance: FFT. Its rounding error is absolute, so rows are grouped such that within a group the
  row sums differ by at most a factor `SPREAD`; a group that would be too small is summed directly. Scores that grow
  with distance without end make every group small and the product O(N²) in time (never in memory).

Everything is computed in float64 up to the coefficients and tables; the products run in the dtype of their argument
(FFTs always in float64).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError

CHUNK = 32
SATURATED = 45.0  # e^-45 is below half an ulp of 1
SPREAD = math.log(16.0)
_TILE = 1 << 20  # elements (batch x rows x heads x positions) worked on at a time
_DIRECT = 64  # rows summed directly where the FFT would have too few


@dataclasses.dataclass(frozen=True, eq=False)
class StructuredKernel:
    """A kernel by its parameters. Make one with `uniform_kernel`, `alibi_kernel` or `distance_kernel`.

    Leading dimensions of the parameters are batch dimensions and broadcast; in a rollout the last of them is the layer.

    Attributes:
        slopes: m [..., H], scores -m·|i-j|; or None.
        scores: s(d) [..., H, L] for sources d positions back; or None.
        ahead: s(d) [..., H, L] for sources d positions ahead (used in a prefix or without a causal mask).
        diagonal: β [..., H].
        weights: [..., H], summing to 1 over heads.
        window: how many keys are visible backwards, the query's own included; None for all.
        prefix: the first `prefix` positions see each other in both directions.
        full: everything sees everything (a prefix of any length).
    """

    slopes: Tensor | None
    scores: Tensor | None
    ahead: Tensor | None
    diagonal: Tensor
    weights: Tensor
    window: int | None = None
    prefix: int = 0
    full: bool = False

    @property
    def heads(self) -> int:
        """H, the number of heads averaged over."""
        return self.weights.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions, before heads."""
        shapes = [self.diagonal.shape[:-1], self.weights.shape[:-1]]
        if self.slopes is not None:
            shapes.append(self.slopes.shape[:-1])
        for table in (self.scores, self.ahead):
            if table is not None:
                shapes.append(table.shape[:-2])
        return torch.broadcast_shapes(*shapes)

    def layer(self, index: int) -> StructuredKernel:
        """The kernel of one layer: entry `index` of the last batch dimension (the kernel itself where it has none)."""
        if not self.batch_shape:
            return self

        def pick(value: Tensor, inner: int) -> Tensor:
            if value.ndim == inner:
                return value
            return value.select(-inner - 1, index if value.shape[-inner - 1] > 1 else 0)

        return self._each(pick)

    def head(self, index: int) -> StructuredKernel:
        """One head alone."""
        alone = self._each(lambda value, inner: value.narrow(-inner, index, 1))
        return dataclasses.replace(alone, weights=torch.ones_like(alone.weights))

    def to(self, device: torch.device | str) -> StructuredKernel:
        """The same kernel on another device."""
        return self._each(lambda value, inner: value.to(device))

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> StructuredKernel:
        """Every tensor changed; `change` is given it and how many dimensions follow its batch dimensions."""
        inner = {"slopes": 1, "scores": 2, "ahead": 2, "diagonal": 1, "weights": 1}
        values = {name: getattr(self, name) for name in inner}
        changed = {name: None if v is None else change(v, inner[name]) for name, v in values.items()}
        return dataclasses.replace(self, **changed)

    def at(self, length: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Applied:
        """The kernel made ready for one length, to be applied many times.

        Raises:
            InputError: no positions, or fewer distance scores than the length needs.
        """
        return Applied(self if device is None else self.to(device), length, dtype)

    def left(self, p: Float[Tensor, "*batch n"]) -> Float[Tensor, "*out n"]:
        """p A, without A: for p [..., Q, N] (or [N]) as in `p @ A`; leading dimensions broadcast with the kernel's."""
        return self.at(p.shape[-1], p.dtype, p.device).left(p)

    def right(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*out"]:
        """A x, without A: for x [..., N, K] (or [N]) as in `A @ x`; leading dimensions broadcast with the kernel's."""
        return self.at(x.shape[-2] if x.ndim > 1 else x.shape[0], x.dtype, x.device).right(x)

    def dense(self, length: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "*batch n n"]:
        """A [..., N, N] from its definition: the softmax of every head, averaged."""
        check_length(self, length)
        device = self.weights.device
        position = torch.arange(length, device=device)
        lag = position[:, None] - position[None, :]
        limit = length if self.window is None else self.window
        seen = (lag >= 0) & (lag < limit)
        block = length if self.full else min(self.prefix, length)
        if block:
            seen |= (lag < 0) & (lag > -limit) & (position < block)[:, None] & (position < block)[None, :]
        total = torch.zeros(*self.batch_shape, length, length, dtype=torch.float64, device=device)
        for head in range(self.heads):
            logits = self._score(head, lag).masked_fill(~seen, -math.inf)
            logits = logits + self.diagonal[..., head, None, None] * torch.eye(
                length, dtype=torch.float64, device=device
            )
            total = total + self.weights[..., head, None, None] * logits.softmax(-1)
        return total.to(dtype)

    def _score(self, head: int, lag: Int[Tensor, "*index"]) -> Float[Tensor, "*out"]:
        """s(lag) of one head; `lag` is negative for sources ahead."""
        if self.slopes is not None:
            return -self.slopes[..., head].reshape(*self.slopes.shape[:-1], *[1] * lag.ndim) * lag.abs()
        assert self.scores is not None
        last = self.scores.shape[-1] - 1
        back = self.scores[..., head, :][..., lag.abs().clamp(max=last)]
        if self.ahead is None:
            return back
        front = self.ahead[..., head, :][..., lag.abs().clamp(max=self.ahead.shape[-1] - 1)]
        return torch.where(lag >= 0, back, front)


# ---- constructors ---------------------------------------------------------------------------------------------------


def uniform_kernel(
    *,
    heads: int = 1,
    window: int | None = None,
    prefix: int = 0,
    full: bool = False,
    diagonal: Any = None,
    weights: Any = None,
) -> StructuredKernel:
    """Heads without positional encoding: equal weight for all that the mask shows, but for the diagonal content β.

    Args:
        heads: H, needed only with one β or weight for several heads.
        window: visible keys backwards, the query's own included; prefix: positions that see each other both ways;
            full: no causal mask.
        diagonal: β, a number or [..., H]; by default 0.
        weights: of the heads in the mean, [..., H] summing to 1; by default equal.

    Raises:
        InputError: a window below 1, a negative prefix, values of the wrong count, NaN.
    """
    for value in (diagonal, weights):
        if value is not None and heads == 1 and _numbers(value, "values").ndim > 0:
            heads = _numbers(value, "values").shape[-1]
    if heads < 1:
        raise InputError(f"heads must be at least 1, not {heads}")
    return _make(heads, window, prefix, full, diagonal, weights, slopes=torch.zeros(heads, dtype=torch.float64))


def alibi_kernel(
    slopes: Any,
    *,
    heads: int | None = None,
    window: int | None = None,
    prefix: int = 0,
    full: bool = False,
    diagonal: Any = None,
    weights: Any = None,
) -> StructuredKernel:
    """ALiBi heads, scores -m·|i-j| (arXiv 2108.12409).

    Args:
        slopes: m [..., H], at least 0 and finite, as they act on the softmax's argument.
        heads: H, to be checked against the slopes. The others are those of `uniform_kernel`.

    Raises:
        InputError: slopes negative, infinite or of another count than `heads`, and as `uniform_kernel`.
    """
    values = _numbers(slopes, "slopes")
    if values.ndim == 0:
        values = values.expand(heads or 1)
    if heads is not None and values.shape[-1] != heads:
        raise InputError(f"{values.shape[-1]} slopes for {heads} heads")
    if bool(((values < 0) | torch.isinf(values)).any()):
        raise InputError("ALiBi slopes must be finite and not negative")
    return _make(values.shape[-1], window, prefix, full, diagonal, weights, slopes=values)


def distance_kernel(
    scores: Any,
    ahead: Any = None,
    *,
    window: int | None = None,
    prefix: int = 0,
    full: bool = False,
    diagonal: Any = None,
    weights: Any = None,
) -> StructuredKernel:
    """Heads whose score depends on the distance alone, in any way.

    Args:
        scores: s(d) [..., H, L], d = 0 to L-1 positions back; -inf hides a distance (not distance 0).
        ahead: the same for d positions ahead (its entry 0 is not used); by default as `scores`. The others are those
            of `uniform_kernel`.

    Raises:
        InputError: NaN, +inf, a hidden distance 0, and as `uniform_kernel`.
    """
    tables: list[Tensor | None] = []
    for name, table in (("distance scores", scores), ("distance scores ahead", ahead)):
        values = None if table is None else _numbers(table, name)
        if values is not None:
            if values.ndim == 1:
                values = values[None]
            if values.ndim == 0 or values.shape[-1] == 0:
                raise InputError(f"{name} must be [..., H, L]")
            if bool((values == math.inf).any()):
                raise InputError(f"{name} hold +inf")
        tables.append(values)
    back, front = tables
    assert back is not None
    if bool(torch.isinf(back[..., 0]).any()):
        raise InputError("distance scores hide distance 0: row 0 would see nothing")
    if front is not None and front.shape[-2] != back.shape[-2]:
        raise InputError(f"distance scores are for {back.shape[-2]} heads, those ahead for {front.shape[-2]}")
    return _make(back.shape[-2], window, prefix, full, diagonal, weights, scores=back, ahead=front)


def _make(
    heads: int,
    window: int | None,
    prefix: int,
    full: bool,
    diagonal: Any,
    weights: Any,
    *,
    slopes: Tensor | None = None,
    scores: Tensor | None = None,
    ahead: Tensor | None = None,
) -> StructuredKernel:
    if window is not None and window < 1:
        raise InputError(f"a window of {window} shows nothing: it counts the query's own key, so it is at least 1")
    if prefix < 0:
        raise InputError(f"prefix must not be negative, not {prefix}")
    device = (slopes if slopes is not None else scores).device  # type: ignore[union-attr]
    beta = _per_head(0.0 if diagonal is None else diagonal, heads, "diagonal content", device)
    if bool(torch.isinf(beta).any()):
        raise InputError("diagonal content must be finite")
    shares = _per_head(1 / heads if weights is None else weights, heads, "head weights", device)
    if bool((shares < 0).any()) or bool(((shares.sum(-1) - 1).abs() > 1e-6).any()):
        raise InputError("head weights must not be negative and must sum to 1")
    kernel = StructuredKernel(slopes, scores, ahead, beta, shares, window, prefix, full)
    try:
        _ = kernel.batch_shape
    except RuntimeError as error:
        raise InputError(f"leading shapes of the kernel's parameters do not fit: {error}") from error
    return kernel


def _numbers(value: Any, name: str) -> Tensor:
    try:
        numbers = value.double() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} cannot be read as numbers: {error}") from error
    if bool(torch.isnan(numbers).any()):
        raise InputError(f"{name} hold NaN")
    return numbers


def _per_head(value: Any, heads: int, name: str, device: torch.device) -> Tensor:
    numbers = _numbers(value, name).to(device)
    if numbers.ndim == 0:
        return numbers.expand(heads)
    if numbers.shape[-1] != heads:
        raise InputError(f"{name} have {numbers.shape[-1]} values for {heads} heads")
    return numbers


def check_length(kernel: StructuredKernel, length: int) -> None:
    """Refuse a length that the kernel cannot be applied at.

    Raises:
        InputError: no positions, or fewer distance scores than the length needs.
    """
    if length < 1:
        raise InputError(f"length must be at least 1, not {length}")
    block = length if kernel.full else min(kernel.prefix, length)
    limit = length if kernel.window is None else min(kernel.window, length)
    for table, needed in ((kernel.scores, limit), (kernel.ahead if block else None, min(limit, block))):
        if table is not None and table.shape[-1] < needed:
            raise InputError(f"scores are given for {table.shape[-1]} distances, length {length} needs {needed}")


# ---- application ----------------------------------------------------------------------------------------------------


class Applied:
    """A structured kernel at one length and dtype: its row sums, scan tables and products.

    `left` and `right` are the products; `entries` gives single weights. All are exact up to rounding.
    """

    def __init__(self, kernel: StructuredKernel, length: int, dtype: torch.dtype = torch.float64) -> None:
        check_length(kernel, length)
        if not dtype.is_floating_point or dtype.itemsize < 4:
            raise InputError(f"structured kernels are applied in float32 or float64, not {dtype}")
        self.kernel, self.length, self.dtype = kernel, length, dtype
        self.device = kernel.weights.device
        self.block = length if kernel.full else min(kernel.prefix, length)
        reach = length - 1 if kernel.window is None else min(kernel.window, length) - 1
        self._low: _Geometric | _Toeplitz
        self._up: _Geometric | _Toeplitz | None = None
        if kernel.slopes is not None:
            self._low = _Geometric(kernel.slopes, reach, length, dtype)
            if self.block > 1:
                self._up = _Geometric(kernel.slopes, min(reach, self.block - 1), self.block, dtype)
        else:
            assert kernel.scores is not None
            self._low = _Toeplitz(kernel.scores, reach, length, dtype)
            if self.block > 1:
                front = kernel.scores if kernel.ahead is None else kernel.ahead
                self._up = _Toeplitz(front, min(reach, self.block - 1), self.block, dtype)
        self._own = kernel.diagonal + (0.0 if kernel.scores is None else kernel.scores[..., 0])
        self._diagonal: Tensor | None = None

    def diagonal(self) -> Float[Tensor, "*batch n"]:
        """A_ii, [..., N], float64."""
        if self._diagonal is None:
            parts = []
            for start, stop, _ in _spans(self.length, max(CHUNK, _TILE // self._size())):
                log_sum = self._log_sum(torch.arange(start, stop, device=self.device))
                share = self.kernel.weights[..., None] * torch.exp(self._own[..., None] - log_sum)
                parts.append(share.sum(-2))
            self._diagonal = torch.cat(parts, -1)
        return self._diagonal

    def entries(self, targets: Int[Tensor, "*#index"], sources: Int[Tensor, "*#index"]) -> Float[Tensor, "*out"]:
        """A at pairs of positions [...batch, *index], float64."""
        targets, sources = torch.broadcast_tensors(targets.to(self.device), sources.to(self.device))
        lag = targets - sources
        limit = self.length if self.kernel.window is None else self.kernel.window
        seen = (lag >= 0) & (lag < limit)
        if self.block:
            seen = seen | ((lag < 0) & (lag > -limit) & (targets < self.block) & (sources < self.block))
        log_sum = self._log_sum(targets.reshape(-1))
        total: Tensor | float = 0.0
        tail = [1] * lag.ndim
        for head in range(self.kernel.heads):
            row = log_sum[..., head, :].reshape(*log_sum.shape[:-2], *lag.shape)
            beta = self.kernel.diagonal[..., head]
            score = self.kernel._score(head, lag) + beta.reshape(*beta.shape, *tail) * (lag == 0)
            weight = self.kernel.weights[..., head]
            total = total + weight.reshape(*weight.shape, *tail) * torch.exp(score - row).masked_fill(~seen, 0.0)
        assert isinstance(total, Tensor)
        return total

    def left(self, p: Float[Tensor, "*batch n"]) -> Float[Tensor, "*out n"]:
        """p A for p [..., Q, N] or [N]."""
        if p.shape[-1] != self.length:
            raise InputError(f"a vector of {p.shape[-1]} positions for a kernel of length {self.length}")
        rows = p[None] if p.ndim == 1 else p
        out = self._apply(rows.to(self.dtype), "left")
        return out.squeeze(-2) if p.ndim == 1 else out

    def right(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*out"]:
        """A x for x [..., N, K] or [N]."""
        if x.shape[-2 if x.ndim > 1 else 0] != self.length:
            raise InputError(f"{x.shape[-2 if x.ndim > 1 else 0]} positions for a kernel of length {self.length}")
        columns = x[None] if x.ndim == 1 else x.transpose(-1, -2)
        out = self._apply(columns.to(self.dtype), "right")
        return out.squeeze(-2) if x.ndim == 1 else out.transpose(-1, -2)

    def _apply(self, rows: Tensor, side: str) -> Tensor:
        """Both products on vectors [..., Q, N], a few of the Q at a time so that memory stays bounded."""
        lead = torch.broadcast_shapes(rows.shape[:-2], self.kernel.batch_shape)
        rows = rows.expand(*lead, *rows.shape[-2:])
        per_row = math.prod(lead) * self.kernel.heads * (CHUNK if isinstance(self._low, _Geometric) else self.length)
        step = max(1, 4 * _TILE // per_row)
        diagonal = self.diagonal().to(self.dtype).unsqueeze(-2)
        pieces = []
        for part in rows.split(step, -2):
            out = part * diagonal
            out = out + getattr(self._low, side)(part, self._low_coefficients)
            if self._up is not None:
                # strictly upper is strictly lower read backwards, within the block
                mirrored = getattr(self._up, side)(part[..., : self.block].flip(-1), self._up_coefficients)
                out = out + torch.nn.functional.pad(mirrored.flip(-1), (0, self.length - self.block))
            pieces.append(out)
        return torch.cat(pieces, -2)

    def _size(self) -> int:
        return max(1, math.prod(self.kernel.batch_shape)) * self.kernel.heads

    def _log_sum(self, positions: Int[Tensor, " k"]) -> Float[Tensor, "*batch heads k"]:
        """Z_i, the log of each row's sum, for rows `positions`."""
        total = torch.logaddexp(self._own[..., None], self._low.log_sum(positions))
        if self._up is not None and bool((positions < self.block).any()):
            mirrored = (self.block - 1 - positions).clamp(min=0)
            total = torch.logaddexp(total, self._up.log_sum(mirrored))
        return total

    def _low_coefficients(
        self, positions: Int[Tensor, " k"], shift: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*batch heads k"]:
        """w_h exp(shift - Z_i), 0 for rows without anything below the diagonal; `shift` undoes a table's scaling."""
        return self._coefficients(positions, positions, shift)

    def _up_coefficients(
        self, positions: Int[Tensor, " k"], shift: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*batch heads k"]:
        """The same for the mirrored upper part; `positions` count backwards from the end of the block."""
        return self._coefficients(positions, self.block - 1 - positions, shift)

    def _coefficients(self, positions: Tensor, rows: Tensor, shift: Tensor) -> Tensor:
        value = self.kernel.weights[..., None] * torch.exp(shift - self._log_sum(rows))
        return torch.where((positions > 0) & (self._low.reach > 0), value, torch.zeros_like(value)).to(self.dtype)


_Coefficients = Callable[[Tensor, Tensor], Tensor]


def _spans(length: int, step: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, is last) of consecutive tiles."""
    for start in range(0, length, step):
        yield start, min(length, start + step), start + step >= length


class _Geometric:
    """Strictly lower Toeplitz e^(-m(d-1)), d = 1 to `reach`, with coefficients per row; summed over heads."""

    def __init__(self, slopes: Tensor, reach: int, length: int, dtype: torch.dtype) -> None:
        self.slopes, self.reach, self.length, self.dtype = slopes, reach, length, dtype
        self.windowed = reach < length - 1
        least = float(slopes.detach().min())
        limit = SATURATED / least if least > 0 else math.inf
        #: from this row on every head's sum has converged
        self.saturated = math.ceil(min(limit, float(length))) + 1
        self._cache: dict[tuple[int, int], Tensor] = {}
        self._cached = 0
        self._hop_cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._merged: Tensor | None = None
        if not self.windowed:
            self._build_tables()

    def _build_tables(self) -> None:
        size = min(CHUNK, self.length)
        index = torch.arange(size, device=self.slopes.device, dtype=torch.float64)
        m = self.slopes
        gap = index[:, None] - index[None, :] - 1
        #: [..., H, C, C]: from k to an earlier j of the same chunk, e^(-m(k-j-1))
        self.within = torch.exp(-m[..., None, None] * gap.clamp(min=0)).tril(-1).to(self.dtype)
        #: [..., H, C]: e^(-m k)
        self.powers = torch.exp(-m[..., None] * index).to(self.dtype)

    def log_sum(self, positions: Tensor) -> Tensor:
        """log Σ_{d=1..min(i, reach)} e^(-m d), -inf for nothing."""
        reached = positions.clamp(max=self.reach)
        count = reached.clamp(min=1).double()  # gradients of log 0 would be NaN
        m = self.slopes[..., None]
        safe = torch.where(m > 0, m, torch.ones_like(m))
        ratio = torch.where(m > 0, torch.expm1(-safe * count) / torch.expm1(-safe), count)
        return torch.where(reached > 0, torch.log(ratio) - m, -math.inf)

    def _coefficients(self, start: int, stop: int, make: _Coefficients) -> Tensor:
        """[..., H, L] for a tile of rows, or [..., H, 1] where they have all converged."""
        if start >= self.saturated:
            start = stop = self.saturated
        if (start, stop) not in self._cache:
            first = min(start, self.length - 1)
            last = first + 1 if start >= self.saturated else min(stop, self.length)
            rows = torch.arange(first, last, device=self.slopes.device)
            value = make(rows, -self.slopes[..., None])
            if last < stop and start < self.saturated:  # padding
                value = torch.nn.functional.pad(value, (0, stop - last))
            if self._cached + value.numel() > 1 << 25:
                return value
            self._cache[start, stop] = value
            self._cached += value.numel()
        return self._cache[start, stop]

    def _tiles(self, rows: Tensor, make: _Coefficients) -> tuple[int, list[tuple[int, int]]]:
        """The chunk and the tiles (multiples of it). A tile is converged in all rows or treated as in none."""
        size = self.within.shape[-1]
        heads = max(self.within.shape[-3], 1)
        chunks = max(1, min(64, _TILE // max(1, rows[..., 0].numel() * heads * size)))
        step = chunks * size
        padded = -(-self.length // size) * size
        return size, [(a, b) for a, b, _ in _spans(padded, step)]

    def left(self, p: Tensor, make: _Coefficients) -> Tensor:
        """y_j = Σ_h Σ_{i>j} p_i c_hi e^(-m_h(i-j-1)) for p [..., Q, N]: tiles from the last to the first."""
        if self.reach == 0 or self.length == 1:
            return torch.zeros_like(p)
        if self.windowed:
            return self._windowed_left(p, make)
        size, tiles = self._tiles(p, make)
        padded = torch.nn.functional.pad(p, (0, tiles[-1][1] - self.length))
        carry: Tensor | None = None  # [..., Q, H]: Σ_{i ≥ end of tile} q_i e^(-m(i - end))
        pieces = []
        for start, stop in reversed(tiles):
            c = self._coefficients(start, stop, make)
            block = padded[..., start:stop].unflatten(-1, (-1, size))  # [..., Q, n_chunks, C]
            count = block.shape[-2]
            if c.shape[-1] == 1:  # converged: the heads' matrices add up
                merged = self._merge(c)
                out = torch.einsum("...qck,...kj->...qcj", block, merged)
                sums = torch.einsum("...qck,...hk->...qhc", block, c * self.powers)
            else:
                q = block.unsqueeze(-3) * c.unflatten(-1, (-1, size)).unsqueeze(-4)  # [..., Q, H, n_chunks, C]
                out = torch.einsum("...qhck,...hkj->...qcj", q, self.within)
                sums = torch.einsum("...qhck,...hk->...qhc", q, self.powers)
            # carried into chunk c, from later chunks and later tiles
            hop, far = self._hops(count, size)
            arriving = torch.einsum("...qhc,...hcd->...qhd", sums, hop)
            if carry is not None:
                arriving = arriving + carry[..., None] * far.flip(-1).unsqueeze(-3)
            out = out + torch.einsum("...qhc,...hj->...qcj", arriving, self.powers.flip(-1))
            total = (sums * far.unsqueeze(-3)).sum(-1)
            if carry is not None:
                decay = torch.exp(-self.slopes * (count * size)).to(self.dtype)
                total = total + carry * decay.unsqueeze(-2)
            carry = total
            pieces.append(out.flatten(-2))
        return torch.cat(pieces[::-1], -1)[..., : self.length]

    def right(self, x: Tensor, make: _Coefficients) -> Tensor:
        """y_i = Σ_h c_hi Σ_{j<i} e^(-m_h(i-j-1)) x_j for x [..., Q, N]: tiles from the first to the last."""
        if self.reach == 0 or self.length == 1:
            return torch.zeros_like(x)
        if self.windowed:
            return self._windowed_right(x, make)
        size, tiles = self._tiles(x, make)
        padded = torch.nn.functional.pad(x, (0, tiles[-1][1] - self.length))
        carry: Tensor | None = None  # [..., Q, H]: Σ_{j < start of tile} x_j e^(-m(start-1-j))
        pieces = []
        for start, stop in tiles:
            c = self._coefficients(start, stop, make)
            block = padded[..., start:stop].unflatten(-1, (-1, size))
            count = block.shape[-2]
            hop, far = self._hops(count, size)
            sums = torch.einsum("...qck,...hk->...qhc", block, self.powers.flip(-1))
            arriving = torch.einsum("...qhd,...hcd->...qhc", sums, hop)
            if carry is not None:
                arriving = arriving + carry[..., None] * far.unsqueeze(-3)
            if c.shape[-1] == 1:
                merged = self._merge(c)
                out = torch.einsum("...qcj,...kj->...qck", block, merged)
                out = out + torch.einsum("...qhc,...hk->...qck", arriving, c * self.powers)
            else:
                y = torch.einsum("...qcj,...hkj->...qhck", block, self.within)
                y = y + arriving[..., None] * self.powers.unsqueeze(-2).unsqueeze(-4)
                out = (y * c.unflatten(-1, (-1, size)).unsqueeze(-4)).sum(-3)
            total = (sums * far.flip(-1).unsqueeze(-3)).sum(-1)
            if carry is not None:
                total = total + carry * torch.exp(-self.slopes * (count * size)).to(self.dtype).unsqueeze(-2)
            carry = total
            pieces.append(out.flatten(-2))
        return torch.cat(pieces, -1)[..., : self.length]

    def _merge(self, c: Tensor) -> Tensor:
        """Σ_h c_h e^(-m_h(k-j-1)) [..., C, C]: the same in every converged tile."""
        if self._merged is None:
            self._merged = (c[..., None] * self.within).sum(-3)
        return self._merged

    def _hops(self, count: int, size: int) -> tuple[Tensor, Tensor]:
        """[..., H, K, K] e^(-m C (c'-c-1)) for c' > c, and [..., H, K] e^(-m C c)."""
        if count not in self._hop_cache:
            self._hop_cache[count] = self._build_hops(count, size)
        return self._hop_cache[count]

    def _build_hops(self, count: int, size: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(count, device=self.slopes.device, dtype=torch.float64)
        step = self.slopes * size
        hop = torch.exp(-step[..., None, None] * (index[:, None] - index[None, :] - 1).clamp(min=0)).tril(-1)
        return hop.to(self.dtype), torch.exp(-step[..., None] * index).to(self.dtype)

    def _windowed_left(self, p: Tensor, make: _Coefficients) -> Tensor:
        rows = torch.arange(self.length, device=p.device)
        c = make(rows, -self.slopes[..., None])
        total = torch.zeros_like(p)
        for a, b in self._head_groups(p):
            q = p.unsqueeze(-2) * c[..., a:b, :].unsqueeze(-3)
            total = total + _window_sum(q.flip(-1), self.slopes[..., a:b], self.reach).flip(-1).sum(-2)
        return total

    def _windowed_right(self, x: Tensor, make: _Coefficients) -> Tensor:
        rows = torch.arange(self.length, device=x.device)
        c = make(rows, -self.slopes[..., None])
        total = torch.zeros_like(x)
        for a, b in self._head_groups(x):
            spread = x.unsqueeze(-2).expand(*x.shape[:-1], b - a, x.shape[-1])
            y = _window_sum(spread, self.slopes[..., a:b], self.reach)
            total = total + (y * c[..., a:b, :].unsqueeze(-3)).sum(-2)
        return total

    def _head_groups(self, rows: Tensor) -> list[tuple[int, int]]:
        heads = self.slopes.shape[-1]
        step = max(1, 4 * _TILE // max(1, rows.numel()))
        return [(a, b) for a, b, _ in _spans(heads, step)]


def _window_sum(
    u: Float[Tensor, "*batch q heads n"], slopes: Float[Tensor, "*#batch heads"], reach: int
) -> Float[Tensor, "*batch q heads n"]:
    """Σ_{d=1..reach} e^(-m(d-1)) u_(i-d), from prefixes and suffixes of blocks of `reach`: only additions."""
    n = u.shape[-1]
    blocks = -(-(n + reach) // reach)
    padded = torch.nn.functional.pad(u, (reach, blocks * reach - n - reach)).unflatten(-1, (blocks, reach))
    padded = padded.transpose(-2, -3)  # [..., blocks, H, W]
    offset = torch.arange(reach, device=u.device, dtype=torch.float64)
    decay = slopes[..., None, None, :]  # [..., 1 (Q), 1 (blocks), H]
    rising = torch.exp(-decay[..., None] * offset).to(u.dtype)  # e^(-m o)
    suffix = (padded * rising.flip(-1)).flip(-1).cumsum(-1).flip(-1) * rising
    prefix = _decayed_cumsum(padded, decay)
    ahead = torch.nn.functional.pad(prefix[..., 1:, :, :-1], (1, 0))  # the first o entries of the next block
    joined = suffix[..., :-1, :, :] + ahead
    return joined.transpose(-2, -3).flatten(-2)[..., :n]


def _decayed_cumsum(x: Float[Tensor, "*batch heads n"], slopes: Float[Tensor, "*#batch heads"]) -> Tensor:
    """y_i = x_i + e^-m y_(i-1), in chunks, recursively over the sums of the chunks."""
    n = x.shape[-1]
    size = min(n, CHUNK)
    index = torch.arange(size, device=x.device, dtype=torch.float64)
    gap = (index[:, None] - index[None, :]).clamp(min=0)
    table = torch.exp(-slopes[..., None, None] * gap).tril().to(x.dtype)  # [..., H, C, C]
    if n <= size:
        return torch.einsum("...hk,...hjk->...hj", x, table)
    chunks = -(-n // size)
    block = torch.nn.functional.pad(x, (0, chunks * size - n)).unflatten(-1, (chunks, size))
    local = torch.einsum("...hck,...hjk->...hcj", block, table)
    carried = _decayed_cumsum(local[..., -1], slopes * size)
    arriving = torch.nn.functional.pad(carried[..., :-1], (1, 0))
    reach = torch.exp(-slopes[..., None] * (index + 1)).to(x.dtype)
    return (local + arriving[..., None] * reach[..., None, :]).flatten(-2)[..., :n]


class _Toeplitz:
    """Strictly lower Toeplitz e^(s(d)), d = 1 to `reach`, with coefficients per row; summed over heads, by FFT."""

    def __init__(self, scores: Tensor, reach: int, length: int, dtype: torch.dtype) -> None:
        self.reach, self.length, self.dtype = reach, length, dtype
        heads = scores.shape[:-1]
        fill = torch.full((*heads, 1), -math.inf, dtype=torch.float64, device=scores.device)
        tail = torch.full((*heads, length - 1 - reach), -math.inf, dtype=torch.float64, device=scores.device)
        #: s(d) with nothing at d = 0 and beyond the window
        self.scores = torch.cat([fill, scores[..., 1 : reach + 1], tail], -1)
        self.sums = torch.logcumsumexp(self.scores, -1)
        self.groups = self._group()

    def log_sum(self, positions: Tensor) -> Tensor:
        """log Σ_{d=1..min(i, reach)} e^s(d), -inf for nothing."""
        return self.sums[..., positions]

    def _group(self) -> list[tuple[int, int, bool]]:
        """(first row, end, by FFT) where a head's row sums in an FFT group are within a factor e^SPREAD."""
        sums = self.sums.reshape(-1, self.length)
        groups, stop = [], self.length
        while stop > 1:
            # row sums never fall from one row to the next, so the rows near enough to the last are its tail
            last = sums[:, stop - 1 : stop]
            near = ((sums[:, :stop] >= last - SPREAD) | (last == -math.inf)).all(0)
            start = max(1, int(near.int().argmax()))
            fast = stop - start > _DIRECT
            start = start if fast else max(1, stop - _DIRECT)
            groups.append((start, stop, fast))
            stop = start
        return groups

    def left(self, p: Tensor, make: _Coefficients) -> Tensor:
        """y_j = Σ_h Σ_{i>j} p_i c_hi e^(s_h(i-j)) for p [..., Q, N]."""
        total = torch.zeros(p.shape, dtype=torch.float64, device=p.device)
        for start, stop, fast in self.groups:
            rows = torch.arange(start, stop, device=p.device)
            part = p[..., start:stop].double()
            if fast:
                scale = self._scale(stop)
                size = _good_size(2 * stop)
                table = torch.fft.rfft(torch.exp(self.scores[..., :stop] - scale), size)
                q = part.unsqueeze(-2) * make(rows, scale).double().unsqueeze(-3)
                q = torch.nn.functional.pad(q, (start, 0))
                joined = (torch.fft.rfft(q, size) * table.conj().unsqueeze(-3)).sum(-2)
                piece = torch.fft.irfft(joined, size)[..., :stop]
            else:
                piece = torch.einsum("...qi,...ij->...qj", part, self._slab(start, stop, rows, make))
            total = total + torch.nn.functional.pad(piece, (0, self.length - stop))
        return total.to(p.dtype)

    def right(self, x: Tensor, make: _Coefficients) -> Tensor:
        """y_i = Σ_h c_hi Σ_{j<i} e^(s_h(i-j)) x_j for x [..., Q, N]."""
        pieces = []
        for start, stop, fast in self.groups:
            rows = torch.arange(start, stop, device=x.device)
            part = x[..., :stop].double()
            if fast:
                scale = self._scale(stop)
                size = _good_size(2 * stop)
                table = torch.fft.rfft(torch.exp(self.scores[..., :stop] - scale), size)
                y = torch.fft.irfft(torch.fft.rfft(part, size).unsqueeze(-2) * table.unsqueeze(-3), size)
                piece = (y[..., start:stop] * make(rows, scale).double().unsqueeze(-3)).sum(-2)
            else:
                piece = torch.einsum("...qj,...ij->...qi", part, self._slab(start, stop, rows, make))
            pieces.append(piece)
        zero = torch.zeros((*x.shape[:-1], 1), dtype=torch.float64, device=x.device)
        return torch.cat([zero, *pieces[::-1]], -1).to(x.dtype)

    def _scale(self, stop: int) -> Tensor:
        """[..., H, 1]: the log of the last row's sum, 0 where that is empty."""
        last = self.sums[..., stop - 1 : stop]
        return torch.where(last == -math.inf, torch.zeros_like(last), last)

    def _slab(self, start: int, stop: int, rows: Tensor, make: _Coefficients) -> Tensor:
        """The weights of rows [start, stop) below the diagonal, summed over heads: [..., rows, stop]."""
        lag = rows[:, None] - torch.arange(stop, device=rows.device)[None, :]
        total: Tensor | float = 0.0
        row_max = self.sums[..., rows]
        shift = torch.where(row_max == -math.inf, torch.zeros_like(row_max), row_max)
        c = make(rows, shift).double()  # w e^(L_i - Z_i), at most 1
        for head in range(self.scores.shape[-2]):
            score = self.scores[..., head, :][..., lag.clamp(min=0)] - shift[..., head, :, None]
            total = total + c[..., head, :, None] * torch.exp(score)
        assert isinstance(total, Tensor)
        return total


def _good_size(n: int) -> int:
    """The smallest 2^a, 3·2^a or 5·2^a that is at least n: sizes the FFT is fast for."""
    power = 1 << (n - 1).bit_length()
    return min(size for size in (power, power // 4 * 3, power // 8 * 5) if size >= n and size > 0)


def layers_of(kernels: StructuredKernel | Sequence[StructuredKernel]) -> int | None:
    """How many layers structured kernels have; None for one kernel shared by all."""
    if isinstance(kernels, StructuredKernel):
        return kernels.batch_shape[-1] if kernels.batch_shape else None
    return len(kernels)
