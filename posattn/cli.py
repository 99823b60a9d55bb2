"""The command line: `posattn profile | heads | simulate | ...`.

This module only gathers the commands of `posattn.commands` and turns what they raise into exit codes:
0 done; 2 and one line on stderr for what the caller can mend; 1 and one line for a fault of ours (`--debug` shows the
traceback); 130 when interrupted and 143 when terminated. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, get_type_hints

import typer

from posattn import __version__, progress
from posattn.errors import InputError, PosattnError
from posattn.interrupts import INTERRUPTED, TERMINATED, Terminated, take_advice, terminable
from posattn.words import one_of

app = typer.Typer(
    name="posattn",
    help="Where in the context a transformer looks, why its architecture makes it look there, and which heads work by "
    "position and which by symbol.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: commands in the order of the help page; each is a function of that name in a module of that name
COMMANDS = ("profile", "heads", "simulate", "train", "lengths", "compare", "figure", "models", "bench")


def option_name(command: Callable[..., Any], parameter: str) -> str:
    """How an option is written on the command line, by the name of the command's parameter."""
    for item in getattr(get_type_hints(command, include_extras=True)[parameter], "__metadata__", ()):
        # the first name is typer's `default` until it reads the annotation
        names = [getattr(item, "default", None), *(getattr(item, "param_decls", None) or ())]
        if found := [one for one in names if isinstance(one, str) and one.startswith("--")]:
            return found[0]
    return "--" + parameter.replace("_", "-")


def _finite(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, refusing NaN and infinity for any option: they pass every comparison with a least and a most."""

    @functools.wraps(command)
    def checked(**values: Any) -> Any:
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{option_name(command, name)} must be a finite number, not {value}")
        return command(**values)

    return checked


for _name in COMMANDS:
    app.command(_name)(_finite(getattr(importlib.import_module(f"posattn.commands.{_name}"), _name)))


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"posattn {__version__}")
        raise typer.Exit()
    return wanted


@app.callback()
def posattn(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    # `--debug` is taken out by `main`, and stands here for the help page
    del debug, version


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    # `--debug` is understood before and after the command's name
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    take_advice()  # of an earlier command in this process
    try:
        with terminable(), progress.heartbeat(), _together():
            code = app(arguments, standalone_mode=False, prog_name="posattn")
        if code == INTERRUPTED:  # newer typers return it, older ones raise
            return _stopped("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _stopped("interrupted", INTERRUPTED)
    except Terminated:
        return _stopped("terminated", TERMINATED)
    except PosattnError as error:
        return _fail(str(error), 2, debug)
    except (MemoryError, RuntimeError) as error:
        if _out_of_memory(error):
            return _fail(f"not enough memory for this{_less_memory(arguments)}", 2, debug)
        return _internal(error, debug)
    except BrokenPipeError:  # the reader of our output went away: nothing to tell it
        sys.stderr.close()
        return 1
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's usage errors, whichever click it brings
            return _fail(error.format_message(), 2, debug)  # type: ignore[attr-defined]
        return _internal(error, debug)


def _together() -> AbstractContextManager[Any]:
    """With the other processes that torchrun has started, where it has."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return nullcontext()
    from posattn.distributed import start

    return start()


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(t in text for t in ("out of memory", "can't allocate memory"))


#: options that decide how much memory a command takes, and what to do with them; in the order of their worth
_LESS = {
    "length": "a shorter --length",
    "lengths": "shorter --lengths",
    "batch_size": "a smaller --batch-size",
    "layers": "fewer --layers",
    "small": "--small",
}


def _less_memory(arguments: list[str]) -> str:
    """What the command that these arguments call can do about it: only options that it has."""
    name = next((argument for argument in arguments if argument in COMMANDS), None)
    if name is None:
        return ""
    has = inspect.signature(getattr(importlib.import_module(f"posattn.commands.{name}"), name)).parameters
    ways = [words for parameter, words in _LESS.items() if parameter in has]
    return f": use {one_of(ways[:2])}" if ways else ""


def _stopped(what: str, code: int) -> int:
    """The end of a command that a signal ended; with what can be done now, where something can."""
    more = take_advice()
    return _fail(f"{what}; {more}" if more else what, code)


def _internal(error: Exception, debug: bool) -> int:
    hint = "" if debug else " (--debug shows where)"
    return _fail(f"internal error, {type(error).__name__}: {error}{hint}", 1, debug)


def _fail(message: str, code: int, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    name = "posattn" if os.environ.get("WORLD_SIZE", "1") == "1" else f"posattn, process {os.environ.get('RANK')}"
    # on a line of its own: a progress bar that was cut short, or the terminal's ^C, may stand on this one
    start = _CLEAR_LINE if sys.stderr.isatty() else ""
    print(f"{start}{name}:", " ".join(message.split()), file=sys.stderr)
    return code


#: return to the beginning of a terminal's line, and clear it
_CLEAR_LINE = "\r\x1b[2K"
