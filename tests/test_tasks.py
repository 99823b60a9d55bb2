from __future__ import annotations

import collections
import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.tasks import TASKS, LetterTask, NumberTask, make_task

ALL = [
    ("number", {}),
    ("letter", {}),
    ("letter", {"distractors": "clean"}),
    ("index", {}),
    ("retrieval", {}),
    ("induction", {}),
]


def test_published_number_example():
    task = NumberTask()
    solution = task.solve(task.encode("n h n v h y r s 6 3 2 7 7 8 4 7 2")[None])
    assert task.vocabulary[int(solution.answers[0])] == "n"
    assert [int(p) for p in solution.path[0] if p >= 0] == [16, 14, 10, 8, 2]
    assert int(solution.hops[0]) == 4


def test_published_letter_example():
    task = LetterTask()
    solution = task.solve(task.encode("e1 b2 e1 g6 a2 b2 e1 g6 be db ca ge eb hc dg fh eh")[None])
    assert task.vocabulary[int(solution.answers[0])] == "a2"
    assert [int(p) for p in solution.path[0] if p >= 0] == [16, 13, 10, 4]


def test_vocabulary_sizes():
    assert NumberTask().vocabulary_size == 136
    assert LetterTask().vocabulary_size == 128
    for name, parameters in ALL:
        vocabulary = make_task(name, **parameters).vocabulary
        assert len(set(vocabulary)) == len(vocabulary)


@pytest.mark.parametrize(("name", "parameters"), ALL)
def test_every_sample_is_solved(name, parameters):
    task = make_task(name, **parameters)
    samples = task.generate(4000, seed=3)
    solution = task.validate(samples)
    assert samples.tokens.shape == (4000, task.length)
    reached = samples.tokens[torch.arange(4000), samples.target]
    assert torch.equal(reached, samples.answers)
    assert (solution.answers >= 0).all()


@settings(deadline=None, max_examples=40)
@given(
    targets=st.integers(1, 6),
    pre=st.integers(1, 6),
    hops=st.integers(1, 5),
    letters=st.integers(2, 9),
    seed=st.integers(0, 999),
    kind=st.sampled_from(["number", "published", "clean"]),
    extra=st.integers(0, 12),
)
def test_samples_of_any_size_are_solved(targets, pre, hops, letters, seed, kind, extra):
    parameters = {"targets": targets, "pre_targets": pre, "max_hops": hops, "letters": letters}
    try:
        task = NumberTask(**parameters) if kind == "number" else LetterTask(**parameters, distractors=kind)
    except InputError:
        return
    samples = task.generate(60, seed=seed)
    task.validate(samples)
    longer = task.prepend(samples, extra, seed=seed)
    assert longer.tokens.shape[1] == task.length + extra
    task.validate(longer)


@settings(deadline=None, max_examples=20)
@given(count=st.integers(1, 700), seed=st.integers(0, 99), which=st.sampled_from(ALL))
def test_cells_differ_by_at_most_one(count, seed, which):
    name, parameters = which
    small = (
        {"targets": 3, "pre_targets": 4, "letters": 6} if name in ("number", "letter") else {"items": 4, "letters": 5}
    )
    task = make_task(name, **small, **parameters)
    samples = task.generate(count, seed)
    cells = collections.Counter(
        zip(samples.target.tolist(), samples.answers.tolist(), samples.hops.tolist(), strict=True)
    )
    total = torch.tensor(task.cells).prod().item()
    low = min(cells.values()) if len(cells) == total else 0
    assert max(cells.values()) - low <= 1


def test_seed_decides_the_samples():
    task = NumberTask()
    assert torch.equal(task.generate(50, 1).tokens, task.generate(50, 1).tokens)
    assert not torch.equal(task.generate(50, 1).tokens, task.generate(50, 2).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["number", "letter"])
def test_432000_samples_in_time(name):
    start = time.perf_counter()
    make_task(name).generate(432_000)
    assert time.perf_counter() - start < 20


def test_distractor_integers_are_uniform():
    """Off the path an integer at 0-based position p is uniform on 1..p: check its mean at the first pre-target."""
    task = NumberTask(max_hops=1)
    samples = task.generate(20_000)
    for p in (8, 15):
        jump = (samples.tokens[:, p] - task.letters + 1).float()
        assert jump.min() == 1
        assert jump.max() == p
        assert abs(jump.mean() - (p + 1) / 2) < 0.15


def _answer_letter_share(samples, task):
    """How often the answer's first letter occurs among the targets, against the mean of the letters that occur
    there."""
    first = torch.from_numpy(task._first(samples.tokens[:, : task.targets].numpy()))
    own = (first == (samples.answers // task.integers)[:, None]).sum(1).float()
    distinct = torch.tensor([len(set(row.tolist())) for row in first]).float()
    return (own * distinct / task.targets).mean().item()


def test_clean_distractors_remove_the_confound():
    assert _answer_letter_share(LetterTask().generate(2000), LetterTask()) < 0.8
    clean = LetterTask(distractors="clean")
    assert _answer_letter_share(clean.generate(2000), clean) == pytest.approx(1.0, abs=1e-6)


def test_wrong_records_are_found():
    task = LetterTask()
    samples = task.generate(8)
    samples.answers[5] = (samples.answers[5] + 1) % 64
    with pytest.raises(InputError, match="sample 5 of task 'letter'"):
        task.validate(samples)


def test_unsolvable_rows_say_why():
    task = LetterTask()
    assert "starts several different" in task.solve(task.encode("a1 a2 ba")[None]).reason
    assert "starts no earlier pair" in task.solve(task.encode("a1 bc")[None]).reason
    assert "no (letter, letter)" in task.solve(task.encode("a1 b1")[None]).reason
    number = NumberTask()
    assert "before the first" in number.solve(number.encode("a 5")[None]).reason
    assert int(number.solve(number.encode("a 5")[None]).answers[0]) == -1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NumberTask(pre_targets=2), "too small for 4 hops"),
        (lambda: LetterTask(pre_targets=2), "too small for 4 hops"),
        (lambda: LetterTask(letters=4), "more letters than hops"),
        (lambda: LetterTask(distractors="dirty"), "published"),
        (lambda: make_task("words"), "unknown task 'words'"),
        (lambda: make_task("number", colours=3), "no parameter 'colours'"),
        (lambda: make_task("number", length=6), "do not fit 6 positions"),
        (lambda: NumberTask(targets=0), "targets must be"),
        (lambda: NumberTask().generate(0), "at least 1"),
        (lambda: NumberTask().encode("a ?"), "'\\?' is not a token"),
        (lambda: NumberTask().prepend(NumberTask().generate(2), -1), "at least 0"),
        (lambda: NumberTask().solve(torch.tensor([[500, 1]])), "lie in 0..135"),
    ],
)
def test_wrong_use_is_one_clear_line(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(TASKS))
def test_parameters_round_trip_and_tokenizer(name, tmp_path):
    task = make_task(name)
    again = make_task(name, **json.loads(json.dumps(task.parameters)))
    assert again == task
    row = task.generate(3).tokens[1]
    text = task.decode(row)
    assert torch.equal(task.encode(text), row)
    task.tokenizer().save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(text)["input_ids"] == row.tolist()
    assert tokenizer("no such word")["input_ids"] == 3 * [task.vocabulary_size], "not a token of the model"
