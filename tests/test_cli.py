"""The command line: light to start, one line for what the caller got wrong, folders that appear whole or not at all."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posattn.cli import COMMANDS, main
from posattn.commands.output import new_folder
from posattn.errors import InputError
from posattn.reports.write import read_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer, as a transformers folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.families import tiny

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama", vocab_size=300).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i + 3 for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40, "utf-8")
    return path


SMALL = ["--length", "24", "--samples", "5", "--batch-size", "2"]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Runs a command that must fail with exit code 2 and one line on stderr; returns the line."""
    quiet = bool(arguments) and arguments[0] in COMMANDS and arguments[0] not in ("compare", "figure", "models")
    code = main([*arguments, "--quiet"] if quiet else arguments)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("posattn: ")
    assert captured.out == ""
    return lines[0]


# ---- starting ----------------------------------------------------------------------------------------------------


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        # processor time, not the clock: other tests run at the same time
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "posattn", "--help"], capture_output=True, text=True, check=True)
        after = os.times()
        assert "profile" in done.stdout
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_nothing_heavy_is_imported_for_help(arguments: list[str]) -> None:
    program = (
        "import sys; from posattn.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'pandas', 'transformers', 'transformer_lens', 'matplotlib', 'scipy', 'jinja2', "
        "'rich'}; "
        "found = heavy & set(sys.modules); assert not found, found; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from posattn import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"posattn {__version__}\n"


# ---- the main job ------------------------------------------------------------------------------------------------


def test_profile_writes_everything_it_promises(
    tiny_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["profile", str(tiny_folder), "--text", str(text_file), "--out", str(out), "--per-head", *SMALL]) == 0
    captured = capsys.readouterr()
    assert str(out / "report.html") in captured.out.splitlines()[-1]
    # three findings, each with what it rests on, and where the rest is
    lines = captured.out.splitlines()
    assert len([line for line in lines if not line.startswith("! ")]) <= 8
    assert len(lines) <= 8 + 3  # with warnings
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["command"] == "profile"
    assert {"schema", "provenance", "mixing", "profiles", "influence", "comparison", "shape", "warnings"} <= set(
        summary
    )
    assert {"residual", "attention_only", "half", "energy"} <= set(summary["profiles"])
    for curve in [summary["influence"], *summary["profiles"].values()]:
        assert len(curve) == 24
        assert sum(curve) == pytest.approx(1, abs=1e-5)
    assert set(summary["comparison"]) == {*summary["profiles"], "uniform"}
    for distances in summary["comparison"].values():
        assert set(distances) == {"wasserstein", "spearman", "total_variation"}
    assert "without_first" in summary["shape"]["influence"]
    assert summary["provenance"]["tokens"]["documents"] == 5
    _, arrays = read_folder(out)
    assert arrays["kernels"].shape == (3, 4, 24, 24)
    for name in ("report.html", "mixing.csv", "profiles.csv", "comparison.csv", "shapes.csv"):
        assert (out / name).stat().st_size > 100
    for figure in ("profiles", "mixing", "kernels"):
        assert (out / "figures" / f"{figure}.pdf").read_bytes().startswith(b"%PDF")
        assert (out / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_batch_size_does_not_change_the_numbers(tiny_folder: Path, text_file: Path, tmp_path: Path) -> None:
    found = []
    for size in ("1", "5"):
        out = tmp_path / size
        arguments = ["--length", "24", "--samples", "5", "--batch-size", size, "--quiet"]
        assert main(["profile", str(tiny_folder), "--text", str(text_file), "--out", str(out), *arguments]) == 0
        found.append(json.loads((out / "summary.json").read_text("utf-8")))
    for key in ("token", "frobenius"):
        assert found[0]["mixing"][key] == pytest.approx(found[1]["mixing"][key], abs=1e-6)
    assert found[0]["influence"] == pytest.approx(found[1]["influence"], abs=1e-6)


def test_without_influence_the_predictions_are_marked_untested(
    tiny_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["--text", str(text_file), "--out", str(out), "--no-influence", "--quiet", *SMALL]
    assert main(["profile", str(tiny_folder), *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert 0 < len(summary["warnings"]) <= 3
    assert all(f"\n! {warning}\n" in said.out for warning in summary["warnings"])
    assert summary["influence"] is None
    assert "stand untested" in (out / "report.html").read_text("utf-8")


# ---- what the caller got wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profil"], "No such command"),
        (["profile"], "MODEL"),
        (["profile", "bundled:bytes", "--length", "1"], "--length"),
        (["profile", "bundled:bytes", "--samples", "0"], "--samples"),
        (["profile", "bundled:bytes", "--samples", "many"], "--samples"),
        (["profile", "bundled:bytes", "--nonsense"], "--nonsense"),
        (["profile", "bundled:nothing"], "bundled"),
        (["profile", "nobody/no-such-model"], "no-such-model"),
        (["profile", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["profile", "/nowhere/folder"], "/nowhere/folder"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says.lower() in refused(capsys, arguments).lower()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "/nowhere/text.txt"], "no such file"),
        (["--text", "{empty}"], "empty"),
        (["--length", "64", "--text", "{short}"], "shorter than the length"),
        (["--length", "65", "--text", "{text}"], "beyond the model's context of 64"),
        (["--method", "magic", "--text", "{text}"], "--method is gradient_norm"),
        (["--target", "best", "--text", "{text}"], "target"),
        (["--device", "abacus", "--text", "{text}"], "abacus"),
        (["--dtype", "float7", "--text", "{text}"], "float7"),
        (["--resume", "--text", "{text}"], "checkpoint"),
        (["--bos", "--text", "{text}"], "no BOS token"),
        (["--checkpoint", "{broken}", "--resume", "--text", "{text}"], "truncated or not a posattn file"),
        (["--out", "{text}", "--text", "{text}"], "is a file"),
    ],
)
def test_wrong_settings_are_one_line_and_leave_no_folder(
    tiny_folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    files = {name: tmp_path / f"{name}.txt" for name in ("empty", "short", "broken")}
    files["empty"].write_text("")
    files["short"].write_text("too short")
    files["broken"].write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{half a header")
    options = [option.format(**files, text=text_file) for option in options]
    out = [] if "--out" in options else ["--out", str(tmp_path / "run")]
    before = sorted(tmp_path.iterdir())
    line = refused(capsys, ["profile", str(tiny_folder), *SMALL, *options, *out])
    assert says in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_config_out_of_range_is_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    refused(capsys, ["profile", str(folder), *SMALL, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_results_are_not_overwritten_unless_asked(
    tiny_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["profile", str(tiny_folder), "--text", str(text_file), "--out", str(out), "--no-influence", *SMALL]
    assert main([*command, "--quiet"]) == 0
    first = (out / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert "--overwrite" in refused(capsys, command)
    assert (out / "summary.json").stat().st_mtime_ns == first
    assert main([*command, "--quiet", "--overwrite"]) == 0
    assert (out / "summary.json").stat().st_mtime_ns > first


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("years of work")
    line = refused(capsys, ["profile", "bundled:bytes", "--out", str(out), "--overwrite"])
    assert "not overwritten" in line
    assert (out / "chapter1.tex").read_text() == "years of work"


def test_a_fault_of_ours_is_exit_1_and_its_traceback_is_for_the_asking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import posattn.commands.output as output

    def broken(*_: object) -> None:
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr(output, "check_target", broken)
    command = ["profile", "bundled:bytes", "--out", str(tmp_path / "run")]
    assert main(command) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == ["posattn: internal error, RuntimeError: a bug of two lines (--debug shows where)"]
    assert main([*command, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import posattn.models.loading as loading

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_model", interrupted)
    assert main(["profile", "bundled:bytes", "--out", str(tmp_path / "run")]) == 130
    assert list(tmp_path.iterdir()) == []


# ---- folders -----------------------------------------------------------------------------------------------------


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"

    def fill(folder: Path) -> None:
        (folder / "half").write_text("half")
        assert not out.exists()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"), new_folder(out, overwrite=False) as folder:
        fill(folder)
    assert list(tmp_path.iterdir()) == []
    with new_folder(out, overwrite=False) as folder:
        (folder / "summary.json").write_text('{"schema": 1, "command": "profile"}')
    assert [path.name for path in out.iterdir()] == ["summary.json"]
    assert os.stat(out).st_mode & 0o055  # as readable as any other new folder


def test_a_run_that_fails_keeps_the_results_that_it_was_to_replace(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "summary.json").write_text('{"schema": 1, "command": "profile", "old": true}')
    with pytest.raises(RuntimeError), new_folder(out, overwrite=True):
        raise RuntimeError
    assert "old" in (out / "summary.json").read_text()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="file is a file, not a folder"),
        new_folder(tmp_path / "file" / "run", overwrite=False),
    ):
        pass


# ---- the other commands ------------------------------------------------------------------------------------------


def test_simulate_from_a_preset_and_from_flags(tmp_path: Path) -> None:
    out = tmp_path / "preset"
    assert main(["simulate", "bloom-176b", "--length", "32", "--length", "64", "--out", str(out), "--quiet"]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["lengths"] == [32, 64]
    shares = summary["forces"]["32"]
    for quantity in range(3):
        total = sum(row[quantity] for row in shares["shares"])
        assert total == pytest.approx(shares["total"][quantity] - shares["baseline"][quantity], abs=1e-12)
    out = tmp_path / "flags"
    flags = ["--layers", "4", "--heads", "2", "--position", "alibi", "--slopes", "0.5,0.1", "--mixing", "power:0.6,1"]
    assert main(["simulate", *flags, "--length", "16", "--out", str(out), "--quiet"]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["mixing"] == pytest.approx([0.6, 0.3, 0.2, 0.15])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a preset"),
        (["bloom-176b", "--layers", "3"], "not both"),
        (["nobody-1b"], "unknown preset"),
        (["--layers", "3", "--mixing", "1.5"], "1.5"),
        (["--layers", "3", "--mixing", "much"], "--mixing much"),
        (["--layers", "3", "--mixing", "power:1"], "power:C,BETA"),
        (["--layers", "3", "--mixing", ".1,.2"], "2 values for 3 layers"),
        (["--layers", "3", "--window", "0"], "--window"),
        (["--layers", "3", "--heads", "2", "--position", "alibi", "--slopes", ".1,.2,.3"], "slopes"),
        (["bloom-176b", "--convention", "mine"], "--convention is own or published"),
    ],
)
def test_simulate_refuses_what_no_transformer_can_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, ["simulate", *arguments, "--length", "16", "--out", str(tmp_path / "run")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_heads_writes_scores_labels_and_lists(tiny_folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--text", str(text_file), "--length", "20", "--samples", "3", "--queries", "3", "--out", str(out)]
    assert main(["heads", str(tiny_folder), *arguments, "--ablate", "--quiet"]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert {"positional", "symbolic", "labels", "counts"} <= set(summary)
    assert sum(summary["counts"].values()) == 12
    assert summary["ablation"]["lengths"]
    lists = json.loads((out / "heads.json").read_text("utf-8"))
    for label, count in summary["counts"].items():
        assert len(lists[label]["heads"]) == count
    _, arrays = read_folder(out)
    assert arrays["pattern"].shape == (3, 4, 20, 20)
    assert arrays["cross_logits"].shape == (3, 4, 19, 19)
    assert "Head by head" in (out / "report.html").read_text("utf-8")


def test_a_model_of_a_task_is_measured_on_that_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from posattn.tasks.training import TrainingConfig, build_model, save_model

    config = TrainingConfig(task="letter", model={"layers": 2, "d_model": 16})
    folder = save_model(build_model(config), config, tmp_path / "letters")

    def length_and_source(*arguments: str) -> tuple[int, str]:
        out = tmp_path / "run"
        assert (
            main(["heads", str(folder), "--samples", "4", "--out", str(out), "--overwrite", "--quiet", *arguments]) == 0
        )
        tokens = json.loads((out / "summary.json").read_text("utf-8"))["provenance"]["tokens"]
        return tokens["length"], tokens["source"]

    own = config.make_task().length
    assert length_and_source() == (own, "samples of task 'letter'")
    assert length_and_source("--length", str(own + 9)) == (own + 9, "samples of task 'letter'")
    capsys.readouterr()
    # the estimate is of the samples that would be measured, not of a text's default
    assert main(["profile", str(folder), "--samples", "4", "--dry-run"]) == 0
    assert f"2 layers, 1 head, 4 documents of {own} tokens" in capsys.readouterr().out
    # a text that is none of the task's words must not be read as tokens of the task
    said = refused(capsys, ["heads", str(folder), "--text", "bundled:python-docs"])
    assert "words that the model has no token for" in said
    assert "leave out --text" in said
    assert f"have {own} tokens" in refused(capsys, ["profile", str(folder), "--length", str(own - 1)])


def test_compare_and_figure_of_finished_runs(
    tiny_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for seed in ("0", "1"):
        runs.append(str(tmp_path / f"run-{seed}"))
        arguments = ["--text", str(text_file), "--seed", seed, "--out", runs[-1], "--quiet", *SMALL]
        assert main(["profile", str(tiny_folder), *arguments]) == 0
    out = tmp_path / "both"
    assert main(["compare", *runs, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["differing"]["seed"] == [0, 1]
    for row in summary["differences"]:
        assert row["low"] <= row["difference"] <= row["high"]
    assert main(["compare", runs[0], runs[0], "--out", str(tmp_path / "same")]) == 0
    same = json.loads((tmp_path / "same" / "summary.json").read_text("utf-8"))
    assert same["differing"] == {}
    assert all(row["difference"] == 0 for row in same["differences"])
    other = str(tmp_path / "other")
    arguments = ["--text", str(text_file), "--method", "input_x_gradient", "--out", other, "--quiet", *SMALL]
    assert main(["profile", str(tiny_folder), *arguments]) == 0
    capsys.readouterr()
    line = refused(capsys, ["compare", runs[0], other, "--out", str(tmp_path / "no")])[:400]
    assert "method of the influence is gradient_norm there and input_x_gradient here" in line
    assert main(["figure", runs[0]]) == 0
    assert capsys.readouterr().out.split()[:2] == ["profiles", "mixing"]
    assert main(["figure", runs[0], "mixing", "--out", str(tmp_path / "m.svg")]) == 0
    assert "<svg" in (tmp_path / "m.svg").read_text("utf-8")


def test_models_lists_what_comes_along(capsys: pytest.CaptureFixture[str]) -> None:
    from posattn.models.bundled import bundled_names

    assert main(["models", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert set(known["bundled"]) == {f"bundled:{name}" for name in bundled_names()}
    assert "bloom-176b/wikipedia" in known["presets"]
    assert main(["models"]) == 0
    assert "bundled:bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "{a}"], "at least two"),
        (["compare", "{a}", "{a}"], "no summary.json"),
        (["figure", "{a}", "profiles"], "no summary.json"),
        (["bench", "--device", "abacus"], "abacus"),
        (["bench", "--device", "cud"], "--device is cpu or cuda, not 'cud'"),
        (["bench", "--compare", "{a}/none.json"], "--compare a/none.json: no such file"),
        (["bench", "--compare", "{a}"], "--compare a: that is a folder"),
    ],
)
def test_wrong_use_of_the_other_commands(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    code = main([part.format(a="a") for part in arguments])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert says in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize("more", [["--out", "f.pdf"], ["--curves", "energy"]])
def test_a_figure_that_is_to_be_written_needs_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--layers", "2", "--length", "8", "--quiet", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["figure", "run"]) == 0
    listed = capsys.readouterr().out.split()
    said = refused(capsys, ["figure", "run", *more])
    assert said.startswith(f"posattn: name a figure: {listed[0]}")
    assert all(name in said for name in listed)
    assert not (tmp_path / "f.pdf").exists()


@pytest.mark.parametrize("command", ["profile", "heads", "lengths"])
@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    says = "no model is named: give a hub name, a folder"
    assert says in refused(capsys, [command, name])
    if command == "profile":
        assert says in refused(capsys, [command, name, "--dry-run"])


@pytest.mark.parametrize("command", ["profile", "heads", "lengths"])
def test_a_text_in_other_words_than_a_tasks(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = [command, "bundled:numbers", "--text", str(text_file), "--out", str(tmp_path / "out")]
    arguments += ["--lengths", "40"] if command == "lengths" else ["--length", "20"]
    said = refused(capsys, arguments)
    assert "words that the model has no token for" in said
    assert "leave out --text" in said


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_one_line_that_says_what_to_do(monkeypatch, capsys, error: Exception) -> None:
    from posattn import cli

    def full(*_args, **_keywords):
        raise error

    monkeypatch.setattr(cli, "app", full)
    assert cli.main(["models"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for name in COMMANDS:
        assert cli.main([name]) == 2
        said = capsys.readouterr().err
        assert said.startswith("posattn: not enough memory for this"), said
        function = getattr(importlib.import_module(f"posattn.commands.{name}"), name)
        has = {cli.option_name(function, one).split("/")[0] for one in inspect.signature(function).parameters}
        assert set(re.findall(r"--[a-z-]+", said)) <= has, name
        assert ("use " in said) == (name not in ("compare", "figure", "models")), name
    monkeypatch.setattr(cli, "app", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("something else")))
    assert cli.main(["models"]) == 1
