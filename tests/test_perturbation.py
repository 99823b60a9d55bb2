"""Perturbation influence against replacing the tokens by hand."""

from __future__ import annotations

import pytest
import torch

from posattn.errors import InputError
from posattn.influence.gradients import Objective
from posattn.influence.perturbation import other_tokens, perturbation
from tests.toy import Toy


def objective(model: Toy, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Objective:
    last = torch.full((len(ids),), ids.shape[1] - 1)
    if mask is not None:
        last = last - mask.flip(-1).long().argmax(-1)
    return Objective(model, ids, mask, last, torch.zeros(len(ids), dtype=torch.long), log=False)


def by_hand(model: Toy, ids: torch.Tensor, replacements: int, seed: int) -> torch.Tensor:
    """One forward pass for each document, position and replacement."""
    found = torch.zeros(ids.shape, dtype=torch.float64)
    for draw in range(replacements):
        others = other_tokens(ids, seed=seed * 1_000_003 + draw)
        for b, document in enumerate(ids):
            p = model(document[None])[0, -1].double().softmax(-1)
            for j in range(len(document)):
                changed = document.clone()
                changed[j] = others[b, j]
                q = model(changed[None])[0, -1].double().softmax(-1)
                found[b, j] += (p * (p / q).log()).sum() / replacements
    return found


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_equals_replacing_by_hand(rows: int) -> None:
    model = Toy()
    ids = torch.randint(3, 23, (2, 7))
    found = perturbation(model.embed(ids), objective(model, ids), replacements=2, seed=3, rows=rows)
    expected = by_hand(model, ids, 2, 3)
    assert float(expected.min()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    root = perturbation(model.embed(ids), objective(model, ids), replacements=2, seed=3, root=True)
    torch.testing.assert_close(root, expected.sqrt(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_neither_batch_nor_padding_matters() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (2, 6))
    both = perturbation(model.embed(ids), objective(model, ids))
    alone = perturbation(model.embed(ids[1:]), objective(model, ids[1:]))
    torch.testing.assert_close(both[1:], alone, rtol=1e-5, atol=1e-9)
    padded = torch.cat([ids[1:], torch.zeros(1, 2, dtype=torch.long)], 1)
    mask = torch.tensor([[True] * 6 + [False] * 2])
    found = perturbation(model.embed(padded), objective(model, padded, mask))
    torch.testing.assert_close(found[:, :6], alone, rtol=1e-5, atol=1e-9)
    assert float(found[:, 6:].abs().max()) == 0


def test_other_tokens_differ_and_come_from_the_document() -> None:
    ids = torch.tensor([[5, 5, 5, 9, 5], [3, 4, 6, 7, 8]])
    for seed in range(5):
        others = other_tokens(ids, seed=seed)
        assert bool((others != ids).all())
        for document, replaced in zip(ids, others, strict=True):
            assert set(replaced.tolist()) <= set(document.tolist())
    assert not torch.equal(other_tokens(ids, seed=0), other_tokens(ids, seed=1))


def test_refusals() -> None:
    with pytest.raises(InputError, match="equal tokens"):
        other_tokens(torch.tensor([[4, 4, 4]]))
    model = Toy()
    ids = torch.randint(3, 23, (1, 4))
    with pytest.raises(InputError, match="at least 1"):
        perturbation(model.embed(ids), objective(model, ids), replacements=0)
