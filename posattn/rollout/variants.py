"""Predicted profiles by name: every way in which this library turns measurements into a guess of the influence.

`VARIANTS` says in words what each one is. `predict` computes those for which it is given the ingredients:

* `residual`, `half`, `attention_only`: rollouts of the measured kernel A with λ, ½ and 1 (`posattn.rollout.dense`);
* `projection`, `value_norm`: the same with λ, of kernels that weigh each source by what it adds (`projection`: by how
  far that points where the whole update points; `value_norm`: by its length alone);
* a suffix `+no-op` or `+renormalise`: an attention sink is found (`find_sinks`) and its mass returned to the position
  itself (attending to a sink then does nothing), or handed to the other sources in proportion;
* `block` in place of `attention`: λ = ‖a‖/(‖x‖+‖a‖+‖m‖), with the MLP in the denominator; `centred`: of norms after the
  mean over documents and positions has been taken away;
* `energy`: squared gains through values and keys (`posattn.rollout.energy`); `energy_value` through values alone;
  `energy_cotangent` in random directions, with the MLP's gain; `energy_coherent`, `energy_coherent_key` with the second
  moments of `coherent_energy_rollout` (with the MLP's gain where `cotangent` is given).

`calibrate` fits one factor on λ (or on the gains) to documents that are not the ones it is judged on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posattn.errors import InputError
from posattn.rollout.dense import rollout
from posattn.rollout.energy import coherent_energy_rollout, energy_rollout
from posattn.words import count, percent, plural

#: what each variant is, in words
VARIANTS: dict[str, str] = {
    "residual": "measured attention and measured λ",
    "half": "measured attention, λ = ½",
    "attention_only": "measured attention, no residual connections",
    "energy": "squared gains through values and keys; nothing fitted, no sink rule",
    "energy_value": "squared gains through values alone",
    "energy_coherent": "second moments: paths through the same heads add, others their squares; values and MLPs",
    "energy_coherent_key": "the same with keys",
    "energy_cotangent": "squared gains in random directions through values, with the MLP's",
    "energy_cotangent_key": "squared gains in random directions through values and keys, with the MLP's",
    "projection": "attention weighted by how far each source points along the update, measured λ",
    "value_norm": "attention weighted by the length of what each source adds, measured λ",
    "residual+no-op": "measured attention and λ; the sink's mass is returned to the position itself",
    "residual+renormalise": "measured attention and λ; the sink is left out",
    "projection+no-op": "projection; the sink's mass is returned to the position itself",
    "projection+no-op+block": "the same, λ with the MLP in the denominator",
    "projection+no-op+block+centred": "the same, λ of centred norms",
}


@dataclasses.dataclass(frozen=True)
class Sinks:
    """Where a layer has attention sinks: `where` [T,N], and the three signs that were looked at, each [T,N]."""

    where: Bool[Tensor, "t n"]
    mass: Float[Tensor, "t n"]
    value: Float[Tensor, "t n"]
    spread: Float[Tensor, "t n"]


def find_sinks(
    received: Float[Tensor, "t n"],
    received_std: Float[Tensor, "t n"],
    value_size: Float[Tensor, "t n"],
    *,
    mass: float = 0.2,
    value: float = 0.5,
    spread: float = 0.5,
) -> Sinks:
    """Find attention sinks from what they do, not from where they stand.

    A position is a sink of a layer when all three hold: it receives at least `mass` of the attention of the positions
    after it; its values are at most `value` times the layer's median in length; and its share varies over documents by
    at most `spread` of itself (with one document, nothing is known of that and the sign is taken to hold).

    The last position has nothing after it and is never a sink.
    """
    size = value_size / value_size.median(-1, keepdim=True).values.clamp(min=1e-30)
    variation = received_std / received.clamp(min=1e-30)
    where = (received >= mass) & (size <= value) & (variation <= spread)
    return Sinks(where=where, mass=received, value=size, spread=variation)


def apply_sink(
    kernels: Float[Tensor, "*batch t n n"], where: Bool[Tensor, "t n"], sink: str = "keep"
) -> Float[Tensor, "*batch t n n"]:
    """Kernels with the sinks' mass kept, returned to the diagonal ("no-op"), or given to the other sources in
    proportion ("renormalise"; a row that has no other source keeps to itself). A sink's own row is left as it is.

    Raises:
        InputError: an unknown rule.
    """
    if sink == "keep":
        return kernels
    if sink not in ("no-op", "renormalise"):
        raise InputError(f"sink must be 'keep', 'renormalise' or 'no-op', not {sink!r}")
    n = kernels.shape[-1]
    identity = torch.eye(n, dtype=torch.bool, device=kernels.device)
    taken = where.to(kernels.device)[..., None, :] & ~identity  # [t, target, source]
    rest = kernels.masked_fill(taken, 0)
    mass = kernels.sum(-1, keepdim=True) - rest.sum(-1, keepdim=True)
    if sink == "no-op":
        return rest + mass * identity
    left = rest.sum(-1, keepdim=True)
    whole = kernels.sum(-1, keepdim=True)
    some = left > 1e-12
    return torch.where(some, rest * whole / torch.where(some, left, torch.ones_like(left)), whole * identity)


def predict(
    kernels: Float[Tensor, "t n n"],
    mixing: Float[Tensor, " t"],
    *,
    energy: Float[Tensor, "t n n"] | None = None,
    key: Float[Tensor, "t n n"] | None = None,
    head_gain: Float[Tensor, "t h n n"] | None = None,
    projection: Float[Tensor, "t n n"] | None = None,
    value_norm: Float[Tensor, "t n n"] | None = None,
    sinks: Bool[Tensor, "t n"] | None = None,
    block: Float[Tensor, " t"] | None = None,
    centred: Float[Tensor, " t"] | None = None,
    cotangent: tuple[Tensor, Tensor, Tensor] | None = None,
    parallel: Sequence[bool] | bool = False,
) -> dict[str, Float[Tensor, " n"]]:
    """Every variant that the ingredients allow, as profiles [N] of the last position, in the order of `VARIANTS`.

    Args:
        kernels, mixing: A [T,N,N] and λ [T].
        energy, key: squared gains [T,N,N] through values and through keys.
        head_gain: gains of single heads [T,H,N,N].
        projection, value_norm: kernels [T,N,N] with rows that sum to 1.
        sinks: [T,N] from `find_sinks`.
        block, centred: λ [T] with the MLP in the denominator, of raw and of centred norms.
        cotangent: squared gains in random directions: through values [T,N,N], through keys [T,N,N], of MLPs [T,N].
        parallel: in which layers attention and MLP read the same stream.
    """
    mixing = mixing.double()

    def rolled(kernel: Tensor, weights: Tensor = mixing) -> Tensor:
        return rollout(weights, kernel.double()).last

    curves: dict[str, Tensor] = {
        "residual": rolled(kernels),
        "half": rolled(kernels, torch.full_like(mixing, 0.5)),
        "attention_only": rolled(kernels, torch.ones_like(mixing)),
    }
    if energy is not None:
        curves["energy_value"] = energy_rollout(energy).last
        if key is not None:
            curves["energy"] = energy_rollout(energy.double() + key.double()).last
    if energy is not None and head_gain is not None:
        gamma = None if cotangent is None else cotangent[2]
        curves["energy_coherent"] = coherent_energy_rollout(head_gain, energy, mlp=gamma, parallel=parallel).last
        if key is not None:
            both = energy.double() + key.double()
            curves["energy_coherent_key"] = coherent_energy_rollout(head_gain, both, mlp=gamma, parallel=parallel).last
    if cotangent is not None:
        value, through_key, mlp = cotangent
        curves["energy_cotangent"] = energy_rollout(value, mlp=mlp, parallel=parallel).last
        both = value.double() + through_key.double()
        curves["energy_cotangent_key"] = energy_rollout(both, mlp=mlp, parallel=parallel).last
    if projection is not None:
        curves["projection"] = rolled(projection)
    if value_norm is not None:
        curves["value_norm"] = rolled(value_norm)
    if sinks is not None:
        curves["residual+no-op"] = rolled(apply_sink(kernels, sinks, "no-op"))
        curves["residual+renormalise"] = rolled(apply_sink(kernels, sinks, "renormalise"))
        if projection is not None:
            returned = apply_sink(projection, sinks, "no-op")
            curves["projection+no-op"] = rolled(returned)
            if block is not None:
                curves["projection+no-op+block"] = rolled(returned, block.double())
            if centred is not None:
                curves["projection+no-op+block+centred"] = rolled(returned, centred.double())
    return {name: curves[name] for name in VARIANTS if name in curves}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One factor fitted on some documents and judged on others."""

    factor: float
    fitted: float
    judged: float
    profile: Tensor


