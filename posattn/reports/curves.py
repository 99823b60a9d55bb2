"""Which of many curves are different, and which matter most: said once, for sentences, charts, tables and figures.

Variants of a prediction can coincide: where no attention sink was found, a rule about sinks changes nothing. Equal
curves count once, under the simplest of their names. Of the different ones a reader first sees those that the findings
speak of: the nearest to the measured influence, `residual`, and `energy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: curves whose total variation is at most this are the same; rounding is far below it
SAME = 1e-6
#: predictions that are shown first wherever they exist, beside the nearest
FIRST = ("residual", "energy")


def same_curves(curves: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """Name of each different curve (the simplest: fewest `+`, then the first) -> the other names of the same curve."""
    values = {name: np.asarray(curve, float) for name, curve in curves.items()}
    order = sorted(curves, key=lambda name: name.count("+"))
    found = _grouped(values, order, lambda gap: float(np.abs(gap).sum()) / 2 <= SAME)
    return {name: found[name] for name in curves if name in found}


def _grouped(
    values: Mapping[str, np.ndarray], order: Sequence[str], same: Callable[[np.ndarray], bool]
) -> dict[str, list[str]]:
    """Name of each curve that is the same as none before it -> the later ones that are, by their difference."""
    found: dict[str, list[str]] = {}
    for name in order:
        for other in found:
            if values[name].shape == values[other].shape and same(values[name] - values[other]):
                found[other].append(name)
                break
        else:
            found[name] = []
    return found


def other_names(summary: Mapping[str, Any]) -> dict[str, str]:
    """Name of each predicted profile that repeats another -> the name under which that one counts."""
    same = same_curves(summary.get("profiles") or {})
    return _first_of(same)


def _first_of(groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {other: name for name, others in groups.items() for other in others}


def alike(summary: Mapping[str, Any], names: Sequence[str], least: float) -> dict[str, str]:
    """Name of each prediction nearer than `least` (Wasserstein-1) to an earlier one of `names` -> that one."""
    profiles = summary.get("profiles") or {}
    values = {name: np.asarray(profiles[name], float) for name in names if profiles.get(name) is not None}

    def near(gap: np.ndarray) -> bool:
        return float(np.abs(np.cumsum(gap)[:-1]).sum()) / max(len(gap) - 1, 1) < least

    return _first_of(_grouped(values, [name for name in names if name in values], near))


def nearest(summary: Mapping[str, Any]) -> str | None:
    """The different prediction that lies nearest to the measured influence; None where none was measured."""
    comparison = summary.get("comparison") or {}
    repeated = other_names(summary)
    names = [name for name in comparison if name != "uniform" and name not in repeated]
    return min(names, key=lambda name: comparison[name]["wasserstein"]) if names else None


def prominent(summary: Mapping[str, Any]) -> list[str]:
    """The predictions that a chart shows at once: the nearest, and those of `FIRST` (or the first one there is)."""
    profiles = summary.get("profiles") or {}
    repeated = other_names(summary)
    best = nearest(summary)
    wanted = [*([] if best is None else [best]), *FIRST]
    found = [repeated.get(name, name) for name in wanted if name in profiles]
    return list(dict.fromkeys(found)) or list(profiles)[:1]
