"""What depth does to influence: profiles layer by layer, bounds, and what lies beyond the last layer.

With R = (1-λ) I + λ A and causal A (arXiv 2602.16837, section 5):

* the diagonal of P is known exactly, P_ii = Π_t (1 - λ_t (1 - A_ii(t)));
* what has not reached the first token is bounded, max_i (1 - P_i1) ≤ Π_t (1 - ε_t λ_t) with ε_t = min_i A_i1(t). For
  u = 1 - P e_1 obeys u ← R u with u_1 = 0, and row i passes on at most the share 1 - λ A_i1 of the largest entry.

A schedule λ_t ~ c t^-β says what more layers would do. β > 1: Σλ_t is finite, the products above stay positive, and no
amount of depth collapses the mass onto the first token. β ≤ 1: Σλ_t is infinite, and the mass collapses if the first
column of A stays bounded below (ε_t ≥ ε > 0); A = I, say, never collapses. A lower triangular A has its diagonal as
eigenvalues, so for a kernel that repeats, what is left falls as exp(-g Σλ_t), g = 1 - max_{i>1} A_ii, in the long run.

`attention_only_bounds` has the case λ = 1 of Wu, Wang, Jegelka and Jadbabaie (arXiv 2502.01951) for their masks:
causal, sliding window, prefix, and a decay mask. The constants here are ours, derived as stated there; each holds
for every kernel of that form.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.results import Provenance, Result, provenance
from posattn.rollout.kernels import StructuredKernel
from posattn.rollout.layers import Layers, layers_from
from posattn.rollout.simulate import PowerLaw

if TYPE_CHECKING:
    import pandas as pd


# ---- schedules ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleFit(Result):
    """λ_t ≈ c t^-exponent, fitted by least squares to log λ_t from layer `first` (counted from 1) on.

    `error` is the root mean square of the residuals of log λ. `total` is Σλ_t over all depths, the measured layers and
    the fitted rest, None where it is infinite.
    """

    c: float
    exponent: float
    error: float
    first: int
    total: float | None

    @property
    def finite(self) -> bool:
        """Whether Σλ_t stays finite."""
        return self.total is not None

    @property
    def law(self) -> str:
        """The fit as a formula; one that neither falls nor rises is called the same at every depth."""
        power = f"{-self.exponent:.3g}".replace("-", "−")
        if abs(self.exponent) < 5e-4:
            return f"λ_t ≈ {self.c:.3g} at every depth"
        return f"λ_t ≈ {self.c:.3g}·t^{power}"

    def values(self, first: int, count: int) -> Float[Tensor, " count"]:
        """λ_first, ..., by the fit."""
        return PowerLaw(self.c, self.exponent).values(count, first)

    def to_dataframe(self) -> pd.DataFrame:
        """One row with the fitted numbers."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(self)])


def fit_schedule(mixing: Any, first: int | None = None) -> ScheduleFit:
    """Fit λ_t ~ c t^-β to a schedule.

    Args:
        mixing: λ [T]. Layers with λ = 0 are left out of the fit.
        first: the first layer used, counted from 1; by default 2 from four layers up, as the first layer, which reads
            the bare embeddings, is off the law in the models that were measured.

    Raises:
        InputError: fewer than two layers to fit.
    """
    from posattn.rollout.dense import check_mixing

    weights = check_mixing(mixing).detach().double().cpu()
    layers = len(weights)
    start = first if first is not None else (2 if layers >= 4 else 1)
    if start < 1:
        raise InputError(f"layers count from 1: first={start}")
    steps = torch.arange(1, layers + 1, dtype=torch.float64)
    used = (steps >= start) & (weights > 0)
    if int(used.sum()) < 2:
        if bool((weights == 0).all()):
            return ScheduleFit(c=0.0, exponent=0.0, error=0.0, first=start, total=0.0)
        raise InputError("a power law needs at least two layers with λ above 0")
    x, y = steps[used].log(), weights[used].log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    exponent, c = -slope, math.exp(float(y.mean()) - slope * float(x.mean()))
    error = float((y - (math.log(c) + slope * x)).square().mean().sqrt())
    exponent = round(exponent, 12) + 0.0  # so that an exact 1/t is not called 1.0000000000000002
    total = None if exponent <= 1 else float(weights.sum()) + _tail(c, exponent, layers)
    return ScheduleFit(c=c, exponent=exponent, error=error, first=start, total=total)


