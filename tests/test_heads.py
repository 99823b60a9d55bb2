"""Rotary usage, taxonomy, evidence, ablation, freezing and the binding task, on heads with known answers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from posattn.commands.heads import chosen_queries
from posattn.errors import DataError, InputError, UnsupportedModelError
from posattn.heads import (
    ablate_heads,
    ablation_study,
    binding_task,
    classify_heads,
    cross_logits,
    freeze_heads,
    head_list,
    head_means,
    measure_evidence,
    repeated_random,
    rotary_usage,
    score_heads,
)
from posattn.heads.taxonomy import label_of

from . import families
from .heads_toy import SHARP, THETA, VOCAB, HandBuilt
from .test_heads_models import bridged


def text(samples: int = 6, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def hand() -> HandBuilt:
    return HandBuilt()


@pytest.fixture(scope="module")
def scored(hand):
    return score_heads(hand, repeated_random(hand, 10, 6, seed=3), queries="all")


def test_known_heads_are_found(scored):
    x = classify_heads(scored)
    assert x.labels[0][0] == "positional"
    assert x.labels[0][1] == "uniform"
    assert x.roles[0][0] == ["previous_token"]
    assert x.roles[0][1] == []
    assert "induction" in x.roles[1][0]
    assert x.heads("induction") == [(1, 0)]
    assert x.heads("previous_token") == [(0, 0)]
    assert (1, 1) not in x.heads("induction")
    assert x.counts == {label: len(x.heads(label)) for label in ("positional", "symbolic", "uniform", "mixed")}
    assert scored.evidence.measured["previous_token"][0, 0] > 0.99
    assert scored.evidence.measured["induction_repeat"][1, 0] > 0.9
    assert scored.evidence.measured["duplicate"][1, 1] == pytest.approx(0.5, abs=0.01)  # the other half is itself
    # the head that looks at nothing gives chance for every figure
    for name, value in scored.evidence.measured.items():
        assert float(value[0, 1]) == pytest.approx(float(scored.evidence.chance[name][0, 1]), abs=1e-6), name


def test_symbolic_head_is_symbolic(hand):
    """The duplicate head asked at the second copy: it follows the first copy wherever it is put."""
    rows = repeated_random(hand, 10, 6, seed=5)[:, :15]
    got = score_heads(hand, rows, queries=[12])
    x = classify_heads(got)
    assert x.labels[1][1] == "symbolic"
    assert got.symbolic[1, 1] > 0.999
    assert got.exact["symbol"][1, 1] == pytest.approx(1)
    assert got.exact["position"][0, 0] == pytest.approx(1)
    assert got.distance_share[0, 0] == pytest.approx(1)
    assert got.entropy[0, 1] == pytest.approx(math.log(13))


def test_offset_of_a_built_head():
    for offset in (1, 3, 5):
        usage = rotary_usage(HandBuilt(offset), text(), queries="all")
        assert usage.offset[0, 0] == -offset
        assert usage.peak_distance[0, 0, 0] == pytest.approx(offset)
        assert usage.sharpness[0, 0] > 0.75
        assert usage.profile_distance[0, 0] < 1e-6  # all keys are alike: the mean key is every key
        assert usage.frequencies[0].tolist() == [pytest.approx(THETA), 0]
        assert usage.norm[0, 0, 0] == pytest.approx(SHARP)
        assert usage.variance_share[0, 0].tolist() == [pytest.approx(1), pytest.approx(0)]
        assert usage.variance_share[1, 0].tolist() == [pytest.approx(0), pytest.approx(1)]
        assert usage.positional[0, 0, 0] == pytest.approx(1)


def test_usage_against_plain_sums():
    """norm, energy, logits, variance shares and ids against loops over queries, keys and frequencies."""
    model, rows = bridged("llama_grouped"), families.tokens(2, 9)
    usage = rotary_usage(model, rows, queries=[4, 8], scores=False)
    layer, head = 1, 3
    seen = {}
    with torch.no_grad(), model.observe(["q", "k"], lambda t, p, b: seen.update(p), [layer]):
        model(rows)
    rotary, scale = model.scheme(layer, 9).rotary, model.scheme(layer, 9).scale
    half = rotary.width // 2
    norms, logits, maxima = [], [], []
    for b in range(2):
        for i in (4, 8):
            q = seen["q"][b, i, head].double()
            row = torch.zeros(i + 1, half, dtype=torch.float64)
            for j in range(i + 1):
                k = seen["k"][b, j, head // 2].double()
                qc, kc = torch.complex(q[:half], q[half:]), torch.complex(k[:half], k[half:])
                norms.append(scale * qc.abs() * kc.abs())
                row[j] = norms[-1] * torch.cos(qc.angle() - kc.angle() + rotary.frequencies * (i - j))
            logits.append(row)
            maxima.append(row.amax(0))
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(usage.norm[layer, head], torch.stack(norms).mean(0), **close)
    torch.testing.assert_close(usage.energy[layer, head], torch.stack(norms).square().mean(0), **close)
    torch.testing.assert_close(usage.mean_logit[layer, head], torch.cat(logits).mean(0), **close)
    torch.testing.assert_close(usage.max_logit[layer, head], torch.stack(maxima).mean(0), **close)
    centred = [row - row.mean(0) for row in logits]
    covariance = sum((row * row.sum(-1, keepdim=True)).sum(0) for row in centred)
    torch.testing.assert_close(usage.variance_share[layer, head], covariance / covariance.sum(), **close)
    ids = torch.arange(1, half + 1, dtype=torch.float64)
    expected = torch.softmax(usage.max_logit[layer].mean(0) / scale, -1) @ ids
    assert usage.layer_id[layer] == pytest.approx(float(expected))
    energy = usage.energy[layer].mean(0)
    assert usage.layer_energy_id[layer] == pytest.approx(float(energy @ ids / energy.sum()))


def test_usage_of_families(tmp_path):
    for name in ("gptj", "phi", "gemma2", "gemma3", "phi3_longrope", "smollm3"):
        usage = rotary_usage(bridged(name), families.tokens(2, 12), queries=4)
        has = torch.isfinite(usage.layer_id)
        assert has.tolist() == [True] * len(has) if name != "smollm3" else [True, False, True]
        shares = usage.variance_share[has].nansum(-1)
        torch.testing.assert_close(shares, torch.ones_like(shares))
        for curve in (usage.predicted_attention, usage.real_attention):
            torch.testing.assert_close(curve[has].sum(-1), torch.ones_like(curve[has].sum(-1)))
        assert ((usage.positional[has] >= 0) | usage.positional[has].isnan()).all()
    back = type(usage).load(usage.save(tmp_path / "u.safetensors"))
    torch.testing.assert_close(back.pull, usage.pull, equal_nan=True)
    assert len(usage.to_dataframe()) == usage.pull.numel()
    assert len(usage.heads_dataframe()) == usage.offset.numel()
    assert usage.plot().get_ylabel() == "layer"
    with pytest.raises(UnsupportedModelError, match="no rotary"):
        rotary_usage(bridged("bloom"), families.tokens(1, 8))


def test_usage_does_not_depend_on_batches():
    model, rows = bridged("llama_dynamic"), [families.tokens(1, n, seed=n)[0] for n in (9, 12, 12)]
    one = rotary_usage(model, rows, queries="last", batch_size=1)
    other = rotary_usage(model, rows[::-1], queries="last", batch_size=3)
    for name in ("norm", "max_logit", "positional", "angle", "real_attention", "layer_id"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-5, rtol=1e-5)


def test_labels_by_hand():
    assert [label_of(*p, 0.2) for p in [(0.9, 0.1), (0.1, 0.9), (0.9, 0.9), (0.9, 0.5), (0.5, 0.5)]] == [
        "positional",
        "symbolic",
        "uniform",
        "mixed",
        "mixed",
    ]
    assert label_of(0.9, 0.5, 0.2, "leading") == "positional"
    assert label_of(0.5, 0.9, 0.2, "leading") == "symbolic"


def test_taxonomy_is_data(scored, tmp_path):
    x = classify_heads(scored, 0.1)
    assert x.thresholds["purity"] == 0.1
    assert float(x.gamma[0, 0]) == pytest.approx(max(1 - float(x.positional[0, 0]), float(x.symbolic[0, 0])))
    back = type(x).load(x.save(tmp_path / "x.safetensors"))
    assert back.heads("previous_token") == [(0, 0)]
    assert back.thresholds == x.thresholds
    chosen = head_list(x, "induction")
    assert json.loads(json.dumps(chosen))["heads"] == [{"name": "L1H0", "layer": 1, "head": 0}]
    frame = x.to_dataframe()
    assert frame.loc[frame.name == "L0H0", "label"].item() == "positional"
    assert "induction_repeat_chance" in frame
    assert x.plot().get_xlabel() == "head"
    with pytest.raises(InputError, match="no label or role"):
        x.heads("lazy")
    for bad in ({"purity": 0.5}, {"purity": 0.0}, {"rule": "best"}, {"roles": {"magic": 0.1}}):
        with pytest.raises(InputError):
            classify_heads(scored, **bad)


def test_certainty_follows_the_intervals(scored):
    import dataclasses

    wide = scored.positional_interval.clone()
    wide[0, 0, 0] = 0.1
    x = classify_heads(dataclasses.replace(scored, positional_interval=wide))
    assert classify_heads(scored).certain[0][0] is True
    assert x.certain[0][0] is False
    wide[0, 0] = math.nan
    assert classify_heads(dataclasses.replace(scored, positional_interval=wide)).certain[0][0] is None


def test_ablating_the_pair_breaks_induction(hand, scored):
    rows = repeated_random(hand, 12, 8, seed=11)
    x = classify_heads(scored)
    study = ablation_study(
        hand, rows, x, classes=["induction", "previous_token"], base=24, factors=(0.5, 1), controls=4
    )
    assert study.lengths == [12, 24]
    assert study.heads == {"induction": [[1, 0]], "previous_token": [[0, 0]]}
    assert study.overlap == {"induction": 0, "previous_token": 0}
    assert (study.late_loss[:, :, 1] - study.late_baseline[:, 1]).mean() > 1
    assert study.late_excess[0, 1] > 1
    assert study.late_excess_interval[0, 1, 0] > 1
    assert study.excess_interval[0, 1, 0] <= study.excess[0, 1] <= study.excess_interval[0, 1, 1]
    # the controls are the one other head of the layer, which writes nothing
    assert study.control_increase.abs().max() < 1e-12
    # independent: the loss by hand with z zeroed
    with hand.intervene("z", lambda t, z, b: z * torch.tensor([0.0, 1.0])[:, None], [1]):
        logits = hand(rows).detach()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert study.loss[0, :, 1].mean() == pytest.approx(float(loss))
    frame = study.to_dataframe()
    assert len(frame) == 4
    assert study.plot().get_ylabel().startswith("increase")


def test_study_is_the_same_for_every_batch_size_and_survives_saving(tmp_path):
    model, rows = bridged("llama_dynamic"), families.tokens(5, 16)
    heads = {"some": [(0, 1), (1, 0), (1, 2)], "all of layer 2": [(2, h) for h in range(4)]}
    a = ablation_study(model, rows, heads, mode="mean", batch_size=1, controls=2)
    b = ablation_study(model, rows, heads, mode="mean", batch_size=5, controls=2)
    torch.testing.assert_close(a.loss, b.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.excess_interval, b.excess_interval, atol=1e-5, rtol=0)
    assert a.lengths == [4, 8, 16]
    assert a.overlap["all of layer 2"] == 4
    assert a.excess[1].abs().max() < 1e-6, "the only control set is the class itself"
    assert a.increase.abs().max() > 1e-3
    # scaled positions: a prefix is measured as a document of its own length
    with torch.no_grad():
        model(rows[:1, :1])  # forget the longer input
        own = torch.nn.functional.cross_entropy(model(rows[:1, :8])[0, :-1], rows[0, 1:8])
    assert a.baseline[0, 1] == pytest.approx(own.item(), abs=1e-5)
    back = type(a).load(a.save(tmp_path / "a.safetensors"))
    torch.testing.assert_close(back.excess, a.excess)


@pytest.mark.parametrize("mode", ["zero", "mean", "position_mean"])
def test_ablation_changes_only_its_heads_and_leaves_no_trace(mode):
    model, rows = bridged("llama_grouped"), families.tokens(3, 10)
    hooks = {id(m): len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules()}
    weights = {name: p.clone() for name, p in model.module.named_parameters()}
    with torch.no_grad():
        before = model(rows)
        taken = {}
        with model.observe(["z"], lambda t, p, b: taken.setdefault(t, p["z"].clone())):
            model(rows)
        seen = {}
        with (
            ablate_heads(model, [(1, 2)], mode, tokens=rows),
            model.observe(["z"], lambda t, p, b: seen.setdefault(t, p["z"].clone())),
        ):
            during = model(rows)
        after = model(rows)
    z = taken[1]
    expected = {
        "zero": torch.zeros_like(z[:, :, 2]),
        "mean": z[:, :, 2].mean((0, 1)).expand_as(z[:, :, 2]),
        "position_mean": z[:, :, 2].mean(0).expand_as(z[:, :, 2]),
    }[mode]
    torch.testing.assert_close(seen[1][:, :, 2], expected)
    others = [0, 1, 3]
    torch.testing.assert_close(seen[1][:, :, others], z[:, :, others])
    assert (during - before).abs().max() > 1e-3
    assert torch.equal(after, before)
    assert {id(m): len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules()} == hooks
    assert all(torch.equal(p, weights[name]) for name, p in model.module.named_parameters())


def test_ablation_is_undone_after_an_error():
    model, rows = bridged("llama_grouped"), families.tokens(2, 10)
    with torch.no_grad():
        before = model(rows)
        with pytest.raises(KeyError), ablate_heads(model, [(0, 0)]):
            raise KeyError
        assert torch.equal(model(rows), before)


def test_position_mean_counts_real_tokens():
    model, rows = bridged("llama_grouped"), families.tokens(2, 8)
    means = head_means(model, rows, by_position=True)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), rows], 1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, :3] = False
    with torch.no_grad(), ablate_heads(model, [(0, 1), (2, 3)], "position_mean", means=means):
        torch.testing.assert_close(model(padded, mask)[:, 3:], model(rows), atol=1e-5, rtol=1e-5)
        with pytest.raises(InputError, match="measured on 8"):
            model(families.tokens(1, 9))


@pytest.mark.parametrize("name", ["llama_grouped", "gpt2"])
def test_frozen_heads_get_no_gradient(name):
    model, rows = bridged(name), families.tokens(2, 8)

    def gradients():
        model.module.zero_grad()
        model(rows).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}

    free = gradients()
    heads = [(1, h) for h in (0, 1)]
    with freeze_heads(model, heads):
        torch.testing.assert_close(model(rows), model(rows))
        frozen = gradients()
    width = model.layers[1].head_dim
    if name == "llama_grouped":  # heads 0 and 1 share key head 0
        layer = [n for n in free if ".1." in n or "blocks.1" in n]
        q, k, v, o = (
            {n: frozen[n] for n in layer if part in n and n.endswith("weight")} for part in ["q_", "k_", "v_", "o_"]
        )
        for grads, rows_of in ((q, 2 * width), (k, width), (v, width)):
            assert len(grads) == 1
            grad = next(iter(grads.values()))
            assert grad[:rows_of].abs().max() == 0
            assert grad[rows_of:].abs().max() > 0
        assert len(o) == 1
        grad = next(iter(o.values()))
        assert grad[:, : 2 * width].abs().max() == 0
        assert grad[:, 2 * width :].abs().max() > 0
    again = gradients()
    assert all(torch.equal(again[n], free[n]) for n in free), "nothing stays frozen"
    assert any(not torch.equal(frozen[n], free[n]) for n in free)


def test_ablation_wrong_use():
    model, rows = bridged("llama_grouped"), families.tokens(2, 10)
    for bad in ([], [(3, 0)], [(0, 4)], [(-1, 0)]):
        with pytest.raises(InputError), ablate_heads(model, bad):
            pass
    with pytest.raises(InputError, match="mode"), ablate_heads(model, [(0, 0)], "noise"):
        pass
    with pytest.raises(InputError, match="tokens"), ablate_heads(model, [(0, 0)], "mean"):
        pass
    one = {"one": [(0, 0)]}
    with pytest.raises(DataError, match="needed"):
        ablation_study(model, rows, one, base=5)
    with pytest.raises(DataError, match="base length"):
        ablation_study(model, rows[:, :4], one)
    for bad in ({"factors": ()}, {"controls": 0}, {"mode": "x"}, {"classes": ["two"]}):
        with pytest.raises(InputError):
            ablation_study(model, rows, one, **bad)
    with pytest.raises(InputError, match="nothing to remove"):
        ablation_study(model, rows, {"none": []})


def test_cross_logits_of_a_model(tmp_path):
    model, row = bridged("smollm3"), families.tokens(1, 10)[0]
    x = cross_logits(model, row, 0, query=7, per_frequency=True)
    assert x.logits.shape == (4, 7, 7)
    torch.testing.assert_close(x.frequencies.sum(1), x.logits, atol=1e-4, rtol=1e-4)
    own = torch.cat([x.logits.diagonal(dim1=1, dim2=2)], -1)
    ratio = x.weights[:, :-1].log() - own
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), atol=1e-4, rtol=1e-4)
    back = type(x).load(x.save(tmp_path / "m.safetensors"))
    torch.testing.assert_close(back.logits, x.logits)
    assert len(x.to_dataframe()) == 28
    assert x.plot(head=1).get_xlabel() == "token"
    with pytest.raises(InputError):
        cross_logits(model, families.tokens(2, 10), 0)
    with pytest.raises(InputError):
        cross_logits(model, row, 3)
    with pytest.raises(UnsupportedModelError):
        cross_logits(bridged("gpt2"), row, 0)


def test_evidence_against_loops():
    model, rows = bridged("mistral"), torch.randint(3, 8, (2, 9))  # few different tokens: copies are common
    got = measure_evidence(model, rows, repeats=0)
    patterns = {}
    with torch.no_grad(), model.observe(["pattern"], lambda t, p, b: patterns.setdefault(t, p["pattern"].double())):
        model(rows)
    where = {
        "previous_token": lambda r, i, j: j == i - 1,
        "self": lambda r, i, j: j == i,
        "first_position": lambda r, i, j: j == 0,
        "local_window": lambda r, i, j: i - 8 <= j < i,
        "duplicate": lambda r, i, j: j < i and r[j] == r[i],
        "induction": lambda r, i, j: j > 0 and r[j - 1] == r[i],
    }
    for name, hit in where.items():
        mass, chance, count = 0, 0, 0
        for b, row in enumerate(rows):
            for i in range(2, 9):
                seen = [j for j in range(i + 1) if i - j < families.WINDOW]
                keys = [j for j in seen if hit(row, i, j)]
                if not keys and name in ("duplicate", "induction"):
                    continue
                mass, chance, count = mass + patterns[1][b, 2, i, keys].sum(), chance + len(keys) / len(seen), count + 1
        assert float(got.measured[name][1, 2]) == pytest.approx(float(mass / count), abs=1e-6), name
        assert float(got.chance[name][1, 2]) == pytest.approx(chance / count, abs=1e-6), name
        assert got.queries[name] == count
    assert got.measured["induction_repeat"].isnan().all()
    assert len(got.to_dataframe()) == 8 * 12


def test_repeated_random_is_repeated():
    model = bridged("llama_grouped")
    rows = repeated_random(model, period=20, samples=3, bos=1)
    assert rows.shape == (3, 41)
    assert torch.equal(rows[:, 1:21], rows[:, 21:])
    assert all(len(set(row[1:21].tolist())) == 20 for row in rows)
    assert repeated_random(model, period=100).shape[1] == 64  # as much as the context holds


class Words:
    """A tokenizer that gives every word and full stop an id."""

    bos_token_id = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text, add_special_tokens=True):
        words = text.replace(".", " .").replace("?", " ?").split()
        return {"input_ids": [self.known.setdefault(w, len(self.known) + 3) for w in words]}


def test_binding_task():
    tokenizer = Words()
    task = binding_task(SimpleNamespace(tokenizer=tokenizer, vocab_size=97), pairs=4, samples=5, query=-1, seed=2)
    names = {i: w for w, i in tokenizer.known.items()}
    for row, blocks, query, answer, asked, words in zip(
        task.documents, task.blocks, task.queries, task.answers, task.asked, task.texts, strict=True
    ):
        assert asked == 3
        clauses = [" ".join(names[int(i)] for i in row[a:b]) for a, b in blocks]
        assert clauses == [c.strip() + " ." for c in words.split(" What")[0].split(".")[:4]]
        assert query == [len(row) - 1]
        assert names[int(row[-1])] == "likes"
        assert names[answer] in clauses[3].split()
        assert words.split()[-2] in clauses[3].split()
    assert json.dumps(task.describe())
    got = score_heads(bridged("gpt2"), task, "tokens", evidence=False)
    assert got.documents == 5
    assert torch.isfinite(got.positional).all()
    plain = binding_task(bridged("gpt2"), pairs=3, samples=2, query=[0, 2])
    assert plain.asked == [0, 2]
    assert int(plain.documents[0][-1]) == int(plain.documents[0][0])
    assert plain.answers[1] == int(plain.documents[1][5])
    for bad in ({"pairs": 1}, {"pairs": 99}, {"query": 5}, {"query": [0]}, {"samples": 0}):
        with pytest.raises(InputError):
            binding_task(bridged("gpt2"), **bad)


def test_a_symbolic_head_on_the_binding_task(hand):
    """Without a tokenizer a prompt is name, colour, ..., name: the duplicate head goes to the block with that name."""
    task = binding_task(hand, pairs=5, samples=6)
    got = score_heads(hand, task, "tokens", evidence=False)
    assert got.symbolic[1, 1] > 0.99
    assert got.positional[1, 1] < 0.7
    assert classify_heads(got).roles[1][1] == []


def test_queries_of_the_command():
    wanted = {"last": "last", "all": "all", "8": 8, "5,": [5], "5, 9,-1": [5, 9, -1]}
    assert {text: chosen_queries(text) for text in wanted} == wanted
    for bad in ("first", "1.5", "3,x"):
        with pytest.raises(InputError, match="--queries"):
            chosen_queries(bad)


def test_the_map_of_frequencies_counts_ids_from_one():
    usage = rotary_usage(bridged("llama_grouped"), families.tokens(2, 10))
    image = usage.plot().images[0]
    left, right, bottom, top = image.get_extent()
    layers, _, terms = usage.norm.shape
    assert (left, right, bottom, top) == (0.5, terms + 0.5, -0.5, layers - 0.5)
    assert usage.to_dataframe()["frequency_id"].max() == terms


def test_a_written_list_of_heads_can_be_ablated_and_frozen(scored, hand):
    written = json.loads(json.dumps(head_list(classify_heads(scored), "induction")))
    assert [entry["name"] for entry in written["heads"]] == ["L1H0"]
    rows, results = text(2), []
    for heads in (written, written["heads"], ["L1H0"], "L1H0", [(1, 0)], [[1, 0]]):
        with torch.no_grad(), ablate_heads(hand, heads):
            results.append(hand(rows))
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], hand(rows).detach())
    model, ids = bridged("llama_grouped"), families.tokens(2, 8)
    heads = {"heads": [{"name": "L1H2", "layer": 1, "head": 2}]}
    gradients = []
    for given in (heads, [(1, 2)]):
        model.module.zero_grad()
        with freeze_heads(model, given):
            model(ids).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.module.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    for bad in (["L1"], [{"layer": 1}], {"selection": "x"}, [3], [(1, 2, 3)]):
        with pytest.raises(InputError, match="head"), ablate_heads(hand, bad):
            pass
