"""The documents that a command measures: a text, or for a model of a task samples of that task."""

from __future__ import annotations

from typing import Any

DEFAULT = "bundled:python-docs"
#: added to the user's seed, so that no document is one that a training run of the same seed has seen
UNSEEN = 3_000_003


def read_documents(
    name: str,
    model: Any,
    text: str | None,
    *,
    length: int | None,
    default: int,
    samples: int,
    batch_size: int,
    bos: bool | None,
    seed: int,
    field: str,
) -> Any:
    """`Tokens` for the model called `name`. Without `text`: the task it was trained on, else the bundled text.

    Without `length`, a text is cut to `default` tokens and samples of a task have their own length; a longer one is
    reached by prepending.

    Raises:
        InputError: a length shorter than the task's, or what `load_tokens` raises.
    """
    from posattn.errors import InputError
    from posattn.tasks.lengths import model_task
    from posattn.tokens import Tokens, load_tokens

    task = model_task(name) if text is None else None
    if task is None:
        return load_tokens(
            text or DEFAULT,
            model,
            length=length or default,
            samples=samples,
            batch_size=batch_size,
            bos=bos,
            seed=seed,
            field=field,
        )
    wanted = task.length if length is None else length
    if wanted < task.length:
        raise InputError(f"--length {wanted}: samples of task '{task.name}' have {task.length} tokens, or more")
    found = task.generate(samples, seed=seed + UNSEEN)
    rows = task.prepend(found, wanted - task.length, seed=seed).tokens
    facts = {"source": f"samples of task '{task.name}'", "samples_asked": samples, "bos": "none", "seed": seed}
    return Tokens(rows, None, batch_size, facts)
