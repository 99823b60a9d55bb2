"""Influence: how much each input position moves the prediction, and how two such curves compare.

Calling the package, `posattn.influence(model, tokens)`, calls `posattn.influence.gradients.influence`.
"""

from __future__ import annotations

from posattn._callable import make_callable

make_callable(__name__, "posattn.influence.gradients", "influence")
