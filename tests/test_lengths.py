from __future__ import annotations

import copy
import math

import pytest
import torch

from posattn.errors import CheckpointError, DataError, InputError
from posattn.heads.ablation import ablate_heads
from posattn.models.loading import as_model
from posattn.tasks import make_task
from posattn.tasks.discrepancy import gaps, model_discrepancy
from posattn.tasks.lengths import (
    KeyValueRetrieval,
    LengthCurve,
    _places,
    key_value_prompts,
    key_value_retrieval,
    key_value_tokens,
    length_generalisation,
    model_task,
)
from posattn.tasks.training import TrainingConfig, build_model, save_model
from tests.toy import ByteTokenizer, Toy

CONFIG = TrainingConfig(
    task_parameters={"targets": 3, "pre_targets": 2, "max_hops": 2, "letters": 5},
    model={"layers": 2, "heads": 2, "d_model": 16},
)


@pytest.fixture(scope="module")
def model():
    inner = build_model(CONFIG).eval()
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(20)  # heads that look somewhere
    return as_model(inner)


def test_accuracy_by_length_is_the_models(model):
    task = CONFIG.make_task()
    curve = length_generalisation(model, task, [6, 11, 30], samples=40, score_samples=4, bootstrap=50, purity=0.3)
    samples = task.generate(40, seed=3_000_017)
    for i, length in enumerate(curve.lengths):
        longer = task.prepend(samples, length - task.length)
        task.validate(longer)
        with torch.no_grad():
            right = model(longer.tokens)[:, -1].argmax(-1) == longer.answers
        assert float(curve.value[i]) == pytest.approx(float(right.double().mean()))
        for k, hops in enumerate(curve.hops):
            assert float(curve.value_hops[i, k]) == pytest.approx(float(right[longer.hops == hops].double().mean()))
        mean, _, best = gaps(model, longer.tokens[:4])
        assert torch.allclose(curve.gap[i], mean.mean(0))
        assert torch.allclose(curve.weight[i], best.mean(0))
    assert set(curve.ablated) == {label for row in curve.labels for label in row}
    name, pairs = next(iter(curve.heads.items()))
    heads = [(t, h) for t, h in pairs]
    with torch.no_grad(), ablate_heads(model, heads):
        right = model(samples.tokens)[:, -1].argmax(-1) == samples.answers
    assert float(curve.ablated[name][0]) == pytest.approx(float(right.double().mean()))
    assert len(curve.heads_dataframe()) == 3 * 4


def test_a_small_budget_changes_nothing(model):
    task = CONFIG.make_task()
    settings = {"lengths": [6, 24], "samples": 12, "score_samples": 3, "bootstrap": 20}
    wide = length_generalisation(model, task, **settings)
    narrow = length_generalisation(model, task, budget=1, **settings)
    assert torch.equal(wide.value, narrow.value)
    assert torch.allclose(wide.gap, narrow.gap, atol=1e-5)
    assert torch.equal(wide.interval, narrow.interval)


def test_text_loss_has_the_same_targets_at_every_length(model, tmp_path):
    rows = torch.randint(model.vocab_size, (5, 40), generator=torch.Generator().manual_seed(1))
    curve = length_generalisation(model, rows, [12, 40], targets=8, score_samples=2, bootstrap=20)
    assert curve.metric == "loss"
    for i, n in enumerate(curve.lengths):
        with torch.no_grad():
            log = model(rows[:, -n:]).log_softmax(-1)
        own = log[:, -9:-1].gather(-1, rows[:, -8:, None]).squeeze(-1)
        assert float(curve.value[i]) == pytest.approx(-float(own.mean()), abs=1e-5)
    assert length_generalisation(model, rows, targets=8, score_samples=0).lengths == (10, 20, 40)
    loaded = LengthCurve.load(curve.save(tmp_path / "c.safetensors"))
    assert loaded.to_dataframe().equals(curve.to_dataframe())
    assert loaded.heads_dataframe().equals(curve.heads_dataframe())
    assert curve.plot().get_xlabel()


def _curve(metric, lengths, value, weight, chance=0.0):
    count, blank = len(lengths), torch.zeros(len(lengths), 1, 1, dtype=torch.float64)
    from posattn.tasks.discrepancy import predicted_break

    first = torch.tensor([[weight]], dtype=torch.float64)
    return LengthCurve(
        metric, tuple(lengths), torch.tensor(value, dtype=torch.float64), torch.zeros(count, 2), (),
        torch.zeros(count, 0), blank, blank, blank, first.expand(count, 1, 1), predicted_break(first, lengths[0]),
        {}, {}, (("mixed",),), chance, 0.95, {},
    )  # fmt: skip


