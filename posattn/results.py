"""Results: small frozen objects that know where they came from.

A result is a frozen dataclass deriving from `Result`. Tensor fields are stored as safetensors, everything else as
JSON in the same file's header; nothing is ever pickled. Nested results are stored under `field.` prefixes.

This module knows no model, no hook and no figure: subclasses add `to_dataframe` and `plot`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from posattn.errors import CheckpointError, InputError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
_HEADER = "posattn"
R = TypeVar("R", bound="Result")
_REGISTRY: dict[str, type[Result]] = {}

#: What a result says about its origin: model, revision, processing, tokens, seed, versions, device, dtype, time.
Provenance = dict[str, Any]


def provenance(**facts: Any) -> Provenance:
    """The facts of this run plus library versions and the time (UTC, ISO 8601).

    `facts` are JSON-serialisable and use the names model, revision, processing, tokens, seed, device, dtype.
    """
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()
    return {**facts, "versions": dict(_versions()), "time": now}


@functools.cache
def _versions() -> dict[str, str]:
    """Reading package metadata takes milliseconds, more than many a result."""
    versions = {"python": platform.python_version()}
    for package in ("posattn", "torch", "transformers", "transformer-lens", "captum", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Base class of every result: subclasses are frozen dataclasses of tensors, JSON values and results."""

    kind: ClassVar[str] = "result"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.__name__] = cls

    def to_dataframe(self) -> pd.DataFrame:
        """The result as a tidy table (one observation a row)."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def plot(self, ax: Any = None) -> Any:
        """Draw the result on matplotlib axes (made when `ax` is None) and return the axes."""
        raise NotImplementedError(f"{type(self).__name__} has no figure")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one safetensors file, atomically (a reader sees the old file or the new one)."""
        tensors, facts = _flatten(self)
        return write_tensors(path, tensors, {"schema": SCHEMA, "class": type(self).__name__, "facts": facts})

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a result written by `save`.

        Raises:
            CheckpointError: the file is missing, truncated, not a posattn result, or of another kind.
        """
        tensors, header = read_tensors(path)
        result_class = _REGISTRY.get(header.get("class", ""))
        if result_class is None or not issubclass(result_class, cls):
            raise CheckpointError(f"{path} holds a {header.get('class', 'foreign file')}, not a {cls.__name__}")
        return _unflatten(result_class, tensors, header["facts"])  # type: ignore[return-value]


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> Path:
    """Write named tensors and a JSON header to `path` atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # safetensors refuses views that share memory
    data = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(data, name, metadata={_HEADER: json.dumps(header)})
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote.

    Raises:
        CheckpointError: the file is missing, truncated, or was not written by posattn.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"no such file: {path}")
    try:
        with safe_open(str(path), framework="pt") as stored:
            header = json.loads((stored.metadata() or {})[_HEADER])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not a posattn file ({type(error).__name__})") from error
    return tensors, header


def _flatten(result: Result, prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        value, name = getattr(result, field.name), prefix + field.name
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, Result):
            inner_tensors, inner_facts = _flatten(value, name + ".")
            tensors.update(inner_tensors)
            facts[field.name] = {"__result__": type(value).__name__, "facts": inner_facts}
        elif isinstance(value, Mapping) and value and all(isinstance(v, torch.Tensor) for v in value.values()):
            tensors.update({f"{name}.{key}": tensor for key, tensor in value.items()})
            facts[field.name] = {"__tensors__": list(value)}
        else:
            try:
                json.dumps(value)
            except TypeError as error:
                raise InputError(f"{type(result).__name__}.{field.name} cannot be stored as JSON: {error}") from error
            facts[field.name] = value
    return tensors, facts


def _unflatten(
    cls: type[Result], tensors: Mapping[str, torch.Tensor], facts: dict[str, Any], prefix: str = ""
) -> Result:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name, fact = prefix + field.name, facts.get(field.name)
        if name in tensors:
            values[field.name] = tensors[name]
        elif isinstance(fact, dict) and "__result__" in fact:
            values[field.name] = _unflatten(_REGISTRY[fact["__result__"]], tensors, fact["facts"], name + ".")
        elif isinstance(fact, dict) and "__tensors__" in fact:
            values[field.name] = {key: tensors[f"{name}.{key}"] for key in fact["__tensors__"]}
        elif field.name in facts:
            values[field.name] = tuple(fact) if isinstance(fact, list) else fact
    return cls(**values)
