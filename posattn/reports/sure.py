"""How much data, and how large a difference, a sentence needs before it says anything: each number once.

A percentile bootstrap over N documents draws from the N documents alone, so that over few of them its intervals are too
narrow (over two, an interval is little more than the two documents' own values). Below `FEW` documents a command warns,
below `SETTLING` no verdict that needs an interval counts as settled. A difference below `SHOWN` is none that a report
shows. Below `LEAST_POSITIONS` there is no eighth of the context, and no shape to speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    rows = tokens.tokens if tokens.mask is None else tokens.tokens.masked_fill(~tokens.mask, -1)
    return len({tuple(row) for row in rows.tolist()})


def document_warnings(tokens: Any) -> list[str]:
    """What is to be said about the documents before their intervals are believed: too few, or some of them equal."""
    from collections import Counter

    rows = tokens.tokens if tokens.mask is None else tokens.tokens.masked_fill(~tokens.mask, -1)
    alike = sum(times for times in Counter(tuple(row) for row in rows.tolist()).values() if times > 1)
    found = []
    if alike:
        every = alike == tokens.documents
        who = f"All {tokens.documents} documents are" if every else f"{alike} of {tokens.documents} documents are"
        found.append(
            f"{who} equal to another one: intervals take them for independent, and come out too narrow; these are "
            f"{count(different_documents(tokens), 'different document')}."
        )
    if few := few_documents(different_documents(tokens)):
        found.append(few)
    return found


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
