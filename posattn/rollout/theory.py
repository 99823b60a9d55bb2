"""The structural theory in one place: forces (`forces`), depth and collapse (`depth`), monotonicity (`monotone`)."""

from posattn.rollout.depth import (
    AttentionOnlyBounds,
    Collapse,
    DepthTheory,
    ScheduleFit,
    attention_only_bounds,
    collapse,
    depth_theory,
    fit_schedule,
)
from posattn.rollout.forces import FORCES, QUANTITIES, ForceShares, force_shares, quantities, without
from posattn.rollout.monotone import Monotonicity, monotonicity

__all__ = [
    "FORCES",
    "QUANTITIES",
    "AttentionOnlyBounds",
    "Collapse",
    "DepthTheory",
    "ForceShares",
    "Monotonicity",
    "ScheduleFit",
    "attention_only_bounds",
    "collapse",
    "depth_theory",
    "fit_schedule",
    "force_shares",
    "monotonicity",
    "quantities",
    "without",
]
