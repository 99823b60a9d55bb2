"""Findings in words, each made from numbers in summary.json.

Every function takes the summary of a command and returns one `Finding`, or None where the summary does not hold what it
would speak of. A finding names the figures it rests on, how many documents stand behind them, the interval where one
was measured, and the condition under which it holds. The thresholds are the constants below; nothing is called large,
small or a U shape on any other ground.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from posattn.reports import curves
from posattn.reports.kit import Finding
from posattn.reports.learning import lengths_findings, train_findings
from posattn.reports.sure import (
    LEAST_POSITIONS,
    SETTLING,
    SHOWN,
    apart,
    few_documents,
    independent_documents,
    known_documents,
    positions,
    shapeless,
    unsettled,
)
from posattn.words import count, listed, number, percent, plural, sentence, span, times

Summary = Mapping[str, Any]

#: an end of the context is called denser than the middle from this excess on (density ratio − 1)
DENSER = 0.10
#: the first position is said to dominate a profile from this share on
DOMINANT = 0.5
#: a profile is said to have collapsed onto the first position from this share on
COLLAPSED = 0.95
#: token-wise and Frobenius mixing are said to part company from this ratio on
MASSIVE = 10.0
#: two distances are told apart only when they differ by more than this share of the smaller
TIE = 0.05
#: a share of influence below this is none
NOTHING = 1e-9

#: the predicted profiles in words, where a summary brings no words of its own
VARIANTS = {
    "residual": "measured attention and measured λ",
    "attention_only": "measured attention, no residual connections",
    "half": "measured attention, λ = ½",
    "uniform": "the even curve: every position counts alike",
}

#: the four forces in words
FORCE_NAMES = {"causal": "the causal mask", "residual": "the residual", "position": "positions", "content": "content"}


def in_words(summary: Summary, variant: str) -> str:
    """What a predicted profile is."""
    return (summary.get("variants") or {}).get(variant) or VARIANTS.get(variant, "")


def profile_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn profile` found, most important first."""
    return _present(
        summary,
        influence_shape,
        closest_prediction,
        theory_reach,
        force_behind,
        mixing_strength,
        first_position,
        collapse_without_residual,
        massive_activations,
        not_measured,
    )


def _present(summary: Summary, *makers: Callable[[Summary], Finding | None]) -> tuple[Finding, ...]:
    found = (make(summary) for make in makers)
    return tuple(finding for finding in found if finding is not None)


def _too_few(summary: Summary) -> str | None:
    """Why the documents settle nothing that needs an interval; None where they may. Equal documents count once."""
    return unsettled(independent_documents(summary))


def _no_shape(length: int) -> Finding:
    return Finding(
        f"{count(length, 'position')} {plural(length, 'is')} too few for a shape: there is no eighth of the "
        f"context to set beside its middle below {count(LEAST_POSITIONS, 'position')}.",
        "Nothing is said about a U shape, about either end, or about what depth does to them.",
        tone="caution",
        links=(("shapes-table", "Shapes"),),
    )


def influence_shape(summary: Summary) -> Finding | None:
    """Which parts of the context the measured influence favours: a U shape, one end, neither."""
    shape = summary.get("shape", {}).get("influence")
    if not shape:
        return None
    if (length := positions(summary)) is not None and shapeless(length):
        return _no_shape(length)
    trimmed = shape.get("without_first") or shape
    first, last = _densities(trimmed)
    kind = _kind(first, last)
    interval = summary.get("intervals", {}).get("influence", {}).get("u_index")
    if interval is not None and None in (interval[0], interval[1]):
        interval = None
    # called a U with an interval that reaches 0, or no U with one in which both ends are denser
    open_ = interval is not None and (interval[0] <= 0 if kind == "u" else interval[1] > DENSER)
    too_few = _too_few(summary)
    start, end = f"{times(first)} the influence of a position in the middle half", times(last)
    ends = f"a position in the first eighth of the context has {start}, one in the last eighth {end}."
    text = {
        "u": f"Influence on the last position is U-shaped: {ends}",
        "recency": f"Influence on the last position leans to the recent end: {ends} That is no U shape.",
        "primacy": f"Influence on the last position leans to the beginning: {ends} That is no U shape.",
        "flat": f"Influence on the last position shows no U shape and favours neither end: {ends}",
    }[kind]
    if too_few:
        looks = {
            "u": "looks U-shaped",
            "recency": "seems to lean to the recent end",
            "primacy": "seems to lean to the beginning",
            "flat": "seems to favour neither end",
        }[kind]
        text = f"Influence on the last position {looks}, but {too_few} it: {ends}"
    elif open_:
        unsure = "these documents do not settle"
        text = {
            "u": f"Influence on the last position looks U-shaped, but {unsure} it: {ends}",
            "flat": f"Influence on the last position favours neither end: {ends} Whether it is U-shaped, {unsure}.",
        }.get(kind, text.replace("That is no U shape.", f"Whether that is a U shape as well, {unsure}."))
    notes = ["The first position, often a sink, is left out."] if trimmed is not shape else []
    if trimmed is not shape and (whole := _kind(*_densities(shape))) != kind:
        notes.append(f"With it, the reading changes to {_KINDS[whole]}.")
    if interval is not None and trimmed["u_index"] is not None:
        notes.append(
            f"U index {number(trimmed['u_index'])}, 95 % bootstrap interval {span(interval)} over "
            f"{_documents(summary)}"
            + (", which includes 0." if interval[0] <= 0 <= interval[1] else ".")
            + _narrow(too_few)
        )
    notes.append(_influence_condition(summary))
    return Finding(
        text,
        " ".join(notes),
        tone="caution" if open_ or too_few else "plain",
        links=(("profiles-chart", "Measured profile"), ("shapes-table", "Shapes")),
    )


