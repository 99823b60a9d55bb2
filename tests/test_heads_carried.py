"""Position carried inside hidden states: on a model built by hand, on its limits, and against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from posattn.errors import DataError, InputError, UnsupportedModelError
from posattn.heads import carried_position, score_heads
from posattn.heads.swaps import pair_scores, swap_scores
from posattn.models.base import PositionScheme

from . import families
from .heads_toy import VOCAB, HandBuilt
from .test_heads_maths import cosine
from .test_heads_models import bridged

LENGTH, WANTED = 12, 5


class PositionWritten(HandBuilt):
    """Positions are written into the states as one-hot vectors, and no layer rotates.

    Every head of layer 1 but the last goes by the written position, to `WANTED`; the last goes by the token.
    """

    def __init__(self, dose: float = 1.0) -> None:
        super().__init__()
        self.dose = dose
        wq, wk, _, wo = self.module
        with torch.no_grad():
            wq.zero_(), wk.zero_(), wo.zero_()
            wk[1, 0, 2 * VOCAB : 3 * VOCAB, 2:] = torch.eye(VOCAB)
            wq[1, 0, -1, 2 + WANTED] = 8
            wk[1, 1, :VOCAB, 2:] = torch.eye(VOCAB)
            wq[1, 1, -1, 2 : 2 + VOCAB] = torch.linspace(0, 40, VOCAB)

    def from_embeddings(self, embeddings, mask=None, tokens=None):
        written = torch.eye(embeddings.shape[1], VOCAB, dtype=embeddings.dtype) * self.dose
        x = embeddings.clone()
        x[..., 2 * VOCAB : 3 * VOCAB] += written
        return super().from_embeddings(x, mask, tokens)

    def _turn(self, x):
        return x

    def scheme(self, layer, length):
        return PositionScheme("none", 1.0)


def distinct(documents: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(VOCAB, generator=generator)[:length] for _ in range(documents)])


def test_a_head_that_goes_by_written_position_is_found():
    got = carried_position(PositionWritten(), distinct(400, LENGTH), [1])
    mean = {
        name: getattr(got, name)[0].mean(-1)
        for name in ("moves_positional", "moves_symbolic", "stays_positional", "stays_symbolic")
    }
    # the position moves with the state: the head looks symbolic; once the position stays, it is positional
    assert mean["moves_symbolic"][0] > 0.999
    assert mean["moves_positional"][0] < 0.2
    assert mean["stays_positional"][0] > 0.97
    assert mean["stays_symbolic"][0] < 0.3
    assert mean["moves_symbolic"][1] > 0.999
    assert mean["stays_symbolic"][1] > 0.97
    assert got.decoded[0] > 0.99
    # one-hot token and one-hot position: the position is about half of the variance
    assert got.share[0] == pytest.approx(0.5, abs=0.05)


def test_states_without_position_hold_none():
    got = carried_position(PositionWritten(0.0), distinct(400, LENGTH, 1), [0, 1])
    assert got.share.abs().max() < 0.01
    assert got.chance == pytest.approx(1 / LENGTH)
    assert (got.decoded - got.chance).abs().max() < 0.05
    for kind in ("positional", "symbolic"):
        moved, kept = getattr(got, f"moves_{kind}")[1, 1], getattr(got, f"stays_{kind}")[1, 1]
        assert (moved - kept).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["gptj", "llama_grouped", "mistral", "gemma2", "bloom"])
def test_equals_brute_force(name):
    model, rows = bridged(name), families.tokens(4, 9, seed=2)
    got = carried_position(model, rows, [1], tau=0.05, batch_size=3)
    found = {}

    def observer(_, points, batch):
        found.update({key: value.clone() for key, value in points.items()})

    def weights(change=None):
        def apply(_, x, batch):
            return x if change is None else change(x.clone())

        with (
            torch.no_grad(),
            model.intervene("resid_pre", apply, [1]),
            model.observe(["resid_pre", "pattern"], observer, [1]),
        ):
            model(rows)
        return found["pattern"][:, :, -1].double()

    with torch.no_grad(), model.observe(["resid_pre"], observer, [1]):
        model(rows)
    states = found["resid_pre"].clone()
    mean, before = states.mean(0), weights()
    first = int((before[0, 0] > 0).nonzero()[0])
    gaps, same, other = [], [], []
    for i, j in itertools.combinations(range(first, 8), 2):

        def change(x, i=i, j=j):
            x[:, i], x[:, j] = states[:, j] - mean[j] + mean[i], states[:, i] - mean[i] + mean[j]
            return x

        new, old = weights(change)[..., [i, j]], before[..., [i, j]]
        gaps.append((old[..., 0] - old[..., 1]).abs())
        same.append(cosine(new, old))
        other.append(cosine(new, old.flip(-1)))
    share = torch.softmax(torch.stack(gaps, -1) / 0.05, -1)
    positional, symbolic = ((share * torch.stack(x, -1)).sum(-1).T for x in (same, other))
    torch.testing.assert_close(got.stays_positional[0].double(), positional, atol=2e-4, rtol=0)
    torch.testing.assert_close(got.stays_symbolic[0].double(), symbolic, atol=2e-4, rtol=0)
    plain = score_heads(model, rows, evidence=False, bootstrap=0, tau=0.05)
    torch.testing.assert_close(got.moves_positional[0].mean(-1), plain.positional[1].float(), atol=1e-4, rtol=0)
    assert (got.stays_positional - got.moves_positional).abs().max() > 1e-3


class PositionWithinKind(PositionWritten):
    """Head 0 of layer 1 goes by distance (rotation), but turns away from the first half of the vocabulary."""

    def __init__(self) -> None:
        super().__init__(0.0)
        wq, wk, _, _ = self.module
        with torch.no_grad():
            wq.zero_(), wk.zero_()
            angle = torch.tensor(-0.1 * 3)
            wq[1, 0, -1, :2] = 3000 * torch.stack([angle.cos(), angle.sin()])
            wk[1, 0, -1, 0] = 1
            wk[1, 0, : VOCAB // 2, 2] = -5000
            wq[1, 0, -1, 2] = 1
            wq[1, 1], wk[1, 1] = wq[1, 0], wk[1, 0]

    def _turn(self, x):
        return HandBuilt._turn(self, x)

    def scheme(self, layer, length):
        return HandBuilt.scheme(self, layer, length)


def test_distance_within_a_kind_is_told_from_a_taste_for_the_kind():
    generator = torch.Generator().manual_seed(3)
    half = VOCAB // 2
    rows = torch.stack(
        [
            torch.cat(
                [torch.randperm(half, generator=generator)[:6], half + torch.randperm(half, generator=generator)[:6]]
            )
            for _ in range(40)
        ]
    )
    got = carried_position(PositionWithinKind(), rows, [1], kinds=(rows >= half).long())
    assert got.within_positional is not None
    assert got.within_symbolic is not None
    assert got.within_positional[0, 0].mean() > 0.99
    assert got.within_symbolic[0, 0].mean() < 0.1
    assert got.moves_positional[0, 0].mean() < 0.9, "exchanges across kinds move the taste too"
    assert got.stays_positional[0, 0].mean() > 0.99, "the kind is in the mean of the position"


@pytest.mark.parametrize("tau", [0.0, 1e-4, 0.3])
def test_chosen_swaps_are_those_of_all_when_all_are_allowed(tau):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, 7, dtype=torch.float64, generator=generator) * 3
    weights = torch.softmax(logits.diagonal(dim1=1, dim2=2), -1)
    one = torch.eye(7, dtype=torch.float64).expand(5, -1, -1)
    everything = torch.ones(5, 7, 7, dtype=torch.bool)
    for got, all_swaps in zip(
        pair_scores(logits, weights, everything, tau), swap_scores(logits, one, weights, None, tau), strict=True
    ):
        torch.testing.assert_close(got, all_swaps, atol=1e-12, rtol=0)
    # one pair alone
    only = torch.zeros_like(everything)
    only[:, 2, 5] = True
    got = pair_scores(logits, weights, only, tau)
    old, new = logits.diagonal(dim1=1, dim2=2)[:, [2, 5]], torch.stack([logits[:, 2, 5], logits[:, 5, 2]], -1)
    torch.testing.assert_close(got[0], cosine(new.softmax(-1), old.softmax(-1)))
    torch.testing.assert_close(got[1], cosine(new.softmax(-1), old.softmax(-1).flip(-1)))
    assert pair_scores(logits, weights, torch.zeros_like(everything), tau)[0].isnan().all()


def test_saves_tables_and_draws(tmp_path):
    got = carried_position(PositionWritten(), distinct(8, 6))
    frame = got.to_dataframe()
    assert len(frame) == 4
    assert frame["stays_positional"].notna().all()
    back = type(got).load(got.save(tmp_path / "carried.safetensors"))
    torch.testing.assert_close(back.stays_positional, got.stays_positional)
    assert len(got.plot().lines) == 3


def test_refusals():
    toy = PositionWritten()
    with pytest.raises(DataError, match="at least 4 documents"):
        carried_position(toy, distinct(3, 6))
    with pytest.raises(DataError, match="one length"):
        carried_position(toy, [*distinct(4, 6), torch.arange(5)])
    with pytest.raises(InputError, match="kinds must be one number a token"):
        carried_position(toy, distinct(4, 6), kinds=torch.zeros(4, 5, dtype=torch.long))
    with pytest.raises(InputError, match="layers must lie"):
        carried_position(toy, distinct(4, 6), [2])
    with pytest.raises(UnsupportedModelError, match="absolute"):
        carried_position(bridged("gpt2"), families.tokens(4, 8))
