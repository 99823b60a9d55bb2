"""What an architecture alone predicts: from layers, heads, mask, position and mixing to an influence profile.

An `Architecture` is turned into structured kernels and a schedule λ_1 ... λ_T, and these are rolled out; no model is
loaded and no N x N matrix is held for long contexts. Presets describe five published ALiBi models with λ measured on
three data sets (arXiv 2602.16837); each has the slopes that the model's own code uses:

* BLOOM and Falcon, H heads, P the largest power of 2 up to H: 2^(-8h/P) for h = 1..P, then the odd steps of twice that
  fineness, 2^(-4/P), 2^(-12/P), ..., for the other H-P heads;
* MPT, P the smallest power of 2 from H up: 2^(-8h/P), every second one first, then the rest, cut off at H;
* Falcon adds its positions before it divides by √d_k, so that its slopes act as m_h/√d_k.

`convention="published"` is what the paper's figures were made with: 2^(-8h/H) for any H and any model, and no 1/√d_k,
neither in Falcon's positions nor in the content term β.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.rollout.dense import Rollout, check_mixing
from posattn.rollout.kernels import StructuredKernel, alibi_kernel, distance_kernel, uniform_kernel
from posattn.rollout.structured import rollout_structured

CONVENTIONS = ("own", "published")
DATA_SETS = ("fineweb-edu", "dclm", "wikipedia")

#: what the published configurations leave out: slope rule, d_k, whether positions are divided by √d_k
_FAMILIES: dict[str, tuple[str, int, bool]] = {
    "falcon-rw-7b": ("bloom", 64, True),
    "mpt-7b": ("mpt", 128, False),
    "mpt-30b": ("mpt", 112, False),
    "bloom-7b1": ("bloom", 128, False),
    "bloom-176b": ("bloom", 128, False),
}


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """The mixing schedule λ_t = c t^-exponent for t = 1, 2, ..., cut off at 1."""

    c: float
    exponent: float

    def __post_init__(self) -> None:
        if not (self.c >= 0 and math.isfinite(self.c) and math.isfinite(self.exponent)):
            raise InputError(f"a power law needs finite numbers and c ≥ 0, not c={self.c}, exponent={self.exponent}")

    def values(self, layers: int, first: int = 1) -> Float[Tensor, " layers"]:
        """λ_first, ..., λ_(first+layers-1), float64."""
        steps = torch.arange(first, first + layers, dtype=torch.float64)
        return (self.c * steps**-self.exponent).clamp(max=1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Architecture:
    """All that the theory needs to know of a transformer.

    Attributes:
        layers, heads: T and H.
        mixing: λ: one number, a list or tensor [T] (measured, for example), or a `PowerLaw`.
        mask: "causal" or "full".
        window: visible keys backwards, the query's own included; one for all layers, or a list with None for no window.
        prefix: the first positions see each other in both directions.
        position: "none", "alibi" (see `slopes`) or "distance" (see `scores`).
        slopes: "bloom", "mpt", "published", or the slopes themselves [H] or [T, H].
        scores: score by distance [H, L] or [T, H, L].
        diagonal: content β, one number, [H] or [T, H]: mean diagonal minus mean strictly lower content logit, scaled by
            1/√d_k as in the model.
        constant: content that is equal for all keys; it cancels in the softmax and is kept for the record.
        weights: of the heads in the mean kernel, [H]; equal by default.
        head_dim: d_k, needed where the scale matters.
        scaled_position: the position score is divided by √d_k too (Falcon).
        name: shown in results.

    Raises:
        InputError: anything that no transformer can have; one line each.
    """

    layers: int
    heads: int
    mixing: Any = 0.5
    mask: str = "causal"
    window: Any = None
    prefix: int = 0
    position: str = "none"
    slopes: Any = "published"
    scores: Any = None
    diagonal: Any = None
    constant: float = 0.0
    weights: Any = None
    head_dim: int | None = None
    scaled_position: bool = False
    name: str = "architecture"

    def __post_init__(self) -> None:
        if self.layers < 1 or self.heads < 1:
            raise InputError(f"an architecture needs layers and heads, not {self.layers} and {self.heads}")
        if self.mask not in ("causal", "full"):
            raise InputError(f"mask must be 'causal' or 'full', not {self.mask!r}")
        if self.position not in ("none", "alibi", "distance"):
            raise InputError(f"position must be 'none', 'alibi' or 'distance', not {self.position!r}")
        if self.position == "distance" and self.scores is None:
            raise InputError("position='distance' needs scores by distance")
        if self.scaled_position and self.head_dim is None:
            raise InputError("scaled positions need head_dim, the d_k of the model")
        if self.head_dim is not None and self.head_dim < 1:
            raise InputError(f"head_dim must be at least 1, not {self.head_dim}")
        if not math.isfinite(self.constant):
            raise InputError("constant content must be finite")
        if self._windows_vary() and len(self.window) != self.layers:
            raise InputError(f"{len(self.window)} windows for {self.layers} layers")
        self.schedule()
        self.kernels()

    def schedule(self) -> Float[Tensor, " layers"]:
        """λ_1 ... λ_T, float64."""
        if isinstance(self.mixing, PowerLaw):
            return self.mixing.values(self.layers)
        values = check_mixing(self.mixing, None if _is_list(self.mixing) else self.layers).double()
        if values.ndim != 1:
            raise InputError(f"mixing must be one number or a list over layers, not of shape {list(values.shape)}")
        if len(values) != self.layers:
            raise InputError(f"mixing has {len(values)} values for {self.layers} layers")
        return values

    def effective_slopes(self) -> Float[Tensor, "*layers heads"]:
        """ALiBi slopes as they act in the softmax: by rule or as given, divided by √d_k where the model does."""
        if isinstance(self.slopes, str):
            values = alibi_slopes(self.slopes, self.heads)
        else:
            values = self.slopes if isinstance(self.slopes, Tensor) else torch.tensor(self.slopes, dtype=torch.float64)
        return values / math.sqrt(self.head_dim) if self.scaled_position and self.head_dim else values

    def kernels(self) -> StructuredKernel | list[StructuredKernel]:
        """One structured kernel for all layers (with layers as a batch dimension where they differ), or one a layer."""
        if self._windows_vary():
            made = [self._kernel(window) for window in self.window]
            return [kernel.layer(t) for t, kernel in enumerate(made)]
        return self._kernel(self.window)

    def _windows_vary(self) -> bool:
        return isinstance(self.window, Sequence)

    def _kernel(self, window: int | None) -> StructuredKernel:
        options: dict[str, Any] = {
            "window": window,
            "prefix": self.prefix,
            "full": self.mask == "full",
            "diagonal": self.diagonal,
            "weights": self.weights,
        }
        if self.position == "alibi":
            kernel = alibi_kernel(self.effective_slopes(), heads=self.heads, **options)
        elif self.position == "distance":
            kernel = distance_kernel(self.scores, **options)
            if kernel.heads != self.heads:
                raise InputError(f"distance scores are for {kernel.heads} heads, the architecture has {self.heads}")
        else:
            kernel = uniform_kernel(heads=self.heads, **options)
        if len(kernel.batch_shape) > 1 or (kernel.batch_shape and kernel.batch_shape[0] not in (1, self.layers)):
            raise InputError(f"parameters of shape {list(kernel.batch_shape)} + heads for {self.layers} layers")
        return kernel

    def describe(self) -> dict[str, Any]:
        """The architecture in JSON values, for provenance."""

        def plain(value: Any) -> Any:
            if isinstance(value, PowerLaw):
                return dataclasses.asdict(value)
            if hasattr(value, "tolist"):
                return value.tolist() if _count(value) <= 4096 else f"({_count(value)} values)"
            return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def simulate(
    architecture: Architecture | str,
    length: int,
    queries: str | int | Sequence[int] | Tensor = "last",
    *,
    convention: str = "own",
    mixing: Any = None,
    depth: str = "final",
    impl: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Rollout:
    """The influence profile that an architecture implies at a length.

    Args:
        architecture: an `Architecture`, or a preset such as "bloom-176b" or "bloom-176b/wikipedia".
        length: N; a million is fine.
        queries, depth, impl, dtype: as in `rollout`; impl "auto" or "structured".
        convention: "own", the model as it computes, or "published", as the figures of arXiv 2602.16837 were made.
        mixing: λ to use instead of the architecture's: 1 for attention only, 0.5 for half, a list, or a `PowerLaw`.

    Raises:
        InputError: an unknown preset or convention, a length below 1, and whatever the architecture refuses.
    """
    chosen = resolve(architecture, convention=convention, mixing=mixing)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError(f"length must be a whole number of at least 1, not {length!r}")
    if impl not in ("auto", "structured"):
        raise InputError(f"simulate works on structured kernels: impl is 'auto' or 'structured', not {impl!r}")
    kernels = chosen.kernels()
    if device is not None:
        kernels = kernels.to(device) if isinstance(kernels, StructuredKernel) else [k.to(device) for k in kernels]
    result = rollout_structured(chosen.schedule(), kernels, length, queries, impl=impl, depth=depth, dtype=dtype)
    facts = {**result.provenance, "architecture": chosen.describe(), "convention": convention}
    return dataclasses.replace(result, provenance=facts)


def resolve(architecture: Architecture | str, *, convention: str = "own", mixing: Any = None) -> Architecture:
    """An architecture from itself or a preset's name, in a convention and with another λ if wanted.

    Raises:
        InputError: an unknown preset or convention.
    """
    if convention not in CONVENTIONS:
        raise InputError(f"unknown convention {convention!r}: choose from {', '.join(CONVENTIONS)}")
    chosen = preset(architecture) if isinstance(architecture, str) else architecture
    if not isinstance(chosen, Architecture):
        raise InputError(f"an architecture or the name of a preset is needed, not {type(chosen).__name__}")
    if convention == "published":
        changes: dict[str, Any] = {"slopes": "published", "scaled_position": False}
        if chosen.diagonal is not None and chosen.head_dim is not None:  # logits before they are divided by √d_k
            changes["diagonal"] = torch.as_tensor(chosen.diagonal, dtype=torch.float64) * math.sqrt(chosen.head_dim)
        chosen = dataclasses.replace(chosen, **changes)
    return chosen if mixing is None else dataclasses.replace(chosen, mixing=mixing)


def alibi_slopes(rule: str, heads: int) -> Float[Tensor, " heads"]:
    """ALiBi slopes m_h [H] by a model's rule: "bloom", "mpt" or "published" (see the module docstring).

    Raises:
        InputError: an unknown rule, or no heads.
    """
    if heads < 1:
        raise InputError(f"heads must be at least 1, not {heads}")
    if rule == "published":
        return 2 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    if rule == "bloom":
        power = 1 << (heads.bit_length() - 1)
        base = 2 ** (-8 * torch.arange(1, power + 1, dtype=torch.float64) / power)
        more = 2 ** (-4 * (2 * torch.arange(heads - power, dtype=torch.float64) + 1) / power)
        return torch.cat([base, more])
    if rule == "mpt":
        power = 1 << (heads - 1).bit_length()
        base = 2 ** (-8 * torch.arange(1, power + 1, dtype=torch.float64) / power)
        return base if power == heads else torch.cat([base[1::2], base[::2]])[:heads]
    raise InputError(f"unknown slope rule {rule!r}: choose from bloom, mpt, published")


@functools.cache
def _published() -> dict[str, Any]:
    text = resources.files("posattn.rollout").joinpath("presets/published_mixing.json").read_text(encoding="utf-8")
    return json.loads(text)["models"]


def published_influence() -> Float[Tensor, " n"]:
    """The measured influence of bloom-176b on fineweb-edu, [256]: gradients at the last position, summing to 1.

    Digitised from the vector figure of arXiv 2602.16837; the only measured curve of a preset that is public.
    """
    text = resources.files("posattn.rollout").joinpath("presets/published_influence.json").read_text(encoding="utf-8")
    curve = torch.tensor(json.loads(text)["influence"], dtype=torch.float64)
    return curve / curve.sum()


def presets() -> list[str]:
    """The names that `preset` knows: "model/data set"."""
    return [f"{model}/{data}" for model, entry in _published().items() for data in entry["mixing"]]


def preset(name: str) -> Architecture:
    """A published model: "bloom-176b" (λ on fineweb-edu) or "bloom-176b/wikipedia".

    Raises:
        InputError: an unknown model or data set.
    """
    model, _, data = name.partition("/")
    models = _published()
    if model not in models:
        raise InputError(f"unknown preset {name!r}: choose from {', '.join(models)}")
    data = data or DATA_SETS[0]
    if data not in models[model]["mixing"]:
        raise InputError(f"unknown data set {data!r}: choose from {', '.join(models[model]['mixing'])}")
    rule, head_dim, scaled = _FAMILIES[model]
    return Architecture(
        layers=models[model]["layers"],
        heads=models[model]["heads"],
        mixing=tuple(models[model]["mixing"][data]),
        position="alibi",
        slopes=rule,
        head_dim=head_dim,
        scaled_position=scaled,
        name=f"{model}/{data}",
    )


def _is_list(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0 or isinstance(value, Sequence)


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else int(getattr(value, "size", 1))
