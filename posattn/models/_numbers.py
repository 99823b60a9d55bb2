"""A model whose logits are no numbers: where that comes from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posattn.errors import UnsupportedModelError


def refuse_no_numbers(logits: Tensor, module: nn.Module, name: str) -> None:
    """Refuse logits that are NaN or infinite.

    Raises:
        UnsupportedModelError: they are; the message names the first parameter that is to blame, if one is.
    """
    if not bool(torch.isfinite(logits).all()):
        raise UnsupportedModelError(f"{name}: its logits are not numbers (NaN or infinite){unsound(module)}")


def unsound(module: nn.Module) -> str:
    """Where a model holds what is no number, as the end of a message; nothing where its weights are sound."""
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            what = "NaN" if bool(torch.isnan(parameter).any()) else "infinity"
            return f": {name} holds {what}, so its checkpoint is damaged; save or download it again"
    narrow = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in module.parameters())
    return ", although its weights are numbers" + (": they may overflow; try --dtype float32" if narrow else "")
