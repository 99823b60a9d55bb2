"""A transformers model as it is, seen as a `Model`, with its fast attention in use.

Nothing is wrapped. The residual stream and what attention and MLP add to it are read from the modules that receive and
produce them; q, k, v and z pass through the ports that `_attention.py` puts into transformers' attention interface, and
only while somebody observes them. Which module is which is not looked up by name but found once, from a short forward
pass:

* the layers' attention modules are those that call the attention interface;
* what attention adds is its module's output, or that of the norm which is given this very tensor;
* what the MLP adds is the output of the last part of the block to run;
* a block is parallel when its MLP's output does not change while its attention gives zeros.

The result must satisfy resid_pre + attn_out + mlp_out = resid_post in every layer and give the model's own logits, or
the model is refused.

The interface hands over queries and keys after their rotation. Points `q` and `k` turn them back with the position
scheme; `q_rot`, `k_rot` are as they come. That the scheme is the model's own is therefore verified in another way,
`PlainModel.rotation_error`: when every position of the stream is made the same vector, queries and keys that are turned
back must not depend on their position.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posattn.errors import HookError, InputError, PosattnError, UnsupportedModelError
from posattn.models._attention import Ports, ports_of, through_ports
from posattn.models._numbers import refuse_no_numbers
from posattn.models._reading import scheme_of, text_config
from posattn.models._taps import PassWatch, Tap, TappedModel, batch_of, check_pattern, scaled_by, whole_stream
from posattn.models.base import Batch, Intervention, LayerInfo, Observer, OutputMap, Point, PositionScheme
from posattn.models.bridge import _context, _weight_and_bias, probe_norm
from posattn.models.positions import real_positions, rotate

#: points that exist only inside the attention function
PORTED = frozenset({"q", "k", "v", "z", "pattern", "q_rot", "k_rot", "lse"})
_PROBE_LENGTH = 8
#: what the block's parts may miss of its output, relative to their norms, by dtype
_RESIDUAL = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class PlainModel(TappedModel):
    """A transformers causal language model, not wrapped; see the module docstring.

    Raises:
        UnsupportedModelError: the model does not use the attention interface, has a layer without attention, or is
            built in a way that this adapter does not understand.
    """

    def __init__(self, hf_model: Any, *, name: str | None = None, revision: str | None = None, tokenizer: Any = None):
        self.module = self._hf = hf_model
        self._config = text_config(hf_model.config)
        self.name = str(name or getattr(hf_model.config, "_name_or_path", None) or type(hf_model).__name__)
        self.revision = revision or getattr(hf_model.config, "_commit_hash", None)
        self.family = type(hf_model).__name__
        self.adapter = "plain"
        self.attention = getattr(self._config, "_attn_implementation", None) or "eager"
        self.processing = {"attention": self.attention}
        self.tokenizer = tokenizer
        self.vocab_size = int(self._config.vocab_size)
        self.context = _context(self._config)
        self._schemes: dict[tuple[int, int], PositionScheme] = {}
        self._length: tuple[Tensor, int] | None = None
        self._parts = _find_parts(self)
        self.d_model = self._parts[0].d_model
        parallel = _is_parallel(self)
        self.layers = tuple(
            LayerInfo(t, part.call.heads, part.call.key_heads, part.call.width, parallel)
            for t, part in enumerate(self._parts)
        )

    # ------------------------------------------------------------------------------------------------------ running it

    @property
    def device(self) -> torch.device:
        return home(self._hf)

    @property
    def dtype(self) -> torch.dtype:
        return next(self._hf.parameters()).dtype

    def __call__(
        self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        return self._forward(mask, input_ids=tokens)

    def run(self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None) -> None:
        """A forward pass for its hooks alone: no logits but the last position's, which matters at great lengths."""
        last = {"logits_to_keep": 1} if "logits_to_keep" in self._accepts else {}
        self._forward(mask, input_ids=tokens, **last)

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self._hf.get_input_embeddings()(tokens.to(self.device))

    def from_embeddings(
        self, embeddings: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        return self._forward(mask, inputs_embeds=embeddings)

    def _forward(self, mask: Tensor | None, **given: Any) -> Tensor:
        key = next(iter(given))
        given[key] = given[key].to(self.device)
        shape = given[key].shape[:2]
        if self.context is not None and shape[1] > self.context:
            raise InputError(
                f"{shape[1]} tokens are more than {self.name} takes ({self.context}): use a shorter length"
            )
        keywords: dict[str, Any] = {}
        if mask is not None:
            if mask.shape != shape:
                raise InputError(f"mask {tuple(mask.shape)} does not fit tokens {tuple(shape)}")
            mask = mask.to(self.device)
            if not bool(mask.all()):
                keywords["attention_mask"] = mask.long()
                if "position_ids" in self._accepts:
                    keywords["position_ids"] = real_positions(mask)
        return self._hf(**given, **keywords, use_cache=False).logits

    @cached_property
    def _accepts(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._hf.forward).parameters)

    # -------------------------------------------------------------------------------------------------- what it is like

    def scheme(self, layer: int, length: int) -> PositionScheme:
        if length < 1:
            raise InputError(f"a position scheme needs a length of at least 1, got {length}")
        part = self._parts[self._chosen([layer])[0]]
        with loaded(part.attention):
            return scheme_of(self._hf, part.attention, layer, length, part.call.width, sinusoidal=False)

    def output_map(self, layer: int) -> OutputMap:
        layer = self._chosen([layer])[0]
        part, info = self._parts[layer], self.layers[layer]
        with loaded(part.projection):
            weight, bias = _weight_and_bias(part.projection)
        shaped = weight.reshape(info.n_heads, part.call.value_width, -1)
        if part.norm is None:
            return OutputMap(shaped, bias, part.multiplier)
        with loaded(part.norm):
            norm_weight, norm_bias, centres = probe_norm(part.norm, weight.shape[-1], weight)
        return OutputMap(shaped, bias, part.multiplier, norm_weight, norm_bias, centres)

    def _scheme_here(self, layer: int, batch: Batch) -> PositionScheme:
        """The scheme of the pass that is running. Tables that follow the length are read anew each time."""
        if self._length is None or self._length[0] is not batch.mask:
            self._length = (batch.mask, int(batch.mask.sum(-1).max()))
        length = self._length[1]
        if self._follows_length:
            return self.scheme(layer, length)
        if (layer, length) not in self._schemes:
            if len(self._schemes) > 4 * len(self._parts):
                self._schemes.clear()
            self._schemes[layer, length] = self.scheme(layer, length)
        return self._schemes[layer, length]

    @cached_property
    def _follows_length(self) -> bool:
        rope = getattr(self._config, "rope_parameters", None) or getattr(self._config, "rope_scaling", None) or {}
        kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))] if isinstance(rope, dict) else []
        return any(kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope") for kind in kinds)

    # ----------------------------------------------------------------------------------------------------------- hooks

    @contextmanager
    def observe(
        self, points: Iterable[Point], observer: Observer, layers: Iterable[int] | None = None
    ) -> Iterator[None]:
        wanted = tuple(points)
        ported = bool(PORTED & set(wanted))
        with through_ports(self._hf) if ported else contextlib.nullcontext(), super().observe(wanted, observer, layers):
            yield

    @contextmanager
    def intervene(
        self,
        point: Literal["z", "q", "k", "attn_in", "resid_pre"],
        change: Intervention,
        layers: Iterable[int] | None = None,
    ) -> Iterator[None]:
        ported = point in PORTED
        with through_ports(self._hf) if ported else contextlib.nullcontext(), super().intervene(point, change, layers):
            yield

    def _tap(self, point: Point, layer: int) -> Tap | None:
        part = self._parts[layer]
        match point:
            case "resid_pre":
                return Tap(part.block, read=whole_stream, arguments=("hidden_states",))
            case "resid_post":
                return Tap(part.block, read=whole_stream)
            case "attn_in":
                return Tap(part.attention, read=whole_stream, arguments=("hidden_states",))
            case "attn_out":
                return Tap(part.attention_source, read=scaled_by(part.multiplier))
            case "mlp_out":
                return Tap(part.mlp_source, read=scaled_by(part.multiplier))
            case "post_scale":
                return None if part.norm is None else Tap(part.norm, read=_norm_scale(part.norm), arguments=("x",))
            case "q" | "k":
                back, forth = self._turned(point, layer)
                return Tap(getattr(part.ports, point), read=back, write=forth)
            case "q_rot":
                factor = self._query_factor(layer)
                scaled = _heads_second if factor == 1 else lambda raw, batch: _heads_second(raw, batch) * factor
                return Tap(part.ports.q, read=scaled)
            case "k_rot":
                return Tap(part.ports.k, read=_heads_second)
            case "v":
                return Tap(part.ports.v, read=_heads_second)
            case "z":
                return Tap(part.ports.z, read=_by_head)
            case "pattern":
                return Tap(part.ports.pattern, read=check_pattern)
            case "lse":
                return Tap(part.ports.lse, read=_normalisers)
        raise InputError(f"unknown point {point!r}")

    def _query_factor(self, layer: int) -> float:
        """Some models (OPT) scale their queries before they hand them over; points are scaled by the scheme alone."""
        part = self._parts[layer]
        factor = part.call.scale / self.scheme(layer, 1).scale
        return 1.0 if abs(factor - 1) < 1e-6 else factor

    def _turned(self, point: str, layer: int) -> tuple[Callable[[Tensor, Batch], Tensor], Callable[..., Tensor]]:
        factor = self._query_factor(layer) if point == "q" else 1.0
        seen: list[Batch] = []

        def back(raw: Tensor, batch: Batch) -> Tensor:
            seen[:] = [batch]
            x = _heads_second(raw, batch)
            rotary = self._scheme_here(layer, batch).rotary
            if rotary is not None:
                positions = real_positions(batch.mask)[..., None]
                x = rotate(x, rotary, positions, inverse=True)
                size = (rotary.cos[0].square() + rotary.sin[0].square()).to(x)  # the attention factor, squared
                size = torch.cat((size, size)) if not rotary.interleaved else size.repeat_interleave(2)
                x = torch.cat((x[..., : rotary.width] / size, x[..., rotary.width :]), -1)
            return x * factor if factor != 1 else x

        def forth(value: Tensor, raw: Tensor) -> Tensor:
            batch = seen[0]
            rotary = self._scheme_here(layer, batch).rotary
            value = value / factor if factor != 1 else value
            if rotary is not None:
                value = rotate(value, rotary, real_positions(batch.mask)[..., None])
            return value.transpose(1, 2).to(raw.dtype)

        return back, forth

    def _watch(self, watch: PassWatch, handles: list[Any]) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tokens = keywords.get("input_ids", args[0] if args else None)
            cache = keywords.get("past_key_values")
            if cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0:
                raise HookError(f"{self.name} was called with cached keys: only whole sequences can be measured")
            mask = keywords.get("attention_mask", args[1] if len(args) > 1 else None)
            watch.begin(batch_of(self.name, tokens, keywords.get("inputs_embeds"), mask))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch.end()

        handles.append(self._hf.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(self._hf.register_forward_hook(after))

    # ----------------------------------------------------------------------------------------------------------- checks

    @torch.no_grad()
    def rotation_error(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, " t"]:
        """How far each layer's turned-back queries and keys depend on position when the stream does not.

        The stream before every block is replaced by its first position's; the figure is the largest distance of a query
        or key from that of the first position, relative to the largest of its kind. Rounding alone where the scheme is
        the model's own.
        """
        found = torch.zeros(self.n_layers)

        def constant(layer: int, x: Tensor, batch: Batch) -> Tensor:
            return x[:, :1].expand_as(x)

        def observe(layer: int, points: Any, batch: Batch) -> None:
            for value in points.values():
                size = value.norm(dim=-1).amax().clamp_min(1e-12)
                found[layer] = max(float(found[layer]), float((value - value[:, :1]).norm(dim=-1).amax() / size))

        with self.intervene("resid_pre", constant), self.observe(("q", "k"), observe):
            self.run(tokens)
        return found


# ---------------------------------------------------------------------------------------------------- finding the parts


class _Part:
    """The modules of one layer, as the probing pass found them."""

    block: nn.Module
    attention: nn.Module
    attention_source: nn.Module
    norm: nn.Module | None
    projection: nn.Module
    mlp_source: nn.Module
    ports: Ports
    multiplier: float
    d_model: int

    @property
    def call(self) -> Any:
        return self.ports.call


def _find_parts(model: PlainModel) -> list[_Part]:
    hf = model._hf
    candidates = {
        name: module
        for name, module in hf.named_modules()
        if any(word in type(module).__name__.lower() for word in ("attention", "attn"))
    }
    for module in candidates.values():
        ports_of(module).call = None
    size = min(_PROBE_LENGTH, model.context or _PROBE_LENGTH)
    tokens = torch.randint(0, model.vocab_size, (1, size), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens)
        refuse_no_numbers(before, model._hf, model.name)
        trouble = ""
        try:
            with through_ports(hf):
                model(tokens)
        except PosattnError:
            raise
        except Exception as error:  # code that knows only its own implementations fails in its own way
            trouble = f" ({type(error).__name__}: {error})"
    found = {name: module for name, module in candidates.items() if ports_of(module).call is not None}
    if not found or trouble:
        raise UnsupportedModelError(
            f"{model.name}: {model.family} does not use transformers' attention interface{trouble}: use the bridge "
            'instead (adapter="bridge")'
        )
    parts = []
    for name, attention in found.items():
        part = _Part()
        part.attention, part.ports = attention, ports_of(attention)
        if part.call.value_width != part.call.width:
            raise UnsupportedModelError(
                f"{model.name}: {name} has queries of width {part.call.width} but values of width "
                f"{part.call.value_width} (latent attention): not supported by the plain adapter"
            )
        path = name.split(".")
        depth = next((i for i, step in enumerate(path) if step.isdigit()), None)
        if depth is None:
            raise UnsupportedModelError(f"{model.name}: {name} is not inside a numbered stack of blocks")
        part.block = hf.get_submodule(".".join(path[: depth + 1]))
        parts.append(part)
    stack = hf.get_submodule(".".join(path[:depth]))
    blocks = [part.block for part in parts]
    for t, block in enumerate(stack):  # type: ignore[arg-type]
        if sum(block is other for other in blocks) != 1:
            raise UnsupportedModelError(
                f"layer {t} of {model.name} has no attention, or more than one, through transformers' attention "
                "interface: there is nothing to measure in it"
            )
    _trace(model, parts, tokens, before)
    return parts


@torch.no_grad()
def _trace(model: PlainModel, parts: list[_Part], tokens: Tensor, before: Tensor) -> None:
    """One pass in which every part of every block says what it was given and what it made of it."""
    calls: list[list[tuple[nn.Module, Tensor | None, Tensor]]] = [[] for _ in parts]
    ends: list[dict[str, Tensor]] = [{} for _ in parts]
    handles = []

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    for t, part in enumerate(parts):

        def enter(module: nn.Module, args: Any, keywords: Any, t: int = t) -> None:
            ends[t]["in"] = keywords.get("hidden_states", args[0] if args else None).clone()

        def leave(module: nn.Module, args: Any, output: Any, t: int = t) -> None:
            ends[t]["out"] = first(output).clone()

        def note(module: nn.Module, args: Any, keywords: Any, output: Any, t: int = t) -> None:
            given = args[0] if args else keywords.get("hidden_states")
            if isinstance(made := first(output), Tensor):
                calls[t].append((module, given if isinstance(given, Tensor) else None, made))

        handles.append(part.block.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.block.register_forward_hook(leave))
        for child in [*part.block.children(), *part.attention.children()]:
            handles.append(child.register_forward_hook(note, with_kwargs=True))
    try:
        with through_ports(model._hf):
            after = model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    tolerance = _RESIDUAL.get(model.dtype, 1e-4)
    difference = float((after.float() - before.float()).abs().max() / before.float().std().clamp_min(1e-12))
    if not difference <= tolerance * 10:
        raise UnsupportedModelError(
            f"{model.name}: through the attention interface {model.family} gives other logits (by {difference:.2g} of "
            'their spread): use the bridge instead (adapter="bridge")'
        )
    for t, part in enumerate(parts):
        _assign(model, t, part, calls[t], ends[t], tolerance)


def _assign(
    model: PlainModel,
    t: int,
    part: _Part,
    calls: list[tuple[nn.Module, Tensor | None, Tensor]],
    ends: dict[str, Tensor],
    tolerance: float,
) -> None:
    where = f"layer {t} of {model.name} ({model.family})"
    inside = set(map(id, part.attention.children()))
    linear = [(m, made) for m, _, made in calls if id(m) in inside and getattr(m, "weight", None) is not None]
    linear = [(m, made) for m, made in linear if getattr(m.weight, "ndim", 0) == 2]
    outer = [call for call in calls if id(call[0]) not in inside and not isinstance(call[0], (nn.Dropout, nn.Identity))]
    attention = next((call for call in outer if call[0] is part.attention), None)
    if attention is None or not linear:
        raise UnsupportedModelError(f"{where}: its attention is not a direct part of the block: not supported")
    part.projection = linear[-1][0]
    made = attention[2]
    part.attention_source, part.norm = part.attention, None
    for module, given, output in outer:
        # the norm that a block applies to the attention's output gets that very tensor
        if module is not part.attention and given is not None and given.data_ptr() == made.data_ptr():
            part.attention_source = part.norm = module
            made = output
            break
    part.mlp_source, _, added = outer[-1]
    if part.mlp_source is part.attention_source:
        raise UnsupportedModelError(f"{where}: no MLP runs after its attention: not supported")
    part.multiplier = float(getattr(part.block, "residual_multiplier", 1.0))
    x, out = ends["in"].double(), ends["out"].double()
    part.d_model = x.shape[-1]
    a, m = (part.multiplier * y.double().reshape(x.shape) for y in (made, added))
    missed = (x + a + m - out).norm(dim=-1) / (x.norm(dim=-1) + a.norm(dim=-1) + m.norm(dim=-1)).clamp_min(1e-30)
    if not float(missed.max()) <= tolerance:
        raise UnsupportedModelError(
            f"{where}: what its attention and MLP give does not add up to the block's output (off by "
            f'{float(missed.max()):.2g}): use the bridge instead (adapter="bridge")'
        )


@torch.no_grad()
def _is_parallel(model: PlainModel) -> bool:
    part = model._parts[0]
    tokens = torch.arange(4)[None] % model.vocab_size
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).double().clone())

    handle = part.mlp_source.register_forward_hook(keep)
    try:
        with through_ports(model._hf):
            model(tokens)
            silent = part.ports.z.register_forward_hook(_zeros)
            try:
                model(tokens)
            finally:
                silent.remove()
    finally:
        handle.remove()
    return torch.equal(seen[0], seen[1])