def _narrow(too_few: str | None) -> str:
    return f" Over fewer than {SETTLING} documents such an interval is too narrow to be trusted." if too_few else ""


_KINDS = {"u": "a U shape", "recency": "a recency bias", "primacy": "a primacy bias", "flat": "no bias to either end"}


def _densities(shape: Mapping[str, float]) -> tuple[float, float]:
    """Density of the first and of the last eighth relative to the middle half."""
    middle = shape["middle"] / 0.5
    if middle <= 0:
        return math.inf, math.inf
    return shape["primacy"] / 0.125 / middle, shape["recency"] / 0.125 / middle


def _kind(first: float, last: float) -> str:
    start, end = first - 1 > DENSER, last - 1 > DENSER
    if start and end:
        return "u"
    return "recency" if end else "primacy" if start else "flat"


def closest_prediction(summary: Summary) -> Finding | None:
    """Which predicted profile lies nearest to the measured influence, and whether it beats an even curve."""
    comparison = dict(summary.get("comparison") or {})
    uniform = comparison.pop("uniform", None)
    repeated = curves.other_names(summary)
    # what coincides counts once
    comparison = {name: figures for name, figures in comparison.items() if name not in repeated}
    if not comparison:
        return None
    intervals = summary.get("intervals") or {}
    ranked = sorted(comparison, key=lambda name: comparison[name]["wasserstein"])
    # and so does what no digit shown here would tell apart
    alike = curves.alike(summary, ranked, SHOWN)
    ranked = [name for name in ranked if name not in alike]
    best, distance = ranked[0], comparison[ranked[0]]["wasserstein"]
    too_few = _too_few(summary)
    margins = None if too_few else intervals.get("over_nearest")

    def is_apart(name: str) -> bool:
        lead = comparison[name]["wasserstein"] - distance
        if margins:
            # an interval all below 0 (the draws prefer the other one) does not make the nearest stand out either
            return apart(lead, margins.get(name)) and not (name in margins and margins[name][1] < 0)
        return apart(lead) and lead > TIE * distance

    ties = [name for name in ranked[1:] if not is_apart(name)]
    tone: Literal["plain", "caution"] = "plain"
    named = f"`{best}` ({in_words(summary, best) or best})"
    text = (
        f"Of {len(ranked)} different predicted profiles, {named} comes closest to the measured influence: "
        f"{number(distance, 3)} away"
        if len(ranked) > 1
        else f"The predicted profile {named} lies {number(distance, 3)} from the measured influence"
    )
    gain = None if too_few else intervals.get("over_uniform", {}).get(best)
    if uniform is None:
        text += "."
    elif distance >= (flat := uniform["wasserstein"]):
        tone = "caution"
        text = (
            "No predicted profile is closer to the measured influence than an even curve: the nearest, "
            f"`{best}`, lies {number(distance, 3)} away, the even curve {number(flat, 3)}."
        )
        if gain and not apart(distance - flat, gain):
            text = (
                f"{text[:-1]}; these documents do not tell the two apart (95 % interval of the difference "
                f"{span(gain, 3)})."
            )
    elif gain and not apart(distance - flat, gain):
        tone = "caution"
        text += (
            f". An even curve is {number(flat, 3)} away, and these documents do not tell the two apart "
            f"(95 % interval of the difference {span(gain, 3)})."
        )
    elif not apart(distance - flat):
        tone = "caution"
        text += f". An even curve is as near ({number(flat, 3)})."
    else:
        text += f", where an even curve is {number(flat, 3)} away."
    if too_few:
        text += f" {too_few} which {'prediction' if len(ranked) > 1 else 'curve'} is nearest."
        tone = "caution"
    else:
        if ties and tone == "plain":
            text += f" {listed([f'`{name}`' for name in ties])} cannot be told apart from it."
        if others := [name for name in ranked[1:] if name not in ties]:
            text += f" {_margin(others, comparison, distance, margins)}"
    sure = (
        "Distances are Wasserstein-1 as a share of the context length: 0 is the same curve, 1 all mass at opposite "
        "ends. The first position is included. "
    )
    if repeated:
        told = [f"`{name}` as `{first}`" for name, first in repeated.items()]
        sure += f"The same curve here, and counted once: {listed(told)}. "
    if alike:
        told = [f"`{name}` with `{first}`" for name, first in alike.items()]
        sure += f"Less than {SHOWN:g} apart, and counted once: {listed(told)}. "
    if interval := intervals.get("comparison", {}).get(best):
        sure += f"95 % bootstrap interval of the nearest: {span(interval, 3)}, over {_documents(summary)}."
        sure += f"{_narrow(too_few)} "
    if intervals.get("comparison"):
        sure += _HELD
    return Finding(
        text,
        sure + _influence_condition(summary),
        tone=tone,
        links=(("distances-table", "Distances"), ("profiles-chart", "Profiles")),
    )


#: what an interval of a distance leaves out
_HELD = (
    "Intervals of distances resample the documents of the measured influence alone; the predictions are held fixed. "
)


def _margin(farther: Sequence[str], comparison: Mapping[str, Any], distance: float, margins: Any) -> str:
    """By how much the nearest prediction leads the first that is farther, and `residual`, with intervals."""
    told = [farther[0], *(["residual"] if "residual" in farther[1:] else [])]
    words = []
    for name in told:
        text = f"`{name}` lies {number(comparison[name]['wasserstein'] - distance, 3)} farther away"
        if margins and (ends := margins.get(name)):
            text += f" ({_paired(ends)})"
        words.append(text)
    return listed(words) + "."


