"""Scripts of the repository as modules; they are no part of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def load_script(path: str) -> Any:
    """The script at `path`, seen from the repository's root, imported."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