def _tail(c: float, exponent: float, after: int) -> float:
    """Σ_{t>after} c t^-exponent, infinite for an exponent up to 1."""
    from scipy.special import zeta

    return math.inf if exponent <= 1 else c * float(zeta(exponent, after + 1))


# ---- depth by depth -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class DepthTheory(Result):
    """Influence at every depth 1..T, and the quantities that decide what more depth does.

    `profiles` [T, N] of the last position; `log_diagonal` [T, N] of P; `off_first` [T] = max_i (1 - P_i1) and its
    `bound` [T]; `least_first` [T] = ε_t; `mixing_sum` [T] = Σλ up to each depth. `implication` says in words what
    extrapolating the schedule implies and `condition` under which condition; `diagonal_limit` is a lower bound on
    every P_ii at infinite depth (0 when Σλ_t is infinite, unless A_ii = 1).
    """

    mixing: Tensor
    profiles: Tensor
    log_diagonal: Tensor
    off_first: Tensor
    bound: Tensor
    least_first: Tensor
    mixing_sum: Tensor
    fit: ScheduleFit | None
    diagonal_limit: float | None
    implication: str
    condition: str
    provenance: Provenance = dataclasses.field(default_factory=dict)

    @property
    def diagonal(self) -> Float[Tensor, "layers n"]:
        """P_ii at every depth, exactly Π_t (1 - λ_t (1 - A_ii))."""
        return self.log_diagonal.exp()

    def to_dataframe(self) -> pd.DataFrame:
        """One row a depth: layer, mixing, mixing_sum, least_first, off_first, bound, last_diagonal, first_mass."""
        import pandas as pd

        return pd.DataFrame(
            {
                "layer": range(1, len(self.mixing) + 1),
                "mixing": self.mixing.numpy(),
                "mixing_sum": self.mixing_sum.numpy(),
                "least_first": self.least_first.numpy(),
                "off_first": self.off_first.numpy(),
                "bound": self.bound.numpy(),
                "last_diagonal": self.diagonal[:, -1].numpy(),
                "first_mass": self.profiles[:, 0].numpy(),
            }
        )

    def plot(self, ax: Any = None) -> Any:
        """What has not reached the first token, its bound, and the last position's own share, by depth."""
        from posattn import plotting

        axes = plotting.axes(ax)
        depth = range(1, len(self.mixing) + 1)
        plotting.curve(axes, self.off_first, depth, label="off the first token, max over i")
        plotting.curve(axes, self.bound, depth, label="bound Π(1−ελ)")
        plotting.curve(axes, self.diagonal[:, -1], depth, label="P_NN")
        axes.set_ylim(bottom=0)
        return plotting.finish(axes, x="depth (layers)", y="mass", legend=True)


def depth_theory(
    system: Any, length: int | None = None, *, convention: str = "own", fit_from: int | None = None
) -> DepthTheory:
    """Influence at every depth, exact diagonals, the bound, and what the schedule implies beyond the last layer.

    Args:
        system: an `Architecture`, a preset's name, or a pair (λ [T], kernels [T, N, N] or structured).
        length: N (may be left out with dense kernels).
        convention: of a preset, as in `simulate`.
        fit_from: first layer of the fit, see `fit_schedule`.

    Raises:
        InputError: parts that do not fit.
    """
    layers = layers_from(system, length, convention)
    n, mixing = layers.length, layers.mixing
    log_diagonal, off, least = [], [], []
    log_own = torch.zeros(n, dtype=torch.float64)
    rest = torch.ones(n, dtype=torch.float64)
    rest[0] = 0.0
    for t in range(layers.count):
        weight = float(mixing[t])
        log_own = log_own + torch.log1p(-weight * (1 - layers.diagonal(t)))
        rest = layers.step(t, weight, rest)
        log_diagonal.append(log_own)
        off.append(float(rest.max()))
        least.append(max(0.0, float(layers.column(t, 0).min())))
    least_first = torch.tensor(least, dtype=torch.float64)
    fit = fit_schedule(mixing, fit_from) if int((mixing > 0).sum()) >= 2 or float(mixing.sum()) == 0 else None
    bound = torch.cumprod(1 - least_first * mixing, 0) if layers.causal else torch.ones_like(mixing)
    limit, implication, condition = _implication(layers, fit, log_diagonal[-1], least_first)
    return DepthTheory(
        mixing=mixing,
        profiles=_profiles(layers),
        log_diagonal=torch.stack(log_diagonal),
        off_first=torch.tensor(off, dtype=torch.float64),
        bound=bound,
        least_first=least_first,
        mixing_sum=mixing.cumsum(0),
        fit=fit,
        diagonal_limit=limit,
        implication=implication,
        condition=condition,
        provenance=provenance(length=n, layers=layers.count, system=_name(system)),
    )


