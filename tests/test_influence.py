"""Influence against autograd written by hand, padding, averaging, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import InputError, NothingMeasuredError
from posattn.influence.gradients import METHODS, Influence, influence
from posattn.tokens import Tokens, load_tokens
from tests.test_probes import _tokens
from tests.toy import Toy

TARGETS = ["argmax_probability", "argmax_log_probability", 7]


def _scalar(model, embeddings, target, token):
    """The attributed number of one document, from the definition."""
    logs = model.from_embeddings(embeddings[None])[0, -1].double().log_softmax(-1)[token]
    return logs if target == "argmax_log_probability" else logs.exp()


def _by_hand(model, document, method, target, steps=32):
    """Magnitudes of one document by autograd alone."""
    embeddings = model.embed(document[None])[0].detach()
    with torch.no_grad():
        token = int(model(document[None])[0, -1].argmax()) if isinstance(target, str) else target

    def gradient(at):
        at = at.clone().requires_grad_()
        return torch.autograd.grad(_scalar(model, at, target, token), at)[0]

    if method == "gradient_norm":
        return gradient(embeddings).norm(dim=-1)
    if method == "input_x_gradient":
        return (embeddings * gradient(embeddings)).norm(dim=-1)
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(steps)
    path = sum(w / 2 * gradient((1 + x) / 2 * embeddings) for x, w in zip(nodes, weights, strict=True))
    return (embeddings * path).norm(dim=-1)


@pytest.mark.parametrize("normalize", ["after_mean", "per_document"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["gradient_norm", "input_x_gradient", "integrated_gradients"])
def test_influence_is_autograd(method, target, normalize) -> None:
    model, ids = Toy(), _tokens(5, 7)
    found = influence(model, load_tokens(ids, model, batch_size=2), method, target, normalize)
    expected = torch.stack([_by_hand(model, row, method, target) for row in ids]).double()
    torch.testing.assert_close(found.per_document, expected, atol=1e-6, rtol=1e-5)
    shares = expected if normalize == "after_mean" else expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found.profile, shares.mean(0) / shares.mean(0).sum(), atol=1e-6, rtol=0)
    assert found.counts.tolist() == [5] * 7
    assert (found.method, found.target, found.normalize) == (method, str(target), normalize)
    with torch.no_grad():
        probabilities = model(ids)[:, -1].softmax(-1)
    chosen = probabilities.argmax(-1) if isinstance(target, str) else torch.full((5,), target)
    assert torch.equal(found.chosen, chosen)
    torch.testing.assert_close(found.probability, probabilities.gather(1, chosen[:, None])[:, 0].double())


def test_integrated_gradients_are_complete() -> None:
    """The signed attributions behind the magnitudes add up to f(e) − f(0), captum's own check on a single feature."""
    model = Toy(width=1, heads=1, key_heads=1, head_dim=1)
    # with one feature per token the magnitude is |attribution|; layer norm of one feature makes the model constant,
    # so the influence is zero and must be refused
    with pytest.raises(NothingMeasuredError, match="zero at every position"):
        influence(model, _tokens(2, 4), "integrated_gradients")


@given(seed=st.integers(0, 99), left=st.booleans(), method=st.sampled_from(sorted(METHODS)[:2]))
def test_padding_changes_nothing(seed, left, method) -> None:
    model = Toy()
    model.module.double()
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (4,), generator=generator).tolist()
    rows = [_tokens(1, n, seed + i)[0] for i, n in enumerate(lengths)]
    width = max(lengths) + 1
    ids, mask = torch.zeros(4, width, dtype=torch.long), torch.zeros(4, width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = row, True
    found = influence(model, load_tokens(ids, model, mask=mask, batch_size=3), method)
    assert found.per_document.shape == (4, max(lengths))
    for i, row in enumerate(rows):
        expected = _by_hand(model, row, method, "argmax_probability").double()
        torch.testing.assert_close(found.per_document[i, : len(row)], expected, atol=1e-7, rtol=1e-4)
        assert bool(found.per_document[i, len(row) :].isnan().all())
    assert found.counts.tolist() == [sum(n > i for n in lengths) for i in range(max(lengths))]
    values = found.per_document.nan_to_num().sum(0) / found.counts
    torch.testing.assert_close(found.profile, values / values.sum())


@given(documents=st.integers(1, 6), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_batches_and_order_change_nothing(documents, size, seed) -> None:
    model, ids = Toy(), _tokens(documents, 5, seed)
    model.module.double()
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(seed))
    a = influence(model, Tokens(ids, batch_size=documents))
    b = influence(model, Tokens(ids[order], batch_size=size))
    torch.testing.assert_close(a.profile, b.profile, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.per_document[order], b.per_document, atol=1e-6, rtol=1e-4)


def test_nothing_is_left_behind_on_the_model() -> None:
    model = Toy()
    influence(model, _tokens(2, 5))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.module.parameters())


def test_a_saturated_prediction_is_refused() -> None:
    model = Toy()
    with torch.no_grad():
        model.module.unembedding.mul_(1e8)  # the probability is exactly 1, its gradient exactly 0
    with pytest.raises(NothingMeasuredError, match="try the target argmax_log_probability"):
        influence(model, _tokens(3, 5))


def test_gradients_that_are_not_finite_are_refused() -> None:
    model = Toy()
    clean = model.from_embeddings
    model.from_embeddings = lambda embeddings, mask=None: clean(embeddings, mask) * (embeddings[0, 0, 0] * 0).sqrt()
    with pytest.raises(NothingMeasuredError, match="not finite"):
        influence(model, _tokens(2, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "gradient_norm, input_x_gradient, integrated_gradients"),
        ({"target": "best"}, "argmax_probability"),
        ({"target": 23}, "vocabulary of 23"),
        ({"normalize": "never"}, "after_mean"),
    ],
)
def test_wrong_names_are_refused(options, words) -> None:
    with pytest.raises(InputError, match=words):
        influence(Toy(), _tokens(2, 4), **options)


def test_no_documents_are_refused() -> None:
    with pytest.raises(NothingMeasuredError, match="no samples left"):
        influence(Toy(), Tokens(_tokens(1, 4)[:0]))


def test_a_method_can_be_added(monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "first", lambda e, objective, size: size * torch.ones(e.shape[:2]).cumsum(1))
    found = influence(Toy(), _tokens(2, 3), "first", size=2.0)
    torch.testing.assert_close(found.profile, torch.tensor([1.0, 2.0, 3.0]).double() / 6)
    assert found.provenance["options"] == {"size": 2.0}


def test_results_round_trip_and_are_drawn(tmp_path) -> None:
    import matplotlib.pyplot as plt

    found = influence(Toy(), _tokens(3, 5))
    back = Influence.load(found.save(tmp_path / "i.safetensors"))
    assert torch.equal(back.profile, found.profile)
    assert torch.equal(back.per_document, found.per_document)
    assert back.provenance == found.provenance
    assert found.to_dataframe()["value"].tolist() == found.profile.tolist()
    assert found.plot().get_xlabel() == "position"
    plt.close("all")
