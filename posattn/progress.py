"""What long work says on stderr while it goes on: one place for all commands.

A command names the stage it is in (`stage`), loops say how far they are (`reached`), and `heartbeat` writes a line when
nothing has been said for half a minute: "measuring 64 documents of 256 tokens: 8 of 64 documents, 40 s". Loops that
run in no stage, and stages outside of a heartbeat, say nothing. On a terminal `bar` draws a bar instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

from posattn.words import plural

#: seconds without a word after which a stage says that it goes on
EVERY = 30.0


@dataclasses.dataclass
class _Stage:
    what: str
    started: float
    done: int | None = None
    total: int = 0
    unit: str = ""

    def line(self, now: float) -> str:
        far = "" if self.done is None else f"{self.done} of {self.total} {plural(self.total, self.unit)}, "
        return f"{self.what}: {far}{now - self.started:.0f} s"


_stage: _Stage | None = None
_spoke = 0.0
_drawn = False
_beating = False


def note(text: str) -> None:
    """A line on stderr."""
    global _spoke
    _spoke = time.monotonic()
    with contextlib.suppress(BrokenPipeError, ValueError):  # nobody reads it, or stderr is closed: work goes on
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def stage(what: str | None) -> None:
    """From here on this is being done; None: nothing."""
    global _stage
    _stage = None if what is None else _Stage(what, time.monotonic())


def reached(done: int, total: int, unit: str) -> None:
    """So many of all are done in the current stage, if there is one."""
    if _stage is not None:
        _stage.done, _stage.total, _stage.unit = done, total, unit


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Inside, a stage that has been silent for `EVERY` seconds says how far it is."""
    global _beating
    if _beating:
        yield
        return
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(min(EVERY, 1.0)):
            now, current = time.monotonic(), _stage
            if current is not None and not _drawn and now - max(_spoke, current.started) >= EVERY:
                note(current.line(now))

    thread = threading.Thread(target=beat, daemon=True, name="posattn progress")
    thread.start()
    _beating = True
    try:
        yield
    finally:
        _beating = False
        stage(None)
        stop.set()
        thread.join(timeout=1.0)


@contextlib.contextmanager
def bar(what: str, total: int, done: int, unit: str, show: bool) -> Iterator[Callable[[int], None]]:
    """Progress of a loop; yields the function that tells it how many more are done.

    On a terminal a bar. Elsewhere the lines of the stage that the loop runs in, or, where there is none, of its own.
    """
    global _drawn
    if not show:
        yield lambda more: None
        return
    if sys.stderr.isatty():
        _drawn = True  # from here on, and not only once there is a bar: what draws it takes a while to import
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as drawing:
                task = drawing.add_task(what, total=total, completed=done)
                yield lambda more: drawing.advance(task, more)
        finally:
            _drawn = False
        return
    own = _stage is None
    with heartbeat():
        if own:
            stage(what)
        reached(done, total, unit)

        def advance(more: int) -> None:
            nonlocal done
            done += more
            reached(done, total, unit)

        yield advance
        if own and _stage is not None:
            note(_stage.line(time.monotonic()))
            stage(None)
