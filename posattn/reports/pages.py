"""Which page belongs to which command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posattn.reports.compare import compare_page
from posattn.reports.heads import heads_page
from posattn.reports.kit import Page
from posattn.reports.learning import lengths_page, train_page
from posattn.reports.profile import profile_page
from posattn.reports.simulate import simulate_page

PAGES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Page]] = {
    "profile": profile_page,
    "simulate": simulate_page,
    "heads": heads_page,
    "train": train_page,
    "lengths": lengths_page,
    "compare": compare_page,
}
