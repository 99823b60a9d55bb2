from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from posattn.errors import InputError, UnsupportedModelError
from posattn.models.base import Rotary
from posattn.models.loading import as_model
from posattn.models.positions import attention
from posattn.tasks import make_task
from posattn.tasks.gating import (
    ROTARY_GRID,
    BandGating,
    GatedHeads,
    GatingCurve,
    band_gating,
    gate_bands,
    gated_training,
    rotary_angle,
)
from posattn.tasks.training import TrainingConfig, build_model
from tests import families
from tests.toy import Toy


def _observe(model, tokens):
    found = {}

    def keep(layer, points, batch):
        found[layer] = {k: v.clone() for k, v in points.items()}

    with torch.no_grad(), model.observe(["q", "k", "pattern"], keep):
        logits = model(tokens)
    return found, logits


FAMILIES = ["gptj", "llama_grouped", "gpt_neox_partial", "qwen3", "olmo2", "llama_yarn", "phi3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_do_what_they_say(family):
    model = as_model(families.tiny(family))
    tokens = families.tokens()
    plain, logits = _observe(model, tokens)
    scheme = model.scheme(0, tokens.shape[1])
    assert scheme.rotary is not None
    count = scheme.rotary.width // 2
    q, k = plain[0]["q"], plain[0]["k"]
    with gate_bands(model, range(count), "freeze"):
        found, _ = _observe(model, tokens)
    # every frequency frozen: a rotation that never turns (its attention factor stays)
    still = Rotary(
        (scheme.rotary.cos.square() + scheme.rotary.sin.square()).sqrt(), torch.zeros_like(scheme.rotary.sin),
        scheme.rotary.interleaved, scheme.rotary.frequencies * 0,
    )  # fmt: skip
    expected = attention(q, k, dataclasses.replace(scheme, rotary=still))
    assert torch.allclose(found[0]["pattern"].float(), expected.float(), atol=1e-4)
    assert not torch.allclose(found[0]["pattern"], plain[0]["pattern"], atol=1e-3)
    with gate_bands(model, [0], "remove"):
        found, changed = _observe(model, tokens)
    kept = q.clone()
    kept[..., [0, 1] if scheme.rotary.interleaved else [0, count]] = 0
    assert torch.allclose(found[0]["pattern"].float(), attention(kept, k, scheme).float(), atol=1e-4)
    assert not torch.allclose(changed, logits, atol=1e-4)
    assert torch.equal(_observe(model, tokens)[1], logits)  # nothing stays behind


def test_band_gating_of_a_task_and_a_text(tmp_path):
    config = TrainingConfig(
        task="index", task_parameters={"items": 5, "letters": 3}, model={"layers": 2, "heads": 1, "d_model": 16}
    )
    model, task = as_model(build_model(config).eval()), config.make_task()
    result = band_gating(model, task, 4, samples=20)
    assert result.bands == ((0, 1), (2, 3), (4, 5), (6, 7))
    samples = task.generate(20, seed=3_000_017)
    with torch.no_grad(), gate_bands(model, [2, 3], "freeze"):
        right = model(samples.tokens)[:, -1].argmax(-1) == samples.answers
    assert torch.equal(result.gated[1, 1], right.double())
    assert len(result.to_dataframe()) == 8
    assert len(result.by_position()) == 8 * 5
    loaded = BandGating.load(result.save(tmp_path / "b.safetensors"))
    assert torch.equal(loaded.gated, result.gated)
    assert loaded.plot().get_xlabel()
    text = band_gating(model, samples.tokens, [(0, 7)], modes=["remove"])
    assert text.metric == "loss"
    with torch.no_grad(), gate_bands(model, range(8), "remove"):
        log = model(samples.tokens).log_softmax(-1)
    loss = -log[:, :-1].gather(-1, samples.tokens[:, 1:, None]).squeeze(-1).mean(1)
    assert torch.allclose(text.gated[0, 0], loss.double(), atol=1e-5)


def test_copies_do_not_touch_each_other():
    task = make_task("index", items=4, letters=3)
    tokens = task.generate(6, seed=0).tokens
    both = GatedHeads(task.vocabulary_size, torch.tensor([[0.0], [0.9]]), 2, 8)
    alone = GatedHeads(task.vocabulary_size, torch.tensor([[0.9]]), 2, 8)
    assert torch.allclose(both(tokens)[1], alone(tokens)[0], atol=1e-6)
    assert torch.allclose(both.pattern(tokens).sum(-1), torch.ones(2, 6), atol=1e-6)
    both(tokens)[1].sum().backward()
    assert all(bool((p.grad[0] == 0).all()) for p in both.parameters())
    # without rotation the order of the earlier tokens does not matter; with it, it does
    shuffled = torch.cat([tokens[:, [2, 0, 3, 1]], tokens[:, 4:]], 1)
    assert torch.allclose(both(shuffled)[0], both(tokens)[0], atol=1e-5)
    assert not torch.allclose(both(shuffled)[1], both(tokens)[1], atol=1e-3)


@pytest.mark.slow
def test_the_angle_decides_what_is_learned():
    index = gated_training(
        make_task("index", items=6, letters=4), [0.0, 2 * math.pi / 6], steps=300, batch=64, embedding=32
    )
    assert index.accuracy[1, 0] > 0.9
    assert index.accuracy[0, 0] < 0.7  # without position the index cannot be found
    retrieval = gated_training(
        make_task("retrieval", items=6, letters=6, integers=3), [0.0, 2.5], steps=400, batch=64, embedding=32
    )
    assert retrieval.accuracy[0, 0] > retrieval.accuracy[1, 0] + 0.15


def test_result_of_gated_training(tmp_path):
    task = make_task("index", items=4, letters=3)
    small = {"steps": 3, "batch": 8, "eval_samples": 64, "embedding": 8}
    result = gated_training(task, [(0.0, 0.5), (0.0, 1.0)], seeds=[0, 1], **small)
    assert result.by_position.shape == (2, 2, 4)
    assert result.accuracy.shape == (2, 2)
    assert torch.allclose(result.by_position.mean(-1), result.accuracy, atol=0.05)  # balanced up to one sample a cell
    assert not torch.equal(result.by_position[:, 0], result.by_position[:, 1])
    loaded = GatingCurve.load(result.save(tmp_path / "g.safetensors"))
    assert loaded.to_dataframe().equals(result.to_dataframe())
    assert loaded.plot().get_xlabel()
    assert loaded.plot_positions().get_xlabel()
    assert result.u_shape.shape == (2,)


def test_u_shape_has_the_right_sign():
    curve = torch.tensor([[[1.0, 0.2, 0.2, 0.9]], [[0.1, 0.8, 0.8, 0.2]]])
    result = GatingCurve("index", ((0.1,), (0.2,)), curve.mean(-1), curve, torch.zeros(2, 2), {}, {})
    assert result.u_shape.tolist() == pytest.approx([0.75, -0.65])


def test_grid_is_that_of_the_published_width():
    assert rotary_angle(1) == 1.0
    assert rotary_angle(64) == pytest.approx(10000 ** (-126 / 128))
    assert ROTARY_GRID[0] == 0.0
    assert list(ROTARY_GRID) == sorted(ROTARY_GRID)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gated_training(make_task("number")), InputError, "one layer makes one hop"),
        (lambda: gated_training(make_task("index"), [0.1, (0.1, 0.2)]), InputError, "as many"),
        (lambda: gated_training(make_task("index"), []), InputError, "at least one angle"),
        (lambda: rotary_angle(65), InputError, "ids 1 to 64"),
        (lambda: gate_bands(Toy(), [0]).__enter__(), UnsupportedModelError, "nothing to gate"),
    ],
)
def test_wrong_use(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_wrong_bands():
    model = as_model(families.tiny("llama"))
    for wrong, message in (([], "no frequency"), ([99], "frequencies 0 to"), ([-1], "frequencies 0 to")):
        with pytest.raises(InputError, match=message), gate_bands(model, wrong):
            pass
    with pytest.raises(InputError, match="mode is one of"), gate_bands(model, [0], "off"):
        pass
    with pytest.raises(InputError, match="bands, not 99"):
        band_gating(model, families.tokens(), 99)
