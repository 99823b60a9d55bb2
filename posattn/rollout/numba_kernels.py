"""Rows of the rollout on the CPU at the speed of memory, compiled by numba (the extra `numba`; imported when used).

v_{t-1} = (1-λ_t) v_t + λ_t v_t A_t, from the last layer to the first, for the query rows v [Q, n]. What counts is that
the lower half of each A_t is read once and in long runs: `_GROUP` rows of A are walked along together, so that as many
streams of memory are open and each sum is loaded and stored once for all of them. The beginnings of the next group's
rows, which no processor can foresee, are fetched meanwhile. The threads share the rows of A in parts of equal area,
each with sums of its own, added up at the end of a layer. One call does all layers.

Sums are in float32 (float64 for float64). bfloat16 kernels are widened as they are read; v is never rounded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError

try:
    import numba
    from llvmlite import ir
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
except ImportError as error:
    raise ImportError(
        "impl='numba' needs numba (pip install numba); impl='rows' needs nothing more than torch"
    ) from error

#: rows of A that are walked along together; `_group` spells them out
_GROUP = 8
#: lines of 64 bytes of each row of the next group that are asked for ahead; what follows the processor foresees itself
_AHEAD = 8
#: columns for which a group of rows stays in the first cache while every query uses it
_COLUMNS = 512
#: what numba may run in parallel: not the short copies and sums beside the one loop that is meant
_PRANGE_ALONE = {
    name: name == "prange"
    for name in ("prange", "setitem", "numpy", "reduction", "comprehension", "fusion", "inplace_binop", "stencil")
}
#: numba's simplest threads stop the process when two of ours call them at once
_ONE_AT_A_TIME = threading.Lock()


def rollout_numba(
    mixing: Float[Tensor, "*#batch layers"], kernels: Float[Tensor, "*#batch layers n n"], rows: Int[Tensor, " q"]
) -> Float[Tensor, "*batch q n"]:
    """Some rows of P; each A is read once, and only on and below the diagonal.

    Args:
        mixing: λ `[..., T]`.
        kernels: lower triangular A `[..., T, N, N]` on the CPU; copied if they are not contiguous or in float16.
            Leading dimensions broadcast with those of `mixing`.
        rows: query positions `[Q]`, 0 for the first token.

    Returns:
        `[..., Q, N]`; float32 for half-precision kernels, else the kernels' dtype.

    Raises:
        InputError: kernels on another device, or a gradient is asked for.
    """
    if kernels.device.type != "cpu":
        raise InputError(f"impl='numba' works on the CPU, and the kernels are on {kernels.device}: use impl='triton'")
    if torch.is_grad_enabled() and (mixing.requires_grad or kernels.requires_grad):
        raise InputError("the numba rollout has no gradient; use impl='rows', or call it under torch.no_grad()")
    # few and simple steps from here on: when memory has streamed through the caches, each costs many microseconds
    layers, n = kernels.shape[-3], kernels.shape[-1]
    wide = torch.float64 if kernels.dtype == torch.float64 else torch.float32
    lam, a, which = mixing.detach().to("cpu", wide), kernels.detach(), None
    if lam.shape[:-1] != a.shape[:-3] or 0 in a.stride()[:-3]:
        lam, a, which = _broadcast(lam, a)
    if a.dtype in (torch.float16, torch.bfloat16):
        a = a.float() if a.dtype == torch.float16 else a.contiguous().view(torch.uint16)
    stored = a.contiguous().numpy().reshape(-1, layers, n, n)
    which = np.arange(len(stored)) if which is None else which.numpy()
    out = torch.zeros(*lam.shape[:-1], len(rows), n, dtype=wide)
    if out.numel():
        flat = out.numpy().reshape(-1, len(rows), n)
        with _ONE_AT_A_TIME:
            _walk(
                stored, which, lam.contiguous().numpy().reshape(-1, layers), rows.cpu().numpy(), flat,
                torch.get_num_threads(),
            )  # fmt: skip
    return out


def _broadcast(lam: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """λ [*lead, T], a with each kernel kept once, and which of them [B] each entry of λ uses."""
    lead = torch.broadcast_shapes(lam.shape[:-1], a.shape[:-3])
    for dim, step in enumerate(a.stride()[:-3]):
        if step == 0:
            a = a.narrow(dim, 0, min(1, a.shape[dim]))
    which = torch.arange(a.shape[:-3].numel()).reshape(a.shape[:-3]).expand(lead).reshape(-1)
    return lam.expand(*lead, lam.shape[-1]), a, which


# ---- compiled -------------------------------------------------------------------------------------------------------


def _compiled(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit`, compiled once for this machine; once a process where no folder can be written to."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(function, cache=True, **options)
        except RuntimeError:
            return numba.njit(function, **options)

    return decorate


@no_type_check  # numba reads the source; a run-time type check would wrap the function
def _wide(value):
    """A weight as a number to compute with; the bits of a bfloat16 come as an unsigned integer (compiled only)."""


@overload(_wide)
@no_type_check
def _compiled_wide(value):
    if isinstance(value, numba.types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)  # the upper half of one
    return lambda value: value


@intrinsic
@no_type_check
def _prefetch(context, a, r, c):
    """Ask for the memory around a[r, c], to be in the second cache soon; beyond the end of the row it does no harm."""

    def generate(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = cgutils.get_item_pointer(context, builder, signature.args[0], array, args[1:], wraparound=False)
        place = builder.bitcast(place, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        builder.call(function, [place, number(0), number(2), number(1)])  # to read, into the second cache, data
        return context.get_dummy_value()

    return numba.types.void(a, r, c), generate


@_compiled(fastmath={"contract"})
@no_type_check
def _group(a, r, c0, c1, v, out):
    """out[c] += Σ_k v[r+k] a[r+k, c] for c0 <= c < c1."""
    a0, a1, a2, a3 = a[r, c0:c1], a[r + 1, c0:c1], a[r + 2, c0:c1], a[r + 3, c0:c1]
    a4, a5, a6, a7 = a[r + 4, c0:c1], a[r + 5, c0:c1], a[r + 6, c0:c1], a[r + 7, c0:c1]
    v0, v1, v2, v3, v4, v5, v6, v7 = v[r], v[r + 1], v[r + 2], v[r + 3], v[r + 4], v[r + 5], v[r + 6], v[r + 7]
    sums = out[c0:c1]
    for c in range(c1 - c0):
        low = v0 * _wide(a0[c]) + v1 * _wide(a1[c]) + v2 * _wide(a2[c]) + v3 * _wide(a3[c])
        high = v4 * _wide(a4[c]) + v5 * _wide(a5[c]) + v6 * _wide(a6[c]) + v7 * _wide(a7[c])
        sums[c] += low + high


@_compiled(fastmath={"contract"})
@no_type_check
def _strip(a, v, begin, end, out):
    """out [Q, n] = v[:, begin:end] a[begin:end], groups cut off at the diagonal of their last row."""
    out[:] = 0
    queries = v.shape[0]
    whole = begin + (end - begin) // _GROUP * _GROUP
    line = 64 // a.itemsize
    for r in range(begin, whole, _GROUP):
        if r + 2 * _GROUP <= whole:
            for row in range(r + _GROUP, r + 2 * _GROUP):
                for c in range(0, _AHEAD * line, line):
                    _prefetch(a, row, c)
        width = _COLUMNS if queries > 1 else r + _GROUP
        for c in range(0, r + _GROUP, width):
            for q in range(queries):
                _group(a, r, c, min(c + width, r + _GROUP), v[q], out[q])
    for r in range(whole, end):
        for q in range(queries):
            for c in range(r + 1):
                out[q, c] += v[q, r] * _wide(a[r, c])


@_compiled(parallel=_PRANGE_ALONE, fastmath={"contract"})
@no_type_check
def _walk(a, which, lam, rows, out, parts):
    """out [B, Q, N] = the rows of P, from a [K, T, N, N], of which entry b uses which[b], and λ [B, T]; out is zero."""
    queries, layers, n = len(rows), a.shape[1], rows.max() + 1  # nothing after the last query is seen
    edges = np.zeros(parts + 1, np.int64)
    for part in range(1, parts + 1):  # triangles of equal area
        edges[part] = min(round(n * math.sqrt(part / parts) / _GROUP) * _GROUP, n)
    edges[parts] = n
    sums = np.empty((parts, queries, n), out.dtype)
    v = np.empty((queries, n), out.dtype)
    for b in range(len(out)):
        v[:] = 0
        for q in range(queries):
            v[q, rows[q]] = 1
        for t in range(layers - 1, -1, -1):
            layer, stay, move = a[which[b], t], 1 - lam[b, t], lam[b, t]
            if t == layers - 1:  # v are unit rows
                for q in range(queries):
                    for c in range(rows[q] + 1):
                        v[q, c] = stay * v[q, c] + move * _wide(layer[rows[q], c])
                continue
            for part in numba.prange(parts):
                _strip(layer, v, edges[part], edges[part + 1], sums[part])
            for q in range(queries):
                for c in range(n):
                    total = sums[0, q, c]
                    for part in range(1, parts):
                        total += sums[part, q, c]
                    v[q, c] = stay * v[q, c] + move * total
        out[b, :, :n] = v
