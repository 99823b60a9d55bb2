"""Distances between two profiles, and the shape of one.

A profile is a distribution p over N positions. Distances:

* W1: the Wasserstein-1 distance of the two distributions over positions i/(N−1), in [0,1];
* Spearman's rank correlation of the two curves (NaN when one of them is constant);
* total variation, ½ Σ|p−q|.

Shapes are taken from the profile's piecewise constant density over [0,1] (position i fills [i/N, (i+1)/N]), so that
an eighth of a length not divisible by 8 takes the fitting part of the position that it cuts:

* primacy, recency: mass of the first and of the last eighth; middle: mass of the middle half [¼, ¾];
* mean_position: Σ p_i i/(N−1);
* trough: where the least mass is: the centre, in [0,1], of the lightest window of N/8 positions (at least one);
* u_index: min(first-eighth density, last-eighth density) / middle-half density − 1: above 0 exactly when both ends are
  denser than the middle (∞ when the middle is empty and both ends are not, 0 when an end is empty too).

One position is first and last at once: its mean position is 0, the distance to itself 0, its density uniform.
Every shape is given twice, with and without the first position, which is often a sink.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison(Result):
    """How far apart two profiles are; see the module docstring."""

    kind: ClassVar[str] = "comparison"

    wasserstein: float
    spearman: float
    total_variation: float

    def to_dict(self) -> dict[str, float]:
        """The distances by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_dataframe(self) -> pd.DataFrame:
        """Columns distance, value."""
        import pandas as pd

        return pd.DataFrame({"distance": list(self.to_dict()), "value": list(self.to_dict().values())})

    def plot(self, ax: Any = None) -> Any:
        """One bar a distance."""
        from posattn import plotting

        ax = plotting.bars(plotting.axes(ax), list(self.to_dict().values()), list(self.to_dict()))
        return plotting.finish(ax, x="", y="distance")


@dataclasses.dataclass(frozen=True, eq=False)
class Shape(Result):
    """The shape of one profile; `without_first` is that of the rest, renormalised (None when nothing is left)."""

    kind: ClassVar[str] = "shape"

    primacy: float
    recency: float
    middle: float
    mean_position: float
    trough: float
    u_index: float
    without_first: Shape | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, `without_first` as a dictionary of its own."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rest = values.pop("without_first")
        return values if rest is None else {**values, "without_first": rest.to_dict()}

    def to_dataframe(self) -> pd.DataFrame:
        """Columns positions ("all" or "without first"), figure, value."""
        import pandas as pd

        rows = []
        for which, shape in (("all", self), ("without first", self.without_first)):
            for name, value in ({} if shape is None else shape.to_dict()).items():
                if name != "without_first":
                    rows.append({"positions": which, "figure": name, "value": value})
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Mass of the first eighth, the middle half and the last eighth."""
        from posattn import plotting

        masses = [self.primacy, self.middle, self.recency]
        ax = plotting.bars(plotting.axes(ax), masses, ["first eighth", "middle half", "last eighth"])
        return plotting.finish(ax, x="part of the context", y="share of the influence")


def compare_profiles(predicted: Float[Tensor, " n"], measured: Float[Tensor, " n"]) -> Comparison:
    """Distances between two profiles over the same N positions; both are normalised first.

    Raises:
        InputError: different lengths, or a curve that is no distribution (negative, not finite, or zero).
    """
    from scipy.stats import spearmanr, wasserstein_distance

    if len(predicted) != len(measured):
        raise InputError(f"profiles of {len(predicted)} and {len(measured)} positions cannot be compared")
    p, q = _distribution(predicted), _distribution(measured)
    places = _places(len(p)).numpy()
    ranks: Any = spearmanr
    constant = bool((p == p[0]).all() or (q == q[0]).all())
    return Comparison(
        wasserstein=float(wasserstein_distance(places, places, p.numpy(), q.numpy())),
        spearman=math.nan if constant else float(ranks(p.numpy(), q.numpy()).statistic),
        total_variation=float((p - q).abs().sum() / 2),
    )


def describe_profile(profile: Float[Tensor, " n"]) -> Shape:
    """The shape of a profile, with and without its first position; see the module docstring.

    Raises:
        InputError: the curve is no distribution (empty, negative, not finite, or zero).
    """
    p = _distribution(profile)
    rest = p[1:]
    return _shape(p, _shape(rest / rest.sum()) if len(rest) and float(rest.sum()) > 0 else None)


def _shape(p: Tensor, rest: Shape | None = None) -> Shape:
    n = len(p)
    primacy, recency, middle = _mass(p, 0.0, 0.125), _mass(p, 0.875, 1.0), _mass(p, 0.25, 0.75)
    end = 8 * min(primacy, recency)
    if middle > 0:
        u_index = end / (2 * middle) - 1
    else:
        u_index = math.inf if end > 0 else 0.0
    width = max(1, round(n / 8))
    windows = p.unfold(0, width, 1).sum(-1)
    # rounding must not decide between windows that are equally light: the first one counts
    lightest = int((windows <= windows.min() + 1e-12).to(torch.uint8).argmax())
    return Shape(
        primacy=primacy,
        recency=recency,
        middle=middle,
        mean_position=float((p * _places(n)).sum()),
        trough=(lightest + (width - 1) / 2) / max(n - 1, 1),
        u_index=u_index,
        without_first=rest,
    )


def _mass(p: Tensor, low: float, high: float) -> float:
    """Mass of the stretch [low, high] of [0,1]."""
    left = torch.arange(len(p), dtype=torch.float64)
    covered = (left + 1).clamp(max=high * len(p)) - left.clamp(min=low * len(p))
    return float((p * covered.clamp(min=0)).sum())


def _places(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) / max(n - 1, 1)


def _distribution(curve: Tensor) -> Tensor:
    """The curve in float64 on the CPU, summing to 1."""
    curve = curve.detach().cpu().double()
    if not len(curve):
        raise InputError("an empty profile has no shape")
    if not bool(curve.isfinite().all()) or bool((curve < 0).any()):
        raise InputError("a profile must be finite and not negative")
    total = curve.sum()
    if not float(total) > 0:
        raise InputError("a profile that is zero everywhere is no distribution")
    return curve / total
