"""Progress on stderr: every command the same way, seldom, and with how far it is."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from posattn import progress
from posattn.cli import main
from posattn.commands import output
from posattn.probes.measure import measure
from posattn.tokens import load_tokens
from tests.test_probes import _tokens
from tests.toy import Toy

ROOT = Path(__file__).parent.parent


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    return 0.05


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float = 0.15) -> None:
    fast = getattr(owner, name)

    def slowed(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return fast(*arguments, **keywords)

    monkeypatch.setattr(owner, name, slowed)


def test_a_stage_that_is_silent_speaks(often: float, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.heartbeat():
        output.say("measuring 64 documents")
        progress.reached(8, 64, "document")
        time.sleep(8 * often)
        output.say("drawing")
        time.sleep(8 * often)
        output.say("a line of results", stage=False)
        time.sleep(8 * often)
    lines = capsys.readouterr().err.splitlines()
    drawing, result = lines.index("drawing"), lines.index("a line of results")
    assert lines[0] == "measuring 64 documents"
    assert all(line.startswith("measuring 64 documents: 8 of 64 documents, ") for line in lines[1:drawing])
    for stage in (lines[drawing + 1 : result], lines[result + 1 :]):  # a result does not end the stage
        assert stage
        assert all(re.fullmatch(r"drawing: \d+ s", line) for line in stage)
    assert 1 < drawing <= 9  # no more than one for each time


def test_nothing_is_said_before_half_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.EVERY == 30
    with progress.heartbeat():
        output.say("measuring")
        time.sleep(1.2)
    assert capsys.readouterr().err == "measuring\n"


def test_quiet_is_quiet(often: float, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.heartbeat():
        output.say("measuring", quiet=True)
        progress.reached(1, 2, "document")
        time.sleep(8 * often)
    assert capsys.readouterr().err == ""


def test_a_stage_is_over_with_its_command(often: float, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        output.say("measuring")
        raise RuntimeError

    with pytest.raises(RuntimeError), progress.heartbeat():
        work()
    time.sleep(3 * often)
    with progress.heartbeat():
        time.sleep(3 * often)
    assert capsys.readouterr().err == "measuring\n"


def test_a_closed_stderr_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    progress.note("nobody hears this")


def test_on_a_terminal_there_is_a_bar_and_no_line(
    often: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with progress.heartbeat():
        progress.stage("measuring 4 documents")
        with progress.bar("measuring toy", 4, 0, "document", True) as advance:
            time.sleep(4 * often)
            advance(4)
    assert "4/4" in screen.getvalue()
    assert "measuring 4 documents" not in screen.getvalue()


def test_a_measurement_in_python_says_how_far_it_is(
    often: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Toy()
    slow(monkeypatch, type(model), "__call__")
    measure(model, load_tokens(_tokens(4, 4), model, batch_size=2), check=False)
    lines = capsys.readouterr().err.splitlines()
    assert "measuring toy: 2 of 4 documents, 0 s" in lines
    assert lines[-1].startswith("measuring toy: 4 of 4 documents")
    measure(model, load_tokens(_tokens(4, 4), model, batch_size=2), check=False, progress=False)
    assert capsys.readouterr().err == ""


SMALL = ["--samples", "6", "--batch-size", "2", "--device", "cpu"]
TRAIN = ["train", "index", "--layers", "1", "--d-model", "8", "--steps", "40", "--every", "40"]
COUNTED = r"\d of 6 documents, \d+ s"


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        pytest.param(
            ["profile", "bundled:numbers", *SMALL],
            [f"measuring 6 documents of 17 tokens: {COUNTED}", f"measuring the influence by gradients: {COUNTED}"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["heads", "bundled:numbers", *SMALL], [f"scoring 12 heads on .*: {COUNTED}"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["lengths", "bundled:numbers", "--lengths", "17", "--no-ablate", "--samples", "4"],
            [r"length 17: .*\d+ s"],
            marks=pytest.mark.slow,
        ),
        (["simulate", "--layers", "2", "--length", "8"], [r"drawing: \d+ s"]),
        (TRAIN, [r"training .*: \d+ of 40 steps, \d+ s"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_every_long_command_says_that_it_goes_on(
    often: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], stages: list[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    for says in stages:
        assert re.search(rf"^{says}$", error, re.M), error


def test_there_is_one_place_that_writes_to_stderr() -> None:
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "posattn").rglob("*.py"))
        if re.search(r"stderr\.write|file=sys\.stderr|tqdm\(|rich\.progress", path.read_text("utf-8"))
    ]
    # the last words of a command, and progress
    assert elsewhere == ["posattn/__main__.py", "posattn/cli.py", "posattn/progress.py"]
