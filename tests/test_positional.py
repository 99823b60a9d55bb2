"""Mean logits by distance and β: against loops over pairs, on toy models and tiny families, and known answers."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posattn.errors import InputError, NothingMeasuredError
from posattn.models.base import Alibi, PositionScheme, Rotary
from posattn.models.positions import attention, logits
from posattn.probes.positional import PositionalLogits, PositionalProbe, diagonal_sums, document_sums
from posattn.probes.session import Session
from tests import families
from tests.toy import Toy


def by_distance(scores: Tensor, reach: int) -> Tensor:
    """Σ over i − j = d of scores [h,n,n], pair by pair."""
    n = scores.shape[-1]
    total = torch.zeros(scores.shape[0], n, dtype=torch.float64)
    for i in range(n):
        for j in range(i + 1):
            if i - j < reach:
                total[:, i - j] += scores[:, i, j].double()
    return total


def rotary(n: int, pairs: int = 2, factor: float = 1.0, interleaved: bool = False) -> Rotary:
    frequencies = 0.7 ** torch.arange(pairs, dtype=torch.float64)
    angles = torch.arange(n, dtype=torch.float64)[:, None] * frequencies
    return Rotary(factor * angles.cos(), factor * angles.sin(), interleaved, frequencies)


@given(
    n=st.integers(1, 40),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    reach=st.integers(1, 40),
    tile=st.sampled_from([1, 64, 1 << 22]),
    softcap=st.sampled_from([None, 1.5]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_diagonal_sums_equal_loops(
    n: int, groups: int, repeats: int, reach: int, tile: int, softcap: float | None, biased: bool, seed: int
) -> None:
    from posattn.probes import positional

    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, groups * repeats, 4, dtype=torch.float64, generator=generator)
    k = torch.randn(n, groups, 4, dtype=torch.float64, generator=generator)
    slopes = torch.rand(groups * repeats, dtype=torch.float64, generator=generator) if biased else None
    scheme = PositionScheme("none", 0.3, softcap=softcap, alibi=None if slopes is None else Alibi(slopes))
    expected = by_distance(logits(q[None], k[None], scheme)[0], min(reach, n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positional, "_TILE", tile)
        found = diagonal_sums(q, k, 0.3, min(reach, n), softcap, slopes)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def record_of(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    seen: list[tuple[Tensor, Tensor]] = []
    with (
        model.observe(["q", "k"], lambda layer, record, batch: seen.append((record["q"].clone(), record["k"].clone()))),
        torch.no_grad(),
    ):
        model(ids, mask)
    return seen


def brute_force(model: Any, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Mean logits by distance [T][H,N] and β [T][H] from whole logit matrices and loops over their pairs."""
    means, betas = [], []
    n = ids.shape[1]
    for layer, (q, k) in enumerate(record_of(model, ids)):
        scheme = model.scheme(layer, n)
        reach = n if scheme.window is None else min(n, scheme.window)
        if scheme.alibi is not None:
            scheme = dataclasses.replace(scheme, alibi=Alibi(scheme.alibi.slopes))
        whole = logits(q, k, scheme).double()
        # at one position for query and key: rotate nothing, or by position 0 where the rotation has a factor
        if scheme.rotary is not None:
            first = dataclasses.replace(
                scheme.rotary,
                cos=scheme.rotary.cos[:1].expand(n, -1),
                sin=scheme.rotary.sin[:1].expand(n, -1),
            )
            content = logits(q, k, dataclasses.replace(scheme, rotary=first)).double()
        else:
            content = logits(q, k, dataclasses.replace(scheme, alibi=None)).double()
        pairs = by_distance(torch.ones(1, n, n), reach)[0] * len(ids)
        means.append(sum(by_distance(one, reach) for one in whole) / pairs.clamp(min=1))
        on, off = [], []
        for document in content:
            for i in range(n):
                on.append(document[:, i, i])
                off += [document[:, i, j] for j in range(max(0, i - reach + 1), i)]
        betas.append(torch.stack(on).mean(0) - torch.stack(off).mean(0))
    return means, betas


def bridged(name: str) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    from posattn.models.bridge import BridgeModel

    plain = families.tiny(name, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = build_bridge_from_module(
            copy.deepcopy(plain), type(plain).__name__, hf_config=plain.config, model_name=name
        )
    return BridgeModel(bridge)


def measured(model: Any, ids: Tensor, mask: Tensor | None = None, batch: int = 8) -> PositionalLogits:
    probe = PositionalProbe()
    with Session(model, (probe,)), torch.no_grad():
        for start in range(0, len(ids), batch):
            rows = slice(start, start + batch)
            model(ids[rows], None if mask is None else mask[rows])
    return probe.result()


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gptj",
        "gpt_neox_partial",
        "bloom12",
        "mpt",
        "llama_grouped",
        "llama_mqa",
        "llama_yarn",
        "mistral",
        "qwen3",
        "gemma2",
        "gemma3",
        "smollm3",
        "gpt_oss",
    ],
)
def test_families_equal_loops_over_pairs(name: str) -> None:
    model = bridged(name)
    ids = families.tokens(2, 11)
    found = measured(model, ids)
    means, betas = brute_force(model, ids)
    schemes = [model.scheme(t, 11) for t in range(model.n_layers)]
    for t, (mean, beta) in enumerate(zip(means, betas, strict=True)):
        assert float(beta.abs().max()) > 1e-3
        torch.testing.assert_close(found.logits[t], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.diagonal[t], beta, rtol=1e-4, atol=1e-5)
        reach = schemes[t].window or 11
        assert found.counts[t].tolist() == [2 * (11 - d) if d < reach else 0 for d in range(11)]
    assert found.kinds == tuple(scheme.kind for scheme in schemes)
    assert found.windows == tuple(scheme.window for scheme in schemes)
    for t, scheme in enumerate(schemes):
        if scheme.alibi is not None:
            torch.testing.assert_close(found.slopes[t].float(), scheme.alibi.slopes.float())


