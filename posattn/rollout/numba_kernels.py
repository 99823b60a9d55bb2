"""Rows of the rollout on the CPU at the speed of memory, compiled by numba (the extra `numba`; imported when used).

v_{t-1} = (1-λ_t) v_t + λ_t v_t A_t, from the last layer to the first, for the query rows v [Q, n]. What counts is that
the lower half of each A_t is read once, in long runs, and without a pause:

* `_GROUP` rows of A are walked along together, so that as many streams of memory are open and each sum is loaded and
  stored once for all of them, a line of memory of each at a time. The lines of the next group are asked for meanwhile:
  a row is too short for the processor to foresee it. Where rows begin with a page and end in it, they are walked
  backwards: forwards, the processor runs on beyond the diagonal, which for short rows costs a third of the time.
* bfloat16 is read in pairs, with the sums of even and of odd columns apart.
* The threads never meet between layers. A layer is cut into blocks of rows, from the last to the first. Column c of
  v A gathers rows >= c only: when a block is through, nothing more is added to its own columns, and the same block of
  the next layer can begin while this layer goes on above it. So blocks are handed out one at a time, layer after layer,
  and one waits until those up to its own predecessor are through, which by then they nearly always are. Whoever waits,
  waits for blocks taken before its own, so somebody always goes on, however many threads there really are.

Sums are in float32 (float64 for float64). bfloat16 kernels are widened as they are read; v is never rounded.
"""

from __future__ import annotations

import functools
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

#: rows of A that are walked along together
_GROUP = 8
#: words of each row for which a group stays in the first cache while every query uses it
_CACHED = 512
#: bytes of memory beyond which no processor looks ahead
_PAGE = 4096
#: blocks of rows of a layer for each thread: enough that none waits, few enough that they are long
_BLOCKS = 4
#: sums of a layer for each thread; the blocks add to them in turn, so the result does not depend on who was faster
_LANES = 2
#: layers whose sums are kept: one that is read, one that is added to, and one between
_RING = 3
#: what numba may run in parallel: not the short copies and sums beside the one loop that is meant
_PRANGE_ALONE = {
    name: name == "prange"
    for name in ("prange", "setitem", "numpy", "reduction", "comprehension", "fusion", "inplace_binop", "stencil")
}
#: a product and a sum may be one instruction
_FUSED = ("contract",)
#: numba's simplest threads stop the process when two of ours call them at once
_ONE_AT_A_TIME = threading.Lock()


