"""From measurement to theory: the profile that mask, position and coarse content imply, with the measured λ.

Two variants, each the last row of a rollout of structured kernels (arXiv 2602.16837, sections 4 and 5):

* `positional`: ALiBi layers from their slopes; layers with rotary or absolute positions from s(d), the mean logit by
  distance of each head; layers without any position from their mask (and window) alone;
* `positional_content`: the same with β, the measured excess of the diagonal content logits.

Where s(d) is measured, s(0) already holds that excess: at distance 0 no rotation acts, and what is left is content. So
`positional` takes s(0) − β there, which for a rotary layer is the mean content logit of the other pairs, as if the own
token were like any other; `positional_content` gives β back and is the measured s(d) as it stands.

Learned sinks take no part: rows sum to 1, as those of the measured kernels after they were renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.rollout.forces import FORCES, ForceShares, force_shares, shapley
from posattn.rollout.kernels import StructuredKernel, alibi_kernel, distance_kernel, uniform_kernel
from posattn.rollout.simulate import Architecture
from posattn.rollout.structured import rollout_structured
from posattn.rollout.variants import area

#: what each variant is, in words
IMPLIED: dict[str, str] = {
    "positional": "mask and position alone, measured λ",
    "positional_content": "mask, position and each head's preference for its own token, measured λ",
}
_MEASURED = ("rotary", "absolute", "shortformer")  # schemes whose score by distance is measured
_KINDS = (*_MEASURED, "alibi", "none")


def implied_kernels(
    logits: Float[Tensor, "t h n"],
    diagonal: Float[Tensor, "t h"],
    *,
    kinds: Sequence[str],
    windows: Sequence[int | None],
    slopes: Float[Tensor, "t h"],
    heads: Sequence[int] | None = None,
    content: bool = True,
) -> list[StructuredKernel]:
    """The kernel of each layer from its position scheme and, with `content`, β.

    Args:
        logits: s(d), the mean logit by distance; needed up to the layer's window.
        diagonal: β.
        kinds: of each layer: "rotary", "absolute", "shortformer", "alibi" or "none".
        windows: visible keys of each layer, the query's own included; None for all.
        slopes: of ALiBi layers, as they act in the softmax.
        heads: how many heads each layer has, where not all H.

    Raises:
        InputError: an unknown kind, or lists that do not fit the layers.
    """
    layers, width = logits.shape[:2]
    _check(layers, kinds, windows, heads)
    made = []
    for t in range(layers):
        h = width if heads is None else heads[t]
        beta = diagonal[t, :h] if content else None
        if kinds[t] == "alibi":
            made.append(alibi_kernel(slopes[t, :h], window=windows[t], diagonal=beta))
        elif kinds[t] == "none":
            made.append(uniform_kernel(heads=h, window=windows[t], diagonal=beta))
        else:
            made.append(distance_kernel(_position(logits, diagonal)[t, :h], window=windows[t], diagonal=beta))
    return made


def implied_profiles(mixing: Float[Tensor, " t"], positional: Any) -> dict[str, Float[Tensor, " n"]]:
    """The variants of `IMPLIED` as profiles [N] of the last position.

    Args:
        mixing: measured λ.
        positional: the result of a `PositionalProbe` (its fields are the arguments of `implied_kernels`).
    """
    found = {}
    for name in IMPLIED:
        kernels = implied_kernels(
            positional.logits,
            positional.diagonal,
            kinds=positional.kinds,
            windows=positional.windows,
            slopes=positional.slopes,
            heads=positional.heads,
            content=name == "positional_content",
        )
        profile = rollout_structured(mixing.double(), kernels, positional.logits.shape[-1]).last.clamp(min=0)
        found[name] = profile / profile.sum()
    return found


def implied_architecture(mixing: Float[Tensor, " t"], positional: Any, name: str = "measured") -> Architecture | None:
    """The architecture whose profile is `positional_content`, or None where layers differ in their number of heads.

    A model with one kind of position throughout keeps it; where layers mix kinds, all become scores by distance.
    """
    layers, heads, n = positional.logits.shape
    if set(positional.heads) != {heads}:
        return None
    _check(layers, positional.kinds, positional.windows, None)
    kinds, windows = set(positional.kinds), positional.windows
    options: dict[str, Any] = {"position": "none"}
    if kinds == {"alibi"}:
        options = {"position": "alibi", "slopes": positional.slopes}
    elif kinds != {"none"}:
        distance = torch.arange(n, dtype=torch.float64)
        scores = _position(positional.logits, positional.diagonal)
        for t, kind in enumerate(positional.kinds):
            if kind == "none":
                scores[t] = 0.0
            elif kind == "alibi":
                scores[t] = -positional.slopes[t, :, None] * distance
        options = {"position": "distance", "scores": scores}
    return Architecture(
        layers=layers,
        heads=heads,
        mixing=mixing.double(),
        window=windows[0] if len(set(windows)) == 1 else tuple(windows),
        diagonal=positional.diagonal,
        name=name,
        **options,
    )


def implied_forces(
    architecture: Architecture, length: int, measured: Float[Tensor, " n"] | None = None
) -> tuple[ForceShares, dict[str, Any] | None]:
    """Shares of the four forces in the implied profile, and in its distance to the measured one.

    Returns:
        `ForceShares`, and where there is a measured profile `{"shares": [4], "baseline": W1 of an even profile,
        "total": W1 with all four}`: a negative share brings the profile nearer. Shares add up to total − baseline.
    """
    shares = force_shares(architecture, length)
    if measured is None:
        return shares, None
    distances = torch.tensor([area(profile, measured) for profile in shares.profiles], dtype=torch.float64)
    parts = shapley(distances)
    assert len(parts) == len(FORCES)
    return shares, {"shares": parts, "baseline": float(distances[0]), "total": float(distances[-1])}


def _position(logits: Tensor, diagonal: Tensor) -> Tensor:
    """s(d) without the diagonal's own excess."""
    scores = logits.double().clone()
    scores[..., 0] -= diagonal.double()
    return scores


def _check(layers: int, kinds: Sequence[str], windows: Sequence[int | None], heads: Sequence[int] | None) -> None:
    for name, values in (("kinds", kinds), ("windows", windows), ("heads", heads)):
        if values is not None and len(values) != layers:
            raise InputError(f"{len(values)} {name} for {layers} layers")
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise InputError(f"unknown kind of position {unknown[0]!r}: choose from {', '.join(_KINDS)}")
