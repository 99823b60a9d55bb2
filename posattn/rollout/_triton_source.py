"""The source of the Triton rollout kernels; `triton_kernels` says what they do. Importing this needs triton."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["t", "layers", "tile_rows"])
@no_type_check  # triton reads the source; a run-time type check would wrap the function
def whole_kernel(
    a_ptr, offset_ptr, stride_m, stride_n,
    source_ptr, target_ptr, master_ptr, lam_ptr, scale_ptr, t, layers, n,
    tile_rows,
    FIRST: tl.constexpr, UPCAST: tl.constexpr, ALIGNED: tl.constexpr, HALF: tl.constexpr,
    SCALED: tl.constexpr, SQUARE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of (1-λ) P + λ A P; tiles above the diagonal have no program (square tiles) or leave at once."""
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    if SQUARE:
        # tile numbers count from the last row of tiles, whose sums are the longest, to the first
        back = tile_rows * (tile_rows + 1) // 2 - 1 - tile
        i = ((tl.sqrt(8.0 * back.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > back, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= back, i + 1, i)
        j = i - (back - i * (i + 1) // 2)  # the longest sum of a row of tiles is in column 0
    else:
        i = tile_rows - 1 - tile % tile_rows
        j = tile // tile_rows
    if j * BLOCK_N < (i + 1) * BLOCK_M:
        # 64-bit offsets to the corner of a tile, 32-bit ones inside it; what only the end needs is made at the end
        row0 = i * BLOCK_M
        col0 = j * BLOCK_N
        first = col0 // BLOCK_K * BLOCK_K
        r = tl.arange(0, BLOCK_M)
        c = tl.arange(0, BLOCK_N)
        s = tl.arange(0, BLOCK_K)
        row_ok = (row0 + r < n)[:, None]
        col_ok = (col0 + c < n)[None, :]
        square = tl.cast(n, tl.int64) * n
        offset = tl.load(offset_ptr + b)
        if ALIGNED:
            offset = tl.multiple_of(offset, 16)
        a = a_ptr + offset + tl.cast(row0, tl.int64) * stride_m
        if FIRST:  # P is the identity
            here = a + tl.cast(col0, tl.int64) * stride_n + r[:, None] * stride_m + c[None, :] * stride_n
            acc = tl.load(here, mask=row_ok & col_ok, other=0.0).to(tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            a_tile = a + tl.cast(first, tl.int64) * stride_n + r[:, None] * stride_m + s[None, :] * stride_n
            p_tile = source_ptr + b * square + tl.cast(first, tl.int64) * n + col0 + s[:, None] * n + c[None, :]
            for k in range(first, tl.minimum(row0 + BLOCK_M, n), BLOCK_K):
                if EVEN:
                    x = tl.load(a_tile)
                    y = tl.load(p_tile)
                else:
                    inside = k + s < n
                    x = tl.load(a_tile, mask=row_ok & inside[None, :], other=0.0)
                    y = tl.load(p_tile, mask=inside[:, None] & col_ok, other=0.0)
                if UPCAST:  # the interpreter would multiply bfloat16's bit patterns as integers
                    x = x.to(tl.float32)
                    y = y.to(tl.float32)
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
                a_tile += BLOCK_K * stride_n
                p_tile += BLOCK_K * n

        lam = tl.load(lam_ptr + b * layers + t)
        corner = b * square + tl.cast(row0, tl.int64) * n + col0
        inner = r[:, None] * n + c[None, :]
        ok = row_ok & col_ok
        if FIRST:
            old = ((row0 + r)[:, None] == (col0 + c)[None, :]).to(tl.float32)
        elif HALF:
            old = tl.load(master_ptr + corner + inner, mask=ok, other=0.0)
        else:
            old = tl.load(source_ptr + corner + inner, mask=ok, other=0.0)
        if SCALED:  # dividing the rows of A is dividing the rows of A P
            acc *= tl.load(scale_ptr + (b * layers + t) * n + row0 + r, mask=row0 + r < n, other=0.0)[:, None]
        new = (1.0 - lam) * old + lam * acc
        if HALF:
            tl.store(master_ptr + corner + inner, new, mask=ok)
        tl.store(target_ptr + corner + inner, new.to(target_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["layers", "batch", "queries", "strips"])
@no_type_check
def rows_kernel(
    a_ptr, offset_ptr, stride_t, stride_r, stride_c,
    query_ptr, state_ptr, state_stride, lam_ptr, scale_ptr, done_ptr, layers, batch, n, queries, strips,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, PER_WORD: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip of columns of v_{t-1} = (1-λ_t) v_t + λ_t v_t A_t, when the strips of v_t that it needs are there.

    `state_ptr` is [layers, batch, queries, state_stride]: slot t is what layers t to the last (counted from 0) make of
    the query's unit row, so slot 0 is the answer. A strip begins on a cache line of its own, so that no line is read
    before all of it is written. `done_ptr` holds one bit a strip, [layers, batch, WORDS] 64-bit words, then the
    ticket counter.
    """
    counter = done_ptr + tl.cast(layers, tl.int64) * batch * WORDS
    ticket = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    b = ticket % batch
    strip = strips - 1 - ((ticket // batch) % strips).to(tl.int32)
    step = ticket // (tl.cast(batch, tl.int64) * strips)
    t = layers - 1 - step  # the layer whose A is read; slot t + 1 is read, slot t written

    begin = strip * BLOCK_C
    cols = begin + tl.arange(0, BLOCK_C)
    col_ok = cols < n
    offset = tl.load(offset_ptr + b)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    a = a_ptr + offset + t * stride_t
    lam = tl.load(lam_ptr + b * layers + t)
    size = tl.cast(queries, tl.int64) * state_stride
    old = state_ptr + ((t + 1) * batch + b) * size
    new = state_ptr + (t * batch + b) * size
    scale = scale_ptr + (b * layers + t) * n  # of the rows of this A
    q = tl.arange(0, QUERIES)
    where = q[:, None] * state_stride + cols[None, :]
    ok = (q < queries)[:, None] & col_ok[None, :]

    if step == 0:  # v A is a row of A
        query = tl.load(query_ptr + q, mask=q < queries, other=0)
        own = tl.load(a + query[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c, mask=ok, other=0.0)
        unit = (query[:, None] == cols[None, :]).to(tl.float32)
        weight = lam
        if SCALED:
            weight = lam * tl.load(scale + query, mask=q < queries, other=0.0)[:, None]
        tl.store(new + where, (1.0 - lam) * unit + weight * own.to(tl.float32), mask=ok)
    else:
        for w in range(strip // PER_WORD, WORDS):
            word = done_ptr + ((t + 1) * batch + b) * WORDS + w
            low = tl.cast(tl.maximum(strip - w * PER_WORD, 0), tl.int64)
            high = tl.cast(tl.minimum(strips - w * PER_WORD, PER_WORD), tl.int64)
            one = tl.cast(1, tl.int64)
            need = (one << high) - (one << low)
            have = tl.atomic_or(word, 0, sem="acquire", scope="gpu")
            while (have & need) != need:
                have = tl.atomic_or(word, 0, sem="acquire", scope="gpu")

        if QUERIES == 1:
            # partial sums stay spread over the tile; one reduction at the end
            acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
            for r in tl.range(begin, n, BLOCK_R, num_stages=STAGES):
                rows = r + tl.arange(0, BLOCK_R)
                row_ok = rows < n
                tile = a + rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
                x = tl.load(tile, mask=row_ok[:, None] & col_ok[None, :], other=0.0)
                v = tl.load(old + rows, mask=row_ok, other=0.0, cache_modifier=".cg")
                if SCALED:
                    v *= tl.load(scale + rows, mask=row_ok, other=0.0)
                acc += x.to(tl.float32) * v[:, None]
            total = tl.sum(acc, axis=0)[None, :]
        else:
            total = tl.zeros((QUERIES, BLOCK_C), dtype=tl.float32)
            for r in tl.range(begin, n, BLOCK_R, num_stages=STAGES):
                rows = r + tl.arange(0, BLOCK_R)
                row_ok = rows < n
                tile = a + rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
                x = tl.load(tile, mask=row_ok[:, None] & col_ok[None, :], other=0.0)
                v = tl.load(
                    old + q[:, None] * state_stride + rows[None, :],
                    mask=(q < queries)[:, None] & row_ok[None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                if SCALED:
                    v *= tl.load(scale + rows, mask=row_ok, other=0.0)[None, :]
                total = tl.dot(v, x.to(tl.float32), total, input_precision=PRECISION)
        kept = tl.load(old + where, mask=ok, other=0.0, cache_modifier=".cg")
        tl.store(new + where, (1.0 - lam) * kept + lam * total, mask=ok)

    # every thread's part of the strip is in memory before the bit says so
    tl.debug_barrier()
    bit = tl.cast(1, tl.int64) << tl.cast(strip % PER_WORD, tl.int64)
    tl.atomic_or(done_ptr + (t * batch + b) * WORDS + strip // PER_WORD, bit, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["layers", "tile_rows"])
@no_type_check
def row_scale_kernel(
    a_ptr, offset_ptr, stride_t, stride_r, stride_c, scale_ptr, layers, n, tile_rows,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """1 / (sum of a row of A), up to the diagonal, for `BLOCK_R` rows of one layer of one batch entry."""
    tile = tile_rows - 1 - tl.program_id(0) % tile_rows  # long rows first
    pair = (tl.program_id(0) // tile_rows).to(tl.int64)
    offset = tl.load(offset_ptr + pair // layers)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < n
    a = a_ptr + offset + (pair % layers) * stride_t + rows.to(tl.int64)[:, None] * stride_r
    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for c in tl.range(0, tl.minimum((tile + 1) * BLOCK_R, n), BLOCK_C, num_stages=4):
        cols = c + tl.arange(0, BLOCK_C)
        ok = row_ok[:, None] & (cols < n)[None, :]
        acc += tl.load(a + cols.to(tl.int64)[None, :] * stride_c, mask=ok, other=0.0).to(tl.float32)
    tl.store(scale_ptr + pair * n + rows, 1.0 / tl.where(row_ok, tl.sum(acc, axis=1), 1.0), mask=row_ok)


#: whether triton runs kernels in its interpreter (TRITON_INTERPRET=1 when it was imported), so that CPU tensors work
INTERPRETED = not isinstance(whole_kernel, triton.JITFunction)
