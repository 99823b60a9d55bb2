"""The public names: there, light to import, and what they say they are."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest
import torch

import posattn


@pytest.mark.parametrize("name", sorted(posattn._PUBLIC))
def test_every_public_name_is_what_its_module_defines(name: str) -> None:
    thing = getattr(posattn, name)
    assert thing.__name__ == name
    assert thing.__module__.startswith("posattn")
    assert name in dir(posattn)


def test_the_packages_that_are_functions() -> None:
    kernels = torch.tril(torch.ones(2, 4, 4, dtype=torch.float64))
    kernels = kernels / kernels.sum(-1, keepdim=True)
    result = posattn.rollout(torch.tensor([0.5, 0.5], dtype=torch.float64), kernels)
    assert isinstance(result, posattn.Rollout)
    importlib.import_module("posattn.influence.distances")
    importlib.import_module("posattn.rollout.dense")

    assert isinstance(posattn.rollout, types.ModuleType)  # it still is one, whoever imported what first
    assert callable(posattn.rollout)
    assert callable(posattn.influence)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        posattn.nonsense  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, posattn; heavy = {'torch', 'numpy', 'transformers', 'transformer_lens'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
