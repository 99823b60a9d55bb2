"""The rollout of attention with residual connections, from dense or structured kernels.

A layer moves influence with R = (1-λ) I + λ A; the whole network with P = R(T) ··· R(1), the last layer leftmost
(arXiv 2602.16837, section 3; λ = 1/2 is the rollout of Abnar and Zuidema, arXiv 2005.00928). R is never built:

* rows  p ← (1-λ) p + λ p A, from the last layer down to the first, starting at the one-hot row of each query;
* whole P ← (1-λ) P + λ A P, from the first layer up, starting at the identity.

With `depth="every"` the answer holds P(1), P(2), ..., P(T): what a model cut off after that many layers would do.

`rollout` checks its input, brings it into the dtype that is computed in, and hands it to one of the implementations
named in `IMPLEMENTATIONS`, which are imported when first used. Each has one of these two signatures:

* whole: `f(mixing [..., T], kernels [..., T, N, N], depth_every) -> [..., N, N]`, or `[..., T, N, N]` for every depth;
* rows:  `f(mixing [..., T], kernels [..., T, N, N], rows [Q]) -> [..., Q, N]`.

`...` are leading dimensions that broadcast. `matmul` and `rows` may rely on lower triangular kernels: kernels with
weight above the diagonal go to the plain versions of this module instead. Those in `_WIDENING` take half precision as
it is, and `renormalise=True`, so that no wider copy of all kernels is made.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

#: name -> (module:function for some rows, module:function for the whole P); None where it has no such form
IMPLEMENTATIONS: dict[str, tuple[str | None, str | None]] = {
    "reference": ("posattn.rollout.dense:reference_rows", "posattn.rollout.dense:reference_whole"),
    "matmul": (None, "posattn.rollout.dense:blocked_whole"),
    "rows": ("posattn.rollout.fast:rollout_rows", None),
    "numba": ("posattn.rollout.numba_kernels:rollout_numba", None),
    "triton": ("posattn.rollout.triton_kernels:rollout_triton", "posattn.rollout.triton_kernels:rollout_triton"),
}
_NAMES = (*IMPLEMENTATIONS, "structured", "auto")
#: what sums in float32 whatever the kernels' dtype (Triton does so for rows; its products for the whole P do not)
_WIDENING = ("matmul", "rows", "numba", "triton")

#: how far a row of a kernel may be from summing to 1
ROW_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout(Result):
    """How the influence of the input positions arrives at some query positions.

    `profile` [..., Q, N] (with every depth [..., D, Q, N]) holds distributions over input positions; `queries` [Q] are
    the positions asked about; `depths` [D] counts layers, or is None when only the full depth was asked for.
    """

    profile: Tensor
    queries: Tensor
    impl: str
    depths: Tensor | None = None
    provenance: Provenance = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """N, the number of positions."""
        return self.profile.shape[-1]

    @property
    def last(self) -> Float[Tensor, "*batch n"]:
        """The profile of the last position, [..., N].

        Raises:
            InputError: the last position was not among the queries.
        """
        found = torch.nonzero(self.queries == self.length - 1).flatten()
        if len(found) == 0:
            raise InputError("this rollout does not hold the last position: ask for it in `queries`")
        return self.profile[..., int(found[0]), :]

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each (batch entry, depth, query, position): columns batch, depth, query, position, value.

        Raises:
            InputError: the table would have more than a million rows.
        """
        import numpy as np
        import pandas as pd

        if self.profile.numel() > 10**6:
            raise InputError(f"a table of {self.profile.numel()} rows: select some of .profile first")
        values = self.profile.detach().double().cpu()
        with_depth = values if self.depths is not None else values.unsqueeze(-3)
        flat = with_depth.reshape(-1, *with_depth.shape[-3:])
        batch, depth, query, position = (axis.ravel() for axis in np.indices(tuple(flat.shape)))
        data: dict[str, Any] = {"batch": batch} if flat.shape[0] > 1 else {}
        if self.depths is not None:
            data["depth"] = self.depths.cpu().numpy()[depth]
        data |= {"query": self.queries.cpu().numpy()[query], "position": position, "value": flat.numpy().ravel()}
        return pd.DataFrame(data)

    def plot(self, ax: Any = None) -> Any:
        """Draw the profile of each query (at most eight lines; of every depth when there is one query)."""
        from posattn import plotting

        axes = plotting.axes(ax)
        profile = self.profile.detach().double().cpu()
        labels = [f"query {int(query)}" for query in self.queries]
        if self.depths is not None and len(self.queries) == 1:
            labels = [f"depth {int(depth)}" for depth in self.depths]
        lines = profile.reshape(-1, self.length)
        shown = torch.linspace(0, len(lines) - 1, min(len(lines), 8)).round().long()
        for index in shown.tolist():
            plotting.curve(axes, lines[index], label=labels[index % len(labels)])
        axes.set_yscale("log" if profile.min() > 0 else "linear")
        return plotting.finish(axes, x="input position", y="share of the influence", legend=len(lines) > 1)


