"""Rollout on a GPU: two Triton kernels for P = R_T ... R_1, R_t = (1-λ_t) I + λ_t A_t, with R never built.

Both use that every A_t and every partial product is lower triangular, and both accumulate in float32.

**Whole P** (`whole_kernel`, one launch a layer). One program makes one tile (i, j), j <= i, of

    P'[i,j] = (1-λ) P[i,j] + λ Σ_{k=j..i} A[i,k] P[k,j]

so a layer costs N³/3 floating-point operations instead of the 2N³ of a dense product, and the convex combination is
part of the same kernel. P is kept in float32 and updated in place (a tile reads only its own part of it); for half
inputs a second copy in the input's dtype, two of them in turn, is what the matrix units read. Programs are numbered so
that the longest sums start first.

**Rows** (`rows_kernel`, one launch for all layers). For a query row v_T = e_q the recursion runs from the last layer
to the first: v_{t-1} = (1-λ_t) v_t + λ_t v_t A_t. A program makes one strip of columns of one layer: it reads the rows
of A_t from the strip's own diagonal down, and nothing else, so each A is read once and only its lower half. Strip c of
layer t needs the strips >= c of the layer before, and no others. Programs therefore take a ticket from a counter; the
tickets run over layers, then strips from the last to the first, then the batch, and a program waits until the strips
that it needs have set their bits. Everything a ticket waits for has a smaller ticket, so some running program can
always finish (nothing is assumed about how many programs fit on the device), and because a strip's inputs are one
whole layer of tickets older than it, the wait is short: layers overlap and the memory stays busy. The first step needs
only row q of A_T. Sums are made in a fixed order: results are the same from run to run.

The float32 product on the matrix units follows `torch.get_float32_matmul_precision()`: "highest" (torch's default)
takes three tf32 products (error as float32's), anything lower takes one.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

#: dtypes that the kernels take; all of them accumulate in float32
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: queries that one launch of the rows kernel handles; more are done in turns
MAX_QUERIES = 64

#: strips whose "done" bits share one 64-bit word
_STRIPS_PER_WORD = 32


class WholeConfig(NamedTuple):
    """Tile of P' (`block_m` × `block_n`), step along the sum (`block_k`), warps a program, and pipeline depth."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class RowsConfig(NamedTuple):
    """Columns a strip (`block_c`), rows read at a time (`block_r`), warps a program, and pipeline depth."""

    block_c: int
    block_r: int
    num_warps: int
    num_stages: int


_HALF_WHOLE = [
    WholeConfig(128, 128, 64, 4, 3),
    WholeConfig(128, 128, 64, 8, 4),
    WholeConfig(128, 256, 64, 8, 3),
    WholeConfig(256, 128, 64, 8, 3),
    WholeConfig(128, 128, 32, 4, 4),
    WholeConfig(64, 128, 64, 4, 4),
]
_HALF_ROWS = [
    RowsConfig(64, 64, 4, 4),
    RowsConfig(64, 128, 8, 4),
    RowsConfig(64, 256, 8, 3),
    RowsConfig(32, 128, 4, 4),
    RowsConfig(32, 256, 4, 4),
    RowsConfig(128, 64, 4, 4),
    RowsConfig(64, 64, 2, 5),
]
#: tiles worth trying on a new device, beside the ones that `whole_config` gives
WHOLE_CANDIDATES = {
    torch.bfloat16: _HALF_WHOLE,
    torch.float16: _HALF_WHOLE,
    torch.float32: [
        WholeConfig(64, 128, 32, 4, 3),
        WholeConfig(128, 64, 32, 4, 3),
        WholeConfig(64, 64, 32, 4, 4),
        WholeConfig(128, 128, 16, 8, 4),
        WholeConfig(128, 128, 32, 4, 3),
    ],
}
#: strips worth trying on a new device, beside the ones that `rows_config` gives
ROWS_CANDIDATES = {
    torch.bfloat16: _HALF_ROWS,
    torch.float16: _HALF_ROWS,
    torch.float32: [
        RowsConfig(32, 64, 4, 4),
        RowsConfig(32, 128, 4, 3),
        RowsConfig(32, 128, 8, 4),
        RowsConfig(64, 64, 4, 4),
        RowsConfig(64, 128, 8, 3),
        RowsConfig(32, 64, 2, 5),
    ],
}


