"""Rollout: pure tensor maths. Structured kernels, products, predictions, theory; it knows no model.

Calling the package, `posattn.rollout(mixing, kernels)`, calls `posattn.rollout.dense.rollout`.
"""

from __future__ import annotations

from posattn._callable import make_callable

make_callable(__name__, "posattn.rollout.dense", "rollout")