def calibrate(
    curve: Callable[[float], Float[Tensor, " n"]],
    fit: Float[Tensor, " n"],
    judge: Float[Tensor, " n"],
    *,
    low: float = 0.02,
    high: float = 50.0,
    steps: int = 25,
) -> Calibration:
    """Choose the factor for which `curve(factor)` is nearest (Wasserstein-1) to `fit`; say how far it is from `judge`.

    `fit` and `judge` are measured influences of two disjoint halves of the documents: the figure that counts is
    `judged`. The factor is searched on a logarithmic grid and then once more around the best of it.
    """
    ratio = (high / low) ** (1 / (steps - 1))
    grid = [low * ratio**k for k in range(steps)]
    for _ in range(4):
        best = min(grid, key=lambda factor: area(curve(factor), fit))
        grid = [best * ratio ** (k / 4) for k in range(-4, 5)]
        ratio = ratio**0.25
    profile = curve(best)
    return Calibration(factor=best, fitted=area(profile, fit), judged=area(profile, judge), profile=profile)


def scaled_mixing(mixing: Float[Tensor, " t"], factor: float) -> Float[Tensor, " t"]:
    """λ times a factor, never above 1."""
    return (mixing.double() * factor).clamp(max=1.0)


def area(left: Float[Tensor, " n"], right: Float[Tensor, " n"]) -> float:
    """Wasserstein-1 of two profiles on positions i/(N−1): the area between their cumulative curves."""
    p, q = (curve.detach().cpu().double() / curve.detach().cpu().double().sum() for curve in (left, right))
    return float((p.cumsum(-1) - q.cumsum(-1)).abs()[:-1].sum() / max(len(p) - 1, 1))


