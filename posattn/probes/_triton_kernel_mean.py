"""Head-mean kernels on a GPU: two Triton kernels, no pattern. Importing this needs triton.

**Levels** (`levels_kernel`): L_h,i = log Σ_j exp S_h,ij (the sink's logit included), one program a head and tile of
queries, running over the tiles of keys that it may see with a running maximum. Only where the attention that the model
uses has not given L as a by-product (`posattn.models._attention`).

**Means** (`mean_kernel`): one program a tile (i, j) of Σ_h exp(S_h,ij − L_h,i). The tile stays in registers while the
program runs over the heads, key head by key head, so that each tile of keys is read once for all the query heads that
share it, and each number of the result is written once. The causal mask and the window are the same for all heads and
are applied to the sum. Tiles that nobody may see are left at once. With bins, the tile's columns are summed within
their bins before they are written: [N, N/bins] numbers instead of [N, N]; the rows are binned from those by
PyTorch. Results are the same from run to run: nothing is added atomically.

Products are of the model's own dtype with float32 accumulation; all else is float32.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.models.base import PositionScheme
from posattn.probes.kernel_mean import add_document, bin_rows

LOG2E = 1.4426950408889634


@triton.jit
@no_type_check
def _capped(s, scale, cap, CAPPED: tl.constexpr):
    """Logits in units of log 2."""
    s = s * scale
    if CAPPED:
        s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
    return s * 1.4426950408889634


@triton.jit(do_not_specialize=["n"])
@no_type_check
def levels_kernel(
    q_ptr, q_n, q_h, k_ptr, k_n, k_h, level_ptr, sink_ptr, scale, cap, n, window, heads,
    SHARING: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """level_ptr [n, heads]: the natural logarithm of each row's normaliser."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + rows[:, None].to(tl.int64) * q_n + h * q_h + d[None, :],
        mask=(rows < n)[:, None] & (d < WIDTH)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if SINK:
        top = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.load(sink_ptr + h) * 1.4426950408889634
        total += 1.0
    low = tile * 0
    if WINDOWED:
        low = tl.maximum(0, tile * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N
    for start in range(low, tl.minimum((tile + 1) * BLOCK_M, n), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = tl.load(
            k_ptr + cols[:, None].to(tl.int64) * k_n + (h // SHARING) * k_h + d[None, :],
            mask=(cols < n)[:, None] & (d < WIDTH)[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
        s = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, cap, CAPPED)
        seen = (cols[None, :] <= rows[:, None]) & (cols < n)[None, :]
        if WINDOWED:
            seen = seen & (rows[:, None] - cols[None, :] < window)
        s = tl.where(seen, s, -1.0e30)
        higher = tl.maximum(top, tl.max(s, 1))
        weights = tl.where(seen, tl.exp2(s - higher[:, None]), 0.0)
        total = total * tl.exp2(top - higher) + tl.sum(weights, 1)
        top = higher
    level = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(level_ptr + rows.to(tl.int64) * heads + h, level, mask=rows < n)


@triton.jit(do_not_specialize=["n"])
@no_type_check
def mean_kernel(
    q_ptr, q_n, q_h, k_ptr, k_n, k_h, level_ptr, level_n, level_h, out_ptr, out_n, scale, cap, n, window, strips, size,
    GROUPS: tl.constexpr, SHARING: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, BIN: tl.constexpr, TILES: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out_ptr [n, size]: sums over heads are added to it; size is n, or the number of bins of BIN positions.

    A program makes TILES tiles beside one another: more than one only where a bin is wider than a tile.
    """
    program = tl.program_id(0)
    tile = program // strips
    strip = program % strips
    row0 = tile * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    begin = strip * TILES * BLOCK_N
    last = tl.minimum(row0 + BLOCK_M, n)
    wanted = begin < last
    if WINDOWED:
        wanted = wanted & (begin + TILES * BLOCK_N > row0 - window + 1)
    if wanted:
        wide = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for part in range(TILES):
            col0 = begin + part * BLOCK_N
            if col0 < last:
                cols = col0 + tl.arange(0, BLOCK_N)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for g in range(GROUPS):
                    k = tl.load(
                        k_ptr + cols[:, None].to(tl.int64) * k_n + g * k_h + d[None, :],
                        mask=(cols < n)[:, None] & (d < WIDTH)[None, :],
                        other=0.0,
                    )
                    if UPCAST:  # the interpreter would multiply bfloat16's bit patterns as integers
                        k = k.to(tl.float32)
                    for r in range(SHARING):
                        h = g * SHARING + r
                        q = tl.load(
                            q_ptr + rows[:, None].to(tl.int64) * q_n + h * q_h + d[None, :],
                            mask=(rows < n)[:, None] & (d < WIDTH)[None, :],
                            other=0.0,
                        )
                        if UPCAST:
                            q = q.to(tl.float32)
                        level = tl.load(level_ptr + rows.to(tl.int64) * level_n + h * level_h, mask=rows < n, other=0.0)
                        s = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, cap, CAPPED)
                        # hidden pairs may be anything, up to infinity, until the mask takes them out
                        acc += tl.exp2(s - (level * 1.4426950408889634)[:, None])
                seen = (cols[None, :] <= rows[:, None]) & (rows < n)[:, None] & (cols < n)[None, :]
                if WINDOWED:
                    seen = seen & (rows[:, None] - cols[None, :] < window)
                acc = tl.where(seen, acc, 0.0)
                if BIN == 1:
                    here = out_ptr + rows[:, None].to(tl.int64) * out_n + cols[None, :]
                    tl.store(here, tl.load(here, mask=seen, other=0.0) + acc, mask=seen)
                elif TILES == 1:
                    sums = tl.sum(tl.reshape(acc, (BLOCK_M, BLOCK_N // BIN, BIN)), 2)
                    bins = col0 // BIN + tl.arange(0, BLOCK_N // BIN)
                    ok = (rows < n)[:, None] & (bins < size)[None, :]
                    tl.store(out_ptr + rows[:, None].to(tl.int64) * out_n + bins[None, :], sums, mask=ok)
                else:
                    wide += tl.sum(acc, 1)
        if TILES > 1:
            tl.store(out_ptr + rows.to(tl.int64) * out_n + strip, wide, mask=rows < n)


def add_document_triton(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n g d"],
    lse: Float[Tensor, "n h"] | None,
    scheme: PositionScheme,
    total: Float[Tensor, "m m"],
    stray: Float[Tensor, " s"],
    bins: int | None,
) -> Float[Tensor, " h"]:
    """`posattn.probes.kernel_mean.add_document` on a GPU, or in Triton's interpreter.

    Raises:
        InputError: query heads that cannot share the key heads.
    """

    n, heads, width = q.shape
    groups = k.shape[1]
    if heads % groups:
        raise InputError(f"{heads} query heads cannot share {groups} key heads")
    odd = bins is not None and bins & (bins - 1)
    if odd or scheme.alibi is not None or q.dtype == torch.float64:  # not made for these
        return add_document(q, k, lse, scheme, total, stray, bins)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    half = q.dtype in (torch.bfloat16, torch.float16)
    block_m, block_n = (128, 128) if half and width <= 128 else (64, 64)
    if n <= 64 or triton_interprets():
        block_m = block_n = 16
    common: dict[str, Any] = {
        "SHARING": heads // groups,
        "WIDTH": width,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "CAPPED": scheme.softcap is not None,
        "UPCAST": triton_interprets() and half,
        "PRECISION": "ieee" if half else "tf32x3",
        "WINDOWED": scheme.window is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if block_m == 128 else 4,
    }
    cap, window = float(scheme.softcap or 1.0), int(scheme.window or 0)
    rows = triton.cdiv(n, block_m)
    sinks = None if scheme.sinks is None else scheme.sinks.to(q.device, torch.float32).contiguous()
    given = lse
    lse = torch.empty(n, heads, device=q.device) if given is None else given.float()
    step = 1 if bins is None else bins
    tiles = max(1, step // block_n)
    strips = triton.cdiv(n, tiles * block_n)
    size = triton.cdiv(n, step)
    out = total if step == 1 else torch.zeros(n, size, device=q.device)
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():  # triton launches on the current device
        if given is None:
            levels_kernel[(rows, heads)](
                q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), lse, lse if sinks is None else sinks,
                scheme.scale, cap, n, window, heads, SINK=sinks is not None, **common,
            )  # fmt: skip
        mean_kernel[(rows * strips,)](
            q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), lse, lse.stride(0), lse.stride(1),
            out, out.stride(0), scheme.scale, cap, n, window, strips, size,
            GROUPS=groups, BIN=step, TILES=tiles, **common,
        )  # fmt: skip
    if step > 1:
        bin_rows(out, step, heads, total, stray)
    if sinks is None:
        return torch.zeros(heads)
    return (sinks - lse).exp().mean(0).cpu()


def triton_interprets() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return not isinstance(mean_kernel, triton.JITFunction)