def test_breaks_on_known_curves():
    curve = _curve("accuracy", [16, 32, 64, 128], [1.0, 0.8, 0.4, 0.1], 0.9)
    assert curve.observed_break() == pytest.approx(math.exp(math.log(32) + 0.75 * math.log(2)))
    assert curve.predicted_break() == pytest.approx(1 + 15 * 9)
    assert math.isnan(_curve("accuracy", [16, 32], [1.0, 0.9], 0.4).predicted_break())
    assert math.isnan(_curve("accuracy", [16, 32], [1.0, 0.9], 0.4).observed_break())
    assert math.isnan(_curve("accuracy", [16, 32], [0.1, 0.0], 0.4, chance=0.2).observed_break())
    # a loss that first falls, as contexts help, and then rises by more than a tenth of a nat
    assert _curve("loss", [16, 32, 64], [2.0, 1.5, 1.7], 0.9).observed_break() == pytest.approx(32 * math.sqrt(2))


def test_predicted_break_of_a_head_that_dilutes():
    # one key matches, the others are alike: weight at length n is e^g / (e^g + n − 1)
    gap, n = 4.0, 10
    from posattn.tasks.discrepancy import predicted_break

    weight = math.exp(gap) / (math.exp(gap) + n - 1)
    found = float(predicted_break(torch.tensor(weight, dtype=torch.float64), n))
    assert math.exp(gap) / (math.exp(gap) + found - 1) == pytest.approx(0.5)


def test_gaps_are_the_two_largest_logits():
    toy = Toy()
    rows = torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(0))
    mean, worst, best = gaps(toy, rows, queries=[4, 8])
    found = {}

    def keep(layer, points, batch):
        found[layer] = points["pattern"].clone()

    with torch.no_grad(), toy.observe(["pattern"], keep):
        toy(rows)
    for layer, pattern in found.items():
        rows_of = torch.stack([pattern[:, :, 4], pattern[:, :, 8]])
        top = rows_of.topk(2, -1).values.log()
        assert torch.allclose(mean[:, layer].float(), (top[..., 0] - top[..., 1]).mean(0), atol=1e-4)
        assert torch.allclose(worst[:, layer].float(), (top[..., 0] - top[..., 1]).amin(0), atol=1e-4)
        assert torch.allclose(best[:, layer].float(), rows_of.amax(-1).mean(0), atol=1e-5)


def test_model_discrepancy_by_length(model):
    rows = torch.randint(model.vocab_size, (3, 32), generator=torch.Generator().manual_seed(1))
    result = model_discrepancy(model, rows)
    assert result.lengths == (8, 16, 32)
    assert torch.allclose(result.mean[0], gaps(model, rows[:, -8:])[0].mean(0))
    assert len(result.to_dataframe()) == 3 * 4
    given = model_discrepancy(model, {16: rows[:, -16:], 8: rows[:, -8:]})
    assert torch.equal(given.mean, result.mean[:2])
    with pytest.raises(InputError, match="was asked for"):
        model_discrepancy(model, rows, [64])


# ------------------------------------------------------------------------------------------------ key–value retrieval


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_prompts_differ_in_the_question_alone(tokenizer):
    toy = Toy(vocab=256, tokenizer=None if tokenizer is None else ByteTokenizer(256, adds_bos=True), context=128)
    prompts = key_value_prompts(toy, pairs=4, samples=3, seed=2)
    for s in range(3):
        spans, body = prompts.spans[s], None
        for p in range(4):
            row, count = prompts.documents[p][s], prompts.values[p][s]
            start, end = spans[p]
            assert torch.equal(row[end - count : end], row[-count:])  # the gold value stands in the line asked about
            key = row[start : end - count]
            assert torch.equal(row[len(row) - count - len(key) : len(row) - count], key)
            lines = row[: spans[-1][1]]
            assert body is None or torch.equal(lines, body)
            body = lines
    assert key_value_tokens(prompts).shape[0] == 3


