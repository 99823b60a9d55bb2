"""Findings in words, each made from numbers in summary.json.

Every function takes the summary of a command and returns one `Finding`, or None where the summary does not hold what it
would speak of. A finding names the figures it rests on, how many documents stand behind them, the interval where one
was measured, and the condition under which it holds. The thresholds are the constants below; nothing is called large,
small or a U shape on any other ground.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from posattn.reports.kit import Finding
from posattn.reports.learning import lengths_findings, train_findings

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
    "uniform": "every position counts alike",
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


def influence_shape(summary: Summary) -> Finding | None:
    """Which parts of the context the measured influence favours: a U shape, one end, neither."""
    shape = summary.get("shape", {}).get("influence")
    if not shape:
        return None
    trimmed = shape.get("without_first") or shape
    first, last = _densities(trimmed)
    kind = _kind(first, last)
    interval = summary.get("intervals", {}).get("influence", {}).get("u_index")
    unsettled = kind == "u" and interval is not None and interval[0] is not None and interval[0] <= 0
    start, end = f"{_times(first)} the influence of a position in the middle half", _times(last)
    ends = f"a position in the first eighth of the context has {start}, one in the last eighth {end}."
    text = {
        "u": f"Influence on the last position is U-shaped: {ends}",
        "recency": f"Influence on the last position leans to the recent end: {ends} That is no U shape.",
        "primacy": f"Influence on the last position leans to the beginning: {ends} That is no U shape.",
        "flat": f"Influence on the last position shows no U shape and favours neither end: {ends}",
    }[kind]
    if unsettled:
        text = f"Influence on the last position looks U-shaped, but these documents do not settle it: {ends}"
    notes = ["The first position, often a sink, is left out."] if trimmed is not shape else []
    if trimmed is not shape and (whole := _kind(*_densities(shape))) != kind:
        notes.append(f"With it, the reading changes to {_KINDS[whole]}.")
    if interval and None not in (interval[0], interval[1], trimmed["u_index"]):
        notes.append(
            f"U index {_signed(trimmed['u_index'])}, 95 % bootstrap interval {_signed(interval[0])} to "
            f"{_signed(interval[1])} over documents"
            + (", which includes 0." if interval[0] <= 0 <= interval[1] else ".")
        )
    notes.append(_influence_condition(summary))
    return Finding(
        text,
        " ".join(notes),
        tone="caution" if unsettled else "plain",
        links=(("profiles-chart", "Measured profile"), ("shapes-table", "Shapes")),
    )


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
    """Which predicted profile lies nearest to the measured influence, and whether it beats a uniform curve."""
    comparison = dict(summary.get("comparison") or {})
    uniform = comparison.pop("uniform", None)
    if not comparison:
        return None
    intervals = summary.get("intervals") or {}
    ranked = sorted(comparison, key=lambda name: comparison[name]["wasserstein"])
    best, distance = ranked[0], comparison[ranked[0]]["wasserstein"]
    margins = intervals.get("over_nearest")
    ties = [
        name
        for name in ranked[1:]
        if (margins[name][0] <= 0 if margins else comparison[name]["wasserstein"] - distance <= TIE * distance)
    ]
    tone: Literal["plain", "caution"] = "plain"
    text = (
        f"Of {len(ranked)} predicted profiles, `{best}` ({in_words(summary, best) or best}) comes closest to the "
        f"measured "
        f"influence: {distance:.3f} away"
    )
    if uniform is None:
        text += "."
    elif distance >= (flat := uniform["wasserstein"]):
        tone = "caution"
        text = (
            "No predicted profile is closer to the measured influence than a uniform curve: the nearest, "
            f"`{best}`, lies {distance:.3f} away, the uniform one {flat:.3f}."
        )
    elif (gain := intervals.get("over_uniform", {}).get(best)) and gain[1] >= 0:
        tone = "caution"
        text += (
            f". A uniform curve is {flat:.3f} away, and these documents do not tell the two apart "
            f"(difference {_signed(gain[0], 3)} to {_signed(gain[1], 3)})."
        )
    else:
        text += f", where a uniform curve is {flat:.3f} away."
    if ties and tone == "plain":
        text += f" {_listed([f'`{name}`' for name in ties])} cannot be told apart from it."
    if apart := [name for name in ranked[1:] if name not in ties]:
        text += f" {_margin(apart, comparison, distance, margins)}"
    sure = (
        "Distances are Wasserstein-1 as a share of the context length: 0 is the same curve, 1 all mass at opposite "
        "ends. The first position is included. "
    )
    if interval := intervals.get("comparison", {}).get(best):
        sure += f"95 % bootstrap interval of the nearest: {interval[0]:.3f} to {interval[1]:.3f}, over documents. "
    return Finding(
        text,
        sure + _influence_condition(summary),
        tone=tone,
        links=(("distances-table", "Distances"), ("profiles-chart", "Profiles")),
    )


def _margin(apart: Sequence[str], comparison: Mapping[str, Any], distance: float, margins: Any) -> str:
    """By how much the nearest prediction leads the first that is farther, and `residual`, with intervals."""
    told = [apart[0], *(["residual"] if "residual" in apart[1:] else [])]
    words = []
    for name in told:
        text = f"`{name}` lies {comparison[name]['wasserstein'] - distance:.3f} farther away"
        if margins and (ends := margins.get(name)):
            text += f" (95 % interval {_signed(ends[0], 3)} to {_signed(ends[1], 3)})"
        words.append(text)
    return _listed(words) + "."


def theory_reach(summary: Summary) -> Finding | None:
    """How near mask, λ, positions and coarse content come, beside the measured attention and an even curve."""
    comparison = summary.get("comparison") or {}
    if "positional" not in comparison or "positional_content" not in comparison:
        return None
    distance = {name: figures["wasserstein"] for name, figures in comparison.items()}
    position, content = distance["positional"], distance["positional_content"]
    best = min(position, content)
    text = (
        f"Mask, λ and positions alone (`positional`) come to {position:.3f} from the measured influence; with each "
        f"head's preference for its own token (`positional_content`) to {content:.3f}"
    )
    tone: Literal["plain", "caution"] = "plain"
    if (flat := distance.get("uniform")) is not None:
        if best >= flat:
            tone = "caution"
            text += f", no nearer than an even curve ({flat:.3f}): the architecture does not explain where it looks"
        else:
            text += f", an even curve to {flat:.3f}"
    text += "."
    ends = (summary.get("intervals") or {}).get("comparison") or {}
    nearest = "positional" if position <= content else "positional_content"
    if (attention := distance.get("residual")) is not None:
        if {nearest, "residual"} <= ends.keys():
            one, other = ends[nearest], ends["residual"]
            tied = max(one[0], other[0]) <= min(one[1], other[1])
            rule = "Two whose 95 % intervals over documents overlap are called equally close"
        else:
            tied = abs(best - attention) <= TIE * min(best, attention)
            rule = f"Closeness is called equal within {TIE:.0%}"
        if tied:
            text += f" The measured attention (`residual`, {attention:.3f}) is not told apart from that."
        elif best < attention:
            text += f" The measured attention (`residual`, {attention:.3f}) does not come as near."
        else:
            text += f" The measured attention (`residual`) comes nearer, to {attention:.3f}."
    else:
        rule = f"Closeness is called equal within {TIE:.0%}"
    sure = f"All use the measured λ. {rule}; distances are Wasserstein-1 as a share of the context length. "
    return Finding(text, sure + _influence_condition(summary), tone=tone, links=(("distances-table", "Distances"),))


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
                f"{FORCE_NAMES[force]} {_signed(share, 3)}"
                for force, share in sorted(shares.items(), key=lambda item: -abs(item[1]))
                if share * sign >= 5e-4
            ]
            for side, sign in (("nearer", -1), ("farther", 1))
        }
        words = [f"{side}: {_listed(names)}" for side, names in told.items() if names]
        text += (
            f" Set beside the measured influence, the four take the distance from {distance['baseline']:.3f} (an even "
            f"curve) to {distance['total']:.3f}" + (f"; {'; '.join(words)}." if words else ".")
        )
    return Finding(text, moved.sure, links=(("forces-chart", "Shares"), ("forces-table", "Figures")))


def mixing_strength(summary: Summary) -> Finding | None:
    """How much of a layer's update is attention."""
    mixing = summary.get("mixing")
    if not mixing:
        return None
    token = mixing["token"]
    mean, low, high = sum(token) / len(token), min(token), max(token)
    text = (
        f"Mixing averages λ = {mean:.2f} over {_count(len(token), 'layer')}: what attention adds is {mean:.0%} of the "
        f"size of update and residual stream together (from {low:.2f} in layer {token.index(low)} to {high:.2f} in "
        f"layer "
        f"{token.index(high)})."
    )
    documents = mixing.get("documents")
    notes = ["Token-wise norms."]
    if documents and documents > 1 and mixing.get("token_std"):
        half = 1.96 * max(mixing["token_std"]) / math.sqrt(documents)
        notes.append(f"The 95 % interval over {documents} documents is at most ±{half:.3f} for any layer.")
    elif documents:
        notes.append(f"From {_count(documents, 'document')}; no interval.")
    return Finding(text, " ".join(notes), links=(("mixing-chart", "Mixing by layer"),))


