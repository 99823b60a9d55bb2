"""Kernels added up tile by tile equal those read from patterns; coarse kernels are what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posattn.errors import CheckpointError, InputError
from posattn.models.base import Alibi, PositionScheme
from posattn.models.loading import as_model, as_plain
from posattn.models.positions import attention
from posattn.models.tiles import blockwise_attention, weight_blocks
from posattn.probes.kernel import KernelProbe, Kernels
from posattn.probes.kernel_mean import add_document
from posattn.probes.measure import measure
from posattn.probes.session import attach
from posattn.probes.streamed import BinnedKernels, StreamedKernelProbe
from posattn.rollout.dense import rollout
from posattn.tokens import load_tokens
from tests import families
from tests.test_plain import NAMES, OTHERS, N, plainly

MASK = torch.ones(3, N, dtype=torch.bool)
MASK[1, :4] = False  # left padding
MASK[2, 7:] = False  # right padding


def kernels(model: Any, probe: KernelProbe, tokens: Tensor, mask: Tensor | None = None, batch: int = 3) -> Kernels:
    with torch.no_grad(), attach(model, probe):
        for start in range(0, len(tokens), batch):
            rows = slice(start, start + batch)
            model(tokens[rows], None if mask is None else mask[rows])
    return probe.result(model)


def assert_same(mine: Kernels, theirs: Kernels, atol: float = 1e-5) -> None:
    torch.testing.assert_close(mine.kernels, theirs.kernels, rtol=0, atol=atol)
    torch.testing.assert_close(mine.row_mass, theirs.row_mass, rtol=0, atol=atol)
    torch.testing.assert_close(mine.sink_mass, theirs.sink_mass, rtol=0, atol=atol)
    assert torch.equal(mine.counts, theirs.counts)
    assert mine.documents == theirs.documents


def coarse(rows: Tensor, bins: int, counts: Tensor) -> Tensor:
    """Sums over bins of columns, then means over the rows of a bin, each with its number of documents."""
    n = rows.shape[-1]
    member = torch.nn.functional.one_hot(torch.arange(n) // bins).to(rows)
    weight = counts.to(rows)[:, None] * member
    return (weight / weight.sum(0)).T @ rows @ member


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_materialised_kernel_in_every_family(name: str) -> None:
    tokens = families.tokens(3, N)
    model = plainly(name)
    bridge = as_model(families.tiny(name))
    for mask in (None, MASK):
        mine = kernels(model, StreamedKernelProbe(), tokens, mask)
        assert_same(mine, kernels(model, KernelProbe(), tokens, mask))
        if mask is None or name not in ("llama_dynamic", "phi3_longrope"):
            assert_same(mine, kernels(bridge, KernelProbe(), tokens, mask))


@pytest.mark.parametrize("name", ["llama_grouped", "gpt_oss", "bloom", "mpt", "falcon_rope"])
def test_streams_from_a_bridge_too(name: str) -> None:
    assert name in (*NAMES, *OTHERS)
    bridge, tokens = as_model(families.tiny(name)), families.tokens(3, N)
    assert_same(kernels(bridge, StreamedKernelProbe(), tokens, MASK), kernels(bridge, KernelProbe(), tokens, MASK))


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    n, groups, sharing = draw(st.integers(1, 23)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, width = groups * sharing, draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    sinks = torch.randn(heads, generator=generator) if draw(st.booleans()) else None
    alibi = None
    if draw(st.booleans()):
        slopes = torch.rand(heads, generator=generator)
        alibi = Alibi(slopes, slopes[:, None] * torch.arange(n) if draw(st.booleans()) else None)
    return {
        "q": torch.randn(n, heads, width, generator=generator),
        "k": torch.randn(n, groups, width, generator=generator),
        "scheme": PositionScheme(
            kind="none",
            scale=draw(st.sampled_from([1.0, 0.3])),
            alibi=alibi,
            window=draw(st.one_of(st.none(), st.integers(1, 25))),
            softcap=draw(st.sampled_from([None, 1.5])),
            sinks=sinks,
        ),
        "bins": draw(st.one_of(st.none(), st.integers(1, 9))),
        "budget": draw(st.sampled_from([1, 60, 2**20])),
        "known": draw(st.booleans()),
    }


@given(layers())
@settings(max_examples=60)
def test_any_layer(case: dict[str, Any]) -> None:
    q, k, scheme, bins = case["q"], case["k"], case["scheme"], case["bins"]
    n, heads, _ = q.shape
    pattern = attention(q[None], k[None], scheme)[0]
    lse = None
    if case["known"]:  # A = exp(S − L): read L off the largest weight of each row
        from posattn.models.positions import logits

        scores = logits(q[None], k[None], scheme)[0]
        top = pattern.argmax(-1, keepdim=True)
        lse = (scores.gather(-1, top) - pattern.gather(-1, top).log())[..., 0].T
    size = n if bins is None else -(-n // bins)
    total, stray = torch.zeros(size, size), torch.zeros(0 if bins is None else n)
    import posattn.models.tiles as tiles

    before, tiles.BUDGET = tiles.BUDGET, case["budget"]
    try:
        sinks = add_document(q, k, lse, scheme, total, stray, bins)
    finally:
        tiles.BUDGET = before
    rows = pattern.sum(0)
    missing = 1 - pattern.sum(-1).mean(-1)
    torch.testing.assert_close(sinks, missing if scheme.sinks is not None else torch.zeros(heads), rtol=0, atol=1e-5)
    if bins is None:
        torch.testing.assert_close(total, rows, rtol=0, atol=1e-5)
        return
    counts = torch.bincount(torch.arange(n) // bins)
    means = coarse(rows, bins, torch.ones(n))
    torch.testing.assert_close(total / counts[:, None], means, rtol=0, atol=1e-5)
    member = torch.nn.functional.one_hot(torch.arange(n) // bins).float()
    off = (rows @ member - means[torch.arange(n) // bins]).abs().sum(-1) / 2 / heads
    torch.testing.assert_close(stray, off, rtol=0, atol=1e-5)


def test_blocks_stay_within_the_budget_and_cover_everything_once() -> None:
    q, k = torch.randn(200, 4, 3), torch.randn(200, 2, 3)
    scheme = PositionScheme(kind="none", scale=1.0, window=30)
    seen = torch.zeros(4, 200, 200)
    for block in weight_blocks(q, k, scheme, align=8, budget=2 * 200 * 32):
        assert block.first % 8 == block.low % 8 == 0
        assert block.weights.shape[1] <= 32
        heads = slice(2 * block.group, 2 * block.group + 2)
        seen[heads, block.first : block.last, block.low : block.last] += block.weights
    torch.testing.assert_close(seen, attention(q[None], k[None], scheme)[0], rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="share"):
        next(weight_blocks(q, torch.randn(200, 3, 3), scheme))


def test_blockwise_attention_has_the_gradients_of_attention() -> None:
    parts = [torch.randn(2, heads, 11, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out = blockwise_attention(*parts, 0.5, budget=1)
    q, k, v = parts
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    direction = torch.randn_like(out)
    mine = torch.autograd.grad(out, parts, direction)
    theirs = torch.autograd.grad(expected.transpose(1, 2), parts, direction)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["llama_grouped", "mistral", "gpt_oss"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "padded"])
def test_binned_is_the_coarse_kernel_of_the_whole(name: str, mask: Tensor | None) -> None:
    model, tokens = plainly(name), families.tokens(3, N)
    whole = kernels(model, StreamedKernelProbe(), tokens, mask)
    found = kernels(model, StreamedKernelProbe(bins=5), tokens, mask)
    assert isinstance(found, BinnedKernels)
    assert found.kernels.shape[-2:] == (3, 3)
    for layer in range(model.n_layers):
        rows = whole.kernels[layer].double() * whole.row_mass[layer][:, None]
        means = coarse(rows, 5, whole.counts)
        torch.testing.assert_close(found.row_mass[layer], means.sum(-1), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            found.kernels[layer].double(), means / means.sum(-1, keepdim=True), rtol=0, atol=1e-6
        )
    assert found.counts.tolist() == torch.stack([c.sum() for c in whole.counts.split(5)]).tolist()


def test_one_position_a_bin_is_the_whole_kernel() -> None:
    model, tokens = plainly("llama"), families.tokens(3, N)
    found = kernels(model, StreamedKernelProbe(bins=1), tokens)
    assert isinstance(found, BinnedKernels)
    assert_same(found, kernels(model, StreamedKernelProbe(), tokens))
    assert float(found.strays.max()) < 1e-6


def lumpable(layers: int, size: int, bins: int) -> Tensor:
    """Kernels whose rows send the same mass to every earlier bin as the other rows of their bin."""
    n = size * bins
    shares = torch.rand(layers, size, size, dtype=torch.float64).tril() + 0.01 * torch.eye(size, dtype=torch.float64)
    shares = shares / shares.sum(-1, keepdim=True)
    index = torch.arange(n) // bins
    within = torch.rand(layers, n, n, dtype=torch.float64).tril()
    same = torch.nn.functional.one_hot(index).double()
    within = within / ((within @ same)[..., index]).clamp_min(1e-300)
    return within * shares[:, index][..., index]


def test_coarse_rollout_is_exact_where_the_chain_is_lumpable() -> None:
    fine, mixing = lumpable(4, 5, 3), torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    torch.testing.assert_close(fine.sum(-1), torch.ones(4, 15, dtype=torch.float64))
    small = torch.stack([coarse(kernel, 3, torch.ones(15)) for kernel in fine])
    exact = rollout(mixing, fine).profile[..., -1, :].double()
    found = rollout(mixing, small).profile[..., -1, :].double()
    torch.testing.assert_close(found, exact.unflatten(-1, (5, 3)).sum(-1), rtol=0, atol=1e-6)


def test_the_binning_error_bounds_what_binning_changes() -> None:
    model, tokens = plainly("llama_grouped"), families.tokens(4, 24)
    whole = kernels(model, StreamedKernelProbe(), tokens, batch=4)
    mixing = torch.full((model.n_layers,), 0.2, dtype=torch.float64)
    exact = rollout(mixing, whole.kernels.double()).profile[..., -1, :].double()
    last = []
    for bins in (2, 4, 8):
        found = kernels(model, StreamedKernelProbe(bins=bins), tokens, batch=4)
        assert isinstance(found, BinnedKernels)
        profile = rollout(mixing, found.kernels.double()).profile[..., -1, :].double()
        change = float((profile - exact.unflatten(-1, (-1, bins)).sum(-1)).abs().sum()) / 2
        assert 0 < change <= found.binning_error(mixing)
        assert float((found.strays.amax(-1) - found.worst_strays).max()) <= 1e-9
        last.append(change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, tokens = as_plain(families.tiny("llama_grouped").to(dtype)), families.tokens(3, N)
    assert_same(kernels(model, StreamedKernelProbe(), tokens), kernels(model, KernelProbe(), tokens), 1e-5)


@pytest.mark.parametrize("bins", [None, 5])
def test_batches_merging_and_states_do_not_change_it(bins: int | None) -> None:
    model, tokens = plainly("gpt_oss"), families.tokens(3, N)
    whole = kernels(model, StreamedKernelProbe(bins), tokens, MASK, batch=3)
    single = kernels(model, StreamedKernelProbe(bins), tokens, MASK, batch=1)
    first, second = StreamedKernelProbe(bins), StreamedKernelProbe(bins)
    kernels(model, first, tokens[:2], MASK[:2])
    kernels(model, second, tokens[2:], MASK[2:])
    stored = StreamedKernelProbe(bins)
    stored.load_state(second.state_tensors())
    first.merge(stored)
    empty = StreamedKernelProbe(bins)
    empty.begin(model)
    empty.merge(first)
    for other in (single, first.result(model), empty.result(model)):
        assert_same(other, whole, 1e-6)
        if isinstance(whole, BinnedKernels):
            assert isinstance(other, BinnedKernels)
            torch.testing.assert_close(other.strays, whole.strays, rtol=0, atol=1e-6)
            torch.testing.assert_close(other.worst_strays, whole.worst_strays, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="merge"):
        first.merge(StreamedKernelProbe(3))


def test_measure_streams_where_the_adapter_is_plain(tmp_path: Path) -> None:
    model = plainly("llama_grouped")
    tokens = load_tokens(families.tokens(5, N), model, batch_size=2)
    mine = measure(model, tokens, progress=False)
    theirs = measure(as_model(families.tiny("llama_grouped")), tokens, progress=False)
    torch.testing.assert_close(mine.kernels, theirs.kernels, rtol=0, atol=1e-5)
    torch.testing.assert_close(mine.mixing.token, theirs.mixing.token, rtol=0, atol=1e-5)
    torch.testing.assert_close(mine.mixing.frobenius, theirs.mixing.frobenius, rtol=0, atol=1e-5)
    assert mine.provenance["self_check"]["values"]["figure"] < 1e-5
    heads = measure(model, tokens, per_head=True, progress=False)
    torch.testing.assert_close(heads.kernels.mean(1), mine.kernels, rtol=0, atol=1e-5)
    path = tmp_path / "state"
    binned = measure(model, tokens, bins=5, progress=False, checkpoint=path)
    assert binned.kernels.shape == (3, 3, 3)
    assert any("binned, 5 positions a bin" in line for line in binned.warnings)
    with pytest.raises(CheckpointError, match="settings"):
        measure(model, tokens, progress=False, checkpoint=path, resume=True)
    again = measure(model, tokens, bins=5, progress=False, checkpoint=path, resume=True)
    assert torch.equal(again.kernels, binned.kernels)
    for wrong in ({"bins": 5, "per_head": True}, {"bins": 5, "streamed": False}, {"bins": 0}):
        with pytest.raises(InputError):
            measure(model, tokens, progress=False, **wrong)


def test_results_can_be_saved(tmp_path: Path) -> None:
    found = kernels(plainly("llama"), StreamedKernelProbe(bins=5), families.tokens(3, N))
    found.save(tmp_path / "k.safetensors")
    again = BinnedKernels.load(tmp_path / "k.safetensors")
    assert torch.equal(again.strays, found.strays)
    assert again.width == 5


@pytest.mark.slow
def test_peak_memory_is_ten_times_below_the_materialised_capture() -> None:
    """At a smaller length than `benchmarks/long_context.py`, which measures N=8192."""
    script = Path(__file__).parents[1] / "benchmarks" / "long_context.py"
    command = [sys.executable, str(script), "--length", "4096", "--bins", "64", "--threads", "1", "--minimum", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
