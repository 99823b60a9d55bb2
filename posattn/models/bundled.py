"""Models that come with posattn: small, trained by the scripts of the project, stored as transformers folders.

`bundled:bytes` and `bundled:bytes-alibi` are byte-level language models (RoPE with grouped queries; ALiBi);
`bundled:numbers` and `bundled:letters` are the paper-preset GPT-Js of the two synthetic tasks. Each folder has a card.
"""

from __future__ import annotations

from pathlib import Path

from posattn.errors import UnsupportedModelError

PREFIX = "bundled:"
_DATA = Path(__file__).parent / "bundled_data"


def bundled_names() -> list[str]:
    """Names of the models that are stored, without the prefix."""
    return sorted(p.name for p in _DATA.iterdir() if (p / "config.json").is_file()) if _DATA.is_dir() else []


def bundled_path(name: str) -> Path:
    """Folder of a bundled model; `name` with or without the prefix.

    Raises:
        UnsupportedModelError: there is no such bundled model.
    """
    short = name.removeprefix(PREFIX)
    if short not in bundled_names():
        raise UnsupportedModelError(f"no bundled model '{short}': there are {', '.join(bundled_names()) or 'none'}")
    return _DATA / short
