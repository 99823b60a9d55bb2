"""posattn: where in the context a transformer looks, and why.

The public names are imported when they are first used, so that `import posattn` and `posattn --help` stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> the module that defines it
_PUBLIC: dict[str, str] = {
    # models and tokens
    "load_model": "posattn.models.loading",
    "as_model": "posattn.models.loading",
    "load_tokens": "posattn.tokens",
    "Tokens": "posattn.tokens",
    # measuring
    "attach": "posattn.probes.session",
    "from_cache": "posattn.probes.session",
    "measure": "posattn.probes.measure",
    "Measurement": "posattn.probes.measure",
    "MixingProbe": "posattn.probes.mixing",
    "KernelProbe": "posattn.probes.kernel",
    "ContributionProbe": "posattn.probes.contribution",
    "PositionalProbe": "posattn.probes.positional",
    # predicting
    "Rollout": "posattn.rollout.dense",
    "energy_rollout": "posattn.rollout.energy",
    "coherent_energy_rollout": "posattn.rollout.energy",
    "cotangent_gains": "posattn.probes.gains",
    "predict": "posattn.rollout.variants",
    "implied_profiles": "posattn.rollout.implied",
    "Architecture": "posattn.rollout.simulate",
    "PowerLaw": "posattn.rollout.simulate",
    "simulate": "posattn.rollout.simulate",
    "presets": "posattn.rollout.simulate",
    "force_shares": "posattn.rollout.forces",
    "depth_theory": "posattn.rollout.depth",
    "collapse": "posattn.rollout.depth",
    "monotonicity": "posattn.rollout.monotone",
    # influence
    "Influence": "posattn.influence.gradients",
    "influence_intervals": "posattn.influence.intervals",
    "compare_profiles": "posattn.influence.distances",
    "describe_profile": "posattn.influence.distances",
    # heads
    "score_heads": "posattn.heads.scores",
    "HeadScores": "posattn.heads.scores",
    "rotary_usage": "posattn.heads.rotary",
    "RotaryUsage": "posattn.heads.rotary",
    "classify_heads": "posattn.heads.taxonomy",
    "HeadTaxonomy": "posattn.heads.taxonomy",
    "head_list": "posattn.heads.taxonomy",
    "cross_logits": "posattn.heads.inspect",
    "ablate_heads": "posattn.heads.ablation",
    "freeze_heads": "posattn.heads.ablation",
    "ablation_study": "posattn.heads.ablation",
    # tasks
    "make_task": "posattn.tasks",
    # results and errors
    "Result": "posattn.results",
    "PosattnError": "posattn.errors",
    "PosattnWarning": "posattn.errors",
}
#: packages that are functions too, see `posattn._callable`
_PACKAGES = ("rollout", "influence")

if TYPE_CHECKING:
    from posattn.errors import PosattnError as PosattnError
    from posattn.errors import PosattnWarning as PosattnWarning
    from posattn.heads.ablation import ablate_heads as ablate_heads
    from posattn.heads.ablation import ablation_study as ablation_study
    from posattn.heads.ablation import freeze_heads as freeze_heads
    from posattn.heads.inspect import cross_logits as cross_logits
    from posattn.heads.rotary import RotaryUsage as RotaryUsage
    from posattn.heads.rotary import rotary_usage as rotary_usage
    from posattn.heads.scores import HeadScores as HeadScores
    from posattn.heads.scores import score_heads as score_heads
    from posattn.heads.taxonomy import HeadTaxonomy as HeadTaxonomy
    from posattn.heads.taxonomy import classify_heads as classify_heads
    from posattn.heads.taxonomy import head_list as head_list
    from posattn.influence.distances import compare_profiles as compare_profiles
    from posattn.influence.distances import describe_profile as describe_profile
    from posattn.influence.gradients import Influence as Influence
    from posattn.influence.gradients import influence as influence
    from posattn.influence.intervals import influence_intervals as influence_intervals
    from posattn.models.loading import as_model as as_model
    from posattn.models.loading import load_model as load_model
    from posattn.probes.contribution import ContributionProbe as ContributionProbe
    from posattn.probes.gains import cotangent_gains as cotangent_gains
    from posattn.probes.kernel import KernelProbe as KernelProbe
    from posattn.probes.measure import Measurement as Measurement
    from posattn.probes.measure import measure as measure
    from posattn.probes.mixing import MixingProbe as MixingProbe
    from posattn.probes.positional import PositionalProbe as PositionalProbe
    from posattn.probes.session import attach as attach
    from posattn.probes.session import from_cache as from_cache
    from posattn.results import Result as Result
    from posattn.rollout.dense import Rollout as Rollout
    from posattn.rollout.dense import rollout as rollout
    from posattn.rollout.depth import collapse as collapse
    from posattn.rollout.depth import depth_theory as depth_theory
    from posattn.rollout.energy import coherent_energy_rollout as coherent_energy_rollout
    from posattn.rollout.energy import energy_rollout as energy_rollout
    from posattn.rollout.forces import force_shares as force_shares
    from posattn.rollout.implied import implied_profiles as implied_profiles
    from posattn.rollout.monotone import monotonicity as monotonicity
    from posattn.rollout.simulate import Architecture as Architecture
    from posattn.rollout.simulate import PowerLaw as PowerLaw
    from posattn.rollout.simulate import presets as presets
    from posattn.rollout.simulate import simulate as simulate
    from posattn.rollout.variants import predict as predict
    from posattn.tasks import make_task as make_task
    from posattn.tokens import Tokens as Tokens
    from posattn.tokens import load_tokens as load_tokens


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name in _PACKAGES:
        return import_module(f"posattn.{name}")
    raise AttributeError(f"module 'posattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_PACKAGES})
