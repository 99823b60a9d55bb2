"""The energy rollout: a forward-only prediction of how large the gradient at each input position is.

A rollout of attention weights adds the weights of all paths from an input position to the output, as if every path
pushed the output the same way. In a trained network thousands of paths arrive with unrelated directions, so their
*squares* add. With g the backward signal at a block's output and K[i,j] the squared gain with which source j reaches
target i,

    E‖g_j⁽ᵗ⁻¹⁾‖² = Σ_i (δ_ij + K⁽ᵗ⁾[i,j]) E‖g_i⁽ᵗ⁾‖²        (cross terms are taken to vanish)

that is e⁽ᵗ⁻¹⁾ = e⁽ᵗ⁾ (I + K⁽ᵗ⁾), from the last layer to the first, starting at the one-hot row of the query. The
profile is √e, made a distribution. The residual connection is the I. A token-local MLP with squared gain γ_i (of the
stream through it, the residual connection around it included) multiplies: e_i ← γ_i e_i before the attention of its
block where the two are in sequence; in a parallel block, where both read the same stream, e ← e (diag γ + K).

Two limits fix what the recursion means, and are tests: where path contributions are independent with mean zero, √e *is*
the root mean square gradient; where they all agree, the plain rollout is exact and this one is not.

Between the limits: paths that pass the same heads of the same layers, at whatever positions, meet the same matrices and
do agree, while different heads' matrices are unrelated. `coherent_energy_rollout` therefore keeps the whole second
moment C[j,k] = E⟨g_j, g_k⟩ of the backward signals, with per-head gains ρ_h:

    C⁽ᵗ⁻¹⁾ = C⁽ᵗ⁾ + Σ_h ρ_hᵀ C⁽ᵗ⁾ ρ_h        (and on the diagonal: what K holds beyond Σ_h ρ_h², MLPs, keys)

whose diagonal is e. Dropping the off-diagonal part of C gives the energy rollout back; one head whose matrix is a
multiple of the identity is not of this kind (the residual stream and the head agree too), but a network at random
initialisation is, exactly. MLPs multiply the diagonal only: their Jacobians differ from token to token, so they end the
agreement of paths that pass them at different positions.

Nothing is normalised per layer (K is a gain, not a distribution over sources), so e may grow by orders of magnitude: it
is rescaled as it goes, and the logarithm of the scale is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.results import provenance
from posattn.rollout.dense import Rollout, is_causal, query_indices


@dataclasses.dataclass(frozen=True, eq=False)
class EnergyRollout(Rollout):
    """A `Rollout` whose profile [..., Q, N] is √e normalised; `log_scale` [..., Q] is log Σ_j √e_j before that.

    So `profile * exp(log_scale)` is the predicted root mean square gradient norm at each position, for a backward
    signal of unit norm at the query.
    """

    log_scale: Tensor | None = None


def energy_rollout(
    kernels: Float[Tensor, "*batch layers n m"],
    queries: str | int | Sequence[int] | Tensor = "last",
    *,
    mlp: Float[Tensor, "..."] | None = None,
    parallel: bool | Sequence[bool] = False,
    scale: Any = 1.0,
    validate: bool = True,
) -> EnergyRollout:
    """Propagate squared gains from the query positions back to the inputs.

    Args:
        kernels: K [..., T, N, N], squared gains (not rows of a distribution), zero above the diagonal.
        queries: "last", "all", or positions (negative ones count from the end).
        mlp: squared gains γ [..., T, N] of the token-local MLPs, residual connections included; 1 by default.
        parallel: whether attention and MLP read the same stream, for all layers or one by one. Only matters with `mlp`.
        scale: multiplies every kernel; a number or [T]. 1 is the definition; others are for calibration.
        validate: look for NaN, negative gains and weight above the diagonal.

    Returns:
        `EnergyRollout`; computed in float64.

    Raises:
        InputError: shapes that do not fit, NaN, a negative gain (naming the layer), weight above the diagonal.
    """
    if kernels.shape[-1] != kernels.shape[-2] or kernels.shape[-1] == 0:
        raise InputError(f"energy kernels must be [..., T, N, N], not {list(kernels.shape)}")
    layers, n = kernels.shape[-3], kernels.shape[-1]
    if mlp is not None and tuple(mlp.shape[-2:]) != (layers, n):
        raise InputError(f"mlp gains must be [..., {layers}, {n}] to fit the kernels, not {list(mlp.shape)}")
    if validate:
        check_gains(kernels, "energy kernel", causal=True)
        if mlp is not None:
            check_gains(mlp, "mlp gain", axes=1)
    side_by_side = [parallel] * layers if isinstance(parallel, bool) else list(parallel)
    if len(side_by_side) != layers:
        raise InputError(f"parallel has {len(side_by_side)} entries, the kernels have {layers} layers")
    factors = torch.as_tensor(scale, dtype=torch.float64, device=kernels.device).expand(layers)
    rows = query_indices(queries, n, device=kernels.device)

    batch = torch.broadcast_shapes(kernels.shape[:-3], () if mlp is None else mlp.shape[:-2])
    energy = torch.nn.functional.one_hot(rows, n).to(torch.float64).expand(*batch, len(rows), n)
    log_scale = torch.zeros(*batch, len(rows), dtype=torch.float64, device=kernels.device)
    for layer in reversed(range(layers)):
        gain = None if mlp is None else mlp[..., layer, None, :].double()
        kept = energy if gain is None else energy * gain
        into = energy if side_by_side[layer] else kept  # what attention's Jacobian acts on
        energy = kept + factors[layer] * (into @ kernels[..., layer, :, :].double())
        total = energy.sum(-1, keepdim=True)
        energy = energy / total
        log_scale = log_scale + total[..., 0].log()
    profile = energy.sqrt()
    total = profile.sum(-1, keepdim=True)
    return EnergyRollout(
        profile=profile / total,
        queries=rows,
        impl="energy",
        log_scale=log_scale / 2 + total[..., 0].log(),
        provenance=provenance(
            dtype="float64", device=str(kernels.device), layers=layers, length=n, mlp=mlp is not None
        ),
    )


def coherent_energy_rollout(
    head_gains: Float[Tensor, "layers heads n n"],
    kernels: Float[Tensor, "layers_ n_ m_"],
    query: int = -1,
    *,
    mlp: Float[Tensor, "..."] | None = None,
    parallel: bool | Sequence[bool] = False,
    validate: bool = True,
) -> EnergyRollout:
    """Propagate the second moments of the backward signals: paths through the same heads add, others their squares.

    Args:
        head_gains: ρ_h [T, H, N, N], gains (not squared) of single heads; zero above the diagonal.
        kernels: K [T, N, N], the squared gains of a single path, cross terms of heads and keys included.
        query: the position asked about.
        mlp: squared gains γ [T, N] of the token-local MLPs, residual connections included; 1 by default.
        parallel: whether attention and MLP read the same stream, for all layers or one by one.
        validate: as in `energy_rollout`.

    Returns:
        `EnergyRollout` with one query. Costs 2 T H products of N×N matrices, in float64.

    Raises:
        InputError: shapes that do not fit, NaN, a negative gain, weight above the diagonal.
    """
    if head_gains.shape[0] != kernels.shape[0] or head_gains.shape[-1] != kernels.shape[-1]:
        raise InputError(f"head gains {list(head_gains.shape)} and kernels {list(kernels.shape)} do not fit")
    layers, _, n, _ = head_gains.shape
    if mlp is not None and tuple(mlp.shape) != (layers, n):
        raise InputError(f"mlp gains must be [{layers}, {n}] to fit the kernels, not {list(mlp.shape)}")
    if validate:
        check_gains(kernels, "energy kernel", causal=True)
        check_gains(head_gains, "head gain", axes=3, causal=True)
        if mlp is not None:
            check_gains(mlp, "mlp gain", axes=1)
    side_by_side = [parallel] * layers if isinstance(parallel, bool) else list(parallel)
    rows = query_indices([query], n, device=kernels.device)
    moments = torch.zeros(n, n, dtype=torch.float64, device=kernels.device)
    moments[rows, rows] = 1.0
    log_scale = 0.0
    for layer in reversed(range(layers)):
        kept = moments.clone()
        if mlp is not None:
            kept.diagonal().mul_(mlp[layer].double())
        into = moments if side_by_side[layer] else kept
        single = kernels[layer].double()
        agreeing = torch.zeros_like(moments)
        for gain in head_gains[layer].double():
            agreeing += gain.mT @ into @ gain
            single = single - gain.square()
        moments = kept + agreeing
        energy = moments.diagonal()
        # what single paths carry beyond their heads' own squares; where heads cancel it may be negative
        energy.add_(into.diagonal() @ single).clamp_(min=0)
        total = float(moments.diagonal().sum())
        moments = moments / total
        log_scale += torch.tensor(total).log().item()
    profile = moments.diagonal().sqrt()
    total = profile.sum()
    return EnergyRollout(
        profile=(profile / total)[None],
        queries=rows,
        impl="coherent energy",
        log_scale=(log_scale / 2 + total.log())[None],
        provenance=provenance(
            dtype="float64", device=str(kernels.device), layers=layers, length=n, mlp=mlp is not None
        ),
    )


def check_gains(gains: Float[Tensor, "..."], what: str, *, axes: int = 2, causal: bool = False) -> None:
    """Refuse NaN, infinite or negative gains, and (for kernels) weight above the diagonal.

    `axes` axes follow the layers' axis.

    Raises:
        InputError: it names the layer.
    """
    with torch.no_grad():
        for layer in range(gains.shape[-1 - axes]):
            part = gains.select(-1 - axes, layer)
            if not bool(torch.isfinite(part).all()):
                raise InputError(f"the {what} of layer {layer} holds NaN or infinite values")
            if float(part.min()) < 0:
                raise InputError(f"the {what} of layer {layer} holds the negative value {float(part.min()):.4g}")
            if causal and not is_causal(part):
                raise InputError(f"the {what} of layer {layer} has weight above the diagonal: it must be causal")