def best_curve(distances: Mapping[str, float], uniform: float | None = None, tie: float = 0.1) -> dict[str, object]:
    """Which predicted curve tracks the measured influence best, and by how much: facts for a report.

    Args:
        distances: Wasserstein-1 of each variant.
        uniform: that of a uniform curve.
        tie: variants within this share of the best are named as equals.

    Returns:
        `best`, `distance`, `ties`, `second` (its name and distance, or None), `times_closer_than_residual`, and
        `beats_uniform`.

    Raises:
        InputError: no variant.
    """
    if not distances:
        raise InputError("there is no predicted curve to choose from")
    ranked = sorted(distances, key=lambda name: distances[name])
    best = ranked[0]
    distance = distances[best]
    second = ranked[1] if len(ranked) > 1 else None
    residual = distances.get("residual")
    return {
        "best": best,
        "distance": distance,
        "ties": [name for name in ranked[1:] if distances[name] - distance <= tie * max(distance, 1e-12)],
        "second": None if second is None else {"name": second, "distance": distances[second]},
        "times_closer_than_residual": None if residual is None else residual / max(distance, 1e-12),
        "beats_uniform": None if uniform is None else distance < uniform,
    }


def sink_warning(
    profile: Float[Tensor, " n"],
    sinks: Bool[Tensor, "t n"],
    measured: Float[Tensor, " n"] | None = None,
    distances: Mapping[str, float] | None = None,
) -> str | None:
    """One sentence when a `residual` profile is dominated by attention sinks, else None.

    It is when positions that are sinks in some layer hold more than half of the profile. `distances` to the measured
    influence, by the predictions' names (and "uniform"), say which of them to look at instead.
    """
    where = sinks.any(0).to(profile.device)
    share = float(profile[where].sum() / profile.sum())
    if share <= 0.5:
        return None
    positions = where.nonzero()[:, 0].tolist()
    layers = int(sinks.any(1).sum())
    named = f"position {positions[0]}" if len(positions) == 1 else f"{len(positions)} positions"
    text = (
        f"the residual profile is dominated by an attention sink: {named} (a sink in {layers} of "
        f"{count(len(sinks), 'layer')}) {plural(len(positions), 'holds')} {percent(share)} of it"
    )
    if measured is not None:
        text += (
            f", and {percent(float(measured[where.to(measured.device)].sum() / measured.sum()), 1)} of the measured "
            "influence"
        )
    known = {name: distance for name, distance in (distances or {}).items() if name != "uniform"}
    if not known:
        return text + "; no influence was measured, so which prediction tracks it best here is not known"
    best = min(known, key=lambda name: known[name])
    if best == "residual":
        return text + f"; no other prediction here comes nearer to the measured influence, though ({known[best]:.3f})"
    uniform = (distances or {}).get("uniform")
    if uniform is not None and known[best] >= uniform:
        return text + (
            f"; no prediction here comes nearer to the measured influence than an even curve (the nearest, {best}, "
            f"{known[best]:.3f}; even {uniform:.3f})"
        )
    beside = f", residual {known['residual']:.3f}" if "residual" in known else ""
    return text + (
        f"; the prediction that tracks the measured influence best here is {best} (Wasserstein-1 distance "
        f"{known[best]:.3f}{beside})"
    )
