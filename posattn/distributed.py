"""One measurement by several processes: `torchrun --nproc-per-node K -m posattn profile ...`.

Every process loads the model and takes a contiguous share of the documents: M documents among K processes are M // K
each and one more for the first M mod K, so none is lost and none counted twice. What a process has gathered (running
sums of a probe, magnitudes of single documents) is then exchanged, and every process merges the K parts in the order of
their ranks: all hold the same result, to the bit, and only rank 0 writes it. It differs from that of one process by the
order of summation alone.

Nothing is shared unless `start` has been called, which the command line does where torchrun has set `WORLD_SIZE`;
`world()` otherwise is a world of one, in which sharing and merging do nothing. Statistics live in main memory and go
through gloo; tensors on a GPU go through NCCL.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from posattn.errors import InputError, PosattnError

T = TypeVar("T")

#: longest wait for another process; a process that ends is noticed at once
PATIENCE = timedelta(hours=12)


class ProcessLostError(PosattnError):
    """Another process of the same run has ended before its part was done."""


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of one run: `size` of them, of which this is number `rank`."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes the results."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Which of `count` documents are this process's own."""
        base, more = divmod(count, self.size)
        first = self.rank * base + min(self.rank, more)
        return slice(first, first + base + (self.rank < more))

    def own_path(self, path: Path) -> Path:
        """This process's own file beside the others'."""
        return path if self.size == 1 else path.with_name(f"{path.name}.{self.rank}of{self.size}")

    def gather(self, value: T) -> list[T]:
        """The values of all processes in the order of their ranks, in every process."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _others_alive():
            dist.all_gather_object(found, value)
        return found

    def concatenate(self, rows: Tensor) -> Tensor:
        """The rows [m, ...] of all processes, one rank after the other."""
        return rows if self.size == 1 else torch.cat(self.gather(rows.cpu()))

    def merge(self, probes: Sequence[Any]) -> None:
        """Let each probe take in what the others' of the same name have measured.

        The parts come one after the other, so that no more than one of them is held beside the sum.
        """
        if self.size == 1:
            return
        for probe in probes:
            own = {name: tensor.contiguous() for name, tensor in probe.state_tensors().items()}
            layouts = self.gather([(name, tuple(t.shape), t.dtype, t.device.type) for name, t in own.items()])
            merged = copy.copy(probe)
            merged.load_state({})
            for rank, layout in enumerate(layouts):
                part = {
                    name: self._from(rank, own.get(name), shape, dtype, kind) for name, shape, dtype, kind in layout
                }
                if part:
                    other = copy.copy(probe)  # shallow: `load_state` puts new statistics in place
                    other.load_state(part)
                    merged.merge(other)
            probe.load_state(merged.state_tensors())

    def _from(self, rank: int, own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
        import torch.distributed as dist

        if rank == self.rank:
            assert own is not None
            tensor = own.to(kind)  # a GPU's tensors go over this process's own GPU
        else:
            tensor = torch.empty(shape, dtype=dtype, device=kind)
        with _others_alive():
            dist.broadcast(tensor, rank)
        return tensor


_WORLD: World | None = None


def world() -> World:
    """The run that this process belongs to; a world of one unless `start` has been called."""
    return _WORLD or World()


def asked() -> tuple[int, int]:
    """Rank and number of processes as torchrun has put them into the environment; (0, 1) without it."""
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0")) if size > 1 else 0
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE in the environment are not numbers: {error}") from error
    return (rank, size) if 0 <= rank < size else (0, 1)


@contextmanager
def start() -> Iterator[World]:
    """Join the other processes that torchrun has started; without torchrun, nothing."""
    global _WORLD
    rank, size = asked()
    if size == 1:
        yield World()
        return
    import torch.distributed as dist

    if not dist.is_available():
        raise InputError("this build of PyTorch has no torch.distributed: run one process")
    backend = "gloo"
    if torch.cuda.is_available():
        place = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(place)  # "cuda" is this process's own from here on
        backend = "cpu:gloo,cuda:nccl"
    with _others_alive():
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)
    _WORLD = World(rank, size)
    try:
        yield _WORLD
        with _others_alive():
            dist.barrier()  # nobody takes the meeting point down while another still talks to it
    finally:
        _WORLD = None
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process. Among several it ends at once: PyTorch's background threads can abort an orderly exit."""
    if asked()[1] > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _others_alive() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        first = " ".join(str(error).split())[:160]
        raise ProcessLostError(
            "another process of this run has ended, so its documents are missing: start the same number of processes "
            f"again, with --resume where a --checkpoint was given ({first})"
        ) from error


def combined(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The parts of all processes, folded from the first to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total