def _profiles(layers: Layers) -> Float[Tensor, "depth n"]:
    """The last position's profile of the network cut off after 1, 2, ..., T layers.

    All in one pass from the last layer down: the network that ends with a layer joins when that layer is reached.
    """
    start = torch.zeros(1, layers.length, dtype=torch.float64)
    start[0, -1] = 1.0
    active = start[:0]
    for t in reversed(range(layers.count)):
        weight = layers.mixing[t]
        active = torch.cat([start, active])
        active = (1 - weight) * active + weight * layers.left(t, active)
    return active


def _implication(
    layers: Layers, fit: ScheduleFit | None, log_diagonal: Tensor, least_first: Tensor
) -> tuple[float | None, str, str]:
    if layers.length == 1:
        return 1.0, "a single position is first and last: it keeps all there is, and no depth moves anything", "none"
    if fit is None:
        return None, "one layer with attention is not enough to extrapolate from", "none"
    law = fit.law + ("" if fit.error < 1e-9 else f" (log λ misses it by {fit.error:.2g} rms)")
    own = layers.diagonal(layers.count - 1)
    inner = own[1:] if layers.causal else own
    if fit.finite:
        step = 1 - float(inner.min()) if len(inner) else 0.0
        lowest = float((log_diagonal[1:] if layers.causal else log_diagonal).min()) if layers.length > 1 else 0.0
        limit = math.exp(lowest + _log_product(fit, step, layers.count)) if lowest > -math.inf else 0.0
        text = (
            f"{law} sums to {fit.total:.4g} over all depths, so no depth collapses the influence onto the first token: "
            f"every position keeps at least {limit:.3g} of itself"
        )
        return limit, text, "the schedule goes on as fitted, with exponent above 1, and λ stays below 1"
    if not layers.causal:
        text = f"{law} sums to infinity; without a causal mask all rows approach one common distribution"
        return 0.0, text, "the schedule goes on as fitted, and kernels keep all positions connected"
    gap = 1 - float(inner.max()) if len(inner) else 0.0
    if gap <= 0:
        text = (
            f"{law} sums to infinity, yet nothing collapses: a position with A_ii = 1 keeps all it has (collapse would "
            "need the first column of A bounded below, which A_ii = 1 excludes)"
        )
        return None, text, "the schedule goes on as fitted, and A_ii stays 1 there"
    smallest = float(least_first[-1])
    text = f"{law} sums to infinity, so that at infinite depth all influence is on the first token"
    if smallest > 0:
        need = f"the first column of A stays bounded below (its least entry at the last layer is ε = {smallest:.3g})"
    else:
        need = (
            f"every A_ii stays below 1 for i > 1 (the largest is now {1 - gap:.3g}; as ε = 0 in one layer, from a "
            "window or from weights that vanish, the bound by the first column says nothing)"
        )
    return 0.0, text, f"the schedule goes on as fitted, with exponent at most 1, and {need}"


def _log_product(fit: ScheduleFit, step: float, after: int) -> float:
    """log Π_{t>after} (1 - step·λ_t) for a fitted schedule with exponent above 1, from below."""
    explicit = 100_000
    values = fit.values(after + 1, explicit) * step
    if float(values.max()) >= 1:
        return -math.inf
    rest = step * _tail(fit.c, fit.exponent, after + explicit)
    last = float(values[-1])
    return float(torch.log1p(-values).sum()) - rest / (1 - last)  # log(1-x) ≥ -x/(1-x)


