"""Packages that can be called.

`posattn.rollout` and `posattn.influence` are packages, and the functions that most people want from them have the same
names. Importing a package always binds its name in the parent, so a lazy attribute could not win; instead the package
itself can be called: `posattn.rollout(mixing, kernels)` is `posattn.rollout.dense.rollout(mixing, kernels)`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    _calls: tuple[str, str]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        module, name = self._calls
        return getattr(import_module(module), name)(*arguments, **keywords)


def make_callable(package: str, module: str, name: str) -> None:
    """Let calling `package` call the function `name` of `module`, which is imported at the first call."""
    loaded = sys.modules[package]
    loaded.__class__ = _CallableModule
    loaded.__dict__["_calls"] = (module, name)