def rollout(
    mixing: Any,
    kernels: Any,
    queries: str | int | Sequence[int] | Tensor = "last",
    *,
    impl: str = "auto",
    depth: str = "final",
    dtype: torch.dtype | None = None,
    causal: bool | None = None,
    validate: bool = True,
    length: int | None = None,
) -> Rollout:
    """Roll attention out through all layers: P = R(T) ··· R(1) with R = (1-λ) I + λ A.

    Args:
        mixing: λ [..., T] in [0, 1]; a single number stands for every layer.
        kernels: attention kernels A [..., T, N, N], rows summing to 1; or one structured kernel (for all layers, or
            with the layers as its last batch dimension), or a list of one structured kernel per layer.
        queries: "last", "all", or the positions whose rows are wanted (negative ones count from the end).
        impl: "auto", "reference" (float64), "matmul" (whole P), "rows", "numba" (rows on the CPU), "triton", or
            "structured". The first use of numba compiles for some seconds; "auto" takes it from then on.
        depth: "final", or "every" for P(1) to P(T).
        dtype: what to compute in; by default the kernels' own, float32 where that is half precision. `torch.bfloat16`
            is faster where the processor multiplies it, and good for two to three digits.
        causal: whether the kernels are lower triangular; found out when None.
        validate: look for NaN, negative weights and rows that do not sum to 1 (reads the kernels once more).
        length: N, needed with structured kernels only.

    Returns:
        `Rollout` with profile [..., Q, N], or [..., T, Q, N] for every depth. Half precision kernels are renormalised
        row by row before use. Gradients flow to λ and A through the torch implementations.

    Raises:
        InputError: λ outside [0, 1], NaN, shapes that do not fit, rows far from 1 (naming the layer), a bad option.
    """
    if impl not in _NAMES:
        raise InputError(f"unknown impl {impl!r}: choose from {', '.join(_NAMES)}")
    if depth not in ("final", "every"):
        raise InputError(f"depth must be 'final' or 'every', not {depth!r}")
    if not isinstance(kernels, Tensor) and not hasattr(kernels, "__array__"):
        from posattn.rollout.structured import rollout_structured

        if impl not in ("structured", "auto"):
            raise InputError(f"impl={impl!r} needs dense kernels: use .dense(N), or impl='structured'")
        if length is None:
            raise InputError("structured kernels have no length of their own: pass length=N")
        return rollout_structured(mixing, kernels, length, queries, impl=impl, depth=depth, dtype=dtype)
    if impl == "structured":
        raise InputError("impl='structured' needs structured kernels, not tensors")

    dense = torch.as_tensor(kernels)
    if dense.ndim < 3 or dense.shape[-1] != dense.shape[-2] or dense.shape[-1] == 0:
        raise InputError(f"kernels must be [..., T, N, N], not {list(dense.shape)}")
    layers, n = dense.shape[-3], dense.shape[-1]
    if length is not None and length != n:
        raise InputError(f"length={length}, but the kernels have {n} positions")
    weights = check_mixing(mixing, layers, device=dense.device)
    _broadcast(weights.shape[:-1], dense.shape[:-3])
    if validate:
        check_kernels(dense)
    if causal is None:
        causal = is_causal(dense)
    rows = query_indices(queries, n, device=dense.device)

    name = impl if impl != "auto" else _pick(weights, dense, rows, depth, causal)
    half = dense.dtype in (torch.float16, torch.bfloat16)
    compute = torch.float64 if name == "reference" else dtype or (torch.float32 if half else dense.dtype)
    every = depth == "every"
    as_stored = half and causal and compute == torch.float32 and name in _WIDENING
    as_stored = as_stored and (name != "triton" or not _is_whole(name, rows, n, every))
    if not as_stored:
        dense = dense.to(compute)
        if half:
            dense = dense / dense.sum(-1, keepdim=True)
    weights = weights.to(compute)

    profile = _run(name, weights, dense, rows, every, causal, renormalise=as_stored)
    if dtype is not None:
        profile = profile.to(dtype)
    return Rollout(
        profile=profile,
        queries=rows,
        impl=name,
        depths=torch.arange(1, layers + 1, device=rows.device) if depth == "every" else None,
        provenance=provenance(
            dtype=str(compute).removeprefix("torch."),
            device=str(dense.device),
            layers=layers,
            length=n,
            renormalised=half,
        ),
    )


