"""The models that come along: what their cards promise is measured again."""

from __future__ import annotations

import pytest
import torch

from posattn.heads import classify_heads, score_heads
from posattn.models.bundled import bundled_names, bundled_path
from posattn.tasks.lengths import model_task
from posattn.tasks.training import accuracy

TASKS = {"numbers": "number", "letters": "letter"}


def test_all_four_are_there():
    assert bundled_names() == ["bytes", "bytes-alibi", "letters", "numbers"]


@pytest.mark.parametrize("name", bundled_names())
def test_small_with_a_card_and_no_local_path(name):
    folder = bundled_path(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
    card = (folder / "README.md").read_text("utf-8")
    assert card.startswith(f"# bundled:{name}\n")
    for path in folder.glob("*.json"):
        assert not any(f'"/{top}/' in path.read_text("utf-8") for top in ("work", "tmp", "home", "root")), path.name


@pytest.fixture(scope="module", params=sorted(TASKS))
def of_task(request):
    from transformers import AutoModelForCausalLM

    name = request.param
    task = model_task(f"bundled:{name}", TASKS[name])
    assert task is not None
    return name, task, AutoModelForCausalLM.from_pretrained(bundled_path(name), dtype=torch.float32).eval()


def test_solves_its_task(of_task):
    _, task, model = of_task
    found = accuracy(model, task.generate(2000, seed=77))
    assert found["accuracy"] >= 0.99
    assert min(found["accuracy_by_hops"].values()) >= 0.98


def test_heads_are_what_the_task_asks_for(of_task):
    name, task, model = of_task
    scores = score_heads(model, task.generate(64, seed=78).tokens, queries="last", evidence=False, bootstrap=0)
    labels = classify_heads(scores, 0.2).counts
    if name == "letters":
        assert labels["positional"] == 0
        assert labels["symbolic"] >= 9
    else:
        assert labels["positional"] >= 1
        assert labels["symbolic"] >= 5
    assert sum(labels.values()) == 12
