"""`score_heads` on real architectures against brute force: rows of a layer's input exchanged, the layer run again."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from posattn.errors import DataError, InputError, SelfCheckError, UnsupportedModelError
from posattn.heads import score_heads
from posattn.heads.crosslogits import visible_from
from posattn.heads.documents import seen
from posattn.models.base import Model
from posattn.tokens import Tokens

from . import families
from .test_heads_maths import cosine

KEYS = [
    "gptj",
    "gpt_neox",
    "gpt_neox_partial",
    "llama_grouped",
    "llama_linear",
    "llama_dynamic",
    "llama_llama3",
    "llama_yarn",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "phi3_longrope",
    "olmo2",
    "smollm3",
    "gpt_oss",
    "bloom",
    "bloom12",
    "mpt",
    "falcon_rope",
    "falcon_alibi",
]


def bridged(name: str, dtype: torch.dtype = torch.float32, prepare=None, **overrides) -> Model:
    module = families.tiny(name, **overrides).to(dtype)
    if prepare is not None:
        prepare(module)
    return seen(module)


@contextmanager
def exact_softmax():
    """transformers computes attention in float32 whatever the model's dtype; a float64 model shall stay in float64."""
    original, cast = torch.nn.functional.softmax, torch.Tensor.to

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return original(x, dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype)

    def to(x, *args, **keywords):
        if x.dtype == torch.float64 and args == (torch.float32,):
            return x
        return cast(x, *args, **keywords)

    with mock.patch("torch.nn.functional.softmax", softmax), mock.patch.object(torch.Tensor, "to", to):
        yield


def brute_scores(model: Model, row: torch.Tensor, query: int, tau: float = 1e-4):
    """Every swap of two earlier visible rows of every layer's input, the model run again, its own weights read."""
    heads = model.layers[0].n_heads
    pos, sym = torch.zeros(2, model.n_layers, heads, dtype=torch.float64)

    def weights(layer, exchange):
        found = {}
        pairs = exchange or [(0, 0)]

        def change(_, x, batch):
            x = x.clone()
            for b, (i, j) in enumerate(pairs):
                x[b, [i, j]] = x[b, [j, i]]
            return x

        def observer(_, points, batch):
            found["d"] = points["pattern"][:, :, query].double()

        tokens = row.expand(len(pairs), -1)
        with (
            torch.no_grad(),
            model.intervene("resid_pre", change, [layer]),
            model.observe(["pattern"], observer, [layer]),
        ):
            model(tokens)
        return found["d"]  # [swaps, H, N]

    for layer in range(model.n_layers):
        first = visible_from(model.scheme(layer, len(row)), query)
        swaps = list(itertools.combinations(range(first, query), 2))
        before = weights(layer, [])[0]
        after = weights(layer, swaps)
        gap, same, other = [], [], []
        for s, (i, j) in enumerate(swaps):
            new, old = after[s][:, [i, j]], before[:, [i, j]]
            gap.append((old[:, 0] - old[:, 1]).abs())
            same.append(cosine(new, old))
            other.append(cosine(new, old.flip(-1)))
        alpha = torch.softmax(torch.stack(gap, -1) / tau, -1)
        pos[layer] = (alpha * torch.stack(same, -1)).sum(-1)
        sym[layer] = (alpha * torch.stack(other, -1)).sum(-1)
    return pos, sym


@pytest.mark.parametrize("name", KEYS)
def test_keys_equal_brute_force(name):
    row = families.tokens(1, 12, seed=4)[0]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        if name == "gpt_oss" and dtype == torch.float64:
            continue  # torch's grouped matrix product, which its experts use, has no float64
        model = bridged(name, dtype)
        with exact_softmax():
            pos, sym = brute_scores(model, row, 11)
            got = score_heads(model, row[None], evidence=False, bootstrap=0)
        torch.testing.assert_close(got.positional, pos, atol=tolerance, rtol=0)
        torch.testing.assert_close(got.symbolic, sym, atol=tolerance, rtol=0)
        assert pos.std() > 0.01, "the model must not be trivial"