def test_log_probability_and_choice_are_the_models():
    toy = Toy(vocab=256, tokenizer=ByteTokenizer(256), context=128)
    prompts = key_value_prompts(toy, pairs=3, samples=4, seed=5)
    found = key_value_retrieval(toy, 3, 4, seed=5, bootstrap=20)
    for p in range(3):
        for s in range(4):
            row, count = prompts.documents[p][s], prompts.values[p][s]
            with torch.no_grad():
                log = toy(row[None])[0].log_softmax(-1)
            gold = row[-count:]
            expected = sum(float(log[len(row) - count - 1 + i, gold[i]]) for i in range(count))
            assert float(found.log_probability[p, s]) == pytest.approx(expected, abs=1e-4)
    assert set(found.choice.unique().tolist()) <= {0.0, 1.0}
    assert found.predicted is None


def test_predicted_share_of_lines(tmp_path):
    toy = Toy(vocab=64)
    prompts = key_value_prompts(toy, pairs=4, samples=2)  # 4 lines of two tokens, and the key: 9 positions
    place, share = _places(prompts, torch.ones(9))
    assert share.tolist() == pytest.approx([0.25] * 4)
    assert place.tolist() == pytest.approx([1 / 9, 3 / 9, 5 / 9, 7 / 9])
    only = torch.zeros(9)
    only[2:4] = 1
    assert _places(prompts, only)[1].tolist() == pytest.approx([0, 1, 0, 0])
    # a profile of another length is stretched
    long = torch.zeros(90)
    long[20:40] = 1
    assert _places(prompts, long)[1].tolist() == pytest.approx([0, 1, 0, 0])
    found = key_value_retrieval(toy, 4, 3, profile=torch.arange(1, 10).float(), bootstrap=20)
    assert found.predicted is not None
    assert bool((found.predicted[1:] > found.predicted[:-1]).all())
    assert set(found.agreement) == {"accuracy", "choice", "log_probability"}
    loaded = KeyValueRetrieval.load(found.save(tmp_path / "k.safetensors"))
    assert loaded.to_dataframe().equals(found.to_dataframe())
    assert found.plot().get_xlabel()


def test_a_model_that_retrieves_scores_one():
    class Perfect(Toy):
        """Answers with the token after the last earlier occurrence of the current one."""

        def __call__(self, tokens, mask=None):
            logits = torch.zeros(*tokens.shape, self.vocab_size)
            for b, row in enumerate(tokens.tolist()):
                for i, token in enumerate(row):
                    for j in range(i):
                        if row[j] == token:
                            logits[b, i] = 0
                            logits[b, i, row[j + 1]] = 20
            return logits

    found = key_value_retrieval(Perfect(vocab=64), 5, 3, bootstrap=20)
    assert found.accuracy.mean() == 1
    assert found.choice.mean() == 1
    assert found.log_probability.max() > -0.01


def test_task_of_a_folder(tmp_path):
    inner = build_model(CONFIG)
    save_model(inner, CONFIG, tmp_path / "model")
    assert model_task(tmp_path / "model") == CONFIG.make_task()
    assert model_task(tmp_path) is None
    with pytest.raises(CheckpointError, match="checkpoint of task 'number', not of 'letter'"):
        model_task(tmp_path / "model", "letter")
    (tmp_path / "model" / "posattn_task.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        model_task(tmp_path / "model")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: length_generalisation(m, make_task("letter")), InputError, "trained on another task"),
        (lambda m: length_generalisation(m, CONFIG.make_task(), [3]), InputError, "lengths start there"),
        (lambda m: length_generalisation(m, CONFIG.make_task(), [9000]), InputError, "more than .* takes"),
        (lambda m: length_generalisation(m, CONFIG.make_task(), mode="all"), InputError, "mode is"),
        (lambda m: length_generalisation(m, torch.zeros(2, 20, dtype=torch.long)), DataError, "use longer"),
        (lambda m: length_generalisation(m, torch.zeros(2, 50, dtype=torch.long), [60]), InputError, "was asked for"),
        (lambda m: length_generalisation(m, torch.zeros(2, 50, dtype=torch.long), [20]), InputError, "no context"),
        (lambda m: key_value_prompts(m, 30), InputError, "between 2 and 24"),
        (lambda m: key_value_prompts(m, 8), DataError, "cannot hold"),
    ],
)
def test_wrong_use(model, call, error, message):
    small = copy.copy(model)
    small.tokenizer = None
    with pytest.raises(error, match=message):
        call(small)
