"""What cannot be right is refused in one line, before a model is loaded; messages stand alone and carry conditions."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from posattn.cli import COMMANDS, main, option_name
from posattn.commands import output
from posattn.commands.documents import DEFAULT
from posattn.commands.lengths import TEXT_LENGTHS
from posattn.errors import DataError
from posattn.reports.write import findings_of
from posattn.tokens import check_source
from tests.report_samples import heads_summary, simulate_summary
from tests.test_cli import refused
from tests.test_reports import ablation_summary


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, where loading or training a model is a failure of the test."""
    import posattn.models.loading as loading
    import posattn.tasks.training as training

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded, or trained, before the options were looked at")

    monkeypatch.setattr(loading, "load_model", loaded)
    monkeypatch.setattr(training, "train", loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{half a header")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


BYTES = "bundled:bytes"
TASKS = ("number", "letter", "index", "retrieval", "induction")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profile", BYTES, "--method", "magic"], "--method is gradient_norm, "),
        (["profile", BYTES, "--target", "best"], "--target is argmax_probability or argmax_log_probability or a token"),
        (["profile", BYTES, "--target", "-5"], "--target is"),
        (["profile", BYTES, "--device", "abacus"], "unknown device 'abacus'"),
        (["profile", BYTES, "--dtype", "float7"], "unknown dtype 'float7'"),
        (["profile", BYTES, "--dtype", "int32"], "floating point"),
        (["profile", BYTES, "--adapter", "glue"], "--adapter is one of"),
        (["profile", BYTES, "--text", "hf:"], "names no data set: write hf: and its name on the hub"),
        (["profile", BYTES, "--text", "hf: "], "names no data set"),
        (["profile", BYTES, "--text", ""], "has no name"),
        (["profile", BYTES, "--text", "bundled:nothing"], "the built-in text is bundled:python-docs"),
        (["profile", BYTES, "--text", "nothing.txt"], "no such file: nothing.txt"),
        (["profile", BYTES, "--text", "empty.txt"], "is empty"),
        (["profile", BYTES, "--resume"], "--resume needs a --checkpoint"),
        (["profile", BYTES, "--checkpoint", "nowhere/state"], "there is no folder nowhere"),
        (["profile", BYTES, "--checkpoint", "damaged"], "exists already: add --resume"),
        (["profile", BYTES, "--checkpoint", "damaged", "--resume"], "truncated or not a posattn file"),
        (["profile", BYTES, "--checkpoint", "."], "is a folder"),
        (["heads", BYTES, "--level", "words"], "--level is keys or tokens, not 'words'"),
        (["heads", BYTES, "--queries", "first"], "--queries is last, all, a number or positions"),
        (["heads", BYTES, "--queries", "0"], "at least one"),
        (["heads", BYTES, "--queries", "128,"], "query 128 of a document of 128 tokens"),
        (["heads", BYTES, "--queries", "30,", "--length", "20"], "query 30 of a document of 20 tokens"),
        (["heads", BYTES, "--length", "2"], "no two earlier keys"),
        (["heads", BYTES, "--purity", "0.5"], "--purity lies above 0 and below 0.5"),
        (["heads", BYTES, "--ablate", "--ablation-mode", "half"], "--ablation-mode is zero, mean or position_mean"),
        (["heads", BYTES, "--ablation-mode", "mean"], "add --ablate"),
        (["heads", BYTES, "--max-swaps", "9"], "goes with --level tokens"),
        (["heads", BYTES, "--device", "abacus"], "unknown device"),
        (["heads", BYTES, "--text", "hf:"], "names no data set"),
        (["lengths", BYTES, "--mode", "half"], "--mode is zero or mean"),
        (["lengths", BYTES, "--purity", "0"], "--purity lies above 0"),
        (["lengths", BYTES, "--lengths", "a"], "give whole numbers"),
        (["lengths", BYTES, "--lengths", "32,64"], "leaves no context before the 32 measured tokens"),
        (["lengths", BYTES, "--lengths", "+5"], "only a task can be made longer"),
        (["lengths", BYTES, "--dtype", "float7"], "unknown dtype"),
        (["lengths", BYTES, "--text", "hf:"], "names no data set"),
        (["train", "number", "--device", "foo"], "unknown device 'foo'"),
        (["train", "number", "--max-seconds", "0"], "--max-seconds must be above 0"),
        (["train", "number", "--seed", "0", "--seed", "1", "--seed", "0"], "--seed 0 is given twice"),
        (["train", "letter", "--letters", "999"], "999 letters and 8 integers make 1005993 tokens, more than 8192"),
        (["train", "retrieval", "--letters", "999"], "tokens, more than 8192"),
        (["train", "number", "--letters", "99999"], "letters must be at most 8192, not 99999"),
        (["train", "number", "--purity", "nan"], "--purity must be a finite number"),
        (["train", "induction", "--hops", "3"], "the induction task has no --hops: it has --length and --letters"),
        (["train", "number", "--distractors", "clean"], "has no --distractors: it has --length, --targets, "),
        *((["train", task, "--length", value], "'--length'") for task in TASKS for value in ("-3", "0", "1")),
        *((["train", task, "--length", "9000"], "9000") for task in TASKS),
        (["train", "index", "--length", "9000"], "--length must be a whole number from 2 to 8192, not 9000"),
        (["train", "retrieval", "--length", "40"], "39 items (length 40)"),
        (["train", "number", "--hops", "0"], "--hops must be a whole number of at least 1, not 0"),
        (["train", "letter", "--pre-targets", "-1"], "--pre-targets must be a whole number of at least 1, not -1"),
    ],
)
def test_refused_before_a_model_is_loaded(
    no_loading: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    before = sorted(no_loading.iterdir())
    assert says in refused(capsys, [*arguments, "--out", "out"])
    assert sorted(no_loading.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "3", "--slopes", "bloom"], "add --position alibi"),
        (["--layers", "3", "--slopes", "bloom", "--position", "none"], "add --position alibi"),
        (["--layers", "3", "--mixing", "nan"], "--mixing nan: give finite numbers"),
        (["--layers", "3", "--position", "alibi", "--slopes", "0.5,inf"], "give finite numbers"),
        (["--layers", "3", "--position", "rope"], "--position is none or alibi, not 'rope'"),
        (["--layers", "3", "--mask", "half"], "--mask is causal or full"),
        (["bloom-176b", "--slopes", "mpt"], "--slopes describes an architecture, and preset bloom-176b has its own"),
        (["bloom-176b", "--heads", "3"], "--heads describes an architecture"),
        (["bloom-176b", "--window", "3"], "--window describes an architecture"),
        (["bloom-176b", "--convention", "mine"], "--convention is own or published"),
        ([], "name a preset (as bloom-176b; `posattn models` lists them), or describe an architecture with --layers"),
        (["bloom-176b", "--layers", "3"], "not both"),
        (["--layers", "3", "--prefix", "9"], "--prefix 9 is more than the 8 positions there are (--length)"),
        (["--layers", "3", "--prefix", "9", "--length", "16"], "--prefix 9 is more than the 8 positions"),
    ],
)
def test_simulate_refuses_options_that_would_do_nothing(
    no_loading: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, ["simulate", *arguments, "--length", "8", "--out", "out"])
    assert not (no_loading / "out").exists()


