"""Heads written down: they solve their tasks, score (1, 0) and (0, 1), and stay below the published bounds."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.tasks import make_task
from posattn.tasks.constructions import HARD, IndexHead, InductionHead, RetrievalHead, construct
from posattn.tasks.discrepancy import (
    construction_discrepancy,
    index_bound,
    index_bound_many,
    predicted_break,
    retrieval_bound,
)

TASKS = ["number", "letter", "index", "retrieval", "induction"]


def _task(name, **more):
    small = {"number": {"letters": 6}, "letter": {}, "index": {}, "retrieval": {}, "induction": {}}[name]
    return make_task(name, **{**small, **more})


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("extra", [0, 1, 13, 47])
def test_constructions_solve_their_tasks_up_to_n0(name, extra):
    task = _task(name)
    longest = task.length - 1 + 47
    samples = task.prepend(task.generate(64, seed=3), extra, seed=1)
    hard, soft = construct(task, longest), construct(task, longest, scale=None)
    assert hard.n0 >= longest
    assert math.isinf(hard.head.scale)
    assert torch.equal(hard.answers(samples.tokens), samples.answers)
    mass = soft(samples.tokens)
    assert torch.equal(mass.argmax(-1), samples.answers)
    right = mass[torch.arange(64), samples.answers]
    assert float(right.min()) > 0.98
    assert torch.allclose(mass.sum(-1), torch.ones(64, dtype=torch.float64))


def test_clean_letters_and_index_with_two_angles():
    task = make_task("letter", distractors="clean")
    samples = task.generate(256, seed=5)
    assert torch.equal(construct(task).answers(samples.tokens), samples.answers)
    task = make_task("number", letters=6)
    two = construct(task, 120, angles=(2 * math.pi / 11, 2 * math.pi / 121))
    samples = task.prepend(task.generate(32, seed=5), 104)
    assert torch.equal(two.answers(samples.tokens), samples.answers)
    # a second angle keeps neighbours further apart than any single one can
    assert two.head.discrepancy(120) > 5 * index_bound(2 * math.pi / 120, 120)


def test_published_example_paths_are_solved():
    number = make_task("number")
    row = number.encode("n h n v h y r s 6 3 2 7 7 8 4 7 2")[None]
    assert number.decode(construct(number).answers(row)) == "n"
    letter = make_task("letter")
    row = letter.encode("e1 b2 e1 g6 a2 b2 e1 g6 be db ca ge eb hc dg fh eh")[None]
    assert letter.decode(construct(letter).answers(row)) == "a2"


def test_beyond_n0_a_head_fails():
    task = make_task("number", letters=40)
    solver = construct(task)  # made for 16 keys
    assert solver.n0 == 16
    samples = task.prepend(task.generate(64, seed=2), 1)
    assert torch.equal(solver.answers(task.generate(64, seed=2).tokens), task.generate(64, seed=2).answers)
    longer = construct(task, 40)
    wide = make_task("index", items=40, letters=30).generate(200, seed=1)
    too_far = construct(make_task("index", items=40, letters=30), 40)
    too_far.head = solver.head
    assert (too_far.answers(wide.tokens) == wide.answers).double().mean() < 0.9
    assert torch.equal(longer.answers(samples.tokens), samples.answers)


@pytest.mark.parametrize("name", TASKS[:4])
def test_scores_are_pure(name):
    task = _task(name)
    solver = construct(task)
    positional, symbolic = solver.scores(task.generate(16, seed=1).tokens)
    first, second = (positional, symbolic) if name in ("number", "index") else (symbolic, positional)
    assert float(first.min()) > 0.999
    assert float(second.max()) < 0.05
    # with a larger scale the other score goes to 0
    sharp = solver.scores(task.generate(16, seed=1).tokens, scale=20 * solver.head.scale_for(task.length - 1))
    other = sharp[1] if name in ("number", "index") else sharp[0]
    assert float(other.max()) < 1e-6


def test_induction_is_neither():
    task = make_task("induction", letters=2)
    positional, symbolic = construct(task).scores(task.generate(64, seed=1).tokens)
    assert float(symbolic.min()) < 0.9  # exchanging two matches shows the positional half
    assert float(positional.mean()) < 0.9


def test_published_bounds_are_reproduced():
    path = Path(__file__).parent / "data" / "published_heads_bounds.json"
    published = json.loads(path.read_text())
    lengths = published["lengths"]
    index = [index_bound(0.866, n) for n in lengths]
    retrieval = [retrieval_bound(0.0027, 8, n) for n in lengths]
    pairs = ((index, "index_theta_0.866"), (retrieval, "retrieval_theta_0.0027_alphabet_8"))
    for ours, name in pairs:
        for a, b in zip(ours, published[name], strict=True):
            assert a == pytest.approx(b, abs=0.6 * 10 ** -len(str(b).split(".")[1]))


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-4, 3.1), st.integers(2, 400))
def test_index_discrepancy_is_below_its_bound(angle, n):
    assert IndexHead(angle).discrepancy(n) <= index_bound(angle, n) + 1e-12


@settings(deadline=None, max_examples=60)
@given(st.floats(0.0, 0.05), st.integers(2, 12), st.integers(2, 300))
def test_retrieval_discrepancy_is_below_its_bound(angle, alphabet, n):
    assert RetrievalHead(alphabet, angle).discrepancy(n) <= retrieval_bound(angle, alphabet, n) + 1e-12


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.01, 3.1), min_size=1, max_size=3), st.integers(5, 300))
def test_index_with_several_angles_is_below_its_bound(angles, n):
    assert IndexHead(angles).discrepancy(n) <= index_bound_many(len(angles), n) + 1e-12


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 9), st.integers(2, 6), st.floats(0.01, 1.5))
def test_worst_cases_are_attained_and_never_beaten(n, alphabet, angle):
    index, retrieval, induction = IndexHead(angle), RetrievalHead(alphabet, angle), InductionHead(alphabet, n, angle)
    distances = torch.arange(1, n + 1, dtype=torch.float64)
    margins = []
    for back in range(1, n + 1):
        logits = (angle * (distances - back)).cos()
        others = logits[torch.arange(n) != back - 1]
        margins.append(float(logits[back - 1] - others.max()))
    assert index.discrepancy(n) == pytest.approx(min(margins), abs=1e-9)
    omega, found, recent = 2 * math.pi / alphabet, [], []
    curve = (induction.phase + angle * distances).cos()
    w = induction.weights.tolist()
    for a in range(n):
        for b in range(n):
            if a == b:
                continue
            for s in range(1, alphabet):
                found.append(float((angle * distances[a]).cos() - (s * omega + angle * distances[b]).cos()))
                recent.append(w[0] * (1 - math.cos(s * omega)) + w[1] * float(curve[a] - curve[b]))
            if a < b:
                recent.append(w[1] * float(curve[a] - curve[b]))
    assert retrieval.discrepancy(n) == pytest.approx(min(found), abs=1e-9)
    assert induction.discrepancy(n) == pytest.approx(min(recent), abs=1e-9)


def test_discrepancy_falls_with_length_and_n0_is_its_end():
    head = RetrievalHead(8, 0.0027)
    values = [head.discrepancy(n) for n in range(2, 200)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert head.discrepancy(head.n0) > 1e-6 >= head.discrepancy(head.n0 + 1)
    assert 140 < head.n0 < 150  # half of what the upper bound alone would say
    assert RetrievalHead(8).n0 == 2**16  # without position nothing ends it
    with pytest.raises(InputError, match="works up to"):
        head.scale_for(200)


def test_result_of_a_construction(tmp_path):
    result = construction_discrepancy(IndexHead(0.866), [10, 20, 50, 100])
    assert bool((result.worst[:, 0, 0] <= result.bounds["index"] + 1e-12).all())
    frame = result.to_dataframe()
    assert list(frame["length"].unique()) == [10, 20, 50, 100]
    loaded = type(result).load(result.save(tmp_path / "d.safetensors"))
    assert torch.equal(loaded.worst, result.worst)
    assert result.plot().get_xlabel()


def test_dilution_law():
    # one key with weight w among n: others alike are added until it holds half
    w, n = 0.9, 16
    length = predicted_break(torch.tensor([[w]]), n)[0, 0]
    rest = (1 - w) / (n - 1)
    assert w / (w + rest * (length - 1)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IndexHead([]), "at least one finite angle"),
        (lambda: IndexHead(0.1, [1, 2]), "as many positive weights"),
        (lambda: RetrievalHead(1), "at least 2 symbols"),
        (lambda: InductionHead(4, 1), "at least 2"),
        (lambda: IndexHead(0.1, scale=0), "scale must be above 0"),
        (lambda: construct(make_task("number"), 50, angles=2 * math.pi / 20), "work up to 20"),
        (lambda: IndexHead(0.1).scale_for(5, 1.5), "share"),
        (lambda: IndexHead(0.1).discrepancy(0), "at least 1"),
    ],
)
def test_wrong_use(make, message):
    with pytest.raises(InputError, match=message):
        make()
    assert math.isinf(HARD)