# ------------------------------------------------------------------------------------------------------------- helpers


def _zeros(module: nn.Module, args: Any, output: Any) -> Tensor:
    return torch.zeros_like(output)


def home(module: Any) -> torch.device:
    """Where a model takes its input: its parameters' device, or the executing one where they are offloaded."""
    embedding = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else module
    place = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if place is not None:
        return torch.device(place if not isinstance(place, int) else f"cuda:{place}")
    return next(module.parameters()).device


def loaded(module: nn.Module) -> Any:
    """While open, the parameters of `module` are really there, also when accelerate keeps them elsewhere."""
    if any(parameter.is_meta for parameter in module.parameters()):
        from accelerate.utils import align_module_device

        return _each_loaded(module, align_module_device)
    return contextlib.nullcontext()


@contextmanager
def _each_loaded(module: nn.Module, align: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
                stack.enter_context(align(part))
        yield


def _heads_second(raw: Tensor, batch: Batch) -> Tensor:
    if raw.dim() != 4 or raw.shape[0] != batch.mask.shape[0] or raw.shape[2] != batch.mask.shape[1]:
        raise RuntimeError("not [batch, head, position, feature]")
    return raw.transpose(1, 2)


def _by_head(raw: Tensor, batch: Batch) -> Tensor:
    if raw.dim() != 4 or raw.shape[:2] != batch.mask.shape:
        raise RuntimeError("not [batch, position, head, feature]")
    return raw


def _normalisers(raw: Tensor, batch: Batch) -> Tensor:
    return raw if not raw.numel() else raw.transpose(1, 2)


def _norm_scale(norm: nn.Module) -> Callable[[Tensor, Batch], Tensor]:
    """The divisor of a norm from its input: the root of the mean square (of the deviations, where it centres)."""
    epsilon = next((float(getattr(norm, n)) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, n)), 0.0)
    centres = isinstance(norm, nn.LayerNorm) or "LayerNorm" in type(norm).__name__

    def read(raw: Tensor, batch: Batch) -> Tensor:
        x = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if centres:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1, keepdim=True) + epsilon).sqrt()

    return read