def whole_config(dtype: torch.dtype, n: int) -> WholeConfig:
    """The tile that is used by default for a dtype and length."""
    if n <= 256:
        return WholeConfig(64, 64, 32, 4, 3)
    if dtype == torch.float32:
        return WholeConfig(128, 128, 32, 8, 3)
    return WholeConfig(128, 128, 64, 8, 3)


def rows_config(dtype: torch.dtype, n: int, queries: int = 1) -> RowsConfig:
    """The strip that is used by default for a dtype, length and number of queries; 128 bytes of a row of A."""
    columns = 32 if dtype == torch.float32 else 64
    if queries > 1:
        return RowsConfig(columns, 64, 4, 3)
    return RowsConfig(columns, 128, 4, 4)


def available() -> bool:
    """Whether the kernels can run here: triton is installed and there is a CUDA device."""
    if not torch.cuda.is_available():
        return False
    try:
        _kernels()
    except InputError:
        return False
    return True


def rollout_triton(
    mixing: Float[Tensor, "*#batch layers"],
    kernels: Float[Tensor, "*#batch layers n n"],
    rows: Int[Tensor, " q"] | None = None,
    *,
    renormalise: bool | None = None,
    config: WholeConfig | RowsConfig | None = None,
) -> Float[Tensor, "*batch m n"]:
    """P (`rows` None) or the given rows of P, by the Triton kernels; float32 whatever the input's dtype.

    Args:
        mixing: λ, `[..., T]`.
        kernels: lower-triangular A in bfloat16, float16 or float32, `[..., T, N, N]`; any strides.
        rows: query positions (0 is the first token), or None for the whole product.
        renormalise: divide each row of A by its sum. By default done for half-precision kernels, whose rows do not sum
            to 1 exactly; a kernel of its own reads A once more for it, and no copy of A is made.
        config: tile sizes to use instead of the default ones.

    Returns:
        `[..., N, N]` or `[..., Q, N]` in float32. No gradients flow through it.

    Raises:
        InputError: triton is not installed, the tensors are not on a CUDA device (and triton's interpreter is off), or
            the dtype is not one of the three.
    """
    triton_module = _kernels()
    if kernels.dtype not in SUPPORTED_DTYPES:
        raise InputError(
            f"the Triton rollout takes bfloat16, float16 or float32 kernels, not {kernels.dtype}; "
            "convert them, or use impl='matmul' or impl='rows'"
        )
    if not kernels.is_cuda and not triton_module.INTERPRETED:
        raise InputError(
            f"the Triton rollout needs a CUDA device but the kernels are on {kernels.device}; move them there, "
            "use impl='matmul' or impl='rows', or set TRITON_INTERPRET=1 before triton is imported to test on the CPU"
        )
    if torch.is_grad_enabled() and (kernels.requires_grad or mixing.requires_grad):
        raise InputError(
            "the Triton rollout has no gradient; use impl='matmul' or impl='rows', or call it under torch.no_grad()"
        )
    kernels = kernels.detach()
    mixing = mixing.detach().to(device=kernels.device, dtype=torch.float32)
    lead = torch.broadcast_shapes(mixing.shape[:-1], kernels.shape[:-3])
    layers, n = kernels.shape[-3], kernels.shape[-1]
    lam = mixing.expand(*lead, layers).reshape(-1, layers).contiguous()
    if max(kernels.stride()[-2:]) >= 1 << 22:  # offsets inside a tile are 32-bit
        kernels = kernels.contiguous()
    flat = kernels.expand(*lead, *kernels.shape[-3:])
    offsets, aligned = _batch_offsets(tuple(lead), flat.stride()[:-3], kernels.device)

    if renormalise is None:
        renormalise = kernels.dtype != torch.float32
    job = _Job(triton_module, lam, flat, offsets, aligned, None)
    if renormalise:
        job = job._replace(scale=_row_scale(job))
    if rows is None:
        return _whole(job, config if isinstance(config, WholeConfig) else None).reshape(*lead, n, n)
    strip = config if isinstance(config, RowsConfig) else None
    parts = [_rows(job, part, strip) for part in rows.split(MAX_QUERIES)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.reshape(*lead, rows.shape[0], n)


class _Job(NamedTuple):
    """One rollout: λ [B, T], A [..., T, N, N] as stored, the offset of each batch entry in it, 1 / row sums or None."""

    module: Any
    lam: Tensor
    flat: Tensor
    offsets: Tensor
    aligned: bool
    scale: Tensor | None


@lru_cache(maxsize=64)
def _batch_offsets(sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    """Where (in elements from the first one) each batch element begins, and whether all do at multiples of 16.

    Leading dimensions of any strides, expanded ones (stride 0) included, become a list of offsets instead of a copy.
    """
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int64) * stride
    offsets = offsets.reshape(-1)
    return offsets.to(device), bool((offsets % 16 == 0).all())


def _precision(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "ieee"  # has no meaning for half operands
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _row_scale(job: _Job) -> Tensor:
    """1 / (sum of each row of A), [B, T, N]."""
    module, lam, flat, offsets, aligned, _ = job
    batch, layers = lam.shape
    n = flat.shape[-1]
    stride_t, stride_r, stride_c = flat.stride()[-3:]
    scale = torch.empty(batch, layers, n, dtype=torch.float32, device=flat.device)
    block_r, block_c = (32, 128) if n > 32 else (16, 16)
    tile_rows = -(-n // block_r)
    with _device_of(flat):
        module.row_scale_kernel[(tile_rows * batch * layers,)](
            flat, offsets, stride_t, stride_r, stride_c, scale, layers, n, tile_rows,
            ALIGNED=aligned, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return scale


def _whole(job: _Job, config: WholeConfig | None) -> Tensor:
    module, lam, flat, offsets, aligned, scale = job
    batch, layers = lam.shape
    n, dtype, device = flat.shape[-1], flat.dtype, flat.device
    stride_m, stride_n = flat.stride()[-2:]
    precision = _precision(dtype)
    config = config or whole_config(dtype, n)

    # the parts above the diagonal are zero and stay so
    half = dtype != torch.float32
    source = torch.zeros(batch, n, n, dtype=dtype, device=device)
    target = torch.zeros_like(source)
    master = torch.zeros(batch, n, n, dtype=torch.float32, device=device) if half else source

    tile_rows = -(-n // config.block_m)
    square = config.block_m == config.block_n
    tiles = tile_rows * (tile_rows + 1) // 2 if square else tile_rows * -(-n // config.block_n)
    with _device_of(flat):
        for t in range(layers):
            module.whole_kernel[(tiles, batch)](
                flat.select(-3, t), offsets, stride_m, stride_n,
                source, target, master, lam, lam if scale is None else scale, t, layers, n, tile_rows,
                FIRST=t == 0, UPCAST=module.INTERPRETED and dtype == torch.bfloat16, ALIGNED=aligned, HALF=half,
                SCALED=scale is not None, SQUARE=square, EVEN=n % max(config[:3]) == 0, PRECISION=precision,
                BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
            source, target = target, source
    return master if half else source


def _rows(job: _Job, rows: Tensor, config: RowsConfig | None) -> Tensor:
    module, lam, flat, offsets, aligned, scale = job
    batch, layers = lam.shape
    device = flat.device
    n = flat.shape[-1]
    rows = rows.to(device=device, dtype=torch.int64).contiguous()
    queries = rows.shape[0]
    config = config or rows_config(flat.dtype, n, queries)
    stride_t, stride_r, stride_c = flat.stride()[-3:]

    padded = 1 if queries == 1 else max(16, 1 << (queries - 1).bit_length())  # a matrix product needs 16
    strips = -(-n // config.block_c)
    words = -(-strips // _STRIPS_PER_WORD)
    stride = -(-n // 32) * 32  # strips of 32 columns and more begin on a 128-byte line
    states = torch.empty(layers, batch, queries, stride, dtype=torch.float32, device=device)
    done = torch.zeros(layers * batch * words + 1, dtype=torch.int64, device=device)
    with _device_of(flat):
        module.rows_kernel[(layers * strips * batch,)](
            flat, offsets, stride_t, stride_r, stride_c,
            rows, states, stride, lam, lam if scale is None else scale, done, layers, batch, n, queries, strips,
            SCALED=scale is not None, ALIGNED=aligned, WORDS=words, QUERIES=padded,
            BLOCK_C=config.block_c, BLOCK_R=config.block_r, PER_WORD=_STRIPS_PER_WORD,
            STAGES=config.num_stages, PRECISION="tf32x3", num_warps=config.num_warps,
        )  # fmt: skip
    return states[0, :, :, :n]


def _device_of(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.no_grad()


@cache
def _kernels() -> ModuleType:
    """The module with the kernels' source, imported when first needed because it needs triton."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise InputError(
            "the Triton rollout needs the package 'triton' (pip install triton); "
            "impl='matmul' and impl='rows' need nothing more than torch"
        ) from error
    from posattn.rollout import _triton_source

    return _triton_source
