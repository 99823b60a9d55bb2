"""Rollout in plain torch, with the half above the diagonal left alone: P = R_T ... R_1, R_t = (1-λ_t) I + λ_t A_t.

The kernels A_t and every partial product are lower triangular. R is never built.

**Whole P** (`rollout_matmul`). With rows and columns cut into blocks, block (i, j), j <= i, of the next product is

    P'[i,j] = (1-λ) P[i,j] + λ Σ_{k=j..i} A[i,k] P[k,j]

one matrix product over the range j..i. That is N³/3 operations a layer instead of 2N³, and a little more for the
blocks on the diagonal.

**Rows** (`rollout_rows`). A query row v_T = e_q goes from the last layer to the first,
v_{t-1} = (1-λ_t) v_t + λ_t v_t A_t. Rows of A come in blocks, each cut off at its last column: A is read once, its
lower half only. The first step is row q of A_T itself, and positions after the last query are never looked at.

Both accumulate in float32 (float64 for float64 input): half-precision kernels are widened a block of rows at a time,
and with `renormalise`, as `posattn.rollout` asks for them, each row is divided by its sum then; no copy of the kernels
is made. The exception are bfloat16 kernels on a CPU without it: each product takes P (or a single row v) rounded to
bfloat16 and gives its result so, while P itself is kept in float32. That is twice as fast, with less rounding than a
chain of bfloat16 products makes. Gradients are computed by hand with the same blocks, always widened: for G = dL/dP_t,

    dL/dA_t = λ tril(G P_{t-1}ᵀ),   dL/dλ_t = <A_t, tril(G P_{t-1}ᵀ)> - <G, P_{t-1}>,   dL/dP_{t-1} = (1-λ) G + λ A_tᵀ G

and its row form. What lies above the diagonal of A is taken to be zero and gets a gradient of zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

#: lengths from which a batch entry is worth its own loop over blocks; shorter ones go through batched products
_LOOP_FROM = 192
#: length from which one row's product is many short ones, see `_vector_product`
_BATCHED_FROM = 3072
#: edge of the blocks of bfloat16 products: smaller ones do not keep the processor's matrix units busy
_BFLOAT16_BLOCK = 256


def rollout_matmul(
    mixing: Float[Tensor, "*#batch layers"],
    kernels: Float[Tensor, "*#batch layers n n"],
    every: bool = False,
    renormalise: bool = False,
) -> Float[Tensor, "..."]:
    """The whole P, or with `every` all partial products, by blocks on and below the diagonal.

    Args:
        mixing: λ `[..., T]`.
        kernels: lower triangular A `[..., T, N, N]`; any strides; leading dimensions broadcast with those of `mixing`.
        every: give P_0 = I, P_1, ..., P_T.
        renormalise: divide each row of A by its sum, which half precision has made unequal to 1.

    Returns:
        `[..., N, N]`, or `[..., T+1, N, N]` with `every`; float32 for half-precision kernels, else the kernels' dtype.
        Exactly zero above the diagonal.
    """
    mixing, kernels = _broadcast(mixing, kernels)
    if torch.is_grad_enabled() and (mixing.requires_grad or kernels.requires_grad):
        states = _Whole.apply(mixing, _wide(kernels, mixing.dtype, True) if renormalise else kernels)
        return states if every else states[..., -1, :, :]  # type: ignore[return-value]
    return _whole(mixing, kernels, every, renormalise)


def rollout_rows(
    mixing: Float[Tensor, "*#batch layers"],
    kernels: Float[Tensor, "*#batch layers n n"],
    rows: Int[Tensor, " q"],
    renormalise: bool = False,
) -> Float[Tensor, "*batch q n"]:
    """Some rows of P; each A is read once, and only on and below the diagonal.

    Args:
        mixing: λ `[..., T]`.
        kernels: lower triangular A `[..., T, N, N]`; any strides; leading dimensions broadcast with those of `mixing`.
        rows: query positions `[Q]`, 0 for the first token.
        renormalise: divide each row of A by its sum, which half precision has made unequal to 1.

    Returns:
        `[..., Q, N]`; float32 for half-precision kernels, else the kernels' dtype.
    """
    mixing, kernels = _broadcast(mixing, kernels)
    if torch.is_grad_enabled() and (mixing.requires_grad or kernels.requires_grad):
        return _Rows.apply(mixing, _wide(kernels, mixing.dtype, True) if renormalise else kernels, rows)[0]  # type: ignore[index]
    return _rows(mixing, kernels, rows, renormalise=renormalise)[..., 0, :, :]


def _broadcast(mixing: Tensor, kernels: Tensor) -> tuple[Tensor, Tensor]:
    lead = torch.broadcast_shapes(mixing.shape[:-1], kernels.shape[:-3])
    mixing = mixing.to(device=kernels.device, dtype=_accumulator(kernels.dtype))
    return mixing.expand(*lead, mixing.shape[-1]), kernels.expand(*lead, *kernels.shape[-3:])


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spans(n: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, size):
        yield start, min(start + size, n)


def _block(n: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a block: few enough that little lies above the diagonal, enough for efficient products."""
    if device.type == "cpu":
        return 128, 192
    edge = max(256, -(-n // 8))
    return edge, edge


def _wide(rows: Tensor, dtype: torch.dtype, renormalise: bool) -> Tensor:
    """Rows of A to compute with, whole or cut off beyond the diagonal."""
    wide = rows.to(dtype)
    return wide / wide.sum(-1, keepdim=True) if renormalise else wide


def _layer(kernels: Tensor, t: int) -> Tensor:
    """A_t as [B, N, N]: a view when the leading dimensions allow it, else a copy of this one layer."""
    return kernels[..., t, :, :].reshape(-1, *kernels.shape[-2:])


# ---------------------------------------------------------------------------------------------------------------- whole


def _whole(mixing: Tensor, kernels: Tensor, every: bool, renormalise: bool = False) -> Tensor:
    """[..., N, N] or [..., T+1, N, N]."""
    lead, layers, n = mixing.shape[:-1], mixing.shape[-1], kernels.shape[-1]
    options: dict[str, Any] = {"dtype": mixing.dtype, "device": kernels.device}
    loop = kernels.device.type == "cpu" and n >= _LOOP_FROM
    if every:
        out = torch.zeros(*lead, layers + 1, n, n, **options)
    else:
        out = torch.zeros(*lead, n, n, **options)
    if loop:
        for index in itertools.product(*(range(size) for size in lead)):
            lam, a = mixing[index].tolist(), kernels[index]
            as_stored = a.dtype == torch.bfloat16 and not renormalise
            rounded = _Rounded(n) if as_stored and _multiplies_bfloat16() else None
            if every:
                states = list(out[index])
            elif rounded is not None:  # in place
                states = [out[index]] * (layers + 1)
            else:  # two buffers in turn, the answer in the one that is returned
                spare = torch.zeros(n, n, **options)
                states = [out[index] if (layers - t) % 2 == 0 else spare for t in range(layers + 1)]
            states[0].fill_diagonal_(1.0)
            for t in range(layers):
                _step(states[t], a[t], lam[t], states[t + 1], renormalise, first=t == 0, rounded=rounded)
        return out
    flat = out.reshape(lead.numel(), *out.shape[len(lead) :])
    lam = mixing.reshape(lead.numel(), layers)
    if every:
        states = list(flat.unbind(1))
    else:
        spare = torch.zeros_like(flat)
        states = [flat if (layers - t) % 2 == 0 else spare for t in range(layers + 1)]
    states[0].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for t in range(layers):
        _batched_step(states[t], _layer(kernels, t), lam[:, t], states[t + 1], renormalise)
    return out


def _step(
    p: Tensor, a: Tensor, lam: float, out: Tensor, renormalise: bool, first: bool, rounded: _Rounded | None = None
) -> None:
    """out = (1-λ) p + λ a p on and below the diagonal, [N, N]; `first` says that p is the identity.

    `rounded`: multiply in bfloat16; the same one for all steps from the first.
    """
    n = p.shape[-1]
    if first:
        out.copy_(a)
        if renormalise:
            out.div_(out.sum(-1, keepdim=True))
        out.mul_(lam).diagonal().add_(1.0 - lam)
        if rounded is not None:
            rounded.p.copy_(out)
        return
    if rounded is not None:
        rounded.step(p, a, lam, out)
        return
    height, width = _block(n, p.device)
    for r0, r1 in _spans(n, height):
        strip = _wide(a[r0:r1, :r1], out.dtype, renormalise)
        for c0, c1 in _spans(r1, width):
            torch.addmm(
                p[r0:r1, c0:c1], strip[:, c0:], p[c0:r1, c0:c1], beta=1.0 - lam, alpha=lam, out=out[r0:r1, c0:c1]
            )


class _Rounded:
    """P in bfloat16 beside the one in float32, and the step that multiplies it."""

    def __init__(self, n: int) -> None:
        self.p = torch.empty(n, n, dtype=torch.bfloat16)
        # kept, because fresh memory costs more than the sums that are written into it
        self._products = torch.empty(min(_BFLOAT16_BLOCK, n), n, dtype=torch.bfloat16)
        self._widened = torch.empty(self._products.shape)

    def step(self, p: Tensor, a: Tensor, lam: float, out: Tensor) -> None:
        """out = (1-λ) p + λ a p, which may be p; strips read only those above them, so the last is replaced first."""
        size = _BFLOAT16_BLOCK
        for r0, r1 in reversed(list(_spans(len(p), size))):
            products = self._products[: r1 - r0, :r1]
            for c0, c1 in _spans(r1, size):
                torch.mm(a[r0:r1, c0:r1], self.p[c0:r1, c0:c1], out=products[:, c0:c1])
            widened = self._widened[: r1 - r0, :r1].copy_(products)
            torch.lerp(p[r0:r1, :r1], widened, lam, out=out[r0:r1, :r1])
            self.p[r0:r1, :r1].copy_(out[r0:r1, :r1])


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 products; without them they are slower than float32's."""
    asks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return torch.backends.mkldnn.is_available() and any(ask() for ask in asks if ask is not None)


def _batched_step(p: Tensor, a: Tensor, lam: Tensor, out: Tensor, renormalise: bool) -> None:
    """out = (1-λ) p + λ a p on and below the diagonal; p, a, out [B, N, N], λ [B]."""
    n = p.shape[-1]
    height, width = _block(n, p.device)
    weight = lam[:, None, None]
    for r0, r1 in _spans(n, height):
        strip = _wide(a[:, r0:r1, :r1], out.dtype, renormalise)
        for c0, c1 in _spans(r1, width):
            product = torch.bmm(strip[:, :, c0:], p[:, c0:r1, c0:c1])
            torch.lerp(p[:, r0:r1, c0:c1], product, weight, out=out[:, r0:r1, c0:c1])


class _Whole(torch.autograd.Function):
    """All partial products, with a gradient."""

    @staticmethod
    def forward(ctx: Any, mixing: Tensor, kernels: Tensor) -> Tensor:
        states = _whole(mixing, kernels, every=True)
        ctx.save_for_backward(mixing, kernels, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mixing, kernels, states = ctx.saved_tensors
        layers, n = mixing.shape[-1], kernels.shape[-1]
        lam = mixing.reshape(-1, layers)
        p = states.reshape(-1, layers + 1, n, n)
        grad = grad.reshape(-1, layers + 1, n, n)
        grad_a = torch.zeros(lam.shape[0], layers, n, n, dtype=kernels.dtype, device=kernels.device)
        grad_lam = torch.empty_like(lam)
        g = grad[:, layers].tril()
        height, width = _block(n, kernels.device)
        for t in range(layers - 1, -1, -1):
            a, before = _layer(kernels, t), p[:, t]
            weight = lam[:, t, None, None]
            dot = -(g * before).sum((-2, -1))
            following = torch.zeros_like(g)
            for r0, r1 in _spans(n, height):
                strip = a[:, r0:r1, :r1].to(g.dtype)
                down = a[:, r0:, r0:r1].to(g.dtype).mT
                for c0, c1 in _spans(r1, width):
                    w = torch.bmm(g[:, r0:r1, :c1], before[:, c0:c1, :c1].mT)
                    if c1 > r0:
                        w = w.tril(diagonal=r0 - c0)
                    dot += (strip[:, :, c0:c1] * w).sum((-2, -1))
                    grad_a[:, t, r0:r1, c0:c1] = weight * w
                    following[:, r0:r1, c0:c1] = torch.bmm(down, g[:, r0:, c0:c1])
            grad_lam[:, t] = dot
            g = (torch.lerp(g, following, weight) + grad[:, t]).tril()
        return grad_lam.reshape(mixing.shape), grad_a.reshape(kernels.shape)


# ----------------------------------------------------------------------------------------------------------------- rows


def _rows(mixing: Tensor, kernels: Tensor, rows: Tensor, every: bool = False, renormalise: bool = False) -> Tensor:
    """[..., 1, Q, N], or with `every` [..., T+1, Q, N] with the unit rows in the last slot."""
    lead, layers, full = mixing.shape[:-1], mixing.shape[-1], kernels.shape[-1]
    queries = rows.shape[0]
    options: dict[str, Any] = {"dtype": mixing.dtype, "device": kernels.device}
    out = torch.zeros(*lead, layers + 1 if every else 1, queries, full, **options)
    if queries == 0:
        return out
    rows = rows.to(kernels.device)
    n = int(rows.max()) + 1  # nothing after the last query is seen
    unit = torch.zeros(queries, n, **options)
    unit[torch.arange(queries, device=kernels.device), rows] = 1.0
    loop = kernels.device.type == "cpu" and n >= _LOOP_FROM
    flat = out.reshape(lead.numel(), *out.shape[-3:])
    lam = mixing.reshape(lead.numel(), layers)

    def keep(t: int, entry: int | slice, v: Tensor) -> None:
        if every or t == 0:
            flat[entry, t, ..., :n] = v

    if every or layers == 0:
        keep(layers, slice(None), unit)
    if loop:
        for entry, index in enumerate(itertools.product(*(range(size) for size in lead))):
            a, weights = kernels[index], lam[entry].tolist()
            v = unit
            for t in range(layers - 1, -1, -1):
                v = _row_step(v, a[t], weights[t], renormalise, rows if t == layers - 1 else None)
                keep(t, entry, v)
        return out
    v = unit.expand(flat.shape[0], queries, n)
    for t in range(layers - 1, -1, -1):
        a = _layer(kernels, t)
        if t == layers - 1:
            product = _wide(a[:, rows, :n], v.dtype, renormalise)
        else:
            product = torch.zeros_like(v)
            for r0, r1 in _spans(n, _block(n, v.device)[0]):
                product[..., :r1] += torch.bmm(v[..., r0:r1], _wide(a[:, r0:r1, :r1], v.dtype, renormalise))
        v = torch.lerp(v, product, lam[:, t, None, None])
        keep(t, slice(None), v)
    return out


def _row_step(v: Tensor, a: Tensor, lam: float, renormalise: bool, rows: Tensor | None) -> Tensor:
    """(1-λ) v + λ v a for v [Q, n] on the CPU; `rows` when v is the unit rows of these positions."""
    queries, n = v.shape
    if rows is not None:
        return torch.lerp(v, _wide(a[rows, :n], v.dtype, renormalise), lam)
    if queries == 1:
        return torch.lerp(v, _vector_product(v[0], a, renormalise)[None], lam)
    product = torch.zeros_like(v)
    for r0, r1 in _spans(n, 256):
        product[:, :r1].addmm_(v[:, r0:r1], _wide(a[r0:r1, :r1], v.dtype, renormalise))
    return torch.lerp(v, product, lam)


def _vector_product(v: Tensor, a: Tensor, renormalise: bool) -> Tensor:
    """v a for one row, v [n], a [>=n, >=n], by row blocks cut off at the diagonal.

    NumPy's BLAS (OpenBLAS) reads memory faster here than the one inside torch, up to where torch's batched products of
    many short pieces are faster than both; the blocks are views for all of them.
    """
    n = v.shape[0]
    out = torch.zeros_like(v)
    # each block costs a call and, on the diagonal, half a square too much: this is where the two balance
    size = 128 if n < 1024 else 256 if n < 2048 else 512
    if a.dtype == torch.bfloat16 and a.stride(-1) == 1 and not renormalise:
        return _bag(v, a)
    if a.dtype != v.dtype or renormalise:  # into one buffer; not with NumPy's threads, which would wait for PyTorch's
        buffer = torch.empty(min(size, n) * n, dtype=v.dtype)
        for r0, r1 in _spans(n, size):
            block = buffer[: (r1 - r0) * r1].view(r1 - r0, r1).copy_(a[r0:r1, :r1])
            out[:r1].addmv_(block.T, v[r0:r1] / block.sum(-1) if renormalise else v[r0:r1])
        return out
    if n >= _BATCHED_FROM:
        for r0, r1 in _spans(n, 1024):
            even = r1 - (r1 - r0) % 128
            parts = torch.bmm(v[r0:even].view(-1, 1, 128), a[r0:even, :r1].unflatten(0, (-1, 128)))
            out[:r1] += parts.sum((0, 1))
            out[:r1].addmv_(a[even:r1, :r1].T, v[even:r1])
        return out
    vector, total, matrix = v.numpy(), out.numpy(), a.detach().numpy()
    for r0, r1 in _spans(n, size):
        total[:r1] += vector[r0:r1] @ matrix[r0:r1, :r1]
    return out


def _bag(v: Tensor, a: Tensor, size: int = 1024) -> Tensor:
    """v a with v rounded to bfloat16 like a: weighted sums of rows, which is what PyTorch's embedding bags are.

    One bag a thread and strip, added up in float32; each bag's sum is rounded to bfloat16.
    """
    n = v.shape[0]
    out, weights, index = torch.zeros_like(v), v.to(a.dtype), torch.arange(n)
    for r0, r1 in _spans(n, size):
        starts = torch.arange(0, r1 - r0, -(-(r1 - r0) // torch.get_num_threads()))
        bags = torch.nn.functional.embedding_bag(
            index[: r1 - r0], a[r0:r1, :r1], starts, mode="sum", per_sample_weights=weights[r0:r1]
        )
        out[:r1] += bags.to(v.dtype).sum(0)
    return out


class _Rows(torch.autograd.Function):
    """Rows of P, with a gradient."""

    @staticmethod
    def forward(ctx: Any, mixing: Tensor, kernels: Tensor, rows: Tensor) -> tuple[Tensor]:
        states = _rows(mixing, kernels, rows, every=True)
        ctx.save_for_backward(mixing, kernels, states)
        return (states[..., 0, :, :].clone(),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        mixing, kernels, states = ctx.saved_tensors
        layers, n = mixing.shape[-1], kernels.shape[-1]
        lam = mixing.reshape(-1, layers)
        v = states.reshape(-1, *states.shape[-3:])
        g = grad.reshape(-1, *grad.shape[-2:])
        grad_a = torch.zeros(lam.shape[0], layers, n, n, dtype=kernels.dtype, device=kernels.device)
        grad_lam = torch.empty_like(lam)
        size, _ = _block(n, kernels.device)
        for t in range(layers):  # v_t = (1-λ_t) v_{t+1} + λ_t v_{t+1} A_t, so the gradient goes up the layers
            a, above = _layer(kernels, t), v[:, t + 1]
            weight = lam[:, t, None, None]
            back = torch.zeros_like(g)
            for r0, r1 in _spans(n, size):
                block = a[:, r0:r1, :r1].to(g.dtype)
                back[..., r0:r1] = torch.bmm(g[..., :r1], block.mT)
                outer = torch.bmm(above[..., r0:r1].mT, g[..., :r1])
                grad_a[:, t, r0:r1, :r1] = (weight * outer).tril(diagonal=r0)
            grad_lam[:, t] = (above * (back - g)).sum((-2, -1))
            g = torch.lerp(g, back, weight)
        return grad_lam.reshape(mixing.shape), grad_a.reshape(kernels.shape), None
