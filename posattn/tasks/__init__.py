"""Synthetic tasks whose solution is known to go by position or by symbol, and the training of models on them."""

from __future__ import annotations

from typing import Any

from posattn.errors import InputError
from posattn.tasks.base import MOST_TOKENS, Samples, Solution, Task
from posattn.tasks.canonical import IndexTask, InductionTask, RetrievalTask
from posattn.tasks.letter import LetterTask
from posattn.tasks.number import NumberTask

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (NumberTask, LetterTask, IndexTask, RetrievalTask, InductionTask)
}


def make_task(name: str, length: int | None = None, **parameters: Any) -> Task:
    """The task of that name. `length` (tokens, the query included) sets the number of pre-targets when that is
    not given.

    Raises:
        InputError: unknown task or parameter, more targets than positions, a task too small for its hops.
    """
    if name not in TASKS:
        raise InputError(f"unknown task '{name}': choose from {', '.join(TASKS)}")
    known = TASKS[name].parameter_names()
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise InputError(f"task '{name}' has no parameter '{unknown[0]}': it has {', '.join(known)}")
    if length is not None:
        if not isinstance(length, int) or not 2 <= length <= MOST_TOKENS:
            raise InputError(f"task '{name}': length must be a whole number from 2 to {MOST_TOKENS}, not {length!r}")
        if "pre_targets" in known:
            targets = parameters.get("targets", 8)
            parameters.setdefault("pre_targets", length - 1 - targets)
            if targets > length - 1 or targets + parameters["pre_targets"] + 1 != length:
                raise InputError(
                    f"task '{name}': {targets} targets, {max(parameters['pre_targets'], 0)} pre-targets and a "
                    f"query do not fit {length} positions"
                )
        else:
            parameters.setdefault("items", length - 1)
            if parameters["items"] + 1 != length:
                raise InputError(
                    f"task '{name}': {parameters['items']} items and a query do not fit {length} positions"
                )
    return TASKS[name](**parameters)


__all__ = [
    "TASKS",
    "IndexTask",
    "InductionTask",
    "LetterTask",
    "NumberTask",
    "RetrievalTask",
    "Samples",
    "Solution",
    "Task",
    "make_task",
]
