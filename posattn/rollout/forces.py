"""Which of four forces makes a profile what it is: Shapley shares over their 16 combinations, and a path of curves.

A force can be taken out of an architecture. What "off" means is a choice, and it is this one:

* causal mask off: every position sees every other (a window then reaches as far ahead as back); scores by distance act
  on |i-j|, unless the architecture has its own scores ahead;
* residual off: λ = 1 in every layer, attention alone;
* positional encoding off: every score by distance is 0 (slopes 0), so that what the mask shows counts alike;
* content off: β = 0.

With all four off the last position's profile is uniform. For a quantity v (mean position in [0,1], mass of the first
eighth, mass of the last eighth) the share of force f is its Shapley value,

    φ_f = Σ_{S without f} |S|! (3-|S|)! / 4! · (v(S and f) - v(S)),

the change that f makes, averaged over all orders in which the four can be switched on. Shares add up exactly to
v(all on) - v(all off), and a force that the architecture does not have changes nothing and gets 0.
(The forces: arXiv 2602.16837, sections 4 and 5; the shares are ours.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.results import Provenance, Result, provenance
from posattn.rollout.simulate import Architecture, PowerLaw, resolve, simulate

if TYPE_CHECKING:
    import pandas as pd

FORCES = ("causal", "residual", "position", "content")
QUANTITIES = ("mean_position", "primacy", "recency")


@dataclasses.dataclass(frozen=True, eq=False)
class ForceShares(Result):
    """Shares of four forces in the shape of a profile, and the profiles on the way.

    `shares` [4, 3] over `forces` and `quantities`; `total` and `baseline` [3] with everything on and off; `values`
    [16, 3] and `profiles` [16, N] for every combination, where bit f of the index is set when force f is on. `path`
    [5, N] are the profiles as the forces of `order` come on one after the other, from none to all.
    """

    shares: Tensor
    total: Tensor
    baseline: Tensor
    values: Tensor
    profiles: Tensor
    path: Tensor
    order: tuple[str, ...]
    forces: tuple[str, ...] = FORCES
    quantities: tuple[str, ...] = QUANTITIES
    provenance: Provenance = dataclasses.field(default_factory=dict)

    def share(self, force: str, quantity: str) -> float:
        """The share of one force in one quantity.

        Raises:
            InputError: an unknown name.
        """
        if force not in self.forces or quantity not in self.quantities:
            raise InputError(f"no share of {force!r} in {quantity!r}: {self.forces} and {self.quantities}")
        return float(self.shares[self.forces.index(force), self.quantities.index(quantity)])

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each force and quantity: force, quantity, share."""
        import pandas as pd

        rows = itertools.product(enumerate(self.forces), enumerate(self.quantities))
        return pd.DataFrame([{"force": f, "quantity": q, "share": float(self.shares[i, k])} for (i, f), (k, q) in rows])

    def plot(self, ax: Any = None) -> Any:
        """The profiles as the forces come on one after the other."""
        from posattn import plotting

        axes = plotting.axes(ax)
        for curve, label in zip(self.path, ("none", *(f"+ {force}" for force in self.order)), strict=True):
            plotting.curve(axes, curve, label=label)
        axes.set_yscale("log")
        return plotting.finish(axes, x="input position", y="share of the influence", legend=True)

    def plot_shares(self, ax: Any = None) -> Any:
        """The shares as bars, grouped by quantity."""
        from posattn import plotting

        axes = plotting.axes(ax)
        places = torch.arange(len(self.quantities), dtype=torch.float64)
        for index, force in enumerate(self.forces):
            at = (places + 0.2 * (index - 1.5)).numpy()
            axes.bar(at, self.shares[index].numpy(), width=0.2, label=force, color=plotting.colour(index))
        axes.set_xticks(places.numpy(), [name.replace("_", " ") for name in self.quantities])
        axes.axhline(0, color="grey", linewidth=0.5)
        return plotting.finish(axes, x="", y="share of the change", legend=True)


