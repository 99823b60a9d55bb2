"""What cross-logits M say exactly, over all permutations of the keys and not only over swaps.

Permute the n earlier keys by π: the key of token t lands on position π(t) with logit M[π(t), t]. A positional head
keeps the logit of each position, a symbolic one the logit of each token. Over a uniformly random π, π(t) is uniform,
so the mean squared departures over all n! permutations are plain means over M:

    positional violation  V_pos = mean_{p,t} (M[p,t] − M[p,p])²
    symbolic violation    V_sym = mean_{p,t} (M[p,t] − M[t,t])²

(M[p,p] − M[t,t])² ≤ 2 (M[p,t] − M[p,p])² + 2 (M[p,t] − M[t,t])², and the mean of its left side is 2 Var(M's diagonal):
the **exclusion bound** V_pos + V_sym ≥ Var(own logits). A head whose logits vary cannot be both.

The **two-way analysis of variance** writes M = mean + position effect + symbol effect + interaction; the three
sums of squares add up to the total.

Without a soft cap M = U Kᵀ and every mean is a quadratic form in the d×d covariances of U and K, so that nothing of
size n² is made (and, being centred, nothing cancels). With one, M is built.

Source of the exclusion principle: arXiv 2511.11579; the bound in this form, and its proof above, are ours.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.heads.crosslogits import Moved


@dataclasses.dataclass(frozen=True)
class Exact:
    """Exact figures of M, per query (and head): all [...] float64.

    Violations and `logit_variance` in squared logits (nats²); `position`, `symbol`, `interaction` are shares of M's
    total variance (all 0 where M is constant); `position_scale` and `symbol_scale` are the standard deviations of the
    two effects in logits.
    """

    positional_violation: Float[Tensor, "*batch"]
    symbolic_violation: Float[Tensor, "*batch"]
    logit_variance: Float[Tensor, "*batch"]
    position: Float[Tensor, "*batch"]
    symbol: Float[Tensor, "*batch"]
    interaction: Float[Tensor, "*batch"]
    position_scale: Float[Tensor, "*batch"]
    symbol_scale: Float[Tensor, "*batch"]

    @property
    def slack(self) -> Float[Tensor, "*batch"]:
        """V_pos + V_sym − Var(own logits), never below zero beyond rounding."""
        return self.positional_violation + self.symbolic_violation - self.logit_variance


def exact(moved: Moved) -> Exact:
    """Exclusion bound and analysis of variance of one query of every head (see the module docstring)."""
    if moved.softcap is not None:
        return exact_from_matrix(moved.matrix())
    rounding = torch.finfo(moved.keys.dtype).eps
    u, k = moved.queries[..., :-1, :].double(), moved.keys[..., :-1, :].double()
    n = u.shape[-2]
    mean_u, mean_k = u.mean(-2, keepdim=True), k.mean(-2, keepdim=True)
    centred_u, centred_k = u - mean_u, k - mean_k
    own = (u * k).sum(-1)
    position_effect = (centred_u * mean_k).sum(-1)
    symbol_effect = (centred_k * mean_u).sum(-1)
    covariance_u, covariance_k = centred_u.mT @ centred_u / n, centred_k.mT @ centred_k / n
    ss_interaction = (covariance_u * covariance_k).sum((-1, -2))
    # the mean over t of (u_p·k_t − u_p·k_p)² is the spread of u_p·k_t plus the squared distance of its mean
    spread_t = ((u @ covariance_k) * u).sum(-1) + ((u * (mean_k - k)).sum(-1)).square()
    spread_p = ((k @ covariance_u) * k).sum(-1) + ((k * (mean_u - u)).sum(-1)).square()
    return _assemble(
        own, spread_t.mean(-1), spread_p.mean(-1), position_effect, symbol_effect, ss_interaction, rounding
    )


def exact_from_matrix(m: Float[Tensor, "*batch n n"]) -> Exact:
    """The same from M itself."""
    rounding = torch.finfo(m.dtype).eps
    m = m.double()
    own = m.diagonal(dim1=-2, dim2=-1)
    mean = m.mean((-1, -2), keepdim=True)
    position, symbol = m.mean(-1, keepdim=True) - mean, m.mean(-2, keepdim=True) - mean
    rest = m - mean - position - symbol
    return _assemble(
        own,
        (m - own.unsqueeze(-1)).square().mean((-1, -2)),
        (m - own.unsqueeze(-2)).square().mean((-1, -2)),
        position.squeeze(-1),
        symbol.squeeze(-2),
        rest.square().mean((-1, -2)),
        rounding,
    )


def _assemble(
    own: Tensor, v_pos: Tensor, v_sym: Tensor, position: Tensor, symbol: Tensor, rest: Tensor, rounding: float
) -> Exact:
    ss_position, ss_symbol = position.square().mean(-1), symbol.square().mean(-1)
    total = ss_position + ss_symbol + rest
    # a constant M has nothing to share out; rounding of it must not look like an effect
    magnitude = (8 * rounding * own.abs().amax(-1)).square()
    flat = total <= magnitude
    total = torch.where(flat, torch.ones_like(total), total)

    def share(part: Tensor) -> Tensor:
        return torch.where(flat, torch.zeros_like(part), part / total)

    return Exact(
        v_pos,
        v_sym,
        own.var(-1, correction=0),
        share(ss_position),
        share(ss_symbol),
        share(rest),
        ss_position.sqrt(),
        ss_symbol.sqrt(),
    )