def _is_whole(name: str, rows: Tensor, n: int, every: bool) -> bool:
    """Whether a request is for the form that gives the whole P."""
    return IMPLEMENTATIONS[name][0] is None or every or len(rows) >= n


def _run(
    name: str, mixing: Tensor, kernels: Tensor, rows: Tensor, every: bool, causal: bool, renormalise: bool = False
) -> Tensor:
    """Call an implementation in the form that suits the request, and select the rows that were asked for."""
    n, options = kernels.shape[-1], {"renormalise": True} if renormalise else {}
    for_rows, for_whole = IMPLEMENTATIONS[name]
    if not causal:
        if name in ("triton", "numba"):
            raise InputError(f"impl={name!r} needs causal kernels: these have weight above the diagonal")
        for_rows, for_whole = (
            (for_rows, for_whole)
            if name == "reference"
            else (
                for_rows and "posattn.rollout.dense:plain_rows",
                for_whole and "posattn.rollout.dense:plain_whole",
            )
        )
    whole = _is_whole(name, rows, n, every)
    if whole and for_whole is None:
        if not every:
            return _resolve(for_rows)(mixing, kernels, rows, **options)
        # rows at every depth: each depth is a rollout of its own that starts at that layer
        run = _resolve(for_rows)
        steps = range(1, kernels.shape[-3] + 1)
        return torch.stack([run(mixing[..., :t], kernels[..., :t, :, :], rows, **options) for t in steps], -3)
    if not whole:
        return _resolve(for_rows)(mixing, kernels, rows, **options)
    if name == "triton":
        if every:
            raise InputError("impl='triton' gives the final depth only: use impl='matmul' for every depth")
        profile = _resolve(for_whole)(mixing, kernels, None)
    else:
        profile = _resolve(for_whole)(mixing, kernels, every, **options)
    everything = len(rows) == n and bool((rows == torch.arange(n, device=rows.device)).all())
    return profile if everything else profile[..., rows, :]


def _resolve(name: str | None) -> Callable[..., Tensor]:
    assert name is not None
    module, function = name.split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise InputError(f"this implementation is not available here ({error}): use impl='auto'") from error


def _pick(mixing: Tensor, kernels: Tensor, rows: Tensor, depth: str, causal: bool) -> str:
    """The implementation that is fastest for this request and device."""
    needs_gradient = torch.is_grad_enabled() and (mixing.requires_grad or kernels.requires_grad)
    if (
        kernels.is_cuda
        and causal
        and depth == "final"
        and not needs_gradient
        and kernels.dtype != torch.float64
        and importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec("posattn.rollout.triton_kernels") is not None
    ):
        return "triton"
    # rows cost Q/N of the whole per layer, but read every kernel; for many depths the whole P is cheaper
    few = len(rows) * (kernels.shape[-3] if depth == "every" else 1) * 2 <= kernels.shape[-1]
    if not few:
        return "matmul"
    # not worth seconds of compiling for one rollout, and faster in all that follow
    compiled = "posattn.rollout.numba_kernels" in sys.modules
    suits = causal and not kernels.is_cuda and not needs_gradient and kernels.dtype != torch.float16
    return "numba" if compiled and suits else "rows"