def test_a_window_as_long_as_the_context_is_one(no_loading: Path) -> None:
    arguments = ["simulate", "--layers", "3", "--length", "8", "--quiet", "--out"]
    for name, more in (("wide", ["--window", "99"]), ("all", ["--prefix", "8"])):
        assert main([*arguments, name, *more]) == 0


#: every option of every command that names a folder or file to be written
PLACES = [
    (["profile", BYTES], "--out"),
    (["profile", BYTES], "--checkpoint"),
    (["heads", BYTES], "--out"),
    (["lengths", BYTES], "--out"),
    (["simulate", "bloom-176b"], "--out"),
    (["train", "number"], "--out"),
    (["bench"], "--out"),
]


@pytest.mark.parametrize(("arguments", "option"), PLACES, ids=lambda value: str(value))
@pytest.mark.parametrize("below", ["one.txt/sub", "one.txt/sub/folder"])
def test_no_place_is_below_a_file(
    no_loading: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], option: str, below: str
) -> None:
    (no_loading / "one.txt").write_text("one")
    said = refused(capsys, [*arguments, option, below])
    assert f"{option} {below}: one.txt is a file, not a folder" in said


def float_options() -> list[tuple[str, list[str], str]]:
    """Every option of every command that takes a number with a fraction: command, arguments, option."""
    needed = {"profile": [BYTES], "heads": [BYTES], "lengths": [BYTES], "train": ["number"], "simulate": ["bloom-176b"]}
    found = []
    for name in COMMANDS:
        function = getattr(importlib.import_module(f"posattn.commands.{name}"), name)
        for parameter, hint in get_type_hints(function, include_extras=True).items():
            kind = getattr(hint, "__origin__", None)
            if kind is float or float in get_args(kind):
                found.append((name, needed.get(name, []), option_name(function, parameter)))
    return found


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("command", "arguments", "option"), float_options(), ids=lambda value: str(value))
def test_no_option_takes_what_is_no_finite_number(
    no_loading: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], option: str, value: str
) -> None:
    line = refused(capsys, [command, *arguments, f"{option}={value}", "--out", "out"])
    assert option in line
    assert sorted(path.name for path in no_loading.iterdir()) == ["damaged", "empty.txt"]