def force_shares(
    architecture: Architecture | str,
    length: int,
    *,
    order: Sequence[str] = ("causal", "position", "residual", "content"),
    convention: str = "own",
) -> ForceShares:
    """Quantify what causal mask, residual, positional encoding and content each do to the last position's profile.

    Args:
        architecture: an `Architecture` or a preset's name; length: N.
        order: in which the path switches the forces on.

    Raises:
        InputError: an order that is not the four forces, and whatever `simulate` refuses.
    """
    if sorted(order) != sorted(FORCES):
        raise InputError(f"order must name the four forces once each: {', '.join(FORCES)}")
    whole = resolve(architecture, convention=convention)
    present = _present(whole)
    found: dict[frozenset[str], tuple[Tensor, Tensor]] = {}
    pairs = []
    for index in range(16):
        on = frozenset(force for bit, force in enumerate(FORCES) if index >> bit & 1)
        key = on & present  # a force that is not there changes nothing, to the last bit
        if key not in found:
            profile = simulate(without(whole, *(set(FORCES) - key)), length).last
            profile = profile.clamp(min=0) / profile.clamp(min=0).sum()
            found[key] = profile, quantities(profile)
        pairs.append(found[key])
    curves, values = (torch.stack(list(column)) for column in zip(*pairs, strict=True))
    shares = shapley(values)
    steps = [0]
    for force in order:
        steps.append(steps[-1] | 1 << FORCES.index(force))
    return ForceShares(
        shares=shares,
        total=values[15],
        baseline=values[0],
        values=values,
        profiles=curves,
        path=curves[steps],
        order=tuple(order),
        provenance=provenance(length=length, architecture=whole.describe(), convention=convention),
    )


def shapley(values: Float[Tensor, "16 *quantities"]) -> Float[Tensor, "4 *quantities"]:
    """Shapley values of the four forces from a quantity's values for all 16 combinations (bit f set: force f is on)."""
    shares = torch.zeros(len(FORCES), *values.shape[1:], dtype=torch.float64)
    for bit in range(4):
        for index in range(16):
            if not index >> bit & 1:
                size = index.bit_count()
                weight = math.factorial(size) * math.factorial(3 - size) / math.factorial(4)
                shares[bit] += weight * (values[index | 1 << bit] - values[index])
    return shares


def without(architecture: Architecture, *forces: str) -> Architecture:
    """The architecture with some of its forces taken out, as the module docstring defines it.

    Raises:
        InputError: an unknown force.
    """
    changes: dict[str, Any] = {}
    for force in forces:
        if force == "causal":
            changes["mask"] = "full"
        elif force == "residual":
            changes["mixing"] = 1.0
        elif force == "position":
            changes |= {"position": "none", "scores": None, "scaled_position": False}
        elif force == "content":
            changes["diagonal"] = None
        else:
            raise InputError(f"unknown force {force!r}: choose from {', '.join(FORCES)}")
    return dataclasses.replace(architecture, **changes)


def quantities(profiles: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch 3"]:
    """Mean position in [0,1] and the masses of the first and last eighth; a cut position counts in proportion."""
    n = profiles.shape[-1]
    index = torch.arange(n, dtype=torch.float64, device=profiles.device)
    first = (n / 8 - index).clamp(0, 1)
    weights = torch.stack([index / max(n - 1, 1), first, first.flip(0)], -1)
    return profiles.double() @ weights


def _present(architecture: Architecture) -> frozenset[str]:
    """The forces that an architecture has at all."""
    present = set()
    if architecture.mask == "causal":
        present.add("causal")
    if isinstance(architecture.mixing, PowerLaw) or bool((architecture.schedule() != 1).any()):
        present.add("residual")
    if architecture.position != "none":
        present.add("position")
    if architecture.diagonal is not None and bool((torch.as_tensor(architecture.diagonal) != 0).any()):
        present.add("content")
    return frozenset(present)