# ---- collapse -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Collapse(Result):
    """At which depth all but η of the last position's influence sits on the first token.

    `depth` is exact, from rolling on to at most `max_depth` layers, None when not reached; `predicted_depth` continues
    from there at the asymptotic rate (None: never, or not known). `bound_depth` is where Π(1-ε_t λ_t) guarantees it for
    every position. `off_first` [D] is 1 - P_N1 at each depth that was computed. `gap` is g of the module docstring;
    `floor` a lower bound on what stays off the first token at any depth (its own P_NN), 0 when nothing does.
    """

    eta: float
    schedule: str
    off_first: Tensor
    depth: int | None
    bound_depth: int | None
    predicted_depth: float | None
    gap: float
    floor: float
    reason: str
    provenance: Provenance = dataclasses.field(default_factory=dict)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a depth: depth, off_first."""
        import pandas as pd

        return pd.DataFrame({"depth": range(1, len(self.off_first) + 1), "off_first": self.off_first.numpy()})

    def plot(self, ax: Any = None) -> Any:
        """What is left off the first token, by depth, on logarithmic axes."""
        from posattn import plotting

        axes = plotting.axes(ax)
        plotting.curve(
            axes, self.off_first.clamp(min=1e-300), range(1, len(self.off_first) + 1), label="off the first token"
        )
        axes.axhline(self.eta, linestyle="--", color="grey", label=f"η = {self.eta:g}")
        axes.set(xscale="log", yscale="log")
        return plotting.finish(axes, x="depth (layers)", y="mass off the first token", legend=True)


def collapse(
    system: Any,
    length: int | None = None,
    eta: float = 0.01,
    *,
    schedule: str = "fit",
    max_depth: int = 4096,
    convention: str = "own",
) -> Collapse:
    """The depth at which 1-η of the last position's influence would sit on the first token.

    Args:
        system: as in `depth_theory`.
        schedule: what follows the last layer: "fit" (the fitted power law), "last" (λ_T for ever), both with the last
            layer's kernel, or "repeat" (all layers again and again).
        max_depth: how many layers are really computed.

    Raises:
        InputError: η outside (0, 1), an unknown schedule, parts that do not fit.
    """
    if not 0 < eta < 1:
        raise InputError(f"eta must lie between 0 and 1, not {eta}")
    if schedule not in ("fit", "last", "repeat"):
        raise InputError(f"schedule must be 'fit', 'last' or 'repeat', not {schedule!r}")
    if max_depth < 1:
        raise InputError(f"max_depth must be at least 1, not {max_depth}")
    layers = layers_from(system, length, convention)
    total, n = layers.count, layers.length
    fit = fit_schedule(layers.mixing) if schedule == "fit" else None

    tail: Tensor | None = None if fit is None else fit.values(total + 1, max(1, max_depth - total))
    rest = torch.ones(n, dtype=torch.float64)
    rest[0] = 0.0
    own = 0.0  # log P_NN
    bound, off = 1.0, []
    depth = bound_depth = None
    least = [max(0.0, float(layers.column(t, 0).min())) for t in range(1 if layers.shared else total)]
    keeps = [float(layers.diagonal(t)[-1]) for t in range(1 if layers.shared else total)]
    for step in range(max_depth):
        if step < total:
            layer, weight = step, float(layers.mixing[step])
        elif schedule == "repeat":
            layer, weight = step % total, float(layers.mixing[step % total])
        else:
            layer = total - 1
            weight = float(layers.mixing[-1]) if tail is None else float(tail[step - total])
        rest = layers.step(layer, weight, rest)
        factor = 1 - weight * (1 - keeps[0 if layers.shared else layer])
        own = own + math.log(factor) if factor > 0 else -math.inf
        bound *= 1 - weight * least[0 if layers.shared else layer]
        off.append(float(rest[-1]))
        if bound_depth is None and layers.causal and bound <= eta:
            bound_depth = step + 1
        if depth is None and off[-1] <= eta:
            depth = step + 1
        if depth is not None and step + 1 >= total and (bound_depth is not None or step > 2 * depth):
            break

    diagonals = [layers.diagonal(t) for t in range(1 if layers.shared or schedule != "repeat" else total)]
    if schedule != "repeat" and not layers.shared:
        diagonals = [layers.diagonal(total - 1)]
    gap = 1 - max(float(d[1:].max()) for d in diagonals) if n > 1 else 0.0
    floor, predicted, reason = _beyond(layers, fit, schedule, eta, off, own, gap, keeps[-1])
    if depth is not None:
        predicted, reason = float(depth), f"reached at depth {depth}, within the layers computed"
        if n == 1:
            reason = "the only position is the first: everything is on it from the start"
        floor = 0.0
    return Collapse(
        eta=eta,
        schedule=schedule,
        off_first=torch.tensor(off, dtype=torch.float64),
        depth=depth,
        bound_depth=bound_depth,
        predicted_depth=predicted,
        gap=gap,
        floor=floor,
        reason=reason,
        provenance=provenance(length=n, layers=total, system=_name(system)),
    )


def _beyond(
    layers: Layers,
    fit: ScheduleFit | None,
    schedule: str,
    eta: float,
    off: list[float],
    log_own: float,
    gap: float,
    own_weight: float,
) -> tuple[float, float | None, str]:
    """(floor, predicted depth, reason) for a collapse that `off` has not reached."""
    done = len(off)
    if not layers.causal:
        return 0.0, None, "never guaranteed: without a causal mask influence settles on all positions, not on the first"
    if gap <= 0:
        reason = "never: a position with A_ii = 1 keeps all it has, whatever the depth (A = I is the extreme case)"
        return math.exp(log_own) if own_weight >= 1 else 0.0, None, reason
    needed = math.log(off[-1] / eta) / gap
    if fit is not None:
        if fit.c == 0:
            return 1.0, None, "never: λ is 0"
        if fit.finite:
            left = _log_product(fit, 1 - own_weight, done)
            floor = math.exp(log_own + left) if log_own > -math.inf else 0.0
            if _tail(fit.c, fit.exponent, done) < needed:
                return floor, None, f"never: {fit.law} has a finite sum, too little to move what is left"
            return floor, None, "not reached within the layers computed; the finite rest of Σλ may or may not suffice"
        if fit.exponent == 1:
            ratio = needed / fit.c
            predicted = done * math.exp(ratio) if ratio < 700 else None
        else:
            power = 1 - fit.exponent
            predicted = (done**power + power * needed / fit.c) ** (1 / power)
        if predicted is not None:
            predicted = max(predicted, done + needed)  # λ is at most 1
        reason = f"Σλ must grow by {needed:.3g} more at the fitted schedule; extrapolated at the rate of the gap"
        return 0.0, predicted, reason
    weight = float(layers.mixing[-1]) if schedule == "last" else float(layers.mixing.mean())
    if weight == 0:
        return math.exp(log_own), None, "never: λ is 0 from here on"
    return 0.0, done + needed / weight, "not reached within the layers computed; extrapolated at the rate of the gap"


# ---- attention alone (λ = 1) ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOnlyBounds(Result):
    """Influence without a residual stream, for one kernel applied again and again, beside what is guaranteed.

    `outside` [D] is the largest mass, over targets, that depth t leaves outside the first `target` positions, and
    `bound` [D] what it cannot exceed: (1 - ε^k)^floor(t/k), where from every position k layers can reach the target and
    ε is the least weight on the way. For decay kernels `lower` and `upper` [D, N] enclose row N of A^t.
    """

    mask: str
    target: int
    steps: int
    least: float
    outside: Tensor
    bound: Tensor
    statement: str
    last_row: Tensor
    lower: Tensor | None = None
    upper: Tensor | None = None
    provenance: Provenance = dataclasses.field(default_factory=dict)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a depth: depth, outside, bound."""
        import pandas as pd

        depths = range(1, len(self.outside) + 1)
        return pd.DataFrame({"depth": depths, "outside": self.outside.numpy(), "bound": self.bound.numpy()})

    def plot(self, ax: Any = None) -> Any:
        """The mass outside the target and its bound, by depth."""
        from posattn import plotting

        axes = plotting.axes(ax)
        depth = range(1, len(self.outside) + 1)
        plotting.curve(axes, self.outside.clamp(min=1e-300), depth, label="outside the target")
        plotting.curve(axes, self.bound.clamp(min=1e-300), depth, label="bound")
        axes.set_yscale("log")
        return plotting.finish(axes, x="depth (layers)", y="mass", legend=True)


