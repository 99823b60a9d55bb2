"""The run-time check of types and shapes in tests: an int may stand for a float, as in PEP 484."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