def first_position(summary: Summary) -> Finding | None:
    """Whether the first position holds most of the predicted profile."""
    profile = (summary.get("profiles") or {}).get("residual")
    if not profile:
        return None
    share = profile[0]
    if share < DOMINANT:
        return None
    text = (
        f"The first position alone holds {share:.0%} of the `residual` profile: the prediction is dominated by a sink."
    )
    influence = summary.get("influence")
    if influence:
        text += f" The measured influence gives that position {influence[0]:.1%}."
    sure = (
        "A rollout counts attention weight whatever the value vectors carry; compare the shapes without the first "
        "position."
    )
    if sinks := summary.get("first_position_attention"):
        top = max(sinks)
        sure = (
            f"Queries of the second half put up to {top:.0%} of a layer's attention there (layer {sinks.index(top)}). "
            + sure
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
    if not profile or not residual or profile[0] < COLLAPSED:
        return None
    layers = len(summary["mixing"]["token"]) if summary.get("mixing") else 0
    text = (
        f"Without residual connections (λ = 1) the {layers} measured attention kernels would put {profile[0]:.1%} "
        f"of the influence on the "
        f"first position; with the measured λ it is {residual[0]:.1%}."
    )
    return Finding(
        text,
        f"This holds for these kernels at {_count(len(profile), 'position')}; it is a statement about products of "
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
        f"In {len(layers)} of {_count(len(ratios), 'layer')} the Frobenius mixing coefficient is at least "
        f"{MASSIVE:.0f} times smaller than "
        f"the token-wise one (layer {worst}: {mixing['frobenius'][worst]:.4f} against {mixing['token'][worst]:.3f})."
    )
    sure = (
        "The Frobenius figure then describes a single position, the token-wise one the typical position; profiles "
        "here use token-wise."
    )
    if shares := mixing.get("largest_position_share"):
        sure = (
            f"One position holds {shares[worst]:.0%} of the squared norm of the residual stream there, on average over "
            f"{mixing.get('documents', '?')} documents. " + sure
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
    )


def _influence_condition(summary: Summary) -> str:
    facts = summary.get("influence_facts") or {}
    documents, length = facts.get("documents"), len(summary.get("influence") or ())
    method = str(facts.get("method", "gradient_norm")).replace("_", " ")
    target = str(facts.get("target", "argmax_probability")).replace("_", " ").replace("argmax", "arg-max")
    who = f"{_count(documents, 'document')} of {length} tokens" if documents else f"documents of {length} tokens"
    return f"Measured as {method} of the {target} at the last position, mean over {who}."


def _times(ratio: float) -> str:
    return (
        "unboundedly more than" if math.isinf(ratio) else f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"
    )


def _signed(value: float, digits: int = 2) -> str:
    """A number with a true minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sentence(text: str) -> str:
    """A clause as a sentence; a symbol at its beginning stays as it is."""
    return (text[:1].upper() if text[:1].isascii() else text[:1]) + text[1:] + "."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


# ---- simulate ----------------------------------------------------------------------------------------------------


def simulate_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn simulate` found."""
    return _present(summary, simulated_shape, with_length, strongest_force, more_depth, not_monotone)


def simulated_shape(summary: Summary) -> Finding | None:
    """The shape of the profile at the shortest length."""
    length = summary["lengths"][0]
    shape = summary["shape"][str(length)]["residual"]
    first, last = _densities(shape)
    kind = _kind(first, last)
    if shape["middle"] <= NOTHING:  # a ratio to nothing says nothing
        ends = [("first", shape["primacy"]), ("last", shape["recency"])]
        told = [f"{share:.0%} of the influence is on the {name} eighth" for name, share in ends if share > NOTHING]
        return Finding(
            f"At {_count(length, 'position')} the architecture alone leaves nothing for the middle half: "
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
        f"At {_count(length, 'position')} the architecture alone implies {name}: a position in the "
        f"first eighth has {_times(first)} the influence of one in the middle half, one in the last eighth "
        f"{_times(last)}."
    )
    sure = (
        f"A computation, exact for this architecture and these λ, whose first position holds "
        f"{_first_value(summary, length):.1%}; what a trained model's content adds is not in it."
    )
    return Finding(text, sure, links=(("profiles-chart", "Profile"), ("shapes-table", "Shapes")))


def _first_value(summary: Summary, length: int) -> float:
    return float(summary["profiles"][str(length)]["residual"]["value"][0])


def with_length(summary: Summary) -> Finding | None:
    """How the shape changes from the shortest length to the longest."""
    lengths = summary["lengths"]
    if len(lengths) < 2:
        return None
    low, high = (summary["shape"][str(n)]["residual"] for n in (lengths[0], lengths[-1]))
    text = (
        f"From {lengths[0]} to {_count(lengths[-1], 'position')} the first eighth goes from {low['primacy']:.0%} to "
        f"{high['primacy']:.0%} of the influence, the last eighth from {low['recency']:.0%} to {high['recency']:.0%}, "
        f"and the mean position from {low['mean_position']:.2f} to {high['mean_position']:.2f}."
    )
    sure = "With the same λ at every length, which a real model need not keep."
    return Finding(text, sure, links=(("profiles-chart", "All lengths"), ("shapes-table", "Shapes")))


def strongest_force(summary: Summary) -> Finding | None:
    """Which force moves the mean position most, and where the others push."""
    if not summary.get("forces"):
        return None
    length, part = next(iter(summary["forces"].items()))
    at = part["quantities"].index("mean_position")
    shares = {force: row[at] for force, row in zip(part["forces"], part["shares"], strict=True)}
    names = FORCE_NAMES
    ranked = sorted(shares, key=lambda force: -abs(shares[force]))
    if abs(shares[ranked[0]]) < 1e-9:
        return None
    told = [f"{names.get(force, force)} {_signed(shares[force])}" for force in ranked if abs(shares[force]) >= 5e-3]
    told = told or [f"by {_signed(shares[ranked[0]], 4)}, less than 0.005"]
    side = "beginning" if shares[ranked[0]] < 0 else "end"
    leader = sentence(names.get(str(ranked[0]), str(ranked[0])))[:-1]
    verb = "move" if leader == "Positions" else "moves"
    text = f"{leader} {verb} the mean position most, towards the {side}: {_listed(told)}."
    return Finding(
        text,
        f"Shapley shares at {length} positions, in units of the context length, against the profile with all four "
        f"forces off (mean {part['baseline'][at]:.2f}; with all forces {part['total'][at]:.2f}). A window is none of "
        "the four and is always on.",
        links=(("forces-chart", "Shares"), ("path-chart", "One force after the other")),
    )


def more_depth(summary: Summary) -> Finding | None:
    """What the schedule implies beyond the last layer, with its condition."""
    depth = summary.get("depth")
    if not depth:
        return None
    end = depth["collapse"]
    text = sentence(depth["implication"])
    sure = f"If {depth['condition']}. "
    if end["depth"]:
        sure += f"{1 - end['eta']:.0%} of the influence is on the first position from depth {end['depth']} on."
    elif end["predicted_depth"]:
        sure += f"{1 - end['eta']:.0%} would be reached near depth {end['predicted_depth']:.3g} ({end['reason']})."
    else:
        sure += sentence(end["reason"])
    return Finding(text, sure, links=(("depth-chart", "Depth"), ("schedule-chart", "Schedule")))


def not_monotone(summary: Summary) -> Finding | None:
    """A violation of stochastic monotonicity, on which part of the theory rests."""
    found = summary.get("monotonicity")
    if not found or found["worst"] <= 1e-9:
        return None
    return Finding(
        f"The kernel is not stochastically monotone: a later position can look further back, by up to "
        f"{found['worst']:.3g} of its weight.",
        f"Checked at {found['length']} positions. Results that assume monotonicity do not apply as they stand.",
        tone="caution",
        links=(("profiles-chart", "Profile"),),
    )


# ---- heads -------------------------------------------------------------------------------------------------------


def heads_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn heads` found."""
    return _present(
        summary, label_counts, no_positional_head, purest_heads, named_roles, too_even_to_tell, removal_matters
    )


def _condition(summary: Summary) -> str:
    swap = "two hidden keys exchanged" if summary["level"] == "keys" else "two tokens of the prompt exchanged"
    return (
        f"{swap}, "
        f"{_count(summary['queries'], 'query') if summary['queries'] == 1 else str(summary['queries']) + ' queries'} "
        f"in {_count(summary['documents'], 'document')}, τ = {summary['tau']:g}"
    )


def _all_heads(summary: Summary) -> list[tuple[int, int]]:
    return [(t, h) for t, row in enumerate(summary["labels"]) for h in range(len(row))]


def label_counts(summary: Summary) -> Finding | None:
    """How many heads are positional, symbolic, uniform, mixed, and how many of the labels are settled."""
    counts, heads = summary["counts"], _all_heads(summary)
    told = _listed([f"{counts.get(label, 0)} {label}" for label in ("positional", "symbolic", "uniform", "mixed")])
    text = f"Of {_count(len(heads), 'head')}, {told}."
    certain = [summary["certain"][t][h] for t, h in heads]
    sure = f"A head is pure within γ = {summary['thresholds']['purity']:g} of a corner; {_condition(summary)}. "
    if any(value is not None for value in certain):
        settled = sum(value is True for value in certain)
        sure += (
            f"{settled} of {len(heads)} labels stay the same over the whole 95 % interval (over "
            f"{summary['interval_over']})."
        )
    else:
        sure += "No interval: one document and query."
    return Finding(text, sure, links=(("plane-chart", "The plane"), ("map-chart", "The map")))


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
            f"the nearest to {label} is L{t}H{h} (s_pos {summary['positional'][t][h]:.2f}, "
            f"s_sym {summary['symbolic'][t][h]:.2f})"
        )
    return Finding(
        f"No head is {' or '.join(missing)}: {_listed(told)}.",
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
            told.append(f"purest {label}: {_listed([f'L{t}H{h}' for t, h in heads])}")
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
            f"{_count(len(heads), role.replace('_', '-') + ' head')} (strongest L{t}H{h}: "
            f"{measured[t][h]:.0%} of its attention goes {_ROLES[role]}, chance {part['chance'][t][h]:.0%})"
        )
        links.append((f"head:layer {t}|head {h}", f"L{t}H{h}"))
    if not told:
        return None
    return Finding(
        f"There are {_listed(told)}.",
        "Roles are measured shares of attention above a threshold and several times chance; they say where a head "
        "looks, not what it is for.",
        links=(("heads-table", "All heads"), *links),
    )


def too_even_to_tell(summary: Summary) -> Finding | None:
    """Says when most heads are uniform: their attention hardly reacts to a swap."""
    uniform, heads = summary["counts"].get("uniform", 0), _all_heads(summary)
    if uniform <= len(heads) / 2:
        return None
    return Finding(
        f"{uniform} of {_count(len(heads), 'head')} are uniform: exchanging two keys hardly changes their attention.",
        "Such a head may look at a sink, or at everything alike, on these prompts; both scores are then near 1 and "
        "say little.",
        tone="caution",
        links=(("map-chart", "The map"),),
    )


def removal_matters(summary: Summary) -> Finding | None:
    """Which classes of heads raise the loss more than random heads, and at which length."""
    study = summary.get("ablation")
    if not study:
        return None
    last = len(study["lengths"]) - 1
    more, less, unclear = [], [], []
    for c, key in enumerate(study["classes"]):
        name, excess, (low, high) = key.replace("_", " "), study["excess"][c][last], study["excess_interval"][c][last]
        if low is not None and (low > 0 or high < 0):
            (more if low > 0 else less).append(f"{name} ({excess:+.3f} nats, {low:.3f} to {high:.3f})")
        else:
            unclear.append(name)
    text = (
        f"Removing these classes raises the loss at {study['lengths'][last]} tokens more than random heads do: "
        f"{_listed(more)}."
        if more
        else f"At {study['lengths'][last]} tokens no class of heads raises the loss by more than random heads do."
    )
    if less:
        text += f" Less than random heads: {_listed(less)}."
    if (more or less) and unclear:
        text += f" Not told apart from random heads: {_listed(unclear)}."
    # a class that is most of its layers leaves little to draw random sets from
    crowded = [
        f"{name.replace('_', ' ')} ({study['overlap'][name]:.0f} of {study['heads'][name]} heads)"
        for name in study["classes"]
        if study["overlap"][name] > 0.5 * study["heads"][name]
    ]
    caution = f" The random sets mostly repeat the class itself for {_listed(crowded)}." if crowded else ""
    return Finding(
        text,
        f"Heads are replaced by {study['mode']}; {_count(study['documents'], 'document')}, {study['controls']} "
        f"random sets of the same "
        f"size in the same layers, 95 % bootstrap intervals.{caution}",
        links=(("ablation-chart", "Loss by class"), ("ablation-table", "Figures")),
    )


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
        apart = [row for row in rows if row["low"] is not None and (row["low"] > 0 or row["high"] < 0)]
        unclear = [row for row in rows if row["low"] is not None and row["low"] <= 0 <= row["high"]]
        told = [
            f"{FIGURE_NAMES[row['figure']]} {_signed(row['first'])} → {_signed(row['this'])} "
            f"({_signed(row['low'])} to {_signed(row['high'])})"
            for row in apart
        ]
        text = f"`{name}` against `{summary['names'][0]}`: " + (
            f"{_listed(told)}." if told else "no figure of shape or mixing is told apart."
        )
        if unclear:
            text += f" Not told apart: {_listed([FIGURE_NAMES[row['figure']] for row in unclear])}."
        paired = any(row["paired"] for row in rows)
        sure = "In brackets the 95 % interval of the difference over documents, " + (
            "paired, since both runs read the same ones." if paired else "the runs taken as independent."
        )
        if not apart and not unclear:
            sure = "A run of a single document has no interval."
        found.append(Finding(text, sure, links=(("differences-table", "Figures"), ("curves-chart", "Curves"))))
    if summary["differing"]:
        shown = list(summary["differing"])
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        found.append(
            Finding(
                f"The runs differ in {_listed(shown[:6]) if not more else ', '.join(shown[:6]) + more}.",
                "Whatever differs beside what was meant to differ can be behind a difference.",
                tone="caution" if len(shown) > 1 else "plain",
                links=(("settings-table", "Settings"),),
            )
        )
    return tuple(found)


def _heads_apart(summary: Summary, index: int, name: str, rows: Sequence[Mapping[str, Any]]) -> Finding:
    told = [f"{row['figure']} {row['first']} → {row['this']}" for row in rows]
    changed = [row for row in summary.get("changed") or () if row["run"] == index]
    text = f"`{name}` against `{summary['names'][0]}`, heads by label: {_listed(told)}."
    if changed:
        settled = sum(row["settled"] for row in changed)
        text += f" {_count(len(changed), 'head')} changed label, {settled} of them beyond the intervals of both runs."
    return Finding(
        text,
        "Counts follow the threshold γ; a head near it changes label by chance.",
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
