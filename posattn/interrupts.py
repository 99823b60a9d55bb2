"""Ctrl-C and SIGTERM: ended in order, between steps where a state is kept, and with a word on how to go on.

`terminable` turns SIGTERM into an exception, as Python does with Ctrl-C, so that whatever cleans up when a block is
left does it then too. `Held` keeps both from landing in the middle of a step. `advice` is what an interrupted command
can say.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

#: exit codes, as shells count them: 128 and the signal's number
INTERRUPTED, TERMINATED = 130, 143

_said: list[str] = []


class Terminated(BaseException):
    """SIGTERM has come. Like KeyboardInterrupt no `Exception`: nobody catches it by mistake."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`, once; afterwards it does what it did before.

    Only in the main thread (no other may set handlers), only where nobody else handles the signal, and not in processes
    that this one forks. Not among several processes either: torchrun ends the others by SIGTERM, and a process that
    waits in the middle of a collective operation would only look at it when that is over.
    """
    mine, alone = os.getpid(), os.environ.get("WORLD_SIZE", "1") == "1"
    here = threading.current_thread() is threading.main_thread()
    if not (alone and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != mine:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # what cleans up now is not ended by another one
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Held(AbstractContextManager["Held"]):
    """Inside, Ctrl-C and SIGTERM wait for `release`, a place where nothing is half done.

    Where they may come at once (in a long evaluation, say) stands `with held.at_once():`. A second one does not wait;
    `torn` is then true: something may be half done. A signal that is not handled by a Python function is left alone,
    and in threads other than the main one, which gets no signals, nothing happens.
    """

    def __init__(self) -> None:
        self.torn = False
        self._open = False
        self._waiting: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Held:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:  # else the handler itself has chosen another, as to ignore it
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._open and self._waiting is None:
            self._waiting = number
            return
        self.torn = not self._open
        self._before[number](number, frame)

    def release(self) -> None:
        """Let a signal that has come do what it does."""
        number, self._waiting = self._waiting, None
        if number is not None:
            self._before[number](number, None)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal does at once what it does."""
        self._open = True
        try:
            self.release()
            yield
        finally:
            self._open = False


@contextmanager
def advice(text: Callable[[], str]) -> Iterator[None]:
    """Keep what to say when the block is interrupted; `text` is asked then, and may say nothing."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        if said := text():
            _said.append(said)
        raise


def take_advice() -> str:
    """What was kept last, once."""
    said = _said[-1] if _said else ""
    _said.clear()
    return said
