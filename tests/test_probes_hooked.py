"""The probes on `HookedTransformer` equal what its own cache holds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from posattn.probes.kernel import KernelProbe
from posattn.probes.measure import measurement
from posattn.probes.mixing import MixingProbe
from posattn.probes.session import attach, from_cache
from tests.test_probes import _assert_same

pytestmark = pytest.mark.hooked
transformer_lens = pytest.importorskip("transformer_lens")
POSITIONS = ["standard", "rotary", "alibi", "shortformer"]


def hooked(positions: str) -> Any:
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
    except ImportError:
        pytest.skip("this transformer-lens has no HookedTransformer")
    config = HookedTransformerConfig(
        n_layers=3,
        d_model=16,
        n_ctx=32,
        d_head=4,
        n_heads=4,
        d_mlp=24,
        d_vocab=50,
        act_fn="gelu",
        positional_embedding_type=positions,
        rotary_dim=4 if positions == "rotary" else None,
        seed=0,
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return HookedTransformer(config)


@pytest.mark.parametrize("positions", POSITIONS)
def test_probes_equal_the_models_own_cache(positions: str) -> None:
    model = hooked(positions)
    ids = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attach(model, MixingProbe(), KernelProbe()) as session:
        _, cache = model.run_with_cache(ids)
    result = measurement(session)
    x = torch.stack([cache[f"blocks.{t}.hook_resid_pre"] for t in range(3)], 1).double()
    a = torch.stack([cache[f"blocks.{t}.hook_attn_out"] for t in range(3)], 1).double()
    position = a.norm(dim=-1) / (x.norm(dim=-1) + a.norm(dim=-1))
    size_x, size_a = x.flatten(2).norm(dim=-1), a.flatten(2).norm(dim=-1)
    pattern = torch.stack([cache[f"blocks.{t}.attn.hook_pattern"] for t in range(3)], 1).double().mean((0, 2))
    assert float(size_a.min()) > 0
    torch.testing.assert_close(result.mixing.token, position.mean((0, 2)), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.per_position, position.mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.frobenius, (size_a / (size_x + size_a)).mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.kernels.double(), pattern, atol=1e-6, rtol=0)
    _assert_same(measurement(from_cache(cache, model)), result)
    assert not any(len(point.fwd_hooks) for point in model.hook_dict.values())