def rollout_numba(
    mixing: Float[Tensor, "*#batch layers"],
    kernels: Float[Tensor, "*#batch layers n n"],
    rows: Int[Tensor, " q"],
    renormalise: bool = False,
) -> Float[Tensor, "*batch q n"]:
    """Some rows of P; each A is read once, and only on and below the diagonal.

    Args:
        mixing: λ `[..., T]`.
        kernels: lower triangular A `[..., T, N, N]` on the CPU; copied if they are not contiguous or in float16.
            Leading dimensions broadcast with those of `mixing`.
        rows: query positions `[Q]`, 0 for the first token.
        renormalise: divide each row of A by its sum, which half precision has made unequal to 1.

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
    if a.dtype == torch.float16:
        a = a.float()
    a = a.contiguous()
    if a.dtype == torch.bfloat16:
        a = a.view(torch.uint16 if n % 2 or a.storage_offset() % 2 else torch.uint32)
    stored = a.numpy().reshape(-1, layers, n, a.shape[-1])
    which = np.arange(len(stored)) if which is None else which.numpy()
    out = torch.zeros(*lam.shape[:-1], len(rows), n, dtype=wide)
    if out.numel():
        flat = out.numpy().reshape(-1, len(rows), n)
        with _ONE_AT_A_TIME:
            _walk(
                stored, which, lam.contiguous().numpy().reshape(-1, layers), rows.cpu().numpy(), renormalise, flat,
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


# A word of a kernel is one float, the bits of one bfloat16 (uint16), or those of two (uint32, the even column in the
# lower half). numba reads the sources from here on; a run-time type check would wrap the functions.


@_compiled(inline="always")
@no_type_check
def _lower(word):
    return np.uint32(word << np.uint32(16)).view(np.float32)  # a bfloat16 is the upper half of a float32


@_compiled(inline="always")
@no_type_check
def _upper(word):
    return np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)


@no_type_check
def _weight(row, c) -> Any:
    """The weight in column c of a row of words (compiled only)."""


@overload(_weight)
@no_type_check
def _compiled_weight(row, c):
    if row.dtype == numba.uint32:
        return lambda row, c: _upper(row[c // 2]) if c % 2 else _lower(row[c // 2])
    if row.dtype == numba.uint16:
        return lambda row, c: _lower(np.uint32(row[c]))
    return lambda row, c: row[c]


@no_type_check
def _address(context, builder, kind, array, *index):
    """The address of array[index], for an intrinsic."""
    found = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, found, index, wraparound=False)


@intrinsic
@no_type_check
def _take(context, counter):
    """counter[0]++ (int64); no two threads are given the same value."""

    def generate(context, builder, signature, args):
        place = _address(context, builder, signature.args[0], args[0], ir.IntType(64)(0))
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "monotonic")

    return numba.types.int64(counter), generate


@intrinsic
@no_type_check
def _set(context, flags, k):
    """flags[k] = 1 (int64), seen by nobody before all that this thread has written until now."""

    def generate(context, builder, signature, args):
        place = _address(context, builder, signature.args[0], *args)
        builder.store_atomic(ir.IntType(64)(1), place, "release", 8)
        return context.get_dummy_value()

    return numba.types.void(flags, k), generate


@intrinsic
@no_type_check
def _is_set(context, flags, k):
    """flags[k] (int64); after a 1, all that its thread had written before is seen too."""

    def generate(context, builder, signature, args):
        place = _address(context, builder, signature.args[0], *args)
        return builder.load_atomic(place, "acquire", 8)

    return numba.types.int64(flags, k), generate


def _group(fetch: bool) -> Any:
    """Makes the innermost loop; numba's own choice of instructions would leave no room for fetching line by line."""

    @intrinsic
    @no_type_check
    def group(context, a, r, begin, end, v, sums, following, backwards):
        """sums[s] += Σ_k v[k] a[r+k], k < `_GROUP`, for the words [begin, end) of the rows and each column s of a word.

        Whole lines of memory: end - begin is a multiple of 64 bytes. `backwards`: they are gone through from the last.
        With `fetch`, the same lines of the group that begins with row `following` are asked for.
        """
        signature = numba.types.void(a, r, begin, end, v, sums, following, backwards)
        return signature, functools.partial(_generate_group, fetch=fetch)

    return group