def _paired(ends: Sequence[float]) -> str:
    """The interval of a paired difference: where both curves lie on one side of every draw it has no width."""
    if ends[1] - ends[0] < SHOWN:
        return "the same in every draw of the documents"
    return f"95 % interval {span(ends, 3)}"


def theory_reach(summary: Summary) -> Finding | None:
    """How near mask, λ, positions and coarse content come, beside the measured attention and an even curve."""
    comparison = summary.get("comparison") or {}
    if "positional" not in comparison or "positional_content" not in comparison:
        return None
    distance = {name: figures["wasserstein"] for name, figures in comparison.items()}
    position, content = distance["positional"], distance["positional_content"]
    best = min(position, content)
    nearest = "positional" if position <= content else "positional_content"
    intervals = summary.get("intervals") or {}
    too_few = _too_few(summary)
    text = (
        f"Mask, λ and positions alone (`positional`) come to {number(position, 3)} from the measured influence; with "
        f"each head's preference for its own token (`positional_content`) to {number(content, 3)}"
    )
    tone: Literal["plain", "caution"] = "caution" if too_few else "plain"
    if (flat := distance.get("uniform")) is not None:
        gain = None if too_few else (intervals.get("over_uniform") or {}).get(nearest)
        if gain and not apart(best - flat, gain):
            tone = "caution"
            text += f", an even curve to {number(flat, 3)}; these documents do not tell `{nearest}` from it"
        elif best >= flat:
            tone = "caution"
            farther = "farther" if apart(best - flat) and best - flat > TIE * flat else "no nearer"
            text += f", {farther} than an even curve ({number(flat, 3)})"
            text += "" if too_few else ": the architecture does not explain where it looks"
        else:
            text += f", an even curve to {number(flat, 3)}"
    text += "."
    rule = ""
    if (attention := distance.get("residual")) is not None:
        measured = f"The measured attention (`residual`, {number(attention, 3)})"
        tied, rule = _tied(best - attention, nearest, intervals, min(best, attention))
        if too_few:
            text += f" {measured[:-1]}) is set beside it, but {too_few} which is nearer."
            rule = ""
        elif tied:
            text += f" {measured} is not told apart from that."
        elif best < attention:
            text += f" {measured} does not come as near."
        else:
            text += f" The measured attention (`residual`) comes nearer, to {number(attention, 3)}."
    sure = f"All use the measured λ. {rule}Distances are Wasserstein-1 as a share of the context length. "
    if intervals.get("comparison"):
        sure += _HELD
    return Finding(text, sure + _influence_condition(summary), tone=tone, links=(("distances-table", "Distances"),))


def _tied(difference: float, name: str, intervals: Summary, smaller: float) -> tuple[bool, str]:
    """Whether a prediction and `residual` are equally close, and by which rule; `difference` is of their distances.

    The paired difference decides. Summaries of before it was kept have the two intervals, or none.
    """
    if paired := (intervals.get("over_residual") or {}).get(name):
        rule = "Told apart: the 95 % interval over documents of the paired difference excludes 0."
        rule += f" Here it is {number(difference, 3, sign=True)} ({_paired(paired)}). "
        return not apart(difference, paired), rule
    ends = intervals.get("comparison") or {}
    if {name, "residual"} <= ends.keys():
        one, other = ends[name], ends["residual"]
        overlap = max(one[0], other[0]) <= min(one[1], other[1])
        rule = "Two whose 95 % intervals over documents overlap are called equally close. "
        return overlap or not apart(difference), rule
    return abs(difference) <= TIE * smaller or not apart(difference), f"Closeness is called equal within {TIE:.0%}. "


def force_behind(summary: Summary) -> Finding | None:
    """Which force moves the implied profile where, and which of them brings it nearer to the measured influence."""
    moved = strongest_force(summary)
    if moved is None:
        return None
    part = next(iter(summary["forces"].values()))
    text = f"In the `positional_content` profile {moved.text[0].lower()}{moved.text[1:]}"
    if distance := part.get("distance"):
        shares = dict(zip(part["forces"], distance["shares"], strict=True))
        told = {
            side: [
                f"{FORCE_NAMES[force]} {number(share, 3, sign=True)}"
                for force, share in sorted(shares.items(), key=lambda item: -abs(item[1]))
                if share * sign >= 5e-4
            ]
            for side, sign in (("nearer", -1), ("farther", 1))
        }
        words = [f"{side}: {listed(names)}" for side, names in told.items() if names]
        text += (
            f" Set beside the measured influence, the four take the distance from {number(distance['baseline'], 3)} "
            f"(an even curve) to {number(distance['total'], 3)}" + (f"; {'; '.join(words)}." if words else ".")
        )
    return Finding(text, moved.sure, links=(("forces-chart", "Shares"), ("forces-table", "Figures")))


