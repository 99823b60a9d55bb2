"""Formulas become MathML when the site is built, so that a page needs no script and no network to show them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(text: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""

    def formula(found: re.Match[str]) -> str:
        kind, bracket, latex = found.groups()
        return f"<{kind}>{convert(html.unescape(latex), display='block' if bracket == '[' else 'inline')}</{kind}>"

    return _FORMULA.sub(formula, text)
