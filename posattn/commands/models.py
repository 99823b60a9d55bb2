"""`posattn models`: the models that come along, and what is known to work."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List the bundled models, the published presets, and the model families that were tested."""
    import json

    from posattn.models.bundled import PREFIX, bundled_names, bundled_path
    from posattn.reports.support import as_text, support_table
    from posattn.rollout.simulate import presets

    bundled = {}
    for name in bundled_names():
        config = json.loads((bundled_path(name) / "config.json").read_text("utf-8"))
        bundled[PREFIX + name] = (config.get("architectures") or ["?"])[0]
    known = {"bundled": bundled, "presets": presets(), "families": support_table()}
    print(json.dumps(known, indent=1) if as_json else as_text(known))