def mixing_strength(summary: Summary) -> Finding | None:
    """How much of a layer's update is attention."""
    mixing = summary.get("mixing")
    if not mixing:
        return None
    token = mixing["token"]
    mean, low, high = sum(token) / len(token), min(token), max(token)
    if len(token) == 1:
        text = (
            f"Mixing in the only layer is λ = {number(mean)}: what attention adds is {percent(mean)} of the size of "
            "update and residual stream together."
        )
    else:
        text = (
            f"Mixing averages λ = {number(mean)} over {count(len(token), 'layer')}: what attention adds is "
            f"{percent(mean)} of the size of update and residual stream together (from {number(low)} in layer "
            f"{token.index(low)} to {number(high)} in layer {token.index(high)})."
        )
    documents = mixing.get("documents")
    notes = ["Token-wise norms."]
    if documents and documents > 1 and mixing.get("token_std"):
        half = 1.96 * max(mixing["token_std"]) / math.sqrt(documents)
        over = count(documents, "document")
        notes.append(f"The 95 % interval over {over} is at most ±{number(half, 3)} for any layer.")
        if few := _narrow(_too_few(summary)):
            notes.append(few.lstrip())
    elif documents:
        notes.append(f"From {count(documents, 'document')}; no interval.")
    return Finding(text, " ".join(notes), links=(("mixing-chart", "Mixing by layer"),))


def first_position(summary: Summary) -> Finding | None:
    """Whether the first position holds most of the predicted profile."""
    profile = (summary.get("profiles") or {}).get("residual")
    if not profile:
        return None
    share = profile[0]
    if share < DOMINANT or shapeless(len(profile)):
        return None
    text = (
        f"The first position alone holds {percent(share)} of the `residual` profile: the prediction is dominated by a "
        "sink."
    )
    influence = summary.get("influence")
    if influence:
        text += f" The measured influence gives that position {percent(influence[0], 1)}."
    sure = (
        "A rollout counts attention weight whatever the value vectors carry; compare the shapes without the first "
        "position."
    )
    if sinks := summary.get("first_position_attention"):
        top = max(sinks)
        sure = (
            f"Queries of the second half put up to {percent(top)} of a layer's attention there (layer "
            f"{sinks.index(top)}). " + sure
        )
    return Finding(
        text,
        sure,
        tone="caution",
        links=(("profiles-chart", "Profiles"), ("shapes-table", "Shapes without the first position")),
    )


def collapse_without_residual(summary: Summary) -> Finding | None:
    """Whether attention without residual connections would put everything on the first position."""
    profile = (summary.get("profiles") or {}).get("attention_only")
    residual = (summary.get("profiles") or {}).get("residual")
    if not profile or not residual or profile[0] < COLLAPSED or shapeless(len(profile)):
        return None
    layers = len(summary["mixing"]["token"]) if summary.get("mixing") else 0
    text = (
        f"Without residual connections (λ = 1) the {count(layers, 'measured attention kernel')} would put "
        f"{percent(profile[0], 1)} of the influence on the first position; with the measured λ it is "
        f"{percent(residual[0], 1)}."
    )
    return Finding(
        text,
        f"This holds for these kernels at {count(len(profile), 'position')}; it is a statement about products of "
        f"averaged "
        "attention, not about what the model computes.",
        links=(("profiles-chart", "Profiles"),),
    )


def massive_activations(summary: Summary) -> Finding | None:
    """Whether the two norms of λ disagree, because single positions hold most of the residual stream."""
    mixing = summary.get("mixing")
    if not mixing:
        return None
    ratios = [
        token / frobenius if frobenius > 0 else 1.0
        for token, frobenius in zip(mixing["token"], mixing["frobenius"], strict=True)
    ]
    layers = [layer for layer, ratio in enumerate(ratios) if ratio >= MASSIVE]
    if not layers:
        return None
    worst = max(layers, key=lambda layer: ratios[layer])
    text = (
        f"In {len(layers)} of {count(len(ratios), 'layer')} the Frobenius mixing coefficient is at least "
        f"{MASSIVE:.0f} times smaller than "
        f"the token-wise one (layer {worst}: {number(mixing['frobenius'][worst], 4)} against "
        f"{number(mixing['token'][worst], 3)})."
    )
    sure = (
        "The Frobenius figure then describes a single position, the token-wise one the typical position; profiles "
        "here use token-wise."
    )
    if shares := mixing.get("largest_position_share"):
        sure = (
            f"One position holds {percent(shares[worst])} of the squared norm of the residual stream there, on average "
            f"over {_documents(summary)}. " + sure
        )
    return Finding(
        text, sure, tone="caution", links=(("mixing-chart", "Mixing by layer"), ("mixing-table", "Both norms"))
    )


def not_measured(summary: Summary) -> Finding | None:
    """Says so when no influence was measured, since nothing then tests the predictions."""
    if summary.get("influence"):
        return None
    return Finding(
        "The influence was not measured, so the predicted profiles stand untested.",
        "Run again without --no-influence to set them beside gradients of the model.",
        tone="caution",
        asked=True,
    )


def _documents(summary: Summary) -> str:
    """How many documents stand behind the figures, in words."""
    known = known_documents(summary)
    return count(known, "document") if known else "documents"


def _influence_condition(summary: Summary) -> str:
    facts = summary.get("influence_facts") or {}
    documents, length = facts.get("documents"), len(summary.get("influence") or ())
    if summary.get("binning"):
        length = summary["provenance"]["tokens"]["length"]
    method = str(facts.get("method", "gradient_norm")).replace("_", " ")
    target = str(facts.get("target", "argmax_probability")).replace("_", " ").replace("argmax", "arg-max")
    who = f"{count(documents, 'document')} of {length} tokens" if documents else f"documents of {length} tokens"
    return f"Measured as {method} of the {target} at the last position, mean over {who}."


# ---- simulate ----------------------------------------------------------------------------------------------------


