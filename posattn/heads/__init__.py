"""Heads: positional or symbolic, by which frequencies, and does it matter."""

from posattn.heads.ablation import AblationStudy, ablate_heads, ablation_study, freeze_heads, head_means
from posattn.heads.binding import BindingTask, binding_task
from posattn.heads.carried import CarriedPosition, carried_position
from posattn.heads.evidence import HeadEvidence, measure_evidence, repeated_random
from posattn.heads.inspect import CrossLogits, cross_logits
from posattn.heads.rotary import RotaryUsage, rotary_usage
from posattn.heads.scores import HeadScores, score_heads
from posattn.heads.taxonomy import HeadTaxonomy, classify_heads, head_list

__all__ = [
    "AblationStudy",
    "BindingTask",
    "CarriedPosition",
    "CrossLogits",
    "HeadEvidence",
    "HeadScores",
    "HeadTaxonomy",
    "RotaryUsage",
    "ablate_heads",
    "ablation_study",
    "binding_task",
    "carried_position",
    "classify_heads",
    "cross_logits",
    "freeze_heads",
    "head_list",
    "head_means",
    "measure_evidence",
    "repeated_random",
    "rotary_usage",
    "score_heads",
]
