"""Influence on real transformers classes equals autograd through the plain model."""

from __future__ import annotations

import pytest
import torch

from posattn.influence.gradients import influence
from posattn.tokens import load_tokens
from tests import families
from tests.test_probes_models import NAMES, bridged, seen


def gradient(plain, document, log):
    """‖∂f/∂e_i‖ of one document by autograd on the transformers model."""
    embeddings = plain.get_input_embeddings()(document[None]).detach().requires_grad_()
    logs = plain(inputs_embeds=embeddings, use_cache=False).logits[0, -1].double().log_softmax(-1)
    value = logs.max() if log else logs.max().exp()
    return torch.autograd.grad(value, embeddings)[0][0].norm(dim=-1).double()


@pytest.mark.parametrize("name", NAMES)
def test_influence_equals_autograd_on_transformers(name: str) -> None:
    plain, bridge = bridged(name)
    model, ids = seen(bridge), families.tokens(3, 10)
    for target in ("argmax_probability", "argmax_log_probability"):
        found = influence(model, load_tokens(ids, model, batch_size=2), target=target)
        want = torch.stack([gradient(plain, row, "log" in target) for row in ids])
        assert float(want.sum()) > 0
        torch.testing.assert_close(found.per_document, want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.profile, want.mean(0) / want.mean(0).sum(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama_grouped", "gemma3", "gpt_oss"])
def test_padding_changes_nothing(name: str) -> None:
    plain, bridge = bridged(name)
    model = seen(bridge)
    rows = [families.tokens(1, n, seed=n)[0] for n in (7, 10, 9)]
    for left in (True, False):
        ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.bool)
        for i, row in enumerate(rows):
            where = slice(11 - len(row), 11) if left else slice(0, len(row))
            ids[i, where], mask[i, where] = row, True
        found = influence(model, load_tokens(ids, model, mask=mask))
        for i, row in enumerate(rows):
            want = gradient(plain, row, False)
            torch.testing.assert_close(found.per_document[i, : len(row)], want, atol=1e-5, rtol=1e-3)
            assert bool(found.per_document[i, len(row) :].isnan().all())