# ---- implementations ------------------------------------------------------------------------------------------------


def reference_rows(
    mixing: Float[Tensor, "*#batch layers"], kernels: Float[Tensor, "*#batch layers n n"], rows: Int[Tensor, " q"]
) -> Float[Tensor, "*batch q n"]:
    """Some rows of `reference_whole`."""
    return reference_whole(mixing, kernels, False)[..., rows, :]


def reference_whole(
    mixing: Float[Tensor, "*#batch layers"], kernels: Float[Tensor, "*#batch layers n n"], depth_every: bool
) -> Tensor:
    """The definition, spelled out: R is built and multiplied, in float64. Slow, and what the others are held to."""
    weights, dense = mixing.double(), kernels.double()
    identity = torch.eye(dense.shape[-1], dtype=torch.float64, device=dense.device)
    product, history = identity, []
    for layer in range(dense.shape[-3]):
        weight = weights[..., layer, None, None]
        transition = (1 - weight) * identity + weight * dense[..., layer, :, :]
        product = transition @ product
        history.append(product)
    return torch.stack(history, -3) if depth_every else product


def plain_rows(
    mixing: Float[Tensor, "*#batch layers"], kernels: Float[Tensor, "*#batch layers n n"], rows: Int[Tensor, " q"]
) -> Float[Tensor, "*batch q n"]:
    """p ← (1-λ) p + λ p A from the last layer to the first; any kernel, any dtype, differentiable."""
    n = kernels.shape[-1]
    batch = torch.broadcast_shapes(mixing.shape[:-1], kernels.shape[:-3])
    profile = torch.nn.functional.one_hot(rows, n).to(kernels.dtype).expand(*batch, len(rows), n)
    for layer in reversed(range(kernels.shape[-3])):
        weight = mixing[..., layer, None, None]
        profile = (1 - weight) * profile + weight * (profile @ kernels[..., layer, :, :])
    return profile


def plain_whole(
    mixing: Float[Tensor, "*#batch layers"], kernels: Float[Tensor, "*#batch layers n n"], depth_every: bool
) -> Tensor:
    """P ← (1-λ) P + λ A P from the first layer to the last; any kernel, any dtype, differentiable."""
    n = kernels.shape[-1]
    batch = torch.broadcast_shapes(mixing.shape[:-1], kernels.shape[:-3])
    product, history = torch.eye(n, dtype=kernels.dtype, device=kernels.device).expand(*batch, n, n), []
    for layer in range(kernels.shape[-3]):
        weight = mixing[..., layer, None, None]
        product = (1 - weight) * product + weight * (kernels[..., layer, :, :] @ product)
        if depth_every:
            history.append(product)
    return torch.stack(history, -3) if depth_every else product


def blocked_whole(
    mixing: Float[Tensor, "*#batch layers"],
    kernels: Float[Tensor, "*#batch layers n n"],
    depth_every: bool,
    renormalise: bool = False,
) -> Tensor:
    """`plain_whole` for lower triangular kernels, by blocks: nothing above the diagonal is touched."""
    from posattn.rollout.fast import rollout_matmul

    product = rollout_matmul(mixing, kernels, depth_every, renormalise)
    return product[..., 1:, :, :] if depth_every else product  # without P(0) = I


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_mixing(mixing: Any, layers: int | None = None, device: torch.device | None = None) -> Tensor:
    """λ as a tensor [..., T] of floats.

    Raises:
        InputError: NaN, a value outside [0, 1] (naming the layer), or a length other than `layers`.
    """
    try:
        # plain numbers keep their double precision
        kept = None if hasattr(mixing, "dtype") else torch.float64
        weights = torch.as_tensor(mixing, device=device, dtype=kept)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"mixing cannot be read as numbers: {error}") from error
    if weights.dtype.is_complex or weights.dtype == torch.bool:
        raise InputError(f"mixing must hold real numbers, not {weights.dtype}")
    if not weights.dtype.is_floating_point:
        weights = weights.double()
    if weights.ndim == 0 and layers is not None:
        weights = weights.expand(layers)
    if weights.ndim == 0 or weights.shape[-1] == 0:
        raise InputError("mixing holds no layer")
    if layers is not None and weights.shape[-1] != layers:
        raise InputError(f"mixing has {weights.shape[-1]} layers, the kernels have {layers}")
    with torch.no_grad():
        outside = ~((weights >= 0) & (weights <= 1))
        if outside.any():
            where = torch.nonzero(outside)[0]
            value = float(weights[tuple(where)])
            raise InputError(f"mixing of layer {int(where[-1])} is {value:g}: λ must lie in [0, 1]")
    return weights