def simulate_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn simulate` found."""
    return _present(summary, simulated_shape, with_length, strongest_force, more_depth, not_monotone)


def simulated_shape(summary: Summary) -> Finding | None:
    """The shape of the profile at the shortest length."""
    length = summary["lengths"][0]
    if shapeless(length):
        return _no_shape(length)
    shape = summary["shape"][str(length)]["residual"]
    first, last = _densities(shape)
    kind = _kind(first, last)
    if shape["middle"] <= NOTHING:  # a ratio to nothing says nothing
        ends = [("first", shape["primacy"]), ("last", shape["recency"])]
        told = [f"{percent(share)} of the influence is on the {name} eighth" for name, share in ends if share > NOTHING]
        return Finding(
            f"At {count(length, 'position')} the architecture alone leaves nothing for the middle half: "
            f"{' and '.join(told) or 'what there is lies between an end and the middle'}.",
            "A computation, exact for this architecture and these λ; a trained model's content is not in it.",
            links=(("profiles-chart", "Profile"), ("shapes-table", "Shapes")),
        )
    name = {
        "u": "a U-shaped profile",
        "recency": "a recency bias and no U shape",
        "primacy": "a primacy bias and no U shape",
        "flat": "a profile that favours neither end, no U shape",
    }[kind]
    text = (
        f"At {count(length, 'position')} the architecture alone implies {name}: a position in the "
        f"first eighth has {times(first)} the influence of one in the middle half, one in the last eighth "
        f"{times(last)}."
    )
    sure = (
        "A computation, exact for this architecture and these λ. The first position is counted and holds "
        f"{percent(_first_value(summary, length), 1)}; what a trained model's content adds is not in it."
    )
    return Finding(text, sure, links=(("profiles-chart", "Profile"), ("shapes-table", "Shapes")))


def _first_value(summary: Summary, length: int) -> float:
    return float(summary["profiles"][str(length)]["residual"]["value"][0])


def with_length(summary: Summary) -> Finding | None:
    """How the shape changes from the shortest length to the longest."""
    lengths = [n for n in summary["lengths"] if not shapeless(n)]
    if len(lengths) < 2:
        return None
    low, high = (summary["shape"][str(n)]["residual"] for n in (lengths[0], lengths[-1]))
    text = (
        f"From {lengths[0]} to {count(lengths[-1], 'position')} the first eighth goes from {percent(low['primacy'])} "
        f"to {percent(high['primacy'])} of the influence, the last eighth from {percent(low['recency'])} to "
        f"{percent(high['recency'])}, and the mean position from {number(low['mean_position'])} to "
        f"{number(high['mean_position'])}."
    )
    sure = "With the same λ at every length, which a real model need not keep."
    return Finding(text, sure, links=(("profiles-chart", "All lengths"), ("shapes-table", "Shapes")), asked=True)


def strongest_force(summary: Summary) -> Finding | None:
    """Which force moves the mean position most, and where the others push."""
    forces = {n: part for n, part in (summary.get("forces") or {}).items() if not shapeless(int(n))}
    if not forces:
        return None
    length, part = next(iter(forces.items()))
    at = part["quantities"].index("mean_position")
    shares = {force: row[at] for force, row in zip(part["forces"], part["shares"], strict=True)}
    names = FORCE_NAMES
    ranked = sorted(shares, key=lambda force: -abs(shares[force]))
    if abs(shares[ranked[0]]) < 1e-9:
        return None
    told = [
        f"{names.get(force, force)} {number(shares[force], sign=True)}"
        for force in ranked
        if abs(shares[force]) >= 5e-3
    ]
    told = told or [
        f"{names.get(str(ranked[0]), str(ranked[0]))} {number(shares[ranked[0]], 4, sign=True)}, the others less"
    ]
    side = "beginning" if shares[ranked[0]] < 0 else "end"
    leader = sentence(names.get(str(ranked[0]), str(ranked[0])))[:-1]
    verb = "move" if leader == "Positions" else "moves"
    text = f"{leader} {verb} the mean position most, towards the {side}: {listed(told)}."
    return Finding(
        text,
        f"Shapley shares at {count(int(length), 'position')}, in units of the context length, against the profile "
        f"with all four forces off (mean {number(part['baseline'][at])}; with all forces {number(part['total'][at])}). "
        "A window is none of the four and is always on.",
        links=(("forces-chart", "Shares"), ("path-chart", "One force after the other")),
    )


def more_depth(summary: Summary) -> Finding | None:
    """What the schedule implies beyond the last layer, with its condition."""
    depth = summary.get("depth")
    if not depth or shapeless(depth["length"]):
        return None
    end, condition = depth["collapse"], depth["condition"]
    # one sentence: it is read on its own, on a terminal, and holds on that condition only
    text = sentence(depth["implication"] + ("" if condition == "none" else f", provided that {condition}"))
    sure = f"Fitted to the mixing coefficients of {count(len(summary['mixing']), 'layer')}, computed at "
    sure += f"{count(depth['length'], 'position')}. "
    if end["depth"]:
        sure += f"{percent(1 - end['eta'])} of the influence is on the first position from depth {end['depth']} on."
    elif end["predicted_depth"]:
        sure += f"{percent(1 - end['eta'])} would be reached near depth {end['predicted_depth']:.3g} ({end['reason']})."
    else:
        sure += sentence(end["reason"])
    return Finding(text, sure, links=(("depth-chart", "Depth"), ("schedule-chart", "Schedule")))


def not_monotone(summary: Summary) -> Finding | None:
    """A violation of stochastic monotonicity, on which part of the theory rests."""
    found = summary.get("monotonicity")
    if not found or found["worst"] <= 1e-9 or shapeless(found["length"]):
        return None
    return Finding(
        f"The kernel is not stochastically monotone: a later position can look further back, by up to "
        f"{found['worst']:.3g} of its weight.",
        f"Checked at {count(found['length'], 'position')}. Results that assume monotonicity do not apply as they "
        "stand.",
        tone="caution",
        links=(("profiles-chart", "Profile"),),
    )


# ---- heads -------------------------------------------------------------------------------------------------------


def heads_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn heads` found."""
    return _present(
        summary, label_counts, no_positional_head, purest_heads, named_roles, too_even_to_tell, removal_matters
    )


def _at_keys(summary: Summary) -> bool:
    """Whether hidden keys were exchanged, not tokens of the prompt."""
    return summary["level"] == "keys"


def _condition(summary: Summary) -> str:
    swap = "two hidden keys exchanged" if _at_keys(summary) else "two tokens of the prompt exchanged"
    over = f"{count(summary['queries'], 'query')} in {count(summary['documents'], 'document')}"
    return f"{swap}, {over}, τ = {summary['tau']:g}"


def _all_heads(summary: Summary) -> list[tuple[int, int]]:
    return [(t, h) for t, row in enumerate(summary["labels"]) for h in range(len(row))]


def label_counts(summary: Summary) -> Finding | None:
    """How many heads are positional, symbolic, uniform, mixed, and how many of the labels are settled."""
    counts, heads = summary["counts"], _all_heads(summary)
    first = counts.get("positional", 0)
    told = listed(
        [
            f"{first} {plural(first, 'is')} positional",
            *(f"{counts.get(label, 0)} {label}" for label in ("symbolic", "uniform", "mixed")),
        ]
    )
    text = f"Of {count(len(heads), 'head')}, {told}."
    text += "".join(f" {words}" for words in _sinks_by_label(summary))
    certain = [summary["certain"][t][h] for t, h in heads]
    sure = f"A head is pure within γ = {summary['thresholds']['purity']:g} of a corner; {_condition(summary)}. "
    too_few = label_doubt(summary)
    if too_few:
        sure += f"{too_few[0].upper()}{too_few[1:]} a label."
    elif any(value is not None for value in certain):
        settled = sum(value is True for value in certain)
        sure += (
            f"{settled} of {len(heads)} labels stay the same over the whole 95 % interval (over "
            f"{summary['interval_over']})."
        )
    else:
        sure += "No interval: one document and query."
    return Finding(
        text,
        sure,
        tone="caution" if too_few else "plain",
        links=(("plane-chart", "The plane"), ("map-chart", "The map")),
    )


#: a label's heads are said to be sinks from this share on
SINKS = 0.25


def _sinks(summary: Summary, label: str) -> list[tuple[int, int]]:
    """The heads of a label that put most of their attention on the first position."""
    return [(t, h) for t, h in _all_heads(summary) if summary["labels"][t][h] == label and _is_sink(summary, t, h)]


def _is_sink(summary: Summary, t: int, h: int) -> bool:
    return "sink" in summary["roles"][t][h]


def _sinks_by_label(summary: Summary) -> list[str]:
    """For each label of which many heads are sinks: how many, and what their label then says."""
    thing = "key" if _at_keys(summary) else "token"
    meaning = {
        "symbolic": f"the swap that moves the first {thing} moves their attention with it, so they follow that one "
        f"{thing}, whatever they do with others",
        "positional": f"their attention stays on the first position, whichever {thing} stands there",
        "uniform": "next to no attention is left that a swap could move",
        "mixed": f"the swaps that move the first {thing} decide their place in the plane",
    }
    told = []
    for label, says in meaning.items():
        sinks, of = len(_sinks(summary, label)), summary["counts"].get(label, 0)
        if sinks and sinks >= SINKS * of:
            who = f"{sinks} of the {of} {label} heads" if of > 1 else f"The one {label} head"
            told.append(f"{who} {'are sinks' if of > 1 else 'is a sink'} (attention on the first position): {says}.")
    return told


def label_doubt(summary: Summary) -> str | None:
    """Why the intervals of the scores settle no label; None where they may, and where there are none at all.

    Intervals over the queries of a single document know no other document either.
    """
    if all(summary["certain"][t][h] is None for t, h in _all_heads(summary)):
        return None
    return _too_few(summary)


def no_positional_head(summary: Summary) -> Finding | None:
    """Says that there is no positional (or symbolic) head, and how near one comes."""
    counts = summary["counts"]
    missing = [label for label in ("positional", "symbolic") if not counts.get(label)]
    if not missing:
        return None
    told = []
    for label in missing:
        # the corner's own distance, not the score alone: a uniform head scores high on both
        def distance(place: tuple[int, int], label: str = label) -> float:
            own, other = (label, "symbolic") if label == "positional" else (label, "positional")
            t, h = place
            return max(1 - summary[own][t][h], summary[other][t][h])

        t, h = min(_all_heads(summary), key=distance)
        told.append(
            f"the nearest to {label} is L{t}H{h} (s_pos {number(summary['positional'][t][h])}, "
            f"s_sym {number(summary['symbolic'][t][h])})"
        )
    return Finding(
        f"No head is {' or '.join(missing)}: {listed(told)}.",
        f"At γ = {summary['thresholds']['purity']:g}; {_condition(summary)}. A larger γ or other prompts may tell "
        "otherwise.",
        links=(("plane-chart", "The plane"),),
    )


def purest_heads(summary: Summary) -> Finding | None:
    """The purest positional and symbolic heads by name."""
    told, links = [], []
    for label in ("positional", "symbolic"):
        heads = [(t, h) for t, h in _all_heads(summary) if summary["labels"][t][h] == label]
        heads = sorted(heads, key=lambda place: summary["gamma"][place[0]][place[1]])[:3]
        if heads:
            words = f"purest {label}: {listed([f'L{t}H{h}' for t, h in heads])}"
            if sinks := [f"L{t}H{h}" for t, h in heads if _is_sink(summary, t, h)]:
                every = len(sinks) == len(heads)
                who = ("all of them" if len(sinks) > 1 else "it") if every else listed(sinks)
                words += f" ({who} {plural(len(sinks), 'is')} {'sinks' if len(sinks) > 1 else 'a sink'})"
            told.append(words)
            links += [(f"head:layer {t}|head {h}", f"L{t}H{h}") for t, h in heads]
    if not told:
        return None
    text = "; ".join(told)
    return Finding(text[0].upper() + text[1:] + ".", _condition(summary).capitalize() + ".", links=tuple(links))


_ROLES = {
    "previous_token": "to the previous token",
    "sink": "to the first position",
    "induction": "to what followed the same token before",
    "duplicate_token": "to the same token before",
    "self": "to themselves",
    "local_window": "to the positions just before",
}


def named_roles(summary: Summary) -> Finding | None:
    """Sinks, previous-token and induction heads by name, with their measured share of attention and its chance."""
    counts = summary.get("role_counts") or {}
    evidence = summary.get("evidence") or {}
    sources = summary["thresholds"].get("role_evidence") or {}
    told, links = [], []
    for role in ("previous_token", "induction", "sink"):
        part = evidence.get(sources.get(role, role))
        if not counts.get(role) or part is None:
            continue
        heads = [(t, h) for t, h in _all_heads(summary) if role in summary["roles"][t][h]]
        measured = part["measured"]
        t, h = max(heads, key=lambda place, of=measured: of[place[0]][place[1]])
        told.append(
            f"{count(len(heads), role.replace('_', '-') + ' head')} (strongest L{t}H{h}: "
            f"{percent(measured[t][h])} of its attention goes {_ROLES[role]}, chance {percent(part['chance'][t][h])})"
        )
        links.append((f"head:layer {t}|head {h}", f"L{t}H{h}"))
    if not told:
        return None
    return Finding(
        f"Roles by where attention goes: {listed(told)}.",
        f"Over {count(summary['documents'], 'document')}. Roles are measured shares of attention above a threshold and "
        "several times chance; they say where a head looks, not what it is for.",
        links=(("heads-table", "All heads"), *links),
    )


def too_even_to_tell(summary: Summary) -> Finding | None:
    """Says when most heads are uniform: their attention hardly reacts to a swap."""
    uniform, heads = summary["counts"].get("uniform", 0), _all_heads(summary)
    if uniform <= len(heads) / 2:
        return None
    return Finding(
        f"{uniform} of {count(len(heads), 'head')} {plural(uniform, 'is')} uniform: exchanging two "
        f"{'keys' if _at_keys(summary) else 'tokens'} hardly changes the attention.",
        "Such a head looks at everything nearly alike on these prompts; both scores are then near 1 and say little.",
        tone="caution",
        links=(("map-chart", "The map"),),
    )


REPLACED = {"zero": "zero", "mean": "its mean", "position_mean": "its mean at each position"}


def compared(study: Summary, name: str) -> bool:
    """Whether there are other heads to remove instead: not where a class is all the heads of its layers."""
    return study["overlap"][name] < study["heads"][name]


def removal_matters(summary: Summary) -> Finding | None:
    """Which classes of heads raise the loss more than random heads, and at which length."""
    study = summary.get("ablation")
    if not study:
        return None
    last = len(study["lengths"]) - 1
    tokens = count(study["lengths"][last], "token")
    more, less, unclear, alone = [], [], [], []
    too_few = unsettled(summary.get("different_documents") or study["documents"])
    for c, key in enumerate(study["classes"]):
        name, excess, (low, high) = key.replace("_", " "), study["excess"][c][last], study["excess_interval"][c][last]
        if not compared(study, key):
            change, (low, high) = study["increase"][c][last], study["increase_interval"][c][last]
            interval = "" if low is None else f", {span((low, high), 3)}"
            alone.append(f"{name} ({number(change, 3, sign=True)} nats{interval})")
        elif low is not None and (low > 0 or high < 0) and not too_few:
            (more if low > 0 else less).append(f"{name} ({number(excess, 3, sign=True)} nats, {span((low, high), 3)})")
        else:
            unclear.append(name)
    text = ""
    if too_few and unclear:
        text = (
            f"{too_few} which classes of heads raise the loss at {tokens} more than random heads do "
            f"({listed(unclear)})."
        )
    elif more:
        text = (
            f"Removing {plural(len(more), 'this class')} of heads raises the loss at {tokens} more than random heads "
            f"do: {listed(more)}."
        )
    elif less or unclear:
        other = " other" if alone else ""
        text = f"At {tokens} removing no{other} class of heads raises the loss by more than random heads do."
    if less:
        text += f" Less than random heads: {listed(less)}."
    if (more or less) and unclear:
        text += f" Not told apart from random heads: {listed(unclear)}."
    if alone:
        said = (
            f"At {tokens} the loss changes with {plural(len(alone), 'this class')} of heads removed: {listed(alone)}."
        )
        text = f"{said} {text}".rstrip()
    # a class that is most of its layers leaves little to draw random sets from
    crowded = [
        f"{name.replace('_', ' ')} ({study['overlap'][name]:.0f} of {count(study['heads'][name], 'head')})"
        for name in study["classes"]
        if compared(study, name) and study["overlap"][name] > 0.5 * study["heads"][name]
    ]
    caution = f" The random sets mostly repeat the class itself for {listed(crowded)}." if crowded else ""
    if alone:
        names = [name.replace("_", " ") for name in study["classes"] if not compared(study, name)]
        caution += f" No random heads stand beside {listed(names)}: the layers hold no other heads."
    if task := _task(summary):
        caution += (
            f" The loss is of the next token within samples of the {task} task, which a model of that task was not "
            "trained to predict: `posattn lengths` removes heads and counts right answers."
        )
    return Finding(
        text,
        f"What a head adds is replaced by {REPLACED.get(study['mode'], study['mode'])}; "
        f"{count(study['documents'], 'document')}, {count(study['controls'], 'random set')} of the same size in the "
        f"same layers, 95 % bootstrap intervals.{caution}",
        tone="caution" if alone or task or too_few else "plain",
        links=(("ablation-chart", "Loss by class"), ("ablation-table", "Figures")),
        asked=True,
    )


def _task(summary: Summary) -> str:
    """The name of the task whose samples were measured; "" for a text."""
    found = re.fullmatch(r"samples of task '(.+)'", str((summary["provenance"].get("tokens") or {}).get("source")))
    return found[1] if found else ""


# ---- compare -----------------------------------------------------------------------------------------------------

#: figures of a comparison in words
FIGURE_NAMES = {
    "u_index": "U index",
    "primacy": "first eighth",
    "middle": "middle half",
    "recency": "last eighth",
    "mean_position": "mean position",
    "mean_mixing": "mean mixing λ",
}


def compare_findings(summary: Summary) -> tuple[Finding, ...]:
    """What tells the runs apart: the figures whose interval of the difference excludes 0."""
    found: list[Finding] = []
    for index, name in list(enumerate(summary["names"]))[1:]:
        rows = [row for row in summary["differences"] if row["run"] == index]
        if summary["of"] == "heads":
            found.append(_heads_apart(summary, index, name, rows))
            continue
        known = [row for row in rows if row["low"] is not None]
        documents = [independent_documents(summary["runs"][i]) for i in (0, index)]
        fewest = min((n for n in documents if n is not None), default=None)
        too_few = unsettled(fewest) if known else None
        told_apart = [row for row in known if not too_few and apart(row["difference"], (row["low"], row["high"]))]
        unclear = [row for row in known if row not in told_apart]
        told = [
            f"{FIGURE_NAMES[row['figure']]} {number(row['first'])} → {number(row['this'])} "
            f"({span((row['low'], row['high']))})"
            for row in told_apart
        ]
        text = f"`{name}` against `{summary['names'][0]}`: " + (
            f"{listed(told)}." if told else "no figure of shape or mixing is told apart."
        )
        if not told and unclear:
            names = [FIGURE_NAMES[row["figure"]] for row in unclear]
            none = f"none of {listed(names)} is" if len(names) > 1 else f"{names[0]} is not"
            text = f"`{name}` against `{summary['names'][0]}`: {none} told apart."
        elif unclear:
            text += f" Not told apart: {listed([FIGURE_NAMES[row['figure']] for row in unclear])}."
        paired = any(row["paired"] for row in rows)
        how = "paired, since both runs read the same ones" if paired else "the runs taken as independent"
        sure = f"In brackets the 95 % interval of the difference over documents, {how}."
        if not told:
            sure = f"Told apart: the 95 % interval of the difference excludes 0. It is over documents, {how}."
        if too_few:
            sure = f"{too_few} a difference: intervals over so few are too narrow. {sure}"
        elif fewest is not None and (few := few_documents(fewest)):
            sure = f"{sure} {few}"
        if not told_apart and not unclear:
            sure = "A run of a single document has no interval."
        found.append(
            Finding(
                text,
                sure,
                tone="caution" if too_few else "plain",
                links=(("differences-table", "Figures"), ("curves-chart", "Curves")),
            )
        )
    if summary["differing"]:
        shown = list(summary["differing"])
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        found.append(
            Finding(
                f"The runs differ in {listed(shown[:6]) if not more else ', '.join(shown[:6]) + more}.",
                "Whatever differs beside what was meant to differ can be behind a difference.",
                tone="caution" if len(shown) > 1 else "plain",
                links=(("settings-table", "Settings"),),
            )
        )
    return tuple(found)


def _heads_apart(summary: Summary, index: int, name: str, rows: Sequence[Mapping[str, Any]]) -> Finding:
    told = [f"{row['figure']} {row['first']} → {row['this']}" for row in rows]
    changed = [row for row in summary.get("changed") or () if row["run"] == index]
    text = f"`{name}` against `{summary['names'][0]}`, heads by label: {listed(told)}."
    sure = "Counts follow the threshold γ; a head near it changes label by chance."
    doubts = [doubt for i in (0, index) if (doubt := label_doubt(summary["runs"][i]))] if changed else []
    if changed:
        settled = sum(row["settled"] for row in changed)
        text += f" {count(len(changed), 'head')} changed label"
        text += "." if doubts else f", {settled} of them beyond the intervals of both runs."
    if doubts:
        sure = f"{doubts[0]} a label. {sure}"
    return Finding(
        text,
        sure,
        links=(("differences-table", "Figures"), ("counts-chart", "Labels")),
    )


#: command -> its findings
FINDINGS: dict[str, Callable[[Summary], tuple[Finding, ...]]] = {
    "profile": profile_findings,
    "simulate": simulate_findings,
    "heads": heads_findings,
    "train": train_findings,
    "lengths": lengths_findings,
    "compare": compare_findings,
}
