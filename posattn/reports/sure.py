"""How much data, and how large a difference, a sentence needs before it says anything: each number once.

A percentile bootstrap over N documents draws from the N documents alone, so that over few of them its intervals are too
narrow (over two, an interval is little more than the two documents' own values). Below `FEW` documents a command warns,
below `SETTLING` no verdict that needs an interval counts as settled. A difference below `SHOWN` is none that a report
shows. Below `LEAST_POSITIONS` there is no eighth of the context, and no shape to speak of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posattn.words import count, plural

#: documents below which a command warns that its intervals are too narrow
FEW = 8
#: documents from which a verdict may rest on an interval over them
SETTLING = 5
#: a smaller difference of two Wasserstein-1 distances is not seen in the digits of a report
SHOWN = 5e-4
#: positions (or bins) from which a profile has a shape to speak of
LEAST_POSITIONS = 8


def few_documents(documents: int) -> str | None:
    """The warning about too few documents for intervals over them; None for enough, and for one, which has none."""
    if not 1 < documents < FEW:
        return None
    return (
        f"Only {count(documents, 'document')}: bootstrap intervals over so few are too narrow to be trusted, since "
        "they know no other documents than these"
        + (" (over two they are little more than the two documents' own values)" if documents == 2 else "")
        + f". Measure at least {FEW} (--samples), better many more."
    )


def different_documents(tokens: Any) -> int:
    """How many different documents there are among `Tokens`: rows that are equal count once."""
    return len(_times(tokens))


def _times(tokens: Any) -> Counter[tuple[int, ...]]:
    """How often each document is there; padding does not tell two apart."""
    rows = tokens.tokens if tokens.mask is None else tokens.tokens.masked_fill(~tokens.mask, -1)
    return Counter(tuple(row) for row in rows.tolist())


def document_warnings(tokens: Any) -> list[str]:
    """What is to be said about the documents before their intervals are believed: too few, or some of them equal."""
    found, times = [], _times(tokens)
    alike = sum(often for often in times.values() if often > 1)
    if alike:
        every = alike == tokens.documents
        who = f"All {tokens.documents} documents are" if every else f"{alike} of {tokens.documents} documents are"
        found.append(
            f"{who} equal to another one: intervals take them for independent, and come out too narrow; these are "
            f"{count(len(times), 'different document')}."
        )
    if few := few_documents(len(times)):
        found.append(few)
    return found


def positions(summary: Mapping[str, Any]) -> int | None:
    """How many positions (or bins) the profiles of a summary have, where it keeps one."""
    kept = [summary.get("influence"), *(summary.get("profiles") or {}).values()]
    return next((len(curve) for curve in kept if curve), None)


def shapeless(positions: int | None) -> bool:
    """Whether there are so few positions that no shape can be spoken of."""
    return positions is not None and positions < LEAST_POSITIONS


def known_documents(summary: Mapping[str, Any]) -> int | None:
    """How many documents the measured influence, or else λ, is of; None where a summary does not say."""
    return (summary.get("influence_facts") or {}).get("documents") or (summary.get("mixing") or {}).get("documents")


def independent_documents(summary: Mapping[str, Any]) -> int | None:
    """How many documents an interval rests on: equal ones count once, where a summary keeps how many differ."""
    return summary.get("different_documents") or summary.get("documents") or known_documents(summary)


def unsettled(documents: int | None, noun: str = "document") -> str | None:
    """Why intervals over these documents settle nothing: "3 documents are too few to settle it"; None where they may.

    Without a known number of documents (None) nothing is said against them.
    """
    if documents is None or documents >= SETTLING:
        return None
    return f"{count(documents, noun)} {plural(documents, 'is')} too few to settle"


def apart(difference: float, interval: Sequence[float | None] | None = None) -> bool:
    """Whether two distances are told apart: by more than is shown, and with an interval of the paired difference that
    excludes 0 where there is one."""
    if abs(difference) < SHOWN:
        return False
    if interval is None or interval[0] is None or interval[1] is None:
        return True
    return not interval[0] <= 0 <= interval[1]


def fixed(ends: Sequence[float | None] | None, digits: int = 3) -> str | None:
    """An interval with the digits of the table's column beside it, so that no value is shown outside its own."""
    if ends is None or ends[0] is None or ends[1] is None:
        return None
    return " to ".join(fixed_digits(end, digits) for end in ends if end is not None)


def fixed_digits(value: float, digits: int = 3) -> str:
    """A number with so many digits, as cells of tables have it: a true minus sign, and none on nothing."""
    shown = f"{value:.{digits}f}"
    return (shown if any(digit in shown for digit in "123456789") else shown.lstrip("-")).replace("-", "−")
