"""Estimates against what was measured, and the advice where a job does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.cli import main
from posattn.commands.profile import job
from posattn.errors import InputError, UnsupportedModelError
from posattn.influence.gradients import influence
from posattn.models.loading import as_model, as_plain, load_model
from posattn.probes.contribution import ContributionProbe
from posattn.probes.measure import measure
from posattn.scale import (
    Job,
    Shape,
    advice,
    duration,
    estimate,
    free_memory,
    matmul_rate,
    nearest,
    shape_from_config,
    shape_from_model,
    shape_of,
    size,
)
from posattn.tokens import load_tokens
from tests import families

SHAPE = Shape("m", 10**9, 16, 32, 8, 64, 2048, 8192, 128_000, 32_768)
SIZES = {
    "long": ({}, 128, 4, 8),
    "wide": ({"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 2000}, 64, 8, 8),
    "heads": ({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}, 256, 2, 4),
}


def peak_bytes(run) -> int:
    """Most bytes that PyTorch's allocator had handed out at once during `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("adapter", ["bridge", "plain"])
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_within_a_factor_of_two(name: str, adapter: str, gradient: bool) -> None:
    changes, length, batch, samples = SIZES[name]
    hf_model = families.tiny("llama_grouped", max_position_embeddings=512, **changes)
    shape = shape_from_model(hf_model, name)
    model = as_model(hf_model) if adapter == "bridge" else as_plain(hf_model)
    tokens = load_tokens(torch.randint(3, 90, (samples, length)), model, batch_size=batch)
    whole = adapter == "bridge"
    job = Job(length, samples, batch, influence=gradient, contributions=whole, streamed=not whole)
    found = estimate(shape, job, 10**12)

    def run() -> None:
        measure(model, tokens, progress=False, probes=[ContributionProbe()] if whole else [])
        if gradient:
            influence(model, tokens)

    measured = peak_bytes(run)
    assert 0.7 * measured <= found.peak - found.memory["weights"] <= 2.1 * measured


def test_shape_is_read_from_the_configuration_alone(tmp_path: Path) -> None:
    for name in ("llama_mqa", "gpt2", "gpt_neox", "opt", "gemma3", "bloom", "mpt"):
        hf_model = families.tiny(name)
        hf_model.config.save_pretrained(tmp_path / name)
        found = shape_from_config(tmp_path / name)
        assert found.parameters == sum(p.numel() for p in hf_model.parameters())
        view = as_model(hf_model)
        info = view.layers[0]
        assert (found.layers, found.heads, found.head_dim) == (view.n_layers, info.n_heads, info.head_dim)
        assert (found.width, found.vocabulary) == (view.d_model, view.vocab_size)
    with pytest.raises(UnsupportedModelError, match="configuration"):
        shape_from_config(tmp_path / "nothing")


@given(
    st.integers(1, 4096), st.integers(1, 64), st.integers(1, 16), st.booleans(), st.booleans(), st.sampled_from([1, 2])
)
def test_more_needs_more(length: int, samples: int, batch: int, gradient: bool, per_head: bool, factor: int) -> None:
    job = Job(length, samples, batch, influence=gradient, per_head=per_head)
    base = estimate(SHAPE, job, 10**12, 1e12)
    for change in ({"length": length + 1}, {"samples": samples + 1}, {"batch_size": batch + 1}, {"influence": True}):
        other = estimate(SHAPE, dataclasses.replace(job, **change), 10**12, 1e12)
        assert other.peak >= base.peak
        assert other.operations >= base.operations
    assert base.seconds == base.operations / (1e12 * 0.4)


