"""Results round-trip through one safetensors file, and a broken file is an error that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from posattn.errors import CheckpointError, InputError
from posattn.results import Result, provenance, read_tensors, write_tensors


@dataclass(frozen=True, eq=False)
class Inner(Result):
    values: torch.Tensor
    name: str


@dataclass(frozen=True, eq=False)
class Outer(Result):
    inner: Inner
    table: dict[str, torch.Tensor]
    labels: tuple[str, ...]
    missing: torch.Tensor | None
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Other(Result):
    values: torch.Tensor


def example() -> Outer:
    whole = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    # views of one storage, non-contiguous: the file format refuses both unless they are copied
    return Outer(
        Inner(whole.T, "λ"), {"a": whole[0], "b": whole[1]}, ("x", "y"), None, provenance(model="tiny", seed=0)
    )


def test_round_trip(tmp_path):
    result = example()
    loaded = Outer.load(result.save(tmp_path / "deep" / "result.safetensors"))
    assert torch.equal(loaded.inner.values, result.inner.values)
    assert loaded.inner.name == "λ"
    assert torch.equal(loaded.table["b"], result.table["b"])
    assert loaded.labels == ("x", "y")
    assert loaded.missing is None
    assert loaded.provenance == result.provenance
    assert {"versions", "time", "model", "seed"} <= set(loaded.provenance)


def test_load_through_the_base_class_gives_the_right_class(tmp_path):
    assert isinstance(Result.load(example().save(tmp_path / "r.safetensors")), Outer)


def test_another_kind_is_refused(tmp_path):
    path = Other(torch.zeros(2)).save(tmp_path / "r.safetensors")
    with pytest.raises(CheckpointError, match="Other, not a Outer"):
        Outer.load(path)


@pytest.mark.parametrize("keep", [0, 4, 60, -3])
def test_truncated_file_is_refused(tmp_path, keep):
    path = example().save(tmp_path / "r.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        Outer.load(path)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        Outer.load(tmp_path / "nothing")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match="not a posattn file"):
        Outer.load(tmp_path / "foreign.safetensors")


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"Inner\.name"):
        Inner(torch.zeros(1), object()).save(tmp_path / "r")  # type: ignore[arg-type]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_tensors(tmp_path / "t", {"a": torch.ones(2)}, {"n": 1})
    monkeypatch.setattr("posattn.results.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_tensors(path, {"a": torch.zeros(2)}, {"n": 2})
    monkeypatch.undo()
    tensors, header = read_tensors(path)
    assert header == {"n": 1}
    assert torch.equal(tensors["a"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
