"""What can be refused before a model is loaded, said in the words of the command line.

Loading can take minutes; an option that cannot be right does not wait for it. What only the model or its tokenizer
knows (context, vocabulary, BOS token) is checked once it is there, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from posattn.commands import output
from posattn.errors import CheckpointError, InputError
from posattn.words import one_of

if TYPE_CHECKING:
    from posattn.tasks.base import Task


def choice(option: str, value: str, known: Iterable[str], also: str = "") -> str:
    """One of the known values.

    Raises:
        InputError: something else; `also` names what else would do.
    """
    known = list(known)
    if value not in known:
        raise InputError(f"{option} is {one_of(known)}{also}, not {value!r}")
    return value


def purity(value: float) -> None:
    """γ, the side of a corner of the plane.

    Raises:
        InputError: it is not above 0 and below ½, where the corners meet.
    """
    if not 0 < value < 0.5:
        raise InputError(f"--purity lies above 0 and below 0.5, not {value}")


def machine(device: str | None, dtype: str | None) -> None:
    """A device that is here, and a number format that a model can have.

    Raises:
        InputError: there is none of that name.
    """
    from posattn.models.loading import placement

    placement(device, dtype)


def source(text: str | None) -> None:
    """A text that is there to be read.

    Raises:
        DataError: a missing, empty or unreadable file, or a name that cannot be one.
    """
    from posattn.tokens import check_source

    if text is not None:
        check_source(text)


def task_length(option: str, length: int, task: Task) -> None:
    """A length that a sample of the task fits into.

    Raises:
        InputError: a shorter one.
    """
    if length < task.length:
        raise InputError(f"{option} {length}: samples of task '{task.name}' have {task.length} tokens, or more")


def target(value: str) -> str | int:
    """What `--target` asks for: a name, or a token id.

    Raises:
        InputError: neither.
    """
    from posattn.influence.gradients import TARGETS

    return int(value) if value.isascii() and value.isdigit() else choice("--target", value, TARGETS, " or a token id")


def checkpoint(path: Path | None, resume: bool) -> None:
    """A checkpoint that can be written to, or gone on from.

    Raises:
        InputError: `--resume` without a file, a file that would be overwritten, or a folder that is not there.
        CheckpointError: the file to go on from is damaged.
    """
    if path is None:
        if resume:
            raise InputError("--resume needs a --checkpoint to go on from")
        return
    output.check_parents("--checkpoint", path)
    if path.is_dir():
        raise InputError(f"--checkpoint {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write the checkpoint {path.name} to")
    if not path.exists():  # or each of several processes has its own beside it
        return
    if not resume:
        raise InputError(f"the checkpoint {path} exists already: add --resume to go on from it, or name another file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not a posattn file ({type(error).__name__})") from error
