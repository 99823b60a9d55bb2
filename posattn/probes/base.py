"""What a probe is.

A probe names the points that it `needs`, is shown them layer by layer (`update`), keeps running statistics only, and
turns them into a result. The same object can be attached to many forward passes, merged with one that saw other
documents, stored and restored: all of that follows from its `statistics`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from posattn.errors import HookError, InputError
from posattn.models.base import Batch, Model, Point
from posattn.probes.statistics import Moments, Sums
from posattn.results import Result


class Probe(abc.ABC):
    """Base class of the probes; see the module docstring."""

    #: what the probe is called in sessions and checkpoints
    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def needs(self) -> frozenset[Point]:
        """The points that `update` reads."""

    def begin(self, model: Model) -> None:  # noqa: B027 (optional: many probes need no preparation)
        """Called whenever the probe is attached to a model, before anything is measured."""

    @abc.abstractmethod
    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        """Take in one layer of one forward pass. The tensors must not be kept or written to."""

    @property
    @abc.abstractmethod
    def documents(self) -> int:
        """How many documents were measured in every layer."""

    @abc.abstractmethod
    def result(self, model: Model) -> Result:
        """What was measured.

        Raises:
            NothingMeasuredError: not a single document went through.
        """

    def settings(self) -> dict[str, Any]:
        """JSON values that must agree for two probes to be merged or a checkpoint to be continued."""
        return {}

    @abc.abstractmethod
    def statistics(self) -> dict[str, Moments | Sums]:
        """Everything measured, by name: what is merged and stored."""

    @abc.abstractmethod
    def restart(self, facts: Mapping[str, Tensor]) -> None:
        """Put new, empty statistics in place, as many as `facts` says; {}: as many as there were."""

    def facts(self) -> dict[str, Tensor]:
        """What `restart` must know to make statistics of the same kind."""
        return {}

    def adopt(self, other: Any) -> None:  # noqa: B027 (optional)
        """Take over what `other` knows of its model, when this probe has measured nothing."""

    def merge(self, other: Any) -> None:
        """Take in everything that `other`, a probe of the same settings, has measured.

        Raises:
            InputError: its settings differ.
        """
        self._check_mergeable(other)
        if not other.documents:
            return
        if not self.documents:
            self.adopt(other)
            self.load_state(other.state_tensors())
            return
        theirs = other.statistics()
        for name, part in self.statistics().items():
            part.merge(theirs[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything measured, as named tensors."""
        if not self.documents:
            return {}
        tensors = self.facts()
        for name, part in self.statistics().items():
            tensors |= part.state(name)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state_tensors` gave."""
        self.restart(tensors)
        for name, part in self.statistics().items():
            part.load(tensors, name)

    def _check_mergeable(self, other: Probe) -> None:
        if type(other) is not type(self) or other.settings() != self.settings():
            raise InputError(f"cannot merge {other.name} {other.settings()} into {self.name} {self.settings()}")

    def _check_layers(self, held: int, model: Model) -> None:
        if held and held != model.n_layers:
            raise InputError(
                f"this {self.name} probe has measured a model of {held} layers; {model.name} has {model.n_layers}: "
                "use a new probe"
            )


def expect_shape(point: str, layer: int, tensor: Tensor, batch: Batch, *, square: bool = False) -> None:
    """Refuse a tensor whose batch or position axes do not fit the batch.

    Raises:
        HookError: naming the layer, the point and both shapes.
    """
    b, n = batch.mask.shape
    fits = tensor.dim() == 4 and tensor.shape[0] == b and tensor.shape[2:] == (n, n)
    if not square:
        fits = tensor.dim() >= 3 and tensor.shape[:2] == (b, n)
    if not fits:
        raise HookError(f"layer {layer}: {point} has shape {list(tensor.shape)}, which does not fit {b} × {n} tokens")