def test_streaming_does_not_grow_with_heads_and_bins_save_statistics() -> None:
    job = Job(length=32_768, samples=4, batch_size=1, influence=False, contributions=False, streamed=True)
    many = dataclasses.replace(SHAPE, heads=64, key_heads=16, head_dim=32)
    assert estimate(many, job, 1).memory == estimate(SHAPE, job, 1).memory
    binned = estimate(SHAPE, dataclasses.replace(job, bins=64), 1)
    assert binned.memory["statistics"] * 64**2 == estimate(SHAPE, job, 1).memory["statistics"]
    whole = estimate(SHAPE, dataclasses.replace(job, streamed=False), 1)
    assert whole.memory["pass"] > 50 * binned.memory["pass"]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    job = Job(length=1024, samples=64, batch_size=32)
    need = estimate(SHAPE, job, 10**13)
    assert need.fits
    assert not estimate(SHAPE, job, need.peak).fits  # some room is left
    found = nearest(SHAPE, job, need.peak)
    assert found is not None
    assert found.fits
    assert found.job.batch_size == 16  # the least change comes first
    text = advice(SHAPE, job, need.peak)
    assert "--batch-size 16 would need about" in text
    assert "mostly influence" in text
    assert "no setting of posattn makes it fit" in advice(SHAPE, job, 10**8)
    tight = 2 * SHAPE.parameters + 3 * 10**9
    small = nearest(SHAPE, job, tight)
    assert small is not None
    assert small.job.dtype == "bfloat16"
    assert f"--dtype {small.job.dtype}" in advice(SHAPE, job, tight)


def test_wrong_jobs() -> None:
    with pytest.raises(InputError, match="context"):
        estimate(SHAPE, Job(length=32_769), 1)
    with pytest.raises(InputError, match="dtype"):
        estimate(SHAPE, Job(dtype="int8"), 1)


def test_units_and_this_machine() -> None:
    assert [size(x) for x in (0, 999, 1000, 2.5e9)] == ["0 B", "999 B", "1 kB", "2.5 GB"]
    assert duration(float("nan")) == "unknown"
    assert duration(7200) == "2 hours"
    assert duration(90) == "90 seconds"
    cpu = torch.device("cpu")
    assert 2**20 < free_memory(cpu) < 2**50
    assert 1e7 < matmul_rate(cpu, "float32", 0.01) < 1e16


def test_dry_run_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    families.tiny("llama").config.save_pretrained(tmp_path / "m")  # no weights: none are read
    command = ["profile", str(tmp_path / "m"), "--length", "64", "--dry-run", "--device", "cpu", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "memory: about" in said
    assert "time: about" in said
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("posattn.scale.free_memory", lambda device: 3 * 10**6)
    assert main([*command, str(tmp_path / "out")]) == 2
    assert "--batch-size" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "out"), "--length", "65"]) == 2
    assert "--length 64" in capsys.readouterr().err


@pytest.mark.parametrize("adapter", ["auto", "plain"])
def test_the_shape_of_a_loaded_model_is_that_of_its_configuration(adapter: str) -> None:
    loaded, read = shape_of(load_model("bundled:bytes", adapter=adapter)), shape_from_config("bundled:bytes")
    unknown = {"parameters": 0, "hidden": 4 * read.width, "name": ""}
    assert dataclasses.replace(loaded, **unknown) == dataclasses.replace(read, **unknown)


@pytest.mark.parametrize("family", ["bloom", "mpt", "llama"])
def test_no_wrapped_model_is_advised_to_use_an_interface_that_it_lacks(family: str) -> None:
    model = families.tiny(family)
    assert shape_of(as_model(model)).interface == shape_from_model(model, family).interface == (family == "llama")


@pytest.mark.parametrize(("share", "code"), [(0.3, 2), (0.7, 0), (3.0, 0)])
def test_a_real_run_looks_at_memory_first(
    share: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model("bundled:bytes")
    asked = job(48, 2, 8, "float32", False, False, model.adapter, None)
    need = estimate(shape_of(model), asked, 1).peak
    monkeypatch.setattr("posattn.scale.free_memory", lambda device: int(share * need))
    options = ["--length", "48", "--samples", "2", "--no-influence", "--out", str(tmp_path / "run")]
    stages: list[str | None] = []
    monkeypatch.setattr("posattn.progress.stage", stages.append)
    assert main(["profile", "bundled:bytes", *options]) == code
    assert stages
    assert not any("memory" in (name or "") for name in stages)  # a remark is not what is being done
    said = capsys.readouterr().err
    assert (tmp_path / "run").exists() == (code == 0)
    assert ("memory may not suffice" in said) == (share == 0.7)
    assert ("does not fit" in said) == (share < 1)
    assert "Traceback" not in said
