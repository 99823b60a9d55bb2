"""A stack of layers, dense or structured, as operators: what the theory needs of a kernel and no more.

Short ones of structured kernels are made dense once: faster to apply thousands of times.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.rollout.dense import check_kernels, check_mixing, is_causal
from posattn.rollout.kernels import Applied, StructuredKernel
from posattn.rollout.simulate import Architecture, resolve
from posattn.rollout.structured import quick_dense

#: positions up to which a dense kernel is applied faster: beyond, it fits in no cache
DENSE_LENGTH = 1024
#: weights of all layers up to which they are made dense
DENSE_UP_TO = 1 << 24


class Layers:
    """λ_1 ... λ_T and A(1) ... A(T) at one length, in float64."""

    def __init__(self, mixing: Tensor, kernels: Any, length: int | None) -> None:
        self.mixing = mixing
        self.count = len(mixing)
        self._parts: list[Tensor | Applied]
        if isinstance(kernels, Tensor):
            if kernels.ndim == 2:
                kernels = kernels[None]
            if kernels.ndim != 3 or kernels.shape[-1] != kernels.shape[-2]:
                raise InputError(f"kernels must be [T, N, N] here, not {list(kernels.shape)}")
            if length is not None and length != kernels.shape[-1]:
                raise InputError(f"length={length}, but the kernels have {kernels.shape[-1]} positions")
            check_kernels(kernels)
            self.length = kernels.shape[-1]
            self.causal = is_causal(kernels)
            exact = kernels.double()
            self._parts = list(exact / exact.sum(-1, keepdim=True))
        else:
            if length is None:
                raise InputError("structured kernels have no length of their own: pass length=N")
            items = [kernels] if isinstance(kernels, StructuredKernel) else list(kernels)
            if len(items) == 1 and items[0].batch_shape:
                items = [items[0].layer(t) for t in range(items[0].batch_shape[-1])]
            if any(item.batch_shape for item in items):
                raise InputError("one stack of layers at a time: a kernel has batch dimensions beyond the layers")
            self.length = length
            self.causal = all(not item.full and item.prefix <= 1 for item in items)
            ready = [item.at(length) for item in items]
            small = length <= DENSE_LENGTH and len(items) * length**2 <= DENSE_UP_TO
            self._parts = [quick_dense(i, length) if small else r for i, r in zip(items, ready, strict=True)]
        if len(self._parts) not in (1, self.count):
            raise InputError(f"mixing has {self.count} layers, the kernels have {len(self._parts)}")

    @property
    def shared(self) -> bool:
        """Whether all layers have the same kernel."""
        return len(self._parts) == 1

    def _part(self, layer: int) -> Tensor | Applied:
        return self._parts[0 if self.shared else layer]

    def left(self, layer: int, p: Float[Tensor, "*q n"]) -> Float[Tensor, "*q n"]:
        """p A of a layer (counted from 0), for one row or several."""
        part = self._part(layer)
        return p @ part if isinstance(part, Tensor) else part.left(p)

    def right(self, layer: int, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """A x of a layer."""
        part = self._part(layer)
        return part @ x if isinstance(part, Tensor) else part.right(x)

    def step(self, layer: int, weight: float, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """R x = (1-λ) x + λ A x."""
        return (1 - weight) * x + weight * self.right(layer, x)

    def diagonal(self, layer: int) -> Float[Tensor, " n"]:
        """A_ii of a layer."""
        return self._part(layer).diagonal()

    def column(self, layer: int, source: int) -> Float[Tensor, " n"]:
        """A_ij of a layer for one source j and all targets i."""
        part = self._part(layer)
        if isinstance(part, Tensor):
            return part[:, source]
        return part.entries(torch.arange(self.length, device=part.device), torch.tensor(source))

    def to_first(self, layer: int, count: int) -> Float[Tensor, " n"]:
        """The weight that each target puts on the first `count` positions."""
        if count == 1:
            return self.column(layer, 0)
        chosen = torch.zeros(self.length, dtype=torch.float64)
        chosen[:count] = 1.0
        return self.right(layer, chosen)


def layers_from(system: Any, length: int | None = None, convention: str = "own") -> Layers:
    """Layers of an architecture, a preset's name, or a pair (mixing, kernels).

    Raises:
        InputError: something else, or parts that do not fit each other.
    """
    if isinstance(system, str | Architecture):
        architecture = resolve(system, convention=convention)
        return Layers(architecture.schedule(), architecture.kernels(), length)
    if isinstance(system, tuple) and len(system) == 2:
        mixing, kernels = system
        layers = kernels.shape[-3] if isinstance(kernels, Tensor) and kernels.ndim == 3 else None
        if layers == 1:
            layers = None
        weights = check_mixing(mixing, layers).double()
        if weights.ndim != 1:
            raise InputError("mixing must be a list over layers here")
        return Layers(weights.detach(), kernels.detach() if isinstance(kernels, Tensor) else kernels, length)
    raise InputError("pass an Architecture, the name of a preset, or a pair (mixing, kernels)")
