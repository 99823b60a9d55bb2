"""The documents that a command measures: a text, or for a model of a task samples of that task."""

from __future__ import annotations

from typing import Any

from posattn.commands import checks

DEFAULT = "bundled:python-docs"
#: added to the user's seed, so that no document is one that a training run of the same seed has seen
UNSEEN = 3_000_003


def document_length(name: str, text: str | None, length: int | None, default: int) -> int:
    """How many tokens a document will have, known before the model is loaded.

    Without `length`, a text is cut to `default` tokens and samples of a task have their own length.

    Raises:
        InputError: no model is named, or a length is shorter than the task's.
    """
    from posattn.models.loading import check_name
    from posattn.tasks.lengths import model_task

    check_name(name)
    task = model_task(name) if text is None else None
    if task is None:
        return default if length is None else length
    if length is None:
        return task.length
    checks.task_length("--length", length, task)
    return length


def read_documents(
    name: str,
    model: Any,
    text: str | None,
    *,
    length: int,
    samples: int,
    batch_size: int,
    bos: bool | None,
    seed: int,
    field: str,
) -> Any:
    """`Tokens` for the model called `name`, `length` from `document_length`; a task's samples are made longer by
    prepending. Without `text`: the task it was trained on, else the bundled text.

    Raises:
        InputError, DataError: what `load_tokens` raises.
    """
    from posattn.tasks.lengths import model_task
    from posattn.tokens import Tokens, load_tokens

    task = model_task(name) if text is None else None
    if task is None:
        return load_tokens(
            text or DEFAULT,
            model,
            length=length,
            samples=samples,
            batch_size=batch_size,
            bos=bos,
            seed=seed,
            field=field,
        )
    found = task.generate(samples, seed=seed + UNSEEN)
    rows = task.prepend(found, length - task.length, seed=seed).tokens
    facts = {"source": f"samples of task '{task.name}'", "samples_asked": samples, "bos": "none", "seed": seed}
    return Tokens(rows, None, batch_size, facts)
