"""Measuring any forward pass: `with attach(model, MixingProbe(), KernelProbe()) as session: ...`.

The session observes the union of what its probes need and shows each layer to each probe. It may be nested and
re-entered; on exit only its own hooks are gone, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posattn.errors import InputError
from posattn.models.base import Batch, Model, Point
from posattn.probes.base import Probe
from posattn.probes.kernel import KernelProbe
from posattn.probes.mixing import MixingProbe
from posattn.results import Result


class Session(AbstractContextManager["Session"]):
    """Probes attached to a model while the context is open. Make one with `attach`."""

    def __init__(self, model: Model, probes: tuple[Probe, ...]) -> None:
        self.model = model
        self.probes = probes
        self._stack: ExitStack | None = None

    def __enter__(self) -> Session:
        if self._stack is not None:
            raise InputError("this session is attached already: call attach again for a second one")
        for probe in self.probes:
            probe.begin(self.model)
        with ExitStack() as stack:
            stack.enter_context(self.model.observe(self.points, self._observe))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        stack, self._stack = self._stack, None
        return None if stack is None else stack.__exit__(kind, error, trace)

    def _observe(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        # The user's pass may run in inference mode; running sums made there could not be continued outside it.
        with torch.inference_mode(False), torch.no_grad():
            for probe in self.probes:
                probe.update(layer, record, batch)

    @property
    def points(self) -> list[Point]:
        """Every point that some probe needs."""
        return sorted({point for probe in self.probes for point in probe.needs})

    @property
    def documents(self) -> int:
        """How many documents every probe has measured."""
        return min(probe.documents for probe in self.probes)

    def results(self) -> dict[str, Result]:
        """Each probe's result by the probe's name (`"mixing"`, `"kernel"`, ...).

        Raises:
            NothingMeasuredError: no forward pass went through while the session was open.
        """
        return {probe.name: probe.result(self.model) for probe in self.probes}


def attach(model: Any, *probes: Probe) -> Session:
    """Attach probes to a model: every forward pass inside the context is measured.

    Args:
        model: a `posattn` model, or a live TransformerLens model.
        probes: fresh probes, or ones that already hold measurements of the same model, to go on with.

    Raises:
        InputError: no probe, or two of one name.
        HookError: a layer lacks a point that a probe needs.
    """
    if not probes:
        raise InputError("attach needs at least one probe, for example MixingProbe()")
    names = [probe.name for probe in probes]
    if len(set(names)) < len(names):
        raise InputError(f"two probes share a name: {', '.join(names)}")
    return Session(as_a_model(model), probes)


def from_cache(
    cache: Mapping[str, Tensor] | Any,
    model: Any,
    *probes: Probe,
    tokens: Int[Tensor, "b n"] | None = None,
    mask: Bool[Tensor, "b n"] | None = None,
) -> Session:
    """Measure an `ActivationCache` that exists already, as if its forward pass had been observed.

    Args:
        cache: from `run_with_cache` of the same model, with its batch dimension.
        model: the model that filled it.
        probes: what to measure; mixing and the head-mean kernel when none is given.
        tokens, mask: of that forward pass; without them nothing is taken to be padding.

    Returns:
        A closed session: ask it for `results()`, or hand it to `measurement`.

    Raises:
        HookError: the cache lacks a point that a probe needs, or holds it in a shape that does not fit.
    """
    from posattn.models.caches import read_cache

    session = attach(model, *(probes or (MixingProbe(), KernelProbe())))
    for probe in session.probes:
        probe.begin(session.model)
    for layer, record, batch in read_cache(session.model, cache, session.points, tokens, mask):
        session._observe(layer, record, batch)
    return session


def as_a_model(model: Any) -> Model:
    """`model` itself, or the live object seen as one."""
    if isinstance(model, Model):
        return model
    from posattn.models.loading import as_model

    return as_model(model)
