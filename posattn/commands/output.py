"""Where a command's results go: a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posattn import progress
from posattn.errors import InputError, PosattnWarning


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse, before anything is computed, a folder that may not be written.

    Raises:
        InputError: `out` exists and `overwrite` is off; or it is no folder of results, which is never replaced.
    """
    if not out.exists() and not out.is_symlink():
        check_parents("--out", out)
        return
    if not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or add --overwrite to replace it")
    if not is_result(out):
        raise InputError(f"{out} holds something other than posattn's results; it is not overwritten, choose another")


def check_parents(option: str, path: Path) -> None:
    """Refuse a path below a file.

    Raises:
        InputError: one of the folders that `path` would be in is a file.
    """
    file = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise InputError(f"{option} {path}: {file} is a file, not a folder; choose another place")


def is_result(folder: Path) -> bool:
    """Whether `folder` holds what a command of ours wrote."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and "schema" in summary and "command" in summary


@contextlib.contextmanager
def new_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends, and vanishes when it raises."""
    if not first_process():
        with tempfile.TemporaryDirectory() as unread:
            yield Path(unread)
        return
    check_target(out, overwrite)
    made = [parent for parent in out.parents if not parent.exists()]  # innermost first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror or error}") from error
    try:
        fresh.chmod(0o777 & ~_umask())
        yield fresh
        check_target(out, overwrite)  # somebody else may have written there in the meantime
        if out.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            os.replace(out, aside / out.name)
            os.replace(fresh, out)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # it is in use: the results are in there
                parent.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Our own warnings as sentences, once each, for the report; the command's last lines say how many there are.

    Warnings of other libraries are not the caller's to mend and are left out.
    """
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PosattnWarning)
        try:
            yield sentences
        finally:
            for warning in caught:
                sentence = " ".join(str(warning.message).split())
                if issubclass(warning.category, PosattnWarning) and sentence not in sentences:
                    sentences.append(sentence)


def quiet_libraries() -> None:
    """Keep the progress bars and notices of other libraries off our stderr."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")


def first_process() -> bool:
    """Whether this process writes and reports: the only one, or the first of those that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def say(message: str, quiet: bool = False, *, stage: bool = True) -> None:
    """One line of progress on stderr: what is being done from here on, or (without `stage`) what it has given so far.

    While a stage lasts, it says now and then how far it is (`posattn.progress`).
    """
    if not quiet and first_process():
        progress.note(message)
        if stage:
            progress.stage(message)


#: so many findings are printed at least, where there are as many
FIRST = 3
#: and so many warnings
WARNED = 3


def tell(out: Path, summary: Mapping[str, Any]) -> None:
    """The end of a command: its first findings, those that an option asked for, warnings, and where the report is.

    Each with what it rests on and holds under, on a line of its own: a sentence is read, and copied, without the rest.
    """
    from posattn.reports.write import REPORT, findings_of
    from posattn.words import count, listed

    if not first_process():
        return
    findings = findings_of(summary)
    told = [finding for i, finding in enumerate(findings) if i < FIRST or finding.asked]
    for finding in told:
        print(f"- {finding.text}".replace("`", ""))
        if finding.sure:
            print(f"  {finding.sure}".replace("`", ""))
    warned = summary.get("warnings") or ()
    for warning in warned[:WARNED]:
        print(f"! {warning}".replace("`", ""))
    more, left = len(findings) - len(told), len(warned) - WARNED
    rest = [*([count(more, "more finding")] if more else []), *([count(left, "more warning")] if left > 0 else [])]
    if rest:
        print(f"  ({listed(rest)} in the report)")
    print(f"report: {out / REPORT}")


def as_json(summary: Mapping[str, Any]) -> str:
    """A summary as the text of summary.json."""
    from posattn.reports.write import plain

    return json.dumps(plain(summary), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