def attention_only_bounds(kernel: StructuredKernel, length: int, depth: int = 32) -> AttentionOnlyBounds:
    """How fast attention alone concentrates influence, and the guarantee for its mask (arXiv 2502.01951, section 4).

    * causal: the target is the first token, k = 1, ε = min_i A_i1;
    * window w: the first token, k = ⌈(N-1)/(w-1)⌉ layers to get there, ε the least visible weight; w = 1 is A = I;
    * prefix K: the prefix, which nothing leaves; k = 1, ε = min_{i>K} Σ_{j≤K} A_ij;
    * full mask: nothing is absorbed; the target is everything.

    For ALiBi heads (a decay mask) with C_min e^(-m(i-j)) ≤ A_ij ≤ C_max e^(-m(i-j)), every path of t steps from N
    down to j has the same decay, so (A^t)_Nj lies between C_min^t and C_max^t times binom(N-j+t-1, t-1) e^(-m(N-j)).
    It is given for one head, causal, without a window. More layers raise the binomial, which works against the decay.

    Raises:
        InputError: a kernel with batch dimensions, a length or depth below 1.
    """
    if kernel.batch_shape:
        raise InputError("one kernel at a time: this one has batch dimensions")
    if depth < 1:
        raise InputError(f"depth must be at least 1, not {depth}")
    layers = Layers(torch.ones(1, dtype=torch.float64), kernel, length)
    n = layers.length
    block = n if kernel.full else min(kernel.prefix, n)
    window = n if kernel.window is None else min(kernel.window, n)
    if block > 1 and window < n:
        raise InputError("a window together with a prefix or a full mask has no bound here")
    target, steps = 1, 1
    if kernel.full and n > 1:
        mask, target, least = "full", n, 1.0
        statement = "without a mask nothing is absorbed: rows approach one common distribution"
    elif block > 1:
        mask, target = "prefix", block
        least = float(layers.to_first(0, block)[block:].min()) if block < n else 1.0
        statement = f"the first {block} positions absorb all influence; what is outside falls at least as (1-ε)^t"
    elif window < n:
        mask = "window"
        steps = -(-(n - 1) // (window - 1)) if window > 1 else 0
        least = _least_visible(layers, kernel, window)
        statement = (
            f"the first token is {steps} layers away at most; what is outside falls at least as (1-ε^k)^⌊t/k⌋"
            if steps
            else "a window of 1 is A = I: nothing ever moves"
        )
    else:
        mask = "causal"
        least = max(0.0, float(layers.column(0, 0).min()))
        statement = "the first token absorbs all influence; what is outside falls at least as (1-ε)^t"

    rest = torch.ones(n, dtype=torch.float64)
    rest[:target] = 0.0
    row = torch.zeros(n, dtype=torch.float64)
    row[-1] = 1.0
    outside, rows = [], []
    for _ in range(depth):
        rest, row = layers.right(0, rest), layers.left(0, row)
        outside.append(float(rest.max()))
        rows.append(row)
    times = torch.arange(1, depth + 1, dtype=torch.float64)
    if mask == "full":
        bound = torch.zeros(depth, dtype=torch.float64)
    elif steps == 0:
        bound = torch.ones(depth, dtype=torch.float64)
    else:
        # ε^k may be far below rounding: log1p keeps what it says
        bound = (
            torch.exp(torch.floor(times / steps) * math.log1p(-min(least**steps, 1.0)))
            if least < 1
            else ((times < steps).double())
        )
    lower, upper = _decay_bounds(kernel, layers, depth) if mask == "causal" else (None, None)
    return AttentionOnlyBounds(
        mask=mask,
        target=target,
        steps=steps,
        least=least,
        outside=torch.tensor(outside, dtype=torch.float64),
        bound=bound,
        statement=statement,
        last_row=torch.stack(rows),
        lower=lower,
        upper=upper,
        provenance=provenance(length=n, depth=depth),
    )


def _least_visible(layers: Layers, kernel: StructuredKernel, window: int) -> float:
    """The least weight that any row puts on a key of its window."""
    ready = kernel.at(layers.length)
    position = torch.arange(layers.length)
    least = 1.0
    for lag in range(window):
        least = min(least, float(ready.entries(position[lag:], position[: layers.length - lag]).min()))
    return least


def _decay_bounds(
    kernel: StructuredKernel, layers: Layers, depth: int
) -> tuple[Float[Tensor, "depth n"] | None, Float[Tensor, "depth n"] | None]:
    """Row N of A^t from below and above, for one ALiBi (or uniform) head with a causal mask."""
    if kernel.slopes is None or kernel.heads != 1:
        return None, None
    n, slope = layers.length, float(kernel.slopes)
    position = torch.arange(n)
    ready = kernel.at(n)
    # A_ij e^(m(i-j)) is e^-Z_i below the diagonal, and A_ii on it
    own = layers.diagonal(0)
    below = torch.exp(-ready._log_sum(position))[0]
    constants = torch.cat([own, below[1:]])
    lag = (n - 1 - position).double()
    times = torch.arange(1, depth + 1, dtype=torch.float64)[:, None]
    paths = torch.lgamma(lag + times) - torch.lgamma(times) - torch.lgamma(lag + 1)
    base = paths - slope * lag
    return (times * constants.min().log() + base).exp(), (times * constants.max().log() + base).exp()


def _name(system: Any) -> str:
    if isinstance(system, str):
        return system
    return getattr(system, "name", "mixing and kernels")