def check_kernels(kernels: Float[Tensor, "*batch layers n n"]) -> None:
    """Refuse kernels with NaN, negative weights, or rows that do not sum to 1.

    Raises:
        InputError: it names the layer and the worst row.
    """
    if not kernels.dtype.is_floating_point:
        raise InputError(f"kernels must be floating point, not {kernels.dtype}")
    tolerance = ROW_TOLERANCE.get(kernels.dtype, 2e-2)
    with torch.no_grad():
        for layer in range(kernels.shape[-3]):
            kernel = kernels[..., layer, :, :]
            # accumulating in float32 keeps the check about the kernel, not about the sum
            sums = kernel.sum(-1, dtype=torch.promote_types(kernel.dtype, torch.float32))
            if not bool(torch.isfinite(sums).all()):
                raise InputError(f"the kernel of layer {layer} holds NaN or infinite values")
            error = (sums - 1).abs()
            if float(error.max()) > tolerance:
                worst = int(torch.argmax(error.reshape(-1))) % kernels.shape[-1]
                value = float(sums.reshape(-1, kernels.shape[-1])[:, worst].flatten()[0])
                raise InputError(
                    f"row {worst} of the kernel of layer {layer} sums to {value:.4g}, not 1 "
                    "(an attention sink? renormalise the rows before the rollout)"
                )
            if float(kernel.min()) < -tolerance:
                raise InputError(f"the kernel of layer {layer} holds the negative weight {float(kernel.min()):.4g}")


def is_causal(kernels: Float[Tensor, "*batch n n"]) -> bool:
    """Whether every kernel is lower triangular, exactly."""
    n, size = kernels.shape[-1], 64
    with torch.no_grad():
        for r0 in range(0, n, size):  # a block of rows at a time: its own upper half, and what lies to its right
            r1 = min(r0 + size, n)
            for part in (kernels[..., r0:r1, r0:r1].triu(1), kernels[..., r0:r1, r1:]):
                if part.numel() and any(bool(value != 0) for value in part.aminmax()):  # also NaN
                    return False
    return True


def query_indices(
    queries: str | int | Sequence[int] | Tensor, n: int, device: torch.device | None = None
) -> Int[Tensor, " q"]:
    """The positions that `queries` stands for, counted from 0.

    Raises:
        InputError: an unknown word, no position, or a position outside the sequence.
    """
    if isinstance(queries, str):
        if queries == "last":
            return torch.tensor([n - 1], device=device)
        if queries == "all":
            return torch.arange(n, device=device)
        raise InputError(f"queries must be 'last', 'all' or positions, not {queries!r}")
    rows = torch.as_tensor(queries, device=device)
    if rows.dtype.is_floating_point or rows.dtype == torch.bool or rows.ndim > 1 or rows.numel() == 0:
        raise InputError("queries must be 'last', 'all' or a list of whole numbers")
    rows = rows.reshape(-1).long()
    outside = (rows < -n) | (rows >= n)
    if bool(outside.any()):
        raise InputError(f"query position {int(rows[outside][0])} is outside the {n} positions")
    return torch.where(rows < 0, rows + n, rows)


def _broadcast(left: torch.Size, right: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(left, right)
    except RuntimeError as error:
        raise InputError(f"leading shapes of mixing {list(left)} and kernels {list(right)} do not fit") from error
