"""Hooks on a live model, delivered layer by layer.

An adapter names, for every point, a `Tap`: the module whose output (or input) holds it, and how to bring that raw
tensor into the canonical shape and back. This module does the rest: it knows when a forward pass begins and ends, hands
a layer to the observer as soon as all of its points have fired, drops it at once, and complains at the end of a pass
about points that never fired. PyTorch's own forward hooks are used, each removed through its handle: no other hook is
ever touched.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from posattn.errors import HookError, InputError
from posattn.models.base import Batch, Intervention, Model, Observer, Point

POINTS: tuple[Point, ...] = get_args(Point)


def _same(value: Tensor, batch: Batch) -> Tensor:
    return value


def _same_back(value: Tensor, raw: Tensor) -> Tensor:
    return value


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where one point of one layer is read: the output of `module`, or its argument(s) `arguments` where given.

    `read(raw, batch)` gives the canonical tensor, `write(canonical, raw)` goes back.
    """

    module: nn.Module
    read: Callable[[Tensor, Batch], Tensor] = _same
    write: Callable[[Tensor, Tensor], Tensor] = _same_back
    arguments: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PassWatch:
    """How an adapter tells where a forward pass begins, ends, and what its batch is."""

    begin: Callable[[Batch], None]
    end: Callable[[], None]
    abandon: Callable[[], None]  # the pass ended early, as it was asked to: nothing is missing


class TappedModel(Model):
    """A model whose points are reached through PyTorch hooks on its modules."""

    @abc.abstractmethod
    def _tap(self, point: Point, layer: int) -> Tap | None:
        """Where `point` of `layer` is read; None where this layer has no such point (only `post_scale`)."""

    @abc.abstractmethod
    def _watch(self, watch: PassWatch, handles: list[Any]) -> None:
        """Install the hooks that call `watch`, appending each handle to `handles` at once."""

    def _chosen(self, layers: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.n_layers)) if layers is None else sorted(set(layers))
        for layer in chosen:
            if not 0 <= layer < self.n_layers:
                raise InputError(f"layer {layer} does not exist: {self.name} has layers 0 to {self.n_layers - 1}")
        return chosen

    @contextmanager
    def observe(
        self, points: Iterable[Point], observer: Observer, layers: Iterable[int] | None = None
    ) -> Iterator[None]:
        wanted = tuple(dict.fromkeys(points))
        for point in wanted:
            if point not in POINTS:
                raise InputError(f"unknown point {point!r}: choose from {', '.join(POINTS)}")
        taps: dict[int, dict[Point, Tap]] = {
            layer: {point: tap for point in wanted if (tap := self._tap(point, layer)) is not None}
            for layer in self._chosen(layers)
        }
        watched = _Pass(self.name, {layer: frozenset(found) for layer, found in taps.items()}, observer)
        handles: list[Any] = []
        try:
            self._watch(PassWatch(watched.begin, watched.end, watched.abandon), handles)
            for layer, found in taps.items():
                for point, tap in found.items():
                    handles.append(_read_hook(tap, layer, point, watched))
            yield
        finally:
            for handle in handles:
                handle.remove()
            watched.forget()

    @contextmanager
    def intervene(
        self,
        point: Literal["z", "q", "k", "attn_in", "resid_pre"],
        change: Intervention,
        layers: Iterable[int] | None = None,
    ) -> Iterator[None]:
        if point not in ("z", "q", "k", "attn_in", "resid_pre"):
            raise InputError(f"cannot intervene at {point!r}: choose z, q, k, attn_in or resid_pre")
        current: list[Batch] = []
        handles: list[Any] = []

        def begin(batch: Batch) -> None:
            current[:] = [batch]

        try:
            self._watch(PassWatch(begin, current.clear, current.clear), handles)
            for layer in self._chosen(layers):
                tap = self._tap(point, layer)
                if tap is None:  # no adapter lacks these points
                    raise HookError(f"layer {layer} of {self.name} has no point {point!r}")
                handles.append(_write_hook(tap, layer, change, current))
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Pass:
    """The state of one forward pass: what has fired in each layer and has not been delivered yet."""

    def __init__(self, name: str, wanted: dict[int, frozenset[Point]], observer: Observer):
        self._name, self._wanted, self._observer = name, wanted, observer
        self._batch: Batch | None = None
        self._pending: dict[int, dict[Point, Tensor]] = {}
        self._done: set[int] = set()
        self._observing = False

    def begin(self, batch: Batch) -> None:
        if self._observing:  # a forward pass that the observer itself runs is not measured
            return
        self.forget()
        self._batch = batch

    def abandon(self) -> None:
        if not self._observing:
            self.forget()

    def forget(self) -> None:
        self._batch, self._pending, self._done = None, {}, set()

    def fire(self, layer: int, point: Point, tap: Tap, raw: Any) -> None:
        batch = self._batch
        if batch is None or self._observing or layer in self._done:
            return
        if not isinstance(raw, Tensor):
            raise HookError(f"layer {layer} of {self._name}: point {point!r} gave {type(raw).__name__}, not a tensor")
        try:
            value = tap.read(raw.detach(), batch)
        except RuntimeError as error:
            raise HookError(
                f"layer {layer} of {self._name}: point {point!r} has the unexpected shape {tuple(raw.shape)}"
            ) from error
        seen = self._pending.setdefault(layer, {})
        seen[point] = value
        if len(seen) == len(self._wanted[layer]):
            self._done.add(layer)
            del self._pending[layer]
            self._observing = True
            try:
                self._observer(layer, cast("Mapping[str, Tensor]", seen), batch)
            finally:
                self._observing = False

    def end(self) -> None:
        if self._observing or self._batch is None:
            return
        missing = {
            layer: sorted(points - self._pending.get(layer, {}).keys())
            for layer, points in self._wanted.items()
            if points and layer not in self._done
        }
        self.forget()
        if missing:
            layer, points = next(iter(missing.items()))
            more = f" (and in {len(missing) - 1} more layers)" if len(missing) > 1 else ""
            raise HookError(
                f"layer {layer} of {self._name}: {', '.join(map(repr, points))} never fired{more}. "
                "The model ran another path than its hooks cover: use eager attention and no fused or compiled forward"
            )