@no_type_check
def _generate_group(context, builder, signature, args, fetch):
    kind, kind_v, kind_sums = signature.args[0], signature.args[4], signature.args[5]
    a, r, begin, end, v, sums, following, backwards = args
    index, size = r.type, 64 * 8 // kind.dtype.bitwidth  # words in a line
    words = ir.VectorType(context.get_data_type(kind.dtype), size)
    numbers = ir.VectorType(context.get_data_type(kind_sums.dtype), size)
    columns = 2 if kind.dtype == numba.uint32 else 1

    rows = [builder.add(r, index(k)) for k in range(_GROUP)]
    starts = [_address(context, builder, kind, a, row, index(0)) for row in rows]
    factors = [builder.load(_address(context, builder, kind_v, v, index(k))) for k in range(_GROUP)]
    factors = [_splat(builder, factor, numbers) for factor in factors]
    totals = [_address(context, builder, kind_sums, sums, index(s), index(0)) for s in range(columns)]
    length = cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, a).shape)[1]
    ahead = builder.mul(builder.sub(following, r), length)
    last = builder.sub(builder.add(begin, end), index(size))
    with cgutils.for_range_slice(builder, begin, end, index(size), index) as (at, _):
        at = builder.select(backwards, builder.sub(last, at), at)
        if fetch:
            for start in starts:
                _fetch(builder, builder.gep(start, [builder.add(at, ahead)]))
        weights = []
        for start in starts:
            place = builder.bitcast(builder.gep(start, [at]), words.as_pointer())
            loaded = builder.load(place, align=kind.dtype.bitwidth // 8)
            weights.append(_widen(builder, loaded, kind.dtype, numbers))
        for s in range(columns):
            place = builder.bitcast(builder.gep(totals[s], [at]), numbers.as_pointer())
            part = builder.fmul(weights[0][s], factors[0])
            for k in range(1, _GROUP):
                part = builder.fadd(part, builder.fmul(weights[k][s], factors[k], flags=_FUSED), flags=_FUSED)
            total = builder.fadd(builder.load(place, align=kind_sums.dtype.bitwidth // 8), part)
            builder.store(total, place, align=kind_sums.dtype.bitwidth // 8)
    return context.get_dummy_value()


@no_type_check
def _widen(builder, words, dtype, numbers):
    """A vector of numbers for each column of a word."""
    if dtype not in (numba.uint16, numba.uint32):
        return [words]
    bits = ir.VectorType(ir.IntType(32), numbers.count)
    if dtype == numba.uint16:
        words = builder.zext(words, bits)
    lower = builder.shl(words, _splat(builder, ir.IntType(32)(16), bits))
    upper = builder.and_(words, _splat(builder, ir.IntType(32)(0xFFFF0000), bits))
    return [builder.bitcast(lower, numbers), builder.bitcast(upper, numbers)]


@no_type_check
def _splat(builder, value, kind):
    """The vector whose entries all are `value`."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None))


@no_type_check
def _fetch(builder, place):
    """Ask for the memory at an address, to be in the second cache soon; an address that is not ours does no harm."""
    place, number = builder.bitcast(place, ir.IntType(8).as_pointer()), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    builder.call(function, [place, number(0), number(2), number(1)])  # to read, into the second cache, data


_add_group, _add_group_and_fetch = _group(fetch=False), _group(fetch=True)


@_compiled(fastmath={"contract"})
@no_type_check
def _multiply(a, v, begin, end, renormalise, sums):
    """sums [Q, s, n/s] += v[:, begin:end] a[begin:end], each group of rows up to the line of memory of the diagonal.

    Never columns from `end` on: another thread may be gathering them.
    """
    queries, columns, words = sums.shape
    line = 64 // a.itemsize
    factors = np.empty((queries, _GROUP), v.dtype)
    head = begin + (end - begin) % _GROUP
    _factors(a, begin, head, v, renormalise, factors)
    _add_rest(a, begin, head, factors, 0, sums)
    for r in range(head, end, _GROUP):
        _factors(a, r, r + _GROUP, v, renormalise, factors)
        reach = min(-(-(r + _GROUP) // (line * columns)), end // (line * columns)) * line
        following = r + _GROUP if r + _GROUP < end else r
        backwards = a.shape[1] * a.itemsize % _PAGE == 0 and reach * a.itemsize <= _PAGE
        width = _CACHED if queries > 1 else words
        for w in range(0, reach, width):
            stop = min(w + width, reach)
            _add_group_and_fetch(a, r, w, stop, factors[0], sums[0], following, backwards)
            for q in range(1, queries):
                _add_group(a, r, w, stop, factors[q], sums[q], r, backwards)
        _add_rest(a, r, r + _GROUP, factors, reach * columns, sums)


@_compiled()
@no_type_check
def _factors(a, begin, end, v, renormalise, factors):
    """factors [Q, rows]: what each of the rows of A is multiplied by."""
    for r in range(begin, end):
        total = _total(a[r], r) if renormalise else v.dtype.type(1)
        for q in range(len(v)):
            factors[q, r - begin] = v[q, r] / total


@_compiled(fastmath={"contract"})
@no_type_check
def _add_rest(a, begin, end, factors, first, sums):
    """The same for the few columns from `first` that fill no line of memory, or for rows that fill no group."""
    columns = sums.shape[1]
    for r in range(begin, end):
        for q in range(len(factors)):
            for c in range(first, r + 1):
                sums[q, c % columns, c // columns] += factors[q, r - begin] * _weight(a[r], c)


@no_type_check
def _total(row, last) -> Any:
    """The sum of the weights in the columns up to `last` (compiled only)."""


@overload(_total, jit_options={"fastmath": {"contract", "reassoc"}})
@no_type_check
def _compiled_total(row, last):
    def single(row, last):
        total = _weight(row, last)
        for c in range(last):
            total += _weight(row, c)
        return total

    def pairs(row, last):
        total = _lower(row[last // 2])  # column `last`, or the one before it
        if last % 2:
            total += _upper(row[last // 2])
        words = row[: last // 2]
        for c in range(len(words)):
            total += _lower(words[c]) + _upper(words[c])
        return total

    return pairs if row.dtype == numba.uint32 else single


@_compiled(fastmath={"contract"})
@no_type_check
def _gather(sums, begin, end, stay, move, v):
    """v = stay v + move Σ sums for the columns from begin to end, and zero in sums [lanes, Q, s, n/s]."""
    lanes, queries, columns = sums.shape[:3]
    for q in range(queries):
        for column in range(columns):
            total = sums[0, q, column, begin // columns : end // columns]
            for lane in range(1, lanes):
                part = sums[lane, q, column, begin // columns : end // columns]
                for c in range(len(total)):
                    total[c] += part[c]
                    part[c] = 0
            into = v[q, begin + column : end : columns]
            for c in range(len(total)):
                into[c] = stay * into[c] + move * total[c]
                total[c] = 0


@_compiled()
@no_type_check
def _work(a, which, lam, height, renormalise, sums, counter, finished, out):
    """Take block after block of `height` rows until none is left."""
    layers, lanes, n = a.shape[1], sums.shape[1], sums.shape[3] * sums.shape[4]
    blocks = -(-n // height)
    known = 0  # blocks up to here are finished
    while True:
        number = _take(counter)
        if number >= len(finished):
            return
        while known <= number - lanes:  # up to the one that added to the same sums, and so to all of them a layer above
            if _is_set(finished, known):
                known += 1
        step, block = number // blocks, number % blocks
        end, lane = n - block * height, block % lanes
        begin = max(0, end - height)
        b, t, v = step // layers, layers - 1 - step % layers, out[step // layers]
        if t < layers - 1:
            _gather(sums[(step - 1) % _RING], begin, end, 1 - lam[b, t], lam[b, t], v)
        if t > 0:
            _multiply(a[which[b], t - 1], v, begin, end, renormalise, sums[step % _RING, lane])
        _set(finished, number)


@_compiled(parallel=_PRANGE_ALONE)
@no_type_check
def _walk(a, which, lam, rows, renormalise, out, threads):
    """out [B, Q, N], zero before, = the rows of P, from a [K, T, N, words], of which b uses which[b], and λ [B, T]."""
    queries, layers, columns = len(rows), a.shape[1], a.shape[2] // a.shape[3]
    n = -(-(rows.max() + 1) // columns) * columns  # nothing after the last query is seen
    for b in range(len(out)):
        for q in range(queries):
            row = a[which[b], layers - 1, rows[q]]
            move = lam[b, layers - 1] / _total(row, rows[q]) if renormalise else lam[b, layers - 1]
            for c in range(rows[q] + 1):
                out[b, q, c] = move * _weight(row, c)
            out[b, q, rows[q]] += 1 - lam[b, layers - 1]
    height = -(-n // (_BLOCKS * threads * _GROUP)) * _GROUP
    blocks = -(-n // height)
    lanes = min(_LANES * threads, blocks)
    sums = np.zeros((_RING, lanes, queries, columns, n // columns), out.dtype)
    counter, finished = np.zeros(1, np.int64), np.zeros(len(out) * layers * blocks, np.int64)
    for _thread in numba.prange(threads):
        _work(a, which, lam, height, renormalise, sums, counter, finished, out)