def test_there_are_such_options() -> None:
    assert {option for _, _, option in float_options()} >= {"--diagonal", "--max-seconds", "--lr", "--tau", "--purity"}


def test_the_help_names_the_same_kinds_of_text_as_the_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        check_source(str(tmp_path))
    kinds = re.search(r"name a (.*) file", str(caught.value))
    assert kinds is not None
    for name in ("profile", "heads"):
        function = getattr(importlib.import_module(f"posattn.commands.{name}"), name)
        option = get_args(get_type_hints(function, include_extras=True)["text"])[-1]
        assert f"A {kinds[1]} file" in option.help
    assert set(re.findall(r"\.\w+", kinds[1])) == {".jsonl", ".parquet", ".arrow", ".csv"}


def test_the_help_of_lengths_says_what_a_model_without_a_task_is_given() -> None:
    function = importlib.import_module("posattn.commands.lengths").lengths
    said = get_args(get_type_hints(function, include_extras=True)["text"])[-1].help
    assert f"for a model of no task, {DEFAULT} at lengths {', '.join(map(str, TEXT_LENGTHS))}" in said


# ---- messages ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_clears_what_stands_on_its_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    print("measuring ━━━━ 3/6", end="", file=screen)
    assert main(["profil"]) == 2
    assert screen.getvalue().startswith("measuring ━━━━ 3/6\r\x1b[2Kposattn: ")
    # a file gets no such characters
    plain = io.StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    assert main(["profil"]) == 2
    assert plain.getvalue().startswith("posattn: ")


def test_an_interrupt_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from posattn import cli

    monkeypatch.setattr(cli, "app", lambda *_a, **_k: 130)
    assert cli.main(["models"]) == 130
    assert capsys.readouterr().err == "posattn: interrupted\n"


def test_every_printed_sentence_comes_with_its_condition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = simulate_summary()
    output.tell(tmp_path, summary)
    lines = capsys.readouterr().out.splitlines()
    for finding in findings_of(summary)[: output.FIRST]:
        at = lines.index(f"- {finding.text}".replace("`", ""))
        assert lines[at + 1] == f"  {finding.sure}".replace("`", "")
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert "more finding" in lines[-2]


def test_what_happens_at_infinite_depth_is_never_printed_without_its_condition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["simulate", "--layers", "4", "--length", "16", "--out", str(out), "--quiet"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "infinite depth" in line)
    assert "λ_t ≈ 0.5 at every depth sums to infinity" in line
    assert "provided that the schedule goes on as fitted" in line
    assert "the first column of A stays bounded below" in line
    assert "What an architecture of 4 layers and 1 head implies" in (out / "report.html").read_text("utf-8")


def test_an_ablation_that_was_asked_for_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ablation_summary((0.1, 0.3))
    assert len(findings_of(asked)) > output.FIRST
    output.tell(tmp_path, asked)
    assert "raises the loss at 32 tokens more than random heads do: positional" in capsys.readouterr().out
    output.tell(tmp_path, heads_summary())
    assert "random heads" not in capsys.readouterr().out