def test_chosen_query_equals_brute_force():
    model, row = bridged("llama_grouped", torch.float64), families.tokens(1, 14, seed=5)[0]
    with exact_softmax():
        got = score_heads(model, row[None], queries=[4, -5], tau=0.01, evidence=False)
        expected = [brute_scores(model, row, query, 0.01) for query in (4, 9)]
    assert got.queries == ((4, 9),)
    torch.testing.assert_close(got.positional, (expected[0][0] + expected[1][0]) / 2, atol=1e-9, rtol=0)
    assert got.interval_over == "queries"


def test_padding_order_and_batch_size_change_nothing():
    model = bridged("llama_dynamic")
    rows = [families.tokens(1, n, seed=n)[0] for n in (9, 12, 12, 7)]
    options = {"queries": 3, "per_frequency": True, "limit": True}
    alone = score_heads(model, rows, batch_size=1, **options)
    for side in ("left", "right"):
        padded, mask = torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, 12, dtype=torch.bool)
        for i, row in enumerate(rows):
            where = slice(12 - len(row), None) if side == "left" else slice(0, len(row))
            padded[i, where], mask[i, where] = row, True
        got = score_heads(model, Tokens(padded, mask), batch_size=8, **options)
        turned = score_heads(model, Tokens(padded.flip(0), mask.flip(0)), batch_size=2, **options)
        for other in (got, turned):
            for name in (
                "positional",
                "symbolic",
                "entropy",
                "limit_positional",
                "positional_interval",
                "distance_share",
            ):
                torch.testing.assert_close(getattr(other, name), getattr(alone, name), atol=2e-6, rtol=0)
            torch.testing.assert_close(other.frequency_positional, alone.frequency_positional, atol=2e-6, rtol=0)
        torch.testing.assert_close(turned.document_positional.flip(0), alone.document_positional, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama_grouped", "bloom", "gemma2"])
def test_levels_agree_on_one_layer(name):
    overrides = {"n_layer": 1} if name == "bloom" else {"num_hidden_layers": 1}
    if name == "gemma2":
        overrides["layer_types"] = ["sliding_attention"]
    model, rows = bridged(name, torch.float64, **overrides), families.tokens(2, 10)
    with exact_softmax():
        keys = score_heads(model, rows, "keys", limit=True, evidence=False)
        tokens = score_heads(model, rows, "tokens", limit=True, evidence=False)
    for field in ("positional", "symbolic", "entropy", "limit_positional", "limit_symbolic"):
        torch.testing.assert_close(getattr(tokens, field), getattr(keys, field), atol=1e-9, rtol=0)


def test_blocks_of_unequal_length():
    """Against a plain loop over whole prompts written out by hand."""
    model, row = bridged("gpt2"), families.tokens(1, 12, seed=9)[0]
    spans = [(1, 3), (4, 5), (6, 10)]
    got = score_heads(model, row[None], "tokens", blocks=spans, evidence=False, tau=0.05)

    def run(ids):
        seen_patterns = []
        with torch.no_grad(), model.observe(["pattern"], lambda _, p, b: seen_patterns.append(p["pattern"][0, :, -1])):
            model(ids[None])
        return torch.stack(seen_patterns).double()

    d = run(row)
    mass = [d[..., a:b].sum(-1) for a, b in spans]
    pieces = {0: row[1:3], 1: row[4:5], 2: row[6:10]}
    gap, same, other = [], [], []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        order = {0: 0, 1: 1, 2: 2}
        order[i], order[j] = j, i
        parts = [row[:1], pieces[order[0]], row[3:4], pieces[order[1]], row[5:6], pieces[order[2]], row[10:]]
        edges = torch.tensor([0, *[len(p) for p in parts]]).cumsum(0)
        new = run(torch.cat(parts))
        after = [new[..., edges[2 * s + 1] : edges[2 * s + 2]].sum(-1) for s in (i, j)]
        a, b = torch.stack(after, -1), torch.stack([mass[i], mass[j]], -1)
        gap.append((mass[i] - mass[j]).abs())
        same.append(cosine(a, b))
        other.append(cosine(a, b.flip(-1)))
    alpha = torch.softmax(torch.stack(gap, -1) / 0.05, -1)
    torch.testing.assert_close(got.positional, (alpha * torch.stack(same, -1)).sum(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(got.symbolic, (alpha * torch.stack(other, -1)).sum(-1), atol=1e-6, rtol=0)


def test_extreme_weights_give_no_nan():
    @torch.no_grad()
    def sharpen(hf):
        for layer in hf.model.layers:
            layer.self_attn.q_proj.weight.mul_(3e3)

    got = score_heads(bridged("llama_grouped", prepare=sharpen), families.tokens(2, 12), per_frequency=True, limit=True)
    for name in ("positional", "symbolic", "entropy", "limit_positional", "frequency_positional", "distance_share"):
        assert torch.isfinite(getattr(got, name)).all(), name
    assert all(torch.isfinite(value).all() for value in got.exact.values())


def test_wrong_use():
    model, rows = bridged("llama_grouped"), families.tokens(2, 10)
    with pytest.raises(UnsupportedModelError, match='level="tokens"'):
        score_heads(bridged("gpt2"), rows)
    with pytest.raises(DataError, match="one token over and over"):
        score_heads(model, torch.full((1, 10), 7))
    with pytest.raises(DataError, match="one-token prompt"):
        score_heads(model, torch.tensor([[5]]))
    with pytest.raises(DataError, match="one token over and over"):
        score_heads(model, torch.full((1, 10), 7), "tokens")
    for bad in (
        {"level": "heads"},
        {"queries": "first"},
        {"queries": [1]},
        {"queries": [10]},
        {"queries": 0},
        {"tau": -1.0},
        {"confidence": 1.0},
        {"batch_size": 0},
        {"blocks": 2},
        {"level": "tokens", "blocks": [(0, 2)]},
        {"level": "tokens", "blocks": [(0, 2), (1, 3)]},
        {"level": "tokens", "blocks": [(0, 2), (5, 10)]},
        {"level": "tokens", "max_swaps": 0},
        {"level": "tokens", "per_frequency": True},
    ):
        with pytest.raises(InputError):
            score_heads(model, rows, **bad)
    with pytest.raises(InputError, match="rotary"):
        score_heads(bridged("bloom"), rows, per_frequency=True)


def test_a_wrong_scheme_is_noticed():
    import dataclasses

    model = bridged("llama_grouped")
    right = model.scheme
    wrong = mock.patch.object(model, "scheme", lambda t, n: dataclasses.replace(right(t, n), scale=0.1))
    with wrong, pytest.raises(SelfCheckError, match="layer 0"):
        score_heads(model, families.tokens(1, 10))


def test_result_survives_saving(tmp_path):
    got = score_heads(bridged("smollm3"), families.tokens(3, 10), per_frequency=True, limit=True)
    back = type(got).load(got.save(tmp_path / "h.safetensors"))
    torch.testing.assert_close(back.positional, got.positional)
    torch.testing.assert_close(back.evidence.measured["self"], got.evidence.measured["self"])
    assert back.exact.keys() == got.exact.keys()
    assert torch.isnan(got.frequency_positional[1]).all(), "the NoPE layer has no frequencies"
    frame = got.to_dataframe()
    assert len(frame) == 12
    assert frame.positional.iloc[5] == pytest.approx(float(got.positional[1, 1]))
    moved = got.compare_documents(0, 2)
    assert moved.distance.is_monotonic_decreasing
    assert len(moved) == 12
    with pytest.raises(InputError):
        got.compare_documents(0, 3)
    assert (got.positional_interval[..., 0] <= got.positional_interval[..., 1]).all()
    assert got.plot().get_xlabel() == "positional score"