def test_alibi_content_is_free_of_the_bias_and_logits_hold_it() -> None:
    q, k = torch.randn(9, 2, 4, dtype=torch.float64), torch.randn(9, 2, 4, dtype=torch.float64)
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with_bias, content = document_sums(q, k, PositionScheme("alibi", 0.5, alibi=Alibi(slopes)))
    none = document_sums(q, k, PositionScheme("none", 0.5))[0]
    torch.testing.assert_close(content, none)
    distance = torch.arange(9, dtype=torch.float64)
    torch.testing.assert_close(with_bias, none - slopes[:, None] * distance * (9 - distance))


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_leaves_the_diagonal_alone(factor: float, interleaved: bool) -> None:
    """S_ii = C_ii whatever the scaling, and equal keys and queries everywhere have no β."""
    scheme = PositionScheme("rotary", 0.5, rotary=rotary(8, factor=factor, interleaved=interleaved))
    q, k = torch.randn(8, 2, 6, dtype=torch.float64), torch.randn(8, 1, 6, dtype=torch.float64)
    whole, content = document_sums(q, k, scheme)
    torch.testing.assert_close(whole[:, 0], content[:, 0])
    assert float((whole[:, 1:] - content[:, 1:]).abs().max()) > 0.1
    same = document_sums(q[:1].expand(8, -1, -1), k[:1].expand(8, -1, -1), scheme)[1] / torch.arange(8, 0, -1)
    torch.testing.assert_close(same, same[:, :1].expand_as(same))


# ---- running statistics -----------------------------------------------------------------------------------------


def assert_same(left: PositionalLogits, right: PositionalLogits) -> None:
    for name in ("logits", "diagonal", "content", "counts"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-5, atol=1e-6, msg=name)


def test_padding_batches_and_merging_change_nothing() -> None:
    model = Toy(sinks=True)
    ids = torch.randint(3, 23, (5, 7))
    plain = measured(model, ids)
    assert_same(measured(model, ids, batch=2), plain)
    for left in (True, False):
        pad = torch.zeros(5, 2, dtype=torch.long)
        padded = torch.cat([pad, ids] if left else [ids, pad], 1)
        real = torch.cat([pad.bool(), ids > 0] if left else [ids > 0, pad.bool()], 1)
        assert_same(measured(model, padded, real), plain)
    halves = [PositionalProbe(), PositionalProbe()]
    for probe, part in zip(halves, (ids[:2], ids[2:]), strict=True):
        with Session(model, (probe,)), torch.no_grad():
            model(part)
    halves[0].merge(halves[1])
    assert halves[0].documents == 5
    assert_same(halves[0].result(), plain)
    stored = PositionalProbe()
    stored.begin(model)
    stored.load_state(halves[0].state_tensors())
    assert_same(stored.result(), plain)


def test_documents_of_several_lengths_count_their_own_pairs() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    found = measured(model, ids, mask)
    assert found.counts[0].tolist() == [10, 8, 6, 4, 2, 1]
    one, other = measured(model, ids[:1]), measured(model, ids[1:, :4])
    pooled = (one.logits[..., 1] * 5 + other.logits[..., 1] * 3) / 8
    torch.testing.assert_close(found.logits[..., 1], pooled, rtol=1e-5, atol=1e-6)
    assert found.documents == 2


def test_a_table_a_figure_and_the_way_back_from_a_file(tmp_path) -> None:
    found = measured(Toy(), torch.randint(3, 23, (2, 6)))
    table = found.to_dataframe()
    assert list(table.columns) == ["layer", "head", "distance", "value"]
    assert len(table) == 3 * 4 * 6
    assert found.plot(layer=1) is not None
    found.save(tmp_path / "logits.safetensors")
    assert_same(PositionalLogits.load(tmp_path / "logits.safetensors"), found)


def test_what_was_not_measured_is_said() -> None:
    probe = PositionalProbe()
    with pytest.raises(NothingMeasuredError, match="no document"):
        probe.result()
    with Session(Toy(), (probe,)), torch.no_grad():
        Toy()
    with pytest.raises(NothingMeasuredError, match="no document"):
        probe.result()
    used = PositionalProbe()
    model = Toy()
    with Session(model, (used,)), torch.no_grad():
        model(torch.randint(3, 23, (2, 6)))
    with pytest.raises(InputError, match="use a new probe"):
        used.begin(Toy(layers=2))


def test_constant_content_gives_the_attention_itself() -> None:
    """With one query and key for all positions the logit is a function of distance: its softmax is the pattern."""
    from posattn.rollout.implied import implied_kernels

    n = 12
    scheme = PositionScheme("rotary", 0.5, rotary=rotary(n), window=5)
    q = torch.randn(1, 2, 6, dtype=torch.float64).expand(n, -1, -1)
    k = torch.randn(1, 1, 6, dtype=torch.float64).expand(n, -1, -1)
    pairs = torch.arange(n, 0, -1, dtype=torch.float64)
    mean = document_sums(q, k, scheme)[0] / pairs
    kernel = implied_kernels(
        mean[None], torch.zeros(1, 2), kinds=("rotary",), windows=(5,), slopes=torch.zeros(1, 2), content=False
    )[0]
    expected = attention(q[None], k[None], scheme)[0].mean(0)
    torch.testing.assert_close(kernel.dense(n), expected, rtol=1e-10, atol=1e-12)
