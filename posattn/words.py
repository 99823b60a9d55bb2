"""Words and numbers as sentences need them: plurals, lists, and small numbers that are not rounded to nothing.

Every sentence that a report or a command makes takes its nouns and numbers from here, so that none says "1 heads",
"0.00 times" or "by 0%" of something that is not nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

#: plurals that are not made with an s
_PLURALS = {
    "query": "queries",
    "class": "classes",
    "this class": "these classes",
    "is": "are",
    "has": "have",
    "was": "were",
    "holds": "hold",
    "attends": "attend",
    "moves": "move",
    "reaches": "reach",
}


def plural(number: float, noun: str) -> str:
    """The noun (or verb) alone, in the number that `number` of them need."""
    if number == 1:
        return noun
    if noun in _PLURALS:
        return _PLURALS[noun]
    head, _, last = noun.rpartition(" ")
    return f"{head} {_PLURALS.get(last, last + 's')}".lstrip()


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 head", "2 heads", "2 queries"."""
    return f"{number} {plural(number, noun)}"


def listed(names: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def one_of(names: Iterable[str]) -> str:
    """ "a", "a or b", "a, b or c"."""
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def number(value: SupportsFloat, digits: int = 2, sign: bool = False) -> str:
    """A number with a true minus sign; what would be rounded to nothing keeps its first digit ("0.0003").

    Below a millionth it is rounding, and "0".
    """
    exact = float(value)
    if abs(exact) < 1e-6:
        return "0"
    while float(f"{exact:.{digits}f}") == 0:
        digits += 1
    return f"{exact:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def percent(share: SupportsFloat | None, digits: int = 0, *, less: str = "less than ", more: str = "more than ") -> str:
    """A share as a percentage that says "less than" where rounding would make it nothing, "more than" where all."""
    if share is None:
        return "–"
    share = float(share)
    if share == 0 or 0 <= share - 1 < 1e-6:  # exactly, or a rounding above all: no digits that say nothing
        return f"{abs(share):.0%}"
    shown = f"{share:.{digits}%}"
    step = 10.0**-digits
    if share > 0 and float(shown[:-1]) == 0:
        return f"{less}{step:.{digits}f}%"
    if share < 1 and float(shown[:-1]) == 100:
        return f"{more}{100 - step:.{digits}f}%"
    return shown.replace("-", "−")


def tile(share: SupportsFloat | None, digits: int = 0) -> str:
    """A percentage with signs for words, where there is little room: "<1%"."""
    return percent(share, digits, less="<", more=">")


def times(ratio: float) -> str:
    """How many times something is something else, before "the ..."."""
    if math.isinf(ratio):
        return "unboundedly more than"
    if 0 < ratio < 0.005:
        return "less than 0.01 times"
    return "0 times" if ratio == 0 else f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"


def sentence(text: str) -> str:
    """A clause as a sentence; a symbol at its beginning stays as it is."""
    return (text[:1].upper() if text[:1].isascii() else text[:1]) + text[1:] + ("" if text.endswith(".") else ".")


def span(ends: Sequence[SupportsFloat], digits: int = 2) -> str:
    """An interval: "0.10 to 0.20"."""
    return f"{number(ends[0], digits)} to {number(ends[1], digits)}"
