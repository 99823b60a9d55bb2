"""`posattn profile`: where in the context does this model look?"""

from __future__ import annotations

from typing import Annotated

import typer


def profile(
    model: Annotated[str, typer.Argument()],
) -> None:
    """Measure a model's position bias, and set what its layers predict beside what its gradients say."""
