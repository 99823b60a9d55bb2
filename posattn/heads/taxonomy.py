"""`classify_heads`: labels from the scores, roles from the evidence, both as data with their thresholds.

A head is **pure** at γ when its point in the plane (s_pos, s_sym) lies in the square of side γ at one of three corners:

    positional   s_pos ≥ 1 − γ  and  s_sym ≤ γ
    symbolic     s_sym ≥ 1 − γ  and  s_pos ≤ γ
    uniform      s_pos ≥ 1 − γ  and  s_sym ≥ 1 − γ      (weights that do not differ enough for a swap to show)
    mixed        anything else

`gamma` is the smallest γ at which the head would be pure (its Chebyshev distance to the nearest corner), `nearest` that
corner, so that no reader depends on our choice of γ. `rule="leading"` drops the second condition of the first two
lines to s < 1 − γ: one score is high and the other is not. A label is `certain` when the corners of the two scores'
bootstrap intervals all get it.

A **role** is given when the measured share of attention reaches its threshold and `FACTOR` times its chance level.
Roles are not exclusive, and say nothing about labels: an induction head is a symbolic head in what it matches and a
positional one in the offset it reads.

Source of γ-pure heads: arXiv 2605.31558 (γ = .2 there); thresholds of roles are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.heads.evidence import HeadEvidence
from posattn.heads.scores import HeadScores
from posattn.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("positional", "symbolic", "uniform", "mixed")
_CORNERS = {"positional": (1.0, 0.0), "symbolic": (0.0, 1.0), "uniform": (1.0, 1.0)}
#: share of attention from which a head has the role
ROLES: dict[str, float] = {
    "previous_token": 0.4,
    "self": 0.4,
    "first_position": 0.5,
    "local_window": 0.6,
    "induction_repeat": 0.3,
    "duplicate_repeat": 0.3,
}
FACTOR = 3.0  # and so many times its chance level
#: evidence name -> name of the role, where they differ
_ROLE_NAMES = {"induction_repeat": "induction", "duplicate_repeat": "duplicate_token", "first_position": "sink"}


@dataclasses.dataclass(frozen=True, eq=False)
class HeadTaxonomy(Result):
    """Labels and roles of every head. `labels`, `nearest`, `certain` [T,H]; `roles` [T,H] lists of names.

    `certain` is None where there is no interval. `thresholds` holds γ, the rule and every role's threshold and factor.
    """

    kind: ClassVar[str] = "head taxonomy"

    labels: Sequence[Sequence[str]]
    nearest: Sequence[Sequence[str]]
    certain: Sequence[Sequence[bool | None]]
    roles: Sequence[Sequence[Sequence[str]]]
    gamma: Float[Tensor, "layers heads"]
    positional: Float[Tensor, "layers heads"]
    symbolic: Float[Tensor, "layers heads"]
    thresholds: dict[str, Any]
    counts: dict[str, int]
    role_counts: dict[str, int]
    evidence: HeadEvidence | None
    provenance: Provenance

    def heads(self, name: str) -> list[tuple[int, int]]:
        """The (layer, head) of every head with that label or role.

        Raises:
            InputError: no such label or role.
        """
        if name in self.counts:
            return [(t, h) for t, row in enumerate(self.labels) for h, label in enumerate(row) if label == name]
        if name in self.role_counts:
            return [(t, h) for t, row in enumerate(self.roles) for h, roles in enumerate(row) if name in roles]
        raise InputError(f"no label or role {name!r}: there are {', '.join([*self.counts, *self.role_counts])}")

    def to_dataframe(self) -> pd.DataFrame:
        """One row a head: layer, head, name, label, nearest, gamma, certain, roles, scores, evidence and its chance."""
        import pandas as pd

        rows = []
        for t, row in enumerate(self.labels):
            for h, label in enumerate(row):
                entry: dict[str, Any] = {
                    "layer": t,
                    "head": h,
                    "name": head_name(t, h),
                    "label": label,
                    "nearest": self.nearest[t][h],
                    "gamma": float(self.gamma[t, h]),
                    "certain": self.certain[t][h],
                    "roles": ", ".join(self.roles[t][h]),
                    "positional": float(self.positional[t, h]),
                    "symbolic": float(self.symbolic[t, h]),
                }
                if self.evidence is not None:
                    for name, value in self.evidence.measured.items():
                        entry[name] = float(value[t, h])
                        entry[f"{name}_chance"] = float(self.evidence.chance[name][t, h])
                rows.append(entry)
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """The layer-by-head map of labels."""
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        from posattn import plotting

        ax = plotting.axes(ax)
        colours = ["#0072b2", "#d55e00", "#bbbbbb", "#f0e6c8"]  # colour-blind safe
        table = torch.tensor([[LABELS.index(label) for label in row] for row in self.labels])
        ax.imshow(table.numpy(), cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto", origin="lower")
        patches = [Patch(color=c, label=label) for c, label in zip(colours, LABELS, strict=True)]
        plotting.legend_outside(ax, handles=patches)
        return plotting.finish(ax, x="head", y="layer")


def head_name(layer: int, head: int) -> str:
    """ "L3H2": layer 3, head 2, both from 0."""
    return f"L{layer}H{head}"


def label_of(positional: float, symbolic: float, purity: float, rule: str = "corner") -> str:
    """The label of one point of the plane (see the module docstring)."""
    high = 1 - purity
    low = purity if rule == "corner" else high
    if positional >= high and symbolic >= high:
        return "uniform"
    if positional >= high and (symbolic <= low):
        return "positional"
    if symbolic >= high and (positional <= low):
        return "symbolic"
    return "mixed"


def classify_heads(
    h: HeadScores,
    purity: float = 0.2,
    *,
    rule: str = "corner",
    roles: Mapping[str, float] | None = None,
    factor: float = FACTOR,
) -> HeadTaxonomy:
    """Label every head positional, symbolic, uniform or mixed, and name its roles.

    Args:
        purity: γ, above 0 and below .5 (at .5 the corners meet).
        rule: "corner" or "leading", see the module docstring.
        roles: thresholds by evidence name instead of `ROLES`.

    Raises:
        InputError: γ out of range, an unknown rule or evidence name.
    """
    if not 0 < purity < 0.5:
        raise InputError(f"purity (γ) lies above 0 and below 0.5, where the corners meet; got {purity}")
    if rule not in ("corner", "leading"):
        raise InputError(f'rule is "corner" or "leading", not {rule!r}')
    roles = dict(ROLES if roles is None else roles)
    if h.evidence is not None and (unknown := set(roles) - set(h.evidence.measured)):
        raise InputError(f"no evidence named {', '.join(sorted(unknown))}: there is {', '.join(h.evidence.measured)}")
    points = torch.stack([h.positional, h.symbolic], -1).double()
    corners = torch.tensor(list(_CORNERS.values()), dtype=torch.float64)
    distance = (points.unsqueeze(-2) - corners).abs().amax(-1)  # [T,H,3]
    gamma, where = distance.min(-1)
    names = list(_CORNERS)
    labels, certain = [], []
    for t, row in enumerate(points.tolist()):
        labels.append([label_of(p, s, purity, rule) for p, s in row])
        certain.append([_certain(h, t, i, labels[-1][i], purity, rule) for i in range(len(row))])
    counts = {label: sum(row.count(label) for row in labels) for label in LABELS}
    given = _roles(h.evidence, roles, factor, h.positional.shape)
    role_names = [_ROLE_NAMES.get(name, name) for name in roles]
    return HeadTaxonomy(
        labels=labels,
        nearest=[[names[i] for i in row] for row in where.tolist()],
        certain=certain,
        roles=given,
        gamma=gamma,
        positional=h.positional,
        symbolic=h.symbolic,
        thresholds={
            "purity": purity,
            "rule": rule,
            "factor": factor,
            "roles": {_ROLE_NAMES.get(name, name): value for name, value in roles.items()},
            "role_evidence": {_ROLE_NAMES.get(name, name): name for name in roles},
        },
        counts=counts,
        role_counts={name: sum(name in roles for row in given for roles in row) for name in role_names},
        evidence=h.evidence,
        provenance=h.provenance,
    )


def _certain(h: HeadScores, layer: int, head: int, label: str, purity: float, rule: str) -> bool | None:
    positional, symbolic = h.positional_interval[layer, head], h.symbolic_interval[layer, head]
    if not (torch.isfinite(positional).all() and torch.isfinite(symbolic).all()):
        return None
    return all(label_of(p, s, purity, rule) == label for p in positional.tolist() for s in symbolic.tolist())


def _roles(
    evidence: HeadEvidence | None, thresholds: Mapping[str, float], factor: float, shape: Sequence[int]
) -> list[list[list[str]]]:
    given: list[list[list[str]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    if evidence is None:
        return given
    for name, threshold in thresholds.items():
        value, chance = evidence.measured[name], evidence.chance[name]
        # NaN, where there was nothing to measure, gives no role
        for t, i in ((value >= threshold) & (value >= factor * chance)).nonzero().tolist():
            given[t][i].append(_ROLE_NAMES.get(name, name))
    return given


def head_list(taxonomy: HeadTaxonomy, name: str) -> dict[str, Any]:
    """The heads of a label or role as JSON values, for pruning or freezing: schema, model, selection, thresholds,
    heads.

    Raises:
        InputError: no such label or role.
    """
    chosen = taxonomy.heads(name)
    return {
        "schema": 1,
        "model": taxonomy.provenance.get("model"),
        "revision": taxonomy.provenance.get("revision"),
        "selection": name,
        "thresholds": taxonomy.thresholds,
        "heads": [{"name": head_name(t, h), "layer": t, "head": h} for t, h in chosen],
    }