def _read_hook(tap: Tap, layer: int, point: Point, watched: _Pass) -> Any:
    if tap.arguments:

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watched.fire(layer, point, tap, kwargs.get(tap.arguments[-1], args[0] if args else None))

        return tap.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        watched.fire(layer, point, tap, output[0] if isinstance(output, tuple) else output)

    return tap.module.register_forward_hook(after)


def _write_hook(tap: Tap, layer: int, change: Intervention, current: list[Batch]) -> Any:
    # prepended, so that every observer, whenever it was attached, sees the changed value
    def changed(raw: Tensor) -> Tensor | None:
        if not current:
            return None
        canonical = tap.read(raw, current[0])
        new = change(layer, canonical, current[0])
        if new is None:
            return None
        if new.shape != canonical.shape:
            raise HookError(
                f"layer {layer}: an intervention must keep the shape {tuple(canonical.shape)}, got {tuple(new.shape)}"
            )
        return tap.write(new, raw).to(raw.dtype)

    if tap.arguments:

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if tap.arguments[-1] not in kwargs:  # given by place
                new = changed(args[0])
                return None if new is None else ((new, *args[1:]), kwargs)
            read = kwargs[tap.arguments[-1]]
            if (new := changed(read)) is None:
                return None
            # the other arguments are the same tensor, or that tensor plus positions (shortformer), which stay
            others = {name: new + (kwargs[name] - read) for name in tap.arguments[:-1]}
            return args, {**kwargs, **others, tap.arguments[-1]: new}

        return tap.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        raw = output[0] if isinstance(output, tuple) else output
        new = changed(raw)
        if new is None:
            return None
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return tap.module.register_forward_hook(after, prepend=True)


def batch_of(name: str, tokens: Tensor | None, embeddings: Tensor | None, mask: Tensor | None) -> Batch:
    """The batch of a forward pass from what the model itself received.

    Raises:
        HookError: the mask is not one flag a token (a four-dimensional mask, or a pass with cached keys).
    """
    shaped = tokens if tokens is not None else embeddings
    if shaped is None:
        raise HookError(f"{name} was called with neither tokens nor embeddings")
    shape = shaped.shape[:2]
    if mask is None:
        real = torch.ones(shape, dtype=torch.bool, device=shaped.device)
    elif mask.shape == shape:
        real = mask if mask.dtype == torch.bool else mask != 0
    else:
        raise HookError(
            f"{name} was called with an attention mask of shape {tuple(mask.shape)} for {tuple(shape)} tokens: "
            "only whole sequences with one flag a token can be measured (no cached keys, as in generation)"
        )
    return Batch(tokens=tokens, mask=real)


def whole_stream(raw: Tensor, batch: Batch) -> Tensor:
    """Read [batch, position, feature] as it is."""
    if raw.shape[:2] != batch.mask.shape:
        raise RuntimeError("not [batch, position, feature]")
    return raw


def scaled_by(multiplier: float) -> Callable[[Tensor, Batch], Tensor]:
    """A reader of what a block adds to the stream, times its residual multiplier."""

    def read(raw: Tensor, batch: Batch) -> Tensor:
        raw = raw.reshape(*batch.mask.shape, raw.shape[-1])
        return raw if multiplier == 1.0 else raw * multiplier

    return read


def split_heads(width: int) -> Callable[[Tensor, Batch], Tensor]:
    """A reader that gives [B,N,heads,width] from [B,N,heads·width] or [B,N,heads,width]."""

    def read(raw: Tensor, batch: Batch) -> Tensor:
        return raw.reshape(*batch.mask.shape, -1, width)

    return read


def heads_first(width: int) -> Callable[[Tensor, Batch], Tensor]:
    """A reader that gives [B,N,heads,width] from [B,heads,N,width]."""

    def read(raw: Tensor, batch: Batch) -> Tensor:
        return raw.transpose(1, 2)

    return read


def like_raw(value: Tensor, raw: Tensor) -> Tensor:
    """Back into the raw shape."""
    return value.reshape(raw.shape)


def check_pattern(raw: Tensor, batch: Batch) -> Tensor:
    """Refuse anything but [B,H,N,N]."""
    size, n = batch.mask.shape
    if raw.dim() != 4 or raw.shape[0] != size or raw.shape[2:] != (n, n):
        raise RuntimeError("not a square attention pattern")
    return raw
